//! `abide rollback`: pins an earlier revision until the source has a newer one, and applies it.

use std::collections::BTreeMap;
use std::sync::Arc;

use clap::builder::NonEmptyStringValueParser;

use crate::cli::args::{LimitArgs, parse_switch};
use crate::cli::commands::apply::{self, ApplyArgs, ExecutionArgs};
use crate::cli::commands::plan::args::{
    BreakGlassArgs, BudgetArgs, InputArgs, OfflineArgs, OwnershipArgs, PlanForm, SelectArgs,
};
use crate::cli::commands::plan::input::DesiredInput;
use crate::cli::commands::plan::json as plan_json;
use crate::cli::commands::watch::source::short_id;
use crate::cli::inventories::InventoryArgs;
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::{ConnectedTarget, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::HistoryEntry;
use crate::engine::history;
use crate::engine::other_sources::contains;
use crate::engine::pin::{self, Pin};
use crate::engine::stored_revisions::{self, Snapshot};
use crate::manifest;
use crate::model::{ManifestRevision, ProcessKey};
use crate::reconcile::Caps;
use crate::store::{Error, Store, Txn, TxnOutcome, keys};

/// Pin an earlier revision and apply it
///
/// REV is a revision or commit from `abide history`, a prefix of one (at least 6 characters), or `previous`: the last
/// converged revision before the current one. `abide watch` reconciles the pinned revision until its source has a newer
/// one; `abide apply` of manifests ends the pin. The last 20 revisions of an owner are stored.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide rollback --to previous\n  abide rollback --to 3f2a91c04d7e --yes --reason 'v2 leaks'\n  abide rollback --unpin"
)]
pub struct RollbackArgs {
    /// Revision, commit, or `previous`
    #[arg(long, value_name = "REV", env = "ABIDE_TO_REVISION", required_unless_present = "unpin")]
    pub to: Option<String>,
    /// End the pin: the source's revision becomes active again
    #[arg(long, env = "ABIDE_UNPIN", value_parser = parse_switch, conflicts_with = "to")]
    pub unpin: bool,
    /// Reason to record
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: Option<String>,
    /// Change instances outside of maintenance windows; requires --reason. Protections, holds, owners and budgets still apply
    #[arg(long, env = "ABIDE_BREAK_GLASS", value_parser = parse_switch)]
    pub break_glass: bool,
    /// Apply without asking for approval
    #[arg(short, long, env = "ABIDE_YES", value_parser = parse_switch)]
    pub yes: bool,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner of the manifests [default: the config file's owner, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,
    /// Delete the owner's processes that the revision does not declare
    #[arg(long, env = "ABIDE_PRUNE", value_parser = parse_switch)]
    pub prune: bool,
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

/// Minimum length of a revision prefix.
const MIN_PREFIX_LEN: usize = 6;

pub fn run(args: RollbackArgs, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let done = (|| {
        let owner = args.target.owner_or_default(args.owner.as_deref())?;
        let live = args.target.connect_or_start(printer)?;
        runtime()?.block_on(async {
            match &args.to {
                Some(to) => roll_back(&args, to, &owner, &live, printer).await,
                None => unpin(&owner, &live, printer).await,
            }
        })
    })();
    done.inspect_err(|failure| {
        if let (true, Some(reason)) = (in_json, failure.reason) {
            printer.data(&plan_json::refusal(failure.exit, Some(reason)));
        }
    })
}

async fn roll_back(
    args: &RollbackArgs,
    to: &str,
    owner: &str,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let broken = |error: Error| live.failure(&error);
    let known = stored_revisions::list(&live.state, owner).await.map_err(broken)?;
    let pinned = pin::read(&live.state, owner).await.map_err(broken)?.map(|(pin, _)| pin);
    let active = stored_revisions::active(&live.state, owner).await.map_err(broken)?.0;
    let history = history::newest(&live.state, owner, history::MAX_ENTRIES).await.map_err(broken)?;
    let now = pinned.as_ref().map(|pin| &pin.revision).or(active.as_ref().map(|active| &active.revision));
    // A rollback stays within its source: other revisions declare other processes.
    let source = active.as_ref().map(|active| active.source.as_str());
    let is_of_source = |snapshot: &Snapshot| {
        source.is_none_or(|source| contains(source, &snapshot.source) || contains(&snapshot.source, source))
    };
    let within: Vec<Snapshot> = known.iter().filter(|snapshot| is_of_source(snapshot)).cloned().collect();
    let snapshot = match to {
        "previous" => find_revision(to, &within, &history, now)?,
        _ => find_revision(to, &known, &history, now)?,
    };
    if !is_of_source(snapshot) {
        let message = format!(
            "revision {} is from {}, and the active one from {}",
            snapshot.revision.short(),
            visible(&snapshot.source),
            visible(source.unwrap_or_default())
        );
        let hint = "a rollback stays within its source: apply these manifests instead";
        return Err(Failure::refused("SourceChanged", message).hint(hint));
    }
    let texts = stored_revisions::texts(&live.state, owner, snapshot).await.map_err(broken)?;
    let limits = args.limits.limits();
    let loaded = manifest::load_files(texts, Vec::new(), &limits, &BTreeMap::new());
    let apply = apply_args(args, owner);
    let wanted = DesiredInput::of(loaded, &apply.input, printer)?;
    if ManifestRevision::of(wanted.desired()) != snapshot.revision {
        let message = format!("the stored files of revision {} have another digest", snapshot.revision);
        return Err(Failure::new(Exit::Failed, message).hint("another version of abide may have stored them"));
    }
    let pin = Pin {
        revision: snapshot.revision.clone(),
        commit: snapshot.commit.clone(),
        since: clock::now(),
        by: history::user(),
        reason: args.reason.clone(),
        // The pin overrides the source's revision, also if another revision is pinned now.
        over: pinned.as_ref().and_then(|pin| pin.over.clone()).or(active.map(|active| active.revision)),
        also: pinned.map(|pin| pin.also).unwrap_or_default(),
    };
    apply::apply_pinned(&apply, wanted, live, pin, printer).await
}

/// The snapshot that `--to` names.
fn find_revision<'a>(
    to: &str,
    known: &'a [Snapshot],
    history: &[HistoryEntry],
    now: Option<&ManifestRevision>,
) -> Result<&'a Snapshot, Failure> {
    let by_revision =
        |revision: &ManifestRevision| known.iter().find(|snapshot| snapshot.revision == *revision);
    let revision_of = |entry: &HistoryEntry| ManifestRevision::from_text(&entry.revision);
    if to == "previous" {
        let well = history.iter().filter(|entry| entry.exit == Some(0));
        let mut before = well.map(revision_of).filter(|one| Some(one) != now);
        return before
            .find_map(|one| by_revision(&one))
            .ok_or_else(|| unknown_revision("no earlier revision converged", known));
    }
    let to = to.to_ascii_lowercase();
    if to.len() < MIN_PREFIX_LEN {
        let message = format!("revision {to:?} is too short: pass at least {MIN_PREFIX_LEN} characters");
        return Err(Failure::new(Exit::Usage, message).hint("`abide history` lists revisions"));
    }
    // Several commits can have the same revision.
    let commits =
        history.iter().filter(|entry| entry.commit.as_deref().is_some_and(|one| one.starts_with(&to)));
    let by_commit = commits.filter_map(|entry| by_revision(&revision_of(entry)));
    let direct = known.iter().filter(|snapshot| {
        let is = |id: &str| id.starts_with(&to);
        is(snapshot.revision.as_str()) || snapshot.commit.as_deref().is_some_and(is)
    });
    let mut found: Vec<&Snapshot> = direct.chain(by_commit).collect();
    found.sort_by(|a, b| a.revision.cmp(&b.revision));
    found.dedup_by(|a, b| a.revision == b.revision);
    match found[..] {
        [one] => Ok(one),
        [] => Err(unknown_revision(&format!("revision {to:?} is not stored"), known)),
        _ => Err(unknown_revision(&format!("{to:?} matches several revisions"), known)),
    }
}

