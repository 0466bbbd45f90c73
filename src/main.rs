//! The `abide` binary: a shim over [`abide::cli`]. Under another name it is the log writer of an agent.

use std::process::ExitCode;

fn main() -> ExitCode {
    abide::agent::run_log_writer_if_named().unwrap_or_else(abide::cli::main)
}
