//! The store: what every engine must do, and what the one in a file must survive: death at any moment, a disk that is
//! full, a file that is damaged, another process that writes to it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use abide::store::{Change, Embedded, Error, Holder, LeaseAttempt, Outcome, Store, Txn, Write};

use crate::support::until;

/// Runs a future to its end.
fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(future)
}

fn embedded(folder: &tempfile::TempDir) -> Embedded {
    Embedded::open(&folder.path().join("store.db")).expect("it opens")
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

// ---- What every engine must do. Another engine adds a line here.

macro_rules! every_engine {
    ($($claim:ident),* $(,)?) => {
        mod in_a_file {
            $(#[test]
            fn $claim() {
                let folder = super::folder();
                super::run(super::$claim(super::embedded(&folder)));
            })*
        }
        mod in_a_file_for_one {
            $(#[test]
            fn $claim() {
                let folder = super::folder();
                let store = super::Embedded::open_alone(&folder.path().join("store.db")).expect("it opens");
                super::run(super::$claim(store));
            })*
        }
    };
}

every_engine!(
    what_is_written_can_be_read,
    a_transaction_is_all_or_nothing,
    compare_and_write_lets_one_of_many_win,
    ranges_come_in_pages_and_in_order,
    a_slice_is_what_a_reader_who_counts_expects,
    changes_come_from_any_number_on,
    a_lease_has_one_holder_and_a_number_that_grows,
);

async fn value(store: &impl Store, key: &str) -> Option<String> {
    let entry = store.get(key).await.expect("a read")?;
    Some(String::from_utf8_lossy(&entry.value).into_owned())
}

async fn what_is_written_can_be_read(store: impl Store) {
    assert_eq!(store.get("a").await, Ok(None));
    let Ok(Outcome::Written(first)) = store.txn(Txn::put("a", "1")).await else { panic!("not written") };
    let entry = store.get("a").await.expect("a read").expect("it is there");
    assert_eq!((&*entry.key, &*entry.value, entry.mod_seq), ("a", &b"1"[..], first));
    let Ok(Outcome::Written(second)) = store.txn(Txn::put("a", "2")).await else { panic!("not written") };
    assert!(second > first);
    assert_eq!(value(&store, "a").await.as_deref(), Some("2"));
    store.txn(Txn::delete("a")).await.expect("a delete");
    store.txn(Txn::delete("never there")).await.expect("no error");
    assert_eq!(value(&store, "a").await, None);
    // Any bytes, none, and keys of all kinds.
    store.txn(Txn::put("é/中文 \u{0}", vec![0, 255, 10])).await.expect("a write");
    store.txn(Txn::put("empty", "")).await.expect("a write");
    assert_eq!(
        store.get("é/中文 \u{0}").await.expect("a read").map(|e| e.value.to_vec()),
        Some(vec![0, 255, 10])
    );
    assert_eq!(value(&store, "empty").await.as_deref(), Some(""));
}

async fn a_slice_is_what_a_reader_who_counts_expects(store: impl Store) {
    for n in 0..40 {
        store.txn(Txn::put(format!("reg/web/{n:02}"), vec![n])).await.expect("written");
        store.txn(Txn::put(format!("reg/we/{n:02}"), vec![n])).await.expect("written");
    }
    for n in 10..20 {
        store.txn(Txn::delete(format!("reg/web/{n:02}"))).await.expect("deleted");
        store.txn(Txn::delete(format!("reg/web/{n:02}"))).await.expect("deleted again");
    }
    let all: Vec<u8> = (0..10).chain(20..40).collect();
    for (skip, limit) in (0..35).flat_map(|skip| [0, 1, 7, 100].map(|limit| (skip, limit))) {
        for (prefix, count) in [("reg/web/", 30), ("reg/we", 70)] {
            let (entries, counted) = store.slice(prefix, skip, limit).await.expect("a slice");
            assert_eq!(counted, count);
            let found: Vec<u8> = entries.iter().map(|entry| entry.value[0]).collect();
            let expected: Vec<u8> = match prefix {
                "reg/web/" => all.iter().copied().skip(skip).take(limit).collect(),
                _ => (0..40).chain(all.iter().copied()).skip(skip).take(limit).collect(),
            };
            assert_eq!(found, expected, "{prefix} {skip} {limit}");
        }
    }
    assert_eq!(store.slice("reg/web/", usize::MAX, usize::MAX).await.expect("a slice").0, []);
}

async fn a_transaction_is_all_or_nothing(store: impl Store) {
    store.txn(Txn::put("there", "1")).await.expect("a write");
    let two = Txn::put("a", "1").and(Txn::put("b", "1"));
    assert_eq!(store.txn(two.clone().only_if("there", 0)).await, Ok(Outcome::Conflict("there".into())));
    assert_eq!((value(&store, "a").await, value(&store, "b").await), (None, None));
    let Ok(Outcome::Written(number)) = store.txn(two.only_if("new", 0)).await else { panic!("not written") };
    for key in ["a", "b"] {
        assert_eq!(
            store.get(key).await.expect("a read").map(|entry| entry.mod_seq),
            Some(number),
            "one number"
        );
    }
    let moved = Txn {
        compares: Vec::new(),
        writes: vec![Write::Delete("a".into()), Write::Put("c".into(), b"1".to_vec())],
    };
    store.txn(moved).await.expect("a write");
    assert_eq!((value(&store, "a").await, value(&store, "c").await.as_deref()), (None, Some("1")));
}

async fn compare_and_write_lets_one_of_many_win(store: impl Store) {
    store.txn(Txn::put("n", "0")).await.expect("a write");
    let store = std::sync::Arc::new(store);
    // Fifty who each add one, beginning anew whenever somebody was quicker.
    async fn add(store: std::sync::Arc<impl Store>) {
        loop {
            let entry = store.get("n").await.expect("a read").expect("it is there");
            let n: u32 = std::str::from_utf8(&entry.value).expect("text").parse().expect("a number");
            let txn = Txn::put("n", (n + 1).to_string()).only_if("n", entry.mod_seq);
            if let Outcome::Written(_) = store.txn(txn).await.expect("an answer") {
                return;
            }
            tokio::task::yield_now().await;
        }
    }
    let mut all = tokio::task::JoinSet::new();
    (0..50).for_each(|_| {
        all.spawn(add(store.clone()));
    });
    all.join_all().await;
    assert_eq!(value(&*store, "n").await.as_deref(), Some("50"));
}

async fn ranges_come_in_pages_and_in_order(store: impl Store) {
    for key in ["b/2", "a", "b/1", "b/10", "b", "c/1", "b/3"] {
        store.txn(Txn::put(key, key)).await.expect("a write");
    }
    let (mut keys, mut after) = (Vec::new(), None);
    loop {
        let page = store.range("b/", after.as_deref(), 2).await.expect("a page");
        assert!(page.entries.len() <= 2);
        keys.extend(page.entries.iter().map(|entry| entry.key.to_string()));
        match page.more {
            Some(more) => after = Some(more.to_string()),
            None => break,
        }
    }
    assert_eq!(keys, ["b/1", "b/10", "b/2", "b/3"]);
    assert_eq!(store.range("", None, 100).await.expect("a page").entries.len(), 7);
    assert!(store.range("x", None, 100).await.expect("a page").entries.is_empty());
}

async fn changes_come_from_any_number_on(store: impl Store) {
    let Ok(Outcome::Written(first)) = store.txn(Txn::put("w/a", "1")).await else { panic!("not written") };
    store.txn(Txn::put("other", "1")).await.expect("a write");
    store.txn(Txn::put("w/a", "2").and(Txn::delete("w/b"))).await.expect("a write");
    let shown = |changes: Vec<Change>| -> Vec<String> {
        let value = |change: &Change| change.value.as_ref().map(|v| String::from_utf8_lossy(v).into_owned());
        changes.iter().map(|change| format!("{} {:?}", change.key, value(change))).collect()
    };
    let all = store.changes("w/", 0).await.expect("changes");
    assert_eq!(shown(all), ["w/a Some(\"1\")", "w/a Some(\"2\")", "w/b None"]);
    let later = store.changes("w/", first).await.expect("changes");
    assert_eq!(shown(later.clone()), ["w/a Some(\"2\")", "w/b None"]);
    // Who waits is woken by the first change that concerns them.
    let last = later.last().expect("a change").number;
    let store = std::sync::Arc::new(store);
    let writer = store.clone();
    let write = async move {
        writer.txn(Txn::put("other", "2")).await.expect("a write");
        writer.txn(Txn::put("w/c", "3")).await.expect("a write");
    };
    let (changes, ()) = tokio::join!(store.changes("w/", last), write);
    assert_eq!(shown(changes.expect("changes")), ["w/c Some(\"3\")"]);
}

async fn a_lease_has_one_holder_and_a_number_that_grows(store: impl Store) {
    let (me, long, short) = (Holder::this("me"), Duration::from_secs(60), Duration::from_millis(1));
    let Ok(LeaseAttempt::Ours(lease)) = store.take_lease("writer", &me, long).await else {
        panic!("not taken")
    };
    // Somebody who is alive: this very process under another name.
    let other = Holder::this("other");
    let Ok(LeaseAttempt::Theirs { holder, generation, .. }) = store.take_lease("writer", &other, long).await
    else {
        panic!("taken twice")
    };
    assert_eq!((holder.id.as_str(), generation), ("me", lease.generation));
    assert_eq!(store.renew_lease(&lease, long).await, Ok(true));
    store.release_lease(&lease).await.expect("a release");
    assert_eq!(store.renew_lease(&lease, long).await, Ok(false), "what was given up is not renewed");
    let Ok(LeaseAttempt::Ours(second)) = store.take_lease("writer", &other, short).await else {
        panic!("not taken")
    };
    assert!(second.generation > lease.generation);
    tokio::time::sleep(Duration::from_millis(5)).await;
    let Ok(LeaseAttempt::Ours(third)) = store.take_lease("writer", &me, long).await else {
        panic!("it expired")
    };
    assert!(third.generation > second.generation);
    assert_eq!(store.renew_lease(&second, long).await, Ok(false));
    // Another lease is another lease.
    assert!(matches!(store.take_lease("leader", &other, long).await, Ok(LeaseAttempt::Ours(_))));
}

// ---- What the engine in a file must survive.

#[test]
fn acknowledged_writes_survive_reopening() {
    let folder = folder();
    let number = run(async {
        let store = embedded(&folder);
        let Ok(Outcome::Written(number)) = store.txn(Txn::put("a", "1")).await else { panic!("not written") };
        number
    });
    run(async {
        let store = embedded(&folder);
        assert_eq!(value(&store, "a").await.as_deref(), Some("1"));
        let Ok(Outcome::Written(next)) = store.txn(Txn::put("a", "2")).await else { panic!("not written") };
        assert!(next > number, "numbers go on");
    });
}

#[test]
fn two_processes_share_a_file() {
    let folder = folder();
    // Two handles are two connections and two copies, as two processes have.
    let (one, other) = (embedded(&folder), embedded(&folder));
    run(async {
        for n in 0..20 {
            let (writer, reader) = if n % 2 == 0 { (&one, &other) } else { (&other, &one) };
            writer.txn(Txn::put("n", n.to_string())).await.expect("a write");
            assert_eq!(value(reader, "n").await, Some(n.to_string()));
        }
        let seen = one.changes("n", 0).await.expect("changes").len();
        assert_eq!(seen, 20);
        let (changes, written) = tokio::join!(one.changes("later", 0), other.txn(Txn::put("later", "1")));
        assert_eq!(
            (changes.expect("changes").len(), written.is_ok()),
            (1, true),
            "a waiting reader is woken"
        );
    });
}

#[test]
fn old_changes_are_compacted_and_reported() {
    let folder = folder();
    let store = embedded(&folder);
    run(async {
        for part in 0..110 {
            let many = (0..1_000).map(|n| Txn::put(format!("k/{part}/{n}"), "x"));
            let mut all = tokio::task::JoinSet::new();
            for txn in many {
                let store = store.clone();
                all.spawn(async move { store.txn(txn).await.expect("a write") });
            }
            all.join_all().await;
        }
        assert_eq!(store.changes("", 0).await, Err(Error::Compacted));
        let last = store.range("", None, 1).await.expect("a page").as_of;
        assert_eq!(store.changes("", last - 10).await.expect("changes").len(), 10);
    });
    // A second handle that fell behind by that much looks at everything anew.
    let late = embedded(&folder);
    assert_eq!(run(late.range("k/", None, 1_000_000)).expect("a page").entries.len(), 110_000);
}

#[test]
fn a_damaged_file_is_refused_with_a_hint() {
    let folder = folder();
    let file = folder.path().join("store.db");
    run(async {
        let store = embedded(&folder);
        for n in 0..500 {
            store.txn(Txn::put(format!("k/{n}"), "x".repeat(500))).await.expect("a write");
        }
    });
    // Everything is in the main file once the last connection is closed; the writer's thread may still be at it.
    until("the log file is removed", || !file.with_file_name("store.db-wal").exists());
    let good = std::fs::read(&file).expect("a file");
    type Damage = fn(&mut Vec<u8>);
    let damage: [(&str, Damage); 5] = [
        ("cut to nothing", Vec::clear),
        ("not a database", |bytes| bytes[..100].fill(b'x')),
        ("a torn page", |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle..middle + 8192].fill(0xff);
        }),
        ("cut off", |bytes| bytes.truncate(bytes.len() / 2)),
        ("from a newer program", |bytes| bytes[60..64].copy_from_slice(&99u32.to_be_bytes())),
    ];
    for (what, damage) in damage {
        let mut bytes = good.clone();
        damage(&mut bytes);
        std::fs::write(&file, bytes).expect("a file");
        let error = Embedded::open(&file).err().unwrap_or_else(|| panic!("{what}: it was served"));
        let text = error.to_string();
        assert!(
            text.contains("store.db") && (text.contains("Move it away") || text.contains("newer")),
            "{what}: {text}"
        );
    }
    std::fs::write(&file, good).expect("a file");
    assert!(Embedded::open(&file).is_ok());
    let other = folder.path().join("other.db");
    rusqlite::Connection::open(&other)
        .and_then(|c| c.execute_batch("CREATE TABLE theirs (x)"))
        .expect("a database");
    assert!(
        matches!(Embedded::open(&other), Err(Error::Corrupt { .. })),
        "some other program's file is left alone"
    );
}

