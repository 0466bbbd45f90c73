//! `abide config`: shows the config files in use, and records trust in the one of the current directory.

use std::path::PathBuf;

use crate::cli::args::PlainForm;
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::{CONFIG_FILE_NAME, Trust, find_config_files, trust};
use crate::cli::{Exit, Failure};
use crate::contract::{self, ConfigFileRow};

/// Show config files, and trust the one in this directory
#[derive(Debug, clap::Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub verb: ConfigVerb,
}

#[derive(Debug, clap::Subcommand)]
pub enum ConfigVerb {
    /// Trust a config file: use its credentials, state and targets
    ///
    /// Records the digest of the file. Read the file first: it decides which host receives the secrets that it names. A
    /// changed file must be trusted again.
    Trust(FileArg),
    /// Remove the trust in a config file
    Untrust(FileArg),
    /// Print the config files in use, with their origin and trust
    Show(ShowArgs),
}

#[derive(Debug, clap::Args)]
pub struct FileArg {
    /// Config file
    #[arg(value_name = "FILE", default_value = CONFIG_FILE_NAME)]
    pub file: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    /// Config file [default: ./abide.yaml, then ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_CONFIG_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &ConfigArgs, printer: &Printer) -> Result<Exit, Failure> {
    match &args.verb {
        ConfigVerb::Trust(FileArg { file }) => {
            // An invalid file is not recorded, and the digest is of the content that was parsed.
            let content = find_config_files(Some(file))?.first.map(|file| file.content).unwrap_or_default();
            let (path, digest) = trust::record(file, content.as_bytes())?;
            printer.data(&format!("trusted {} (blake3 {})\n", visible(&path), &digest[..16]));
        }
        ConfigVerb::Untrust(FileArg { file }) => {
            let was = if trust::remove(file)? { "is no longer trusted" } else { "was not trusted" };
            printer.data(&format!("{} {was}\n", visible(&file.display().to_string())));
        }
        ConfigVerb::Show(args) => show(args, printer)?,
    }
    Ok(Exit::Done)
}

fn show(args: &ShowArgs, printer: &Printer) -> Result<(), Failure> {
    let chosen = find_config_files(args.config.as_deref())?;
    let files: Vec<_> = chosen.first.iter().chain(&chosen.users).collect();
    if args.output == PlainForm::Json {
        let file = |file: &&crate::cli::target::ConfigFile| ConfigFileRow {
            file: file.path.display().to_string(),
            origin: file.origin,
            trusted: file.trust == Trust::Full,
            targets: file.config.targets.keys().cloned().collect(),
        };
        printer.data(&contract::compact(&files.iter().map(file).collect::<Vec<_>>()));
        return Ok(());
    }
    if files.is_empty() {
        printer.data("no config file\n");
    }
    for file in files {
        let targets: Vec<String> = file.config.targets.keys().map(|name| visible(name)).collect();
        let targets = if targets.is_empty() { "none".to_owned() } else { targets.join(", ") };
        let (path, why) = (visible(&file.path.display().to_string()), file.origin.describe());
        printer.data(&format!("{path}: {why}; {}; targets: {targets}\n", file.trust.describe()));
    }
    Ok(())
}
