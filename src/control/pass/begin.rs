//! A plan is handed over to be carried out: under the writer's lease, and only if it is still ours to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::super::crew::{Order, Report, keeping};
use super::super::event::Event;
use super::super::under_way::Going;
use super::super::{Look, Target, name_of_run, terms};
use super::Pass;
use crate::clock;
use crate::execute::journal::{self, Call};
use crate::execute::{self, Ended, Unsettled};
use crate::model::{Desired, Plan, Reason};
use crate::store::keeping::LIVES;
use crate::store::{Error, Holder, Lease, Store, Taken};

/// How long a pass waits for what runs that died had begun, for each of it at least, and how soon it asks again.
const SETTLING: Duration = Duration::from_secs(3);
const AT_LEAST: Duration = Duration::from_millis(200);
const ASKED_AGAIN: Duration = Duration::from_secs(10);

/// What came of it.
enum May {
    Yes(Lease),
    LookAgain,
    No,
}

impl<T: Target> Pass<'_, T> {
    /// Is it to be looked at again at once?
    pub(super) async fn begin(&mut self, look: &Look) -> bool {
        let lease = match self.may().await {
            May::Yes(lease) => lease,
            may => {
                self.rest().await;
                return matches!(may, May::LookAgain);
            }
        };
        let Look { plan, desired, observed, .. } = look;
        self.is_begun(plan, desired).await;
        self.unsettled = true;
        let (_, never) = watch::channel(false);
        for part in execute::apart(plan, &terms(desired, observed, plan, never)) {
            self.last += 1;
            let (number, run, ends) = (self.last, name_of_run(), watch::channel(false).0);
            let plan = Arc::new(part);
            let going = Going::new(run.clone(), Arc::clone(&plan), Arc::clone(desired), ends.clone());
            self.sight.expect(going.instances().cloned());
            self.under_way.add(number, going);
            let (desired, observed, lease) = (Arc::clone(desired), Arc::clone(observed), lease.clone());
            let (revision, commit) = (self.revision.clone(), self.commit.clone());
            let order = Order { number, run, plan, desired, observed, revision, commit, lease, ends };
            // Whoever takes them is there for as long as this is.
            let _ = self.orders.send(order);
        }
        false
    }

    /// With the writer's lease in hand: is what was planned still ours to do?
    async fn may(&mut self) -> May {
        let (state, owner) = (self.target.state(), &self.setting.rules.owner);
        let lease = match self.lease().await {
            Ok(Some(lease)) => lease,
            // Somebody is applying: then there may be something else to do afterwards.
            Ok(None) => return May::No,
            Err(error) => return self.fails(&error.to_string(), May::No),
        };
        // Somebody pinned a revision, or ended a pin, since this was planned.
        if !self.back.is_current(state, owner).await.unwrap_or(false) {
            return May::No;
        }
        // Whoever slept for long may have been replaced.
        if let Some(leader) = &self.leader
            && !state.renew_lease(leader, LIVES).await.unwrap_or(false)
        {
            return May::No;
        }
        // If somebody else wrote since we last did, perhaps after our look, what he did is looked at first.
        let last = self.wrote.replace(lease.generation);
        if !last.is_some_and(|last| last == lease.generation || last.checked_add(1) == Some(lease.generation))
        {
            return May::LookAgain;
        }
        self.target.act_as(lease.generation);
        // What a run that died had begun may have changed what was looked at: then it is looked at again.
        match self.left().await {
            Ok(left) if left.is_empty() => May::Yes(lease),
            Ok(left) => match self.settle(left, &lease).await {
                Ok(()) => May::LookAgain,
                Err(why) => self.fails(&why, May::No),
            },
            Err(error) => self.fails(&error.to_string(), May::No),
        }
    }

    /// The writer's lease: the one that we have, as long as something is under way, else a new one.
    async fn lease(&mut self) -> Result<Option<Lease>, Error> {
        let state = self.target.state();
        if let Some(lease) = &self.writer
            && state.renew_lease(lease, LIVES).await?
        {
            return Ok(Some(lease.clone()));
        }
        let holder = Holder::this(format!("watch-{}-{}", std::process::id(), clock::moment().0));
        let place = format!("writer/{}", self.setting.rules.owner);
        self.writer = match state.take_lease(&place, &holder, LIVES).await? {
            Taken::Ours(lease) => Some(lease),
            Taken::Theirs { .. } => None,
        };
        Ok(self.writer.clone())
    }

    /// If nothing is under way, others may write.
    pub(super) async fn rest(&mut self) {
        if let Some(lease) = self.writer.take_if(|_| self.under_way.is_empty()) {
            let _ = self.target.state().release_lease(&lease).await;
        }
    }

    /// What runs that died left in the journal. What was still under way a moment ago is not asked about again.
    async fn left(&self) -> Result<Vec<(String, Call)>, Error> {
        let owner = &self.setting.rules.owner;
        let mut left = journal::left(self.target.state(), owner).await?;
        left.retain(|(key, _)| {
            let lives = self.under_way.runs().any(|run| journal::is_of(key, owner, run));
            !lives && (self.is_open_due() || !self.open.contains_key(key))
        });
        Ok(left)
    }

    /// Finds out what became of what was left. What takes longer than a moment is left alone meanwhile, so that nobody waits
    /// for it who has nothing to do with it.
    async fn settle(&mut self, left: Vec<(String, Call)>, lease: &Lease) -> Result<(), String> {
        let (state, owner) = (self.target.state(), &self.setting.rules.owner);
        let whom = (self.target.name(), &self.setting.rules.caps);
        let until = Instant::now() + SETTLING;
        let mut open = BTreeMap::new();
        for (key, call) in left {
            let instances = call.steps.iter().map(|began| began.instance.clone()).collect();
            // One that takes long does not take the time of the others.
            let deadline = until.max(Instant::now() + AT_LEAST);
            let one = vec![(key.clone(), call)];
            let settling = execute::settle(self.target.backend(), state, whom, owner, one, deadline);
            match keeping(state, lease, settling).await {
                Ok(()) => {}
                Err(Unsettled::UnderWay(_)) => drop(open.insert(key, instances)),
                Err(why @ (Unsettled::Target(_) | Unsettled::State(_))) => return Err(why.to_string()),
            }
        }
        self.open_until = (!open.is_empty()).then(|| Instant::now() + ASKED_AGAIN);
        self.open = open;
        Ok(())
    }

    /// Is it time to ask again about what was still under way?
    pub(super) fn is_open_due(&self) -> bool {
        self.open_until.is_some_and(|then| then <= Instant::now())
    }

    /// What a run that died had begun is found out before anything is planned on: where specs are not read back, a look
    /// alone takes what it gave for what is in effect. `false`: that is not known yet.
    pub(super) async fn settle_first(&mut self) -> bool {
        let left = match self.left().await {
            Ok(left) if left.is_empty() => {
                if self.is_open_due() {
                    // Somebody else found out.
                    (self.open, self.open_until) = (BTreeMap::new(), None);
                }
                self.unsettled = false;
                return true;
            }
            Ok(left) => left,
            Err(error) => return self.fails(&error.to_string(), false),
        };
        // Whatever comes of it, it is not asked about again at once.
        self.open_until = self.open_until.map(|_| Instant::now() + ASKED_AGAIN);
        let lease = match self.lease().await {
            Ok(Some(lease)) => lease,
            // It is their own, and not left.
            Ok(None) => return true,
            Err(error) => return self.fails(&error.to_string(), false),
        };
        self.target.act_as(lease.generation);
        self.wrote = Some(lease.generation);
        let settled = self.settle(left, &lease).await;
        self.rest().await;
        match settled {
            Ok(()) => true,
            Err(why) => self.fails(&why, false),
        }
    }

    /// Takes in what became of orders. Is one of them over?
    pub async fn hear(&mut self, reports: Vec<Report>) -> bool {
        // Of one order many may be free at once.
        let (mut free, mut over): (BTreeMap<u64, Vec<Ended>>, Vec<_>) = Default::default();
        for report in reports {
            match report {
                Report::Free { order, instance, tried } => {
                    self.under_way.free(order, &instance);
                    free.entry(order).or_default().extend(tried);
                }
                Report::Over { order, tried, put_back } => over.push((order, tried, put_back)),
            }
        }
        for (order, tried) in free {
            if let Some((plan, desired)) = self.under_way.get(order).map(Going::what) {
                self.note(&plan, &desired, tried);
            }
        }
        let is_over = !over.is_empty();
        for (order, tried, put_back) in over {
            let going = self.under_way.over(order);
            if let Some((plan, desired)) = going.as_ref().map(Going::what) {
                self.note(&plan, &desired, tried);
                let put_back = desired.instances.iter().filter(|(key, want)| {
                    put_back.contains(&want.origin.declared) && desired.asks_as(&self.desired, key)
                });
                for (key, _) in put_back {
                    let why = "its rollout failed, and it was put back as it was: left alone until its manifest changes";
                    self.patience.give_up(key, Reason::RolledBack, why);
                }
            }
            // What it did not see the end of is in the journal.
            self.unsettled = true;
        }
        self.rest().await;
        is_over
    }

    /// Of what is asked for as it was then, how it ended counts.
    fn note(&mut self, plan: &Plan, desired: &Desired, mut tried: Vec<Ended>) {
        tried.retain(|one| desired.asks_as(&self.desired, &one.instance));
        self.patience.note(plan, &tried, self.target.now(), &mut fastrand::f64);
        self.due = self.patience.next(self.target.now());
    }

    pub(super) fn trouble<W>(&mut self, why: &str) -> Option<W> {
        self.teller.tell(Event::Trouble { why });
        None
    }

    pub(super) fn fails<W>(&mut self, why: &str, so: W) -> W {
        self.teller.tell(Event::Trouble { why });
        so
    }
}
