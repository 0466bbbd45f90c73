//! Hash chain of the audit log: kills leave it intact, and every kind of tampering is found at its line. Rotation, and a
//! file that cannot be written.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::audit::{auth, body, entries, start};
use crate::fixtures::workspace::Workspace;
use crate::serve::{Gateway, log_of};
use crate::server::Server;
use crate::support::{abide, stderr, stdout, until};

/// Exit code and output of a verification of the files.
fn verify(folder: &Path) -> (i32, String) {
    let output = abide(&["audit", "--verify", "--data", "data"], folder, b"");
    (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
}

#[track_caller]
fn is_intact(folder: &Path) -> String {
    let (code, text) = verify(folder);
    assert!(code == 0 && text.starts_with("intact: "), "{code} {text}");
    text
}

fn stop(mut gateway: Gateway) {
    crate::system::kill(gateway.child.id(), "TERM");
    assert!(gateway.child.wait().expect("it ends").success());
}

fn register(server: &Server, name: &str) -> bool {
    let body = body("web", name, &["10.0.0.1".to_owned()], 0).to_string();
    let path = "/api/c/compapi/v2/gse/register_proc_info/";
    let (_, text) = server.send("POST", path, &auth("all"), body.as_bytes());
    serde_json::from_str::<Value>(&text).is_ok_and(|answer| answer["code"] == 0)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder.join("data/audit"))
        .expect("a folder")
        .flatten()
        .map(|entry| entry.path())
        .collect();
    all.sort();
    all
}

fn lines(file: &Path) -> Vec<String> {
    std::fs::read_to_string(file).expect("a file").lines().map(str::to_owned).collect()
}

fn write(file: &Path, lines: &[String]) {
    std::fs::write(file, lines.join("\n") + "\n").expect("it is written");
}

#[test]
fn a_killed_gateway_leaves_an_intact_log_with_every_answered_change() {
    let folder = Workspace::new();
    let mut answered = 0;
    for round in 0..4 {
        let mut gateway = start(folder.path(), &[]);
        let (done, ends) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for nth in 0..4 {
                let (server, done, ends) = (&gateway.server, &done, &ends);
                scope.spawn(move || {
                    for number in 0.. {
                        if ends.load(Ordering::Acquire) {
                            return;
                        }
                        if register(server, &format!("p-{round}-{nth}-{number}")) {
                            done.fetch_add(1, Ordering::AcqRel);
                        }
                    }
                });
            }
            until("some are answered", || done.load(Ordering::Acquire) > 40 + 17 * round);
            gateway.child.kill().expect("it is killed");
            gateway.child.wait().expect("it ends");
            ends.store(true, Ordering::Release);
        });
        answered += done.load(Ordering::Acquire);
        is_intact(folder.path());
        let all = entries(folder.path(), &[]);
        let of_call =
            all.iter().filter(|entry| entry["what"]["call"] == "register" && entry["event"] == "change");
        assert!(of_call.count() >= answered, "round {round}: {answered} were answered");
        let numbers: Vec<u64> = all.iter().filter_map(|entry| entry["seq"].as_u64()).collect();
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    }
    stop(start(folder.path(), &[]));
    let text = is_intact(folder.path());
    assert!(text.contains("the store has the digest of entry"), "{text}");
}

/// A line cut by a crash is removed by the next gateway, and a verification before that does not fail.
#[test]
fn an_unfinished_line_at_the_end_is_not_tampering() {
    let folder = Workspace::new();
    let mut gateway = start(folder.path(), &[]);
    assert!(register(&gateway.server, "one"));
    gateway.child.kill().expect("it is killed");
    gateway.child.wait().expect("it ends");
    let file = files(folder.path()).pop().expect("a file");
    let whole = std::fs::read(&file).expect("a file");
    std::fs::write(&file, [&whole[..], b"{\"seq\":7,\"ti"].concat()).expect("it is written");
    assert!(is_intact(folder.path()).contains("12 bytes of an unfinished entry"));
    let gateway = start(folder.path(), &[]);
    assert!(register(&gateway.server, "two"));
    assert!(std::fs::read(&file).expect("a file").starts_with(&whole));
    let started = entries(folder.path(), &["--who", "gateway"]);
    let detail = started.last().expect("a start")["what"]["detail"].clone();
    assert_eq!(detail, "removed an unfinished entry of 12 bytes");
    stop(gateway);
    is_intact(folder.path());
}

