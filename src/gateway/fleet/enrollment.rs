//! Enrollment: a join token becomes a certificate, and a certificate is renewed.

use super::pins::revoked_entry;
use super::records::{CertificatePin, LiveCertificate, TokenUse};
use super::{FleetMembership, MAX_ATTEMPTS, contended, now};
use crate::agent_protocol::{CertificateLife, EnrollmentRequest, IssuedCertificate, Join};
use crate::error_chain::chain;
use crate::gateway::{ApiError, readable};
use crate::model::{HostKey, Time};
use crate::pki::{AgentCertificate, CLOCK_SKEW_SECS, CertificateSubject, IssuedPem, JoinToken, SigningError};
use crate::store::{Seq, Store, Txn, keys};

/// Maximum certificates of a host that have not expired. A further one revokes the oldest.
const MAX_LIVE: usize = 8;
/// Maximum characters of an agent's id.
const MAX_AGENT_CHARS: usize = 64;

impl<S: Store> FleetMembership<S> {
    /// Exchanges a join token for a certificate. The same agent with the same key gets the same certificate again until
    /// the token expires: its first answer may have been lost.
    pub async fn enroll(
        &self,
        token: &JoinToken,
        request: &EnrollmentRequest,
    ) -> Result<IssuedCertificate, ApiError> {
        let (authority, life) = self.issuer()?;
        let id_chars = request.agent.chars().count();
        if id_chars == 0 || id_chars > MAX_AGENT_CHARS || request.agent.contains(char::is_control) {
            return Err(ApiError::BadRequest(format!("agent must have 1 to {MAX_AGENT_CHARS} characters")));
        }
        let mut hosts = request.hosts.clone();
        hosts.sort();
        hosts.dedup();
        for _ in 0..MAX_ATTEMPTS {
            let now = now();
            let refused = |why: String| Err(ApiError::NotAllowed(why));
            let Some((mut record, seq)) = self.find_token(token).await? else {
                return refused("the join token is not known".to_owned());
            };
            if record.revoked.is_some() {
                return refused("the join token is revoked".to_owned());
            }
            if record.expires <= now.0 {
                return refused(format!("the join token expired at {}", Time(record.expires)));
            }
            if let Some(host) = hosts.iter().find(|host| !record.hosts.contains(host)) {
                return refused(format!("the join token is not for host {host}"));
            }
            let subject = CertificateSubject { agent: request.agent.clone(), hosts: hosts.clone(), life };
            let issued = authority.sign_request(&request.csr, &subject, now).map_err(bad_request)?;
            if let Some(used) = record.used {
                if used.key != issued.facts.key || used.agent != request.agent || used.hosts != hosts {
                    let (agent, at) = (used.agent, Time(used.at));
                    return Err(ApiError::Conflict(format!(
                        "the join token was used by agent {agent} at {at}"
                    )));
                }
                let life = CertificateLife {
                    total_secs: used.life_secs,
                    remaining_secs: Time(used.not_after).secs_since(now),
                };
                return Ok(IssuedCertificate { certificate: used.certificate, life });
            }
            record.used = Some(TokenUse {
                at: now.0,
                agent: request.agent.clone(),
                hosts: hosts.clone(),
                key: issued.facts.key.clone(),
                certificate: issued.pem.clone(),
                not_after: issued.facts.not_after.0,
                life_secs: life.as_secs(),
            });
            let key = keys::join_token(token.id());
            let mut txn = Txn::put(key.clone(), serde_json::to_vec(&record)?).only_if(key, seq);
            for host in &hosts {
                let (old, seq) = self.stored_pin(host).await?;
                txn = txn.and(pin_txn(host, old, seq, &issued, token.id(), now)?);
            }
            if self.commit(txn).await? {
                return Ok(answer(issued, now));
            }
        }
        Err(contended())
    }

    /// Renews the certificate of an agent: the same key, the hosts that it still speaks for, a new life. A certificate
    /// in the first third of its life is returned again.
    pub async fn renew(&self, certificate: &AgentCertificate) -> Result<IssuedCertificate, ApiError> {
        let (authority, life) = self.issuer()?;
        for _ in 0..MAX_ATTEMPTS {
            let now = now();
            let mut pins: Vec<(HostKey, CertificatePin, Seq)> = Vec::new();
            for host in &certificate.hosts {
                if let (Some(pin), seq) = self.stored_pin(host).await?
                    && self.pins.allows(certificate, host, now)
                    && pin.key == certificate.key
                    && pin.revoked.is_none()
                {
                    pins.push((host.clone(), pin, seq));
                }
            }
            let Some((_, newest, _)) = pins.iter().max_by_key(|(_, pin, _)| pin.issued) else {
                return Err(ApiError::NotAllowed("this certificate is revoked or replaced".to_owned()));
            };
            let is_young = now < Time(newest.issued).after_secs(life.as_secs() / 3);
            let covers_all = pins.iter().all(|(_, pin, _)| pin.serial == newest.serial);
            if is_young && covers_all && !newest.certificate.is_empty() {
                let life = CertificateLife {
                    total_secs: Time(newest.not_after).secs_since(Time(newest.issued)),
                    remaining_secs: Time(newest.not_after).secs_since(now),
                };
                return Ok(IssuedCertificate { certificate: newest.certificate.clone(), life });
            }
            let subject = CertificateSubject {
                agent: newest.agent.clone(),
                hosts: pins.iter().map(|(host, ..)| host.clone()).collect(),
                life,
            };
            let issued = authority.renew(certificate, &subject, now).map_err(bad_request)?;
            let mut txn = Txn::default();
            for (host, pin, seq) in pins {
                let token = pin.token.clone().unwrap_or_default();
                txn = txn.and(pin_txn(&host, Some(pin), seq, &issued, &token, now)?);
            }
            if self.commit(txn).await? {
                return Ok(answer(issued, now));
            }
        }
        Err(contended())
    }

