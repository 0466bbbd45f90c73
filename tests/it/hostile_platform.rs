//! Platforms that lag, lose, cut and falsify responses: nothing starts twice, no other process is stopped, reports
//! are correct, and a run ends by its deadline.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::dialects::{Daemon, Fleet};
use crate::http::Request;
use crate::support::command;
use crate::system::is_alive;

/// What goes wrong between a controller and its platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultKind {
    None,
    /// Every answer comes late.
    Lags,
    /// The first results lack rows.
    DropsRows,
    /// Results never come to an end.
    Says115,
    /// No result has any row, ever.
    NoRows,
    /// The same for every call, observations included: nothing can be known.
    Mute,
    /// A task is not queued when it is first asked about.
    NotQueued,
    /// No agent is there, for a while.
    Says117,
    /// An operation is refused by the server before it has an effect.
    BreaksBefore,
    /// The same after it had one.
    BreaksAfter,
    /// The platform has lost GSE, after the effect.
    Says50001,
    /// Too many requests.
    Busy,
    BusyByCode,
    ResetsBefore,
    ResetsAfter,
    /// Every first answer of its kind is cut in two.
    Truncates,
    /// Rows of others stand among ours, in another order.
    Swaps,
    /// Lists stay as they were when they were first asked for.
    Stale,
    /// The first questions for results are lost on the way.
    LosesResults,
    LosesGse,
    /// A check after an operation that came too late.
    Says836,
    /// A command that failed.
    Says65535,
}

struct Proxy {
    address: SocketAddr,
    evil: Arc<Mutex<FaultKind>>,
    ends: Arc<AtomicBool>,
}

#[derive(Default)]
struct Memory {
    /// How often each call came.
    seen: HashMap<String, usize>,
    /// The first answer to each question.
    first: HashMap<(String, Vec<u8>), Vec<u8>>,
}

