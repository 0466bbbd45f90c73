//! Pid words: memory of the agent and its launcher, in which the kernel writes the pids of new processes.
//!
//! So the agent knows the pid before the process runs, and whether a launcher that was killed created a process.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::agent::reaper::StartingPid;

/// Number of words: the launches that can be in progress at the same time.
const WORDS: usize = 1024;
const LENGTH: usize = WORDS * size_of::<AtomicI32>();

/// A shared mapping of all words.
pub struct PidWords(*const AtomicI32);

// SAFETY: the words are atomic, and the mapping lives as long as the value.
unsafe impl Send for PidWords {}
// SAFETY: as above.
unsafe impl Sync for PidWords {}

impl PidWords {
    /// New words, and the file by which another process maps them.
    pub fn create() -> io::Result<(PidWords, OwnedFd)> {
        let file = memfd_create(c"abide-pids", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, LENGTH as u64)?;
        Ok((PidWords::map(file.as_fd())?, file))
    }

    /// Maps the words of another process.
    pub fn map(file: BorrowedFd<'_>) -> io::Result<PidWords> {
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a mapping at an address of the kernel's choice replaces no other mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), LENGTH, access, libc::MAP_SHARED, fd, 0) };
        match start == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(PidWords(start.cast())),
        }
    }

    /// Leaves the words out of forked processes: a writer of the words can name any process. The kernel writes them in the memory
    /// of the process that forks.
    pub fn leave_out_of_forks(&self) -> io::Result<()> {
        let start = self.0.cast_mut().cast::<c_void>();
        // SAFETY: the mapping is of this value, and no other process loses it.
        match unsafe { libc::madvise(start, LENGTH, libc::MADV_DONTFORK) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// `None`: no such word.
    pub fn word(&self, nth: usize) -> Option<&AtomicI32> {
        // SAFETY: the index is inside the mapping, and every value is valid.
        (nth < WORDS).then(|| unsafe { &*self.0.add(nth) })
    }
}

impl Drop for PidWords {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping.
        unsafe { libc::munmap(self.0.cast_mut().cast::<c_void>(), LENGTH) };
    }
}

/// The words of one launcher, as the agent uses them.
pub struct PidTable {
    words: PidWords,
    /// The words that no launch uses.
    free: Mutex<Vec<usize>>,
}

impl PidTable {
    pub fn new(words: PidWords) -> Arc<PidTable> {
        Arc::new(PidTable { words, free: Mutex::new((0..WORDS).rev().collect()) })
    }

    /// A free word, set to 0; `None`: too many launches are in progress.
    pub fn take(self: &Arc<PidTable>) -> Option<LaunchPid> {
        let nth = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop()?;
        let pid = LaunchPid { table: Arc::clone(self), nth };
        pid.word().store(0, std::sync::atomic::Ordering::Release);
        Some(pid)
    }
}

/// The word of one launch.
pub struct LaunchPid {
    table: Arc<PidTable>,
    pub nth: usize,
}

impl StartingPid for LaunchPid {
    fn word(&self) -> &AtomicI32 {
        // SAFETY: the number is that of a word.
        unsafe { &*self.table.words.0.add(self.nth) }
    }
}

impl Drop for LaunchPid {
    fn drop(&mut self) {
        self.table.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(self.nth);
    }
}
