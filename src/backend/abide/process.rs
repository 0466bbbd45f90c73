//! A process as the gateway tells of it, with both of its specs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::read;
use crate::backend::Fault;
use crate::gse::request::SpecWire;
use crate::model::{Health, InstanceKey, Revision, Runs, Seen, Stamped, Version};

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
    ran: Option<Value>,
}

impl ProcessWire<'_> {
    pub(super) fn seen(&self, specs: &mut HashMap<String, Arc<Stamped>>) -> Result<Seen, Fault> {
        let mut version = |raw: Option<&RawValue>, revision: Option<Revision>| match raw.map(RawValue::get) {
            None | Some("null") => Ok(revision.map_or(Version::Unknown, Version::Digests)),
            Some(text) => known(text, &self.labels, specs).map(Version::Spec),
        };
        let given = version(self.spec, self.revision)?;
        let live = if self.running { version(self.live_spec, self.live_revision)? } else { Version::Unknown };
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
) -> Result<Arc<Stamped>, Fault> {
    let name = format!("{text}{labels:?}");
    if let Some(spec) = specs.get(&name) {
        return Ok(Arc::clone(spec));
    }
    let wire: SpecWire = read(text)?;
    let mut spec =
        wire.spec().map_err(|wrong| Fault::Refused(format!("it tells of a spec whose {wrong}")))?;
    spec.labels = labels.clone();
    let spec = Arc::new(Stamped::new(spec));
    specs.insert(name, Arc::clone(&spec));
    Ok(spec)
}