impl Proxy {
    fn before(platform: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (evil, ends) = (Arc::new(Mutex::new(FaultKind::None)), Arc::new(AtomicBool::new(false)));
        let (way, over) = (Arc::clone(&evil), Arc::clone(&ends));
        let memory = Arc::new(Mutex::new(Memory::default()));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(stream), way, memory) = (stream, Arc::clone(&way), Arc::clone(&memory)) else {
                    continue;
                };
                std::thread::spawn(move || serve(stream, platform, &way, &memory));
            }
        });
        Proxy { address, evil, ends }
    }

    fn be(&self, evil: FaultKind) {
        *self.evil.lock().expect("a lock") = evil;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

/// One request, whole: its path and all of its bytes.
fn request(stream: &mut TcpStream) -> Option<(String, Vec<u8>, Vec<u8>)> {
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let Request { path, head, body } = Request::read(stream)?;
    // One request a connection.
    let whole = format!("{}\r\nConnection: close\r\n\r\n", head.trim_end());
    Some((path.to_ascii_lowercase(), body.clone(), [whole.into_bytes(), body].concat()))
}

fn forward(platform: SocketAddr, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(platform).ok()?;
    stream.write_all(bytes).ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    Some(answer)
}

fn with_body(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
        .into_bytes()
}

fn failed(code: i64) -> String {
    json!({"result": false, "code": code, "message": "no", "data": null}).to_string()
}

/// What a fault answers without a call of the platform; empty: the connection ends.
fn answer_in_its_place(evil: FaultKind, nth: usize, is_result: bool, acts: bool) -> Option<Vec<u8>> {
    match evil {
        FaultKind::Lags => {
            std::thread::sleep(Duration::from_millis(150));
            None
        }
        FaultKind::NotQueued if is_result && nth <= 2 => Some(with_body("200 OK", &failed(1_000_115))),
        FaultKind::LosesResults if is_result && nth <= 2 => {
            Some(with_body("502 Bad Gateway", "<html>no</html>"))
        }
        FaultKind::LosesGse if is_result && nth <= 2 => Some(with_body("200 OK", &failed(50_001))),
        FaultKind::BreaksBefore if acts && nth == 1 => Some(with_body("502 Bad Gateway", "<html>no</html>")),
        FaultKind::Busy if nth <= 2 => Some(with_body("429 Too Many Requests", "")),
        FaultKind::BusyByCode if nth <= 2 => Some(with_body("200 OK", &failed(1_642_902))),
        FaultKind::ResetsBefore if acts && nth == 1 => Some(Vec::new()),
        _ => None,
    }
}

fn serve(mut stream: TcpStream, platform: SocketAddr, evil: &Mutex<FaultKind>, memory: &Mutex<Memory>) {
    let Some((path, body, bytes)) = request(&mut stream) else { return };
    let evil = *evil.lock().expect("a lock");
    let is_result = path.contains("result");
    let operates = path.contains("operate_proc") && !is_result
        || path.contains("manage_proc")
        || path.contains("proc_info");
    let is_list = path.contains("status") || path.contains("sync");
    let asks = body_of(&body).pointer("/op_type") == Some(&json!(2))
        || String::from_utf8_lossy(&body).contains("\"op_type\":2");
    let nth = {
        let mut memory = memory.lock().expect("a lock");
        let nth = memory.seen.entry(format!("{evil:?}{path}")).or_default();
        *nth += 1;
        *nth
    };
    let acts = operates && !asks;
    if let Some(answer) = answer_in_its_place(evil, nth, is_result, acts) {
        let _ = stream.write_all(&answer);
        return;
    }
    let Some(answer) = forward(platform, &bytes) else { return };
    let answer = match evil {
        FaultKind::BreaksAfter if acts && nth == 1 => with_body("504 Gateway Timeout", "<html>late</html>"),
        FaultKind::Says50001 if acts && nth == 1 => with_body("200 OK", &failed(50_001)),
        FaultKind::ResetsAfter if acts && nth == 1 => return,
        FaultKind::Truncates if nth == 1 => answer[..answer.len() - answer.len() / 4].to_vec(),
        FaultKind::DropsRows if is_result && nth <= 2 => altered(&answer, |_| None),
        FaultKind::NoRows if is_result => altered(&answer, |row| is_status_query(row).then(|| row.clone())),
        FaultKind::Mute if is_result => altered(&answer, |_| None),
        FaultKind::Says115 if is_result => altered(&answer, |row| match is_status_query(row) {
            true => Some(row.clone()),
            false => Some(json!({"error_code": 115, "error_msg": "", "content": ""})),
        }),
        FaultKind::Says117 if is_result => altered(&answer, |_| {
            Some(json!({"error_code": 117, "error_msg": "agent missing", "content": ""}))
        }),
        FaultKind::Says836 | FaultKind::Says65535 if is_result => {
            altered(&answer, |row| match is_status_query(row) {
                true => Some(row.clone()),
                false => {
                    let code = if evil == FaultKind::Says836 { 836 } else { 65535 };
                    Some(json!({"error_code": code, "error_msg": "no luck", "content": ""}))
                }
            })
        }
        FaultKind::Swaps if is_result => swapped(&answer),
        FaultKind::Stale if is_list => {
            let mut memory = memory.lock().expect("a lock");
            memory.first.entry((path, body)).or_insert(answer).clone()
        }
        _ => answer,
    };
    let _ = stream.write_all(&answer);
}

fn body_of(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_default()
}

/// Only a status query has content.
fn is_status_query(row: &Value) -> bool {
    row["content"].as_str().is_none_or(|text| !text.is_empty()) && !row["content"].is_null()
}

/// An answer with each row changed, or left out.
fn altered(answer: &[u8], change: impl Fn(&Value) -> Option<Value>) -> Vec<u8> {
    rows(answer, |rows| {
        let old = std::mem::take(rows);
        rows.extend(old.into_iter().filter_map(|(key, row)| Some((key, change(&row)?))));
    })
}

fn swapped(answer: &[u8]) -> Vec<u8> {
    rows(answer, |rows| {
        let failed = json!({"error_code": 65535, "error_msg": "another's", "content": ""});
        let others: Vec<String> = rows.keys().map(|key| format!("9:{key}")).collect();
        rows.extend(others.into_iter().map(|key| (key, failed.clone())));
    })
}

fn rows(answer: &[u8], change: impl Fn(&mut serde_json::Map<String, Value>)) -> Vec<u8> {
    let text = String::from_utf8_lossy(answer);
    let Some((_, body)) = text.split_once("\r\n\r\n") else { return answer.to_vec() };
    let mut envelope: Value = serde_json::from_str(body).unwrap_or_default();
    let data = match envelope.pointer("/data/result").is_some() {
        true => envelope.pointer_mut("/data/result"),
        false => envelope.get_mut("data"),
    };
    if let Some(rows) = data.and_then(Value::as_object_mut) {
        change(rows);
    }
    with_body("200 OK", &envelope.to_string())
}

fn starts(fleet: &Fleet, name: &str) -> usize {
    let started = |line: &&String| line.starts_with(&format!("start {name} "));
    fleet.effects().iter().filter(started).count()
}

const FAULTS: [FaultKind; 17] = [
    FaultKind::Lags,
    FaultKind::DropsRows,
    FaultKind::Says115,
    FaultKind::NoRows,
    FaultKind::Mute,
    FaultKind::NotQueued,
    FaultKind::Says117,
    FaultKind::BreaksBefore,
    FaultKind::BreaksAfter,
    FaultKind::Says50001,
    FaultKind::Busy,
    FaultKind::BusyByCode,
    FaultKind::ResetsBefore,
    FaultKind::ResetsAfter,
    FaultKind::Truncates,
    FaultKind::Swaps,
    FaultKind::Stale,
];

fn survives_faults(dialect: &'static str, evils: &[FaultKind]) {
    let fleet = Fleet::new(dialect);
    let proxy = Proxy::before(fleet.system.server.address);
    fleet.target(&format!("http://{}", proxy.address), "");
    let names = [
        "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9", "p10", "p11", "p12", "p13", "p14", "p15", "p16",
    ];
    // One that nothing is ever asked of.
    fleet.write(&Daemon::new("calm"));
    fleet.well("in peace", &[]);
    let calm = fleet.pid("calm");
    for (evil, name) in evils.iter().zip(names) {
        let told = |what: &str, (code, out, err): &(i32, String, String)| {
            format!("{dialect} {evil:?} {what}: exit {code}\n{out}{err}\n{:?}", fleet.effects())
        };
        // Something new.
        let mut one = Daemon::new(name);
        fleet.write(&one);
        proxy.be(*evil);
        let begin = Instant::now();
        let ended = fleet.apply(&["--timeout", "40s"]);
        assert!(begin.elapsed() < Duration::from_secs(60), "{}", told("too long", &ended));
        assert!([0, 3, 5].contains(&ended.0), "{}", told("new", &ended));
        assert!(starts(&fleet, name) <= 1, "{}", told("new", &ended));
        if ended.0 == 0 {
            assert!(fleet.pid(name).is_some_and(is_alive), "{}", told("it says that all is well", &ended));
        }
        proxy.be(FaultKind::None);
        let ended = fleet.apply(&[]);
        assert_eq!((ended.0, starts(&fleet, name)), (0, 1), "{}", told("afterwards", &ended));
        let first = fleet.pid(name);
        assert!(first.is_some_and(is_alive), "{}", told("it runs", &ended));
        // Another identity: stopped once, started once.
        one.pid_file = "second";
        fleet.write(&one);
        proxy.be(*evil);
        let ended = fleet.apply(&["--timeout", "40s"]);
        assert!([0, 3, 5].contains(&ended.0), "{}", told("replaced", &ended));
        proxy.be(FaultKind::None);
        let ended = fleet.apply(&[]);
        assert_eq!((ended.0, starts(&fleet, name)), (0, 2), "{}", told("replaced, afterwards", &ended));
        let stopped = fleet.effects().iter().filter(|line| **line == format!("stop {name}")).count();
        assert_eq!(stopped, 1, "{}", told("replaced, afterwards", &ended));
        assert!(!first.is_some_and(is_alive), "{}", told("the old one is gone", &ended));
        assert_eq!(fleet.pid("calm"), calm, "{}", told("no call asked for it", &ended));
    }
    assert_eq!(starts(&fleet, "calm"), 1);
}

fn some(dialect: &'static str) {
    // What takes its time to be found out stands apart.
    let slow = [FaultKind::Says115, FaultKind::NoRows, FaultKind::Mute];
    let quick: Vec<FaultKind> = FAULTS.into_iter().filter(|evil| !slow.contains(evil)).collect();
    survives_faults(dialect, &quick);
}

#[test]
fn gse_v1_endures_a_hostile_platform() {
    survives_faults(
        "gse-v1",
        &[
            FaultKind::DropsRows,
            FaultKind::BreaksBefore,
            FaultKind::BreaksAfter,
            FaultKind::ResetsAfter,
            FaultKind::Truncates,
            FaultKind::Stale,
        ],
    );
}

#[test]
fn gse_v2_endures_a_hostile_platform() {
    some("gse-v2");
}

#[test]
fn gse_apigw_endures_a_hostile_platform() {
    survives_faults(
        "gse-apigw",
        &[
            FaultKind::Busy,
            FaultKind::ResetsBefore,
            FaultKind::ResetsAfter,
            FaultKind::Truncates,
            FaultKind::Swaps,
        ],
    );
}

#[test]
fn job_endures_a_hostile_platform() {
    survives_faults(
        "job",
        &[FaultKind::NotQueued, FaultKind::ResetsAfter, FaultKind::Truncates, FaultKind::Swaps],
    );
}

#[test]
fn missing_results_are_inferred_from_observation() {
    survives_faults("gse-v2", &[FaultKind::Says115, FaultKind::NoRows]);
}

#[test]
fn an_unknowable_outcome_is_reported_as_unknown() {
    survives_faults("gse-v2", &[FaultKind::Mute]);
}

/// One answer that is lost does not end a look.
#[test]
fn a_live_check_is_polled_again() {
    let fleet = Fleet::new("job");
    let proxy = Proxy::before(fleet.system.server.address);
    fleet.target(&format!("http://{}", proxy.address), "");
    fleet.write(&Daemon::new("x"));
    fleet.well("in peace", &[]);
    for evil in [FaultKind::LosesResults, FaultKind::LosesGse, FaultKind::Busy] {
        proxy.be(evil);
        let (code, out, err) = fleet.run(&["plan", "m", "--owner", "team"]);
        assert!(code == 0 && out.contains("nothing to do"), "{evil:?}: {code} {out}{err}");
    }
}

/// A one-shot has run when its check comes too late, and also when it ends badly: neither the next run nor one that comes
/// after a death begins it again.
#[test]
fn a_failed_one_shot_is_not_run_twice() {
    for (evil, exit) in [(FaultKind::Says836, 0), (FaultKind::Says65535, 3)] {
        for nth in 1.. {
            let fleet = Fleet::new("job");
            let proxy = Proxy::before(fleet.system.server.address);
            fleet.target(&format!("http://{}", proxy.address), "");
            fleet.once("once", "echo start once >> effects");
            proxy.be(evil);
            let args = ["apply", "m", "--yes", "--owner", "team", "--target", "it"];
            let mut dies = command(&args, fleet.system.folder.path());
            dies.env("IT_SECRET", "s3cret").env("ABIDE_DIE_AFTER", nth.to_string()).stdin(Stdio::null());
            let code = dies.output().expect("it ends").status.code();
            // What it left is settled by the next one.
            let told = fleet.apply(&[]);
            proxy.be(FaultKind::None);
            let told = [told, fleet.apply(&[])];
            assert!(fleet.effects().len() <= 1, "{evil:?}, death {nth}: {told:?} {:?}", fleet.effects());
            // A run that a slow agent left without a step proves nothing; one with all of them ends the search.
            if code == Some(exit) && nth > 3 && fleet.effects().len() == 1 {
                break;
            }
            assert!(nth < 60, "{evil:?}: no run got to its end: {code:?}, {told:?}");
        }
    }
}
