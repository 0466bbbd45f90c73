//! Sent incidents in the store, for the next start and the next leader.
//!
//! `alert/OWNER/ROUTE:KIND:SUBJECT` exists from the first message about an incident until its recovery is sent.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::conditions::{AlertSubject, Extent, IncidentKey};
use super::tracker::{Incident, LastSent};
use crate::contract::AlertKind;
use crate::model::Time;
use crate::store::{Error, Store, Txn, keys};

/// Maximum writes per transaction.
const CHUNK: usize = 200;

#[derive(Debug, Serialize, Deserialize)]
struct StoredIncident {
    kind: AlertKind,
    subject: String,
    since: i64,
    sent: i64,
    instances: usize,
    #[serde(default)]
    detail: String,
}

/// The incidents that a route has sent. An entry of another version is left out.
pub async fn read<S: Store>(
    state: &S,
    owner: &str,
    route: &str,
) -> Result<BTreeMap<IncidentKey, Incident>, Error> {
    let prefix = keys::alerts_prefix(owner);
    let page = state.range(&prefix, None, usize::MAX).await?;
    let of_route = format!("{prefix}{route}:");
    let one = |entry: &crate::store::Entry| {
        let stored: StoredIncident = serde_json::from_slice(&entry.value).ok()?;
        let key = IncidentKey { kind: stored.kind, subject: subject(stored.kind, &stored.subject)? };
        let extent = Extent { instances: stored.instances, named: Vec::new(), detail: stored.detail };
        let sent = Some(LastSent { at: Time(stored.sent), instances: stored.instances });
        Some((key, Incident { since: Time(stored.since), ended: None, sent, extent }))
    };
    Ok(page.entries.iter().filter(|entry| entry.key.starts_with(&of_route)).filter_map(one).collect())
}

/// Writes changed incidents. Returns those that were not written, and why.
pub async fn write<S: Store>(
    state: &S,
    owner: &str,
    route: &str,
    changed: Vec<(IncidentKey, Option<Incident>)>,
) -> Result<(), (Vec<IncidentKey>, Error)> {
    let mut rest = changed.as_slice();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(rest.len().min(CHUNK));
        let txn = now.iter().map(|(key, one)| write_one(owner, route, key, one.as_ref())).reduce(Txn::and);
        if let Some(txn) = txn
            && let Err(error) = state.txn(txn).await
        {
            return Err((rest.iter().map(|(key, _)| key.clone()).collect(), error));
        }
        rest = later;
    }
    Ok(())
}

fn write_one(owner: &str, route: &str, key: &IncidentKey, incident: Option<&Incident>) -> Txn {
    let subject = key.subject.to_string();
    let stored_at = keys::alert(owner, route, key.kind.word(), &subject);
    match incident.and_then(|one| Some((one, one.sent?))) {
        None => Txn::delete(stored_at),
        Some((one, sent)) => {
            let stored = StoredIncident {
                kind: key.kind,
                subject,
                since: one.since.0,
                sent: sent.at.0,
                instances: sent.instances,
                detail: one.extent.detail.clone(),
            };
            Txn::put(stored_at, serde_json::to_vec(&stored).unwrap_or_default())
        }
    }
}

fn subject(kind: AlertKind, text: &str) -> Option<AlertSubject> {
    match (kind, text) {
        (_, "") => Some(AlertSubject::Controller),
        (AlertKind::HostUnknown, host) => host.parse().ok().map(AlertSubject::Host),
        (_, process) => process.parse().ok().map(AlertSubject::Process),
    }
}