/// SQLite alone would take each of these for a database that ends a little earlier.
#[test]
fn lost_acknowledged_writes_are_detected() {
    let folder = folder();
    let file = folder.path().join("store.db");
    let wal = file.with_file_name("store.db-wal");
    let mut child = child("count", &file).spawn().expect("a child");
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    assert_eq!(out.lines().map_while(Result::ok).filter(|line| line.contains("ack ")).take(50).count(), 50);
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    let (main, log) = (std::fs::read(&file).expect("a file"), std::fs::read(&wal).expect("a log"));
    let restore = || {
        std::fs::write(&file, &main).expect("a file");
        std::fs::write(&wal, &log).expect("a log");
    };
    let half = log.len() / 2;
    let mut flipped = log.clone();
    flipped[half] ^= 1;
    for (what, main, log) in [
        ("the log is cut", Some(&main[..]), Some(&log[..half])),
        ("a bit of the log is flipped", Some(&main[..]), Some(&flipped[..])),
        ("the log is gone", Some(&main[..]), None),
        ("both are gone", None, None),
        ("the file is gone", None, Some(&log[..])),
    ] {
        for (path, bytes) in [(&file, main), (&wal, log)] {
            match bytes {
                Some(bytes) => std::fs::write(path, bytes).expect("a file"),
                None => std::fs::remove_file(path).expect("it was there"),
            }
        }
        let _ = std::fs::remove_file(file.with_file_name("store.db-shm"));
        let error = Embedded::open(&file).err().unwrap_or_else(|| panic!("{what}: it was served"));
        assert!(error.to_string().contains("Move it away"), "{what}: {error}");
        restore();
    }
    let _ = std::fs::remove_file(file.with_file_name("store.db-shm"));
    assert!(Embedded::open(&file).is_ok(), "as it was, it is served");
}

