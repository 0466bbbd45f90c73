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
    let kinds = [
        ("fifo", "a FIFO"),
        ("directory", "a directory"),
        ("link", "a symbolic link"),
        ("text", "not a pid file"),
    ];
    for (name, kind) in kinds {
        let spec = system.spec(name, &format!("echo {name} >> effects; exec sleep 1000"));
        let named = path(name).display().to_string();
        system.refuses(name, &spec, &["cannot write pid_path", &named, kind]);
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
