//! The standing loop: look, plan, do, wait for a reason to look again.
//!
//! # Theory of operation
//! Level-triggered: a trigger (a file that changed, a new commit, the interval) only says "look". Every pass reads the
//! manifests ([`source`]: what is broken stays as it last was), looks at the target, plans with the pure core, carries the
//! plan out like `apply`, and tells what it left alone and why. One pass at a time.
//!
//! What failed is left alone for a while, longer each time ([`patience`]); a new revision of the manifests begins anew.
//! Only the leader acts: a second controller waits for the lease.
//!
//! What is taken is kept ([`snapshot`]), so that it can be gone back to; a revision that a person pinned ([`pin`]) stands in
//! for what the source says ([`back`]).
//!
//! Every [`Event`] is told to a closure; [`board`] keeps from them what is known now, for whoever asks.

mod back;
pub mod board;
pub mod old_specs;
pub mod patience;
pub mod pin;
pub mod rollback;
pub mod snapshot;
pub mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use self::back::Back;
use self::old_specs::{Known, Past};
use self::patience::Patience;
use self::pin::Pin;
use self::rollback::as_before;
use self::snapshot::Word;
use self::source::{Reading, Source, Trouble};
use crate::backend::Backend;
use crate::clock;
use crate::execute::world::World;
use crate::execute::{self, Check, Ended, Terms, Told};
use crate::manifest::Limits;
use crate::model::{Desired, Hold, Observed, Pause, Plan, ProcessKey, Step};
use crate::reconcile::old::missing;
use crate::reconcile::{Caps, Rules, of_desired, reconcile};
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
    /// Whoever wants a look at once says so here.
    pub look_now: Arc<Notify>,
    /// Where the manifests come from, as it is remembered.
    pub source: String,
    /// Whom processes run as where nobody says.
    pub user: Option<String>,
    pub limits: Limits,
    /// Where older manifests are.
    pub past: Past,
}

