//! Retry backoff per instance, and detection of instances that never converge.
//!
//! After a failure an instance backs off for one second, then two, four, up to five minutes, with jitter. A failure
//! with another cause starts over; a success ends the backoff. A process that its agent has given up on counts as
//! failed, whatever the start returned: crash loops are retried with the same backoff. An instance whose steps
//! succeeded three times and are needed again is suspended until its observed state changes: something undoes the
//! steps. New manifests reset everything; an instance that was rolled back is suspended until its own declaration
//! changes.
//!
//! Time and randomness are inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::repeated_operations::RepeatedOperations;
use crate::execute::StepResult;
use crate::model::{
    Desired, Health, Hold, HoldReason, InstanceKey, Observed, ObservedInstance, Op, Plan, Time, span,
};
use crate::observe::stable_fields;
use crate::retry_delay::RetryDelay;

const DELAYS: RetryDelay =
    RetryDelay::doubling(Duration::from_secs(1), Duration::from_secs(300)).with_jitter(0.2);
/// Number of times that the same steps may succeed within this window.
const MAX_REPEATS: u32 = 3;
const REPEAT_WINDOW_SECS: u64 = 600;
/// Between the cause and the time of the next attempt, in the text of a hold.
const NEXT_ATTEMPT: &str = ": backing off until ";

/// State of one instance.
#[derive(Debug, Default)]
struct Attempts {
    failed: Option<FailureStreak>,
    crashed: Option<CrashStreak>,
    same: RepeatCounter,
    given_up: Option<Suspension>,
}

/// Consecutive failures with the same cause.
#[derive(Debug)]
struct FailureStreak {
    cause: String,
    times: u32,
    until: Time,
}

/// Its agent has given up on it.
#[derive(Debug)]
struct CrashStreak {
    times: u32,
    until: Time,
    /// A start was sent since.
    started: bool,
}

/// Steps, the number of times they succeeded, and the start of that window.
#[derive(Debug, Default)]
struct RepeatCounter {
    repeated: RepeatedOperations,
    well: u32,
    since: Time,
}

#[derive(Debug)]
struct Suspension {
    reason: HoldReason,
    why: String,
    /// Observed state when it was suspended; another state ends the suspension.
    seen: Option<Option<ObservedInstance>>,
}

/// Reason why an instance is held, and until when; `None`: until something changes.
#[derive(Clone, Debug, PartialEq)]
pub struct BackoffHold {
    pub reason: HoldReason,
    pub why: String,
    pub until: Option<Time>,
}

impl BackoffHold {
    /// As a hold for display.
    pub fn hold(&self, instance: &InstanceKey) -> Hold {
        let (instance, reason) = (instance.clone(), Some(self.why.clone()));
        Hold { instance, by: "watch".to_owned(), reason, until: self.until }
    }
}

#[derive(Debug, Default)]
pub struct Backoff {
    attempts: BTreeMap<InstanceKey, Attempts>,
}

/// The cause in the text of a hold, without the time of the next attempt: that changes with each failure.
pub fn without_retry_time(detail: &str) -> &str {
    detail.rsplit_once(NEXT_ATTEMPT).map_or(detail, |(cause, _)| cause)
}

/// The next delay after this many failures. `chance` is between 0 and 1.
fn delay_secs(failures: u32, chance: f64) -> f64 {
    DELAYS.jittered(DELAYS.after(failures), chance).as_secs_f64()
}

fn time_after(now: Time, secs: f64) -> Time {
    Time(now.0.saturating_add((secs * 1000.0) as i64))
}

