//! Process row of the gateway, with the registered and the live spec.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::value::RawValue;

use super::read;
use crate::backend::BackendError;
use crate::contract::{GatewayProcess, ReportedSpec, RunReport};
use crate::gse::request::SpecWire;
use crate::model::{
    HashedSpec, Health, KnownSpec, LastRun, ObservedInstance, ObservedSpecs, Protection, RunningProcess,
    Spec, SpecRevision,
};

/// The observed instance of a row.
pub(super) fn observed_instance(
    row: &GatewayProcess<&RawValue>,
    specs: &mut HashMap<String, Arc<HashedSpec>>,
) -> Result<ObservedInstance, BackendError> {
    let mut labels = row.labels.clone();
    let protections =
        labels.remove("abide_protect").map(|text| Protection::of_label(&text)).unwrap_or_default();
    let mut version = |raw: Option<&RawValue>,
                       redacted: Option<&RawValue>,
                       revision: Option<SpecRevision>| match (raw, redacted) {
        (Some(raw), _) => known(raw.get(), &labels, specs, whole).map(KnownSpec::Full),
        (None, Some(redacted)) => known(redacted.get(), &labels, specs, self::redacted).map(KnownSpec::Full),
        (None, None) => Ok(revision.map_or(KnownSpec::Unknown, KnownSpec::Digests)),
    };
    let given = version(row.spec.flatten(), row.spec_redacted, row.revision)?;
    let live = match row.running {
        true => version(row.live_spec.flatten(), row.live_spec_redacted, row.live_revision)?,
        false => KnownSpec::Unknown,
    };
    let ran = match &row.ran {
        None => LastRun::Unknown,
        Some(RunReport::Word(word)) if word == "never" => LastRun::Never,
        Some(RunReport::Word(_)) => LastRun::Unknown,
        Some(RunReport::With { revision, .. }) => {
            revision.map_or(LastRun::Given, |revision| LastRun::Digest(revision.run))
        }
    };
    Ok(ObservedInstance {
        unknown: row.unknown,
        registered: Some(row.registered),
        hosted: Some(row.hosted),
        running: Some(row.running),
        completed: row.completed,
        labels,
        owner: row.owner.as_deref().map(Arc::from),
        health: Health::ALL.into_iter().find(|one| one.word() == row.health).unwrap_or_default(),
        since: row.since.as_deref().and_then(crate::clock::read),
        report_time: row.report_time.as_deref().and_then(crate::clock::read),
        specs: ObservedSpecs {
            registered: given,
            live,
            is_live_assumed: row.live_spec_unknown && row.running,
            ran,
            drifted_files: row.drifted_files(),
            protections,
        },
        process: RunningProcess { pid: row.pid, started: None, not_owned: false },
    })
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
    let wire: ReportedSpec<SpecWire> = read(text)?;
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
