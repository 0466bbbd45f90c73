//! The choice of operations, against its definition: every row of the tables, and a search for a shorter way in
//! every state there is. The search interprets the operations in code of its own.

use std::collections::{HashMap, HashSet};

use abide::model::{AutoType, HoldReason, Op, SpecSide, State};
use abide::reconcile::{Caps, Delta, Goal, RanStatus, Situation, StopBy, Stops, choose};

const NEW: Delta = Delta { register: false, reload: false, restart: false, replace: false };
/// The three columns of the tables: a choice sees no difference between gse-v2, gse-apigw and job.
const CAPS: [(&str, Caps); 3] = [("gse-v1", Caps::GSE_V1), ("gse-v2", Caps::GSE_V2), ("local", Caps::LOCAL)];

/// `register(n), start(n)`.
fn shown(steps: &[(Op, SpecSide)]) -> String {
    let one = |(op, which): &(Op, SpecSide)| match (op, which) {
        (Op::Unregister, _) => "unregister".to_owned(),
        (op, SpecSide::New) => format!("{op}(n)"),
        (op, SpecSide::Old) => format!("{op}(o)"),
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
        (_, "nothing there" | "never seen") => (None, false, None, RanStatus::NotThis),
        (_, "registered, stopped" | "not guarded, registered") => {
            (Some(NEW), false, None, RanStatus::NotThis)
        }
        (AutoType::Resident, "running, guarded, all as wanted") => {
            (Some(NEW), true, Some(NEW), RanStatus::NotThis)
        }
        (AutoType::Resident, "running, not guarded") => (Some(NEW), false, Some(NEW), RanStatus::NotThis),
        (AutoType::Resident, "died, still guarded") => (Some(NEW), true, None, RanStatus::NotThis),
        (AutoType::Resident, "Replace differs, died, still guarded") => {
            (Some(spec), true, None, RanStatus::NotThis)
        }
        (AutoType::Resident, "Restart differs, running, not guarded") => {
            (Some(spec), false, Some(spec), RanStatus::NotThis)
        }
        (AutoType::Resident, "Replace differs, stopped") => (Some(spec), false, None, RanStatus::NotThis),
        (AutoType::Resident, text) if text.starts_with("crash after") => {
            (Some(NEW), true, Some(spec), RanStatus::NotThis)
        }
        (AutoType::Resident, _) => (Some(spec), true, Some(spec), RanStatus::NotThis),
        (AutoType::Periodic, "guarded, not running now") => (Some(NEW), true, None, RanStatus::NotThis),
        (AutoType::Periodic, "guarded, a run in progress") => {
            (Some(NEW), true, Some(NEW), RanStatus::NotThis)
        }
        (AutoType::Periodic, "… with a run of the old spec in progress") => {
            (Some(old("Restart")), true, Some(old("Restart")), RanStatus::NotThis)
        }
        (AutoType::Periodic, _) => (Some(spec), true, None, RanStatus::NotThis),
        (AutoType::OneShot, "ran this revision") => (Some(NEW), false, None, RanStatus::This),
        (AutoType::OneShot, "ran it, still guarded") => (Some(NEW), true, None, RanStatus::This),
        (AutoType::OneShot, "running it now") => (Some(NEW), true, Some(NEW), RanStatus::This),
        (AutoType::OneShot, "ran an older one, Register-field differs") => {
            (Some(spec), false, None, RanStatus::This)
        }
        (AutoType::OneShot, "ran an older one, Restart-field differs") => {
            (Some(spec), false, None, RanStatus::NotThis)
        }
        (AutoType::OneShot, "older one in progress, Restart-field differs") => {
            (Some(spec), true, Some(spec), RanStatus::NotThis)
        }
        (AutoType::OneShot, "ran an older one, Replace differs, still guarded") => {
            (Some(spec), true, None, RanStatus::NotThis)
        }
        (AutoType::OneShot, other) => panic!("{other}"),
    };
    // Without a registry what was given is there exactly while it is guarded.
    let given = given.filter(|_| caps.registry || hosted);
    Situation { given, hosted, live, ran, old_known: true, stops: Stops::default(), identities_differ: false }
}

