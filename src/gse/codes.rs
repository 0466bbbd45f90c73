//! Result codes and operation codes of the protocol.
//!
//! GSE's operations and JOB's `manage_proc` use the same numbers with different meanings: 1 is stop in GSE and host in
//! JOB. Two types keep them apart.

use crate::model::Op;

/// Code of a result row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowCode(pub i64);

macro_rules! codes {
    ($type:ident: $($(#[$meta:meta])* $name:ident = $code:literal, $meaning:literal;)*) => {
        impl $type {
            $($(#[$meta])* pub const $name: $type = $type($code);)*

            /// The documented codes.
            pub const ALL: &[$type] = &[$($type::$name),*];

            /// Description; `None`: not documented.
            pub fn meaning(self) -> Option<&'static str> {
                match self {
                    $($type::$name => Some($meaning),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    RowCode:
    DONE = 0, "done";
    RUNNING = 115, "still running";
    AGENT_MISSING = 117, "the host's agent is missing";
    ALREADY_RUNNING = 828, "the process is already running";
    NOT_RUNNING = 829, "the process is not running";
    BAD_OP_TYPE = 832, "unknown operation";
    CHECK_FAILED = 836, "the check after the operation failed";
    EXISTS = 850, "the process is already registered";
    COMMAND_FAILED = 65535, "the command failed";
    STOPPING = 1015012, "the process is being stopped";
    /// Abide gateway and agent only.
    OLD_GENERATION = 1900409, "a newer controller has taken over: observe and plan again";
    /// Abide gateway only: an item of a batch.
    BAD_ITEM = 1900400, "the item is not valid";
    /// Abide agent only: the operation arrived too late, or is already final. Nothing was done.
    NOT_BEGUN = 1900408, "the operation was not started";
    /// Abide gateway only: the agent is connected and sent no result before the row's deadline. It may have run.
    NO_RESULT = 1900504, "the agent sent no result in time";
}

/// Code of an envelope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EnvelopeCode(pub i64);

codes! {
    EnvelopeCode:
    OK = 0, "success";
    NOT_QUEUED = 1000115, "the task is not queued yet";
    NO_GSE = 50001, "the platform cannot reach GSE";
    NO_AGENTS = 1011003, "unknown agents";
    RATE_LIMITED = 1642902, "too many requests";
    CONCURRENCY_LIMITED = 1642903, "too many requests at once";
    /// Abide's own codes, where the documents define none.
    BAD_REQUEST = 1900400, "invalid request";
    NOT_ALLOWED = 1900403, "these credentials do not permit the call";
    UNKNOWN_TASK = 1900404, "unknown task";
    NO_SUCH_PATH = 1900405, "unknown path or method";
    TAKEN = 1900409, "another process holds it";
    GONE = 1900410, "no longer available: start over";
    TOO_LARGE = 1900413, "the request is too large";
    STORE_FAILED = 1900507, "the store failed: nothing was written";
}

/// An operation of GSE, and of JOB's operate_process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GseOp {
    Start,
    Stop,
    Status,
    Host,
    Unhost,
    Restart,
    Reload,
    Kill,
}

impl GseOp {
    pub const ALL: [GseOp; 8] = [
        GseOp::Start,
        GseOp::Stop,
        GseOp::Status,
        GseOp::Host,
        GseOp::Unhost,
        GseOp::Restart,
        GseOp::Reload,
        GseOp::Kill,
    ];

    pub fn code(self) -> i64 {
        match self {
            GseOp::Start => 0,
            GseOp::Stop => 1,
            GseOp::Status => 2,
            GseOp::Host => 3,
            GseOp::Unhost => 4,
            GseOp::Restart => 7,
            GseOp::Reload => 8,
            GseOp::Kill => 9,
        }
    }

    pub fn from_code(code: i64) -> Option<GseOp> {
        GseOp::ALL.into_iter().find(|op| op.code() == code)
    }

    /// The operation of a step; `None`: register and unregister are separate calls.
    pub fn of(op: Op) -> Option<GseOp> {
        match op {
            Op::Start => Some(GseOp::Start),
            Op::Stop => Some(GseOp::Stop),
            Op::Supervise => Some(GseOp::Host),
            Op::Unsupervise => Some(GseOp::Unhost),
            Op::Restart => Some(GseOp::Restart),
            Op::Reload => Some(GseOp::Reload),
            Op::Kill => Some(GseOp::Kill),
            Op::Register | Op::Unregister => None,
        }
    }
}

/// The two operations of JOB's manage_proc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ManageOp {
    Host,
    Unhost,
}

impl ManageOp {
    pub fn code(self) -> i64 {
        match self {
            ManageOp::Host => 1,
            ManageOp::Unhost => 2,
        }
    }

    pub fn from_code(code: i64) -> Option<ManageOp> {
        [ManageOp::Host, ManageOp::Unhost].into_iter().find(|op| op.code() == code)
    }

    /// The equivalent GSE operation.
    pub fn to_gse(self) -> GseOp {
        match self {
            ManageOp::Host => GseOp::Host,
            ManageOp::Unhost => GseOp::Unhost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_documents() {
        let codes: Vec<i64> = GseOp::ALL.iter().map(|op| op.code()).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 7, 8, 9]);
        assert_eq!((GseOp::from_code(5), GseOp::from_code(6), GseOp::from_code(-1)), (None, None, None));
        assert_eq!(
            (ManageOp::from_code(1), ManageOp::from_code(2)),
            (Some(ManageOp::Host), Some(ManageOp::Unhost))
        );
        assert_eq!((ManageOp::from_code(0), ManageOp::from_code(3)), (None, None));
        // The same number, another operation.
        assert_eq!((GseOp::from_code(1), ManageOp::Host.to_gse()), (Some(GseOp::Stop), GseOp::Host));
    }

    #[test]
    fn every_code_has_a_meaning() {
        assert!(RowCode::ALL.iter().all(|code| code.meaning().is_some()));
        assert!(EnvelopeCode::ALL.iter().all(|code| code.meaning().is_some()));
        assert_eq!(RowCode(4711).meaning(), None);
    }
}
