//! Hooks and environment files of a launch: `before_start` and `env_file`.

use std::os::unix::fs::{PermissionsExt, chown};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{test_user, until};
use crate::system::{System, is_alive, kill, lines, processes, whoami};

#[test]
fn the_hook_runs_before_every_launch() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let mut spec = system.spec_of(&user, "p", "echo start >> order; exec sleep 1000");
    spec["env"] = json!({"WORD": "hook"});
    spec["hooks"] =
        json!({"before_start": {"run": "echo $WORD $(id -un) >> order; echo 'FROM_HOOK=yes' > env"}});
    // The hook may create the file that the process needs.
    spec["env_file"] = json!(home.join("env"));
    assert_eq!(system.operate("p", 0, &spec), (0, "success".to_owned()));
    let order = || std::fs::read_to_string(home.join("order")).unwrap_or_default();
    let once = format!("hook {}\nstart\n", user.name);
    until("it has started", || order() == once);
    kill(system.pid("p").expect("a pid"), "KILL");
    until("it is relaunched", || order() == once.repeat(2));
    assert_eq!(system.operate("p", 7, &spec).0, 0);
    until("it is restarted", || order() == once.repeat(3));
    let pid = system.pid("p").expect("a pid");
    let environment = std::fs::read(format!("/proc/{pid}/environ")).expect("an environment");
    assert!(environment.split(|byte| *byte == 0).any(|one| one == b"FROM_HOOK=yes"));
}

#[test]
fn a_hook_that_fails_hangs_or_floods_fails_the_start() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let spec = |hook: serde_json::Value| {
        let mut spec = system.spec_of(&user, "p", "touch launched; exec sleep 1000");
        spec["env"] = json!({"TOKEN": {"value": "hunter2-hunter2", "secret": true}});
        spec["hooks"] = json!({"before_start": hook});
        spec
    };
    let failing = spec(json!({"run": "echo no schema, token $TOKEN; exit 3"}));
    system.refuses("p", &failing, &["before_start ended with 3: no schema, token (secret)"]);
    let begun = Instant::now();
    let hanging = spec(json!({"run": "echo waiting; sleep 1000", "timeout": 1}));
    system.refuses("p", &hanging, &["before_start timed out after 1 s: waiting"]);
    assert!(begun.elapsed() < Duration::from_secs(15));
    let sleeping = |text: &str| {
        let of_hook = |pid: &u32| {
            let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
            String::from_utf8_lossy(&cmdline).contains(text) && cwd.starts_with(&home) && is_alive(*pid)
        };
        processes().into_iter().filter(of_hook).count()
    };
    until("the hook is killed", || sleeping("1000") == 0);
    let flooding = spec(json!({"run": "yes flood | head -c 50000000; exit 1"}));
    let (code, message) = system.operate("p", 0, &flooding);
    assert!(
        code != 0 && message.contains("before_start ended with 1: ") && message.len() < 20_000,
        "{}",
        message.len()
    );
    let missing = spec(json!({"run": "./no-such-program"}));
    system.refuses("p", &missing, &["before_start ended with 127"]);
    assert!(!home.join("launched").exists());
    // A process that the hook leaves behind is killed before the launch.
    let forking = spec(json!({"run": "setsid sleep 4321 < /dev/null > /dev/null 2>&1 & echo $! > daemon"}));
    assert_eq!(system.operate("p", 0, &forking), (0, "success".to_owned()));
    until("the process runs", || home.join("launched").exists());
    until("the daemon of the hook is gone", || sleeping("4321") == 0);
    until("it is reported", || system.facts("p").2);
}

#[test]
fn an_agent_that_is_killed_during_the_hook_launches_once() {
    for (place, private) in [
        ("intent-written", false),
        ("command-begun", false),
        ("command-ended", false),
        ("hook-ended", false),
        ("command-begun", true),
        ("hook-ended", true),
        ("born", false),
    ] {
        let mut system = System::without_agent();
        system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
        let here = system.folder.path().display().to_string();
        let mut spec = system.spec("p", &format!("cd {here}; echo start >> starts; exec sleep 1000"));
        spec["hooks"] = json!({"before_start": {"run": format!("cd {here}; echo begin >> hooks; sleep 1; echo end >> hooks")}});
        if private {
            if !crate::support::needs_root() {
                continue;
            }
            // The folder itself is below /tmp: this sandbox does not hide it.
            spec["sandbox"] = json!({"protect_system": "true"});
        }
        let task = system.begin("p", 0, &spec);
        let mut agent = system.agent.take().expect("it runs");
        assert!(!agent.wait().expect("it ends").success(), "it died at {place}");
        system.start_agent();
        let row = system.row("p", &task);
        assert_eq!(row["error_code"], 0, "{place}: {row}\n{}", system.log());
        until("it has started", || lines(&system.path("starts")) > 0);
        assert_eq!(lines(&system.path("starts")), 1, "{place}");
        let hooks = std::fs::read_to_string(system.path("hooks")).expect("hooks");
        assert!(hooks.ends_with("end\n") && hooks.matches("begin").count() == 1, "{place}: {hooks}");
        until("it is reported", || system.facts("p") == (true, true, true));
    }
}

