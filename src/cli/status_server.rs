//! The status server of `watch`, and its notifications: status board, webhooks, messages, systemd.

use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tracing::warn;

use super::args::parse_switch;
use super::commands::plan::input::PlanDigests;
use super::commands::plan::json::{PlanHeader, controller_plan};
use super::local::Home;
use super::output::print::Printer;
use super::people::PeopleArgs;
use super::systemd::Systemd;
use super::{Exit, Failure};
use crate::alerts;
use crate::alerts::{AlertFeed, AlertRoute, DeliveryBoard, MessageTemplate, RunningAlerts, TemplateError};
use crate::backend::Abide;
use crate::control::status::{ControllerInfo, StatusBoard};
use crate::control::{ControllerEvent, PassResult};
use crate::dashboard::notify::{DEFAULT_TEMPLATE, Notifier, PLACEHOLDERS};
use crate::dashboard::{
    AccessControl, Dashboard, DetailCache, DetailSource, ExtraMetrics, PeopleAccess, Webhook,
};
use crate::error_chain::chain;
use crate::http::{
    AddressError, ApiClient, ClientConfig, Listener, Reloadable, Tls, WebhookClient, bind, is_weak, serve,
    watch_file,
};
use crate::permissions::PermissionError;
use crate::store::Store;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Status server")]
pub struct ListenArgs {
    /// Address and port of the status page, API and metrics; port 0 selects a free port
    #[arg(long, env = "ABIDE_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7466")]
    pub listen: SocketAddr,
    /// File with a token that every request needs [default: reads need none, changes need the token in
    /// $ABIDE_HOME/watch.token]
    #[arg(long, env = "ABIDE_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// TLS certificate chain, PEM
    #[arg(long, env = "ABIDE_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// TLS private key, PEM
    #[arg(long, env = "ABIDE_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Accept plain http with --users on an address that is not loopback
    ///
    /// Tokens and sessions then cross the network in plain text.
    #[arg(long, env = "ABIDE_INSECURE_LISTEN", value_parser = parse_switch)]
    pub insecure_listen: bool,
    #[command(flatten)]
    pub people: PeopleArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Notifications and webhooks")]
pub struct NotifyArgs {
    /// File with the webhook secret: a signed POST to /api/v1/webhook triggers a reconcile
    #[arg(long, env = "ABIDE_WEBHOOK_SECRET_FILE", value_name = "FILE")]
    pub webhook_secret_file: Option<PathBuf>,
    /// URL to post notifications to, such as a chat webhook
    #[arg(long, env = "ABIDE_NOTIFY", value_name = "URL", hide_env_values = true)]
    pub notify: Option<String>,
    /// Accept a plain http URL in --notify that is not loopback
    #[arg(long, env = "ABIDE_INSECURE_NOTIFY", value_parser = parse_switch)]
    pub insecure_notify: bool,
    /// JSON template of a notification, with {{title}}, {{text}}, {{owner}}, {{target}}, {{revision}} and {{level}}
    #[arg(long, env = "ABIDE_NOTIFY_TEMPLATE", value_name = "FILE")]
    pub notify_template: Option<PathBuf>,
}

impl ListenArgs {
    /// Binds the port first, so that a conflict has no side effects.
    pub fn bind(&self) -> Result<TcpListener, Failure> {
        let (is_loopback, has_people) = (self.listen.ip().is_loopback(), self.people.users.is_some());
        if !is_loopback && has_people && self.tls_cert.is_none() && !self.insecure_listen {
            let message =
                format!("refusing to listen on {} without TLS (not a loopback address)", self.listen);
            let hint =
                "pass --tls-cert and --tls-key, or --insecure-listen behind a proxy that terminates TLS";
            return Err(Failure::new(Exit::Usage, message).hint(hint));
        }
        if !is_loopback && self.token_file.is_none() && !has_people {
            let message =
                format!("refusing to listen on {} without a token (not a loopback address)", self.listen);
            return Err(Failure::new(Exit::Usage, message)
                .hint("pass --token-file FILE or --users FILE, or listen on 127.0.0.1 behind a proxy that authenticates"));
        }
        bind(self.listen).map_err(|error| {
            let taken = error.kind() == std::io::ErrorKind::AddrInUse;
            let why = if taken { "the address is in use".to_owned() } else { error.to_string() };
            let failure = Failure::new(Exit::Failed, format!("cannot listen on {}: {why}", self.listen));
            if taken { failure.hint("--listen 127.0.0.1:0 selects a free port") } else { failure }
        })
    }

    /// Access control of the status server.
    pub fn access(&self, listen: SocketAddr, printer: &Printer) -> Result<AccessControl, Failure> {
        let access = match &self.token_file {
            Some(file) => {
                let token = Some(secret_file("--token-file", file)?);
                AccessControl { listen, token_required: true, token, people: None }
            }
            None => default_access(listen, printer),
        };
        with_people(access, &self.people)
    }

