//! Encryption at rest: an older file is rewritten once, keys rotate, and a file without its key is refused unchanged.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use abide::store::{Embedded, Error, KeySource, Store, TrimChoice, Txn, print_set_aside};

use crate::fixtures::workspace::Workspace;
use crate::serve::{Gateway, log_of};
use crate::store::{run, value};
use crate::support::{abide, command, key_file, stderr, test_user, until};

const SECRET: &str = "hunter2-of-the-old-version";

struct DataFolder(Workspace);

impl DataFolder {
    fn new() -> DataFolder {
        DataFolder(Workspace::new())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("store.db")
    }

    fn keys(&self, text: &str) -> KeySource {
        use std::os::unix::fs::PermissionsExt;
        let file = self.0.path().join("key");
        std::fs::write(&file, text).expect("a file");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("a mode");
        KeySource::File(file)
    }

    /// Every byte of the database, its log and its other files.
    fn bytes(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let files = std::fs::read_dir(self.0.path()).expect("a folder").flatten().map(|entry| entry.path());
        let mut files: Vec<PathBuf> =
            files.filter(|path| path.to_string_lossy().contains("store.db")).collect();
        files.sort();
        // The last one that closes the database removes its log.
        files.into_iter().filter_map(|path| Some((path.clone(), std::fs::read(path).ok()?))).collect()
    }

    fn has(&self, text: &str) -> bool {
        self.bytes().iter().any(|(_, bytes)| String::from_utf8_lossy(bytes).contains(text))
    }

    fn version(&self) -> i64 {
        let file = rusqlite::Connection::open(self.file()).expect("a database");
        file.query_row("PRAGMA user_version", [], |row| row.get(0)).expect("a version")
    }
}

fn key(digit: char) -> String {
    format!("{}\n", digit.to_string().repeat(64))
}

/// Entries, replaced entries, deleted ones, an empty one, and values that look encrypted.
async fn fill(store: &Embedded) {
    for n in 0..60 {
        let text = format!("{SECRET}-{n}-{}", "x".repeat(n * 100));
        store.txn(Txn::put(format!("reg/{n:02}"), text)).await.expect("a write");
    }
    for n in 0..60 {
        let write = match n % 3 {
            0 => Txn::delete(format!("reg/{n:02}")),
            _ => Txn::put(format!("reg/{n:02}"), format!("{SECRET} again {n}")),
        };
        store.txn(write).await.expect("a write");
    }
    store.txn(Txn::put("empty", "")).await.expect("a write");
    store.txn(Txn::put("odd", &b"\0as1 bytes of an app"[..])).await.expect("a write");
    store.settle().await.expect("a checkpoint");
}

async fn content(store: &Embedded) -> (Vec<(String, Vec<u8>, u64)>, usize) {
    let page = store.range("", None, usize::MAX).await.expect("entries");
    let entries =
        page.entries.iter().map(|entry| (entry.key.to_string(), entry.value.to_vec(), entry.mod_seq));
    (entries.collect(), store.changes("", 0).await.expect("changes").len())
}

#[test]
fn a_file_of_an_older_version_is_encrypted_once_and_keeps_its_content() {
    let place = DataFolder::new();
    let before = run(async {
        let store = Embedded::open(&place.file()).expect("it opens");
        fill(&store).await;
        content(&store).await
    });
    assert!(place.has(SECRET));
    let keys = KeySource::File(place.0.path().join("made/key"));
    for opening in 0..2 {
        let store = Embedded::open_keyed(&place.file(), &keys).expect("it opens");
        assert_eq!(run(content(&store)), before, "opening {opening}");
        drop(store);
        assert!(!place.has("hunter2"), "opening {opening}");
        assert_eq!(place.version(), 3);
    }
    // New writes, leases and changes work, and are encrypted.
    run(async {
        let store = Embedded::open_keyed(&place.file(), &keys).expect("it opens");
        store.txn(Txn::put("reg/new", format!("{SECRET} new"))).await.expect("a write");
        let changes = store.changes("reg/new", 0).await.expect("changes");
        assert_eq!(changes[0].value.as_deref(), Some(format!("{SECRET} new").as_bytes()));
    });
    assert!(!place.has("hunter2"));
}

