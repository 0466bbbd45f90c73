//! User files: the paths of a spec (`log_path`, `pid_path`, `env.file`, `env_file`, `configmap`), opened with its user's rights.
//!
//! The agent runs as root, and a manifest author does not. A file is therefore opened by a helper thread with the user's
//! groups and file-system ids and without capabilities. Such a thread serves one account and never another. The user cannot
//! signal or trace it, since its real ids stay root's. Files of the agent's own user are opened directly, by a walk
//! ([`walk`]) that no link of another user can redirect. Root opens a file for another user only if the host policy lists
//! its path ([`RootOpenPolicy`]), the user's own rights do not suffice, and every component belongs to root alone.
//!
//! Nothing here runs on an async thread: [`Rights::run`] uses a worker thread, a timeout, and permits per user. A file
//! system that hangs uses up the permits of its own user, and does not affect other users.

mod env_file;
mod launch_check;
mod log_files;
mod pid_file;
mod sums;
mod walk;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use self::env_file::EnvFileError;
pub use self::log_files::log_entry;
pub use self::pid_file::{ExistingPidFile, PidEntry, PidFile};
use self::sums::sum;
pub use self::sums::{FileSum, own_sum};
use self::walk::parent;
pub use self::walk::{FileAccess, FileError, Folder, WalkRule, locate};
use super::account::{Account, FileCredentials};
use super::permits::Permits;
use super::start_output::LogStart;
use super::worker_threads;

/// Whether the host policy lets root open this path for another user.
pub type RootOpenPolicy = Arc<dyn Fn(&Path) -> bool + Send + Sync>;

/// Maximum duration of work on a spec's files.
const FILE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum concurrent file threads, and launches, of one user: more would only wait for CPU time.
pub const MAX_PER_USER: usize = 8;
/// Maximum size of an `env.file` and of an `env_file`.
const MAX_ENV_FILE_BYTES: u64 = 64 << 10;
/// Bytes at the end of a log that a message may show.
const LOG_TAIL_BYTES: u64 = 4096;

