//! Log writer program: reads the output of a process from a pipe, and writes it to a rotating log.
//!
//! It is this binary under another name ([`PROGRAM_NAME`]), with the ids of the process's user. It ends when no process can
//! write to the pipe any more, or on SIGTERM after it has written what it has read. One writer at a time reads a pipe: a
//! lock on the pipe makes a successor wait.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use super::queue::{OutputQueue, QueueItem};
use super::rotating_log::{RotatingLog, RotationLimits};
use crate::agent::user_files::{FileError, WalkRule};

/// The name by which the binary is a log writer.
pub const PROGRAM_NAME: &str = "abide-log";
/// The descriptor on which a writer reports that its log is open, or why not.
pub const STATUS_FD: i32 = 3;
/// The report of an open log.
pub const OPENED: &str = "opened\n";

/// The second argument of a writer that opens its log while it reads the pipe.
pub const DEFERRED: &std::ffi::CStr = c"deferred";

/// Bytes of one read.
const CHUNK: usize = 64 << 10;
/// Interval between two attempts to write after an error.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two attempts to open a log.
const OPEN_INTERVAL: Duration = Duration::from_secs(1);
const STACK: usize = 256 << 10;

/// The argument of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterConfig {
    pub path: PathBuf,
    /// Name of the process, for a path that is a directory.
    pub name: String,
    pub max_size: u64,
    pub keep: u32,
    /// The user is the agent's own: links of other users are not followed.
    pub is_own: bool,
    /// User, group and further groups that the writer takes; `None`: those that it begins with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<(u32, u32, Vec<u32>)>,
}

/// Denies the processes of the own user access to this one: a writer is outside the sandbox of the process that it serves, and
/// `/proc/PID/root` and ptrace would lead out of it.
fn close_to_user() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?)
}

/// Takes the ids of the user. The process has one thread.
fn take_ids((user, group, groups): (u32, u32, Vec<u32>)) -> io::Result<()> {
    use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: a system call on this process alone; a null name makes a keyring without one.
    unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>()) };
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    setgroups(&groups.into_iter().map(Gid::from_raw).collect::<Vec<_>>())?;
    setresgid(group, group, group)?;
    Ok(setresuid(user, user, user)?)
}

/// Runs the program if the binary was started under its name.
pub fn run_if_named() -> Option<ExitCode> {
    let mut args = std::env::args_os();
    if args.next()? != PROGRAM_NAME {
        return None;
    }
    let config = args.next().and_then(|text| serde_json::from_str(text.to_str()?).ok());
    let is_deferred = args.next().is_some_and(|word| word.as_encoded_bytes() == DEFERRED.to_bytes());
    Some(match config.map(|config| run(config, is_deferred)) {
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(_)) | None => ExitCode::FAILURE,
    })
}

fn run(mut config: WriterConfig, is_deferred: bool) -> io::Result<()> {
    if let Some(ids) = config.ids.take() {
        // Once more afterwards: the change of the ids resets this to a setting of the host.
        let taken = close_to_user().and_then(|()| take_ids(ids)).and_then(|()| close_to_user());
        if let Err(error) = taken {
            report(format!("cannot take the ids of the user: {error}"));
            return Err(error);
        }
    }
    let opened = if is_deferred { None } else { Some(open(&config)) };
    report(match &opened {
        Some(Err(error)) => error.to_string(),
        Some(Ok(_)) | None => OPENED.to_owned(),
    });
    let log = opened.transpose().map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
    let pipe = io::stdin();
    rustix::fs::flock(&pipe, rustix::fs::FlockOperation::LockExclusive)?;
    let stop = stop_signal()?;
    let queue = Arc::new(OutputQueue::default());
    let output = Arc::clone(&queue);
    let writer = std::thread::Builder::new().name("log".to_owned()).stack_size(STACK);
    let writer = writer.spawn(move || {
        let mut lost = LostOutput::default();
        if let Some(log) = log.or_else(|| open_deferred(&output, &config, &mut lost)) {
            write_all(&output, log, lost);
        }
    })?;
    read_all(pipe.as_fd(), &stop, &queue);
    queue.close();
    let _ = writer.join();
    Ok(())
}

fn open(config: &WriterConfig) -> Result<RotatingLog, FileError> {
    let WriterConfig { path, name, max_size, keep, is_own, .. } = config;
    let rule = if *is_own { WalkRule::Trusting(nix::unistd::geteuid().as_raw()) } else { WalkRule::Any };
    let limits = RotationLimits { max_size: (*max_size).max(1), keep: *keep };
    RotatingLog::open(path, name, rule, limits)
}

