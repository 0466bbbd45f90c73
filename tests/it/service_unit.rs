//! The shipped systemd units, and an agent inside the control group of a unit: each launch has a group of its own, and the
//! end of the agent alone, as with `KillMode=process`, leaves its processes.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::process_tree::{START, STOP, alive, replaced};
use crate::support::{needs, needs_root, skip, until};
use crate::system::{System, is_alive, kill};

fn unit(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("examples/systemd/abide-{name}.service"))
}

/// The values of a setting.
fn settings(name: &str, setting: &str) -> Vec<String> {
    let text = std::fs::read_to_string(unit(name)).expect("a unit");
    let lines = text.lines().filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
    lines.map(str::to_owned).collect()
}

#[test]
fn the_units_are_valid_and_those_that_launch_nothing_are_hardened() {
    if !needs("systemd-analyze") {
        return;
    }
    let folder = crate::fixtures::workspace::Workspace::new();
    for name in ["agent", "serve", "watch"] {
        // The program and its manual need not be installed here.
        let text = std::fs::read_to_string(unit(name)).expect("a unit");
        let text = text.replace("/usr/bin/abide", "/bin/true").replace("Documentation=man:abide(1)\n", "");
        let copy = folder.path().join(format!("abide-{name}.service"));
        std::fs::write(&copy, text).expect("a copy");
        let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output();
        let verified = verified.expect("systemd-analyze");
        let said = String::from_utf8_lossy(&verified.stderr);
        assert!(verified.status.success() && said.trim().is_empty(), "{name}: {said}");
        if name != "agent" {
            // An exposure of at most 2.0 of 10.
            let rated = Command::new("systemd-analyze")
                .args(["security", "--no-pager", "--offline=true", "--threshold=20"])
                .arg(&copy)
                .output()
                .expect("systemd-analyze");
            assert!(rated.status.success(), "{name}: {}", String::from_utf8_lossy(&rated.stdout));
        }
    }
    for (setting, value) in [("KillMode", "process"), ("Delegate", "yes"), ("OOMPolicy", "continue")] {
        assert_eq!(settings("agent", setting), [value], "{setting}");
    }
}

/// A control group as systemd makes it for a unit with `Delegate=yes`. It is removed in the end.
struct UnitGroup(PathBuf);

impl UnitGroup {
    fn new() -> Option<UnitGroup> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (path, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(path))
        })?;
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/').to_owned();
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("abide-agent-{}-{number}.service", std::process::id());
        let path = mount.join(own).join(name);
        std::fs::create_dir(&path).ok().map(|()| UnitGroup(path))
    }

    /// Starts the agent as a process of the unit.
    fn start(&self, system: &mut System) {
        system.kill_agent();
        let script = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", self.0.display());
        let url = format!("http://{}", system.server.address);
        system.start_agent_under(&url, &["sh", "-c", &script, "sh"], &[]);
    }

    /// The path of a process's group below the unit.
    fn of(&self, pid: u32) -> String {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let group = text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
        let name = self.0.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        group
            .split_once(name)
            .map(|(_, below)| below.to_owned())
            .unwrap_or_else(|| format!("outside: {group}"))
    }
}

impl Drop for UnitGroup {
    fn drop(&mut self) {
        fn remove(path: &Path) {
            for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    remove(&entry.path());
                }
            }
            let _ = std::fs::remove_dir(path);
        }
        remove(&self.0);
    }
}

#[test]
fn an_agent_in_a_units_group_makes_a_group_per_launch_and_its_end_leaves_the_processes() {
    if !needs_root() {
        return;
    }
    let mut system = System::without_agent();
    let Some(group) = UnitGroup::new() else {
        skip("control groups of version 2 cannot be created");
        return;
    };
    group.start(&mut system);
    // Each has a child in a session of its own, which only the group finds.
    let tree = "setsid sleep 1000 & exec sleep 2000";
    let names = ["one", "two"];
    for name in names {
        assert_eq!(system.operate(name, START, &system.spec(name, tree)).0, 0, "{}", system.log());
    }
    until("two trees", || alive(&system).len() == 4);
    let pids = names.map(|name| system.pid(name).expect("a pid"));
    let groups = pids.map(|pid| group.of(pid));
    assert!(groups[0] != groups[1], "{groups:?}");
    for path in &groups {
        let levels: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        assert!(levels.len() == 2 && levels[0].starts_with("abide-"), "{path}");
    }
    for pid in alive(&system) {
        assert!(groups.contains(&group.of(pid)), "{pid}: {}", group.of(pid));
    }
    // The agent itself is in the unit's group.
    let agent = system.agent.as_ref().expect("an agent").id();
    assert_eq!(group.of(agent), "");
    // `systemctl restart` sends SIGTERM to the agent alone. A crash is a SIGKILL.
    for signal in ["TERM", "KILL"] {
        let mut agent = system.agent.take().expect("an agent");
        kill(agent.id(), signal);
        agent.wait().expect("it ends");
        assert!(alive(&system).len() == 4, "{signal}: {:?}", alive(&system));
        group.start(&mut system);
        until("both are taken over", || names.map(|name| system.pid(name)) == pids.map(Some));
        assert_eq!(pids.map(|pid| group.of(pid)), groups, "{signal}");
    }
    // The group still ends the whole tree: what a killed main process leaves, and a stop.
    let old: Vec<u32> = alive(&system);
    kill(pids[0], "KILL");
    let second = replaced(&system, "one", pids[0]);
    assert!(!groups.contains(&group.of(second)) && group.of(second).starts_with("/abide-"));
    let left = old.into_iter().filter(|pid| is_alive(*pid) && group.of(*pid) == groups[0]).count();
    assert_eq!(left, 0, "the child of the first launch");
    for name in names {
        assert_eq!(system.operate(name, STOP, &json!(null)).0, 0);
    }
    assert_eq!(alive(&system), [0u32; 0]);
    // Empty groups are removed with the agent.
    let mut agent = system.agent.take().expect("an agent");
    kill(agent.id(), "TERM");
    agent.wait().expect("it ends");
    let is_group = |entry: &std::fs::DirEntry| entry.path().is_dir();
    let below = || std::fs::read_dir(&group.0).expect("the unit's group").flatten().filter(is_group).count();
    until("no group is left", || below() == 0);
}
