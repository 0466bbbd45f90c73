//! Agent errors: why a process was not launched, adopted, checked or commanded.

use super::account::AccountError;
use super::exit_record::ExitRecordError;
use super::ownership::OwnershipError;
use super::policy::PolicyRefusal;
use super::spawn::LaunchError;
use super::user_files::UserFileError;
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
