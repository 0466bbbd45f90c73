//! GSE requests: tolerant parsing, with errors that name the field.
//!
//! Real callers send unknown fields, numeric labels, `hosts` or `agent_id_list`, `monitor_policy` or
//! `alive_monitor_policy`, and empty texts for unset fields. All of these are accepted. A missing or out-of-range field is
//! an error that names it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::codes::GseOp;
pub use super::spec_request::SpecWire;
use crate::model::{Host, HostKey, ProcessKey, Spec};

/// An invalid request: the field, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    pub field: String,
    pub why: String,
}

impl RequestError {
    pub(super) fn missing(field: &str) -> RequestError {
        RequestError { field: field.to_owned(), why: "is missing".to_owned() }
    }

    pub(super) fn new(field: impl Into<String>, why: impl Into<String>) -> RequestError {
        RequestError { field: field.into(), why: why.into() }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.field, self.why)
    }
}

impl std::error::Error for RequestError {}

/// The body of every call about processes. Each call checks the parts that it requires.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ProcRequest {
    pub meta: MetaWire,
    #[serde(deserialize_with = "loose_hosts")]
    pub hosts: Vec<HostWire>,
    #[serde(deserialize_with = "loose_ids")]
    pub agent_id_list: Vec<String>,
    pub op_type: Option<i64>,
    pub spec: Option<SpecWire>,
    pub page: Option<PageWire>,
    pub task_id: Option<String>,
    /// Sent by Abide clients with a reload: the fields that take effect.
    pub takes: Option<Vec<String>>,
    /// Sent by Abide clients: the operation repairs drift, and hooks run only if they ask for that.
    pub repairs: Option<bool>,
}

/// get_proc_operate_result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TaskQuery {
    #[schemars(required)]
    pub task_id: Option<String>,
}

/// JOB's get_proc_result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct JobTaskQuery {
    #[schemars(required)]
    pub bk_gse_taskid: Option<String>,
}

/// operate_proc_multi: several processes, with different operations.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MultiRequest {
    pub proc_operate_req: Vec<ProcRequest>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Meta")]
pub struct MetaWire {
    #[serde(deserialize_with = "loose_text")]
    pub namespace: Option<String>,
    #[serde(deserialize_with = "loose_text")]
    pub name: Option<String>,
    pub labels: Option<BTreeMap<String, Loose>>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Host")]
pub struct HostWire {
    #[serde(deserialize_with = "loose_text")]
    pub ip: Option<String>,
    #[serde(deserialize_with = "loose_number")]
    pub bk_cloud_id: Option<u64>,
    #[serde(deserialize_with = "loose_number")]
    pub bk_supplier_id: Option<u64>,
    #[serde(deserialize_with = "loose_text")]
    pub bk_agent_id: Option<String>,
    /// An entry of another form, and the error: its row is the only one that fails.
    #[serde(skip)]
    pub unread: Option<Box<(Value, String)>>,
}

/// The hosts that a request names, and entries that name none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    pub hosts: Vec<Host>,
    pub invalid: Vec<InvalidHost>,
}

/// An entry of `hosts` or `agent_id_list` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidHost {
    pub written: WrittenHost,
    pub error: RequestError,
}

/// A host as the caller wrote it, for the key of its result row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WrittenHost {
    /// `cloud:supplier:ip`.
    pub v1: String,
    /// `cloud:ip`, or the agent id.
    pub v2: String,
    pub ip: String,
    pub cloud: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Page")]
pub struct PageWire {
    pub start: Option<u64>,
    pub limit: Option<u64>,
}

/// Value of a label or environment variable: a text, number or boolean.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "TextOrNumber")]
pub enum Loose {
    Text(String),
    Number(serde_json::Number),
    Bool(bool),
    Nothing(()),
}

impl fmt::Display for Loose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loose::Text(text) => f.write_str(text),
            Loose::Number(number) => write!(f, "{number}"),
            Loose::Bool(yes) => write!(f, "{yes}"),
            Loose::Nothing(()) => Ok(()),
        }
    }
}

/// An empty text is unset; a number in place of a text is its digits.
pub(super) fn loose_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::String(text) if !text.is_empty() => Some(text),
        Value::Number(number) => Some(number.to_string()),
        Value::Null | Value::String(_) => None,
        other => {
            return Err(serde::de::Error::custom(format!("expected a text, found {}", kind(&other))));
        }
    })
}

