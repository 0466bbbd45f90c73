//! The choice of operations, against its definition: every row of the tables, and a search for a shorter way in
//! every state there is. The search interprets the operations in code of its own.

use std::collections::{HashMap, HashSet};

use abide::model::{AutoType, Op, Reason, State, Which};
use abide::reconcile::{Caps, Delta, Goal, Ran, Situation, Stops, choose};

const NEW: Delta = Delta { register: false, reload: false, restart: false, replace: false };
/// The three columns of the tables; what the other two can do is the same as gse-v2, as far as a choice sees it.
const CAPS: [(&str, Caps); 3] = [("gse-v1", Caps::GSE_V1), ("gse-v2", Caps::GSE_V2), ("local", Caps::LOCAL)];

/// `register(n), start(n)`.
fn shown(steps: &[(Op, Which)]) -> String {
    let one = |(op, which): &(Op, Which)| match (op, which) {
        (Op::Unregister, _) => "unregister".to_owned(),
        (op, Which::New) => format!("{op:?}(n)").to_lowercase(),
        (op, Which::Old) => format!("{op:?}(o)").to_lowercase(),
    };
    if steps.is_empty() { "nothing".into() } else { steps.iter().map(one).collect::<Vec<_>>().join(", ") }
}

/// The first column of a table as a situation.
fn situation(observed: &str, auto_type: AutoType, caps: Caps) -> Situation {
    let old = |field: &str| Delta {
        register: field == "Register",
        reload: field == "Reload",
        restart: field == "Restart",
        replace: field == "Replace",
    };
    let class =
        ["Register", "Reload", "Restart", "Replace"].into_iter().find(|class| observed.contains(class));
    let spec = class.map_or(NEW, old);
    let (given, hosted, live, ran) = match (auto_type, observed) {
        (_, "nothing there" | "never seen") => (None, false, None, Ran::NotThis),
        (_, "registered, stopped" | "not guarded, registered") => (Some(NEW), false, None, Ran::NotThis),
        (AutoType::Resident, "running, guarded, all as wanted") => (Some(NEW), true, Some(NEW), Ran::NotThis),
        (AutoType::Resident, "running, not guarded") => (Some(NEW), false, Some(NEW), Ran::NotThis),
        (AutoType::Resident, "died, still guarded") => (Some(NEW), true, None, Ran::NotThis),
        (AutoType::Resident, "Replace differs, died, still guarded") => {
            (Some(spec), true, None, Ran::NotThis)
        }
        (AutoType::Resident, "Restart differs, running, not guarded") => {
            (Some(spec), false, Some(spec), Ran::NotThis)
        }
        (AutoType::Resident, "Replace differs, stopped") => (Some(spec), false, None, Ran::NotThis),
        (AutoType::Resident, text) if text.starts_with("crash after") => {
            (Some(NEW), true, Some(spec), Ran::NotThis)
        }
        (AutoType::Resident, _) => (Some(spec), true, Some(spec), Ran::NotThis),
        (AutoType::Periodic, "guarded, not running now") => (Some(NEW), true, None, Ran::NotThis),
        (AutoType::Periodic, "guarded, a run in progress") => (Some(NEW), true, Some(NEW), Ran::NotThis),
        (AutoType::Periodic, "… with a run of the old spec in progress") => {
            (Some(old("Restart")), true, Some(old("Restart")), Ran::NotThis)
        }
        (AutoType::Periodic, _) => (Some(spec), true, None, Ran::NotThis),
        (AutoType::OneShot, "ran this revision") => (Some(NEW), false, None, Ran::This),
        (AutoType::OneShot, "ran it, still guarded") => (Some(NEW), true, None, Ran::This),
        (AutoType::OneShot, "running it now") => (Some(NEW), true, Some(NEW), Ran::This),
        (AutoType::OneShot, "ran an older one, Register-field differs") => {
            (Some(spec), false, None, Ran::This)
        }
        (AutoType::OneShot, "ran an older one, Restart-field differs") => {
            (Some(spec), false, None, Ran::NotThis)
        }
        (AutoType::OneShot, "older one in progress, Restart-field differs") => {
            (Some(spec), true, Some(spec), Ran::NotThis)
        }
        (AutoType::OneShot, "ran an older one, Replace differs, still guarded") => {
            (Some(spec), true, None, Ran::NotThis)
        }
        (AutoType::OneShot, other) => panic!("{other}"),
    };
    // Without a registry what was given is there exactly while it is guarded.
    let given = given.filter(|_| caps.registry || hosted);
    Situation { given, hosted, live, ran, old_known: true, stops: Stops::default() }
}

