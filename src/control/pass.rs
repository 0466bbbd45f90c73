//! One pass: read, look, plan, do, and tell what was left alone.
//!
//! Nothing here waits for a reason; whoever runs it does. Time is the target's.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;
use tokio::time::Instant;

use super::back::Back;
use super::history;
use super::old_specs::Known;
use super::patience::Patience;
use super::rollback::as_before;
use super::sight::Sight;
use super::snapshot::{self, Word};
use super::source::{Reading, Source};
use super::{Event, LEASE, Look, Setting, Target, keeping, keeping_or_ending};
use crate::clock;
use crate::execute::world::World;
use crate::execute::{self, Ended, Terms, Told};
use crate::model::{Desired, Observed, Plan, ProcessKey, Reason, Time};
use crate::reconcile::old::missing;
use crate::reconcile::{Rules, reconcile};
use crate::store::{Error, Holder, Lease, Store, Taken, Txn};

pub struct Pass<'a, T> {
    setting: &'a Setting,
    target: &'a T,
    pub(super) told: &'a mut (dyn FnMut(Event<'_>) + Send),
    patience: Patience,
    /// When something that failed may be tried again.
    due: Option<Time>,
    pub(super) sight: Sight,
    /// Of what was read last, and of what was last begun to be made true: what differs from that is drift.
    revision: String,
    /// What was read last is this commit.
    commit: Option<String>,
    applied: String,
    /// The revision and the commit that are known to be kept.
    taken: (String, Option<String>),
    /// Something was taken, and older things may be too old now.
    untidy: bool,
    back: Back,
    old: Known,
}