/// Entries that are judged one by one.
fn loose_hosts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<HostWire>, D::Error> {
    let entries = Option::<Vec<Value>>::deserialize(from)?.unwrap_or_default();
    Ok(entries.into_iter().map(HostWire::read).collect())
}

/// The same for agent ids: an entry that is not a text names no agent.
fn loose_ids<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let entries = Option::<Vec<Value>>::deserialize(from)?.unwrap_or_default();
    Ok(entries.iter().map(|entry| value_text(entry).unwrap_or_default()).collect())
}

/// A text or number as text.
fn value_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

/// A whole number, or a text of its digits. An empty text is unset.
pub(super) fn loose_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let wrong = || serde::de::Error::custom("invalid value, expected u64");
    match Value::deserialize(from)? {
        Value::Null => Ok(None),
        Value::String(text) if text.is_empty() => Ok(None),
        Value::String(text) => text.parse().map(Some).map_err(|_| wrong()),
        Value::Number(number) => number.as_u64().map(Some).ok_or_else(wrong),
        Value::Bool(_) | Value::Array(_) | Value::Object(_) => Err(wrong()),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl ProcRequest {
    pub fn process(&self) -> Result<ProcessKey, RequestError> {
        let name = |field: &str, text: &Option<String>| match text {
            None => Err(RequestError::missing(field)),
            Some(text) => {
                text.parse().map_err(|error| RequestError::new(field, format!("cannot be used: {error}")))
            }
        };
        Ok(ProcessKey {
            namespace: name("meta.namespace", &self.meta.namespace)?,
            name: name("meta.name", &self.meta.name)?,
        })
    }

    /// Each host once, in request order, from `hosts` and `agent_id_list`. An entry that cannot be used concerns no other.
    pub fn read_targets(&self) -> Result<Targets, RequestError> {
        let mut all = Targets::default();
        let mut seen = std::collections::HashSet::new();
        let hosts = self.hosts.iter().enumerate().map(|(at, host)| {
            let place = format!("hosts[{at}]");
            (host.host(&place), host.written(&place))
        });
        let agents = self.agent_id_list.iter().enumerate().map(|(at, id)| {
            let place = format!("agent_id_list[{at}]");
            (agent(&place, id), WrittenHost::agent(id, &place))
        });
        for (host, written) in hosts.chain(agents) {
            match host {
                Ok(host) if seen.insert(host.key.clone()) => all.hosts.push(host),
                Ok(_) => {}
                Err(error) => all.invalid.push(InvalidHost { written, error }),
            }
        }
        match all.hosts.is_empty() && all.invalid.is_empty() {
            true => Err(RequestError::missing("hosts")),
            false => Ok(all),
        }
    }

    /// The same for a call about one process: without any usable host it is refused.
    pub fn usable_targets(&self) -> Result<Targets, RequestError> {
        let all = self.read_targets()?;
        match all.invalid.first().filter(|_| all.hosts.is_empty()) {
            Some(invalid) => Err(invalid.error.clone()),
            None => Ok(all),
        }
    }

    /// The hosts, if every entry can be used.
    pub fn targets(&self) -> Result<Vec<Host>, RequestError> {
        let Targets { hosts, invalid } = self.read_targets()?;
        match invalid.into_iter().next() {
            Some(InvalidHost { error, .. }) => Err(error),
            None => Ok(hosts),
        }
    }

    /// The spelling of addresses that are not in canonical form.
    pub fn written(&self) -> HashMap<HostKey, String> {
        let spelled = self.hosts.iter().filter_map(|wire| {
            let text = wire.ip.as_deref().filter(|text| text.contains(':'))?;
            let host = wire.host("").ok()?;
            match &host.key {
                HostKey::Address { ip, .. } if ip.to_string() != text => Some((host.key, text.to_owned())),
                HostKey::Address { .. } | HostKey::Agent(_) => None,
            }
        });
        spelled.collect()
    }

    /// The spec of an operation. A live check without the whole identity has none: it means the process by its name.
    pub fn spec_of_op(&self, op: Option<GseOp>) -> Result<Option<Spec>, RequestError> {
        let identified = |spec: &SpecWire| spec.required_identity().is_ok();
        match op {
            Some(GseOp::Status) if !self.spec.as_ref().is_some_and(identified) => Ok(None),
            Some(_) | None => self.spec(),
        }
    }

    /// The spec, with the labels of `meta`.
    pub fn spec(&self) -> Result<Option<Spec>, RequestError> {
        let Some(wire) = &self.spec else { return Ok(None) };
        let mut spec = wire.spec()?;
        let labels = self.meta.labels.iter().flatten();
        spec.labels = labels.map(|(name, value)| (name.clone(), value.to_string())).collect();
        Ok(Some(spec))
    }
}

/// The agent of an id. Callers without one send the address in its place.
fn agent(place: &str, id: &str) -> Result<Host, RequestError> {
    let key = match id.parse() {
        Ok(key @ HostKey::Address { .. }) => key,
        Ok(HostKey::Agent(_)) | Err(_) => HostKey::Agent(
            id.parse().map_err(|error| RequestError::new(place, format!("cannot be used: {error}")))?,
        ),
    };
    Ok(Host { key, supplier: None, agent_id: None })
}

impl WrittenHost {
    pub fn agent(id: &str, place: &str) -> WrittenHost {
        let id = if id.is_empty() { place } else { id }.to_owned();
        WrittenHost { v1: id.clone(), v2: id, ..WrittenHost::default() }
    }
}

impl HostWire {
    /// An entry of any form.
    pub fn read(entry: Value) -> HostWire {
        HostWire::deserialize(&entry).unwrap_or_else(|_| {
            let is_wrong = |name: &&str| entry.get(name).is_some_and(|id| loose_number(id).is_err());
            let why = match ["bk_cloud_id", "bk_supplier_id"].into_iter().find(is_wrong) {
                Some(field) => format!("cannot be used: {field} is not a whole number"),
                None if entry.is_object() => "cannot be used: ip or bk_agent_id is not a text".to_owned(),
                None => "is not an object".to_owned(),
            };
            HostWire { unread: Some(Box::new((entry, why))), ..HostWire::default() }
        })
    }

    /// The host as written. `place`: the name of an entry without an address and an agent id.
    pub fn written(&self, place: &str) -> WrittenHost {
        let number = |value: Option<u64>| value.map(|number| number.to_string());
        let raw = |name: &str| self.unread.as_ref().and_then(|unread| value_text(unread.0.get(name)?));
        let ip = self.ip.clone().or_else(|| raw("ip")).filter(|ip| !ip.is_empty());
        let Some(ip) = ip else {
            let id = self.bk_agent_id.clone().or_else(|| raw("bk_agent_id")).unwrap_or_default();
            return WrittenHost::agent(&id, place);
        };
        let cloud = number(self.bk_cloud_id).or_else(|| raw("bk_cloud_id")).unwrap_or_default();
        let supplier = number(self.bk_supplier_id).or_else(|| raw("bk_supplier_id"));
        let supplier = supplier.unwrap_or_else(|| "0".to_owned());
        WrittenHost {
            v1: format!("{cloud}:{supplier}:{ip}"),
            v2: format!("{cloud}:{ip}"),
            ip,
            cloud: self.bk_cloud_id,
        }
    }

    fn host(&self, field: &str) -> Result<Host, RequestError> {
        if let Some(unread) = &self.unread {
            return Err(RequestError::new(field, unread.1.clone()));
        }
        let agent_id = match &self.bk_agent_id {
            None => None,
            Some(id) => Some(id.parse().map_err(|error| {
                RequestError::new(format!("{field}.bk_agent_id"), format!("cannot be used: {error}"))
            })?),
        };
        let Some(ip) = &self.ip else {
            let id = agent_id.ok_or_else(|| RequestError::missing(&format!("{field}.ip")))?;
            return Ok(Host { key: HostKey::Agent(id), supplier: self.bk_supplier_id, agent_id: None });
        };
        let ip = ip.parse().map_err(|_| RequestError::new(format!("{field}.ip"), "is not an IP address"))?;
        let cloud = self.bk_cloud_id.ok_or_else(|| RequestError::missing(&format!("{field}.bk_cloud_id")))?;
        Ok(Host { key: HostKey::Address { cloud, ip }, supplier: self.bk_supplier_id, agent_id })
    }
}
