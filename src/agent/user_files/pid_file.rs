//! Pid files: read as a hint, written atomically by a rename, removed only while they name the ended process.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, linkat, openat, renameat, unlinkat};

use super::walk::{FileAccess, FileError, Folder, WalkRule, parent};
use super::{FileWork, Rights, UserFileError, run_as_user};

/// Maximum size of a pid file.
const MAX_PID_FILE_BYTES: u64 = 64;

/// The content of a pid file.
#[derive(Debug, PartialEq, Eq)]
pub enum PidEntry {
    Pid(u32),
    /// The file is missing, or does not name a process.
    None(String),
}

/// Whether a launch replaces an existing pid file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingPidFile {
    Replace,
    /// It may name a running process, which the agent did not launch.
    Refuse,
}

/// A prepared pid file: its directory is open, and a temporary file exists.
pub struct PidFile {
    path: PathBuf,
    folder: Folder,
    name: OsString,
    /// Name of the temporary file; `None`: it has no name yet.
    temporary: Option<OsString>,
    file: File,
    rule: WalkRule,
}

impl Rights {
    /// Performs all steps that can fail for missing rights, before the process is created. Blocks.
    pub fn prepare_pid_file(
        &self,
        path: &Path,
        existing: ExistingPidFile,
    ) -> Result<Arc<PidFile>, UserFileError> {
        self.with(path, move |path, rule| PidFile::prepare(path, rule, existing))
            .map(Arc::new)
            .map_err(|error| self.explain_pid_file(path, error))
    }

    pub(super) fn explain_pid_file(&self, path: &Path, error: FileError) -> UserFileError {
        let denied =
            matches!(&error, FileError::Io(error) if error.kind() == io::ErrorKind::PermissionDenied);
        let hint = if denied { self.pid_path_hint(path) } else { String::new() };
        self.explain("cannot write pid_path", path, error).with_hint(hint)
    }

    /// A hint for a refused pid file. A file name that a shell would interpret does not become part of a command.
    fn pid_path_hint(&self, path: &Path) -> String {
        let user = self.account().name();
        let plain = |text: &&str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            text.bytes().all(is_plain) && !text.starts_with(['.', '-'])
        };
        let needs = format!("; pid_path needs a directory that user {user:?} can write");
        match path.file_stem().and_then(|stem| stem.to_str()).filter(plain) {
            Some(stem) => format!("{needs}, such as /run/{stem}: install -d -o {user} /run/{stem}"),
            None => needs,
        }
    }

    /// Writes the pid, and renames the file to its path. Blocks.
    pub fn write_pid_file(&self, prepared: &Arc<PidFile>, pid: u32) -> Result<(), UserFileError> {
        self.with_prepared_rights(prepared, move |prepared| prepared.write(pid))
            .map_err(|error| self.explain("cannot write pid_path", &prepared.path, error))
    }

    /// Removes the temporary file after a failed launch. Blocks.
    pub fn discard_pid_file(&self, prepared: &Arc<PidFile>) {
        let _ = self.with_prepared_rights(prepared, |prepared| {
            let Some(temporary) = &prepared.temporary else { return Ok(()) };
            Ok(unlinkat(&prepared.folder.fd, temporary, AtFlags::empty())?)
        });
    }

    /// The pid in a pid file, as a hint. Accepts only a regular file with a number that is neither pid 1 nor the agent. An
    /// error: the file cannot be read, and may name a process.
    pub async fn read_pid_file(&self, path: &str) -> Result<PidEntry, UserFileError> {
        let path = PathBuf::from(path);
        self.run(FileWork::PidFile, "read pid_path", move |rights| rights.pid_in(&path)).await
    }

    /// Removes a pid file if it names this process.
    pub async fn remove_pid_file(&self, path: &str, pid: u32) {
        let path = PathBuf::from(path);
        let removed = self.run(FileWork::PidFile, "remove pid_path", move |rights| {
            let removed = rights.with(&path, move |path, rule| remove(path, rule, pid));
            removed.map_err(|error| rights.explain("cannot remove pid_path", &path, error))
        });
        // An error leaves the file: the next launch replaces it.
        let _ = removed.await;
    }

    /// As [`Rights::read_pid_file`]. Blocks.
    pub fn pid_in(&self, path: &Path) -> Result<PidEntry, UserFileError> {
        let shown = path.display();
        let text = self.with(path, |path, rule| {
            let (folder, name) = parent(path, rule, false)?;
            content(&folder, &name)
        });
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                let names_none = match &error {
                    FileError::Io(error) => matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidData
                    ),
                    FileError::TooLarge(_) | FileError::Content(_) => true,
                    FileError::NotAbsolute
                    | FileError::Link
                    | FileError::ForeignLink(..)
                    | FileError::Kind(_)
                    | FileError::Owner(_)
                    | FileError::HardLinks
                    | FileError::Exposed(_) => false,
                };
                let why = self.explain("cannot read pid_path", path, error);
                return if names_none { Ok(PidEntry::None(why.to_string())) } else { Err(why) };
            }
        };
        let Ok(pid) = text.trim().parse::<u32>() else {
            return Ok(PidEntry::None(format!("{shown} does not contain a pid")));
        };
        if pid <= 1 || pid == std::process::id() {
            let why = format!("{shown} names process {pid}, which is not a process of this agent");
            return Ok(PidEntry::None(why));
        }
        Ok(PidEntry::Pid(pid))
    }

    /// Runs work with the rights that prepared the file.
    fn with_prepared_rights<T: Send + 'static>(
        &self,
        prepared: &Arc<PidFile>,
        work: impl FnOnce(&PidFile) -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, FileError> {
        match prepared.rule {
            WalkRule::Any => {
                let prepared = Arc::clone(prepared);
                run_as_user(self.account(), move || work(&prepared))?
            }
            WalkRule::Trusting(_) | WalkRule::RootOnly => work(prepared),
        }
    }
}

