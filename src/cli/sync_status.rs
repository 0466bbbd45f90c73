//! Sync status of processes without manifests on disk: compared with the active revision in the state store.

use std::collections::{BTreeMap, BTreeSet};

use super::Failure;
use super::commands::plan::groups;
use super::target::ConnectedTarget;
use crate::clock;
use crate::contract::NextAction;
use crate::control::suspended;
use crate::engine::other_sources::desired_elsewhere;
use crate::engine::rollout_records;
use crate::engine::{pin, stored_revisions};
use crate::manifest::{self, Limits};
use crate::model::{Desired, HostKey, InstanceKey, Observed, ProcessKey};
use crate::observe::Target;
use crate::reconcile::{HoldRules, Rules, SyncStatus, reconcile, sync_statuses};
use crate::source::set_default_user;

/// The sync status of one instance.
pub struct ProcessStatus {
    pub sync: SyncStatus,
    /// The next steps with reasons, or why the instance is held.
    pub next: Vec<NextAction>,
    /// Location of its declaration in the revision: `file:line:column`.
    pub declared: Option<String>,
    /// The name that declares it: of several instances, if the process has `instances`.
    pub declared_name: Option<ProcessKey>,
}

impl ProcessStatus {
    /// The held reason and its sentence, if the plan holds the instance.
    pub fn held(&self) -> Option<String> {
        self.next.iter().find_map(|action| match action {
            NextAction::Held { held, detail } if detail.is_empty() => Some(held.word().to_owned()),
            NextAction::Held { held, detail } => Some(format!("{}: {detail}", held.word())),
            NextAction::Step { .. } => None,
        })
    }
}

/// The status of every instance whose owner has an active revision.
pub async fn statuses(live: &ConnectedTarget) -> Result<BTreeMap<InstanceKey, ProcessStatus>, Failure> {
    let mut observed = live.observe_all().await?;
    let alive = connected_hosts(live, &observed).await?;
    let (holds, pauses) = live.holds_and_pauses().await?;
    // An owner without observed processes may still declare some.
    let mut owners = stored_revisions::owners(&live.state).await.unwrap_or_default();
    owners.extend(observed.instances.values().filter_map(|seen| seen.owner.as_deref().map(str::to_owned)));
    let mut all = BTreeMap::new();
    for owner in owners {
        let exists = |key: &InstanceKey| observed.instances.contains_key(key);
        let Some(desired) = desired_where(live, &owner, exists).await else { continue };
        if let Some(alive) = &alive {
            add_gaps(&mut observed, &desired, alive);
        }
        let suspended = suspended::read(&live.state, &owner).await.unwrap_or_default();
        let by_controller = suspended.into_iter().map(|(key, one)| (key, (one.reason(), one.why))).collect();
        let (manual, pauses) = (holds.clone(), pauses.clone());
        let holds = HoldRules { manual, pauses, by_controller, ..HoldRules::default() };
        let decided = rollout_records::read(&live.state, &owner).await.unwrap_or_default();
        let rollouts = rollout_records::progress(&decided);
        let rules = Rules { owner, holds, rollouts, ..Rules::new(live.caps()) };
        all.extend(statuses_of_owner(&desired, &observed, &rules));
    }
    Ok(all)
}

/// The hosts with a connected agent. `None`: the target does not report agents.
async fn connected_hosts(
    live: &ConnectedTarget,
    observed: &Observed,
) -> Result<Option<BTreeSet<HostKey>>, Failure> {
    if live.abide().is_err() {
        return Ok(None);
    }
    let hosts = live.hosts(observed).await?.into_iter();
    Ok(Some(hosts.filter(|host| host.agent).map(|host| host.host).collect()))
}

/// A declared host without an agent cannot be observed, also if none of its processes is registered.
fn add_gaps(observed: &mut Observed, desired: &Desired, alive: &BTreeSet<HostKey>) {
    for key in desired.instances.keys().filter(|key| !alive.contains(&key.host)) {
        let why = || "no agent is connected".to_owned();
        observed.gaps.entry(key.host.clone()).or_insert_with(why);
    }
}

/// The desired state of the pinned, else of the active revision, with the instances that other sources of the owner declare.
/// `None`: not stored, or no longer valid.
pub async fn active_desired(live: &ConnectedTarget, owner: &str) -> Option<Desired> {
    desired_where(live, owner, |_| true).await
}

/// The same. Of other sources, only instances that are `wanted`: some of them may have been removed since.
async fn desired_where(
    live: &ConnectedTarget,
    owner: &str,
    wanted: impl Fn(&InstanceKey) -> bool,
) -> Option<Desired> {
    let revision = match pin::read(&live.state, owner).await.ok()? {
        Some((pin, _)) => pin.revision,
        None => stored_revisions::active(&live.state, owner).await.ok()?.0?.revision,
    };
    let snapshots = stored_revisions::list(&live.state, owner).await.ok()?;
    let snapshot = snapshots.iter().find(|snapshot| snapshot.revision == revision)?;
    let texts = stored_revisions::texts(&live.state, owner, snapshot).await.ok()?;
    let limits = Limits::default();
    let mut loaded = manifest::load_files(texts, Vec::new(), &limits, &BTreeMap::new());
    if loaded.errors() > 0 {
        return None;
    }
    let elsewhere = desired_elsewhere(&live.state, owner, &snapshot.source, &snapshots, &limits).await;
    for (key, want) in elsewhere.unwrap_or_default().0.into_iter().filter(|(key, _)| wanted(key)) {
        loaded.desired.instances.entry(key).or_insert(want);
    }
    live.set_default_user(&mut loaded.desired);
    Some(loaded.desired)
}

impl ConnectedTarget {
    /// On the local target, processes without a user run as the caller.
    pub fn set_default_user(&self, desired: &mut Desired) {
        let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten();
        if let (true, Some(me)) = (self.name == "local", me) {
            set_default_user(desired, &me.name);
        }
    }
}

fn statuses_of_owner(
    desired: &Desired,
    observed: &Observed,
    rules: &Rules,
) -> BTreeMap<InstanceKey, ProcessStatus> {
    let plan = reconcile(desired, observed, rules, &clock::with_zones(desired));
    let mut next: BTreeMap<&InstanceKey, Vec<NextAction>> = BTreeMap::new();
    for step in plan.steps() {
        let why: Vec<String> = step.why.iter().map(groups::reason).collect();
        next.entry(&step.instance).or_default().push(NextAction::Step { op: step.op, why });
    }
    for held in &plan.held {
        let entry = NextAction::Held { held: held.reason, detail: held.detail.clone() };
        next.entry(&held.instance).or_default().push(entry);
    }
    let status = |(key, sync): (&InstanceKey, SyncStatus)| {
        let next = next.get(key).cloned().unwrap_or_default();
        let origin = desired.instances.get(key).map(|want| &want.origin);
        let declared = origin.map(|origin| origin.place.to_string());
        let declared_name = origin.map(|origin| origin.declared.clone());
        (key.clone(), ProcessStatus { sync, next, declared, declared_name })
    };
    // Instances of other owners are compared with their owners' revisions.
    let ours = |(key, _): &(&InstanceKey, SyncStatus)| {
        let owner = observed.instances.get(*key).and_then(|seen| seen.owner.as_deref());
        owner.is_none_or(|owner| owner == rules.owner)
    };
    sync_statuses(desired, observed, &plan, rules).into_iter().filter(ours).map(status).collect()
}
