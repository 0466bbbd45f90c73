//! Scheduled processes: history of runs over restarts of the agent, no overlap, and the next runs.

use serde_json::{Value, json};

use crate::process_tree::START;
use crate::support::until;
use crate::system::{System, lines};

/// A process that runs every second.
fn every_second(system: &System, name: &str, start: &str) -> Value {
    let mut spec = system.spec(name, start);
    spec["monitor_policy"]["auto_type"] = json!(0);
    spec["job"] = json!({"cycle_time": 1});
    spec
}

fn runs(system: &System, name: &str) -> Vec<Value> {
    system.process(name)["runs"].as_array().cloned().unwrap_or_default()
}

#[test]
fn the_last_runs_are_kept_with_start_duration_and_exit() {
    let mut system = System::new();
    let spec = every_second(&system, "job", "echo run >> job-runs; sleep 0.3; exit 3");
    assert_eq!(system.operate("job", START, &spec).0, 0);
    until("three runs have ended", || {
        runs(&system, "job").iter().filter(|run| run["running"] == false).count() >= 3
    });
    let first = runs(&system, "job").pop().expect("a run");
    assert_eq!((&first["code"], &first["signal"], &first["skipped"]), (&json!(3), &Value::Null, &json!(0)));
    let duration = first["duration"].as_f64().expect("a duration");
    assert!((0.3..5.0).contains(&duration), "{first}");
    // The history outlives the agent, and goes on.
    let known: Vec<Value> = runs(&system, "job").into_iter().filter(|run| run["running"] == false).collect();
    system.kill_agent();
    system.start_agent();
    until("another run", || runs(&system, "job").len() > known.len() + 1);
    let all = runs(&system, "job");
    assert!(known.iter().all(|run| all.contains(run)), "{all:?} {known:?}");
    let starts: Vec<&str> = all.iter().filter_map(|run| run["start"].as_str()).collect();
    assert!(starts.iter().rev().is_sorted(), "newest first: {starts:?}");
    // Each run is counted once, also the one that was in progress when the agent was killed.
    let begun = lines(&system.path("job-runs"));
    assert!(all.len().abs_diff(begun) <= 1, "{} entries of {begun} runs", all.len());
    until("only the last are kept", || {
        runs(&system, "job").len() == 20 && lines(&system.path("job-runs")) > 21
    });
}

#[test]
fn a_run_that_is_due_while_another_is_in_progress_is_skipped_and_counted() {
    let mut system = System::new();
    let spec =
        every_second(&system, "long", "echo begin >> long-runs; while [ ! -e go ]; do sleep 0.05; done");
    assert_eq!(system.operate("long", START, &spec).0, 0);
    let started = system.process("long")["started"].clone();
    assert!(started.is_string(), "{started}");
    until("a skipped run", || {
        runs(&system, "long").first().is_some_and(|run| run["skipped"].as_u64() >= Some(2))
    });
    assert_eq!((runs(&system, "long").len(), lines(&system.path("long-runs"))), (1, 1), "no overlap");
    // The next agent finds the run in progress, and starts no second one.
    system.kill_agent();
    system.start_agent();
    let skipped = runs(&system, "long")[0]["skipped"].as_u64();
    until("another skipped run", || runs(&system, "long")[0]["skipped"].as_u64() > skipped);
    assert_eq!(system.process("long")["started"], started, "a skipped run starts nothing");
    assert_eq!((runs(&system, "long").len(), lines(&system.path("long-runs"))), (1, 1), "no overlap");
    std::fs::write(system.path("go"), "").expect("a file");
    until("the next run", || lines(&system.path("long-runs")) >= 2);
    until("it has ended", || {
        runs(&system, "long").last().is_some_and(|run| run["running"] == false && run["code"] == 0)
    });
}

#[test]
fn a_scheduled_process_has_its_next_three_runs() {
    let system = System::new();
    let mut spec = system.spec("daily", "true");
    spec["monitor_policy"]["auto_type"] = json!(0);
    spec["monitor_policy"]["crontab_rule"] = json!("30 3 * * *");
    spec["monitor_policy"]["crontab_zone"] = json!("Asia/Tokyo");
    assert_eq!(system.operate("daily", 3, &spec).0, 0);
    until("next runs", || {
        system.process("daily")["next_runs"].as_array().is_some_and(|runs| runs.len() == 3)
    });
    let row = system.process("daily");
    let next: Vec<&str> =
        row["next_runs"].as_array().expect("times").iter().filter_map(Value::as_str).collect();
    assert!(next.iter().all(|time| time.ends_with("T18:30:00Z")) && next.is_sorted(), "{next:?}");
    assert_eq!(row["next"].as_str(), Some(next[0]));
    // A resident process has no schedule.
    assert_eq!(system.operate("a", START, &system.spec("a", "exec sleep 1000")).0, 0);
    let row = system.process("a");
    assert!(row.get("runs").is_none() && row.get("next_runs").is_none(), "{row}");
}