#[test]
fn a_file_whose_key_is_missing_or_wrong_is_refused_unchanged() {
    let place = DataFolder::new();
    let right = place.keys(&key('1'));
    run(async {
        fill(&Embedded::open_keyed(&place.file(), &right).expect("it opens")).await;
    });
    let before = place.bytes();
    let missing = place.0.path().join("nowhere");
    let wrong = place.0.path().join("wrong");
    std::fs::copy(place.0.path().join("key"), &wrong).expect("a copy");
    std::fs::write(&wrong, key('2')).expect("a file");
    let trim_all = |entries: &mut dyn Iterator<Item = (String, usize)>| TrimChoice {
        set_aside: entries.map(|(key, _)| key).collect(),
        ..TrimChoice::default()
    };
    for (keys, why) in [
        (KeySource::None, "no key file is given"),
        (KeySource::File(missing.clone()), "nowhere does not exist"),
        (KeySource::Default(missing.clone()), "nowhere does not exist"),
        (KeySource::File(wrong), "wrong does not have key"),
    ] {
        for opened in [
            Embedded::open_keyed(&place.file(), &keys),
            Embedded::open_as_found(&place.file(), &keys),
            Embedded::open_alone_trimmed(&place.file(), &keys, &trim_all),
        ] {
            let error = opened.err().expect("it is refused");
            assert!(matches!(error, Error::KeyMissing { .. }) && error.to_string().contains(why), "{error}");
        }
    }
    assert!(!missing.exists(), "no key is made up for a file that has one");
    let content_of = |bytes: Vec<(PathBuf, Vec<u8>)>| {
        bytes.into_iter().filter(|(path, _)| path.ends_with("store.db")).collect::<Vec<_>>()
    };
    assert_eq!(content_of(place.bytes()), content_of(before));
    let store = Embedded::open_keyed(&place.file(), &right).expect("it opens with its key");
    assert_eq!(run(value(&store, "reg/01")), Some(format!("{SECRET} again 1")));
}

#[test]
fn keys_rotate_and_an_old_key_can_be_removed() {
    let place = DataFolder::new();
    let before = run(async {
        let store = Embedded::open_keyed(&place.file(), &place.keys(&key('1'))).expect("it opens");
        fill(&store).await;
        content(&store).await
    });
    let both = place.keys(&format!("{}{}", key('2'), key('1')));
    assert_eq!(run(content(&Embedded::open_keyed(&place.file(), &both).expect("it opens"))), before);
    let new = place.keys(&key('2'));
    assert_eq!(run(content(&Embedded::open_keyed(&place.file(), &new).expect("it opens"))), before);
    // And back to plain text, for an older version.
    let plain = place.keys(&format!("plain\n{}", key('2')));
    assert_eq!(run(content(&Embedded::open_keyed(&place.file(), &plain).expect("it opens"))), before);
    assert_eq!(place.version(), 1);
    assert_eq!(run(content(&Embedded::open(&place.file()).expect("it opens"))), before);
}

#[test]
fn bytes_that_another_process_kept_are_removed_by_a_later_opening() {
    let place = DataFolder::new();
    run(async { fill(&Embedded::open(&place.file()).expect("it opens")).await });
    let keys = place.keys(&key('1'));
    let reader = rusqlite::Connection::open(place.file()).expect("a database");
    reader.execute_batch("BEGIN; SELECT count(*) FROM entry;").expect("a read transaction");
    let count: i64 = reader.query_row("SELECT count(*) FROM entry", [], |row| row.get(0)).expect("a count");
    assert_eq!(count, 42);
    let store = Embedded::open_keyed(&place.file(), &keys).expect("it opens");
    assert_eq!(run(value(&store, "reg/01")), Some(format!("{SECRET} again 1")));
    drop(store);
    assert_eq!((place.version(), place.has(SECRET)), (2, true), "the reader still needs the old pages");
    drop(reader);
    drop(Embedded::open_keyed(&place.file(), &keys).expect("it opens"));
    assert_eq!((place.version(), place.has("hunter2")), (3, false));
}

