//! Control groups (version 2): one group per launch, for accounting, limits and kill of a whole process tree.
//!
//! Each launch gets its own group below the agent's, where the kernel and the agent's rights allow it. The group contains
//! every descendant, also one that daemonizes. Limits are set in the kernel for each controller that is enabled; other
//! limits are enforced by sampling. The agent also works without control groups.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::meter::{cpu_limit, mem_limit};
use crate::model::Spec;

/// Hexadecimal digits of a folder's hash in the name of the agent's group.
const HASH_DIGITS: usize = 12;
/// Attempts of an ending agent to remove its groups, and the wait between two attempts.
const REMOVE_ATTEMPTS: u32 = 10;
const REMOVE_RETRY_INTERVAL: std::time::Duration = std::time::Duration::from_millis(10);

/// Parent directory of the agent's groups; `None`: control groups are not available.
#[derive(Debug)]
pub struct Cgroups(Option<PathBuf>);

impl Cgroups {
    /// A directory below the agent's own group, whose name depends on the agent's folder only.
    pub fn under_own_cgroup(folder: &Path) -> Cgroups {
        Cgroups(Cgroups::find(folder))
    }

    fn find(folder: &Path) -> Option<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (path, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(path))
        })?;
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::"))?;
        let own = outermost(own);
        let folder = folder.canonicalize().ok()?;
        let name = blake3::hash(folder.as_os_str().as_encoded_bytes()).to_hex();
        let base = mount.join(own.trim_start_matches('/')).join(format!("abide-{}", &name[..HASH_DIGITS]));
        std::fs::create_dir_all(&base).ok()?;
        // Removes empty groups of an earlier agent. The kernel refuses to remove one that is in use.
        for entry in std::fs::read_dir(&base).ok()?.flatten() {
            let _ = std::fs::remove_dir(entry.path());
        }
        base.join("cgroup.procs").is_file().then_some(base)
    }

    /// The group of a launch, if it exists.
    pub fn of(&self, launch_id: &str) -> Option<Cgroup> {
        let path = self.0.as_ref()?.join(launch_id);
        path.is_dir().then_some(Cgroup(path))
    }

    /// Creates the group of a launch unless it exists, and sets its limits where controllers are enabled.
    pub fn make(&self, launch_id: &str, spec: &Spec) -> Option<Cgroup> {
        let path = self.0.as_ref()?.join(launch_id);
        // An earlier agent of this folder may have removed the parent directory when it ended.
        std::fs::create_dir(&path).or_else(|_| std::fs::create_dir_all(&path)).ok()?;
        let group = Cgroup(path);
        group.limit(cpu_limit(spec), mem_limit(spec));
        Some(group)
    }
}

/// The part of a group's path before the groups of an agent: an agent that another agent launched does not create groups
/// inside the group of that launch. A unit may be named `abide-agent.service`: only the name that [`Cgroups`] creates counts.
fn outermost(own: &str) -> &str {
    let is_base = |component: &str| {
        let hash = component.strip_prefix("abide-").unwrap_or_default();
        hash.len() == HASH_DIGITS && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let bases = own.match_indices('/').map(|(at, _)| at);
    let mut bases = bases.filter(|at| is_base(own[at + 1..].split('/').next().unwrap_or_default()));
    bases.next().map_or(own, |at| &own[..at])
}

/// Removes empty groups when the agent ends. The kernel refuses to remove one that is in use.
impl Drop for Cgroups {
    fn drop(&mut self) {
        let Some(base) = &self.0 else { return };
        for _ in 0..REMOVE_ATTEMPTS {
            let children: Vec<PathBuf> =
                std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
            let children: Vec<PathBuf> = children.into_iter().filter(|path| path.is_dir()).collect();
            children.iter().for_each(|path| drop(std::fs::remove_dir(path)));
            if std::fs::remove_dir(base).is_ok() || !base.exists() {
                return;
            }
            // A group with a process stays. A group whose last process is exiting can be removed a moment later.
            if children.iter().any(|path| !Cgroup(path.clone()).processes().is_empty()) {
                return;
            }
            std::thread::sleep(REMOVE_RETRY_INTERVAL);
        }
    }
}

/// The control group of one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    pub fn at(path: &str) -> Cgroup {
        Cgroup(PathBuf::from(path))
    }

    pub fn path(&self) -> String {
        self.0.display().to_string()
    }

    /// The directory, for creating a process in the group.
    pub fn open_dir(&self) -> Option<File> {
        File::open(&self.0).ok()
    }

    /// Sets the limits of a changed spec; one that is unset no longer limits.
    pub fn change_limits(&self, spec: &Spec) {
        self.limit(cpu_limit(spec).or(Some(f64::INFINITY)), mem_limit(spec).or(Some(f64::INFINITY)));
    }

    /// Sets limits in percent of the host as absolute values, for each controller that is enabled.
    fn limit(&self, cpu: Option<f64>, mem: Option<f64>) {
        let set = |file: &str, value: String| {
            let path = self.0.join(file);
            path.is_file() && std::fs::write(path, value).is_ok()
        };
        if let Some(cpu) = cpu {
            const PERIOD_US: f64 = 100_000.0;
            let quota = (cpu / 100.0 * super::meter::processors() * PERIOD_US).max(1000.0);
            set("cpu.max", format!("{} {PERIOD_US:.0}", number_or_max(quota)));
        }
        if let Some(mem) = mem {
            let bytes = mem / 100.0 * super::meter::memory() as f64;
            set("memory.max", number_or_max(bytes));
        }
    }

    pub fn processes(&self) -> Vec<u32> {
        let mut text = String::with_capacity(512);
        // Without a size, which the kernel does not know, the file needs fewer system calls.
        let read = File::open(self.0.join("cgroup.procs"))
            .and_then(|file| file.take(u64::MAX).read_to_string(&mut text));
        let text = read.map(|_| text).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// CPU time of all current and former members, in seconds.
    pub fn cpu_secs(&self) -> Option<f64> {
        let text = std::fs::read_to_string(self.0.join("cpu.stat")).ok()?;
        let micros = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
        micros.trim().parse::<f64>().ok().map(|micros| micros / 1e6)
    }

    /// Whether the kernel killed a member because of the memory limit of the group.
    pub fn has_oom_kill(&self) -> bool {
        let text = std::fs::read_to_string(self.0.join("memory.events")).unwrap_or_default();
        let kills = text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok());
        kills.is_some_and(|kills| kills > 0)
    }

    /// Removes the group if it has no process. True: the group is gone.
    pub fn remove_if_empty(&self) -> bool {
        match std::fs::remove_dir(&self.0) {
            Ok(()) => true,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }

    /// Kills all members at once.
    pub fn kill(&self) -> bool {
        std::fs::write(self.0.join("cgroup.kill"), "1").is_ok()
    }
}

