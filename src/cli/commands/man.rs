//! `abide man`: manual pages, of Abide and of each verb.

use clap::CommandFactory;

use crate::cli::args::Args;
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};
use crate::manifest::did_you_mean;

/// Print a manual page
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide man validate | man -l -")]
pub struct ManArgs {
    /// Verb to print the page of [default: the page of abide itself]
    pub verb: Option<String>,
}

pub fn run(args: &ManArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut command = Args::command();
    command.build();
    let page = match &args.verb {
        None => command,
        Some(verb) => match command.find_subcommand(verb) {
            // After `build` the page has the full name: abide-validate.
            Some(found) => found.clone(),
            None => {
                let names: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
                let hint = match did_you_mean(verb, names.iter().copied()) {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => format!("verbs: {}", names.join(", ")),
                };
                return Err(Failure::new(Exit::Usage, format!("abide has no verb {verb:?}")).hint(hint));
            }
        },
    };
    let mut text = Vec::new();
    let rendered = clap_mangen::Man::new(page).render(&mut text);
    rendered.map_err(|error| Failure::new(Exit::Failed, format!("cannot write the manual page: {error}")))?;
    printer.data(&String::from_utf8_lossy(&text));
    Ok(Exit::Done)
}
