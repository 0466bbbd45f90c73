//! What a machine can generate: schema, completions, manual, version.

use clap::CommandFactory;

use crate::cli::args::{Args, CompletionsArgs, ManArgs, PlainForm, VersionArgs};
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};
use crate::manifest::{did_you_mean, schema};

pub fn schema(printer: &Printer) -> Result<Exit, Failure> {
    let schema = serde_json::to_string_pretty(&schema::schema());
    let schema =
        schema.map_err(|error| Failure::new(Exit::Failed, format!("cannot write the schema: {error}")))?;
    printer.data(&(schema + "\n"));
    Ok(Exit::Done)
}

pub fn completions(args: &CompletionsArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "abide", &mut text);
    printer.data(&String::from_utf8_lossy(&text));
    Ok(Exit::Done)
}

pub fn man(args: &ManArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut command = Args::command();
    command.build();
    let page = match &args.verb {
        None => command,
        Some(verb) => match command.find_subcommand(verb) {
            // The page of a verb is called as people look for it: abide-validate.
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

pub fn version(args: &VersionArgs, printer: &Printer) -> Result<Exit, Failure> {
    let (name, version) = (env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"));
    printer.data(&match args.output {
        PlainForm::Text => format!("{name} {version}\n"),
        PlainForm::Json => {
            let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
            let api = crate::manifest::grammar::API_VERSION;
            format!("{}\n", serde_json::json!({"name": name, "version": version, "os": os, "arch": arch, "apiVersion": api}))
        }
    });
    Ok(Exit::Done)
}
