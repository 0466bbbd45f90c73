//! The host policy of an agent: what it refuses, by which rule, when it keeps the agent from starting, and what an upgrade
//! would refuse.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::ownership::folder_of;
use crate::support::{abide, needs_root, stderr, stdout, test_user, until};
use crate::system::{System, is_alive, kill};

fn write(system: &System, name: &str, text: &str) -> PathBuf {
    let file = system.path(name);
    std::fs::write(&file, text).expect("a file");
    file
}

fn set(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("a mode");
}

fn restart_with(system: &mut System, policy: &str) {
    write(system, "policy.yaml", policy);
    system.kill_agent();
    system.start_agent_with(&["--policy", "policy.yaml"], &[]);
}

/// A foreground process of a user, all in one folder.
fn spec(folder: &Path, user: &str) -> Value {
    json!({"identity": {"proc_name": "sleep", "setup_path": folder, "user": user, "pid_path": folder.join("p.pid"),
                        "log_path": folder.join("p.log")},
           "control": {"start_cmd": "exec sleep 1000", "start_mode": "foreground"},
           "monitor_policy": {"auto_type": 1, "start_check_secs": 0, "start_interval": 1, "stop_check_secs": 5}})
}

#[test]
fn each_launch_and_adoption_is_bounded_and_the_refusal_names_the_rule() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let app = folder_of(&system, "app", user.uid, 0o755);
    let root = folder_of(&system, "root", 0, 0o755);
    let refusal = |what: &str| format!("host policy policy.yaml: {what}");
    for (policy, folder, account, says) in [
        ("users: [abide-test]\n".to_owned(), &root, "root", "users: user \"root\" is not allowed"),
        ("root: false\n".to_owned(), &root, "root", "root: user \"root\" (uid 0) is not allowed"),
        ("namespaces: [db]\n".to_owned(), &app, "abide-test", "namespaces: namespace \"web\" is not allowed"),
        (format!("paths: [{}]\n", root.display()), &app, "abide-test", "paths: setup_path"),
    ] {
        restart_with(&mut system, &policy);
        for op in [0, 3] {
            let (code, message) = system.operate("p", op, &spec(folder, account));
            assert!(code == 65535 && message.starts_with(&refusal(says)), "{policy} {op}: {code} {message}");
        }
        assert!(system.process("p").is_null(), "{policy}");
    }
    let policy =
        format!("users: [\"abide-*\"]\nroot: false\nnamespaces: [web]\npaths: [{}]\n", app.display());
    restart_with(&mut system, &policy);
    assert_eq!(system.operate("p", 0, &spec(&app, "abide-test")), (0, "success".to_owned()));
    // A request's own spec does not smuggle a command of root in.
    let mut forged = spec(&app, "root");
    forged["control"]["stop_cmd"] = json!("touch owned");
    let (code, message) = system.operate("p", 1, &forged);
    assert!(!app.join("owned").exists(), "{code} {message}");
    system.operate("p", 1, &spec(&app, "abide-test"));
    until("it is stopped", || !system.facts("p").2);
}

#[test]
fn a_sandbox_raises_no_priority_of_a_user_unless_the_policy_allows_it() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let sandboxed = |sandbox: Value| {
        let mut spec = system.spec_of(&user, "p", "exec sleep 1000");
        spec["sandbox"] = sandbox;
        spec
    };
    let rule = "raise_priority: sandbox.";
    system.refuses("p", &sandboxed(json!({"nice": -20})), &[rule, "nice of user \"abide-test\""]);
    system.refuses("p", &sandboxed(json!({"oom_score_adj": -1000})), &[rule, "oom_score_adj"]);
    let ulimits = json!({"ulimits": {"nofile": 1_000_000_000}});
    system.refuses("p", &sandboxed(ulimits), &[rule, "ulimits.nofile"]);
    let raised = sandboxed(json!({"nice": -3}));
    let lowered = sandboxed(json!({"nice": 5, "oom_score_adj": 1000, "ulimits": {"nofile": 64}}));
    assert_eq!(system.operate("p", 0, &lowered).0, 0);
    assert_eq!(system.operate("p", 1, &Value::Null).0, 0);
    restart_with(&mut system, "raise_priority: true\n");
    assert_eq!(system.operate("p", 0, &raised), (0, "success".to_owned()));
    let stat =
        std::fs::read_to_string(format!("/proc/{}/stat", system.pid("p").expect("a pid"))).expect("a stat");
    let nice = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(16).map(str::to_owned));
    assert_eq!(nice.as_deref(), Some("-3"));
}

