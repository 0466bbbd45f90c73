//! Expectations: the effects of executed steps, overlaid on an observation that may predate them.
//!
//! A list may be five minutes old. Without expectations the planner would start a process that was just started, or
//! stop a process that was just replaced. Each executed step leaves an expectation; it is valid until a newer report of
//! the instance (whatever its content), or until it expires.

use std::sync::Arc;

use super::caps::Caps;
use crate::model::{
    EffectTable, Health, InstanceKey, KnownSpec, LastRun, Observed, ObservedInstance, OnChange, Op, Step,
    Time,
};

/// Expected state of an instance after an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    pub instance: InstanceKey,
    pub expected: Expected,
    /// End of the operation.
    pub at: Time,
    /// End of validity, whatever was observed.
    pub expires: Time,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Expected {
    /// The operation succeeded, with this state.
    State(Box<ObservedInstance>),
    /// The operation succeeded: the instance is removed.
    Gone,
    /// The operation was sent, and its result is unknown: the state is unknown.
    Unknown,
}

impl Expectation {
    /// Valid for the time that the target's lists may lag behind the operation.
    pub fn new(instance: InstanceKey, expected: Expected, at: Time, lag_secs: u64) -> Expectation {
        Expectation { instance, expected, at, expires: at.after_secs(lag_secs) }
    }
}

/// The state of an instance after a step, from the state before: the same effects that `choose` assumes.
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
        seen.specs.registered.clone()
    } else {
        sent
    };
    let register = |seen: &mut ObservedInstance, spec: &KnownSpec| {
        seen.specs.registered = spec.clone();
        seen.owner = Some(owner.into());
        seen.registered = Some(caps.registry);
    };
    match step.op {
        Op::Register => {
            register(&mut seen, &used);
            assume_live(&mut seen);
        }
        Op::Unregister => return Expected::Gone,
        Op::Start => {
            register(&mut seen, &used);
            (seen.hosted, seen.running, seen.specs.live) = (Some(true), Some(true), used);
            (seen.completed, seen.specs.is_live_assumed) = (false, false);
            seen.specs.ran = step.revision.map_or(LastRun::Given, |revision| LastRun::Digest(revision.run));
            seen.health = Health::Starting;
        }
        Op::Stop | Op::Kill => {
            // The supervision of another identity does not end with the process.
            let stays = seen.hosted == Some(true) && have_two_identities(&seen, caps);
            (seen.hosted, seen.running, seen.process.pid) = (Some(stays), Some(false), None);
            seen.specs.is_live_assumed = false;
        }
        Op::Supervise => {
            register(&mut seen, &used);
            assume_live(&mut seen);
            seen.hosted = Some(true);
        }
        Op::Unsupervise => seen.hosted = Some(false),
        Op::Restart | Op::Reload => {
            if caps.restart_registers_spec {
                register(&mut seen, &used);
            }
            // A reload is planned only if all remaining differences take effect with it.
            seen.specs.live = used;
            seen.specs.is_live_assumed &= step.op == Op::Reload;
        }
    }
    Expected::State(Box::new(seen))
}

/// Adoption: a running process with an unknown spec counts as running with the registered one.
fn assume_live(seen: &mut ObservedInstance) {
    seen.specs.is_live_assumed |= seen.running == Some(true) && seen.specs.live == KnownSpec::Unknown;
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
    let identities = identity(&seen.specs.registered).zip(identity(&seen.specs.live));
    seen.running == Some(true) && identities.is_some_and(|(registered, live)| registered != live)
}

/// The observation with all valid expectations applied, and those expectations. `lag_secs`: assumed age of an instance
/// without a report time.
pub fn overlay(
    mut observed: Observed,
    mut expectations: Vec<Expectation>,
    lag_secs: u64,
    now: Time,
) -> (Observed, Vec<Expectation>) {
    let horizon = observed.at.before_secs(lag_secs);
    expectations.retain(|expectation| {
        let seen = observed.instances.get(&expectation.instance);
        let seen_at = seen.and_then(|seen| seen.report_time).unwrap_or(horizon);
        now < expectation.expires && seen_at <= expectation.at
    });
    // The last expectation of an instance wins.
    expectations.sort_by_key(|expectation| expectation.at);
    for Expectation { instance, expected, at, .. } in &expectations {
        match expected {
            Expected::Gone => {
                observed.instances.remove(instance);
            }
            Expected::State(seen) => {
                let mut seen = ObservedInstance { report_time: Some(*at), ..(**seen).clone() };
                // A step does not end protections.
                if let Some(listed) = observed.instances.get_mut(instance) {
                    seen.specs.protections = std::mem::take(&mut listed.specs.protections);
                }
                observed.instances.insert(instance.clone(), seen);
            }
            Expected::Unknown => {
                let seen = observed.instances.entry(instance.clone()).or_default();
                seen.unknown = true;
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

    fn seen(running: bool, reported: Option<i64>) -> ObservedInstance {
        let fact = Some(running);
        let report_time = reported.map(|seconds| Time(seconds * 1000));
        ObservedInstance {
            registered: fact,
            hosted: fact,
            running: fact,
            report_time,
            ..ObservedInstance::default()
        }
    }

    fn observation(at: i64, row: Option<ObservedInstance>) -> Observed {
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
        // Reported before the start ended.
        let (after, open) =
            overlay(observation(110, Some(seen(false, Some(90)))), started(), LAG, Time(110_000));
        assert_eq!((runs(&after), open.len()), (Some(true), 1));
        // Reported after it: confirmed, or contradicted.
        for running in [true, false] {
            let (after, open) =
                overlay(observation(130, Some(seen(running, Some(120)))), started(), LAG, Time(130_000));
            assert_eq!((runs(&after), open.len()), (Some(running), 0));
        }
    }

    #[test]
    fn a_list_that_lags_does_not_make_it_absent_until_the_lag_is_over() {
        let started = || expect(Expected::State(Box::new(seen(true, None))), 100);
        let (after, open) = overlay(observation(399, None), started(), LAG, Time(399_000));
        assert_eq!((runs(&after), open.len()), (Some(true), 1));
        let (after, open) = overlay(observation(401, None), started(), LAG, Time(401_000));
        assert_eq!((runs(&after), open.len()), (Some(false), 0), "it expired");
    }

    #[test]
    fn a_removed_instance_stays_removed_and_an_unknown_result_is_unknown() {
        let (after, _) = overlay(
            observation(110, Some(seen(true, Some(90)))),
            expect(Expected::Gone, 100),
            LAG,
            Time(110_000),
        );
        assert_eq!(runs(&after), Some(false));
        let (after, _) = overlay(observation(110, None), expect(Expected::Unknown, 100), LAG, Time(110_000));
        assert_eq!(runs(&after), None);
    }

    #[test]
    fn the_last_expectation_wins() {
        let mut both = expect(Expected::Gone, 105);
        both.extend(expect(Expected::State(Box::new(seen(true, None))), 100));
        let (after, open) = overlay(observation(110, None), both, LAG, Time(110_000));
        assert_eq!((runs(&after), open.len()), (Some(false), 2));
    }
}
