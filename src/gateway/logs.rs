//! Log streams: reads of a process's log by the agent of its host, one chunk at a time.
//!
//! The gateway requests the next chunk when the caller has taken the last one, so that a stream holds at most one chunk in
//! memory. A cursor names the position, and the stream continues with it after the agent reconnects. When the caller hangs
//! up, the agent's read is cancelled. The numbers of streams per app and in total are bounded.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::request::Parts;
use futures_util::stream;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::agent_sessions::AgentStreamId;
use super::decode::{parameter, parse_body};
use super::processes::CurrentGrant;
use super::{ApiError, Gateway};
use crate::agent_protocol::{
    HEARTBEAT_SECS, LogChunk, LogErrorReason, LogRead, LogReadFrom, LoggedRun, ToAgent,
};
use crate::clock;
use crate::contract::{LogLine, compact};
use crate::gse::response::Envelope;
use crate::ids::fresh_id;
use crate::model::{HostKey, InstanceKey, Time};
use crate::store::Store;

/// Maximum streams of one app, and of all apps.
const MAX_STREAMS_OF_APP: usize = 256;
const MAX_STREAMS: usize = 1024;
/// Bytes of one chunk.
const CHUNK_BYTES: usize = 128 << 10;
/// Maximum bytes of an agent's answer. Replaced bytes are three bytes long each.
const MAX_ANSWER_BYTES: usize = 4 * CHUNK_BYTES;
/// Time for which an agent waits for new lines of a followed log.
const FOLLOW_WAIT: Duration = Duration::from_secs(10);
/// Time of an agent for an answer, in addition to its wait.
const READ_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval between two checks for a missing agent.
const AGENT_POLL: Duration = Duration::from_millis(500);

/// A request for a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogQuery {
    pub instance: InstanceKey,
    /// The last lines only.
    pub tail: Option<u64>,
    /// Lines since this time only.
    pub since: Option<Time>,
    /// After a line of an earlier stream.
    pub cursor: Option<String>,
    pub follow: bool,
}

impl LogQuery {
    /// The query of a request.
    pub(super) fn read(parts: &Parts) -> Result<LogQuery, ApiError> {
        let get = |name: &str| parameter(parts, name);
        let wrong = |name: &str, form: &str| ApiError::BadRequest(format!("{name} is missing or not {form}"));
        let instance = InstanceKey {
            namespace: get("namespace")
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| wrong("namespace", "a name"))?,
            name: get("name").and_then(|text| text.parse().ok()).ok_or_else(|| wrong("name", "a name"))?,
            host: get("host")
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| wrong("host", "CLOUD:IP or @AGENT_ID"))?,
        };
        let tail = get("tail").map(|text| text.parse().map_err(|_| wrong("tail", "a number"))).transpose()?;
        let since = match get("since") {
            Some(text) => Some(clock::read(&text).ok_or_else(|| wrong("since", "a time in RFC 3339"))?),
            None => None,
        };
        let cursor = get("cursor").filter(|cursor| !cursor.is_empty());
        let follow = matches!(get("follow").as_deref(), Some("1" | "true"));
        Ok(LogQuery { instance, tail, since, cursor, follow })
    }
}

/// The open log streams, and the reads that wait for an answer.
#[derive(Default)]
pub struct LogStreams {
    waiting: Mutex<HashMap<String, WaitingRead>>,
    by_app: Mutex<HashMap<String, usize>>,
}

struct WaitingRead {
    host: HostKey,
    answer: oneshot::Sender<LogChunk>,
}

