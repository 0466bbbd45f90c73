//! Log writers: one small process per foreground process with `log`, between its output and its rotated log.
//!
//! The output of the process is a pipe. A writer ([`program`]) reads it and writes the log with the ids of the spec's user.
//! It is not part of the process's tree: it outlives the process until the pipe is empty, and it outlives the agent.
//!
//! The process itself has the pipe open for reading too, so that it is not killed (SIGPIPE) if its writer is. While a
//! writer is missing, the pipe keeps up to [`PIPE_BYTES`]; the agent starts another writer at once. After some writers that
//! cannot open their log, one empties the pipe and counts dropped output, so that the process goes on. The next agent finds
//! the pipe as descriptor 1 of the process. It duplicates that descriptor, opens no path of the user, and verifies that it
//! is the pipe of the launch.

mod program;
mod queue;
mod rotating_log;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};

use self::program::{DEFERRED, OPENED, PROGRAM_NAME};
pub use self::program::{WriterConfig, run_if_named};
use super::account::Account;
use super::clone_exec::{ExecRequest, Restrictions, SpawnedProcess, Streams, VforkGuard};
use super::context::LogLocation;
use super::process::{ProcessHandle, ProcessIdentity, UnclaimedProcess, kill_unclaimed, uids};
use super::user_files::{self, MAX_PER_USER, Rights, UserFileError};
use crate::model::{LogRotation, Spec, SpecSection};
use crate::proc::ProcessStrings;

/// Capacity of a pipe: the output that waits while a writer is replaced.
const PIPE_BYTES: libc::c_int = 1 << 20;
/// Maximum duration until a writer has opened its log.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
const PIPEFS_MAGIC: u64 = 0x5049_5045;

