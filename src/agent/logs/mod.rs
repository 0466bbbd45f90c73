//! Logs: reads of an instance's log for the gateway, each with one answer.
//!
//! A read names where it begins and how long it may wait; the answer has the next lines and a cursor for the next read. So
//! the agent keeps no state between two reads, a slow caller delays nothing, and a follow survives a reconnection. The
//! number of reads in progress, the bytes of an answer and the time of file work are bounded. Files are opened with the
//! rights of the spec's user.

mod segments;
mod since;

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use self::segments::{LogPart, LogPosition, Segment, SegmentId, start};
use super::account::AccountError;
use super::context::AgentContext;
use super::environment::secret_texts;
use super::masking::SecretTexts;
use super::process_files::ProcessFiles;
use super::run_output::RunOutputs;
use super::user_files::{FileWork, Rights, UserFileError};
use crate::agent_protocol::{LogChunk, LogError, LogErrorReason, LogRead, LogReadFrom, LoggedRun};
use crate::model::{AutoType, InstanceKey, Spec};

/// Maximum reads in progress. Most of them wait for new lines.
const MAX_READS: usize = 128;
/// Maximum bytes of one answer, whatever the gateway requests.
const MAX_BYTES: usize = 1 << 20;
/// Maximum wait of one read.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Interval between two checks for new lines, first and last. It doubles while there are none.
const FIRST_POLL: Duration = Duration::from_millis(50);
const LAST_POLL: Duration = Duration::from_millis(400);

/// Location of the log of each instance: in the file of its spec (that of its process, or of its last launch), and in stored
/// outputs.
#[derive(Default)]
pub struct LogSources {
    specs: Mutex<HashMap<InstanceKey, Arc<Spec>>>,
    outputs: RunOutputs,
    files: ProcessFiles,
}

impl LogSources {
    pub fn new(outputs: RunOutputs, files: ProcessFiles) -> LogSources {
        LogSources { specs: Mutex::default(), outputs, files }
    }

    /// Pid files and logs of processes that name none.
    pub fn files(&self) -> &ProcessFiles {
        &self.files
    }

    /// The stored outputs of runs.
    pub fn outputs(&self) -> &RunOutputs {
        &self.outputs
    }

    fn specs(&self) -> MutexGuard<'_, HashMap<InstanceKey, Arc<Spec>>> {
        self.specs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn set(&self, instance: &InstanceKey, spec: &Arc<Spec>) {
        let mut specs = self.specs();
        match specs.get_mut(instance) {
            Some(known) => known.clone_from(spec),
            None => drop(specs.insert(instance.clone(), Arc::clone(spec))),
        }
    }

    pub fn rename(&self, from: &InstanceKey, to: &InstanceKey) {
        let mut specs = self.specs();
        if let Some(spec) = specs.remove(from) {
            specs.insert(to.clone(), spec);
        }
        self.outputs.rename(from, to);
        self.files.rename(from, to);
    }

    /// Forgets an instance that is not registered, and removes its stored outputs and files.
    pub fn forget(&self, instance: &InstanceKey) {
        self.specs().remove(instance);
        self.outputs.remove(instance);
        self.files.remove(instance);
    }

    fn get(&self, instance: &InstanceKey) -> Option<Arc<Spec>> {
        self.specs().get(instance).cloned()
    }
}

/// The reads in progress.
pub struct LogReads {
    shared: Arc<AgentContext>,
    running: HashMap<String, AbortHandle>,
    send: mpsc::UnboundedSender<LogChunk>,
    done: mpsc::UnboundedReceiver<LogChunk>,
}

impl LogReads {
    pub fn new(shared: Arc<AgentContext>) -> LogReads {
        // Bounded by the number of reads: each sends one answer.
        let (send, done) = mpsc::unbounded_channel();
        LogReads { shared, running: HashMap::new(), send, done }
    }

