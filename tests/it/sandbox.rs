//! Sandbox of a spec: each restriction, as the process and its commands see it from inside.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::support::{TestUser, needs_root, test_user, until};
use crate::system::{System, whoami};

/// What a process sees of its restrictions, one line each.
const LOOK: &str = "(grep -E '^(NoNewPrivs|CapBnd|Umask)' /proc/self/status; nice; cat /proc/self/oom_score_adj; ulimit -Sn; ulimit -Hn; ulimit -c)";

/// A folder of a user outside /tmp, which a private /tmp would hide.
pub struct Home(tempfile::TempDir);

impl Home {
    pub fn of(user: &TestUser) -> Home {
        use std::os::unix::fs::{PermissionsExt, chown};
        let folder = tempfile::Builder::new().prefix("abide-test-").tempdir_in("/var/lib").expect("a folder");
        chown(folder.path(), Some(user.uid), Some(user.gid)).expect("another owner");
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
        Home(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// A foreground process that works here.
    pub fn spec(&self, system: &System, user: &str, name: &str, start: &str) -> Value {
        let mut spec = system.spec(name, start);
        spec["identity"]["user"] = json!(user);
        spec["identity"]["setup_path"] = json!(self.0.path());
        spec["identity"]["pid_path"] = json!(self.path(&format!("{name}.pid")));
        spec["identity"]["log_path"] = json!(self.path(&format!("{name}.log")));
        // The workspace ends processes that name it.
        spec["env"] = json!({"WORKSPACE": system.path("x")});
        spec
    }
}

fn root() -> TestUser {
    TestUser { name: whoami(), uid: 0, gid: 0 }
}

#[test]
fn every_restriction_holds_in_the_process_and_in_all_its_commands() {
    let Some(other) = test_user() else { return };
    let system = System::new();
    for user in [other, root()] {
        let home = Home::of(&user);
        let name = format!("all-{}", user.name);
        let to = |file: &str| format!("{LOOK} > {file}");
        let mut spec = home.spec(&system, &user.name, &name, &format!("{}; exec sleep 1000", to("started")));
        spec["sandbox"] = json!({
            "no_new_privs": true, "capabilities": ["CAP_NET_BIND_SERVICE", "CAP_SETUID"], "umask": "0027", "nice": 7,
            "oom_score_adj": 500, "ulimits": {"nofile": "100:200", "core": 0},
        });
        spec["hooks"] = json!({"before_start": {"run": to("hooked")}});
        spec["control"]["reload_cmd"] = json!(to("reloaded"));
        spec["control"]["stop_cmd"] = json!(format!("{}; kill $ABIDE_PID", to("stopped")));
        spec["control"]["version_cmd"] = json!(to("versioned"));
        spec["health"] = json!({"cmd": to("checked"), "interval": 1});
        assert_eq!(system.operate(&name, 0, &spec), (0, "success".to_owned()));
        assert_eq!(system.operate(&name, 8, &spec).0, 0);
        until("it is checked", || !home.text("checked").is_empty() && !home.text("versioned").is_empty());
        assert_eq!(system.operate(&name, 1, &spec).0, 0);
        let seen = "Umask:\t0027\nCapBnd:\t0000000000000480\nNoNewPrivs:\t1\n7\n500\n100\n200\n0\n";
        for file in ["hooked", "started", "reloaded", "checked", "versioned", "stopped"] {
            let mut lines: Vec<String> = home.text(file).lines().map(str::to_owned).collect();
            let mut expected: Vec<&str> = seen.lines().collect();
            lines.sort();
            expected.sort();
            assert_eq!(lines, expected, "{file} of {}", user.name);
        }
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(home.path("started")).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "the umask holds");
    }
}

#[test]
fn an_unset_sandbox_restricts_nothing() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = Home::of(&user);
    let spec = home.spec(&system, &user.name, "free", &format!("{LOOK} > started; exec sleep 1000"));
    assert_eq!(system.operate("free", 0, &spec).0, 0);
    until("it has started", || home.text("started").lines().count() >= 8);
    let own = std::fs::read_to_string("/proc/self/status").expect("a status");
    let bounding = own.lines().find(|line| line.starts_with("CapBnd")).expect("a line");
    let text = home.text("started");
    for line in [bounding, "NoNewPrivs:\t0", "Umask:\t0022"] {
        assert!(text.lines().any(|one| one == line), "{line} in {text}");
    }
}

