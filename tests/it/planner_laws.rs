//! Laws of the planner over thousands of random fleets. The simulated fleet (`backend::sim`) executes each plan by rules of
//! its own, and so checks it.

use std::collections::{BTreeMap, BTreeSet};

use abide::model::{
    Amount, AutoType, Desired, DesiredInstance, Health, HoldReason, HostKey, InstanceKey, KnownSpec,
    ObservedInstance, OnChange, Op, Plan, ProcessKey, Protection, Rule, SpecSide, State, Step,
};
use abide::reconcile::{EffectTable, Expected, changes, expectations, reconcile};

use crate::fixtures::world::*;

#[test]
fn one_execution_converges_and_planning_again_is_empty() {
    let mut steps = 0;
    let count = std::cell::RefCell::new(&mut steps);
    in_every_world(|world| {
        world.count_budgets();
        let plan = world.plan();
        for step in world.order(&plan) {
            world.execute_step(step);
            **count.borrow_mut() += 1;
        }
        let again = world.plan();
        assert_eq!(
            again.steps().count(),
            0,
            "again:\n{}after:\n{}{}",
            shown(&again),
            shown(&plan),
            drawn(world)
        );
        // A held instance is still held, for the same reason.
        let reasons = |plan: &Plan| -> BTreeMap<InstanceKey, HoldReason> {
            plan.held.iter().map(|held| (held.instance.clone(), held.reason)).collect()
        };
        assert_eq!(reasons(&again), reasons(&plan));
    });
    assert!(steps > 4 * WORLDS || std::env::var("ABIDE_SEED").is_ok(), "only {steps} steps were tried");
}

#[test]
fn every_step_changes_something_and_pids_stay_as_planned() {
    in_every_world(|world| {
        let plan = world.plan();
        for step in world.order(&plan) {
            let pid = |world: &World| {
                let own = world.fleet.procs().get(&step.instance).and_then(|proc| proc.pid);
                own.or(step.from.as_ref().and_then(|from| world.fleet.procs().get(from)?.pid))
            };
            let (before, had) = (world.fleet.clone(), pid(world));
            world.execute_step(step);
            assert_ne!(before.procs(), world.fleet.procs(), "{} changes nothing", line(step));
            if step.pid_stays && had.is_some() {
                assert_eq!(pid(world), had, "the pid did not stay: {}", line(step));
            }
        }
    });
}

#[test]
fn after_any_prefix_exactly_the_rest_is_planned() {
    in_every_world(|world| {
        world.count_budgets();
        let plan = world.plan();
        let steps = world.order(&plan);
        for (done, step) in steps.iter().enumerate() {
            world.execute_step(step);
            let rest = world.plan();
            let left = steps.len() - done - 1;
            let did: Vec<String> = steps[..=done].iter().map(|step| line(step)).collect();
            let story =
                || format!("after {did:#?} of\n{}comes\n{}in {}", shown(&plan), shown(&rest), drawn(world));
            assert_eq!(rest.steps().count(), left, "{}", story());
        }
    });
}

#[test]
fn unknown_foreign_held_and_protected_instances_get_no_step() {
    in_every_world(|world| {
        let (plan, look) = (world.plan(), world.observe());
        let held: BTreeSet<&InstanceKey> = plan.held.iter().map(|held| &held.instance).collect();
        for step in plan.steps() {
            let key = &step.instance;
            assert!(!world.gaps.contains(&key.host), "unknown: {}", line(step));
            assert!(!held.contains(key), "both held and done: {}", line(step));
            assert!(
                !world.rules.holds.manual.iter().any(|hold| hold.instance == *key),
                "held by a person: {}",
                line(step)
            );
            assert!(world.rules.holds.pauses.is_empty(), "paused: {}", line(step));
            let want = world.desired.instances.get(key);
            let row = look.instances.get(key).filter(|row| {
                row.hosted == Some(true) || row.running == Some(true) || row.registered == Some(true)
            });
            match row.map(|row| row.owner.as_deref()) {
                None | Some(Some(OWNER)) => {}
                Some(Some(other)) => panic!("{other} owns it: {}", line(step)),
                Some(None) => {
                    // Under an old name, the new one's manifest speaks for it.
                    let name = key.name.as_str().trim_start_matches("old-");
                    let newer = format!("{}:web:{name}", key.host).parse().expect("a key");
                    let want = want.or_else(|| world.desired.instances.get(&newer));
                    let adopts = world.rules.adopt || want.is_some_and(|want| want.origin.adopt);
                    assert!(adopts, "it has no owner: {}", line(step));
                }
            }
            if want.is_none() {
                let moved = is_moved(step);
                assert!(world.rules.prune || moved, "its removal was not requested: {}", line(step));
            }
        }
        for (key, want) in &world.desired.instances {
            let ops: Vec<Op> =
                plan.steps().filter(|step| step.instance == *key).map(|step| step.op).collect();
            let stops = ops.contains(&Op::Stop) || ops.contains(&Op::Kill);
            let restarts = ops.contains(&Op::Restart) || (stops && ops.contains(&Op::Start));
            for guard in &want.origin.protect {
                let broken = match guard {
                    Protection::Delete => want.origin.state == State::Absent && !ops.is_empty(),
                    Protection::Restart => restarts,
                    Protection::Stop => stops,
                };
                assert!(!broken, "{key} is protected from {guard:?}: {ops:?}");
            }
        }
    });
}