/// One look at the target, and what follows from it.
#[derive(Debug)]
pub struct Look {
    pub revision: String,
    pub observed: Observed,
    /// As they held at this look: with holds, pauses and back-off.
    pub rules: Rules,
    /// What is left alone because it failed, or does not stay as it is made.
    pub backing_off: Vec<Hold>,
    pub plan: Plan,
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
    /// The source is not followed, and why; `None`: it is again.
    Source {
        trouble: Option<&'a Trouble>,
    },
    /// A person pinned this revision: it is kept true, whatever the source says.
    Pinned {
        pin: &'a Pin,
    },
    /// The pin is over; `newer`: because the source has something newer.
    Unpinned {
        pin: &'a Pin,
        newer: bool,
    },
    /// Somebody else leads.
    Waiting {
        holder: &'a Holder,
    },
    Leading {
        generation: u64,
    },
    Planned {
        look: &'a Arc<Look>,
        desired: &'a Desired,
    },
    /// A plan is carried out from here on.
    Doing {
        steps: usize,
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
    /// A rollout failed, and its processes are put back as they were.
    RolledBack {
        processes: &'a str,
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
    /// A pass begins.
    Passing,
    Passed {
        took: Duration,
    },
    /// The loop goes round.
    Turned,
}

/// A target, as the loop needs it.
pub trait Target: Send + Sync {
    type Backend: Backend;
    type State: Store;

    fn backend(&self) -> &Self::Backend;
    fn state(&self) -> &Self::State;
    /// Calls carry this number from here on.
    fn act_as(&self, generation: u64);
    fn name(&self) -> &str;
    fn look(&self, desired: &Desired, prune: bool) -> impl Future<Output = Result<World, String>> + Send;
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
        commit: None,
        applied: String::new(),
        taken: (String::new(), None),
        back: Back::default(),
        old: Known::default(),
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
                source.forget();
                loop_.taken = (String::new(), None);
            }
        }
        let changed = source.changed();
        if changed || looked.is_none_or(|last| last.elapsed() >= setting.interval) || loop_.patience.is_due()
        {
            looked = Some(Instant::now());
            (loop_.told)(Event::Passing);
            // A rollout may take much longer than a lease lives.
            let did = keeping(target.state(), &leader, loop_.pass(source, stop.clone())).await;
            renewed = Instant::now();
            (loop_.told)(Event::Passed { took: looked.map(|began| began.elapsed()).unwrap_or_default() });
            if did {
                looked = None;
            }
        }
        (loop_.told)(Event::Turned);
        let rest = source.wait().min(Duration::from_millis(500));
        tokio::select! {
            () = tokio::time::sleep(rest) => {}
            () = source.woken() => {}
            () = setting.look_now.notified() => {
                // Wherever the manifests come from, too.
                source.nudge().now();
                looked = None;
            }
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
        told(Event::Turned);
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
    /// What was read last is this commit.
    commit: Option<String>,
    applied: String,
    /// The revision and the commit that are known to be kept.
    taken: (String, Option<String>),
    back: Back,
    old: Known,
}

impl<T: Target> Loop<'_, T> {
    /// Was something done? Then it is looked at again at once.
    async fn pass(&mut self, source: &mut Source, stop: watch::Receiver<bool>) -> bool {
        if let Some(trouble) = source.news() {
            (self.told)(Event::Source { trouble });
        }
        let reading = match source.read(self.target.state()).await {
            Ok(reading) => reading,
            Err(error) => return self.trouble(&error.to_string()),
        };
        // A pin is kept true also before the source has said anything.
        let (is_silent, nothing) = (reading.is_none(), Reading { is_incomplete: true, ..Reading::default() });
        let reading = reading.unwrap_or(&nothing);
        let (found, state) = (of_desired(&reading.desired), self.target.state());
        let pinned = match self.back.instead_of(reading, &found, state, self.setting, self.told).await {
            Ok(pinned) => pinned,
            Err(error) => return self.trouble(&error.to_string()),
        };
        let (reading, revision) = match &pinned {
            Some((pinned, revision)) => (&**pinned, revision.clone()),
            None if is_silent => return false,
            None => (reading, found),
        };
        let fresh = revision != self.revision || reading.is_news;
        if fresh {
            (self.told)(Event::Read { reading, revision: &revision });
        }
        self.commit.clone_from(&reading.commit);
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
        let mut rules = self.setting.rules.clone();
        let mut world = match self.target.look(desired, rules.prune).await {
            Ok(world) => world,
            Err(why) => return self.trouble(&why),
        };
        match self.target.restraints().await {
            Ok(restraints) => (rules.holds, rules.pauses) = restraints,
            Err(why) => return self.trouble(&why),
        }
        rules.source_unreadable |= reading.is_incomplete;
        rules.prune &= reading.may_prune;
        let now = clock::now(desired);
        let backing_off = self.patience.holds(now.at);
        rules.holds.extend(backing_off.iter().cloned());
        let mut plan = reconcile(desired, &world.observed, &rules, &now);
        let missing = missing(&plan, desired, &world.observed, &rules.caps);
        if !missing.is_empty() {
            let Setting { past, limits, .. } = self.setting;
            world.learn(self.old.of(past, reading.commit.as_deref(), limits, missing, &rules.caps).await);
            plan = reconcile(desired, &world.observed, &rules, &now);
        }
        // Nothing is lost on the word of a list.
        loop {
            match world.come_closer(self.target.backend(), &rules.caps, &plan).await {
                Ok(true) => plan = reconcile(desired, &world.observed, &rules, &now),
                Ok(false) => break,
                Err(blind) => return self.trouble(&blind.to_string()),
            }
        }
        let observed = world.observed;
        let look = Arc::new(Look { revision: revision.clone(), observed, rules, backing_off, plan });
        (self.told)(Event::Planned { look: &look, desired });
        let plan = &look.plan;
        let may = match revision == self.applied {
            true => self.setting.heal,
            // What is pinned is a person's word, not the source's.
            false => self.setting.follow || pinned.is_some(),
        };
        let steps = plan.steps().count();
        if pinned.is_none()
            && (steps == 0 || may)
            && let Err(error) = self.take(reading, &revision).await
        {
            return self.trouble(&error.to_string());
        }
        let did = steps > 0 && may && self.carry_out(plan, desired, &look.observed, stop).await;
        if steps == 0 || may {
            self.applied = revision;
        }
        if steps == 0 {
            (self.told)(Event::Rested { settled: plan.settled, held: plan.held.len() });
        }
        did
    }