fn unknown_revision(what: &str, known: &[Snapshot]) -> Failure {
    let line = |snapshot: &Snapshot| {
        let commit =
            snapshot.commit.as_deref().map(|id| format!("  commit {}", short_id(id))).unwrap_or_default();
        format!(
            "\n  {}  {}{commit}  {}",
            short_id(snapshot.revision.as_str()),
            snapshot.at,
            visible(&snapshot.source)
        )
    };
    let list: String = known.iter().map(line).collect();
    let list = if list.is_empty() { "\n  none".to_owned() } else { list };
    Failure::new(Exit::Failed, format!("{what}; stored revisions:{list}"))
}

async fn unpin(owner: &str, live: &ConnectedTarget, printer: &Printer) -> Result<Exit, Failure> {
    let broken = |error: Error| live.failure(&error);
    let Some((pin, changed)) = pin::read(&live.state, owner).await.map_err(broken)? else {
        printer.info(&format!("owner {owner:?} has no pinned revision"));
        return Ok(Exit::Done);
    };
    let key = keys::pin(owner);
    let ended = live.state.txn(Txn::delete(&key).only_if(&key, changed)).await.map_err(broken)?;
    if let TxnOutcome::Conflict(_) = ended {
        let message = "the pin changed at the same time: nothing was done";
        return Err(Failure::new(Exit::Failed, message).hint("`abide history` shows the current pin"));
    }
    printer.info(&format!("no longer pinned to {}", short_id(pin.revision.as_str())));
    Ok(Exit::Done)
}

