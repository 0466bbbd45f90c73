//! Files of a launch: pid files, the check before an upgrade, and control groups that an agent leaves.

use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown, symlink};
use std::process::Command;

use serde_json::json;

use crate::support::{abide, stdout, test_user, until};
use crate::system::{System, kill};

#[test]
fn only_a_pid_file_is_replaced_by_a_pid_file() {
    let system = System::new();
    let run = system.path("run");
    std::fs::create_dir(&run).expect("a folder");
    let path = |name: &str| run.join(format!("{name}.pid"));
    assert!(Command::new("mkfifo").arg(path("fifo")).status().expect("mkfifo").success());
    std::fs::create_dir(path("directory")).expect("a folder");
    std::fs::write(system.path("target"), "1234\n").expect("a file");
    symlink(system.path("target"), path("link")).expect("a link");
    std::fs::write(path("text"), "root:x:0:0:root:/root:/bin/bash\n").expect("a file");
    let (read, write) = ("cannot read pid_path", "cannot write pid_path");
    let kinds = [
        ("fifo", read, "a FIFO"),
        ("directory", read, "a directory"),
        ("link", read, "a symbolic link"),
        ("text", write, "not a pid file"),
    ];
    for (name, refused, kind) in kinds {
        let spec = system.spec(name, &format!("echo {name} >> effects; exec sleep 1000"));
        let named = path(name).display().to_string();
        system.refuses(name, &spec, &[refused, &named, kind]);
    }
    assert!(!system.path("effects").exists(), "nothing was launched");
    let kind = |name: &str| std::fs::symlink_metadata(path(name)).expect("it is there").file_type();
    assert!(kind("fifo").is_fifo() && kind("directory").is_dir() && kind("link").is_symlink());
    assert_eq!(std::fs::read_to_string(path("text")).expect("a file"), "root:x:0:0:root:/root:/bin/bash\n");
    assert_eq!(std::fs::read_dir(&run).expect("a folder").count(), kinds.len(), "no temporary file is left");
    // What a supervisor or the program itself left is a pid file.
    for (name, content) in
        [("stale", "4711\n"), ("empty", ""), ("lines", "4711\n/var/lib/data\n1794973489 5432\n")]
    {
        std::fs::write(path(name), content).expect("a file");
        let spec = system.spec(name, "exec sleep 1000");
        assert_eq!(system.operate(name, 0, &spec), (0, "success".to_owned()), "{name}");
        let pid = system.pid(name).expect("a pid");
        assert_eq!(std::fs::read_to_string(path(name)).expect("a file"), format!("{pid}\n"));
    }
}

#[test]
fn the_check_before_an_upgrade_lists_folders_and_configmap_files() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let home = system.home(&user);
    let (closed, config) = (home.join("closed"), home.join("config"));
    std::fs::create_dir(&closed).expect("a folder");
    std::fs::write(&config, "a\n").expect("a file");
    chown(&config, Some(user.uid), None).expect("an owner");
    chown(&closed, Some(user.uid), None).expect("an owner");
    let mut spec = system.spec_of(&user, "app", "exec sleep 1000");
    spec["identity"]["setup_path"] = json!(closed);
    spec["configmap"] = json!([{"path": config, "md5": "60b725f10c9c85c70d97880dfe8191b3"}]);
    assert_eq!(system.operate("app", 0, &spec), (0, "success".to_owned()));
    let check = |system: &System| {
        stdout(&abide(&["agent", "--check-policy", "--data", "agent"], system.folder.path(), b""))
    };
    system.kill_agent();
    assert!(check(&system).contains("no instance would be refused"), "{}", check(&system));
    for path in [&closed, &config] {
        chown(path, Some(0), Some(0)).expect("an owner");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).expect("a mode");
    }
    let listed = check(&system);
    let says = |field: &str, what: &str, path: &std::path::Path| {
        listed.contains(&format!("{field}: user {:?} cannot {what} {}", user.name, path.display()))
    };
    assert!(says("setup_path", "enter", &closed) && says("configmap", "read", &config), "{listed}");
}

