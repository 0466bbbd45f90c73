//! Constraints on a plan: holds, pauses, suspensions, protections, maintenance windows and budgets.
//!
//! A constraint removes whole chains only. A removed chain becomes a held change and does not count towards a budget.

use std::collections::{BTreeMap, BTreeSet};

use super::chain::{Chain, PlanDraft};
use super::rules::Rules;
use crate::model::{
    Amount, Desired, DesiredInstance, Disruption, Hold, HoldReason, InstanceKey, Name, Now, Observed, Op,
    Pause, Policy, Protection, State, Time, Window, count,
};

/// The disruptions of a chain, as protections, windows and budgets name them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DisruptionSet {
    pub start: bool,
    pub stop: bool,
    /// A restart, or a stop and a start.
    pub restart: bool,
    pub reload: bool,
    /// The wanted state is absent.
    pub delete: bool,
}

impl DisruptionSet {
    pub fn of(chain: &Chain<'_>) -> DisruptionSet {
        DisruptionSet::of_ops(&chain.ops().collect::<Vec<_>>(), chain.state())
    }

    /// The disruptions of these operations on one instance with this wanted state.
    pub fn of_ops(ops: &[Op], state: State) -> DisruptionSet {
        let has = |wanted: &[Op]| ops.iter().any(|op| wanted.contains(op));
        let (stops, starts) = (has(&[Op::Stop, Op::Kill]), has(&[Op::Start]));
        DisruptionSet {
            start: starts && !stops,
            stop: stops && !starts,
            restart: has(&[Op::Restart]) || (stops && starts),
            reload: has(&[Op::Reload]),
            delete: state == State::Absent,
        }
    }

    fn has(self, operation: Disruption) -> bool {
        match operation {
            Disruption::Start => self.start,
            Disruption::Stop => self.stop,
            Disruption::Restart => self.restart,
            Disruption::Reload => self.reload,
            Disruption::Delete => self.delete,
        }
    }
}

/// Windows that a plan passes with break-glass, each with its number of instances.
pub type PassedWindows = BTreeMap<String, usize>;

/// Moves the chains that may not be executed now from `found.chains` to `found.held`.
pub fn apply_constraints(
    found: &mut PlanDraft<'_>,
    desired: &Desired,
    observed: &Observed,
    rules: &Rules,
    now: &Now,
) -> PassedWindows {
    let constraints = Constraints {
        desired,
        observed,
        rules,
        now,
        policies_by_namespace: policies_by_namespace(desired),
        all: (0..desired.policies.len()).collect(),
    };
    hold_where(found, |chain| constraints.check(chain));
    constraints.budgets(found);
    constraints.passed_windows(found)
}

fn hold_where(found: &mut PlanDraft<'_>, reason: impl Fn(&Chain<'_>) -> Option<(HoldReason, String)>) {
    let held = &mut found.held;
    found.chains.retain(|chain| match reason(chain) {
        Some((reason, detail)) => {
            held.push(chain.held(reason, detail));
            false
        }
        None => true,
    });
}

struct Constraints<'a> {
    desired: &'a Desired,
    observed: &'a Observed,
    rules: &'a Rules,
    now: &'a Now,
    /// The policies that apply to some instance of a namespace.
    policies_by_namespace: BTreeMap<&'a Name, Vec<usize>>,
    all: Vec<usize>,
}

fn policies_by_namespace(desired: &Desired) -> BTreeMap<&Name, Vec<usize>> {
    let mut all: BTreeMap<&Name, BTreeSet<usize>> = BTreeMap::new();
    if !desired.policies.is_empty() {
        for (key, want) in desired.instances.iter().filter(|(_, want)| !want.origin.policies.is_empty()) {
            all.entry(&key.namespace).or_default().extend(&want.origin.policies);
        }
    }
    all.into_iter().map(|(name, policies)| (name, policies.into_iter().collect())).collect()
}