impl Backoff {
    /// Records the results of a plan.
    pub fn record_results(
        &mut self,
        plan: &Plan,
        ended: &[StepResult],
        now: Time,
        chance: &mut impl FnMut() -> f64,
    ) {
        let concerned: BTreeSet<&InstanceKey> = ended.iter().map(|one| &one.instance).collect();
        let mut steps: BTreeMap<&InstanceKey, RepeatedOperations> = BTreeMap::new();
        for step in plan.steps().filter(|step| concerned.contains(&step.instance)) {
            steps.entry(&step.instance).or_default().add(step);
        }
        let mut bad: BTreeMap<&InstanceKey, Option<String>> = BTreeMap::new();
        for one in ended {
            let cause = bad.entry(&one.instance).or_default();
            if !one.outcome.is_well() && cause.is_none() {
                *cause = Some(format!("`{}` ended {}, code {}", one.op.word(), one.outcome.word(), one.code));
            }
        }
        for (key, bad) in bad {
            let attempts = self.attempts.entry(key.clone()).or_default();
            if let Some(cause) = bad {
                let before = attempts.failed.take().filter(|failed| failed.cause == cause);
                let times = before.map_or(1, |failed| failed.times.saturating_add(1));
                let until = time_after(now, delay_secs(times, chance()));
                attempts.failed = Some(FailureStreak { cause, times, until });
                continue;
            }
            attempts.failed = None;
            let done = steps.remove(key).unwrap_or_default();
            if let Some(crashed) = &mut attempts.crashed {
                crashed.started |= done.ops.iter().any(|op| matches!(op, Op::Start | Op::Restart));
                // A crash is not a step that was undone.
                continue;
            }
            let same = &mut attempts.same;
            if same.repeated != done || now.secs_since(same.since) > REPEAT_WINDOW_SECS {
                *same = RepeatCounter { repeated: done, well: 0, since: now };
            }
            same.well += 1;
            if same.well >= MAX_REPEATS {
                let why = format!(
                    "not converging: {} succeeded {} times in {} but {} each time. \
                     No more attempts until its observed state or its manifest changes.",
                    same.repeated.operations(),
                    same.well,
                    span(REPEAT_WINDOW_SECS),
                    same.repeated.returned()
                );
                attempts.given_up = Some(Suspension { reason: HoldReason::NotConverging, why, seen: None });
            }
        }
    }

    /// Suspends an instance until its manifest changes.
    pub fn suspend(&mut self, key: &InstanceKey, reason: HoldReason, why: &str) {
        let given_up = Suspension { reason, why: why.to_owned(), seen: None };
        self.attempts.entry(key.clone()).or_default().given_up = Some(given_up);
    }

    /// Suspended instances and their reasons.
    pub fn suspended(&self) -> impl Iterator<Item = (&InstanceKey, HoldReason, &str)> {
        self.attempts.iter().filter_map(|(key, attempts)| {
            let given_up = attempts.given_up.as_ref()?;
            Some((key, given_up.reason, given_up.why.as_str()))
        })
    }

    /// Resets for new manifests. A rolled-back instance stays suspended unless its own declaration changed.
    pub fn reset_changed(&mut self, before: &Desired, now: &Desired) {
        self.attempts.retain(|key, attempts| {
            let put_back = attempts.given_up.take_if(|given_up| given_up.reason == HoldReason::RolledBack);
            *attempts = Attempts {
                given_up: put_back.filter(|_| before.is_same_request(now, key)),
                ..Attempts::default()
            };
            attempts.given_up.is_some()
        });
    }

    /// Records the observed state of held instances.
    pub fn record_held(&mut self, plan: &Plan, observed: &Observed) {
        for held in plan.held.iter().filter(|held| held.reason == HoldReason::NotConverging) {
            let attempts = self.attempts.get_mut(&held.instance);
            if let Some(given_up) = attempts.and_then(|attempts| attempts.given_up.as_mut()) {
                given_up
                    .seen
                    .get_or_insert_with(|| observed.instances.get(&held.instance).map(stable_fields));
            }
        }
    }

