//! What failed is not tried again at once, and what never stays as it was made is not made so for ever.
//!
//! After a failure an instance is left alone for a second, then two, four, at most five minutes (a little less each, so that
//! many do not come back at once); another cause begins anew, success ends it. A process that its agent has given up on is
//! a failure too, whatever became of the start: a crash loop is not fed. If the same steps ended well three times and are
//! needed once more, somebody or something undoes them: no more attempts until what is seen becomes another. New manifests
//! end all of it; what was put back after a failed rollout waits for manifests that ask for something else of it.
//!
//! Time and chance come in as values.

use std::collections::{BTreeMap, BTreeSet};

use super::sight::standing;
use crate::execute::Ended;
use crate::model::{Desired, Health, Hold, InstanceKey, Observed, Op, Plan, Reason, Seen, Time, span};

const FIRST_SECS: u64 = 1;
const LONGEST_SECS: u64 = 300;
/// So often the same steps may end well within this time.
const SAME: u32 = 3;
const WITHIN_SECS: u64 = 600;

/// What is known of one instance.
#[derive(Debug, Default)]
struct Tries {
    failed: Option<Failed>,
    crashed: Option<Crashed>,
    same: Same,
    given_up: Option<GivenUp>,
}

/// Steps failed in a row, for the same cause.
#[derive(Debug)]
struct Failed {
    cause: String,
    times: u32,
    until: Time,
}

/// Its agent gave up on it.
#[derive(Debug)]
struct Crashed {
    times: u32,
    until: Time,
    /// It was started since.
    started: bool,
}

/// What was done, how often it ended well, and since when.
#[derive(Debug, Default)]
struct Same {
    steps: String,
    fields: String,
    well: u32,
    since: Time,
}

#[derive(Debug)]
struct GivenUp {
    reason: Reason,
    why: String,
    /// How it was when it was first left alone for this; another sight ends it.
    seen: Option<Option<Seen>>,
}

/// Why an instance is left alone, and for how long; `None`: until something changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Left {
    pub reason: Reason,
    pub why: String,
    pub until: Option<Time>,
}

impl Left {
    /// As people are told of it.
    pub fn hold(&self, instance: &InstanceKey) -> Hold {
        let (instance, reason) = (instance.clone(), Some(self.why.clone()));
        Hold { instance, by: "watch".to_owned(), reason, until: self.until }
    }
}

#[derive(Debug, Default)]
pub struct Patience {
    tries: BTreeMap<InstanceKey, Tries>,
}

/// The next wait after so many failures. `chance` is of 0 to 1.
fn wait_secs(failures: u32, chance: f64) -> f64 {
    let most = FIRST_SECS.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(LONGEST_SECS);
    most as f64 * (0.8 + 0.2 * chance)
}

fn after(now: Time, secs: f64) -> Time {
    Time(now.0.saturating_add((secs * 1000.0) as i64))
}

impl Patience {
    /// Takes in how a plan ended.
    pub fn note(&mut self, plan: &Plan, ended: &[Ended], now: Time, chance: &mut impl FnMut() -> f64) {
        let concerned: BTreeSet<&InstanceKey> = ended.iter().map(|one| &one.instance).collect();
        let mut steps: BTreeMap<&InstanceKey, (String, Vec<&str>)> = BTreeMap::new();
        for step in plan.steps().filter(|step| concerned.contains(&step.instance)) {
            let (text, fields) = steps.entry(&step.instance).or_default();
            text.push_str(step.op.word());
            text.push(' ');
            fields.extend(step.why.iter().map(|why| why.field.as_deref().unwrap_or(why.rule.word())));
        }
        let mut bad: BTreeMap<&InstanceKey, Option<String>> = BTreeMap::new();
        for one in ended {
            let cause = bad.entry(&one.instance).or_default();
            if !one.outcome.is_well() && cause.is_none() {
                *cause = Some(format!("{} {} {}", one.op.word(), one.outcome.word(), one.code));
            }
        }
        for (key, bad) in bad {
            let tries = self.tries.entry(key.clone()).or_default();
            if let Some(cause) = bad {
                let before = tries.failed.take().filter(|failed| failed.cause == cause);
                let times = before.map_or(1, |failed| failed.times.saturating_add(1));
                let until = after(now, wait_secs(times, chance()));
                tries.failed = Some(Failed { cause, times, until });
                continue;
            }
            tries.failed = None;
            let (did, mut fields) = steps.remove(key).unwrap_or_default();
            fields.sort_unstable();
            fields.dedup();
            if let Some(crashed) = &mut tries.crashed {
                crashed.started |= did.contains(Op::Start.word()) || did.contains(Op::Restart.word());
                // What crashes does not stay as it was made; that is not somebody's doing.
                continue;
            }
            let same = &mut tries.same;
            let fields = fields.join(", ");
            if (&same.steps, &same.fields) != (&did, &fields) || now.secs_since(same.since) > WITHIN_SECS {
                *same = Same { steps: did, fields, well: 0, since: now };
            }
            same.well += 1;
            if same.well >= SAME {
                let (fields, many) = (&same.fields, same.well);
                let why = format!(
                    "it does not stay as it is made: {fields} differed again though {} ended well {many} times within {}; \
                     not tried any more until it is seen to be otherwise, or the manifests change",
                    same.steps.trim_end(),
                    span(WITHIN_SECS)
                );
                tries.given_up = Some(GivenUp { reason: Reason::NotConverging, why, seen: None });
            }
        }
    }