/// Done under an old name, so that the new one can have it.
fn is_moved(step: &Step) -> bool {
    step.why.iter().all(|why| why.rule == Rule::Moved)
}

#[test]
fn budgets_hold_over_the_whole_plan() {
    in_every_world(|world| {
        let (plan, look) = (world.plan(), world.observe());
        let mut chains: BTreeMap<&InstanceKey, Vec<Op>> = BTreeMap::new();
        for step in plan.steps() {
            chains.entry(&step.instance).or_default().push(step.op);
        }
        let moved: BTreeSet<&InstanceKey> =
            plan.steps().filter(|step| is_moved(step)).map(|step| &step.instance).collect();
        let deletes = chains.keys().filter(|key| {
            let state = world.desired.instances.get(*key).map(|want| want.origin.state);
            state.is_none_or(|state| state == State::Absent) && !moved.contains(*key)
        });
        let restarts = chains.iter().filter(|(key, ops)| {
            let before =
                plan.steps().find(|step| step.instance == ***key).and_then(|step| step.from.as_ref());
            let before = before.and_then(|from| chains.get(from)).cloned().unwrap_or_default();
            let has = |op: Op| ops.contains(&op) || before.contains(&op);
            has(Op::Restart) || ((has(Op::Stop) || has(Op::Kill)) && has(Op::Start))
        });
        let (deletes, restarts) = (deletes.count(), restarts.count());
        let owned = look.instances.values().filter(|row| row.owner.as_deref() == Some(OWNER)).count();
        let most = |amount: Amount| match amount {
            Amount::Count(count) => count as usize,
            Amount::Share(share) => (owned as f64 * share.get() / 100.0) as usize,
        };
        let by_policy = world.desired.policies.iter().any(|policy| policy.budgets.delete.is_some());
        let default = if by_policy { usize::MAX } else { (owned / 10).max(1) };
        let delete = world.rules.budgets.delete.map_or(default, most);
        assert!(deletes <= delete, "{deletes} deletes of {delete}: {}", shown(&plan));
        let restart = world.rules.budgets.restart.map_or(usize::MAX, most);
        assert!(restarts <= restart, "{restarts} restarts of {restart}: {}", shown(&plan));
        for policy in &world.desired.policies {
            assert!(deletes <= policy.budgets.delete.map_or(usize::MAX, most), "{}", shown(&plan));
            assert!(restarts <= policy.budgets.restart.map_or(usize::MAX, most), "{}", shown(&plan));
        }
    });
}

