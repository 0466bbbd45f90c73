//! Planning of each instance: its differences, and the chain of steps that resolves them.
//!
//! One merge pass over Desired and Observed. An instance in sync costs one comparison; chains and reasons are built only
//! for instances that differ.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::assess::{TargetSpec, absent, assess, assess_adopted, relaunching, unsupported};
use super::caps::Caps;
use super::chain::{Chain, PlanDraft, StepDraft};
use super::choose::choose;
use super::reasons::{StepReasons, down_rule};
use super::rules::Rules;
use crate::model::{
    AutoType, ConfigFile, Desired, DesiredInstance, DigestKeyRef, Field, HashedSpec, HeldChange, HoldReason,
    InstanceKey, KnownSpec, Now, Observed, ObservedInstance, Op, Presence, Present, SpecSide, State, span,
};

pub fn plan_instances<'a>(
    desired: &'a Desired,
    observed: &'a Observed,
    rules: &'a Rules,
    now: &'a Now,
) -> PlanDraft<'a> {
    let unsupported_fields: Vec<Field> =
        Field::ALL.iter().copied().filter(|field| !rules.caps.supports_field(*field)).collect();
    let mut planner = Planner {
        desired,
        observed,
        rules,
        now,
        unsupported_mask: HashedSpec::mask(unsupported_fields.iter().copied()),
        unsupported_fields,
        target_specs: HashMap::default(),
        taken: BTreeSet::new(),
        found: PlanDraft::default(),
    };
    let mut rows = observed.instances.iter().peekable();
    let mut undeclared = Vec::new();
    for (key, want) in &desired.instances {
        let seen = loop {
            match rows.peek().map(|(seen, _)| (*seen).cmp(key)) {
                Some(Ordering::Less) => undeclared.extend(rows.next()),
                Some(Ordering::Equal) => break rows.next().map(|(_, seen)| seen),
                Some(Ordering::Greater) | None => break None,
            }
        };
        match rules.selection.selects(key, Some(&want.origin.declared), &want.spec.labels) {
            true => planner.wanted(key, want, seen),
            false => planner.spare_earlier(key, want, seen),
        }
    }
    undeclared.extend(rows);
    planner.orphans(undeclared);
    planner.found
}

pub struct Planner<'a> {
    pub(super) desired: &'a Desired,
    pub(super) observed: &'a Observed,
    pub(super) rules: &'a Rules,
    now: &'a Now,
    /// Fields that the target does not support.
    unsupported_fields: Vec<Field>,
    /// The same as bits.
    unsupported_mask: u64,
    /// By the addresses of spec and declaration, which the instances of one process share.
    target_specs: ByAddress<TargetSpec<'a>>,
    /// Earlier names of moved instances.
    pub(super) taken: BTreeSet<&'a InstanceKey>,
    pub(super) found: PlanDraft<'a>,
}

impl<'a> Planner<'a> {
    fn wanted(
        &mut self,
        key: &'a InstanceKey,
        want: &'a DesiredInstance,
        seen: Option<&'a ObservedInstance>,
    ) {
        let present = match self.observed.presence(&key.host, seen) {
            Presence::Present(present) => match self.stale(key, present) {
                Some(detail) => return self.hold(key, want, HoldReason::Stale, detail),
                None => Some(present),
            },
            Presence::Absent => None,
            Presence::Unknown(why) => {
                let detail = format!("host {}: {why}", key.host);
                return self.hold(key, want, HoldReason::HostUnknown, detail);
            }
        };
        let there = present.filter(|present| self.is_there(*present));
        if there.is_some_and(|present| self.is_ours(present)) {
            self.found.owned.push((key, Some(want)));
        }
        if let Some(present) = there.filter(|present| !present.seen().specs.drifted_files.is_empty()) {
            for path in drifted_files(present.seen(), want) {
                *self.found.drifted.entry((key.process(), path.clone())).or_default() += 1;
            }
        }
        if !self.unsupported_fields.is_empty() {
            let holds = || unsupported(&want.spec, &self.rules.caps);
            if let Some(field) = want.origin.state.needs_start().then(holds).flatten() {
                let detail =
                    format!("{} does not support {field}, which changes the process", self.rules.caps.name());
                return self.hold(key, want, HoldReason::Unsupported, detail);
            }
            self.found
                .unsupported_fields
                .extend(self.unsupported_fields.iter().filter(|field| want.spec.is_set(**field)));
        }
        if let Some(present) = there.filter(|present| self.is_in_sync(*present, want)) {
            self.note_assumed_spec(key, present);
            self.found.in_sync += 1;
            return;
        }
        if there.is_none()
            && let Some((from, earlier)) = self.earlier(key, want)
        {
            self.taken.insert(from);
            self.found.seen_as.insert(key, from);
            return match earlier {
                Ok(present) => self.moved(key, want, from, present),
                Err((reason, detail)) => self.hold(key, want, reason, detail),
            };
        }
        self.chain(key, want, present, None);
    }