    /// It is not tried again until its manifest changes.
    pub fn give_up(&mut self, key: &InstanceKey, reason: Reason, why: &str) {
        let given_up = GivenUp { reason, why: why.to_owned(), seen: None };
        self.tries.entry(key.clone()).or_default().given_up = Some(given_up);
    }

    /// What is not tried again, and why.
    pub fn given_up(&self) -> impl Iterator<Item = (&InstanceKey, Reason, &str)> {
        self.tries.iter().filter_map(|(key, tries)| {
            let given_up = tries.given_up.as_ref()?;
            Some((key, given_up.reason, given_up.why.as_str()))
        })
    }

    /// There are new manifests. What was put back is not tried again for what others ask for.
    pub fn begin_anew(&mut self, before: &Desired, now: &Desired) {
        self.tries.retain(|key, tries| {
            let put_back = tries.given_up.take_if(|given_up| given_up.reason == Reason::RolledBack);
            *tries = Tries { given_up: put_back.filter(|_| before.asks_as(now, key)), ..Tries::default() };
            tries.given_up.is_some()
        });
    }

    /// Takes in what a plan leaves alone: how that is.
    pub fn held(&mut self, plan: &Plan, observed: &Observed) {
        for held in plan.held.iter().filter(|held| held.reason == Reason::NotConverging) {
            let tries = self.tries.get_mut(&held.instance);
            if let Some(given_up) = tries.and_then(|tries| tries.given_up.as_mut()) {
                given_up.seen.get_or_insert_with(|| observed.instances.get(&held.instance).map(standing));
            }
        }
    }

    /// Takes in a look: who crashed, who is well again, and what is not as it was when it was given up.
    pub fn look(
        &mut self,
        desired: &Desired,
        observed: &Observed,
        now: Time,
        chance: &mut impl FnMut() -> f64,
    ) {
        let failed = observed.instances.iter().filter(|(_, seen)| seen.health == Health::Failed);
        for (key, _) in failed.filter(|(key, _)| desired.instances.contains_key(*key)) {
            let crashed = &mut self.tries.entry(key.clone()).or_default().crashed;
            let times = match crashed {
                Some(Crashed { started: false, .. }) => continue,
                Some(before) => before.times.saturating_add(1),
                None => 1,
            };
            let until = after(now, wait_secs(times, chance()));
            *crashed = Some(Crashed { times, until, started: false });
        }
        self.tries.retain(|key, tries| {
            let seen = observed.instances.get(key);
            let is_well = |seen: &Seen| {
                seen.health == Health::Healthy
                    && seen.since.is_some_and(|since| now.secs_since(since) >= WITHIN_SECS)
            };
            if tries.crashed.is_some() && seen.is_none_or(is_well) {
                tries.crashed = None;
            }
            let then = tries.given_up.as_ref().and_then(|given_up| given_up.seen.as_ref());
            let blind = observed.gaps.contains_key(&key.host);
            blind || then.is_none_or(|then| *then == seen.map(standing))
        });
    }

    /// What is left alone now.
    pub fn left_alone(&self, now: Time) -> BTreeMap<InstanceKey, Left> {
        let left = |(key, tries): (&InstanceKey, &Tries)| {
            let Tries { failed, crashed, same: _, given_up } = tries;
            let times = |times: u32| match times {
                1 => "once".to_owned(),
                many => format!("{many} times in a row"),
            };
            let left = if let Some(given_up) = given_up {
                Left { reason: given_up.reason, why: given_up.why.clone(), until: None }
            } else if let Some(Failed { cause, times: n, until }) =
                failed.as_ref().filter(|failed| failed.until > now)
            {
                let why = format!("it failed {} ({cause}): backing off until {until}", times(*n));
                Left { reason: Reason::BackingOff, why, until: Some(*until) }
            } else if let Some(Crashed { times: n, until, .. }) =
                crashed.as_ref().filter(|crashed| crashed.until > now)
            {
                let why = format!("its agent gave up on it {}: backing off until {until}", times(*n));
                Left { reason: Reason::BackingOff, why, until: Some(*until) }
            } else {
                return None;
            };
            Some((key.clone(), left))
        };
        self.tries.iter().filter_map(left).collect()
    }

