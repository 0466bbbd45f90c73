//! The config file: targets, and how to connect to each.
//!
//! An unknown field is an error. The file contains no secrets, only their locations. [`super::config_files`] selects the
//! file and decides whether it is trusted.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::config_files::Definition;
use super::inventory_config::InventoryEntry;
use super::notify_config::RouteEntry;
use super::secret_from::{SecretFrom, TextOrSecret};
use crate::backend::{Abide, AnyBackend, Business, Pace, Platform};
use crate::cli::{Exit, Failure};
use crate::error_chain::chain;
use crate::http::{AddressError, ApiCredentials, ApiEndpoint, ClientConfig, ClientError};
use crate::model::Dialect;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub targets: BTreeMap<String, Entry>,
    pub owner: Option<String>,
    pub state: Option<String>,
    /// Routes of alerts.
    pub notify: Option<BTreeMap<String, RouteEntry>>,
    /// Inventories of host groups.
    pub inventories: BTreeMap<String, InventoryEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub url: String,
    pub dialect: String,
    auth: Option<Auth>,
    #[serde(default)]
    ca_file: Option<PathBuf>,
    /// Trust only `ca_file`, not the system's certificates.
    #[serde(default)]
    ca_only: bool,
    /// Accept plain http to an address that is not loopback.
    #[serde(default)]
    insecure: bool,
    /// Client certificate and key in one PEM file.
    #[serde(default)]
    client_cert: Option<PathBuf>,
    #[serde(default)]
    proxy: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, TextOrSecret>,
    #[serde(default)]
    supplier_id: Option<u64>,
    #[serde(default)]
    biz_id: Option<i64>,
    #[serde(default)]
    scope: Option<ScopeEntry>,
    #[serde(default)]
    tenant: Option<String>,
    #[serde(default)]
    qps: Option<f64>,
    #[serde(default)]
    max_in_flight: Option<usize>,
    #[serde(skip)]
    pub definition: Definition,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScopeEntry {
    #[serde(rename = "type")]
    kind: String,
    #[serde(deserialize_with = "text_or_number")]
    id: String,
}

/// Ids are strings on the wire; users also write numbers.
fn text_or_number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Id {
        Text(String),
        Number(i64),
    }
    Ok(match Id::deserialize(from)? {
        Id::Text(text) => text,
        Id::Number(number) => number.to_string(),
    })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Auth {
    app_code: Option<String>,
    app_secret: Option<SecretFrom>,
    username: Option<String>,
    /// The token of a person in the users file of an Abide gateway.
    token: Option<SecretFrom>,
}

impl Auth {
    /// The credentials of an app. `what`: the setting, for messages.
    pub(super) fn app_credentials(&self, what: &str) -> Result<ApiCredentials, Failure> {
        match (&self.app_code, &self.app_secret, &self.token) {
            (Some(code), Some(secret), None) => Ok(ApiCredentials::App {
                code: code.clone(),
                secret: secret.read(&format!("{what}.app_secret"))?,
                username: self.username.clone(),
            }),
            _ => {
                Err(Failure::new(Exit::Usage, format!("{what} must have app_code and app_secret of an app")))
            }
        }
    }

    fn credentials(&self, target: &str, dialect: Dialect) -> Result<ApiCredentials, Failure> {
        let wrong = |why: &str| Failure::new(Exit::Usage, format!("target {target:?}: auth: {why}"));
        match (&self.app_code, &self.app_secret, &self.token) {
            (Some(code), Some(secret), None) => Ok(ApiCredentials::App {
                code: code.clone(),
                secret: secret.read(&format!("target {target:?}: auth.app_secret"))?,
                username: self.username.clone(),
            }),
            (None, None, Some(_)) if dialect != Dialect::Abide => {
                Err(wrong("only dialect abide has tokens of people: use app_code and app_secret"))
            }
            (None, None, Some(_)) if self.username.is_some() => {
                Err(wrong("username belongs to an app: the gateway knows the name of a token's person"))
            }
            (None, None, Some(token)) => {
                Ok(ApiCredentials::Token(token.read(&format!("target {target:?}: auth.token"))?))
            }
            _ => Err(wrong("must have app_code and app_secret of an app, or token of a person")),
        }
    }
}

