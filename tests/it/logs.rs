//! Logs: tail, time, follow and rights of log files, through a gateway and its agents.

use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use crate::apply::{KillOnDrop, Machine};
use crate::fixtures::workspace::Workspace;
use crate::server::{Lines, Server};
use crate::support::{test_user, until};
use crate::system::{HOST, System, kill, lines};

const APP: &str = "Authorization: Basic YWxsOnMzY3JldA==\r\n";

fn open(server: &Server, name: &str, query: &str) -> (u16, Lines) {
    server.stream(&format!("/api/abide/v1/logs?namespace=web&name={name}&host={HOST}{query}"), APP)
}

/// The text of a log that ends, or its error.
fn read(server: &Server, name: &str, query: &str) -> Result<String, String> {
    let (status, mut stream) = open(server, name, query);
    assert_eq!(status, 200);
    let mut text = String::new();
    while let Some(line) = stream.next() {
        if let Some(reason) = line["reason"].as_str() {
            return Err(format!("{reason}: {}", line["error"].as_str().expect("a message")));
        }
        text.push_str(line["text"].as_str().unwrap_or_default());
        if line["end"] == true {
            return Ok(text);
        }
    }
    panic!("the stream ended without an end line after {text:?}");
}

/// Reads a follow until its text is the expected one.
fn follow_until(stream: &mut Lines, expected: &str) {
    let mut text = String::new();
    while text != expected {
        let line = stream.next().unwrap_or_else(|| panic!("the stream ended after {text:?}"));
        assert!(line["error"].is_null(), "{line}");
        text.push_str(line["text"].as_str().unwrap_or_default());
        assert!(expected.starts_with(&text), "{text:?} instead of {expected:?}");
    }
}

fn append(path: &Path, text: &str) {
    let mut file = std::fs::File::options().append(true).create(true).open(path).expect("a log");
    file.write_all(text.as_bytes()).expect("it is written");
}

fn started(system: &System, name: &str) -> std::path::PathBuf {
    assert_eq!(system.operate(name, 0, &system.spec(name, "exec sleep 1000")).0, 0);
    system.path(&format!("log/{name}.log"))
}

#[test]
fn a_log_is_read_whole_or_from_the_end_or_since_a_time() {
    let system = System::new();
    let log = started(&system, "app");
    append(&system.path("log/app.log.2"), "2025-11-18T08:00:00Z one\n2025-11-18T09:00:00Z two\n");
    append(&system.path("log/app.log.1"), "2025-11-18T10:00:00Z three\n");
    append(&log, "2025-11-18T11:00:00Z four\n  more of four\n2025-11-18T12:00:00Z five");
    let all = read(&system.server, "app", "").expect("a log");
    assert_eq!(all.lines().count(), 6);
    assert!(all.starts_with("2025-11-18T08") && all.ends_with("five"), "rotated files come first: {all}");
    for lines in [0, 1, 2, 4, 5, 6, 99] {
        let tail = read(&system.server, "app", &format!("&tail={lines}")).expect("a log");
        let expected: Vec<&str> = all.lines().rev().take(lines).collect();
        assert_eq!(tail.lines().rev().collect::<Vec<_>>(), expected, "{lines}");
    }
    for (since, first) in
        [("2025-11-18T08:30:00Z", "two"), ("2025-11-18T10:30:00Z", "four"), ("2025-11-18T12:00:00Z", "five")]
    {
        let text = read(&system.server, "app", &format!("&since={since}")).expect("a log");
        assert!(text.lines().next().is_some_and(|line| line.ends_with(first)), "{since}: {text}");
        assert!(text.ends_with("five"), "{since}: {text}");
    }
    let both = read(&system.server, "app", "&since=2025-11-18T08:30:00Z&tail=1").expect("a log");
    assert_eq!(both, "2025-11-18T12:00:00Z five");
    // A log of several chunks, with bytes that are not text and lines longer than a chunk.
    let long = format!("{}\n{}", "é".repeat(200_000), "x\n".repeat(300_000));
    std::fs::write(&log, [long.as_bytes(), b"\xff\n"].concat()).expect("it is written");
    let text = read(&system.server, "app", "&tail=300002").expect("a log");
    assert!(text == format!("{long}\u{fffd}\n"), "{} of {} bytes", text.len(), long.len());
}

