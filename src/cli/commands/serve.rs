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

use crate::cli::args::{InvalidValue, parse_switch};
use crate::cli::fleet_ca::FleetArgs;
use crate::cli::key_file::KeyFileArgs;
use crate::cli::output::print::Printer;
use crate::cli::people::{PeopleArgs, read_users};
use crate::cli::systemd::Systemd;
use crate::cli::{Exit, Failure};
use crate::error_chain::chain;
use crate::gateway::audit::{AuditLog, AuditSettings};
use crate::gateway::auth::{Apps, Authenticator, CredentialsFileError, Tokens};
use crate::gateway::{FleetMembership, FleetTrust, Gateway, excess_entries, middleware, overload_body};
use crate::http::{Listener, Reloadable, Tls, bind, raise_file_limit, serve, watch_file};
use crate::permissions::{PermissionError, close_to_others, own_uid, refuse_changeable, require_private};
use crate::store::{Embedded, Error, print_set_aside};

/// Run the gateway: GSE and JOB process API for clients and agents
///
/// Prints `ready URL` on stdout when it accepts requests. Every acknowledged change is stored in --data. Changed apps,
/// token and certificate files are reloaded. SIGTERM and Ctrl-C stop the gateway; agents keep supervising.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Files:\n  --apps              apps: [{code: NAME, secret: TEXT | secret_sha256: HEX, namespaces: [\"*\"]}]\n  \
    --users             users: [{name: NAME, token_sha256: HEX, role: read|operate|admin, namespaces: [\"*\"]}]\n  \
    --agent-token-file  lines CLOUD:IP TOKEN, or * TOKEN for any host; TOKEN may be sha256:HEX"
)]
pub struct ServeArgs {
    /// Address and port to listen on; port 0 selects a free port
    #[arg(long, env = "ABIDE_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7465")]
    pub listen: SocketAddr,
    /// Data folder, created if it does not exist
    #[arg(long, env = "ABIDE_DATA", value_name = "DIR")]
    pub data: PathBuf,
    /// File of apps: credentials of clients and their namespaces
    #[arg(long, env = "ABIDE_APPS", value_name = "FILE")]
    pub apps: PathBuf,
    #[command(flatten)]
    pub people: PeopleArgs,
    /// File of agent tokens
    #[arg(long, env = "ABIDE_AGENT_TOKEN_FILE", value_name = "FILE")]
    pub agent_token_file: Option<PathBuf>,
    /// TLS certificate chain, PEM
    #[arg(long, env = "ABIDE_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// TLS private key, PEM
    #[arg(long, env = "ABIDE_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Accept plain http on an address that is not loopback
    ///
    /// Secrets then cross the network in plain text.
    #[arg(long, env = "ABIDE_INSECURE_LISTEN", value_parser = parse_switch)]
    pub insecure_listen: bool,
    #[command(flatten)]
    pub store: StoreArgs,
    #[command(flatten)]
    pub fleet: FleetArgs,
    #[command(flatten)]
    pub limits: GatewayLimitArgs,
    #[command(flatten)]
    pub audit: AuditFileArgs,
}

/// The store of the gateway.
#[derive(Debug, clap::Args)]
pub struct StoreArgs {
    #[command(flatten)]
    pub keys: KeyFileArgs,
    /// Print the registrations of a `store.db.set-aside-TIME` file, decrypted, and exit
    #[arg(long, value_name = "FILE")]
    pub print_set_aside: Option<PathBuf>,
}

/// Files of the audit log.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Audit log")]
pub struct AuditFileArgs {
    /// Bytes after which a new audit file begins
    #[arg(long, env = "ABIDE_AUDIT_MAX_BYTES", value_name = "N", default_value_t = AuditSettings::default().max_bytes, value_parser = clap::value_parser!(u64).range(4096..))]
    pub audit_max_bytes: u64,
    /// Maximum number of audit files; the oldest is deleted
    #[arg(long, env = "ABIDE_AUDIT_KEEP", value_name = "N", default_value_t = AuditSettings::default().keep, value_parser = at_least_one)]
    pub audit_keep: usize,
}

/// Limits on requests and connections.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
pub struct GatewayLimitArgs {
    /// Maximum bytes of a request body
    #[arg(long, env = "ABIDE_MAX_BODY_BYTES", value_name = "N", default_value_t = middleware::Limits::default().body_bytes, value_parser = at_least_one)]
    pub max_body_bytes: usize,
    /// Maximum concurrent connections: unauthenticated ones are evicted first, authenticated ones beyond it get 503
    #[arg(long, env = "ABIDE_MAX_CONNECTIONS", value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub max_connections: usize,
    /// Maximum concurrent requests of authenticated clients, and as many of agents; more get 503
    #[arg(long, env = "ABIDE_MAX_REQUESTS", value_name = "N", default_value_t = middleware::Limits::default().at_once, value_parser = at_least_one)]
    pub max_requests: usize,
    /// Maximum requests per second of one app; more get 429
    #[arg(long, env = "ABIDE_MAX_RATE", value_name = "N", default_value_t = middleware::Limits::default().rate, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_rate: u32,
    /// Seconds for a request's header and for its body to arrive; the first header of a connection has 5
    #[arg(long, env = "ABIDE_REQUEST_SECS", value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub request_secs: u64,
}

fn at_least_one(text: &str) -> Result<usize, InvalidValue> {
    match text.parse() {
        Ok(0) => Err(InvalidValue("must be at least 1")),
        Ok(number) => Ok(number),
        Err(_) => Err(InvalidValue("not a whole number")),
    }
}

pub fn run(args: &ServeArgs, printer: &Printer) -> Result<Exit, Failure> {
    if let Some(file) = &args.store.print_set_aside {
        let keys = args.store.keys.source(&args.data)?;
        let printed = print_set_aside(file, &keys, &mut |entry| printer.data(&format!("{entry}\n")));
        return printed.map(|()| Exit::Done).map_err(|error| Failure::new(Exit::Failed, error.to_string()));
    }
    if !args.listen.ip().is_loopback() && args.tls_cert.is_none() && !args.insecure_listen {
        let message = format!("refusing to listen on {} without TLS (not a loopback address)", args.listen);
        let hint = "pass --tls-cert and --tls-key, or --insecure-listen behind a proxy that terminates TLS";
        return Err(Failure::new(Exit::Usage, message).hint(hint));
    }
    args.fleet.check(&args.data, args.tls_cert.is_some())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))?;
    runtime.block_on(run_until_stopped(args, printer))
}

