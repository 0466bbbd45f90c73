//! The verbs of the command line: one module per verb.

pub mod agent;
pub mod apply;
pub mod config;
pub mod convert;
pub mod diff;
pub mod doctor;
pub mod explain;
pub mod generate;
pub mod get;
pub mod import;
pub mod init;
pub mod lease;
pub mod logs;
pub mod manual;
pub mod plan;
pub mod rollback;
pub mod serve;
pub mod status;
pub mod up;
pub mod validate;
pub mod watch;
