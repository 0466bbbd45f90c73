//! Compact process list: the facts that determine a plan, and digests in place of specs.
//!
//! A controller lists the whole fleet before each plan, and nearly every spec is as it expects. Rows are kept until the
//! registration or the report of their instance changes, so that a list costs neither parsing nor hashing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::error;

use super::processes::{Query, time};
use super::registry::RegistryRecord;
use super::secrets::has_secrets;
use super::{ApiError, Gateway, readable};
use crate::access::Grant;
use crate::agent_protocol::{ConfigState, Report, ReportedRun};
use crate::contract::{ProcessDigest, ProcessDigestPage, RunReport};
use crate::model::{HashedSpec, Health, HostKey, InstanceKey, Spec};
use crate::store::{Entry, Seq, Store, keys};

/// Maximum number of rows that are kept; the others are computed for each list. About 600 bytes each.
const MAX_KEPT: usize = 20_000;

/// Rows of the last lists, by the key of their registration.
#[derive(Default)]
pub struct DigestCache(Mutex<HashMap<Arc<str>, CachedDigest>>);

#[derive(Clone)]
struct CachedDigest {
    /// The changes that wrote the registration and the report; 0: there is no report.
    versions: (Seq, Seq),
    digest: Arc<ProcessDigest>,
}

impl DigestCache {
    fn rows(&self) -> MutexGuard<'_, HashMap<Arc<str>, CachedDigest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, key: &str, versions: (Seq, Seq)) -> Option<Arc<ProcessDigest>> {
        let rows = self.rows();
        rows.get(key).filter(|row| row.versions == versions).map(|row| Arc::clone(&row.digest))
    }

    fn put(&self, key: &Arc<str>, versions: (Seq, Seq), digest: &Arc<ProcessDigest>) {
        let mut rows = self.rows();
        if rows.len() < MAX_KEPT || rows.contains_key(key) {
            rows.insert(Arc::clone(key), CachedDigest { versions, digest: Arc::clone(digest) });
        }
    }

    /// Removes rows of instances that are not among these, which are all.
    fn retain(&self, all: &[Entry]) {
        let mut rows = self.rows();
        if rows.len() > all.len() {
            // The entries are sorted by key.
            rows.retain(|key, _| all.binary_search_by(|entry| entry.key.cmp(key)).is_ok());
        }
    }
}

impl<S: Store> Gateway<S> {
    /// A page of the compact list, sorted by namespace, name and host. A cursor names only processes that the app may see.
    pub async fn process_digests(
        &self,
        query: &Query,
        grant: &Grant,
    ) -> Result<ProcessDigestPage<Arc<ProcessDigest>>, ApiError> {
        let (limit, prefix) = (query.limit()?, query.prefix());
        let (mut items, mut last) = (Vec::new(), None);
        let (mut after, mut as_of) = (query.after.clone(), None);
        let more = 'pages: loop {
            let page = self.store.range(&prefix, after.as_deref(), limit).await?;
            as_of.get_or_insert(page.as_of);
            for entry in &page.entries {
                let Some(key) = keys::instance_of(&entry.key).filter(|key| query.matches_key(key)) else {
                    continue;
                };
                let Some(digest) = self.process_digest(&key, entry).await? else { continue };
                let owner = digest.owner.as_deref();
                if query.matches_owner(owner) && grant.may_see(&key, owner) {
                    if items.len() == limit {
                        break 'pages last;
                    }
                    last = Some(entry.key.to_string());
                    items.push(digest);
                }
            }
            if page.more.is_none() && after.is_none() && prefix == keys::REGISTRATION_PREFIX {
                self.digests.retain(&page.entries);
            }
            match page.more {
                Some(more) => after = Some(more.to_string()),
                None => break None,
            }
        };
        let contacts = self.contacts(&items);
        Ok(ProcessDigestPage { items, contacts, more, as_of: as_of.unwrap_or_default() })
    }

    /// The last contact with the agent of each host of these rows.
    fn contacts(&self, rows: &[Arc<ProcessDigest>]) -> BTreeMap<HostKey, String> {
        let hosts: BTreeSet<&HostKey> = rows.iter().map(|row| &row.instance.host).collect();
        let contact = |host: &HostKey| Some((host.clone(), self.hosts.last_contact(host).and_then(time)?));
        hosts.into_iter().filter_map(contact).collect()
    }

    /// The row of an instance. `None`: its record cannot be read, which is logged.
    async fn process_digest(
        &self,
        key: &InstanceKey,
        entry: &Entry,
    ) -> Result<Option<Arc<ProcessDigest>>, ApiError> {
        let reported = self.store.get(&keys::report(key)).await?;
        let versions = (entry.mod_seq, reported.as_ref().map_or(0, |entry| entry.mod_seq));
        if let Some(digest) = self.digests.get(&entry.key, versions) {
            return Ok(Some(digest));
        }
        let Some(record) = readable(entry.decode::<RegistryRecord>()) else { return Ok(None) };
        let digest = match reported.as_ref().map(Entry::decode::<Report>).transpose() {
            Ok(report) => digest(key, &record, report.as_ref()),
            Err(error) => {
                error!(%error, "cannot read the report of an instance");
                ProcessDigest { unknown: true, ..digest(key, &record, None) }
            }
        };
        let digest = Arc::new(digest);
        self.digests.put(&entry.key, versions, &digest);
        Ok(Some(digest))
    }
}

