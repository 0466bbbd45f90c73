//! Instance history: exits, restarts and failed starts of real processes, over kills of the agent.

use std::net::TcpListener;

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::process_tree::{START, STOP, replaced};
use crate::support::{needs, needs_root, test_user, until};
use crate::system::{System, is_alive, kill};

const CHECK_FAILED: i64 = 836;
const COMMAND_FAILED: i64 = 65535;

fn exits(system: &System, name: &str) -> Vec<(String, Value, Value)> {
    let row = system.process(name);
    let exits = row["exits"].as_array().cloned().unwrap_or_default();
    let word = |exit: &Value| exit["reason"].as_str().unwrap_or_default().to_owned();
    exits.iter().map(|exit| (word(exit), exit["code"].clone(), exit["signal"].clone())).collect()
}

/// All rows of an instance, also of a failed start.
fn attempts(system: &System, query: &str) -> Vec<Value> {
    let page = system.server.call("GET", &format!("/api/abide/v1/processes?attempts=1{query}"), json!({}));
    page["data"]["items"].as_array().cloned().expect("items")
}

#[test]
fn restarts_and_exits_survive_relaunches_and_kills_of_the_agent() {
    let mut system = System::new();
    let spec = system.spec("a", "exec sleep 1000");
    assert_eq!(system.operate("a", START, &spec).0, 0);
    let first = system.pid("a").expect("a pid");
    assert_eq!((system.process("a")["restarts"].clone(), exits(&system, "a")), (json!(0), vec![]));
    kill(first, "KILL");
    let second = replaced(&system, "a", first);
    let crashed = |signal: i32| ("crashed".to_owned(), Value::Null, json!(signal));
    assert_eq!(exits(&system, "a"), [crashed(9)]);
    let row = system.process("a");
    assert_eq!((&row["restarts"], &row["last_exit"]["pid"]), (&json!(1), &json!(first)), "{row}");

    // Neither the count nor the exits depend on this agent.
    system.kill_agent();
    system.start_agent();
    until("it is reported", || system.pid("a") == Some(second));
    assert_eq!((system.process("a")["restarts"].clone(), exits(&system, "a")), (json!(1), vec![crashed(9)]));
    system.kill_agent();
    kill(second, "KILL");
    until("it ends", || !is_alive(second));
    system.start_agent();
    let third = replaced(&system, "a", second);
    let unknown = ("unknown".to_owned(), Value::Null, Value::Null);
    assert_eq!(exits(&system, "a"), [unknown.clone(), crashed(9)]);
    assert_eq!(system.process("a")["exits"][0]["detail"], "ended while no agent ran");

    assert_eq!(system.operate("a", STOP, &Value::Null).0, 0);
    let row = system.process("a");
    assert_eq!((&row["restarts"], &row["last_exit"]["pid"]), (&json!(2), &json!(third)), "{row}");
    assert_eq!(row["last_exit"]["reason"], "stopped");
    assert_eq!(row["last_exit"]["detail"], "operation stop by app all");
    // A start does not reset them.
    assert_eq!(system.operate("a", START, &Value::Null).0, 0);
    assert_eq!(exits(&system, "a").len(), 3);
    assert_eq!(exits(&system, "a")[1..], [unknown, crashed(9)]);
    // A registration begins with none.
    assert_eq!(system.operate("a", STOP, &Value::Null).0, 0);
    let body =
        json!({"meta": {"namespace": "web", "name": "a"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
    assert_eq!(system.server.gse("unregister_proc_info", body)["result"], true);
    assert_eq!(system.operate("a", START, &spec).0, 0);
    let row = system.process("a");
    assert_eq!((&row["restarts"], &row["exits"]), (&json!(0), &json!([])), "{row}");
}

/// A program that binds a port, and prints the reason of a failure.
const SERVER: &str = "import http.server, sys\n\
    http.server.ThreadingHTTPServer((\"127.0.0.1\", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()\n";

#[test]
fn the_message_of_a_failed_start_has_the_last_lines_of_its_output() {
    if !needs("python3") {
        return;
    }
    let system = System::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    std::fs::write(system.path("server.py"), SERVER).expect("a script");
    let start = format!("exec python3 server.py {port}");
    for has_log in [true, false] {
        let name = if has_log { "logged" } else { "silent" };
        let mut spec = system.spec(name, &start);
        spec["monitor_policy"]["start_check_secs"] = json!(10);
        if has_log {
            // The output of an earlier run is not that of this attempt.
            std::fs::create_dir_all(system.path("log")).expect("a folder");
            std::fs::write(system.path("log/logged.log"), "an earlier run\n").expect("a log");
        } else {
            spec["identity"].as_object_mut().expect("an object").remove("log_path");
        }
        let (code, message) = system.operate(name, START, &spec);
        assert_eq!(code, CHECK_FAILED, "{message}");
        assert!(message.contains("; output: ") && message.contains("Address already in use"), "{message}");
        assert!(!message.contains("an earlier run") && !message.contains('\n'), "{message}");
        let row = attempts(&system, &format!("&name={name}")).remove(0);
        assert_eq!(row["message"].as_str(), Some(message.as_str()));
    }
    // A start that succeeds ends the row of the attempt, and the captured output is bounded from then on.
    drop(taken);
    let mut spec = system.spec("silent", "yes | head -c 8000000; exec sleep 1000");
    spec["identity"].as_object_mut().expect("an object").remove("log_path");
    assert_eq!(system.operate("silent", START, &spec).0, 0);
    let rows = attempts(&system, "&name=silent");
    assert_eq!((rows.len(), &rows[0]["registered"], &rows[0]["message"]), (1, &json!(true), &json!("")));
}

#[test]
fn the_message_of_a_failed_daemon_start_has_the_last_lines_of_its_output() {
    if !needs("nginx") || !needs_root() {
        return;
    }
    let system = System::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let at = |name: &str| system.path(name).display().to_string();
    let config = format!(
        "pid {};\nerror_log {};\nevents {{}}\nhttp {{ access_log off; server {{ listen 127.0.0.1:{port}; }} }}\n",
        at("run/nginx.pid"),
        at("error.log")
    );
    std::fs::write(system.path("nginx.conf"), config).expect("a file");
    let mut spec = system.spec("nginx", &format!("nginx -c {} -p {}", at("nginx.conf"), at("")));
    spec["control"]["start_mode"] = json!("daemon");
    spec["identity"]["proc_name"] = json!("nginx");
    let (code, message) = system.operate("nginx", START, &spec);
    assert_eq!(code, COMMAND_FAILED, "{message}");
    assert!(
        message.starts_with("start_cmd ended with 1: ") && message.contains("Address already in use"),
        "{message}"
    );
    assert!(!message.contains('\n'), "{message}");
    assert_eq!(attempts(&system, "")[0]["message"].as_str(), Some(message.as_str()));
    // A start_cmd that succeeds and leaves no process.
    let mut spec = system.spec("gone", "echo bind: Address already in use >&2");
    spec["control"]["start_mode"] = json!("daemon");
    let (code, message) = system.operate("gone", START, &spec);
    assert_eq!(code, CHECK_FAILED, "{message}");
    assert!(message.ends_with("; output: bind: Address already in use"), "{message}");
}

#[test]
fn output_in_a_message_forges_no_line_and_shows_no_secret() {
    let system = System::new();
    let script = r#"printf 'first\n\033[31mred\r\nkey=%s\n' "$KEY"; exit 3"#;
    for has_log in [true, false] {
        let mut spec = system.spec("a", script);
        spec["monitor_policy"]["start_check_secs"] = json!(10);
        spec["env"] = json!({"KEY": {"value": "hunter2-secret", "secret": true}});
        if !has_log {
            spec["identity"].as_object_mut().expect("an object").remove("log_path");
        }
        let (code, message) = system.operate("a", START, &spec);
        let expected = "process ended with code 3 within 10 s; output: first | \\u{1b}[31mred | key=(secret)";
        assert_eq!((code, message.as_str()), (CHECK_FAILED, expected));
        let row = attempts(&system, "&name=a").remove(0);
        assert!(!row.to_string().contains("hunter2"), "{row}");
    }
}

/// A log that its user cannot read is not shown, though the agent could read it.
#[test]
fn a_log_is_read_with_the_rights_of_its_user() {
    use std::os::unix::fs::PermissionsExt;
    let Some(user) = test_user() else { return };
    let system = System::new();
    let mut spec = system.spec_of(&user, "a", "echo told; exit 3");
    spec["monitor_policy"]["start_check_secs"] = json!(10);
    let (_, message) = system.operate("a", START, &spec);
    assert!(message.ends_with("; output: told"), "{message}");
    let log = system.home(&user).join("log/a.log");
    std::fs::set_permissions(&log, std::fs::Permissions::from_mode(0o222)).expect("a mode");
    let (_, message) = system.operate("a", START, &spec);
    assert!(message.ends_with("within 10 s"), "{message}");
}

#[test]
fn the_first_attempt_is_listed_on_request_and_changes_no_other_answer() {
    let mut system = System::new();
    let mut spec = system.spec("a", "exit 3");
    spec["monitor_policy"]["start_check_secs"] = json!(10);
    assert_eq!(system.operate("a", START, &spec).0, CHECK_FAILED);
    for restarted in [false, true] {
        if restarted {
            system.kill_agent();
            system.start_agent();
        }
        assert_eq!(system.process("a"), Value::Null, "nothing is registered");
        assert_eq!(system.facts("a"), (false, false, false));
        let rows = attempts(&system, "");
        let facts = ["registered", "hosted", "running"].map(|fact| rows[0][fact] == true);
        assert_eq!((rows.len(), facts), (1, [false; 3]), "{rows:?}");
        assert_eq!((&rows[0]["health"], &rows[0]["revision"]), (&json!("Failed"), &Value::Null));
        assert_eq!(rows[0]["exits"][0]["reason"], "crashed");
        assert_eq!(rows[0]["spec"]["control"]["start_cmd"], "exit 3");
    }
    // Filters and pages include it, after the registered processes.
    assert_eq!(system.operate("b", START, &system.spec("b", "exec sleep 1000")).0, 0);
    assert_eq!(attempts(&system, "&namespace=web&name=a").len(), 1);
    assert_eq!(attempts(&system, "&namespace=other").len(), 0);
    let page = |after: &str| {
        let path = format!("/api/abide/v1/processes?attempts=1&limit=1{after}");
        let page = system.server.call("GET", &path, json!({}));
        (page["data"]["items"][0]["name"].clone(), page["data"]["more"].as_str().map(str::to_owned))
    };
    let (first, more) = page("");
    let more = more.expect("a second page").replace('/', "%2F").replace(':', "%3A");
    assert_eq!((first, page(&format!("&after={more}")).0), (json!("b"), json!("a")));
    // The registration ends the row of the attempt.
    let body = json!({"meta": {"namespace": "web", "name": "a"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}], "spec": spec});
    assert_eq!(system.server.gse("register_proc_info", body)["result"], true);
    assert_eq!(
        attempts(&system, "&name=a").iter().map(|row| row["registered"] == true).collect::<Vec<_>>(),
        [true]
    );
}

/// The state of an instance that is not registered goes with its last row: the agent keeps nothing of it.
#[test]
fn a_failed_first_start_is_forgotten_after_a_day() {
    let mut system = System::new();
    let mut spec = system.spec("a", "exit 3");
    spec["monitor_policy"]["start_check_secs"] = json!(10);
    assert_eq!(system.operate("a", START, &spec).0, CHECK_FAILED);
    assert_eq!(system.stored("proc/").len(), 1);
    system.kill_agent();
    let almost_a_day = (24 * 3600 - 15) * 1000;
    system.start_agent_with(&[], &[("ABIDE_CLOCK_SHIFT_MS", &almost_a_day.to_string())]);
    assert_eq!((attempts(&system, "").len(), system.stored("proc/").len()), (1, 1));
    until("the failed start is forgotten", || attempts(&system, "").is_empty());
    until("nothing is stored", || system.stored("proc/").is_empty());
    // The name can be used again.
    assert_eq!(system.operate("a", START, &system.spec("a", "exec sleep 1000")).0, 0);
    assert_eq!(system.facts("a"), (true, true, true));
}

#[test]
fn a_failed_first_start_is_visible_and_planned_again() {
    let machine = Machine::new();
    let manifest = machine
        .manifest("web")
        .control("start_mode", "foreground")
        .monitor("start_check_secs", 5)
        .start_cmd("echo bind: Address already in use; exit 1");
    machine.declare("web", manifest);
    let (code, _, err) = machine.apply(&[]);
    assert_eq!(code, 3, "{err}");
    let row = machine.rows().remove("web").expect("a row");
    assert!(row["message"].as_str().expect("text").contains("Address already in use"), "{row}");
    assert_eq!((&row["registered"], &row["sync"]), (&json!(false), &json!("OutOfSync")), "{row}");
    let (_, text, _) = machine.run(&["get", "processes"]);
    assert!(text.contains("Address already in use"), "{text}");
    let (_, wide, _) = machine.run(&["get", "processes", "-o", "wide"]);
    assert!(wide.contains("LAST_EXIT") && wide.contains("crashed: code 1 at "), "{wide}");
    let (code, text, err) = machine.run(&["describe", "web/web"]);
    assert!(
        code == 0 && text.contains("Address already in use") && text.contains("reason: crashed"),
        "{text}{err}"
    );
    let (code, log, err) = machine.run(&["logs", "web/web"]);
    assert!(code == 0 && log.contains("Address already in use"), "{log}{err}");
    let (_, orphans, _) = machine.run(&["get", "orphans"]);
    assert!(!orphans.contains("web"), "{orphans}");
    // The plan is that of an instance that is not there, from the target and from the rows.
    let plan = |more: &[&str]| {
        let args = [&["plan", "m", "-o", "json"], more].concat();
        let (_, out, err) = machine.run(&args);
        let plan: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"));
        (plan["waves"].clone(), plan["held"].clone())
    };
    let planned = plan(&[]);
    assert_eq!(planned.0[0][0]["op"], "start");
    let (_, rows, _) = machine.run(&["get", "processes", "-o", "json"]);
    std::fs::write(machine.path("rows.json"), rows).expect("a file");
    assert_eq!(plan(&["--observed", "rows.json"]), planned);
    // Corrected, it starts.
    machine.edit("web", "exit 1", "exec sleep 1000");
    assert_eq!(machine.apply(&[]).0, 0);
    let row = machine.rows().remove("web").expect("a row");
    assert_eq!(
        (&row["registered"], &row["message"], &row["restarts"]),
        (&json!(true), &json!(""), &json!(0))
    );
}
