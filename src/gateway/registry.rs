//! What is registered: one spec an instance, and no two instances of a host with one identity.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Gateway, Refusal, now_secs};
use crate::gse::answer::{Row, Rows};
use crate::gse::codes::RowCode;
use crate::gse::keys;
use crate::gse::request::ProcRequest;
use crate::model::{Host, InstanceKey, ProcessKey, Spec};
use crate::store::{Outcome, Store, Txn};

/// One registered instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub spec: Spec,
    pub supplier: Option<u64>,
    /// Seconds since 1970.
    pub registered: i64,
}

/// How often a call begins anew because another wrote meanwhile.
const TRIES: usize = 50;

/// What a registry call does with each host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Register,
    Update,
    Unregister,
}

pub fn record_key(process: &ProcessKey, host: &Host) -> String {
    format!("reg/{}/{}/{}", process.namespace, process.name, host.key)
}

/// Who has an identity on a host. A path may contain anything, so it comes last.
fn identity_key(host: &Host, spec: &Spec) -> String {
    format!("identity/{}/{}", host.key, spec.identity.index_key())
}

impl<S: Store> Gateway<S> {
    /// All hosts of one request in one commit; each has its own row.
    pub async fn registry_call(&self, call: Call, request: &ProcRequest) -> Result<Rows, Refusal> {
        let (process, hosts) = (request.process()?, request.targets()?);
        let spec = request.spec()?;
        if spec.is_none() && call != Call::Unregister {
            return Err(Refusal::Wrong("spec is missing".to_owned()));
        }
        for _ in 0..TRIES {
            let mut rows = Rows::new();
            let mut txn = Txn::default();
            for host in &hosts {
                let key = keys::v1(host, &process).unwrap_or_else(|| keys::v2(&host.key, &process));
                let (row, part) = match (&spec, call) {
                    (Some(spec), Call::Register) => self.put(&process, host, spec, false).await?,
                    (Some(spec), Call::Update) => self.put(&process, host, spec, true).await?,
                    (_, _) => self.remove(&process, host).await?,
                };
                rows.insert(key, row);
                txn = txn.and(part);
            }
            if txn.writes.is_empty() || matches!(self.store.txn(txn).await?, Outcome::Written(_)) {
                return Ok(rows);
            }
        }
        Err(Refusal::Wrong("others keep changing the same processes: try again".to_owned()))
    }

    async fn put(
        &self,
        process: &ProcessKey,
        host: &Host,
        spec: &Spec,
        update: bool,
    ) -> Result<(Row, Txn), Refusal> {
        let (key, identity) = (record_key(process, host), identity_key(host, spec));
        let there = self.store.get(&key).await?;
        let old: Option<Record> = there.as_ref().and_then(|entry| serde_json::from_slice(&entry.value).ok());
        if there.is_some() && !update {
            return Ok((
                Row::new(RowCode::EXISTS, "it is registered already: update_proc_info changes it"),
                Txn::default(),
            ));
        }
        let own = process.to_string();
        let taken = self.store.get(&identity).await?;
        if let Some(other) = taken.as_ref().filter(|entry| *entry.value != *own.as_bytes()) {
            let other = String::from_utf8_lossy(&other.value).into_owned();
            let message =
                format!("{other} has the same value_key, or setup_path and proc_name, on this host");
            return Ok((Row::new(RowCode::COMMAND_FAILED, message), Txn::default()));
        }
        let registered = old.as_ref().map_or_else(now_secs, |old| old.registered);
        let record = Record { spec: spec.clone(), supplier: host.supplier, registered };
        let value = serde_json::to_vec(&record).map_err(|error| Refusal::Wrong(error.to_string()))?;
        let mut txn = Txn::put(key.clone(), value)
            .only_if(key, there.map_or(0, |entry| entry.changed))
            .and(Txn::put(identity.clone(), own))
            .only_if(identity.clone(), taken.map_or(0, |entry| entry.changed));
        let left = old.map(|old| identity_key(host, &old.spec)).filter(|left| *left != identity);
        if let Some(left) = left {
            txn = txn.and(Txn::delete(left));
        }
        Ok((Row::done(), txn))
    }

    async fn remove(&self, process: &ProcessKey, host: &Host) -> Result<(Row, Txn), Refusal> {
        let key = record_key(process, host);
        let Some(entry) = self.store.get(&key).await? else {
            return Ok((Row::new(RowCode::DONE, "it was not registered"), Txn::default()));
        };
        let mut txn = Txn::delete(key.clone()).only_if(key, entry.changed);
        if let Ok(record) = serde_json::from_slice::<Record>(&entry.value) {
            txn = txn.and(Txn::delete(identity_key(host, &record.spec)));
        }
        Ok((Row::done(), txn))
    }

    /// The instance that is registered with an identity on a host.
    pub(super) async fn named(&self, host: &Host, spec: &Spec) -> Result<Option<ProcessKey>, Refusal> {
        let entry = self.store.get(&identity_key(host, spec)).await?;
        Ok(entry.and_then(|entry| std::str::from_utf8(&entry.value).ok()?.parse().ok()))
    }

    /// The registered one of each host, by its key.
    pub(super) async fn records(
        &self,
        process: &ProcessKey,
        hosts: &[Host],
    ) -> Result<HashMap<InstanceKey, Record>, Refusal> {
        let mut records = HashMap::new();
        for host in hosts {
            if let Some(entry) = self.store.get(&record_key(process, host)).await?
                && let Ok(record) = serde_json::from_slice(&entry.value)
            {
                let ProcessKey { namespace, name } = process.clone();
                records.insert(InstanceKey { host: host.key.clone(), namespace, name }, record);
            }
        }
        Ok(records)
    }
}
