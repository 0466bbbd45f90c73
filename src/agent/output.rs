//! Captured output of a command: memory without a name, kept by its descriptor.
//!
//! A daemon that a command leaves behind may write there for as long as it lives; its pages are given back from time to
//! time, and at once above a bound ([`output_bound`]). After a restart of the agent the descriptor is duplicated from the
//! process itself, never opened by a path of the user, and proved by what it is: a user decides what descriptor 1 of a
//! process is, and what it is called.

use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::Arc;

use super::masking::SecretTexts;
use super::output_bound::{self, Bounded};
use super::process::ProcessHandle;

/// How much of a command's output is kept.
const TAIL: u64 = 4096;

pub struct Output {
    file: Arc<File>,
    /// Keeps it trimmed.
    _bounded: Option<Bounded>,
}

impl Output {
    pub fn new() -> Result<Output, String> {
        let made = || -> std::io::Result<Output> {
            let fd = rustix::fs::memfd_create("abide-output", rustix::fs::MemfdFlags::CLOEXEC)?;
            let made = File::from(fd);
            let own = opened_again(&made, File::options().read(true).write(true))?;
            // It can be opened again to write (/dev/stdout), but not to be mapped: that memory would not be noticed.
            made.set_permissions(Permissions::from_mode(0o222))?;
            Ok(Output::bounded(own))
        };
        made().map_err(|error| format!("cannot keep the command's output: {error}"))
    }

    fn bounded(file: File) -> Output {
        let file = Arc::new(file);
        let _bounded = output_bound::bound(&file);
        Output { file, _bounded }
    }

    /// The same memory, for the command to write to: with a file description of its own, whose end is noticed.
    pub fn descriptor(&self) -> Result<File, String> {
        opened_again(&self.file, File::options().append(true))
            .map_err(|error| format!("cannot keep the command's output: {error}"))
    }

    /// The inode, which proves it later.
    pub fn inode(&self) -> Option<u64> {
        self.file.metadata().ok().map(|meta| meta.ino())
    }

    /// Descriptor 1 of a process, if it is such memory. `inode`: as recorded at launch; an earlier version recorded none.
    pub fn of(hold: &ProcessHandle, inode: Option<u64>) -> Option<Output> {
        let file = File::from(hold.descriptor(1)?);
        if !is_memory(&file, inode) {
            return None;
        }
        let output = Output::bounded(opened_again(&file, File::options().write(true)).ok()?);
        // What was printed while no agent ran.
        output.forget();
        Some(output)
    }

    /// The end of the output, with secrets masked.
    pub fn tail(&self, secrets: &SecretTexts) -> String {
        let length = self.file.metadata().map_or(0, |meta| meta.len());
        let start = length.saturating_sub(TAIL);
        // A secret that begins before the cut would not be recognized by its rest.
        let before = start.saturating_sub(secrets.longest() as u64);
        let mut bytes = vec![0; (length - before) as usize];
        let _ = self.file.read_exact_at(&mut bytes, before);
        // What was given back reads as zeros.
        secrets.mask(&bytes, (start - before) as usize).trim_start_matches('\0').to_owned()
    }

    /// Gives all of it back: it is not needed any more.
    pub fn forget(&self) {
        output_bound::trim(&self.file, 0);
    }
}

/// A new file description of an open file.
fn opened_again(file: &File, options: &mut std::fs::OpenOptions) -> std::io::Result<File> {
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A regular file without a name, in the kernel's own memory file system, where no path leads, and of that inode.
fn is_memory(file: &File, inode: Option<u64>) -> bool {
    let probe = rustix::fs::memfd_create("probe", rustix::fs::MemfdFlags::CLOEXEC);
    let (Ok(probe), Ok(meta)) = (probe, file.metadata()) else { return false };
    let device = File::from(probe).metadata().map(|meta| meta.dev());
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
