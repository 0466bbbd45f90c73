//! Manual operations on instances: `start`, `stop`, `restart`, `reload`, `kill`; `release`; `pause` and `resume`.
//!
//! `start`, `stop` and `kill` record a hold before they are sent, so that `watch` and `apply` do not undo them.

pub mod operate;
pub mod pause;
pub mod release;

use crate::cli::Failure;
use crate::cli::args::InvalidValue;
use crate::cli::commands::plan::args::SelectArgs;
use crate::cli::target::{ConnectedTarget, TargetArgs};
use crate::clock::{self, now};
use crate::engine::manual;
use crate::model::{InstanceKey, KeyError, Name, ProcessKey, Time, glob, seconds};
use crate::observe::Observation;

/// Selection of instances, by name or by selector.
#[derive(Debug, clap::Args)]
pub struct InstanceArgs {
    /// Process, or one of its instances: NS/NAME or NS/NAME@HOST (repeatable)
    // A namespace or a host alone, perhaps from a variable, does not select: it would select too much.
    #[arg(value_name = "NS/NAME[@HOST]", required_unless_present_any = ["selector", "include"])]
    pub processes: Vec<InstanceSelector>,
    #[command(flatten)]
    pub select: SelectArgs,
    #[command(flatten)]
    pub target: TargetArgs,
}

impl InstanceArgs {
    /// Without names, every instance matches. `declared`: the name that the instance was declared under.
    pub fn matches(&self, key: &InstanceKey, declared: Option<&ProcessKey>) -> bool {
        self.processes.is_empty() || self.processes.iter().any(|one| one.matches(key, declared))
    }

    /// The names of the command: arguments, and those of the selection.
    pub fn names(&self) -> impl Iterator<Item = &ProcessKey> {
        let SelectArgs { include, exclude, .. } = &self.select;
        self.processes.iter().map(InstanceSelector::process).chain(include).chain(exclude)
    }
}

/// `web/api`, or `web/api@0:10.0.0.1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceSelector {
    process: ProcessKey,
    host: Option<String>,
}

impl InstanceSelector {
    pub fn process(&self) -> &ProcessKey {
        &self.process
    }

    pub fn namespace(&self) -> &Name {
        &self.process.namespace
    }
}

impl std::str::FromStr for InstanceSelector {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<InstanceSelector, KeyError> {
        let (process, host) = match text.split_once('@') {
            Some((process, host)) => (process, Some(host.to_owned()).filter(|host| !host.is_empty())),
            None => (text, None),
        };
        Ok(InstanceSelector { process: process.parse()?, host })
    }
}

impl std::fmt::Display for InstanceSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.host {
            Some(host) => write!(f, "{}@{host}", self.process),
            None => write!(f, "{}", self.process),
        }
    }
}

impl InstanceSelector {
    /// Whether an instance has this name, or was declared under it.
    pub fn matches(&self, key: &InstanceKey, declared: Option<&ProcessKey>) -> bool {
        let on = |pattern: &String| {
            let host = key.host.to_string();
            glob(pattern, &host) || host.split_once(':').is_some_and(|(_, address)| glob(pattern, address))
        };
        let is_named = key.process() == self.process || declared == Some(&self.process);
        is_named && self.host.as_ref().is_none_or(on)
    }
}

/// Expiry and reason of a hold or pause.
#[derive(Debug, clap::Args)]
pub struct HoldArgs {
    /// Expiry: a duration such as 2h, or a time [default: none]
    #[arg(long, value_name = "TIME", env = "ABIDE_UNTIL", value_parser = parse_until)]
    pub until: Option<Until>,
    /// Reason to record
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    After(u64),
    At(Time),
}

fn parse_until(text: &str) -> Result<Until, InvalidValue> {
    match (seconds(text), clock::read(text)) {
        (Some(secs), _) => Ok(Until::After(secs)),
        (None, Some(time)) if time <= now() => Err(InvalidValue("this time is in the past")),
        (None, Some(time)) => Ok(Until::At(time)),
        (None, None) => Err(InvalidValue("a duration such as 2h, or a time such as 2026-11-16T08:00:00Z")),
    }
}

impl Until {
    fn time(self) -> Time {
        match self {
            Until::After(secs) => now().after_secs(secs),
            Until::At(time) => time,
        }
    }
}

/// Observes every instance of the target, with recorded specs.
pub async fn observe_all(live: &ConnectedTarget) -> Result<Observation, Failure> {
    manual::observe_all(live).await.map_err(|error| live.target_failure(&error))
}