impl<'a, T: Target> Pass<'a, T> {
    pub fn new(
        setting: &'a Setting,
        target: &'a T,
        told: &'a mut (dyn FnMut(Event<'_>) + Send),
    ) -> Pass<'a, T> {
        Pass {
            setting,
            target,
            told,
            patience: Patience::default(),
            due: None,
            sight: Sight::default(),
            revision: String::new(),
            commit: None,
            applied: String::new(),
            taken: (String::new(), None),
            untidy: false,
            back: Back::default(),
            old: Known::default(),
        }
    }

    /// Is it time to try something again?
    pub fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= self.target.now())
    }

    pub fn tell_relaunched(&mut self) {
        for (instance, pid) in self.sight.relaunched() {
            (self.told)(Event::Relaunched { instance: &instance, pid });
        }
    }

    /// Was something done? Then it is looked at again at once.
    pub async fn run(&mut self, source: &mut Source, stop: watch::Receiver<bool>) -> bool {
        self.due = None;
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
        let (found, state) = (&reading.revision, self.target.state());
        let pinned = match self.back.instead_of(reading, found, state, self.setting, self.told).await {
            Ok(pinned) => pinned,
            Err(error) => return self.trouble(&error.to_string()),
        };
        let is_pinned = pinned.is_some();
        let reading = match &pinned {
            Some(pinned) => &**pinned,
            None if is_silent => return false,
            None => reading,
        };
        if reading.revision != self.revision || reading.is_news {
            (self.told)(Event::Read { reading, revision: &reading.revision });
        }
        self.commit.clone_from(&reading.commit);
        if reading.revision != self.revision {
            self.revision.clone_from(&reading.revision);
            // What failed before may work now.
            self.patience = Patience::default();
        }
        // Nothing was ever read: nothing is wanted, and nothing is known.
        if reading.desired.instances.is_empty() && reading.is_incomplete {
            return false;
        }
        let prune = self.setting.rules.prune;
        let world = match self.sight.world(self.target, &reading.desired, prune).await {
            Ok(world) => world,
            Err(why) => return self.trouble(&why),
        };
        self.tell_relaunched();
        let did = self.make_true(reading, is_pinned, world, stop).await;
        if std::mem::take(&mut self.untidy) {
            // What is left lying is picked up another time.
            let _ = snapshot::tidy(self.target.state(), &self.setting.rules.owner).await;
        }
        self.due = self.patience.next(self.target.now());
        did
    }

    async fn make_true(
        &mut self,
        reading: &Reading,
        is_pinned: bool,
        mut world: World,
        stop: watch::Receiver<bool>,
    ) -> bool {
        let desired = &reading.desired;
        let mut rules = self.setting.rules.clone();
        match self.target.restraints().await {
            Ok(restraints) => (rules.holds, rules.pauses) = restraints,
            Err(why) => {
                self.sight.keep(Arc::new(world.observed));
                return self.trouble(&why);
            }
        }
        rules.source_unreadable |= reading.is_incomplete;
        rules.prune &= reading.may_prune;
        let now = clock::at(self.target.now(), desired);
        self.patience.look(desired, &world.observed, now.at, &mut fastrand::f64);
        let left = self.patience.left_alone(now.at);
        let backing_off = left.iter().map(|(key, left)| left.hold(key)).collect();
        rules.left_alone = left.into_iter().map(|(key, left)| (key, (left.reason, left.why))).collect();
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
        self.patience.held(&plan, &world.observed);
        let observed = Arc::new(world.observed);
        self.sight.keep(Arc::clone(&observed));
        let look = Arc::new(Look {
            revision: self.revision.clone(),
            desired: Arc::clone(desired),
            observed,
            rules,
            backing_off,
            plan,
            rows: OnceLock::new(),
        });
        (self.told)(Event::Planned { look: &look });
        let plan = &look.plan;
        let may = match self.revision == self.applied {
            true => self.setting.heal,
            // What is pinned is a person's word, not the source's.
            false => self.setting.follow || is_pinned,
        };
        let steps = plan.steps().count();
        if !is_pinned
            && (steps == 0 || may)
            && let Err(error) = self.take(reading).await
        {
            return self.trouble(&error.to_string());
        }
        let did = steps > 0 && may && self.carry_out(plan, desired, &look.observed, stop).await;
        if steps == 0 || may {
            self.applied.clone_from(&self.revision);
        }
        if steps == 0 {
            (self.told)(Event::Rested { settled: plan.settled, held: plan.held.len() });
        }
        did
    }

    /// Somebody else may have led meanwhile.
    pub fn forget(&mut self) {
        self.taken = (String::new(), None);
    }

    /// What is about to be made true is kept, if it is not what was kept last.
    async fn take(&mut self, reading: &Reading) -> Result<(), Error> {
        let (owner, source) = (&self.setting.rules.owner, &self.setting.source);
        let (revision, commit) = (reading.revision.as_str(), reading.commit.as_deref());
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
            self.untidy = true;
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
        self.sight.expect(plan.steps().map(|step| step.instance.clone()));
        let begin = Instant::now();
        let caps = self.setting.rules.caps;
        let deadline = begin + self.setting.timeout;
        let whom = (self.target.name(), &caps);
        // What a run that died had begun may have changed what was looked at: then it is looked at again.
        let left = execute::journal::left(state, owner).await.is_ok_and(|left| !left.is_empty());
        let settled = execute::settle(self.target.backend(), state, whom, owner, deadline).await;
        if left || settled.is_err() {
            let _ = state.release_lease(&lease).await;
            return settled.map_or_else(|why| self.trouble(&why.to_string()), |()| true);
        }
        let (ends, ended) = watch::channel(false);
        let mut terms = super::terms(desired, observed, plan, ended);
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
        let done = keeping_or_ending(state, &lease, stop, &ends, executing).await;
        self.patience.note(plan, &done.ended, self.target.now(), &mut fastrand::f64);
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
                let why = "its rollout failed, and it was put back as it was: left alone until the manifests change";
                self.patience.give_up(key, Reason::RolledBack, why);
            }
        }
        let world = match self.target.look(&back, false).await {
            Ok(world) => world,
            Err(why) => return (self.told)(Event::Trouble { why: &why }),
        };
        self.sight.expect(back.instances.keys().cloned());
        let rules = Rules { prune: false, max_restart: None, ..self.setting.rules.clone() };
        let plan = reconcile(&back, &world.observed, &rules, &clock::at(self.target.now(), &back));
        let mut again = super::terms(&back, &world.observed, &plan, terms.stop.clone());
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
            "exit": if failed == 0 { 0 } else { 3 }, "failed": failed, "by": history::whoever(),
            "steps": history::steps(ended),
        });
        if let Some(commit) = &self.commit {
            entry["commit"] = commit.as_str().into();
        }
        let key = format!("history/{}/{:013}", self.setting.rules.owner, at.0);
        let _: Result<_, Error> = self.target.state().txn(Txn::put(key, entry.to_string())).await;
    }
}
