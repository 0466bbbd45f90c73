//! Arguments of `plan` and `diff`, and those that `apply`, `watch` and `rollback` share with them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser, TypedValueParser};

use super::sign::SignArgs;
use crate::cli::args::{InvalidValue, LimitArgs, milliseconds, parse_switch};
use crate::cli::inventories::InventoryArgs;
use crate::cli::target::TargetArgs;
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::model::{
    Amount, Budgets, ControlHostPolicy, Name, Op, ProcessKey, Selection, Selector, Time, seconds,
};
use crate::reconcile::Caps;

/// Show the operations of an apply, with reasons
///
/// Compares the manifests with the registered and running processes, and prints the operations that bring them in sync:
/// destructive operations first, hosts with the same change on one line, held instances with the reason. Changes nothing.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:\n  abide plan manifests\n  abide plan manifests --observed rows.json --caps gse-v1\n  abide plan manifests --only restart,stop\n  abide plan manifests -o markdown > comment.md"
)]
pub struct PlanArgs {
    #[command(subcommand)]
    pub action: Option<PlanAction>,
    #[command(flatten)]
    pub input: InputArgs,
    /// Output format: text for terminals, json for scripts, markdown for a pull request comment
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_PLAN_OUTPUT", value_name = "FORMAT")]
    pub output: PlanForm,
    /// Also write the plan to FILE, for `abide apply FILE`
    #[arg(long, value_name = "FILE", env = "ABIDE_OUT", conflicts_with = "only")]
    pub out: Option<PathBuf>,
    /// Exit with 2 if there are changes, including held ones
    #[arg(long, env = "ABIDE_DETAILED_EXITCODE", value_parser = parse_switch)]
    pub detailed_exitcode: bool,
    /// Show only steps with these operations
    #[arg(long, value_name = "OP,…", env = "ABIDE_ONLY", value_delimiter = ',', value_parser = op_parser())]
    pub only: Vec<Op>,
    /// With -o markdown: maximum bytes, cut between blocks
    #[arg(long, value_name = "N", env = "ABIDE_MAX_BYTES", default_value_t = 65_000)]
    pub max_bytes: usize,
}

#[derive(Debug, clap::Subcommand)]
pub enum PlanAction {
    Sign(SignArgs),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PlanForm {
    #[default]
    Text,
    Json,
    Markdown,
}

/// Show field differences of manifests, specs and processes
///
/// Compares each manifest with the registered spec and with the running process. Hosts with the same differences are
/// shown once; changed words are highlighted. Exits with 0 without differences, 1 with differences, 65 for invalid
/// manifests, 69 if the target is unreachable, 77 if the credentials lack a grant, and 2 for other errors. With --between,
/// compares two trees of manifests with each other, without a target.
#[derive(Debug, clap::Args)]
#[command(
    mut_arg("paths", |paths| paths.required(false).required_unless_present("between")),
    after_help = "Examples:\n  abide diff manifests\n  abide diff --between overlays/staging overlays/prod"
)]
pub struct DiffArgs {
    #[command(flatten)]
    pub input: InputArgs,
    /// Compare the manifests of A with those of B, without a target
    #[arg(
        long,
        num_args = 2,
        value_names = ["A", "B"],
        value_delimiter = ':',
        env = "ABIDE_BETWEEN",
        conflicts_with = "paths"
    )]
    pub between: Vec<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_DIFF_OUTPUT", value_name = "FORMAT")]
    pub output: crate::cli::args::PlainForm,
}

/// The inputs of a plan.
#[derive(Debug, clap::Args)]
pub struct InputArgs {
    /// Files, directories (recursive: *.yaml *.yml *.json), or - for standard input
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner of the manifests [default: the owner in a Policy, else the config file's, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,
    #[command(flatten)]
    pub claims: OwnershipArgs,
    #[command(flatten)]
    pub bounds: BudgetArgs,
    #[command(flatten)]
    pub break_glass: BreakGlassArgs,
    #[command(flatten)]
    pub select: SelectArgs,
    #[command(flatten)]
    pub offline: OfflineArgs,
    #[command(flatten)]
    pub inventory: InventoryArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
}

/// Ownership: pruning and adoption.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct OwnershipArgs {
    /// Delete the owner's processes that no manifest declares
    #[arg(long, env = "ABIDE_PRUNE", value_parser = parse_switch)]
    pub prune: bool,
    /// Adopt existing processes without an owner, without a restart
    #[arg(long, env = "ABIDE_ADOPT", value_parser = parse_switch)]
    pub adopt: bool,
    /// With --prune: accept manifests from another source than the owner's last apply
    #[arg(long, env = "ABIDE_ACCEPT_SOURCE", value_parser = parse_switch)]
    pub accept_source: bool,
}

