//! Rollouts by group: each group waits for a promotion, in one apply after another, under `watch`, and across crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use abide::model::{
    Amount, AutoType, HoldReason, InstanceKey, Op, ProcessKey, Rollout, RolloutGroup, RolloutProgress,
};
use abide::reconcile::EffectTable;
use serde_json::Value;

use crate::fixtures::machine::{KillOnDrop, Machine};
use crate::fixtures::world::{drawn, hosts, in_every_world, shown};
use crate::support::until;
use crate::watch::read_log;

const GROUPS: [(&str, &str); 3] = [("first", "127.0.0.1"), ("eu", "127.0.0.2"), ("us", "127.0.0.3")];

/// A system with three hosts, each in a group of its own.
pub fn system(machine: &Machine) -> KillOnDrop {
    let groups = GROUPS.map(|(name, ip)| {
        format!("apiVersion: abide/v1\nkind: HostGroup\nmeta: {{name: {name}}}\nhosts: [{{ip: {ip}, bk_cloud_id: 0}}]\n")
    });
    std::fs::write(machine.path("m/groups.yaml"), groups.join("---\n")).expect("a file");
    let mut args = vec!["up", "--listen", "127.0.0.1:0"];
    let hosts = GROUPS.map(|(_, ip)| format!("0:{ip}"));
    hosts.iter().for_each(|host| args.extend(["--as-host", host.as_str()]));
    let up = machine.start(&args, "up.log");
    until("`up` is ready", || read_log(machine, "up.log").contains("ready http://"));
    up
}

pub fn version(machine: &Machine, version: &str, rollout: &str) {
    let manifest = machine
        .manifest("api")
        .field("rollout", rollout)
        .identity("pid_path", machine.path("run/${host.ip}.pid").display())
        .identity("value_key", "api")
        .control("start_mode", "foreground")
        .start_cmd(&format!("echo ${{host.ip}} {version} >> effects; exec sleep 1000"))
        .to_string();
    let own = "hosts: [{group: us}, {group: eu}, {group: first}]";
    let text: String = manifest
        .lines()
        .map(|line| format!("{}\n", if line.starts_with("hosts:") { own } else { line }))
        .collect();
    assert!(text.contains(own), "{text}");
    machine.declare("api", text);
}

const PAUSES: &str = "{order: [first, eu, us], pause: promoted}";

pub fn started(machine: &Machine, version: &str) -> Vec<String> {
    let suffix = format!(" {version}");
    machine.effects().iter().filter_map(|line| line.strip_suffix(&suffix).map(str::to_owned)).collect()
}

pub fn expect(machine: &Machine, args: &[&str], code: i32, part: &str) -> String {
    let (found, out, err) = machine.run(args);
    assert!(found == code && format!("{out}{err}").contains(part), "{args:?}: {found} {out} {err}");
    out
}