#[test]
fn openings_at_the_same_time_encrypt_a_file_once() {
    for _ in 0..5 {
        let place = DataFolder::new();
        let before = run(async {
            let store = Embedded::open(&place.file()).expect("it opens");
            fill(&store).await;
            content(&store).await
        });
        let keys = KeySource::File(place.0.path().join("key"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let store = Embedded::open_keyed(&place.file(), &keys).expect("it opens");
                    assert_eq!(run(content(&store)), before);
                });
            }
        });
        drop(Embedded::open_keyed(&place.file(), &keys).expect("it opens"));
        assert_eq!((place.version(), place.has("hunter2")), (3, false));
    }
}

/// Someone who can write to the file: bytes of another entry, or of an older version of the same one.
#[test]
fn moved_and_damaged_values_are_refused() {
    let place = DataFolder::new();
    let keys = place.keys(&key('1'));
    run(async {
        let store = Embedded::open_keyed(&place.file(), &keys).expect("it opens");
        for text in ["old", "new"] {
            store.txn(Txn::put("a", text)).await.expect("a write");
        }
        store.txn(Txn::put("b", "other")).await.expect("a write");
        store.settle().await.expect("a checkpoint");
    });
    let good = std::fs::read(place.file()).expect("a file");
    let change = |sql: &str| {
        std::fs::write(place.file(), &good).expect("a file");
        let file = rusqlite::Connection::open(place.file()).expect("a database");
        let (value, changed): (Vec<u8>, i64) =
            file.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?))).expect("a value");
        let mut hasher = blake3::Hasher::new();
        hasher.update(&1_u64.to_le_bytes()).update(b"a").update(&value).update(&changed.to_le_bytes());
        let sum = i64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("eight bytes"));
        let put = "UPDATE entry SET value = ?1, changed = ?2, sum = ?3 WHERE key = 'a'";
        file.execute(put, rusqlite::params![value, changed, sum]).expect("a write");
        drop(file);
        Embedded::open_keyed(&place.file(), &keys).map(|store| run(value_of(&store)))
    };
    async fn value_of(store: &Embedded) -> Option<String> {
        value(store, "a").await
    }
    let unchanged = change("SELECT value, changed FROM entry WHERE key = 'a'");
    assert_eq!(unchanged.expect("the checksum is right"), Some("new".to_owned()));
    for moved in [
        "SELECT value, changed FROM entry WHERE key = 'b'",
        "SELECT value, 2 FROM log WHERE key = 'a' AND number = 1",
    ] {
        let refused = change(moved);
        assert!(matches!(refused, Err(Error::Corrupt { .. })), "{moved}: {refused:?}");
    }
}

/// The log of such a store has one row without a value, also after the log of an older version.
#[test]
fn a_store_without_a_log_is_encrypted_and_other_readers_follow_it() {
    let place = DataFolder::new();
    run(async { fill(&Embedded::open(&place.file()).expect("it opens")).await });
    let keys = place.keys(&key('1'));
    run(async {
        let store = Embedded::open_alone_unlogged(&place.file(), &keys).expect("it opens");
        // The first read of a row that is one change behind, and of one that is two behind.
        store.txn(Txn::put("reg/01", format!("{SECRET} first"))).await.expect("a write");
        let reader = Embedded::open_as_found(&place.file(), &keys).expect("it opens");
        for (nth, text) in [SECRET, "second", "third"].into_iter().enumerate() {
            for _ in 0..=nth % 2 {
                store.txn(Txn::put("reg/01", text)).await.expect("a write");
            }
            assert_eq!(value(&reader, "reg/01").await.as_deref(), Some(text));
        }
        let last = store.get("reg/01").await.expect("a read").expect("an entry").mod_seq;
        let told = reader.changes("reg/", last - 1).await;
        assert!(matches!(told, Err(Error::Compacted)), "{told:?}");
        store.txn(Txn::delete("reg/02")).await.expect("a write");
        assert_eq!(value(&reader, "reg/02").await, None);
        store.settle().await.expect("a checkpoint");
    });
    assert!(!place.has("hunter2"));
    let file = rusqlite::Connection::open(place.file()).expect("a database");
    let rows: (i64, i64) = file
        .query_row("SELECT count(*), count(value) FROM log", [], |row| Ok((row.get(0)?, row.get(1)?)))
        .expect("rows");
    assert_eq!(rows, (1, 0));
    drop(file);
    // A rotation and the way back keep content and number.
    let last = |store: &Embedded| run(async { store.range("", None, 1).await.expect("entries").as_of });
    let before = last(&Embedded::open_as_found(&place.file(), &keys).expect("it opens"));
    for text in [format!("{}{}", key('2'), key('1')), key('2'), format!("plain\n{}", key('2'))] {
        let keys = place.keys(&text);
        let store = Embedded::open_alone_unlogged(&place.file(), &keys).expect("it opens");
        assert_eq!((run(value(&store, "reg/01")).as_deref(), last(&store)), (Some("third"), before));
    }
    assert_eq!(place.version(), 1);
}