#[test]
fn a_stricter_policy_leaves_what_runs_and_stops_it_from_coming_back() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let app = folder_of(&system, "app", user.uid, 0o755);
    let root = folder_of(&system, "root", 0, 0o755);
    // Its own log, as an agent that opens logs with the user's rights leaves it.
    chown(write(&system, "app/p.log", ""), Some(user.uid), None).expect("an owner");
    let (ours, roots) = (spec(&app, "abide-test"), spec(&root, "root"));
    for (name, spec) in [("ours", &ours), ("roots", &roots), ("stopped", &spec(&root, "root"))] {
        let mut spec = spec.clone();
        spec["identity"]["value_key"] = json!(name);
        spec["identity"]["pid_path"] = json!(system.path(&format!("run/{name}.pid")));
        if name == "ours" {
            spec["identity"]["pid_path"] = json!(app.join("ours.pid"));
        }
        assert_eq!(system.operate(name, 0, &spec).0, 0, "{name}");
    }
    let pids = ["ours", "roots", "stopped"].map(|name| system.pid(name).expect("a pid"));
    restart_with(&mut system, "root: false\n");
    until("all are held", || {
        ["ours", "roots", "stopped"].iter().all(|name| system.process(name)["agent"] == true)
    });
    assert_eq!(
        ["ours", "roots", "stopped"].map(|name| system.pid(name)),
        pids.map(Some),
        "nothing was restarted"
    );
    let (code, message) = system.operate("roots", 7, &Value::Null);
    assert!(code == 65535 && message.contains("root: user \"root\""), "{code} {message}");
    assert!(is_alive(pids[1]), "a refused restart leaves the process as it is");
    assert_eq!(system.row("roots", &system.begin("roots", 2, &Value::Null))["error_code"], 0);
    assert_eq!(system.operate("stopped", 1, &Value::Null).0, 0, "stopping is always allowed");
    kill(pids[1], "KILL");
    until("its row names the rule", || {
        let row = system.process("roots");
        row["message"]
            .as_str()
            .is_some_and(|text| text.starts_with("host policy policy.yaml: root: user \"root\""))
    });
    assert_eq!(system.facts("roots"), (true, true, false));
    assert_eq!(system.operate("roots", 4, &Value::Null).0, 0, "and so is unhosting");
    // What would be refused is listed, by a folder that is in use.
    let check = |more: &[&str]| {
        let args =
            [&["agent", "--check-policy", "--data", "agent", "--policy", "policy.yaml"], more].concat();
        let output = abide(&args, system.folder.path(), b"");
        (output.status.code(), stdout(&output), stderr(&output))
    };
    let (code, out, err) = check(&["-o", "json"]);
    let listed: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"));
    assert_eq!((code, listed["refused"].as_array().expect("rows").len()), (Some(3), 2), "{out}");
    assert_eq!(listed["refused"][0]["instance"], "0:127.0.0.1:web:roots");
    let (code, out, _) = check(&[]);
    assert!(code == Some(3) && out.contains("root: user \"root\" (uid 0) is not allowed"), "{out}");
    write(&system, "policy.yaml", "root: false\nnamespaces: [db]\n");
    let (_, out, _) = check(&[]);
    let rules = ["root: user \"root\" (uid 0)", "namespaces: namespace \"web\""];
    assert!(rules.iter().all(|rule| out.contains(rule)), "every rule is listed: {out}");
    let output = abide(&["agent", "--check-policy", "--data", "nowhere"], system.folder.path(), b"");
    assert!(stderr(&output).starts_with("error: folder nowhere has no agent.db\n"), "{}", stderr(&output));
    let log = system.log();
    assert!(log.contains("host policy active") && log.contains("launch or adoption refused"), "{log}");
    // Files that their user cannot reach are listed, too.
    write(&system, "policy.yaml", "");
    set(&app, 0o700);
    chown(&app, Some(0), Some(0)).expect("an owner");
    let (code, out, _) = check(&[]);
    assert!(code == Some(3) && out.contains("log_path: user \"abide-test\" cannot write to"), "{out}");
    chown(&app, Some(user.uid), Some(user.gid)).expect("an owner");
    let (code, out, err) = check(&[]);
    assert_eq!((code, out.as_str()), (Some(0), "no instance would be refused\n"), "{err}");
}