/// Reason why a file of a spec cannot be used with its user's rights.
#[derive(Debug, thiserror::Error)]
pub enum UserFileError {
    #[error("{attempt}: {source}{hint}")]
    Path { attempt: String, source: FileError, hint: String },
    #[error("log_path {} is a symbolic link; Abide does not follow links to a log file", path.display())]
    LogLink { path: PathBuf },
    #[error("env_file {}: {source}", path.display())]
    EnvFile { path: PathBuf, source: EnvFileError },
    #[error("cannot {what} as user {user:?}: the helper thread failed")]
    ThreadFailed { what: &'static str, user: String },
    #[error("cannot {what} as user {user:?}: no answer within {} s", FILE_TIMEOUT.as_secs())]
    TimedOut { what: &'static str, user: String },
    #[error("cannot start a thread: {0}")]
    NoThread(#[source] io::Error),
}

impl UserFileError {
    /// Whether the file does not exist.
    pub fn is_missing(&self) -> bool {
        let UserFileError::Path { source: FileError::Io(error), .. } = self else { return false };
        error.kind() == io::ErrorKind::NotFound
    }

    /// Whether a file exists that must not.
    pub fn is_existing(&self) -> bool {
        let UserFileError::Path { source: FileError::Io(error), .. } = self else { return false };
        error.kind() == io::ErrorKind::AlreadyExists
    }

    fn with_hint(mut self, more: String) -> UserFileError {
        if let UserFileError::Path { hint, .. } = &mut self {
            hint.push_str(&more);
        }
        self
    }
}

/// Permits per user and kind of work.
pub struct UserPermits {
    files: Permits,
    sums: Permits,
    pid_files: Permits,
    paths: Permits,
    logs: Permits,
    launches: Permits,
}

/// Kinds of work on files. Each has its own permits: a configmap file that hangs does not block reads of pid files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWork {
    /// Files that a launch needs.
    Launch,
    /// Sums of configmap files.
    Sums,
    PidFile,
    /// Resolution of paths, for the host policy and for proofs of ownership.
    Paths,
    /// Reads of logs.
    Logs,
}

impl Default for UserPermits {
    fn default() -> UserPermits {
        let permits = || Permits::new(MAX_PER_USER);
        UserPermits {
            files: permits(),
            sums: permits(),
            pid_files: permits(),
            paths: permits(),
            logs: permits(),
            launches: permits(),
        }
    }
}

/// The rights of one account: opens files and runs work as that account.
#[derive(Clone)]
pub struct Rights {
    account: Account,
    permits: Arc<UserPermits>,
    root_open_policy: RootOpenPolicy,
}

impl Rights {
    pub fn new(account: Account, permits: Arc<UserPermits>, root_open_policy: RootOpenPolicy) -> Rights {
        Rights { account, permits, root_open_policy }
    }

    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Waits for a permit to launch a process.
    pub async fn launch_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.launches.acquire(self.account.uid()).await
    }

    /// Runs work on files on a worker thread, within [`FILE_TIMEOUT`].
    pub async fn run<T: Send + 'static, E: From<UserFileError> + Send + 'static>(
        &self,
        kind: FileWork,
        what: &'static str,
        work: impl FnOnce(&Rights) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let user = || self.account.name().to_owned();
        let permits = match kind {
            FileWork::Launch => &self.permits.files,
            FileWork::Sums => &self.permits.sums,
            FileWork::PidFile => &self.permits.pid_files,
            FileWork::Paths => &self.permits.paths,
            FileWork::Logs => &self.permits.logs,
        };
        let job = async {
            // Released by the thread, so that stuck threads count against their user.
            let permit = permits.acquire(self.account.uid()).await;
            let rights = self.clone();
            let done = spawn_thread(move || {
                let done = work(&rights);
                drop(permit);
                done
            });
            done.map_err(E::from)?
                .await
                .unwrap_or_else(|_| Err(UserFileError::ThreadFailed { what, user: user() }.into()))
        };
        let done = tokio::time::timeout(FILE_TIMEOUT, job).await;
        done.unwrap_or_else(|_| Err(UserFileError::TimedOut { what, user: user() }.into()))
    }

    /// The values of `env.file` entries, each a name and a path.
    pub async fn env_values(
        &self,
        entries: Vec<(String, String)>,
    ) -> Result<Vec<(String, String)>, UserFileError> {
        let read = |rights: &Rights, (name, path): (String, String)| {
            let path = Path::new(&path);
            let value = rights.with(path, env_value);
            let failed = |error| rights.explain(&format!("env {name}: cannot read"), path, error);
            value.map(|value| (name.clone(), value)).map_err(failed)
        };
        self.run(FileWork::Launch, "read the env files", move |rights| {
            entries.into_iter().map(|entry| read(rights, entry)).collect()
        })
        .await
    }

    /// The variables of an environment file, in the order of the file.
    pub async fn env_file(&self, path: &str) -> Result<Vec<(String, String)>, UserFileError> {
        let path = PathBuf::from(path);
        self.run(FileWork::Launch, "read env_file", move |rights| {
            let failed = |error| rights.explain("cannot read env_file", &path, error);
            let text = rights.with(&path, small_text).map_err(failed)?;
            env_file::parse(&text).map_err(|source| UserFileError::EnvFile { path: path.clone(), source })
        })
        .await
    }

    /// Opens a log for appending, and creates missing directories. For a directory, opens NAME.log in it. Blocks.
    pub fn open_log(&self, path: &Path, name: &str) -> Result<File, UserFileError> {
        let name = name.to_owned();
        let opened = self.with(path, move |path, rule| open_log(path, &name, rule, FileAccess::Append));
        opened.map_err(|error| self.explain_log(path, error))
    }

    fn explain_log(&self, path: &Path, error: FileError) -> UserFileError {
        let denied =
            matches!(&error, FileError::Io(error) if error.kind() == io::ErrorKind::PermissionDenied);
        let hint = if denied { self.hint(path) } else { String::new() };
        match error {
            FileError::Link => UserFileError::LogLink { path: path.to_owned() },
            error => self.explain("cannot open log_path", path, error).with_hint(hint),
        }
    }

    /// The end of what was written to a log since `start`, after `context` bytes that masking needs. Returns the bytes and
    /// the number of context bytes. A log that was replaced since is read from its beginning. Blocks.
    pub fn read_log(
        &self,
        path: &Path,
        name: &str,
        start: LogStart,
        context: usize,
    ) -> Result<(Vec<u8>, usize), UserFileError> {
        let name = name.to_owned();
        let read = self.with(path, move |path, rule| read_log(path, &name, rule, start, context as u64));
        read.map_err(|error| self.explain("cannot read log_path", path, error))
    }

    /// Creates the missing parent directories of a file. Blocks.
    pub fn make_parents(&self, field: &str, path: &Path) -> Result<(), UserFileError> {
        self.with(path, |path, rule| parent(path, rule, true).map(|_| ()))
            .map_err(|error| self.explain(&format!("cannot create the directory of {field}"), path, error))
    }

    /// The md5 of each file; `None`: the file is missing or cannot be read. Known sums of unchanged files are reused.
    /// Blocks.
    pub fn sums(&self, files: Vec<(PathBuf, Option<FileSum>)>) -> Vec<(PathBuf, Option<FileSum>)> {
        let sum = |(path, known): (PathBuf, Option<FileSum>)| {
            let summed = self.with(&path, move |path, rule| sum(path, rule, known.as_ref())).ok();
            (path, summed)
        };
        files.into_iter().map(sum).collect()
    }

    /// Runs work with the rights of the account: on this thread for the agent's own account, else on a helper thread.
    fn with<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl Fn(&Path, WalkRule) -> Result<T, FileError> + Send + Sync + 'static,
    ) -> Result<T, FileError> {
        if self.account.is_own() {
            return work(path, WalkRule::Trusting(self.account.uid()));
        }
        let (work, owned) = (Arc::new(work), path.to_owned());
        let as_user = Arc::clone(&work);
        match run_as_user(&self.account, move || as_user(&owned, WalkRule::Any))? {
            Err(FileError::Io(error))
                if error.kind() == io::ErrorKind::PermissionDenied && (self.root_open_policy)(path) =>
            {
                work(path, WalkRule::RootOnly)
            }
            done => done,
        }
    }

