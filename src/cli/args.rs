//! Command-line arguments: the verbs and the flags that several verbs share. Every flag has an `ABIDE_…` variable.

use std::path::PathBuf;

use clap::{ArgAction, Parser, Subcommand, ValueEnum};

use crate::gse::{Dialect, JobApi};
use crate::manifest::Limits;
use crate::model::{Name, seconds};

/// Declarative reconciler for operating-system processes on a fleet.
#[derive(Debug, Parser)]
#[command(
    name = "abide",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Args {
    #[command(flatten)]
    pub common: GlobalArgs,
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, clap::Args)]
pub struct GlobalArgs {
    /// Log more on stderr (-vv: even more)
    #[arg(short, long, global = true, action = ArgAction::Count, env = "ABIDE_VERBOSE", help_heading = "Global options")]
    pub verbose: u8,
    /// Print only errors on stderr
    #[arg(short, long, global = true, env = "ABIDE_QUIET", value_parser = parse_switch, help_heading = "Global options")]
    pub quiet: bool,
    /// Format of log lines on stderr
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        env = "ABIDE_LOG_FORMAT",
        value_name = "FORMAT",
        help_heading = "Global options"
    )]
    pub log_format: LogFormat,
    /// When to use colour
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        env = "ABIDE_COLOR",
        value_name = "WHEN",
        help_heading = "Global options"
    )]
    pub color: Color,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum Color {
    #[default]
    Auto,
    Always,
    Never,
}

impl From<Color> for anstream::ColorChoice {
    fn from(color: Color) -> Self {
        match color {
            Color::Auto => anstream::ColorChoice::Auto,
            Color::Always => anstream::ColorChoice::Always,
            Color::Never => anstream::ColorChoice::Never,
        }
    }
}

impl GlobalArgs {
    pub fn colour_on_stderr(&self) -> bool {
        let choice = match self.color {
            Color::Auto => anstream::AutoStream::choice(&std::io::stderr()),
            always_or_never => always_or_never.into(),
        };
        !matches!(choice, anstream::ColorChoice::Never)
    }
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    Init(InitArgs),
    Validate(ValidateArgs),
    Plan(Box<super::commands::plan::PlanArgs>),
    Diff(Box<super::commands::plan::args::DiffArgs>),
    Apply(Box<super::commands::apply::ApplyArgs>),
    Watch(Box<super::commands::watch::WatchArgs>),
    Up(super::commands::up::UpArgs),
    Down(super::commands::down::DownArgs),
    Get(super::commands::get::GetArgs),
    Logs(super::commands::logs::LogsArgs),
    Status(super::commands::status::StatusArgs),
    Describe(super::commands::describe::DescribeArgs),
    Why(super::commands::why::WhyArgs),
    History(super::commands::history::HistoryArgs),
    Rollback(Box<super::commands::rollback::RollbackArgs>),
    Export(super::commands::export::ExportArgs),
    Import(super::commands::import::ImportArgs),
    /// Start processes now and hold them running
    ///
    /// The hold keeps `watch` and `apply` from undoing the operation, until it expires or `abide release` ends it.
    Start(super::commands::manual::operate::OperateArgs),
    /// Stop processes now and hold them stopped
    ///
    /// The hold keeps `watch` and `apply` from undoing the operation, until it expires or `abide release` ends it.
    Stop(super::commands::manual::operate::OperateArgs),
    /// Restart processes now with their registered specs
    Restart(super::commands::manual::operate::OperateArgs),
    /// Reload the configuration of processes now
    Reload(super::commands::manual::operate::OperateArgs),
    /// Kill processes now and hold them stopped
    ///
    /// The hold keeps `watch` and `apply` from undoing the operation, until it expires or `abide release` ends it.
    Kill(super::commands::manual::operate::OperateArgs),
    Release(super::commands::manual::release::ReleaseArgs),
    Unprotect(super::commands::unprotect::UnprotectArgs),
    Own(super::commands::own::OwnArgs),
    Rollout(Box<super::commands::rollout::RolloutArgs>),
    Pause(super::commands::manual::pause::PauseArgs),
    Resume(super::commands::manual::pause::ResumeArgs),
    Lease(super::commands::lease::LeaseArgs),
    Token(super::commands::token::TokenArgs),
    Host(super::commands::host::HostArgs),
    Access(super::commands::access::AccessArgs),
    Audit(Box<super::commands::audit::AuditArgs>),
    Doctor(super::commands::doctor::DoctorArgs),
    Config(super::commands::config::ConfigArgs),
    Inventory(super::commands::inventory::InventoryVerbArgs),
    Notify(super::commands::notify::NotifyVerbArgs),
    Convert(ConvertArgs),
    Explain(ExplainArgs),
    Render(super::commands::render::RenderArgs),
    Serve(Box<super::commands::serve::ServeArgs>),
    Agent(super::commands::agent::AgentArgs),
    /// Print the JSON Schema of manifests for editors
    Schema,
    Completions(super::commands::completions::CompletionsArgs),
    Man(super::commands::man::ManArgs),
    Version(super::commands::version::VersionArgs),
}