/// The flags as those of `apply`.
fn apply_args(args: &RollbackArgs, owner: &str) -> ApplyArgs {
    let input = InputArgs {
        paths: Vec::new(),
        target: args.target.clone(),
        owner: Some(owner.to_owned()),
        claims: OwnershipArgs { prune: args.prune, ..OwnershipArgs::default() },
        bounds: args.bounds.clone(),
        break_glass: BreakGlassArgs { break_glass: args.break_glass, reason: args.reason.clone() },
        select: SelectArgs::default(),
        offline: OfflineArgs { observed: None, caps: Caps::LOCAL, now: None },
        inventory: InventoryArgs::default(),
        limits: args.limits.clone(),
    };
    ApplyArgs {
        input,
        yes: args.yes,
        force: false,
        going: args.going.clone(),
        junit: None,
        output: args.output,
    }
}

/// One process of an earlier revision, and the flags of its apply.
pub struct OldRevision<'a> {
    pub owner: &'a str,
    pub process: &'a ProcessKey,
    pub target: &'a TargetArgs,
    pub shown_source: String,
    pub yes: bool,
    pub bounds: &'a BudgetArgs,
    pub going: &'a ExecutionArgs,
    pub output: PlanForm,
    pub limits: &'a LimitArgs,
}

/// Applies one process of an earlier revision, without pauses and without a change of the active revision.
pub async fn apply_old_revision(
    old: OldRevision<'_>,
    mut loaded: manifest::Loaded,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Exit, Failure> {
    for want in loaded.desired.instances.values_mut() {
        if let Some(rollout) = &mut Arc::make_mut(&mut want.origin).rollout {
            rollout.pauses = false;
        }
    }
    let input = InputArgs {
        paths: Vec::new(),
        target: old.target.clone(),
        owner: Some(old.owner.to_owned()),
        claims: OwnershipArgs::default(),
        bounds: old.bounds.clone(),
        break_glass: BreakGlassArgs::default(),
        select: SelectArgs { include: vec![old.process.clone()], ..SelectArgs::default() },
        offline: OfflineArgs { observed: None, caps: Caps::LOCAL, now: None },
        inventory: InventoryArgs::default(),
        limits: old.limits.clone(),
    };
    let (yes, going, output) = (old.yes, old.going.clone(), old.output);
    let apply = ApplyArgs { input, yes, force: false, going, junit: None, output };
    let wanted = DesiredInput::of(loaded, &apply.input, printer)?;
    apply::apply_unrecorded(&apply, wanted, live, old.shown_source, printer).await
}

/// A pin as text.
pub fn describe_pin(pin: &Pin) -> String {
    let commit = pin.commit.as_deref().map(|id| format!(" (commit {})", short_id(id))).unwrap_or_default();
    let why = pin.reason.as_deref().map(|why| format!(": {}", visible(why))).unwrap_or_default();
    format!("{}{commit} since {} by {}{why}", short_id(pin.revision.as_str()), pin.since, visible(&pin.by))
}
