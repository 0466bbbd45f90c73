//! Files that a spec names: the agent opens them with the rights of the spec's user.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{TestUser, test_user, until};
use crate::system::{System, kill};

/// A root-owned directory that everyone can enter, and a root-owned file in it.
fn root_file(system: &System, name: &str, mode: u32) -> PathBuf {
    let folder = system.path("root-only");
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join(name);
    std::fs::write(&path, "of root\n").expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("a mode");
    path
}

fn is_untouched(path: &Path) {
    assert_eq!(std::fs::read_to_string(path).expect("a file"), "of root\n", "{}", path.display());
    assert_eq!(std::fs::metadata(path).expect("a file").uid(), 0, "{}", path.display());
}

/// A link or a file that the user makes himself.
fn as_user(user: &TestUser, program: &str, args: &[&Path]) {
    assert!(user.command(program).args(args).status().expect("it runs").success(), "{program} {args:?}");
}

#[test]
fn a_spec_accesses_only_files_its_user_may() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let as_whom = format!("as user {:?}", user.name);
    let secret = root_file(&system, "secret", 0o600);
    let cron = system.path("root-only/cron");
    let mut spec = system.spec_of(&user, "log", "echo '* * * * * root evil'; sleep 1000");
    spec["identity"]["log_path"] = json!(cron);
    system.refuses("log", &spec, &["cannot open log_path", "root-only/cron", &as_whom, "Permission denied"]);
    assert!(!cron.exists());
    let mut spec = system.spec_of(&user, "env", "echo $TAKEN > taken; sleep 1000");
    spec["env"] = json!({"TAKEN": {"file": secret}});
    system.refuses("env", &spec, &["env TAKEN", "root-only/secret", &as_whom, "Permission denied"]);
    assert!(!system.home(&user).join("taken").exists());
    let mut spec = system.spec_of(&user, "pid", "sleep 1000");
    spec["identity"]["pid_path"] = json!(secret);
    system.refuses("pid", &spec, &["pid_path", "root-only/secret", &as_whom, "Permission denied"]);
    is_untouched(&secret);
    let mut spec = system.spec_of(&user, "cwd", "pwd; sleep 1000");
    spec["identity"]["setup_path"] = json!(system.path("agent"));
    system.refuses("cwd", &spec, &["setup_path", &as_whom, "Permission denied"]);
    // A command that runs later has no more rights than the start.
    let mut spec = system.spec_of(&user, "later", "sleep 1000");
    assert_eq!(system.operate("later", 0, &spec).0, 0);
    spec["env"] = json!({"TAKEN": {"file": secret}});
    spec["control"]["reload_cmd"] = json!("echo $TAKEN > taken");
    let (code, message) = system.operate("later", 8, &spec);
    assert!(code != 0 && !system.home(&user).join("taken").exists(), "{code} {message}");
}

#[test]
fn checksums_are_computed_with_the_users_permissions() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    system.kill_agent();
    system.start_agent_with(&["--check-secs", "1"], &[]);
    let (secret, open) = (root_file(&system, "secret", 0o600), root_file(&system, "open", 0o644));
    let mut spec = system.spec_of(&user, "sum", "sleep 1000");
    let md5 = "b582ada07fca717df33c082738421734";
    spec["configmap"] = json!([{"path": secret, "md5": md5}, {"path": open, "md5": md5}]);
    assert_eq!(system.operate("sum", 0, &spec).0, 0);
    let state = |path: &Path| system.process("sum")["config"][path.display().to_string()].clone();
    until("the files are summed", || state(&open) == "as_stated");
    assert_eq!(state(&secret), "missing", "whether a guess is right is not the user's to know");
}