    /// Counts an adopted process that was not restarted since: the spec that it runs with is unknown.
    fn note_assumed_spec(&mut self, key: &InstanceKey, present: Present<'_>) {
        if present.seen().specs.is_live_assumed && present.running {
            *self.found.assumed.entry(key.process()).or_default() += 1;
        }
    }

    /// The message for an instance whose report is too old, in sync or not.
    pub(super) fn stale(&self, key: &InstanceKey, present: Present<'_>) -> Option<String> {
        let age = self.observed.age(present.seen());
        let limit = self.rules.stale_after_secs?;
        (age > limit).then(|| format!("host {} has not reported for {}", key.host, span(age)))
    }

    /// Whether an observed instance exists, and is not only a name that the target remembers.
    pub(super) fn is_there(&self, present: Present<'_>) -> bool {
        present.running || present.hosted || (self.rules.caps.registry && present.registered)
    }

    pub(super) fn is_ours(&self, present: Present<'_>) -> bool {
        self.owner_of(present.seen()) == Some(self.rules.owner.as_str())
    }

    /// The owner of an instance. An owner label does not prove ownership of a process that the agent did not start.
    pub(super) fn owner_of<'s>(&self, seen: &'s ObservedInstance) -> Option<&'s str> {
        let owner = seen.owner.as_deref();
        owner.filter(|owner| {
            !(seen.process.not_owned && seen.running == Some(true) && *owner == self.rules.owner)
        })
    }

    /// Fast path for an instance in sync; `false` means that a full comparison follows.
    fn is_in_sync(&mut self, present: Present<'_>, want: &'a DesiredInstance) -> bool {
        let (given, live) = (&present.seen().specs.registered, &present.seen().specs.live);
        if want.origin.state == State::Stopped {
            let is_down = !present.running && !present.hosted && self.is_ours(present);
            return is_down
                && (!self.rules.caps.registry || (present.registered && self.is_wanted(given, want)));
        }
        let kept = match want.spec.monitor.auto_type {
            AutoType::Resident if present.running => true,
            AutoType::Periodic => false,
            AutoType::Resident | AutoType::OneShot => return false,
        };
        let one = match (given, live) {
            (KnownSpec::Full(given), KnownSpec::Full(live)) => Arc::ptr_eq(given, live),
            (KnownSpec::Digests(given), KnownSpec::Digests(live)) => given == live,
            (KnownSpec::Unknown | KnownSpec::Digests(_) | KnownSpec::Full(_), _) => false,
        };
        want.origin.state == State::Running
            && present.hosted
            && self.is_ours(present)
            && self.is_wanted(given, want)
            && (!kept || one || self.is_wanted(live, want))
    }

    /// Whether a spec is known to equal the wanted one.
    fn is_wanted(&mut self, version: &KnownSpec, want: &'a DesiredInstance) -> bool {
        match version {
            KnownSpec::Full(spec) => Arc::ptr_eq(spec, &want.spec) || spec.is_equivalent(&want.spec),
            KnownSpec::Digests(revision) => {
                let plain = want.origin.on_change.is_empty() && !want.spec.sets_any(self.unsupported_mask);
                plain && want.spec.revision() == revision || self.target_spec(want).revision() == revision
            }
            KnownSpec::Unknown => false,
        }
    }

    /// Checks ownership. `Ok(true)`: the instance is adopted.
    pub(super) fn may_touch(
        &self,
        present: Present<'_>,
        want: &DesiredInstance,
    ) -> Result<bool, OwnershipConflict> {
        let adopt = self.rules.adopt || want.origin.adopt;
        match self.owner_of(present.seen()) {
            // With --adopt, an owned instance with an unknown spec is adopted again.
            Some(owner) if owner == self.rules.owner => {
                let lost = |there: bool, version: &KnownSpec| there && *version == KnownSpec::Unknown;
                let seen = present.seen();
                Ok(adopt
                    && (lost(present.hosted, &seen.specs.registered)
                        || lost(present.running, &seen.specs.live)))
            }
            Some(owner) => {
                Err(OwnershipConflict::Other { owner: owner.to_owned(), of_plan: self.rules.owner.clone() })
            }
            None if adopt => Ok(true),
            None => Err(OwnershipConflict::NoOwner),
        }
    }

    /// Plans one instance. `from`: the earlier name under which it was observed.
    pub(super) fn chain(
        &mut self,
        key: &'a InstanceKey,
        want: &'a DesiredInstance,
        present: Option<Present<'a>>,
        from: Option<&'a InstanceKey>,
    ) {
        let there = present.filter(|present| self.is_there(*present));
        let adopting = match there.map(|present| self.may_touch(present, want)) {
            None => false,
            Some(Ok(adopting)) => adopting,
            Some(Err(why)) => return self.hold(key, want, HoldReason::NotOwned, why.to_string()),
        };
        let (rules, now) = (self.rules, self.now);
        let target = self.target_spec(want);
        let situation = match present {
            None => Ok(absent(target)),
            Some(present) if adopting => assess_adopted(present, target, &rules.caps),
            Some(present) => assess(present, target, &rules.caps),
        };
        let chosen = situation.and_then(|is| Ok((is, choose(is, target.goal, rules.caps)?)));
        let (is, ops) = match chosen {
            Ok(chosen) => chosen,
            Err(reason) => {
                let (reason, detail) = explained(reason, present, &rules.caps);
                return self.hold(key, want, reason, detail);
            }
        };
        // Without a registry only supervision carries the owner label.
        if adopting && !rules.caps.registry && want.origin.state == State::Unhosted {
            let detail = format!(
                "the process has no owner, and {} records owners of supervised processes only: set `state: running` to \
                 adopt it",
                rules.caps.name()
            );
            return self.hold(key, want, HoldReason::NotOwned, detail);
        }
        let replaces = |op: Op| matches!(op, Op::Restart | Op::Start | Op::Stop | Op::Kill);
        if let Some(present) = there.filter(|_| !ops.iter().any(|(op, _)| replaces(*op))) {
            self.note_assumed_spec(key, present);
        }
        if ops.is_empty() {
            self.found.in_sync += 1;
            return;
        }
        let target = self.target_spec(want);
        let reasons = StepReasons {
            target,
            present,
            is,
            adopting,
            // A process that another program started may run under the identity, and only a live check finds it. Where
            // operations use the registered spec, what is not registered cannot be checked.
            unlisted: there.is_none()
                && !rules.caps.operates_on_registered_spec
                && (rules.caps.lag_secs > 0 || leaves_pid_file(want) || rules.adopt || want.origin.adopt),
            rule: down_rule(want.origin.state),
            place: &want.origin.place,
        };
        let mut steps: Vec<StepDraft> = ops.into_iter().map(|(op, which)| reasons.draft(op, which)).collect();
        reasons.add_other_changes(&mut steps);
        // Adoption does not restart: a process with another spec is changed by the next plan.
        let deferred = adopting
            && target.goal.state.needs_start()
            && present.filter(|present| present.running).is_some_and(|present| {
                target.delta(&present.seen().specs.live).is_some_and(|delta| delta.reload || delta.restart)
            });
        let waits = present.and_then(|present| relaunching(present, &is, target, now.at));
        let lost = !is.old_known && names_by_the_new_spec(&steps, &rules.caps);
        let chain = Chain { key, want: Some(want), from, before: Vec::new(), steps };
        if let Some(left) = waits {
            let detail = format!("the process died, and the agent has {} left to relaunch it", span(left));
            self.found.held.push(chain.held(HoldReason::AgentRelaunching, detail));
            return;
        }
        self.found.lost += usize::from(lost);
        self.found.deferred += usize::from(deferred);
        self.found.chains.push(chain);
    }

    pub(super) fn target_spec(&mut self, want: &'a DesiredInstance) -> &TargetSpec<'a> {
        let origin = &want.origin;
        self.target_specs
            .entry(addresses(&want.spec, origin))
            .or_insert_with(|| TargetSpec::new(&want.spec, origin.state, &origin.on_change, &self.rules.caps))
    }

    pub(super) fn hold(
        &mut self,
        key: &InstanceKey,
        want: &DesiredInstance,
        reason: HoldReason,
        detail: String,
    ) {
        let (instance, at) = (key.clone(), Some(want.origin.place.clone()));
        self.found.held.push(HeldChange { instance, reason, detail, steps: Vec::new(), why: Vec::new(), at });
    }
}

