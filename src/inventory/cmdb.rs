//! BlueKing CMDB: the hosts of a business by `list_biz_hosts`, page by page, with fields as labels.
//!
//! A list that changes between two pages is read again: a page that shifted would hide a host.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::rows::{Row, RowError, RowList, RowPlace};
use super::{InventoryError, MAX_BYTES, MAX_HOSTS};
use crate::http::{ApiClient, ApiCredentials, ApiEndpoint, CallError, ClientError};

/// Hosts of one page: the maximum of the API.
const PAGE: usize = 500;
/// Maximum attempts to read a list that changes meanwhile.
const MAX_ATTEMPTS: usize = 3;
/// The call, as the ESB names it.
const PATH: &str = "/api/c/compapi/v2/cc/list_biz_hosts/";
/// Fields that identify a host.
const HOST_FIELDS: [&str; 5] =
    ["bk_host_id", "bk_host_innerip", "bk_host_innerip_v6", "bk_cloud_id", "bk_agent_id"];

/// The selected hosts of a business.
#[derive(Clone, Debug, Default)]
pub struct CmdbSelection {
    pub biz_id: i64,
    /// Sets by the value of the label `set`. Empty: all.
    pub sets: BTreeMap<String, i64>,
    /// Modules by the value of the label `module`. Empty: all.
    pub modules: BTreeMap<String, i64>,
    /// Labels by the field of the host.
    pub labels: BTreeMap<String, String>,
    pub supplier: Option<u64>,
    /// Path of the call, instead of that of the ESB.
    pub path: Option<String>,
}

pub struct Cmdb {
    calls: ApiClient,
    /// Credentials that the ESB expects in the body.
    credentials: Map<String, Value>,
    selection: CmdbSelection,
}

/// One query: a set, a module, or neither.
#[derive(Clone, Debug, Default)]
struct CmdbQuery {
    set: Option<(String, i64)>,
    module: Option<(String, i64)>,
}

#[derive(Deserialize)]
struct HostPage {
    #[serde(default)]
    count: usize,
    #[serde(default)]
    info: Vec<Map<String, Value>>,
}

/// A host with the sets and modules that list it.
#[derive(Default)]
struct CmdbHost {
    fields: Map<String, Value>,
    sets: BTreeSet<String>,
    modules: BTreeSet<String>,
}

impl Cmdb {
    pub fn new(endpoint: &ApiEndpoint, selection: CmdbSelection) -> Result<Cmdb, ClientError> {
        let mut credentials = Map::new();
        if let ApiCredentials::App { code, secret, username } = &endpoint.credentials {
            credentials.insert("bk_app_code".to_owned(), code.clone().into());
            credentials.insert("bk_app_secret".to_owned(), secret.clone().into());
            let name = username.clone().unwrap_or_else(|| "admin".to_owned());
            credentials.insert("bk_username".to_owned(), name.into());
        }
        Ok(Cmdb { calls: ApiClient::new(endpoint)?, credentials, selection })
    }

    /// The address and the business.
    pub fn shown(&self) -> String {
        format!("{}, biz {}", self.calls.url(), self.selection.biz_id)
    }

    pub async fn read(&self, timeout: Duration) -> Result<RowList, InventoryError> {
        for _ in 0..MAX_ATTEMPTS {
            if let Some(hosts) = self.read_once(timeout).await? {
                return self.rows(hosts);
            }
        }
        let message = format!("the list of hosts changed during each of {MAX_ATTEMPTS} reads");
        Err(InventoryError::Http(message))
    }

    /// All hosts by id. `None`: the list changed between two pages.
    async fn read_once(&self, timeout: Duration) -> Result<Option<BTreeMap<i64, CmdbHost>>, InventoryError> {
        let mut hosts: BTreeMap<i64, CmdbHost> = BTreeMap::new();
        let mut bytes = 0;
        for query in self.queries() {
            let mut ids = BTreeSet::new();
            let mut expected = None;
            loop {
                let (page, size) = self.page(&query, ids.len(), timeout).await?;
                bytes += size;
                if bytes > MAX_BYTES {
                    return Err(InventoryError::TooLarge);
                }
                if page.count > MAX_HOSTS || hosts.len() > MAX_HOSTS {
                    return Err(InventoryError::TooManyHosts);
                }
                if *expected.get_or_insert(page.count) != page.count {
                    return Ok(None);
                }
                let is_last = page.info.is_empty() || ids.len() + page.info.len() >= page.count;
                for fields in page.info {
                    let id = fields.get("bk_host_id").and_then(Value::as_i64);
                    let id = id.ok_or_else(|| no_id(&fields))?;
                    if !ids.insert(id) {
                        return Ok(None);
                    }
                    let host = hosts.entry(id).or_default();
                    host.fields = fields;
                    host.sets.extend(query.set.iter().map(|(name, _)| name.clone()));
                    host.modules.extend(query.module.iter().map(|(name, _)| name.clone()));
                }
                if is_last {
                    break;
                }
            }
            if expected.is_some_and(|count| count != ids.len()) {
                return Ok(None);
            }
        }
        Ok(Some(hosts))
    }

