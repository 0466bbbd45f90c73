//! The standing loop: look, plan, do, wait for a reason to look again.
//!
//! # Theory of operation
//! Level-triggered: a trigger (a file that changed, a new commit, something that the target tells, the interval) only says
//! "look". Every [`pass`] reads the manifests ([`source`]: what is broken stays as it last was), looks at the target
//! ([`sight`]: at what changed, where the target tells), plans with the pure core, carries the plan out like `apply`,
//! and tells what it left alone and why. One pass at a time.
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
pub mod history;
pub mod old_specs;
mod pass;
pub mod patience;
pub mod pin;
pub mod rollback;
mod sight;
pub mod snapshot;
pub mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use self::board::Row;
use self::old_specs::Past;
use self::pass::Pass;
use self::pin::Pin;
use self::source::{Reading, Source, Trouble};
use crate::backend::{Backend, Changes};
use crate::clock;
use crate::execute::world::World;
use crate::execute::{Check, Ended, Restraints, Terms};
use crate::manifest::Limits;
use crate::model::{Desired, Hold, InstanceKey, Observed, Pause, Plan, ProcessKey, Seen, Step, Time, Want};
use crate::reconcile::{Caps, Rules};
use crate::store::keeping::{LIVES, RENEWED, keep};
use crate::store::{Holder, Lease, Store, Taken};

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
    pub desired: Arc<Desired>,
    pub observed: Arc<Observed>,
    /// As they held at this look: with holds, pauses and back-off.
    pub rules: Rules,
    /// What is left alone because it failed, or does not stay as it is made.
    pub backing_off: Vec<Hold>,
    pub plan: Plan,
    /// For whoever asks; most looks are never shown.
    rows: OnceLock<Vec<Row>>,
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
    /// What is wrong with the manifests, while something else is in force.
    Problems {
        reading: &'a Reading,
    },
    /// The manifests are others than those in force, and are not to be followed.
    Unfollowed {
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
    /// It ended, and is back as another process, without our doing: its agent's, most often.
    Relaunched {
        instance: &'a InstanceKey,
        pid: u32,
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
    /// The same, and from there on what changes, where the target tells.
    fn follow(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> impl Future<Output = Result<(World, Option<Changes>), String>> + Send {
        async move { Ok((self.look(desired, prune).await?, None)) }
    }
    /// This moment.
    fn now(&self) -> Time {
        clock::moment()
    }
    fn restraints(&self) -> impl Future<Output = Result<(Vec<Hold>, Vec<Pause>), String>> + Send;
}

/// Nothing is looked at more often than this.
const AT_ONCE: Duration = Duration::from_millis(10);

/// What is told one after the other is looked at together.
const TOGETHER: Duration = Duration::from_millis(30);

/// Goes on until told to stop.
pub async fn run<T: Target>(
    setting: &Setting,
    source: &mut Source,
    target: &T,
    mut stop: watch::Receiver<bool>,
    told: &mut (dyn FnMut(Event<'_>) + Send),
) {
    let holder = Holder::this(format!("watch-{}-{}", std::process::id(), clock::moment().0));
    let owner = &setting.rules.owner;
    let Some(mut leader) = lead(target, owner, &holder, &mut stop, told).await else { return };
    let mut pass = Pass::new(setting, target, told);
    let mut renewed = Instant::now();
    let mut looked: Option<Instant> = None;
    // Something was told: when to look.
    let mut due: Option<Instant> = None;
    while !*stop.borrow() {
        if renewed.elapsed() >= RENEWED {
            renewed = Instant::now();
            // It ran out, while the target did not answer, say: whoever has it now leads.
            if matches!(target.state().renew_lease(&leader, LIVES).await, Ok(false)) {
                match lead(target, owner, &holder, &mut stop, pass.told).await {
                    Some(again) => leader = again,
                    None => return,
                }
                source.forget();
                pass.forget();
            }
            if pass.is_told_otherwise().await {
                looked = None;
            }
        }
        let changed = source.changed();
        let is_told = due.take_if(|due| *due <= Instant::now()).is_some();
        let is_time = looked.is_none_or(|last| last.elapsed() >= setting.interval);
        if changed || is_told || is_time || pass.is_due() {
            looked = Some(Instant::now());
            (pass.told)(Event::Passing);
            // A rollout may take much longer than a lease lives.
            let (ends, ended) = watch::channel(*stop.borrow());
            pass.leader = Some(leader.clone());
            let did =
                keeping_or_ending(target.state(), &leader, stop.clone(), &ends, pass.run(source, ended))
                    .await;
            renewed = Instant::now();
            (pass.told)(Event::Passed { took: looked.map(|began| began.elapsed()).unwrap_or_default() });
            if did {
                looked = None;
            }
        }
        (pass.told)(Event::Turned);
        let now = Instant::now();
        let left = |then: Instant| then.saturating_duration_since(now);
        let rest = source.wait().min(Duration::from_millis(500)).min(due.map_or(RENEWED, left));
        // Something was done: how it is now is looked at without waiting for a reason.
        let rest = if looked.is_none() { rest.min(AT_ONCE) } else { rest };
        let cares = |key: &InstanceKey, seen: Option<&Seen>| {
            source.wants(key) || seen.is_some_and(|seen| seen.owner.as_deref() == Some(owner))
        };
        tokio::select! {
            () = tokio::time::sleep(rest) => {}
            () = source.woken() => {}
            () = pass.sight.told(cares) => due = due.or(Some(Instant::now() + TOGETHER)),
            () = setting.look_now.notified() => {
                // Wherever the manifests come from, too.
                source.nudge().now();
                looked = None;
            }
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => break,
        }
        pass.tell_relaunched();
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
        match target.state().take_lease(&format!("leader/{owner}"), holder, LIVES).await {
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

/// What a plan for these manifests is carried out under, as far as they and a look say.
pub fn terms(desired: &Desired, observed: &Observed, plan: &Plan, stop: watch::Receiver<bool>) -> Terms {
    let (mut depends, mut declared) = (BTreeMap::new(), BTreeMap::new());
    for key in plan.steps().map(|step| &step.instance) {
        let Some(want) = desired.instances.get(key) else { continue };
        declared.insert(key.clone(), want.origin.declared.clone());
        depends.entry(want.origin.declared.clone()).or_insert_with(|| want.origin.depends_on.clone());
    }
    let row = |step: &Step| Some((step.instance.clone(), observed.instances.get(&step.instance)?.clone()));
    let mut before: BTreeMap<_, _> = plan.steps().filter_map(row).collect();
    // A rollback concerns all of a process.
    let rolled: BTreeSet<&ProcessKey> =
        plan.waves.iter().flat_map(|wave| &wave.gates).map(|gate| &gate.process).collect();
    let is_rolled = |want: &Want| rolled.contains(&want.origin.declared);
    let all = desired.instances.iter().filter(|_| !rolled.is_empty());
    for (key, want) in all.filter(|(_, want)| is_rolled(want)) {
        if let (false, Some(seen)) = (want.origin.rollout.is_none(), observed.instances.get(key)) {
            before.entry(key.clone()).or_insert_with(|| seen.clone());
            declared.entry(key.clone()).or_insert_with(|| want.origin.declared.clone());
        }
    }
    Terms {
        owner: String::new(),
        target: String::new(),
        caps: Caps::LOCAL,
        run: name_of_run(),
        deadline: Instant::now(),
        max_parallel: 1000,
        depends,
        declared,
        before,
        check: |_| None,
        restraints: watch::channel(Restraints::default()).1,
        stop,
    }
}

/// No two have the same, however soon one comes after the other.
fn name_of_run() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let nth = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:013}-{}-{nth}", clock::moment().0, std::process::id())
}

/// The same for work that is to come to its end at a safe point when somebody wants that, or when the lease is lost.
async fn keeping_or_ending<S: Store, T>(
    state: &S,
    lease: &Lease,
    mut stop: watch::Receiver<bool>,
    ends: &watch::Sender<bool>,
    work: impl Future<Output = T>,
) -> T {
    let ended = async {
        let _ = stop.wait_for(|stop| *stop).await;
    };
    let lost = keep(state, lease);
    tokio::pin!(work, ended, lost);
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = &mut ended, if !*ends.borrow() => {
                ends.send_replace(true);
            }
            _ = &mut lost, if !*ends.borrow() => {
                ends.send_replace(true);
            }
        }
    }
}

/// Renews a lease while something goes on.
async fn keeping<S: Store, T>(state: &S, lease: &Lease, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        never = async { keep(state, lease).await; std::future::pending::<Infallible>().await } => match never {},
    }
}
