//! Planner: a pure function from desired and observed state to a plan with reasons.
//!
//! ```text
//! Desired  ┐
//! Observed ┼─ planner: per instance ─ assess → choose → reasons ─→ PlanDraft { chains of steps, held }
//! Rules    ┘    │        (moves: earlier names; orphans: no manifest)
//!               ├─ constraints: holds, pauses, protections, windows and budgets remove whole chains
//!               └─ waves: dependencies, identities, batches (rollout) ─→ Plan { waves, held, notes }
//! ```
//! Start reading at [`reconcile`], then [`choose`](choose::choose), which selects the fewest operations for one instance.
//! [`effect`] is the table of the effects of a field change; [`caps`] describes a target; [`expectations`] overlays the
//! effects of executed steps on an observation that may predate them; [`sync_statuses`] summarizes each instance.
//!
//! Synchronous, total, deterministic: time is an argument, and the same input gives the same plan.
//! Invariants: no step for an instance that was not observed, is not owned, or is held; every step changes something
//! and has a reason; constraints remove whole chains, never a part of one.

mod assess;
mod batches;
pub mod caps;
mod chain;
pub mod choose;
mod constraints;
mod dependencies;
pub mod diff;
pub mod expectations;
pub mod field_differences;
pub mod fingerprint;
mod identities;
mod moves;
mod orphans;
mod planner;
mod reasons;
mod rules;
pub mod spec_effects;
pub mod spec_recovery;
mod stages;
mod sync_status;
mod waves;

pub use caps::{Caps, Moves};
pub use choose::{Delta, Goal, RanStatus, Situation, StopBy, Stops, choose};
pub use constraints::{DisruptionSet, active_hold, paused};
pub use diff::{Change, changes, delta, delta_of_revisions};
pub use expectations::{Expectation, Expected, after, overlay};
pub use fingerprint::fingerprint;
pub use planner::drifted_files;
pub use rules::{HoldRules, OrphanRules, Rules};
pub use spec_effects::{EffectTable, effect_of, revision, table};
pub use stages::{aborted_rollout, rollout_id};
pub use sync_status::{SyncStatus, sync_statuses};

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{AutoType, Desired, Now, Observed, Op, Plan, ProcessKey, Wave, count};
use chain::PlanDraft;
use constraints::PassedWindows;

/// The plan: the steps to execute, and the held changes.
pub fn reconcile(desired: &Desired, observed: &Observed, rules: &Rules, now: &Now) -> Plan {
    let mut found = planner::plan_instances(desired, observed, rules, now);
    let passed = constraints::apply_constraints(&mut found, desired, observed, rules, now);
    let pauses = stages::hold_stages(&mut found, desired, observed, rules);
    stages::hold_unavailable(&mut found, desired, observed);
    let waves = waves::build_waves(&mut found, desired, observed, rules);
    let mut notes = notes(&found, rules);
    notes.extend(break_glass_note(rules, &passed));
    notes.extend(unknown_success_note(&waves, desired, rules));
    let orphans = found.spared.values().sum();
    let aborted = rules.rollouts.iter().filter(|(_, progress)| progress.is_aborted);
    let aborted = aborted.map(|(process, progress)| (process.clone(), progress.id.clone())).collect();
    let mut held = found.held;
    held.sort_by(|a, b| a.instance.cmp(&b.instance));
    Plan { waves, held, notes, in_sync: found.in_sync, pauses, aborted, orphans }
}

/// The first processes by name, each with its number of instances.
fn named(processes: &BTreeMap<ProcessKey, usize>) -> String {
    const SHOWN: usize = 5;
    let mut names: Vec<String> =
        processes.iter().take(SHOWN).map(|(name, n)| format!("{name} ({n})")).collect();
    if processes.len() > SHOWN {
        names.push(format!("and {} more", processes.len() - SHOWN));
    }
    names.join(", ")
}

