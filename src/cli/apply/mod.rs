//! `abide apply`: plan, ask, do it, and look again.

mod approve;
mod carry_out;
mod lease;
mod progress;
mod report;
mod said;
mod saved;
mod settle;

pub use carry_out::config_is_there;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use self::approve::{approve, over_budget};
use self::carry_out::{carry_out, ill};
use self::lease::Writer;
use self::report::{Before, Report, can_be_written, reasons, show, sole_reason};
use self::said::{Said, ended};
use self::saved::{same_as, saved_plan};
use self::settle::{settle, settle_held};
use super::args::switch;
use super::plan::args::{Input as InputArgs, PlanForm, duration};
use super::plan::input::{Early, Input, Wanted};
use super::plan::{self, json as plan_json};
use super::print::Printer;
use super::target::{Live, runtime};
use super::watch_source::short;
use super::{Exit, Failure};
use crate::control::history;
use crate::control::pin::Pin;
use crate::model::Plan;

/// Make the manifests true: plan, ask, carry it out, and look again
///
/// Takes manifests, or a plan that `abide plan --out` wrote, which is carried out only if it is still what would be planned.
/// Exits with 0 when everything is as wanted, 3 when something failed or is unknown, 4 when a guard said no, 5 when time ran
/// out, 6 when another holds the lease.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide apply manifests\n  abide apply manifests --yes --prune --owner web-team\n  abide plan manifests --out plan.json && abide apply plan.json --yes"
)]
pub struct Apply {
    #[command(flatten)]
    pub input: InputArgs,
    /// Do not ask
    #[arg(short, long, env = "ABIDE_YES", value_parser = switch)]
    pub yes: bool,
    #[command(flatten)]
    pub going: Going,
    /// Also write the outcomes as JUnit XML, for CI systems
    #[arg(long, value_name = "FILE", env = "ABIDE_JUNIT")]
    pub junit: Option<PathBuf>,
    /// Form of the report
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_APPLY_OUTPUT", value_name = "FORM")]
    pub output: PlanForm,
}

/// How it is carried out.
#[derive(Clone, Debug, clap::Args)]
pub struct Going {
    /// Do not look again after everything was carried out
    #[arg(long, env = "ABIDE_NO_WAIT", value_parser = switch)]
    pub no_wait: bool,
    /// The longest that it may take
    #[arg(long, value_name = "TIME", env = "ABIDE_TIMEOUT", default_value = "10m", value_parser = duration)]
    pub timeout: u64,
    /// Most steps under way at once
    #[arg(long, value_name = "N", env = "ABIDE_MAX_PARALLEL", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_parallel: u32,
}

pub fn run(args: &mut Apply, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let done = (|| {
        let saved = saved_plan(args)?;
        let runtime = runtime()?;
        runtime.block_on(apply(args, saved.as_ref(), printer))
    })();
    done.inspect_err(|failure| {
        if in_json {
            printer.data(&plan_json::refusal(failure.exit, failure.reason));
        }
    })
}

async fn apply(args: &Apply, saved: Option<&Value>, printer: &Printer) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.going.timeout);
    if args.input.offline.observed.is_some() {
        return Err(Failure::new(Exit::Usage, "apply needs a target: --observed is for plan and diff"));
    }
    if let Some(file) = &args.junit {
        can_be_written(file)?;
    }
    let early = Early::begin(&args.input, Duration::from_secs(args.going.timeout));
    let wanted = Wanted::read(&args.input, printer)?;
    let live = match early {
        Some(early) => early.end(),
        None => Arc::new(args.input.target.reach()?),
    };
    reach(args, saved, wanted, &live, &Said::New, deadline, printer).await
}

/// An earlier revision, like any other, and then it is pinned.
pub async fn go_back(
    args: &Apply,
    wanted: Wanted,
    live: &Live,
    pin: Pin,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.going.timeout);
    reach(args, None, wanted, live, &Said::Before(pin), deadline, printer).await
}