/// Reason why a process has no log writer.
#[derive(Debug, thiserror::Error)]
pub enum LogWriterError {
    #[error("cannot create a pipe for the output: {0}")]
    Pipe(#[source] io::Error),
    #[error("cannot start the log writer as user {user:?}: {source}")]
    Start { user: String, source: io::Error },
    #[error("cannot open log_path {path} as user {user:?}: {why}")]
    Open { path: String, user: String, why: String },
    #[error("the log writer of user {user:?} did not open its log within {} s", OPEN_TIMEOUT.as_secs())]
    TimedOut { user: String },
    #[error("{MAX_PER_USER} launches of user {user:?} hang: no log writer was started within {} s", waited.as_secs())]
    Queue { user: String, waited: Duration },
    #[error(transparent)]
    Thread(#[from] UserFileError),
}

/// The output pipe of a process, open for reading and writing.
pub struct OutputPipe(File);

impl OutputPipe {
    /// A pipe that the user can open again (/dev/stdout).
    pub fn new(account: &Account) -> Result<OutputPipe, LogWriterError> {
        let made = || -> io::Result<OutputPipe> {
            let (read, _write) = io::pipe()?;
            // SAFETY: fcntl with an integer argument on an open descriptor. A user's limit may refuse the size.
            unsafe { libc::fcntl(read.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES) };
            if nix::unistd::geteuid().is_root() {
                std::os::unix::fs::fchown(&read, Some(account.uid), Some(account.gid))?;
            }
            Ok(OutputPipe(opened_again(&read, File::options().read(true).write(true))?))
        };
        made().map_err(LogWriterError::Pipe)
    }

    /// Descriptor 1 of a process, if it is an output pipe. `inode`: recorded at launch; `None`: the agent was killed before
    /// it recorded it.
    pub fn of(handle: &ProcessHandle, inode: Option<u64>) -> Option<OutputPipe> {
        let file = File::from(handle.descriptor(1)?);
        let meta = file.metadata().ok()?;
        let is_pipe = FileType::from_raw_mode(meta.mode()) == FileType::Fifo
            && rustix::fs::fstatfs(&file).is_ok_and(|fs| u64::try_from(fs.f_type) == Ok(PIPEFS_MAGIC));
        // A pipe of a shell is open for one direction only.
        let is_ours = rustix::fs::fcntl_getfl(&file).is_ok_and(|flags| flags.contains(OFlags::RDWR));
        (is_pipe && is_ours && inode.is_none_or(|inode| inode == meta.ino())).then_some(OutputPipe(file))
    }

    /// The inode, by which a later agent verifies the pipe.
    pub fn inode(&self) -> Option<u64> {
        self.0.metadata().ok().map(|meta| meta.ino())
    }

    /// A descriptor for the process.
    pub fn descriptor(&self) -> Result<File, LogWriterError> {
        self.0.try_clone().map_err(LogWriterError::Pipe)
    }

    /// A descriptor for a writer. It has its own file description: only the processes can write, so that their end is
    /// detected, and reads do not block.
    fn reader(&self) -> io::Result<File> {
        opened_again(&self.0, File::options().read(true).custom_flags(libc::O_NONBLOCK))
    }
}

/// Opens a new file description of an open file.
fn opened_again(file: &impl AsRawFd, options: &mut std::fs::OpenOptions) -> io::Result<File> {
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The configuration of a log's writer; `None`: its output needs no writer. A log of the agent is always rotated.
pub fn config_of(spec: &Spec, name: &str, log: &LogLocation) -> Option<WriterConfig> {
    (spec.log.is_set() || log.is_agents).then(|| WriterConfig {
        path: log.path.clone(),
        name: name.to_owned(),
        max_size: spec.log.max_size.unwrap_or(LogRotation::MAX_SIZE),
        keep: spec.log.keep.unwrap_or(LogRotation::KEEP).min(LogRotation::MAX_KEPT),
        is_own: log.rights.account().is_own(),
        ids: None,
    })
}

/// When a writer opens its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogOpening {
    /// Before it reads the pipe: if it cannot, the start has failed.
    First,
    /// While it reads the pipe: output is dropped and counted until the log is open.
    Deferred,
}

/// Starts a writer that reads the pipe, and waits until it has opened its log. `queue`: maximum wait for a permit of the
/// user, whose launches may all hang.
pub async fn start(
    rights: &Rights,
    pipe: &OutputPipe,
    config: WriterConfig,
    opening: LogOpening,
    queue: Duration,
) -> Result<ProcessHandle, LogWriterError> {
    let account = rights.account().clone();
    let user = account.name().to_owned();
    let reader = pipe.reader().map_err(LogWriterError::Pipe)?;
    let permit = tokio::time::timeout(queue, rights.launch_permit()).await;
    let Ok(permit) = permit else { return Err(LogWriterError::Queue { user, waited: queue }) };
    let timed_out = Arc::new(AtomicBool::new(false));
    let gave_up = Arc::clone(&timed_out);
    let work = move || {
        let started = start_writer(&account, &reader, &config, opening);
        drop(permit);
        started.map(|process| UnclaimedProcess::new(process, gave_up))
    };
    let mut receive = user_files::spawn_thread(work)?;
    // By reference: a writer that arrives at the last moment is dropped after `timed_out` is set, and so killed.
    let started = tokio::time::timeout(OPEN_TIMEOUT * 2, &mut receive).await;
    let Ok(Ok(started)) = started else {
        timed_out.store(true, Ordering::Release);
        return Err(LogWriterError::TimedOut { user });
    };
    let gone = || LogWriterError::Start { user: user.clone(), source: io::ErrorKind::NotFound.into() };
    started?.into_handle().ok_or_else(gone)
}

/// The writer of a pipe that an agent started and was killed before it recorded it. It has the pipe as its input. Of several,
/// the oldest has the lock and reads. Can block.
pub fn find_writer(pipe: u64, uid: u32) -> Option<(ProcessIdentity, WriterConfig)> {
    let reads_pipe = |pid: &u32| {
        let input = std::fs::metadata(format!("/proc/{pid}/fd/0"));
        input.is_ok_and(|meta| FileType::from_raw_mode(meta.mode()) == FileType::Fifo && meta.ino() == pipe)
            && uids(*pid).is_some_and(|ids| ids[0] == uid)
    };
    let writer = |pid: u32| {
        let arguments = ProcessStrings::arguments(pid).ok()?;
        let mut arguments = arguments.iter();
        let is_writer = arguments.next()? == PROGRAM_NAME.as_bytes();
        let config: WriterConfig = serde_json::from_slice(arguments.next()?).ok().filter(|_| is_writer)?;
        Some((ProcessIdentity::of(pid)?, WriterConfig { ids: None, ..config }))
    };
    let found = crate::proc::pids().into_iter().filter(reads_pipe).filter_map(writer);
    found.min_by_key(|(identity, _)| identity.started)
}

/// Starts a writer. Blocks.
fn start_writer(
    account: &Account,
    reader: &File,
    config: &WriterConfig,
    opening: LogOpening,
) -> Result<SpawnedProcess, LogWriterError> {
    let user = || account.name().to_owned();
    let failed = |source: io::Error| LogWriterError::Start { user: user(), source };
    let (status, report) = io::pipe().map_err(failed)?;
    let null = File::options().read(true).write(true).open("/dev/null").map_err(failed)?;
    // The writer takes the ids itself: a process of its user never has access to it, not even between `execve` and that.
    let ids = nix::unistd::geteuid().is_root().then(|| (account.uid, account.gid, account.groups.clone()));
    let config = WriterConfig { ids, ..config.clone() };
    let text = serde_json::to_string(&config).map_err(|error| failed(error.into()))?;
    let argument = CString::new(text).map_err(|error| failed(error.into()))?;
    let name = CString::new(PROGRAM_NAME).map_err(|error| failed(error.into()))?;
    let request = ExecRequest {
        programs: vec![c"/proc/self/exe".to_owned()],
        args: match opening {
            LogOpening::First => vec![name, argument],
            LogOpening::Deferred => vec![name, argument, DEFERRED.to_owned()],
        },
        env: Vec::new(),
        folder: c"/".to_owned(),
        streams: Streams { input: reader.as_fd(), output: null.as_fd(), code: Some(report.as_fd()) },
        group: None,
        ids: None,
        restrictions: Restrictions::default(),
        namespace: None,
        is_own: true,
        pid_file: None,
    };
    let spawned = request.spawn(&VforkGuard::default());
    let spawned = spawned.map_err(|(_, error)| failed(error))?;
    drop(report);
    match read_status(&status) {
        Ok(text) if text == OPENED => Ok(spawned),
        Ok(why) => {
            let path = config.path.display().to_string();
            kill_unclaimed(spawned.pid, &spawned.fd);
            Err(LogWriterError::Open { path, user: user(), why })
        }
        Err(_) => {
            kill_unclaimed(spawned.pid, &spawned.fd);
            Err(LogWriterError::TimedOut { user: user() })
        }
    }
}

/// The report of a writer, within [`OPEN_TIMEOUT`].
fn read_status(status: &io::PipeReader) -> io::Result<String> {
    let until = std::time::Instant::now() + OPEN_TIMEOUT;
    let mut text = Vec::new();
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        let time = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(status, PollFlags::IN)], Some(&time)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let mut piece = [0; 512];
        match rustix::io::read(status, &mut piece[..])? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            count if text.len() < 4096 => text.extend_from_slice(&piece[..count]),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::user_files::UserPermits;

    /// Launches that hang use up the permits of their user.
    #[tokio::test]
    async fn a_writer_waits_for_a_permit_within_its_time_limit() {
        let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).expect("users").expect("a name").name;
        let account = Account::named(&me).expect("an account");
        let rights = Rights::new(account.clone(), Arc::new(UserPermits::default()), Arc::new(|_| false));
        let mut held = Vec::new();
        for _ in 0..MAX_PER_USER {
            held.push(rights.launch_permit().await);
        }
        let pipe = OutputPipe::new(&account).expect("a pipe");
        let (path, name) = ("/dev/null".into(), "app".to_owned());
        let config = WriterConfig { path, name, max_size: 4096, keep: 1, is_own: true, ids: None };
        let waited = Duration::from_millis(100);
        let started = start(&rights, &pipe, config, LogOpening::First, waited).await;
        assert!(matches!(started, Err(LogWriterError::Queue { .. })));
    }
}
