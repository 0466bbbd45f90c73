//! What is left alone though it differs: because a person said so, a policy, a window, or a budget.
//!
//! Restraint only ever takes whole chains out. What is taken out keeps its reason, and does not count for a budget.

use std::collections::{BTreeMap, BTreeSet};

use super::chain::{Chain, PlanDraft};
use super::rules::Rules;
use crate::model::{
    Amount, Desired, DesiredInstance, Disruption, Hold, HoldReason, InstanceKey, Name, Now, Op, Pause,
    Policy, Protection, State, Time, Window,
};

/// What a chain does to people's processes, as protection, windows and budgets speak of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DisruptionSet {
    pub start: bool,
    pub stop: bool,
    /// A restart, or a stop and a start.
    pub restart: bool,
    pub reload: bool,
    /// It is to be gone.
    pub delete: bool,
}

impl DisruptionSet {
    pub fn of(chain: &Chain<'_>) -> DisruptionSet {
        DisruptionSet::of_ops(&chain.ops().collect::<Vec<_>>(), chain.state())
    }

    /// What these operations on one instance are, for somebody who wants it to be in this state.
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

/// Takes out of `found.chains` what may not happen now.
pub fn apply_constraints(found: &mut PlanDraft<'_>, desired: &Desired, rules: &Rules, now: &Now) {
    let law = Constraints {
        desired,
        rules,
        now,
        policies_by_namespace: policies_by_namespace(desired),
        all: (0..desired.policies.len()).collect(),
    };
    hold_where(found, |chain| law.check(chain));
    law.budgets(found);
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
    rules: &'a Rules,
    now: &'a Now,
    /// The policies that bind something in a namespace.
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
        self.paused(chain)
            .or_else(|| self.held_by_person(chain))
            .or_else(|| self.suspended(chain))
            .or_else(|| protected(chain, kinds))
            .or_else(|| self.outside_window(chain, kinds))
    }

    /// Under its name, or under the one that it comes from.
    fn suspended(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        let all = &self.rules.left_alone;
        all.get(chain.key).or_else(|| chain.from.and_then(|from| all.get(from))).cloned()
    }

    fn paused(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        Some((HoldReason::Paused, paused(&self.rules.pauses, chain.key, self.now.at)?))
    }

    fn held_by_person(&self, chain: &Chain<'_>) -> Option<(HoldReason, String)> {
        if self.rules.override_holds {
            return None;
        }
        Some((HoldReason::Hold, active_hold(&self.rules.holds, chain.key, chain.from, self.now.at)?))
    }

    fn outside_window(&self, chain: &Chain<'_>, kinds: DisruptionSet) -> Option<(HoldReason, String)> {
        self.policies(chain.key, chain.want).find_map(|policy| {
            let closed = Disruption::ALL.into_iter().find(|operation| {
                let mut named = policy.windows.iter().filter(|window| window.operations.contains(operation));
                kinds.has(*operation)
                    && policy.windows.iter().any(|window| window.operations.contains(operation))
                    && !named.any(|window| self.now.is_in(window))
            })?;
            let named = policy.windows.iter().filter(|window| window.operations.contains(&closed));
            let open: Vec<String> = named.map(shown).collect();
            let (name, place) = (&policy.name, &policy.place);
            let detail =
                format!("policy {name:?} ({place}) allows a {} only {}", closed.word(), open.join(", or "));
            Some((HoldReason::OutsideWindow, detail))
        })
    }

