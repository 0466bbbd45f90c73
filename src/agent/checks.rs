//! Checks of a running process: health, version_cmd and the sums of configuration files.
//!
//! Checks run in their own task, so that the instance task keeps accepting operations; the result comes back as a
//! [`CheckResult`].

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::context::AgentContext;
use super::environment::{LAUNCH_ID_VARIABLE, environment};
use super::error::LaunchError;
use super::exit_record::probe_id;
use super::health::{HealthFailure, HealthSettings, Probe, ProbeClient, ProbeResult};
use super::process::ProcessIdentity;
use super::sandbox::{LaunchSandbox, MainProcess};
use super::spawn::{CommandExit, SpecCommand, run};
use super::tree::ProcessTree;
use super::user_files::{FileSum, FileWork, Rights, UserFileError, own_sum};
use crate::agent_protocol::ConfigState;
use crate::model::{ConfigFile, InstanceKey, Spec};

/// Delay of the first check after a start.
pub const FIRST_CHECK_DELAY: Duration = Duration::from_millis(500);
/// Number of checks per run of version_cmd.
pub const CHECKS_PER_VERSION: u32 = 30;
/// Maximum duration of a check command.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum characters of a reported version.
const VERSION_CHARS: usize = 100;

/// Whether the spec has anything to check.
pub fn has_any(spec: &Spec) -> bool {
    HealthSettings::of(spec).is_some() || spec.control.version_cmd.is_some() || !spec.configmap.is_empty()
}

/// Whether a check of the spec runs a command.
pub fn has_command(spec: &Spec) -> bool {
    let probe = HealthSettings::of(spec).map(|settings| settings.probe);
    matches!(probe, Some(Probe::Command(_))) || spec.control.version_cmd.is_some()
}

/// Reason why a check command did not succeed.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("ended with {code}{}", if text.is_empty() { String::new() } else { format!(": {text}") })]
    Failed { code: i32, text: String },
    #[error("timed out after {} s{}", time.as_secs(), if text.is_empty() { String::new() } else { format!(": {text}") })]
    TimedOut { time: Duration, text: String },
}

/// The result of one check.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckResult {
    /// `None`: the spec has no health check.
    pub health: Option<ProbeResult>,
    pub version: Option<String>,
    pub config: Vec<(String, ConfigState)>,
    /// Sums of the files, so that an unchanged file is not read again.
    pub files: FileSums,
}

/// The last known sum of each file.
pub type FileSums = HashMap<PathBuf, FileSum>;

/// A running process to check.
pub struct CheckedProcess<'a> {
    pub shared: &'a AgentContext,
    pub key: &'a InstanceKey,
    pub spec: &'a Spec,
    pub rights: Rights,
    pub main: ProcessIdentity,
}

