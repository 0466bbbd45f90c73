//! One pass: read, look, plan, hand over what is to be done, and tell what was left alone.
//!
//! Nothing here waits for a reason, nor for what was handed over; whoever runs it does. Time is the target's.

mod begin;
mod kept;
mod switches;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use tokio::sync::mpsc;
use tokio::time::Instant;

use self::switches::{Applied, Off};
use super::back::{Back, Standing};
use super::crew::Order;
use super::event::{Event, Teller};
use super::left;
use super::old_specs::Known;
use super::patience::Patience;
use super::sight::Sight;
use super::snapshot;
use super::source::{Reading, Source};
use super::under_way::UnderWay;
use super::{Look, Setting, Target};
use crate::clock;
use crate::execute::world::World;
use crate::manifest::whence;
use crate::model::{Desired, Hold, InstanceKey, Pause, Reason, Time};
use crate::reconcile::old::missing;
use crate::reconcile::reconcile;
use crate::store::Lease;

pub struct Pass<'a, T> {
    setting: &'a Setting,
    target: &'a T,
    teller: &'a Teller<'a>,
    /// Who carries out what is to be done, what he has at hand, and the number of the last order.
    orders: mpsc::UnboundedSender<Order>,
    pub(super) under_way: UnderWay,
    last: u64,
    patience: Patience,
    /// When something that failed may be tried again.
    due: Option<Time>,
    pub(super) sight: Sight,
    /// Of what was read last, and of what was last begun to be made true: what differs from that is drift.
    revision: String,
    /// What was read last is this commit.
    commit: Option<String>,
    applied: Option<Applied>,
    /// What it asks for.
    desired: Arc<Desired>,
    /// The revision and the commit that are known to be kept.
    taken: (String, Option<String>),
    /// What was taken, where the source is not followed.
    standing: Standing,
    /// What the source says instead, and whether something is wrong with it.
    unfollowed: Option<String>,
    has_problems: bool,
    recalled: bool,
    /// The lease that lets us act at all, and the number of the last one under which we wrote.
    pub(super) leader: Option<Lease>,
    wrote: Option<u64>,
    /// The one under which we write, as long as something is under way.
    writer: Option<Lease>,
    /// Something was taken, and older things may be too old now.
    untidy: bool,
    back: Back,
    old: Known,
    /// A run may have left something in the journal.
    unsettled: bool,
    /// Calls of runs that died which are still under way, whom they concern, and when to ask again.
    open: BTreeMap<String, BTreeSet<InstanceKey>>,
    open_until: Option<Instant>,
    /// What is known to be kept of what was given up; `None`: nobody asked yet.
    left: Option<left::All>,
    /// What was held and paused at the last look.
    restraints: Option<(Vec<Hold>, Vec<Pause>)>,
}