    /// The policies that bind an instance. An orphan is bound by those of its namespace, and where nothing of its
    /// namespace is left, by all.
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
        let limit = self.rules.max_delete.map_or(default, |amount| most(amount, owned));
        let said = match self.rules.max_delete {
            None => format!("without --max-delete, the greater of 1 and 10% of the {owned} that are ours"),
            Some(amount) => source("--max-delete", amount, owned),
        };
        // The default is for what nobody has set a budget for.
        let set = |key: &InstanceKey, want: Option<&DesiredInstance>| {
            self.rules.max_delete.is_some()
                || self.policies(key, want).all(|policy| policy.budgets.delete.is_none())
        };
        self.within(found, HoldReason::DeleteBudget, limit, &said, set);
        if let Some(amount) = self.rules.max_restart {
            let said = source("--max-restart", amount, owned);
            self.within(found, HoldReason::RestartBudget, most(amount, owned), &said, |_, _| true);
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
                let said = source(&name, amount, owned);
                self.within(found, reason, most(amount, owned), &said, binds);
            }
        }
    }

    /// Over the budget nothing of that kind happens. What an earlier plan still does counts as well.
    fn within(
        &self,
        found: &mut PlanDraft<'_>,
        reason: HoldReason,
        limit: usize,
        said: &str,
        binds: impl Fn(&InstanceKey, Option<&DesiredInstance>) -> bool,
    ) {
        let (word, of_kind): (_, fn(DisruptionSet) -> bool) = match reason {
            HoldReason::DeleteBudget => ("delete", |kinds| kinds.delete),
            _ => ("restart", |kinds| kinds.restart),
        };
        let counts = |chain: &Chain<'_>| of_kind(DisruptionSet::of(chain)) && binds(chain.key, chain.want);
        let planned = found.chains.iter().filter(|chain| counts(chain)).count();
        let under_way = self
            .rules
            .under_way
            .iter()
            .filter(|(key, kinds)| of_kind(**kinds) && binds(key, self.desired.instances.get(*key)));
        let under_way = under_way.count();
        if planned > 0 && planned + under_way > limit {
            let times = |n: usize| if n == 1 { format!("1 {word}") } else { format!("{n} {word}s") };
            let beside = if under_way > 0 { format!(", {under_way} under way") } else { String::new() };
            let detail =
                format!("{} planned{beside}, and at most {limit} may happen: {said}", times(planned));
            hold_where(found, |chain| counts(chain).then(|| (reason, detail.clone())));
        }
    }
}

/// A share is rounded down: a budget is not stretched.
fn most(amount: Amount, of: usize) -> usize {
    match amount {
        Amount::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        Amount::Share(share) => (of as f64 * share.get() / 100.0).floor() as usize,
    }
}

fn source(by: &str, amount: Amount, owned: usize) -> String {
    match amount {
        Amount::Count(_) => format!("{by} {amount}"),
        Amount::Share(_) => format!("{by} {amount} of the {owned} that are ours"),
    }
}

fn protected(chain: &Chain<'_>, kinds: DisruptionSet) -> Option<(HoldReason, String)> {
    let guards = &chain.want?.origin.protect;
    let against = |guard: &&Protection| match guard {
        Protection::Delete => kinds.delete,
        Protection::Restart => kinds.restart,
        // Also one that a start follows.
        Protection::Stop => chain.ops().any(|op| matches!(op, Op::Stop | Op::Kill)),
    };
    let guard = guards.iter().find(against)?;
    Some((HoldReason::Protected, format!("its manifest protects it: `protect: [{}]`", guard.word())))
}

/// The word of the pause that an instance is under.
pub fn paused(pauses: &[Pause], key: &InstanceKey, now: Time) -> Option<String> {
    let over = |pause: &&Pause| {
        pause.namespace.as_ref().is_none_or(|namespace| *namespace == key.namespace)
            && pause.until.is_none_or(|until| until > now)
    };
    let pause = pauses.iter().find(over)?;
    let what = match &pause.namespace {
        Some(namespace) => format!("namespace {namespace}"),
        None => "everything".to_owned(),
    };
    Some(hold_message(&format!("{what} is paused"), &pause.by, &pause.reason, pause.until))
}

/// The word of the hold on an instance, under its name or the one that it comes from.
pub fn active_hold(
    holds: &[Hold],
    key: &InstanceKey,
    from: Option<&InstanceKey>,
    now: Time,
) -> Option<String> {
    let over = |hold: &&Hold| {
        (hold.instance == *key || Some(&hold.instance) == from) && hold.until.is_none_or(|until| until > now)
    };
    let hold = holds.iter().find(over)?;
    Some(hold_message("it is held", &hold.by, &hold.reason, hold.until))
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
