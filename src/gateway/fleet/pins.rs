//! Pin table: pinned keys of hosts and revoked certificates, in memory.

use std::collections::HashMap;
use std::sync::{Arc, RwLock, RwLockReadGuard};

use tokio::sync::watch;

use super::FleetTrust;
use super::records::{CertificatePin, RevokedCertificate};
use crate::http::Revocation;
use crate::model::{HostKey, Time};
use crate::pki::AgentCertificate;
use crate::store::{Seq, decode, keys};

/// All pins and revocations, shared by all handles.
#[derive(Clone)]
pub struct PinTable(Arc<SharedPins>);

struct SharedPins {
    accepts: AcceptedIssuer,
    tables: RwLock<Tables>,
    /// Number of changes.
    version: watch::Sender<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AcceptedIssuer {
    None,
    Own,
    External,
}

/// Values with the change that wrote them; `None`: deleted. An older change never replaces a newer one.
#[derive(Default)]
struct Tables {
    pins: HashMap<HostKey, (Seq, Option<CertificatePin>)>,
    revoked: HashMap<String, Seq>,
}

impl PinTable {
    pub fn new(trust: &FleetTrust) -> PinTable {
        let accepts = match trust {
            FleetTrust::Disabled => AcceptedIssuer::None,
            FleetTrust::Issuer { .. } => AcceptedIssuer::Own,
            FleetTrust::External => AcceptedIssuer::External,
        };
        PinTable(Arc::new(SharedPins { accepts, tables: RwLock::default(), version: watch::Sender::new(0) }))
    }

    fn tables(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.tables.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Applies a change of the store.
    pub fn apply(&self, key: &str, value: Option<&[u8]>, number: Seq) {
        {
            let mut tables = self.0.tables.write().unwrap_or_else(|poisoned| poisoned.into_inner());
            if let Some(host) = keys::host_pin_of(key) {
                if tables.pins.get(&host).is_some_and(|(known, _)| *known > number) {
                    return;
                }
                // A pin that cannot be read refuses every credential of its host.
                let pin = value.map(|value| {
                    decode(key, value).unwrap_or_else(|error| {
                        tracing::error!(%error, "cannot read the certificate of a host: it is refused");
                        CertificatePin::unreadable()
                    })
                });
                tables.pins.insert(host, (number, pin));
            } else if let Some(serial) = keys::revoked_certificate_of(key) {
                match value {
                    Some(_) => drop(tables.revoked.insert(serial.to_owned(), number)),
                    None => {
                        tables.revoked.retain(|known, at| known != serial || *at > number);
                    }
                }
            } else {
                return;
            }
        }
        self.0.version.send_modify(|version| *version += 1);
    }

    pub fn get(&self, host: &HostKey) -> Option<CertificatePin> {
        self.tables().pins.get(host)?.1.clone()
    }

    /// All pins by host.
    pub fn all(&self) -> HashMap<HostKey, CertificatePin> {
        let tables = self.tables();
        let pinned = tables.pins.iter().filter_map(|(host, (_, pin))| Some((host.clone(), pin.clone()?)));
        pinned.collect()
    }

    /// Whether a host accepts certificates only.
    pub fn is_pinned(&self, host: &HostKey) -> bool {
        self.tables().pins.get(host).is_some_and(|(_, pin)| pin.is_some())
    }

    /// Hosts that are pinned to a key.
    pub fn hosts_of_key(&self, key: &str) -> Vec<HostKey> {
        let tables = self.tables();
        let pinned =
            tables.pins.iter().filter(|(_, (_, pin))| pin.as_ref().is_some_and(|pin| pin.key == key));
        pinned.map(|(host, _)| host.clone()).collect()
    }

    /// Whether a certificate speaks for any host.
    pub fn is_in_force(&self, certificate: &AgentCertificate, now: Time) -> bool {
        certificate.hosts.iter().any(|host| self.allows(certificate, host, now))
    }

    /// Whether a certificate speaks for a host.
    pub fn allows(&self, certificate: &AgentCertificate, host: &HostKey, now: Time) -> bool {
        let tables = self.tables();
        if !certificate.is_valid_at(now)
            || !certificate.hosts.contains(host)
            || tables.revoked.contains_key(&certificate.serial)
        {
            return false;
        }
        let pin = tables.pins.get(host).and_then(|(_, pin)| pin.as_ref());
        match (self.0.accepts, pin) {
            (AcceptedIssuer::Own, Some(pin)) => {
                pin.token.is_some() && pin.revoked.is_none() && pin.key == certificate.key
            }
            (AcceptedIssuer::External, Some(pin)) => {
                pin.revoked.as_ref().is_none_or(|mark| certificate.not_before.0 > mark.at)
            }
            (AcceptedIssuer::External, None) => true,
            (AcceptedIssuer::Own, None) | (AcceptedIssuer::None, _) => false,
        }
    }

    /// Whether the certificates are those of the gateway's own CA.
    pub fn accepts_own(&self) -> bool {
        self.0.accepts == AcceptedIssuer::Own
    }

    pub fn accepts_certificates(&self) -> bool {
        self.0.accepts != AcceptedIssuer::None
    }

    /// Resolves when the table no longer fulfils a condition.
    pub fn revocation(&self, holds: impl Fn(&PinTable) -> bool + Send + Sync + 'static) -> Revocation {
        let (table, mut versions) = (self.clone(), self.0.version.subscribe());
        Box::pin(async move {
            // The table holds the sender, so this never fails.
            let _ = versions.wait_for(|_| !holds(&table)).await;
        })
    }
}

impl CertificatePin {
    fn unreadable() -> CertificatePin {
        CertificatePin {
            key: String::new(),
            agent: String::new(),
            serial: String::new(),
            certificate: String::new(),
            issued: 0,
            not_after: 0,
            token: None,
            live: Vec::new(),
            revoked: Some(super::records::RevocationMark { at: i64::MAX, by: String::new() }),
        }
    }
}

/// A revocation as the store holds it.
pub fn revoked_entry(by: &str, now: Time, not_after: i64) -> Result<Vec<u8>, serde_json::Error> {
    serde_json::to_vec(&RevokedCertificate { at: now.0, by: by.to_owned(), not_after })
}