async fn reach(
    args: &Apply,
    saved: Option<&Value>,
    wanted: Wanted,
    live: &Live,
    said: &Said,
    deadline: Instant,
    printer: &Printer,
) -> Result<Exit, Failure> {
    in_time(deadline, settle(live, wanted.owner(), deadline, printer)).await?;
    let mut input = in_time(deadline, wanted.beside(&args.input, Some(live), printer)).await?;
    if let Said::Before(pin) = said {
        input.paths = format!("rollback to {}", short(&pin.revision));
    }
    let mut planned = input.plan();
    plan::locate(&mut planned, &input, &args.input.limits.limits());
    if let Some(saved) = saved {
        same_as(saved, &input, &planned)?;
    }
    over_budget(&planned)?;
    if planned.steps().next().is_none() {
        let exit = if planned.held.is_empty() { Exit::Done } else { Exit::Incomplete };
        if let Said::Before(_) = said {
            approve(args, saved.is_some(), &input, &planned, printer)?;
        }
        let into_force = async {
            match said.is_in_force(args, live, &input).await? {
                true => Ok(()),
                false => said.put_in_force(args, live, &input, printer).await,
            }
        };
        in_time(deadline, into_force).await?;
        let mut ill = ill(&input);
        let _ = tokio::time::timeout_at(deadline, reasons(live, &mut ill)).await;
        let exit = if ill.is_empty() { exit } else { Exit::Incomplete };
        let reason = sole_reason(planned.held.iter().map(|held| Some(held.reason)));
        let reason = reason.filter(|_| ill.is_empty());
        let report = Report { ended: Vec::new(), converged: Some(exit == Exit::Done), exit, reason, ill };
        let report = report.agreed();
        return show(args, &planned, &Before::of(&input, &planned)?, &report, printer);
    }
    approve(args, saved.is_some(), &input, &planned, printer)?;
    let left = deadline.saturating_duration_since(Instant::now());
    let patience = left.min(Duration::from_secs(args.input.bounds.lock_timeout));
    let writer = in_time(deadline + GRACE, Writer::begin(live, &input.rules.owner, patience)).await?;
    // Somebody may have been at work until a moment ago, or died in it: what is done is what is needed now.
    let ready = async {
        settle_held(live, &input.rules.owner, deadline).await?;
        plan_anew(args, saved.is_some(), live, &mut input, &mut planned).await?;
        said.put_in_force(args, live, &input, printer).await
    };
    if let Err(failure) = in_time(deadline, ready).await {
        writer.end(live).await;
        return Err(failure);
    }
    let before = Before::of(&input, &planned)?;
    let (owner, begun) = (input.rules.owner.clone(), said.begun(&input, &planned, &before));
    let working = async {
        let report = carry_out(args, live, &mut input, &planned, deadline, writer.lost(), printer).await;
        let end = ended(&report);
        writer.end(live).await;
        (report, end)
    };
    let report = history::telling(&live.state, &owner, begun, working).await;
    show(args, &planned, &before, &report, printer)
}

/// How long what is written at the end is waited for, though the time is over.
const GRACE: Duration = Duration::from_secs(2);

/// What has to be known before anything is begun is known in time, or nothing is begun.
async fn in_time<T>(
    deadline: Instant,
    asked: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::time::timeout_at(deadline, asked).await.unwrap_or_else(|_| {
        let message = "the time was over before the target had answered: nothing was begun";
        Err(Failure::new(Exit::TimedOut, message)
            .hint("see whether it answers at all, or give --timeout more"))
    })
}

/// The same plan for the world as it is now. One that a person approved must not have become another.
async fn plan_anew(
    args: &Apply,
    saved: bool,
    live: &Live,
    input: &mut Input,
    planned: &mut Plan,
) -> Result<(), Failure> {
    let steps = |plan: &Plan| -> Vec<String> {
        plan.steps().map(|step| format!("{} {} {}", step.instance, step.op, step.which.word())).collect()
    };
    let approved = steps(planned);
    input.ask_again(live).await?;
    input.look_again(live).await?;
    let mut anew = input.plan();
    plan::locate(&mut anew, input, &args.input.limits.limits());
    if steps(&anew) != approved && (saved || !args.yes) {
        let message = "what is there has changed since the plan was shown: nothing was done";
        return Err(Failure::refused("StalePlan", message).hint("apply again, and look at the new plan"));
    }
    over_budget(&anew)?;
    *planned = anew;
    Ok(())
}
