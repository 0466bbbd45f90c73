//! Sync status of each instance: one word for operators and scripts.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::rules::Rules;
pub use crate::model::SyncStatus;
use crate::model::{Desired, HoldReason, InstanceKey, Observed, Plan, Presence, State};

/// The status of every desired or observed instance, except those that are absent as wanted.
pub fn sync_statuses<'a>(
    desired: &'a Desired,
    observed: &'a Observed,
    plan: &Plan,
    rules: &Rules,
) -> BTreeMap<&'a InstanceKey, SyncStatus> {
    let held: HashMap<&InstanceKey, HoldReason> =
        plan.held.iter().map(|held| (&held.instance, held.reason)).collect();
    let moves: HashSet<&InstanceKey> =
        plan.steps().flat_map(|step| [Some(&step.instance), step.from.as_ref()]).flatten().collect();
    let mut all = BTreeMap::new();
    for (key, want) in &desired.instances {
        let presence = observed.get(key);
        if want.origin.state == State::Absent && presence == Presence::Absent {
            continue;
        }
        let sync = match held.get(key) {
            _ if !rules.selection.selects(key, Some(&want.origin.declared), &want.spec.labels) => {
                SyncStatus::Unknown
            }
            Some(HoldReason::Paused) => SyncStatus::Paused,
            Some(HoldReason::UnderWay) => SyncStatus::OutOfSync,
            Some(reason) if reason.is_unknown() => SyncStatus::Unknown,
            Some(_) => SyncStatus::Held,
            None if moves.contains(key) => SyncStatus::OutOfSync,
            None if matches!(presence, Presence::Unknown(_)) => SyncStatus::Unknown,
            None => SyncStatus::InSync,
        };
        all.insert(key, sync);
    }
    for (key, seen) in &observed.instances {
        all.entry(key).or_insert_with(|| {
            let ours = seen.owner.as_deref() == Some(rules.owner.as_str()) && !seen.process.not_owned;
            let wanted_gone = desired.instances.contains_key(key);
            match moves.contains(key) && (wanted_gone || !ours) {
                true => SyncStatus::OutOfSync,
                // Another source declares it: these manifests cannot tell.
                false if rules.orphans.declared_elsewhere.contains(key) => SyncStatus::Unknown,
                false if ours && rules.selection.selects(key, None, &seen.labels) => SyncStatus::Orphan,
                false => SyncStatus::Unknown,
            }
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{
        DeclaredProcess, DesiredInstance, HashedSpec, Host, KnownSpec, Now, ObservedInstance, ObservedSpecs,
        Pause, SourceLocation, Spec, Time,
    };
    use crate::reconcile::{Caps, reconcile};

    fn key(name: &str) -> InstanceKey {
        format!("0:10.0.0.1:web:{name}").parse().expect("a key")
    }

    fn want(name: &str, command: &str) -> (InstanceKey, DesiredInstance) {
        let key = key(name);
        let origin = DeclaredProcess {
            place: SourceLocation { file: "a.yaml".into(), line: 1, column: 1 },
            declared: key.process(),
            state: State::Running,
            depends_on: Vec::new(),
            protect: Vec::new(),
            adopt: false,
            moved_from: Vec::new(),
            on_change: Default::default(),
            rollout: None,
            policies: Vec::new(),
        };
        let host = Host { key: key.host.clone(), supplier: None, agent_id: None };
        (
            key,
            DesiredInstance {
                host,
                spec: Arc::new(HashedSpec::new(spec(name, command))),
                origin: Arc::new(origin),
            },
        )
    }

    fn spec(name: &str, command: &str) -> Spec {
        let mut spec = Spec::default();
        // Distinct identities.
        spec.identity.value_key = Some(name.to_owned());
        spec.control.start_cmd = Some(command.to_owned());
        spec
    }

    fn seen(name: &str, command: &str, owner: &str) -> ObservedInstance {
        let spec = KnownSpec::Full(Arc::new(HashedSpec::new(spec(name, command))));
        ObservedInstance {
            registered: Some(true),
            hosted: Some(true),
            running: Some(true),
            owner: Some(owner.into()),
            specs: ObservedSpecs { registered: spec.clone(), live: spec, ..ObservedSpecs::default() },
            ..ObservedInstance::default()
        }
    }

    #[test]
    fn each_sync_status_follows_from_the_plan() {
        let desired = Desired {
            instances: [want("same", "a"), want("differs", "b"), want("absent", "a")].into(),
            ..Desired::default()
        };
        let mut observed = Observed { at: Time(1_000), ..Observed::default() };
        observed.instances.insert(key("same"), seen("same", "a", "default"));
        observed.instances.insert(key("differs"), seen("differs", "a", "default"));
        observed.instances.insert(key("orphan"), seen("orphan", "a", "default"));
        observed.instances.insert(key("other"), seen("other", "a", "somebody"));
        let mut rules = Rules::new(Caps::LOCAL);
        let now = Now { at: Time(1_000), offsets: BTreeMap::new() };
        let words = |rules: &Rules, observed: &Observed| -> Vec<String> {
            let plan = reconcile(&desired, observed, rules, &now);
            let all = sync_statuses(&desired, observed, &plan, rules);
            all.iter().map(|(key, sync)| format!("{} {}", key.name, sync.word())).collect()
        };
        assert_eq!(
            words(&rules, &observed),
            ["absent OutOfSync", "differs OutOfSync", "orphan Orphan", "other Unknown", "same InSync"]
        );
        rules.holds.pauses.push(Pause { namespace: None, by: "me".to_owned(), reason: None, until: None });
        assert_eq!(
            words(&rules, &observed),
            ["absent Paused", "differs Paused", "orphan Orphan", "other Unknown", "same InSync"]
        );
        rules.holds.pauses.clear();
        observed.gaps.insert(key("same").host, "no agent is connected".to_owned());
        assert_eq!(
            words(&rules, &observed),
            ["absent Unknown", "differs Unknown", "orphan Orphan", "other Unknown", "same Unknown"]
        );
    }
}