fn remove(path: &Path, rule: WalkRule, pid: u32) -> Result<(), FileError> {
    let (folder, name) = parent(path, rule, false)?;
    if content(&folder, &name)?.trim().parse() != Ok(pid) {
        return Ok(());
    }
    Ok(unlinkat(&folder.fd, &name, AtFlags::empty())?)
}

fn content(folder: &Folder, name: &OsStr) -> Result<String, FileError> {
    let file = folder.open(name, FileAccess::Compare)?;
    if file.metadata()?.len() > MAX_PID_FILE_BYTES {
        return Err(FileError::TooLarge(MAX_PID_FILE_BYTES));
    }
    let mut text = String::new();
    file.take(MAX_PID_FILE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// Checks that the file is regular, and empty or with a pid as its first line. Some programs add further lines.
pub(super) fn is_replaceable(folder: &Folder, name: &OsStr, stat: &Stat) -> Result<(), FileError> {
    // Includes /dev/null, which is accepted for other files.
    if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice {
        return Err(FileError::Kind("a device"));
    }
    let mut start = Vec::new();
    folder.open(name, FileAccess::Compare)?.take(MAX_PID_FILE_BYTES).read_to_end(&mut start)?;
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let is_pid = |text: &str| text.trim().is_empty() || text.trim().parse::<u32>().is_ok();
    match std::str::from_utf8(line).is_ok_and(is_pid) {
        true => Ok(()),
        false => {
            Err(FileError::Content("is not a pid file, and is not replaced; remove it or name another path"))
        }
    }
}

impl PidFile {
    fn prepare(path: &Path, rule: WalkRule, existing: ExistingPidFile) -> Result<PidFile, FileError> {
        let (folder, name) = parent(path, rule, true)?;
        // Fails before the launch, not after it. Only a pid file is replaced: a wrong path must not destroy another file.
        let replaced = folder.kind(&name)?;
        if replaced.is_some() && existing == ExistingPidFile::Refuse {
            return Err(FileError::Io(io::ErrorKind::AlreadyExists.into()));
        }
        if let Some(stat) = &replaced {
            is_replaceable(&folder, &name, stat)?;
        }
        let (file, temporary) = match replaced.is_none().then(|| create_unnamed(&folder)).transpose() {
            Ok(Some(file)) => (file, None),
            // A file system without unnamed files, or a file to replace: only a rename replaces one.
            Ok(None) | Err(_) => {
                let temporary = random_name();
                (create(&folder, &temporary)?, Some(temporary))
            }
        };
        Ok(PidFile { path: path.to_owned(), folder, name, temporary, file, rule })
    }

    fn write(&self, pid: u32) -> Result<(), FileError> {
        (&self.file).write_all(format!("{pid}\n").as_bytes())?;
        let folder = &self.folder.fd;
        let temporary = match &self.temporary {
            Some(temporary) => temporary.clone(),
            None => match link(&self.file, folder, &self.name) {
                // Another file appeared in the meantime.
                Err(rustix::io::Errno::EXIST) => {
                    let temporary = random_name();
                    link(&self.file, folder, &temporary)?;
                    temporary
                }
                linked => return Ok(linked?),
            },
        };
        Ok(renameat(folder, &temporary, folder, &self.name)?)
    }
}

/// A random name: no other user can guess it or have created it.
fn random_name() -> OsString {
    OsString::from(format!(".abide-{}", crate::agent::fresh_id()))
}

fn create(folder: &Folder, name: &OsStr) -> rustix::io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(&folder.fd, name, flags, Mode::from_raw_mode(0o644)).map(File::from)
}

/// A file that gets its name after it is written. Unlike a named one, it is made without a lock on the directory, for which
/// launches would wait, and nothing of it remains if the agent is killed.
fn create_unnamed(folder: &Folder) -> rustix::io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    openat(&folder.fd, ".", flags, Mode::from_raw_mode(0o644)).map(File::from)
}

/// Names an open file. Fails if the name exists.
fn link(file: &File, folder: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    linkat(CWD, format!("/proc/self/fd/{}", file.as_raw_fd()), folder, name, AtFlags::SYMLINK_FOLLOW)
}
