//! What can be typed. Every flag has its `ABIDE_…` variable.

use std::path::PathBuf;

use clap::{ArgAction, Parser, Subcommand, ValueEnum};

use crate::gse::{Dialect, JobApi};
use crate::manifest::Limits;

/// Processes that abide by git: a declarative reconciler for operating-system processes on a fleet.
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
    /// Say more on stderr (-vv: even more)
    #[arg(short, long, global = true, action = ArgAction::Count, env = "ABIDE_VERBOSE", help_heading = "Everywhere")]
    pub verbose: u8,
    /// Say nothing on stderr but errors
    #[arg(short, long, global = true, env = "ABIDE_QUIET", value_parser = parse_switch, help_heading = "Everywhere")]
    pub quiet: bool,
    /// Form of log lines on stderr
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        env = "ABIDE_LOG_FORMAT",
        value_name = "FORMAT",
        help_heading = "Everywhere"
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
        help_heading = "Everywhere"
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
    Down(super::commands::up::DownArgs),
    Get(super::commands::get::GetArgs),
    Logs(super::commands::logs::LogsArgs),
    Status(super::commands::status::StatusArgs),
    Describe(super::commands::status::DescribeArgs),
    History(super::commands::status::HistoryArgs),
    Rollback(Box<super::commands::rollback::RollbackArgs>),
    Export(super::commands::status::ExportArgs),
    Import(super::commands::import::ImportArgs),
    /// Start processes now, and leave them so: a hold keeps others from undoing it
    Start(super::commands::manual::OperateArgs),
    /// Stop processes now, and leave them so: a hold keeps others from undoing it
    Stop(super::commands::manual::OperateArgs),
    /// Restart processes now, with what the engine holds
    Restart(super::commands::manual::OperateArgs),
    /// Let processes read their configuration again, now
    Reload(super::commands::manual::OperateArgs),
    /// Kill processes now, and leave them so: a hold keeps others from undoing it
    Kill(super::commands::manual::OperateArgs),
    Release(super::commands::manual::ReleaseArgs),
    Pause(super::commands::manual::PauseArgs),
    Resume(super::commands::manual::ResumeArgs),
    Lease(super::commands::lease::LeaseArgs),
    Doctor(super::commands::doctor::DoctorArgs),
    Config(super::commands::config::ConfigArgs),
    Convert(ConvertArgs),
    Explain(ExplainArgs),
    Serve(Box<super::commands::serve::ServeArgs>),
    Agent(super::commands::agent::AgentArgs),
    /// Print the JSON Schema of manifests, for editors
    Schema,
    Completions(CompletionsArgs),
    Man(ManArgs),
    Version(VersionArgs),
}

/// Print a commented manifest to start from
///
/// The manifest is valid as it is. With a command it runs that command, in the present directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide init -- python3 -m http.server 8000 > web.yaml")]
pub struct InitArgs {
    /// What the process is to run
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Check manifests: every problem of every file, with its place
///
/// Exits with 0 when there is no error (warnings do not count), else with 65.
#[derive(Debug, clap::Args)]
pub struct ValidateArgs {
    /// Files, directories (recursive: *.yaml *.yml *.json), or - for standard input
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Form of the problems: for people, for scripts, or as annotations of a GitHub workflow
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_OUTPUT", value_name = "FORM")]
    pub output: ProblemForm,
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

/// Limits, as MANIFEST's; past one is a problem, not a crash.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Most bytes in one file
    #[arg(long, env = "ABIDE_MAX_FILE_BYTES", value_name = "N", default_value_t = Limits::default().file_bytes)]
    pub max_file_bytes: u64,
    /// Most bytes in all files
    #[arg(long, env = "ABIDE_MAX_TREE_BYTES", value_name = "N", default_value_t = Limits::default().tree_bytes)]
    pub max_tree_bytes: u64,
    /// Most bytes in one document
    #[arg(long, env = "ABIDE_MAX_DOCUMENT_BYTES", value_name = "N", default_value_t = Limits::default().document_bytes)]
    pub max_document_bytes: u64,
    /// Deepest nesting (at most 100: what the YAML reader can follow)
    #[arg(long, env = "ABIDE_MAX_DEPTH", value_name = "N", default_value_t = Limits::default().depth, value_parser = parse_depth)]
    pub max_depth: usize,
    /// Most aliases in one document
    #[arg(long, env = "ABIDE_MAX_ALIASES", value_name = "N", default_value_t = Limits::default().aliases)]
    pub max_aliases: usize,
    /// Most documents in one file
    #[arg(long, env = "ABIDE_MAX_DOCUMENTS", value_name = "N", default_value_t = Limits::default().documents)]
    pub max_documents: usize,
    /// Most values in one document
    #[arg(long, env = "ABIDE_MAX_VALUES", value_name = "N", default_value_t = Limits::default().values)]
    pub max_values: usize,
    /// Most instances in all
    #[arg(long, env = "ABIDE_MAX_INSTANCES", value_name = "N", default_value_t = Limits::default().instances)]
    pub max_instances: usize,
}

/// A switch from a variable: a word that is neither yes nor no is a mistake, not a yes.
pub fn parse_switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "y" | "on" | "t" => Ok(true),
        "" | "0" | "false" | "no" | "n" | "off" | "f" => Ok(false),
        _ => Err("true or false".to_owned()),
    }
}

