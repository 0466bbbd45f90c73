//! The `abide` binary: a shim over [`abide::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    abide::cli::main()
}
