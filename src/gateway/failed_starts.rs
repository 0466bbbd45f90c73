//! Failed starts: instances whose first start failed, listed on request although nothing is registered.
//!
//! A failed start registers nothing, so that the planner finds the instance absent and plans the same start again. The
//! report of the attempt is stored under a key of its own until a start succeeds, or for a day.

use super::processes::Query;
use super::registry::RegistryRecord;
use super::row_digests::{RowDigests, RowReader};
use super::{ApiError, Gateway, readable};
use crate::agent_protocol::Report;
use crate::clock;
use crate::contract::{GatewayProcess, ProcessPage};
use crate::model::{Health, InstanceKey};
use crate::store::{Store, Txn, keys};

/// Time after which a failed start is removed, in milliseconds. Agents report a retry before.
const KEPT_MS: i64 = 24 * 3_600_000;

impl<S: Store> Gateway<S> {
    /// Adds the failed starts that a query matches to a page of registered processes.
    pub(super) async fn add_failed_starts(
        &self,
        page: &mut ProcessPage,
        query: &Query,
        reader: &RowReader<'_>,
        limit: usize,
    ) -> Result<(), ApiError> {
        let prefix = keys::failed_starts_prefix(query.exact_namespace());
        let mut after = query.after.clone().filter(|after| is_failed_start(after));
        loop {
            let found = self.store.range(&prefix, after.as_deref(), limit).await?;
            for entry in &found.entries {
                if page.items.len() == limit {
                    page.more = Some(after.unwrap_or_else(|| keys::FAILED_START_PREFIX.to_owned()));
                    return Ok(());
                }
                after = Some(entry.key.to_string());
                let report = readable(entry.decode::<Report>()).filter(is_current);
                let (Some(key), Some(report)) = (keys::failed_start_of(&entry.key), report) else { continue };
                let is_registered = self.store.get(&keys::registration(&key)).await?.is_some();
                let owner =
                    report.history.failed_start.as_ref().and_then(|failed| failed.spec.owner.as_deref());
                if reader.grant.may_see(&key, owner) && !is_registered {
                    let digests = reader.digests(owner);
                    page.items.extend(self.failed_start_row(&key, &report, query, &digests));
                }
            }
            if found.more.is_none() {
                return Ok(());
            }
        }
    }

    /// The row of a failed start: nothing is registered, supervised or running. Its spec is that of the attempt.
    fn failed_start_row(
        &self,
        key: &InstanceKey,
        report: &Report,
        query: &Query,
        digests: &RowDigests,
    ) -> Option<GatewayProcess> {
        let failed = report.history.failed_start.as_ref()?;
        let (given, registered) = (failed.spec.clone(), failed.at / 1000);
        let record =
            RegistryRecord { given, supplier: None, registered, generation: None, secrets: Vec::new() };
        let row = query
            .matches(key, Some(&record))
            .then(|| self.process(key, &record, Some(report), query.is_whole(), digests))?;
        let health = Health::Failed.word().to_owned();
        Some(GatewayProcess { registered: false, registered_at: None, revision: None, health, ..row })
    }

    /// Removes old entries.
    pub(super) async fn gc_failed_starts(&self) -> Result<(), ApiError> {
        let page = self.store.range(keys::FAILED_START_PREFIX, None, usize::MAX).await?;
        for entry in page.entries {
            if !readable(entry.decode::<Report>()).is_some_and(|report| is_current(&report)) {
                // A report since the read has replaced the entry, and stays.
                let key = entry.key.to_string();
                self.store.txn(Txn::delete(key.clone()).only_if(key, entry.mod_seq)).await?;
            }
        }
        Ok(())
    }
}

/// Whether the key of a page belongs to the failed starts, which follow the registered processes.
pub(super) fn is_failed_start(after: &str) -> bool {
    after.starts_with(keys::FAILED_START_PREFIX)
}

fn is_current(report: &Report) -> bool {
    clock::now().0.saturating_sub(report.at) <= KEPT_MS
}
