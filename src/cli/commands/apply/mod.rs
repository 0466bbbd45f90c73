//! `abide apply`: plan, confirm, execute, verify.

mod activate;
mod approve;
mod execute;
mod lease;
mod plan_file;
mod progress;
mod recover;
mod report;

pub use execute::check_config_files;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use self::activate::{Activation, history_result};
use self::approve::{approve, check_budget};
use self::execute::{execute_plan, unhealthy};
use self::lease::WriterLease;
use self::plan_file::{check_unchanged, load_plan_file};
use self::recover::{recover, recover_with_lease};
use self::report::{OriginalPlan, Report, check_writable, explain_unhealthy, show, sole_reason};
use crate::cli::args::parse_switch;
use crate::cli::commands::plan::args::{InputArgs, PlanForm, duration};
use crate::cli::commands::plan::input::{DesiredInput, PlanInput, Prefetch};
use crate::cli::commands::plan::{self, json as plan_json};
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::print::Printer;
use crate::cli::target::{ConnectedTarget, runtime};
use crate::cli::{Exit, Failure};
use crate::control::history;
use crate::control::pin::Pin;
use crate::model::Plan;

/// Apply manifests: plan, confirm, execute, verify
///
/// PATH is manifests, or a plan file of `abide plan --out`, which is executed only if a new plan has the same steps. Exits
/// with 0 if all instances converged, 3 if an instance failed or is unknown, 4 if a safety check refused, 5 on timeout, 6 if
/// another process holds the lease.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide apply manifests\n  abide apply manifests --yes --prune --owner web-team\n  abide plan manifests --out plan.json && abide apply plan.json --yes"
)]
pub struct ApplyArgs {
    #[command(flatten)]
    pub input: InputArgs,
    /// Apply without asking for approval
    #[arg(short, long, env = "ABIDE_YES", value_parser = parse_switch)]
    pub yes: bool,
    #[command(flatten)]
    pub going: ExecutionArgs,
    /// Also write the outcomes as JUnit XML to FILE
    #[arg(long, value_name = "FILE", env = "ABIDE_JUNIT")]
    pub junit: Option<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_APPLY_OUTPUT", value_name = "FORMAT")]
    pub output: PlanForm,
}

/// Execution of a plan.
#[derive(Clone, Debug, clap::Args)]
pub struct ExecutionArgs {
    /// Exit after the last step, without verifying that instances converged
    #[arg(long, env = "ABIDE_NO_WAIT", value_parser = parse_switch)]
    pub no_wait: bool,
    /// Time limit for the whole run
    #[arg(long, value_name = "TIME", env = "ABIDE_TIMEOUT", default_value = "10m", value_parser = duration)]
    pub timeout: u64,
    /// Maximum steps in flight
    #[arg(long, value_name = "N", env = "ABIDE_MAX_PARALLEL", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_parallel: u32,
}

pub fn run(args: &mut ApplyArgs, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let done = (|| {
        let saved = load_plan_file(args)?;
        let runtime = runtime()?;
        runtime.block_on(apply(args, saved.as_ref(), printer))
    })();
    done.inspect_err(|failure| {
        if in_json {
            printer.data(&plan_json::refusal(failure.exit, failure.reason));
        }
    })
}

async fn apply(args: &ApplyArgs, saved: Option<&Value>, printer: &Printer) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.going.timeout);
    if args.input.offline.observed.is_some() {
        return Err(Failure::new(Exit::Usage, "apply needs a target: --observed is for plan and diff"));
    }
    if let Some(file) = &args.junit {
        check_writable(file)?;
    }
    let early = Prefetch::start(&args.input, Duration::from_secs(args.going.timeout));
    let wanted = DesiredInput::read(&args.input, printer)?;
    let live = match early {
        Some(early) => early.join(),
        None => Arc::new(args.input.target.connect_or_start()?),
    };
    apply_activation(args, saved, wanted, &live, &Activation::New, deadline, printer).await
}

/// Applies an earlier revision and pins it.
pub async fn apply_pinned(
    args: &ApplyArgs,
    wanted: DesiredInput,
    live: &ConnectedTarget,
    pin: Pin,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.going.timeout);
    apply_activation(args, None, wanted, live, &Activation::Pinned(pin), deadline, printer).await
}

