//! Credential of an agent: a client certificate, or a static token on hosts that no certificate is pinned to.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::request::Parts;

use super::{PinTable, now};
use crate::gateway::auth::{Authenticator, bearer};
use crate::gateway::middleware::peer_of;
use crate::http::{CredentialCheck, CredentialKey, CredentialScope, Revocation, TransportSecurity};
use crate::model::HostKey;
use crate::pki::AgentCertificate;

/// The credential of a request, and the tables that decide on it.
#[derive(Clone)]
pub struct AgentGuard {
    authenticator: Arc<Authenticator>,
    pins: PinTable,
    credential: AgentCredential,
    peer: IpAddr,
}

#[derive(Clone)]
enum AgentCredential {
    Token(String),
    Certificate(Arc<AgentCertificate>),
}

impl AgentGuard {
    /// The certificate of the connection, else the token of the header. `None`: the request has neither.
    pub fn of(authenticator: &Arc<Authenticator>, pins: &PinTable, parts: &Parts) -> Option<AgentGuard> {
        let der = parts
            .extensions
            .get::<TransportSecurity>()
            .and_then(|security| security.client_certificate.as_ref());
        let certificate = der
            .filter(|_| pins.accepts_certificates())
            .and_then(|der| AgentCertificate::parse(der).ok())
            .filter(|certificate| !certificate.hosts.is_empty());
        let credential = match certificate {
            Some(certificate) => AgentCredential::Certificate(Arc::new(certificate)),
            None => AgentCredential::Token(bearer(&parts.headers)?.to_owned()),
        };
        let (authenticator, pins) = (Arc::clone(authenticator), pins.clone());
        Some(AgentGuard { authenticator, pins, credential, peer: peer_of(parts) })
    }

    pub fn certificate(&self) -> Option<&Arc<AgentCertificate>> {
        match &self.credential {
            AgentCredential::Certificate(certificate) => Some(certificate),
            AgentCredential::Token(_) => None,
        }
    }

    /// Whether the credential is valid for any host.
    pub fn is_known(&self) -> bool {
        match &self.credential {
            AgentCredential::Token(token) => self.authenticator.tokens().is_known(token),
            AgentCredential::Certificate(certificate) => self.pins.is_in_force(certificate, now()),
        }
    }

    /// Name of the caller for the log of wrong credentials.
    pub fn claimed_name(&self) -> String {
        match &self.credential {
            AgentCredential::Token(_) => "an agent".to_owned(),
            AgentCredential::Certificate(certificate) => {
                format!("certificate {} of agent {}", certificate.serial, certificate.agent)
            }
        }
    }

    /// Reason why the credential does not speak for all of these hosts.
    pub fn refusal(&self, hosts: &[HostKey]) -> Option<String> {
        match &self.credential {
            AgentCredential::Token(token) => {
                let tokens = self.authenticator.tokens();
                if !hosts.iter().all(|host| tokens.allow(token, host)) {
                    return Some(TOKEN_HOST_MISMATCH.to_owned());
                }
                let pinned = hosts.iter().find(|host| self.pins.is_pinned(host))?;
                Some(format!("host {pinned} joins with its certificate: no static token is accepted"))
            }
            AgentCredential::Certificate(certificate) => {
                let now = now();
                let refused = hosts.iter().find(|host| !self.pins.allows(certificate, host, now))?;
                Some(match certificate.hosts.contains(refused) {
                    true => format!("this certificate is revoked, replaced or expired for host {refused}"),
                    false => format!("this certificate is not for host {refused}"),
                })
            }
        }
    }

    pub fn allows(&self, hosts: &[HostKey]) -> bool {
        self.refusal(hosts).is_none()
    }

    /// The credential as a unit of limits.
    pub fn credential_key(&self) -> CredentialKey {
        match &self.credential {
            AgentCredential::Token(token) => self.authenticator.tokens().credential_key(token, self.peer),
            AgentCredential::Certificate(certificate) => {
                CredentialKey::new(CredentialScope::OneHost, &certificate.key)
            }
        }
    }

    /// Checks whether the credential is still in force.
    pub fn credential_check(&self) -> CredentialCheck {
        match &self.credential {
            AgentCredential::Token(token) => {
                let tokens = self.authenticator.tokens();
                self.authenticator.token_credential_check(&tokens, token)
            }
            AgentCredential::Certificate(_) => {
                let guard = self.clone();
                Box::new(move || guard.is_known())
            }
        }
    }

    /// Resolves when the credential no longer speaks for these hosts.
    pub fn revocation(&self, hosts: Vec<HostKey>) -> Revocation {
        let (guard, of_pins) = (self.clone(), hosts.clone());
        let pins = self.pins.revocation(move |_| guard.allows(&of_pins));
        match &self.credential {
            AgentCredential::Token(token) => {
                let tokens = self.authenticator.token_revocation(token, hosts);
                Box::pin(async move {
                    tokio::select! {
                        () = tokens => {}
                        () = pins => {}
                    }
                })
            }
            AgentCredential::Certificate(certificate) => {
                let remaining_ms =
                    u64::try_from(certificate.not_after.0.saturating_sub(now().0)).unwrap_or(0);
                Box::pin(async move {
                    tokio::select! {
                        () = tokio::time::sleep(Duration::from_millis(remaining_ms)) => {}
                        () = pins => {}
                    }
                })
            }
        }
    }
}

pub(in crate::gateway) const TOKEN_HOST_MISMATCH: &str =
    "this token or certificate is not known, or not for these hosts";
