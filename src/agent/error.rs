//! Agent errors: why a process was not launched, adopted, checked or commanded.

use std::path::PathBuf;

use super::account::AccountError;
use super::captured_output::OutputError;
use super::clone_exec;
use super::exit_record::ExitRecordError;
use super::log_writer::LogWriterError;
use super::ownership::OwnershipError;
use super::policy::PolicyRefusal;
use super::sandbox::SandboxError;
use super::spawn::{LAUNCH_TIMEOUT, QUEUE_TIMEOUT};
use super::user_files::{MAX_PER_USER, UserFileError};
use crate::error_chain::chain;

/// Error of the work on one instance.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error(transparent)]
    Policy(#[from] PolicyRefusal),
    #[error(transparent)]
    Files(#[from] UserFileError),
    #[error(transparent)]
    Ownership(#[from] OwnershipError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Record(#[from] ExitRecordError),
}

/// The message of a result row.
impl From<AgentError> for String {
    fn from(error: AgentError) -> String {
        chain(&error)
    }
}

/// Reason why a process or command was not launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(transparent)]
    Files(#[from] UserFileError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(transparent)]
    LogWriter(#[from] LogWriterError),
    #[error(transparent)]
    Record(#[from] ExitRecordError),
    #[error("env {name}: the value of the secret is not available")]
    NoSecret { name: String },
    /// Neither output nor standard error is shown: both may contain the secret.
    #[error("env {name}: the program {program:?} {how}")]
    EnvExec { name: String, program: String, how: String },
    #[error("env {name:?} contains a NUL byte")]
    NulInEnv { name: String },
    /// The message does not contain the text, which may be a secret.
    #[error("the command, its environment or its folder contains a NUL byte")]
    Nul,
    #[error(
        "cannot run {command:?} as user {user:?}: waited {} s for the {MAX_PER_USER} launches of this user that are \
         in flight. A launch hangs where its log_path, pid_path or program is on a file system that does not answer",
        QUEUE_TIMEOUT.as_secs()
    )]
    Queue { command: String, user: String },
    #[error("cannot run {command:?} as user {user:?}: cannot open a handle on the process; it was killed")]
    NoHandle { command: String, user: String },
    #[error("cannot run {command:?} as user {user:?}: the launching thread failed")]
    ThreadFailed { command: String, user: String },
    #[error("cannot run {command:?} as user {user:?}: no answer within {} s", LAUNCH_TIMEOUT.as_secs())]
    TimedOut { command: String, user: String },
    /// The caller no longer waits.
    #[error("the launch timed out")]
    GivenUp,
    /// A process that the agent did not launch runs under the identity.
    #[error("process {0} runs under this identity, and this agent did not start it")]
    Foreign(u32),
    #[error(transparent)]
    MayBeForeign(Box<OwnershipError>),
    #[error("cannot open /dev/null: {0}")]
    Null(#[source] std::io::Error),
    #[error("setup_path {} does not exist", folder.display())]
    NoFolder { folder: PathBuf },
    #[error("cannot enter setup_path {} as user {user:?}: {source}", folder.display())]
    Folder { folder: PathBuf, user: String, source: std::io::Error },
    #[error("cannot become user {user:?}: {source}")]
    User { user: String, source: std::io::Error },
    #[error(
        "cannot run {command:?} as user {user:?}: the new process did not reach its program within {} s and was killed",
        clone_exec::EXEC_TIMEOUT.as_secs()
    )]
    ExecTimedOut { command: String, user: String },
    #[error("cannot run {command:?}: {source}")]
    Exec { command: String, source: std::io::Error },
}
