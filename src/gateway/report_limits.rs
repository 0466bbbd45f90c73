//! Agent message limits: a stolen agent token must not fill the gateway's memory or store.
//!
//! A call with too many messages is refused as a whole. A report is subject to three limits of its host: its own size,
//! the bytes and instances that the host keeps in the store, and the bytes that the host writes over time
//! ([`report_usage`](super::report_usage)). A report beyond a limit is ignored, counted and logged; the other messages
//! of the call are processed. A report beyond the rate is deferred: the newest one of each instance is stored when the
//! rate allows it. The result of an operation is always processed, shortened if necessary, because its caller waits for
//! it.

use std::collections::HashMap;

use tracing::warn;

use super::report_usage::{HostUsage, ReportUsage};
use super::{ApiError, Gateway};
use crate::agent_protocol::{FromAgent, Join, OpResult};
use crate::model::{HostKey, InstanceKey};
use crate::store::Store;

/// Maximum messages of one call; an agent sends up to 1000.
pub const MAX_MESSAGES: usize = 10_000;
/// Maximum hosts of one session.
const MAX_HOSTS: usize = 100_000;
/// Maximum bytes of an agent's name, which is part of a key, and of its version.
const MAX_NAME: usize = 256;
/// Maximum bytes of one report: up to three specs.
const MAX_REPORT: usize = 4 << 20;
/// Maximum reported instances of one host, far above real hosts.
pub(super) const MAX_INSTANCES: usize = 20_000;
/// Maximum bytes of one host's reports and registrations. 5,000 instances with a specification of 2 KiB need 36 MiB.
pub(super) const MAX_HOST_BYTES: usize = 64 << 20;
/// Maximum bytes of one host's deferred reports, which are in memory only.
const MAX_DEFERRED: usize = 32 << 20;
/// Bytes counted for a report in addition to its value: keys and indexes.
const ROW_BYTES: usize = 256;
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

/// Writes of a report: bytes of its rows before and after.
#[derive(Clone, Copy, Debug)]
pub struct ReportSize {
    /// Bytes of the report itself.
    pub report: usize,
    /// Bytes of the rows that it replaces or deletes.
    pub before: usize,
    /// Bytes of the rows that it writes: none for a deletion, several copies of its specification for a new instance.
    pub after: usize,
    /// The store has no row of the instance.
    pub is_new: bool,
}

/// Decision on a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Stored,
    /// Beyond the rate of its host: the newest report of the instance waits in memory.
    Deferred,
    /// Beyond a limit.
    Ignored,
}

/// Changes of one batch to the usage of its hosts. They count once the batch is committed.
#[derive(Default)]
pub struct ReportBudget {
    hosts: HashMap<HostKey, HostChange>,
}

/// Change of one host's usage.
#[derive(Default)]
struct HostChange {
    added: usize,
    removed: usize,
    instances: usize,
    /// Bytes of the batch's writes.
    written: usize,
    deferred_bytes: usize,
    deferred: Vec<(InstanceKey, Vec<u8>)>,
    /// Instances whose deferred report is obsolete: a newer one was handled.
    settled: Vec<InstanceKey>,
    ignored: usize,
    reason: Option<String>,
}

impl ReportBudget {
    /// Decides about a report. `value`: the report as it would be stored.
    pub async fn admit<S: Store>(
        &mut self,
        gateway: &Gateway<S>,
        instance: &InstanceKey,
        value: &[u8],
        size: ReportSize,
    ) -> Result<Admission, ApiError> {
        let host = &instance.host;
        let mut usage = gateway.report_usage.of(host);
        let change = self.hosts.entry(host.clone()).or_default();
        let mut refused = change.refusal(host, &usage, size);
        // Rows may have been deleted by other callers since the usage was counted.
        if refused.is_some() && gateway.recount_reports().await? {
            usage = gateway.report_usage.of(host);
            refused = change.refusal(host, &usage, size);
        }
        if let Some(why) = refused {
            change.ignored += 1;
            change.reason.get_or_insert(why);
            change.settled.push(instance.clone());
            return Ok(Admission::Ignored);
        }
        let cost = size.after + ROW_BYTES;
        if change.written + cost > usage.allowance {
            if usage.deferred_bytes + change.deferred_bytes + value.len() > MAX_DEFERRED {
                change.ignored += 1;
                change
                    .reason
                    .get_or_insert_with(|| format!("host {host} writes more reports than its rate allows"));
                return Ok(Admission::Ignored);
            }
            change.deferred_bytes += value.len();
            change.deferred.push((instance.clone(), value.to_vec()));
            return Ok(Admission::Deferred);
        }
        change.written += cost;
        change.added += size.after;
        change.removed += size.before;
        change.instances += usize::from(size.is_new && size.after > 0);
        change.settled.push(instance.clone());
        Ok(Admission::Stored)
    }

    /// Applies the changes, after the commit. Logs ignored reports at a bounded rate: an agent must not fill the log
    /// either.
    pub fn commit(self, usage: &ReportUsage) {
        for (host, change) in self.hosts {
            let logged = usage.change(&host, |of| {
                of.bytes = of.bytes.saturating_add(change.added).saturating_sub(change.removed);
                of.instances += change.instances;
                of.spend(change.written);
                change.settled.iter().for_each(|instance| of.settle(instance));
                let deferred = change.deferred.len();
                change.deferred.into_iter().for_each(|(instance, value)| of.defer(instance, value));
                of.count(change.ignored, deferred)
            });
            usage.count(change.ignored);
            if let Some((ignored, deferred)) = logged {
                let why = change
                    .reason
                    .unwrap_or_else(|| format!("host {host} writes more reports than its rate allows"));
                warn!(%host, ignored, deferred, %why, "reports of an agent ignored or deferred");
            }
        }
    }
}

impl HostChange {
    /// Reason why the report exceeds a limit.
    fn refusal(&self, host: &HostKey, usage: &HostUsage, size: ReportSize) -> Option<String> {
        if size.report > MAX_REPORT {
            let bytes = size.report;
            return Some(format!(
                "host {host}: a report has {bytes} bytes, and at most {MAX_REPORT} are allowed"
            ));
        }
        let instances = usage.instances + self.instances;
        if size.is_new && size.after > 0 && instances >= MAX_INSTANCES {
            return Some(format!(
                "host {host} has {instances} instances, and at most {MAX_INSTANCES} are allowed"
            ));
        }
        let bytes = (usage.bytes + self.added + size.after).saturating_sub(self.removed + size.before);
        (size.after > size.before && bytes > MAX_HOST_BYTES).then(|| {
            format!("host {host}: its reports need {bytes} bytes, and at most {MAX_HOST_BYTES} are allowed")
        })
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
