//! The choice of operations, against its definition: every row of the tables, and a search for a shorter plan in every
//! state. The search interprets the operations in code of its own (`fixtures::operation_model`).

use std::collections::HashSet;

use abide::model::{AutoType, HoldReason, Op, SpecSide, State};
use abide::reconcile::{Caps, Delta, Goal, RanStatus, Situation, StopBy, Stops, choose};

use crate::fixtures::operation_model::*;

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
        (_, "nothing there" | "never observed") => (None, false, None, RanStatus::NotThis),
        (_, "registered, stopped" | "registered, not supervised") => {
            (Some(NEW), false, None, RanStatus::NotThis)
        }
        (AutoType::Resident, "running, supervised, all as wanted") => {
            (Some(NEW), true, Some(NEW), RanStatus::NotThis)
        }
        (AutoType::Resident, "running, not supervised") => (Some(NEW), false, Some(NEW), RanStatus::NotThis),
        (AutoType::Resident, "exited, still supervised") => (Some(NEW), true, None, RanStatus::NotThis),
        (AutoType::Resident, "Replace differs, exited, still supervised") => {
            (Some(spec), true, None, RanStatus::NotThis)
        }
        (AutoType::Resident, "Restart differs, running, not supervised") => {
            (Some(spec), false, Some(spec), RanStatus::NotThis)
        }
        (AutoType::Resident, "Replace differs, stopped") => (Some(spec), false, None, RanStatus::NotThis),
        (AutoType::Resident, text) if text.starts_with("crash after") => {
            (Some(NEW), true, Some(spec), RanStatus::NotThis)
        }
        (AutoType::Resident, _) => (Some(spec), true, Some(spec), RanStatus::NotThis),
        (AutoType::Periodic, "supervised, not running now") => (Some(NEW), true, None, RanStatus::NotThis),
        (AutoType::Periodic, "supervised, a run in progress") => {
            (Some(NEW), true, Some(NEW), RanStatus::NotThis)
        }
        (AutoType::Periodic, "… with a run of the old spec in progress") => {
            (Some(old("Restart")), true, Some(old("Restart")), RanStatus::NotThis)
        }
        (AutoType::Periodic, _) => (Some(spec), true, None, RanStatus::NotThis),
        (AutoType::OneShot, "ran this revision") => (Some(NEW), false, None, RanStatus::This),
        (AutoType::OneShot, "ran it, still supervised") => (Some(NEW), true, None, RanStatus::This),
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
        (AutoType::OneShot, "ran an older one, Replace differs, still supervised") => {
            (Some(spec), true, None, RanStatus::NotThis)
        }
        (AutoType::OneShot, other) => panic!("{other}"),
    };
    // Without a registry what was given is there exactly while it is supervised.
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
            .replace("any Register/Reload/Restart field differs, supervised", "Restart, supervised")
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
/// the plan is as long as with the old spec, and every step can be executed with the known specs.
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
                        assert!(!others.iter().any(sends), "{what} sends an unknown spec");
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
        // Whether it ran is unknown; a stop does not depend on it.
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

/// The fewest operations for all, where one starts only while the one before it runs; the search stops at `most`.
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
                    // The spec of another instance is not a spec of this one.
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
