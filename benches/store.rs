//! Store benchmark: the store in a file, with durability on. `cargo bench --bench store` prints how long 100,000 specs take to be written
//! in transactions of 1,000 and one by one by many at once, to be read by key and page by page, how long opening takes
//! with them, and how much memory a process that holds them needs. `ABIDE_KEY_FILE=none` measures without encryption.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use abide::store::{Embedded, KeySource, Store, Txn};

const ENTRIES: usize = 100_000;
/// Asks this program to open a file and print its memory.
const PEAK: &str = "--peak-of";

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().expect("a runtime");
    if let Some(at) = args.iter().position(|arg| arg == PEAK) {
        return tell_peak(Path::new(&args[at + 1]));
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("store.db");
    runtime.block_on(measure(&file));
    let begin = Instant::now();
    let store = Embedded::open_keyed(&file, &keys(&file)).expect("it opens");
    say("open, with a check of the file", begin.elapsed(), "");
    drop(store);
    let program = std::env::current_exe().expect("this program");
    let output = std::process::Command::new(program).arg(PEAK).arg(&file).output().expect("it runs");
    println!("peak memory of a process that opened it: {}", String::from_utf8_lossy(&output.stdout).trim());
}

async fn measure(file: &Path) {
    let store = Embedded::open_keyed(file, &keys(file)).expect("it opens");
    let value = |n: usize| format!("{{\"spec\":\"{}\",\"n\":{n}}}", "x".repeat(900));
    let begin = Instant::now();
    for part in 0..ENTRIES / 1_000 {
        let txn = (part * 1_000..(part + 1) * 1_000)
            .fold(Txn::default(), |txn, n| txn.and(Txn::put(key(n), value(n))));
        store.txn(txn).await.expect("a write");
    }
    let took = begin.elapsed();
    say("100,000 entries of 0.9 KB, 1,000 a transaction", took, "");
    let store = Arc::new(store);
    let (writers, each) = (64, 200);
    let begin = Instant::now();
    let mut all = tokio::task::JoinSet::new();
    for writer in 0..writers {
        let store = Arc::clone(&store);
        all.spawn(async move {
            for n in 0..each {
                store.txn(Txn::put(format!("w/{writer}/{n}"), "x")).await.expect("a write");
            }
        });
    }
    all.join_all().await;
    let took = begin.elapsed();
    let rate = (writers * each) as f64 / took.as_secs_f64();
    say("12,800 transactions by 64 writers", took, &format!("{rate:.0} a second"));
    let begin = Instant::now();
    for n in 0..ENTRIES {
        assert!(store.get(&key(n)).await.expect("a read").is_some());
    }
    let took = begin.elapsed();
    say("100,000 reads by key", took, &format!("{:.1} µs each", took.as_secs_f64() * 1e6 / ENTRIES as f64));
    let begin = Instant::now();
    let page = store.range("reg/", Some(&key(50_000)), 1_000).await.expect("a page");
    assert_eq!(page.entries.len(), 1_000);
    say("a page of 1,000", begin.elapsed(), "");
}

/// The keys of the product's own stores.
fn keys(file: &Path) -> KeySource {
    match std::env::var_os("ABIDE_KEY_FILE").is_some_and(|value| value == "none") {
        true => KeySource::None,
        false => KeySource::File(file.with_file_name("key")),
    }
}

fn key(n: usize) -> String {
    format!("reg/0:10.{}.{}.{}/web/proc-{n:06}", n / 65_536, n / 256 % 256, n % 256)
}

fn say(what: &str, took: Duration, more: &str) {
    println!("{what:<50} {took:>10.1?}   {more}");
}

fn tell_peak(file: &Path) {
    let store = Embedded::open_keyed(file, &keys(file)).expect("it opens");
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("unknown");
    println!("{}", peak.trim());
    drop(store);
}