#[test]
fn every_step_has_a_reason_that_is_a_real_difference() {
    in_every_world(|world| {
        let (plan, look) = (world.plan(), world.observe());
        for step in plan.steps() {
            assert!(!step.why.is_empty(), "{}\n{}{}", line(step), shown(&plan), drawn(world));
            let own = look.instances.get(&step.instance);
            let row = own.or_else(|| look.instances.get(step.from.as_ref()?));
            for why in &step.why {
                let text = format!("{why:?}");
                assert!(!text.contains("hush") && !text.contains("quiet"), "a secret is shown: {text}");
                if why.field.is_some() {
                    assert_ne!(why.old, why.new, "{step:?}");
                }
                let real = match why.rule {
                    Rule::GivenDiffers | Rule::LiveDiffers => why.field.is_some() && row.is_some(),
                    Rule::NotRunning => own.is_none_or(|row| row.running == Some(false)),
                    Rule::NotHosted => own.is_none_or(|row| row.hosted == Some(false)),
                    Rule::NotRegistered => own.is_none_or(|row| row.registered == Some(false)),
                    Rule::Hosted => world.desired.instances[&step.instance].origin.state == State::Unhosted,
                    Rule::NotRun => {
                        world.desired.instances[&step.instance].spec.monitor.auto_type == AutoType::OneShot
                    }
                    Rule::StateStopped => {
                        world.desired.instances[&step.instance].origin.state == State::Stopped
                    }
                    Rule::StateAbsent => {
                        world.desired.instances[&step.instance].origin.state == State::Absent
                    }
                    Rule::Orphan => !world.desired.instances.contains_key(&step.instance),
                    Rule::Adopted => row
                        .is_some_and(|row| row.owner.is_none() || row.specs.registered == KnownSpec::Unknown),
                    Rule::Moved => {
                        !world.desired.instances.contains_key(&step.instance)
                            || step.from.is_some()
                            || plan.steps().any(|other| other.from.as_ref() == Some(&step.instance))
                    }
                    Rule::SpecUnknown => row.is_some_and(|row| {
                        row.specs.registered.spec().is_none() || row.specs.live.spec().is_none()
                    }),
                };
                assert!(real, "{why:?} of {}\n{}{}", line(step), shown(&plan), drawn(world));
            }
        }
    });
}

/// A plan shows every field that changes with it, also those that did not cause it.
#[test]
fn every_changed_field_of_a_changed_instance_is_named() {
    let named = std::cell::Cell::new(0_usize);
    in_every_world(|world| {
        let (plan, look) = (world.plan(), world.observe());
        let caps = world.rules.caps;
        for (key, want) in &world.desired.instances {
            let steps: Vec<&Step> = plan.steps().filter(|step| step.instance == *key).collect();
            let sends = [Op::Register, Op::Reload, Op::Restart, Op::Start, Op::Supervise];
            let carries = |step: &&&Step| step.spec_side == SpecSide::New && sends.contains(&step.op);
            let Some(row) = look.instances.get(key).filter(|_| steps.iter().any(|step| carries(&step)))
            else {
                continue;
            };
            let is_given = row.hosted == Some(true) || (caps.registry && row.registered == Some(true));
            let Some(old) = row.specs.registered.spec().filter(|_| is_given) else { continue };
            let effects = EffectTable::of(&want.spec, &OnChange::new());
            let effects = effects.without(|field| !caps.supports_field(field));
            for change in changes(old, &want.spec, &effects) {
                let path = change.field.path();
                let whys = || steps.iter().flat_map(|step| &step.why).filter_map(|why| why.field.as_deref());
                assert!(whys().any(|field| field.starts_with(path)), "{path} of {key} in\n{}", shown(&plan));
                named.set(named.get() + 1);
            }
        }
    });
    assert!(
        named.get() > WORLDS as usize / 4 || std::env::var("ABIDE_SEED").is_ok(),
        "only {} fields",
        named.get()
    );
}

/// An orphan that another source declares is not one, and a protected orphan is held.
#[test]
fn orphans_of_other_sources_and_protected_orphans_stay() {
    let spared = std::cell::Cell::new(0_usize);
    in_every_world(|world| {
        let plan = world.plan();
        let is_orphan =
            |step: &&Step| !world.desired.instances.contains_key(&step.instance) && !is_moved(step);
        let orphans: BTreeSet<InstanceKey> =
            plan.steps().filter(is_orphan).map(|step| step.instance.clone()).collect();
        spared.set(spared.get() + orphans.len());
        world.rules.orphans.declared_elsewhere = orphans.clone();
        let elsewhere = world.plan();
        let touched = elsewhere.steps().map(|step| &step.instance);
        let touched = touched.chain(elsewhere.held.iter().map(|held| &held.instance));
        assert!(touched.into_iter().all(|key| !orphans.contains(key)), "{}", shown(&elsewhere));
        world.rules.orphans.declared_elsewhere.clear();
        world.rules.holds.protections =
            orphans.iter().map(|key| (key.clone(), vec![Protection::Delete])).collect();
        let protected = world.plan();
        assert!(protected.steps().all(|step| !orphans.contains(&step.instance)), "{}", shown(&protected));
        for key in &orphans {
            let held = protected.held.iter().find(|held| held.instance == *key).map(|held| held.reason);
            assert_eq!(held, Some(HoldReason::Protected), "{key} in\n{}", shown(&protected));
        }
    });
    assert!(spared.get() > 0 || std::env::var("ABIDE_SEED").is_ok(), "no orphan was planned");
}

