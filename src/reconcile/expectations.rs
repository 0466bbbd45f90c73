//! What we did, laid over a look that cannot know it yet.
//!
//! A list may be five minutes old. Read as the truth, it would have us start what we just started, or stop what we
//! just replaced. So every executed step leaves an expectation, which counts until a look that is newer than the
//! step tells of the instance (whatever it tells), or until it expires.

use std::sync::Arc;

use super::caps::Caps;
use crate::model::{
    EffectTable, Health, InstanceKey, KnownSpec, LastRun, Observed, ObservedInstance, OnChange, Op, Step,
    Time,
};

/// How an instance should be after an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    pub instance: InstanceKey,
    pub expected: Expected,
    /// When the operation ended.
    pub at: Time,
    /// When it stops counting, whatever was seen.
    pub expires: Time,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Expected {
    /// It was done: this is how it is now.
    State(Box<ObservedInstance>),
    /// It was done: it is gone.
    Gone,
    /// It was sent, and nobody knows what came of it: nothing is known of the instance.
    Unknown,
}

impl Expectation {
    /// Counts for as long as the target's lists may lag behind the end of the operation.
    pub fn new(instance: InstanceKey, expected: Expected, at: Time, lag_secs: u64) -> Expectation {
        Expectation { instance, expected, at, expires: at.after_secs(lag_secs) }
    }
}

/// How an instance is after a step was done, from how it was before: the same effects that the choice counts on.
pub fn after(step: &Step, before: Option<&ObservedInstance>, owner: &str, caps: &Caps) -> Expected {
    let mut seen = before.cloned().unwrap_or_default();
    seen.unknown = false;
    let facts = [&mut seen.registered, &mut seen.hosted, &mut seen.running];
    facts.into_iter().for_each(|fact| *fact = Some(fact.unwrap_or(false)));
    let sent = match (&step.spec, step.revision) {
        (Some(spec), _) => KnownSpec::Full(Arc::clone(spec)),
        (None, Some(revision)) => KnownSpec::Digests(revision),
        (None, None) => KnownSpec::Unknown,
    };
    let used = if caps.operates_on_registered_spec && step.op != Op::Register {
        seen.registered_spec.clone()
    } else {
        sent
    };
    let give = |seen: &mut ObservedInstance, spec: &KnownSpec| {
        seen.registered_spec = spec.clone();
        seen.owner = Some(owner.into());
        seen.registered = Some(caps.registry);
    };
    match step.op {
        Op::Register => give(&mut seen, &used),
        Op::Unregister => return Expected::Gone,
        Op::Start => {
            give(&mut seen, &used);
            (seen.hosted, seen.running, seen.live) = (Some(true), Some(true), used);
            seen.ran = step.revision.map_or(LastRun::Given, |revision| LastRun::Digest(revision.run));
            seen.health = Health::Starting;
        }
        Op::Stop | Op::Kill => {
            // The supervision of another identity does not end with the process.
            let stays = seen.hosted == Some(true) && have_two_identities(&seen, caps);
            (seen.hosted, seen.running, seen.pid) = (Some(stays), Some(false), None);
        }
        Op::Supervise => {
            give(&mut seen, &used);
            seen.hosted = Some(true);
        }
        Op::Unsupervise => seen.hosted = Some(false),
        Op::Restart | Op::Reload => {
            if caps.restart_registers_spec {
                give(&mut seen, &used);
            }
            // A reload is chosen only where nothing is left that it does not put into effect.
            seen.live = used;
        }
    }
    Expected::State(Box::new(seen))
}

/// Whether the registered and the live spec are known to have two identities on this target.
fn have_two_identities(seen: &ObservedInstance, caps: &Caps) -> bool {
    let identity = |spec: &KnownSpec| match spec {
        KnownSpec::Unknown => None,
        KnownSpec::Digests(revision) => Some(revision.replace),
        KnownSpec::Full(spec) => {
            let effects = EffectTable::of(spec, &OnChange::new());
            Some(effects.without(|field| !caps.supports_field(field)).revision(spec).replace)
        }
    };
    let identities = identity(&seen.registered_spec).zip(identity(&seen.live));
    seen.running == Some(true) && identities.is_some_and(|(registered, live)| registered != live)
}

