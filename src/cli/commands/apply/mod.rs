//! `abide apply`: plan, confirm, execute, verify.

mod approve;
mod config_files;
mod handler;
mod other_controller;
mod plan_file;
mod progress;
mod report;
mod signed_plan;

pub use config_files::check_config_files;
pub use plan_file::is_saved_plan;
pub use signed_plan::check_controller;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use self::handler::ConsoleHandler;
use self::plan_file::{load_plan_file, saved_plan};
use self::report::{ReportView, check_writable, show};
use crate::access::AccessRole;
use crate::cli::args::parse_switch;
use crate::cli::commands::plan::args::{InputArgs, PlanForm, duration};
use crate::cli::commands::plan::input::{DesiredInput, Prefetch};
use crate::cli::commands::plan::json as plan_json;
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::print::Printer;
use crate::cli::target::{ConnectedTarget, runtime};
use crate::cli::{Exit, Failure};
use crate::control::spec_history::HistorySearch;
use crate::engine::pin::Pin;
use crate::engine::{self, Activation, ApplyRequest, ExecutionLimits, PlanRequest, SavedPlan};
use crate::source::git::work_tree;

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
    /// Apply although a controller of the same owner follows another source, and would undo it
    #[arg(long, env = "ABIDE_FORCE", value_parser = parse_switch)]
    pub force: bool,
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
    let mut wanted = DesiredInput::read(&args.input, printer)?;
    if wanted.is_without_files() {
        let message = "no manifests found: nothing was applied";
        return Err(Failure::refused("EmptySet", message)
            .hint("a process is removed by `state: absent`, or by --prune with the manifests that remain"));
    }
    let signed_by = signed_plan::check(wanted.rules(), &args.input.target.target, saved)?;
    let live = match early {
        Some(early) => early.join(),
        None => Arc::new(args.input.target.connect_or_start(printer)?),
    };
    let checking = async {
        live.check_desired(wanted.desired(), wanted.rules(), AccessRole::Operate).await?;
        other_controller::check(&live, &wanted.rules().owner, &args.input.paths, args.force, printer).await
    };
    // A target that does not answer is reported by the apply itself.
    if let Ok(checked) = tokio::time::timeout_at(deadline, checking).await {
        checked?;
    }
    let (inventories, owner) = (wanted.take_inventories(), wanted.rules().owner.clone());
    let plan = wanted.request(&args.input, Some(work_tree::of_paths(&args.input.paths)));
    let saved = saved.map(|plan| (SavedPlan { signed_by, ..saved_plan(plan) }, plan));
    let exit = apply_revision(args, saved, plan, Activation::New, &live, deadline, printer).await?;
    // A refused or declined plan leaves the last good hosts as they were.
    if let Err(error) = inventories.store_new(&live.state, &owner).await {
        printer.warning(&format!("cannot store the hosts of inventories as the last good ones: {error}"));
    }
    Ok(exit)
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
    signed_plan::check(wanted.rules(), &live.name, None)?;
    // A rollback has no paths, and no new source.
    let shown_source = format!("rollback to {}", short_id(pin.revision.as_str()));
    let plan = PlanRequest { shown_source, activates: false, ..wanted.request(&args.input, None) };
    apply_revision(args, None, plan, Activation::Pinned(pin), live, deadline, printer).await
}

/// Applies one process of an earlier revision. The active revision stays.
pub async fn apply_unrecorded(
    args: &ApplyArgs,
    wanted: DesiredInput,
    live: &ConnectedTarget,
    shown_source: String,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.going.timeout);
    signed_plan::check(wanted.rules(), &live.name, None)?;
    let plan = PlanRequest { shown_source, activates: false, ..wanted.request(&args.input, None) };
    apply_revision(args, None, plan, Activation::Nothing, live, deadline, printer).await
}

async fn apply_revision(
    args: &ApplyArgs,
    saved: Option<(SavedPlan, &Value)>,
    plan: PlanRequest<HistorySearch>,
    activation: Activation,
    live: &ConnectedTarget,
    deadline: Instant,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let (stop, stopped) = watch::channel(None);
    let (saved, document) = saved.unzip();
    let mut handler = ConsoleHandler::new(args, document, stop, printer);
    let request = ApplyRequest {
        plan,
        activation,
        saved,
        accept_changed_plan: args.yes,
        limits: ExecutionLimits {
            deadline,
            lock_timeout: args.input.bounds.lock_timeout,
            max_parallel: args.going.max_parallel as usize,
            verify: !args.going.no_wait,
        },
        check: if live.name == "local" { check_config_files } else { |_| None },
        stop: stopped,
    };
    match engine::apply(request, live, &mut handler).await {
        Ok(report) => {
            let original = handler.original_plan();
            let (report, plan) = ReportView::of(report, live, deadline).await;
            show(args, &plan, original, &report, printer)
        }
        Err(error) => Err(handler.declined().unwrap_or_else(|| live.apply_failure(&error))),
    }
}