fn parse_depth(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(depth @ 1..=100) => Ok(depth),
        Ok(_) | Err(_) => Err("a whole number from 1 to 100".to_owned()),
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

/// Make manifests of GSE and JOB request bodies, and back
///
/// Takes the bodies of GSE register_proc_info and operate_proc and of JOB manage_proc (both versions) and
/// operate_process, one or many, as JSON or YAML. `state` comes from op_type; op_type itself and credentials are not
/// carried over. With --to, manifests (or bodies) become request bodies, one JSON object after the other, and what
/// the dialect has no place for is listed on stderr.
#[derive(Debug, clap::Args)]
pub struct ConvertArgs {
    /// A file or directory with request bodies or manifests, or - for standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Write request bodies of this dialect instead of manifests
    #[arg(long, value_name = "DIALECT", env = "ABIDE_TO", value_parser = dialect_parser())]
    pub to: Option<Dialect>,
    /// With --to: exit with 65 when a body cannot say everything
    #[arg(long, env = "ABIDE_STRICT", value_parser = parse_switch)]
    pub strict: bool,
    /// Which JOB call bodies are for, where their shape leaves that open; with --to job: which call to write
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

/// Explain a field of a manifest: type, default, meaning, source, what changing it does
///
/// Without FIELD, lists all fields. With --in, shows for each process there the value it has and the file, line and
/// column that gave it, be it the process or a Defaults document above it.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide explain start_check_secs\n  abide explain monitor_policy.start_check_secs --in manifests\n  abide explain Policy.windows\n  abide explain E0402"
)]
pub struct ExplainArgs {
    /// A field's path from the document's root (a leading `spec.` may be left out), a kind, a problem's code, or
    /// `problems` for all codes
    #[arg(value_name = "FIELD")]
    pub field: Option<String>,
    /// Manifests in which to look up who gave the field its value
    #[arg(long = "in", value_name = "PATH", env = "ABIDE_IN")]
    pub paths: Vec<PathBuf>,
    /// With --in: only this process
    #[arg(long, value_name = "NS/NAME", env = "ABIDE_PROCESS")]
    pub process: Option<String>,
    #[command(flatten)]
    pub limits: LimitArgs,
}

/// Print completions for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide completions bash > /etc/bash_completion.d/abide")]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Print the manual page
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide man validate | man -l -")]
pub struct ManArgs {
    /// A verb; left out: the page of abide itself
    pub verb: Option<String>,
}

/// Print the version
#[derive(Debug, clap::Args)]
pub struct VersionArgs {
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_VERSION_OUTPUT", value_name = "FORM")]
    pub output: PlainForm,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PlainForm {
    #[default]
    Text,
    Json,
}