#[test]
fn a_relaunch_whose_hook_was_interrupted_continues() {
    let mut system = System::new();
    let mut spec = system.spec("p", "echo start >> starts; exec sleep 1000");
    spec["hooks"] = json!({"before_start": {"run": "echo begin >> hooks; sleep 1; echo end >> hooks"}});
    assert_eq!(system.operate("p", 0, &spec).0, 0);
    kill(system.pid("p").expect("a pid"), "KILL");
    until("the hook of the relaunch has begun", || lines(&system.path("hooks")) == 3);
    system.kill_agent();
    system.start_agent();
    until("it is relaunched", || lines(&system.path("starts")) == 2);
    assert_eq!(std::fs::read_to_string(system.path("hooks")).expect("hooks"), "begin\nend\nbegin\nend\n");
    until("it runs", || system.facts("p").2);
}

#[test]
fn variables_of_the_file_are_overridden_by_env_and_read_at_each_start() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let file = system.home(&user).join("env");
    let write = |text: &str| {
        std::fs::write(&file, text).expect("a file");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("a mode");
        chown(&file, Some(user.uid), Some(user.gid)).expect("an owner");
    };
    write("# comment\nONE=file\nTWO='from the file'\nABIDE_INSTANCE=forged\nPATH=/usr/bin:/bin\n");
    let mut spec = system.spec_of(&user, "p", "echo $ONE,$TWO,$ABIDE_INSTANCE >> out; exec sleep 1000");
    spec["env"] = json!({"ONE": "spec"});
    spec["env_file"] = json!(file);
    assert_eq!(system.operate("p", 0, &spec), (0, "success".to_owned()));
    let out = || std::fs::read_to_string(system.home(&user).join("out")).unwrap_or_default();
    let first = "spec,from the file,0:127.0.0.1:web:p\n";
    until("it has started", || out() == first);
    write("TWO=\"changed\"\n");
    kill(system.pid("p").expect("a pid"), "KILL");
    until("it is relaunched", || out() == format!("{first}spec,changed,0:127.0.0.1:web:p\n"));
    // Its commands have the variables too, and their values are masked.
    write("TWO=hunter2-hunter2\n");
    spec["control"]["reload_cmd"] = json!("echo got $TWO; exit 1");
    let (code, message) = system.operate("p", 8, &spec);
    assert!(code != 0 && message.contains("got (secret)"), "{message}");
    assert!(!system.process("p").to_string().contains("hunter2") && !system.log().contains("hunter2"));
}

#[test]
fn a_hostile_env_file_fails_the_start_and_names_the_line() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let path = |name: &str| home.join(name);
    let spec = |file: std::path::PathBuf| {
        let mut spec = system.spec_of(&user, "p", "touch launched; exec sleep 1000");
        spec["env_file"] = json!(file);
        spec
    };
    for (name, content, why) in [
        ("name", &b"GOOD=1\nBAD NAME=hunter2\n"[..], "line 2 has an invalid name"),
        ("text", b"hunter2\n", "line 1 is not NAME=VALUE"),
        ("quote", b"A='hunter2\n", "line 1 has a quote that is not closed"),
        ("nul", b"A=hun\0ter2\n", "line 1 contains a NUL byte"),
        ("utf8", b"A=hunter2\xff\n", "is not valid UTF-8"),
    ] {
        std::fs::write(path(name), content).expect("a file");
        let (code, message) = system.operate("p", 0, &spec(path(name)));
        assert!(code != 0 && message.contains(why) && message.contains(name), "{message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
    std::fs::write(path("huge"), vec![b'#'; 70_000]).expect("a file");
    system.refuses("p", &spec(path("huge")), &["env_file", "huge", "larger than 65536 bytes"]);
    assert!(std::process::Command::new("mkfifo").arg(path("fifo")).status().expect("mkfifo").success());
    system.refuses("p", &spec(path("fifo")), &["env_file", "fifo", "a FIFO"]);
    std::os::unix::fs::symlink("/etc/hostname", path("link")).expect("a link");
    system.refuses("p", &spec(path("link")), &["env_file", "link", "symbolic link"]);
    system.refuses("p", &spec("/dev/zero".into()), &["env_file", "/dev/zero", "a device"]);
    system.refuses("p", &spec(path("none")), &["env_file", "none", "No such file"]);
    system.refuses("p", &spec(home.clone()), &["env_file", "a directory"]);
    let secret = system.path("secret");
    std::fs::write(&secret, "A=hunter2\n").expect("a file");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    system.refuses("p", &spec(secret), &["env_file", "secret", &user.name, "Permission denied"]);
    assert!(!home.join("launched").exists() && whoami() == "root");
}
