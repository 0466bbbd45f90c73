//! Child side of a launch: the steps between clone and execve.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use super::restrict::Restrictions;
use super::{EXIT_RECORD_FD, ExecStage};
use crate::agent::user_files::{self, ExistingPidFile};

/// The descriptor by which a forked process reports a failed step.
const STATUS_FD: RawFd = 4;
/// The descriptor of the mount namespace until the process has entered it.
const NAMESPACE_FD: RawFd = 5;

/// The message that permits a forked process to run its program.
pub const PERMISSION: u8 = 1;

/// Input of the new process. Plain data: the child reads it in a copy of the agent's memory, or in that memory itself.
pub struct ChildContext {
    /// Each list ends with a null pointer.
    pub programs: *const *const c_char,
    pub args: *const *const c_char,
    pub env: *const *const c_char,
    pub folder: *const c_char,
    pub streams: ChildStreams,
    /// Socket for the permission and the report of a forked process; -1: the process shares this memory and reports in
    /// `failed`.
    pub status: RawFd,
    /// The process shares the agent's descriptor table, and copies only the descriptors below this one; -1: it has a copy
    /// of the whole table.
    pub copied: RawFd,
    pub ids: Option<(u32, u32, *const u32, usize)>,
    pub restrictions: Restrictions,
    /// The pid file that a forked process writes; null: none.
    pub pid_file: *const c_char,
    pub existing_pid_file: ExistingPidFile,
    pub failed: Option<(ExecStage, c_int)>,
}

/// The numbers of the [`Streams`](super::Streams) in this process; -1: none.
pub struct ChildStreams {
    pub input: RawFd,
    pub output: RawFd,
    pub code: RawFd,
}

/// Entry point of the new process. It has one thread and its own signal actions, and leaves the descriptor table that it
/// may share with the agent in its first step; its memory may be the
/// agent's.
pub extern "C" fn exec_child(arg: *mut c_void) -> c_int {
    // SAFETY: `clone` passes a `ChildContext` that the parent does not touch until this process has called `execve` or is
    // gone. A process that shares memory only makes system calls: nothing is allocated, no lock is taken, no heap memory is
    // read. A forked process has its own copy of the launcher's memory, and the launcher has one thread, so it may allocate.
    // Users and groups are set by direct system calls: libc's wrappers would signal the other threads of this memory, which
    // belong to another process.
    unsafe {
        let context = &mut *arg.cast::<ChildContext>();
        if let Err(stage) = prepare(context) {
            report(context, stage, *libc::__errno_location());
            libc::_exit(127);
        }
        let mut error = libc::ENOENT;
        let mut program = context.programs;
        while !(*program).is_null() {
            libc::execve(*program, context.args, context.env);
            program = program.add(1);
            let why = *libc::__errno_location();
            // The next directory of PATH may have the program. A file that exists but cannot be executed is the better
            // error than a missing one.
            if why != libc::ENOENT && why != libc::ENOTDIR {
                error = why;
            }
        }
        if !context.pid_file.is_null() {
            user_files::remove_own_pid(path(context.pid_file));
        }
        report(context, ExecStage::Program, error);
        libc::_exit(127)
    }
}

/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn report(context: &mut ChildContext, stage: ExecStage, error: c_int) {
    context.failed = Some((stage, error));
    if context.status >= 0 {
        let [one, two, three, four] = error.to_ne_bytes();
        let bytes = [stage.code(), one, two, three, four];
        // SAFETY: writes a local buffer to the status pipe, by its current number.
        unsafe { libc::write(context.status, bytes.as_ptr().cast(), bytes.len()) };
    }
}

/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn prepare(context: &mut ChildContext) -> Result<(), ExecStage> {
    let done = |result: c_int, stage: ExecStage| if result < 0 { Err(stage) } else { Ok(()) };
    let called = |result: libc::c_long, stage: ExecStage| if result < 0 { Err(stage) } else { Ok(()) };
    // SAFETY: system calls on this process alone; the pointers of the context are valid until `execve`.
    unsafe {
        if context.copied >= 0 {
            copy_descriptors(context)?;
        }
        // All zero is the default action. A direct system call, because libc refuses its own internal signals.
        let default = [0usize; 4];
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), 0usize, 8usize);
        }
        done(libc::setsid(), ExecStage::Session)?;
        install_descriptors(context)?;
        context.restrictions.apply_as_agent()?;
        if let Some((user, group, groups, count)) = context.ids {
            leave_session_keyring();
            called(libc::syscall(libc::SYS_setgroups, count, groups), ExecStage::User)?;
            called(libc::syscall(libc::SYS_setresgid, group, group, group), ExecStage::User)?;
            called(libc::syscall(libc::SYS_setresuid, user, user, user), ExecStage::User)?;
        }
        context.restrictions.apply_as_user()?;
        if context.status >= 0 {
            // The user must not read this copy of the agent's memory, whatever fs.suid_dumpable says. `execve` resets this.
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        }
        // After the switch of the user: the folder is entered with the user's rights.
        done(libc::chdir(context.folder), ExecStage::Folder)?;
        if context.status >= 0 {
            wait_for_permission(context.status);
        }
        if !context.pid_file.is_null() {
            write_pid_file(context)?;
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        done(libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut()), ExecStage::Session)
    }
}