    /// Records an observation: crashed instances, recovered ones, and suspended ones whose state changed.
    pub fn record_observation(
        &mut self,
        desired: &Desired,
        observed: &Observed,
        now: Time,
        chance: &mut impl FnMut() -> f64,
    ) {
        let failed = observed.instances.iter().filter(|(_, seen)| seen.health == Health::Failed);
        for (key, _) in failed.filter(|(key, _)| desired.instances.contains_key(*key)) {
            let crashed = &mut self.attempts.entry(key.clone()).or_default().crashed;
            let times = match crashed {
                Some(CrashStreak { started: false, .. }) => continue,
                Some(before) => before.times.saturating_add(1),
                None => 1,
            };
            let until = time_after(now, delay_secs(times, chance()));
            *crashed = Some(CrashStreak { times, until, started: false });
        }
        self.attempts.retain(|key, attempts| {
            let seen = observed.instances.get(key);
            let is_well = |seen: &ObservedInstance| {
                seen.health == Health::Healthy
                    && seen.since.is_some_and(|since| now.secs_since(since) >= REPEAT_WINDOW_SECS)
            };
            if attempts.crashed.is_some() && seen.is_none_or(is_well) {
                attempts.crashed = None;
            }
            let then = attempts.given_up.as_ref().and_then(|given_up| given_up.seen.as_ref());
            let blind = observed.gaps.contains_key(&key.host);
            blind || then.is_none_or(|then| *then == seen.map(stable_fields))
        });
    }

    /// Instances that are held now.
    pub fn backing_off(&self, now: Time) -> BTreeMap<InstanceKey, BackoffHold> {
        let left = |(key, attempts): (&InstanceKey, &Attempts)| {
            let Attempts { failed, crashed, same: _, given_up } = attempts;
            let times = |times: u32| match times {
                1 => "once".to_owned(),
                many => format!("{many} times in a row"),
            };
            let left = if let Some(given_up) = given_up {
                BackoffHold { reason: given_up.reason, why: given_up.why.clone(), until: None }
            } else if let Some(FailureStreak { cause, times: n, until }) =
                failed.as_ref().filter(|failed| failed.until > now)
            {
                let why = format!("failed {} ({cause}){NEXT_ATTEMPT}{until}", times(*n));
                BackoffHold { reason: HoldReason::BackingOff, why, until: Some(*until) }
            } else if let Some(CrashStreak { times: n, until, .. }) =
                crashed.as_ref().filter(|crashed| crashed.until > now)
            {
                let why = format!("the agent gave up {}{NEXT_ATTEMPT}{until}", times(*n));
                BackoffHold { reason: HoldReason::BackingOff, why, until: Some(*until) }
            } else {
                return None;
            };
            Some((key.clone(), left))
        };
        self.attempts.iter().filter_map(left).collect()
    }

