//! `abide render`: the processes that overlays, Defaults, host groups and variables result in.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::cli::args::LimitArgs;
use crate::cli::inventories::load_offline;
use crate::cli::output::print::{self, Printer, count};
use crate::cli::{Exit, Failure};
use crate::manifest::{Severity, print as manifests, render};
use crate::model::EnvValue;

/// Print the manifests that overlays and variables result in
///
/// Prints each process in the long form, with the values of Defaults, host groups, variables and patches. Hosts with
/// different values have documents of their own. Values of secrets are left out. No target is needed. Inventories are read.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  abide render overlays/prod\n  abide render overlays/prod -o json")]
pub struct RenderArgs {
    /// Files, directories (recursive: *.yaml *.yml *.json), or - for standard input
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_RENDER_OUTPUT", value_name = "FORMAT")]
    pub output: RenderForm,
    /// Config file with the inventories [default: ./abide.yaml (see `abide config trust`), then
    /// ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum RenderForm {
    #[default]
    Yaml,
    Json,
}

pub fn run(args: &RenderArgs, printer: &Printer) -> Result<Exit, Failure> {
    let loaded = load_offline(&args.paths, &args.limits.limits(), args.config.as_ref(), printer)?;
    let shown = loaded.problems.iter().filter(|p| p.severity == Severity::Error || !printer.is_quiet());
    printer.to_stderr(&shown.map(|problem| print::problem(problem) + "\n").collect::<String>());
    if loaded.errors() > 0 {
        let message = format!("{} in the manifests: nothing was rendered", count(loaded.errors(), "error"));
        return Err(Failure::new(Exit::InvalidManifest, message));
    }
    let specs = loaded.desired.instances.values().map(|want| &want.spec);
    if specs.flat_map(|spec| spec.env.values()).any(|value| matches!(value, EnvValue::Secret(_))) {
        printer.warning("secret values of env are left out");
    }
    let documents = render::documents(&loaded.desired);
    match args.output {
        RenderForm::Yaml => printer.data(&manifests::yaml(&documents)),
        RenderForm::Json => {
            let json = serde_json::to_string_pretty(&documents);
            let json =
                json.map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))?;
            printer.data(&(json + "\n"));
        }
    }
    Ok(Exit::Done)
}
