//! Tests of the walk rules and of files that root opens for another user. Some need root and are skipped without it.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

use super::*;

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

fn rights(name: &str, root_open_policy: RootOpenPolicy) -> Rights {
    Rights::new(Account::named(name).expect("an account"), Arc::default(), root_open_policy)
}

fn never() -> RootOpenPolicy {
    Arc::new(|_| false)
}

/// A folder whose ancestors only root can write.
fn root_only_folder() -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("abide-test-").tempdir_in("/run").expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
    folder
}

#[test]
fn root_opens_a_listed_path_for_another_user_and_no_other() {
    if !is_root() {
        return;
    }
    let folder = root_only_folder();
    let log = folder.path().join("app.log");
    assert!(rights("nobody", never()).open_log(&log, "app").is_err(), "not listed");
    let refused = |name: &str| {
        let prepared =
            rights("nobody", never()).prepare_pid_file(&folder.path().join(name), ExistingPidFile::Replace);
        prepared.err().expect("not listed").to_string()
    };
    let (plain, strange) = (refused("api.pid"), refused("$(x).pid"));
    assert!(plain.ends_with("such as /run/api: install -d -o nobody /run/api"), "{plain}");
    assert!(strange.ends_with("needs a directory that user \"nobody\" can write"), "{strange}");
    let below = folder.path().to_owned();
    let listed = rights("nobody", Arc::new(move |path| path.starts_with(&below)));
    let mut file = listed.open_log(&log, "app").expect("listed");
    file.write_all(b"hello\n").expect("it is open for writing");
    let meta = file.metadata().expect("a file");
    assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o640));
    let pid_file =
        listed.prepare_pid_file(&folder.path().join("app.pid"), ExistingPidFile::Replace).expect("listed");
    listed.write_pid_file(&pid_file, 4242).expect("listed");
    assert_eq!(std::fs::read_to_string(folder.path().join("app.pid")).expect("a file"), "4242\n");
    // A component that another user can write, a second hard link, a path with `..`.
    let own = folder.path().join("own");
    std::fs::create_dir(&own).expect("a folder");
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o770)).expect("a mode");
    let why = listed.open_log(&own.join("app.log"), "app").expect_err("others can write").to_string();
    assert!(why.contains("can be written by others"), "{why}");
    std::fs::hard_link(&log, folder.path().join("second")).expect("a link");
    assert!(listed.open_log(&log, "app").expect_err("two names").to_string().contains("hard links"));
    let up = folder.path().join("../").join(folder.path().file_name().expect("a name")).join("up.log");
    assert!(listed.open_log(&up, "app").is_err(), "a path that leaves the listed folder");
    let outside = root_only_folder();
    symlink(outside.path(), folder.path().join("link")).expect("a link");
    chown_link(&folder.path().join("link"), 65534);
    assert!(listed.open_log(&folder.path().join("link/x.log"), "app").is_err(), "a link of another user");
}

fn chown_link(path: &Path, uid: u32) {
    std::os::unix::fs::lchown(path, Some(uid), None).expect("another owner");
}

#[test]
fn the_helper_thread_has_the_users_rights_and_the_agent_keeps_its_own() {
    if !is_root() {
        return;
    }
    let account = Account::named("nobody").expect("an account");
    let status =
        run_as_user(&account, || std::fs::read_to_string("/proc/thread-self/status")).expect("a thread");
    let status = status.expect("a file");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a field");
        line.split_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    // Real, effective and saved ids stay root's: no user can signal the thread.
    assert_eq!(field("Uid:"), ["0", "0", "0", "65534"]);
    assert_eq!(field("CapEff:"), ["0000000000000000"]);
    assert_eq!(field("CapPrm:"), ["0000000000000000"]);
    let groups: Vec<String> = account.groups().iter().map(u32::to_string).collect();
    assert_eq!(field("Groups:"), groups);
    let own = std::fs::read_to_string("/proc/thread-self/status").expect("a file");
    assert!(own.lines().any(|line| line.starts_with("Uid:\t0\t0\t0\t0")), "only that thread changed");
}

#[test]
fn a_walk_follows_own_links_and_checks_what_others_could_exchange() {
    let folder = tempfile::tempdir().expect("a folder");
    let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).expect("users").expect("a name").name;
    let rights = rights(&me, never());
    let path = |name: &str| folder.path().join(name);
    symlink(path("real"), path("link")).expect("a link");
    std::fs::create_dir(path("real")).expect("a folder");
    rights.open_log(&path("link/../link/a/b/x.log"), "x").expect("own links and `..` are followed");
    assert!(path("real/a/b/x.log").is_file(), "missing directories are created");
    symlink(path("loop"), path("loop")).expect("a link");
    assert!(rights.open_log(&path("loop/x.log"), "x").is_err());
    assert!(
        rights.open_log(Path::new("x.log"), "x").expect_err("relative").to_string().contains("not absolute")
    );
    assert!(rights.open_log(&path("real/a/b/x.log/y"), "x").is_err(), "a file is not a directory");
    // /tmp can be written by all: a file of another user there is not written to.
    std::fs::write(path("theirs"), "").expect("a file");
    if is_root() {
        chown(path("theirs"), Some(65534), None).expect("another owner");
        let why = rights.open_log(&path("theirs"), "x").expect_err("another owner").to_string();
        assert!(why.contains("use a directory that only") && !why.contains("chown"), "{why}");
    }
}

#[tokio::test]
async fn work_that_hangs_uses_up_the_permits_of_its_user_only() {
    let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).expect("users").expect("a name").name;
    let rights = rights(&me, never());
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let wait = Arc::new(std::sync::Mutex::new(wait));
    tokio::time::pause();
    let stuck = (0..MAX_PER_USER + 1).map(|_| {
        let wait = Arc::clone(&wait);
        rights.run(FileWork::Sums, "wait", move |_| {
            let _ = wait.lock().map(|wait| wait.recv());
            Ok::<_, UserFileError>(())
        })
    });
    let answers = futures_util::future::join_all(stuck).await;
    assert!(
        answers
            .iter()
            .all(|answer| answer.as_ref().is_err_and(|why| why.to_string().contains("within 10 s")))
    );
    tokio::time::resume();
    let missing = rights.read_pid_file("/no/such.pid").await.expect("pid files have their own permits");
    assert!(matches!(missing, PidEntry::None(_)), "{missing:?}");
    drop(release);
    let free = async { rights.run(FileWork::Sums, "go on", |_| Ok::<_, UserFileError>(())).await };
    free.await.expect("permits come back with their threads");
}