async fn apply_activation(
    args: &ApplyArgs,
    saved: Option<&Value>,
    wanted: DesiredInput,
    live: &ConnectedTarget,
    activation: &Activation,
    deadline: Instant,
    printer: &Printer,
) -> Result<Exit, Failure> {
    within_deadline(deadline, recover(live, wanted.owner(), deadline, printer)).await?;
    let mut input = within_deadline(deadline, wanted.observe(&args.input, Some(live), printer)).await?;
    if let Activation::Pinned(pin) = activation {
        input.paths = format!("rollback to {}", short_id(&pin.revision));
    }
    let mut planned = input.plan();
    plan::locate(&mut planned, &input, &args.input.limits.limits());
    if let Some(saved) = saved {
        check_unchanged(saved, &input, &planned)?;
    }
    check_budget(&planned)?;
    if planned.steps().next().is_none() {
        let exit = if planned.held.is_empty() { Exit::Done } else { Exit::Incomplete };
        if let Activation::Pinned(_) = activation {
            approve(args, saved.is_some(), &input, &planned, printer)?;
        }
        let activated = async {
            match activation.is_active(args, live, &input).await? {
                true => Ok(()),
                false => activation.activate(args, live, &input, printer).await,
            }
        };
        within_deadline(deadline, activated).await?;
        let mut unhealthy = unhealthy(&input);
        let _ = tokio::time::timeout_at(deadline, explain_unhealthy(live, &mut unhealthy)).await;
        let exit = if unhealthy.is_empty() { exit } else { Exit::Incomplete };
        let reason = sole_reason(planned.held.iter().map(|held| Some(held.reason)));
        let reason = reason.filter(|_| unhealthy.is_empty());
        let report =
            Report { ended: Vec::new(), converged: Some(exit == Exit::Done), exit, reason, unhealthy };
        let report = report.with_consistent_exit();
        return show(args, &planned, &OriginalPlan::of(&input, &planned), &report, printer);
    }
    approve(args, saved.is_some(), &input, &planned, printer)?;
    let left = deadline.saturating_duration_since(Instant::now());
    let lock_timeout = left.min(Duration::from_secs(args.input.bounds.lock_timeout));
    let writer =
        within_deadline(deadline + GRACE, WriterLease::acquire(live, &input.rules.owner, lock_timeout))
            .await?;
    // The previous holder may have changed processes, or crashed: recover its steps and plan again.
    let ready = async {
        recover_with_lease(live, &input.rules.owner, deadline).await?;
        replan(args, saved.is_some(), live, &mut input, &mut planned).await?;
        activation.activate(args, live, &input, printer).await
    };
    if let Err(failure) = within_deadline(deadline, ready).await {
        writer.release(live).await;
        return Err(failure);
    }
    let before = OriginalPlan::of(&input, &planned);
    let (owner, begun) = (input.rules.owner.clone(), activation.history_entry(&input, &planned, &before));
    let working = async {
        let report = execute_plan(args, live, &mut input, &planned, deadline, writer.lost(), printer).await;
        let end = history_result(&report);
        writer.release(live).await;
        (report, end)
    };
    let report = history::record_run(&live.state, &owner, begun, working).await;
    show(args, &planned, &before, &report, printer)
}

/// Extra time after the deadline for the last writes.
const GRACE: Duration = Duration::from_secs(2);

/// Fails with exit code 5 if the target does not answer before the deadline. No step has started then.
async fn within_deadline<T>(
    deadline: Instant,
    asked: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::time::timeout_at(deadline, asked).await.unwrap_or_else(|_| {
        let message = "the target did not answer before the timeout: nothing was done";
        Err(Failure::new(Exit::TimedOut, message)
            .hint("check the target with `abide doctor`, or pass a longer --timeout"))
    })
}

/// Plans again with the current observed state. An approved plan must not have changed.
async fn replan(
    args: &ApplyArgs,
    saved: bool,
    live: &ConnectedTarget,
    input: &mut PlanInput,
    planned: &mut Plan,
) -> Result<(), Failure> {
    let steps = |plan: &Plan| -> Vec<String> {
        plan.steps().map(|step| format!("{} {} {}", step.instance, step.op, step.spec_side.word())).collect()
    };
    let approved = steps(planned);
    input.refresh_holds(live).await?;
    input.observe_again(live).await?;
    let mut current = input.plan();
    plan::locate(&mut current, input, &args.input.limits.limits());
    if steps(&current) != approved && (saved || !args.yes) {
        let message = "the observed state changed after the plan was shown: nothing was done";
        return Err(Failure::refused("StalePlan", message).hint("apply again, and review the new plan"));
    }
    check_budget(&current)?;
    *planned = current;
    Ok(())
}
