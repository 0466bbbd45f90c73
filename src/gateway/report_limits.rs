//! Agent message limits: a stolen agent token must not fill the gateway's memory or store.
//!
//! A call with too many messages is refused as a whole. A report that is too large, or exceeds the instances of its
//! host, is ignored and logged; the other messages of the call are processed. The result of an operation is always
//! processed, shortened if necessary, because its caller waits for it.

use std::collections::HashMap;

use tracing::warn;

use super::{ApiError, Gateway};
use crate::agent_protocol::{FromAgent, Join, OpResult};
use crate::model::HostKey;
use crate::store::{Store, keys};

/// Maximum messages of one call; an agent sends up to 1000.
pub const MAX_MESSAGES: usize = 10_000;
/// Maximum hosts of one session.
const MAX_HOSTS: usize = 100_000;
/// Maximum bytes of an agent's name, which is part of a key, and of its version.
const MAX_NAME: usize = 256;
/// Maximum bytes of one report: up to three specs.
const MAX_REPORT: usize = 4 << 20;
/// Maximum reported instances of one host, far above real hosts.
const MAX_INSTANCES: usize = 100_000;
/// Maximum bytes of a result's message and of its content.
const MAX_MESSAGE: usize = 64 << 10;
const MAX_CONTENT: usize = 1 << 20;

pub fn check_join(join: &Join) -> Result<(), ApiError> {
    let refused = match () {
        () if join.hosts.len() > MAX_HOSTS => {
            format!("{} hosts in one session: at most {MAX_HOSTS} are allowed", join.hosts.len())
        }
        () if join.agent.len() > MAX_NAME || join.version.len() > MAX_NAME => {
            format!("the name or version of the agent is longer than {MAX_NAME} bytes")
        }
        () => return Ok(()),
    };
    warn!(hosts = join.hosts.len(), why = %refused, "agent refused");
    Err(ApiError::BadRequest(refused))
}

pub fn check_messages(agent: &str, messages: &[FromAgent]) -> Result<(), ApiError> {
    if messages.len() <= MAX_MESSAGES {
        return Ok(());
    }
    let refused = format!("{} messages in one call: at most {MAX_MESSAGES} are allowed", messages.len());
    warn!(agent, why = %refused, "messages of an agent refused");
    Err(ApiError::BadRequest(refused))
}

/// The message and content of a result, within the limits.
pub fn shortened(result: &OpResult) -> (String, Option<serde_json::Value>) {
    let end = result.message.floor_char_boundary(MAX_MESSAGE);
    let mut message = result.message[..end].to_owned();
    let size = result.content.as_ref().map_or(0, |content| content.to_string().len());
    if end == result.message.len() && size <= MAX_CONTENT {
        return (message, result.content.clone());
    }
    warn!(op_id = %result.op_id, message = result.message.len(), content = size, "result of an agent shortened");
    message.push_str(" (shortened by the gateway: the agent's result is too large)");
    (message, result.content.clone().filter(|_| size <= MAX_CONTENT))
}

/// Remaining capacity for reports in one batch.
#[derive(Default)]
pub struct ReportBudget {
    /// Instances of each host, counted when a report names a new one.
    instances: HashMap<HostKey, usize>,
    /// Number of ignored reports, and the reason of the first.
    ignored: usize,
    reason: Option<String>,
}

impl ReportBudget {
    /// Whether a report of this size may be stored. `is_new`: the store has no report of its instance.
    pub async fn admits<S: Store>(
        &mut self,
        gateway: &Gateway<S>,
        host: &HostKey,
        bytes: usize,
        is_new: bool,
    ) -> Result<bool, ApiError> {
        if bytes > MAX_REPORT {
            self.ignore(format!(
                "host {host}: a report has {bytes} bytes, and at most {MAX_REPORT} are allowed"
            ));
            return Ok(false);
        }
        if !is_new {
            return Ok(true);
        }
        let count = match self.instances.get(host) {
            Some(count) => *count,
            None => gateway.reported_instances(host).await?,
        };
        let admitted = count < MAX_INSTANCES;
        self.instances.insert(host.clone(), count + usize::from(admitted));
        if !admitted {
            self.ignore(format!(
                "host {host} has {count} instances, and at most {MAX_INSTANCES} are allowed"
            ));
        }
        Ok(admitted)
    }

    fn ignore(&mut self, why: String) {
        self.ignored += 1;
        self.reason.get_or_insert(why);
    }

    /// One line per batch: an agent must not fill the log either.
    pub fn log(&self) {
        if let Some(why) = &self.reason {
            warn!(reports = self.ignored, %why, "reports of an agent ignored");
        }
    }
}

impl<S: Store> Gateway<S> {
    /// Number of instances of a host with a report.
    async fn reported_instances(&self, host: &HostKey) -> Result<usize, ApiError> {
        let end = format!("/{host}");
        let mut count = 0;
        for prefix in [keys::REPORT_PREFIX, keys::FAILED_START_PREFIX] {
            let page = self.store.range(prefix, None, usize::MAX).await?;
            count += page.entries.iter().filter(|entry| entry.key.ends_with(&end)).count();
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_result_is_shortened_and_still_a_result() {
        let result =
            |message: String, content| OpResult { op_id: "1".into(), seq: 1, code: 0, message, content };
        let small = result("ä".repeat(10), Some(serde_json::json!({"a": 1})));
        assert_eq!(shortened(&small), (small.message.clone(), small.content.clone()));
        let (message, content) =
            shortened(&result("ä".repeat(MAX_MESSAGE), Some("x".repeat(MAX_CONTENT).into())));
        assert!(message.len() < MAX_MESSAGE + 100 && message.contains("shortened by the gateway"));
        assert_eq!(content, None);
    }
}
