//! Everything is in `cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    abide::cli::main()
}
