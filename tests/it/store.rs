//! The store: what every engine must do. Another engine adds a line to the macro below.

use std::time::Duration;

use abide::store::{
    Change, Embedded, Holder, KeySource, LeaseAttempt, Reset, Store, Txn, TxnOutcome, Write, lease,
};

/// Runs a future to its end.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(future)
}

pub fn embedded(folder: &tempfile::TempDir) -> Embedded {
    Embedded::open(&folder.path().join("store.db")).expect("it opens")
}

pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

// ---- What every engine must do. Another engine adds a line here.

/// A claim about an encrypted file that is opened in one of the ways.
macro_rules! engine_test {
    ($claim:ident, $open:ident) => {
        #[test]
        fn $claim() {
            let folder = super::folder();
            let keys = super::KeySource::File(folder.path().join("key"));
            let store = super::Embedded::$open(&folder.path().join("store.db"), &keys);
            super::run(super::$claim(store.expect("it opens")));
        }
    };
}

macro_rules! every_engine {
    ($($claim:ident),* ; followed: $($followed:ident),* $(,)?) => {
        mod in_a_file {
            $(#[test]
            fn $claim() {
                let folder = super::folder();
                super::run(super::$claim(super::embedded(&folder)));
            })*
            $(#[test]
            fn $followed() {
                let folder = super::folder();
                super::run(super::$followed(super::embedded(&folder)));
            })*
        }
        mod in_a_file_for_one {
            $(engine_test!($claim, open_alone);)*
            $(engine_test!($followed, open_alone);)*
        }
        mod in_an_encrypted_file {
            $(engine_test!($claim, open_keyed);)*
            $(engine_test!($followed, open_keyed);)*
        }
        mod in_a_file_without_a_cache {
            $(engine_test!($claim, open_alone_unlogged);)*
        }
    };
}

every_engine!(
    a_written_value_can_be_read,
    a_transaction_is_all_or_nothing,
    compare_and_write_lets_one_of_many_win,
    ranges_come_in_pages_and_in_order,
    a_slice_is_what_a_reader_who_counts_expects,
    a_lease_has_one_holder_and_a_number_that_grows,
    a_value_that_does_not_parse_is_an_error_with_its_key;
    followed: changes_come_from_any_number_on,
);

pub async fn value(store: &impl Store, key: &str) -> Option<String> {
    let entry = store.get(key).await.expect("a read")?;
    Some(String::from_utf8_lossy(&entry.value).into_owned())
}

async fn a_written_value_can_be_read(store: impl Store) {
    assert_eq!(store.get("a").await.expect("a read"), None);
    let Ok(TxnOutcome::Written(first)) = store.txn(Txn::put("a", "1")).await else { panic!("not written") };
    let entry = store.get("a").await.expect("a read").expect("it is there");
    assert_eq!((&*entry.key, &*entry.value, entry.mod_seq), ("a", &b"1"[..], first));
    let Ok(TxnOutcome::Written(second)) = store.txn(Txn::put("a", "2")).await else { panic!("not written") };
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
    let refused = store.txn(two.clone().only_if("there", 0)).await.expect("an answer");
    assert_eq!(refused, TxnOutcome::Conflict("there".into()));
    assert_eq!((value(&store, "a").await, value(&store, "b").await), (None, None));
    let Ok(TxnOutcome::Written(number)) = store.txn(two.only_if("new", 0)).await else {
        panic!("not written")
    };
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
    // Fifty writers that each add one, and retry after a conflict.
    async fn add(store: std::sync::Arc<impl Store>) {
        loop {
            let entry = store.get("n").await.expect("a read").expect("it is there");
            let n: u32 = std::str::from_utf8(&entry.value).expect("text").parse().expect("a number");
            let txn = Txn::put("n", (n + 1).to_string()).only_if("n", entry.mod_seq);
            if let TxnOutcome::Written(_) = store.txn(txn).await.expect("an answer") {
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
    let Ok(TxnOutcome::Written(first)) = store.txn(Txn::put("w/a", "1")).await else { panic!("not written") };
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
    let Ok(LeaseAttempt::Acquired(lease)) = store.take_lease("writer", &me, long).await else {
        panic!("not taken")
    };
    // A live holder: this process under another name.
    let other = Holder::this("other");
    let Ok(LeaseAttempt::HeldByOther { holder, generation, .. }) =
        store.take_lease("writer", &other, long).await
    else {
        panic!("taken twice")
    };
    assert_eq!((holder.id.as_str(), generation), ("me", lease.generation));
    assert!(store.renew_lease(&lease, long).await.expect("an answer"));
    store.release_lease(&lease).await.expect("a release");
    assert!(!store.renew_lease(&lease, long).await.expect("an answer"), "what was given up is not renewed");
    let Ok(LeaseAttempt::Acquired(second)) = store.take_lease("writer", &other, short).await else {
        panic!("not taken")
    };
    assert!(second.generation > lease.generation);
    tokio::time::sleep(Duration::from_millis(5)).await;
    let Ok(LeaseAttempt::Acquired(third)) = store.take_lease("writer", &me, long).await else {
        panic!("it expired")
    };
    assert!(third.generation > second.generation);
    assert!(!store.renew_lease(&second, long).await.expect("an answer"));
    // Another lease is another lease.
    assert!(matches!(store.take_lease("leader", &other, long).await, Ok(LeaseAttempt::Acquired(_))));
}

async fn a_value_that_does_not_parse_is_an_error_with_its_key(store: impl Store) {
    store.txn(Txn::put("lease/writer", r#"{"generation": "s3cret"}"#)).await.expect("a write");
    let entry = store.get("lease/writer").await.expect("a read").expect("it is there");
    let read = entry.decode::<lease::Record>().expect_err("not a record").to_string();
    let (me, long) = (Holder::this("me"), Duration::from_secs(60));
    let taken = store.take_lease("writer", &me, long).await.expect_err("not taken").to_string();
    let reset = store.reset_lease("writer", 0, false).await.expect_err("not reset").to_string();
    for error in [read, taken, reset] {
        assert!(error.contains("lease/writer") && !error.contains("s3cret"), "{error}");
    }
    // Other leases are not affected, and an administrator can replace the record.
    assert!(matches!(store.take_lease("leader", &me, long).await, Ok(LeaseAttempt::Acquired(_))));
    assert!(matches!(store.reset_lease("writer", 7, true).await, Ok(Reset::Free { generation: 8 })));
    let Ok(LeaseAttempt::Acquired(lease)) = store.take_lease("writer", &me, long).await else {
        panic!("not taken")
    };
    assert_eq!(lease.generation, 9);
}