#[test]
fn every_row_of_the_tables() {
    let text = include_str!("fixtures/planner.md");
    let mut rows = 0;
    let (mut auto_type, mut state) = (AutoType::Resident, State::Running);
    for line in text.lines() {
        if let Some((kind, goal)) =
            line.strip_prefix("**auto_type ").and_then(|rest| rest.split_once(", state: "))
        {
            auto_type = AutoType::try_from(kind.parse::<i64>().expect("a number")).expect("a kind");
            let word = goal.trim_end_matches('*');
            state = State::ALL.into_iter().find(|state| state.word() == word).expect("a state");
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [observed, cells @ ..] = cells.as_slice() else { continue };
        if cells.len() != 3 || *observed == "observed" || observed.starts_with("---") {
            continue;
        }
        let observed = observed
            .replace("any Register/Reload/Restart field differs, guarded", "Restart, guarded")
            .replace("`register(n)`, ", "");
        for ((name, caps), cell) in CAPS.iter().zip(cells) {
            row(&observed, auto_type, state, name, *caps, cell);
            rows += 1;
        }
    }
    assert_eq!(rows, 3 * (13 * 4 + 7 * 2 + 8 * 2), "all tables were read");
}

/// One cell: the plan, and what it is without a restart_cmd or without the old spec.
fn row(observed: &str, auto_type: AutoType, state: State, name: &str, caps: Caps, cell: &str) {
    let is = situation(observed, auto_type, caps);
    let goal = Goal { state, auto_type, has_restart: true, has_reload: true };
    let what = format!("auto_type {auto_type:?}, {state:?}, {observed:?}, {name}");
    let chosen = |is, goal| match choose(is, goal, caps) {
        Ok(steps) => shown(&steps),
        Err(Reason::OldSpecUnknown) => "held".to_owned(),
        Err(_) => "HELD".to_owned(),
    };
    for (nth, part) in cell.split("; ").enumerate() {
        match part.split_once(": ") {
            None => {
                assert_eq!(nth, 0, "{cell}");
                assert_eq!(chosen(is, goal), part, "{what}");
            }
            Some(("without restart_cmd", plan)) => {
                assert_eq!(
                    chosen(is, Goal { has_restart: false, ..goal }),
                    plan,
                    "{what}, without restart_cmd"
                );
            }
            Some(("old spec unknown", plan)) => {
                assert_eq!(
                    chosen(Situation { old_known: false, ..is }, goal),
                    plan,
                    "{what}, old spec unknown"
                );
            }
            Some(other) => panic!("{other:?}"),
        }
    }
}

// ---- The operations, interpreted anew.

/// A world of one instance. A spec is what differs of it from the wanted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    given: Option<Delta>,
    hosted: bool,
    live: Option<Delta>,
    ran: bool,
}

