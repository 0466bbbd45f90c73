//! Event stream: server-sent events from the log of the status board.
//!
//! A reader has no queue: it holds the number of the last event it sent, and reads later entries from the board. A
//! reader slower than the retained log is disconnected and resumes with `Last-Event-ID`. The server's write timeout
//! disconnects a reader that stops reading.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::parameter;
use super::reply::{ErrorResponse, error_response, typed_response};
use super::viewer::Viewer;
use crate::control::status::StatusBoard;

/// Interval of comment lines that keep the connection alive.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum entries per chunk.
const MAX_BATCH: usize = 100;

const MISSED: &str = "event: missed\ndata: {\"kind\":\"missed\"}\n\n";

struct EventReader {
    board: Arc<StatusBoard>,
    last: u64,
    updates: watch::Receiver<Option<u64>>,
    begun: bool,
    /// The reader resumes from a number that this board never assigned.
    is_foreign: bool,
    viewer: Viewer,
    _permits: Vec<OwnedSemaphorePermit>,
}

/// Streams events after `Last-Event-ID` or `?after=`; without either, new events only.
pub fn stream(
    board: &Arc<StatusBoard>,
    permits: Vec<OwnedSemaphorePermit>,
    parts: &Parts,
    viewer: &Viewer,
) -> Result<Response, ErrorResponse> {
    let header = parts.headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let last = match header.or(parameter(parts, "after")) {
        None | Some("") => board.status().number,
        Some(text) => text.trim().parse().map_err(|_| {
            error_response(StatusCode::BAD_REQUEST, "Last-Event-ID and after must be the number of an event")
        })?,
    };
    let updates = board.subscribe();
    // A number above the newest comes from another controller, or from before a clock correction. Only later events are
    // certain to be new to the reader.
    let newest = board.status().number;
    let is_foreign = last > newest;
    let last: u64 = last.min(newest);
    let reader = EventReader {
        board: Arc::clone(board),
        last,
        updates,
        begun: false,
        is_foreign,
        viewer: viewer.clone(),
        _permits: permits,
    };
    let pieces = stream::unfold(reader, |mut reader| async move {
        let piece = reader.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(piece)), reader))
    });
    Ok(typed_response(Body::from_stream(pieces), "text/event-stream"))
}

impl EventReader {
    /// The next chunk. `None`: the board is closed, or the reader missed entries.
    async fn next(&mut self) -> Option<String> {
        let mut text = String::new();
        let first = !std::mem::replace(&mut self.begun, true);
        if first {
            text.push_str("retry: 2000\n\n");
        }
        if std::mem::take(&mut self.is_foreign) {
            text.push_str(MISSED);
        }
        loop {
            let is_over = self.updates.borrow_and_update().is_none();
            let later = self.board.entries_after(self.last, MAX_BATCH);
            match (later.missed, first) {
                (true, false) => return None,
                // A reader that starts at 0 gets the whole retained log. A late one gets `missed`, then the retained
                // log.
                (true, true) if self.last > 0 => {
                    text.push_str(MISSED);
                }
                (true, true) | (false, _) => {}
            }
            if later.missed && later.notes.is_empty() {
                self.last = self.board.status().number;
            }
            for entry in &later.notes {
                self.last = entry.number;
                let Some(event) = self.viewer.event(entry) else { continue };
                let json = serde_json::to_string(&event).unwrap_or_default();
                let _ = write!(text, "id: {}\ndata: {json}\n\n", entry.number);
            }
            if !text.is_empty() {
                return Some(text);
            }
            if is_over {
                return None;
            }
            match tokio::time::timeout(HEARTBEAT_INTERVAL, self.updates.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return None,
                Err(_) => return Some(": keep-alive\n\n".to_owned()),
            }
        }
    }
}
