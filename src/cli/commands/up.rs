//! `abide up`: the local system, with gateway, agent and optional controller in one process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::agent::{
    AgentIntervals, HostPolicy, JoinConfig, Supervisor, agent_name, run as serve_host, this_host,
};
use crate::cli::args::{LimitArgs, parse_switch};
use crate::cli::commands::plan::owner::owner as resolve_owner;
use crate::cli::commands::serve::{RunningGateway, Signals, open_audit, open_store};
use crate::cli::commands::watch as watch_over;
use crate::cli::commands::watch::source::WatchSource;
use crate::cli::key_file::KeyFileArgs;
use crate::cli::local::{APP, Home, ServerLock};
use crate::cli::output::print::{Printer, count};
use crate::cli::people::{PeopleArgs, read_users};
use crate::cli::status_server::{Notifiers, NotifyArgs, default_access, with_people};
use crate::cli::systemd::Systemd;
use crate::cli::target::{LocalStart, TargetArgs};
use crate::cli::{Exit, Failure};
use crate::dashboard::{self, AccessControl};
use crate::error_chain::chain;

use crate::gateway::audit::AuditSettings;
use crate::gateway::auth::{Apps, Authenticator, Tokens};
use crate::gateway::middleware::Limits;
use crate::gateway::{FleetTrust, Gateway};
use crate::http::{ClientConfig, Reloadable, bind, watch_file};
use crate::manifest;
use crate::model::HostKey;
use crate::store::{Embedded, KeySource};

/// Run the local system: a gateway and an agent in the foreground
///
/// With PATH, also reconciles the manifests there: applies changed files, repairs drift, and serves a status page at the
/// URL. Prints `ready URL` on stdout when it accepts requests. Ctrl-C stops it and leaves the processes running; the next
/// `abide up` adopts them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide up manifests\n  abide up --as-host 0:127.0.0.1 --as-host 0:127.0.0.2"
)]
pub struct UpArgs {
    /// Manifests to reconcile: files or directories
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Loopback address and port to listen on
    #[arg(long, env = "ABIDE_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Host that the agent serves, as CLOUD:IP (repeatable) [default: 0:127.0.0.1]
    #[arg(long, env = "ABIDE_AS_HOST", value_name = "CLOUD:IP", value_delimiter = ',')]
    pub as_host: Vec<HostKey>,
    /// Seconds between checks of health_cmd and configuration files
    #[arg(long, env = "ABIDE_CHECK_SECS", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub check_secs: u64,
    /// Host policy: allowed users, namespaces, paths and probe targets of processes [default: /etc/abide/agent.yaml, if it exists]
    #[arg(long, env = "ABIDE_AGENT_POLICY", value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Policy for the manifests: allowed namespaces, hosts, users and paths, and budgets. No manifest can widen it
    #[arg(long, env = "ABIDE_POLICY", value_name = "FILE")]
    pub manifest_policy: Option<PathBuf>,
    #[command(flatten)]
    pub keys: KeyFileArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub tell: NotifyArgs,
    #[command(flatten)]
    pub people: PeopleArgs,
    /// Set by verbs that start the local system on demand
    #[arg(long, hide = true, value_parser = parse_switch)]
    pub background: bool,
}

