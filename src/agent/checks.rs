//! What is looked at while a process runs: its health, its version, its configuration files, and how much it uses.
//!
//! Commands run beside the keeper, which goes on taking operations; what they found comes back as a note.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::spawn::{CommandExit, SpecCommand, environment, run};
use super::user_files::{FileSum, FileWork, Rights, own_sum};
use crate::gse::agent_protocol::{ConfigState, OwnedSpec};
use crate::model::{ConfigFile, InstanceKey, Monitor, Spec};

/// The first look comes this soon after a start.
pub const FIRST_CHECK_DELAY: Duration = Duration::from_millis(500);
/// The version is asked for with every so manieth look.
pub const CHECKS_PER_VERSION: u32 = 30;
/// How long a look may take.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// As much of a version as anybody wants to read.
const VERSION_CHARS: usize = 100;

/// Is there anything to look at?
pub fn has_any(spec: &Spec) -> bool {
    spec.control.health_cmd.is_some() || spec.control.version_cmd.is_some() || !spec.configmap.is_empty()
}

/// What a look found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckResult {
    /// Why it is not well; an empty text: it is. `None`: nobody asked.
    pub health: Option<Result<(), String>>,
    pub version: Option<String>,
    pub config: Vec<(String, ConfigState)>,
    /// What is known of files, so that they are not read again for nothing.
    pub files: FileSums,
}

/// Of each file: how it was, and the sum that it had then.
pub type FileSums = HashMap<PathBuf, FileSum>;

/// One look.
pub async fn run_checks(
    key: InstanceKey,
    held: OwnedSpec,
    rights: Rights,
    pid: u32,
    with_version: bool,
    files: FileSums,
) -> CheckResult {
    let spec = &held.spec;
    let health = match &spec.control.health_cmd {
        Some(command) => Some(run_check_command(&key, spec, &rights, pid, command).await.map(|_| ())),
        None => None,
    };
    let version = match spec.control.version_cmd.as_ref().filter(|_| with_version) {
        // A version that cannot be told is none.
        Some(command) => run_check_command(&key, spec, &rights, pid, command).await.ok().map(|text| {
            text.lines().next().unwrap_or_default().chars().take(VERSION_CHARS).collect::<String>()
        }),
        None => None,
    };
    let files = sums(&spec.configmap, &rights, files).await;
    let config = compare(&spec.configmap, |path| files.get(path).map(|(_, _, sum)| sum.clone()));
    CheckResult { health, version, config, files }
}

/// Runs a command that only looks: what it says, or why it failed.
async fn run_check_command(
    key: &InstanceKey,
    spec: &Spec,
    rights: &Rights,
    pid: u32,
    command: &str,
) -> Result<String, String> {
    let marks = [("ABIDE_INSTANCE", key.to_string()), ("ABIDE_PID", pid.to_string())];
    let env = environment(spec, rights, &marks).await?;
    let limit = Duration::from_secs(spec.monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT).into());
    let time = limit.min(CHECK_TIMEOUT);
    let folder = Path::new(&spec.identity.setup_path);
    let secrets = env.secrets.clone();
    let (ended, output) = run(SpecCommand { command, folder, rights, env, time }, None, None).await?;
    match ended {
        CommandExit::Success => Ok(output.tail(&secrets)),
        CommandExit::Failure(code, said) if said.is_empty() => Err(format!("it ended with {code}")),
        CommandExit::Failure(code, said) => Err(format!("it ended with {code}: {said}")),
        CommandExit::TimedOut(_) => Err(format!("it took longer than {} s", time.as_secs())),
    }
}

/// The first of these files that is not what it is said to be, in words. With the caller's own rights.
pub fn first_mismatch(entries: &[ConfigFile]) -> Option<String> {
    compare(entries, own_sum).into_iter().find_map(|(path, state)| match state {
        ConfigState::AsStated => None,
        ConfigState::Differs => Some(format!("{path} has another md5 than the manifest states")),
        ConfigState::Missing => Some(format!("{path} is not there, or cannot be read")),
    })
}

/// The sums of all files that can be read with the spec user's rights.
async fn sums(entries: &[ConfigFile], rights: &Rights, mut known: FileSums) -> FileSums {
    let stated = |entry: &ConfigFile| entry.path.clone().filter(|_| entry.md5.is_some());
    let files: Vec<_> = entries.iter().filter_map(stated).map(PathBuf::from).collect();
    if files.is_empty() {
        return FileSums::new();
    }
    let files: Vec<_> =
        files.into_iter().map(|path| (known.remove(&path), path)).map(|(sum, path)| (path, sum)).collect();
    let summed =
        rights.run(FileWork::Sums, "read the configmap files", move |rights| Ok(rights.sums(files))).await;
    summed.unwrap_or_default().into_iter().filter_map(|(path, sum)| Some((path, sum?))).collect()
}

/// Is each file what it is said to be?
fn compare(entries: &[ConfigFile], sum: impl Fn(&Path) -> Option<String>) -> Vec<(String, ConfigState)> {
    let mut states = Vec::new();
    for ConfigFile { path, md5 } in entries {
        let (Some(path), Some(md5)) = (path, md5) else { continue };
        let state = match sum(Path::new(path)) {
            None => ConfigState::Missing,
            Some(sum) if sum.eq_ignore_ascii_case(md5) => ConfigState::AsStated,
            Some(_) => ConfigState::Differs,
        };
        states.push((path.clone(), state));
    }
    states
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_as_stated_or_differs_or_is_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("app.conf");
        std::fs::write(&path, "hello\n").expect("a file");
        let entry = |path: &Path, md5: &str| ConfigFile {
            path: Some(path.display().to_string()),
            md5: Some(md5.to_owned()),
        };
        let entries = [
            entry(&path, "B1946AC92492D2347C6235B4D2611184"),
            entry(&path, "00000000000000000000000000000000"),
            entry(&folder.path().join("none"), "b1946ac92492d2347c6235b4d2611184"),
            entry(folder.path(), "b1946ac92492d2347c6235b4d2611184"),
        ];
        let states: Vec<ConfigState> =
            compare(&entries, own_sum).into_iter().map(|(_, state)| state).collect();
        use ConfigState::{AsStated, Differs, Missing};
        assert_eq!(states, [AsStated, Differs, Missing, Missing]);
        std::fs::write(&path, "other").expect("a file");
        assert_eq!(compare(&entries[..1], own_sum)[0].1, Differs, "a change is seen");
    }
}
