//! Allocator settings for long-running processes: return memory after a burst.

/// Limits malloc to one arena: less memory for a process with few threads.
pub fn allocate_tightly() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt may be called at any time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
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
