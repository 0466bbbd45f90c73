//! Change stream of the gateway: all changes after a number, until the reader is dropped.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::mpsc::Sender;

use super::process::observed_instance;
use super::{TIME, read};
use crate::backend::{BackendError, ChangeEvent};
use crate::contract::ProcessChange;
use crate::http::ApiClient;

/// Reads the stream until the receiver is dropped.
pub(super) async fn feed(calls: ApiClient, after: u64, tell: Sender<ChangeEvent>) {
    let over = tokio::select! {
        over = pushed(&calls, after, &tell) => over,
        () = tell.closed() => return,
    };
    let _ = tell.send(ChangeEvent::Over(over)).await;
}

/// Reads until the end, and returns the cause.
async fn pushed(calls: &ApiClient, after: u64, tell: &Sender<ChangeEvent>) -> String {
    let path = format!("/api/abide/v1/processes/watch?numbers=1&after={after}");
    let mut lines = match calls.lines(&path, TIME).await {
        Ok(lines) => lines,
        Err(broken) => return BackendError::from(broken).to_string(),
    };
    // Every heartbeat is a line, possibly empty.
    let silence = Duration::from_secs(3 * crate::agent_protocol::HEARTBEAT_SECS);
    loop {
        let text = match tokio::time::timeout(silence, lines.next()).await {
            Ok(Ok(text)) if text.is_empty() => return "the gateway closed the stream".to_owned(),
            Ok(Ok(text)) => text,
            Ok(Err(broken)) => return BackendError::from(broken).to_string(),
            Err(_) => return "no heartbeat from the gateway".to_owned(),
        };
        let told = match understood(&text) {
            Ok(told) => told,
            Err(why) => return why,
        };
        if let Some(told) = told
            && tell.send(told).await.is_err()
        {
            return String::new();
        }
    }
}

/// Parses lines into one event. `Err`: the stream can no longer be trusted.
fn understood(text: &[u8]) -> Result<Option<ChangeEvent>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "the stream is not valid UTF-8".to_owned())?;
    let (mut last, mut rows, mut specs) = (None, Vec::new(), HashMap::new());
    for line in text.lines().filter(|line| !line.is_empty()) {
        let line: ProcessChange<&RawValue> = read(line).map_err(|fault| fault.to_string())?;
        let Some(number) = line.number else {
            return Err(line.error.unwrap_or_else(|| "the gateway compacted older changes".to_owned()));
        };
        last = Some(number);
        if let Some(key) = line.instance {
            let seen = line.process.flatten().map(|row| observed_instance(&row, &mut specs)).transpose();
            rows.push((key, seen.map_err(|fault| fault.to_string())?));
        }
    }
    Ok(last.map(|number| ChangeEvent::Rows { number, rows }))
}