async fn run_until_stopped(args: &ServeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let mut signals = Signals::listen()?;
    let (file, users) = (args.apps.clone(), args.people.users.clone());
    let files = std::iter::once(file.clone()).chain(users.clone()).collect();
    let apps = watch_file(files, move || {
        let apps = Apps::read(&file)?;
        require_private(&file)?;
        Ok::<_, CredentialsFileError>(match &users {
            Some(users) => apps.with_people(read_users(users)?),
            None => apps,
        })
    });
    let apps = apps.map_err(|error| failed(chain(&error)))?;
    let tokens = match &args.agent_token_file {
        None => Reloadable::fixed(Tokens::default()),
        Some(file) => {
            let file = file.clone();
            let tokens = watch_file(vec![file.clone()], move || {
                let tokens = Tokens::read(&file)?;
                require_private(&file)?;
                Ok::<_, CredentialsFileError>(tokens)
            });
            tokens.map_err(|error| failed(chain(&error)))?
        }
    };
    let store = open_store(&args.data, &args.store.keys)?;
    let settings = AuditSettings { max_bytes: args.audit.audit_max_bytes, keep: args.audit.audit_keep };
    let audit = open_audit(&args.data, settings, &store).await?;
    // Creates the CA whose certificate the TLS configuration reads.
    let trust = args.fleet.trust(&store).await?;
    let client_ca = args.fleet.client_ca_file();
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => {
            let tls = Tls::watch_files_and_clients(cert, key, client_ca.as_deref());
            Some(tls.map_err(|error| failed(chain(&error)))?)
        }
        _ => None,
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
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
    let authenticator = Authenticator::new(apps, tokens).with_proxy(args.people.proxy());
    let no_routes = |_: &Arc<Gateway<Embedded>>, _| Router::new();
    let gateway = RunningGateway::start(
        (store, audit),
        socket,
        (tls, trust),
        authenticator,
        limits,
        (connections, time),
        no_routes,
    )
    .await?;
    printer.data(&format!("ready {scheme}://{}\n", gateway.address));
    let systemd = Systemd::from_env();
    systemd.ready();
    let exit = tokio::select! {
        exit = signals.shutdown_signal() => exit,
        why = gateway.wait_for_failure() => return Err(failed(why)),
    };
    info!("stopping");
    systemd.stopping();
    gateway.stop().await;
    Ok(exit)
}

/// A running gateway.
pub struct RunningGateway {
    pub address: SocketAddr,
    gateway: Arc<Gateway<Embedded>>,
    store: Embedded,
    stop: watch::Sender<bool>,
    serving: tokio::task::JoinHandle<()>,
    broken: watch::Receiver<Option<String>>,
}

impl RunningGateway {
    /// Maximum connections, and the time limit for a header.
    pub const DEFAULT_LIMITS: (usize, Duration) = (4096, Duration::from_secs(30));

