//! Control groups, version 2: a process and everything that it forks, under one name.
//!
//! Each launch gets a group of its own below the agent's, where the kernel and our rights allow it. Then its whole tree is
//! known, whatever forks and daemonizes there, is counted, and can be ended at once. Limits are handed to the kernel where
//! their controller is there, file by file; where it is not, they are looked after by sampling. Without any of this the
//! agent works too.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::meter::limit;
use crate::model::Resource;

/// Tries of an agent that ends to remove its groups, and the wait between them.
const LAST_TRIES: u32 = 10;
const LAST_WAIT: std::time::Duration = std::time::Duration::from_millis(10);

/// Where groups are made; `None`: nowhere.
#[derive(Debug)]
pub struct Cgroups(Option<PathBuf>);

impl Cgroups {
    /// Below the agent's own group, under a name that is the same for the same folder.
    pub fn under_own_cgroup(folder: &Path) -> Cgroups {
        Cgroups(Cgroups::find(folder))
    }

    fn find(folder: &Path) -> Option<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (place, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(place))
        })?;
        let ours = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let ours = ours.lines().find_map(|line| line.strip_prefix("0::"))?;
        // One that we were launched in by another agent is its, not ours to build in.
        let ours = ours.split("/abide-").next().unwrap_or_default();
        let folder = folder.canonicalize().ok()?;
        let name = blake3::hash(folder.as_os_str().as_encoded_bytes()).to_hex();
        let base = mount.join(ours.trim_start_matches('/')).join(format!("abide-{}", &name[..12]));
        std::fs::create_dir_all(&base).ok()?;
        // What a former agent left empty goes; what is in use cannot be removed.
        for left in std::fs::read_dir(&base).ok()?.flatten() {
            let _ = std::fs::remove_dir(left.path());
        }
        base.join("cgroup.procs").is_file().then_some(base)
    }

    /// The group of a launch, if it was made.
    pub fn of(&self, incarnation: &str) -> Option<Cgroup> {
        let path = self.0.as_ref()?.join(incarnation);
        path.is_dir().then_some(Cgroup(path))
    }

    /// A new group for a launch, with its limits where they can be set.
    pub fn make(&self, incarnation: &str, limits: &Resource) -> Option<Cgroup> {
        let path = self.0.as_ref()?.join(incarnation);
        // A former agent of this folder removes the directory above at its end.
        std::fs::create_dir(&path).or_else(|_| std::fs::create_dir_all(&path)).ok()?;
        let group = Cgroup(path);
        group.limit(limits);
        Some(group)
    }
}

/// An agent that ends with nothing running leaves no group behind. What is in use cannot be removed.
impl Drop for Cgroups {
    fn drop(&mut self) {
        let Some(base) = &self.0 else { return };
        for _ in 0..LAST_TRIES {
            let children: Vec<PathBuf> =
                std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
            let children: Vec<PathBuf> = children.into_iter().filter(|path| path.is_dir()).collect();
            children.iter().for_each(|path| drop(std::fs::remove_dir(path)));
            if std::fs::remove_dir(base).is_ok() || !base.exists() {
                return;
            }
            // One whose last process is on its way out goes a moment later; one with a process stays.
            if children.iter().any(|path| !Cgroup(path.clone()).processes().is_empty()) {
                return;
            }
            std::thread::sleep(LAST_WAIT);
        }
    }
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    pub fn at(path: &str) -> Cgroup {
        Cgroup(PathBuf::from(path))
    }

    pub fn path(&self) -> String {
        self.0.display().to_string()
    }

    /// A process can be born into it by this.
    pub fn open_dir(&self) -> Option<File> {
        File::open(&self.0).ok()
    }

    /// Shares of the host become absolute, where a controller takes them.
    fn limit(&self, limits: &Resource) {
        let set = |file: &str, value: String| {
            let path = self.0.join(file);
            path.is_file() && std::fs::write(path, value).is_ok()
        };
        if let Some(cpu) = limit(limits.cpu) {
            const PERIOD_US: f64 = 100_000.0;
            let quota = (cpu / 100.0 * super::meter::processors() * PERIOD_US).max(1000.0);
            set("cpu.max", format!("{quota:.0} {PERIOD_US:.0}"));
        }
        if let Some(mem) = limit(limits.mem) {
            let bytes = mem / 100.0 * super::meter::memory() as f64;
            set("memory.max", format!("{bytes:.0}"));
        }
    }

    pub fn processes(&self) -> Vec<u32> {
        let text = std::fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Processor time of all that are or were in it: seconds.
    pub fn cpu_secs(&self) -> Option<f64> {
        let text = std::fs::read_to_string(self.0.join("cpu.stat")).ok()?;
        let micros = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
        micros.trim().parse::<f64>().ok().map(|micros| micros / 1e6)
    }

    /// Ends everything in it at once.
    pub fn kill(&self) -> bool {
        std::fs::write(self.0.join("cgroup.kill"), "1").is_ok()
    }

    /// Ends what is left in it, and the group. A group whose last process is still on its way out goes a moment later.
    pub fn clear(self) {
        if std::fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
            return;
        }
        self.kill();
        tokio::spawn(async move {
            for _ in 0..50 {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                if std::fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                    return;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Percent;

    #[test]
    fn limits_are_set_where_their_controller_is_there_and_only_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("memory.max"), "max").expect("a file");
        let limits = Resource { cpu: Percent::new(50.0), mem: Percent::new(10.0), ..Resource::default() };
        Cgroup(folder.path().to_owned()).limit(&limits);
        assert!(!file("cpu.max").exists(), "there is no such controller");
        let bytes: u64 = std::fs::read_to_string(file("memory.max")).expect("a file").parse().expect("bytes");
        assert_eq!(bytes / 1024, super::super::meter::memory() / 10 / 1024);
        std::fs::write(file("cpu.max"), "max 100000").expect("a file");
        Cgroup(folder.path().to_owned()).limit(&limits);
        let half = (super::super::meter::processors() * 50_000.0) as u64;
        assert_eq!(std::fs::read_to_string(file("cpu.max")).expect("a file"), format!("{half} 100000"));
        std::fs::write(file("memory.max"), "max").expect("a file");
        Cgroup(folder.path().to_owned()).limit(&Resource { mem: Percent::new(0.0), ..Resource::default() });
        assert_eq!(std::fs::read_to_string(file("memory.max")).expect("a file"), "max", "0 is no limit");
    }
}
