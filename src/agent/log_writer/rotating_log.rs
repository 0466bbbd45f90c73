//! Rotating log: a log file that is renamed to PATH.1 when it is full, PATH.1 to PATH.2, and so on.
//!
//! All names are resolved relative to the open directory, and no link at a name is followed. A rotation happens between two
//! lines. If another program moves or removes the file, the log continues in a new one.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, renameat, unlinkat};

use crate::agent::user_files::{FileAccess, FileError, Folder, WalkRule, log_entry};

/// When a log is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotationLimits {
    /// Maximum bytes of the log, above zero. A longer line is written whole.
    pub max_size: u64,
    /// Rotated files that are kept.
    pub keep: u32,
}

pub struct RotatingLog {
    folder: Folder,
    name: OsString,
    file: File,
    limits: RotationLimits,
    size: u64,
    /// Size above which the log is rotated. Higher than the maximum after a rotation that failed.
    rotate_at: u64,
    is_at_line_start: bool,
}

impl RotatingLog {
    /// Opens a log, and creates missing directories. For a directory, opens NAME.log in it.
    pub fn open(
        path: &Path,
        name: &str,
        rule: WalkRule,
        limits: RotationLimits,
    ) -> Result<RotatingLog, FileError> {
        let (folder, name) = log_entry(path, name, rule, true)?;
        let file = folder.open(&name, FileAccess::Append)?;
        let rotate_at = limits.max_size;
        let mut log = RotatingLog { folder, name, file, limits, size: 0, rotate_at, is_at_line_start: true };
        log.size = log.file.metadata()?.len();
        Ok(log)
    }

    pub fn is_at_line_start(&self) -> bool {
        self.is_at_line_start
    }

    /// Appends output. An error has the number of bytes that were written before it.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        self.follow_name();
        let mut written = 0;
        while written < bytes.len() {
            let rest = &bytes[written..];
            let mut length = self.fitting(rest);
            if length == 0 {
                self.rotate();
                // After a rotation that failed, the log grows by at least one line: every pass makes progress.
                length = self.fitting(rest).max(line_length(rest));
            }
            match self.file.write(&rest[..length]) {
                Ok(0) => return Err((written, io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    written += count;
                    self.size += count as u64;
                    self.is_at_line_start = rest[count - 1] == b'\n';
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((written, error)),
            }
        }
        Ok(())
    }

    /// Number of these bytes that fit into the file: whole lines. Zero: the file is full.
    fn fitting(&self, bytes: &[u8]) -> usize {
        let room = usize::try_from(self.rotate_at.saturating_sub(self.size)).unwrap_or(usize::MAX);
        if bytes.len() <= room {
            return bytes.len();
        }
        if let Some(end) = bytes[..room].iter().rposition(|byte| *byte == b'\n') {
            return end + 1;
        }
        let is_endless = self.size >= self.rotate_at.saturating_mul(2);
        if self.size > 0 && (self.is_at_line_start || is_endless) {
            return 0;
        }
        // The rest of a line that has begun, or a line that is longer than a file.
        line_length(bytes)
    }

    /// Continues in the file that has the name now. Another program may have moved, removed or truncated the log.
    fn follow_name(&mut self) {
        if !self.has_name()
            && let Ok(file) = self.folder.open(&self.name, FileAccess::Append)
        {
            self.file = file;
            self.is_at_line_start = true;
        }
        if let Ok(meta) = self.file.metadata() {
            self.size = meta.len();
        }
    }

    /// Whether the name is still the open file.
    fn has_name(&self) -> bool {
        let (Ok(Some(named)), Ok(open)) = (self.folder.kind(&self.name), self.file.metadata()) else {
            return false;
        };
        (named.st_dev, named.st_ino) == (open.dev(), open.ino())
    }

    /// Renames the files and opens a new log. If that fails, the log grows by another maximum before the next attempt.
    fn rotate(&mut self) {
        self.rotate_at = self.limits.max_size;
        if self.has_name() && self.rename_files().is_err() {
            self.rotate_at = self.size.saturating_add(self.limits.max_size);
            return;
        }
        match self.folder.open(&self.name, FileAccess::Append) {
            Ok(file) => {
                self.size = file.metadata().map_or(0, |meta| meta.len());
                self.file = file;
                self.is_at_line_start = true;
                if self.size >= self.rotate_at {
                    self.rotate_at = self.size.saturating_add(self.limits.max_size);
                }
            }
            Err(_) => self.rotate_at = self.size.saturating_add(self.limits.max_size),
        }
    }

    fn rename_files(&self) -> rustix::io::Result<()> {
        let numbered = |number: u32| {
            let mut name = self.name.clone();
            name.push(format!(".{number}"));
            name
        };
        let RotationLimits { keep, .. } = self.limits;
        if keep == 0 {
            return unlinkat(&self.folder.fd, &self.name, AtFlags::empty());
        }
        for number in (1..keep).rev() {
            match renameat(&self.folder.fd, numbered(number), &self.folder.fd, numbered(number + 1)) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        renameat(&self.folder.fd, &self.name, &self.folder.fd, numbered(1))
    }
}

/// Length of the first line, with its end.
fn line_length(bytes: &[u8]) -> usize {
    bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(folder: &Path, max_size: u64, keep: u32) -> RotatingLog {
        let limits = RotationLimits { max_size, keep };
        RotatingLog::open(&folder.join("log"), "app", WalkRule::Any, limits).expect("a log")
    }

    fn texts(folder: &Path) -> Vec<String> {
        let names = ["log.3", "log.2", "log.1", "log"];
        names.iter().filter_map(|name| std::fs::read_to_string(folder.join(name)).ok()).collect()
    }

    #[test]
    fn a_full_log_is_rotated_between_two_lines() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut one = log(folder.path(), 8, 2);
        one.append(b"111\n222\n333\n44").expect("it is written");
        one.append(b"4\na line that is longer than a file\n5\n").expect("it is written");
        assert_eq!(texts(folder.path()), ["333\n444\n", "a line that is longer than a file\n", "5\n"]);
        let mut again = log(folder.path(), 8, 2);
        again.append(b"6666666\n").expect("it is written");
        assert_eq!(texts(folder.path()), ["a line that is longer than a file\n", "5\n", "6666666\n"]);
        let mut none = log(folder.path(), 8, 0);
        none.append(b"7\n").expect("it is written");
        assert_eq!(texts(folder.path()).last().map(String::as_str), Some("7\n"), "no file is kept");
    }

    #[test]
    fn a_log_that_was_moved_or_truncated_continues() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut one = log(folder.path(), 100, 3);
        one.append(b"1\n").expect("it is written");
        std::fs::rename(folder.path().join("log"), folder.path().join("log.1")).expect("a rotation");
        one.append(b"2\n").expect("it is written");
        assert_eq!(texts(folder.path()), ["1\n", "2\n"]);
        std::fs::remove_file(folder.path().join("log")).expect("it is removed");
        one.append(b"3\n").expect("it is written");
        assert_eq!(texts(folder.path()), ["1\n", "3\n"]);
    }