/// Waits until the agent has claimed this process. Ends the process if the agent or its interest in the launch is gone:
/// nothing has run yet.
///
/// SAFETY: may only be called by `exec_child`, with the socket of its context.
unsafe fn wait_for_permission(status: RawFd) {
    let mut message = 0u8;
    // SAFETY: reads into a local variable.
    unsafe {
        loop {
            let length = libc::read(status, (&raw mut message).cast(), 1);
            if length == 1 && message == PERMISSION {
                return;
            }
            if length >= 0 || *libc::__errno_location() != libc::EINTR {
                libc::_exit(127);
            }
        }
    }
}

/// SAFETY: may only be called by `exec_child` in a forked process, with its context.
unsafe fn write_pid_file(context: &ChildContext) -> Result<(), ExecStage> {
    // SAFETY: the path is valid until `execve`; the error number is this thread's own.
    unsafe {
        user_files::write_own_pid(path(context.pid_file), context.existing_pid_file).map_err(|error| {
            *libc::__errno_location() = error.raw_os_error().unwrap_or(libc::EINVAL);
            ExecStage::PidFile
        })
    }
}

/// SAFETY: the text must be valid until `execve`.
unsafe fn path<'a>(text: *const c_char) -> &'a Path {
    // SAFETY: as promised by the caller; `Image` writes a terminating NUL.
    Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(text) }.to_bytes()))
}

/// Leaves the session keyring of the agent: every process in it can read the keys of the others, whatever their user.
/// As root, so that the new keyring counts against the quota of root. Where the kernel refuses the call, it refuses it
/// to the new process as well.
///
/// SAFETY: may only be called by `exec_child`.
unsafe fn leave_session_keyring() {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: a system call on this process alone; a null name makes a keyring without one.
    unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, ptr::null::<c_char>()) };
}

/// Leaves the agent's descriptor table before any descriptor is changed.
///
/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn copy_descriptors(context: &ChildContext) -> Result<(), ExecStage> {
    // SAFETY: system calls on this process alone; the written byte is a local variable.
    unsafe {
        let unshare = libc::CLOSE_RANGE_UNSHARE;
        if libc::syscall(libc::SYS_close_range, context.copied, c_int::MAX, unshare) < 0
            && libc::unshare(libc::CLONE_FILES) < 0
        {
            return Err(ExecStage::Table);
        }
    }
    Ok(())
}

/// Moves descriptors to their numbers and closes all others: a slow child must not hold descriptors of another launch.
///
/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn install_descriptors(context: &mut ChildContext) -> Result<(), ExecStage> {
    const ABOVE: c_int = 16;
    let done = |result: c_int| if result < 0 { Err(ExecStage::Descriptors) } else { Ok(result) };
    // SAFETY: system calls on this process's own descriptor table.
    unsafe {
        // Moves the sources above the target numbers, so that no `dup2` overwrites one.
        let away = |fd: RawFd| match fd {
            ..0 => Ok(-1),
            fd => done(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, ABOVE)),
        };
        context.status = away(context.status)?;
        let (code, namespace) = (away(context.streams.code)?, away(context.restrictions.namespace)?);
        done(libc::dup2(context.streams.input, 0))?;
        done(libc::dup2(context.streams.output, 1))?;
        done(libc::dup2(context.streams.output, 2))?;
        match code {
            ..0 => drop(libc::close(EXIT_RECORD_FD)),
            code => drop(done(libc::dup2(code, EXIT_RECORD_FD))?),
        }
        match context.status {
            ..0 => drop(libc::close(STATUS_FD)),
            status => context.status = done(libc::dup3(status, STATUS_FD, libc::O_CLOEXEC))?,
        }
        match namespace {
            ..0 => drop(libc::close(NAMESPACE_FD)),
            fd => context.restrictions.namespace = done(libc::dup3(fd, NAMESPACE_FD, libc::O_CLOEXEC))?,
        }
        if libc::syscall(libc::SYS_close_range, NAMESPACE_FD + 1, c_int::MAX, 0) < 0 {
            // Kernels before 5.9 have no close_range. Descriptors above the limit close on `execve`.
            for fd in NAMESPACE_FD + 1..OLD_DESCRIPTORS {
                libc::close(fd);
            }
        }
    }
    Ok(())
}

/// Upper bound of the descriptors that are closed one by one without close_range.
const OLD_DESCRIPTORS: c_int = 65_536;