/// A change outside of a maintenance window.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct BreakGlassArgs {
    /// Change instances outside of maintenance windows; requires --reason. Protections, holds, owners and budgets still apply
    #[arg(long, env = "ABIDE_BREAK_GLASS", value_parser = parse_switch)]
    pub break_glass: bool,
    /// Reason of --break-glass, for the plan, the history and the audit log
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: Option<String>,
}

impl BreakGlassArgs {
    /// The reason, if maintenance windows are bypassed.
    pub fn reason(&self) -> Result<Option<String>, Failure> {
        if !self.break_glass {
            return Ok(None);
        }
        match self.reason.as_deref().map(str::trim).filter(|reason| !reason.is_empty()) {
            Some(reason) => Ok(Some(reason.to_owned())),
            None => Err(Failure::new(Exit::Usage, "--break-glass requires a reason")
                .hint("add --reason TEXT: the history and the audit log record it")),
        }
    }
}

/// Budgets, holds and timeouts of a plan.
#[derive(Clone, Debug, clap::Args)]
pub struct BudgetArgs {
    /// Maximum instances to delete: a number, or a percentage of the owner's [default: the greater of 1 and 10%]
    #[arg(long, value_name = "N|P%", env = "ABIDE_MAX_DELETE")]
    pub max_delete: Option<Amount>,
    /// Maximum instances to restart: a number, or a percentage of the owner's [default: no limit]
    #[arg(long, value_name = "N|P%", env = "ABIDE_MAX_RESTART")]
    pub max_restart: Option<Amount>,
    /// Change instances even if a hold or pause applies
    #[arg(long, env = "ABIDE_OVERRIDE_HOLDS", value_parser = parse_switch)]
    pub override_holds: bool,
    /// Hold instances whose last report is older than this
    #[arg(long, value_name = "TIME", env = "ABIDE_STALE_AFTER", default_value = "10m", value_parser = duration)]
    pub stale_after: u64,
    /// Maximum wait for the writer lease; plan and diff need none, and watch retries at its next reconcile
    #[arg(long, value_name = "TIME", env = "ABIDE_LOCK_TIMEOUT", default_value = "10s", value_parser = lock_timeout)]
    pub lock_timeout: Duration,
    /// Policy of this host: allowed namespaces, hosts, users and paths, and budgets. No manifest can widen it.
    /// /etc/abide/policy.yaml always holds, if it exists
    #[arg(long, value_name = "FILE", env = "ABIDE_POLICY")]
    pub policy: Option<PathBuf>,
}

impl Default for BudgetArgs {
    /// The defaults of the flags.
    fn default() -> BudgetArgs {
        BudgetArgs {
            max_delete: None,
            max_restart: None,
            override_holds: false,
            stale_after: 600,
            lock_timeout: Duration::from_secs(10),
            policy: None,
        }
    }
}

impl BudgetArgs {
    /// The policies of this host.
    pub fn read_policy(&self) -> Result<Option<Arc<ControlHostPolicy>>, Failure> {
        super::policy::read_policies(self.policy.as_deref())
    }

    pub fn budgets(&self) -> Budgets {
        Budgets { delete: self.max_delete, restart: self.max_restart }
    }
}

/// A flag of a saved plan whose value is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its {flag} {value:?} is invalid")]
pub struct InvalidSavedFlag {
    flag: &'static str,
    value: String,
}

impl InvalidSavedFlag {
    fn parse<T: std::str::FromStr>(flag: &'static str, value: String) -> Result<T, InvalidSavedFlag> {
        value.parse().map_err(|_| InvalidSavedFlag { flag, value })
    }
}