#[test]
fn each_group_waits_for_its_promotion() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", PAUSES);
    let apply = ["apply", "m", "--yes"];
    expect(&machine, &["rollout", "promote", "web/api"], 64, "declare no process web/api");
    expect(&machine, &["rollout", "status", "web/api"], 0, "declare no process web/api");
    expect(&machine, &apply, 5, "stage 1 of 3 (first) is done: `abide rollout promote web/api` continues");
    assert_eq!(started(&machine, "1"), ["127.0.0.1"]);
    let out = expect(&machine, &["apply", "m", "--yes", "-o", "json"], 5, "AwaitingPromotion");
    let report: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(report["exit"]["reason"], "AwaitingPromotion", "{report}");
    expect(&machine, &["rollout", "promote", "web/api", "--reason", "looks good"], 0, "next stage: eu");
    expect(&machine, &["rollout", "promote", "web/api"], 1, "no rollout of web/api waits");
    expect(&machine, &apply, 5, "stage 2 of 3 (eu) is done");
    assert_eq!(started(&machine, "1"), ["127.0.0.1", "127.0.0.2"]);
    let out = expect(&machine, &["rollout", "status", "-o", "json"], 0, "paused");
    let rows: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((&rows[0]["stage"], &rows[0]["promoted"]), (&"eu".into(), &1.into()), "{rows}");
    expect(&machine, &["rollout", "promote", "web/api"], 0, "next stage: us");
    expect(&machine, &apply, 0, "converged");
    expect(&machine, &apply, 0, "Nothing to do");
    assert_eq!(started(&machine, "1"), GROUPS.map(|(_, ip)| ip));
    expect(&machine, &["history"], 0, "looks good");
    // Another version starts with the first stage again. Aborted and undone, it stays there.
    version(&machine, "2", PAUSES);
    expect(&machine, &apply, 5, "stage 1 of 3");
    assert_eq!(started(&machine, "2"), ["127.0.0.1"]);
    expect(&machine, &["rollout", "abort", "web/api"], 0, "aborted");
    expect(&machine, &apply, 3, "RolloutAborted");
    expect(&machine, &["rollout", "undo", "web/api", "--yes"], 0, "converged");
    assert_eq!(started(&machine, "1").iter().filter(|ip| *ip == "127.0.0.1").count(), 2);
    expect(&machine, &apply, 3, "RolloutAborted");
    expect(&machine, &["rollout", "promote", "web/api"], 0, "promoted");
    expect(&machine, &apply, 5, "stage 1 of 3");
    assert_eq!(started(&machine, "2"), ["127.0.0.1", "127.0.0.1"]);
    // A repair is not part of the rollout.
    assert_eq!(machine.run(&["stop", "web/api@127.0.0.1"]).0, 0);
    assert_eq!(machine.run(&["release", "web/api"]).0, 0);
    expect(&machine, &apply, 5, "stage 1 of 3");
    assert_eq!(started(&machine, "2").len(), 3);
}

#[test]
fn watch_continues_after_a_promotion() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", PAUSES);
    // Neither the interval nor a change at the target causes the pass.
    let _watch = machine.start(&["watch", "m", "--interval", "1h", "--listen", "127.0.0.1:0"], "watch.log");
    for count in 1..=3 {
        until("a stage is done", || started(&machine, "1").len() == count);
        if count < 3 {
            until("it is promoted", || machine.run(&["rollout", "promote", "web/api"]).0 == 0);
        }
    }
    assert_eq!(started(&machine, "1"), GROUPS.map(|(_, ip)| ip));
}

/// Batches of one whose soak never ends in a test.
const ENDLESS: &str = "{batch: 1, soak: 1h}";

#[test]
fn an_abort_ends_a_running_apply_where_it_is() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", "{}");
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    version(&machine, "2", ENDLESS);
    let mut apply = machine.start(&["apply", "m", "--yes", "--timeout", "2h"], "apply.log");
    until("the first batch soaks", || read_log(&machine, "apply.log").contains("soaking"));
    expect(&machine, &["rollout", "abort", "web/api", "--reason", "errors"], 0, "aborted");
    assert_eq!(apply.0.wait().expect("it ends").code(), Some(3));
    let log = read_log(&machine, "apply.log");
    assert!(log.contains("the rollout of this version was aborted"), "{log}");
    assert_eq!(started(&machine, "2").len(), 1, "{log}");
    expect(&machine, &["apply", "m", "--yes"], 3, "RolloutAborted");
    // Undo needs no end of the soak, either: it aborts the apply, and then has its lease.
    expect(&machine, &["rollout", "promote", "web/api"], 0, "promoted");
    let mut apply = machine.start(&["apply", "m", "--yes", "--timeout", "2h"], "again.log");
    until("the second batch soaks", || read_log(&machine, "again.log").matches("soaking").count() > 0);
    expect(&machine, &["rollout", "undo", "web/api", "--yes"], 0, "converged");
    assert_eq!(apply.0.wait().expect("it ends").code(), Some(3));
    assert_eq!(started(&machine, "1").len(), 3 + started(&machine, "2").len(), "each one is back");
}