    /// A query for each set and module: the API does not say in which of them a host is.
    fn queries(&self) -> Vec<CmdbQuery> {
        let named = |all: &BTreeMap<String, i64>| -> Vec<Option<(String, i64)>> {
            match all.is_empty() {
                true => vec![None],
                false => all.iter().map(|(name, id)| Some((name.clone(), *id))).collect(),
            }
        };
        let modules = named(&self.selection.modules);
        let of_set = |set: Option<(String, i64)>| {
            modules.iter().map(move |module| CmdbQuery { set: set.clone(), module: module.clone() })
        };
        named(&self.selection.sets).into_iter().flat_map(of_set).collect()
    }

    async fn page(
        &self,
        query: &CmdbQuery,
        start: usize,
        timeout: Duration,
    ) -> Result<(HostPage, usize), InventoryError> {
        let fields: BTreeSet<&str> =
            HOST_FIELDS.into_iter().chain(self.selection.labels.keys().map(String::as_str)).collect();
        let mut body = json!({
            "bk_biz_id": self.selection.biz_id,
            "page": {"start": start, "limit": PAGE, "sort": "bk_host_id"},
            "fields": fields,
        });
        if let Value::Object(body) = &mut body {
            if let Some((_, set)) = &query.set {
                body.insert("bk_set_ids".to_owned(), json!([set]));
            }
            if let Some((_, module)) = &query.module {
                body.insert("bk_module_ids".to_owned(), json!([module]));
            }
            body.extend(self.credentials.clone());
        }
        let path = match &self.selection.path {
            Some(path) => path.replace("{bk_biz_id}", &self.selection.biz_id.to_string()),
            None => PATH.to_owned(),
        };
        let body = body.to_string().into_bytes();
        let answer = self.calls.call(reqwest::Method::POST, &path, body, &[], timeout).await;
        let text = answer.map_err(|error: CallError| InventoryError::Http(error.to_string()))?;
        let page = serde_json::from_str(&text)
            .map_err(|error| InventoryError::Syntax(format!("hosts from {start} on: {error}")))?;
        Ok((page, text.len()))
    }

    fn rows(&self, hosts: BTreeMap<i64, CmdbHost>) -> Result<RowList, InventoryError> {
        let mut rows = RowList::default();
        for (id, host) in hosts {
            let row = self.row(host).map_err(|why| InventoryError::Invalid {
                problems: vec![format!("bk_host_id {id}: {why}")],
                more: 0,
            })?;
            rows.push(RowPlace::Named(format!("with bk_host_id {id}").into()), row)?;
        }
        Ok(rows)
    }

    fn row(&self, host: CmdbHost) -> Result<Row, RowError> {
        let CmdbHost { fields, sets, modules } = host;
        let text =
            |name: &str| fields.get(name).and_then(Value::as_str).map(str::trim).filter(|t| !t.is_empty());
        // A host with several addresses has them as a list in one text; the first one is the agent's.
        let first = |text: &str| text.split([',', ';']).next().unwrap_or_default().trim().to_owned();
        let cloud = match fields.get("bk_cloud_id") {
            None | Some(Value::Null) => None,
            Some(value) => Some(
                value.as_u64().ok_or_else(|| RowError::not_a_number("bk_cloud_id", &value.to_string()))?,
            ),
        };
        let mut labels = BTreeMap::new();
        for (field, label) in &self.selection.labels {
            let value = match fields.get(field) {
                None | Some(Value::Null) => continue,
                Some(Value::String(text)) => text.clone(),
                Some(value @ (Value::Number(_) | Value::Bool(_))) => value.to_string(),
                Some(Value::Array(_) | Value::Object(_)) => {
                    return Err(RowError::NotALabel(field.clone()));
                }
            };
            labels.insert(label.clone(), value);
        }
        for (label, names) in [("set", sets), ("module", modules)] {
            // A host may be in several: each has a label of its own.
            for name in &names {
                labels.insert(format!("{label}.{name}"), "true".to_owned());
            }
            labels.extend(names.into_iter().next().map(|first| (label.to_owned(), first)));
        }
        Ok(Row {
            ip: text("bk_host_innerip").or_else(|| text("bk_host_innerip_v6")).map(first),
            cloud,
            supplier: self.selection.supplier,
            agent: text("bk_agent_id").map(str::to_owned),
            labels,
            vars: BTreeMap::new(),
        })
    }
}

fn no_id(fields: &Map<String, Value>) -> InventoryError {
    let name = fields.get("bk_host_innerip").and_then(Value::as_str).unwrap_or_default();
    InventoryError::Syntax(format!("host {:?} has no bk_host_id", super::rows::shown(name)))
}
