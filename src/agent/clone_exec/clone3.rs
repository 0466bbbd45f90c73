//! System calls that create a process: clone3, and clone where clone3 is not permitted.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use super::child::exec_child;
use super::launch_block::ChildMemory;
use crate::agent::reaper;

/// `struct clone_args` of the kernel.
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

/// Addresses at which the kernel writes numbers of a new process; null: nowhere. The addresses are only accessed atomically.
pub struct CloneWords {
    /// The pidfd, which the caller then owns.
    pub pidfd: *mut c_int,
    /// The pid, before the process runs.
    pub pid: *mut c_int,
    /// Zero, when a process that shares the memory has called `execve` or is gone.
    pub cleared: *mut c_int,
}

impl CloneWords {
    fn flags(&self) -> c_int {
        let flag = |word: *mut c_int, flag: c_int| if word.is_null() { 0 } else { flag };
        flag(self.pidfd, libc::CLONE_PIDFD)
            | flag(self.pid, libc::CLONE_PARENT_SETTID)
            | flag(self.cleared, libc::CLONE_CHILD_CLEARTID)
    }
}

/// Creates a process that begins with `exec_child`. `flags`: of clone. With CLONE_VFORK, waits until the process has called
/// `execve` or is gone. With shared memory and without it, the caller keeps the memory until then.
///
/// An error with a control group: the group may refuse the process. The caller tries without.
pub fn create(memory: &ChildMemory, flags: c_int, group: RawFd, words: &CloneWords) -> io::Result<u32> {
    match clone(memory, flags, group, words) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) && group < 0 => {
            clone_without_clone3(memory, flags, words)
        }
        cloned => cloned,
    }
}

pub fn clone(memory: &ChildMemory, flags: c_int, group: RawFd, words: &CloneWords) -> io::Result<u32> {
    // A process with the same parent as its creator also ends with the same signal.
    let exit_signal = if flags & libc::CLONE_PARENT == 0 { libc::SIGCHLD as u64 } else { 0 };
    let flags = (flags | words.flags()) as u64;
    let into = u64::try_from(group).ok();
    let args = CloneArgs {
        flags: flags | into.map_or(0, |_| CLONE_INTO_CGROUP),
        pidfd: words.pidfd as u64,
        child_tid: words.cleared as u64,
        parent_tid: words.pid as u64,
        exit_signal,
        stack: memory.stack as u64,
        stack_size: memory.stack_size as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: into.unwrap_or(0),
    };
    // SAFETY: with CLONE_VFORK this thread waits; without it the caller keeps shared memory until the kernel has cleared its
    // word; a forked child has a copy. The child starts on its own stack and calls `exec_child`, which does not return, so
    // it never returns into this function.
    let result = with_signals_blocked(|| unsafe { clone3(&args, exec_child, memory.context.cast()) });
    match u32::try_from(result) {
        Ok(pid) => Ok(pid),
        Err(_) => Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL))),
    }
}

/// `clone` for containers whose seccomp filter has no clone3. It cannot set a control group.
pub fn clone_without_clone3(memory: &ChildMemory, flags: c_int, words: &CloneWords) -> io::Result<u32> {
    // This call has one address for the pidfd and the pid. Without the pid, the reaper would take the process for an orphan
    // before this function returns.
    let _guard = (!words.pidfd.is_null()).then(reaper::spawn_guard);
    let (first, set_pid) = match words.pidfd.is_null() {
        true => (words.pid, 0),
        false => (words.pidfd, libc::CLONE_PARENT_SETTID),
    };
    let flags = (flags | words.flags() | libc::SIGCHLD) & !set_pid;
    let (entry, context) = (exec_child, memory.context.cast());
    // SAFETY: as for `clone`. The stack is passed by its upper end, which is aligned.
    let result = with_signals_blocked(|| unsafe {
        let upper_end = memory.stack.byte_add(memory.stack_size);
        let no_tls = ptr::null_mut::<c_void>();
        libc::clone(entry, upper_end, flags, context, first, no_tls, words.cleared)
    });
    let pid = u32::try_from(result).map_err(|_| io::Error::last_os_error())?;
    if set_pid != 0 && !words.pid.is_null() {
        // SAFETY: the caller passes a valid address, which is only accessed atomically.
        unsafe { AtomicI32::from_ptr(words.pid) }.store(result, Ordering::Release);
    }
    Ok(pid)
}

/// Blocks all signals: no signal handler of the agent may run in a child that shares its memory.
fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the signal sets are local variables.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let done = work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
        done
    }
}

/// The clone3 system call. Returns the pid in the parent; the child calls `entry(arg)`.
///
/// SAFETY: `entry` must not return. The targets of `args` and `arg` must be valid until the child has called `execve` or is
/// gone.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(args: &CloneArgs, entry: extern "C" fn(*mut c_void) -> c_int, arg: *mut c_void) -> i64 {
    let result: i64;
    // SAFETY: the kernel clobbers rax, rcx and r11. The child has the parent's registers and its own aligned stack.
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

/// The clone3 system call, as above.
///
/// SAFETY: as above.
#[cfg(target_arch = "aarch64")]
unsafe fn clone3(args: &CloneArgs, entry: extern "C" fn(*mut c_void) -> c_int, arg: *mut c_void) -> i64 {
    let result: i64;
    // SAFETY: the kernel changes x0. The child has the parent's registers and its own aligned stack.
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
