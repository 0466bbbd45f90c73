//! What can be typed after `watch`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;

use crate::cli::args::{LimitArgs, parse_switch};
use crate::cli::commands::plan::args::{BudgetArgs, OwnershipArgs, SelectArgs};
use crate::cli::commands::watch::source::SourceArgs;
use crate::cli::status_server::{ListenArgs, NotifyArgs};
use crate::cli::target::TargetArgs;
use crate::model::seconds;

/// Keep manifests true, for ever
///
/// Reads the directory again whenever it changes, or takes each new commit of a branch, repairs what drifts, and says why. A
/// broken file changes nothing: what it used to declare stays in force until the next good save. Prints `ready URL` on stdout
/// when it answers requests there: a status page, an API, events, metrics. SIGTERM and Ctrl-C end it at a safe point, and leave
/// processes as they are (143 and 130); SIGHUP reads the config file again. Everything but the URL is told on stderr.
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
    /// Whose set this is; left out: the owner that a Policy in PATH names at the start, else the config file's, else `default`
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,
    #[command(flatten)]
    pub claims: OwnershipArgs,
    /// Repair what differs though no manifest changed
    #[arg(long, env = "ABIDE_HEAL", value_name = "YES|NO", default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = parse_switch)]
    pub heal: bool,
    /// Take changed manifests
    #[arg(long, env = "ABIDE_FOLLOW_MANIFESTS", value_name = "YES|NO", default_value = "true", num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, value_parser = parse_switch)]
    pub follow: bool,
    /// How often to look without a reason
    #[arg(long, value_name = "TIME", env = "ABIDE_INTERVAL", default_value = "30s", value_parser = milliseconds)]
    pub interval: u64,
    /// How long it must have been quiet after a change
    #[arg(long, value_name = "TIME", env = "ABIDE_DEBOUNCE", default_value = "200ms", value_parser = milliseconds)]
    pub debounce: u64,
    #[command(flatten)]
    pub bounds: BudgetArgs,
}

impl ControllerArgs {
    /// As without any flag.
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
        self.owner.as_deref().unwrap_or("default")
    }

    /// How often to look; somebody has to answer in between.
    pub fn reconcile_interval(&self) -> Duration {
        Duration::from_millis(self.interval.max(100))
    }
}

fn milliseconds(text: &str) -> Result<u64, String> {
    let wrong = || "a duration such as 200ms or 2s".to_owned();
    match text.strip_suffix("ms") {
        Some(number) => number.trim().parse().map_err(|_| wrong()),
        None => seconds(text).map(|secs| secs.saturating_mul(1000)).ok_or_else(wrong),
    }
}
