//! `abide rollout`: status of rollouts that wait for promotions; promote, abort and undo.

use std::collections::BTreeMap;

use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser;

use super::rollback::{OldRevision, apply_old_revision};
use crate::cli::args::{LimitArgs, PlainForm, parse_switch};
use crate::cli::commands::apply::ExecutionArgs;
use crate::cli::commands::plan::args::{BudgetArgs, PlanForm};
use crate::cli::output::print::{BOLD, Printer, visible};
use crate::cli::output::table::{Align, Table};
use crate::cli::sync_status::active_desired;
use crate::cli::target::{ConnectedTarget, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::{HistoryEntry, RolloutRow};
use crate::engine::other_sources::contains;
use crate::engine::rollout_records::{self, RolloutDecision, RolloutRecord, version_of};
use crate::engine::{history, stored_revisions};
use crate::manifest::{self, did_you_mean};
use crate::model::{Desired, ProcessKey};

/// Show, promote, abort or undo rollouts
///
/// A rollout with `pause: promoted` waits after its canaries and after each host group. `apply` then exits with 5.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide rollout status\n  abide rollout promote web/api --reason 'error rate is fine'\n  abide rollout undo web/api --yes"
)]
pub struct RolloutArgs {
    #[command(subcommand)]
    pub verb: RolloutVerb,
}

#[derive(Debug, Subcommand)]
pub enum RolloutVerb {
    Status(RolloutStatusArgs),
    /// Continue a rollout with its next stage
    ///
    /// The decision is stored. The next `apply`, or a running `watch`, continues the rollout.
    Promote(RolloutDecisionArgs),
    /// Abort a rollout: changed instances keep the new version
    ///
    /// The process is held (`RolloutAborted`) until the rollout is promoted or undone, or the manifest has another version.
    Abort(RolloutDecisionArgs),
    Undo(RolloutUndoArgs),
}

