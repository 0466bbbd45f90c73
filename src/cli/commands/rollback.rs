//! `abide rollback`: an earlier revision is wanted again, and stays so until there is a newer one.

use std::collections::BTreeMap;

use clap::builder::NonEmptyStringValueParser;
use serde_json::Value;

use crate::cli::args::{LimitArgs, parse_switch};
use crate::cli::commands::apply::{self, ApplyArgs, ExecutionArgs};
use crate::cli::commands::plan::args::{
    BudgetArgs, InputArgs, OfflineArgs, OwnershipArgs, PlanForm, SelectArgs,
};
use crate::cli::commands::plan::input::DesiredInput;
use crate::cli::commands::plan::json as plan_json;
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::{ConnectedTarget, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::control::history;
use crate::control::pin::{self, Pin};
use crate::control::revisions::{self, Snapshot};
use crate::manifest;
use crate::reconcile::{Caps, of_desired};
use crate::store::{Error, Outcome, Store, Txn};

/// Go back to an earlier revision, and stay there until there is a newer one
///
/// REV is a revision or a commit that `abide history` shows, or the beginning of one (6 characters at least), or `previous`: the
/// last one before this that converged. It is pinned, and carried out like `abide apply`. `abide watch` keeps it true until its
/// source has something newer; `abide apply` of manifests ends the pin. The last 20 revisions of an owner are kept.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide rollback --to previous\n  abide rollback --to 3f2a91c04d7e --yes --reason 'v2 leaks'\n  abide rollback --unpin"
)]
pub struct RollbackArgs {
    /// Where to: a revision, a commit, or `previous`
    #[arg(long, value_name = "REV", env = "ABIDE_TO_REVISION", required_unless_present = "unpin")]
    pub to: Option<String>,
    /// End the pin instead: what the source says is wanted again
    #[arg(long, env = "ABIDE_UNPIN", value_parser = parse_switch, conflicts_with = "to")]
    pub unpin: bool,
    /// Why, for whoever asks
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: Option<String>,
    /// Do not ask
    #[arg(short, long, env = "ABIDE_YES", value_parser = parse_switch)]
    pub yes: bool,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Whose set it is; left out: the owner that the config file names, else `default`
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,
    /// Remove what is ours and was not there then
    #[arg(long, env = "ABIDE_PRUNE", value_parser = parse_switch)]
    pub prune: bool,
    #[command(flatten)]
    pub bounds: BudgetArgs,
    #[command(flatten)]
    pub going: ExecutionArgs,
    /// Form of the report
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_APPLY_OUTPUT", value_name = "FORM")]
    pub output: PlanForm,
    #[command(flatten)]
    pub limits: LimitArgs,
}

/// The shortest beginning of a revision that means one.
const MIN_PREFIX_LEN: usize = 6;