#[test]
fn three_kinds_of_target_are_one_column() {
    let seen = |caps: Caps| {
        let Caps {
            registry,
            operates_on_registered_spec: uses_given,
            restart_registers_spec: restart_gives,
            stop_needs_old,
            needs_commands,
            ..
        } = caps;
        [registry, uses_given, restart_gives, stop_needs_old, needs_commands]
    };
    assert_eq!(seen(Caps::GSE_APIGW), seen(Caps::GSE_V2));
    assert_eq!(seen(Caps::JOB), seen(Caps::GSE_V2));
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
        Err(HoldReason::OldSpecUnknown) => "held".to_owned(),
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
    let s = if caps.operates_on_registered_spec && !matches!(op, Op::Register | Op::Unregister) {
        w.given?
    } else {
        s
    };
    let same = |a: Delta, b: Delta| a.replace == b.replace;
    let kept = goal.auto_type != AutoType::Periodic;
    let gone = |given: Option<Delta>| given.filter(|_| caps.registry);
    let restarts =
        |has: bool| goal.auto_type == AutoType::Resident && has && w.live.is_some_and(|live| same(s, live));
    match op {
        Op::Register => {
            let other_guard = w.hosted && w.given.is_some_and(|given| !same(given, s));
            let other_process = kept && w.live.is_some_and(|live| !same(live, s));
            let can = caps.registry && !other_guard && !other_process;
            can.then_some(World { given: Some(s), live: registered_live(w.live, s, caps), ..w })
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
            let named = !(caps.operates_on_registered_spec || caps.stop_needs_old) || same(s, live);
            // The supervision of another identity stays.
            let hosted = w.hosted && w.given.is_some_and(|given| !same(given, live));
            let given = if hosted { w.given } else { gone(w.given) };
            named.then_some(World { live: None, hosted, given, ..w })
        }
        Op::Supervise => {
            let fits = w.live.is_none_or(|live| same(s, live)) || !kept;
            let guard = !w.hosted || w.given.is_some_and(|given| same(given, s));
            let needed =
                if caps.operates_on_registered_spec { !w.hosted } else { !(w.hosted && w.given == Some(s)) };
            let live = registered_live(w.live, s, caps);
            (fits && guard && needed).then_some(World { hosted: true, given: Some(s), live, ..w })
        }
        Op::Unsupervise => {
            let named = w.given.is_some_and(|given| same(given, s));
            (w.hosted && named).then_some(World { hosted: false, given: gone(w.given), ..w })
        }
        Op::Restart => {
            let can = restarts(goal.has_restart || !caps.needs_commands);
            can.then_some(World {
                live: Some(s),
                given: if caps.restart_registers_spec { Some(s) } else { w.given },
                ..w
            })
        }
        Op::Reload => {
            let can = restarts(goal.has_reload);
            let live = w.live.map(|live| Delta { reload: s.reload, ..live });
            can.then_some(World {
                live: registered_live(live, s, caps),
                given: if caps.restart_registers_spec { Some(s) } else { w.given },
                ..w
            })
        }
    }
}

/// Our own engine, which alone registers with a restart: Register-class fields take effect at once, unless a Restart- or
/// Replace-class difference is pending.
fn registered_live(live: Option<Delta>, s: Delta, caps: Caps) -> Option<Delta> {
    let at_once = |live: Delta| (live.restart, live.replace) == (s.restart, s.replace);
    live.map(|live| match caps.restart_registers_spec && at_once(live) {
        true => Delta { register: s.register, ..live },
        false => live,
    })
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

const OPS: [Op; 8] = [
    Op::Stop,
    Op::Register,
    Op::Reload,
    Op::Restart,
    Op::Start,
    Op::Supervise,
    Op::Unsupervise,
    Op::Unregister,
];

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
        Op::Register | Op::Supervise | Op::Unsupervise | Op::Unregister => 0,
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
    let ran = if w.ran { RanStatus::This } else { RanStatus::NotThis };
    Situation {
        given: w.given,
        hosted: w.hosted,
        live: w.live,
        ran,
        old_known: true,
        stops: Stops::default(),
        identities_differ: false,
    }
}

/// Carries out one step as it was chosen: Old is what the process has, or the guard, or the registry.
fn carry_out(w: World, (op, which): (Op, SpecSide), goal: Goal, caps: Caps) -> World {
    let old = match op {
        Op::Unsupervise => w.given,
        _ => w.live.or(w.given),
    };
    let spec = if which == SpecSide::New { NEW } else { old.expect("there is an old spec") };
    let next = apply(w, op, spec, goal, caps);
    let next =
        next.unwrap_or_else(|| panic!("{op:?} {which:?} is not possible in {w:?} for {goal:?} {caps:?}"));
    assert_ne!(next, w, "{op:?} changes nothing in {w:?} for {goal:?}");
    next
}