pub fn run(args: &UpArgs, printer: &Printer) -> Result<Exit, Failure> {
    if !args.listen.ip().is_loopback() {
        let message = format!("refusing to listen on {}: the local system has no TLS", args.listen);
        return Err(Failure::new(Exit::Usage, message)
            .hint("listen on a loopback address, or use `abide serve` and `abide agent` for several hosts"));
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
    let mut controller = watch_over::ControllerArgs::with_defaults(owner(args)?);
    if !args.paths.is_empty() {
        controller.bounds.policy.clone_from(&args.manifest_policy);
    }
    // An invalid policy ends it before anything starts.
    controller.bounds.read_policy()?;
    let mut signals = Signals::listen()?;
    let home = Home::find()?;
    home.create()?;
    let policy = HostPolicy::read(args.policy.as_deref()).map_err(|error| failed(chain(&error)))?;
    policy.log();
    let Some(_served) = server_lock(&home, args.background, printer)? else { return Ok(Exit::Done) };
    let authenticator = local_authenticator(&home, &args.people)?;
    let socket =
        bind(args.listen).map_err(|error| failed(format!("cannot listen on {}: {error}", args.listen)))?;
    // The whole folder is the data of the local system.
    let keys = args.keys.source(&home.path("."))?;
    let store = open_store(&home.path("gateway"), &args.keys)?;
    let audit = open_audit(&home.path("gateway"), AuditSettings::default(), &store).await?;
    let notifiers = start_notifiers(args, &controller)?;
    let state = Reloadable::fixed(store.clone());
    let page_access = || with_people(default_access(args.listen, printer), &args.people);
    let access = notifiers.as_ref().map(|_| page_access()).transpose()?;
    let routes = |gateway: &Arc<Gateway<Embedded>>, address| match notifiers.as_ref().zip(access) {
        None => Router::new(),
        Some((notifiers, access)) => {
            dashboard_routes(notifiers, gateway, state, AccessControl { listen: address, ..access })
        }
    };
    let gateway = RunningGateway::start(
        (store, audit),
        socket,
        (None, FleetTrust::Disabled),
        authenticator,
        Limits::default(),
        RunningGateway::DEFAULT_LIMITS,
        routes,
    )
    .await?;
    let url = format!("http://{}", gateway.address);
    let hosts = if args.as_host.is_empty() { vec![this_host()] } else { args.as_host.clone() };
    home.add_served_hosts(&hosts)?;
    let intervals = AgentIntervals::with_checks(Duration::from_secs(args.check_secs));
    let agent = LocalAgent::start(&home, (&url, hosts), &keys, intervals, policy).await?;
    home.write("address", &url)?;
    printer.data(&format!("ready {url}\n"));
    let systemd = Systemd::from_env();
    systemd.ready();
    let (stop, stopped) = watch::channel(false);
    let exit = {
        let controller = run_controller(args, &controller, stopped, printer, notifiers.as_ref());
        tokio::pin!(controller);
        let exit = tokio::select! {
            ended = &mut controller => return ended.map(|()| Exit::Done),
            exit = signals.shutdown_signal() => exit,
            why = gateway.wait_for_failure() => return Err(failed(why)),
        };
        info!("stopping");
        systemd.stopping();
        // Operations in flight finish first.
        let _ = stop.send(true);
        controller.await?;
        exit
    };
    let running = count_running().await;
    home.remove_address();
    if let Some(notifiers) = notifiers {
        notifiers.stop().await;
    }
    agent.stop().await;
    gateway.stop().await;
    if running > 0 && !args.background {
        printer.info(&end_message(&home, running));
    }
    Ok(exit)
}

/// The notifiers of the controller. `None`: no manifests are followed.
fn start_notifiers(
    args: &UpArgs,
    controller: &watch_over::ControllerArgs,
) -> Result<Option<Notifiers>, Failure> {
    if args.paths.is_empty() {
        return Ok(None);
    }
    let from = WatchSource::Paths { paths: args.paths.clone(), only_poll: false };
    let routes = configured().config()?.notify()?;
    Notifiers::start(&args.tell, routes, watch_over::controller_info(&from, controller, "local")).map(Some)
}

/// The lock of the local system. `None`: another system runs, and this one was started in the background.
fn server_lock(home: &Home, background: bool, printer: &Printer) -> Result<Option<ServerLock>, Failure> {
    loop {
        match home.acquire_server_lock()? {
            Some(served) => return Ok(Some(served)),
            None if background => return Ok(None),
            None if let Some((pid, false)) = home.running_server() => {
                let message = format!("`abide up` is already running as process {pid}");
                let hint = "stop that process first, or set ABIDE_HOME to another folder";
                return Err(Failure::new(Exit::Failed, message).hint(hint));
            }
            // A background system is replaced: its processes keep running, and this agent adopts them.
            None => {
                printer.info("taking over the local system that runs in the background");
                home.stop()?;
            }
        }
    }
}

/// Accepts the credentials that are stored in the folder of the local system, and people of a users file.
fn local_authenticator(home: &Home, people: &PeopleArgs) -> Result<Authenticator, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let (secret, token) = (home.secret("secret")?, home.secret("token")?);
    let apps = Apps::parse(&format!("apps: [{{code: {APP}, secret: {secret}}}]"))
        .map_err(|error| failed(error.to_string()))?;
    let tokens = Tokens::parse(&format!("* {token}\n")).map_err(|error| failed(error.to_string()))?;
    let apps = match people.users.clone() {
        None => Reloadable::fixed(apps),
        Some(file) => {
            let read = move || read_users(&file).map(|people| apps.clone().with_people(people));
            let files = people.users.iter().cloned().collect();
            watch_file(files, read).map_err(|error| failed(format!("--users: {}", chain(&error))))?
        }
    };
    Ok(Authenticator::new(apps, Reloadable::fixed(tokens)).with_proxy(people.proxy()))
}