/// Opens the log as soon as that succeeds. Output that arrives before is dropped and counted. `None`: the output has ended.
fn open_deferred(queue: &OutputQueue, config: &WriterConfig, lost: &mut LostOutput) -> Option<RotatingLog> {
    let mut next = Instant::now();
    loop {
        if Instant::now() >= next {
            match open(config) {
                Ok(log) => return Some(log),
                Err(error) => lost.reason = format!("cannot open the log: {error}"),
            }
            next = Instant::now() + OPEN_INTERVAL;
        }
        match queue.take(OPEN_INTERVAL)? {
            QueueItem::Bytes(bytes) => lost.add(&bytes),
            QueueItem::Dropped(count) => (lost.bytes, lost.is_mid_line) = (lost.bytes + count, true),
            QueueItem::Nothing => {}
        }
    }
}

/// Reports the opened log, or why it cannot be opened, to the agent.
fn report(text: String) {
    // SAFETY: the agent passed this descriptor for the report, and nothing else uses it.
    let status = unsafe { OwnedFd::from_raw_fd(STATUS_FD) };
    let _ = rustix::io::write(&status, text.as_bytes());
}

/// A descriptor that is readable after SIGTERM, which no longer ends the program.
fn stop_signal() -> io::Result<OwnedFd> {
    // SAFETY: the signal set is a local variable, and the new descriptor has no other owner.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        match libc::signalfd(-1, &set, libc::SFD_CLOEXEC) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Reads the pipe until its end, or until SIGTERM.
fn read_all(pipe: std::os::fd::BorrowedFd<'_>, stop: &OwnedFd, queue: &OutputQueue) {
    let mut chunk = vec![0; CHUNK];
    loop {
        let mut polled = [PollFd::new(&pipe, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut polled, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
            Ok(_) => {}
        }
        if polled[1].revents().contains(PollFlags::IN) {
            return;
        }
        match rustix::io::read(pipe, &mut chunk[..]) {
            Ok(0) => return,
            Ok(count) => queue.push(&chunk[..count]),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Output that could not be written.
#[derive(Default)]
struct LostOutput {
    bytes: u64,
    reason: String,
    /// The lost output ended inside a line.
    is_mid_line: bool,
    /// When the next write is attempted.
    retry_at: Option<Instant>,
}

impl LostOutput {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.is_mid_line = bytes.last().map_or(self.is_mid_line, |last| *last != b'\n');
    }

    fn fail(&mut self, error: &io::Error) {
        self.reason = error.to_string();
        self.retry_at = Some(Instant::now() + RETRY_INTERVAL);
    }
}

/// Writes the queue to the log. Output that cannot be written is dropped and counted, and the log gets the count once it can be
/// written again.
fn write_all(queue: &OutputQueue, mut log: RotatingLog, mut lost: LostOutput) {
    // Without lost output there is nothing to do until more arrives.
    while let Some(item) = queue.take(if lost.bytes > 0 { RETRY_INTERVAL } else { Duration::MAX }) {
        let bytes = match item {
            QueueItem::Dropped(count) => {
                (lost.bytes, lost.is_mid_line) = (lost.bytes + count, true);
                lost.reason = "the disk did not keep up".to_owned();
                continue;
            }
            QueueItem::Nothing => {
                note(&mut log, &mut lost);
                continue;
            }
            QueueItem::Bytes(bytes) => bytes,
        };
        if lost.retry_at.is_some_and(|at| Instant::now() < at) {
            lost.add(&bytes);
            continue;
        }
        let mut from = 0;
        if lost.bytes > 0 {
            // The rest of a line whose beginning is lost is not written.
            if lost.is_mid_line {
                from = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1);
                lost.add(&bytes[..from]);
            }
            if lost.is_mid_line || !note(&mut log, &mut lost) {
                lost.add(&bytes[from..]);
                continue;
            }
        }
        if let Err((written, error)) = log.append(&bytes[from..]) {
            lost.add(&bytes[from + written..]);
            lost.fail(&error);
        }
    }
    if lost.bytes > 0 {
        note(&mut log, &mut lost);
    }
}

/// Writes a line about lost output. False: it cannot be written either.
fn note(log: &mut RotatingLog, lost: &mut LostOutput) -> bool {
    let begin = if log.is_at_line_start() { "" } else { "\n" };
    let line = format!("{begin}abide: {} bytes of output were dropped: {}\n", lost.bytes, lost.reason);
    match log.append(line.as_bytes()) {
        Ok(()) => {
            *lost = LostOutput::default();
            true
        }
        Err((_, error)) => {
            lost.fail(&error);
            false
        }
    }
}
