//! Change stream of the gateway: all changes after a number, until the reader is dropped.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::mpsc::Sender;

use super::process::observed_instance;
use super::secret_keys::SecretKeyRing;
use super::{TIME, read};
use crate::backend::{BackendError, ChangeEvent};
use crate::contract::ProcessChange;
use crate::error_chain::chain;
use crate::http::ApiClient;

/// Reason why the stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("the stream is not valid UTF-8")]
    NotUtf8,
    #[error("the gateway closed the stream")]
    Closed,
    #[error("no heartbeat from the gateway")]
    Silent,
    #[error("the gateway compacted older changes")]
    Compacted,
    /// The gateway's own text.
    #[error("{0}")]
    Ended(String),
}

/// Reads the stream until the receiver is dropped.
pub(super) async fn feed(
    calls: ApiClient,
    secret_keys: SecretKeyRing,
    after: u64,
    tell: Sender<ChangeEvent>,
) {
    let over = tokio::select! {
        over = pushed(&calls, &secret_keys, after, &tell) => over,
        () = tell.closed() => return,
    };
    if let Err(error) = over {
        let _ = tell.send(ChangeEvent::Over(chain(&error))).await;
    }
}

/// Reads until the stream ends with an error, or the receiver is dropped.
async fn pushed(
    calls: &ApiClient,
    secret_keys: &SecretKeyRing,
    after: u64,
    tell: &Sender<ChangeEvent>,
) -> Result<(), StreamError> {
    let path = format!("/api/abide/v1/processes/watch?numbers=1&digests=keyed&after={after}");
    let mut lines = calls.lines(&path, TIME).await.map_err(BackendError::from)?;
    // Every heartbeat is a line, possibly empty.
    let silence = Duration::from_secs(3 * crate::agent_protocol::HEARTBEAT_SECS);
    loop {
        let text = tokio::time::timeout(silence, lines.next()).await.map_err(|_| StreamError::Silent)?;
        let text = text.map_err(BackendError::from)?;
        if text.is_empty() {
            return Err(StreamError::Closed);
        }
        if let Some(event) = understood(&text, secret_keys)?
            && tell.send(event).await.is_err()
        {
            return Ok(());
        }
    }
}

/// Parses lines into one event. `Err`: the stream can no longer be trusted.
fn understood(text: &[u8], secret_keys: &SecretKeyRing) -> Result<Option<ChangeEvent>, StreamError> {
    let text = std::str::from_utf8(text).map_err(|_| StreamError::NotUtf8)?;
    let (mut last, mut rows, mut specs) = (None, Vec::new(), HashMap::new());
    for line in text.lines().filter(|line| !line.is_empty()) {
        let line: ProcessChange<&RawValue> = read(line)?;
        let Some(number) = line.number else {
            return Err(line.error.map_or(StreamError::Compacted, StreamError::Ended));
        };
        last = Some(number);
        secret_keys.add(&line.secret_keys);
        if let Some(key) = line.instance {
            let seen = |row| observed_instance(&row, secret_keys, &mut specs);
            let seen = line.process.flatten().map(seen).transpose()?;
            rows.push((key, seen));
        }
    }
    Ok(last.map(|number| ChangeEvent::Rows { number, rows }))
}
