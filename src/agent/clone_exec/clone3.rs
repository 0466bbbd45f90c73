//! System calls that create a process: clone3, and clone where clone3 is not permitted.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use super::child::exec_child;
use super::image::Image;
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

/// Creates a process that begins with `exec_child`, and stores its pidfd. `flags`: of clone. `pid`: where the kernel writes the
/// pid before the process runs; null: nowhere. With shared memory, waits until the process has called `execve` or is gone.
///
/// An error with a control group: the group may refuse the process. The caller tries without.
pub fn create(
    image: &Image,
    flags: c_int,
    pidfd: *mut c_int,
    group: RawFd,
    pid: *mut c_int,
) -> io::Result<u32> {
    match clone(image, flags, pidfd, group, pid) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) && group < 0 => {
            // This call does not write the pid before the process runs: the reaper would take the process for an orphan.
            let _guard = reaper::spawn_guard();
            let cloned = clone_without_clone3(image, flags, pidfd)?;
            if !pid.is_null() {
                // SAFETY: the caller passes a valid address, which is only accessed atomically.
                unsafe { AtomicI32::from_ptr(pid) }.store(cloned.cast_signed(), Ordering::Release);
            }
            Ok(cloned)
        }
        cloned => cloned,
    }
}

pub fn clone(image: &Image, flags: c_int, fd: *mut c_int, group: RawFd, pid: *mut c_int) -> io::Result<u32> {
    let (stack, stack_size) = image.stack();
    // A process with the same parent as its creator also ends with the same signal.
    let exit_signal = if flags & libc::CLONE_PARENT == 0 { libc::SIGCHLD as u64 } else { 0 };
    let set_pid = if pid.is_null() { 0 } else { libc::CLONE_PARENT_SETTID };
    let flags = (flags | libc::CLONE_PIDFD | set_pid) as u64;
    let into = u64::try_from(group).ok();
    let args = CloneArgs {
        flags: flags | into.map_or(0, |_| CLONE_INTO_CGROUP),
        pidfd: fd as u64,
        child_tid: 0,
        parent_tid: pid as u64,
        exit_signal,
        stack: stack as u64,
        stack_size: stack_size as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: into.unwrap_or(0),
    };
    // SAFETY: with shared memory this thread waits (CLONE_VFORK), so the image outlives its use by the child; a forked
    // child has a copy. The child starts on its own stack and calls `exec_child`, which does not return, so it never
    // returns into this function.
    let result = with_signals_blocked(|| unsafe { clone3(&args, exec_child, image.context().cast()) });
    match u32::try_from(result) {
        Ok(pid) => Ok(pid),
        Err(_) => Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL))),
    }
}

/// `clone` for containers whose seccomp filter has no clone3. It cannot set a control group.
pub fn clone_without_clone3(image: &Image, flags: c_int, fd: *mut c_int) -> io::Result<u32> {
    let (stack, stack_size) = image.stack();
    let flags = flags | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: as for `clone`. The stack is passed by its upper end, which is aligned.
    let result = with_signals_blocked(|| unsafe {
        libc::clone(exec_child, stack.byte_add(stack_size), flags, image.context().cast(), fd)
    });
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
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