#[test]
fn a_damaged_change_is_not_streamed() {
    let folder = folder();
    let file = folder.path().join("store.db");
    let store = embedded(&folder);
    run(async {
        store.txn(Txn::put("a", "one").and(Txn::put("b", "two"))).await.expect("a write");
        assert_eq!(store.changes("", 0).await.expect("changes").len(), 2);
        let other = rusqlite::Connection::open(&file).expect("a database");
        other.execute("UPDATE log SET value = NULL WHERE key = 'b'", []).expect("an update");
        assert_eq!(store.changes("a", 0).await.expect("changes").len(), 1);
        let told = store.changes("b", 0).await;
        assert!(matches!(told, Err(Error::Corrupt { .. })), "{told:?}");
    });
}

/// Asks this test program to be one of the children below.
const CHILD: &str = "ABIDE_STORE_CHILD";

fn child(what: &str, file: &Path) -> Command {
    let program = std::env::current_exe().expect("this program");
    // Writing past a limit of the file size raises a signal, unless it is ignored; a shell can arrange that.
    let mut command = Command::new("bash");
    command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]).arg(program);
    command.args(["--exact", "store::a_child_of_these_tests", "--nocapture", "--test-threads=1"]);
    command.env(CHILD, what).env("ABIDE_STORE_FILE", file).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

