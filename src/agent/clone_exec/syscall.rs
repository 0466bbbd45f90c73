//! System calls without libc: for a new process that shares its creator's memory, and with it libc's error number.

use std::ffi::{c_int, c_long};

/// The largest number of an error.
const MAX_ERROR: isize = 4095;

/// Performs a system call. An error: its number.
///
/// SAFETY: the arguments must be valid for this call, and its effects safe in this process.
pub unsafe fn call<const N: usize>(number: c_long, args: [usize; N]) -> Result<usize, c_int> {
    let arg = |nth: usize| args.get(nth).copied().unwrap_or(0);
    let all = [arg(0), arg(1), arg(2), arg(3), arg(4), arg(5)];
    // SAFETY: as promised by the caller.
    let result = unsafe { raw(number, all) };
    match -result {
        error @ 1..=MAX_ERROR => Err(error as c_int),
        _ => Ok(result.cast_unsigned()),
    }
}

/// Ends this process at once.
pub fn exit(code: c_int) -> ! {
    loop {
        // SAFETY: nothing of this process runs afterwards.
        let _ = unsafe { call(libc::SYS_exit_group, [code as usize]) };
    }
}

/// SAFETY: as above.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn raw(number: c_long, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel clobbers rax, rcx and r11.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// SAFETY: as above.
#[cfg(target_arch = "aarch64")]
#[inline]
unsafe fn raw(number: c_long, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel changes x0.
    unsafe {
        std::arch::asm!(
            "svc #0",
            inlateout("x0") args[0] => result,
            in("x1") args[1],
            in("x2") args[2],
            in("x3") args[3],
            in("x4") args[4],
            in("x5") args[5],
            in("x8") number,
            options(nostack),
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_a_number_or_an_error_and_leaves_the_error_of_libc() {
        // SAFETY: both calls change nothing but descriptors that do not exist.
        let (pid, closed) = unsafe {
            *libc::__errno_location() = 7;
            (call(libc::SYS_getpid, []), call(libc::SYS_close, [usize::MAX]))
        };
        assert_eq!(pid, Ok(std::process::id() as usize));
        assert_eq!(closed, Err(libc::EBADF));
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(7));
    }
}