/// A service that is starting or unhealthy, and a run in progress, are not ready: their dependents wait, unless the plan
/// changes the dependency first.
#[test]
fn dependents_wait_for_what_is_pending() {
    let held = std::cell::Cell::new(0_usize);
    in_every_world(|world| {
        let mut observed = world.observe();
        let mut pending: BTreeSet<InstanceKey> = BTreeSet::new();
        for (key, seen) in observed.instances.iter_mut().filter(|(_, seen)| seen.running == Some(true)) {
            let kind = world.desired.instances.get(key).map(|want| want.spec.monitor.auto_type);
            if kind == Some(AutoType::OneShot) {
                pending.insert(key.clone());
            } else if world.dice.one_in(2) {
                seen.health = world.dice.pick(&[Health::Starting, Health::Degraded]);
                pending.insert(key.clone());
            }
        }
        let plan = reconcile(&world.desired, &observed, &world.rules, &world.now);
        held.set(held.get() + count(&plan, HoldReason::WaitingForDependency));
        let mut changed: BTreeSet<&InstanceKey> = BTreeSet::new();
        for wave in &plan.waves {
            for step in wave.steps.iter().filter(|step| step.op == Op::Start) {
                let Some(want) = world.desired.instances.get(&step.instance) else { continue };
                for name in &want.origin.depends_on {
                    for (key, _) in declared_instances(&world.desired, name, &step.instance.host) {
                        let is_ready = !pending.contains(key) || changed.contains(key);
                        assert!(
                            is_ready,
                            "{} starts before {key} is ready:\n{}{}",
                            step.instance,
                            shown(&plan),
                            drawn(world)
                        );
                    }
                }
            }
            let brings_up =
                |step: &&Step| matches!(step.op, Op::Start | Op::Restart | Op::Reload | Op::Supervise);
            changed.extend(wave.steps.iter().filter(brings_up).map(|step| &step.instance));
        }
    });
    assert!(held.get() > 100 || std::env::var("ABIDE_SEED").is_ok(), "{} dependents waited", held.get());
}

fn count(plan: &Plan, reason: HoldReason) -> usize {
    plan.held.iter().filter(|held| held.reason == reason).count()
}

/// Waves respect dependencies: what starts finds running what it depends on, and what stops leaves nothing behind
/// that depended on it and is to stop too.
#[test]
fn dependencies_are_kept_in_every_order_that_the_waves_allow() {
    in_every_world(|world| {
        let plan = world.plan();
        for step in world.order(&plan) {
            if matches!(step.op, Op::Start | Op::Restart) {
                let Some(want) = world.desired.instances.get(&step.instance) else { continue };
                for name in &want.origin.depends_on {
                    for (key, other) in declared_instances(&world.desired, name, &step.instance.host) {
                        let earlier = format!("{}:web:old-{}", key.host, key.name).parse().expect("a key");
                        let proc = world.fleet.procs().get(key).or_else(|| world.fleet.procs().get(&earlier));
                        let idle = other.origin.state == State::Unhosted
                            && other.spec.monitor.auto_type == AutoType::Periodic;
                        let there = idle
                            || proc.is_some_and(|proc| match other.spec.monitor.auto_type {
                                AutoType::Resident => proc.live.is_some(),
                                AutoType::Periodic => proc.hosted,
                                AutoType::OneShot => proc.ran.is_some(),
                            });
                        assert!(
                            there,
                            "{} starts without {key}:\n{}{}",
                            step.instance,
                            shown(&plan),
                            drawn(world)
                        );
                    }
                }
            }
            if matches!(step.op, Op::Stop | Op::Kill)
                && world
                    .desired
                    .instances
                    .get(&step.instance)
                    .is_some_and(|want| !want.origin.state.needs_start())
            {
                for (key, other) in &world.desired.instances {
                    let depends = other.origin.depends_on.iter().any(|name| {
                        declared_instances(&world.desired, name, &key.host)
                            .iter()
                            .any(|(key, _)| **key == step.instance)
                    });
                    let stops = plan
                        .steps()
                        .any(|other| other.instance == *key && matches!(other.op, Op::Stop | Op::Kill));
                    let down = !other.origin.state.needs_start() && stops && depends;
                    let runs = world.fleet.procs().get(key).is_some_and(|proc| proc.live.is_some());
                    assert!(!(down && runs), "{} stops before {key}:\n{}", step.instance, shown(&plan));
                }
            }
            world.execute_step(step);
        }
    });
}