    /// What is about to be made true is kept, if it is not what was kept last.
    async fn take(&mut self, reading: &Reading, revision: &str) -> Result<(), Error> {
        let (owner, source) = (&self.setting.rules.owner, &self.setting.source);
        let commit = reading.commit.as_deref();
        if (self.taken.0.as_str(), self.taken.1.as_deref()) == (revision, commit) {
            return Ok(());
        }
        let state = self.target.state();
        let known = snapshot::taken(state, owner).await?.0;
        let is_known = known.is_some_and(|known| {
            (known.revision.as_str(), known.commit.as_deref(), &known.source) == (revision, commit, source)
        });
        if !is_known {
            snapshot::take(state, &Word { owner, source, revision, commit, texts: &reading.texts }).await?;
        }
        self.taken = (revision.to_owned(), reading.commit.clone());
        Ok(())
    }

    fn trouble(&mut self, why: &str) -> bool {
        (self.told)(Event::Trouble { why });
        false
    }

    async fn carry_out(
        &mut self,
        plan: &Plan,
        desired: &Desired,
        observed: &Observed,
        stop: watch::Receiver<bool>,
    ) -> bool {
        let (owner, at) = (&self.setting.rules.owner, clock::moment());
        let holder = Holder::this(format!("watch-{}-{}", std::process::id(), at.0));
        let state = self.target.state();
        // Somebody is applying: then there may be something else to do afterwards.
        let lease = match state.take_lease(&format!("writer/{owner}"), &holder, LEASE.0).await {
            Ok(Taken::Ours(lease)) => lease,
            Ok(Taken::Theirs { .. }) => return false,
            Err(error) => return self.trouble(&error.to_string()),
        };
        // Somebody pinned a revision, or ended a pin, since this was planned.
        if !self.back.is_current(state, owner).await.unwrap_or(false) {
            let _ = state.release_lease(&lease).await;
            return false;
        }
        self.target.act_as(lease.generation);
        (self.told)(Event::Doing { steps: plan.steps().count() });
        let begin = Instant::now();
        let caps = self.setting.rules.caps;
        let deadline = begin + self.setting.timeout;
        let whom = (self.target.name(), &caps);
        if let Err(why) = execute::settle(self.target.backend(), state, whom, owner, deadline).await {
            let _ = state.release_lease(&lease).await;
            return self.trouble(&why.to_string());
        }
        let mut terms = terms(desired, observed, plan, stop);
        terms.owner.clone_from(owner);
        (terms.target, terms.caps) = (self.target.name().to_owned(), caps);
        (terms.deadline, terms.check) = (deadline, self.setting.check);
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
        let done = keeping(state, &lease, executing).await;
        self.patience.note(plan, &done.ended, clock::now(desired).at);
        if !done.to_roll_back.is_empty() {
            self.roll_back(desired, &terms, &done.to_roll_back, &lease).await;
        }
        let _ = state.release_lease(&lease).await;
        self.remember(plan, &done.ended).await;
        (self.told)(Event::Did { steps: done.ended.len(), took: begin.elapsed() });
        true
    }