#[test]
fn a_policy_that_another_user_could_write_or_that_is_wrong_keeps_the_agent_from_starting() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let folder = folder_of(&system, "etc", 0, 0o755);
    let file = folder.join("agent.yaml");
    let refused = |says: &str| {
        let policy = file.display().to_string();
        let args = [
            "agent",
            "--join",
            "http://127.0.0.1:9",
            "--token-file",
            "token",
            "--data",
            "other",
            "--policy",
            &policy,
        ];
        let output = abide(&args, system.folder.path(), b"");
        let err = stderr(&output);
        assert!(
            output.status.code() == Some(1) && err.contains(says) && err.contains(&policy),
            "{says}: {err}"
        );
        assert!(!system.path("other").exists(), "{says}: nothing was begun");
    };
    refused("cannot read the file");
    for (text, says) in [
        ("user: [app]\n", "unknown field `user`"),
        ("users: app\n", "users"),
        ("paths: [opt]\n", "not an absolute path"),
    ] {
        std::fs::write(&file, text).expect("a file");
        refused(says);
    }
    std::fs::write(&file, "root: false\n").expect("a file");
    set(&file, 0o666);
    refused("writable by every user");
    // The group of root has no other member.
    set(&file, 0o664);
    refused("writable by group root: run `chmod g-w ");
    set(&file, 0o644);
    chown(&file, Some(user.uid), None).expect("an owner");
    refused("belongs to user abide-test");
    chown(&file, Some(0), None).expect("an owner");
    set(&folder, 0o777);
    refused("etc is writable by every user");
    set(&folder, 0o755);
    chown(&folder, Some(user.uid), None).expect("an owner");
    refused("etc belongs to user abide-test, not to root: move ");
}

/// A policy file of another kind, or of any size, is a clear error in bounded time.
#[test]
fn a_policy_that_is_not_a_regular_file_of_bounded_size_keeps_the_agent_from_starting() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let folder = folder_of(&system, "etc", 0, 0o755);
    let users = folder_of(&system, "home", user.uid, 0o755);
    let file = folder.join("agent.yaml");
    let refused = |says: &str| {
        let policy = file.display().to_string();
        let args = ["agent", "--check-policy", "--data", "other", "--policy", &policy];
        let begin = std::time::Instant::now();
        let output = abide(&args, system.folder.path(), b"");
        let err = stderr(&output);
        assert!(output.status.code() == Some(1) && err.contains(says), "{says}: {err}");
        assert!(err.contains(&policy) && begin.elapsed() < Duration::from_secs(20), "{says}: {err}");
        std::fs::remove_file(&file).expect("it is removed");
    };
    let made = std::process::Command::new("mkfifo").arg(&file).status().expect("mkfifo");
    assert!(made.success());
    refused("not a regular file");
    for device in ["/dev/zero", "/dev/tty"] {
        std::os::unix::fs::symlink(device, &file).expect("a link");
        refused("not a regular file");
    }
    // A sparse file of many gigabytes costs neither memory nor time.
    std::fs::File::create(&file).and_then(|file| file.set_len(64 << 30)).expect("a file");
    refused("larger than 1048576 bytes");
    std::os::unix::fs::symlink(folder.join("missing"), &file).expect("a link");
    refused("cannot read the file");
    std::os::unix::fs::symlink(&file, &file).expect("a link");
    refused("cannot read the file");
    // A link to a file of another user.
    let other = users.join("policy.yaml");
    std::fs::write(&other, "root: true\n").expect("a file");
    chown(&other, Some(user.uid), None).expect("an owner");
    std::os::unix::fs::symlink(&other, &file).expect("a link");
    refused("belongs to user abide-test");
    // A link to root's file in a folder of another user.
    chown(&other, Some(0), None).expect("an owner");
    std::os::unix::fs::symlink(&other, &file).expect("a link");
    refused("home belongs to user abide-test");
    // A link to root's own file is a policy.
    let own = folder.join("policy.yaml");
    std::fs::write(&own, "root: false\n").expect("a file");
    std::os::unix::fs::symlink(&own, &file).expect("a link");
    let policy = file.display().to_string();
    std::fs::create_dir(system.path("other")).expect("a folder");
    let args = ["agent", "--check-policy", "--data", "other", "--policy", &policy];
    let output = abide(&args, system.folder.path(), b"");
    // The policy is accepted: only the agent's folder is missing.
    assert!(stderr(&output).contains("folder other has no agent.db"), "{}", stderr(&output));
}