/// Entries that are set aside are readable with the key only; sizes and index values are those of the text.
#[test]
fn entries_that_are_set_aside_are_encrypted() {
    for was_plain in [true, false] {
        let place = DataFolder::new();
        let keys = place.keys(&key('1'));
        let first = if was_plain { KeySource::None } else { keys.clone() };
        let text = format!(r#"{{"secret":"{SECRET}"}}"#);
        run(async {
            let store = Embedded::open_keyed(&place.file(), &first).expect("it opens");
            for (key, value) in [("reg/a", &*text), ("reg/b", "{}"), ("index/1", "a"), ("index/2", "b")] {
                store.txn(Txn::put(key, value)).await.expect("a write");
            }
            store.settle().await.expect("a checkpoint");
        });
        let size = text.len();
        let trim = move |entries: &mut dyn Iterator<Item = (String, usize)>| {
            let set_aside: Vec<String> =
                entries.filter(|(_, length)| *length == size).map(|(key, _)| key).collect();
            TrimChoice {
                set_aside,
                index_entries: vec![("index/".to_owned(), vec!["a".to_owned()])],
                ..TrimChoice::default()
            }
        };
        let both = place.keys(&format!("{}{}", key('2'), key('1')));
        let store = Embedded::open_alone_trimmed(&place.file(), &both, &trim).expect("it opens");
        let left = run(async { store.range("", None, 10).await.expect("entries").entries });
        let left: Vec<&str> = left.iter().map(|entry| &*entry.key).collect();
        assert_eq!(left, ["index/2", "reg/b"], "was plain: {was_plain}");
        drop(store);
        assert!(!place.has("hunter2"), "was plain: {was_plain}");
        let aside = place.bytes().into_iter().find(|(path, _)| path.to_string_lossy().contains("set-aside"));
        let (aside, bytes) = aside.expect("a file");
        let read = |keys: &KeySource| {
            let mut entries = Vec::new();
            print_set_aside(&aside, keys, &mut |entry| entries.push(entry.to_string())).map(|()| entries)
        };
        let entry = format!(r#"{{"key":"reg/a","value":{text}}}"#);
        assert_eq!(read(&place.keys(&key('2'))).expect("entries"), [entry]);
        for wrong in [KeySource::None, place.keys(&key('1'))] {
            let refused = read(&wrong);
            assert!(matches!(refused, Err(Error::KeyMissing { .. })), "{refused:?}");
        }
        std::fs::write(&aside, String::from_utf8_lossy(&bytes).replace("reg/a", "reg/c")).expect("a file");
        let refused = read(&place.keys(&key('2')));
        assert!(matches!(refused, Err(Error::InvalidLine { line: 1, .. })), "{refused:?}");
    }
}

fn serve(here: &Path, more: &[&str]) -> (Option<i32>, String) {
    let args = ["serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"];
    let output = abide(&[&args[..], more].concat(), here, b"");
    (output.status.code(), stderr(&output))
}

#[test]
fn a_gateway_without_its_key_does_not_start_and_loses_nothing() {
    let folder = Workspace::new();
    let register = |gateway: &Gateway, name: &str| {
        let body = serde_json::json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}],
            "spec": {"identity": {"proc_name": name, "setup_path": "/opt", "pid_path": format!("/run/{name}.pid"), "user": "root"}}});
        gateway.server.gse("register_proc_info", body);
    };
    let gateway = Gateway::start(folder.path(), &[]);
    register(&gateway, "a");
    drop(gateway);
    let kept = folder.path().join("kept");
    std::fs::rename(key_file(folder.path()), &kept).expect("it is moved");
    let (code, told) = serve(folder.path(), &[]);
    let path = key_file(folder.path()).display().to_string();
    assert!(
        code == Some(1)
            && told.contains(&format!("is encrypted, and the key file {path} does not exist"))
            && told.contains("restore the key file from a backup, or pass the right one with --key-file"),
        "{told}"
    );
    assert!(!key_file(folder.path()).exists());
    let (code, told) = serve(folder.path(), &["--key-file", "none"]);
    assert!(code == Some(1) && told.contains("no key file is given"), "{told}");
    let (code, told) = serve(folder.path(), &["--key-file", "data/key"]);
    assert!(code == Some(64) && told.contains("is in the data folder"), "{told}");
    std::fs::write(folder.path().join("bad"), "not a key").expect("a file");
    let (code, told) = serve(folder.path(), &["--key-file", "bad"]);
    assert!(code == Some(1) && !told.contains("not a key"), "{told}");
    let gateway = Gateway::start(folder.path(), &["--key-file", "kept"]);
    let page = gateway.server.gse("sync_proc_status", serde_json::json!({"meta": {"namespace": "web"}}));
    assert_eq!(page["data"]["count"], 1);
}

