//! Check of a selection: one that means nothing is a mistake.

use std::collections::{BTreeMap, BTreeSet};

use super::error::ApplyError;
use super::input::PlanInput;
use crate::execute::ledger;
use crate::manifest::did_you_mean;
use crate::model::{InstanceKey, ProcessKey};
use crate::observe::{Target, TargetError};

/// Refuses a selection, or a name in it, that is in neither the manifests nor the observed state nor the ledger. A host that
/// cannot be observed may have it.
pub async fn check_selection<T: Target>(target: &T, input: &PlanInput) -> Result<(), ApplyError> {
    let selection = &input.rules.selection;
    if selection.is_everything() || !input.observed.gaps.is_empty() {
        return Ok(());
    }
    let declared = input.loaded.desired.instances.iter();
    let mut known: Vec<KnownInstance<'_>> = declared
        .map(|(key, want)| (key, Some(&want.origin.declared), &want.spec.labels))
        .chain(input.observed.instances.iter().map(|(key, seen)| (key, None, &seen.labels)))
        .collect();
    if unknown(input, &known).is_none() {
        return Ok(());
    }
    let recorded = ledger::read(target.state(), target.name()).await;
    let recorded = recorded.map_err(|error| TargetError::state(target.name(), error))?.entries;
    let none = BTreeMap::new();
    known.extend(recorded.keys().map(|key| (key, None, &none)));
    unknown(input, &known).map_or(Ok(()), Err)
}

/// An instance with its declared name and labels.
type KnownInstance<'a> = (&'a InstanceKey, Option<&'a ProcessKey>, &'a BTreeMap<String, String>);

/// The error of the first name that none of these instances has, or of a selection of none of them.
fn unknown(input: &PlanInput, known: &[KnownInstance<'_>]) -> Option<ApplyError> {
    let selection = &input.rules.selection;
    let has = |name: &ProcessKey| {
        known.iter().any(|(key, declared, _)| key.process() == *name || *declared == Some(name))
    };
    if let Some(name) = selection.include.iter().find(|name| !has(name)) {
        let names: BTreeSet<String> = known
            .iter()
            .flat_map(|(key, declared, _)| [Some(key.process()), declared.cloned()])
            .flatten()
            .map(|name| name.to_string())
            .collect();
        let meant = did_you_mean(&name.to_string(), names.iter().map(String::as_str)).map(str::to_owned);
        let what = format!("target {} has no process {name}, and no manifest declares it", input.target);
        return Some(ApplyError::NothingSelected { what, meant });
    }
    let is_meant = |(key, declared, labels): &KnownInstance<'_>| selection.selects(key, *declared, labels);
    let what = || "no instance matches this selection".to_owned();
    (!known.iter().any(is_meant)).then(|| ApplyError::NothingSelected { what: what(), meant: None })
}