/// Recomputes the hashes of all lines, as an attacker with the file alone can.
fn rehash(lines: &mut [String]) {
    let header: Value = serde_json::from_str(&lines[0]).expect("a header");
    let mut prev = hex(header["prev"].as_str().expect("a hash"));
    for line in &mut lines[1..] {
        let (body, _) = line.rsplit_once(",\"hash\":\"").expect("a hash");
        let hash = blake3::Hasher::new().update(&prev).update(body.as_bytes()).finalize();
        prev = hash.as_bytes().to_vec();
        *line = format!("{body},\"hash\":\"{}\"}}", hash.to_hex());
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
    (0..text.len()).step_by(2).map(digit).collect()
}

#[test]
fn every_kind_of_tampering_is_found_at_its_line() {
    let folder = Workspace::new();
    let gateway = start(folder.path(), &[]);
    for number in 0..8 {
        assert!(register(&gateway.server, &format!("p-{number}")));
    }
    stop(gateway);
    is_intact(folder.path());
    let file = files(folder.path()).pop().expect("a file");
    let (name, good) = (file.file_name().expect("a name").to_string_lossy().into_owned(), lines(&file));
    let last = good.len();
    type Change = fn(&mut Vec<String>);
    let cases: [(&str, Change, usize, &str); 9] = [
        (
            "edited",
            |lines| lines[4] = lines[4].replace("p-1", "p-9").replace("web/", "wob/"),
            5,
            "was changed",
        ),
        ("result edited", |lines| lines[5] = lines[5].replace("\"ok\"", "\"no\""), 6, "was changed"),
        ("removed", |lines| drop(lines.remove(4)), 5, "entry 4 is missing"),
        ("reordered", |lines| lines.swap(4, 5), 5, "entry 4 is missing"),
        ("repeated", |lines| lines.insert(5, lines[4].clone()), 6, "entry 5 is missing"),
        ("not an entry", |lines| lines[4] = "{}".to_owned(), 5, "not an audit entry"),
        ("tail removed", |lines| lines.truncate(6), 7, "are missing"),
        (
            "header changed",
            |lines| lines[0] = lines[0].replace("\"first\":1", "\"first\":2"),
            1,
            "its file name has",
        ),
        (
            "rewritten with new hashes",
            |lines| {
                lines[4] = lines[4].replace("\"ok\"", "\"no\"");
                rehash(lines);
            },
            0,
            "differs from the digest in the store",
        ),
    ];
    for (what, change, line, says) in cases {
        let mut changed = good.clone();
        change(&mut changed);
        assert_ne!(changed, good, "{what}");
        write(&file, &changed);
        let (code, text) = verify(folder.path());
        let line = if line == 0 { last } else { line };
        assert_eq!(code, 3, "{what}: {text}");
        assert!(text.contains(&format!("{name} line {line}: ")) && text.contains(says), "{what}: {text}");
    }
    // As JSON, with the place and the reason.
    let output = abide(&["audit", "--verify", "--data", "data", "-o", "json"], folder.path(), b"");
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!((&found["intact"], &found["problem"]["line"]), (&json!(false), &json!(last)));
    assert_eq!(output.status.code(), Some(3));
    // All files removed.
    std::fs::remove_file(&file).expect("it is removed");
    let (code, text) = verify(folder.path());
    assert!(code == 3 && text.contains(&format!("entries 1 to {} are missing", last - 1)), "{text}");
    // Back to what it was.
    write(&file, &good);
    is_intact(folder.path());
}

/// A gateway does not repair what was removed: it continues the chain, and the gap stays visible.
#[test]
fn a_restart_does_not_hide_a_removed_tail() {
    let folder = Workspace::new();
    let gateway = start(folder.path(), &[]);
    for number in 0..5 {
        assert!(register(&gateway.server, &format!("p-{number}")));
    }
    stop(gateway);
    let file = files(folder.path()).pop().expect("a file");
    let mut kept = lines(&file);
    let removed = kept.len() - 2;
    kept.truncate(kept.len() - 2);
    write(&file, &kept);
    let gateway = start(folder.path(), &[]);
    assert!(log_of(folder.path()).contains("the audit log is not intact"), "{}", log_of(folder.path()));
    assert!(register(&gateway.server, "after"));
    let says = format!("entries {} to {} are missing", removed, removed + 1);
    let (code, text) = verify(folder.path());
    assert!(code == 3 && text.contains(&says), "{says}: {text}");
    let (_, text) = gateway.server.send("GET", "/api/abide/v1/audit/verify", &auth("all"), b"");
    assert!(text.contains(&says), "{text}");
    stop(gateway);
    let (code, text) = verify(folder.path());
    assert!(code == 3 && text.contains(&says), "{text}");
}

#[test]
fn files_are_rotated_and_the_oldest_are_deleted_and_counted() {
    let folder = Workspace::new();
    let limits = ["--audit-max-bytes", "4096", "--audit-keep", "3"];
    let gateway = start(folder.path(), &limits);
    let mut number = 0;
    until("the first file is deleted", || {
        number += 1;
        assert!(register(&gateway.server, &format!("p-{number}")));
        !files(folder.path())[0].ends_with("audit-000000000001.jsonl")
    });
    until("old files are deleted", || files(folder.path()).len() <= 3);
    let seen = entries(folder.path(), &[]);
    let numbers: Vec<u64> = seen.iter().filter_map(|entry| entry["seq"].as_u64()).collect();
    assert!(numbers[0] > 1 && numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
    let text = is_intact(folder.path());
    assert!(text.contains(&format!("({} to ", numbers[0])), "{text}");
    for file in files(folder.path()) {
        let size = std::fs::metadata(&file).expect("a file").len();
        assert!(size < 4096 + 2000, "{} has {size} bytes", file.display());
    }
    stop(gateway);
    is_intact(folder.path());
    assert_eq!(files(folder.path()).len(), 3);
    // A restart continues the last file, and a page continues across files.
    let gateway = start(folder.path(), &limits);
    assert!(register(&gateway.server, "again"));
    let mut after = 0;
    let mut paged: Vec<u64> = Vec::new();
    loop {
        let path = format!("/api/abide/v1/audit?limit=7&after={after}");
        let (_, text) = gateway.server.send("GET", &path, &auth("all"), b"");
        let page: Value = serde_json::from_str(&text).expect("JSON");
        let entries = page["data"]["entries"].as_array().expect("entries");
        paged.extend(entries.iter().filter_map(|entry| entry["seq"].as_u64()));
        match page["data"]["more"].as_u64() {
            Some(more) => after = more,
            None => break,
        }
    }
    assert!(paged.len() > 7 && paged.windows(2).all(|pair| pair[1] == pair[0] + 1), "{paged:?}");
    stop(gateway);
    // A file that another program deleted.
    let all = files(folder.path());
    let second = std::fs::read(&all[1]).expect("a file");
    for (removed, says) in [(&all[0], "line 1: entries"), (&all[1], "line 1: entries")] {
        let text = std::fs::read(removed).expect("a file");
        std::fs::remove_file(removed).expect("it is removed");
        let (code, shown) = verify(folder.path());
        assert!(code == 3 && shown.contains(says) && shown.contains("are missing"), "{shown}");
        std::fs::write(removed, text).expect("it is back");
    }
    assert_eq!(std::fs::read(&all[1]).expect("a file"), second);
    is_intact(folder.path());
}

/// Sets the maximum size of files of a process.
fn limit_file_size(pid: u32, bytes: Option<u64>) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).expect("a limit");
}

