//! Files that a spec names (`log_path`, `pid_path`, `env.file`, `configmap`): opened with the rights of the spec's user.
//!
//! The agent is root, and a manifest author is not. A file is therefore opened by a helper thread that has the user's
//! groups and file-system ids and no capability, for good: it works for this account and no other. The user cannot signal
//! or trace it, since its real ids stay root's. Files of the agent's own user are opened directly, by a walk ([`walk`]) that no other
//! user's link can redirect. Root opens a file for another user only where the host's policy lists its path
//! ([`RootOpenPolicy`]), the user's own rights do not suffice, and every component belongs to root alone.
//!
//! Nothing here runs on an async thread: [`Rights::run`] has a thread, a time limit, and permits per user. A file system
//! that does not answer costs its own user permits, and other users nothing.

mod pid_file;
mod walk;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

pub use self::pid_file::{PidEntry, PidFile};
use self::walk::{FileAccess, FileError, Folder, WalkRule, parent};
use super::account::{Account, FileCredentials};
use super::permits::Permits;
use super::worker_threads;

/// Whether the host's policy lets root open this path for another user.
pub type RootOpenPolicy = Arc<dyn Fn(&Path) -> bool + Send + Sync>;

/// How long the work on a spec's files may take.
const FILE_TIMEOUT: Duration = Duration::from_secs(10);
/// Threads that work on files, and launches, of one user at once: more would only wait for the processors.
pub const MAX_PER_USER: usize = 8;
/// The largest value that an `env.file` gives.
const MAX_ENV_FILE_BYTES: u64 = 64 << 10;
/// A file that is larger has no sum.
const MAX_SUMMED_FILE_BYTES: u64 = 64 << 20;

/// What one user may do at once.
pub struct UserPermits {
    files: Permits,
    sums: Permits,
    pid_files: Permits,
    paths: Permits,
    launches: Permits,
}

/// Kinds of work on files. Each has its own permits: a configmap file that hangs does not keep pid files from being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWork {
    /// Files that a launch needs.
    Launch,
    /// Sums of configmap files.
    Sums,
    PidFile,
    /// Resolution of paths, for the host policy and for proofs of ownership.
    Paths,
}

impl Default for UserPermits {
    fn default() -> UserPermits {
        let permits = || Permits::new(MAX_PER_USER);
        UserPermits {
            files: permits(),
            sums: permits(),
            pid_files: permits(),
            paths: permits(),
            launches: permits(),
        }
    }
}

/// The right to open files as one account.
#[derive(Clone)]
pub struct Rights {
    account: Account,
    permits: Arc<UserPermits>,
    root_open_policy: RootOpenPolicy,
}

/// The length, modification time and md5 of a file when it was last read.
pub type FileSum = (u64, SystemTime, String);

