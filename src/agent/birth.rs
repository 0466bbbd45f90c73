//! A new process, made the way posix_spawn makes one, with what that cannot do: a user, a session, a control group.
//!
//! The new process borrows our memory until it has become the program (`CLONE_VM | CLONE_VFORK`), so nothing is copied,
//! however much memory the agent has. Everything that it needs is made before; in between it makes system calls and
//! nothing else, and tells us by that memory if one of them failed.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// The descriptor that a shell writes an exit code to; the command itself does not have it.
pub const CODE: RawFd = 3;

/// What a process is to be.
pub struct Birth<'a> {
    /// Tried in turn, as a shell looks for a program.
    pub programs: Vec<CString>,
    pub args: Vec<CString>,
    pub env: Vec<CString>,
    pub folder: CString,
    pub input: BorrowedFd<'a>,
    pub output: BorrowedFd<'a>,
    pub code: Option<BorrowedFd<'a>>,
    /// A control group's list of processes.
    pub group: Option<BorrowedFd<'a>>,
    /// User, group and groups; `None`: as we are.
    pub ids: Option<(u32, u32, Vec<u32>)>,
}

/// What could not be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Clone,
    Session,
    Descriptors,
    Folder,
    User,
    Program,
}

/// What the new process sees, in memory that is ours.
struct Inside {
    programs: Vec<*const c_char>,
    args: Vec<*const c_char>,
    env: Vec<*const c_char>,
    folder: *const c_char,
    input: RawFd,
    output: RawFd,
    code: RawFd,
    group: RawFd,
    ids: Option<(u32, u32, *const u32, usize)>,
    failed: Option<(Stage, c_int)>,
}

/// Much more than the few system calls need.
const STACK: usize = 64 << 10;

impl Birth<'_> {
    /// The process and a descriptor that is it, once it has become its program.
    pub fn go(&self) -> Result<(u32, OwnedFd), (Stage, io::Error)> {
        let pointers = |texts: &[CString]| {
            let mut all: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
            all.push(ptr::null());
            all
        };
        let raw = |fd: &Option<BorrowedFd<'_>>| fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut inside = Inside {
            programs: self.programs.iter().map(|text| text.as_ptr()).collect(),
            args: pointers(&self.args),
            env: pointers(&self.env),
            folder: self.folder.as_ptr(),
            input: self.input.as_raw_fd(),
            output: self.output.as_raw_fd(),
            code: raw(&self.code),
            group: raw(&self.group),
            ids: self
                .ids
                .as_ref()
                .map(|(user, group, groups)| (*user, *group, groups.as_ptr(), groups.len())),
            failed: None,
        };
        let mut stack = vec![0u128; STACK / 16];
        let mut fd: c_int = -1;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        // SAFETY: the signal sets are ours. While the new process runs on our memory no handler of ours may run in it,
        // so everything is blocked around the clone. The stack is ours until it is gone (CLONE_VFORK: we wait), aligned,
        // and passed by its end; `inside` outlives the wait, and nobody else has it. `become_program` only makes system
        // calls on it.
        let pid = unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            let top = stack.as_mut_ptr().add(stack.len()).cast::<c_void>();
            let arg = ptr::from_mut(&mut inside).cast::<c_void>();
            let pid = libc::clone(become_program, top, flags, arg, &mut fd as *mut c_int);
            let error = io::Error::last_os_error();
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
            if pid < 0 {
                return Err((Stage::Clone, error));
            }
            pid
        };
        // SAFETY: the kernel gave us this descriptor, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if let Some((stage, error)) = inside.failed {
            let _ = rustix::process::waitid(
                rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&fd)),
                rustix::process::WaitIdOptions::EXITED,
            );
            return Err((stage, io::Error::from_raw_os_error(error)));
        }
        Ok((u32::try_from(pid).unwrap_or(0), fd))
    }
}

/// The new process's own steps. It has one thread, its own descriptors and its own signal actions; memory is ours.
extern "C" fn become_program(arg: *mut c_void) -> c_int {
    // SAFETY: `Birth::go` passes an `Inside` that it does not touch until we are gone or another program. Only system
    // calls are made: nothing is allocated, no lock is taken. Users and groups are set by the system call itself: libc's
    // own function would ask the other threads of this memory, which are not of this process, to do the same.
    unsafe {
        let inside = &mut *arg.cast::<Inside>();
        if let Err(stage) = prepare(inside) {
            inside.failed = Some((stage, *libc::__errno_location()));
            libc::_exit(127);
        }
        let mut error = libc::ENOENT;
        for program in &inside.programs {
            libc::execve(*program, inside.args.as_ptr(), inside.env.as_ptr());
            let why = *libc::__errno_location();
            // The next place may have it; what is there and cannot be run is the better reason.
            if why != libc::ENOENT && why != libc::ENOTDIR {
                error = why;
            }
        }
        inside.failed = Some((Stage::Program, error));
        libc::_exit(127)
    }
}

/// SAFETY: only to be called by `become_program`.
unsafe fn prepare(inside: &Inside) -> Result<(), Stage> {
    let done = |result: c_int, stage: Stage| if result < 0 { Err(stage) } else { Ok(()) };
    let called = |result: libc::c_long, stage: Stage| if result < 0 { Err(stage) } else { Ok(()) };
    // SAFETY: as above.
    unsafe {
        // All zero is the default action. By the system call: libc keeps some signals to itself.
        let default = [0usize; 4];
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), 0usize, 8usize);
        }
        done(libc::setsid(), Stage::Session)?;
        if inside.group >= 0 {
            // Without its group it is looked after less well, not less.
            libc::write(inside.group, c"0".as_ptr().cast(), 1);
        }
        done(libc::dup2(inside.input, 0), Stage::Descriptors)?;
        done(libc::dup2(inside.output, 1), Stage::Descriptors)?;
        done(libc::dup2(inside.output, 2), Stage::Descriptors)?;
        match inside.code {
            ..0 => {}
            CODE => done(libc::fcntl(CODE, libc::F_SETFD, 0), Stage::Descriptors)?,
            code => done(libc::dup2(code, CODE), Stage::Descriptors)?,
        }
        libc::umask(0o022);
        done(libc::chdir(inside.folder), Stage::Folder)?;
        if let Some((user, group, groups, count)) = inside.ids {
            called(libc::syscall(libc::SYS_setgroups, count, groups), Stage::User)?;
            called(libc::syscall(libc::SYS_setresgid, group, group, group), Stage::User)?;
            called(libc::syscall(libc::SYS_setresuid, user, user, user), Stage::User)?;
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        done(libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut()), Stage::Session)
    }
}