/// The files on hosts that differ from a configmap. No step changes them: the files are not delivered by a plan.
fn drift_note(drifted: &BTreeMap<(ProcessKey, String), usize>) -> Option<String> {
    const SHOWN: usize = 5;
    let one = |((process, path), n): (&(ProcessKey, String), &usize)| match n {
        1 => format!("{path} of {process}"),
        n => format!("{path} of {process} ({n} instances)"),
    };
    let mut names: Vec<String> = drifted.iter().take(SHOWN).map(one).collect();
    if drifted.len() > SHOWN {
        names.push(format!("and {} more", drifted.len() - SHOWN));
    }
    (!names.is_empty()).then(|| format!("files on hosts differ from the configmap: {}", names.join(", ")))
}

/// The windows that break-glass bypasses, with its reason.
fn break_glass_note(rules: &Rules, passed: &PassedWindows) -> Option<String> {
    let reason = rules.holds.break_glass.as_ref()?;
    if passed.is_empty() {
        return Some(format!("break-glass ({reason}): no maintenance window forbids a change"));
    }
    let one = |(window, n): (&String, &usize)| format!("{} although {window}", count(*n, "instance"));
    let all: Vec<String> = passed.iter().map(one).collect();
    Some(format!("break-glass ({reason}): changes {}", all.join("; ")))
}

/// The one-shots of a plan whose dependents cannot wait for their success: the target reports no exit codes.
fn unknown_success_note(waves: &[Wave], desired: &Desired, rules: &Rules) -> Option<String> {
    if rules.caps.reads_health {
        return None;
    }
    let steps = waves.iter().flat_map(|wave| &wave.steps);
    let starts = steps.filter(|step| matches!(step.op, Op::Start | Op::Restart));
    let started: Vec<_> = starts.filter_map(|step| desired.instances.get_key_value(&step.instance)).collect();
    let needed: BTreeSet<&ProcessKey> =
        started.iter().flat_map(|(_, want)| &want.origin.depends_on).collect();
    let mut runs: BTreeMap<ProcessKey, usize> = BTreeMap::new();
    for (key, want) in started {
        let declared = &want.origin.declared;
        let is_needed = needed.contains(declared) || needed.contains(&key.process());
        if want.spec.monitor.auto_type == AutoType::OneShot && is_needed {
            *runs.entry(declared.clone()).or_default() += 1;
        }
    }
    let (target, names) = (rules.caps.name(), named(&runs));
    (!runs.is_empty()).then(|| {
        format!("{target} reports no exit codes: dependents of {names} start when the run has ended, even if it failed")
    })
}

/// Notes for the operator.
fn notes(found: &PlanDraft<'_>, rules: &Rules) -> Vec<String> {
    let caps = &rules.caps;
    let mut notes = Vec::new();
    if !found.unsupported_fields.is_empty() {
        let fields: Vec<&str> = found.unsupported_fields.iter().map(|field| field.path()).collect();
        notes.push(format!(
            "{} does not support {}: excluded from every comparison",
            caps.name(),
            fields.join(", ")
        ));
    }
    if found.lost > 0 {
        let stopped = count(found.lost, "instance");
        let are = if found.lost == 1 { "is" } else { "are" };
        notes.push(format!(
            "{stopped} {are} stopped with the new spec: only digests of the old spec are known"
        ));
    }
    if found.deferred > 0 {
        let adopted = count(found.deferred, "instance");
        let are = if found.deferred == 1 { "is" } else { "are" };
        notes.push(format!(
            "{adopted} {are} adopted with a running spec that differs from the manifest: the next plan changes it"
        ));
    }
    if !found.rehosted.is_empty() {
        notes.push(format!(
            "not supervised while its name changes: {}; {} cannot exchange the name of a supervised process in one \
             operation",
            named(&found.rehosted),
            caps.name()
        ));
    }
    if !found.assumed.is_empty() {
        let names = named(&found.assumed);
        notes.push(format!(
            "runs with an unknown spec: {names}; adopted, and not restarted since. `abide restart` starts it with the \
             registered spec"
        ));
    }
    notes.extend(drift_note(&found.drifted));
    if !found.spared.is_empty() {
        let (names, owner) = (named(&found.spared), &rules.owner);
        notes.push(format!("owned by {owner:?} and in no manifest: {names}; --prune would remove them"));
    }
    notes
}