    /// Returns when the gateway is ready. `extra_routes` are served at the same address.
    pub async fn start(
        (store, audit): (Embedded, AuditLog),
        socket: TcpListener,
        (tls, trust): (Option<Tls>, FleetTrust),
        authenticator: Authenticator,
        limits: middleware::Limits,
        (connections, header_time): (usize, Duration),
        extra_routes: impl FnOnce(&Arc<Gateway<Embedded>>, SocketAddr) -> Router,
    ) -> Result<RunningGateway, Failure> {
        let gateway = Arc::new(Gateway::new(store.clone()).with_audit(audit));
        let address = socket.local_addr().map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        let overload_body = overload_body();
        let listener = Listener { socket, tls, connections, header_time, overload_body };
        let fleet = Arc::new(FleetMembership::new(gateway.store(), trust));
        let loaded = fleet.load().await;
        let loaded = loaded.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        let followed = Arc::clone(&fleet);
        tokio::spawn(async move { followed.follow(loaded).await });
        let router =
            middleware::router_with_fleet(Arc::clone(&gateway), Arc::new(authenticator), fleet, limits);
        let router = extra_routes(&gateway, address).merge(router);
        let (stop, stopped) = watch::channel(false);
        let (broke, broken) = watch::channel(None);
        let maintenance = tokio::spawn({
            let gateway = Arc::clone(&gateway);
            async move {
                let error = gateway.run_maintenance().await;
                let _ = broke.send(Some(format!("cannot use the store: {}", chain(&error))));
            }
        });
        let audited = Arc::clone(&gateway);
        tokio::spawn(async move { audited.run_audit().await });
        let serving = tokio::spawn(serve(listener, router, stopped));
        while !gateway.is_ready() && !maintenance.is_finished() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(RunningGateway { address, gateway, store, stop, serving, broken })
    }

    /// Waits for a fatal error of the gateway, and returns it.
    pub async fn wait_for_failure(&self) -> String {
        let mut broken = self.broken.clone();
        match broken.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "the gateway stopped".to_owned(),
        }
    }

    pub async fn stop(self) {
        self.gateway.close();
        let _ = self.stop.send(true);
        let _ = self.serving.await;
        self.gateway.close_audit().await;
        if let Err(error) = self.store.settle().await {
            tracing::warn!(%error, "cannot checkpoint the store: its write-ahead log stays next to it");
        }
    }
}

/// Opens the store of a folder. No other user may read it: it holds specs, with their secrets.
pub fn open_store(folder: &Path, keys: &KeyFileArgs) -> Result<Embedded, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let shown = folder.display();
    let keys = keys.source(folder)?;
    private_folder(folder)?;
    let file = folder.join("store.db");
    private_file(&file)?;
    let store = Embedded::open_alone_trimmed(&file, &keys, &excess_entries).map_err(|error| match error {
        Error::Corrupt { .. }
        | Error::TooNew { .. }
        | Error::InUse { .. }
        | Error::KeyMissing { .. }
        | Error::KeyFile(_) => failed(error.to_string()),
        error => failed(format!("cannot open the store in {shown}: {error}")),
    })?;
    close_to_others(folder, &["store.db", "store.db-wal", "store.db-shm"])
        .map_err(|error| failed(chain(&error)))?;
    Ok(store)
}

/// Opens the audit log next to the store, in `audit`.
pub async fn open_audit(
    folder: &Path,
    settings: AuditSettings,
    store: &Embedded,
) -> Result<AuditLog, Failure> {
    let folder = folder.join("audit");
    private_folder(&folder)?;
    let opened = AuditLog::open(&folder, settings, store).await;
    opened.map_err(|error| Failure::new(Exit::Failed, chain(&error)))
}

/// Creates a folder that no other user can enter. An existing folder must be safe from changes by other users.
pub fn private_folder(folder: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    if folder.exists() {
        return require_private(folder).map_err(unsafe_path);
    }
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| {
        Failure::new(Exit::Failed, format!("cannot create folder {}: {error}", folder.display()))
    })?;
    refuse_changeable(folder, own_uid()).map(drop).map_err(unsafe_path)
}

/// Checks that a file of a private folder, if it exists, is safe from changes by other users.
pub fn private_file(file: &Path) -> Result<(), Failure> {
    match file.exists() {
        true => refuse_changeable(file, own_uid()).map(drop).map_err(unsafe_path),
        false => Ok(()),
    }
}

fn unsafe_path(error: PermissionError) -> Failure {
    Failure::new(Exit::Failed, chain(&error)).hint("other users could change what this program trusts")
}

const SIGXFSZ: i32 = 25;

/// The signals of a daemon. Handlers are installed before the daemon reports that it is ready.
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
            // At the file size limit the write fails, and the daemon keeps running.
            _too_large: listen(SignalKind::from_raw(SIGXFSZ))?,
        })
    }

    /// Waits for SIGTERM or SIGINT. The exit code tells them apart, for work that they interrupt.
    pub async fn stop_signal(&mut self) -> Exit {
        tokio::select! {
            _ = self.term.recv() => Exit::Terminated,
            _ = self.interrupt.recv() => Exit::Interrupted,
        }
    }

    /// Like [`Signals::stop_signal`], for a daemon that can reload: `None` is SIGHUP.
    pub async fn stop_or_reload_signal(&mut self) -> Option<Exit> {
        tokio::select! {
            _ = self.term.recv() => Some(Exit::Terminated),
            _ = self.interrupt.recv() => Some(Exit::Interrupted),
            _ = self.hangup.recv() => None,
        }
    }

    /// Waits for SIGINT or SIGTERM, which end a daemon with exit code 0. A closed terminal (SIGHUP) does not end it.
    pub async fn shutdown_signal(&mut self) -> Exit {
        loop {
            tokio::select! {
                _ = self.term.recv() => return Exit::Done,
                _ = self.interrupt.recv() => return Exit::Done,
                _ = self.hangup.recv() => info!("SIGHUP ignored: changed files are reloaded automatically"),
            }
        }
    }
}
