//! Answers at the terminal: the table of processes with its reasons, the story of an instance, and the meaning of words.

use serde_json::Value;

use crate::fixtures::machine::Machine;
use crate::support::until;

#[test]
fn the_table_folds_alike_instances_and_names_reasons() {
    let machine = Machine::new();
    machine.process("api", "1", "");
    machine.several("w", "1");
    assert_eq!(machine.apply(&[]).0, 0);
    let lines = |args: &[&str]| -> Vec<String> {
        let (code, out, err) = machine.run(&[&["get", "processes"], args].concat());
        assert_eq!(code, 0, "{err}");
        out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    let all = lines(&[]);
    assert_eq!(all[0], "NAMESPACE NAME HOST SYNC HEALTH STATE PID RESTARTS AGE MESSAGE");
    assert_eq!(all.len(), 3, "{all:?}");
    assert!(all[2].starts_with("web w (2/2) 0:127.0.0.1 InSync "), "{all:?}");
    assert_eq!(lines(&["--expand"]).len(), 4);
    assert_eq!(machine.run(&["get", "process", "-o", "name"]).1.lines().count(), 3, "the singular works");
    // An instance that differs has a line of its own, with the reason of its hold.
    assert_eq!(machine.run(&["stop", "web/w_2", "--reason", "lunch"]).0, 0);
    let all = lines(&[]);
    let held = all.iter().find(|line| line.starts_with("web w_2 ")).unwrap_or_else(|| panic!("{all:?}"));
    assert!(held.contains(" Held ") && held.contains("Hold: "), "{held}");
    let (_, out, _) = machine.run(&["get", "processes", "-o", "json", "--sort", "host"]);
    let rows: Vec<Value> = serde_json::from_str(&out).expect("rows");
    let held = rows.iter().find(|row| row["name"] == "w_2").expect("a row");
    assert!(held["why"].as_str().is_some_and(|why| why.starts_with("Hold")), "{held}");
    assert!(rows.iter().all(|row| row["name"] == "w_2" || row.get("why").is_none()), "{out}");
}

#[test]
fn the_story_of_an_instance_is_in_order_of_time() {
    let machine = Machine::new();
    machine.process("api", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let pid = machine.rows()["api"]["pid"].as_i64().expect("a pid");
    assert!(
        std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill").success()
    );
    let story = || -> Value {
        let (code, out, err) = machine.run(&["why", "web/api", "-o", "json"]);
        assert_eq!(code, 0, "{err}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    };
    until("it runs again", || story()[0]["process"]["restarts"] == 1 && story()[0]["state"] == "running");
    let all = story();
    let events = all[0]["events"].as_array().expect("events").clone();
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["kind"].as_str()).collect();
    assert_eq!(kinds.last(), Some(&"start"), "{all}");
    let exit = events.iter().find(|event| event["kind"] == "exit").expect("an exit");
    assert_eq!(exit["text"], format!("crashed by signal 9 (pid {pid})"));
    for kind in ["manifest", "registered", "operation"] {
        assert!(kinds.contains(&kind), "{kind}: {all}");
    }
    assert!(all[0]["declared"].as_str().is_some_and(|at| at.contains("m/api.yaml:")), "{all}");
    assert_eq!(all[0]["next_action"], Value::Array(Vec::new()));
    let (_, text, _) = machine.run(&["why", "web/api"]);
    for part in ["start Done", "crashed by signal 9", "running (pid ", "nothing to do"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // The hold is the reason of the next action. A reading verb reports an unknown name and succeeds.
    assert_eq!(machine.run(&["stop", "web/api", "--reason", "lunch"]).0, 0);
    let (_, text, _) = machine.run(&["why", "web/api"]);
    assert!(text.contains("held: Hold") && text.contains("stopped"), "{text}");
    let (code, out, err) = machine.run(&["why", "web/none", "-o", "json"]);
    assert_eq!((code, out.as_str()), (0, "[]\n"), "{err}");
    assert!(err.contains("has no process web/none"), "{err}");
    let (_, text, _) = machine.run(&["describe", "web/api"]);
    let summary: Vec<&str> = text.lines().take(4).map(str::trim).collect();
    assert!(summary[1].starts_with("stopped") && summary[3].starts_with("next: held: Hold"), "{text}");
    let (_, text, _) = machine.run(&["history"]);
    assert!(text.starts_with("WHEN ") && text.contains("1 start") && text.contains("converged"), "{text}");
}

#[test]
fn words_and_codes_are_explained() {
    let machine = Machine::new();
    let explain = |word: &str| machine.run(&["explain", word]);
    let (code, text, _) = explain("HostUnknown");
    assert!(code == 0 && text.contains("held reason") && text.contains("abide get hosts"), "{text}");
    assert!(explain("unknown").1.contains("SYNC") && explain("unknown").1.contains("HEALTH"));
    assert!(explain("828").1.contains("already running"));
    assert!(explain("69").1.contains("unreachable"));
    assert!(explain("StalePlan").1.contains("Plan again"));
    assert!(explain("words").1.lines().count() > 40);
    let (code, _, err) = explain("HostUnknwn");
    assert!(code == 64 && err.contains("did you mean HostUnknown?"), "{code} {err}");
    assert!(explain("start_check_secs").1.contains("monitor_policy"), "a field is not a word");
}
