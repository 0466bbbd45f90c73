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

pub mod caps;
mod chain;
pub mod choose;
pub mod diff;
pub mod effect;
pub mod expect;
pub mod fingerprint;
mod moves;
mod names;
pub mod old;
mod order;
mod orphans;
mod places;
mod restrain;
mod rollout;
mod rules;
mod situate;
mod story;
mod sync;
mod walk;
pub mod why;

pub use caps::{Caps, Moves};
pub use choose::{Delta, Goal, Ran, Situation, StopBy, Stops, choose};
pub use diff::{Change, changes, delta, delta_of_revisions};
pub use effect::{Classes, effect_of, revision, table};
pub use expect::{Expectation, Expected, after, lay_over};
pub use fingerprint::{fingerprint, of_desired};
pub use restrain::{Kinds, held_by_hand, paused};
pub use rules::Rules;
pub use sync::{Sync, standing};

use crate::model::{Desired, Now, Observed, Plan};
use chain::Found;

/// What to do, and what to leave alone.
pub fn reconcile(desired: &Desired, observed: &Observed, rules: &Rules, now: &Now) -> Plan {
    let mut found = walk::find(desired, observed, rules, now);
    restrain::restrain(&mut found, desired, rules, now);
    let waves = order::order(&mut found, desired, observed, rules);
    let notes = notes(&found, rules);
    let mut held = found.held;
    held.sort_by(|a, b| a.instance.cmp(&b.instance));
    Plan { waves, held, notes, settled: found.settled }
}

/// What people should know beside the steps.
fn notes(found: &Found<'_>, rules: &Rules) -> Vec<String> {
    let caps = &rules.caps;
    let mut notes = Vec::new();
    if !found.unsaid.is_empty() {
        let fields: Vec<&str> = found.unsaid.iter().map(|field| field.path()).collect();
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