fn declared_instances<'a>(
    desired: &'a Desired,
    name: &ProcessKey,
    host: &HostKey,
) -> Vec<(&'a InstanceKey, &'a DesiredInstance)> {
    let all: Vec<_> = desired.instances.iter().filter(|(key, _)| key.process() == *name).collect();
    let here: Vec<_> = all.iter().copied().filter(|(key, _)| key.host == *host).collect();
    if here.is_empty() { all } else { here }
}

#[test]
fn a_change_and_its_revert_leave_nothing_to_do() {
    in_every_world(|world| {
        world.count_budgets();
        let first = world.desired.clone();
        let run = |world: &mut World| {
            let plan = world.plan();
            for step in world.order(&plan) {
                world.execute_step(step);
            }
        };
        run(world);
        let second = world.desired();
        world.desired = first.clone();
        let settled = world.plan();
        assert_eq!(settled.steps().count(), 0);
        // A revision that is replaced before a step leaves nothing to do.
        world.desired = second;
        world.plan();
        world.desired = first;
        assert_eq!(world.plan(), settled);
    });
}

/// What a step leaves behind as an expectation is what a look shows once it knows.
#[test]
fn expectations_match_the_effect_of_each_step() {
    in_every_world(|world| {
        let plan = world.plan();
        for step in world.order(&plan) {
            let before = world.fleet.rows();
            let row = before.get(&step.instance).or_else(|| before.get(step.from.as_ref()?));
            let expected = expectations::after(step, row, OWNER, &world.rules.caps);
            if step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot) {
                // Its end comes with the step here.
                world.execute_step(step);
                continue;
            }
            world.execute_step(step);
            let shown = world.fleet.rows().remove(&step.instance);
            match (expected, shown) {
                (Expected::Gone, shown) => {
                    assert!(shown.is_none_or(|row| row.registered == Some(false)), "{}", line(step));
                }
                (Expected::State(seen), shown) => {
                    let shown = shown.unwrap_or_default();
                    let fact = |fact: Option<bool>| fact.unwrap_or(false);
                    let facts = |seen: &ObservedInstance| [fact(seen.hosted), fact(seen.running)];
                    assert_eq!(facts(&seen), facts(&shown), "{}\n{}", line(step), drawn(world));
                    let held = fact(shown.hosted) || fact(shown.registered);
                    if !world.hidden && held && step.spec_side == abide::model::SpecSide::New {
                        assert_eq!(seen.specs.registered, shown.specs.registered, "{}", line(step));
                    }
                    if held && matches!(step.op, Op::Register | Op::Start | Op::Supervise) {
                        assert_eq!(seen.owner, shown.owner, "{}", line(step));
                    }
                    // Fields with effect Register take effect with a registration at some engines: no plan depends on that.
                    let registers = matches!(step.op, Op::Register | Op::Supervise);
                    let revision =
                        |row: &ObservedInstance| row.specs.live.spec().map(|spec| *spec.revision());
                    let alike = match (revision(&seen), revision(&shown)) {
                        (Some(seen), Some(shown)) => {
                            seen.differs_from(&shown) <= abide::model::Effect::Register
                        }
                        (seen, shown) => seen == shown,
                    };
                    if !world.hidden && fact(shown.running) && step.op != Op::Reload {
                        assert!(seen.specs.live == shown.specs.live || registers && alike, "{}", line(step));
                    }
                }
                (Expected::Unknown, _) => panic!("a step that was done is never unsure"),
            }
        }
    });
}
