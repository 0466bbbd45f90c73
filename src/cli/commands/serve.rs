//! `abide serve`: the gateway as a daemon.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tracing::info;

use crate::cli::args::parse_switch;
use crate::cli::output::print::Printer;
use crate::cli::systemd::Systemd;
use crate::cli::{Exit, Failure};
use crate::gateway::auth::{Apps, Authenticator, Tokens};
use crate::gateway::{Gateway, middleware};
use crate::http::{Listener, Reloadable, Tls, bind, raise_file_limit, serve, watch_file};
use crate::permissions::{Above, close_to_others, own_uid, refuse_changeable, require_private};
use crate::store::{Embedded, Error};

/// Run the gateway: BlueKing's GSE and JOB process API, for clients and for agents
///
/// Prints `ready URL` on stdout when it answers. Everything that it acknowledged is in the folder of --data. The files of
/// apps, tokens and certificates are read again when they change. SIGTERM and Ctrl-C end it; agents go on guarding.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Files:\n  --apps              apps: [{code: NAME, secret: TEXT | secret_sha256: HEX, namespaces: [\"*\"]}]\n  \
    --agent-token-file  lines of CLOUD:IP TOKEN, or * TOKEN for any host"
)]
pub struct ServeArgs {
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, env = "ABIDE_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7465")]
    pub listen: SocketAddr,
    /// Folder for everything that must survive; it is made if need be
    #[arg(long, env = "ABIDE_DATA", value_name = "DIR")]
    pub data: PathBuf,
    /// Who may call, and which namespaces each may touch
    #[arg(long, env = "ABIDE_APPS", value_name = "FILE")]
    pub apps: PathBuf,
    /// Which agents may join, by token
    #[arg(long, env = "ABIDE_AGENT_TOKEN_FILE", value_name = "FILE")]
    pub agent_token_file: Option<PathBuf>,
    /// Certificate (chain) in PEM
    #[arg(long, env = "ABIDE_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key in PEM
    #[arg(long, env = "ABIDE_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Listen on another address than loopback without TLS: secrets then cross the network as they are
    #[arg(long, env = "ABIDE_INSECURE_LISTEN", value_parser = parse_switch)]
    pub insecure_listen: bool,
    #[command(flatten)]
    pub limits: GatewayLimitArgs,
}

/// What a client that is slow, huge or too eager meets.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
pub struct GatewayLimitArgs {
    /// Most bytes of a request's body
    #[arg(long, env = "ABIDE_MAX_BODY_BYTES", value_name = "N", default_value_t = middleware::Limits::default().body_bytes, value_parser = at_least_one)]
    pub max_body_bytes: usize,
    /// Most connections at once: unauthenticated ones make room for new ones, known callers beyond it are answered 503
    #[arg(long, env = "ABIDE_MAX_CONNECTIONS", value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub max_connections: usize,
    /// Most requests at once of known callers, and as many of agents; more are answered 503
    #[arg(long, env = "ABIDE_MAX_REQUESTS", value_name = "N", default_value_t = middleware::Limits::default().at_once, value_parser = at_least_one)]
    pub max_requests: usize,
    /// Most requests a second of one app; more are answered 429
    #[arg(long, env = "ABIDE_MAX_RATE", value_name = "N", default_value_t = middleware::Limits::default().rate, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_rate: u32,
    /// Seconds for a request's header, and for its body, to arrive; a connection's first header has 5
    #[arg(long, env = "ABIDE_REQUEST_SECS", value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub request_secs: u64,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("nothing could be served with 0".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

pub fn run(args: &ServeArgs, printer: &Printer) -> Result<Exit, Failure> {
    if !args.listen.ip().is_loopback() && args.tls_cert.is_none() && !args.insecure_listen {
        let message = format!("{} is not this machine alone, and there is no TLS", args.listen);
        let hint = "pass --tls-cert and --tls-key, or --insecure-listen if something in front of it encrypts";
        return Err(Failure::new(Exit::Usage, message).hint(hint));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))?;
    runtime.block_on(run_until_stopped(args, printer))
}

async fn run_until_stopped(args: &ServeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let mut signals = Signals::listen()?;
    let file = args.apps.clone();
    let apps = watch_file(vec![file.clone()], move || {
        let apps = Apps::read(&file)?;
        require_private(&file).map(|()| apps)
    });
    let apps = apps.map_err(failed)?;
    let tokens = match &args.agent_token_file {
        None => Reloadable::fixed(Tokens::default()),
        Some(file) => {
            let file = file.clone();
            let tokens = watch_file(vec![file.clone()], move || {
                let tokens = Tokens::read(&file)?;
                require_private(&file).map(|()| tokens)
            });
            tokens.map_err(failed)?
        }
    };
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(Tls::watch_files(cert, key).map_err(failed)?),
        _ => None,
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let store = open_store(&args.data)?;
    let GatewayLimitArgs { max_body_bytes, max_connections, max_requests, max_rate, request_secs } =
        args.limits;
    let time = Duration::from_secs(request_secs);
    let limits = middleware::Limits {
        body_bytes: max_body_bytes,
        body_time: time,
        at_once: max_requests.min(1 << 20),
        rate: max_rate,
    };
    raise_file_limit();
    let socket =
        bind(args.listen).map_err(|error| failed(format!("cannot listen on {}: {error}", args.listen)))?;
    let connections = max_connections.clamp(1, 1 << 20);
    let keepers = Authenticator::new(apps, tokens);
    let standing =
        RunningGateway::start(store, socket, tls, keepers, limits, (connections, time), |_, _| Router::new())
            .await?;
    printer.data(&format!("ready {scheme}://{}\n", standing.address));
    let systemd = Systemd::from_env();
    systemd.ready();
    let exit = tokio::select! {
        exit = signals.shutdown_signal() => exit,
        why = standing.wait_for_failure() => return Err(failed(why)),
    };
    info!("stopping");
    systemd.stopping();
    standing.stop().await;
    Ok(exit)
}

