//! Allocator settings for long-running processes: return memory after a burst.

/// Size from which an allocation has a mapping of its own, which is returned at once when it is freed.
const MAPPED_BYTES: libc::c_int = 128 << 10;

/// Limits malloc to one arena: less memory for a process with few threads.
pub fn allocate_tightly() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt may be called at any time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives every large buffer a mapping of its own. By default, the first one that is freed raises the limit, and later ones
/// leave gaps in the heap.
pub fn map_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt may be called at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
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
