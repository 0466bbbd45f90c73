//! Observation by digests: the facts of all processes, and only those specs that are not as expected.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::value::RawValue;

use super::process::{Facts, last_run, observed_facts, observed_instance};
use super::{Abide, escaped, read};
use crate::backend::{BackendError, Scope};
use crate::contract::{ProcessDigest, ProcessDigestPage, ProcessPage};
use crate::model::{HashedSpec, HostKey, InstanceKey, KnownSpec, ObservedInstance, ObservedSpecs, Time};

/// Rows per page.
const PAGE: usize = 10_000;
/// Maximum number of processes whose specs are requested one by one; above it, a full list costs less.
const MAX_SINGLE: usize = 64;
/// Maximum calls in flight.
const MAX_CALLS: usize = 8;

/// The compact list, before the expected specs are known.
pub(super) struct DigestRows {
    rows: Vec<ProcessDigest>,
    /// Last contact with the agent of each host.
    contacts: BTreeMap<HostKey, Time>,
}

impl Abide {
    /// The compact list, and its watermark. `None`: a gateway of an earlier version, without such a list.
    pub(super) async fn digest_rows(&self) -> Result<Option<(DigestRows, u64)>, BackendError> {
        let mut all = DigestRows { rows: Vec::new(), contacts: BTreeMap::new() };
        let (mut as_of, mut after) = (None, String::new());
        loop {
            let path = format!("/api/abide/v1/processes/digests?limit={PAGE}{after}");
            let text = match self.get(&path).await {
                // Any list of that gateway shows why it refuses.
                Err(BackendError::Refused(_)) => return Ok(None),
                text => text?,
            };
            let page: ProcessDigestPage = read(&text)?;
            let as_of = *as_of.get_or_insert(page.as_of);
            all.rows.extend(page.items);
            let contact = |(host, at): (HostKey, String)| Some((host, crate::clock::read(&at)?));
            all.contacts.extend(page.contacts.into_iter().filter_map(contact));
            match page.more {
                Some(more) => after = format!("&after={}", escaped(&more)),
                None => return Ok(Some((all, as_of))),
            }
        }
    }

    /// The instances of a compact list, with the expected specs where the digests are equal, and requested ones elsewhere.
    /// `None`: too many differ.
    pub(super) async fn with_expected_specs(
        &self,
        digests: DigestRows,
        scope: &Scope,
    ) -> Result<Option<BTreeMap<InstanceKey, ObservedInstance>>, BackendError> {
        let expected: HashMap<&InstanceKey, &Arc<HashedSpec>> =
            scope.subjects.iter().filter_map(|one| Some((&one.instance, one.spec.as_ref()?))).collect();
        let DigestRows { rows, contacts } = digests;
        let (mut known, mut differing) = (Vec::with_capacity(rows.len()), Vec::new());
        for row in rows {
            let contact = contacts.get(&row.instance.host).copied();
            match expected.get(&row.instance).filter(|spec| is_expected(&row, spec)) {
                Some(spec) => known.push((row.instance.clone(), instance(row, spec, contact))),
                None if differing.len() == MAX_SINGLE => return Ok(None),
                None => differing.push(row.instance),
            }
        }
        let mut all: BTreeMap<InstanceKey, ObservedInstance> = known.into_iter().collect();
        // Not a closure: its future would not be `Send` for every lifetime.
        let mut calls = Vec::new();
        for key in differing {
            calls.push(self.whole_row(key));
        }
        let whole: Vec<_> = stream::iter(calls).buffer_unordered(MAX_CALLS).try_collect().await?;
        all.extend(whole.into_iter().flatten());
        Ok(Some(all))
    }

    /// The row of one instance with its specs. `None`: it was removed since, which the change stream reports, too.
    async fn whole_row(
        &self,
        key: InstanceKey,
    ) -> Result<Option<(InstanceKey, ObservedInstance)>, BackendError> {
        // The filter is a pattern, and an agent id may contain its characters.
        let host = match key.host {
            HostKey::Address { .. } => format!("&host={}", escaped(&key.host.to_string())),
            HostKey::Agent(_) => String::new(),
        };
        let mut after = String::new();
        loop {
            let path = format!(
                "/api/abide/v1/processes?limit=1000&digests=keyed&namespace={}&name={}{host}{after}",
                escaped(key.namespace.as_str()),
                escaped(key.name.as_str()),
            );
            let text = self.get(&path).await?;
            let page: ProcessPage<&RawValue> = read(&text)?;
            self.secret_keys.add(&page.secret_keys);
            if let Some(row) = page.items.iter().find(|row| row.instance == key) {
                return Ok(Some((key, observed_instance(row, &self.secret_keys, &mut HashMap::new())?)));
            }
            match page.more {
                Some(more) => after = format!("&after={}", escaped(&more)),
                None => return Ok(None),
            }
        }
    }
}

/// Whether the row has the expected spec, registered and in effect.
fn is_expected(row: &ProcessDigest, spec: &HashedSpec) -> bool {
    let sum = format!("{:032x}", u128::from_be_bytes(spec.sum()));
    let is_live = match &row.live_sum {
        Some(live) => *live == sum,
        None => !row.running,
    };
    row.sum.as_ref() == Some(&sum) && is_live && row.labels == spec.labels
}

fn instance(row: ProcessDigest, spec: &Arc<HashedSpec>, contact: Option<Time>) -> ObservedInstance {
    let whole = || KnownSpec::Full(Arc::clone(spec));
    let live = if row.running { whole() } else { KnownSpec::Unknown };
    let report_time = row.report_time.as_deref().and_then(crate::clock::read);
    let specs = ObservedSpecs {
        registered: whole(),
        live,
        is_live_assumed: row.live_spec_unknown && row.running,
        ran: last_run(Some(&row.ran), |revision| revision),
        drifted_files: row.drifted_files,
        protections: Vec::new(),
        // Rows with secrets have no digests here.
        digest_key: None,
    };
    observed_facts(Facts {
        unknown: row.unknown,
        registered: true,
        hosted: row.hosted,
        running: row.running,
        completed: row.completed,
        pid: row.pid,
        owner: row.owner.as_deref(),
        health: &row.health,
        since: row.since.as_deref(),
        report_time: report_time.max(contact),
        labels: row.labels,
        specs,
    })
}
