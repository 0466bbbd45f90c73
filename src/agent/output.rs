//! Captured output of a command: memory without a name, kept by its descriptor.
//!
//! A daemon that a command leaves behind may write there for as long as it lives; its pages are given back from time to
//! time. After a restart of the agent the descriptor is duplicated from the process itself, never opened by a path, and
//! proved by what it is: a user decides what descriptor 1 of a process is, and what it is called.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::kernel::Hold;
use super::masking::SecretTexts;

/// How much of a command's output is kept.
const TAIL: u64 = 4096;
/// No page is larger on machines that we know.
const PAGE: u64 = 65_536;

pub struct Output(File);

impl Output {
    pub fn new() -> Result<Output, String> {
        let fd = rustix::fs::memfd_create("abide-output", rustix::fs::MemfdFlags::CLOEXEC);
        fd.map(|fd| Output(File::from(fd)))
            .map_err(|error| format!("cannot keep the command's output: {}", std::io::Error::from(error)))
    }

    /// The same memory, for the command to write to.
    pub fn descriptor(&self) -> Result<File, String> {
        self.0.try_clone().map_err(|error| format!("cannot keep the command's output: {error}"))
    }

    /// The inode, which proves it later.
    pub fn inode(&self) -> Option<u64> {
        self.0.metadata().ok().map(|meta| meta.ino())
    }

    /// Descriptor 1 of a process, if it is such memory. `inode`: as recorded at launch; an earlier version recorded none.
    pub fn of(hold: &Hold, inode: Option<u64>) -> Option<Output> {
        let file = File::from(hold.descriptor(1)?);
        is_memory(&file, inode).then_some(Output(file))
    }

    /// The end of the output, with secrets masked.
    pub fn tail(&self, secrets: &SecretTexts) -> String {
        let length = self.0.metadata().map_or(0, |meta| meta.len());
        let start = length.saturating_sub(TAIL);
        // A secret that begins before the cut would not be recognized by its rest.
        let before = start.saturating_sub(secrets.longest() as u64);
        // Read without moving: the writer shares the position.
        let mut bytes = vec![0; (length - before) as usize];
        let _ = self.0.read_exact_at(&mut bytes, before);
        secrets.mask(&bytes, (start - before) as usize)
    }

    pub fn forget(&self) {
        use rustix::fs::{FallocateFlags, fallocate};
        let length = self.0.metadata().map_or(0, |meta| meta.len());
        if length > 0 {
            // The last page too: it is only given back whole.
            let length = length.next_multiple_of(PAGE);
            let _ = fallocate(&self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, length);
        }
    }
}

/// A regular file without a name, in the kernel's own memory file system, where no path leads, and of that inode.
fn is_memory(file: &File, inode: Option<u64>) -> bool {
    let (Ok(probe), Ok(meta)) = (Output::new(), file.metadata()) else { return false };
    let device = probe.0.metadata().map(|meta| meta.dev());
    meta.is_file()
        && meta.nlink() == 0
        && device.is_ok_and(|device| device == meta.dev())
        && rustix::fs::fcntl_get_seals(file).is_ok()
        && inode.is_none_or(|inode| inode == meta.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_memory_that_was_recorded_is_taken_for_it() {
        let output = Output::new().expect("memory");
        let other = Output::new().expect("memory");
        let inode = output.inode();
        assert!(is_memory(&output.descriptor().expect("a descriptor"), inode));
        assert!(is_memory(&output.descriptor().expect("a descriptor"), None));
        assert!(!is_memory(&other.descriptor().expect("a descriptor"), inode), "another memory");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("memfd:abide-output (deleted)");
        let named = File::create(&path).expect("a file");
        assert!(!is_memory(&named, None), "a file of that name");
        std::fs::remove_file(&path).expect("it is removed");
        assert!(!is_memory(&named, None), "a file without a name, elsewhere");
        let (pipe, _other_end) = std::io::pipe().expect("a pipe");
        assert!(!is_memory(&File::from(std::os::fd::OwnedFd::from(pipe)), None));
    }
}
