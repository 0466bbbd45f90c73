//! Fleet membership: join tokens, certificates of agents, their renewal and their revocation.
//!
//! A join token is stored as a digest and used once. The first agent that exchanges it gets a certificate, and the
//! gateway pins the agent's key to its hosts ([`CertificatePin`]). From then on these hosts accept certificates of that key
//! only: no static token, and no certificate of another key. [`PinTable`] holds all pins in memory and follows the
//! store, so that a revocation ends open streams at once. With an external CA the gateway signs nothing and pins no key.

mod calls;
mod credential;
mod enrollment;
mod pins;
mod records;
mod revocation;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

pub(super) use self::calls::{WRONG_JOIN_TOKEN, app_call, enroll};
pub(super) use self::credential::{AgentGuard, TOKEN_HOST_MISMATCH};
pub(super) use self::pins::PinTable;
use self::records::CertificatePin;
use super::ApiError;
use crate::access::Grant;
use crate::clock;
use crate::contract::{HostCertificate, HostEntry};
use crate::http::Reloadable;
use crate::model::Time;
use crate::pki::Authority;
use crate::store::{Error, Seq, Store, Txn, TxnOutcome, Write, keys};

/// Certificates of agents that a gateway accepts.
#[derive(Clone)]
pub enum FleetTrust {
    /// None: agents have static tokens.
    Disabled,
    /// Certificates that its own CA signed, for keys that are pinned.
    Issuer {
        authority: Reloadable<Authority>,
        /// Life of a certificate.
        life: Duration,
    },
    /// Certificates of another CA.
    External,
}

/// Join tokens and certificates of a gateway.
pub struct FleetMembership<S> {
    store: Arc<S>,
    trust: FleetTrust,
    pins: PinTable,
}

/// Maximum attempts of a change whose records change at the same time.
const MAX_ATTEMPTS: usize = 16;
/// Interval between removals of expired records.
const GC_INTERVAL: Duration = Duration::from_secs(600);

impl<S: Store> FleetMembership<S> {
    pub fn new(store: Arc<S>, trust: FleetTrust) -> FleetMembership<S> {
        let pins = PinTable::new(&trust);
        FleetMembership { store, trust, pins }
    }

    pub(super) fn pins(&self) -> &PinTable {
        &self.pins
    }

    /// Reads all pins. Must end before the first request: without its pin a host would accept a static token.
    pub async fn load(&self) -> Result<Seq, Error> {
        let page = self.store.range(keys::FLEET_PREFIX, None, usize::MAX).await?;
        for entry in page.entries {
            self.pins.apply(&entry.key, Some(&entry.value), entry.mod_seq);
        }
        Ok(page.as_of)
    }

    /// Follows changes of the store after a number, and removes expired records.
    pub async fn follow(&self, mut after: Seq) {
        let mut gc = tokio::time::interval(GC_INTERVAL);
        loop {
            let changes = tokio::select! {
                changes = self.store.changes(keys::FLEET_PREFIX, after) => changes,
                _ = gc.tick() => {
                    if let Err(refusal) = self.remove_expired().await {
                        warn!(?refusal, "cannot remove expired join tokens and revocations");
                    }
                    continue;
                }
            };
            match changes {
                Ok(changes) => {
                    for change in changes {
                        self.pins.apply(&change.key, change.value.as_deref(), change.number);
                        after = after.max(change.number);
                    }
                }
                Err(Error::Closed) => return,
                Err(error) => {
                    if !matches!(error, Error::Compacted) {
                        warn!(%error, "cannot follow certificates: trying again");
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                    if let Ok(as_of) = self.load().await {
                        after = as_of;
                    }
                }
            }
        }
    }

    /// Commits a change and applies it to the pins. `false`: a record changed in between, and nothing was written.
    async fn commit(&self, txn: Txn) -> Result<bool, ApiError> {
        let writes = txn.writes.clone();
        let TxnOutcome::Written(number) = self.store.txn(txn).await? else { return Ok(false) };
        for write in &writes {
            match write {
                Write::Put(key, value) => self.pins.apply(key, Some(value), number),
                Write::Delete(key) => self.pins.apply(key, None, number),
            }
        }
        Ok(true)
    }

    /// The authority and the life of its certificates.
    fn issuer(&self) -> Result<(Arc<Authority>, Duration), ApiError> {
        match &self.trust {
            FleetTrust::Issuer { authority, life } => Ok((authority.get(), *life)),
            FleetTrust::External => Err(ApiError::BadRequest(
                "this gateway signs no certificates: an external CA signs them (--client-ca)".to_owned(),
            )),
            FleetTrust::Disabled => Err(ApiError::BadRequest(
                "this gateway signs no certificates: start it with --ca-dir DIR and TLS".to_owned(),
            )),
        }
    }

    /// Adds the certificates of hosts to their rows, and a row for each granted host that has a certificate and no
    /// session.
    pub(super) fn describe(&self, rows: &mut Vec<HostEntry>, grant: &Grant) {
        let mut pins = self.pins.all();
        for row in &mut *rows {
            row.certificate = pins.remove(&row.host).as_ref().map(certificate);
        }
        let others = pins.into_iter().filter(|(host, _)| grant.check_host(host).is_ok());
        rows.extend(others.map(|(host, pin)| HostEntry {
            host,
            agent: false,
            version: None,
            heard: Time(pin.issued).to_string(),
            clock_skew_ms: None,
            certificate: Some(certificate(&pin)),
            processes: None,
        }));
        rows.sort_by(|one, other| one.host.cmp(&other.host));
    }
}

fn certificate(pin: &CertificatePin) -> HostCertificate {
    HostCertificate {
        expires: Time(pin.not_after).to_string(),
        serial: pin.serial.clone(),
        key: pin.key.clone(),
        revoked: pin.is_revoked(),
    }
}

fn contended() -> ApiError {
    ApiError::Busy("the host's certificate keeps changing: try again".to_owned())
}

fn now() -> Time {
    clock::now()
}
