//! Allocator settings for long-running processes: return memory after a burst, and fork without copying the heap.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Limits malloc to one arena: less memory for a process with few threads.
pub fn allocate_tightly() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt may be called at any time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Start address of the heap that forked processes do not get; 0: the heap is copied.
static HEAP: AtomicUsize = AtomicUsize::new(0);

/// Enables [`exclude_heap_from_forks`]: copying the heap takes most of the time of a fork. Only for a program in which
/// no forked process uses the heap; `std::process::Command` with `pre_exec` uses it.
pub fn fork_without_heap() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let heap = maps.lines().find(|line| line.ends_with("[heap]")).and_then(|line| line.split_once('-'));
    let start = heap.and_then(|(start, _)| usize::from_str_radix(start, 16).ok());
    HEAP.store(start.unwrap_or(0), Ordering::Relaxed);
}

/// Excludes the current heap from processes forked later, if [`fork_without_heap`] was called.
pub fn exclude_heap_from_forks() {
    let start = HEAP.load(Ordering::Relaxed);
    if start == 0 {
        return;
    }
    // SAFETY: sbrk(0) only reads the end of the heap. The advice changes no memory of this process; an unmapped part of
    // the range is ignored.
    unsafe {
        let end = libc::sbrk(0) as usize;
        libc::madvise(start as *mut libc::c_void, end.saturating_sub(start), libc::MADV_DONTFORK);
    }
}

/// Returns freed memory to the system.
pub fn give_freed_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