#[test]
fn a_log_that_cannot_be_written_refuses_changes_until_it_can() {
    let folder = Workspace::new();
    let gateway = start(folder.path(), &[]);
    let server = &gateway.server;
    assert!(register(server, "before"));
    // Refused calls write no store: only the audit file reaches the limit.
    let size = std::fs::metadata(files(folder.path()).pop().expect("a file")).expect("a file").len();
    limit_file_size(gateway.child.id(), Some(size + 20_000));
    let many: Vec<String> = (0..5000).map(|n| format!("10.1.{}.{}", n / 250, n % 250)).collect();
    let refused = body("db", "sql", &many, 0).to_string();
    let path = "/api/c/compapi/v2/gse/register_proc_info/";
    server.send("POST", path, &auth("web"), refused.as_bytes());
    let ready = || server.send("GET", "/readyz", "", b"");
    until("the gateway is not ready", || ready().1.contains("the audit log cannot be written"));
    assert!(!register(server, "meanwhile"));
    let (status, text) = server.send("GET", "/api/abide/v1/processes", &auth("all"), b"");
    assert!(
        status == 200 && text.contains("before") && !text.contains("meanwhile"),
        "reads continue: {text}"
    );
    let (_, metrics) = server.send("GET", "/metrics", &auth("all"), b"");
    assert!(metrics.contains("abide_gateway_audit_failing 1"), "{metrics}");
    assert!(log_of(folder.path()).contains("cannot write the audit log"), "{}", log_of(folder.path()));
    is_intact(folder.path());
    limit_file_size(gateway.child.id(), None);
    until("it is ready again", || ready().0 == 200);
    assert!(register(server, "after"));
    let all = entries(folder.path(), &[]);
    let is_refused = |entry: &Value| entry["event"] == "refused" && entry["who"]["name"] == "web";
    let waited = all.iter().find(|entry| is_refused(entry)).expect("the entry that waited");
    assert_eq!(waited["what"]["instances"][0]["hosts"].as_array().map(Vec::len), Some(5000));
    stop(gateway);
    is_intact(folder.path());
}