    fn explain(&self, attempt: &str, path: &Path, source: FileError) -> UserFileError {
        let user = self.account.name();
        let attempt = format!("{attempt} {} as user {user:?}", path.display());
        let hint = match &source {
            FileError::Owner(_) => format!("; use a directory that only {user:?} can write"),
            _ => String::new(),
        };
        UserFileError::Path { attempt, source, hint }
    }

    /// A hint for a log that the user cannot write. It discloses only facts that the user can see.
    fn hint(&self, path: &Path) -> String {
        let user = self.account.name();
        let seen = self.with(path, |path, rule| {
            let (folder, name) = parent(path, rule, false)?;
            Ok(folder.kind(&name)?.map(|stat| (stat.st_uid, may_be_our_log(path, &stat))))
        });
        match seen {
            Ok(Some((owner, false))) if owner != self.account.uid() => format!(
                "; the file belongs to user {}: log_path needs a file of user {user:?}, or a directory that {user:?} can write",
                name_of(owner)
            ),
            Ok(Some((owner, true))) if owner != self.account.uid() => format!(
                "; the file belongs to user {}: if it is the log of this process, hand it over with: chown {user}: {}",
                name_of(owner),
                path.display()
            ),
            Ok(Some(_)) => String::new(),
            Ok(None) | Err(_) => {
                format!("; log_path needs a directory that user {user:?} can write")
            }
        }
    }
}

/// Directories of the operating system, in which no earlier agent created logs.
const SYSTEM: [&str; 15] = [
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/root",
    "/sbin",
    "/sys",
    "/usr/bin",
    "/usr/lib",
    "/usr/sbin",
    "/usr/share",
];

/// Whether an earlier version, which opened logs as root, can have created this file. An author without root rights sets
/// `log_path`: the hint with `chown` must not be printed for a system file.
fn may_be_our_log(path: &Path, stat: &rustix::fs::Stat) -> bool {
    use rustix::fs::{FileType, Mode};
    let unusual = Mode::XUSR | Mode::XGRP | Mode::XOTH | Mode::SUID | Mode::SGID | Mode::WOTH;
    let of_root = stat.st_uid == 0 && stat.st_gid == 0;
    let plain = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_nlink == 1;
    let direct = !path.components().any(|part| part == std::path::Component::ParentDir);
    of_root
        && plain
        && direct
        && !Mode::from_raw_mode(stat.st_mode).intersects(unusual)
        && !SYSTEM.iter().any(|folder| path.starts_with(folder))
}

/// Runs work on a thread that the runtime does not wait for: the agent can end while the work hangs.
pub fn spawn_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<oneshot::Receiver<T>, UserFileError> {
    let (send, receive) = oneshot::channel();
    let started = worker_threads::run(move || {
        let _ = send.send(work());
    });
    started.map(|()| receive).map_err(UserFileError::NoThread)
}

