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
    /// The folder of a control group: it is born there, since moving it later would make it wait.
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
            ids: self
                .ids
                .as_ref()
                .map(|(user, group, groups)| (*user, *group, groups.as_ptr(), groups.len())),
            failed: None,
        };
        let mut stack = vec![0u128; STACK / 16];
        let mut fd: c_int = -1;
        let mut born = clone(&mut inside, &mut stack, &mut fd, raw(&self.group));
        if born.is_err() && self.group.is_some() {
            // A group that cannot take it in is no reason not to be born.
            born = clone(&mut inside, &mut stack, &mut fd, -1);
        }
        if born.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENOSYS)) {
            born = clone_as_before(&mut inside, &mut stack, &mut fd);
        }
        let pid = born.map_err(|error| (Stage::Clone, error))?;
        // SAFETY: the kernel gave us this descriptor, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if let Some((stage, error)) = inside.failed {
            let _ = rustix::process::waitid(
                rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&fd)),
                rustix::process::WaitIdOptions::EXITED,
            );
            return Err((stage, io::Error::from_raw_os_error(error)));
        }
        Ok((pid, fd))
    }
}

/// What the kernel wants to know, in its order.
#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Makes the process, and waits until it is its program or gone.
fn clone(inside: &mut Inside, stack: &mut [u128], fd: &mut c_int, group: RawFd) -> io::Result<u32> {
    let flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64;
    let into = u64::try_from(group).ok();
    let args = CloneArgs {
        flags: flags | into.map_or(0, |_| CLONE_INTO_CGROUP),
        pidfd: ptr::from_mut(fd) as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: size_of_val(stack) as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: into.unwrap_or(0),
    };
    // SAFETY: the stack is ours until the new process is gone (CLONE_VFORK: we wait); `inside` outlives the wait, and
    // nobody else has it. The new process begins on its own stack and calls `become_program`, which does not return; it
    // never comes back to this function.
    let result = undisturbed(|| unsafe { clone3(&args, become_program, ptr::from_mut(inside).cast()) });
    match u32::try_from(result) {
        Ok(pid) => Ok(pid),
        Err(_) => Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL))),
    }
}

/// The same by the older call, for containers that do not know the new one. It knows no control groups.
fn clone_as_before(inside: &mut Inside, stack: &mut [u128], fd: &mut c_int) -> io::Result<u32> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: as above; the stack is passed by its end, which is aligned.
    let result = undisturbed(|| unsafe {
        let top = stack.as_mut_ptr().add(stack.len()).cast::<c_void>();
        libc::clone(become_program, top, flags, ptr::from_mut(inside).cast(), ptr::from_mut(fd))
    });
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// While a new process runs on our memory no handler of ours may run in it: every signal waits.
fn undisturbed<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the signal sets are ours.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let done = work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
        done
    }
}

/// The system call: the pid for us, a call of `entry(arg)` for the new process.
///
/// SAFETY: `entry` must not return, and what `args` and `arg` point to must be there until the new process is another
/// program or gone.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(args: &CloneArgs, entry: extern "C" fn(*mut c_void) -> c_int, arg: *mut c_void) -> i64 {
    let result: i64;
    // SAFETY: the kernel changes rax, rcx and r11. The new process has our registers and an aligned stack of its own.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r8",
            "call r9",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") args,
            in("rsi") size_of::<CloneArgs>(),
            in("r8") arg,
            in("r9") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// The same.
#[cfg(target_arch = "aarch64")]
unsafe fn clone3(args: &CloneArgs, entry: extern "C" fn(*mut c_void) -> c_int, arg: *mut c_void) -> i64 {
    let result: i64;
    // SAFETY: the kernel changes x0. The new process has our registers and an aligned stack of its own.
    unsafe {
        std::arch::asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x2",
            "blr x3",
            "brk #1",
            "2:",
            inlateout("x0") args => result,
            in("x1") size_of::<CloneArgs>(),
            in("x2") arg,
            in("x3") entry,
            in("x8") libc::SYS_clone3,
            lateout("x30") _,
        );
    }
    result
}

/// The new process's own steps. It has one thread, its own descriptors and its own signal actions; memory is ours.
extern "C" fn become_program(arg: *mut c_void) -> c_int {
    // SAFETY: `clone` passes an `Inside` that it does not touch until we are gone or another program. Only system
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn both_ways_of_being_born_end_in_the_program() {
        let null = std::fs::File::options().read(true).write(true).open("/dev/null").expect("a file");
        let (args, env) =
            ([c"sh".to_owned(), c"-c".to_owned(), c"exit $WITH".to_owned()], [c"WITH=7".to_owned()]);
        let pointers = |texts: &[CString]| {
            texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>()
        };
        type Way = fn(&mut Inside, &mut [u128], &mut c_int) -> io::Result<u32>;
        let ways: [Way; 2] = [|inside, stack, fd| clone(inside, stack, fd, -1), clone_as_before];
        for way in ways {
            let mut inside = Inside {
                programs: vec![c"/no/such/sh".as_ptr(), c"/bin/sh".as_ptr()],
                args: pointers(&args),
                env: pointers(&env),
                folder: c"/".as_ptr(),
                input: null.as_raw_fd(),
                output: null.as_raw_fd(),
                code: -1,
                ids: None,
                failed: None,
            };
            let (mut stack, mut fd) = (vec![0u128; STACK / 16], -1);
            way(&mut inside, &mut stack, &mut fd).expect("it is born");
            assert_eq!(inside.failed, None);
            // SAFETY: the kernel gave it to us.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            use rustix::process::{WaitId, WaitIdOptions, waitid};
            let status =
                waitid(WaitId::PidFd(fd.as_fd()), WaitIdOptions::EXITED).expect("a child").expect("its end");
            assert_eq!(status.exit_status(), Some(7));
        }
    }
}