#[test]
fn plans_are_shortest_and_every_prefix_leaves_the_rest() {
    let (mut cases, mut held) = (0, 0);
    for (name, caps) in CAPS {
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

/// What is known of the old spec decides whether a step can be taken, never which way is shortest: where it is not held,
/// the way is as long as with the old spec at hand, and every step can be carried out with the specs that are known.
#[test]
fn without_the_old_spec_the_plan_is_the_same_or_held() {
    let (mut same, mut held) = (0, 0);
    for (name, caps) in CAPS {
        for goal in goals() {
            for from in worlds(goal, caps) {
                let known = seen(from);
                let Ok(steps) = choose(known, goal, caps) else { continue };
                let what = format!("{name} {goal:?} {from:?}: {}", shown(&steps));
                match choose(Situation { old_known: false, ..known }, goal, caps) {
                    Ok(others) => {
                        same += 1;
                        assert_eq!(
                            others.iter().map(|(op, _)| op).collect::<Vec<_>>(),
                            steps.iter().map(|(op, _)| op).collect::<Vec<_>>(),
                            "{what}"
                        );
                        let sends = |(op, which): &(Op, SpecSide)| {
                            *which == SpecSide::Old
                                && matches!(op, Op::Stop | Op::Unsupervise)
                                && caps.stop_needs_old
                        };
                        assert!(!others.iter().any(sends), "{what} sends what nobody knows");
                        let mut world = from;
                        for step in others {
                            world = carry_out(world, step, goal, caps);
                        }
                        assert!(reached(world, goal, caps), "{what}");
                    }
                    Err(reason) => {
                        held += 1;
                        assert_eq!(reason, HoldReason::OldSpecUnknown, "{what}");
                        let other = |delta: Option<Delta>| delta.is_some_and(|delta| delta.replace);
                        assert!(other(from.live) || other(from.given), "{what} is held for nothing");
                    }
                }
            }
        }
    }
    assert!(same > 20_000 && held > 1_000, "{same} the same, {held} held");
}

#[test]
fn held_changes_have_the_expected_reason() {
    let other = Some(Delta { replace: true, ..NEW });
    let up =
        Goal { state: State::Running, auto_type: AutoType::Resident, has_restart: true, has_reload: true };
    let once = Goal { auto_type: AutoType::OneShot, ..up };
    let nothing = Situation {
        given: None,
        hosted: false,
        live: None,
        ran: RanStatus::NotThis,
        old_known: true,
        stops: Stops::default(),
        identities_differ: false,
    };
    for (_, caps) in Caps::ALL {
        // A guard and a process under two identities, whichever of them is the wanted one, or neither.
        for (given, live, apart) in
            [(Some(NEW), other, false), (other, Some(NEW), false), (other, other, true)]
        {
            let mixed = Situation { given, hosted: true, live, identities_differ: apart, ..nothing };
            for state in State::ALL {
                assert_eq!(choose(mixed, Goal { state, ..up }, caps), Err(HoldReason::IdentityMix));
            }
        }
        // Nobody knows whether it ran; going down needs no answer to that.
        let unknown = Situation { ran: RanStatus::Unknown, ..nothing };
        assert_eq!(choose(unknown, once, caps), Err(HoldReason::RunUnknown));
        assert_eq!(choose(unknown, Goal { state: State::Absent, ..once }, caps), Ok(Vec::new()));
        let older = Situation { live: Some(Delta { restart: true, ..NEW }), ..nothing };
        assert_eq!(choose(older, once, caps), Err(HoldReason::RunInProgress));
    }
}

/// A run and the supervision have two identities, and neither of them is the wanted one.
#[test]
fn a_run_and_a_supervision_of_two_identities_both_end() {
    let other = Some(Delta { replace: true, ..NEW });
    let is = Situation {
        given: other,
        hosted: true,
        live: other,
        ran: RanStatus::NotThis,
        old_known: true,
        stops: Stops::default(),
        identities_differ: true,
    };
    for auto_type in [AutoType::Periodic, AutoType::OneShot] {
        for (name, caps) in Caps::ALL {
            for state in [State::Stopped, State::Absent] {
                let goal = Goal { state, auto_type, has_restart: true, has_reload: true };
                let plan = choose(is, goal, caps).map(|steps| shown(&steps));
                let expected = match (name, state) {
                    ("gse-v1", State::Stopped) => "unhost(o), register(o), stop(o), register(n)",
                    ("gse-v1", _) => "unhost(o), register(o), stop(o), unregister",
                    ("local", State::Stopped) => "stop(o), unhost(o), register(n)",
                    ("local", _) => "stop(o), unhost(o), unregister",
                    (_, _) => "stop(o), unhost(o)",
                };
                assert_eq!(plan.as_deref(), Ok(expected), "{auto_type:?} {state:?} {name}");
                let unknown = choose(Situation { old_known: false, ..is }, goal, caps);
                if caps.stop_needs_old {
                    assert_eq!(unknown, Err(HoldReason::OldSpecUnknown), "{auto_type:?} {state:?} {name}");
                }
            }
        }
    }
}

#[test]
fn stopping_needs_a_command_where_signals_are_unavailable() {
    let down =
        Goal { state: State::Stopped, auto_type: AutoType::Resident, has_restart: false, has_reload: false };
    let runs = |given: Delta, stops: Stops| Situation {
        given: Some(given),
        hosted: true,
        live: Some(given),
        ran: RanStatus::NotThis,
        old_known: true,
        stops,
        identities_differ: false,
    };
    let all = |by| Stops { new: by, given: by, live: by };
    let weaker = Delta { restart: true, ..NEW };
    for (name, caps) in Caps::ALL {
        let first = |situation| choose(situation, down, caps).map(|steps| shown(&steps));
        let signals = name == "local";
        let kill = if signals { "stop(n)" } else { "kill(n)" };
        assert_eq!(first(runs(NEW, all(StopBy::Kill))).as_deref(), Ok(kill), "{name}");
        match first(runs(NEW, all(StopBy::Nothing))) {
            Ok(steps) => assert!(signals && steps == "stop(n)", "{name}: {steps}"),
            Err(reason) => assert!(!signals && reason == HoldReason::NoStopCommand, "{name}: {reason:?}"),
        }
        // The old spec has no way, the new one of the same identity has: that is used.
        let stops = Stops { new: StopBy::Stop, given: StopBy::Nothing, live: StopBy::Nothing };
        let expected = match name {
            "gse-v1" => "register(n), stop(n)",
            "local" => "stop(o), register(n)",
            _ => "stop(n)",
        };
        assert_eq!(first(runs(weaker, stops)).as_deref(), Ok(expected), "{name}");
        // Another identity cannot be stopped by the new spec's command.
        let other = Delta { replace: true, ..NEW };
        if !signals {
            assert_eq!(first(runs(other, stops)), Err(HoldReason::NoStopCommand), "{name}");
        }
    }
}

// ---- Several instances at once: dependencies order steps and add none.

#[test]
fn plans_with_dependencies_are_shortest() {
    let mut seed = 7u64;
    let mut roll = move |sides: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize % sides
    };
    let mut tried = 0;
    while tried < 100 {
        let (_, caps) = Caps::ALL[roll(Caps::ALL.len())];
        let count = 2 + roll(2);
        // All residents that are to run, each depending on the one before it.
        let goal = Goal {
            state: State::Running,
            auto_type: AutoType::Resident,
            has_restart: roll(2) == 0,
            has_reload: true,
        };
        let all = worlds(goal, caps);
        let from: Vec<World> = (0..count).map(|_| all[roll(all.len())]).collect();
        let chosen: Result<Vec<_>, _> = from.iter().map(|world| choose(seen(*world), goal, caps)).collect();
        let Ok(chosen) = chosen else { continue };
        let total: usize = chosen.iter().map(Vec::len).sum();
        assert_eq!(shortest_together(&from, goal, caps, total), Some(total), "{from:?} {goal:?} {caps:?}");
        tried += 1;
    }
}

/// The fewest operations for all, where one starts only while the one before it runs; looks no further than `most`.
fn shortest_together(from: &[World], goal: Goal, caps: Caps, most: usize) -> Option<usize> {
    let specs: HashSet<Delta> = from.iter().flat_map(|w| [Some(NEW), w.given, w.live]).flatten().collect();
    let mut before: HashSet<Vec<World>> = HashSet::new();
    let mut level: HashSet<Vec<World>> = HashSet::from([from.to_vec()]);
    for steps in 0..=most {
        if level.iter().any(|all| all.iter().all(|world| reached(*world, goal, caps))) {
            return Some(steps);
        }
        let mut next = HashSet::new();
        for all in &level {
            for at in 0..all.len() {
                for (op, spec) in OPS.iter().flat_map(|op| specs.iter().map(move |spec| (*op, *spec))) {
                    let starts = matches!(op, Op::Start | Op::Restart);
                    if starts && at > 0 && all[at - 1].live.is_none() {
                        continue;
                    }
                    // A spec of another instance is no spec of this one.
                    if spec != NEW && Some(spec) != from[at].given && Some(spec) != from[at].live {
                        continue;
                    }
                    if let Some(world) = apply(all[at], op, spec, goal, caps) {
                        let mut after = all.clone();
                        after[at] = world;
                        if !before.contains(&after) && !level.contains(&after) {
                            next.insert(after);
                        }
                    }
                }
            }
        }
        before.extend(level);
        level = next;
    }
    None
}
