//! `abide up` and `abide down`: the local system, gateway and agent in one process.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use super::args::{LimitArgs, switch};
use super::by_hand::carry_out;
use super::listen::{TellArgs, Telling, own_access};
use super::local::{APP, Home};
use super::plan::owner::owner as named;
use super::print::{Printer, count};
use super::serve::{Signals, Standing, open};
use super::systemd::Systemd;
use super::target::{Live, Start, TargetArgs, runtime};
use super::watch as watch_over;
use super::watch_source::Watched;
use super::{Exit, Failure};
use crate::agent::{HostPolicy, Joining, Table, own_name, run as serve_host, this_host};
use crate::dashboard;
use crate::execute::by_hand::step;
use crate::execute::world::World;
use crate::gateway::Gateway;
use crate::gateway::auth::{Apps, Keepers, Tokens};
use crate::gateway::http::Limits;
use crate::http::{Calling, Reloaded, bind};
use crate::manifest;
use crate::model::{Desired, HostKey, InstanceKey, Op, Seen, Step};
use crate::store::Embedded;

/// Run the local system in the foreground: a gateway and an agent for this machine
///
/// With PATH it makes the manifests there true and keeps them so: a changed file is taken up, and what drifts is repaired; a status page is at the URL. Prints `ready URL` on stdout once it
/// answers. Ctrl-C ends it and leaves the processes running; the next `abide up` takes hold of them again.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide up manifests\n  abide up --as-host 0:127.0.0.1 --as-host 0:127.0.0.2"
)]
pub struct Up {
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
    pub tell: TellArgs,
    /// For whoever starts it on demand
    #[arg(long, hide = true, value_parser = switch)]
    pub background: bool,
}

/// End the local system, leaving processes as they are
#[derive(Debug, clap::Args)]
pub struct Down {
    /// Stop every process first
    #[arg(long, env = "ABIDE_STOP_PROCESSES", value_parser = switch)]
    pub stop_processes: bool,
}

pub fn up(args: &Up, printer: &Printer) -> Result<Exit, Failure> {
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
    runtime.block_on(stand(args, printer))
}

async fn stand(args: &Up, printer: &Printer) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let usual = watch_over::How::usual(owner(args)?);
    let mut signals = Signals::listen()?;
    let home = Home::find()?;
    home.make()?;
    let policy = HostPolicy::read(args.policy.as_deref()).map_err(failed)?;
    policy.log();
    let _served = loop {
        match home.serve()? {
            Some(served) => break served,
            None if args.background => return Ok(Exit::Done),
            None if let Some((pid, false)) = home.served() => {
                let message = format!("`abide up` runs already, as process {pid}");
                let hint = "end that one first, or give this one a folder of its own: ABIDE_HOME";
                return Err(Failure::new(Exit::Failed, message).hint(hint));
            }
            // One in the background is taken over: its processes go on, and are held by us from then on.
            None => {
                printer.remark("taking over the local system that runs in the background");
                home.end()?;
            }
        }
    };
    let (secret, token) = (home.secret("secret")?, home.secret("token")?);
    let apps = Apps::parse(&format!("apps: [{{code: {APP}, secret: {secret}}}]"))
        .map_err(|error| failed(error.to_string()))?;
    let tokens = Tokens::parse(&format!("* {token}\n")).map_err(|error| failed(error.to_string()))?;
    let keepers = Keepers::new(Reloaded::fixed(apps), Reloaded::fixed(tokens));
    let socket =
        bind(args.listen).map_err(|error| failed(format!("cannot listen on {}: {error}", args.listen)))?;
    let store = open(&home.path("gateway"))?;
    let from = Watched::Paths { paths: args.paths.clone(), only_poll: false };
    let telling = match args.paths.is_empty() {
        true => None,
        false => Some(Telling::begin(&args.tell, watch_over::subject(&from, &usual, "local"))?),
    };
    let state = Reloaded::fixed(store.clone());
    let beside = |gateway: &Arc<Gateway<Embedded>>, address| match &telling {
        None => Router::new(),
        Some(telling) => {
            let gateway = Arc::clone(gateway);
            let more: dashboard::More = Box::new(move || {
                let gateway = Arc::clone(&gateway);
                Box::pin(async move { gateway.metrics_text().await })
            });
            dashboard::routes(telling.dashboard(own_access(address, printer), state, Some(more)))
        }
    };
    let gateway =
        Standing::begin(store, socket, None, keepers, Limits::default(), Standing::USUAL, beside).await?;
    let url = format!("http://{}", gateway.address);
    let hosts = if args.as_host.is_empty() { vec![this_host()] } else { args.as_host.clone() };
    let agent = Agent::begin(&home, &url, hosts, Duration::from_secs(args.check_secs), policy).await?;
    home.write("address", &url)?;
    printer.data(&format!("ready {url}\n"));
    let systemd = Systemd::here();
    systemd.ready();
    let (stop, stopped) = watch::channel(false);
    let exit = {
        let living = live(args, &usual, stopped, printer, telling.as_ref());
        tokio::pin!(living);
        let exit = tokio::select! {
            ended = &mut living => return ended.map(|()| Exit::Done),
            exit = signals.asked_to_stop() => exit,
            why = gateway.broken() => return Err(failed(why)),
        };
        info!("stopping");
        systemd.stopping();
        // What was sent comes to its end.
        let _ = stop.send(true);
        living.await?;
        exit
    };
    let left = running().await;
    home.forget_address();
    if let Some(telling) = telling {
        telling.end().await;
    }
    agent.end().await;
    gateway.end().await;
    if left > 0 && !args.background {
        let one = left == 1;
        let (s, are) = if one { ("", "is") } else { ("es", "are") };
        printer.remark(&format!(
            "{left} process{s} {are} left running, and nobody guards {}: `abide up` guards them again, `abide down \
             --stop-processes` stops them",
            if one { "it" } else { "them" }
        ));
    }
    Ok(exit)
}

