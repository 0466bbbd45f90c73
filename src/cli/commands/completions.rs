//! `abide completions`: completion scripts for shells.

use clap::CommandFactory;

use crate::cli::args::Args;
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};

/// Print a shell completion script
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide completions bash > /etc/bash_completion.d/abide")]
pub struct CompletionsArgs {
    /// Shell to complete for
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

pub fn run(args: &CompletionsArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "abide", &mut text);
    printer.data(&String::from_utf8_lossy(&text));
    Ok(Exit::Done)
}