pub fn run(args: RollbackArgs, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let done = (|| {
        let said = args.owner.clone().map_or_else(|| args.target.owner(), |owner| Ok(Some(owner)));
        let owner = said?.unwrap_or_else(|| "default".to_owned());
        let live = args.target.connect_or_start()?;
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
    let known = revisions::list(&live.state, owner).await.map_err(broken)?;
    let pinned = pin::read(&live.state, owner).await.map_err(broken)?.map(|(pin, _)| pin);
    let taken = revisions::active(&live.state, owner).await.map_err(broken)?.0;
    let history = history::newest(&live.state, owner, history::MAX_ENTRIES).await.map_err(broken)?;
    let now = pinned.as_ref().map(|pin| &pin.revision).or(taken.as_ref().map(|taken| &taken.revision));
    let snapshot = find_revision(to, &known, &history, now.map(String::as_str))?;
    let texts = revisions::texts(&live.state, owner, snapshot).await.map_err(broken)?;
    let limits = args.limits.limits();
    let loaded = manifest::load_files(texts, Vec::new(), &limits, &BTreeMap::new());
    let apply = apply_args(args, owner);
    let wanted = DesiredInput::of(loaded, &apply.input, printer)?;
    if of_desired(wanted.desired()) != snapshot.revision {
        let message = format!("what is kept of {} does not read as it did", snapshot.revision);
        return Err(Failure::new(Exit::Failed, message).hint("it may be from another version of abide"));
    }
    let pin = Pin {
        revision: snapshot.revision.clone(),
        commit: snapshot.commit.clone(),
        since: clock::now(),
        by: history::user(),
        reason: args.reason.clone(),
        // Whatever is pinned meanwhile, it is the source's revision that is left behind.
        over: pinned.as_ref().and_then(|pin| pin.over.clone()).or(taken.map(|taken| taken.revision)),
        also: pinned.map(|pin| pin.also).unwrap_or_default(),
    };
    apply::apply_pinned(&apply, wanted, live, pin, printer).await
}

/// The snapshot that somebody means.
fn find_revision<'a>(
    to: &str,
    known: &'a [Snapshot],
    history: &[Value],
    now: Option<&str>,
) -> Result<&'a Snapshot, Failure> {
    let by_revision = |revision: &str| known.iter().find(|snapshot| snapshot.revision == revision);
    if to == "previous" {
        let well = history.iter().filter(|entry| entry["exit"] == 0);
        let mut before = well.filter_map(|entry| entry["revision"].as_str()).filter(|one| Some(*one) != now);
        return before
            .find_map(by_revision)
            .ok_or_else(|| unknown_revision("there is no revision before this one", known));
    }
    let to = to.to_ascii_lowercase();
    if to.len() < MIN_PREFIX_LEN {
        let message = format!("{to:?} is too short for a revision: say {MIN_PREFIX_LEN} characters at least");
        return Err(Failure::new(Exit::Usage, message).hint("`abide history` shows them"));
    }
    // A revision may have been several commits.
    let commits =
        history.iter().filter(|entry| entry["commit"].as_str().is_some_and(|one| one.starts_with(&to)));
    let by_commit = commits.filter_map(|entry| by_revision(entry["revision"].as_str()?));
    let direct = known.iter().filter(|snapshot| {
        let is = |id: &str| id.starts_with(&to);
        is(&snapshot.revision) || snapshot.commit.as_deref().is_some_and(is)
    });
    let mut found: Vec<&Snapshot> = direct.chain(by_commit).collect();
    found.sort_by(|a, b| a.revision.cmp(&b.revision));
    found.dedup_by(|a, b| a.revision == b.revision);
    match found[..] {
        [one] => Ok(one),
        [] => Err(unknown_revision(&format!("no revision {to:?} is kept"), known)),
        _ => Err(unknown_revision(&format!("{to:?} means several revisions"), known)),
    }
}

fn unknown_revision(what: &str, known: &[Snapshot]) -> Failure {
    let line = |snapshot: &Snapshot| {
        let commit =
            snapshot.commit.as_deref().map(|id| format!("  commit {}", short_id(id))).unwrap_or_default();
        format!(
            "\n  {}  {}{commit}  {}",
            short_id(&snapshot.revision),
            snapshot.at,
            visible(&snapshot.source)
        )
    };
    let list: String = known.iter().map(line).collect();
    let list = if list.is_empty() { "\n  none".to_owned() } else { list };
    Failure::new(Exit::Failed, format!("{what}; these are kept:{list}"))
}

async fn unpin(owner: &str, live: &ConnectedTarget, printer: &Printer) -> Result<Exit, Failure> {
    let broken = |error: Error| live.failure(&error);
    let Some((pin, changed)) = pin::read(&live.state, owner).await.map_err(broken)? else {
        printer.info(&format!("nothing is pinned for {owner:?}"));
        return Ok(Exit::Done);
    };
    let place = pin::store_key(owner);
    let ended = live.state.txn(Txn::delete(&place).only_if(&place, changed)).await.map_err(broken)?;
    if let Outcome::Conflict(_) = ended {
        let message = "somebody pinned something else just now: nothing was done";
        return Err(Failure::new(Exit::Failed, message).hint("`abide history` shows it"));
    }
    printer.info(&format!("no longer pinned to {}", short_id(&pin.revision)));
    Ok(Exit::Done)
}

/// The same flags mean the same as for `apply`.
fn apply_args(args: &RollbackArgs, owner: &str) -> ApplyArgs {
    let input = InputArgs {
        paths: Vec::new(),
        target: args.target.clone(),
        owner: Some(owner.to_owned()),
        claims: OwnershipArgs { prune: args.prune, ..OwnershipArgs::default() },
        bounds: args.bounds.clone(),
        select: SelectArgs::default(),
        offline: OfflineArgs { observed: None, caps: Caps::LOCAL, now: None },
        limits: args.limits.clone(),
    };
    ApplyArgs { input, yes: args.yes, going: args.going.clone(), junit: None, output: args.output }
}

/// A pin, as people read it.
pub fn describe_pin(pin: &Pin) -> String {
    let commit = pin.commit.as_deref().map(|id| format!(" (commit {})", short_id(id))).unwrap_or_default();
    let why = pin.reason.as_deref().map(|why| format!(": {}", visible(why))).unwrap_or_default();
    format!("{}{commit} since {} by {}{why}", short_id(&pin.revision), pin.since, visible(&pin.by))
}
