//! `abide rollback`: an earlier revision is wanted again, and stays so until there is a newer one.

use std::collections::BTreeMap;

use clap::builder::NonEmptyStringValueParser;
use serde_json::Value;

use super::apply::{self, Apply, Going};
use super::args::{LimitArgs, switch};
use super::plan::args::{Bounds, Claims, Input, Offline, PlanForm, Select};
use super::plan::input::Wanted;
use super::plan::json as plan_json;
use super::print::{Printer, visible};
use super::target::{Live, TargetArgs, runtime};
use super::watch_source::short;
use super::{Exit, Failure};
use crate::clock::moment;
use crate::control::history;
use crate::control::pin::{self, Pin};
use crate::control::snapshot::{self, Snapshot};
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
pub struct Rollback {
    /// Where to: a revision, a commit, or `previous`
    #[arg(long, value_name = "REV", env = "ABIDE_TO_REVISION", required_unless_present = "unpin")]
    pub to: Option<String>,
    /// End the pin instead: what the source says is wanted again
    #[arg(long, env = "ABIDE_UNPIN", value_parser = switch, conflicts_with = "to")]
    pub unpin: bool,
    /// Why, for whoever asks
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: Option<String>,
    /// Do not ask
    #[arg(short, long, env = "ABIDE_YES", value_parser = switch)]
    pub yes: bool,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Whose set it is; left out: the owner that the config file names, else `default`
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,
    /// Remove what is ours and was not there then
    #[arg(long, env = "ABIDE_PRUNE", value_parser = switch)]
    pub prune: bool,
    #[command(flatten)]
    pub bounds: Bounds,
    #[command(flatten)]
    pub going: Going,
    /// Form of the report
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_APPLY_OUTPUT", value_name = "FORM")]
    pub output: PlanForm,
    #[command(flatten)]
    pub limits: LimitArgs,
}

/// The shortest beginning of a revision that means one.
const SHORTEST: usize = 6;

pub fn run(args: Rollback, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let done = (|| {
        let said = args.owner.clone().map_or_else(|| args.target.owner(), |owner| Ok(Some(owner)));
        let owner = said?.unwrap_or_else(|| "default".to_owned());
        let live = args.target.reach()?;
        runtime()?.block_on(async {
            match &args.to {
                Some(to) => back(&args, to, &owner, &live, printer).await,
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

async fn back(
    args: &Rollback,
    to: &str,
    owner: &str,
    live: &Live,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let broken = |error: Error| live.failure(&error);
    let known = snapshot::list(&live.state, owner).await.map_err(broken)?;
    let pinned = pin::read(&live.state, owner).await.map_err(broken)?.map(|(pin, _)| pin);
    let taken = snapshot::taken(&live.state, owner).await.map_err(broken)?.0;
    let history = history::newest(&live.state, owner, history::KEPT).await.map_err(broken)?;
    let now = pinned.as_ref().map(|pin| &pin.revision).or(taken.as_ref().map(|taken| &taken.revision));
    let snapshot = meant(to, &known, &history, now.map(String::as_str))?;
    let texts = snapshot::texts(&live.state, owner, snapshot).await.map_err(broken)?;
    let limits = args.limits.limits();
    let loaded = manifest::load_given(texts, Vec::new(), &limits, &BTreeMap::new());
    let apply = as_apply(args, owner);
    let wanted = Wanted::of(loaded, &apply.input, printer)?;
    if of_desired(wanted.desired()) != snapshot.revision {
        let message = format!("what is kept of {} does not read as it did", snapshot.revision);
        return Err(Failure::new(Exit::Failed, message).hint("it may be from another version of abide"));
    }
    let pin = Pin {
        revision: snapshot.revision.clone(),
        commit: snapshot.commit.clone(),
        since: moment(),
        by: history::user(),
        reason: args.reason.clone(),
        // Whatever is pinned meanwhile, it is the source's revision that is left behind.
        over: pinned.as_ref().and_then(|pin| pin.over.clone()).or(taken.map(|taken| taken.revision)),
        also: pinned.map(|pin| pin.also).unwrap_or_default(),
    };
    apply::go_back(&apply, wanted, live, pin, printer).await
}

/// The snapshot that somebody means.
fn meant<'a>(
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
            .ok_or_else(|| unknown("there is no revision before this one", known));
    }
    let to = to.to_ascii_lowercase();
    if to.len() < SHORTEST {
        let message = format!("{to:?} is too short for a revision: say {SHORTEST} characters at least");
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
        [] => Err(unknown(&format!("no revision {to:?} is kept"), known)),
        _ => Err(unknown(&format!("{to:?} means several revisions"), known)),
    }
}

fn unknown(what: &str, known: &[Snapshot]) -> Failure {
    let line = |snapshot: &Snapshot| {
        let commit =
            snapshot.commit.as_deref().map(|id| format!("  commit {}", short(id))).unwrap_or_default();
        format!("\n  {}  {}{commit}  {}", short(&snapshot.revision), snapshot.at, visible(&snapshot.source))
    };
    let list: String = known.iter().map(line).collect();
    let list = if list.is_empty() { "\n  none".to_owned() } else { list };
    Failure::new(Exit::Failed, format!("{what}; these are kept:{list}"))
}

async fn unpin(owner: &str, live: &Live, printer: &Printer) -> Result<Exit, Failure> {
    let broken = |error: Error| live.failure(&error);
    let Some((pin, changed)) = pin::read(&live.state, owner).await.map_err(broken)? else {
        printer.remark(&format!("nothing is pinned for {owner:?}"));
        return Ok(Exit::Done);
    };
    let place = pin::place(owner);
    let ended = live.state.txn(Txn::delete(&place).only_if(&place, changed)).await.map_err(broken)?;
    if let Outcome::Conflict(_) = ended {
        let message = "somebody pinned something else just now: nothing was done";
        return Err(Failure::new(Exit::Failed, message).hint("`abide history` shows it"));
    }
    printer.remark(&format!("no longer pinned to {}", short(&pin.revision)));
    Ok(Exit::Done)
}

/// The same flags mean the same as for `apply`.
fn as_apply(args: &Rollback, owner: &str) -> Apply {
    let input = Input {
        paths: Vec::new(),
        target: args.target.clone(),
        owner: Some(owner.to_owned()),
        claims: Claims { prune: args.prune, ..Claims::default() },
        bounds: args.bounds.clone(),
        select: Select::default(),
        offline: Offline { observed: None, caps: Caps::LOCAL, now: None },
        limits: args.limits.clone(),
    };
    Apply { input, yes: args.yes, going: args.going.clone(), junit: None, output: args.output }
}

/// A pin, as people read it.
pub fn words(pin: &Pin) -> String {
    let commit = pin.commit.as_deref().map(|id| format!(" (commit {})", short(id))).unwrap_or_default();
    let why = pin.reason.as_deref().map(|why| format!(": {}", visible(why))).unwrap_or_default();
    format!("{}{commit} since {} by {}{why}", short(&pin.revision), pin.since, visible(&pin.by))
}
