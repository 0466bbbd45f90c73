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
    pub hosts: Vec<HostWire>,
    pub agent_id_list: Vec<String>,
    pub op_type: Option<i64>,
    pub spec: Option<SpecWire>,
    pub page: Option<PageWire>,
    pub task_id: Option<String>,
    /// Sent by Abide clients with a reload: the fields that take effect.
    pub takes: Option<Vec<String>>,
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

    /// Each host once, in request order, from `hosts` and `agent_id_list`.
    pub fn targets(&self) -> Result<Vec<Host>, RequestError> {
        let mut all: Vec<Host> = Vec::with_capacity(self.hosts.len() + self.agent_id_list.len());
        let mut seen = std::collections::HashSet::new();
        for (at, host) in self.hosts.iter().enumerate() {
            let host = host.host(&format!("hosts[{at}]"))?;
            if seen.insert(host.key.clone()) {
                all.push(host);
            }
        }
        for (at, id) in self.agent_id_list.iter().enumerate() {
            let wrong =
                |error| RequestError::new(format!("agent_id_list[{at}]"), format!("cannot be used: {error}"));
            let key = match id.parse() {
                // Callers without an agent id send the address in its place.
                Ok(key @ HostKey::Address { .. }) => key,
                Ok(HostKey::Agent(_)) | Err(_) => HostKey::Agent(id.parse().map_err(wrong)?),
            };
            let host = Host { key, supplier: None, agent_id: None };
            if seen.insert(host.key.clone()) {
                all.push(host);
            }
        }
        if all.is_empty() { Err(RequestError::missing("hosts")) } else { Ok(all) }
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

    /// The spec, with the labels of `meta`.
    pub fn spec(&self) -> Result<Option<Spec>, RequestError> {
        let Some(wire) = &self.spec else { return Ok(None) };
        let mut spec = wire.spec()?;
        let labels = self.meta.labels.iter().flatten();
        spec.labels = labels.map(|(name, value)| (name.clone(), value.to_string())).collect();
        Ok(Some(spec))
    }
}

impl HostWire {
    fn host(&self, field: &str) -> Result<Host, RequestError> {
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