#[test]
fn a_users_link_does_not_redirect_root() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let keys = root_file(&system, "authorized_keys", 0o600);
    let in_home = |name: &str| {
        let mut spec = system.spec(name, "echo ssh-ed25519 evil; sleep 1000");
        spec["identity"]["log_path"] = json!(home.join(name));
        spec
    };
    // The log itself is a link.
    as_user(&user, "ln", &[Path::new("-s"), &keys, &home.join("link")]);
    system.refuses("link", &in_home("link"), &["log_path", "link is a symbolic link"]);
    // A directory on the way is one.
    as_user(&user, "ln", &[Path::new("-s"), keys.parent().expect("a folder"), &home.join("way")]);
    let mut spec = in_home("way");
    spec["identity"]["log_path"] = json!(home.join("way/authorized_keys"));
    system.refuses("way", &spec, &["log_path", "way is a symbolic link of user", &user.name]);
    spec["identity"]["log_path"] = json!(home.join("free.log"));
    spec["identity"]["pid_path"] = json!(home.join("way/authorized_keys"));
    system.refuses("way", &spec, &["pid_path", "way is a symbolic link of user", &user.name]);
    // A hard link, which the user could make where the kernel does not protect them.
    std::fs::hard_link(&keys, home.join("hard")).expect("a link");
    system.refuses("hard", &in_home("hard"), &["log_path", "hard links"]);
    is_untouched(&keys);
    // A root-owned link leads where root wants.
    symlink(system.folder.path(), home.join("roots")).expect("a link");
    let mut spec = in_home("roots");
    spec["identity"]["log_path"] = json!(home.join("roots/roots.log"));
    assert_eq!(system.operate("roots", 0, &spec), (0, "success".to_owned()));
    assert!(system.path("roots.log").exists());
}

#[test]
fn no_link_at_a_temporary_name_is_written_through() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let victim = root_file(&system, "victim", 0o600);
    let mut spec = system.spec("t", "sleep 1000");
    spec["identity"]["pid_path"] = json!(home.join("t.pid"));
    let last = std::fs::read_to_string("/proc/loadavg").expect("a file");
    let last: u32 = last.split_whitespace().last().and_then(|pid| pid.parse().ok()).expect("the last pid");
    for pid in last..last + 5000 {
        symlink(&victim, home.join(format!("t.pid.{pid}"))).expect("a link");
    }
    assert_eq!(system.operate("t", 0, &spec).0, 0);
    let pid = system.pid("t").expect("a pid");
    assert!((last..last + 5000).contains(&pid), "the links were at the right place");
    assert_eq!(std::fs::read_to_string(home.join("t.pid")).expect("a pid file"), format!("{pid}\n"));
    is_untouched(&victim);
    assert_eq!(system.operate("t", 1, &spec).0, 0);
    let left = std::fs::read_dir(&home).expect("a folder").flatten();
    assert!(left.map(|entry| entry.file_name()).all(|name| name.to_string_lossy().starts_with("t.pid.")));
}

#[test]
fn files_created_for_a_user_belong_to_it() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let spec = system.spec_of(&user, "own", "echo hello; sleep 1000");
    assert_eq!(system.operate("own", 0, &spec), (0, "success".to_owned()));
    for name in ["log", "log/own.log", "run", "run/own.pid"] {
        let meta = std::fs::metadata(home.join(name)).expect("it was made");
        assert_eq!((meta.uid(), meta.gid()), (user.uid, user.gid), "{name}");
    }
    assert_eq!(std::fs::metadata(home.join("log/own.log")).expect("a log").mode() & 0o777, 0o640);
    until("it wrote", || {
        std::fs::read_to_string(home.join("log/own.log")).is_ok_and(|text| text == "hello\n")
    });
    assert_eq!(system.operate("own", 1, &spec).0, 0);
    assert!(!home.join("run/own.pid").exists(), "the pid file is removed with the user's rights, too");
    // In a directory, and through a link to one.
    as_user(&user, "ln", &[Path::new("-s"), &home.join("log"), &home.join("logs")]);
    let mut spec = system.spec_of(&user, "below", "echo hello; sleep 1000");
    spec["identity"]["log_path"] = json!(home.join("logs"));
    assert_eq!(system.operate("below", 0, &spec), (0, "success".to_owned()));
    assert!(home.join("log/below.log").exists());
    spec["identity"]["log_path"] = json!("/dev/null");
    assert_eq!(system.operate("below", 7, &spec), (0, "success".to_owned()));
}