/// The folder of this agent is a relative path, and its processes have other working folders.
#[test]
fn a_process_without_paths_has_its_files_in_the_folder_of_the_agent() {
    let mut system = System::new();
    let mut spec = system.spec("app", "echo up; exec sleep 1000");
    for field in ["pid_path", "log_path"] {
        spec["identity"].as_object_mut().expect("fields").remove(field);
    }
    assert_eq!(system.operate("app", 0, &spec), (0, "success".to_owned()), "{}", system.log());
    let pid = system.pid("app").expect("a pid");
    let files = system.path(&format!("agent/processes/{HOST}:web:app"));
    let named = std::fs::read_to_string(files.join("process.pid")).expect("a pid file");
    assert_eq!(named.trim(), pid.to_string());
    until("its line is logged", || read(&system.server, "app", "").is_ok_and(|text| text == "up\n"));
    // The next agent finds the same files.
    system.kill_agent();
    system.start_agent();
    kill(pid, "KILL");
    until("it is back", || read(&system.server, "app", "").is_ok_and(|text| text == "up\nup\n"));
}

#[test]
fn an_unreadable_log_has_a_reason() {
    let system = System::new();
    let unknown = read(&system.server, "none", "").expect_err("no process");
    assert!(unknown.starts_with("unknown_process: "), "{unknown}");
    let log = started(&system, "app");
    std::fs::remove_file(&log).expect("it is removed");
    let missing = read(&system.server, "app", "").expect_err("no file");
    assert!(missing.starts_with("no_log: ") && missing.contains("app.log does not exist yet"), "{missing}");
    symlink("/etc/shadow", &log).expect("a link");
    let link = read(&system.server, "app", "").expect_err("a link");
    assert!(link.starts_with("unreadable: ") && link.contains("symbolic link"), "{link}");
    let (status, _) = open(&system.server, "app/../x", "");
    assert_eq!(status, 200, "an envelope with an error");
    let wrong =
        system.server.send("GET", "/api/abide/v1/logs?namespace=web&name=app&host=nowhere", APP, b"").1;
    assert!(wrong.contains("host is missing or not CLOUD:IP"), "{wrong}");
}

#[test]
fn a_follow_continues_after_rotation_relaunch_and_a_new_agent() {
    let mut system = System::new();
    let spec = system.spec("app", "echo up; exec sleep 1000");
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let log = system.path("log/app.log");
    let (_, mut follow) = open(&system.server, "app", "&follow=1");
    follow_until(&mut follow, "up\n");
    // A line without its end is not shown before it is complete.
    append(&log, "par");
    append(&log, "tial\nlast of the old file\n");
    std::fs::rename(&log, system.path("log/app.log.1")).expect("a rotation");
    append(&system.path("log/app.log.1"), "written after the rotation\n");
    append(&log, "first of the new file\n");
    follow_until(
        &mut follow,
        "partial\nlast of the old file\nwritten after the rotation\nfirst of the new file\n",
    );
    // The log is truncated in place.
    std::fs::write(&log, "short\n").expect("it is written");
    follow_until(&mut follow, "short\n");
    kill(system.pid("app").expect("a pid"), "KILL");
    follow_until(&mut follow, "up\n");
    system.kill_agent();
    append(&log, "written without an agent\n");
    let notice = follow.next().expect("a line");
    assert!(notice["notice"].as_str().is_some_and(|text| text.contains("not connected")), "{notice}");
    system.start_agent();
    follow_until(&mut follow, "written without an agent\n");
}