/// A gateway that serves.
pub struct RunningGateway {
    pub address: SocketAddr,
    gateway: Arc<Gateway<Embedded>>,
    store: Embedded,
    stop: watch::Sender<bool>,
    serving: tokio::task::JoinHandle<()>,
    broken: watch::Receiver<Option<String>>,
}

impl RunningGateway {
    /// Connections, and the time for a header.
    pub const DEFAULT_LIMITS: (usize, Duration) = (4096, Duration::from_secs(30));

    /// Returns when it is ready. What is `beside` it has its own routes at the same address.
    pub async fn start(
        store: Embedded,
        socket: TcpListener,
        tls: Option<Tls>,
        keepers: Authenticator,
        limits: middleware::Limits,
        (connections, header_time): (usize, Duration),
        beside: impl FnOnce(&Arc<Gateway<Embedded>>, SocketAddr) -> Router,
    ) -> Result<RunningGateway, Failure> {
        let gateway = Arc::new(Gateway::new(store.clone()));
        let address = socket.local_addr().map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        let listener = Listener { socket, tls, connections, header_time };
        let router = middleware::router(Arc::clone(&gateway), Arc::new(keepers), limits);
        let router = beside(&gateway, address).merge(router);
        let (stop, stopped) = watch::channel(false);
        let (broke, broken) = watch::channel(None);
        let house = tokio::spawn({
            let gateway = Arc::clone(&gateway);
            async move {
                let why = gateway.run_maintenance().await;
                let _ = broke.send(Some(format!("the store cannot be used: {why:?}")));
            }
        });
        let serving = tokio::spawn(serve(listener, router, stopped));
        while !gateway.is_ready() && !house.is_finished() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(RunningGateway { address, gateway, store, stop, serving, broken })
    }

    /// Waits until it cannot go on. Why.
    pub async fn wait_for_failure(&self) -> String {
        let mut broken = self.broken.clone();
        match broken.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "the gateway ended".to_owned(),
        }
    }

    pub async fn stop(self) {
        self.gateway.close();
        let _ = self.stop.send(true);
        let _ = self.serving.await;
        if let Err(error) = self.store.settle().await {
            tracing::warn!(%error, "the store's log stays beside its file");
        }
    }
}

/// Opens the store of a folder, which nobody else may read: it holds what processes are given, secrets too.
pub fn open_store(folder: &Path) -> Result<Embedded, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let shown = folder.display();
    private_folder(folder)?;
    let file = folder.join("store.db");
    private_file(&file)?;
    let store = Embedded::open_alone(&file).map_err(|error| match error {
        Error::Corrupt { .. } | Error::TooNew { .. } | Error::InUse { .. } => failed(error.to_string()),
        error => failed(format!("cannot open the store in {shown}: {error}")),
    })?;
    close_to_others(folder, &["store.db", "store.db-wal", "store.db-shm"]).map_err(failed)?;
    Ok(store)
}

/// Makes a folder that no other user can enter. One that exists already must be safe from changes by other users.
pub fn private_folder(folder: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    if folder.exists() {
        return require_private(folder).map_err(unsafe_path);
    }
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| {
        Failure::new(Exit::Failed, format!("cannot make the folder {}: {error}", folder.display()))
    })?;
    refuse_changeable(folder, own_uid(), Above::NotWritable).map(drop).map_err(unsafe_path)
}

/// A file of such a folder, if it exists, must be safe from changes by other users.
pub fn private_file(file: &Path) -> Result<(), Failure> {
    match file.exists() {
        true => refuse_changeable(file, own_uid(), Above::NotWritable).map(drop).map_err(unsafe_path),
        false => Ok(()),
    }
}

fn unsafe_path(why: String) -> Failure {
    Failure::new(Exit::Failed, why).hint("other users could change what this program trusts")
}

/// SIGXFSZ.
const SIGXFSZ: i32 = 25;

/// The signals of a daemon, listened for from here on: before it says that it is ready.
pub struct Signals {
    term: Signal,
    interrupt: Signal,
    hangup: Signal,
    _too_large: Signal,
}

impl Signals {
    pub fn listen() -> Result<Signals, Failure> {
        let listen = |kind: SignalKind| {
            signal(kind)
                .map_err(|error| Failure::new(Exit::Failed, format!("cannot listen for signals: {error}")))
        };
        Ok(Signals {
            term: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
            // A file that may not grow: that write fails, and we go on.
            _too_large: listen(SignalKind::from_raw(SIGXFSZ))?,
        })
    }

    /// The same for what does not end well by being interrupted: which of the two it was.
    pub async fn stop_signal(&mut self) -> Exit {
        tokio::select! {
            _ = self.term.recv() => Exit::Terminated,
            _ = self.interrupt.recv() => Exit::Interrupted,
        }
    }

    /// The same for what goes on for ever and can begin anew: `None` asks for that.
    pub async fn stop_or_reload_signal(&mut self) -> Option<Exit> {
        tokio::select! {
            _ = self.term.recv() => Some(Exit::Terminated),
            _ = self.interrupt.recv() => Some(Exit::Interrupted),
            _ = self.hangup.recv() => None,
        }
    }

    /// Waits for Ctrl-C or SIGTERM. Ending because of them is what was asked for; a terminal that goes away is no reason.
    pub async fn shutdown_signal(&mut self) -> Exit {
        loop {
            tokio::select! {
                _ = self.term.recv() => return Exit::Done,
                _ = self.interrupt.recv() => return Exit::Done,
                _ = self.hangup.recv() => info!("files that changed are read again by themselves"),
            }
        }
    }
}