impl InputArgs {
    /// Replaces the manifests and flags with those of a saved plan.
    pub fn restore_from(&mut self, inputs: &serde_json::Value) -> Result<(), InvalidSavedFlag> {
        let flags = &inputs["flags"];
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        let list = |value: &serde_json::Value| -> Vec<String> {
            value.as_array().into_iter().flatten().filter_map(text).collect()
        };
        let amount = |name| text(&flags[name]).map(|text| InvalidSavedFlag::parse(name, text)).transpose();
        let processes = |name| -> Result<Vec<ProcessKey>, InvalidSavedFlag> {
            list(&flags[name]).into_iter().map(|text| InvalidSavedFlag::parse("process", text)).collect()
        };
        self.paths = list(&inputs["paths"]).into_iter().map(PathBuf::from).collect();
        self.target.target = text(&flags["target"]).unwrap_or_else(|| "local".to_owned());
        self.owner = text(&flags["owner"]);
        self.inventory = InventoryArgs { accept_shrink: list(&flags["accept_shrink"]) };
        let is = |name: &str| flags[name].as_bool().unwrap_or(false);
        self.claims =
            OwnershipArgs { prune: is("prune"), adopt: is("adopt"), accept_source: is("accept_source") };
        self.bounds = BudgetArgs {
            max_delete: amount("max_delete")?,
            max_restart: amount("max_restart")?,
            override_holds: is("override_holds"),
            stale_after: flags["stale_after_secs"].as_u64().unwrap_or(self.bounds.stale_after),
            lock_timeout: self.bounds.lock_timeout,
            // Not from the plan: a saved plan must not choose it.
            policy: self.bounds.policy.clone(),
        };
        let reason = text(&flags["break_glass"]);
        self.break_glass = BreakGlassArgs { break_glass: reason.is_some(), reason };
        let namespaces = list(&flags["namespace"]).into_iter();
        self.select.namespace =
            namespaces.map(|text| InvalidSavedFlag::parse("namespace", text)).collect::<Result<_, _>>()?;
        let selector = text(&flags["selector"]);
        self.select.selector = selector.map(|text| InvalidSavedFlag::parse("selector", text)).transpose()?;
        self.select.host = list(&flags["host"]);
        self.select.include = processes("include")?;
        self.select.exclude = processes("exclude")?;
        Ok(())
    }
}

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Selection")]
pub struct SelectArgs {
    /// Select a namespace (repeatable)
    #[arg(short, long, value_name = "NAMESPACE", env = "ABIDE_NAMESPACE", value_delimiter = ',')]
    pub namespace: Vec<Name>,
    /// Select instances by label: key=v,key!=v,key in (a,b),key,!key
    #[arg(short = 'l', long, value_name = "LABELS", env = "ABIDE_SELECTOR")]
    pub selector: Option<Selector>,
    /// Select hosts by pattern, such as 0:10.0.* or 10.0.0.7 (repeatable)
    #[arg(long, value_name = "PATTERN", env = "ABIDE_HOST", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub host: Vec<String>,
    /// Select a process (repeatable)
    #[arg(long, value_name = "NS/NAME", env = "ABIDE_INCLUDE", value_delimiter = ',')]
    pub include: Vec<ProcessKey>,
    /// Exclude a process (repeatable)
    #[arg(long, value_name = "NS/NAME", env = "ABIDE_EXCLUDE", value_delimiter = ',')]
    pub exclude: Vec<ProcessKey>,
}

impl SelectArgs {
    pub fn selection(&self) -> Selection {
        Selection {
            namespaces: self.namespace.clone(),
            labels: self.selector.clone(),
            hosts: self.host.clone(),
            include: self.include.clone(),
            exclude: self.exclude.clone(),
        }
    }
}

/// Offline planning, without a target.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Offline")]
pub struct OfflineArgs {
    /// Read the observed state from FILE, with rows of `get processes -o json` (or yaml), instead of a target
    #[arg(long, value_name = "FILE", env = "ABIDE_OBSERVED")]
    pub observed: Option<PathBuf>,
    /// Capabilities of the target to plan for
    #[arg(long, value_name = "DIALECT", env = "ABIDE_CAPS", requires = "observed", default_value = "local", value_parser = caps_parser())]
    pub caps: Caps,
    /// Time to plan for, such as 2026-11-16T08:00:00Z
    #[arg(long, value_name = "TIME", env = "ABIDE_NOW", value_parser = time)]
    pub now: Option<Time>,
}

fn op_parser() -> impl TypedValueParser<Value = Op> {
    let read = |word: String| Op::ALL.into_iter().find(|op| op.word() == word).unwrap_or(Op::Start);
    PossibleValuesParser::new(Op::ALL.map(Op::word)).map(read)
}

fn caps_parser() -> impl TypedValueParser<Value = Caps> {
    let read = |word: String| Caps::ALL.into_iter().find(|(name, _)| *name == word);
    PossibleValuesParser::new(Caps::ALL.map(|(name, _)| name))
        .map(move |word| read(word).map_or(Caps::LOCAL, |(_, caps)| caps))
}

pub fn duration(text: &str) -> Result<u64, InvalidValue> {
    seconds(text).ok_or(InvalidValue("a duration such as 30s, 10m or 1h30m"))
}

fn lock_timeout(text: &str) -> Result<Duration, InvalidValue> {
    milliseconds(text).map(Duration::from_millis)
}

fn time(text: &str) -> Result<Time, InvalidValue> {
    clock::read(text).ok_or(InvalidValue("a time such as 2026-11-16T08:00:00Z"))
}