fn digest(key: &InstanceKey, record: &RegistryRecord, report: Option<&Report>) -> ProcessDigest {
    let given = &record.given;
    let live = report.and_then(|report| report.live.as_ref());
    // As a reader of rows computes it: a row has one set of labels.
    let labels = &given.spec.labels;
    let sum = |spec: &Spec| {
        let whole = HashedSpec::new(Spec { labels: labels.clone(), ..spec.clone() });
        format!("{:032x}", u128::from_be_bytes(whole.sum()))
    };
    let run = match report.and_then(|report| report.ran.as_ref()) {
        Some(ReportedRun::With(held)) => Some(held),
        Some(ReportedRun::Never | ReportedRun::Unknown) | None => None,
    };
    // A digest that covers a secret would confirm guesses.
    let is_secret = [Some(given), live, run].into_iter().flatten().any(|held| has_secrets(&held.spec));
    let registered_sum = (!is_secret).then(|| sum(&given.spec));
    let live_sum = live.filter(|_| !is_secret).map(|live| match live.spec == given.spec {
        true => registered_sum.clone().unwrap_or_default(),
        false => sum(&live.spec),
    });
    let ran = match report.and_then(|report| report.ran.as_ref()) {
        _ if is_secret => RunReport::Word("unknown".to_owned()),
        None | Some(ReportedRun::Never) => RunReport::Word("never".to_owned()),
        Some(ReportedRun::Unknown) => RunReport::Word("unknown".to_owned()),
        Some(ReportedRun::With(held)) => RunReport::With { revision: held.revision, spec: None },
    };
    let health = report.map(|report| report.health.as_str()).filter(|health| !health.is_empty());
    let config = report.map(|report| report.config.as_slice()).unwrap_or_default();
    let drifted = config.iter().filter(|(_, state)| *state != ConfigState::AsStated);
    let reported_secs = report.map_or(0, |report| report.at / 1000).max(record.registered);
    ProcessDigest {
        instance: key.clone(),
        labels: labels.clone(),
        unknown: false,
        hosted: report.is_some_and(|report| report.hosted),
        running: live.is_some(),
        completed: report.is_some_and(|report| report.completed),
        pid: report.and_then(|report| report.pid),
        owner: given.owner.clone(),
        health: health.unwrap_or(Health::NotReported.word()).to_owned(),
        since: report.and_then(|report| time(report.since)),
        report_time: time(reported_secs * 1000),
        drifted_files: drifted.map(|(path, _)| path.clone()).collect(),
        sum: registered_sum,
        live_sum,
        live_spec_unknown: report.is_some_and(|report| report.live_spec_unknown && live.is_some()),
        ran,
    }
}