#[test]
fn a_private_tmp_is_empty_and_shared_by_the_commands_of_a_launch() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let home = Home::of(&user);
    let mark = format!("abide-private-{}", std::process::id());
    let start = format!(
        "ls -A /tmp /var/tmp | grep -v -e '^/' -e '^$' > found; echo main > /tmp/{mark}; echo main > /var/tmp/{mark}; touch ready; exec sleep 1000"
    );
    let mut spec = home.spec(&system, &user.name, "tmp", &start);
    spec["sandbox"] = json!({"private_tmp": true});
    spec["hooks"] = json!({"before_start": {"run": "echo hook > /tmp/of-hook"}});
    spec["health"] = json!({"cmd": format!("cat /tmp/{mark} > checked"), "interval": 1});
    spec["control"]["reload_cmd"] =
        json!(format!("cat /tmp/{mark} > reloaded; echo reload > /tmp/of-reload"));
    spec["control"]["stop_cmd"] =
        json!(format!("cat /var/tmp/{mark} /tmp/of-hook /tmp/of-reload > stopped; kill $ABIDE_PID"));
    assert_eq!(system.operate("tmp", 0, &spec), (0, "success".to_owned()));
    until("it has started", || home.path("ready").exists());
    assert_eq!(home.text("found"), "of-hook\n", "only what the hook left is there");
    assert!(!Path::new("/tmp").join(&mark).exists() && !Path::new("/var/tmp").join(&mark).exists());
    assert_eq!(system.operate("tmp", 8, &spec).0, 0);
    assert_eq!(home.text("reloaded"), "main\n");
    until("it is checked", || home.text("checked") == "main\n");
    // The next agent enters the namespace of the process that it took over.
    system.kill_agent();
    system.start_agent();
    assert_eq!(system.operate("tmp", 1, &spec).0, 0);
    assert_eq!(home.text("stopped"), "main\nhook\nreload\n");
    // The next launch has an empty one.
    std::fs::remove_file(home.path("ready")).expect("a file");
    assert_eq!(system.operate("tmp", 0, &spec).0, 0);
    until("it has started again", || home.path("ready").exists());
    assert_eq!(home.text("found"), "of-hook\n");
    let private = std::fs::read_to_string(format!("/proc/{}/mounts", system.pid("tmp").expect("a pid")));
    let of_host = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    for path in [" /tmp tmpfs ", " /var/tmp tmpfs "] {
        let mounted = |mounts: &str| mounts.lines().filter(|line| line.contains(path)).count();
        assert_eq!(mounted(private.as_ref().expect("mounts")), mounted(&of_host) + 1, "{path}");
    }
}

/// The private directories of a hook are gone when the agent is killed: the hook runs again in those of the launch.
#[test]
fn a_hook_of_a_killed_agent_runs_again_in_the_private_tmp_of_the_launch() {
    let Some(user) = test_user() else { return };
    for place in ["command-begun", "hook-ended"] {
        let mut system = System::without_agent();
        system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
        let home = Home::of(&user);
        let start = "cat /tmp/of-hook > seen; echo start >> starts; exec sleep 1000";
        let mut spec = home.spec(&system, &user.name, "p", start);
        spec["sandbox"] = json!({"private_tmp": true});
        spec["hooks"] =
            json!({"before_start": {"run": "echo begin >> hooks; sleep 1; echo hook > /tmp/of-hook"}});
        let task = system.begin("p", 0, &spec);
        let mut agent = system.agent.take().expect("it runs");
        assert!(!agent.wait().expect("it ends").success(), "it died at {place}");
        system.start_agent();
        let row = system.row("p", &task);
        assert_eq!(row["error_code"], 0, "{place}: {row}");
        until("it has started", || home.text("starts") == "start\n");
        assert_eq!(
            (home.text("seen"), home.text("hooks")),
            ("hook\n".to_owned(), "begin\nbegin\n".to_owned())
        );
    }
}