impl Rights {
    pub fn new(account: Account, permits: Arc<UserPermits>, root_may: RootOpenPolicy) -> Rights {
        Rights { account, permits, root_open_policy: root_may }
    }

    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Waits for its turn to launch a process.
    pub async fn launch_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.launches.acquire(self.account.uid()).await
    }

    /// Does work on files on a thread of its own, within [`LIMIT`].
    pub async fn run<T: Send + 'static>(
        &self,
        kind: FileWork,
        what: &str,
        work: impl FnOnce(&Rights) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let user = self.account.name();
        let permits = match kind {
            FileWork::Launch => &self.permits.files,
            FileWork::Sums => &self.permits.sums,
            FileWork::PidFile => &self.permits.pid_files,
            FileWork::Paths => &self.permits.paths,
        };
        let job = async {
            // The thread gives the permit back, so that stuck threads of a user are counted.
            let permit = permits.acquire(self.account.uid()).await;
            let rights = self.clone();
            let done = spawn_thread(move || {
                let done = work(&rights);
                drop(permit);
                done
            });
            done?.await.unwrap_or_else(|_| Err(format!("cannot {what} as user {user:?}: the helper failed")))
        };
        tokio::time::timeout(FILE_TIMEOUT, job).await.unwrap_or_else(|_| {
            Err(format!("cannot {what} as user {user:?}: no answer within {} s", FILE_TIMEOUT.as_secs()))
        })
    }

    /// The values of `env.file` entries, each a name and a path.
    pub async fn env_values(&self, entries: Vec<(String, String)>) -> Result<Vec<(String, String)>, String> {
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

    /// Opens a log for appending; its missing directories are created. In a directory it is NAME.log. Blocks.
    pub fn open_log(&self, path: &Path, name: &str) -> Result<File, String> {
        let name = name.to_owned();
        let opened = self.with(path, move |path, rule| open_log(path, &name, rule));
        opened.map_err(|error| {
            let denied =
                matches!(&error, FileError::Io(error) if error.kind() == io::ErrorKind::PermissionDenied);
            let hint = if denied { self.hint(path) } else { String::new() };
            match error {
                FileError::Link => format!(
                    "log_path {} is a symbolic link; Abide does not follow links to a log file",
                    path.display()
                ),
                error => self.explain("cannot open log_path", path, error) + &hint,
            }
        })
    }

    /// Creates the missing directories on the way to a file. Blocks.
    pub fn make_parents(&self, field: &str, path: &Path) -> Result<(), String> {
        self.with(path, |path, rule| parent(path, rule, true).map(|_| ()))
            .map_err(|error| self.explain(&format!("cannot create the directory of {field}"), path, error))
    }

    /// The md5 of each file; `None`: it is missing or cannot be read. `known` sums of unchanged files are used again. Blocks.
    pub fn sums(&self, files: Vec<(PathBuf, Option<FileSum>)>) -> Vec<(PathBuf, Option<FileSum>)> {
        let sum = |(path, known): (PathBuf, Option<FileSum>)| {
            let summed = self.with(&path, move |path, rule| sum(path, rule, known.as_ref())).ok();
            (path, summed)
        };
        files.into_iter().map(sum).collect()
    }

    /// Does work with the rights of the account: here, if they are the agent's own.
    fn with<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl Fn(&Path, WalkRule) -> Result<T, FileError> + Send + Sync + 'static,
    ) -> Result<T, FileError> {
        if self.account.is_own() {
            return work(path, WalkRule::Trusting(self.account.uid()));
        }
        let (work, owned) = (Arc::new(work), path.to_owned());
        let with_their_rights = Arc::clone(&work);
        match run_as_user(&self.account, move || with_their_rights(&owned, WalkRule::Any))? {
            Err(FileError::Io(error))
                if error.kind() == io::ErrorKind::PermissionDenied && (self.root_open_policy)(path) =>
            {
                work(path, WalkRule::RootOnly)
            }
            done => done,
        }
    }

    fn explain(&self, attempt: &str, path: &Path, error: FileError) -> String {
        let (user, path) = (self.account.name(), path.display());
        let attempt = format!("{attempt} {path} as user {user:?}");
        match error {
            FileError::Io(error) => format!("{attempt}: {error}"),
            FileError::NotAbsolute => format!("{attempt}: the path is not absolute"),
            FileError::Link => format!("{attempt}: the file is a symbolic link"),
            FileError::ForeignLink(link, uid) => {
                format!("{attempt}: {} is a symbolic link of user {}", link.display(), name_of(uid))
            }
            FileError::Kind(kind) => format!("{attempt}: the path is {kind}, not a regular file"),
            FileError::TooLarge(limit) => format!("{attempt}: the file is larger than {limit} bytes"),
            FileError::Owner(uid) => format!(
                "{attempt}: the file belongs to user {} and others can write its directory; use a directory that only {user:?} can write",
                name_of(uid)
            ),
            FileError::HardLinks => {
                format!("{attempt}: the file has several hard links and others can write its directory")
            }
            FileError::Exposed(part) => format!(
                "{attempt}: the host's policy lists the path, but {} can be written by others than root",
                part.display()
            ),
            FileError::Content(why) => format!("{attempt}: the file {why}"),
        }
    }

    /// What to do about a log that the user may not write, as far as the user can see it.
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

/// Directories of the operating system: an agent that opened logs as root may have created files elsewhere, not there.
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

/// Could an earlier version, which opened logs as root, have created this file? An author without root names `log_path`:
/// the hint to hand a file over must not be printed for a file of the system.
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