    /// Starts a read.
    pub fn begin(&mut self, read: LogRead) {
        let id = read.id.clone();
        if self.running.len() >= MAX_READS {
            let message = format!("the agent serves {MAX_READS} reads of logs: try again later");
            let error = Some(LogError { reason: LogErrorReason::Busy, message });
            let _ = self.send.send(LogChunk { id, error, ..LogChunk::default() });
            return;
        }
        let (shared, send) = (Arc::clone(&self.shared), self.send.clone());
        let task = tokio::spawn(async move {
            let id = read.id.clone();
            let chunk = match wait_for_lines(&shared, read).await {
                Ok(chunk) => LogChunk { id, ..chunk },
                Err(error) => LogChunk { id, error: Some(error.into()), ..LogChunk::default() },
            };
            let _ = send.send(chunk);
        });
        self.running.insert(id, task.abort_handle());
    }

    pub fn cancel(&mut self, id: &str) {
        if let Some(task) = self.running.remove(id) {
            task.abort();
        }
    }

    pub fn cancel_all(&mut self) {
        self.running.drain().for_each(|(_, task)| task.abort());
    }

    /// The next answer of a read that was not cancelled.
    pub async fn next(&mut self) -> LogChunk {
        loop {
            match self.done.recv().await {
                Some(chunk) if chunk.error.is_some() || self.running.remove(&chunk.id).is_some() => {
                    self.running.remove(&chunk.id);
                    return chunk;
                }
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
    }
}

/// Reason why a log cannot be read.
#[derive(Debug, thiserror::Error)]
enum LogReadError {
    #[error("the agent does not know this process")]
    Unknown,
    #[error("the process has no log_path, and no output of it is stored")]
    NoLog,
    #[error("{} does not exist yet", path.display())]
    Missing { path: PathBuf },
    #[error("the cursor is not one of this agent")]
    Cursor,
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error(transparent)]
    File(#[from] UserFileError),
    #[error("cannot mask the secrets of the stored output: {0}")]
    Secrets(#[source] UserFileError),
    #[error("cannot read the log: {0}")]
    Read(#[from] std::io::Error),
}

impl From<LogReadError> for LogError {
    fn from(error: LogReadError) -> LogError {
        let reason = match &error {
            LogReadError::Unknown => LogErrorReason::UnknownProcess,
            LogReadError::NoLog | LogReadError::Missing { .. } => LogErrorReason::NoLog,
            LogReadError::File(_) | LogReadError::Account(_) | LogReadError::Secrets(_) => {
                LogErrorReason::Unreadable
            }
            LogReadError::Cursor | LogReadError::Read(_) => LogErrorReason::Other,
        };
        LogError { reason, message: error.to_string() }
    }
}

/// Positions in both parts of a log, and where a read that does not wait ends.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Cursor {
    #[serde(default)]
    runs: Option<LogPosition>,
    #[serde(default)]
    files: Option<LogPosition>,
    /// The end of the log file when the read began: a process that writes faster than it is read does not prolong it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until: Option<LogPosition>,
}

/// Start of a read.
#[derive(Clone)]
enum ReadStart {
    Tail(Option<u64>, Option<i64>),
    Cursor(Cursor),
}

impl ReadStart {
    /// Device and inode of the oldest log file that the read needs; `None`: all files. A follow opens only the newest ones.
    fn oldest_file(&self) -> Option<(u64, u64)> {
        match self {
            ReadStart::Cursor(Cursor {
                files: Some(LogPosition(SegmentId::File(device, inode), _)), ..
            }) => Some((*device, *inode)),
            ReadStart::Cursor(_) | ReadStart::Tail(..) => None,
        }
    }
}

/// Reads the next lines, and waits for them if the read may.
async fn wait_for_lines(shared: &AgentContext, read: LogRead) -> Result<LogChunk, LogReadError> {
    let follows = read.wait_ms > 0;
    let until = tokio::time::Instant::now() + Duration::from_millis(read.wait_ms).min(MAX_WAIT);
    let mut from = match read.from {
        LogReadFrom::Tail { lines, since } => ReadStart::Tail(lines, since),
        LogReadFrom::Cursor(text) => {
            ReadStart::Cursor(serde_json::from_str(&text).map_err(|_| LogReadError::Cursor)?)
        }
    };
    let mut poll = FIRST_POLL;
    loop {
        let (lines, cursor) =
            read_once(shared, &read.instance, from, read.max_bytes.min(MAX_BYTES), follows).await?;
        if !lines.text.is_empty() || tokio::time::Instant::now() + poll > until {
            let cursor = serde_json::to_string(&cursor).unwrap_or_default();
            return Ok(LogChunk { cursor, ..lines });
        }
        from = ReadStart::Cursor(cursor);
        tokio::time::sleep(poll).await;
        poll = (poll * 2).min(LAST_POLL);
    }
}

/// Opens the log and reads the next lines, on a worker thread.
async fn read_once(
    shared: &AgentContext,
    instance: &InstanceKey,
    from: ReadStart,
    max_bytes: usize,
    follows: bool,
) -> Result<(LogChunk, Cursor), LogReadError> {
    let spec = shared.logs.get(instance).ok_or(LogReadError::Unknown)?;
    let rights = shared.rights_of(&spec)?;
    let stored: Vec<(String, File)> = shared.logs.outputs.open_all(instance);
    // Without its secrets no stored output is shown.
    let secrets = match stored.is_empty() {
        true => SecretTexts::default(),
        false => secret_texts(&spec, &rights).await.map_err(LogReadError::Secrets)?,
    };
    let name = instance.name.to_string();
    let log = shared.log_of(instance, &spec)?;
    let rights = log.as_ref().map_or(rights, |log| log.rights.clone());
    let work = move |rights: &Rights| {
        let path = log.map(|log| log.path);
        let is_resident = spec.monitor.auto_type == AutoType::Resident;
        let files = match &path {
            Some(path) => rights.open_log_files(path, &name, from.oldest_file())?,
            None => Vec::new(),
        };
        let files: Result<Vec<Segment>, _> = files.into_iter().rev().map(Segment::of_file).collect();
        let stored: Result<Vec<Segment>, _> =
            stored.into_iter().map(|(id, file)| Segment::of_run(id, file)).collect();
        let (runs, files) = (LogPart::of(stored?), LogPart::of(files?));
        match path {
            None if runs.is_empty() && (!follows || is_resident) => return Err(LogReadError::NoLog),
            Some(path) if runs.is_empty() && files.is_empty() && !follows => {
                return Err(LogReadError::Missing { path });
            }
            _ => {}
        }
        read_parts(&runs, &files, from, max_bytes, follows, &secrets)
    };
    rights.run(FileWork::Logs, "read the log", work).await
}

fn read_parts(
    runs: &LogPart,
    files: &LogPart,
    from: ReadStart,
    max_bytes: usize,
    follows: bool,
    secrets: &SecretTexts,
) -> Result<(LogChunk, Cursor), LogReadError> {
    let mut cursor = match from {
        ReadStart::Cursor(cursor) => cursor,
        ReadStart::Tail(lines, since) => {
            let [in_runs, in_files] = start(runs, files, lines, since)?;
            let until = if follows { None } else { files.end() };
            Cursor { runs: in_runs, files: in_files, until }
        }
    };
    let mut lines = runs.read_after(cursor.runs.as_ref(), max_bytes, follows)?;
    if lines.is_none() && (follows || !files.has_reached(cursor.files.as_ref(), cursor.until.as_ref())) {
        lines = files.read_after(cursor.files.as_ref(), max_bytes, follows)?;
    }
    let Some(lines) = lines else { return Ok((LogChunk { end: true, ..LogChunk::default() }, cursor)) };
    let run = match &lines.id {
        SegmentId::File(..) => None,
        SegmentId::Run(id) => Some(LoggedRun { started: run_start(id), first: lines.first }),
    };
    *(if run.is_some() { &mut cursor.runs } else { &mut cursor.files }) = Some(lines.next);
    let text = match run {
        // Secrets are masked in captured output, and not in a log, which the process writes itself.
        Some(_) => {
            let mut text = secrets.mask_lines(&lines.bytes);
            // The next run begins on a line of its own.
            if !text.ends_with('\n') {
                text.push('\n');
            }
            text
        }
        None => String::from_utf8_lossy(&lines.bytes).into_owned(),
    };
    Ok((LogChunk { text, run, ..LogChunk::default() }, cursor))
}

/// The start of a run, which its id begins with, in milliseconds since 1970.
fn run_start(id: &str) -> i64 {
    id.split('-').next().and_then(|text| text.parse().ok()).unwrap_or(0)
}
