//! Property of the tree tracker: members of a launch are its live descendants, and no other process.
//!
//! Sequences of fork, exec, setsid, exit and reuse of pids are random. Trackers with a seeded defect violate the property.

use std::collections::{BTreeMap, BTreeSet};

use super::traces::LaunchSession;
use super::*;
use crate::agent::process_table::ScannedProcess;

/// Above the pids of this host: the tracker reads the user of a process from /proc.
const FIRST_PID: u32 = 1 << 30;
const INIT: u32 = 1;
const STEPS: usize = 120;
const SEEDS: u64 = 400;

/// A process of the model.
#[derive(Clone)]
struct ModelProcess {
    parent: u32,
    session: u32,
    started: u64,
    launch_id: Option<&'static str>,
    mark: Option<LaunchMark>,
    /// The process that adopts its orphans: the agent for its launches.
    reaper: u32,
    /// Whether it descends from the launch. The tracker does not see this.
    is_own: bool,
}

/// A kernel with a launch, another launch, and unrelated processes.
struct Model {
    random: fastrand::Rng,
    now: u64,
    processes: BTreeMap<u32, ModelProcess>,
    free: Vec<u32>,
    next: u32,
    main: (u32, u64),
    session_until: u64,
}

/// A defect of the tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    None,
    /// It knows no launch mark.
    NoMark,
    /// It takes the number of a session for proof after its end.
    OldSession,
    /// It does not search descendants.
    NoDescent,
}

impl Model {
    fn new(seed: u64, has_mark: bool) -> Model {
        let random = fastrand::Rng::with_seed(seed);
        let mut model = Model {
            random,
            now: 100,
            processes: BTreeMap::new(),
            free: Vec::new(),
            next: FIRST_PID,
            main: (0, 0),
            session_until: 0,
        };
        let own = model.launch("own", has_mark, true);
        model.main = (own, model.now);
        model.launch("other", has_mark, false);
        model.add(INIT, None, None, INIT, false);
        model
    }

    fn launch(&mut self, id: &'static str, has_mark: bool, is_own: bool) -> u32 {
        let mark = has_mark.then(|| LaunchMark::of(id));
        self.add(std::process::id(), Some(id), mark, std::process::id(), is_own)
    }

    /// A process in a session of its own.
    fn add(
        &mut self,
        parent: u32,
        launch_id: Option<&'static str>,
        mark: Option<LaunchMark>,
        reaper: u32,
        is_own: bool,
    ) -> u32 {
        let (pid, started) = (self.free_pid(), self.now);
        self.processes
            .insert(pid, ModelProcess { parent, session: pid, started, launch_id, mark, reaper, is_own });
        pid
    }

    /// A pid that no process and no session has. Half of them were used before.
    fn free_pid(&mut self) -> u32 {
        let is_session = |pid: u32| self.processes.values().any(|process| process.session == pid);
        let reusable: Vec<u32> = self.free.iter().copied().filter(|pid| !is_session(*pid)).collect();
        match self.random.choice(&reusable).copied().filter(|_| self.random.bool()) {
            Some(pid) => {
                self.free.retain(|one| *one != pid);
                pid
            }
            None => {
                self.next += 1;
                self.next
            }
        }
    }

    fn step(&mut self) {
        self.now += 1;
        let pids: Vec<u32> = self.processes.keys().copied().collect();
        let Some(pid) = self.random.choice(&pids).copied() else { return };
        let what = self.random.u32(..12);
        let main = self.main_process().map(|_| self.main.0);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        match what {
            0..5 => {
                let child = ModelProcess { parent: pid, started: self.now, ..process.clone() };
                let pid = self.free_pid();
                self.processes.insert(pid, child);
            }
            5 => process.launch_id = None,
            6 if process.session != pid => process.session = pid,
            6..10 => self.exit(pid),
            10 => drop(self.add(INIT, None, None, INIT, false)),
            // The agent writes the session of the main process.
            _ if main.is_some() => self.session_until = self.now,
            _ => {}
        }
    }

    fn exit(&mut self, pid: u32) {
        let Some(ended) = self.processes.remove(&pid) else { return };
        self.free.push(pid);
        for orphan in self.processes.values_mut().filter(|process| process.parent == pid) {
            orphan.parent = ended.reaper;
        }
    }

    fn main_process(&self) -> Option<&ModelProcess> {
        self.processes.get(&self.main.0).filter(|process| process.started == self.main.1)
    }

    /// The members that the tracker finds.
    fn found(&self, defect: Defect) -> BTreeSet<u32> {
        let scanned = self.processes.iter().map(|(pid, process)| {
            let ModelProcess { parent, session, started, launch_id, mark, .. } = process;
            let parent = if defect == Defect::NoDescent && *parent >= FIRST_PID { INIT } else { *parent };
            let (unused, threads) = ("0 ".repeat(13), 1);
            let text = format!("{pid} (p) S {parent} 0 {session} {unused}{threads} 0 {started} 0 0");
            let stat = ProcStat::parse(&text).expect("a stat");
            let mark = mark.filter(|_| defect != Defect::NoMark);
            (*pid, ScannedProcess::for_test(stat, *launch_id, mark))
        });
        let table = ProcessTable::of(scanned.collect());
        let until = if defect == Defect::OldSession { u64::MAX } else { self.session_until };
        let sessions = match self.session_until {
            0 => Vec::new(),
            _ => vec![LaunchSession { id: self.main.0, until }],
        };
        let launch = LaunchRecord {
            boot: boot_id().to_owned(),
            launch_id: "own".to_owned(),
            group: None,
            uid: Some(0),
            traces: LaunchTraces { sessions, observed: Vec::new() },
        };
        let (pid, started) = self.main;
        let main = Some(ProcessIdentity { boot: boot_id().to_owned(), pid, started });
        let members = ProcessTree { main, launch, group: None }.find_members(&table);
        members.known.into_iter().map(|one| one.pid).collect()
    }

    /// The live processes of the launch, except the main process.
    fn own(&self) -> BTreeSet<u32> {
        let own = self.processes.iter().filter(|(_, process)| process.is_own).map(|(pid, _)| *pid);
        own.filter(|pid| *pid != self.main.0 || self.main_process().is_none()).collect()
    }
}

/// The number of seeds that violate the property. With a mark every member is found; without one, no other process is.
fn violations(defect: Defect, has_mark: bool) -> u64 {
    let is_violated = |seed: &u64| {
        let mut model = Model::new(*seed, has_mark);
        (0..STEPS).any(|_| {
            model.step();
            let (found, own) = (model.found(defect), model.own());
            if has_mark { found != own } else { !found.is_subset(&own) }
        })
    };
    (0..SEEDS).filter(is_violated).count() as u64
}

#[test]
fn the_members_of_a_launch_are_its_live_descendants() {
    assert_eq!(violations(Defect::None, true), 0);
    assert_eq!(violations(Defect::None, false), 0);
}

#[test]
fn seeded_defects_of_the_tracker_violate_the_property() {
    for (defect, has_mark) in [
        (Defect::NoMark, true),
        (Defect::NoDescent, true),
        (Defect::OldSession, true),
        (Defect::OldSession, false),
    ] {
        assert!(violations(defect, has_mark) > SEEDS / 100, "{defect:?} {has_mark}");
    }
}
