//! Revocation of join tokens and of the certificates of hosts.

use std::collections::BTreeSet;

use super::pins::revoked_entry;
use super::records::{CertificatePin, JoinTokenRecord, RevocationMark};
use super::{FleetMembership, MAX_ATTEMPTS, contended, now};
use crate::contract::{HostRevocation, Revoked};
use crate::gateway::{ApiError, readable};
use crate::model::{HostKey, Time};
use crate::store::{Seq, Store, Txn, keys};

impl<S: Store> FleetMembership<S> {
    /// Revokes a join token, and the certificates that it was exchanged for.
    pub async fn revoke_token(&self, id: &str, by: &str) -> Result<Revoked, ApiError> {
        for _ in 0..MAX_ATTEMPTS {
            let now = now();
            let entry = self.store.get(&keys::join_token(id)).await?;
            let seq = entry.as_ref().map_or(0, |entry| entry.mod_seq);
            let Some(record) = entry.and_then(|entry| readable(entry.decode::<JoinTokenRecord>())) else {
                return Err(ApiError::BadRequest(format!("no join token has the id {id:?}")));
            };
            let mut hosts = BTreeSet::new();
            for host in record.used.iter().flat_map(|used| &used.hosts) {
                if let Some(pin) = self.pins.get(host).filter(|pin| pin.token.as_deref() == Some(id)) {
                    hosts.extend(self.pins.hosts_of_key(&pin.key));
                }
            }
            let txn = token_txn(id, record, seq, by, now)?;
            let (txn, hosts) = self.revoke_pins(txn, hosts, false, by, now).await?;
            if self.commit(txn).await? {
                return Ok(Revoked { hosts, tokens: vec![id.to_owned()] });
            }
        }
        Err(contended())
    }

    /// Revokes the key of a host, on all hosts of its agent, and the open join tokens for the host.
    pub async fn revoke_host(&self, request: &HostRevocation, by: &str) -> Result<Revoked, ApiError> {
        let host = &request.host;
        for _ in 0..MAX_ATTEMPTS {
            let now = now();
            let Some(pin) = self.pins.get(host) else {
                return Err(ApiError::BadRequest(format!("host {host} has no certificate")));
            };
            let mut txn = Txn::default();
            let mut tokens = Vec::new();
            for (id, record, seq) in self.tokens().await? {
                if record.state(now) == "open" && record.hosts.contains(host) {
                    txn = txn.and(token_txn(&id, record, seq, by, now)?);
                    tokens.push(id);
                }
            }
            let mut hosts: BTreeSet<HostKey> = self.pins.hosts_of_key(&pin.key).into_iter().collect();
            hosts.insert(host.clone());
            let (txn, hosts) = self.revoke_pins(txn, hosts, request.forget, by, now).await?;
            if self.commit(txn).await? {
                return Ok(Revoked { hosts, tokens });
            }
        }
        Err(contended())
    }

    /// Revokes the pins of hosts and their certificates. `forget`: deletes the pins.
    async fn revoke_pins(
        &self,
        mut txn: Txn,
        hosts: BTreeSet<HostKey>,
        forget: bool,
        by: &str,
        now: Time,
    ) -> Result<(Txn, Vec<HostKey>), ApiError> {
        let mut revoked = Vec::new();
        let mut serials = BTreeSet::new();
        for host in hosts {
            let (Some(pin), seq) = self.stored_pin(&host).await? else { continue };
            let key = keys::host_pin(&host);
            let live = pin.live.iter().map(|one| (one.serial.clone(), one.not_after));
            serials.extend(live.chain([(pin.serial.clone(), pin.not_after)]));
            let mark = Some(RevocationMark { at: now.0, by: by.to_owned() });
            let pin = CertificatePin { live: Vec::new(), revoked: mark, ..pin };
            let part = match forget {
                true => Txn::delete(key.clone()),
                false => Txn::put(key.clone(), serde_json::to_vec(&pin)?),
            };
            txn = txn.and(part.only_if(key, seq));
            revoked.push(host);
        }
        for (serial, not_after) in serials.into_iter().filter(|(_, not_after)| *not_after >= now.0) {
            let key = keys::revoked_certificate(&serial);
            txn = txn.and(Txn::put(key, revoked_entry(by, now, not_after)?));
        }
        Ok((txn, revoked))
    }
}

/// Marks a join token as revoked.
fn token_txn(id: &str, record: JoinTokenRecord, seq: Seq, by: &str, now: Time) -> Result<Txn, ApiError> {
    let mark = record.revoked.clone().unwrap_or(RevocationMark { at: now.0, by: by.to_owned() });
    let key = keys::join_token(id);
    let record = JoinTokenRecord { revoked: Some(mark), ..record };
    Ok(Txn::put(key.clone(), serde_json::to_vec(&record)?).only_if(key, seq))
}
