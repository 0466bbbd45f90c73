//! Process files: pid file and log of a process whose spec names none, in the agent's own folder.
//!
//! Only a foreground process may leave its pid file out: the agent starts it, so the file proves nothing and is a record for
//! people. Both files belong to the agent, and no path of a spec leads to them. The log is always rotated.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use tracing::warn;

use crate::model::{AutoType, InstanceKey, Spec, StartMode};

/// The folder of these files: a folder per instance.
#[derive(Clone, Debug, Default)]
pub struct ProcessFiles(PathBuf);

/// Maximum length of a folder name that is the key of an instance.
const MAX_NAME_BYTES: usize = 200;

impl ProcessFiles {
    /// Opens the folder of an agent.
    pub fn in_folder(agent: &Path) -> io::Result<ProcessFiles> {
        // The processes have other working folders than the agent.
        let files = ProcessFiles(std::path::absolute(agent)?.join("processes"));
        make_folder(&files.0)?;
        Ok(files)
    }

    fn folder(&self, instance: &InstanceKey) -> PathBuf {
        let name = instance.to_string();
        // Without a slash, and never `.` or `..`: a key has colons.
        self.0.join(match name.len() <= MAX_NAME_BYTES {
            true => name,
            false => blake3::hash(name.as_bytes()).to_hex().to_string(),
        })
    }

    /// The log of a process that leaves its log and its pid file out.
    pub fn log(&self, instance: &InstanceKey, spec: &Spec) -> Option<PathBuf> {
        has_log(spec).then(|| self.folder(instance).join("process.log"))
    }

    /// The pid file of a process that names none.
    pub fn pid_file(&self, instance: &InstanceKey, spec: &Spec) -> Option<PathBuf> {
        let is_own = is_foreground(spec) && spec.identity.pid_path.is_empty();
        is_own.then(|| self.folder(instance).join("process.pid"))
    }

    /// Creates the folder of an instance.
    pub fn prepare(&self, instance: &InstanceKey) -> io::Result<()> {
        make_folder(&self.folder(instance))
    }

    /// Records the pid of a process that has no pid file of its own. A failure is logged: nothing reads the file but people.
    pub fn write_pid(&self, instance: &InstanceKey, spec: &Spec, pid: u32) {
        let Some(path) = self.pid_file(instance, spec) else { return };
        let written = self.prepare(instance).and_then(|()| std::fs::write(&path, format!("{pid}\n")));
        if let Err(error) = written {
            warn!(%instance, path = %path.display(), %error, "pid file not written");
        }
    }

    /// Removes the pid file of an ended process, if the file still names it.
    pub fn remove_pid(&self, instance: &InstanceKey, spec: &Spec, pid: u32) {
        let Some(path) = self.pid_file(instance, spec) else { return };
        let names = |text: String| text.trim().parse() == Ok(pid);
        if std::fs::read_to_string(&path).is_ok_and(names) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Removes the files of an instance.
    pub fn remove(&self, instance: &InstanceKey) {
        let _ = std::fs::remove_dir_all(self.folder(instance));
    }

    pub fn rename(&self, from: &InstanceKey, to: &InstanceKey) {
        let _ = std::fs::rename(self.folder(from), self.folder(to));
    }
}

fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

fn is_foreground(spec: &Spec) -> bool {
    spec.control.start_mode == Some(StartMode::Foreground)
}

/// Whether the agent keeps the log of a process. The output of other runs without a log is stored per run.
pub fn has_log(spec: &Spec) -> bool {
    let identity = &spec.identity;
    let is_resident = spec.monitor.auto_type == AutoType::Resident;
    is_resident && is_foreground(spec) && identity.pid_path.is_empty() && identity.log_path.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_after_the_instance_and_removed_with_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = ProcessFiles::in_folder(folder.path()).expect("it opens");
        let key: InstanceKey = "0:127.0.0.1:web:api_1".parse().expect("a key");
        let long: InstanceKey = format!("0:127.0.0.1:web:{}", "é".repeat(100)).parse().expect("a key");
        let mut spec = Spec::default();
        spec.control.start_mode = Some(StartMode::Foreground);
        for key in [&key, &long] {
            files.write_pid(key, &spec, 77);
            let path = files.pid_file(key, &spec).expect("a path");
            assert_eq!(std::fs::read_to_string(&path).expect("it is written"), "77\n");
            files.remove_pid(key, &spec, 78);
            assert!(path.exists());
            files.remove_pid(key, &spec, 77);
            assert!(!path.exists());
        }
        assert!(folder.path().join("processes/0:127.0.0.1:web:api_1").is_dir());
        assert!(files.log(&key, &spec).is_some());
        spec.identity.log_path = Some("/x".to_owned());
        assert_eq!(files.log(&key, &spec), None);
        spec.identity = crate::model::Identity { pid_path: "/x".to_owned(), ..Default::default() };
        assert_eq!((files.log(&key, &spec), files.pid_file(&key, &spec)), (None, None));
        files.remove(&key);
        assert!(!folder.path().join("processes/0:127.0.0.1:web:api_1").exists());
    }
}