/// A server that counts its connections, and answers with this text.
fn counting(text: String) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            counted.fetch_add(1, Ordering::Relaxed);
            let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(text.as_bytes());
        }
    });
    (port, count)
}

#[test]
fn probes_reach_only_allowed_addresses() {
    if !needs_root() {
        return;
    }
    let (target, reached) = counting("HTTP/1.1 200 OK\r\n\r\n".to_owned());
    let (redirect, _) =
        counting(format!("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{target}/\r\n\r\n"));
    let mut system = System::without_agent();
    write(
        &system,
        "hosts",
        "127.0.0.1 localhost inside.example\n192.0.2.7 outside.example\n169.254.169.254 metadata.example\n",
    );
    let script = format!("mount --bind {}/hosts /etc/hosts && exec \"$@\"", system.folder.path().display());
    let join = format!("http://{}", system.server.address);
    let start_agent = |system: &mut System, policy: &str| {
        write(system, "policy.yaml", policy);
        system.kill_agent();
        let wrapper = ["unshare", "-m", "sh", "-c", &script, "sh"];
        system.start_agent_under(&join, &wrapper, &["--policy", "policy.yaml"]);
    };
    let probing = |system: &System, name: &str, check: Value| {
        let mut spec = system.spec(name, "exec sleep 1000");
        spec["health"] = json!({"interval": 1, "timeout": 1, "start_period": 0, "retries": 1});
        for (field, value) in check.as_object().expect("fields") {
            spec["health"][field] = value.clone();
        }
        spec
    };
    let message = |system: &System, name: &str| system.process(name)["message"].to_string();

    start_agent(&mut system, "");
    let literal = |address: &str| probing(&system, "literal", json!({"tcp": address}));
    let (metadata, outside) = (literal("169.254.169.254:80"), literal("192.0.2.7:80"));
    let by_url = probing(&system, "literal", json!({"http": "http://[::ffff:169.254.169.254]/latest"}));
    system.refuses("literal", &metadata, &["policy.yaml: probes: 169.254.169.254:80 is not allowed"]);
    system.refuses("literal", &by_url, &["probes: [::ffff:169.254.169.254]:80 is not allowed"]);
    assert_eq!(system.operate("literal", 0, &outside).0, 0, "without the rule");

    start_agent(&mut system, "probes: []\n");
    let checked = abide(
        &["agent", "--check-policy", "--data", "agent", "--policy", "policy.yaml"],
        system.folder.path(),
        b"",
    );
    let listed = stdout(&checked);
    assert!(
        checked.status.code() == Some(3) && listed.contains("probes: 192.0.2.7:80 is not allowed"),
        "{listed}"
    );
    assert_eq!(system.operate("literal", 1, &outside).0, 0, "a stop is always allowed");
    system.refuses("literal", &outside, &["probes: 192.0.2.7:80 is not allowed"]);
    for (name, check) in [
        ("redirected", json!({"http": format!("http://127.0.0.1:{redirect}/")})),
        ("outside", json!({"tcp": "outside.example:80"})),
        ("metadata", json!({"http": "http://metadata.example/latest"})),
    ] {
        assert_eq!(system.operate(name, 0, &probing(&system, name, check)).0, 0, "{name}");
    }
    until("a redirect is an answer", || system.process("redirected")["health"] == "Healthy");
    for (name, refused) in [("outside", "192.0.2.7:80"), ("metadata", "169.254.169.254:80")] {
        let refused = format!("policy.yaml: probes: {refused} is not allowed");
        until("the probe is refused", || message(&system, name).contains(&refused));
    }
    assert_eq!(reached.load(Ordering::Relaxed), 0, "a redirect is not followed");
    let inside = probing(&system, "inside", json!({"tcp": format!("inside.example:{target}")}));
    assert_eq!(system.operate("inside", 0, &inside).0, 0);
    until("a name of this host is probed", || system.process("inside")["health"] == "Healthy");
    assert!(reached.load(Ordering::Relaxed) > 0);

    start_agent(&mut system, "probes: [\"outside.example:80\"]\n");
    until("a listed name is tried", || {
        let message = message(&system, "outside");
        message.contains("cannot connect to outside.example:80") && !message.contains("not allowed")
    });
    system.refuses("literal", &outside, &["probes: 192.0.2.7:80 is not allowed"]);
}