impl<'a> Constraints<'a> {
    fn check(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        let kinds = DisruptionSet::of(chain);
        self.refused_by_policy(chain)
            .or_else(|| self.paused(chain))
            .or_else(|| self.held_by_person(chain))
            .or_else(|| self.suspended(chain))
            .or_else(|| self.protected(chain, kinds))
            .or_else(|| self.outside_window(chain, kinds))
    }

    /// By its manifest, or by the protection that an orphan still has.
    fn protected(&self, chain: &Chain<'_>, kinds: DisruptionSet) -> Option<(HoldReason, String)> {
        let detail = match chain.want {
            Some(want) => {
                let protection = forbidding(chain, kinds, &want.origin.protect)?;
                format!("the manifest has `protect: [{}]`", protection.word())
            }
            None => {
                let protection = forbidding(chain, kinds, &self.protections_of_orphan(chain.key))?;
                let (word, process) = (protection.word(), chain.key.process());
                format!(
                    "its manifest had `protect: [{word}]`: `abide unprotect {process} --reason …`, or a manifest with \
                     `state: absent` and `protect: []`, ends the protection"
                )
            }
        };
        Some((HoldReason::Protected, detail))
    }

    /// The recorded protections and those of the target's label. A record without any ends those of the label.
    fn protections_of_orphan(&self, key: &InstanceKey) -> Vec<Protection> {
        let label = self.observed.instances.get(key).map(|seen| seen.specs.protections.as_slice());
        match (self.rules.holds.protections.get(key), label.unwrap_or_default()) {
            (Some(recorded), _) if recorded.is_empty() => Vec::new(),
            (recorded, label) => recorded.into_iter().flatten().chain(label).copied().collect(),
        }
    }

    /// By its name and by the name that it moved from: both change.
    fn refused_by_policy(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        let policy = self.rules.policy.as_ref()?;
        let spec = chain.want.map(|want| &**want.spec);
        let refused = policy.violation(chain.key, spec);
        let detail = refused.or_else(|| chain.from.and_then(|from| policy.violation(from, None)))?;
        Some((HoldReason::PolicyViolated, detail))
    }

    /// By its name, or by the name that it moved from.
    fn suspended(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        let all = &self.rules.holds.by_controller;
        all.get(chain.key).or_else(|| chain.from.and_then(|from| all.get(from))).cloned()
    }

    fn paused(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        Some((HoldReason::Paused, paused(&self.rules.holds.pauses, chain.key, self.now.at)?))
    }

    fn held_by_person(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        if self.rules.holds.override_manual {
            return None;
        }
        Some((HoldReason::Hold, active_hold(&self.rules.holds.manual, chain.key, chain.from, self.now.at)?))
    }

    fn outside_window(&self, chain: &Chain<'_>, kinds: DisruptionSet) -> Option<(HoldReason, String)> {
        if self.rules.holds.break_glass.is_some() {
            return None;
        }
        Some((HoldReason::OutsideWindow, self.closed_window(chain, kinds)?))
    }

    /// The window that forbids a chain. One that denies comes first: no other window overrides it.
    fn closed_window(&self, chain: &Chain<'_>, kinds: DisruptionSet) -> Option<String> {
        let wanted = || Disruption::ALL.into_iter().filter(|operation| kinds.has(*operation));
        let denied = self.policies(chain.key, chain.want).find_map(|policy| {
            let is_active = |window: &&Window| self.now.is_denied_by(window);
            let mut active = policy.windows.iter().filter(is_active);
            active.find_map(|window| {
                let operation = wanted().find(|operation| window.denies(*operation))?;
                let end = self.now.end_of(window).map(|end| format!(", until {end}")).unwrap_or_default();
                let (name, place, word) = (&policy.name, &window.place, operation.word());
                Some(format!("policy {name:?} ({place}) forbids a {word} {}{end}", shown(window)))
            })
        });
        denied.or_else(|| {
            self.policies(chain.key, chain.want).find_map(|policy| {
                let closed = wanted().find(|operation| {
                    let mut named =
                        policy.windows.iter().filter(|window| window.allows(*operation)).peekable();
                    named.peek().is_some() && !named.any(|window| self.now.is_in(window))
                })?;
                let named = policy.windows.iter().filter(|window| window.allows(closed));
                let open: Vec<String> = named.map(shown).collect();
                let (name, place) = (&policy.name, &policy.place);
                Some(format!(
                    "policy {name:?} ({place}) allows a {} only {}",
                    closed.word(),
                    open.join(", or ")
                ))
            })
        })
    }

