//! Rows of a pass for display, built on demand: most results are never displayed.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use super::super::PassResult;
use crate::model::{HoldReason, InstanceKey, Observed, ObservedInstance, State};
pub use crate::reconcile::SyncStatus;
use crate::reconcile::sync_statuses;

/// One instance: desired and observed state.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub key: InstanceKey,
    /// `None`: absent.
    pub seen: Option<ObservedInstance>,
    /// Reason why its host could not be observed.
    pub gap: Option<String>,
    pub sync: SyncStatus,
    /// Hold reason, and its detail.
    pub held: Option<(HoldReason, String)>,
    /// Location of its declaration.
    pub declared: Option<String>,
}

/// Every instance that is wanted or ours.
pub fn rows(pass: &PassResult) -> Vec<Row> {
    let PassResult { desired, observed, rules, plan, .. } = pass;
    let held: BTreeMap<&InstanceKey, (HoldReason, &String)> =
        plan.held.iter().map(|held| (&held.instance, (held.reason, &held.detail))).collect();
    let row = |(key, sync): (&InstanceKey, SyncStatus)| Row {
        key: key.clone(),
        seen: observed.instances.get(key).cloned(),
        gap: observed.gaps.get(&key.host).cloned(),
        sync,
        held: held.get(key).map(|(reason, detail)| (*reason, (*detail).clone())),
        declared: desired
            .instances
            .get(key)
            .filter(|want| want.origin.state != State::Absent)
            .map(|want| want.origin.place.to_string()),
    };
    // Instances of other owners are not counted.
    let ours = |key: &InstanceKey| {
        let owner = observed.instances.get(key).and_then(|seen| seen.owner.as_deref());
        desired.instances.contains_key(key) || owner == Some(rules.owner.as_str())
    };
    sync_statuses(desired, observed, plan, rules).into_iter().filter(|(key, _)| ours(key)).map(row).collect()
}

/// Number of rows that changed, not counting their report times.
pub fn count_changes(before: &Observed, now: &Observed) -> usize {
    let facts =
        |seen: &ObservedInstance| (seen.running, seen.hosted, seen.registered, seen.health, seen.process.pid);
    let (mut then, mut here) = (before.instances.iter().peekable(), now.instances.iter().peekable());
    let mut differ = 0;
    // Both are sorted by key.
    loop {
        let order = match (then.peek(), here.peek()) {
            (None, None) => break,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((a, _)), Some((b, _))) => a.cmp(b),
        };
        let old = if order.is_le() { then.next() } else { None };
        let new = if order.is_ge() { here.next() } else { None };
        differ += usize::from(old.map(|(_, seen)| facts(seen)) != new.map(|(_, seen)| facts(seen)));
    }
    let gap = |seen: &Observed| seen.gaps.keys().cloned().collect::<BTreeSet<_>>();
    differ + gap(before).symmetric_difference(&gap(now)).count()
}