    /// When the next retry is due.
    pub fn next_retry(&self, now: Time) -> Option<Time> {
        let waits =
            self.attempts.values().filter(|attempts| attempts.given_up.is_none()).flat_map(|attempts| {
                let failed = attempts.failed.as_ref().map(|failed| failed.until);
                failed.into_iter().chain(attempts.crashed.as_ref().map(|crashed| crashed.until))
            });
        waits.filter(|until| *until > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::testing::start_step;
    use crate::execute::StepOutcome;
    use crate::manifest::{Limits, load_text};
    use crate::model::{HeldChange, Wave};

    const KEY: &str = "0:10.0.0.1:web:api";

    fn key() -> InstanceKey {
        KEY.parse().expect("a key")
    }

    fn wanted() -> Desired {
        let text = "apiVersion: abide/v1\nkind: Process\nmeta: {namespace: web, name: api}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]\n\
                    spec:\n  identity: {proc_name: api, setup_path: /opt, pid_path: /run/api.pid}\n  control: {start_cmd: ./run}\n";
        load_text("api.yaml", text.to_owned(), &Limits::default()).desired
    }

    fn plan() -> Plan {
        Plan { waves: vec![Wave { steps: vec![start_step(key())], gates: Vec::new() }], ..Plan::default() }
    }

    fn ended(outcome: StepOutcome, code: i64) -> Vec<StepResult> {
        vec![StepResult {
            step: 1,
            instance: key(),
            op: Op::Start,
            outcome,
            state: crate::backend::RowState::Unreported,
            code,
            message: String::new(),
            took_ms: 0,
            reason: None,
        }]
    }

    fn seen(health: Health, running: bool) -> Observed {
        let seen = ObservedInstance { running: Some(running), health, ..ObservedInstance::default() };
        Observed { instances: [(key(), seen)].into(), ..Observed::default() }
    }

    #[test]
    fn delays_grow_with_each_failure_and_a_success_or_another_cause_resets_them() {
        let mut backoff = Backoff::default();
        let mut now = Time(1_000_000);
        let mut waits = Vec::new();
        for _ in 0..10 {
            backoff.record_results(&plan(), &ended(StepOutcome::Failed, 7), now, &mut || 1.0);
            let until = backoff.next_retry(now).expect("a time");
            waits.push((until.0 - now.0) / 1000);
            assert_eq!(backoff.backing_off(now)[&key()].reason, HoldReason::BackingOff);
            assert!(backoff.backing_off(until).is_empty(), "then it may be tried");
            now = until;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        backoff.record_results(&plan(), &ended(StepOutcome::Failed, 8), now, &mut || 0.0);
        assert_eq!(backoff.next_retry(now), Some(Time(now.0 + 800)), "another cause, and a lucky one");
        backoff.record_results(&plan(), &ended(StepOutcome::Done, 0), now, &mut || 1.0);
        assert!(backoff.backing_off(now).is_empty());
        backoff.record_results(&plan(), &ended(StepOutcome::Failed, 7), now, &mut || 1.0);
        assert_eq!(backoff.next_retry(now), Some(now.after_secs(1)));
    }

    #[test]
    fn a_repeatedly_undone_operation_suspends_the_instance_until_its_state_changes() {
        let mut backoff = Backoff::default();
        let now = Time(1_000_000);
        for nth in 0..3 {
            assert!(backoff.backing_off(now).is_empty(), "{nth}");
            backoff.record_results(&plan(), &ended(StepOutcome::Done, 0), now, &mut || 1.0);
        }
        let BackoffHold { reason, why, .. } = backoff.backing_off(now)[&key()].clone();
        assert!(reason == HoldReason::NotConverging && why.contains("`start` succeeded 3 times"), "{why}");
        // Our step, then undone; the state stays like that.
        let (made, undone) = (seen(Health::Unknown, true), seen(Health::Unknown, false));
        let held =
            HeldChange { instance: key(), reason, detail: why, steps: Vec::new(), why: Vec::new(), at: None };
        let left = Plan { held: vec![held], ..Plan::default() };
        backoff.record_observation(&wanted(), &made, now, &mut || 1.0);
        for _ in 0..2 {
            backoff.record_observation(&wanted(), &undone, now, &mut || 1.0);
            assert!(!backoff.backing_off(now).is_empty(), "as before");
            backoff.record_held(&left, &undone);
        }
        backoff.record_observation(&wanted(), &made, now, &mut || 1.0);
        assert!(backoff.backing_off(now).is_empty());
        let mut slow = Backoff::default();
        for hour in 0..9 {
            slow.record_results(
                &plan(),
                &ended(StepOutcome::Done, 0),
                now.after_secs(hour * 3600),
                &mut || 1.0,
            );
        }
        assert!(slow.backing_off(now).is_empty(), "rare repetitions converge");
    }

    #[test]
    fn a_crash_loop_is_not_fed() {
        let mut backoff = Backoff::default();
        let mut now = Time(1_000_000);
        let mut waits = Vec::new();
        for _ in 0..12 {
            // Repeated observations count once.
            for _ in 0..3 {
                backoff.record_observation(&wanted(), &seen(Health::Failed, false), now, &mut || 1.0);
            }
            let until = backoff.next_retry(now).expect("a time");
            waits.push((until.0 - now.0) / 1000);
            now = until;
            assert!(backoff.backing_off(now).is_empty(), "it may be started");
            backoff.record_results(&plan(), &ended(StepOutcome::Done, 0), now, &mut || 1.0);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
        let mut well = seen(Health::Healthy, true);
        well.instances.values_mut().for_each(|seen| seen.since = Some(now));
        backoff.record_observation(&wanted(), &well, now.after_secs(REPEAT_WINDOW_SECS), &mut || 1.0);
        assert!(backoff.attempts.values().all(|attempts| attempts.crashed.is_none()), "well for long enough");
    }
}
