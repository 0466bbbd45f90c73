//! Live status check at the gateway (operation 2): finds a process by its identity.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::try_join_all;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::operations::{TaskWire, host_value};
use super::{Abide, read};
use crate::backend::live_check::live;
use crate::backend::{BackendError, InstanceQuery};
use crate::clock;
use crate::gse::codes::{GseOp, RowCode};
use crate::gse::{keys, spec_body};
use crate::model::{Dialect, Observed, ObservedInstance, Time};
use crate::retry_delay::RetryDelay;

/// Maximum instances per call.
const BATCH: usize = 1000;
/// Maximum calls in flight.
const MAX_CALLS: usize = 4;
/// Timeout for the rows of one call.
const TIME: Duration = Duration::from_secs(10);
/// Interval between two polls: first and maximum.
const POLL: RetryDelay = RetryDelay::doubling(Duration::from_millis(10), Duration::from_millis(500));

#[derive(Deserialize)]
struct StatusWire {
    error_code: i64,
    #[serde(default)]
    error_msg: String,
    #[serde(default)]
    content: Value,
}

impl Abide {
    /// An instance without a final row is unknown.
    pub(super) async fn status_of(&self, subjects: &[InstanceQuery]) -> Result<Observed, BackendError> {
        let mut observed = Observed { at: clock::now(), ..Observed::default() };
        let chunks: Vec<&[InstanceQuery]> = subjects.chunks(BATCH).collect();
        for group in chunks.chunks(MAX_CALLS) {
            // Not a closure: its future would not be `Send` for every lifetime.
            let mut calls = Vec::new();
            for chunk in group {
                calls.push(self.status_rows(chunk));
            }
            let replies = try_join_all(calls).await?;
            let replied = clock::now();
            for (chunk, rows) in group.iter().zip(replies) {
                Abide::add_rows(&mut observed, chunk, &rows, replied);
            }
        }
        Ok(observed)
    }

    fn add_rows(
        observed: &mut Observed,
        chunk: &[InstanceQuery],
        rows: &HashMap<String, StatusWire>,
        replied: Time,
    ) {
        for InstanceQuery { instance, .. } in chunk {
            let row = rows.get(&keys::v2(&instance.host, &instance.process()));
            let unknown = || ObservedInstance { unknown: true, ..ObservedInstance::default() };
            let seen = match row.map(|row| (RowCode(row.error_code), row)) {
                Some((RowCode::DONE, row)) => live(&row.content, observed.at, replied),
                Some((RowCode::AGENT_MISSING, row)) => {
                    observed.gaps.insert(instance.host.clone(), row.error_msg.clone());
                    continue;
                }
                Some(_) | None => unknown(),
            };
            observed.instances.insert(instance.clone(), seen);
        }
    }

    async fn status_rows(
        &self,
        subjects: &[InstanceQuery],
    ) -> Result<HashMap<String, StatusWire>, BackendError> {
        let item = |subject: &InstanceQuery| {
            let InstanceQuery { instance, host, spec } = subject;
            let mut item = json!({
                "meta": {"namespace": instance.namespace, "name": instance.name},
                "hosts": [host_value(host)],
                "op_type": GseOp::Status.code(),
            });
            if let Some(spec) = spec {
                item["spec"] = spec_body(spec, Dialect::Abide);
            }
            item
        };
        let body = json!({"proc_operate_req": subjects.iter().map(item).collect::<Vec<_>>()});
        let text = self.post("/api/c/compapi/v2/gse/operate_proc_multi/", &body, &[]).await?;
        let task = read::<TaskWire>(&text)?.task_id;
        let (begin, mut pace) = (Instant::now(), POLL.first());
        loop {
            let mut rows: HashMap<String, StatusWire> = match self.results(&task).await? {
                Some(text) => read(&text)?,
                None => HashMap::new(),
            };
            rows.retain(|_, row| RowCode(row.error_code) != RowCode::RUNNING);
            if rows.len() >= subjects.len() || begin.elapsed() > TIME {
                return Ok(rows);
            }
            tokio::time::sleep(pace).await;
            pace = POLL.next(pace);
        }
    }
}
