//! Names of processes for verbs without manifests: a declared name means all of its instances.
//!
//! `web/api` of a process with `instances: 3` is registered as `web/api_1` to `web/api_3`. The active revision of each owner
//! decides which instances a name declares.

use std::collections::{BTreeMap, BTreeSet};

use super::commands::manual::{InstanceArgs, InstanceSelector};
use super::sync_status::active_desired;
use super::target::ConnectedTarget;
use super::{Exit, Failure};
use crate::engine::stored_revisions;
use crate::manifest::did_you_mean;
use crate::model::{InstanceKey, Observed, ProcessKey, Selection};

/// The declared name of each instance of the active revisions.
#[derive(Debug, Default)]
pub struct DeclaredNames(BTreeMap<InstanceKey, ProcessKey>);

/// Instances in which a name is searched.
pub struct KnownNames<'a> {
    pub declared: &'a DeclaredNames,
    pub observed: &'a Observed,
    /// Further instances: of the ledger, and of holds.
    pub recorded: Vec<&'a InstanceKey>,
}

impl DeclaredNames {
    /// Reads the active revisions. An owner whose revision is not stored declares no names.
    pub async fn read(live: &ConnectedTarget) -> DeclaredNames {
        let mut names = BTreeMap::new();
        for owner in stored_revisions::owners(&live.state).await.unwrap_or_default() {
            let Some(desired) = active_desired(live, &owner).await else { continue };
            let declared = desired.instances.iter().map(|(key, want)| (key, &want.origin.declared));
            names.extend(declared.map(|(key, name)| (key.clone(), name.clone())));
        }
        DeclaredNames(names)
    }

    pub fn of(&self, key: &InstanceKey) -> Option<&ProcessKey> {
        self.0.get(key)
    }

    /// Whether the arguments and the selection select an instance.
    pub fn selects(
        &self,
        args: &InstanceArgs,
        selection: &Selection,
        key: &InstanceKey,
        labels: &BTreeMap<String, String>,
    ) -> bool {
        let declared = self.of(key);
        args.matches(key, declared) && selection.selects(key, declared, labels)
    }

    /// The message for arguments that name none of these instances; `None`: each of them names one.
    pub fn unknown_message(&self, args: &InstanceArgs, keys: &[&InstanceKey]) -> Option<String> {
        let is_known = |one: &InstanceSelector| keys.iter().any(|key| one.matches(key, self.of(key)));
        let unknown = args.processes.iter().filter(|one| !is_known(one));
        let unknown: Vec<String> = unknown.map(ToString::to_string).collect();
        let target = &args.target.target;
        (!unknown.is_empty()).then(|| format!("target {target} has no process {}", unknown.join(", ")))
    }
}

impl KnownNames<'_> {
    fn instances(&self) -> impl Iterator<Item = &InstanceKey> {
        let observed = self.observed.instances.keys();
        observed.chain(self.declared.0.keys()).chain(self.recorded.iter().copied())
    }

    /// Whether a name is in the manifests, the observed state or the records.
    pub fn has(&self, one: &InstanceSelector) -> bool {
        self.instances().any(|key| one.matches(key, self.declared.of(key)))
    }

    /// All names, for a suggestion.
    fn names(&self) -> BTreeSet<String> {
        let declared = self.declared.0.values().map(ToString::to_string);
        self.instances().map(|key| key.process().to_string()).chain(declared).collect()
    }

    /// The message for a selection without instances. A host that cannot be observed may have some.
    pub fn nothing_selected(&self, selection: &Selection) -> Failure {
        let message = "no instance matches this selection";
        if !self.observed.gaps.is_empty() {
            return Failure::new(Exit::Failed, message).hint("some hosts cannot be observed");
        }
        let names = self.names();
        let is_unknown = |name: &&ProcessKey| !names.contains(&name.to_string());
        let failure = Failure::new(Exit::Usage, message);
        let first = selection.include.iter().find(is_unknown).map(ToString::to_string);
        match first.and_then(|name| did_you_mean(&name, names.iter().map(String::as_str)).map(str::to_owned))
        {
            Some(meant) => failure.hint(format!("did you mean {meant}?")),
            None => failure.hint("`abide get processes` lists them"),
        }
    }

    /// The message for a name that is not known. A host that cannot be observed may have it.
    pub fn unknown(&self, one: &InstanceSelector, target: &str) -> Failure {
        let message = format!("target {target} has no process {one}");
        if !self.observed.gaps.is_empty() {
            let hosts = self.observed.gaps.len();
            let message = format!("{message}, and {hosts} of its hosts cannot be observed");
            return Failure::new(Exit::Failed, message).hint("`abide get hosts` lists them");
        }
        let names = self.names();
        let failure = Failure::new(Exit::Usage, message);
        match did_you_mean(&one.process().to_string(), names.iter().map(String::as_str)) {
            Some(meant) => failure.hint(format!("did you mean {meant}?")),
            None => failure.hint("`abide get processes` lists them"),
        }
    }
}
