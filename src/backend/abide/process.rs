//! Process row of the gateway, with the registered and the live spec.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::read;
use crate::backend::BackendError;
use crate::gse::request::SpecWire;
use crate::model::{
    HashedSpec, Health, InstanceKey, KnownSpec, LastRun, ObservedInstance, Spec, SpecRevision,
};

#[derive(Deserialize)]
pub(super) struct ProcessWire<'a> {
    pub(super) instance: InstanceKey,
    #[serde(default)]
    unknown: bool,
    registered: bool,
    hosted: bool,
    running: bool,
    #[serde(default)]
    completed: bool,
    pid: Option<u32>,
    owner: Option<String>,
    revision: Option<SpecRevision>,
    live_revision: Option<SpecRevision>,
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

/// A spec without its secrets, and the digests computed with them.
#[derive(Deserialize)]
struct RedactedWire {
    spec: SpecWire,
    revision: SpecRevision,
    sum: String,
}

impl ProcessWire<'_> {
    pub(super) fn seen(
        &self,
        specs: &mut HashMap<String, Arc<HashedSpec>>,
    ) -> Result<ObservedInstance, BackendError> {
        let mut version =
            |raw: Option<&RawValue>, redacted: Option<&RawValue>, revision: Option<SpecRevision>| {
                let is_there = |raw: &&RawValue| raw.get() != "null";
                match (raw.filter(is_there), redacted.filter(is_there)) {
                    (Some(raw), _) => known(raw.get(), &self.labels, specs, whole).map(KnownSpec::Full),
                    (None, Some(redacted)) => {
                        known(redacted.get(), &self.labels, specs, self::redacted).map(KnownSpec::Full)
                    }
                    (None, None) => Ok(revision.map_or(KnownSpec::Unknown, KnownSpec::Digests)),
                }
            };
        let given = version(self.spec, self.spec_redacted, self.revision)?;
        let live = match self.running {
            true => version(self.live_spec, self.live_spec_redacted, self.live_revision)?,
            false => KnownSpec::Unknown,
        };
        let ran = match &self.ran {
            None => LastRun::Unknown,
            Some(Value::String(word)) if word == "never" => LastRun::Never,
            Some(Value::String(_)) => LastRun::Unknown,
            Some(ran) => {
                let revision = ran["revision"].as_str().and_then(|text| text.parse::<SpecRevision>().ok());
                revision.map_or(LastRun::Given, |revision| LastRun::Digest(revision.run))
            }
        };
        Ok(ObservedInstance {
            unknown: self.unknown,
            registered: Some(self.registered),
            hosted: Some(self.hosted),
            running: Some(self.running),
            completed: self.completed,
            labels: self.labels.clone(),
            owner: self.owner.as_deref().map(Arc::from),
            registered_spec: given,
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

/// Cache of parsed specs: thousands of rows share one spec.
fn known(
    text: &str,
    labels: &BTreeMap<String, String>,
    specs: &mut HashMap<String, Arc<HashedSpec>>,
    made: fn(&str, &BTreeMap<String, String>) -> Result<HashedSpec, BackendError>,
) -> Result<Arc<HashedSpec>, BackendError> {
    let name = format!("{text}{labels:?}");
    if let Some(spec) = specs.get(&name) {
        return Ok(Arc::clone(spec));
    }
    let spec = Arc::new(made(text, labels)?);
    specs.insert(name, Arc::clone(&spec));
    Ok(spec)
}

fn whole(text: &str, labels: &BTreeMap<String, String>) -> Result<HashedSpec, BackendError> {
    spec(&read::<SpecWire>(text)?, labels).map(HashedSpec::new)
}

fn redacted(text: &str, labels: &BTreeMap<String, String>) -> Result<HashedSpec, BackendError> {
    let wire: RedactedWire = read(text)?;
    let bytes = u128::from_str_radix(&wire.sum, 16);
    let sum = bytes.map_err(|_| BackendError::invalid_response("invalid response: sum is not hex"))?;
    Ok(HashedSpec::redacted(spec(&wire.spec, labels)?, wire.revision, sum.to_be_bytes()))
}

fn spec(wire: &SpecWire, labels: &BTreeMap<String, String>) -> Result<Spec, BackendError> {
    let mut spec = wire
        .spec()
        .map_err(|wrong| BackendError::invalid_response(format!("invalid spec in the response: {wrong}")))?;
    spec.labels = labels.clone();
    Ok(spec)
}