    /// The windows that forbid the remaining chains, which break-glass passes.
    fn passed_windows(&self, found: &PlanDraft<'_>) -> PassedWindows {
        let mut passed = PassedWindows::new();
        if self.rules.holds.break_glass.is_some() {
            let closed = |chain: &Chain<'_>| self.closed_window(chain, DisruptionSet::of(chain));
            for window in found.chains.iter().filter_map(closed) {
                *passed.entry(window).or_default() += 1;
            }
        }
        passed
    }

    /// The policies that apply to an instance. The policies of its namespace apply to an orphan; without any other
    /// instance in the namespace, all policies do.
    fn binding<'l>(&'l self, key: &InstanceKey, want: Option<&'l DesiredInstance>) -> &'l [usize] {
        match want {
            Some(want) => &want.origin.policies,
            None => self.policies_by_namespace.get(&key.namespace).unwrap_or(&self.all),
        }
    }

    fn policies<'l>(
        &'l self,
        key: &InstanceKey,
        want: Option<&'l DesiredInstance>,
    ) -> impl Iterator<Item = &'a Policy> + use<'a, 'l> {
        self.binding(key, want).iter().filter_map(|at| self.desired.policies.get(*at))
    }

    fn budgets(&self, found: &mut PlanDraft<'_>) {
        let owned = found.owned.len();
        let default = (owned / 10).max(1);
        let limit = self.rules.budgets.delete.map_or(default, |amount| most(amount, owned));
        let origin = match self.rules.budgets.delete {
            None => format!("the default limit is the greater of 1 and 10% of {owned} owned instances"),
            Some(amount) => source("--max-delete", amount, owned),
        };
        // The default applies to instances without any configured delete budget.
        let set = |key: &InstanceKey, want: Option<&DesiredInstance>| {
            self.rules.budgets.delete.is_some()
                || self.policies(key, want).all(|policy| policy.budgets.delete.is_none())
        };
        self.within(found, HoldReason::DeleteBudget, limit, &origin, set);
        if let Some(amount) = self.rules.budgets.restart {
            let origin = source("--max-restart", amount, owned);
            self.within(found, HoldReason::RestartBudget, most(amount, owned), &origin, |_, _| true);
        }
        for policy in self.rules.policy.iter().flat_map(|policy| policy.all()) {
            let name = format!("policy {:?} ({}) allows", policy.name, policy.file);
            for (reason, amount) in [
                (HoldReason::DeleteBudget, policy.budgets.delete),
                (HoldReason::RestartBudget, policy.budgets.restart),
            ] {
                if let Some(amount) = amount {
                    let origin = source(&name, amount, owned);
                    self.within(found, reason, most(amount, owned), &origin, |_, _| true);
                }
            }
        }
        for (at, policy) in self.desired.policies.iter().enumerate() {
            if policy.budgets == Default::default() {
                continue;
            }
            let binds = |key: &InstanceKey, want: Option<&DesiredInstance>| {
                self.binding(key, want).binary_search(&at).is_ok()
            };
            let owned = found.owned.iter().filter(|(key, want)| binds(key, *want)).count();
            let budgets = [
                (HoldReason::DeleteBudget, policy.budgets.delete),
                (HoldReason::RestartBudget, policy.budgets.restart),
            ];
            for (reason, amount) in budgets {
                let Some(amount) = amount else { continue };
                let name = format!("policy {:?} ({}) allows", policy.name, policy.place);
                let origin = source(&name, amount, owned);
                self.within(found, reason, most(amount, owned), &origin, binds);
            }
        }
    }

    /// Holds all chains of a kind if they exceed the budget together with those in flight by an earlier plan.
    fn within(
        &self,
        found: &mut PlanDraft<'_>,
        reason: HoldReason,
        limit: usize,
        origin: &str,
        binds: impl Fn(&InstanceKey, Option<&DesiredInstance>) -> bool,
    ) {
        let (word, of_kind): (_, fn(DisruptionSet) -> bool) = match reason {
            HoldReason::DeleteBudget => ("delete", |kinds| kinds.delete),
            _ => ("restart", |kinds| kinds.restart),
        };
        let counts = |chain: &Chain<'_>| of_kind(DisruptionSet::of(chain)) && binds(chain.key, chain.want);
        let planned = found.chains.iter().filter(|chain| counts(chain)).count();
        let in_flight = self
            .rules
            .in_flight
            .iter()
            .filter(|(key, kinds)| of_kind(**kinds) && binds(key, self.desired.instances.get(*key)));
        let in_flight = in_flight.count();
        if planned > 0 && planned + in_flight > limit {
            let others = if in_flight > 0 { format!(", {in_flight} in flight") } else { String::new() };
            let detail =
                format!("{} planned{others}, at most {limit} allowed: {origin}", count(planned, word));
            hold_where(found, |chain| counts(chain).then(|| (reason, detail.clone())));
        }
    }
}

