//! The standing loop: look, plan, do, wait for a reason to look again.
//!
//! # Theory of operation
//! Level-triggered: a trigger (a file that changed, the interval) only says "look". Every pass reads the manifests
//! ([`source`]: what is broken stays as it last was), looks at the target, plans with the pure core, carries the plan out
//! like `apply`, and tells what it left alone and why. One pass at a time.
//!
//! What failed is left alone for a while, longer each time ([`patience`]); a new revision of the manifests begins anew.
//! Only the leader acts: a second controller waits for the lease.

pub mod patience;
pub mod source;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use self::patience::Patience;
use self::source::{Reading, Source};
use crate::backend::Backend;
use crate::clock;
use crate::execute::{self, Check, Ended, Terms, Told};
use crate::model::{Desired, Hold, Observed, Pause, Plan, ProcessKey, Step, Time};
use crate::reconcile::{Rules, of_desired, reconcile};
use crate::store::{Error, Holder, Lease, Store, Taken, Txn};

/// What is to be watched over, and how.
pub struct Setting {
    pub rules: Rules,
    /// Take new revisions.
    pub follow: bool,
    /// Repair what differs though the manifests did not change.
    pub heal: bool,
    /// How often to look without a reason.
    pub interval: Duration,
    /// How long a pass may take.
    pub timeout: Duration,
    pub check: Check,
}

/// What happened, for whoever tells people.
#[derive(Debug)]
pub enum Event<'a> {
    /// The manifests were read, and are not what they were: problems, and whether something else was taken in place of
    /// what is broken.
    Read {
        reading: &'a Reading,
        revision: &'a str,
    },
    /// Somebody else leads.
    Waiting {
        holder: &'a Holder,
    },
    Leading {
        generation: u64,
    },
    Planned {
        plan: &'a Plan,
    },
    /// One step came to its end.
    Ended {
        step: &'a Step,
        ended: &'a Ended,
    },
    /// A rollout waits to see whether what was changed stays well.
    Soaking {
        process: &'a ProcessKey,
        secs: u64,
    },
    Did {
        steps: usize,
        took: Duration,
    },
    /// It could not be looked at, or written down.
    Trouble {
        why: &'a str,
    },
    /// There is nothing to do.
    Rested {
        settled: usize,
        held: usize,
    },
}

/// A target, as the loop needs it.
pub trait Target: Send + Sync {
    type Backend: Backend;
    type State: Store;

    fn backend(&self) -> &Self::Backend;
    fn state(&self) -> &Self::State;
    /// Calls carry this number from here on.
    fn act_as(&self, generation: u64);
    fn look(&self, desired: &Desired) -> impl Future<Output = Result<Observed, String>> + Send;
    fn restraints(&self) -> impl Future<Output = Result<(Vec<Hold>, Vec<Pause>), String>> + Send;
}

/// How long a lease lives, and how often it is renewed.
const LEASE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(1500));

/// Goes on until told to stop.
pub async fn run<T: Target>(
    setting: &Setting,
    source: &mut Source,
    target: &T,
    mut stop: watch::Receiver<bool>,
    told: &mut (dyn FnMut(Event<'_>) + Send),
) {
    let holder = Holder::this(format!("watch-{}", std::process::id()));
    let owner = &setting.rules.owner;
    let Some(mut leader) = lead(target, owner, &holder, &mut stop, told).await else { return };
    let mut loop_ = Loop {
        setting,
        target,
        told,
        patience: Patience::default(),
        revision: String::new(),
        applied: String::new(),
    };
    let mut renewed = Instant::now();
    let mut looked: Option<Instant> = None;
    loop {
        if renewed.elapsed() >= LEASE.1 {
            renewed = Instant::now();
            // It ran out, while the target did not answer, say: whoever has it now leads.
            if matches!(target.state().renew_lease(&leader, LEASE.0).await, Ok(false)) {
                match lead(target, owner, &holder, &mut stop, loop_.told).await {
                    Some(again) => leader = again,
                    None => return,
                }
            }
        }
        let changed = source.changed();
        if changed || looked.is_none_or(|last| last.elapsed() >= setting.interval) || loop_.patience.is_due()
        {
            looked = Some(Instant::now());
            // A rollout may take much longer than a lease lives.
            let did = keeping(target.state(), &leader, loop_.pass(source, stop.clone())).await;
            renewed = Instant::now();
            if did {
                looked = None;
            }
        }
        let rest = source.wait().min(Duration::from_millis(500));
        tokio::select! {
            () = tokio::time::sleep(rest) => {}
            () = source.woken() => {}
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => break,
        }
    }
    let _ = target.state().release_lease(&leader).await;
}

async fn lead<T: Target>(
    target: &T,
    owner: &str,
    holder: &Holder,
    stop: &mut watch::Receiver<bool>,
    told: &mut (dyn FnMut(Event<'_>) + Send),
) -> Option<Lease> {
    let mut said = false;
    loop {
        match target.state().take_lease(&format!("leader/{owner}"), holder, LEASE.0).await {
            Ok(Taken::Ours(lease)) => {
                told(Event::Leading { generation: lease.generation });
                return Some(lease);
            }
            Ok(Taken::Theirs { holder, .. }) if !std::mem::replace(&mut said, true) => {
                told(Event::Waiting { holder: &holder });
            }
            Ok(Taken::Theirs { .. }) => {}
            Err(error) => told(Event::Trouble { why: &error.to_string() }),
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(500)) => {}
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => return None,
        }
    }
}

struct Loop<'a, T> {
    setting: &'a Setting,
    target: &'a T,
    told: &'a mut (dyn FnMut(Event<'_>) + Send),
    patience: Patience,
    /// Of what was read last, and of what was last begun to be made true: what differs from that is drift.
    revision: String,
    applied: String,
}