impl Entry {
    pub fn dialect(&self, name: &str) -> Result<Dialect, Failure> {
        let found = Dialect::ALL.into_iter().find(|dialect| dialect.name() == self.dialect);
        found.ok_or_else(|| {
            let known = Dialect::ALL.map(Dialect::name).join(", ");
            Failure::new(Exit::Usage, format!("target {name:?}: unknown dialect {:?}", self.dialect))
                .hint(format!("one of {known}"))
        })
    }

    pub fn access(&self, name: &str) -> Result<ApiEndpoint, Failure> {
        let found = self.checked_access(name);
        // The message names the file: there may be several.
        found.map_err(|mut failure| {
            failure.message = format!("{} ({})", failure.message, self.definition.file.display());
            failure
        })
    }

    fn checked_access(&self, name: &str) -> Result<ApiEndpoint, Failure> {
        let auth = self.auth.as_ref();
        let auth = auth.ok_or_else(|| Failure::new(Exit::Usage, format!("target {name:?} has no auth")))?;
        self.definition.may_use(name, "its credentials")?;
        let mut calling = ClientConfig {
            ca_file: self.ca_file.clone(),
            ca_only: self.ca_only,
            client_cert: self.client_cert.clone(),
            proxy: self.proxy.clone(),
            headers: Vec::new(),
            insecure: self.insecure,
        };
        // Checked before a secret is read.
        calling.check(&self.url).map_err(|error| {
            let failure = unusable(name, &error.to_string());
            match error {
                AddressError::Plain(_) => failure.hint("use https, or set `insecure: true` for this target"),
                AddressError::Invalid(_) => failure,
            }
        })?;
        let headers = &mut calling.headers;
        for (header, value) in &self.headers {
            let value = value.read(&format!("target {name:?}: headers.{header}"))?;
            headers.push((header.clone(), value));
        }
        headers.extend(self.tenant.clone().map(|tenant| ("X-Bk-Tenant-Id".to_owned(), tenant)));
        Ok(ApiEndpoint {
            url: self.url.clone(),
            credentials: auth.credentials(name, self.dialect(name)?)?,
            client_config: calling,
        })
    }

    pub fn client(&self, name: &str) -> Result<AnyBackend, Failure> {
        let dialect = self.dialect(name)?;
        let access = self.access(name)?;
        let broken = |error: ClientError| unusable(name, &chain(&error));
        if dialect == Dialect::Abide {
            return Ok(AnyBackend::Abide(Box::new(Abide::new(&access).map_err(broken)?)));
        }
        let business = match (self.biz_id, &self.scope) {
            (None, None) if dialect == Dialect::Job => {
                let message =
                    format!("target {name:?}: JOB needs a business: biz_id, or scope: {{type, id}}");
                return Err(Failure::new(Exit::Usage, message));
            }
            (Some(_), Some(_)) => {
                let message = format!("target {name:?} has both biz_id and scope: set one of them");
                return Err(Failure::new(Exit::Usage, message));
            }
            (Some(id), None) => Some(Business::Biz(id)),
            (None, Some(scope)) => Some(Business::Scope { kind: scope.kind.clone(), id: scope.id.clone() }),
            (None, None) => None,
        };
        let default = Pace::default();
        let pace = Pace { qps: self.qps, at_once: self.max_in_flight.unwrap_or(default.at_once) };
        let platform = Platform::new(&access, dialect, business, self.supplier_id, pace);
        Ok(AnyBackend::Platform(Box::new(platform.map_err(broken)?)))
    }
}

/// An invalid target definition, found before the first request.
pub fn unusable(name: &str, why: &str) -> Failure {
    Failure::new(Exit::Usage, format!("target {name:?}: {why}"))
}
