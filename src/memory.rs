//! The allocator's habits, for those who stand for long: a burst is no reason to stay large.

/// One place to allocate from: for who has few threads, and should cost little.
pub fn allocate_tightly() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a setting of the allocator, which may be made at any time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
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