impl LogStreams {
    fn waiting(&self) -> MutexGuard<'_, HashMap<String, WaitingRead>> {
        self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn by_app(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.by_app.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Counts a stream of an app, within the limits.
    fn open(&self, app: &str) -> Result<(), ApiError> {
        let mut open = self.by_app();
        let (own, all) = (open.get(app).copied().unwrap_or(0), open.values().sum::<usize>());
        if own >= MAX_STREAMS_OF_APP || all >= MAX_STREAMS {
            let message = format!(
                "too many open log streams: {own} of app {app:?} (at most {MAX_STREAMS_OF_APP}), {all} in total (at most \
                 {MAX_STREAMS})"
            );
            return Err(ApiError::Busy(message));
        }
        open.insert(app.to_owned(), own + 1);
        Ok(())
    }

    fn close(&self, app: &str) {
        let mut open = self.by_app();
        if let Some(count) = open.get_mut(app) {
            *count -= 1;
            if *count == 0 {
                open.remove(app);
            }
        }
    }

    /// Number of open streams.
    pub fn count(&self) -> usize {
        self.by_app().values().sum()
    }
}

impl<S: Store> Gateway<S> {
    /// Streams a log, one JSON object per line. An empty line is a heartbeat.
    pub fn logs(self: &Arc<Self>, app: &str, query: LogQuery, grant: CurrentGrant) -> Result<Body, ApiError> {
        self.log_streams.open(app)?;
        let LogQuery { instance, tail, since, cursor, follow } = query;
        let from = match cursor {
            Some(cursor) => LogReadFrom::Cursor(cursor),
            None => LogReadFrom::Tail { lines: tail, since: since.map(|since| since.0) },
        };
        let log = LogStream {
            gateway: Arc::clone(self),
            app: app.to_owned(),
            grant,
            instance,
            from,
            follow,
            read: None,
            is_missing: false,
            has_ended: false,
        };
        Ok(Body::from_stream(stream::unfold(log, |mut log| async move {
            let line = log.next().await?;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), log))
        })))
    }

    /// Takes an agent's answer to a read. Answers of cancelled reads, and about hosts outside the session, are ignored.
    pub fn receive_log_chunk(&self, hosts: &[HostKey], bytes: &[u8]) -> Result<Envelope<Value>, ApiError> {
        let chunk: LogChunk = parse_body(bytes)?;
        if chunk.text.len() > MAX_ANSWER_BYTES || chunk.cursor.len() > 4096 {
            return Err(ApiError::BadRequest("the part of a log is too large".to_owned()));
        }
        let mut waiting = self.log_streams.waiting();
        if waiting.get(&chunk.id).is_some_and(|read| hosts.contains(&read.host))
            && let Some(read) = waiting.remove(&chunk.id)
        {
            let _ = read.answer.send(chunk);
        }
        Ok(Envelope::ok(true.into()))
    }
}

/// One log stream. Dropping it cancels its read.
struct LogStream<S: Store> {
    gateway: Arc<Gateway<S>>,
    app: String,
    /// Read for each part of the log, as the owner of the instance: both may change while the stream is open.
    grant: CurrentGrant,
    instance: InstanceKey,
    from: LogReadFrom,
    follow: bool,
    /// The read in progress.
    read: Option<OpenRead>,
    /// The caller knows that the agent is not connected.
    is_missing: bool,
    has_ended: bool,
}

struct OpenRead {
    id: String,
    stream: AgentStreamId,
    since: Instant,
    answer: oneshot::Receiver<LogChunk>,
}

impl<S: Store> LogStream<S> {
    /// The next line; `None`: the stream has ended.
    async fn next(&mut self) -> Option<String> {
        if self.has_ended {
            return None;
        }
        let Some(read) = &mut self.read else { return Some(self.begin_read().await) };
        let beat = Duration::from_secs(HEARTBEAT_SECS);
        match tokio::time::timeout(beat, &mut read.answer).await {
            Ok(Ok(chunk)) => {
                self.read = None;
                match self.is_granted().await {
                    true => Some(self.line(chunk)),
                    false => {
                        let message = "the caller may no longer read this log: its grant or the owner of the process changed";
                        Some(self.fail("revoked", message.to_owned()))
                    }
                }
            }
            // Neither an answer nor an error: the gateway is closing.
            Ok(Err(_)) => {
                self.read = None;
                Some(self.fail("other", "the gateway is stopping".to_owned()))
            }
            Err(_) => {
                let allowed = READ_TIMEOUT + if self.follow { FOLLOW_WAIT } else { Duration::ZERO };
                let is_late = read.since.elapsed() > allowed;
                let now = self.gateway.hosts.log_stream(&self.instance.host).map(|(stream, _)| stream);
                let is_lost = now.as_ref() != Some(&read.stream);
                if is_late && !self.follow {
                    let message = format!("the agent of {} gave no answer", self.instance.host);
                    return Some(self.fail("other", message));
                }
                if is_late || is_lost {
                    self.cancel();
                }
                Some("\n".to_owned())
            }
        }
    }

