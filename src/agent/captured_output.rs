//! Captured output of a command: an anonymous memory file (memfd).
//!
//! A daemon that a command leaves behind may write to it as long as it lives. The pages are freed periodically, and at once
//! above a bound ([`output_bound`]). After a restart the agent duplicates the descriptor from the process and never opens a
//! path of the user. It verifies the file itself (memfd, inode): the user controls descriptor 1 of a process and its name.

use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::Arc;

use super::clone_exec::held_descriptor;
use super::masking::SecretTexts;
use super::output_bound::{self, BoundedOutput};
use super::process::ProcessHandle;

/// Bytes of output that a message shows.
const TAIL: u64 = 4096;

/// The output of a command cannot be captured.
#[derive(Debug, thiserror::Error)]
#[error("cannot capture the command's output: {0}")]
pub struct OutputError(#[source] pub std::io::Error);

/// The captured output of one command.
pub struct CapturedOutput {
    file: Arc<File>,
    /// Keeps the output trimmed.
    _bounded: Option<BoundedOutput>,
}

impl CapturedOutput {
    /// `uid`: the user of the command.
    pub fn new(uid: u32) -> Result<CapturedOutput, OutputError> {
        let made = || -> std::io::Result<CapturedOutput> {
            let fd = rustix::fs::memfd_create("abide-output", rustix::fs::MemfdFlags::CLOEXEC)?;
            let made = File::from(fd);
            let own = opened_again(&made, File::options().read(true).write(true))?;
            // The command can open it again for writing (/dev/stdout) but not map it: inotify does not see writes to a
            // mapping.
            made.set_permissions(Permissions::from_mode(0o222))?;
            Ok(CapturedOutput::bounded(own, uid))
        };
        made().map_err(OutputError)
    }

    fn bounded(file: File, uid: u32) -> CapturedOutput {
        // Held as long as the process lives.
        let file = Arc::new(File::from(held_descriptor(file.into())));
        let _bounded = output_bound::bound(&file, uid);
        CapturedOutput { file, _bounded }
    }

    /// A descriptor for the command. It has its own file description, so that its close is detected.
    pub fn descriptor(&self) -> Result<File, OutputError> {
        opened_again(&self.file, File::options().append(true)).map_err(OutputError)
    }

    /// The inode, by which a later agent verifies the output.
    pub fn inode(&self) -> Option<u64> {
        self.file.metadata().ok().map(|meta| meta.ino())
    }

    /// Descriptor 1 of a process, if it is a captured output. `inode`: recorded at launch; `None` for an earlier version.
    pub fn of(handle: &ProcessHandle, inode: Option<u64>) -> Option<CapturedOutput> {
        let file = File::from(handle.descriptor(1)?);
        if !is_memory(&file, inode) {
            return None;
        }
        let uid = handle.uid()?;
        let output = CapturedOutput::bounded(opened_again(&file, File::options().write(true)).ok()?, uid);
        // Frees the output that was written while no agent ran.
        output.forget();
        Some(output)
    }

    /// The end of the output, with secrets masked.
    pub fn tail(&self, secrets: &SecretTexts) -> String {
        let length = self.file.metadata().map_or(0, |meta| meta.len());
        let start = length.saturating_sub(TAIL);
        // A secret that begins before the cut is only recognized as a whole.
        let before = start.saturating_sub(secrets.longest() as u64);
        let mut bytes = vec![0; (length - before) as usize];
        let _ = self.file.read_exact_at(&mut bytes, before);
        // Freed pages read as zeros.
        secrets.mask(&bytes, (start - before) as usize).trim_start_matches('\0').to_owned()
    }

    /// Frees the whole output.
    pub fn forget(&self) {
        output_bound::trim(&self.file, 0);
    }
}

/// Opens a new file description of an open file.
fn opened_again(file: &File, options: &mut std::fs::OpenOptions) -> std::io::Result<File> {
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Whether the file is a memfd: an unlinked regular file in the kernel's internal tmpfs, which no path reaches, with this
/// inode.
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
    fn only_the_recorded_memfd_is_accepted() {
        let output = CapturedOutput::new(0).expect("memory");
        let other = CapturedOutput::new(0).expect("memory");
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
