//! Log files for readers: the log of a process and its rotated files, opened with the rights of its user.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::walk::{FileAccess, FileError, Folder, WalkRule, parent};
use super::{Rights, UserFileError};

/// Maximum rotated files that are read.
pub const MAX_ROTATED: u32 = 1000;

impl Rights {
    /// Opens the log at a path and its rotated files (PATH.1, PATH.2, …) for reading, newest first. For a directory, the
    /// log is NAME.log in it. `oldest`: device and inode of the last file that is needed. Empty: there is no log yet. Blocks.
    pub fn open_log_files(
        &self,
        path: &Path,
        name: &str,
        oldest: Option<(u64, u64)>,
    ) -> Result<Vec<File>, UserFileError> {
        let name = name.to_owned();
        let opened = self.with(path, move |path, rule| open_log_files(path, &name, rule, oldest));
        opened.map_err(|error| match error {
            FileError::Link => UserFileError::LogLink { path: path.to_owned() },
            error => self.explain("cannot read log_path", path, error),
        })
    }
}

fn open_log_files(
    path: &Path,
    name: &str,
    rule: WalkRule,
    oldest: Option<(u64, u64)>,
) -> Result<Vec<File>, FileError> {
    let (folder, log) = match log_entry(path, name, rule, false) {
        Err(error) if is_missing(&error) => return Ok(Vec::new()),
        entry => entry?,
    };
    let (mut files, mut inodes) = (Vec::new(), Vec::new());
    // The newest first: a rotation in between shows a file twice, but hides none.
    for nth in 0..=MAX_ROTATED {
        let mut entry = log.clone();
        if nth > 0 {
            entry.push(format!(".{nth}"));
        }
        match folder.open(&entry, FileAccess::Read) {
            Ok(file) => {
                let meta = file.metadata()?;
                if !inodes.contains(&(meta.dev(), meta.ino())) {
                    inodes.push((meta.dev(), meta.ino()));
                    files.push(file);
                }
                if oldest == Some((meta.dev(), meta.ino())) {
                    break;
                }
            }
            // Between the two steps of a rotation, only the rotated file exists.
            Err(error) if nth == 0 && is_missing(&error) => {}
            Err(error) if nth == 0 => return Err(error),
            // No more rotated files, or a name that is not a log.
            Err(_) => break,
        }
    }
    Ok(files)
}

/// The directory of a log, and its name in it. `make`: creates missing directories.
pub fn log_entry(
    path: &Path,
    name: &str,
    rule: WalkRule,
    make: bool,
) -> Result<(Folder, OsString), FileError> {
    let (folder, last) = parent(path, rule, make)?;
    let kind = folder.kind(&last)?.map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode));
    let inside = match kind {
        Some(rustix::fs::FileType::Directory) => Folder::walk(path, rule, false)?,
        // A link to a directory is treated as a link inside the path.
        Some(rustix::fs::FileType::Symlink) => match Folder::walk(path, rule, false) {
            Ok(inside) => inside,
            Err(foreign @ FileError::ForeignLink(..)) => return Err(foreign),
            Err(_) => return Err(FileError::Link),
        },
        _ => return Ok((folder, last)),
    };
    // A name with a slash could leave the directory.
    match name.contains('/') {
        true => Err(FileError::Content("name contains a slash")),
        false => Ok((inside, format!("{name}.log").into())),
    }
}

fn is_missing(error: &FileError) -> bool {
    matches!(error, FileError::Io(error) if error.kind() == io::ErrorKind::NotFound)
}
