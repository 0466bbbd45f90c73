//! `abide down`: stops the local system, and with `--stop-processes` every process first.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::cli::args::parse_switch;
use crate::cli::commands::manual::operate::print_results;
use crate::cli::commands::up::{count_left_running, count_running, unsupervised_message};
use crate::cli::local::Home;
use crate::cli::output::print::{Printer, count};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::engine::manual::{execute_steps, step};
use crate::model::{Desired, InstanceKey, ObservedInstance, Op, Step};
use crate::observe::Observation;

/// Stop the local system; its processes keep running
#[derive(Debug, clap::Args)]
pub struct DownArgs {
    /// Stop all processes first
    #[arg(long, env = "ABIDE_STOP_PROCESSES", value_parser = parse_switch)]
    pub stop_processes: bool,
}

pub fn run(args: &DownArgs, printer: &Printer) -> Result<Exit, Failure> {
    let home = Home::find()?;
    if args.stop_processes && home.path("gateway").is_dir() {
        // The local system that ends here names what happens to its processes.
        let _stop = home.record_stop_of_processes()?;
        // A controller of `abide up PATH` would start stopped processes again, so a new local system stops them.
        home.stop()?;
        home.start()?;
        let runtime = runtime()?;
        if let Some(live) = TargetArgs::local().connect_local(LocalStart::Never)? {
            let running = runtime.block_on(stop_all(&live, printer))?;
            if running > 0 {
                let message =
                    format!("cannot stop {}: the local system keeps running", count(running, "process"));
                return Err(Failure::new(Exit::Failed, message).hint("`abide kill NS/NAME` kills a process"));
            }
        }
    }
    let running = match args.stop_processes {
        true => 0,
        false => runtime()?.block_on(count_running()),
    };
    match home.stop()? {
        true if running > 0 => {
            printer.info(&format!("local system stopped; {}", unsupervised_message(running)));
        }
        true => printer.info("local system stopped"),
        false => {
            let left = runtime()?.block_on(count_left_running(&home));
            let also = if left > 0 { format!("; {}", unsupervised_message(left)) } else { String::new() };
            printer.info(&format!("the local system is not running{also}"));
        }
    }
    Ok(Exit::Done)
}

/// Maximum wait for the first report of an agent that has just started.
const AGENT_REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Time limit for stopping all processes.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum wait for operations in flight: the rest of a start's check under the next agent is shorter.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits for operations in flight: a first start that is still being checked is registered only when it ends.
async fn wait_for_operations(live: &ConnectedTarget, printer: &Printer) -> Result<(), Failure> {
    let begin = Instant::now();
    let mut is_announced = false;
    loop {
        let tasks = live.abide()?.tasks().await.map_err(|fault| live.failure(&fault))?;
        let in_flight = tasks.iter().filter(|task| task.done < task.rows).count();
        if in_flight == 0 || begin.elapsed() > IN_FLIGHT_TIMEOUT {
            return Ok(());
        }
        if !std::mem::replace(&mut is_announced, true) {
            printer.info(&format!("waiting for {} in flight", count(in_flight, "operation")));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Stops every running process. Returns the number of processes that still run.
async fn stop_all(live: &ConnectedTarget, printer: &Printer) -> Result<usize, Failure> {
    let desired = Desired::default();
    let observe = || live.observe_for(&desired, Some(BTreeSet::new()));
    wait_for_operations(live, printer).await?;
    let mut world = observe().await?;
    // An agent that has just started has not reported its processes yet.
    let begin = Instant::now();
    let runs = |world: &Observation| world.observed.instances.values().any(|seen| seen.running == Some(true));
    while !runs(&world) && begin.elapsed() < AGENT_REPORT_TIMEOUT {
        tokio::time::sleep(Duration::from_millis(50)).await;
        world = observe().await?;
    }
    let step = |(key, seen): (&InstanceKey, &ObservedInstance)| {
        let op = match (seen.running, seen.hosted) {
            (Some(true), _) => Op::Stop,
            (_, Some(true)) => Op::Unsupervise,
            _ => return None,
        };
        Some(step(op, key, seen, &world))
    };
    let steps: Vec<Step> = world.observed.instances.iter().filter_map(step).collect();
    if steps.is_empty() {
        return Ok(0);
    }
    let many = steps.iter().filter(|step| step.op == Op::Stop).count();
    if many > 0 {
        printer.info(&format!("stopping {}", count(many, "process")));
    }
    let deadline = tokio::time::Instant::now() + STOP_TIMEOUT;
    let results = execute_steps(steps, live, &world.observed, deadline).await;
    Ok(print_results(&results, printer))
}
