//! Health probes of hostile specs: slow names, secrets in answers, values beyond their range, injected requests.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixtures::wait::until_within;
use crate::server::Server;
use crate::support::{needs_root, skip, test_user, until};
use crate::system::{APPS, System};

/// Answers each request on a port of its own with this text.
fn answering(text: String) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(text.as_bytes());
        }
    });
    port
}

#[test]
fn slow_names_of_one_user_block_neither_other_probes_nor_the_agent() {
    let Some(user) = test_user().filter(|_| needs_root()) else { return };
    // A name server that never answers.
    let Ok(_silent) = UdpSocket::bind("127.0.0.53:53").or_else(|_| UdpSocket::bind("127.0.0.9:53")) else {
        return skip("port 53 is in use");
    };
    let server = _silent.local_addr().expect("an address").ip();
    let mut system = System::without_agent();
    std::fs::write(system.path("resolv"), format!("nameserver {server}\n")).expect("a file");
    std::fs::write(system.path("hosts"), "127.0.0.1 localhost\n").expect("a file");
    let script = format!(
        "mount --bind {0}/resolv /etc/resolv.conf && mount --bind {0}/hosts /etc/hosts && exec \"$@\"",
        system.folder.path().display()
    );
    let join = format!("http://localhost:{}", system.server.address.port());
    system.start_agent_under(&join, &["unshare", "-m", "sh", "-c", &script, "sh"], &[]);
    for nth in 0..20 {
        let mut spec = system.spec_of(&user, &format!("slow{nth}"), "exec sleep 1000");
        spec["health"] = json!({"tcp": format!("x{nth}.slow.example:80"), "interval": 1, "timeout": 1});
        assert_eq!(system.operate(&format!("slow{nth}"), 0, &spec).0, 0);
    }
    until("lookups wait", || {
        system.process("slow0")["message"].as_str().is_some_and(|text| text.contains("timed out"))
    });
    let port = answering("HTTP/1.1 200 OK\r\n\r\n".to_owned());
    let mut spec = system.spec("victim", "exec sleep 1000");
    spec["health"] =
        json!({"tcp": format!("localhost:{port}"), "interval": 1, "timeout": 2, "start_period": 3});
    assert_eq!(system.operate("victim", 0, &spec).0, 0);
    until_within(Duration::from_secs(8), "another user's name is resolved", || {
        system.process("victim")["health"] == "Healthy"
    });
    // The agent's own lookup does not wait for those of probes.
    let (address, file) = (system.server.address, system.path("store.db"));
    system.server = Server::at(address);
    until("the port is free again", || TcpListener::bind(address).is_ok());
    system.server = Server::restart_at(address, &file, APPS, "* token\n");
    let begin = Instant::now();
    until_within(Duration::from_secs(15), "the agent is back", || {
        system.server.call("GET", "/api/abide/v1/hosts", json!({}))["data"][0]["agent"] == true
    });
    assert!(begin.elapsed() < Duration::from_secs(12), "it took {:?}", begin.elapsed());
}

