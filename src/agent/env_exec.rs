//! Variables that programs print: `env: {NAME: {exec: [PROGRAM, ARGUMENT…]}}`, run at each start.
//!
//! The program runs as the user of the process, in its folder and sandbox. Its standard error is discarded. Its output
//! goes to memory of a fixed size, so that no program can fill the memory of the agent, and is shown in no message.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};

use super::captured_output::OutputError;
use super::context::AgentContext;
use super::environment::{Environment, LAUNCH_ID_VARIABLE};
use super::error::LaunchError;
use super::exit_record::kill_group;
use super::sandbox::LaunchSandbox;
use super::spawn::{Launch, Sink};
use super::tree::ProcessTree;
use super::user_files::Rights;
use crate::model::{EnvValue, Spec};

/// Maximum bytes of a value.
const MAX_BYTES: u64 = 64 << 10;
/// Memory of an output: a page more than the maximum, which shows a value that is too long.
const MEMORY: u64 = MAX_BYTES + 4096;
/// Maximum duration of a program.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why an output is not a value.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum InvalidOutput {
    #[error("printed output that cannot be read")]
    Unreadable,
    #[error("printed more than 64 KiB")]
    TooLong,
    #[error("printed output that is not UTF-8")]
    NotUtf8,
    #[error("printed output with a NUL byte")]
    Nul,
}

/// Whether programs print values of a spec's variables.
pub fn has_any(spec: &Spec) -> bool {
    spec.env.values().any(|value| matches!(value, EnvValue::Exec(_)))
}

/// The values of a spec's variables that programs print.
pub async fn values(
    shared: &AgentContext,
    spec: &Spec,
    rights: &Rights,
    env: &Environment,
    sandbox: &LaunchSandbox,
) -> Result<Vec<(String, String)>, LaunchError> {
    let mut values = Vec::new();
    for (name, value) in &spec.env {
        let EnvValue::Exec(argv) = value else { continue };
        let id = crate::ids::fresh_id();
        // The id of the program, not of the launch: it is never taken for the launched process.
        let mut variables = env.variables.clone();
        variables.retain(|(known, _)| known != LAUNCH_ID_VARIABLE);
        variables.push((LAUNCH_ID_VARIABLE.to_owned(), id.clone()));
        let group = shared.groups.make(&id, spec);
        let tree = ProcessTree::of_command(&id, group.clone(), rights.account().uid());
        let output = bounded_memory().map_err(|error| LaunchError::Output(OutputError(error)))?;
        let launch = Launch {
            command: format!("exec {} 2>/dev/null", shell_words::join(argv)),
            folder: Path::new(&spec.identity.setup_path).to_owned(),
            rights: rights.clone(),
            env: variables,
            output: Sink::File(output.try_clone().map_err(|error| LaunchError::Output(OutputError(error)))?),
            record: None,
            pid_file: None,
            foreign: None,
            group,
            sandbox: sandbox.clone(),
        };
        let ended = run(launch).await;
        tree.end_leftovers().await;
        let program = argv.first().cloned().unwrap_or_default();
        let failed = |how: String| LaunchError::EnvExec { name: name.clone(), program: program.clone(), how };
        let value = read(&output);
        match ended? {
            Some(Some(0)) => {}
            // Its last write failed.
            Some(_) if value == Err(InvalidOutput::TooLong) => {}
            Some(Some(code)) => return Err(failed(format!("ended with {code}"))),
            Some(None) => return Err(failed("was killed".to_owned())),
            None => return Err(failed(format!("timed out after {} s", TIMEOUT.as_secs()))),
        }
        values.push((name.clone(), value.map_err(|how| failed(how.to_string()))?));
    }
    Ok(values)
}

/// The exit code of a program. Outer `None`: it timed out and was killed.
async fn run(launch: Launch) -> Result<Option<Option<i32>>, LaunchError> {
    let handle = launch.spawn().await?;
    match tokio::time::timeout(TIMEOUT, handle.wait_exit()).await {
        Ok(code) => Ok(Some(code)),
        Err(_) => {
            kill_group(&handle);
            handle.wait_exit().await;
            Ok(None)
        }
    }
}

/// Memory that cannot grow: a write beyond its end fails.
fn bounded_memory() -> std::io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("abide-env", flags)?);
    file.set_len(MEMORY)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// The text before the unwritten end, without its final line break.
fn read(output: &File) -> Result<String, InvalidOutput> {
    let mut bytes = vec![0; MEMORY as usize];
    output.read_exact_at(&mut bytes, 0).map_err(|_| InvalidOutput::Unreadable)?;
    let length = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    if length as u64 > MAX_BYTES {
        return Err(InvalidOutput::TooLong);
    }
    bytes.truncate(length);
    let text = String::from_utf8(bytes).map_err(|_| InvalidOutput::NotUtf8)?;
    match text.contains('\0') {
        true => Err(InvalidOutput::Nul),
        false => Ok(text
            .strip_suffix('\n')
            .map(|line| line.strip_suffix('\r').unwrap_or(line))
            .unwrap_or(&text)
            .to_owned()),
    }
}