    /// Puts processes back as they were, and leaves them alone until the manifests change.
    async fn roll_back(
        &mut self,
        desired: &Desired,
        terms: &Terms,
        processes: &BTreeSet<ProcessKey>,
        lease: &Lease,
    ) {
        let back = as_before(desired, &terms.before, processes);
        let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
        (self.told)(Event::RolledBack { processes: &names.join(", ") });
        for (key, want) in &desired.instances {
            if processes.contains(&want.origin.declared) {
                self.patience.give_up(key, "its rollout failed, and was rolled back");
            }
        }
        let world = match self.target.look(&back, false).await {
            Ok(world) => world,
            Err(why) => return (self.told)(Event::Trouble { why: &why }),
        };
        let rules = Rules { prune: false, max_restart: None, ..self.setting.rules.clone() };
        let plan = reconcile(&back, &world.observed, &rules, &clock::now(&back));
        let mut again = self::terms(&back, &world.observed, &plan, terms.stop.clone());
        (again.owner, again.target, again.caps) = (terms.owner.clone(), terms.target.clone(), terms.caps);
        (again.deadline, again.run) = (Instant::now() + self.setting.timeout, format!("{}-back", terms.run));
        let (backend, state, told) = (self.target.backend(), self.target.state(), &mut *self.told);
        let mut each = |said: Told<'_>| {
            if let Told::Ended(ended) = said
                && let Some(step) = plan.steps().find(|step| step.id == ended.step)
            {
                told(Event::Ended { step, ended });
            }
        };
        let _ = keeping(state, lease, execute::execute(&plan, backend, state, &again, &mut each)).await;
    }

    async fn remember(&self, plan: &Plan, ended: &[Ended]) {
        let at = clock::moment();
        let failed = ended.iter().filter(|ended| !ended.outcome.is_well()).count();
        let mut summary = serde_json::Map::new();
        for step in plan.steps() {
            let many = summary.get(step.op.word()).and_then(serde_json::Value::as_u64).unwrap_or(0);
            summary.insert(step.op.word().to_owned(), (many + 1).into());
        }
        let mut entry = serde_json::json!({
            "at": at.to_string(), "revision": self.revision, "source": "watch", "summary": summary,
            "exit": if failed == 0 { 0 } else { 3 }, "failed": failed,
        });
        if let Some(commit) = &self.commit {
            entry["commit"] = commit.as_str().into();
        }
        let key = format!("history/{}/{:013}", self.setting.rules.owner, at.0);
        let _: Result<_, Error> = self.target.state().txn(Txn::put(key, entry.to_string())).await;
    }
}

/// What a plan for these manifests is carried out under, as far as they and a look say.
pub fn terms(desired: &Desired, observed: &Observed, plan: &Plan, stop: watch::Receiver<bool>) -> Terms {
    let (mut depends, mut declared) = (BTreeMap::new(), BTreeMap::new());
    for (key, want) in &desired.instances {
        declared.insert(key.clone(), want.origin.declared.clone());
        depends.entry(want.origin.declared.clone()).or_insert_with(|| want.origin.depends_on.clone());
    }
    let row = |step: &Step| Some((step.instance.clone(), observed.instances.get(&step.instance)?.clone()));
    let mut before: BTreeMap<_, _> = plan.steps().filter_map(row).collect();
    // A rollback concerns all of a process.
    let rolled: BTreeSet<&ProcessKey> =
        plan.waves.iter().flat_map(|wave| &wave.gates).map(|gate| &gate.process).collect();
    for (key, want) in desired.instances.iter().filter(|(_, want)| rolled.contains(&want.origin.declared)) {
        if let (false, Some(seen)) = (want.origin.rollout.is_none(), observed.instances.get(key)) {
            before.entry(key.clone()).or_insert_with(|| seen.clone());
        }
    }
    Terms {
        owner: String::new(),
        target: String::new(),
        caps: Caps::LOCAL,
        run: format!("{:013}-{}", clock::moment().0, std::process::id()),
        deadline: Instant::now(),
        max_parallel: 1000,
        depends,
        declared,
        before,
        check: |_| None,
        stop,
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
