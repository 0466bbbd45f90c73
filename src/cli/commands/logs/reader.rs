//! Log reader: one log stream of the gateway, reopened after its last line when the connection breaks.

use std::time::Duration;

use tokio::sync::mpsc;

use super::LogsArgs;
use crate::agent_protocol::HEARTBEAT_SECS;
use crate::backend::{Abide, BackendError, LogRequest};
use crate::cli::Exit;
use crate::contract::LogLine;
use crate::http::ApiClient;
use crate::model::InstanceKey;
use crate::retry_delay::RetryDelay;

/// Delays between attempts to continue a followed log.
const BACKOFF: RetryDelay =
    RetryDelay::doubling(Duration::from_millis(200), Duration::from_secs(5)).with_jitter(0.5);
/// A gateway that is silent for this long counts as gone.
const STREAM_TIMEOUT: Duration = Duration::from_secs(3 * HEARTBEAT_SECS + 1);

/// News of one log.
pub struct LogUpdate {
    /// Index of the instance.
    pub nth: usize,
    pub event: LogEvent,
}

pub enum LogEvent {
    Text(String),
    /// The stored output of a run begins: its start time.
    Run(String),
    Notice(String),
    Failed {
        exit: Exit,
        message: String,
    },
}

pub struct LogReader {
    nth: usize,
    calls: ApiClient,
    request: LogRequest,
    is_complaining: bool,
}

/// Reason why a stream ended early.
enum StreamEnd {
    /// The reader is done.
    Complete,
    /// The log cannot be read.
    Failed {
        reason: String,
        message: String,
    },
    Lost(BackendError),
}

impl LogReader {
    pub fn new(abide: &Abide, nth: usize, key: &InstanceKey, args: &LogsArgs) -> LogReader {
        let request = LogRequest {
            instance: key.clone(),
            tail: args.tail,
            since: args.since,
            cursor: None,
            follow: args.follow,
        };
        LogReader { nth, calls: abide.calls().clone(), request, is_complaining: false }
    }

    /// Reads until the log ends, cannot be read, or the receiver is gone.
    pub async fn run(mut self, updates: mpsc::Sender<LogUpdate>) {
        let mut wait = BACKOFF.first();
        loop {
            let event = match self.read(&updates, &mut wait).await {
                StreamEnd::Complete => return,
                StreamEnd::Failed { reason, .. } if self.request.follow && reason == "busy" => None,
                StreamEnd::Failed { message, .. } => Some(LogEvent::Failed { exit: Exit::Failed, message }),
                StreamEnd::Lost(error) if error.is_forbidden() => {
                    Some(LogEvent::Failed { exit: Exit::Forbidden, message: error.to_string() })
                }
                StreamEnd::Lost(BackendError::Refused(refusal)) => {
                    Some(LogEvent::Failed { exit: Exit::Failed, message: refusal.to_string() })
                }
                StreamEnd::Lost(error) if self.request.follow => {
                    let notice = format!("{error}; retrying");
                    match std::mem::replace(&mut self.is_complaining, true) {
                        true => None,
                        false => Some(LogEvent::Notice(notice)),
                    }
                }
                StreamEnd::Lost(error) => {
                    let (exit, message) = (Exit::Unreachable, error.to_string());
                    Some(LogEvent::Failed { exit, message })
                }
            };
            let is_final = matches!(event, Some(LogEvent::Failed { .. }));
            if let Some(event) = event
                && updates.send(LogUpdate { nth: self.nth, event }).await.is_err()
            {
                return;
            }
            if is_final {
                return;
            }
            tokio::time::sleep(BACKOFF.jittered(wait, fastrand::f64())).await;
            wait = BACKOFF.next(wait);
        }
    }

    /// Reads one stream to its end.
    async fn read(&mut self, updates: &mpsc::Sender<LogUpdate>, wait: &mut Duration) -> StreamEnd {
        let mut lines = match self.request.open(&self.calls).await {
            Ok(lines) => lines,
            Err(error) => return StreamEnd::Lost(error),
        };
        loop {
            let text = match tokio::time::timeout(STREAM_TIMEOUT, lines.next()).await {
                Err(_) => return StreamEnd::Lost(BackendError::NoAnswer),
                Ok(Err(error)) => return StreamEnd::Lost(error.into()),
                Ok(Ok(text)) if text.is_empty() => return StreamEnd::Lost(BackendError::NoAnswer),
                Ok(Ok(text)) => text,
            };
            (*wait, self.is_complaining) = (BACKOFF.first(), false);
            for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                let Ok(line) = serde_json::from_slice::<LogLine>(line) else {
                    let error = BackendError::invalid_response("the log has an invalid line".to_owned());
                    return StreamEnd::Lost(error);
                };
                if let Some(end) = self.take(line, updates).await {
                    return end;
                }
            }
        }
    }

    async fn take(&mut self, line: LogLine, updates: &mpsc::Sender<LogUpdate>) -> Option<StreamEnd> {
        let LogLine { text, cursor, run, end, notice, error, reason } = line;
        if let Some(message) = error {
            return Some(StreamEnd::Failed { reason: reason.unwrap_or_default(), message });
        }
        let events = [run.map(LogEvent::Run), text.map(LogEvent::Text), notice.map(LogEvent::Notice)];
        for event in events.into_iter().flatten() {
            if updates.send(LogUpdate { nth: self.nth, event }).await.is_err() {
                return Some(StreamEnd::Complete);
            }
        }
        if cursor.is_some() {
            self.request.cursor = cursor;
        }
        end.then_some(StreamEnd::Complete)
    }
}