#[test]
fn an_abort_ends_a_rollout_of_watch_until_it_is_promoted() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", "{}");
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    version(&machine, "2", ENDLESS);
    let _watch = machine.start(&["watch", "m", "--interval", "1h", "--listen", "127.0.0.1:0"], "watch.log");
    until("the first batch soaks", || read_log(&machine, "watch.log").contains("soaking"));
    expect(&machine, &["rollout", "abort", "web/api"], 0, "aborted");
    until("the others are held", || read_log(&machine, "watch.log").contains("RolloutAborted"));
    assert_eq!(started(&machine, "2").len(), 1);
    // The soak belongs to the rollout, not to the version.
    machine.edit("api", "soak: 1h", "soak: 0s");
    until("the new manifest is read", || {
        read_log(&machine, "watch.log").matches("read 3 instances").count() > 1
    });
    expect(&machine, &["rollout", "promote", "web/api"], 0, "promoted");
    until("the rollout continues", || started(&machine, "2").len() == 3);
}

/// The abort of a version stops its rollout, not the repair of the instances that have it.
#[test]
fn an_aborted_version_is_still_repaired() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", "{}");
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    version(&machine, "2", PAUSES);
    expect(&machine, &["apply", "m", "--yes"], 5, "stage 1 of 3");
    expect(&machine, &["rollout", "promote", "web/api"], 0, "promoted");
    expect(&machine, &["apply", "m", "--yes"], 5, "stage 2 of 3");
    expect(&machine, &["rollout", "abort", "web/api"], 0, "aborted");
    for ip in ["127.0.0.1", "127.0.0.2"] {
        assert_eq!(machine.run(&["stop", &format!("web/api@{ip}")]).0, 0);
    }
    assert_eq!(machine.run(&["release", "web/api"]).0, 0);
    // One after the other, with a soak: later steps begin after holds and decisions were read again.
    machine.edit("api", "pause: promoted", "batch: 1, soak: 2s");
    expect(&machine, &["apply", "m", "--yes"], 3, "RolloutAborted");
    assert_eq!(started(&machine, "2").len(), 4);
}

/// `watch` must not repeat what a person undid, also without batches.
#[test]
fn a_change_without_batches_can_be_aborted_and_undone() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", "{}");
    machine.edit("api", "rollout: {}\n", "");
    let apply = ["apply", "m", "--yes"];
    expect(&machine, &apply, 0, "converged");
    machine.edit("api", " 1 >>", " 2 >>");
    expect(&machine, &apply, 0, "converged");
    expect(&machine, &["rollout", "undo", "web/api", "--yes"], 0, "converged");
    assert_eq!(started(&machine, "1").len(), 6);
    expect(&machine, &apply, 3, "RolloutAborted");
    expect(&machine, &["rollout", "promote", "web/api"], 0, "promoted");
    expect(&machine, &apply, 0, "converged");
    assert_eq!(started(&machine, "2").len(), 6);
}

/// A controller that is killed at any step neither skips a pause nor starts an instance twice.
#[test]
fn a_killed_apply_keeps_the_pause() {
    let machine = Machine::new();
    let _up = system(&machine);
    let mut nth = 0;
    loop {
        nth += 1;
        assert!(nth < 200, "the apply never ends");
        let name = format!("v{nth}");
        version(&machine, &name, PAUSES);
        let mut apply = machine.command(&["apply", "m", "--yes"]);
        let status = apply.env("ABIDE_DIE_AFTER", nth.to_string()).output().expect("it runs").status;
        assert!(started(&machine, &name).len() <= 1, "{:?}", machine.effects());
        expect(&machine, &["apply", "m", "--yes"], 5, "stage 1 of 3 (first) is done");
        assert_eq!(started(&machine, &name), ["127.0.0.1"], "killed at {nth}");
        if status.code() == Some(5) {
            break;
        }
    }
    assert!(nth > 4, "only {nth} steps");
}

