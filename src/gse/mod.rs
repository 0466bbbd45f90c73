//! GSE and JOB wire formats: requests, responses, codes and keys, and their conversion to and from the model.
//!
//! Client and gateway use the same types.

mod body;
pub mod codes;
mod job;
pub mod keys;
pub mod request;
pub mod response;
mod spec_request;

pub use crate::model::Dialect;
pub use body::{bodies, spec_body};
pub use job::{Api as JobApi, JobBody, JobHost, JobProcess, process_info as job_process};

use self::codes::{EnvelopeCode, RowCode};
use crate::model::{Field, Host, ProcessKey, Spec, State};

/// The documented result codes of operations with their meanings, for display.
pub fn row_code_meanings() -> impl Iterator<Item = (i64, &'static str)> {
    RowCode::ALL.iter().filter_map(|code| Some((code.0, code.meaning()?)))
}

/// The documented codes of answers with their meanings, for display.
pub fn envelope_code_meanings() -> impl Iterator<Item = (i64, &'static str)> {
    EnvelopeCode::ALL.iter().filter_map(|code| Some((code.0, code.meaning()?)))
}

/// The content of a request body about a process: one spec, one state, some hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct BodyContent {
    pub key: ProcessKey,
    pub hosts: Vec<Host>,
    pub state: State,
    pub spec: Spec,
}

/// A part of a process that a body cannot transmit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Loss {
    pub key: ProcessKey,
    pub what: String,
    pub why: String,
}

impl Loss {
    fn new(subject: &BodyContent, what: impl ToString, why: impl Into<String>) -> Loss {
        Loss { key: subject.key.clone(), what: what.to_string(), why: why.into() }
    }

    fn field(subject: &BodyContent, field: Field, dialect: Dialect) -> Loss {
        Loss::new(subject, field, format!("{} does not support it", dialect.name()))
    }
}