/// Runs work on a thread that has only this account's file rights.
fn run_as_user<T: Send + 'static>(
    account: &Account,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    worker_threads::run_as(account.file_credentials(), assume_user, work)
}

/// Sets the groups and file-system ids of an account on the calling thread alone, and drops all its capabilities.
///
/// The real ids stay root's: with the user's real ids, the user could signal the thread and so the whole agent.
fn assume_user(credentials: &FileCredentials) -> io::Result<()> {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    assume_file_ids(credentials)?;
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

/// Sets the groups and file-system ids of an account on the calling thread alone. The kernel drops the capabilities for
/// files from the effective set, until the thread has the file-system id of root again.
pub fn assume_file_ids(credentials: &FileCredentials) -> io::Result<()> {
    use rustix::thread::set_thread_groups;
    let FileCredentials { uid, gid, groups } = credentials;
    let groups: Vec<_> = groups.iter().map(|group| rustix::process::Gid::from_raw(*group)).collect();
    set_thread_groups(&groups)?;
    // The calls return the former id even if they fail. Only a second call, with an invalid id, shows the outcome.
    // SAFETY: both calls take no pointers and change the calling thread alone.
    let (fs_gid, fs_uid) = unsafe {
        libc::setfsgid(*gid);
        libc::setfsuid(*uid);
        (libc::setfsgid(u32::MAX), libc::setfsuid(u32::MAX))
    };
    if u32::try_from(fs_gid) != Ok(*gid) || u32::try_from(fs_uid) != Ok(*uid) {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    Ok(())
}

fn name_of(uid: u32) -> String {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

fn read_log(
    path: &Path,
    name: &str,
    rule: WalkRule,
    start: LogStart,
    context: u64,
) -> Result<(Vec<u8>, usize), FileError> {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let file = open_log(path, name, rule, FileAccess::Read)?;
    let meta = file.metadata()?;
    let is_same = (meta.dev(), meta.ino()) == (start.device, start.inode) && meta.len() >= start.length;
    let begin = if is_same { start.length } else { 0 };
    let from = begin.max(meta.len().saturating_sub(LOG_TAIL_BYTES));
    let before = from.saturating_sub(context);
    let mut bytes = vec![0; usize::try_from(meta.len() - before).unwrap_or(0)];
    let mut length = 0;
    // A log may be truncated while it is read.
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], before + length as u64)? {
            0 => break,
            count => length += count,
        }
    }
    bytes.truncate(length);
    Ok((bytes, usize::try_from(from - before).unwrap_or(0)))
}

fn open_log(path: &Path, name: &str, rule: WalkRule, access: FileAccess) -> Result<File, FileError> {
    let below = |folder: Folder| {
        let name = format!("{name}.log");
        // A name with a slash could leave the directory.
        match name.contains('/') {
            true => Err(FileError::Content("name contains a slash")),
            false => folder.open(name.as_ref(), access),
        }
    };
    let (folder, last) = parent(path, rule, access == FileAccess::Append)?;
    match folder.open(&last, access) {
        Err(FileError::Kind("a directory")) => below(Folder::walk(path, rule, false)?),
        // A link to a directory is treated as a link inside the path.
        Err(FileError::Link) => match Folder::walk(path, rule, false) {
            Ok(folder) => below(folder),
            Err(foreign @ FileError::ForeignLink(..)) => Err(foreign),
            Err(_) => Err(FileError::Link),
        },
        opened => opened,
    }
}

fn env_value(path: &Path, rule: WalkRule) -> Result<String, FileError> {
    let text = small_text(path, rule)?;
    match text.contains('\0') {
        true => Err(FileError::Content("contains a NUL byte")),
        false => Ok(text.trim_end_matches('\n').to_owned()),
    }
}

/// The text of a small file.
fn small_text(path: &Path, rule: WalkRule) -> Result<String, FileError> {
    let (folder, name) = parent(path, rule, false)?;
    let file = folder.open(&name, FileAccess::Read)?;
    if file.metadata()?.len() > MAX_ENV_FILE_BYTES {
        return Err(FileError::TooLarge(MAX_ENV_FILE_BYTES));
    }
    let mut bytes = Vec::new();
    file.take(MAX_ENV_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_ENV_FILE_BYTES {
        return Err(FileError::TooLarge(MAX_ENV_FILE_BYTES));
    }
    String::from_utf8(bytes).map_err(|_| FileError::Content("is not valid UTF-8"))
}

#[cfg(test)]
mod tests;