#[test]
fn a_secret_in_the_answer_of_a_probe_is_masked() {
    let system = System::new();
    std::fs::write(system.path("key"), "FILESECRETVALUE\n").expect("a file");
    let body = "no login with SECVALSECVAL and FILESECRETVALUE";
    let port = answering(format!("HTTP/1.1 503 No\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
    let mut spec = system.spec("d", "exec sleep 1000");
    spec["env"] =
        json!({"DB": {"value": "SECVALSECVAL", "secret": true}, "KEY": {"file": system.path("key")}});
    spec["health"] =
        json!({"http": format!("http://127.0.0.1:{port}/"), "interval": 1, "start_period": 0, "retries": 1});
    assert_eq!(system.operate("d", 0, &spec).0, 0);
    until("the probe fails", || system.process("d")["health"] == "Degraded");
    let message = system.process("d")["message"].as_str().expect("text").to_owned();
    assert!(message.ends_with("HTTP 503: no login with (secret) and (secret)"), "{message}");
    let log = system.log();
    assert!(log.contains("(secret)") && !log.contains("SECVAL") && !log.contains("FILESECRET"), "{log}");
}

#[test]
fn health_values_beyond_their_range_are_refused() {
    let system = System::without_agent();
    let refused = |health: Value| {
        let mut spec = system.spec("h", "exec sleep 1000");
        spec["health"] = health;
        let body = json!({"meta": {"namespace": "web", "name": "h"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
                          "op_type": 0, "spec": spec});
        let answer = system.server.gse("operate_proc", body);
        assert_eq!(answer["result"], false, "{answer}");
        answer["message"].as_str().expect("text").to_owned()
    };
    for (field, health) in [
        ("interval", json!({"tcp": "127.0.0.1:80", "interval": 0})),
        ("timeout", json!({"tcp": "127.0.0.1:80", "timeout": 0})),
        ("retries", json!({"tcp": "127.0.0.1:80", "retries": 0})),
        ("retries", json!({"tcp": "127.0.0.1:80", "retries": 4_000_000_000u32})),
        ("start_period", json!({"tcp": "127.0.0.1:80", "start_period": 4_000_000_000u32})),
        ("http", json!({"http": "http://127.0.0.1/a HTTP/1.1\r\nX-Injected: 1\r\n\r\n"})),
        ("tcp", json!({"tcp": "127.0.0.1:80\n"})),
    ] {
        let message = refused(health);
        assert!(message.contains(&format!("spec.health.{field}")), "{field} in {message:?}");
    }
}

/// The soft and the hard limit of open files of a process.
fn file_limits(pid: u32) -> (String, String) {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("limits");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line");
    let mut words = line.split_whitespace().skip(3).map(str::to_owned);
    (words.next().expect("a number"), words.next().expect("a number"))
}

#[test]
fn commands_that_leave_processes_behind_do_not_use_up_the_agents_descriptors() {
    let Some(user) = test_user().filter(|_| needs_root()) else { return };
    let mut system = System::without_agent();
    let join = format!("http://{}", system.server.address);
    system.start_agent_under(
        &join,
        &["sh", "-c", "ulimit -Sn 200 && ulimit -Hn 256 && exec \"$@\"", "sh"],
        &[],
    );
    let agent = system.agent.as_ref().expect("an agent").id();
    assert_eq!(file_limits(agent), ("256".to_owned(), "256".to_owned()), "the agent uses its hard limit");
    let open = || std::fs::read_dir(format!("/proc/{agent}/fd")).expect("descriptors").count();
    for nth in 0..20 {
        let name = format!("e{nth}");
        let mut spec = system.spec_of(&user, &name, "exec sleep 1000");
        spec["control"]["reload_cmd"] = json!("echo x >> runs; sleep 100003 & exit 1");
        assert_eq!(system.operate(&name, 0, &spec).0, 0);
    }
    // More outputs are left than the agent may open.
    for _ in 0..14 {
        let reload = |nth: u32| (nth, system.begin(&format!("e{nth}"), 8, &Value::Null));
        for (nth, task) in (0..20).map(reload).collect::<Vec<_>>() {
            let row = system.row(&format!("e{nth}"), &task);
            assert_eq!(row["error_code"], 65535, "{row}");
        }
    }
    assert_eq!(crate::system::lines(&system.home(&user).join("runs")), 280);
    assert!(open() < 160, "{} descriptors", open());
    let done = system.operate("victim", 0, &system.spec("victim", "exec sleep 1000"));
    assert_eq!(done.0, 0, "another user's process starts: {}", done.1);
    let limits = file_limits(system.pid("victim").expect("a pid"));
    assert_eq!(limits, ("200".to_owned(), "256".to_owned()), "processes get the original limit");
}
