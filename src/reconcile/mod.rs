//! The pure core: from what is wanted and what was seen to what will be done, and why.
//!
//! ```text
//! Desired  ┐
//! Observed ┼─ walk: instance by instance ─ situate → choose → story ─→ chains of steps, each with its why
//! Rules    ┘    │        (moves: another name; orphans: no manifest)
//!               ├─ restrain: holds, pauses, protection, windows, budgets take whole chains out
//!               └─ order: dependencies (names), batches (rollout) → waves ─→ Plan { waves, held, notes }
//! ```
//! Start reading at [`reconcile`], then [`choose`](choose::choose), where the fewest operations for one instance are
//! decided. [`effect`] is the one table that says what changing a field does; [`caps`] says what a target can do;
//! [`expect`] lays what was done just now over a look that cannot know it yet; [`standing`] says in a word how each
//! instance stands to its wish.
//!
//! Synchronous, total, deterministic: time comes in as a value, and the same input gives the same plan.
//! Invariants: nothing is done to what was not seen, to what is not ours, or to what somebody holds; every step
//! changes something and says what; restraint takes out whole chains, never a part of one.

mod assess;
pub mod caps;
mod chain;
pub mod choose;
mod constraints;
mod dependencies;
pub mod diff;
pub mod effect;
pub mod expectations;
pub mod fingerprint;
mod identities;
mod moves;
mod orphans;
mod planner;
mod reasons;
mod rollout;
mod rules;
pub mod spec_recovery;
mod sync_status;
mod waves;
pub mod why;

pub use caps::{Caps, Moves};
pub use choose::{Delta, Goal, RanStatus, Situation, StopBy, Stops, choose};
pub use constraints::{DisruptionSet, active_hold, paused};
pub use diff::{Change, changes, delta, delta_of_revisions};
pub use effect::{EffectTable, effect_of, revision, table};
pub use expectations::{Expectation, Expected, after, overlay};
pub use fingerprint::{fingerprint, of_desired};
pub use rules::Rules;
pub use sync_status::{SyncStatus, sync_statuses};

use crate::model::{Desired, Now, Observed, Plan};
use chain::PlanDraft;

/// What to do, and what to leave alone.
pub fn reconcile(desired: &Desired, observed: &Observed, rules: &Rules, now: &Now) -> Plan {
    let mut found = planner::plan_instances(desired, observed, rules, now);
    constraints::apply_constraints(&mut found, desired, rules, now);
    let waves = waves::build_waves(&mut found, desired, observed, rules);
    let notes = notes(&found, rules);
    let mut held = found.held;
    held.sort_by(|a, b| a.instance.cmp(&b.instance));
    Plan { waves, held, notes, in_sync: found.in_sync }
}

/// What people should know beside the steps.
fn notes(found: &PlanDraft<'_>, rules: &Rules) -> Vec<String> {
    let caps = &rules.caps;
    let mut notes = Vec::new();
    if !found.unsupported_fields.is_empty() {
        let fields: Vec<&str> = found.unsupported_fields.iter().map(|field| field.path()).collect();
        notes.push(format!(
            "{} has no place for {}: left out of every comparison",
            caps.name(),
            fields.join(", ")
        ));
    }
    if found.lost > 0 {
        let (n, s) = (found.lost, if found.lost == 1 { "" } else { "s" });
        notes.push(format!(
            "of {n} instance{s} only digests of the old spec are known: stopped by the new one"
        ));
    }
    if found.deferred > 0 {
        let (n, s) = (found.deferred, if found.deferred == 1 { " is" } else { "s are" });
        notes.push(format!(
            "{n} instance{s} adopted as running, with another spec than wanted: the next plan changes that"
        ));
    }
    if !found.spared.is_empty() {
        const SHOWN: usize = 5;
        let named = found.spared.iter().take(SHOWN).map(|(name, n)| format!("{name} ({n})"));
        let mut names: Vec<String> = named.collect();
        if found.spared.len() > SHOWN {
            names.push(format!("and {} more", found.spared.len() - SHOWN));
        }
        let (names, owner) = (names.join(", "), &rules.owner);
        notes.push(format!("owned by {owner:?} and in no manifest: {names}; --prune would remove them"));
    }
    notes
}
