//! Viewer: the part of a controller's status that a reader may see.
//!
//! A person whose grant does not contain everything sees instances of the own namespaces, hosts and owners. Texts that
//! may name other instances are left out: notes, manifest problems, and events that belong to no instance.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::redact::{self, View};
use crate::access::Grant;
use crate::contract::{EventDetails, EventEntry, HistoryEntry, OperationCounts, PlanDocument};
use crate::control::status::{ControllerStatus, LogEntry, Row};
use crate::model::{HoldReason, InstanceKey, Name};

/// A reader of responses.
#[derive(Clone, Debug)]
pub struct Viewer {
    pub view: View,
    /// `None`: every instance.
    grant: Option<Arc<Grant>>,
    /// The owner of the controller's instances.
    owner: Arc<str>,
}

impl Viewer {
    /// A reader of everything.
    pub fn new(view: View, owner: &str) -> Viewer {
        Viewer { view, grant: None, owner: Arc::from(owner) }
    }

    /// A person.
    pub fn of_grant(grant: &Arc<Grant>, owner: &str) -> Viewer {
        let grant = Some(Arc::clone(grant)).filter(|grant| !grant.sees_everything());
        Viewer { view: View::Full, grant, owner: Arc::from(owner) }
    }

    pub fn sees_everything(&self) -> bool {
        self.grant.is_none()
    }

    /// An instance of the controller's owner.
    pub fn sees(&self, key: &InstanceKey) -> bool {
        self.sees_owned(key, &self.owner)
    }

    fn sees_owned(&self, key: &InstanceKey, owner: &str) -> bool {
        self.grant.as_ref().is_none_or(|grant| grant.may_see(key, Some(owner)))
    }

    /// A pause of everything concerns every reader.
    pub fn sees_pause(&self, namespace: Option<&Name>) -> bool {
        let sees = |grant: &Arc<Grant>| {
            namespace.is_none_or(|namespace| grant.check_namespace(namespace.as_str()).is_ok())
        };
        self.grant.as_ref().is_none_or(sees)
    }

    pub fn rows<'a>(&'a self, status: &'a ControllerStatus) -> impl Iterator<Item = &'a Row> {
        let sees = |row: &&Row| {
            let owner = row.seen.as_ref().and_then(|seen| seen.owner.as_deref());
            self.sees_owned(&row.key, owner.unwrap_or(&self.owner))
        };
        status.rows().iter().filter(sees)
    }

    /// The detail of a held change. For a scoped reader it is left out where it may name another instance.
    pub fn detail(&self, reason: HoldReason, detail: &str) -> String {
        let names_others = matches!(
            reason,
            HoldReason::WaitingForDependency
                | HoldReason::IdentityMix
                | HoldReason::NotOwned
                | HoldReason::MoveUnsupported
        );
        if names_others && !self.sees_everything() { String::new() } else { detail.to_owned() }
    }

    fn sees_entry(&self, entry: &LogEntry) -> bool {
        self.sees_everything()
            || match &entry.details {
                EventDetails::Step { instance, .. } | EventDetails::Relaunched { instance, .. } => {
                    self.sees(instance)
                }
                _ => false,
            }
    }

    /// The entry as this reader may see it. `None`: not at all.
    pub fn entry(&self, entry: &LogEntry) -> Option<LogEntry> {
        self.sees_entry(entry).then(|| match self.view {
            View::Full => entry.clone(),
            View::Redacted => entry.redacted(),
        })
    }

    pub fn event(&self, entry: &LogEntry) -> Option<EventEntry> {
        self.sees_entry(entry).then(|| match self.view {
            View::Full => entry.event(),
            View::Redacted => entry.redacted_event(),
        })
    }

    pub fn plan(&self, plan: PlanDocument) -> PlanDocument {
        let plan = if self.sees_everything() { plan } else { self.scoped_plan(plan) };
        match self.view {
            View::Full => plan,
            View::Redacted => redact::plan(plan),
        }
    }

    fn scoped_plan(&self, mut plan: PlanDocument) -> PlanDocument {
        for wave in &mut plan.waves {
            wave.retain(|step| {
                self.sees(&step.instance) && step.from.as_ref().is_none_or(|from| self.sees(from))
            });
        }
        plan.held.retain(|held| self.sees(&held.instance));
        for held in &mut plan.held {
            held.detail = self.detail(held.reason, &held.detail);
        }
        let steps = || plan.waves.iter().flatten();
        let shown: BTreeSet<_> = steps().map(|step| step.instance.process()).collect();
        plan.gates.retain(|gate| shown.contains(&gate.process));
        plan.notes.clear();
        let mut summary = OperationCounts {
            instances: steps().map(|step| &step.instance).collect::<BTreeSet<_>>().len(),
            held: plan.held.len(),
            unknown: plan.held.iter().filter(|held| held.reason.is_unknown()).count(),
            ..OperationCounts::default()
        };
        steps().for_each(|step| *summary.of(step.op) += 1);
        PlanDocument { summary, ..plan }
    }

    pub fn history(&self, mut entries: Vec<HistoryEntry>) -> Vec<HistoryEntry> {
        if !self.sees_everything() {
            for entry in &mut entries {
                entry.steps.retain(|step| self.sees(&step.instance));
                let instances: BTreeSet<_> = entry.steps.iter().map(|step| &step.instance).collect();
                let mut summary =
                    OperationCounts { instances: instances.len(), ..OperationCounts::default() };
                entry.steps.iter().for_each(|step| *summary.of(step.op) += 1);
                (entry.summary, entry.failed) = (summary, None);
                entry.other.clear();
            }
            entries.retain(|entry| !entry.steps.is_empty());
        }
        match self.view {
            View::Full => entries,
            View::Redacted => redact::history(entries),
        }
    }
}
