//! Apply benchmark: `abide apply` and `abide plan` on the local system.
//!
//! `cargo bench --bench apply` prints one JSON object: 1,000 new foreground processes from the command to all running and
//! verified, compared with spawning the same command lines directly, and the number of calls; an apply with nothing to
//! do, and its number of writes; a plan over 10,000 instances that are registered, with its memory; and the apply of one
//! changed line among 20, 1,000 and 10,000 registered instances, next to `validate` of the same manifests.
//! `ABIDE_BENCH_ONLY=change` measures the last part only.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

const PROCESSES: usize = 1000;
const REGISTERED: usize = 10_000;

const CHANGES: usize = 11;

fn main() {
    if std::env::var("ABIDE_BENCH_ONLY").as_deref() == Ok("change") {
        println!("{:#}", json!({"one_changed_line": one_changed_lines()}));
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    std::fs::write(here.join("fleet.yaml"), fleet(here, PROCESSES, "running")).expect("a file");
    let mut spawned: Vec<Duration> = (0..3).map(|_| spawn_directly()).collect();
    spawned.sort();
    // The system is there; its start is not measured.
    std::fs::write(here.join("empty.yaml"), fleet(here, 1, "absent")).expect("a file");
    abide(here, &["apply", "empty.yaml", "--yes"]);
    let before = operates(here);
    let (started, _) = abide(here, &["apply", "fleet.yaml", "--yes"]);
    let calls = operates(here) - before;
    assert_eq!(calls, PROCESSES.div_ceil(1000), "as few calls as there can be");
    let writes = writes(here);
    let mut nothing: Vec<Duration> =
        (0..11).map(|_| abide(here, &["apply", "fleet.yaml", "--yes"]).0).collect();
    nothing.sort();
    let wrote = self::writes(here) - writes;
    abide(here, &["down", "--stop-processes"]);
    std::fs::write(here.join("many.yaml"), fleet(here, REGISTERED, "stopped")).expect("a file");
    abide(here, &["apply", "many.yaml", "--yes"]);
    let mut planned: Vec<(Duration, u64)> = (0..5).map(|_| abide(here, &["plan", "many.yaml"])).collect();
    planned.sort();
    abide(here, &["down"]);
    let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
    println!(
        "{:#}",
        json!({
            "spawned_directly_ms": ms(spawned[1]),
            "applied_1000_new_ms": ms(started),
            "operate_calls": calls,
            "applied_over_spawned": (started.as_secs_f64() / spawned[1].as_secs_f64() * 100.0).round() / 100.0,
            "nothing_to_do_ms": {"median": ms(nothing[5]), "longest": ms(nothing[10]), "writes": wrote},
            "plan_10000_registered": {"ms": ms(planned[2].0), "peak_mb": planned[2].1 as f64 / 1e6},
            "one_changed_line": one_changed_lines(),
        })
    );
}

/// The cost of an apply grows with the change: 1,000 instances cost at most 1.5 times as much as 20, and 10,000 at most
/// twice as much, plus the time to read their files.
fn one_changed_lines() -> serde_json::Value {
    let [few, many, most] = [20, 1000, REGISTERED].map(one_changed_line);
    let rounded = |value: f64| (value * 100.0).round() / 100.0;
    json!({
        "measured": [few.json(), many.json(), most.json()],
        "ratio_1000_to_20": rounded(many.applied / few.applied),
        "ratio_10000_to_20": rounded(most.applied / few.applied),
        "ratio_10000_to_20_without_reading": rounded((most.applied - (most.validated - few.validated)) / few.applied),
    })
}

/// Medians in milliseconds: the apply of one changed line, and `validate` of the same manifests.
struct OneChange {
    instances: usize,
    applied: f64,
    longest: f64,
    validated: f64,
}

impl OneChange {
    fn json(&self) -> serde_json::Value {
        json!({"instances": self.instances, "applied_ms": self.applied, "longest_ms": self.longest,
               "validated_ms": self.validated})
    }
}

/// One line of one of many registered processes changes, and is applied and verified.
fn one_changed_line(many: usize) -> OneChange {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let text = fleet(here, many, "stopped");
    std::fs::write(here.join("fleet.yaml"), &text).expect("a file");
    // The second one fills the caches of the gateway.
    for _ in 0..2 {
        abide(here, &["apply", "fleet.yaml", "--yes"]);
    }
    let mut applied: Vec<Duration> = Vec::new();
    for nth in 1..=CHANGES {
        let changed = text.replacen("100000", &format!("{}", 100_000 + nth), 1);
        std::fs::write(here.join("fleet.yaml"), changed).expect("a file");
        applied.push(abide(here, &["apply", "fleet.yaml", "--yes"]).0);
    }
    let mut read: Vec<Duration> = (0..CHANGES).map(|_| abide(here, &["validate", "fleet.yaml"]).0).collect();
    abide(here, &["down"]);
    applied.sort();
    read.sort();
    let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
    OneChange {
        instances: many,
        applied: ms(applied[CHANGES / 2]),
        longest: ms(applied[CHANGES - 1]),
        validated: ms(read[CHANGES / 2]),
    }
}

fn fleet(here: &Path, many: usize, state: &str) -> String {
    let here = here.display();
    let mut text = String::new();
    for nth in 0..many {
        text.push_str(&format!(
            "---\napiVersion: abide/v1\nkind: Process\nstate: {state}\nmeta: {{namespace: bench, name: p{nth}}}\n\
             hosts: [{{ip: 127.0.0.1, bk_cloud_id: 0}}]\nspec:\n  identity: {{proc_name: sleep, setup_path: /, \
             pid_path: {here}/run/{nth}.pid, value_key: p{nth}}}\n  control: {{start_mode: foreground, start_cmd: /bin/sleep \
             100000}}\n  monitor_policy: {{auto_type: 1, start_check_secs: 0}}\n"
        ));
    }
    text
}

fn spawn_directly() -> Duration {
    let begin = Instant::now();
    let spawn = |_| {
        let mut command = Command::new("/bin/sleep");
        command.arg("100000").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("it starts")
    };
    let mut children: Vec<_> = (0..PROCESSES).map(spawn).collect();
    let took = begin.elapsed();
    for child in &mut children {
        child.kill().expect("it is killed");
        child.wait().expect("it ends");
    }
    took
}

/// Runs it to its end: how long that took, and the most memory it had.
fn abide(here: &Path, args: &[&str]) -> (Duration, u64) {
    let begin = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_abide"))
        .args(args)
        .current_dir(here)
        .env("ABIDE_HOME", here.join("home"))
        .env("ABIDE_KEY_FILE", here.join("key"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut peak = 0;
    let status = loop {
        let text = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kb = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        peak = kb.map_or(peak, |kb| peak.max(kb * 1024));
        if let Some(status) = child.try_wait().expect("it is ours") {
            break status;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let took = begin.elapsed();
    assert!(status.success(), "{args:?}: {status}");
    (took, peak)
}

/// How many calls asked for operations so far, as the gateway counts them.
fn operates(here: &Path) -> usize {
    let read = |name: &str| std::fs::read_to_string(here.join("home").join(name)).expect("a file");
    let (address, secret) = (read("address"), read("secret"));
    let authorization =
        json!({"bk_app_code": "abide", "bk_app_secret": secret.trim(), "bk_username": "admin"});
    let mut stream =
        std::net::TcpStream::connect(address.trim().trim_start_matches("http://")).expect("a gateway");
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Bkapi-Authorization: {authorization}\r\n\r\n"
    )
    .expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let calls = text.lines().filter(|line| line.contains("requests_total{call=\"operate_multi\""));
    calls.filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok()).sum()
}

fn writes(here: &Path) -> i64 {
    let store = rusqlite::Connection::open(here.join("home/gateway/store.db")).expect("a store");
    store.query_row("SELECT max(number) FROM log", [], |row| row.get(0)).expect("a number")
}