#[test]
fn a_daemon_has_the_private_tmp_of_its_start_command() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = Home::of(&user);
    let start =
        "echo start > /tmp/of-start; setsid sleep 1000 < /dev/null > /dev/null 2>&1 & echo $! > sleep.pid";
    let mut spec = home.spec(&system, &user.name, "sleep", start);
    spec["control"]["start_mode"] = json!("daemon");
    spec["control"]["stop_cmd"] = json!("cat /tmp/of-start > stopped; kill $ABIDE_PID");
    spec["sandbox"] = json!({"private_tmp": true, "no_new_privs": true});
    assert_eq!(system.operate("sleep", 0, &spec), (0, "success".to_owned()));
    assert_eq!(system.operate("sleep", 1, &spec).0, 0);
    assert_eq!(home.text("stopped"), "start\n");
    // The agent reads the pid file of a daemon outside the sandbox.
    spec["identity"]["pid_path"] = json!("/tmp/hidden.pid");
    system.refuses("sleep", &spec, &["sandbox.private_tmp hides pid_path /tmp/hidden.pid"]);
    spec["identity"]["setup_path"] = json!("/var/tmp");
    system.refuses("sleep", &spec, &["sandbox.private_tmp hides setup_path /var/tmp"]);
}

#[test]
fn read_only_paths_cannot_be_written_and_links_of_users_are_not_followed() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    for user in [user, root()] {
        let home = Home::of(&user);
        let (data, file) = (home.path("data"), home.path("file"));
        std::fs::create_dir_all(data.join("below")).expect("a folder");
        std::fs::write(&file, "text\n").expect("a file");
        for path in [&data, &data.join("below"), &file] {
            std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid)).expect("an owner");
        }
        let name = format!("paths-{}", user.name);
        let write = "touch data/new data/below/new free; echo more >> file; cat file > read; touch ready";
        let mut spec = home.spec(&system, &user.name, &name, &format!("{write}; exec sleep 1000"));
        spec["sandbox"] = json!({"read_only_paths": [data, file]});
        assert_eq!(system.operate(&name, 0, &spec), (0, "success".to_owned()));
        until("it has started", || home.path("ready").exists());
        let log = home.text(&format!("{name}.log"));
        assert_eq!(log.matches("Read-only file system").count(), 3, "{log}");
        assert!(!data.join("new").exists() && !data.join("below/new").exists());
        assert!(home.path("free").exists(), "the rest can be written");
        assert_eq!((home.text("file"), home.text("read")), ("text\n".to_owned(), "text\n".to_owned()));
        assert_eq!(system.operate(&name, 1, &spec).0, 0);
        spec["sandbox"] = json!({"read_only_paths": [home.path("missing")]});
        system.refuses(&name, &spec, &["sandbox.read_only_paths", "missing", "No such file"]);
    }
    let user = test_user().expect("a user");
    let home = Home::of(&user);
    let link = |target: &str, name: &str| {
        let status = user.command("ln").arg("-s").arg(target).arg(home.path(name)).status();
        assert!(status.expect("ln").success());
    };
    link("/etc", "link");
    link("/etc/passwd", "file-link");
    for (path, why) in [
        ("link", "is a symbolic link of user"),
        ("link/ssl", "is a symbolic link of user"),
        ("file-link", "symbolic link"),
    ] {
        for name in [user.name.clone(), whoami()] {
            let mut spec = home.spec(&system, &name, "links", "exec sleep 1000");
            spec["sandbox"] = json!({"read_only_paths": [home.path(path)]});
            system.refuses("links", &spec, &["sandbox.read_only_paths", path, why]);
        }
    }
    // Whether a file exists that the user cannot see is not disclosed.
    for path in ["/root/.ssh", "/root/no-such-file"] {
        let mut spec = home.spec(&system, &user.name, "closed", "exec sleep 1000");
        spec["sandbox"] = json!({"read_only_paths": [path]});
        system.refuses("closed", &spec, &["sandbox.read_only_paths", path, "Permission denied"]);
    }
    // Links of root are part of the system.
    let mut spec = home.spec(&system, &user.name, "system", "exec sleep 1000");
    spec["sandbox"] = json!({"read_only_paths": ["/bin"]});
    assert_eq!(system.operate("system", 0, &spec), (0, "success".to_owned()));
}