/// Whose set the manifests are, as `apply` would take them.
fn owner(args: &Up) -> Result<Option<String>, Failure> {
    if args.paths.is_empty() {
        return Ok(None);
    }
    let config = std::env::var_os("ABIDE_CONFIG").map(PathBuf::from);
    let desired = manifest::load(&args.paths, &args.limits.limits()).desired;
    named(None, &desired, &TargetArgs { config, ..TargetArgs::local() })
}

/// Makes the manifests true and keeps them so, or only waits.
async fn live(
    args: &Up,
    usual: &watch_over::How,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    telling: Option<&Telling>,
) -> Result<(), Failure> {
    if let Some(telling) = telling
        && let Some(live) = TargetArgs::local().here(Start::Never)?
    {
        watch_over::usually(&args.paths, &args.limits, usual, &live, stop, printer, telling).await;
        return Ok(());
    }
    let mut stop = stop;
    let _ = stop.wait_for(|stop| *stop).await;
    Ok(())
}

/// How many processes run.
async fn running() -> usize {
    let Ok(Some(live)) = TargetArgs::local().here(Start::Never) else { return 0 };
    let look = tokio::time::timeout(Duration::from_secs(2), live.everything()).await;
    let Ok(Ok(observed)) = look else { return 0 };
    observed.instances.values().filter(|seen| seen.running == Some(true)).count()
}

/// This machine's agent, in this process.
struct Agent {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Agent {
    async fn begin(
        home: &Home,
        url: &str,
        hosts: Vec<HostKey>,
        look_every: Duration,
        policy: HostPolicy,
    ) -> Result<Agent, Failure> {
        let failed = |why: String| Failure::new(Exit::Failed, why);
        let folder = home.path("agent");
        super::serve::private_folder(&folder)?;
        super::serve::private_file(&folder.join("agent.db"))?;
        let (up, told) = mpsc::unbounded_channel();
        let table =
            Table::open(&folder, look_every, policy, up).await.map_err(|error| failed(error.to_string()))?;
        let joining = Joining {
            url: url.to_owned(),
            token_file: home.path("token"),
            agent: own_name(&folder).map_err(failed)?,
            hosts,
            calling: Calling::default(),
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
        Ok(Agent { stop, task })
    }

    async fn end(self) {
        let _ = self.stop.send(true);
        let _ = tokio::time::timeout(Duration::from_secs(5), self.task).await;
    }
}

pub fn down(args: &Down, printer: &Printer) -> Result<Exit, Failure> {
    let home = Home::find()?;
    if args.stop_processes && home.path("gateway").is_dir() {
        // Whoever watches over manifests there would bring back what is stopped: another one does the stopping.
        home.end()?;
        home.start()?;
        let runtime = runtime()?;
        if let Some(live) = TargetArgs::local().here(Start::Never)? {
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
    match home.end()? {
        true => printer.remark("the local system has ended"),
        false => printer.remark("there is no local system"),
    }
    Ok(Exit::Done)
}

/// How long an agent may take to tell of everything that it found.
const TO_TELL: Duration = Duration::from_millis(500);

/// How long everything may take to end.
const TO_STOP: Duration = Duration::from_secs(120);

/// Stops everything that runs. How many still do.
/// Maximum wait for operations in flight: the rest of a start's check under the next agent is shorter.
const TO_FINISH: Duration = Duration::from_secs(20);

/// Waits for operations in flight: a first start that is still being checked is registered only when it ends.
async fn wait_for_operations(live: &Live, printer: &Printer) -> Result<(), Failure> {
    let begin = Instant::now();
    let mut is_announced = false;
    loop {
        let tasks = live.abide()?.tasks().await.map_err(|fault| live.failure(&fault))?;
        let in_flight = tasks.iter().filter(|task| task["done"].as_u64() < task["rows"].as_u64()).count();
        if in_flight == 0 || begin.elapsed() > TO_FINISH {
            return Ok(());
        }
        if !std::mem::replace(&mut is_announced, true) {
            printer.remark(&format!("waiting for {} in flight", count(in_flight, "operation")));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn stop_all(live: &Live, printer: &Printer) -> Result<usize, Failure> {
    let nothing = Desired::default();
    let everything = || live.world(&nothing, Some(BTreeSet::new()));
    wait_for_operations(live, printer).await?;
    let mut world = everything().await?;
    // An agent that has just come up has yet to tell of what it found running.
    let begin = Instant::now();
    let runs = |world: &World| world.observed.instances.values().any(|seen| seen.running == Some(true));
    while !runs(&world) && begin.elapsed() < TO_TELL {
        tokio::time::sleep(Duration::from_millis(50)).await;
        world = everything().await?;
    }
    let step = |(key, seen): (&InstanceKey, &Seen)| {
        let op = match (seen.running, seen.hosted) {
            (Some(true), _) => Op::Stop,
            (_, Some(true)) => Op::Unhost,
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
        printer.remark(&format!("stopping {}", count(many, "process")));
    }
    Ok(carry_out(steps, live, &world.observed, TO_STOP, printer).await)
}
