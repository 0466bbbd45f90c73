//! What failed is not tried again at once, and what never stays as it was made is not made so for ever.
//!
//! After a failure an instance is left alone for a second, then two, four, at most five minutes. If the same steps ended
//! well three times and are needed once more, somebody or something undoes them: no more attempts until the manifests change.

use std::collections::BTreeMap;

use crate::execute::Ended;
use crate::model::{Hold, InstanceKey, Plan, Time};

const FIRST_SECS: u64 = 1;
const LONGEST_SECS: u64 = 300;
/// So often the same steps may end well within this time.
const SAME: u32 = 3;
const WITHIN_SECS: u64 = 600;

#[derive(Debug, Default)]
struct Tries {
    failures: u32,
    until: Option<Time>,
    /// What was done, how often it ended well, and since when.
    steps: String,
    well: u32,
    since: Time,
    gave_up: bool,
    /// Why it is not tried any more, where that is not because it does not stay as it is made.
    why: Option<&'static str>,
}

#[derive(Debug, Default)]
pub struct Patience {
    tries: BTreeMap<InstanceKey, Tries>,
    next: Option<std::time::Instant>,
}

impl Patience {
    /// Takes in how a plan ended.
    pub fn note(&mut self, plan: &Plan, ended: &[Ended], now: Time) {
        let mut steps: BTreeMap<&InstanceKey, String> = BTreeMap::new();
        for step in plan.steps() {
            let text = steps.entry(&step.instance).or_default();
            text.push_str(step.op.word());
            text.extend(step.why.iter().filter_map(|why| why.field.as_deref()));
        }
        let mut bad: BTreeMap<&InstanceKey, bool> = BTreeMap::new();
        for one in ended {
            *bad.entry(&one.instance).or_default() |= !one.outcome.is_well();
        }
        for (key, bad) in bad {
            let tries = self.tries.entry(key.clone()).or_default();
            let did = steps.get(key).cloned().unwrap_or_default();
            if bad {
                let wait = FIRST_SECS.saturating_mul(1 << tries.failures.min(10)).min(LONGEST_SECS);
                tries.failures = tries.failures.saturating_add(1);
                tries.until = Some(now.after_secs(wait));
                let at = std::time::Instant::now() + std::time::Duration::from_secs(wait);
                self.next = Some(self.next.map_or(at, |next| next.min(at)));
                continue;
            }
            (tries.failures, tries.until) = (0, None);
            if tries.steps != did || now.secs_since(tries.since) > WITHIN_SECS {
                (tries.steps, tries.well, tries.since) = (did, 0, now);
            }
            tries.well += 1;
            tries.gave_up = tries.well >= SAME;
        }
    }

    /// It is not tried again until the manifests change.
    pub fn give_up(&mut self, key: &InstanceKey, why: &'static str) {
        let tries = self.tries.entry(key.clone()).or_default();
        (tries.gave_up, tries.why) = (true, Some(why));
    }

    /// What is left alone now.
    pub fn holds(&self, now: Time) -> Vec<Hold> {
        let hold = |(key, tries): (&InstanceKey, &Tries)| {
            let (reason, until) = match (tries.gave_up, tries.until) {
                (true, _) => {
                    (tries.why.unwrap_or("it does not stay as it is made: not converging").to_owned(), None)
                }
                (false, Some(until)) if until > now => (
                    match tries.failures {
                        1 => "it failed once: backing off".to_owned(),
                        many => format!("it failed {many} times in a row: backing off"),
                    },
                    Some(until),
                ),
                (false, _) => return None,
            };
            Some(Hold { instance: key.clone(), by: "watch".to_owned(), reason: Some(reason), until })
        };
        self.tries.iter().filter_map(hold).collect()
    }

    /// Is it time to try something again?
    pub fn is_due(&mut self) -> bool {
        self.next.take_if(|next| std::time::Instant::now() >= *next).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execute::Outcome;
    use crate::model::{Host, Op, Step, Wave, Which};

    fn plan() -> Plan {
        let instance: InstanceKey = "0:10.0.0.1:web:api".parse().expect("a key");
        let host = Host { key: instance.host.clone(), supplier: None, agent_id: None };
        let step = Step {
            id: 1,
            instance,
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

    fn ended(outcome: Outcome) -> Vec<Ended> {
        let instance = "0:10.0.0.1:web:api".parse().expect("a key");
        vec![Ended { step: 1, instance, op: Op::Start, outcome, code: 0, message: String::new(), took_ms: 0 }]
    }

    #[test]
    fn failures_wait_longer_each_time_and_success_begins_anew() {
        let mut patience = Patience::default();
        let mut now = Time(1_000_000);
        let mut waits = Vec::new();
        for _ in 0..10 {
            patience.note(&plan(), &ended(Outcome::Failed), now);
            let until = patience.holds(now)[0].until.expect("a time");
            waits.push((until.0 - now.0) / 1000);
            assert!(patience.holds(until).is_empty(), "then it may be tried");
            now = until;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        patience.note(&plan(), &ended(Outcome::Done), now);
        assert!(patience.holds(now).is_empty());
        patience.note(&plan(), &ended(Outcome::Failed), now);
        assert_eq!(patience.holds(now)[0].until, Some(now.after_secs(1)));
    }

    #[test]
    fn what_is_undone_again_and_again_is_left_alone() {
        let mut patience = Patience::default();
        let now = Time(1_000_000);
        for nth in 0..3 {
            assert!(patience.holds(now).is_empty(), "{nth}");
            patience.note(&plan(), &ended(Outcome::Done), now);
        }
        assert!(patience.holds(now)[0].reason.as_deref().is_some_and(|why| why.contains("not converging")));
        let mut slow = Patience::default();
        for hour in 0..9 {
            slow.note(&plan(), &ended(Outcome::Done), now.after_secs(hour * 3600));
        }
        assert!(slow.holds(now).is_empty(), "now and then is no quarrel");
    }
}