/// A user with a home, and one without a folder for a key: the second store is as it was before encryption.
#[test]
fn the_default_key_is_in_the_users_configuration() {
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;
    let Some(user) = test_user() else { return };
    for has_home in [true, false] {
        let folder = Workspace::new();
        let here = folder.path();
        std::fs::write(here.join("apps.yaml"), crate::system::APPS).expect("a file");
        std::fs::set_permissions(here.join("apps.yaml"), std::fs::Permissions::from_mode(0o600))
            .expect("a mode");
        for path in [here.to_owned(), here.join("apps.yaml")] {
            chown(path, Some(user.uid), Some(user.gid)).expect("another owner");
        }
        let log = std::fs::File::create(here.join("log")).expect("a log");
        let args = ["serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"];
        let mut command = command(&args, here);
        command
            .env_remove("ABIDE_KEY_FILE")
            .env_remove("XDG_CONFIG_HOME")
            .env("HOME", if has_home { here } else { Path::new("/") });
        command.uid(user.uid).gid(user.gid).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut child = crate::apply::KillOnDrop(command.spawn().expect("it starts"));
        until("it runs", || log_of(here).contains("listening") || here.join("data/store.db-mark").exists());
        let key = here.join(".config/abide/secret.key");
        match has_home {
            true => {
                until("the key exists", || key.exists());
                assert_eq!(std::fs::metadata(&key).expect("a file").permissions().mode() & 0o777, 0o600);
                until("it says so", || log_of(here).contains("back it up"));
            }
            false => {
                until("it warns", || log_of(here).contains("stored values are not encrypted"));
                assert!(child.0.try_wait().expect("a status").is_none(), "it runs: {}", log_of(here));
            }
        }
    }
}

#[test]
fn doctor_warns_about_a_store_without_encryption() {
    let folder = Workspace::new();
    let here = folder.path();
    for (keys, warns) in [("none", true), ("key", false)] {
        let run = |args: &[&str]| {
            let mut command = command(args, here);
            let key = if keys == "none" { "none".into() } else { here.join(keys) };
            command.env("ABIDE_HOME", here.join("home")).env("ABIDE_KEY_FILE", key);
            command.stdin(Stdio::null()).output().expect("it runs")
        };
        let mut up = crate::apply::KillOnDrop({
            let mut command = command(&["-q", "up"], here);
            let key = if keys == "none" { "none".into() } else { here.join(keys) };
            command.env("ABIDE_HOME", here.join("home")).env("ABIDE_KEY_FILE", key);
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("it starts")
        });
        let told = || crate::support::stdout(&run(&["doctor"]));
        until("it runs", || told().contains("accepts the credentials"));
        for file in ["gateway/store.db", "agent/agent.db"] {
            let warning = format!("{} is not encrypted", here.join("home").join(file).display());
            assert_eq!(told().contains(&warning), warns, "{keys}: {}", told());
        }
        run(&["down"]);
        up.0.wait().expect("it ends");
    }
}