#[test]
fn the_system_is_protected_in_three_levels() {
    if !needs_root() {
        return;
    }
    let system = System::new();
    let probe = "for f in /usr /etc /boot . /tmp /dev/shm; do if touch $f/abide-probe-$$ 2> /dev/null; then rm $f/abide-probe-$$; echo $f; fi; done > /dev/shm/OUT; cat /dev/shm/OUT > out; touch /dev/shm/OUT.ready; exec sleep 1000";
    for (level, writable) in [
        (json!("true"), "/etc . /tmp /dev/shm"),
        (json!("full"), ". /tmp /dev/shm"),
        (json!("strict"), "/dev/shm"),
    ] {
        let home = Home::of(&root());
        let word = level.as_str().expect("a word").to_owned();
        let out = format!("abide-{}-{word}", std::process::id());
        let mut spec = home.spec(&system, &whoami(), &word, &probe.replace("OUT", &out));
        spec["sandbox"] = json!({"protect_system": level});
        assert_eq!(system.operate(&word, 0, &spec), (0, "success".to_owned()));
        let ready = PathBuf::from(format!("/dev/shm/{out}.ready"));
        until("it has looked", || ready.exists());
        let seen = std::fs::read_to_string(format!("/dev/shm/{out}")).expect("a file");
        let _ = (std::fs::remove_file(format!("/dev/shm/{out}")), std::fs::remove_file(ready));
        assert_eq!(seen.split_whitespace().collect::<Vec<_>>().join(" "), writable, "{word}");
    }
    // Strict with a private /tmp: only that can be written.
    let home = Home::of(&root());
    let mut spec =
        home.spec(&system, &whoami(), "both", "touch /tmp/a /var/tmp/a && touch x || exec sleep 1000");
    spec["sandbox"] = json!({"protect_system": "strict", "private_tmp": true});
    spec["health"] =
        json!({"cmd": "test -e /tmp/a -a -e /var/tmp/a -a ! -e x", "interval": 1, "start_period": 0});
    assert_eq!(system.operate("both", 0, &spec), (0, "success".to_owned()));
    until("it is healthy", || system.process("both")["health"] == "Healthy");
}

#[test]
fn a_restriction_that_the_host_cannot_enforce_fails_the_start_and_is_named() {
    let Some(user) = test_user() else { return };
    let mut system = System::without_agent();
    let home = Home::of(&user);
    system.start_agent_as(&user);
    let refused = [
        (json!({"nice": -5}), "sandbox.nice cannot be enforced on this host", "CAP_SYS_NICE"),
        (json!({"capabilities": []}), "sandbox.capabilities cannot be enforced on this host", "CAP_SETPCAP"),
        (json!({"oom_score_adj": -500}), "sandbox.oom_score_adj cannot be enforced", "CAP_SYS_RESOURCE"),
        (
            json!({"ulimits": {"nofile": 100_000_000}}),
            "sandbox.ulimits.nofile cannot be enforced",
            "CAP_SYS_RESOURCE",
        ),
        (json!({"private_tmp": true}), "sandbox.private_tmp cannot be enforced", "CAP_SYS_ADMIN"),
        (json!({"read_only_paths": ["/etc"]}), "sandbox.read_only_paths cannot be enforced", "root"),
        (json!({"protect_system": "full"}), "sandbox.protect_system cannot be enforced", "root"),
    ];
    for (sandbox, field, needs) in refused {
        let mut spec = home.spec(&system, &user.name, "held", "touch started; exec sleep 1000");
        spec["sandbox"] = sandbox.clone();
        system.refuses("held", &spec, &[field, needs]);
        assert!(!home.path("started").exists(), "{sandbox}");
    }
    let mut spec = home.spec(&system, &user.name, "own", &format!("{LOOK} > started; exec sleep 1000"));
    spec["sandbox"] = json!({"no_new_privs": true, "umask": "0077", "nice": 3, "oom_score_adj": 700,
                             "ulimits": {"nofile": 64, "core": 0}, "private_tmp": false});
    assert_eq!(system.operate("own", 0, &spec), (0, "success".to_owned()));
    until("it has started", || home.text("started").lines().count() >= 8);
    let text = home.text("started");
    for line in ["NoNewPrivs:\t1", "Umask:\t0077", "3", "700", "64"] {
        assert!(text.lines().any(|one| one == line), "{line} in {text}");
    }
}

