//! Inventories in the config file: `inventories`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::config::Auth;
use super::secret_from::TextOrSecret;
use crate::cli::args::milliseconds;
use crate::cli::{Exit, Failure};
use crate::error_chain::chain;
use crate::http::{AddressError, ApiEndpoint, ClientConfig};
use crate::inventory::cmdb::CmdbSelection;
use crate::inventory::{Cmdb, HttpInventory, InventoryKind, InventorySource};
use crate::manifest::inventory::is_name;
use crate::model::Amount;

const INTERVAL: Duration = Duration::from_secs(300);
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of queries of sets and modules.
const MAX_QUERIES: usize = 1_000;

/// An inventory as it is written. Exactly one of `file`, `command`, `url`, `ansible` and `cmdb` is set.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InventoryEntry {
    file: Option<PathBuf>,
    command: Option<Vec<String>>,
    url: Option<TextOrSecret>,
    ansible: Option<PathBuf>,
    cmdb: Option<CmdbEntry>,
    /// With `url`.
    #[serde(default)]
    headers: BTreeMap<String, TextOrSecret>,
    ca_file: Option<PathBuf>,
    proxy: Option<String>,
    /// Accept plain http to an address that is not loopback.
    #[serde(default)]
    insecure: bool,
    interval: Option<String>,
    timeout: Option<String>,
    max_shrink: Option<AmountEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum AmountEntry {
    Count(u64),
    Text(String),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CmdbEntry {
    url: String,
    /// Path of the call, for an API gateway.
    path: Option<String>,
    auth: Auth,
    biz_id: i64,
    /// Sets by name, with their ids.
    #[serde(default)]
    sets: BTreeMap<String, i64>,
    #[serde(default)]
    modules: BTreeMap<String, i64>,
    /// Fields of a host, with the labels that they become.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    supplier_id: Option<u64>,
    tenant: Option<String>,
}

impl InventoryEntry {
    /// The definition. `folder`: of the config file, for relative paths.
    pub fn source(&self, name: &str, folder: &Path) -> Result<InventorySource, Failure> {
        let wrong = |why: &str| Failure::new(Exit::Usage, format!("inventory {name:?}: {why}"));
        if !is_name(name) {
            return Err(wrong("a name has only letters, digits, `-`, `_` and `.`"));
        }
        let duration = |field: &str, text: &Option<String>, default: Duration, most: Duration| match text {
            None => Ok(default),
            Some(text) => milliseconds(text)
                .map(Duration::from_millis)
                .map_err(|why| wrong(&format!("{field}: {text:?} is not {why}")))
                .and_then(|time| match time >= Duration::from_millis(100) && time <= most {
                    true => Ok(time),
                    false => Err(wrong(&format!("{field} must be at least 100ms and at most {most:?}"))),
                }),
        };
        let max_shrink = match &self.max_shrink {
            None => Amount::share("20%").map(Amount::Share).ok_or_else(|| wrong("max_shrink"))?,
            Some(AmountEntry::Count(count)) => Amount::Count(*count),
            Some(AmountEntry::Text(text)) => {
                text.parse().map_err(|why| wrong(&format!("max_shrink: {text:?} is not {why}")))?
            }
        };
        Ok(InventorySource {
            name: name.to_owned(),
            interval: duration("interval", &self.interval, INTERVAL, Duration::from_secs(86_400))?,
            timeout: duration("timeout", &self.timeout, TIMEOUT, Duration::from_secs(600))?,
            max_shrink,
            kind: self.kind(name, folder)?,
        })
    }

    fn kind(&self, name: &str, folder: &Path) -> Result<InventoryKind, Failure> {
        let wrong = |why: &str| Failure::new(Exit::Usage, format!("inventory {name:?}: {why}"));
        let InventoryEntry { file, command, url, ansible, cmdb, .. } = self;
        if url.is_none() && !self.headers.is_empty() {
            return Err(wrong("headers belong to url"));
        }
        match (file, command, url, ansible, cmdb) {
            (Some(file), None, None, None, None) => Ok(InventoryKind::File(folder.join(file))),
            (None, Some(argv), None, None, None) if argv.first().is_none_or(String::is_empty) => {
                Err(wrong("command is empty: write [PROGRAM, ARGUMENT, …]"))
            }
            (None, Some(argv), None, None, None) => {
                let mut argv = argv.clone();
                // A checkout in the current directory must not decide which program runs.
                if let Some(program) = argv.first_mut().filter(|program| program.contains('/')) {
                    *program = folder.join(&*program).display().to_string();
                }
                Ok(InventoryKind::Command(argv))
            }
            (None, None, Some(url), None, None) => {
                let url = url.read(&format!("inventory {name:?}: url"))?;
                let mut config = self.client_config(name, &url)?;
                for (header, value) in &self.headers {
                    let value = value.read(&format!("inventory {name:?}: headers.{header}"))?;
                    config.headers.push((header.clone(), value));
                }
                let http = HttpInventory::new(&url, &config).map_err(|error| wrong(&chain(&error)))?;
                Ok(InventoryKind::Http(http))
            }
            (None, None, None, Some(file), None) => Ok(InventoryKind::Ansible(folder.join(file))),
            (None, None, None, None, Some(cmdb)) => {
                let config = self.client_config(name, &cmdb.url)?;
                cmdb.client(name, config).map(InventoryKind::Cmdb)
            }
            _ => Err(wrong("must have exactly one of file, command, url, ansible and cmdb")),
        }
    }

    /// Settings of the client. The address is checked before a secret is read.
    fn client_config(&self, name: &str, url: &str) -> Result<ClientConfig, Failure> {
        let config = ClientConfig {
            ca_file: self.ca_file.clone(),
            proxy: self.proxy.clone(),
            insecure: self.insecure,
            ..ClientConfig::default()
        };
        config.check(url).map_err(|error| {
            let failure = Failure::new(Exit::Usage, format!("inventory {name:?}: {error}"));
            match error {
                AddressError::Plain(_) => {
                    failure.hint("use https, or set `insecure: true` for this inventory")
                }
                AddressError::Invalid(_) => failure,
            }
        })?;
        Ok(config)
    }
}

impl CmdbEntry {
    fn client(&self, name: &str, mut config: ClientConfig) -> Result<Cmdb, Failure> {
        let wrong = |why: &str| Failure::new(Exit::Usage, format!("inventory {name:?}: cmdb: {why}"));
        if self.sets.len().max(1).saturating_mul(self.modules.len().max(1)) > MAX_QUERIES {
            return Err(wrong(&format!("sets and modules need more than {MAX_QUERIES} queries")));
        }
        if self.path.as_ref().is_some_and(|path| !path.starts_with('/')) {
            return Err(wrong("path must begin with /"));
        }
        config.headers.extend(self.tenant.clone().map(|tenant| ("X-Bk-Tenant-Id".to_owned(), tenant)));
        let endpoint = ApiEndpoint {
            url: self.url.clone(),
            credentials: self.auth.app_credentials(&format!("inventory {name:?}: cmdb.auth"))?,
            client_config: config,
        };
        let selection = CmdbSelection {
            biz_id: self.biz_id,
            sets: self.sets.clone(),
            modules: self.modules.clone(),
            labels: self.labels.clone(),
            supplier: self.supplier_id,
            path: self.path.clone(),
        };
        Cmdb::new(&endpoint, selection).map_err(|error| wrong(&chain(&error)))
    }
}