    /// When something may be tried again next.
    pub fn next(&self, now: Time) -> Option<Time> {
        let waits = self.tries.values().filter(|tries| tries.given_up.is_none()).flat_map(|tries| {
            let failed = tries.failed.as_ref().map(|failed| failed.until);
            failed.into_iter().chain(tries.crashed.as_ref().map(|crashed| crashed.until))
        });
        waits.filter(|until| *until > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execute::Outcome;
    use crate::manifest::{Limits, load_text};
    use crate::model::{Held, Host, Step, Wave, Which};

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
        let host = Host { key: key().host, supplier: None, agent_id: None };
        let step = Step {
            id: 1,
            instance: key(),
            host,
            op: Op::Start,
            which: Which::New,
            spec: None,
            revision: None,
            takes: Vec::new(),
            pid_stays: false,
            looks_first: false,
            from: None,
            why: Vec::new(),
        };
        Plan { waves: vec![Wave { steps: vec![step], gates: Vec::new() }], ..Plan::default() }
    }

    fn ended(outcome: Outcome, code: i64) -> Vec<Ended> {
        vec![Ended {
            step: 1,
            instance: key(),
            op: Op::Start,
            outcome,
            code,
            message: String::new(),
            took_ms: 0,
            reason: None,
        }]
    }

    fn seen(health: Health, running: bool) -> Observed {
        let seen = Seen { running: Some(running), health, ..Seen::default() };
        Observed { instances: [(key(), seen)].into(), ..Observed::default() }
    }

    #[test]
    fn failures_wait_longer_each_time_and_success_or_another_cause_begins_anew() {
        let mut patience = Patience::default();
        let mut now = Time(1_000_000);
        let mut waits = Vec::new();
        for _ in 0..10 {
            patience.note(&plan(), &ended(Outcome::Failed, 7), now, &mut || 1.0);
            let until = patience.next(now).expect("a time");
            waits.push((until.0 - now.0) / 1000);
            assert_eq!(patience.left_alone(now)[&key()].reason, Reason::BackingOff);
            assert!(patience.left_alone(until).is_empty(), "then it may be tried");
            now = until;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        patience.note(&plan(), &ended(Outcome::Failed, 8), now, &mut || 0.0);
        assert_eq!(patience.next(now), Some(Time(now.0 + 800)), "another cause, and a lucky one");
        patience.note(&plan(), &ended(Outcome::Done, 0), now, &mut || 1.0);
        assert!(patience.left_alone(now).is_empty());
        patience.note(&plan(), &ended(Outcome::Failed, 7), now, &mut || 1.0);
        assert_eq!(patience.next(now), Some(now.after_secs(1)));
    }

    #[test]
    fn what_is_undone_again_and_again_is_left_alone_until_it_is_seen_to_be_otherwise() {
        let mut patience = Patience::default();
        let now = Time(1_000_000);
        for nth in 0..3 {
            assert!(patience.left_alone(now).is_empty(), "{nth}");
            patience.note(&plan(), &ended(Outcome::Done, 0), now, &mut || 1.0);
        }
        let Left { reason, why, .. } = patience.left_alone(now)[&key()].clone();
        assert!(reason == Reason::NotConverging && why.contains("start ended well 3 times"), "{why}");
        // As we made it, then undone, and so it stays.
        let (made, undone) = (seen(Health::Unknown, true), seen(Health::Unknown, false));
        let held =
            Held { instance: key(), reason, detail: why, steps: Vec::new(), why: Vec::new(), at: None };
        let left = Plan { held: vec![held], ..Plan::default() };
        patience.look(&wanted(), &made, now, &mut || 1.0);
        for _ in 0..2 {
            patience.look(&wanted(), &undone, now, &mut || 1.0);
            assert!(!patience.left_alone(now).is_empty(), "as before");
            patience.held(&left, &undone);
        }
        patience.look(&wanted(), &made, now, &mut || 1.0);
        assert!(patience.left_alone(now).is_empty());
        let mut slow = Patience::default();
        for hour in 0..9 {
            slow.note(&plan(), &ended(Outcome::Done, 0), now.after_secs(hour * 3600), &mut || 1.0);
        }
        assert!(slow.left_alone(now).is_empty(), "now and then is no quarrel");
    }

    #[test]
    fn a_crash_loop_is_not_fed() {
        let mut patience = Patience::default();
        let mut now = Time(1_000_000);
        let mut waits = Vec::new();
        for _ in 0..12 {
            // However often it is looked at.
            for _ in 0..3 {
                patience.look(&wanted(), &seen(Health::Failed, false), now, &mut || 1.0);
            }
            let until = patience.next(now).expect("a time");
            waits.push((until.0 - now.0) / 1000);
            now = until;
            assert!(patience.left_alone(now).is_empty(), "it may be started");
            patience.note(&plan(), &ended(Outcome::Done, 0), now, &mut || 1.0);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
        let mut well = seen(Health::Healthy, true);
        well.instances.values_mut().for_each(|seen| seen.since = Some(now));
        patience.look(&wanted(), &well, now.after_secs(WITHIN_SECS), &mut || 1.0);
        assert!(patience.tries.values().all(|tries| tries.crashed.is_none()), "well for long enough");
    }
}