/// What happens to the processes of a local system that ends.
fn end_message(home: &Home, running: usize) -> String {
    match home.stops_processes() {
        true => format!("`abide down --stop-processes` stops {}", count(running, "process")),
        false => unsupervised_message(running),
    }
}

pub fn unsupervised_message(running: usize) -> String {
    let (runs, them) = if running == 1 { ("keeps", "it") } else { ("keep", "them") };
    format!(
        "{} {runs} running unsupervised: `abide up` supervises {them} again, `abide down --stop-processes` stops {them}",
        count(running, "process")
    )
}

/// The status page and API of the controller, with the gateway's metrics.
fn dashboard_routes(
    notifiers: &Notifiers,
    gateway: &Arc<Gateway<Embedded>>,
    state: Reloadable<Embedded>,
    access: AccessControl,
) -> Router {
    let gateway = Arc::clone(gateway);
    let metrics: dashboard::ExtraMetrics = Box::new(move || {
        let gateway = Arc::clone(&gateway);
        Box::pin(async move { gateway.metrics_text().await })
    });
    dashboard::routes(notifiers.dashboard(access, state, Some(metrics)))
}

/// The owner of the manifests, resolved as `apply` does.
fn owner(args: &UpArgs) -> Result<Option<String>, Failure> {
    if args.paths.is_empty() {
        return Ok(None);
    }
    let desired = manifest::load(&args.paths, &args.limits.limits()).desired;
    resolve_owner(None, &desired, &configured())
}

/// The local system, with the config file.
fn configured() -> TargetArgs {
    let config = std::env::var_os("ABIDE_CONFIG").map(PathBuf::from);
    TargetArgs { config, ..TargetArgs::local() }
}

/// Runs the controller until it is stopped. Without manifests it only waits.
async fn run_controller(
    args: &UpArgs,
    controller: &watch_over::ControllerArgs,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    notifiers: Option<&Notifiers>,
) -> Result<(), Failure> {
    if let Some(notifiers) = notifiers
        && let Some(live) = TargetArgs::local().connect_local(LocalStart::Never)?
    {
        return watch_over::run_with_defaults(
            &args.paths,
            &args.limits,
            controller,
            &live,
            stop,
            printer,
            notifiers,
        )
        .await;
    }
    let mut stop = stop;
    let _ = stop.wait_for(|stop| *stop).await;
    Ok(())
}

/// The number of running processes; 0 if the local system does not answer.
pub async fn count_running() -> usize {
    let Ok(Some(live)) = TargetArgs::local().connect_local(LocalStart::Never) else { return 0 };
    let observed = tokio::time::timeout(Duration::from_secs(2), live.observe_all()).await;
    let Ok(Ok(observed)) = observed else { return 0 };
    observed.instances.values().filter(|seen| seen.running == Some(true)).count()
}

/// The number of processes that the local system left running when it ended.
pub async fn count_left_running(home: &Home) -> usize {
    let folder = home.path("agent");
    if !folder.join("agent.db").is_file() {
        return 0;
    }
    let Ok(keys) = KeyFileArgs::from_env().source(&home.path(".")) else { return 0 };
    crate::agent::left_running(&folder, &keys).await.map_or(0, |(running, _)| running)
}

/// The agent of this machine, in this process.
struct LocalAgent {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl LocalAgent {
    async fn start(
        home: &Home,
        (url, hosts): (&str, Vec<HostKey>),
        keys: &KeySource,
        intervals: AgentIntervals,
        policy: HostPolicy,
    ) -> Result<LocalAgent, Failure> {
        let failed = |why: String| Failure::new(Exit::Failed, why);
        let folder = home.path("agent");
        crate::cli::commands::serve::private_folder(&folder)?;
        crate::cli::commands::serve::private_file(&folder.join("agent.db"))?;
        let (reports, outgoing) = mpsc::unbounded_channel();
        let supervisor = Supervisor::open(&folder, keys, intervals, policy, reports)
            .await
            .map_err(|error| failed(error.to_string()))?;
        let joining = JoinConfig {
            url: url.to_owned(),
            token_file: Some(home.path("token")),
            folder: folder.clone(),
            agent: agent_name(&folder).map_err(|error| failed(chain(&error)))?,
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
            if let Err(why) = serve_host(joining, supervisor, outgoing, ready, stopped).await {
                warn!(%why, "the local agent stopped");
            }
        });
        if tokio::time::timeout(Duration::from_secs(10), joined.notified()).await.is_err() {
            return Err(failed("the local agent did not join the local gateway within 10 s".to_owned()));
        }
        Ok(LocalAgent { stop, task })
    }

    async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = tokio::time::timeout(Duration::from_secs(5), self.task).await;
    }
}
