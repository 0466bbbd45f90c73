//! Stored output of runs without a log: one-shots, scheduled runs and failed starts.
//!
//! A run writes to a file in the agent's folder, so that its output survives the agent. The file has no path that the user
//! can reach, and only its end is kept: while the run writes, all but the last part is freed ([`output_bound`]), and less
//! is left when it ends. The last [`MAX_RUNS`] runs of an instance are kept for [`MAX_AGE`], until the instance is
//! unregistered.
//!
//! [`output_bound`]: super::output_bound

use std::collections::HashSet;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tracing::info;

use super::output_bound::{self, BoundedOutput};
use crate::clock;
use crate::model::InstanceKey;

/// Runs of an instance whose output is kept.
const MAX_RUNS: usize = 20;
/// Bytes that are kept of an ended run.
const MAX_BYTES: u64 = 64 << 10;
const MAX_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// The folder of the stored outputs: a folder per instance, a file per run.
#[derive(Clone, Default)]
pub struct RunOutputs(PathBuf);

/// The output of a run in progress. It is bounded while this lives.
pub struct RunOutput {
    file: Arc<File>,
    _bounded: Option<BoundedOutput>,
}

impl RunOutputs {
    /// Opens the folder of an agent, and removes outdated outputs.
    pub fn in_folder(agent: &Path) -> io::Result<RunOutputs> {
        let outputs = RunOutputs(agent.join("output"));
        DirBuilder::new().recursive(true).mode(0o700).create(&outputs.0)?;
        outputs.remove_outdated();
        Ok(outputs)
    }

    fn folder(&self, instance: &InstanceKey) -> PathBuf {
        self.0.join(folder_name(instance))
    }

    /// Removes the outputs of an instance.
    pub fn remove(&self, instance: &InstanceKey) {
        let _ = std::fs::remove_dir_all(self.folder(instance));
    }