/// Earlier versions opened logs as root: such a file is not the user's to write until it is handed over.
#[test]
fn a_log_that_root_made_earlier_is_named_with_the_command_that_hands_it_over() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let spec = system.spec_of(&user, "old", "echo new; sleep 1000");
    let log = system.home(&user).join("log/old.log");
    std::fs::create_dir(system.home(&user).join("log")).expect("a folder");
    std::fs::write(&log, "earlier\n").expect("a file");
    let command = format!("chown {}: {}", user.name, log.display());
    system.refuses("old", &spec, &["log_path", "Permission denied", "belongs to user root", &command]);
    let words: Vec<&str> = command.split(' ').collect();
    assert!(Command::new(words[0]).args(&words[1..]).status().expect("it runs").success());
    assert_eq!(system.operate("old", 0, &spec), (0, "success".to_owned()));
    until("it appends", || std::fs::read_to_string(&log).is_ok_and(|text| text == "earlier\nnew\n"));
}

/// An author names `log_path`: no message suggests to hand over a file of the system.
#[test]
fn a_log_path_that_is_a_file_of_the_system_is_refused_without_a_command() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let mut spec = system.spec_of(&user, "thief", "sleep 1000");
    for path in ["/etc/shadow", "/etc/passwd", "/bin/sh", "/usr/bin/env"] {
        spec["identity"]["log_path"] = json!(path);
        let (code, message) = system.operate("thief", 0, &spec);
        assert!(code != 0 && message.contains("log_path"), "{path}: {code} {message}");
        assert!(!message.contains("chown"), "{path}: {message}");
    }
}

#[test]
fn an_env_file_that_is_not_a_small_regular_file_is_an_error() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let home = system.home(&user);
    let (fifo, sparse, link) = (home.join("fifo"), home.join("sparse"), home.join("link"));
    as_user(&user, "mkfifo", &[&fifo]);
    let file = std::fs::File::create(&sparse).expect("a file");
    file.set_len(1 << 30).expect("a length");
    chown(&sparse, Some(user.uid), None).expect("another owner");
    as_user(&user, "ln", &[Path::new("-s"), Path::new("/etc/passwd"), &link]);
    let files = [
        (fifo.as_path(), "is a FIFO"),
        (&sparse, "larger than 65536 bytes"),
        (&link, "symbolic link"),
        (Path::new("/dev/zero"), "is a device"),
        (Path::new("/proc/self/maps"), "a file of /proc"),
    ];
    for (nth, (path, says)) in files.into_iter().enumerate() {
        for (who, mut spec) in
            [("user", system.spec_of(&user, "x", "sleep 1000")), ("root", system.spec("x", "sleep 1000"))]
        {
            spec["env"] = json!({"FROM": {"file": path}});
            let begin = Instant::now();
            system.refuses(&format!("{who}{nth}"), &spec, &["env FROM", &path.display().to_string(), says]);
            assert!(begin.elapsed() < Duration::from_secs(5), "{}", path.display());
        }
    }
    assert_eq!(system.operate("well", 0, &system.spec("well", "sleep 1000")).0, 0, "the agent goes on");
    // A log and a pid file, too.
    let mut spec = system.spec_of(&user, "log", "sleep 1000");
    spec["identity"]["log_path"] = json!(fifo);
    system.refuses("log", &spec, &["log_path", "is a FIFO"]);
    let mut agent = system.agent.take().expect("an agent");
    kill(agent.id(), "TERM");
    let mut ended = None;
    until("SIGTERM ends the agent", || {
        ended = agent.try_wait().expect("it is ours");
        ended.is_some()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(0));
}

/// Processes that share a session keyring can read each other's keys, whatever their user.
#[test]
fn each_launch_has_its_own_session_keyring() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let keyring = |name: &str| {
        let code = "import ctypes; print(ctypes.CDLL(None).syscall(250, 0, -3, 0))";
        let command = format!("python3 -c '{code}' > {name}.keyring; exec sleep 1000");
        assert_eq!(system.operate(name, 0, &system.spec_of(&user, name, &command)).0, 0);
        let file = system.home(&user).join(format!("{name}.keyring"));
        let read = || std::fs::read_to_string(&file).unwrap_or_default().trim().parse::<i64>().ok();
        until("the keyring is known", || read().is_some());
        read().expect("a number")
    };
    let (one, other) = (keyring("one"), keyring("other"));
    assert!(one > 0 && other > 0 && one != other, "{one} {other}");
}