/// A process may enter a mount namespace of its own, where it chooses what each path is. No command follows it there.
#[test]
fn no_command_enters_a_namespace_that_the_process_made() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = Home::of(&user);
    let hide = "mount -t tmpfs none /mnt && touch /mnt/hostile && touch ready; exec sleep 1000";
    let start = format!("exec unshare --user --map-root-user --mount sh -c '{hide}'");
    if !user
        .command("unshare")
        .args(["--user", "--map-root-user", "--mount", "true"])
        .status()
        .is_ok_and(|s| s.success())
    {
        return crate::support::skip("users cannot make namespaces here");
    }
    let mut spec = home.spec(&system, &user.name, "evil", &start);
    spec["sandbox"] = json!({"private_tmp": true});
    spec["control"]["stop_cmd"] = json!("ls -A /mnt > seen; ls -A /tmp >> seen; kill $ABIDE_PID");
    assert_eq!(system.operate("evil", 0, &spec), (0, "success".to_owned()));
    until("it has its own namespace", || home.path("ready").exists());
    assert_eq!(system.operate("evil", 1, &spec).0, 0);
    assert!(home.path("seen").exists());
    assert!(!home.text("seen").contains("hostile"), "{}", home.text("seen"));
}

/// The sandbox of a manifest is applied, shown, compared and exported.
/// The agent's log writer runs as the process's user, but outside its sandbox: it must not be a way out.
#[test]
fn no_process_of_the_agent_leads_out_of_a_sandbox() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = Home::of(&user);
    let data = home.path("data");
    std::fs::create_dir_all(&data).expect("a folder");
    std::os::unix::fs::chown(&data, Some(user.uid), Some(user.gid)).expect("an owner");
    let agent = system.agent.as_ref().expect("an agent").id();
    // Tries the files of every process of this agent, while the first writer is killed and another one starts. Other tests have
    // processes of the same user, too.
    let attack = format!(
        "tries() {{ for one in /proc/[0-9]*; do grep -qx \"PPid:.{agent}\" $one/status && echo out > $one/root{0}/out; done; }}; until [ -s writers ]; do sleep 0.1; done; \
         {{ tries; kill $(cat writers); tries; tries; }} 2>/dev/null; touch tried; exec sleep 1000",
        data.display()
    );
    let mut spec = home.spec(&system, &user.name, "jailed", &attack);
    spec["sandbox"] = json!({"read_only_paths": [data], "no_new_privs": true});
    spec["log"] = json!({"max_size": 1_000_000});
    let writers = || {
        let is_writer = |pid: &u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with("abide-log") && line.contains("jailed")
        };
        crate::system::processes().into_iter().filter(is_writer).collect::<Vec<u32>>()
    };
    let task = system.begin("jailed", 0, &spec);
    until("a writer runs", || !writers().is_empty());
    assert!(writers().iter().all(|pid| crate::system::parent_of(*pid) == Some(agent)), "it is not tried");
    let text = writers().iter().map(|pid| format!("{pid} ")).collect::<String>();
    std::fs::write(home.path("writers"), text).expect("a file");
    assert_eq!(system.row("jailed", &task)["error_code"], 0);
    until("it has tried", || home.path("tried").exists());
    assert!(!data.join("out").exists(), "a file outside the sandbox was written");
    until("its output is still written", || !writers().is_empty());
}