    /// Whether the caller may still read the instance. An owner that cannot be read counts as another one.
    async fn is_granted(&self) -> bool {
        let Some(grant) = (self.grant)() else { return false };
        let owner = match grant.is_bound_to_owners() {
            true => self.gateway.owner_of(&self.instance).await,
            false => Ok(None),
        };
        owner.is_ok_and(|owner| grant.may_see(&self.instance, owner.as_deref()))
    }

    /// Requests the next chunk. Returns a line for the caller.
    async fn begin_read(&mut self) -> String {
        let host = &self.instance.host;
        let stream = match self.gateway.hosts.log_stream(host) {
            Some((stream, true)) => stream,
            Some((_, false)) => {
                let version = self.gateway.hosts.agent_version(host).unwrap_or_default();
                let message = format!("the agent of {host} ({version}) does not serve logs: upgrade it");
                return self.fail("old_agent", message);
            }
            None => return self.wait_for_agent().await,
        };
        let (id, wait) = (fresh_id(), if self.follow { FOLLOW_WAIT } else { Duration::ZERO });
        let (send, answer) = oneshot::channel();
        let waiting = WaitingRead { host: host.clone(), answer: send };
        self.gateway.log_streams.waiting().insert(id.clone(), waiting);
        let read = LogRead {
            id: id.clone(),
            instance: self.instance.clone(),
            from: self.from.clone(),
            max_bytes: CHUNK_BYTES,
            wait_ms: u64::try_from(wait.as_millis()).unwrap_or(0),
        };
        self.gateway.hosts.send(host, ToAgent::ReadLog(Box::new(read)));
        self.read = Some(OpenRead { id, stream, since: Instant::now(), answer });
        match std::mem::take(&mut self.is_missing) {
            true => compact(&LogLine {
                notice: Some(format!("the agent of {host} is connected again")),
                ..LogLine::default()
            }),
            false => "\n".to_owned(),
        }
    }

    async fn wait_for_agent(&mut self) -> String {
        let message = format!("the agent of {} is not connected", self.instance.host);
        if !self.follow {
            return self.fail("no_agent", message);
        }
        if !std::mem::replace(&mut self.is_missing, true) {
            return compact(&LogLine { notice: Some(message), ..LogLine::default() });
        }
        let until = Instant::now() + Duration::from_secs(HEARTBEAT_SECS);
        while Instant::now() < until && self.gateway.hosts.log_stream(&self.instance.host).is_none() {
            tokio::time::sleep(AGENT_POLL).await;
        }
        "\n".to_owned()
    }

    /// The line of an answer.
    fn line(&mut self, chunk: LogChunk) -> String {
        let LogChunk { text, cursor, end, run, error, .. } = chunk;
        if let Some(error) = error {
            let reason = match error.reason {
                LogErrorReason::UnknownProcess => "unknown_process",
                LogErrorReason::NoLog => "no_log",
                LogErrorReason::Unreadable => "unreadable",
                LogErrorReason::Busy => "busy",
                LogErrorReason::Other => "other",
            };
            return self.fail(reason, error.message);
        }
        self.from = LogReadFrom::Cursor(cursor.clone());
        self.has_ended = end && !self.follow;
        if text.is_empty() && !self.has_ended {
            return "\n".to_owned();
        }
        let begins = |run: LoggedRun| run.first.then(|| Time(run.started).to_string());
        compact(&LogLine {
            text: Some(text).filter(|text| !text.is_empty()),
            cursor: Some(cursor),
            run: run.and_then(begins),
            end: self.has_ended,
            ..LogLine::default()
        })
    }

    fn fail(&mut self, reason: &str, message: String) -> String {
        self.has_ended = true;
        let (error, reason) = (Some(message), Some(reason.to_owned()));
        compact(&LogLine { error, reason, ..LogLine::default() })
    }

    /// Ends the read in progress, here and at the agent.
    fn cancel(&mut self) {
        let Some(read) = self.read.take() else { return };
        if self.gateway.log_streams.waiting().remove(&read.id).is_some() {
            self.gateway.hosts.send(&self.instance.host, ToAgent::CancelLog { id: read.id });
        }
    }
}

impl<S: Store> Drop for LogStream<S> {
    fn drop(&mut self) {
        self.cancel();
        self.gateway.log_streams.close(&self.app);
    }
}