    #[test]
    fn no_link_is_followed_and_a_rotation_that_fails_loses_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let other = folder.path().join("other");
        std::fs::write(&other, "other\n").expect("a file");
        std::os::unix::fs::symlink(&other, folder.path().join("log.1")).expect("a link");
        let mut one = log(folder.path(), 4, 1);
        one.append(b"111\n222\n").expect("it is written");
        assert_eq!(texts(folder.path()), ["111\n", "222\n"], "the link was replaced");
        std::fs::remove_file(folder.path().join("log")).expect("it is removed");
        std::os::unix::fs::symlink(&other, folder.path().join("log")).expect("a link");
        one.append(b"333\n444\n").expect("it is written to the open file");
        assert_eq!(std::fs::read_to_string(&other).expect("a file"), "other\n");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("log.1")).expect("a folder");
        let mut one = log(folder.path(), 4, 1);
        one.append(b"111\n222\n333\n").expect("it is written");
        assert_eq!(texts(folder.path()), ["111\n222\n333\n"]);
    }

    #[test]
    fn a_long_line_in_a_log_that_cannot_be_rotated_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("log.1")).expect("a folder");
        let mut one = log(folder.path(), 4, 1);
        let text =
            "1\na line that is longer than a file\n2\nanother line of that kind\n\nunfinished".to_owned();
        one.append(text.as_bytes()).expect("it is written");
        one.append(b", and its end\n3\n").expect("it is written");
        assert_eq!(texts(folder.path()), [text + ", and its end\n3\n"]);
        std::fs::remove_dir(folder.path().join("log.1")).expect("it is removed");
        one.append(b"a line that is longer than a file\n").expect("it is written");
        assert_eq!(texts(folder.path())[1], "a line that is longer than a file\n", "it is rotated again");
    }
}