/// Whether the pid file of a running process shows that it runs.
fn leaves_pid_file(want: &DesiredInstance) -> bool {
    want.spec.monitor.auto_type == AutoType::Resident && !want.spec.identity.pid_path.is_empty()
}

/// Whether a chain sends the new spec in place of an unknown old one.
fn names_by_the_new_spec(steps: &[StepDraft], caps: &Caps) -> bool {
    let names = |draft: &StepDraft| {
        matches!(draft.op, Op::Stop | Op::Kill | Op::Unsupervise) && draft.spec_side == SpecSide::New
    };
    caps.stop_needs_old && steps.iter().any(names)
}

/// A reason that `choose` or `assess` returned, with its message. Without the key of its digests a spec is unknown.
pub fn explained(reason: HoldReason, present: Option<Present<'_>>, caps: &Caps) -> (HoldReason, String) {
    let is_spec = matches!(reason, HoldReason::OldSpecUnknown | HoldReason::RunUnknown);
    match present.and_then(|present| present.seen().specs.digest_key.as_ref()).filter(|_| is_spec) {
        Some(DigestKeyRef::Unknown(id)) => (
            HoldReason::SecretKeyUnknown,
            format!(
                "this caller cannot read key {id} of the secret digests, so the specs cannot be compared. Use an app \
                 with role operate, or with role read and this owner in `owners`"
            ),
        ),
        Some(DigestKeyRef::Known(_)) | None => (reason, detail(reason, present, caps)),
    }
}

