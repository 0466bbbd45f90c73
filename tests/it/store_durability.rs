//! Durability of the embedded store: kills at any moment, a full disk, a damaged file, a second process that writes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use abide::store::{Embedded, Error, Store, Txn, TxnOutcome};

use crate::store::{embedded, folder, run, value};
use crate::support::until;

#[test]
fn acknowledged_writes_survive_reopening() {
    let folder = folder();
    let number = run(async {
        let store = embedded(&folder);
        let Ok(TxnOutcome::Written(number)) = store.txn(Txn::put("a", "1")).await else {
            panic!("not written")
        };
        number
    });
    run(async {
        let store = embedded(&folder);
        assert_eq!(value(&store, "a").await.as_deref(), Some("1"));
        let Ok(TxnOutcome::Written(next)) = store.txn(Txn::put("a", "2")).await else {
            panic!("not written")
        };
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
fn large_changes_are_compacted_by_size() {
    let folder = folder();
    let store = embedded(&folder);
    run(async {
        let first = store.txn(Txn::put("first", "1")).await.expect("a write");
        for nth in 0..50u8 {
            store.txn(Txn::put("large", vec![nth; 8 << 20])).await.expect("a write");
        }
        let last = store.get("large").await.expect("a read").expect("an entry");
        assert_eq!((last.value.len(), last.value.first()), (8 << 20, Some(&49)));
        assert_eq!(first, TxnOutcome::Written(1));
        assert!(matches!(store.changes("", 1).await, Err(Error::Compacted)), "400 MiB are not kept");
        let newest = store.changes("", last.mod_seq - 1).await.expect("the last change");
        assert_eq!(newest.len(), 1);
    });
    let sizes =
        std::fs::read_dir(folder.path()).expect("a folder").filter_map(|entry| entry.ok()?.metadata().ok());
    let bytes: u64 = sizes.map(|meta| meta.len()).sum();
    assert!(bytes < 300 << 20, "{} MiB on disk", bytes >> 20);
    drop(store);
    assert_eq!(run(embedded(&folder).get("first")).expect("a read").map(|entry| entry.mod_seq), Some(1));
}

#[test]
fn old_changes_are_compacted_and_reported() {
    let folder = folder();
    let store = embedded(&folder);
    run(async {
        let quiet = store.clone();
        let follower = tokio::spawn(async move { quiet.changes("quiet/", 0).await });
        for part in 0..110 {
            let many = (0..1_000).map(|n| Txn::put(format!("k/{part}/{n}"), "x"));
            let mut all = tokio::task::JoinSet::new();
            for txn in many {
                let store = store.clone();
                all.spawn(async move { store.txn(txn).await.expect("a write") });
            }
            all.join_all().await;
        }
        assert!(matches!(store.changes("", 0).await, Err(Error::Compacted)));
        let last = store.range("", None, 1).await.expect("a page").as_of;
        assert_eq!(store.changes("", last - 10).await.expect("changes").len(), 10);
        store.txn(Txn::put("quiet/1", "x")).await.expect("a write");
        let followed = follower.await.expect("a task").expect("a waiting follower has seen all changes");
        assert_eq!(followed.len(), 1);
    });
    // A second handle that is behind by that much reads everything again.
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
        // The store that wrote the changes has them in memory.
        assert_eq!(store.changes("b", 0).await.expect("changes").len(), 1);
        let reader = embedded(&folder);
        assert_eq!(reader.changes("a", 0).await.expect("changes").len(), 1);
        let told = reader.changes("b", 0).await;
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
    command.args(["--exact", "store_durability::a_child_of_these_tests", "--nocapture", "--test-threads=1"]);
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

/// Counts on from the last number without end, and prints each acknowledged number.
async fn count(store: &Embedded) {
    loop {
        let entry = store.get("count").await.expect("a read");
        let n = entry
            .as_ref()
            .map_or(0, |entry| u64::from_le_bytes(entry.value[..8].try_into().expect("8 bytes")));
        let txn = Txn::put("count", (n + 1).to_le_bytes()).and(Txn::put(format!("n/{n:08}"), "x"));
        let changed = entry.map_or(0, |entry| entry.mod_seq);
        match store.txn(txn.only_if("count", changed)).await {
            Ok(TxnOutcome::Written(_)) => println!("ack {n}"),
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
        // After this number of answers and a part of the next.
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
    assert!(matches!(error, Error::Full | Error::Disk { .. }), "{error}");
    assert_eq!(value(store, "first").await.as_deref(), Some("1"), "reading goes on");
    let refused = store.get(&format!("k/{n}")).await.expect("a read");
    assert_eq!(refused, None, "what was refused is not there");
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