    /// TLS of the status server.
    pub fn tls(&self) -> Result<Option<Tls>, Failure> {
        let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let tls = Tls::watch_files(cert, key);
        tls.map(Some).map_err(|error| Failure::new(Exit::Failed, chain(&error)))
    }
}

/// Adds the people of a users file. Then every request needs credentials.
pub fn with_people(access: AccessControl, args: &PeopleArgs) -> Result<AccessControl, Failure> {
    let Some(people) = args.people()? else { return Ok(access) };
    let people = Some(PeopleAccess::start(people, args.proxy()));
    Ok(AccessControl { token_required: true, people, ..access })
}

/// Access control on loopback: reads need no token, changes need the one in `$ABIDE_HOME/watch.token`.
pub fn default_access(listen: SocketAddr, printer: &Printer) -> AccessControl {
    let token = Home::find().and_then(|home| {
        home.create()?;
        home.secret("watch.token")?;
        // Another process may have written the file at the same time: the token in the file is valid.
        secret_file("watch.token", &home.path("watch.token"))
    });
    let token = match token {
        Ok(token) => Some(token),
        Err(failure) => {
            let message = &failure.message;
            printer.warning(&format!("no token: the API refuses changes: {message}"));
            None
        }
    };
    AccessControl { listen, token_required: false, token, people: None }
}

/// A secret from a file, reloaded when the file changes.
fn secret_file(flag: &str, file: &Path) -> Result<Reloadable<String>, Failure> {
    let path = file.to_owned();
    let read = move || {
        let text = std::fs::read_to_string(&path)
            .map_err(|source| SecretFileError::Read { file: path.clone(), source })?;
        crate::permissions::require_private(&path)?;
        match text.trim() {
            "" => Err(SecretFileError::Empty { file: path.clone() }),
            secret => {
                if is_weak(secret) {
                    warn!(file = %path.display(), "the secret in this file has fewer than 16 characters");
                }
                Ok(secret.to_owned())
            }
        }
    };
    watch_file(vec![file.to_owned()], read)
        .map_err(|error| Failure::new(Exit::Usage, format!("{flag}: {}", chain(&error))))
}

/// Reason why a file with a secret cannot be used.
#[derive(Debug, thiserror::Error)]
enum SecretFileError {
    #[error("cannot read {}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Unsafe(#[from] PermissionError),
    #[error("{} is empty", file.display())]
    Empty { file: PathBuf },
}

/// Reason why a template file cannot be used.
#[derive(Debug, thiserror::Error)]
enum TemplateFileError {
    #[error("{}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("{}", file.display())]
    Template { file: PathBuf, source: TemplateError },
}

/// Outputs of the controller besides the console, and the webhook that triggers it.
pub struct Notifiers {
    pub board: Arc<StatusBoard>,
    pub trigger: Arc<Notify>,
    pub systemd: Arc<Systemd>,
    /// The gateway whose rows have the details of processes; `None`: the target has no such rows.
    pub gateway: Reloadable<Option<ApiClient>>,
    pub alerts: AlertOutputs,
    webhook: Option<Webhook>,
    messages: Option<JoinHandle<()>>,
    watchdog: JoinHandle<()>,
}

/// Alerts by the routes of the config file.
pub struct AlertOutputs {
    /// The routes of the next run. A reload of the config file replaces them.
    routes: Mutex<Vec<AlertRoute>>,
    pub feed: Arc<AlertFeed>,
    pub deliveries: Arc<DeliveryBoard>,
    /// Whether there are routes: without them nothing is recorded.
    pub is_active: AtomicBool,
}

impl AlertOutputs {
    fn new(routes: Vec<AlertRoute>) -> AlertOutputs {
        let outputs = AlertOutputs {
            routes: Mutex::default(),
            feed: Arc::default(),
            deliveries: Arc::default(),
            is_active: AtomicBool::new(false),
        };
        outputs.set_routes(routes);
        outputs
    }

    /// The routes of the next run.
    pub fn set_routes(&self, routes: Vec<AlertRoute>) {
        self.is_active.store(!routes.is_empty(), Ordering::Relaxed);
        *self.routes.lock().unwrap_or_else(PoisonError::into_inner) = routes;
    }

    /// Records an event of the control loop.
    pub fn record(&self, event: &ControllerEvent<'_>) {
        if self.is_active.load(Ordering::Relaxed) {
            self.feed.record(event);
        }
    }

