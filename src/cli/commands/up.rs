//! `abide up` and `abide down`: the local system, gateway and agent in one process.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::agent::{HostPolicy, JoinConfig, Supervisor, agent_name, run as serve_host, this_host};
use crate::cli::args::{LimitArgs, parse_switch};
use crate::cli::commands::manual::execute_steps;
use crate::cli::commands::plan::owner::owner as named;
use crate::cli::commands::serve::{RunningGateway, Signals, open_store};
use crate::cli::commands::watch as watch_over;
use crate::cli::commands::watch::source::WatchSource;
use crate::cli::local::{APP, Home};
use crate::cli::output::print::{Printer, count};
use crate::cli::status_server::{Notifiers, NotifyArgs, default_access};
use crate::cli::systemd::Systemd;
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::dashboard;
use crate::execute::manual::step;
use crate::execute::world::Observation;
use crate::gateway::Gateway;
use crate::gateway::auth::{Apps, Authenticator, Tokens};
use crate::gateway::middleware::Limits;
use crate::http::{ClientConfig, Reloadable, bind};
use crate::manifest;
use crate::model::{Desired, HostKey, InstanceKey, ObservedInstance, Op, Step};
use crate::store::Embedded;

/// Run the local system in the foreground: a gateway and an agent for this machine
///
/// With PATH it makes the manifests there true and keeps them so: a changed file is taken up, and what drifts is repaired; a status page is at the URL. Prints `ready URL` on stdout once it
/// answers. Ctrl-C ends it and leaves the processes running; the next `abide up` takes hold of them again.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide up manifests\n  abide up --as-host 0:127.0.0.1 --as-host 0:127.0.0.2"
)]
pub struct UpArgs {
    /// Manifests to make true: files or directories
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Address to listen on, on this machine
    #[arg(long, env = "ABIDE_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Host to answer for, as CLOUD:IP; may be given several times [default: 0:127.0.0.1]
    #[arg(long, env = "ABIDE_AS_HOST", value_name = "CLOUD:IP", value_delimiter = ',')]
    pub as_host: Vec<HostKey>,
    /// Seconds between two looks at a process's health_cmd and configuration files
    #[arg(long, env = "ABIDE_CHECK_SECS", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub check_secs: u64,
    /// Host policy: which users, namespaces and paths processes may have [default: /etc/abide/agent.yaml, if it exists]
    #[arg(long, env = "ABIDE_AGENT_POLICY", value_name = "FILE")]
    pub policy: Option<PathBuf>,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub tell: NotifyArgs,
    /// For whoever starts it on demand
    #[arg(long, hide = true, value_parser = parse_switch)]
    pub background: bool,
}

/// End the local system, leaving processes as they are
#[derive(Debug, clap::Args)]
pub struct DownArgs {
    /// Stop every process first
    #[arg(long, env = "ABIDE_STOP_PROCESSES", value_parser = parse_switch)]
    pub stop_processes: bool,
}

pub fn up(args: &UpArgs, printer: &Printer) -> Result<Exit, Failure> {
    if !args.listen.ip().is_loopback() {
        let message = format!("{} is not this machine alone: the local system has no TLS", args.listen);
        return Err(Failure::new(Exit::Usage, message)
            .hint("`abide serve` and `abide agent` are for several machines"));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(64)
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))?;
    runtime.block_on(run_until_stopped(args, printer))
}