impl<T: Target> Loop<'_, T> {
    /// Was something done? Then it is looked at again at once.
    async fn pass(&mut self, source: &mut Source, stop: watch::Receiver<bool>) -> bool {
        let reading = source.read();
        let revision = of_desired(&reading.desired);
        let fresh = revision != self.revision || reading.is_news;
        if fresh {
            (self.told)(Event::Read { reading, revision: &revision });
        }
        if revision != self.revision {
            self.revision.clone_from(&revision);
            // What failed before may work now.
            self.patience = Patience::default();
        }
        let desired = &reading.desired;
        // Nothing was ever read: nothing is wanted, and nothing is known.
        if desired.instances.is_empty() && reading.is_incomplete {
            return false;
        }
        let observed = match self.target.look(desired).await {
            Ok(observed) => observed,
            Err(why) => return self.trouble(&why),
        };
        let mut rules = self.setting.rules.clone();
        match self.target.restraints().await {
            Ok(restraints) => (rules.holds, rules.pauses) = restraints,
            Err(why) => return self.trouble(&why),
        }
        rules.source_unreadable |= reading.is_incomplete;
        rules.prune &= reading.may_prune;
        let now = clock::now(desired);
        rules.holds.extend(self.patience.holds(now.at));
        let plan = reconcile(desired, &observed, &rules, &now);
        (self.told)(Event::Planned { plan: &plan });
        let may = match revision == self.applied {
            true => self.setting.heal,
            false => self.setting.follow,
        };
        let steps = plan.steps().count();
        let did = steps > 0 && may && self.carry_out(&plan, desired, now.at, stop).await;
        if steps == 0 || may {
            self.applied = revision;
        }
        if steps == 0 {
            (self.told)(Event::Rested { settled: plan.settled, held: plan.held.len() });
        }
        did
    }

    fn trouble(&mut self, why: &str) -> bool {
        (self.told)(Event::Trouble { why });
        false
    }

    async fn carry_out(
        &mut self,
        plan: &Plan,
        desired: &Desired,
        at: Time,
        stop: watch::Receiver<bool>,
    ) -> bool {
        let owner = &self.setting.rules.owner;
        let holder = Holder::this(format!("watch-{}-{}", std::process::id(), at.0));
        let state = self.target.state();
        // Somebody is applying: then there may be something else to do afterwards.
        let lease = match state.take_lease(&format!("writer/{owner}"), &holder, LEASE.0).await {
            Ok(Taken::Ours(lease)) => lease,
            Ok(Taken::Theirs { .. }) => return false,
            Err(error) => return self.trouble(&error.to_string()),
        };
        self.target.act_as(lease.generation);
        let (mut depends, mut declared) = (BTreeMap::new(), BTreeMap::new());
        for (key, want) in &desired.instances {
            declared.insert(key.clone(), want.origin.declared.clone());
            depends.entry(want.origin.declared.clone()).or_insert_with(|| want.origin.depends_on.clone());
        }
        let begin = Instant::now();
        let terms = Terms {
            owner: owner.clone(),
            run: format!("{:013}-{}", at.0, std::process::id()),
            deadline: begin + self.setting.timeout,
            max_parallel: 1000,
            depends,
            declared,
            check: self.setting.check,
            stop,
        };
        let told = &mut *self.told;
        let mut each = |said: Told<'_>| match said {
            Told::Ended(ended) => {
                if let Some(step) = plan.steps().find(|step| step.id == ended.step) {
                    told(Event::Ended { step, ended });
                }
            }
            Told::Soaking { process, secs } => told(Event::Soaking { process, secs }),
            Told::Wave { .. } | Told::Sent { .. } | Told::Waiting { .. } => {}
        };
        let executing = execute::execute(plan, self.target.backend(), state, &terms, &mut each);
        let ended = keeping(state, &lease, executing).await;
        let _ = state.release_lease(&lease).await;
        self.patience.note(plan, &ended, clock::now(desired).at);
        self.remember(plan, &ended).await;
        (self.told)(Event::Did { steps: ended.len(), took: begin.elapsed() });
        true
    }

    async fn remember(&self, plan: &Plan, ended: &[Ended]) {
        let at = clock::moment();
        let failed = ended.iter().filter(|ended| !ended.outcome.is_well()).count();
        let mut summary = serde_json::Map::new();
        for step in plan.steps() {
            let many = summary.get(step.op.word()).and_then(serde_json::Value::as_u64).unwrap_or(0);
            summary.insert(step.op.word().to_owned(), (many + 1).into());
        }
        let entry = serde_json::json!({
            "at": at.to_string(), "revision": self.revision, "source": "watch", "summary": summary,
            "exit": if failed == 0 { 0 } else { 3 }, "failed": failed,
        });
        let key = format!("history/{}/{:013}", self.setting.rules.owner, at.0);
        let _: Result<_, Error> = self.target.state().txn(Txn::put(key, entry.to_string())).await;
    }
}

/// Renews a lease while something goes on.
async fn keeping<S: Store, T>(state: &S, lease: &Lease, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = tokio::time::sleep(LEASE.1) => {
                let _ = state.renew_lease(lease, LEASE.0).await;
            }
        }
    }
}
