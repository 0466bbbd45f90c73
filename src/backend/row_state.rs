//! Row states: what a target reports of one operation. The codes of the protocol are for display only.

use crate::gse::codes::{EnvelopeCode, RowCode};

/// Reported state of a final row, without its code and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    /// No row exists: the operation was not sent, or its outcome was inferred from an observation.
    Unreported,
    Done,
    StillRunning,
    /// The host's agent is not connected: the operation was not executed.
    AgentMissing,
    /// A start found a process running.
    AlreadyRunning,
    /// A stop found no process.
    NotRunning,
    UnknownOperation,
    /// The operation was executed, and the check after it failed.
    CheckFailed,
    AlreadyRegistered,
    CommandFailed,
    Stopping,
    /// A newer controller has taken over.
    Fenced,
    /// The operation arrived too late, or is already final: it was not executed.
    NotBegun,
    /// The agent is connected and sent no result in time: the operation may have been executed.
    NoResult,
    /// The gateway refused this item of a batch: it was not executed.
    Rejected,
    /// The credentials do not permit the operation: it was not executed.
    Forbidden,
    /// A code that is not documented.
    Other(i64),
}

/// The documented codes and their states.
const STATES: [(RowCode, RowState); 14] = [
    (RowCode::DONE, RowState::Done),
    (RowCode::RUNNING, RowState::StillRunning),
    (RowCode::AGENT_MISSING, RowState::AgentMissing),
    (RowCode::ALREADY_RUNNING, RowState::AlreadyRunning),
    (RowCode::NOT_RUNNING, RowState::NotRunning),
    (RowCode::BAD_OP_TYPE, RowState::UnknownOperation),
    (RowCode::CHECK_FAILED, RowState::CheckFailed),
    (RowCode::EXISTS, RowState::AlreadyRegistered),
    (RowCode::COMMAND_FAILED, RowState::CommandFailed),
    (RowCode::STOPPING, RowState::Stopping),
    (RowCode::OLD_GENERATION, RowState::Fenced),
    (RowCode::NOT_BEGUN, RowState::NotBegun),
    (RowCode::NO_RESULT, RowState::NoResult),
    (RowCode::BAD_ITEM, RowState::Rejected),
];

impl RowState {
    pub fn of(code: RowCode) -> RowState {
        let known = STATES.iter().find(|(known, _)| *known == code);
        known.map_or(RowState::Other(code.0), |(_, state)| *state)
    }

    /// The code, for display. 0: done, or no row.
    pub fn code(self) -> i64 {
        match self {
            RowState::Other(code) => code,
            RowState::Forbidden => EnvelopeCode::NOT_ALLOWED.0,
            state => STATES.iter().find(|(_, known)| *known == state).map_or(0, |(code, _)| code.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_documented_code_has_a_state_that_shows_it() {
        for code in RowCode::ALL {
            assert!(!matches!(RowState::of(*code), RowState::Other(_)), "{code:?}");
            assert_eq!(RowState::of(*code).code(), code.0);
        }
        assert_eq!((RowState::of(RowCode(7)), RowState::of(RowCode(7)).code()), (RowState::Other(7), 7));
        assert_eq!(RowState::Unreported.code(), 0);
    }
}