async fn run_until_stopped(args: &UpArgs, printer: &Printer) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let usual = watch_over::ControllerArgs::with_defaults(owner(args)?);
    let mut signals = Signals::listen()?;
    let home = Home::find()?;
    home.create()?;
    let policy = HostPolicy::read(args.policy.as_deref()).map_err(failed)?;
    policy.log();
    let _served = loop {
        match home.acquire_server_lock()? {
            Some(served) => break served,
            None if args.background => return Ok(Exit::Done),
            None if let Some((pid, false)) = home.running_server() => {
                let message = format!("`abide up` runs already, as process {pid}");
                let hint = "end that one first, or give this one a folder of its own: ABIDE_HOME";
                return Err(Failure::new(Exit::Failed, message).hint(hint));
            }
            // One in the background is taken over: its processes go on, and are held by us from then on.
            None => {
                printer.info("taking over the local system that runs in the background");
                home.stop()?;
            }
        }
    };
    let (secret, token) = (home.secret("secret")?, home.secret("token")?);
    let apps = Apps::parse(&format!("apps: [{{code: {APP}, secret: {secret}}}]"))
        .map_err(|error| failed(error.to_string()))?;
    let tokens = Tokens::parse(&format!("* {token}\n")).map_err(|error| failed(error.to_string()))?;
    let keepers = Authenticator::new(Reloadable::fixed(apps), Reloadable::fixed(tokens));
    let socket =
        bind(args.listen).map_err(|error| failed(format!("cannot listen on {}: {error}", args.listen)))?;
    let store = open_store(&home.path("gateway"))?;
    let from = WatchSource::Paths { paths: args.paths.clone(), only_poll: false };
    let telling = match args.paths.is_empty() {
        true => None,
        false => Some(Notifiers::start(&args.tell, watch_over::controller_info(&from, &usual, "local"))?),
    };
    let state = Reloadable::fixed(store.clone());
    let beside = |gateway: &Arc<Gateway<Embedded>>, address| match &telling {
        None => Router::new(),
        Some(telling) => {
            let gateway = Arc::clone(gateway);
            let more: dashboard::ExtraMetrics = Box::new(move || {
                let gateway = Arc::clone(&gateway);
                Box::pin(async move { gateway.metrics_text().await })
            });
            dashboard::routes(telling.dashboard(default_access(address, printer), state, Some(more)))
        }
    };
    let gateway = RunningGateway::start(
        store,
        socket,
        None,
        keepers,
        Limits::default(),
        RunningGateway::DEFAULT_LIMITS,
        beside,
    )
    .await?;
    let url = format!("http://{}", gateway.address);
    let hosts = if args.as_host.is_empty() { vec![this_host()] } else { args.as_host.clone() };
    let agent = LocalAgent::start(&home, &url, hosts, Duration::from_secs(args.check_secs), policy).await?;
    home.write("address", &url)?;
    printer.data(&format!("ready {url}\n"));
    let systemd = Systemd::from_env();
    systemd.ready();
    let (stop, stopped) = watch::channel(false);
    let exit = {
        let living = run_controller(args, &usual, stopped, printer, telling.as_ref());
        tokio::pin!(living);
        let exit = tokio::select! {
            ended = &mut living => return ended.map(|()| Exit::Done),
            exit = signals.shutdown_signal() => exit,
            why = gateway.wait_for_failure() => return Err(failed(why)),
        };
        info!("stopping");
        systemd.stopping();
        // What was sent comes to its end.
        let _ = stop.send(true);
        living.await?;
        exit
    };
    let left = count_running().await;
    home.remove_address();
    if let Some(telling) = telling {
        telling.stop().await;
    }
    agent.stop().await;
    gateway.stop().await;
    if left > 0 && !args.background {
        let one = left == 1;
        let (s, are) = if one { ("", "is") } else { ("es", "are") };
        printer.info(&format!(
            "{left} process{s} {are} left running, and nobody guards {}: `abide up` guards them again, `abide down \
             --stop-processes` stops them",
            if one { "it" } else { "them" }
        ));
    }
    Ok(exit)
}

/// Whose set the manifests are, as `apply` would take them.
fn owner(args: &UpArgs) -> Result<Option<String>, Failure> {
    if args.paths.is_empty() {
        return Ok(None);
    }
    let config = std::env::var_os("ABIDE_CONFIG").map(PathBuf::from);
    let desired = manifest::load(&args.paths, &args.limits.limits()).desired;
    named(None, &desired, &TargetArgs { config, ..TargetArgs::local() })
}

/// Makes the manifests true and keeps them so, or only waits.
async fn run_controller(
    args: &UpArgs,
    usual: &watch_over::ControllerArgs,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    telling: Option<&Notifiers>,
) -> Result<(), Failure> {
    if let Some(telling) = telling
        && let Some(live) = TargetArgs::local().connect_local(LocalStart::Never)?
    {
        watch_over::run_with_defaults(&args.paths, &args.limits, usual, &live, stop, printer, telling).await;
        return Ok(());
    }
    let mut stop = stop;
    let _ = stop.wait_for(|stop| *stop).await;
    Ok(())
}

/// How many processes run.
async fn count_running() -> usize {
    let Ok(Some(live)) = TargetArgs::local().connect_local(LocalStart::Never) else { return 0 };
    let look = tokio::time::timeout(Duration::from_secs(2), live.observe_all()).await;
    let Ok(Ok(observed)) = look else { return 0 };
    observed.instances.values().filter(|seen| seen.running == Some(true)).count()
}

