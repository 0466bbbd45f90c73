//! Full observation of the gateway: all processes page by page, and the hosts without a connected agent.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde_json::value::RawValue;

use super::digests::DigestRows;
use super::process::observed_instance;
use super::{Abide, escaped, read};
use crate::backend::{BackendError, Scope};
use crate::contract::{AccessInfo, FigureSeries, GatewayProcess, HostEntry, ProcessPage, TaskEntry};
use crate::model::{HashedSpec, HostKey, InstanceKey, KnownSpec, Observed, ObservedInstance, Time};

/// Rows per page.
const PAGE: usize = 5_000;

/// A full observation.
pub(super) struct FullObservation {
    at: Time,
    rows: ObservedRows,
    /// Hosts with a connected agent.
    alive: BTreeSet<HostKey>,
    /// The watermark that the change stream starts after.
    as_of: u64,
}

enum ObservedRows {
    Whole(BTreeMap<InstanceKey, ObservedInstance>),
    Digests(DigestRows),
}

impl Abide {
    /// Every process that the gateway knows, sorted by namespace, name and host.
    pub async fn rows(&self, query: &str) -> Result<Vec<GatewayProcess>, BackendError> {
        let mut all = Vec::new();
        let mut after = String::new();
        loop {
            let path = format!("/api/abide/v1/processes?limit={PAGE}&digests=keyed{query}{after}");
            let page: ProcessPage = read(&self.get(&path).await?)?;
            all.extend(page.items.into_iter().map(GatewayProcess::with_redacted_specs));
            match page.more {
                Some(more) => after = format!("&after={}", escaped(&more)),
                None => {
                    // Failed starts follow the registered processes.
                    let order = |one: &GatewayProcess| {
                        (one.namespace.clone(), one.name.clone(), one.host.to_string())
                    };
                    all.sort_by_key(order);
                    return Ok(all);
                }
            }
        }
    }

    /// The messages of these instances, also of those whose first start failed.
    pub(super) async fn messages_of(
        &self,
        instances: &[InstanceKey],
    ) -> Result<BTreeMap<InstanceKey, String>, BackendError> {
        let Some(first) = instances.first() else { return Ok(BTreeMap::new()) };
        let is_one = |same: fn(&InstanceKey) -> &str| instances.iter().all(|one| same(one) == same(first));
        let filter = |name: &str, same: fn(&InstanceKey) -> &str| match is_one(same) {
            true => format!("&{name}={}", escaped(same(first))),
            false => String::new(),
        };
        let namespace = filter("namespace", |key| key.namespace.as_str());
        let query = format!("&brief=1&attempts=1{namespace}{}", filter("name", |key| key.name.as_str()));
        let meant: BTreeSet<&InstanceKey> = instances.iter().collect();
        let rows = self.rows(&query).await?.into_iter();
        let rows = rows.filter(|row| meant.contains(&row.instance));
        let message = |row: GatewayProcess| match (row.message.is_empty(), row.exit) {
            (false, _) => Some((row.instance, row.message)),
            (true, Some(code)) if code != 0 => Some((row.instance, format!("exited with code {code}"))),
            (true, _) => None,
        };
        Ok(rows.filter_map(message).collect())
    }

    /// Fresh figures of an instance, and those of the last hour.
    pub async fn figures(&self, instance: &InstanceKey) -> Result<FigureSeries, BackendError> {
        let path = format!("/api/abide/v1/processes/figures?instance={}", escaped(&instance.to_string()));
        read(&self.get(&path).await?)
    }

    pub async fn hosts(&self) -> Result<Vec<HostEntry>, BackendError> {
        read(&self.get("/api/abide/v1/hosts").await?)
    }

    /// Access of the app of this client.
    pub async fn access(&self) -> Result<AccessInfo, BackendError> {
        read(&self.get("/api/abide/v1/access").await?)
    }

    pub async fn tasks(&self) -> Result<Vec<TaskEntry>, BackendError> {
        read(&self.get("/api/abide/v1/tasks").await?)
    }

    /// Hosts with a connected agent.
    pub(super) async fn alive(&self) -> Result<BTreeSet<HostKey>, BackendError> {
        let hosts: Vec<HostEntry> = read(&self.get("/api/abide/v1/hosts?brief=1").await?)?;
        Ok(hosts.into_iter().filter(|row| row.agent).map(|row| row.host).collect())
    }