    /// Removes the outputs of all instances except these.
    pub fn remove_others<'a>(&self, instances: impl Iterator<Item = &'a InstanceKey>) {
        let known: HashSet<String> = instances.map(folder_name).collect();
        let unknown: Vec<String> = names(&self.0).into_iter().filter(|name| !known.contains(name)).collect();
        for name in &unknown {
            let _ = std::fs::remove_dir_all(self.0.join(name));
        }
        if !unknown.is_empty() {
            info!(instances = unknown.len(), "removed stored outputs of instances that are not registered");
        }
    }

    /// Creates the output of a run, and removes the oldest ones. Returns a descriptor for the process.
    pub fn create(&self, instance: &InstanceKey, launch_id: &str, uid: u32) -> io::Result<(RunOutput, File)> {
        let folder = self.folder(instance);
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let known = self.runs(instance);
        for old in known.iter().take((known.len() + 1).saturating_sub(MAX_RUNS)) {
            let _ = std::fs::remove_file(folder.join(old));
        }
        // Names sort by time. Two runs of one millisecond, or a clock that was set back, do not change the order.
        let after = known.last().and_then(|last| last.split('-').next()?.parse::<i64>().ok());
        let started = clock::now().0.max(after.map_or(0, |last| last.saturating_add(1)));
        let path = folder.join(format!("{started:015}-{launch_id}"));
        let file = File::options().append(true).create(true).mode(0o600).open(&path)?;
        let own = File::options().read(true).write(true).open(&path)?;
        // A process of another user can open it again for writing (/dev/stdout) but not map it: inotify does not see writes
        // to a mapping.
        if nix::unistd::geteuid().is_root() {
            file.set_permissions(Permissions::from_mode(0o222))?;
        }
        Ok((RunOutput::bounded(own, uid), file))
    }

    /// The output of a run that an earlier agent launched.
    pub fn of_launch(&self, instance: &InstanceKey, launch_id: &str, uid: u32) -> Option<RunOutput> {
        let runs = self.runs(instance);
        let name = runs.iter().find(|name| name.split_once('-').is_some_and(|(_, id)| id == launch_id))?;
        let file = File::options().read(true).write(true).open(self.folder(instance).join(name)).ok()?;
        Some(RunOutput::bounded(file, uid))
    }

    /// Stores the output of a start that failed.
    pub fn store(&self, instance: &InstanceKey, launch_id: &str, text: &str) -> io::Result<()> {
        let (output, mut file) = self.create(instance, launch_id, nix::unistd::geteuid().as_raw())?;
        file.write_all(text.as_bytes())?;
        if !text.ends_with('\n') {
            file.write_all(b"\n")?;
        }
        output.end();
        Ok(())
    }

    /// The outputs of an instance with the ids of their runs, oldest first.
    pub fn open_all(&self, instance: &InstanceKey) -> Vec<(String, File)> {
        let folder = self.folder(instance);
        let open = |name: String| Some((name.clone(), File::open(folder.join(name)).ok()?));
        self.runs(instance).into_iter().filter_map(open).collect()
    }

    pub fn rename(&self, from: &InstanceKey, to: &InstanceKey) {
        let _ = std::fs::rename(self.folder(from), self.folder(to));
    }

    /// The ids of the stored runs, oldest first.
    fn runs(&self, instance: &InstanceKey) -> Vec<String> {
        let mut names = names(&self.folder(instance));
        names.sort();
        names
    }

    fn remove_outdated(&self) {
        for folder in names(&self.0).into_iter().map(|name| self.0.join(name)) {
            for path in names(&folder).into_iter().map(|name| folder.join(name)) {
                let modified = std::fs::metadata(&path).and_then(|meta| meta.modified());
                let age = modified.ok().map(|time| clock::now().secs_since(clock::of_file(time)));
                if age.is_some_and(|age| age > MAX_AGE.as_secs()) {
                    let _ = std::fs::remove_file(path);
                }
            }
            // Fails unless it is empty.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

fn folder_name(instance: &InstanceKey) -> String {
    blake3::hash(instance.to_string().as_bytes()).to_hex()[..32].to_owned()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

impl RunOutput {
    fn bounded(file: File, uid: u32) -> RunOutput {
        let file = Arc::new(file);
        let _bounded = output_bound::bound(&file, uid);
        RunOutput { file, _bounded }
    }

    /// The run has ended: frees all but the end of its output.
    pub fn end(self) {
        output_bound::trim(&self.file, MAX_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_runs_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let outputs = RunOutputs::in_folder(folder.path()).expect("a folder");
        let (one, two) =
            ("0:127.0.0.1:web:one".parse().expect("a key"), "0:127.0.0.1:web:two".parse().expect("a key"));
        for run in 0..25 {
            outputs.store(&one, &format!("run{run}"), &format!("output {run}")).expect("it is stored");
        }
        let runs = outputs.open_all(&one);
        assert_eq!(runs.len(), MAX_RUNS);
        let text = |(_, file): &(String, File)| io::read_to_string(file).expect("text");
        assert_eq!((text(&runs[0]), text(&runs[19])), ("output 5\n".into(), "output 24\n".into()));
        assert!(outputs.open_all(&two).is_empty());
        outputs.rename(&one, &two);
        assert_eq!((outputs.open_all(&one).len(), outputs.open_all(&two).len()), (0, MAX_RUNS));
        assert!(
            outputs.of_launch(&two, "run24", 0).is_some() && outputs.of_launch(&two, "run4", 0).is_none()
        );
        outputs.store(&one, "run", "output").expect("it is stored");
        outputs.remove_others([&two].into_iter());
        assert_eq!((outputs.open_all(&one).len(), outputs.open_all(&two).len()), (0, MAX_RUNS));
        outputs.remove(&two);
        assert!(names(&outputs.0).is_empty());
    }

    #[test]
    fn an_ended_run_keeps_its_end_only() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().expect("a folder");
        let outputs = RunOutputs::in_folder(folder.path()).expect("a folder");
        let key = "0:127.0.0.1:web:one".parse().expect("a key");
        outputs.store(&key, "run", &"a line\n".repeat(100_000)).expect("it is stored");
        let meta = outputs.open_all(&key)[0].1.metadata().expect("a file");
        assert!(meta.blocks() * 512 <= 2 * MAX_BYTES, "{} bytes are left", meta.blocks() * 512);
    }
}