/// A share is rounded down, so that a budget is never exceeded.
fn most(amount: Amount, of: usize) -> usize {
    match amount {
        Amount::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        Amount::Share(share) => (of as f64 * share.get() / 100.0).floor() as usize,
    }
}

fn source(by: &str, amount: Amount, owned: usize) -> String {
    match amount {
        Amount::Count(_) => format!("{by} {amount}"),
        Amount::Share(_) => format!("{by} {amount} of {owned} owned instances"),
    }
}

/// The protection that forbids a chain.
fn forbidding(chain: &Chain<'_>, kinds: DisruptionSet, protections: &[Protection]) -> Option<Protection> {
    let forbids = |protection: &&Protection| match protection {
        Protection::Delete => kinds.delete,
        Protection::Restart => kinds.restart,
        // Also a stop that a start follows.
        Protection::Stop => chain.ops().any(|op| matches!(op, Op::Stop | Op::Kill)),
    };
    protections.iter().find(forbids).copied()
}

/// The message of the active pause of an instance.
pub fn paused(pauses: &[Pause], key: &InstanceKey, now: Time) -> Option<String> {
    let active = |pause: &&Pause| {
        pause.namespace.as_ref().is_none_or(|namespace| *namespace == key.namespace)
            && pause.until.is_none_or(|until| until > now)
    };
    let pause = pauses.iter().find(active)?;
    let what = match &pause.namespace {
        Some(namespace) => format!("namespace {namespace}"),
        None => "everything".to_owned(),
    };
    Some(hold_message(&format!("{what} is paused"), &pause.by, &pause.reason, pause.until))
}

/// The message of the active hold on an instance, by its name or the name that it moved from.
pub fn active_hold(
    holds: &[Hold],
    key: &InstanceKey,
    from: Option<&InstanceKey>,
    now: Time,
) -> Option<String> {
    let active = |hold: &&Hold| {
        (hold.instance == *key || Some(&hold.instance) == from) && hold.until.is_none_or(|until| until > now)
    };
    let hold = holds.iter().find(active)?;
    Some(hold_message("held", &hold.by, &hold.reason, hold.until))
}

fn hold_message(what: &str, by: &str, reason: &Option<String>, until: Option<Time>) -> String {
    let reason = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    match until {
        Some(until) => format!("{what} by {by} until {until}{reason}"),
        None => format!("{what} by {by}{reason}"),
    }
}

fn shown(window: &Window) -> String {
    const NAMES: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
    let days: Vec<&str> = NAMES.iter().zip(window.days).filter(|(_, on)| *on).map(|(day, _)| *day).collect();
    let days = if days.len() == 7 { "every day".to_owned() } else { days.join(",") };
    let (from, to) = (window.from, window.to);
    format!("{days} {:02}:{:02}-{:02}:{:02} {}", from.hour, from.minute, to.hour, to.minute, window.tz)
}