#[test]
fn a_sandbox_is_applied_shown_and_exported() {
    let machine = Machine::new();
    std::fs::write(machine.path("env"), "FROM_FILE=yes\n").expect("a file");
    let write = |umask: &str| {
        let more = format!(
            "  control: {{start_mode: foreground, start_cmd: \"umask > seen; echo $FROM_FILE >> seen; exec sleep 1000\"}}\n\
             \x20 sandbox: {{no_new_privs: true, umask: \"{umask}\", ulimits: {{nofile: \"64:128\"}}}}\n\
             \x20 env_file: {}\n  hooks: {{before_start: {{run: echo hook > hooked, timeout: 30s}}}}\n",
            machine.path("env").display()
        );
        machine.write("p", &more);
    };
    write("0027");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    until("it has started", || {
        std::fs::read_to_string(machine.path("seen")).unwrap_or_default() == "0027\nyes\n"
    });
    assert_eq!(std::fs::read_to_string(machine.path("hooked")).expect("a file"), "hook\n");
    assert_eq!(machine.apply(&[]).0, 0, "nothing to do");
    let (_, described, _) = machine.run(&["describe", "web/p"]);
    let (_, exported, err) = machine.run(&["export"]);
    for text in ["no_new_privs", "0027", "nofile", "64:128", "before_start", "echo hook > hooked", "env_file"]
    {
        assert!(exported.contains(text), "{text} in {exported}{err}");
        assert!(described.contains(text), "{text} in {described}");
    }
    write("0077");
    let (_, diff, _) = machine.run(&["diff", "m"]);
    assert!(diff.contains("0027") && diff.contains("0077"), "{diff}");
    let (_, plan, _) = machine.run(&["plan", "m"]);
    assert!(plan.contains("restart") && plan.contains("sandbox.umask: 0027 → 0077"), "{plan}");
    let (code, explained, _) = machine.run(&["explain", "spec.sandbox.private_tmp"]);
    assert!(code == 0 && explained.contains("/var/tmp"), "{explained}");
    let (code, full, err) = machine.run(&["convert", "m/p.yaml"]);
    assert!(
        code == 0 && full.contains("umask: \"0077\"") && full.contains("nofile: \"64:128\""),
        "{full}{err}"
    );
}

#[test]
fn a_request_with_an_unknown_or_invalid_restriction_is_refused() {
    let system = System::without_agent();
    let refused = |section: &str, value: Value| {
        let mut spec = system.spec("p", "exec sleep 1000");
        spec[section] = value;
        let body = json!({"meta": {"namespace": "web", "name": "p"}, "op_type": 0, "spec": spec,
                          "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
        let answer = system.server.call("POST", "/api/c/compapi/v2/gse/operate_proc/", body);
        answer.to_string()
    };
    for (section, value, text) in [
        ("sandbox", json!({"private_network": true}), "spec.sandbox.private_network is not supported"),
        ("sandbox", json!({"umask": "1000"}), "spec.sandbox umask is not octal text"),
        (
            "sandbox",
            json!({"capabilities": ["CAP_EVERYTHING"]}),
            "spec.sandbox.capabilities names an unknown",
        ),
        (
            "sandbox",
            json!({"read_only_paths": ["etc"]}),
            "spec.sandbox.read_only_paths[0] is not an absolute",
        ),
        ("hooks", json!({"after_stop": {"run": "x"}}), "spec.hooks.after_stop is not supported"),
        ("hooks", json!({"before_start": {"run": ""}}), "spec.hooks.before_start.run"),
        ("hooks", json!({"after_start": {"timeout": 5}}), "spec.hooks.after_start.run"),
        (
            "hooks",
            json!({"before_stop": {"run": "x", "timeout": 3601}}),
            "spec.hooks.before_stop.timeout is not",
        ),
        ("hooks", json!({"before_stop": {"run": "x", "on_failure": "retry"}}), "spec.hooks"),
        (
            "hooks",
            json!({"before_start": {"run": "x", "drift": true}}),
            "spec.hooks.before_start.drift is not",
        ),
        ("env_file", json!("relative"), "spec.env_file is not an absolute path"),
    ] {
        let answer = refused(section, value);
        assert!(answer.contains(text), "{text} in {answer}");
    }
}