fn number_or_max(number: f64) -> String {
    if number.is_finite() { format!("{number:.0}") } else { "max".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Percent, Resource};

    #[test]
    fn groups_stay_inside_the_unit_of_the_agent() {
        for (own, outer) in [
            ("/", "/"),
            ("/system.slice/abide-agent.service", "/system.slice/abide-agent.service"),
            ("/a/abide-0123456789ab/launch", "/a"),
            ("/abide-0123456789ab/launch", ""),
            ("/a.service/abide-0123456789ab/x/abide-ba9876543210/y", "/a.service"),
            ("/abide-0123456789abc/abide-0123456789AB", "/abide-0123456789abc/abide-0123456789AB"),
        ] {
            assert_eq!(outermost(own), outer, "{own}");
        }
    }

    #[test]
    fn limits_are_set_only_for_enabled_controllers() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("memory.max"), "max").expect("a file");
        let resource = Resource { cpu: Percent::new(50.0), mem: Percent::new(10.0), ..Resource::default() };
        let mut spec = Spec { resource, ..Spec::default() };
        let group = Cgroup(folder.path().to_owned());
        group.limit(cpu_limit(&spec), mem_limit(&spec));
        assert!(!file("cpu.max").exists(), "the controller is not enabled");
        let bytes: u64 = std::fs::read_to_string(file("memory.max")).expect("a file").parse().expect("bytes");
        assert_eq!(bytes / 1024, super::super::meter::memory() / 10 / 1024);
        std::fs::write(file("cpu.max"), "max 100000").expect("a file");
        group.limit(cpu_limit(&spec), mem_limit(&spec));
        let half = (super::super::meter::processors() * 50_000.0) as u64;
        assert_eq!(std::fs::read_to_string(file("cpu.max")).expect("a file"), format!("{half} 100000"));
        std::fs::write(file("memory.max"), "max").expect("a file");
        spec.resource = Resource { mem: Percent::new(0.0), ..Resource::default() };
        group.limit(cpu_limit(&spec), mem_limit(&spec));
        assert_eq!(std::fs::read_to_string(file("memory.max")).expect("a file"), "max", "0 means unlimited");
        spec.limits.memory = Some(512_000_000);
        group.limit(cpu_limit(&spec), mem_limit(&spec));
        assert_eq!(std::fs::read_to_string(file("memory.max")).expect("a file"), "512000000");
        group.change_limits(&Spec::default());
        let read = |name: &str| std::fs::read_to_string(file(name)).expect("a file");
        assert_eq!((read("memory.max"), read("cpu.max")), ("max".to_owned(), "max 100000".to_owned()));
        assert!(!group.has_oom_kill(), "the controller is not enabled");
        for (events, is_killed) in [("low 0\noom 1\noom_kill 0\n", false), ("oom 1\noom_kill 2\n", true)] {
            std::fs::write(file("memory.events"), events).expect("a file");
            assert_eq!(group.has_oom_kill(), is_killed);
        }
    }
}
