//! `abide version`: the version, with the platform and manifest API for scripts.

use crate::cli::args::PlainForm;
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};
use crate::contract::{self, VersionInfo};

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
            let [name, version, os, arch, api_version] = [name, version, os, arch, api].map(str::to_owned);
            contract::compact(&VersionInfo { name, version, os, arch, api_version })
        }
    });
    Ok(Exit::Done)
}
