//! Parse, start logging, run, exit.

use std::process::ExitCode;

fn main() -> ExitCode {
    abide::cli::main()
}
