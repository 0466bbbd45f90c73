//! The allocator's habits, for those who stand for long: a burst is no reason to stay large.

use std::sync::atomic::{AtomicUsize, Ordering};

/// One place to allocate from: for who has few threads, and should cost little.
pub fn allocate_tightly() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a setting of the allocator, which may be made at any time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// The lowest address of the heap that stays out of forked processes; 0: the heap is copied.
static HEAP: AtomicUsize = AtomicUsize::new(0);

/// Keeps the heap out of processes that [`exclude_heap_from_forks`] announces: copying it takes most of the time of a fork.
/// Only for a program in which every forked process uses other memory. `std::process::Command` with `pre_exec` does not.
pub fn fork_without_heap() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let heap = maps.lines().find(|line| line.ends_with("[heap]")).and_then(|line| line.split_once('-'));
    let start = heap.and_then(|(start, _)| usize::from_str_radix(start, 16).ok());
    HEAP.store(start.unwrap_or(0), Ordering::Relaxed);
}

/// Excludes the heap, as large as it is now, from processes that are forked from now on, if [`fork_without_heap`] was
/// called.
pub fn exclude_heap_from_forks() {
    let start = HEAP.load(Ordering::Relaxed);
    if start == 0 {
        return;
    }
    // SAFETY: the end of the heap is read. The advice changes no memory of this process; a part of the range that is
    // not mapped any more is ignored.
    unsafe {
        let end = libc::sbrk(0) as usize;
        libc::madvise(start as *mut libc::c_void, end.saturating_sub(start), libc::MADV_DONTFORK);
    }
}

/// What was freed, and the allocator keeps for later, goes back to the system.
pub fn give_freed_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the allocator's own business; it may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
