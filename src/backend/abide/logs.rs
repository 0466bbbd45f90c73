//! Logs: a log stream of the gateway.

use super::{TIME, escaped};
use crate::backend::BackendError;
use crate::http::{ApiClient, LineStream};
use crate::model::{InstanceKey, Time};

/// A request for the log of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRequest {
    pub instance: InstanceKey,
    pub tail: Option<u64>,
    pub since: Option<Time>,
    /// Continues after a line of an earlier stream.
    pub cursor: Option<String>,
    pub follow: bool,
}

impl LogRequest {
    /// Opens the stream: one [`LogLine`](crate::contract::LogLine) per line.
    pub async fn open(&self, calls: &ApiClient) -> Result<LineStream, BackendError> {
        let InstanceKey { host, namespace, name } = &self.instance;
        let mut path = format!(
            "/api/abide/v1/logs?namespace={}&name={}&host={}",
            escaped(namespace.as_str()),
            escaped(name.as_str()),
            escaped(&host.to_string())
        );
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                path.push_str(&format!("&{name}={}", escaped(&value)));
            }
        };
        add("tail", self.tail.map(|lines| lines.to_string()));
        add("since", self.since.map(|since| since.to_string()));
        add("cursor", self.cursor.clone());
        add("follow", self.follow.then(|| "1".to_owned()));
        calls.lines(&path, TIME).await.map_err(BackendError::from)
    }
}
