//! Plan fingerprint: a digest of all inputs of a plan, so that a saved plan is executed only if they have not changed.
//!
//! Pids and times are excluded: they differ between two observations of the same state.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::Arc;

use blake3::Hasher;

use super::rules::Rules;
use crate::model::{
    DeclaredProcess, Desired, InstanceKey, KnownSpec, LastRun, Observed, ObservedInstance, Plan, Policy,
    SpecRevision,
};

/// Covers Desired and policies (by their own digest, from [`of_desired`]), rules and, for every instance with a step or
/// held, its facts, specs and owner.
pub fn fingerprint(
    of_desired: &str,
    observed: &Observed,
    rules: &Rules,
    target: &str,
    plan: &Plan,
) -> String {
    let mut print = Print(Hasher::new());
    let mut put = |text: &str| print.put(text);
    put(of_desired);
    put(target);
    put(&format!("{rules:?}"));
    let touched: BTreeSet<&InstanceKey> = plan
        .steps()
        .flat_map(|step| [Some(&step.instance), step.from.as_ref()])
        .flatten()
        .chain(plan.held.iter().map(|held| &held.instance))
        .collect();
    for key in touched {
        put(&key.to_string());
        put(&match observed.instances.get(key) {
            Some(seen) => facts(seen),
            None => format!("{:?}", observed.gaps.contains_key(&key.host)),
        });
    }
    print.hex()
}

/// Digest of the desired state only: the revision of a manifest set.
pub fn of_desired(desired: &Desired) -> String {
    let mut print = Print(Hasher::new());
    print.desired(desired);
    print.hex()
}

struct Print(Hasher);

impl Print {
    /// Length-prefixed, so that no two lists of texts have the same bytes.
    fn put(&mut self, text: &str) {
        self.0.update(&(text.len() as u64).to_le_bytes());
        self.0.update(text.as_bytes());
    }

    fn hex(&self) -> String {
        self.0.finalize().to_hex()[..32].to_owned()
    }

    /// The same for a `Display` value, in a reused buffer.
    fn show(&mut self, text: &mut String, what: impl std::fmt::Display) {
        text.clear();
        // Writing to a String does not fail.
        let _ = write!(text, "{what}");
        self.put(text);
    }

    fn desired(&mut self, desired: &Desired) {
        // Many instances share a spec and a declaration: each pair is written once, then by its index.
        let mut known: HashMap<(usize, usize), usize> = HashMap::new();
        let mut text = String::new();
        for (key, want) in &desired.instances {
            self.show(&mut text, key);
            let address = (Arc::as_ptr(&want.spec) as usize, Arc::as_ptr(&want.origin) as usize);
            let next = known.len();
            let number = *known.entry(address).or_insert(next);
            self.0.update(&(number as u64).to_le_bytes());
            if number == next {
                self.show(&mut text, want.spec.revision());
                self.origin(&want.origin, &mut text);
            }
        }
        for policy in &desired.policies {
            let Policy { name, place: _, reach: _, owner, allow, budgets, windows } = policy;
            self.put(&format!("{:?}", (name, owner, allow, budgets, windows)));
        }
    }

    /// The source location is not part of the desired state.
    fn origin(&mut self, origin: &DeclaredProcess, text: &mut String) {
        let DeclaredProcess { place: _, declared, state, adopt, depends_on, moved_from, .. } = origin;
        self.show(text, declared);
        self.0.update(&[*state as u8, u8::from(*adopt)]);
        for names in [depends_on, moved_from] {
            self.0.update(&(names.len() as u64).to_le_bytes());
            names.iter().for_each(|name| self.show(text, name));
        }
        let DeclaredProcess { protect, on_change, rollout, policies, .. } = origin;
        if !protect.is_empty() || !on_change.is_empty() || rollout.is_some() || !policies.is_empty() {
            self.put(&format!("{:?}", (protect, on_change, rollout, policies)));
        }
    }
}

fn facts(seen: &ObservedInstance) -> String {
    let ObservedInstance {
        unknown,
        registered,
        hosted,
        running,
        owner,
        registered_spec: given,
        live,
        ran,
        ..
    } = seen;
    let ran = match ran {
        LastRun::Unknown => "unknown".to_owned(),
        LastRun::Never => "never".to_owned(),
        LastRun::Given => "given".to_owned(),
        LastRun::Digest(run) => format!("{run:08x}"),
    };
    let facts = (unknown, registered, hosted, running, owner, digests(given), digests(live), ran);
    format!("{facts:?}")
}

fn digests(version: &KnownSpec) -> Option<SpecRevision> {
    match version {
        KnownSpec::Unknown => None,
        KnownSpec::Digests(revision) => Some(*revision),
        KnownSpec::Full(spec) => Some(*spec.revision()),
    }
}