/// The look as it would be if it knew, and the expectations that are still open. `lag_secs`: how old the look may be
/// where it does not say.
pub fn overlay(
    mut observed: Observed,
    mut expectations: Vec<Expectation>,
    lag_secs: u64,
    now: Time,
) -> (Observed, Vec<Expectation>) {
    let horizon = observed.at.before_secs(lag_secs);
    expectations.retain(|expectation| {
        let row = observed.instances.get(&expectation.instance);
        let seen_at = row.and_then(|row| row.report_time).unwrap_or(horizon);
        now < expectation.expires && seen_at <= expectation.at
    });
    // The last word on an instance counts.
    expectations.sort_by_key(|expectation| expectation.at);
    for Expectation { instance, expected, at, .. } in &expectations {
        match expected {
            Expected::Gone => {
                observed.instances.remove(instance);
            }
            Expected::State(seen) => {
                let seen = ObservedInstance { report_time: Some(*at), ..(**seen).clone() };
                observed.instances.insert(instance.clone(), seen);
            }
            Expected::Unknown => {
                let row = observed.instances.entry(instance.clone()).or_default();
                row.unknown = true;
            }
        }
    }
    (observed, expectations)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Presence;

    const LAG: u64 = 300;

    fn key() -> InstanceKey {
        "0:10.0.0.1:web:api".parse().expect("a key")
    }

    fn seen(running: bool, told: Option<i64>) -> ObservedInstance {
        let fact = Some(running);
        let report_time = told.map(|seconds| Time(seconds * 1000));
        ObservedInstance {
            registered: fact,
            hosted: fact,
            running: fact,
            report_time,
            ..ObservedInstance::default()
        }
    }

    fn look(at: i64, row: Option<ObservedInstance>) -> Observed {
        let instances = row.into_iter().map(|row| (key(), row)).collect();
        Observed { instances, at: Time(at * 1000), ..Observed::default() }
    }

    fn expect(expected: Expected, at: i64) -> Vec<Expectation> {
        vec![Expectation::new(key(), expected, Time(at * 1000), LAG)]
    }

    fn runs(observed: &Observed) -> Option<bool> {
        match observed.get(&key()) {
            Presence::Present(present) => Some(present.running),
            Presence::Absent => Some(false),
            Presence::Unknown(_) => None,
        }
    }

    #[test]
    fn an_older_row_is_overruled_and_a_newer_one_ends_the_expectation() {
        let started = || expect(Expected::State(Box::new(seen(true, None))), 100);
        // Told before the start ended.
        let (after, open) = overlay(look(110, Some(seen(false, Some(90)))), started(), LAG, Time(110_000));
        assert_eq!((runs(&after), open.len()), (Some(true), 1));
        // Told after it: confirmed, or contradicted.
        for running in [true, false] {
            let (after, open) =
                overlay(look(130, Some(seen(running, Some(120)))), started(), LAG, Time(130_000));
            assert_eq!((runs(&after), open.len()), (Some(running), 0));
        }
    }

    #[test]
    fn a_list_that_lags_does_not_make_it_absent_until_the_lag_is_over() {
        let started = || expect(Expected::State(Box::new(seen(true, None))), 100);
        let (after, open) = overlay(look(399, None), started(), LAG, Time(399_000));
        assert_eq!((runs(&after), open.len()), (Some(true), 1));
        let (after, open) = overlay(look(401, None), started(), LAG, Time(401_000));
        assert_eq!((runs(&after), open.len()), (Some(false), 0), "it expired");
    }

    #[test]
    fn what_is_gone_stays_gone_and_what_is_unsure_is_unknown() {
        let (after, _) =
            overlay(look(110, Some(seen(true, Some(90)))), expect(Expected::Gone, 100), LAG, Time(110_000));
        assert_eq!(runs(&after), Some(false));
        let (after, _) = overlay(look(110, None), expect(Expected::Unknown, 100), LAG, Time(110_000));
        assert_eq!(runs(&after), None);
    }

    #[test]
    fn the_last_word_counts() {
        let mut both = expect(Expected::Gone, 105);
        both.extend(expect(Expected::State(Box::new(seen(true, None))), 100));
        let (after, open) = overlay(look(110, None), both, LAG, Time(110_000));
        assert_eq!((runs(&after), open.len()), (Some(false), 2));
    }
}