/// Not a claim: the other process of the two tests below. Alone it does nothing.
#[test]
fn a_child_of_these_tests() {
    let (Ok(what), Ok(file)) = (std::env::var(CHILD), std::env::var("ABIDE_STORE_FILE")) else { return };
    let store = Embedded::open(Path::new(&file)).expect("it opens");
    match what.as_str() {
        "count" => run(count(&store)),
        "fill" => run(fill(&store)),
        other => panic!("{other}"),
    }
}

/// Counts on from where it was, for ever; says a number when it is acknowledged.
async fn count(store: &Embedded) {
    loop {
        let entry = store.get("count").await.expect("a read");
        let n = entry
            .as_ref()
            .map_or(0, |entry| u64::from_le_bytes(entry.value[..8].try_into().expect("8 bytes")));
        let txn = Txn::put("count", (n + 1).to_le_bytes()).and(Txn::put(format!("n/{n:08}"), "x"));
        let changed = entry.map_or(0, |entry| entry.mod_seq);
        match store.txn(txn.only_if("count", changed)).await {
            Ok(Outcome::Written(_)) => println!("ack {n}"),
            other => panic!("{other:?}"),
        }
    }
}

/// 2,000 deaths, over several files, since opening a large one takes its time; `ABIDE_SOAK=n` for n times as many.
#[test]
fn no_acknowledged_write_is_lost_or_repeated_by_kills() {
    const FILES: u64 = 20;
    let soak: u64 = std::env::var("ABIDE_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let next = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                loop {
                    let nth = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if nth >= FILES * soak {
                        break;
                    }
                    deaths(12_345 + nth);
                }
            });
        }
    });
}