/// Starts work on a thread that no runtime waits for: the agent ends even if the work never does.
pub fn spawn_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<oneshot::Receiver<T>, String> {
    let (send, receive) = oneshot::channel();
    let started = worker_threads::run(move || {
        let _ = send.send(work());
    });
    started.map(|()| receive).map_err(|error| format!("cannot start a thread: {error}"))
}

/// Does work on a thread that has this account's rights to files, and no others.
fn run_as_user<T: Send + 'static>(
    account: &Account,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    worker_threads::run_as(account.file_credentials(), assume_user, work)
}

/// Gives this thread, and only this one, an account's groups and file-system ids, and takes every capability from it.
///
/// Only the file-system ids: with the user's real ids the thread, and so the whole agent, could be signalled by the user.
fn assume_user(credentials: &FileCredentials) -> io::Result<()> {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_thread_groups};
    let FileCredentials { uid, gid, groups } = credentials;
    let groups: Vec<_> = groups.iter().map(|group| rustix::process::Gid::from_raw(*group)).collect();
    set_thread_groups(&groups)?;
    // The calls return the former id, also where they fail: only a second call shows the outcome.
    // SAFETY: both are system calls without pointers that change the calling thread alone.
    let (fs_gid, fs_uid) = unsafe {
        libc::setfsgid(*gid);
        libc::setfsuid(*uid);
        (libc::setfsgid(u32::MAX), libc::setfsuid(u32::MAX))
    };
    if u32::try_from(fs_gid) != Ok(*gid) || u32::try_from(fs_uid) != Ok(*uid) {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

fn name_of(uid: u32) -> String {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

fn open_log(path: &Path, name: &str, rule: WalkRule) -> Result<File, FileError> {
    let below = |folder: Folder| {
        let name = format!("{name}.log");
        // A name of several components would leave the directory.
        match name.contains('/') {
            true => Err(FileError::Content("name contains a slash")),
            false => folder.open(name.as_ref(), FileAccess::Append),
        }
    };
    let (folder, last) = parent(path, rule, true)?;
    match folder.open(&last, FileAccess::Append) {
        Err(FileError::Kind("a directory")) => below(Folder::walk(path, rule, false)?),
        // A link to a directory is a link on the way.
        Err(FileError::Link) => match Folder::walk(path, rule, false) {
            Ok(folder) => below(folder),
            Err(foreign @ FileError::ForeignLink(..)) => Err(foreign),
            Err(_) => Err(FileError::Link),
        },
        opened => opened,
    }
}

fn env_value(path: &Path, rule: WalkRule) -> Result<String, FileError> {
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
    let text = String::from_utf8(bytes).map_err(|_| FileError::Content("is not valid UTF-8"))?;
    match text.contains('\0') {
        true => Err(FileError::Content("contains a NUL byte")),
        false => Ok(text.trim_end_matches('\n').to_owned()),
    }
}

fn sum(path: &Path, rule: WalkRule, known: Option<&FileSum>) -> Result<FileSum, FileError> {
    use md5::{Digest, Md5};
    let (folder, name) = parent(path, rule, false)?;
    let file = folder.open(&name, FileAccess::Compare)?;
    let meta = file.metadata()?;
    let (length, modified) = (meta.len(), meta.modified()?);
    if length > MAX_SUMMED_FILE_BYTES {
        return Err(FileError::TooLarge(MAX_SUMMED_FILE_BYTES));
    }
    if let Some(known) = known.filter(|known| (known.0, known.1) == (length, modified)) {
        return Ok(known.clone());
    }
    let (mut digest, mut piece) = (Md5::new(), vec![0; 64 << 10]);
    // As long as it was when it was opened: a file that grows has another sum next time.
    let mut file = file.take(length);
    loop {
        match file.read(&mut piece)? {
            0 => break,
            count => digest.update(&piece[..count]),
        }
    }
    let sum = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((length, modified, sum))
}

/// The md5 of a file that the calling process may read, wherever links lead on the way.
pub fn own_sum(path: &Path) -> Option<String> {
    sum(path, WalkRule::Any, None).ok().map(|(_, _, sum)| sum)
}

#[cfg(test)]
mod tests;