impl CheckedProcess<'_> {
    /// Runs one check.
    pub async fn check(&self, with_version: bool, files: FileSums) -> CheckResult {
        let CheckedProcess { spec, rights, .. } = self;
        let health = match HealthSettings::of(spec) {
            Some(settings) => Some(self.probe(&settings).await),
            None => None,
        };
        let version = match spec.control.version_cmd.as_ref().filter(|_| with_version) {
            // If version_cmd fails, the last known version stays.
            Some(command) => self.run_command(command, CHECK_TIMEOUT).await.ok().map(|text| {
                text.lines().next().unwrap_or_default().chars().take(VERSION_CHARS).collect::<String>()
            }),
            None => None,
        };
        let files = sums(&spec.configmap, rights, files).await;
        let config = compare(&spec.configmap, |path| files.get(path).map(|(_, _, sum)| sum.clone()));
        CheckResult { health, version, config, files }
    }

    /// Runs the probe of a health check.
    async fn probe(&self, settings: &HealthSettings<'_>) -> ProbeResult {
        let client = ProbeClient {
            uid: self.rights.account().uid(),
            policy: &self.shared.policy,
            timeout: settings.timeout,
        };
        match settings.probe {
            Probe::Command(command) => {
                let ran = self.run_command(command, settings.timeout).await;
                ran.map_err(|error| HealthFailure::of(&error))
            }
            Probe::Http(url) => {
                let response = client.request(url).await?;
                // The secrets are read only if there is a text to mask.
                let secrets = match response.has_body() {
                    true => environment(self.spec, &self.rights, &[]).await.ok().map(|env| env.secrets),
                    false => None,
                };
                response.result(secrets.as_ref())
            }
            Probe::Tcp(address) => client.connect(address).await,
        }
    }

    /// Runs a check command, and ends its whole tree. Returns its output, or the reason of its failure.
    async fn run_command(&self, command: &str, time: Duration) -> Result<String, CheckError> {
        let CheckedProcess { shared, key, spec, rights, main } = self;
        let id = probe_id(main);
        let variables = [
            ("ABIDE_INSTANCE", key.to_string()),
            ("ABIDE_PID", main.pid.to_string()),
            (LAUNCH_ID_VARIABLE, id.clone()),
        ];
        let env = environment(spec, rights, &variables).await?;
        let folder = Path::new(&spec.identity.setup_path);
        let secrets = env.secrets.clone();
        let main = MainProcess { identity: main, live: spec };
        let sandbox = LaunchSandbox::of_command(spec, rights, Some(main)).await.map_err(LaunchError::from)?;
        let program = SpecCommand { command, folder, rights, env, time, sandbox };
        let group = shared.groups.make(&id, spec);
        let guard = CommandGuard(Some(ProcessTree::of_command(&id, group.clone(), rights.account().uid())));
        let ended = run(program, None, group).await;
        guard.end().await;
        let (ended, output) = ended?;
        match ended {
            CommandExit::Success => Ok(output.tail(&secrets)),
            CommandExit::Failure(code, text) => Err(CheckError::Failed { code, text }),
            CommandExit::TimedOut(text) => {
                Err(CheckError::TimedOut { time, text: text.trim_end().to_owned() })
            }
        }
    }
}

/// Ends the processes of a check command: after its end, or when its check is aborted.
struct CommandGuard(Option<ProcessTree>);

impl CommandGuard {
    async fn end(mut self) {
        if let Some(tree) = &self.0 {
            tree.end_leftovers().await;
        }
        self.0 = None;
    }
}

impl Drop for CommandGuard {
    fn drop(&mut self) {
        if let (Some(tree), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { tree.end(Duration::ZERO).await });
        }
    }
}

/// A check in a task of its own, which is aborted when this is dropped: a check of an ended process has no result.
pub struct CheckTask(tokio::task::JoinHandle<CheckResult>);

impl CheckTask {
    pub fn spawn(check: impl Future<Output = CheckResult> + Send + 'static) -> CheckTask {
        CheckTask(tokio::spawn(check))
    }

    pub async fn result(&mut self) -> CheckResult {
        (&mut self.0).await.unwrap_or_default()
    }
}

impl Drop for CheckTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The first file whose md5 differs from the manifest, as a message. Reads with the caller's own rights.
pub fn first_mismatch(entries: &[ConfigFile]) -> Option<String> {
    compare(entries, own_sum).into_iter().find_map(|(path, state)| match state {
        ConfigState::AsStated => None,
        ConfigState::Differs => Some(format!("{path}: md5 differs from the manifest")),
        ConfigState::Missing => Some(format!("{path} does not exist or cannot be read")),
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
    let sum = move |rights: &Rights| Ok::<_, UserFileError>(rights.sums(files));
    let summed = rights.run(FileWork::Sums, "read the configmap files", sum).await;
    summed.unwrap_or_default().into_iter().filter_map(|(path, sum)| Some((path, sum?))).collect()
}

/// Compares the sum of each file with the stated md5.
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