/// The world after an operation with a spec, if its precondition holds.
fn apply(w: World, op: Op, s: Delta, goal: Goal, caps: Caps) -> Option<World> {
    // A registry's operations know no spec but the one it holds.
    let s = if caps.uses_given && !matches!(op, Op::Register | Op::Unregister) { w.given? } else { s };
    let same = |a: Delta, b: Delta| a.replace == b.replace;
    let kept = goal.auto_type != AutoType::Periodic;
    let gone = |given: Option<Delta>| given.filter(|_| caps.registry);
    let restarts =
        |has: bool| goal.auto_type == AutoType::Resident && has && w.live.is_some_and(|live| same(s, live));
    match op {
        Op::Register => {
            let other_guard = w.hosted && w.given.is_some_and(|given| !same(given, s));
            let other_process = kept && w.live.is_some_and(|live| !same(live, s));
            (caps.registry && !other_guard && !other_process).then_some(World { given: Some(s), ..w })
        }
        Op::Unregister => {
            let free = caps.registry && w.given.is_some() && !w.hosted && w.live.is_none();
            free.then_some(World { given: None, ..w })
        }
        Op::Start => {
            let other_guard = w.hosted && w.given.is_some_and(|given| !same(given, s));
            let can = w.live.is_none() && kept && !other_guard;
            can.then_some(World {
                live: Some(s),
                hosted: true,
                given: Some(s),
                ran: s == NEW || runs_alike(s),
            })
        }
        Op::Stop | Op::Kill => {
            let live = w.live?;
            let named = !(caps.uses_given || caps.stop_needs_old) || same(s, live);
            named.then_some(World { live: None, hosted: false, given: gone(w.given), ..w })
        }
        Op::Host => {
            let fits = w.live.is_none_or(|live| same(s, live)) || !kept;
            let guard = !w.hosted || w.given.is_some_and(|given| same(given, s));
            let needed = if caps.uses_given { !w.hosted } else { !(w.hosted && w.given == Some(s)) };
            (fits && guard && needed).then_some(World { hosted: true, given: Some(s), ..w })
        }
        Op::Unhost => {
            let named = w.given.is_some_and(|given| same(given, s));
            (w.hosted && named).then_some(World { hosted: false, given: gone(w.given), ..w })
        }
        Op::Restart => {
            let can = restarts(goal.has_restart || !caps.needs_commands);
            can.then_some(World {
                live: Some(s),
                given: if caps.restart_gives { Some(s) } else { w.given },
                ..w
            })
        }
        Op::Reload => {
            let can = restarts(goal.has_reload);
            let live = w.live.map(|live| Delta { reload: s.reload, ..live });
            can.then_some(World { live, given: if caps.restart_gives { Some(s) } else { w.given }, ..w })
        }
    }
}

/// A one-shot's run is another run only by what runs.
fn runs_alike(s: Delta) -> bool {
    !(s.reload || s.restart || s.replace)
}

fn reached(w: World, goal: Goal, caps: Caps) -> bool {
    let registered = !caps.registry || w.given == Some(NEW);
    let live_ok = w.live.is_some_and(runs_alike);
    match (goal.state, goal.auto_type) {
        (State::Running, AutoType::Resident) => live_ok && w.hosted && w.given == Some(NEW),
        (State::Running, AutoType::Periodic) => w.hosted && w.given == Some(NEW),
        (State::Running | State::Unhosted, AutoType::OneShot) => w.ran && registered,
        (State::Unhosted, AutoType::Resident) => live_ok && !w.hosted && registered,
        (State::Unhosted, AutoType::Periodic) => !w.hosted && registered,
        (State::Stopped, _) => w.live.is_none() && !w.hosted && registered,
        (State::Absent, _) => w.live.is_none() && !w.hosted && (!caps.registry || w.given.is_none()),
    }
}

const OPS: [Op; 8] =
    [Op::Stop, Op::Register, Op::Reload, Op::Restart, Op::Start, Op::Host, Op::Unhost, Op::Unregister];

/// The length of the shortest way, and the least disturbance among ways of that length.
fn shortest(from: World, goal: Goal, caps: Caps) -> Option<(usize, u32)> {
    let specs: HashSet<Delta> = [Some(NEW), from.given, from.live].into_iter().flatten().collect();
    let mut before: HashSet<World> = HashSet::new();
    let mut level = HashMap::from([(from, 0)]);
    for steps in 0..6 {
        let ends = level.iter().filter(|(world, _)| reached(**world, goal, caps));
        if let Some(least) = ends.map(|(_, disturbed)| *disturbed).min() {
            return Some((steps, least));
        }
        let mut next: HashMap<World, u32> = HashMap::new();
        for (world, disturbed) in &level {
            for (op, spec) in OPS.iter().flat_map(|op| specs.iter().map(move |spec| (*op, *spec))) {
                // A run in progress is never stopped to begin another.
                let run =
                    goal.auto_type != AutoType::Resident && goal.state.needs_start() && world.live.is_some();
                if run && op == Op::Stop {
                    continue;
                }
                let Some(after) = apply(*world, op, spec, goal, caps)
                    .filter(|w| !before.contains(w) && !level.contains_key(w))
                else {
                    continue;
                };
                let sum = disturbed + disturbance(op);
                next.entry(after).and_modify(|least| *least = sum.min(*least)).or_insert(sum);
            }
        }
        before.extend(level.into_keys());
        level = next;
    }
    None
}