impl<'a, T: Target> Pass<'a, T> {
    pub fn new(
        setting: &'a Setting,
        target: &'a T,
        teller: &'a Teller<'a>,
        orders: mpsc::UnboundedSender<Order>,
    ) -> Pass<'a, T> {
        Pass {
            setting,
            target,
            teller,
            orders,
            under_way: UnderWay::default(),
            last: 0,
            patience: Patience::default(),
            due: None,
            sight: Sight::default(),
            revision: String::new(),
            commit: None,
            applied: None,
            desired: Arc::default(),
            taken: (String::new(), None),
            standing: Standing::default(),
            unfollowed: None,
            has_problems: false,
            recalled: false,
            leader: None,
            wrote: None,
            writer: None,
            untidy: false,
            back: Back::default(),
            old: Known::default(),
            unsettled: true,
            open: BTreeMap::new(),
            open_until: None,
            left: None,
            restraints: None,
        }
    }

    /// Is it time to try something again?
    pub fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= self.target.now()) || self.is_open_due()
    }

    /// Did somebody hold, release, pause, resume or pin something since the last look? What cannot be asked has not changed.
    pub async fn is_told_otherwise(&self) -> bool {
        let Some(known) = &self.restraints else { return false };
        let (state, owner) = (self.target.state(), &self.setting.rules.owner);
        let restraints = self.target.restraints().await;
        restraints.is_ok_and(|now| now != *known) || !self.back.is_current(state, owner).await.unwrap_or(true)
    }

    pub fn tell_relaunched(&mut self) {
        for (instance, pid) in self.sight.relaunched() {
            self.teller.tell(Event::Relaunched { instance: &instance, pid });
        }
    }

    /// Is it to be looked at again at once?
    pub async fn run(&mut self, source: &mut Source) -> bool {
        self.due = None;
        let Some(look) = self.find_out(source).await else { return false };
        let again = match look.plan.steps().next().is_some() {
            true => self.begin(&look).await,
            false => false,
        };
        if std::mem::take(&mut self.untidy) {
            // What is left lying is picked up another time.
            let _ = snapshot::tidy(self.target.state(), &self.setting.rules.owner).await;
        }
        self.due = self.patience.next(self.target.now());
        self.keep_left().await;
        again
    }

    /// What is wanted, what is there, and what follows. `None`: that is not known, or nothing is wanted.
    async fn find_out(&mut self, source: &mut Source) -> Option<Arc<Look>> {
        if let Some(trouble) = source.news() {
            self.teller.tell(Event::Source { trouble });
        }
        let was_news = self.recall(source).await;
        let reading = match source.read(self.target.state()).await {
            Ok(reading) => reading,
            Err(error) => return self.trouble(&error.to_string()),
        };
        // A pin is kept true also before the source has said anything.
        let (is_silent, nothing) = (reading.is_none(), Reading { is_incomplete: true, ..Reading::default() });
        let said = reading.unwrap_or(&nothing);
        let state = self.target.state();
        let pinned = match self.back.instead_of(said, state, self.setting, self.teller).await {
            Ok(pinned) => pinned,
            Err(error) => return self.trouble(&error.to_string()),
        };
        let is_pinned = pinned.is_some();
        // Who does not follow keeps true what was last taken, whatever the source says by now.
        let standing = match self.setting.follow || is_pinned {
            true => None,
            false => match self.standing.reading(state, self.setting).await {
                Ok(standing) => standing,
                Err(error) => return self.trouble(&error.to_string()),
            },
        };
        let reading = match pinned.as_ref().or(standing.as_ref()) {
            Some(instead) => &**instead,
            None if is_silent => return None,
            None => said,
        };
        if reading.revision != self.revision || reading.is_news {
            self.teller.tell(Event::Read { reading, revision: &reading.revision });
        }
        // What is wrong in the source meanwhile is worth knowing all the same.
        let is_other = !std::ptr::eq(reading, said);
        let had_problems = std::mem::replace(&mut self.has_problems, !said.problems.is_empty());
        if is_other && (said.is_news || was_news) && (self.has_problems || had_problems) {
            self.teller.tell(Event::Problems { reading: said });
        }
        let is_left = !self.setting.follow && !is_pinned && !is_silent;
        let unfollowed = is_left && (standing.is_none() || said.revision != reading.revision);
        let unfollowed = unfollowed.then(|| said.revision.clone());
        if self.unfollowed != unfollowed {
            self.teller.tell(Event::Unfollowed { revision: unfollowed.as_deref() });
            self.unfollowed = unfollowed;
        }
        self.commit.clone_from(&reading.commit);
        if self.applied.is_none() && !self.setting.heal {
            self.applied = self.applied_before(reading).await;
        }
        if reading.revision != self.revision {
            self.revision.clone_from(&reading.revision);
            // What failed before may work now.
            self.patience.begin_anew(&self.desired, &reading.desired);
            self.desired = Arc::clone(&reading.desired);
            self.under_way.heed(&reading.desired);
        }
        self.recall_left(&reading.desired).await;
        // Nothing was ever read: nothing is wanted, and nothing is known.
        if reading.desired.instances.is_empty() && reading.is_incomplete {
            return None;
        }
        let needs_to_know = self.unsettled && !self.setting.rules.caps.reads_specs;
        if (needs_to_know || self.is_open_due()) && !self.settle_first().await {
            return None;
        }
        let prune = self.setting.rules.prune;
        let under_way = self.under_way.instances(&reading.desired);
        let world = match self.sight.world(self.target, &reading.desired, prune, &under_way).await {
            Ok(world) => world,
            Err(why) => return self.trouble(&why),
        };
        self.tell_relaunched();
        // What is pinned is a person's word, not the source's; what stands was taken before.
        let off = match (is_left && standing.is_none(), self.setting.heal) {
            (true, _) => Off::Follow,
            (false, false) => Off::Heal,
            (false, true) => Off::Nothing,
        };
        if off == Off::Heal && standing.is_some() {
            // Nobody follows, nobody repairs: whatever is otherwise is drift.
            self.applied = Some(Applied::of(reading));
        }
        let look = self.plan(reading, world, under_way, off).await?;
        let plan = &look.plan;
        if !is_pinned
            && standing.is_none()
            && !reading.lacks
            && off != Off::Follow
            && let Err(error) = self.take(reading).await
        {
            return self.trouble(&error.to_string());
        }
        // What is missing is made sure of in a moment.
        let is_unsure = self.setting.rules.prune && !reading.may_prune && !reading.is_incomplete;
        if plan.steps().next().is_none() && self.under_way.is_empty() && !is_unsure {
            // What only waits for its time is still to be followed.
            if !plan.held.iter().any(|held| held.reason.passes()) && off != Off::Follow {
                self.is_applied(&reading.desired).await;
            }
            self.teller.tell(Event::Rested { settled: plan.settled, held: plan.held.len() });
        }
        Some(look)
    }

    async fn plan(
        &mut self,
        reading: &Reading,
        mut world: World,
        under_way: BTreeSet<InstanceKey>,
        off: Off,
    ) -> Option<Arc<Look>> {
        let desired = &reading.desired;
        let mut rules = self.setting.rules.clone();
        match self.target.restraints().await {
            Ok(restraints) => {
                (rules.holds, rules.pauses) = restraints.clone();
                self.restraints = Some(restraints);
            }
            Err(why) => {
                self.sight.keep(Arc::new(world.observed));
                return self.trouble(&why);
            }
        }
        rules.source_unreadable |= reading.is_incomplete;
        // What is missing in a whole reading is made sure of first; in one that is not whole, it is told of.
        rules.prune &= reading.may_prune || reading.is_incomplete;
        rules.known_namespaces = world.namespaces(&rules.owner);
        let now = clock::at(self.target.now(), desired);
        self.patience.look(desired, &world.observed, now.at, &mut fastrand::f64);
        let left = self.patience.left_alone(now.at);
        let backing_off = left.iter().map(|(key, left)| left.hold(key)).collect();
        rules.left_alone = self.switched_off(off, desired, &world.observed);
        rules.left_alone.extend(left.into_iter().map(|(key, left)| (key, (left.reason, left.why))));
        let why = |what: &str| (Reason::UnderWay, what.to_owned());
        let open = self.open.values().flatten().cloned();
        rules
            .left_alone
            .extend(open.map(|key| (key, why("what an interrupted run had begun is still under way"))));
        let at_work = "an earlier plan for it is being carried out";
        rules.left_alone.extend(under_way.into_iter().map(|key| (key, why(at_work))));
        rules.under_way = self.under_way.kinds();
        let mut plan = reconcile(desired, &world.observed, &rules, &now);
        let missing = missing(&plan, desired, &world.observed, &rules.caps);
        if !missing.is_empty() {
            let Setting { past, limits, .. } = self.setting;
            world.learn(self.old.of(past, reading.commit.as_deref(), limits, missing, &rules.caps).await);
            plan = reconcile(desired, &world.observed, &rules, &now);
        }
        // Nothing is lost on the word of a list.
        while world.come_closer(self.target.backend(), &rules.caps, &plan).await {
            plan = reconcile(desired, &world.observed, &rules, &now);
        }
        self.sight.keep_listed(world.listed());
        self.patience.held(&plan, &world.observed);
        whence::locate_in(&mut plan, &reading.texts, &self.setting.limits);
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
        self.teller.tell(Event::Planned { look: &look });
        Some(look)
    }

    /// Somebody else may have led meanwhile.
    pub fn forget(&mut self) {
        (self.applied, self.left) = (None, None);
        self.taken = (String::new(), None);
        self.unsettled = true;
    }
}