/// A hundred deaths over one file.
fn deaths(seed: u64) {
    let folder = folder();
    let file = folder.path().join("store.db");
    let mut random = seed;
    let mut acknowledged = 0u64;
    for round in 0..100 {
        let mut child = child("count", &file).spawn().expect("a child");
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // After so many answers, and then some part of the next.
        let answers = (random >> 40) % 20;
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut lines = out.lines().map_while(Result::ok);
        let acks = lines.by_ref().filter_map(|line| line.split("ack ").nth(1)?.parse::<u64>().ok());
        let last = acks.take(answers as usize + 1).last();
        std::thread::sleep(Duration::from_micros((random >> 33) % 700));
        child.kill().expect("it is killed");
        child.wait().expect("it ends");
        let late = lines.filter_map(|line| line.split("ack ").nth(1)?.parse::<u64>().ok()).last();
        acknowledged = late.or(last).map_or(acknowledged, |n| n + 1);
        let store = Embedded::open(&file).expect("it opens after any death");
        let (kept, count) = run(async {
            let page = store.range("n/", None, usize::MAX).await.expect("a page");
            let count = store
                .get("count")
                .await
                .expect("a read")
                .map_or(0, |entry| u64::from_le_bytes(entry.value[..8].try_into().expect("8 bytes")));
            (page.entries.len() as u64, count)
        });
        assert!(kept >= acknowledged, "round {round}: {acknowledged} acknowledged, {kept} kept");
        assert_eq!(kept, count, "round {round}: both of a transaction or neither");
        assert!(
            kept <= acknowledged + 1,
            "round {round}: {kept} kept of {acknowledged}, and one at most was on its way"
        );
        acknowledged = kept;
    }
    assert!(acknowledged > 100, "only {acknowledged} were written at all");
}

/// Writes until the file may not grow, reads on, and writes again when it may.
async fn fill(store: &Embedded) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = |bytes: Option<u64>| {
        let hard = getrlimit(Resource::Fsize).maximum;
        setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum: hard }).expect("a limit");
    };
    store.txn(Txn::put("first", "1")).await.expect("a write");
    limit(Some(300_000));
    let mut refused = None;
    for n in 0..100 {
        if let Err(error) = store.txn(Txn::put(format!("k/{n}"), vec![7; 10_000])).await {
            refused = Some((n, error));
            break;
        }
    }
    let (n, error) = refused.expect("the limit is felt");
    assert!(matches!(error, Error::Full | Error::Disk(_)), "{error}");
    assert_eq!(value(store, "first").await.as_deref(), Some("1"), "reading goes on");
    assert_eq!(store.get(&format!("k/{n}")).await, Ok(None), "what was refused is not there");
    limit(None);
    store.txn(Txn::put("last", "1")).await.expect("it recovers");
    println!("recovered");
}

#[test]
fn a_full_disk_refuses_writes_and_recovers() {
    let folder = folder();
    let file = folder.path().join("store.db");
    let output = child("fill", &file).output().expect("a child");
    assert!(String::from_utf8_lossy(&output.stdout).contains("recovered"), "{output:?}");
    let store = Embedded::open(&file).expect("it opens");
    assert_eq!(run(value(&store, "last")).as_deref(), Some("1"));
}
