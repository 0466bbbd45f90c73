//! A plan is carried out: under the writer's lease, and only while it is what is wanted.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::super::history;
use super::super::rollback::as_before;
use super::super::source::Source;
use super::super::{Event, Look, Target, keeping, keeping_or_ending};
use super::{Pass, Work};
use crate::clock;
use crate::execute::restraints::{Restraints, heeding};
use crate::execute::{self, Ended, Outcome, Terms, Told};
use crate::model::{Desired, Plan, ProcessKey, Reason};
use crate::reconcile::{Rules, reconcile};
use crate::store::keeping::{LIVES, RENEWED};
use crate::store::{Holder, Lease, Store, Taken};

/// A source that says "at once" is still not asked all the time.
const MOMENT: Duration = Duration::from_millis(20);

/// What a plan is by the time that it could be carried out.
enum Still {
    Yes,
    LookAgain,
    No,
}

impl<T: Target> Pass<'_, T> {
    /// Was something done?
    pub(super) async fn carry_out(
        &mut self,
        work: &Work,
        source: &mut Source,
        stop: watch::Receiver<bool>,
    ) -> bool {
        let (Look { plan, desired, observed, .. }, owner) = (&*work.look, &self.setting.rules.owner);
        let holder = Holder::this(format!("watch-{}-{}", std::process::id(), clock::moment().0));
        let state = self.target.state();
        // Somebody is applying: then there may be something else to do afterwards.
        let lease = match state.take_lease(&format!("writer/{owner}"), &holder, LIVES).await {
            Ok(Taken::Ours(lease)) => lease,
            Ok(Taken::Theirs { .. }) => return false,
            Err(error) => return self.fails(&error.to_string()),
        };
        match self.may_still(&lease).await {
            Still::Yes => {}
            Still::LookAgain => {
                let _ = state.release_lease(&lease).await;
                return true;
            }
            Still::No => {
                let _ = state.release_lease(&lease).await;
                return false;
            }
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
        let settling = execute::settle(self.target.backend(), state, whom, owner, deadline);
        let settled = keeping(state, &lease, settling).await;
        if left || settled.is_err() {
            let _ = state.release_lease(&lease).await;
            return match settled {
                Ok(()) => true,
                Err(why) => self.fails(&why.to_string()),
            };
        }
        let (ends, ended) = watch::channel(false);
        let mut terms = super::super::terms(desired, observed, plan, ended.clone());
        terms.owner.clone_from(owner);
        (terms.target, terms.caps) = (self.target.name().to_owned(), caps);
        (terms.deadline, terms.check) = (deadline, self.setting.check);
        let told = Mutex::new(&mut *self.told);
        let mut each = |said: Told<'_>| match said {
            Told::Ended(ended) => {
                if let Some(step) = plan.steps().find(|step| step.id == ended.step) {
                    tell(&told, Event::Ended { step, ended });
                }
            }
            Told::Soaking { process, secs } => tell(&told, Event::Soaking { process, secs }),
            Told::Wave { .. } | Told::Sent { .. } | Told::Waiting { .. } => {}
        };
        self.unsettled = true;
        let (restrain, restraints) = watch::channel(Restraints::default());
        terms.restraints = restraints;
        let executing = execute::execute(plan, self.target.backend(), state, &terms, &mut each);
        let (target, rules) = (self.target, &self.setting.rules);
        let executing = heeding(&restrain, rules, || target.restraints(), executing);
        let executing = keeping_or_ending(state, &lease, stop, &ends, executing);
        let follows = self.setting.follow && !work.is_pinned;
        let done = tokio::select! {
            done = executing => done,
            never = newer(source, state, &work.look.revision, follows, &ends, &told) => match never {},
        };
        // What was never begun, because somebody wanted that, has not failed.
        let is_left_alone =
            |one: &Ended| terms.restraints.borrow().means(&one.instance, None, false).is_some();
        let tried =
            |one: &&Ended| one.outcome != Outcome::Skipped || !(*ended.borrow() || is_left_alone(one));
        let tried: Vec<Ended> = done.ended.iter().filter(tried).cloned().collect();
        self.patience.note(plan, &tried, self.target.now(), &mut fastrand::f64);
        if !done.to_roll_back.is_empty() {
            self.roll_back(desired, &terms, &done.to_roll_back, &lease).await;
        }
        let _ = state.release_lease(&lease).await;
        self.remember(plan, &done.ended).await;
        (self.told)(Event::Did { steps: done.ended.len(), took: begin.elapsed() });
        true
    }

    /// With the writer's lease in hand: is what was planned still ours to do?
    async fn may_still(&mut self, lease: &Lease) -> Still {
        let (state, owner) = (self.target.state(), &self.setting.rules.owner);
        // Somebody pinned a revision, or ended a pin, since this was planned.
        if !self.back.is_current(state, owner).await.unwrap_or(false) {
            return Still::No;
        }
        // Whoever slept for long may have been replaced.
        if let Some(leader) = &self.leader
            && !state.renew_lease(leader, LIVES).await.unwrap_or(false)
        {
            return Still::No;
        }
        // If somebody else wrote since we last did, perhaps after our look, what he did is looked at first.
        match self.wrote.replace(lease.generation) {
            Some(last) if last.checked_add(1) == Some(lease.generation) => Still::Yes,
            Some(_) | None => Still::LookAgain,
        }
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
        let mut again = super::super::terms(&back, &world.observed, &plan, terms.stop.clone());
        (again.owner, again.target, again.caps) = (terms.owner.clone(), terms.target.clone(), terms.caps);
        again.restraints = terms.restraints.clone();
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
        let _ = history::add(self.target.state(), &self.setting.rules.owner, at, &entry).await;
    }
}

type Teller<'a, 'b> = &'a mut (dyn FnMut(Event<'_>) + Send + 'b);

fn tell(told: &Mutex<Teller<'_, '_>>, event: Event<'_>) {
    told.lock().unwrap_or_else(PoisonError::into_inner)(event);
}

/// While a plan is carried out, the source goes on: what is wrong with it is told, and something newer ends the plan at a
/// safe point.
async fn newer<S: Store>(
    source: &mut Source,
    state: &S,
    revision: &str,
    follows: bool,
    ends: &watch::Sender<bool>,
    told: &Mutex<Teller<'_, '_>>,
) -> Infallible {
    loop {
        tokio::select! {
            () = tokio::time::sleep(source.wait().clamp(MOMENT, RENEWED)) => {}
            () = source.woken() => {}
        }
        if !source.changed() {
            continue;
        }
        // What cannot be read now is told of by the next pass.
        let Ok(Some(reading)) = source.read(state).await else { continue };
        if reading.is_news {
            tell(told, Event::Read { reading, revision: &reading.revision });
        }
        if follows && reading.revision != revision {
            ends.send_replace(true);
        }
    }
}