/// Show rollouts and the last decisions on them
#[derive(Debug, clap::Args)]
pub struct RolloutStatusArgs {
    /// Process [default: all of the owner]
    #[arg(value_name = "NS/NAME")]
    pub process: Option<ProcessKey>,
    #[command(flatten)]
    pub of: RolloutOwnerArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

#[derive(Debug, clap::Args)]
pub struct RolloutDecisionArgs {
    /// Process
    #[arg(value_name = "NS/NAME")]
    pub process: ProcessKey,
    /// Reason to record
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: Option<String>,
    #[command(flatten)]
    pub of: RolloutOwnerArgs,
}

/// Abort a rollout and return its process to the previous version
///
/// The previous version is that of the newest stored revision with another version of the process. Other processes stay as
/// they are.
#[derive(Debug, clap::Args)]
pub struct RolloutUndoArgs {
    #[command(flatten)]
    pub decision: RolloutDecisionArgs,
    /// Apply without asking for approval
    #[arg(short, long, env = "ABIDE_YES", value_parser = parse_switch)]
    pub yes: bool,
    #[command(flatten)]
    pub bounds: BudgetArgs,
    #[command(flatten)]
    pub going: ExecutionArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_APPLY_OUTPUT", value_name = "FORMAT")]
    pub output: PlanForm,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub struct RolloutOwnerArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner of the manifests [default: the config file's owner, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,
}

impl RolloutOwnerArgs {
    fn name(&self) -> Result<String, Failure> {
        self.target.owner_or_default(self.owner.as_deref())
    }
}

pub fn run(args: RolloutArgs, printer: &Printer) -> Result<Exit, Failure> {
    let of = match &args.verb {
        RolloutVerb::Status(args) => &args.of,
        RolloutVerb::Promote(args) | RolloutVerb::Abort(args) => &args.of,
        RolloutVerb::Undo(args) => &args.decision.of,
    };
    let (owner, live) = (of.name()?, of.target.connect_or_start(printer)?);
    runtime()?.block_on(async {
        match &args.verb {
            RolloutVerb::Status(args) => status(args, &owner, &live, printer).await,
            RolloutVerb::Promote(args) => promote(args, &owner, &live, printer).await,
            RolloutVerb::Abort(args) => {
                decide(args, RolloutDecision::Aborted, &owner, &live).await?;
                let name = visible(&args.process.to_string());
                printer.styled(&format!(
                    "{BOLD}aborted{BOLD:#}: {name}; `abide rollout promote {name}` resumes it\n"
                ));
                Ok(Exit::Done)
            }
            RolloutVerb::Undo(args) => undo(args, &owner, &live, printer).await,
        }
    })
}

async fn status(
    args: &RolloutStatusArgs,
    owner: &str,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let records = rollout_records::read(&live.state, owner).await.map_err(|error| live.failure(&error))?;
    let meant = records.iter().filter(|(process, _)| args.process.as_ref().is_none_or(|one| one == *process));
    let rows: Vec<RolloutRow> = meant.map(|(process, record)| row(owner, process, record)).collect();
    if args.output == PlainForm::Json {
        printer.data(&format!("{}\n", serde_json::to_string_pretty(&rows).unwrap_or_default()));
        return Ok(Exit::Done);
    }
    if rows.is_empty() {
        let desired = active_desired(live, owner).await.unwrap_or_default();
        printer.info(&match &args.process {
            Some(process) if version_of(&desired, process).is_none() => {
                format!("the active manifests of owner {owner:?} declare no process {process}")
            }
            _ => "no rollout waits for a decision".to_owned(),
        });
        return Ok(Exit::Done);
    }
    let columns = ["PROCESS", "STATE", "STAGE", "OF", "AT", "BY", "REASON"];
    let mut table = Table::new(columns.map(|name| (name, Align::Left)));
    for one in rows {
        let is_done = one.state == RolloutDecision::Promoted.word();
        let stage = one.stage.unwrap_or_else(|| if is_done { "done" } else { "-" }.to_owned());
        let (by, reason) = (one.by.unwrap_or_default(), one.reason.unwrap_or_default());
        let cells = [one.process, one.state, stage, one.stages.join(" > "), one.at, by, reason];
        table.row(cells.iter().map(|text| visible(text)).collect());
    }
    printer.styled(&table.text());
    Ok(Exit::Done)
}

fn row(owner: &str, process: &ProcessKey, record: &RolloutRecord) -> RolloutRow {
    RolloutRow {
        process: process.to_string(),
        owner: owner.to_owned(),
        version: record.id.clone(),
        state: record.state.word().to_owned(),
        promoted: record.promoted,
        stage: record.stages.get(record.promoted).cloned(),
        stages: record.stages.clone(),
        at: record.at.to_string(),
        by: record.by.clone(),
        reason: record.reason.clone(),
    }
}

/// Promotes the stage after which a rollout waits, or resumes an aborted rollout.
async fn promote(
    args: &RolloutDecisionArgs,
    owner: &str,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let broken = |error: crate::store::Error| live.failure(&error);
    let before = rollout_records::read(&live.state, owner).await.map_err(broken)?.remove(&args.process);
    let Some(before) = before.filter(|record| record.state != RolloutDecision::Promoted) else {
        return Err(not_waiting(&args.process, owner, live).await);
    };
    let after = rollout_records::change(&live.state, owner, &args.process, |record| {
        // Two promotions at once are one: only the record that this command read is promoted.
        let record = record.filter(|record| **record == before)?;
        let is_paused = record.state == RolloutDecision::Paused;
        Some(RolloutRecord {
            state: RolloutDecision::Promoted,
            promoted: record.promoted + usize::from(is_paused),
            at: clock::now(),
            by: Some(history::user()),
            reason: args.reason.clone(),
            ..record.clone()
        })
    });
    let after = after.await.map_err(broken)?;
    if after.as_ref().is_none_or(|after| after.state != RolloutDecision::Promoted) {
        let message = format!("the rollout of {} changed at the same time: nothing was done", args.process);
        return Err(Failure::new(Exit::Failed, message).hint("`abide rollout status` shows it"));
    }
    note("promote", args, owner, live).await?;
    let next = after.and_then(|after| after.stages.get(after.promoted).cloned());
    let next = next.map(|next| format!(", next stage: {}", visible(&next))).unwrap_or_default();
    printer.styled(&format!(
        "{BOLD}promoted{BOLD:#}: {}{next}; the next `abide apply`, or a running `abide watch`, continues\n",
        visible(&args.process.to_string())
    ));
    Ok(Exit::Done)
}

/// Records an abort of the active version.
async fn decide(
    args: &RolloutDecisionArgs,
    state: RolloutDecision,
    owner: &str,
    live: &ConnectedTarget,
) -> Result<String, Failure> {
    let desired = active_desired(live, owner).await.unwrap_or_default();
    let id = version_of(&desired, &args.process);
    let Some(id) = id else { return Err(unknown(&args.process, &desired, owner)) };
    let decided = rollout_records::change(&live.state, owner, &args.process, |record| {
        let of_version = record.filter(|record| record.id == id);
        Some(RolloutRecord {
            id: id.clone(),
            state,
            promoted: of_version.map_or(0, |record| record.promoted),
            stages: of_version.map(|record| record.stages.clone()).unwrap_or_default(),
            at: clock::now(),
            by: Some(history::user()),
            reason: args.reason.clone(),
        })
    });
    decided.await.map_err(|error| live.failure(&error))?;
    note(state.word(), args, owner, live).await?;
    Ok(id)
}

async fn undo(
    args: &RolloutUndoArgs,
    owner: &str,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let broken = |error: crate::store::Error| live.failure(&error);
    let process = &args.decision.process;
    let desired = active_desired(live, owner).await.unwrap_or_default();
    let Some(id) = version_of(&desired, process) else { return Err(unknown(process, &desired, owner)) };
    let active = stored_revisions::active(&live.state, owner).await.map_err(broken)?.0;
    let source = active.map(|active| active.source).unwrap_or_default();
    let stored = stored_revisions::list(&live.state, owner).await.map_err(broken)?;
    let of_source =
        |one: &&stored_revisions::Snapshot| contains(&source, &one.source) || contains(&one.source, &source);
    let limits = args.limits.limits();
    for snapshot in stored.iter().filter(of_source) {
        let texts = stored_revisions::texts(&live.state, owner, snapshot).await.map_err(broken)?;
        let mut loaded = manifest::load_files(texts, Vec::new(), &limits, &BTreeMap::new());
        live.set_default_user(&mut loaded.desired);
        let is_previous = version_of(&loaded.desired, process).is_some_and(|one| one != id);
        if !is_previous || loaded.errors() > 0 {
            continue;
        }
        // Recorded first: a running `watch` must not repeat the change.
        decide(&args.decision, RolloutDecision::Undone, owner, live).await?;
        let old = OldRevision {
            owner,
            process,
            target: &args.decision.of.target,
            shown_source: format!("undo {process} to {}", snapshot.revision.short()),
            yes: args.yes,
            bounds: &args.bounds,
            going: &args.going,
            output: args.output,
            limits: &args.limits,
        };
        return apply_old_revision(old, loaded, live, printer).await;
    }
    let message = format!("no stored revision has an earlier version of {process}");
    Err(Failure::new(Exit::Failed, message).hint("`abide rollout abort` stops the rollout where it is"))
}

fn unknown(process: &ProcessKey, desired: &Desired, owner: &str) -> Failure {
    let names: Vec<String> =
        desired.instances.values().map(|want| want.origin.declared.to_string()).collect();
    let message = format!("the active manifests of owner {owner:?} declare no process {process}");
    let failure = Failure::new(Exit::Usage, message);
    match did_you_mean(&process.to_string(), names.iter().map(String::as_str)) {
        Some(meant) => failure.hint(format!("did you mean {meant}?")),
        None => failure.hint("`abide status` lists owners"),
    }
}

async fn not_waiting(process: &ProcessKey, owner: &str, live: &ConnectedTarget) -> Failure {
    let desired = active_desired(live, owner).await.unwrap_or_default();
    match version_of(&desired, process) {
        None => unknown(process, &desired, owner),
        Some(_) => Failure::new(Exit::Failed, format!("no rollout of {process} waits for a promotion"))
            .hint("`abide apply` or `abide watch` has to reach the pause first"),
    }
}

async fn note(
    verb: &str,
    args: &RolloutDecisionArgs,
    owner: &str,
    live: &ConnectedTarget,
) -> Result<(), Failure> {
    let reason = args.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let entry = HistoryEntry {
        source: format!("rollout {verb} {}{reason}", args.process),
        at: clock::now().to_string(),
        by: history::user_at_host(),
        exit: Some(0),
        ..HistoryEntry::default()
    };
    history::add(&live.state, owner, clock::now(), &entry).await.map_err(|error| live.failure(&error))
}