#[test]
fn the_log_of_another_user_is_read_with_that_users_rights() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let spec = system.spec_of(&user, "app", "umask 077; echo own line; exec sleep 1000");
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let home = system.home(&user);
    let log = home.join("log/app.log");
    until("it is written", || lines(&log) == 1);
    std::fs::set_permissions(&log, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    std::fs::set_permissions(home.join("log"), std::fs::Permissions::from_mode(0o700)).expect("a mode");
    assert_eq!(read(&system.server, "app", "").as_deref(), Ok("own line\n"));
    // A file of root in the user's folder, as a hard link or a replaced log would be: the user cannot read it.
    std::fs::write(&log, "root's\n").expect("it is written");
    chown(&log, Some(0), Some(0)).expect("root's");
    let denied = read(&system.server, "app", "").expect_err("root's file");
    assert!(denied.starts_with("unreadable: ") && denied.contains("as user \"abide-test\""), "{denied}");
    let secret = system.path("secret");
    std::fs::write(&secret, "secret\n").expect("it is written");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    for name in ["app.log", "app.log.1"] {
        std::fs::remove_file(home.join("log").join(name)).ok();
        symlink(&secret, home.join("log").join(name)).expect("a link");
    }
    let linked = read(&system.server, "app", "").expect_err("a link");
    assert!(!linked.contains("secret\n"), "{linked}");
    std::fs::remove_file(&log).expect("it is removed");
    std::fs::write(&log, "mine\n").expect("it is written");
    chown(&log, Some(user.uid), Some(user.gid)).expect("the user's");
    assert_eq!(read(&system.server, "app", "").as_deref(), Ok("mine\n"), "a linked rotated file is left out");
}

/// Apps for tests of namespaces and owners.
fn restricted() -> System {
    let folder = Workspace::new();
    std::fs::write(folder.path().join("token"), "token\n").expect("a file");
    let apps = "apps: [{code: all, secret: s3cret}, {code: db, secret: s3cret, namespaces: [db]}, {code: red, secret: s3cret, owners: [red]}]\n";
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(10), apps, "* token\n");
    let mut system = System { folder, server, agent: None };
    system.start_agent();
    system
}

#[test]
fn an_app_reads_only_logs_of_its_namespaces() {
    let system = restricted();
    append(&started(&system, "app"), "a line\n");
    let path = format!("/api/abide/v1/logs?namespace=web&name=app&host={HOST}");
    let db = "Authorization: Basic ZGI6czNjcmV0\r\n";
    let answer: Value = serde_json::from_str(&system.server.send("GET", &path, db, b"").1).expect("JSON");
    assert_eq!((&answer["result"], &answer["code"]), (&json!(false), &json!(1_900_403)), "{answer}");
    assert_eq!(system.server.send("GET", &path, "", b"").0, 401);
    assert_eq!(read(&system.server, "app", "").as_deref(), Ok("a line\n"));
}

/// The owner of a process may change while its log is followed.
#[test]
fn a_follow_ends_when_the_process_gets_another_owner() {
    let system = restricted();
    let spec = system.spec("app", "echo up; exec sleep 1000");
    let of = |owner: &str| {
        let hosts = json!([{"ip": "127.0.0.1", "bk_cloud_id": 0}]);
        json!({"meta": {"namespace": "web", "name": "app", "labels": {"abide_owner": owner}}, "hosts": hosts, "spec": spec})
    };
    assert_eq!(system.server.gse("register_proc_info", of("red"))["result"], true);
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let path = format!("/api/abide/v1/logs?namespace=web&name=app&host={HOST}&follow=1");
    let (status, mut follow) = system.server.stream(&path, "Authorization: Basic cmVkOnMzY3JldA==\r\n");
    assert_eq!(status, 200);
    follow_until(&mut follow, "up\n");
    let moved = system.server.gse("update_proc_info", of("blue"));
    assert_eq!(moved["result"], true, "{moved}");
    append(&system.path("log/app.log"), "of blue\n");
    let last = follow.next().expect("a line");
    assert_eq!(last["reason"], "revoked", "{last}");
    assert!(
        last["error"].as_str().is_some_and(|text| text.contains("may no longer read this log")),
        "{last}"
    );
    assert_eq!(follow.next(), None);
}

