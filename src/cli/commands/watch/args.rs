//! Arguments of `watch`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;

use crate::cli::args::{LimitArgs, milliseconds, parse_switch};
use crate::cli::commands::plan::args::{BudgetArgs, OwnershipArgs, SelectArgs};
use crate::cli::commands::watch::source::SourceArgs;
use crate::cli::status_server::{ListenArgs, NotifyArgs};
use crate::cli::target::TargetArgs;
use crate::model::DEFAULT_OWNER;

/// Reconcile manifests continuously from a directory or git
///
/// Applies changed files or new commits, and repairs drift. The last good version of an invalid file stays active. Prints
/// `ready URL` on stdout when it accepts requests there: status page, API, events and metrics; events are logged on stderr.
/// SIGTERM and Ctrl-C stop it at a safe point and leave processes running (exit codes 143 and 130); SIGHUP reloads the
/// config file.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide watch manifests\n  abide watch manifests --prune --target prod --owner web-team\n  abide watch --git https://git.example.org/fleet.git --ref main --path manifests"
)]
pub struct WatchArgs {
    /// Files or directories of manifests
    #[arg(required_unless_present = "git", conflicts_with = "git", value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub how: ControllerArgs,
    #[command(flatten)]
    pub select: SelectArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub tell: NotifyArgs,
}

#[derive(Debug, clap::Args)]
pub struct ControllerArgs {
    /// Owner of the manifests [default: the owner in a Policy in PATH at the start, else the config file's, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,
    #[command(flatten)]
    pub claims: OwnershipArgs,
    /// Repair drift
    #[arg(long, env = "ABIDE_HEAL", value_name = "YES|NO", default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = parse_switch)]
    pub heal: bool,
    /// Apply manifest changes
    #[arg(long, env = "ABIDE_FOLLOW_MANIFESTS", value_name = "YES|NO", default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = parse_switch)]
    pub follow: bool,
    /// Interval between full reconciles
    #[arg(long, value_name = "TIME", env = "ABIDE_INTERVAL", default_value = "30s", value_parser = milliseconds)]
    pub interval: u64,
    /// Quiet time after a file change before it is applied
    #[arg(long, value_name = "TIME", env = "ABIDE_DEBOUNCE", default_value = "200ms", value_parser = milliseconds)]
    pub debounce: u64,
    #[command(flatten)]
    pub bounds: BudgetArgs,
}

impl ControllerArgs {
    /// The defaults of the flags.
    pub fn with_defaults(owner: Option<String>) -> ControllerArgs {
        ControllerArgs {
            owner,
            claims: OwnershipArgs::default(),
            heal: true,
            follow: true,
            interval: 30_000,
            debounce: 200,
            bounds: BudgetArgs::default(),
        }
    }

    pub fn owner(&self) -> &str {
        self.owner.as_deref().unwrap_or(DEFAULT_OWNER)
    }

    /// The interval, at least 100 ms: targets need time between reconciles.
    pub fn reconcile_interval(&self) -> Duration {
        Duration::from_millis(self.interval.max(100))
    }
}
