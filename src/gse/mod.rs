//! The wire of BlueKing's GSE and JOB: what calls are sent and what they answer, from and to the model; codes and
//! operations by name; the keys of results. Client and server use the same types.

pub mod agent_protocol;
mod body;
pub mod codes;
mod job;
pub mod keys;
pub mod request;
pub mod response;

pub use crate::model::Dialect;
pub use body::{bodies, spec_body};
pub use job::{Api as JobApi, JobBody, JobProcess, process_info as job_process};

use crate::model::{Field, Host, ProcessKey, Spec, State};

/// A process as a request body speaks of it: one spec, one state, some hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    pub key: ProcessKey,
    pub hosts: Vec<Host>,
    pub state: State,
    pub spec: Spec,
}

/// Something of a process that a body has no place for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Loss {
    pub key: ProcessKey,
    pub what: String,
    pub why: String,
}

impl Loss {
    fn new(subject: &Subject, what: impl ToString, why: impl Into<String>) -> Loss {
        Loss { key: subject.key.clone(), what: what.to_string(), why: why.into() }
    }

    fn field(subject: &Subject, field: Field, dialect: Dialect) -> Loss {
        Loss::new(subject, field, format!("{} has no place for it", dialect.name()))
    }
}