/// Print a commented starter manifest
///
/// The manifest is valid as printed. With COMMAND, its process runs that command in the current directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide init -- python3 -m http.server 8000 > web.yaml")]
pub struct InitArgs {
    /// Name of the process [default: derived from the program]
    #[arg(long, value_name = "NAME", env = "ABIDE_NAME")]
    pub name: Option<Name>,
    /// Namespace of the process [default: default]
    #[arg(short, long, value_name = "NAMESPACE", env = "ABIDE_NAMESPACE")]
    pub namespace: Option<Name>,
    /// Command of the process
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Check manifests and print every problem with its location
///
/// Exits with 0 if there are no errors (warnings do not count), else with 65.
#[derive(Debug, clap::Args)]
pub struct ValidateArgs {
    /// Files, directories (recursive: *.yaml *.yml *.json), or - for standard input
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Output format: text for terminals, json for scripts, github for workflow annotations
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_OUTPUT", value_name = "FORMAT")]
    pub output: ProblemForm,
    /// Check every overlay below the paths, and the files that no overlay has
    #[arg(long, env = "ABIDE_VALIDATE_ALL", value_parser = parse_switch)]
    pub all: bool,
    /// Read the inventories that host groups name, and check their hosts
    #[arg(long, env = "ABIDE_INVENTORIES", value_parser = parse_switch)]
    pub inventories: bool,
    /// With --inventories: config file [default: ./abide.yaml (see `abide config trust`), then
    /// ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum ProblemForm {
    #[default]
    Text,
    Json,
    Github,
}

/// Limits on manifests. Exceeding one is reported as a problem.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Maximum bytes per file
    #[arg(long, env = "ABIDE_MAX_FILE_BYTES", value_name = "N", default_value_t = Limits::default().file_bytes)]
    pub max_file_bytes: u64,
    /// Maximum bytes of all files together
    #[arg(long, env = "ABIDE_MAX_TREE_BYTES", value_name = "N", default_value_t = Limits::default().tree_bytes)]
    pub max_tree_bytes: u64,
    /// Maximum bytes per document
    #[arg(long, env = "ABIDE_MAX_DOCUMENT_BYTES", value_name = "N", default_value_t = Limits::default().document_bytes)]
    pub max_document_bytes: u64,
    /// Maximum nesting depth (1 to 100, the limit of the YAML parser)
    #[arg(long, env = "ABIDE_MAX_DEPTH", value_name = "N", default_value_t = Limits::default().depth, value_parser = parse_depth)]
    pub max_depth: usize,
    /// Maximum aliases per document
    #[arg(long, env = "ABIDE_MAX_ALIASES", value_name = "N", default_value_t = Limits::default().aliases)]
    pub max_aliases: usize,
    /// Maximum documents per file
    #[arg(long, env = "ABIDE_MAX_DOCUMENTS", value_name = "N", default_value_t = Limits::default().documents)]
    pub max_documents: usize,
    /// Maximum values per document
    #[arg(long, env = "ABIDE_MAX_VALUES", value_name = "N", default_value_t = Limits::default().values)]
    pub max_values: usize,
    /// Maximum instances of all manifests together
    #[arg(long, env = "ABIDE_MAX_INSTANCES", value_name = "N", default_value_t = Limits::default().instances)]
    pub max_instances: usize,
}

/// A value of a flag that is not of the expected form, with that form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidValue(pub &'static str);

/// Parses a switch from a flag or variable. A word that is neither yes nor no is an error.
pub fn parse_switch(text: &str) -> Result<bool, InvalidValue> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "y" | "on" | "t" => Ok(true),
        "" | "0" | "false" | "no" | "n" | "off" | "f" => Ok(false),
        _ => Err(InvalidValue("true or false")),
    }
}

