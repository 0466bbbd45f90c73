//! The steps of a new process between its making and its program: system calls, and nothing else.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;

use super::{EXIT_RECORD_FD, ExecStage};

/// The descriptor that a forked process reports a failed step by.
const STATUS_FD: RawFd = 4;

/// What the new process sees. Plain data: it is read in a copy of this memory, or in this memory itself.
pub struct ChildContext {
    /// Lists end with a null pointer.
    pub programs: *const *const c_char,
    pub args: *const *const c_char,
    pub env: *const *const c_char,
    pub folder: *const c_char,
    pub input: RawFd,
    pub output: RawFd,
    pub code: RawFd,
    /// Where a forked process reports; -1: in this memory, which it borrows.
    pub status: RawFd,
    pub ids: Option<(u32, u32, *const u32, usize)>,
    pub failed: Option<(ExecStage, c_int)>,
}

/// The new process's own steps. It has one thread, its own descriptors and its own signal actions; memory may be ours.
pub extern "C" fn exec_child(arg: *mut c_void) -> c_int {
    // SAFETY: `clone` passes an `Inside` that it does not touch until we are gone or another program. Only system
    // calls are made: nothing is allocated, no lock is taken, nothing of the heap is read. Users and groups are set by the system call itself: libc's
    // own function would ask the other threads of this memory, which are not of this process, to do the same.
    unsafe {
        let inside = &mut *arg.cast::<ChildContext>();
        if let Err(stage) = prepare(inside) {
            report(inside, stage, *libc::__errno_location());
            libc::_exit(127);
        }
        let mut error = libc::ENOENT;
        let mut program = inside.programs;
        while !(*program).is_null() {
            libc::execve(*program, inside.args, inside.env);
            program = program.add(1);
            let why = *libc::__errno_location();
            // The next place may have it; what is there and cannot be run is the better reason.
            if why != libc::ENOENT && why != libc::ENOTDIR {
                error = why;
            }
        }
        report(inside, ExecStage::Program, error);
        libc::_exit(127)
    }
}

/// SAFETY: only to be called by `exec_child`.
unsafe fn report(inside: &mut ChildContext, stage: ExecStage, error: c_int) {
    inside.failed = Some((stage, error));
    if inside.status >= 0 {
        let nth = ExecStage::REPORTED.iter().position(|one| *one == stage).unwrap_or_default();
        let [one, two, three, four] = error.to_ne_bytes();
        let bytes = [nth as u8, one, two, three, four];
        // SAFETY: a write of bytes that are ours, to the pipe, whichever number it has by now.
        unsafe { libc::write(inside.status, bytes.as_ptr().cast(), bytes.len()) };
    }
}

/// SAFETY: only to be called by `exec_child`.
unsafe fn prepare(inside: &mut ChildContext) -> Result<(), ExecStage> {
    let done = |result: c_int, stage: ExecStage| if result < 0 { Err(stage) } else { Ok(()) };
    let called = |result: libc::c_long, stage: ExecStage| if result < 0 { Err(stage) } else { Ok(()) };
    // SAFETY: as above.
    unsafe {
        // All zero is the default action. By the system call: libc keeps some signals to itself.
        let default = [0usize; 4];
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), 0usize, 8usize);
        }
        done(libc::setsid(), ExecStage::Session)?;
        install_descriptors(inside)?;
        libc::umask(0o022);
        if let Some((user, group, groups, count)) = inside.ids {
            called(libc::syscall(libc::SYS_setgroups, count, groups), ExecStage::User)?;
            called(libc::syscall(libc::SYS_setresgid, group, group, group), ExecStage::User)?;
            called(libc::syscall(libc::SYS_setresuid, user, user, user), ExecStage::User)?;
        }
        if inside.status >= 0 {
            // The copy of our memory is not the user's to read, whatever fs.suid_dumpable says; `execve` ends this.
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        }
        // With the user's rights.
        done(libc::chdir(inside.folder), ExecStage::Folder)?;
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        done(libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut()), ExecStage::Session)
    }
}

/// Gives descriptors their numbers, and closes all others: none of another launch is held, however long this one takes.
///
/// SAFETY: only to be called by `exec_child`.
unsafe fn install_descriptors(inside: &mut ChildContext) -> Result<(), ExecStage> {
    const ABOVE: c_int = 16;
    let done = |result: c_int| if result < 0 { Err(ExecStage::Descriptors) } else { Ok(result) };
    // SAFETY: as above; the numbers are this process's own.
    unsafe {
        // Out of the way of the numbers that are taken now.
        let away = |fd: RawFd| match fd {
            ..0 => Ok(-1),
            fd => done(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, ABOVE)),
        };
        inside.status = away(inside.status)?;
        let code = away(inside.code)?;
        done(libc::dup2(inside.input, 0))?;
        done(libc::dup2(inside.output, 1))?;
        done(libc::dup2(inside.output, 2))?;
        match code {
            ..0 => drop(libc::close(EXIT_RECORD_FD)),
            code => drop(done(libc::dup2(code, EXIT_RECORD_FD))?),
        }
        match inside.status {
            ..0 => drop(libc::close(STATUS_FD)),
            status => inside.status = done(libc::dup3(status, STATUS_FD, libc::O_CLOEXEC))?,
        }
        if libc::syscall(libc::SYS_close_range, STATUS_FD + 1, c_int::MAX, 0) < 0 {
            // An older kernel: one after the other. Those beyond close with `execve`.
            for fd in STATUS_FD + 1..OLD_DESCRIPTORS {
                libc::close(fd);
            }
        }
    }
    Ok(())
}

/// As many are closed one by one where the kernel cannot close a range.
const OLD_DESCRIPTORS: c_int = 65_536;