/// This machine's agent, in this process.
struct LocalAgent {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl LocalAgent {
    async fn start(
        home: &Home,
        url: &str,
        hosts: Vec<HostKey>,
        look_every: Duration,
        policy: HostPolicy,
    ) -> Result<LocalAgent, Failure> {
        let failed = |why: String| Failure::new(Exit::Failed, why);
        let folder = home.path("agent");
        crate::cli::commands::serve::private_folder(&folder)?;
        crate::cli::commands::serve::private_file(&folder.join("agent.db"))?;
        let (up, told) = mpsc::unbounded_channel();
        let table = Supervisor::open(&folder, look_every, policy, up)
            .await
            .map_err(|error| failed(error.to_string()))?;
        let joining = JoinConfig {
            url: url.to_owned(),
            token_file: home.path("token"),
            agent: agent_name(&folder).map_err(failed)?,
            hosts,
            calling: ClientConfig::default(),
        };
        let (stop, stopped) = watch::channel(false);
        let joined = Arc::new(tokio::sync::Notify::new());
        let ready = {
            let joined = Arc::clone(&joined);
            move || joined.notify_one()
        };
        let task = tokio::spawn(async move {
            if let Err(why) = serve_host(joining, table, told, ready, stopped).await {
                warn!(%why, "the agent ended");
            }
        });
        if tokio::time::timeout(Duration::from_secs(10), joined.notified()).await.is_err() {
            return Err(failed("the agent cannot join the gateway of its own machine".to_owned()));
        }
        Ok(LocalAgent { stop, task })
    }

    async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = tokio::time::timeout(Duration::from_secs(5), self.task).await;
    }
}

pub fn down(args: &DownArgs, printer: &Printer) -> Result<Exit, Failure> {
    let home = Home::find()?;
    if args.stop_processes && home.path("gateway").is_dir() {
        // Whoever watches over manifests there would bring back what is stopped: another one does the stopping.
        home.stop()?;
        home.start()?;
        let runtime = runtime()?;
        if let Some(live) = TargetArgs::local().connect_local(LocalStart::Never)? {
            let left = runtime.block_on(stop_all(&live, printer))?;
            if left > 0 {
                let message =
                    format!("{} could not be stopped: the local system stays", count(left, "process"));
                return Err(
                    Failure::new(Exit::Failed, message).hint("`abide kill NS/NAME` ends one by force")
                );
            }
        }
    }
    match home.stop()? {
        true => printer.info("the local system has ended"),
        false => printer.info("there is no local system"),
    }
    Ok(Exit::Done)
}

/// How long an agent may take to tell of everything that it found.
const AGENT_REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// How long everything may take to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);

/// Stops everything that runs. How many still do.
/// Maximum wait for operations in flight: the rest of a start's check under the next agent is shorter.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits for operations in flight: a first start that is still being checked is registered only when it ends.
async fn wait_for_operations(live: &ConnectedTarget, printer: &Printer) -> Result<(), Failure> {
    let begin = Instant::now();
    let mut is_announced = false;
    loop {
        let tasks = live.abide()?.tasks().await.map_err(|fault| live.failure(&fault))?;
        let in_flight = tasks.iter().filter(|task| task["done"].as_u64() < task["rows"].as_u64()).count();
        if in_flight == 0 || begin.elapsed() > IN_FLIGHT_TIMEOUT {
            return Ok(());
        }
        if !std::mem::replace(&mut is_announced, true) {
            printer.info(&format!("waiting for {} in flight", count(in_flight, "operation")));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn stop_all(live: &ConnectedTarget, printer: &Printer) -> Result<usize, Failure> {
    let nothing = Desired::default();
    let everything = || live.observe_for(&nothing, Some(BTreeSet::new()));
    wait_for_operations(live, printer).await?;
    let mut world = everything().await?;
    // An agent that has just come up has yet to tell of what it found running.
    let begin = Instant::now();
    let runs = |world: &Observation| world.observed.instances.values().any(|seen| seen.running == Some(true));
    while !runs(&world) && begin.elapsed() < AGENT_REPORT_TIMEOUT {
        tokio::time::sleep(Duration::from_millis(50)).await;
        world = everything().await?;
    }
    let step = |(key, seen): (&InstanceKey, &ObservedInstance)| {
        let op = match (seen.running, seen.hosted) {
            (Some(true), _) => Op::Stop,
            (_, Some(true)) => Op::Unsupervise,
            _ => return None,
        };
        Some(step(op, key, seen, &world, &live.caps()))
    };
    let steps: Vec<Step> = world.observed.instances.iter().filter_map(step).collect();
    if steps.is_empty() {
        return Ok(0);
    }
    let many = steps.iter().filter(|step| step.op == Op::Stop).count();
    if many > 0 {
        printer.info(&format!("stopping {}", count(many, "process")));
    }
    Ok(execute_steps(steps, live, &world.observed, STOP_TIMEOUT, printer).await)
}