    /// Checks that an agent's id is the one that its key is pinned to.
    pub fn check_agent(&self, certificate: &AgentCertificate, join: &Join) -> Result<(), ApiError> {
        let is_pinned = |host: &HostKey| self.pins.get(host).is_none_or(|pin| pin.agent == join.agent);
        match !self.pins.accepts_own()
            || (certificate.agent == join.agent && join.hosts.iter().all(is_pinned))
        {
            true => Ok(()),
            false => Err(ApiError::NotAllowed(format!(
                "the certificate is for agent {:?}, not for {:?}",
                certificate.agent, join.agent
            ))),
        }
    }

    /// Life of a certificate of the gateway's own CA.
    pub fn life_of(&self, certificate: &AgentCertificate) -> Option<CertificateLife> {
        self.pins.accepts_own().then(|| CertificateLife {
            total_secs: certificate
                .not_after
                .secs_since(certificate.not_before)
                .saturating_sub(CLOCK_SKEW_SECS),
            remaining_secs: certificate.not_after.secs_since(now()),
        })
    }

    /// Records the certificate that an external CA signed: its hosts accept certificates only from then on.
    pub async fn record_external(&self, certificate: &AgentCertificate, join: &Join) -> Result<(), ApiError> {
        if self.pins.accepts_own() {
            return Ok(());
        }
        for host in &join.hosts {
            if self
                .pins
                .get(host)
                .is_some_and(|pin| pin.serial == certificate.serial && pin.agent == join.agent)
            {
                continue;
            }
            let (old, seq) = self.stored_pin(host).await?;
            let pin = CertificatePin {
                key: certificate.key.clone(),
                agent: join.agent.clone(),
                serial: certificate.serial.clone(),
                certificate: String::new(),
                issued: certificate.not_before.0,
                not_after: certificate.not_after.0,
                token: None,
                live: Vec::new(),
                revoked: old.and_then(|pin| pin.revoked),
            };
            let key = keys::host_pin(host);
            let txn = Txn::put(key.clone(), serde_json::to_vec(&pin)?).only_if(key, seq);
            if !self.commit(txn).await? {
                return Err(contended());
            }
        }
        Ok(())
    }

    /// The stored pin of a host, and the change that wrote it.
    pub(super) async fn stored_pin(&self, host: &HostKey) -> Result<(Option<CertificatePin>, Seq), ApiError> {
        let entry = self.store.get(&keys::host_pin(host)).await?;
        let seq = entry.as_ref().map_or(0, |entry| entry.mod_seq);
        Ok((entry.and_then(|entry| readable(entry.decode())), seq))
    }
}

fn bad_request(error: SigningError) -> ApiError {
    ApiError::BadRequest(chain(&error))
}

fn answer(issued: IssuedPem, now: Time) -> IssuedCertificate {
    let remaining_secs = issued.facts.not_after.secs_since(now);
    let life = CertificateLife { total_secs: remaining_secs, remaining_secs };
    IssuedCertificate { certificate: issued.pem, life }
}

/// Pins a new certificate. Certificates of an earlier key, and those beyond [`MAX_LIVE`], are revoked.
fn pin_txn(
    host: &HostKey,
    old: Option<CertificatePin>,
    seq: Seq,
    issued: &IssuedPem,
    token: &str,
    now: Time,
) -> Result<Txn, ApiError> {
    let facts = &issued.facts;
    let (mut live, mut ended) = (Vec::new(), Vec::new());
    if let Some(old) = old {
        let is_same = old.key == facts.key && old.revoked.is_none();
        let unexpired = old.live.into_iter().filter(|one| one.not_after >= now.0);
        if is_same { live.extend(unexpired) } else { ended.extend(unexpired) }
    }
    live.push(LiveCertificate { serial: facts.serial.clone(), not_after: facts.not_after.0 });
    while live.len() > MAX_LIVE {
        ended.push(live.remove(0));
    }
    let pin = CertificatePin {
        key: facts.key.clone(),
        agent: facts.agent.clone(),
        serial: facts.serial.clone(),
        certificate: issued.pem.clone(),
        issued: now.0,
        not_after: facts.not_after.0,
        token: Some(token.to_owned()),
        live,
        revoked: None,
    };
    let key = keys::host_pin(host);
    let mut txn = Txn::put(key.clone(), serde_json::to_vec(&pin)?).only_if(key, seq);
    for one in ended {
        let entry = revoked_entry("replaced", now, one.not_after)?;
        txn = txn.and(Txn::put(keys::revoked_certificate(&one.serial), entry));
    }
    Ok(txn)
}