    /// Starts the alerts of one run of the controller.
    pub fn start<S: Store + Clone>(&self, state: S, board: &Arc<StatusBoard>) -> RunningAlerts {
        let routes = std::mem::take(&mut *self.routes.lock().unwrap_or_else(PoisonError::into_inner));
        alerts::start(routes, state, board, &self.feed, &self.deliveries)
    }
}

impl Notifiers {
    pub fn start(
        args: &NotifyArgs,
        routes: Vec<AlertRoute>,
        subject: ControllerInfo,
    ) -> Result<Notifiers, Failure> {
        let webhook = match &args.webhook_secret_file {
            Some(file) => Some(Webhook::new(secret_file("--webhook-secret-file", file)?)),
            None => None,
        };
        let messages = match (&args.notify, &args.notify_template) {
            (Some(url), template) => Some(notifier(url, args.insecure_notify, template.as_deref())?),
            (None, Some(_)) => {
                return Err(Failure::new(Exit::Usage, "--notify-template needs --notify URL"));
            }
            (None, None) => None,
        };
        let board = Arc::new(StatusBoard::new(subject));
        let systemd = Arc::new(Systemd::from_env());
        let messages = messages.map(|messages| tokio::spawn(messages.run(Arc::clone(&board))));
        let watchdog = tokio::spawn(Arc::clone(&systemd).run_watchdog(Arc::clone(&board)));
        let (trigger, gateway) = (Arc::new(Notify::new()), Reloadable::fixed(None));
        let alerts = AlertOutputs::new(routes);
        Ok(Notifiers { board, trigger, systemd, gateway, alerts, webhook, messages, watchdog })
    }

    pub fn dashboard<S>(
        &self,
        access: AccessControl,
        state: Reloadable<S>,
        more_metrics: Option<ExtraMetrics>,
    ) -> Dashboard<S> {
        let subject = self.board.subject.clone();
        let plan = move |result: &PassResult| {
            let PassResult { revision, observed, rules, plan, .. } = result;
            let digests = PlanDigests::of(revision.clone(), observed, rules, &subject.target, plan);
            let about = PlanHeader {
                target: &subject.target,
                owner: &rules.owner,
                paths: &subject.sources.join(" "),
                observed_at: observed.at,
            };
            controller_plan(&about, plan, &digests)
        };
        Dashboard {
            board: Arc::clone(&self.board),
            state,
            trigger: Arc::clone(&self.trigger),
            plan: Box::new(plan),
            access,
            webhook: self.webhook.clone(),
            extra_metrics: more_metrics,
            details: DetailCache::new(detail_source(self.gateway.clone())),
            deliveries: Arc::clone(&self.alerts.deliveries),
        }
    }

    /// Closes event streams, and waits briefly for the last messages to be sent.
    pub async fn stop(self) {
        const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
        self.board.close();
        self.watchdog.abort();
        if let Some(messages) = self.messages {
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, messages).await;
        }
    }
}

fn detail_source(gateway: Reloadable<Option<ApiClient>>) -> DetailSource {
    Box::new(move || {
        let client = gateway.get();
        Box::pin(async move { Abide::of_client(client.as_ref().clone()?).rows("&brief=1").await.ok() })
    })
}

fn notifier(url: &str, insecure: bool, template: Option<&Path>) -> Result<Notifier, Failure> {
    let usage = |why: String| Failure::new(Exit::Usage, why);
    if let Err(plain @ AddressError::Plain(_)) =
        (ClientConfig { insecure, ..ClientConfig::default() }).check(url)
    {
        return Err(usage(format!("--notify: {plain}")).hint("use https, or pass --insecure-notify"));
    }
    let to =
        WebhookClient::new(url, insecure).map_err(|error| usage(format!("--notify: {}", chain(&error))))?;
    let invalid = |error: &(dyn Error + 'static)| usage(format!("--notify-template: {}", chain(error)));
    let template = match template {
        None => Reloadable::fixed(
            MessageTemplate::parse(DEFAULT_TEMPLATE, PLACEHOLDERS).map_err(|error| invalid(&error))?,
        ),
        Some(file) => {
            let path = file.to_owned();
            watch_file(vec![file.to_owned()], move || {
                let file = || path.clone();
                let text = std::fs::read_to_string(&path)
                    .map_err(|source| TemplateFileError::Read { file: file(), source })?;
                MessageTemplate::parse(&text, PLACEHOLDERS)
                    .map_err(|source| TemplateFileError::Template { file: file(), source })
            })
            .map_err(|error| invalid(&error))?
        }
    };
    Ok(Notifier { to, template })
}

/// Maximum concurrent connections.
const CONNECTIONS: usize = 1024;

/// A running status server.
pub struct StatusServer {
    pub url: String,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl StatusServer {
    pub fn start(socket: TcpListener, address: SocketAddr, tls: Option<Tls>, router: Router) -> StatusServer {
        let (stop, stopped) = watch::channel(false);
        let scheme = if tls.is_some() { "https" } else { "http" };
        let listener = Listener {
            socket,
            tls,
            connections: CONNECTIONS,
            header_time: Duration::from_secs(10),
            overload_body: crate::dashboard::overload_body(),
        };
        let serving = tokio::spawn(serve(listener, router, stopped));
        StatusServer { url: format!("{scheme}://{address}"), stop, serving }
    }

    pub async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = self.serving.await;
    }
}