#[test]
fn log_streams_are_bounded_and_a_hang_up_frees_them() {
    let system = System::new();
    append(&started(&system, "app"), "a line\n");
    let open_streams = || {
        let text = system.server.send("GET", "/metrics", APP, b"").1;
        let count = text.lines().find_map(|line| line.strip_prefix("abide_gateway_log_streams "));
        count.and_then(|count| count.parse::<usize>().ok()).expect("a number")
    };
    let mut streams: Vec<Lines> = Vec::new();
    for _ in 0..128 {
        let (_, mut stream) = open(&system.server, "app", "&follow=1");
        follow_until(&mut stream, "a line\n");
        streams.push(stream);
    }
    // Each waits at the agent for the next line: one more is refused there.
    until("the agent is busy", || {
        read(&system.server, "app", "").is_err_and(|why| why.starts_with("busy: "))
    });
    for _ in 128..256 {
        streams.push(open(&system.server, "app", "&follow=1").1);
    }
    until("refused streams have ended", || open_streams() == 128);
    append(&system.path("log/app.log"), "for all\n");
    follow_until(&mut streams[127], "for all\n");
    drop(streams);
    until("nothing is left", || open_streams() == 0);
    until("the agent is free", || read(&system.server, "app", "").as_deref() == Ok("a line\nfor all\n"));
}