#[test]
fn the_check_before_an_upgrade_opens_files_as_the_launch_does() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let home = system.home(&user);
    let env = |name: &str| home.join(format!("{name}.env"));
    let names = ["loglink", "envlink", "envbig", "envfifo", "envfile", "pidother", "pidlink", "well"];
    for name in names {
        std::fs::write(env(name), "A=1\n").expect("a file");
        chown(env(name), Some(user.uid), Some(user.gid)).expect("an owner");
        let mut spec = system.spec_of(&user, name, "exec sleep 1000");
        match name {
            "envfile" => spec["env_file"] = json!(env(name)),
            _ => spec["env"] = json!({"A": {"file": env(name)}}),
        }
        assert_eq!(system.operate(name, 0, &spec), (0, "success".to_owned()), "{name}");
    }
    let script = "mv log/loglink.log real.log; ln -s ../real.log log/loglink.log
        mv envlink.env other; ln -s other envlink.env; head -c 70000 /dev/zero | tr '\\0' a > envbig.env
        rm envfifo.env; mkfifo envfifo.env; echo not an assignment > envfile.env
        echo not a pid > run/pidother.pid; mv run/pidlink.pid run/x.pid; ln -s x.pid run/pidlink.pid";
    assert!(user.command("sh").args(["-c", script]).current_dir(&home).status().expect("it runs").success());
    let output =
        abide(&["agent", "--check-policy", "--data", "agent", "-o", "json"], system.folder.path(), b"");
    let listed: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let listed = listed["refused"].as_array().expect("rows").clone();
    let reasons = |name: &str| {
        let row = listed.iter().find(|row| row["instance"] == format!("0:127.0.0.1:web:{name}"));
        row.map(|row| row["reasons"].to_string()).unwrap_or_default()
    };
    for (name, texts) in [
        ("loglink", ["log_path", "symbolic link"]),
        ("envlink", ["env A", "symbolic link"]),
        ("envbig", ["env A", "larger than 65536 bytes"]),
        ("envfifo", ["env A", "a FIFO"]),
        ("envfile", ["env_file", "line 1 is not NAME=VALUE"]),
        ("pidother", ["pid_path", "is not a pid file"]),
        ("pidlink", ["pid_path", "symbolic link"]),
    ] {
        let why = reasons(name);
        assert!(texts.iter().all(|text| why.contains(text)), "{name}: {why}");
        // The next launch refuses it for the same reason.
        let (code, message) = system.operate(name, 7, &serde_json::Value::Null);
        assert!(code != 0 && message.contains(texts[1]), "{name}: {code} {message}");
    }
    assert_eq!((output.status.code(), listed.len(), reasons("well")), (Some(3), 7, String::new()));
    // Files that the policy lets root open are not listed.
    let opened = tempfile::tempdir_in("/var/lib").expect("a folder that only root can write");
    let policy = format!("root_opens: [{}]\n", opened.path().display());
    std::fs::write(system.path("policy.yaml"), policy).expect("a file");
    system.kill_agent();
    system.start_agent_with(&["--policy", "policy.yaml"], &[]);
    let mut spec = system.spec_of(&user, "opened", "exec sleep 1000");
    spec["identity"]["log_path"] = json!(opened.path().join("p.log"));
    assert_eq!(system.operate("opened", 0, &spec), (0, "success".to_owned()));
    let args = ["agent", "--check-policy", "--data", "agent", "--policy", "policy.yaml"];
    let listed = stdout(&abide(&args, system.folder.path(), b""));
    assert!(!listed.contains("web:opened"), "{listed}");
}

/// The directory of an agent's control groups.
fn groups(system: &System) -> Option<std::path::PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let mount = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        (kind == "cgroup2").then(|| place.to_owned())
    })?;
    let folder = system.path("agent").canonicalize().expect("a folder");
    let name = format!("abide-{}", &blake3::hash(folder.as_os_str().as_encoded_bytes()).to_hex()[..12]);
    let own = std::fs::read_to_string("/proc/self/cgroup").expect("groups");
    let own = own.lines().find_map(|line| line.strip_prefix("0::"))?.split("/abide-").next()?.to_owned();
    Some(std::path::Path::new(&mount).join(own.trim_start_matches('/')).join(name))
}

#[test]
fn an_agent_that_ends_with_nothing_running_leaves_no_control_group() {
    let mut system = System::new();
    let Some(base) = groups(&system) else { return crate::support::skip("no control groups, version 2") };
    if !base.is_dir() {
        return crate::support::skip("control groups cannot be made");
    }
    let spec = system.spec("app", "exec sleep 1000");
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let end = |system: &mut System| {
        let mut agent = system.agent.take().expect("an agent");
        kill(agent.id(), "TERM");
        agent.wait().expect("it ends");
    };
    end(&mut system);
    assert!(base.is_dir(), "the group of what runs stays");
    system.start_agent();
    assert_eq!(system.operate("app", 1, &spec).0, 0);
    end(&mut system);
    assert!(!base.exists(), "{}", base.display());
    system.start_agent();
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    until("it has its group again", || base.is_dir());
    assert_eq!(system.operate("app", 1, &spec).0, 0);
}