#[test]
fn max_unavailable_counts_instances_that_are_down() {
    let machine = Machine::new();
    let _up = system(&machine);
    let rollout = "{max_unavailable: 1}";
    version(&machine, "1", rollout);
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    let plan = |machine: &Machine| -> Value {
        serde_json::from_str(&expect(machine, &["plan", "m", "-o", "json"], 0, "waves")).expect("a plan")
    };
    version(&machine, "2", rollout);
    let planned = plan(&machine);
    let waves = planned["waves"].as_array().expect("waves").iter().map(|wave| wave.as_array().map(Vec::len));
    assert_eq!(waves.collect::<Option<Vec<_>>>(), Some(vec![1, 1, 1]));
    assert_eq!(machine.run(&["stop", "web/api@127.0.0.3"]).0, 0);
    let held = plan(&machine)["held"].clone();
    let reasons: BTreeSet<&str> =
        held.as_array().expect("a list").iter().filter_map(|one| one["reason"].as_str()).collect();
    assert_eq!(reasons, BTreeSet::from(["Hold", "MaxUnavailable"]), "{held}");
    assert_eq!(machine.run(&["release", "web/api"]).0, 0);
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    assert_eq!(started(&machine, "2").len(), 3);
}

#[test]
fn an_invalid_order_is_a_problem() {
    let machine = Machine::new();
    version(&machine, "1", "{order: [eu, nowhere], pause: promoted}");
    std::fs::write(
        machine.path("m/g.yaml"),
        "apiVersion: abide/v1\nkind: HostGroup\nmeta: {name: eu}\nhosts: [{ip: 127.0.0.1, bk_cloud_id: 0}]\n",
    )
    .expect("a file");
    machine.edit("api", "{group: us}, {group: eu}, {group: first}", "{group: eu}");
    expect(&machine, &["validate", "m"], 65, "names host group \"nowhere\", which no manifest defines");
    machine.edit("api", "[eu, nowhere]", "[eu, eu]");
    expect(&machine, &["validate", "m"], 65, "rollout.order names \"eu\" twice");
    machine.edit("api", "order: [eu, eu], ", "");
    expect(&machine, &["validate", "m"], 65, "rollout.pause needs `canary` or `order`");
}

/// Law: no wave makes more instances of a group unavailable than the rollout allows, with those that are down already.
#[test]
fn a_wave_makes_no_more_instances_unavailable_than_allowed() {
    let (waves, held) = (std::cell::Cell::new(0_usize), std::cell::Cell::new(0_usize));
    in_every_world(|world| {
        let all = BTreeSet::from_iter(hosts().into_iter().map(|host| host.key));
        let groups = vec![RolloutGroup { name: "all".to_owned(), hosts: all }];
        for want in world.desired.instances.values_mut() {
            let rollout = Rollout {
                groups: groups.clone(),
                max_unavailable: Some(Amount::Count(1)),
                ..Rollout::default()
            };
            Arc::make_mut(&mut want.origin).rollout = Some(rollout);
        }
        let (plan, observed) = (world.plan(), world.observe());
        held.set(
            held.get() + plan.held.iter().filter(|held| held.reason == HoldReason::MaxUnavailable).count(),
        );
        let runs =
            |key: &InstanceKey| observed.instances.get(key).is_some_and(|seen| seen.running == Some(true));
        let disturbs =
            |step: &&abide::model::Step| matches!(step.op, Op::Stop | Op::Kill | Op::Restart | Op::Reload);
        for wave in &plan.waves {
            let mut down: BTreeMap<&ProcessKey, BTreeSet<&InstanceKey>> = BTreeMap::new();
            for step in wave.steps.iter().filter(disturbs) {
                let Some(want) = world.desired.instances.get(&step.instance) else { continue };
                let is_service = want.spec.monitor.auto_type == AutoType::Resident;
                if is_service && want.origin.state.needs_start() && runs(&step.instance) {
                    down.entry(&want.origin.declared).or_default().insert(&step.instance);
                }
            }
            waves.set(waves.get() + down.len());
            for (process, instances) in down {
                assert!(
                    instances.len() <= 1,
                    "{process}: {instances:?} in\n{}{}",
                    shown(&plan),
                    drawn(world)
                );
            }
        }
    });
    assert!(waves.get() > 100 && held.get() > 100, "{} {}", waves.get(), held.get());
}

