//! `abide version`: the version, with the platform and manifest API for scripts.

use crate::cli::args::PlainForm;
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};

/// Print the version
#[derive(Debug, clap::Args)]
pub struct VersionArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_VERSION_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &VersionArgs, printer: &Printer) -> Result<Exit, Failure> {
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