#[test]
fn several_logs_are_printed_with_prefixes() {
    let machine = Machine::new();
    for name in ["api", "longer"] {
        machine.write(
            name,
            &format!(
                "  control: {{start_mode: foreground, start_cmd: \"echo {name} is up; exec sleep 1000\"}}\n"
            ),
        );
    }
    let none = machine.run(&["logs", "web/api"]);
    assert!(none.0 == 0 && none.2.contains("has no process web/api"), "{none:?}");
    assert_eq!(machine.apply(&[]).0, 0);
    for name in ["api", "longer"] {
        until("it is up", || lines(&machine.path(&format!("log/{name}.log"))) == 1);
    }
    let both = machine.run(&["logs", "web/api", "web/longer@127.0.0.1"]);
    let expected = "web/api@0:127.0.0.1    | api is up\nweb/longer@0:127.0.0.1 | longer is up\n";
    assert_eq!((both.0, both.1.as_str()), (0, expected), "{}", both.2);
    assert_eq!(machine.run(&["logs", "--include", "web/api", "-n", "web"]).1, "api is up\n");
    // A name without a process is reported, and the others are shown.
    for verb in ["logs", "describe"] {
        let (code, out, err) = machine.run(&[verb, "web/api", "web/nope@127.0.0.1", "web/other"]);
        assert!(code == 0 && out.contains("api is up"), "{verb}: {out}{err}");
        assert!(err.contains("target local has no process web/nope@127.0.0.1, web/other\n"), "{verb}: {err}");
    }
    // One of the two cannot be read: the other is printed.
    std::fs::remove_file(machine.path("log/api.log")).expect("it is removed");
    let one = machine.run(&["logs", "web/api", "web/longer"]);
    assert!(
        one.0 == 1 && one.1.contains("longer is up") && one.2.contains("web/api@0:127.0.0.1: "),
        "{one:?}"
    );
    // Ctrl-C ends a follow, and so does a closed pipe.
    let mut follow = machine.command(&["logs", "web/longer", "-f"]);
    let mut follow =
        KillOnDrop(follow.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts"));
    let mut out = std::io::BufReader::new(follow.0.stdout.take().expect("a pipe"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).expect("a line");
    assert_eq!(line, "longer is up\n");
    kill(follow.0.id(), "INT");
    assert_eq!(follow.0.wait().expect("it ends").code(), Some(130));
    let mut closed = machine.command(&["logs", "web/longer", "-f", "--tail", "0"]);
    let mut closed =
        KillOnDrop(closed.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts"));
    drop(closed.0.stdout.take());
    let mut ended = None;
    until("a follow without a reader ends", || {
        append(&machine.path("log/longer.log"), "one more line\n");
        ended = closed.0.try_wait().expect("a child");
        ended.is_some()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(0));
    let config = "targets: {bk: {url: \"http://127.0.0.1:9\", dialect: gse-v2, auth: {app_code: a, app_secret: {env: IT_SECRET}}}}\n";
    std::fs::write(machine.path("other.yaml"), config).expect("a file");
    let args = ["logs", "web/api", "--target", "bk", "--config", "other.yaml"];
    let refused = machine.command(&args).env("IT_SECRET", "s").output().expect("it runs");
    assert_eq!(refused.status.code(), Some(64), "{}", String::from_utf8_lossy(&refused.stderr));
}

/// A run without a log: one-shot (auto_type 2) or scheduled (0).
fn run_spec(system: &System, name: &str, auto_type: u8, start: &str) -> Value {
    let mut spec = system.spec(name, start);
    spec["identity"].as_object_mut().expect("an object").remove("log_path");
    spec["monitor_policy"]["auto_type"] = json!(auto_type);
    spec["env"] = json!({"PASSWORD": {"value": "hunter2-hunter2", "secret": true}});
    spec
}

#[test]
fn output_of_runs_without_a_log_is_stored() {
    let mut system = System::new();
    let once = run_spec(&system, "once", 2, "echo began; echo with $PASSWORD; exit 3");
    assert_eq!(system.operate("once", 0, &once).0, 0);
    let expected = "began\nwith (secret)\n";
    until("the run is stored", || read(&system.server, "once", "").as_deref() == Ok(expected));
    let mut cycle = run_spec(&system, "cycle", 0, "date +%s%N >> runs; wc -l < runs");
    cycle["job"] = json!({"cycle_time": 1});
    assert_eq!(system.operate("cycle", 3, &cycle).0, 0);
    let (_, mut follow) = open(&system.server, "cycle", "&follow=1");
    follow_until(&mut follow, "1\n2\n");
    // A run that ends while no agent runs.
    let slow = run_spec(&system, "slow", 2, "echo first; sleep 1; echo last; touch ended");
    assert_eq!(system.operate("slow", 0, &slow).0, 0);
    system.kill_agent();
    until("it has ended", || system.path("ended").exists());
    system.start_agent();
    until("it is known", || read(&system.server, "slow", "").as_deref() == Ok("first\nlast\n"));
    assert_eq!(read(&system.server, "once", "&tail=1").as_deref(), Ok("with (secret)\n"));
    assert_eq!(read(&system.server, "once", "&since=2099-01-01T00:00:00Z").as_deref(), Ok(""));
    let (_, mut stream) = open(&system.server, "once", "");
    assert!(stream.next().expect("a line")["run"].is_string(), "the start of the run");
}

#[test]
fn values_of_environment_files_are_masked_in_stored_output() {
    let system = System::new();
    let (all, one) = (system.path("all.env"), system.path("one"));
    std::fs::write(&all, "API_KEY=key-of-the-file\n").expect("a file");
    std::fs::write(&one, "value-of-the-file\n").expect("a file");
    let mut once = run_spec(&system, "once", 2, "echo $API_KEY $ONE $PASSWORD plain; touch ended");
    once["env"]["ONE"] = json!({"file": one});
    once["env_file"] = json!(all);
    assert_eq!(system.operate("once", 0, &once).0, 0);
    until("it has ended", || system.path("ended").exists());
    let masked = "(secret) (secret) (secret) plain\n";
    until("the run is stored", || read(&system.server, "once", "").as_deref() == Ok(masked));
    // Without one of the values nothing is shown.
    for file in [&all, &one] {
        let hidden = file.with_extension("hidden");
        std::fs::rename(file, &hidden).expect("it is moved");
        let refused = read(&system.server, "once", "").expect_err("its secrets are unknown");
        assert!(!format!("{refused:?}").contains("-of-the-file"), "{refused:?}");
        std::fs::rename(&hidden, file).expect("it is moved back");
        assert_eq!(read(&system.server, "once", "").as_deref(), Ok(masked));
    }
}

#[test]
fn output_of_a_failed_start_is_stored() {
    let system = System::new();
    let mut spec = run_spec(&system, "app", 1, "echo bind: Address already in use; exit 1");
    spec["monitor_policy"]["start_check_secs"] = json!(5);
    assert_ne!(system.operate("app", 0, &spec).0, 0);
    let text = read(&system.server, "app", "").expect("a log");
    assert_eq!(text, "bind: Address already in use\n");
    let mut daemon = run_spec(&system, "daemon", 1, "echo no config; exit 2");
    daemon["control"]["start_mode"] = json!("daemon");
    assert_ne!(system.operate("daemon", 0, &daemon).0, 0);
    assert_eq!(read(&system.server, "daemon", "").as_deref(), Ok("no config\n"));
}

/// The stored outputs of an instance end with its registration, and those that a killed agent left end with the next one.
#[test]
fn the_stored_outputs_of_an_unregistered_process_are_removed() {
    let mut system = System::new();
    let stored = |system: &System| {
        let folders = std::fs::read_dir(system.path("agent/output")).expect("a folder").flatten();
        folders.count()
    };
    let records = |system: &System| std::fs::read_dir(system.path("agent/exits")).expect("a folder").count();
    let one_shot = |system: &System, name: &str, command: &str| {
        let mut spec = system.spec(name, command);
        spec["identity"].as_object_mut().expect("an object").remove("log_path");
        spec["monitor_policy"]["auto_type"] = json!(2);
        spec
    };
    let unregister = |system: &System, name: &str| {
        let body = json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
        let answer = system.server.gse("unregister_proc_info", body);
        let rows = answer["data"].as_object().cloned().unwrap_or_default();
        assert!(rows.values().any(|row| row["error_code"] == 0), "{answer}");
    };
    for name in ["kept", "gone", "left"] {
        assert_eq!(system.operate(name, 0, &one_shot(&system, name, &format!("echo from {name}"))).0, 0);
        until("its output", || read(&system.server, name, "").as_deref() == Ok(&format!("from {name}\n")));
    }
    let ended = |system: &System, name: &str| !system.facts(name).2;
    until("all ended", || ["kept", "gone", "left"].iter().all(|name| ended(&system, name)));
    assert_eq!(stored(&system), 3);
    for name in ["gone", "left"] {
        assert_eq!(system.operate(name, 4, &Value::Null).0, 0, "it is not supervised any more");
    }
    unregister(&system, "gone");
    until("its output is removed", || stored(&system) == 2);
    // A failed first start is shown for a day, and so is its output.
    let (code, _) = system.operate("failed", 0, &one_shot(&system, "failed", "echo why >&2; exit 7"));
    assert_eq!(code, 0, "a one-shot that runs has started");
    until("it ended", || ended(&system, "failed"));
    assert_eq!(stored(&system), 3);
    // Unregistered while no agent runs.
    system.kill_agent();
    unregister(&system, "left");
    std::fs::create_dir(system.path("agent/output/0123456789abcdef0123456789abcdef")).expect("a folder");
    std::fs::write(system.path("agent/output/0123456789abcdef0123456789abcdef/1-x"), "x").expect("a file");
    std::fs::write(system.path("agent/exits/stale"), "0\n").expect("a file");
    system.start_agent();
    until("the leftovers are removed", || stored(&system) == 2 && records(&system) == 0);
    assert_eq!(read(&system.server, "kept", "").as_deref(), Ok("from kept\n"));
}
