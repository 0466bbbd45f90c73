//! A process as the gateway tells of it, with both of its specs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::read;
use crate::backend::Fault;
use crate::gse::request::SpecWire;
use crate::model::{Health, InstanceKey, Revision, Runs, Seen, Spec, Stamped, Version};

#[derive(Deserialize)]
pub(super) struct ProcessWire<'a> {
    pub(super) instance: InstanceKey,
    registered: bool,
    hosted: bool,
    running: bool,
    pid: Option<u32>,
    owner: Option<String>,
    revision: Option<Revision>,
    live_revision: Option<Revision>,
    labels: BTreeMap<String, String>,
    health: String,
    since: Option<String>,
    report_time: Option<String>,
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
    #[serde(borrow)]
    live_spec: Option<&'a RawValue>,
    #[serde(borrow)]
    spec_redacted: Option<&'a RawValue>,
    #[serde(borrow)]
    live_spec_redacted: Option<&'a RawValue>,
    ran: Option<Value>,
}

/// A spec without its secrets, and the digests that were made with them.
#[derive(Deserialize)]
struct RedactedWire {
    spec: SpecWire,
    revision: Revision,
    sum: String,
}

impl ProcessWire<'_> {
    pub(super) fn seen(&self, specs: &mut HashMap<String, Arc<Stamped>>) -> Result<Seen, Fault> {
        let mut version =
            |raw: Option<&RawValue>, redacted: Option<&RawValue>, revision: Option<Revision>| {
                let is_there = |raw: &&RawValue| raw.get() != "null";
                match (raw.filter(is_there), redacted.filter(is_there)) {
                    (Some(raw), _) => known(raw.get(), &self.labels, specs, whole).map(Version::Spec),
                    (None, Some(redacted)) => {
                        known(redacted.get(), &self.labels, specs, self::redacted).map(Version::Spec)
                    }
                    (None, None) => Ok(revision.map_or(Version::Unknown, Version::Digests)),
                }
            };
        let given = version(self.spec, self.spec_redacted, self.revision)?;
        let live = match self.running {
            true => version(self.live_spec, self.live_spec_redacted, self.live_revision)?,
            false => Version::Unknown,
        };
        let ran = match &self.ran {
            None => Runs::Unknown,
            Some(Value::String(word)) if word == "never" => Runs::Never,
            Some(Value::String(_)) => Runs::Unknown,
            Some(ran) => {
                let revision = ran["revision"].as_str().and_then(|text| text.parse::<Revision>().ok());
                revision.map_or(Runs::Given, |revision| Runs::Digest(revision.run))
            }
        };
        Ok(Seen {
            unknown: false,
            registered: Some(self.registered),
            hosted: Some(self.hosted),
            running: Some(self.running),
            labels: self.labels.clone(),
            owner: self.owner.as_deref().map(Arc::from),
            given,
            live,
            ran,
            health: Health::ALL.into_iter().find(|one| one.word() == self.health).unwrap_or_default(),
            pid: self.pid,
            started: None,
            not_owned: false,
            since: self.since.as_deref().and_then(crate::clock::read),
            report_time: self.report_time.as_deref().and_then(crate::clock::read),
        })
    }
}

/// Thousands of rows tell of the same spec.
fn known(
    text: &str,
    labels: &BTreeMap<String, String>,
    specs: &mut HashMap<String, Arc<Stamped>>,
    made: fn(&str, &BTreeMap<String, String>) -> Result<Stamped, Fault>,
) -> Result<Arc<Stamped>, Fault> {
    let name = format!("{text}{labels:?}");
    if let Some(spec) = specs.get(&name) {
        return Ok(Arc::clone(spec));
    }
    let spec = Arc::new(made(text, labels)?);
    specs.insert(name, Arc::clone(&spec));
    Ok(spec)
}

fn whole(text: &str, labels: &BTreeMap<String, String>) -> Result<Stamped, Fault> {
    spec(&read::<SpecWire>(text)?, labels).map(Stamped::new)
}

fn redacted(text: &str, labels: &BTreeMap<String, String>) -> Result<Stamped, Fault> {
    let wire: RedactedWire = read(text)?;
    let bytes = u128::from_str_radix(&wire.sum, 16);
    let sum = bytes.map_err(|_| Fault::Refused("its answer cannot be read: sum is not hex".to_owned()))?;
    Ok(Stamped::redacted(spec(&wire.spec, labels)?, wire.revision, sum.to_be_bytes()))
}

fn spec(wire: &SpecWire, labels: &BTreeMap<String, String>) -> Result<Spec, Fault> {
    let mut spec =
        wire.spec().map_err(|wrong| Fault::Refused(format!("it tells of a spec whose {wrong}")))?;
    spec.labels = labels.clone();
    Ok(spec)
}
