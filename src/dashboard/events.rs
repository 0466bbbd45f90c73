//! What happens, as it happens: server-sent events, read off the board's notes.
//!
//! A reader keeps no queue: it knows the last number that it was given, and takes what came after it. One who reads too
//! slowly for what is kept is let go, and comes back with `Last-Event-ID`; one who does not read at all is let go by the
//! server's patience with writes.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::redact::View;
use super::{ErrorResponse, error_response, parameter, typed_response};
use crate::control::status::StatusBoard;

/// So often a line tells that the connection is alive.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
/// Notes of one piece.
const MAX_BATCH: usize = 100;

const MISSED: &str = "event: missed\ndata: {\"kind\":\"missed\"}\n\n";

struct EventReader {
    board: Arc<StatusBoard>,
    last: u64,
    news: watch::Receiver<Option<u64>>,
    begun: bool,
    /// He knows a number that is not one of ours.
    is_foreign: bool,
    view: View,
    _place: OwnedSemaphorePermit,
}

/// From the event after `Last-Event-ID` (or `?after=`) on; without either, from now on.
pub fn stream(
    board: &Arc<StatusBoard>,
    readers: &Arc<Semaphore>,
    parts: &Parts,
    view: View,
) -> Result<Response, ErrorResponse> {
    let Ok(place) = Arc::clone(readers).try_acquire_owned() else {
        return Err(error_response(StatusCode::SERVICE_UNAVAILABLE, "too many read events: try again later"));
    };
    let header = parts.headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let last = match header.or(parameter(parts, "after")) {
        None | Some("") => board.status().number,
        Some(text) => text.trim().parse().map_err(|_| {
            error_response(StatusCode::BAD_REQUEST, "Last-Event-ID and after are the number of an event")
        })?,
    };
    let news = board.subscribe();
    // A number that was never given, of a controller elsewhere or before a clock was set right: all that is certain is
    // what comes from here on.
    let newest = board.status().number;
    let is_foreign = last > newest;
    let last: u64 = last.min(newest);
    let reader =
        EventReader { board: Arc::clone(board), last, news, begun: false, is_foreign, view, _place: place };
    let pieces = stream::unfold(reader, |mut reader| async move {
        let piece = reader.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(piece)), reader))
    });
    Ok(typed_response(Body::from_stream(pieces), "text/event-stream"))
}

impl EventReader {
    /// The next piece of text. `None`: there will be no more, or too much was missed.
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
            let is_over = self.news.borrow_and_update().is_none();
            let later = self.board.entries_after(self.last, MAX_BATCH);
            match (later.missed, first) {
                (true, false) => return None,
                // Who asks for everything misses nothing; who comes back late is told so, and goes on with what is kept.
                (true, true) if self.last > 0 => {
                    text.push_str(MISSED);
                }
                (true, true) | (false, _) => {}
            }
            if later.missed && later.notes.is_empty() {
                self.last = self.board.status().number;
            }
            for note in &later.notes {
                self.last = note.number;
                let json = match self.view {
                    View::Full => note.json(),
                    View::Redacted => note.redacted().json(),
                };
                let _ = write!(text, "id: {}\ndata: {json}\n\n", note.number);
            }
            if !text.is_empty() {
                return Some(text);
            }
            if is_over {
                return None;
            }
            match tokio::time::timeout(HEARTBEAT_INTERVAL, self.news.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return None,
                Err(_) => return Some(": still here\n\n".to_owned()),
            }
        }
    }
}