    /// The observation of the scope, with a gap for each host without a connected agent; and the watermark that the
    /// change stream starts after.
    pub async fn observe_with_seq(&self, scope: &Scope) -> Result<(Observed, u64), BackendError> {
        let early = self.early.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let full = match early {
            Some(early) => early,
            // A reader without expectations needs all specs.
            None if scope.subjects.is_empty() => self.whole(scope).await?,
            None => self.compact(scope).await?,
        };
        let FullObservation { at, rows, mut alive, mut as_of } = full;
        let mut observed = Observed { at, ..Observed::default() };
        observed.instances = match rows {
            ObservedRows::Whole(instances) => instances,
            ObservedRows::Digests(digests) => match self.with_expected_specs(digests, scope).await? {
                Some(instances) => instances,
                None => {
                    let instances;
                    (instances, as_of) = self.whole_rows(scope).await?;
                    alive = self.alive().await?;
                    instances
                }
            },
        };
        let mut asked: BTreeSet<&HostKey> = scope.subjects.iter().map(|one| &one.host.key).collect();
        asked.extend(observed.instances.keys().map(|key| &key.host));
        observed.gaps = gaps(asked.into_iter(), &alive);
        Ok((observed, as_of))
    }

    /// Discards the prefetched observation after an operation.
    pub fn discard_prefetched(&self) {
        *self.early.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
    }

    /// Fetches the next observation in advance.
    pub async fn prefetch(&self) {
        if let Ok(full) = self.compact(&Scope::default()).await {
            *self.early.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(full);
        }
    }

    /// All rows with digests in place of specs, where the gateway has them.
    async fn compact(&self, scope: &Scope) -> Result<FullObservation, BackendError> {
        let at = crate::clock::now();
        let (alive, digests) = tokio::try_join!(self.alive(), self.digest_rows())?;
        match digests {
            Some((digests, as_of)) => {
                Ok(FullObservation { at, rows: ObservedRows::Digests(digests), alive, as_of })
            }
            None => self.whole(scope).await,
        }
    }

    async fn whole(&self, scope: &Scope) -> Result<FullObservation, BackendError> {
        let at = crate::clock::now();
        let alive = self.alive().await?;
        let (instances, as_of) = self.whole_rows(scope).await?;
        Ok(FullObservation { at, rows: ObservedRows::Whole(instances), alive, as_of })
    }

    async fn whole_rows(
        &self,
        scope: &Scope,
    ) -> Result<(BTreeMap<InstanceKey, ObservedInstance>, u64), BackendError> {
        let mut as_of = None;
        let mut instances = BTreeMap::new();
        let mut specs: HashMap<String, Arc<HashedSpec>> = HashMap::new();
        let likely: HashMap<&InstanceKey, &Arc<HashedSpec>> =
            scope.subjects.iter().filter_map(|one| Some((&one.instance, one.spec.as_ref()?))).collect();
        let mut after = String::new();
        loop {
            let text =
                self.get(&format!("/api/abide/v1/processes?limit={PAGE}&digests=keyed{after}")).await?;
            let page: ProcessPage<&RawValue> = read(&text)?;
            as_of.get_or_insert(page.as_of);
            self.secret_keys.add(&page.secret_keys);
            // The caller has the wanted specs; the cache must not keep all others alive.
            specs.clear();
            for row in page.items {
                let key = row.instance.clone();
                let mut seen = observed_instance(&row, &self.secret_keys, &mut specs)?;
                // Most specs are as wanted: share one copy in memory.
                if let Some(likely) = likely.get(&key) {
                    for version in [&mut seen.specs.registered, &mut seen.specs.live] {
                        if version.spec().is_some_and(|spec| spec == *likely) {
                            *version = KnownSpec::Full(Arc::clone(likely));
                        }
                    }
                }
                instances.insert(key, seen);
            }
            match page.more {
                Some(more) => after = format!("&after={}", escaped(&more)),
                None => return Ok((instances, as_of.unwrap_or_default())),
            }
        }
    }
}

pub(super) fn gaps<'a>(
    hosts: impl Iterator<Item = &'a HostKey>,
    alive: &BTreeSet<HostKey>,
) -> BTreeMap<HostKey, String> {
    let silent = hosts.filter(|host| !alive.contains(*host));
    silent.map(|host| (host.clone(), "no agent is connected".to_owned())).collect()
}