/// Law: no instance changes its version before every earlier group is promoted, and promotions complete every rollout.
#[test]
fn groups_change_in_order_and_promotions_complete_them() {
    let (waited, completed) = (std::cell::Cell::new(0_usize), std::cell::Cell::new(0_usize));
    in_every_world(|world| {
        world.count_budgets();
        let groups: Vec<RolloutGroup> = hosts()
            .into_iter()
            .map(|host| RolloutGroup { name: host.key.to_string(), hosts: BTreeSet::from([host.key]) })
            .collect();
        for want in world.desired.instances.values_mut() {
            let rollout = Rollout { groups: groups.clone(), pauses: true, ..Rollout::default() };
            Arc::make_mut(&mut want.origin).rollout = Some(rollout);
        }
        let mut stages: BTreeMap<ProcessKey, BTreeSet<usize>> = BTreeMap::new();
        let group =
            |key: &InstanceKey| groups.iter().position(|group| group.hosts.contains(&key.host)).unwrap_or(3);
        for (key, want) in &world.desired.instances {
            stages.entry(want.origin.declared.clone()).or_default().insert(group(key));
        }
        for _ in 0..5 {
            let plan = world.plan();
            for step in
                plan.steps().filter(|step| matches!(step.op, Op::Start | Op::Restart | Op::Stop | Op::Reload))
            {
                let Some(want) = world.desired.instances.get(&step.instance) else { continue };
                let stage =
                    stages[&want.origin.declared].iter().filter(|one| **one < group(&step.instance)).count();
                let promoted = world.rules.rollouts.get(&want.origin.declared).map_or(0, |one| one.promoted);
                let proc = world.fleet.procs().get(step.from.as_ref().unwrap_or(&step.instance));
                let has_version =
                    proc.is_some_and(|proc| proc.given.is_some()) && !want.origin.on_change.is_empty();
                let caps = world.rules.caps;
                let effects = EffectTable::of(&want.spec, &want.origin.on_change)
                    .without(|field| !caps.supports_field(field));
                let run = effects.revision(&want.spec).run;
                let same = |held: &abide::backend::sim::SimulatedSpec| {
                    effects.revision(&held.spec).run == run
                        || held.revision.is_some_and(|revision| revision.run == run)
                };
                let is_repair = has_version || proc.is_some_and(|proc| proc.given.as_ref().is_some_and(same));
                assert!(
                    stage <= promoted || is_repair,
                    "{} too early in\n{}{}",
                    step.instance,
                    shown(&plan),
                    drawn(world)
                );
            }
            for step in world.order(&plan) {
                world.execute_step(step);
            }
            let after = world.plan();
            waited.set(waited.get() + after.pauses.len());
            let reached: Vec<_> = after.pauses.iter().filter(|pause| pause.is_reached).cloned().collect();
            if reached.is_empty() {
                break;
            }
            completed.set(completed.get() + reached.len());
            for pause in reached {
                let progress = RolloutProgress { id: pause.id, promoted: pause.stage + 1, is_aborted: false };
                world.rules.rollouts.insert(pause.process, progress);
            }
        }
        let last = world.plan();
        let open: BTreeSet<&ProcessKey> =
            last.pauses.iter().filter(|pause| pause.is_reached).map(|pause| &pause.process).collect();
        assert!(open.is_empty(), "{open:?} in\n{}", shown(&last));
        let waits = last.held.iter().any(|held| held.reason == HoldReason::AwaitingPromotion);
        assert_eq!(waits, !last.pauses.is_empty());
    });
    assert!(waited.get() > 100 && completed.get() > 50, "{} {}", waited.get(), completed.get());
}