/// A duration, to the millisecond.
pub fn milliseconds(text: &str) -> Result<u64, InvalidValue> {
    let wrong = || InvalidValue("a duration such as 200ms or 2s");
    match text.strip_suffix("ms") {
        Some(number) => number.trim().parse().map_err(|_| wrong()),
        None => seconds(text).map(|secs| secs.saturating_mul(1000)).ok_or_else(wrong),
    }
}

fn parse_depth(text: &str) -> Result<usize, InvalidValue> {
    match text.parse() {
        Ok(depth @ 1..=100) => Ok(depth),
        Ok(_) | Err(_) => Err(InvalidValue("a whole number from 1 to 100")),
    }
}

impl LimitArgs {
    pub fn limits(&self) -> Limits {
        Limits {
            file_bytes: self.max_file_bytes,
            tree_bytes: self.max_tree_bytes,
            document_bytes: self.max_document_bytes,
            depth: self.max_depth,
            aliases: self.max_aliases,
            documents: self.max_documents,
            values: self.max_values,
            instances: self.max_instances,
        }
    }
}

/// Convert GSE and JOB request bodies to manifests, and back
///
/// Takes the bodies of GSE register_proc_info and operate_proc and of JOB manage_proc (both versions) and
/// operate_process, one or many, as JSON or YAML. `state` is derived from op_type; op_type and credentials are not
/// converted. With --to, prints request bodies, one JSON object after the other, and lists fields that the dialect
/// cannot express on stderr.
#[derive(Debug, clap::Args)]
pub struct ConvertArgs {
    /// File or directory of request bodies or manifests, or - for standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Write request bodies of this dialect instead of manifests
    #[arg(long, value_name = "DIALECT", env = "ABIDE_TO", value_parser = dialect_parser())]
    pub to: Option<Dialect>,
    /// With --to: exit with 65 if the dialect cannot express every field
    #[arg(long, env = "ABIDE_STRICT", value_parser = parse_switch)]
    pub strict: bool,
    /// Write the long form of each process, with every value that the short form leaves out
    #[arg(long, env = "ABIDE_FULL", conflicts_with_all = ["to", "short"], value_parser = parse_switch)]
    pub full: bool,
    /// Write the short form of each process
    #[arg(long, env = "ABIDE_SHORT", conflicts_with = "to", value_parser = parse_switch)]
    pub short: bool,
    /// JOB call of bodies whose shape does not show it; with --to job: the call to write
    #[arg(long, value_name = "CALL", env = "ABIDE_JOB_API", value_parser = job_api_parser())]
    pub job_api: Option<JobApi>,
    #[command(flatten)]
    pub limits: LimitArgs,
}

fn dialect_parser() -> impl clap::builder::TypedValueParser<Value = Dialect> {
    use clap::builder::{PossibleValuesParser, TypedValueParser};
    PossibleValuesParser::new(Dialect::BODIES.map(Dialect::name)).map(|name| {
        Dialect::BODIES.into_iter().find(|dialect| dialect.name() == name).unwrap_or(Dialect::GseV1)
    })
}

fn job_api_parser() -> impl clap::builder::TypedValueParser<Value = JobApi> {
    use clap::builder::{PossibleValuesParser, TypedValueParser};
    PossibleValuesParser::new(["manage_proc", "operate_process"])
        .map(|name| if name == "manage_proc" { JobApi::ManageProc } else { JobApi::OperateProcess })
}

/// Explain a manifest field, a held reason, a state or a code
///
/// Without FIELD, lists all fields. With --in, prints the field's value for each process, with the file, line and
/// column that set it: in the process, in a patch of an overlay or in an inherited Defaults document. Without FIELD, --in
/// prints all fields and the variables in them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide explain start_check_secs\n  abide explain monitor_policy.start_check_secs --in manifests\n  abide explain --in overlays/prod --process web/api\n  abide explain Policy.windows\n  abide explain E0402\n  abide explain HostUnknown"
)]
pub struct ExplainArgs {
    /// Field path from the document's root (`spec.` is optional), a kind, a problem code (`problems`: all codes), a held
    /// reason, a state (`words`: all of them), a result code or an exit code
    #[arg(value_name = "FIELD")]
    pub field: Option<String>,
    /// Manifests to print the field's values from
    #[arg(long = "in", value_name = "PATH", env = "ABIDE_IN")]
    pub paths: Vec<PathBuf>,
    /// With --in: print only this process
    #[arg(long, value_name = "NS/NAME", env = "ABIDE_PROCESS")]
    pub process: Option<String>,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PlainForm {
    #[default]
    Text,
    Json,
}