fn disturbance(op: Op) -> u32 {
    match op {
        Op::Register | Op::Host | Op::Unhost | Op::Unregister => 0,
        Op::Reload => 1,
        Op::Start | Op::Stop | Op::Kill => 2,
        Op::Restart => 3,
    }
}

fn deltas() -> impl Iterator<Item = Delta> + Clone {
    (0..16u8).map(|bits| Delta {
        register: bits & 1 != 0,
        reload: bits & 2 != 0,
        restart: bits & 4 != 0,
        replace: bits & 8 != 0,
    })
}

/// Every world that a target can be in.
fn worlds(goal: Goal, caps: Caps) -> Vec<World> {
    let maybe = || std::iter::once(None).chain(deltas().map(Some));
    let mut all = Vec::new();
    for (given, live, hosted, ran) in maybe().flat_map(|given| {
        maybe().flat_map(move |live| {
            [
                (given, live, false, false),
                (given, live, true, false),
                (given, live, false, true),
                (given, live, true, true),
            ]
        })
    }) {
        let given_there = if caps.registry { !hosted || given.is_some() } else { given.is_some() == hosted };
        // A process has run as what it is running as.
        let once = goal.auto_type == AutoType::OneShot;
        let ran_fits = if once { live.is_none_or(|live| runs_alike(live) == ran) } else { !ran };
        if given_there && ran_fits {
            all.push(World { given, hosted, live, ran });
        }
    }
    all
}

fn goals() -> impl Iterator<Item = Goal> {
    let kinds = [AutoType::Periodic, AutoType::Resident, AutoType::OneShot];
    State::ALL
        .into_iter()
        .flat_map(move |state| {
            kinds.into_iter().flat_map(move |auto_type| {
                [(true, true), (true, false), (false, true), (false, false)]
                    .map(|(has_restart, has_reload)| Goal { state, auto_type, has_restart, has_reload })
            })
        })
        // A problem at validation.
        .filter(|goal| !(goal.state == State::Unhosted && goal.auto_type == AutoType::OneShot))
}

fn seen(w: World) -> Situation {
    let ran = if w.ran { Ran::This } else { Ran::NotThis };
    Situation {
        given: w.given,
        hosted: w.hosted,
        live: w.live,
        ran,
        old_known: true,
        stops: Stops::default(),
    }
}

/// Carries out one step as it was chosen: Old is what the process has, or the guard, or the registry.
fn carry_out(w: World, (op, which): (Op, Which), goal: Goal, caps: Caps) -> World {
    let old = match op {
        Op::Unhost => w.given,
        _ => w.live.or(w.given),
    };
    let spec = if which == Which::New { NEW } else { old.expect("there is an old spec") };
    let next = apply(w, op, spec, goal, caps);
    let next =
        next.unwrap_or_else(|| panic!("{op:?} {which:?} is not possible in {w:?} for {goal:?} {caps:?}"));
    assert_ne!(next, w, "{op:?} changes nothing in {w:?} for {goal:?}");
    next
}

#[test]
fn no_shorter_way_exists_and_every_prefix_leaves_the_rest() {
    let (mut cases, mut held) = (0, 0);
    for (name, caps) in Caps::ALL {
        for goal in goals() {
            for from in worlds(goal, caps) {
                let steps = match choose(seen(from), goal, caps) {
                    Ok(steps) => steps,
                    Err(_) => {
                        held += 1;
                        continue;
                    }
                };
                let what = format!("{name} {goal:?} {from:?}: {}", shown(&steps));
                let disturbed = steps.iter().map(|(op, _)| disturbance(*op)).sum();
                assert_eq!(Some((steps.len(), disturbed)), shortest(from, goal, caps), "{what}");
                let mut world = from;
                for (done, step) in steps.iter().enumerate() {
                    world = carry_out(world, *step, goal, caps);
                    let rest = choose(seen(world), goal, caps)
                        .unwrap_or_else(|held| panic!("{what}: then {held:?} in {world:?}"));
                    assert_eq!(
                        rest.len(),
                        steps.len() - done - 1,
                        "{what}: after {} steps {}",
                        done + 1,
                        shown(&rest)
                    );
                }
                assert!(reached(world, goal, caps), "{what}: ends in {world:?}");
                cases += 1;
            }
        }
    }
    assert!(cases > 20_000 && held > 1_000, "{cases} cases, {held} held");
}