fn detail(reason: HoldReason, present: Option<Present<'_>>, caps: &Caps) -> String {
    let digests = |seen: &ObservedInstance| {
        [&seen.specs.registered, &seen.specs.live].iter().any(|v| matches!(v, KnownSpec::Digests(_)))
    };
    match reason {
        HoldReason::IdentityMix => {
            "the running process and the supervised one have different identities: stop one of them manually"
                .to_owned()
        }
        HoldReason::NotOwned => {
            "the process has no owner, and its identity differs from the wanted one: it cannot be \
             adopted"
                .to_owned()
        }
        HoldReason::OldSpecUnknown if present.is_some_and(|present| digests(present.seen())) => format!(
            "the identity differs from the wanted one, and only digests of the old spec are known: {} needs the whole \
             spec to stop the process. Stop it manually",
            caps.name()
        ),
        HoldReason::OldSpecUnknown => {
            "the spec of the process is unknown, so it may not be the wanted process: --adopt adopts it \
             after a live check of its identity"
                .to_owned()
        }
        HoldReason::RunInProgress => {
            "an earlier run is still in progress, and is not stopped for another".to_owned()
        }
        HoldReason::RunUnknown => {
            "whether the process already ran is unknown: `abide start` runs it".to_owned()
        }
        HoldReason::NoStopCommand => format!(
            "{} needs a command to stop the process, and its spec has neither stop_cmd nor kill_cmd",
            caps.name()
        ),
        other => other.word().to_owned(),
    }
}

/// The files that differ on the host from what the manifest states. A file whose entry changes with this plan is left out:
/// it may have its new content already.
pub fn drifted_files<'s>(
    seen: &'s ObservedInstance,
    want: &DesiredInstance,
) -> impl Iterator<Item = &'s String> {
    let registered = seen.specs.registered.spec();
    let wanted = &want.spec.configmap;
    let is_unchanged = move |path: &&String| {
        let entry = |files: &[ConfigFile]| {
            files.iter().find(|file| file.path.as_deref() == Some(path.as_str())).map(|file| file.md5.clone())
        };
        let now = entry(wanted);
        now.is_some() && registered.is_none_or(|spec| entry(&spec.configmap) == now)
    };
    let wants_it = want.origin.state != State::Absent;
    let files: Vec<&String> =
        seen.specs.drifted_files.iter().filter(|_| wants_it).filter(is_unchanged).collect();
    files.into_iter()
}

/// A map keyed by two memory addresses, which need no collision-resistant hash.
type ByAddress<V> = HashMap<(usize, usize), V, BuildHasherDefault<AddressHasher>>;

fn addresses<A, B>(a: &Arc<A>, b: &Arc<B>) -> (usize, usize) {
    (Arc::as_ptr(a) as usize, Arc::as_ptr(b) as usize)
}

#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_usize((*byte).into()));
    }

    fn write_usize(&mut self, n: usize) {
        self.0 = (self.0.rotate_left(23) ^ n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// Reason why a plan may not change an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OwnershipConflict {
    Other { owner: String, of_plan: String },
    NoOwner,
}

impl fmt::Display for OwnershipConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OwnershipConflict::Other { owner, of_plan } => write!(
                f,
                "the process belongs to owner {owner:?}, and this plan to {of_plan:?}: remove it from these manifests, \
                 or use --owner {owner}"
            ),
            OwnershipConflict::NoOwner => f.write_str(
                "the process exists and has no owner: --adopt (or `adopt: true`) adopts it without a restart",
            ),
        }
    }
}
