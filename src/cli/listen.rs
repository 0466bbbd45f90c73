//! The listener of `watch`, and everything else by which the loop tells: the board, webhooks, messages, systemd.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tracing::warn;

use super::args::switch;
use super::local::Home;
use super::plan::input::Digests;
use super::plan::json::{About, of_loop};
use super::print::Printer;
use super::systemd::Systemd;
use super::{Exit, Failure};
use crate::control::Look;
use crate::control::board::{Board, Subject};
use crate::dashboard::messages::{Messages, Template, USUAL};
use crate::dashboard::{Access, Dashboard, More, Webhook};
use crate::http::{AddressError, Calling, Hook, Listener, Reloaded, bind, follow, is_short, serve};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Listening")]
pub struct ListenArgs {
    /// Address and port of the status page, the API and the metrics; port 0 takes a free one
    #[arg(long, env = "ABIDE_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7466")]
    pub listen: SocketAddr,
    /// File with a token that everybody needs; left out: reading is free, and a token for changes is in
    /// $ABIDE_HOME/watch.token
    #[arg(long, env = "ABIDE_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Telling and being told")]
pub struct TellArgs {
    /// File with the secret of webhooks: POST /api/v1/webhook with its signature makes the loop look at once
    #[arg(long, env = "ABIDE_WEBHOOK_SECRET_FILE", value_name = "FILE")]
    pub webhook_secret_file: Option<PathBuf>,
    /// Address to which messages for people are sent, such as a chat's webhook
    #[arg(long, env = "ABIDE_NOTIFY", value_name = "URL", hide_env_values = true)]
    pub notify: Option<String>,
    /// Accept a --notify address of plain http that is not loopback
    #[arg(long, env = "ABIDE_INSECURE_NOTIFY", value_parser = switch)]
    pub insecure_notify: bool,
    /// File with the JSON of a message, in which {{title}}, {{text}}, {{owner}}, {{target}}, {{revision}} and {{level}} are filled in
    #[arg(long, env = "ABIDE_NOTIFY_TEMPLATE", value_name = "FILE")]
    pub notify_template: Option<PathBuf>,
}

impl ListenArgs {
    /// Takes the port before anything else is done.
    pub fn bind(&self) -> Result<TcpListener, Failure> {
        if !self.listen.ip().is_loopback() && self.token_file.is_none() {
            let message = format!("{} is not this machine alone, and there is no token", self.listen);
            return Err(Failure::new(Exit::Usage, message).hint(
                "pass --token-file FILE, or listen on 127.0.0.1 behind something that asks for credentials",
            ));
        }
        bind(self.listen).map_err(|error| {
            let taken = error.kind() == std::io::ErrorKind::AddrInUse;
            let why =
                if taken { "another watch, or something else, has it".to_owned() } else { error.to_string() };
            let failure = Failure::new(Exit::Failed, format!("cannot listen on {}: {why}", self.listen));
            if taken { failure.hint("--listen 127.0.0.1:0 takes a free port") } else { failure }
        })
    }

    /// Who may read and change.
    pub fn access(&self, listen: SocketAddr, printer: &Printer) -> Result<Access, Failure> {
        match &self.token_file {
            Some(file) => {
                let token = secret_file("--token-file", file)?;
                Ok(Access { listen, guarded: true, token: Some(token) })
            }
            None => Ok(own_access(listen, printer)),
        }
    }
}

/// On this machine: free to read, and a token of its own for whoever changes something.
pub fn own_access(listen: SocketAddr, printer: &Printer) -> Access {
    let made = Home::find().and_then(|home| {
        home.make()?;
        home.secret("watch.token")?;
        // Another that began at the same moment may have written its own: what is in the file counts.
        secret_file("watch.token", &home.path("watch.token"))
    });
    let token = match made {
        Ok(token) => Some(token),
        Err(failure) => {
            let message = &failure.message;
            printer.warning(&format!("there is no token, so nothing can be changed by HTTP: {message}"));
            None
        }
    };
    Access { listen, guarded: false, token }
}

/// A secret that is in a file, and follows it.
fn secret_file(flag: &str, file: &Path) -> Result<Reloaded<String>, Failure> {
    let path = file.to_owned();
    let read = move || {
        let text = std::fs::read_to_string(&path)
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        crate::permissions::require_private(&path)?;
        match text.trim() {
            "" => Err(format!("{} is empty", path.display())),
            secret => {
                if is_short(secret) {
                    warn!(file = %path.display(), "the secret in this file has fewer than 16 characters");
                }
                Ok(secret.to_owned())
            }
        }
    };
    follow(vec![file.to_owned()], read).map_err(|why| Failure::new(Exit::Usage, format!("{flag}: {why}")))
}

/// What the loop tells with.
pub struct Telling {
    pub board: Arc<Board>,
    pub look_now: Arc<Notify>,
    pub systemd: Arc<Systemd>,
    webhook: Option<Webhook>,
    messages: Option<JoinHandle<()>>,
    tending: JoinHandle<()>,
}

impl Telling {
    pub fn begin(args: &TellArgs, subject: Subject) -> Result<Telling, Failure> {
        let webhook = match &args.webhook_secret_file {
            Some(file) => Some(Webhook::new(secret_file("--webhook-secret-file", file)?)),
            None => None,
        };
        let messages = match (&args.notify, &args.notify_template) {
            (Some(url), template) => Some(messages(url, args.insecure_notify, template.as_deref())?),
            (None, Some(_)) => {
                return Err(Failure::new(Exit::Usage, "--notify-template is given, and no --notify"));
            }
            (None, None) => None,
        };
        let board = Arc::new(Board::new(subject));
        let systemd = Arc::new(Systemd::here());
        let messages = messages.map(|messages| tokio::spawn(messages.run(Arc::clone(&board))));
        let tending = tokio::spawn(Arc::clone(&systemd).tend(Arc::clone(&board)));
        Ok(Telling { board, look_now: Arc::new(Notify::new()), systemd, webhook, messages, tending })
    }

    pub fn dashboard<S>(
        &self,
        access: Access,
        state: Reloaded<S>,
        more_metrics: Option<More>,
    ) -> Dashboard<S> {
        let subject = self.board.subject.clone();
        let plan = move |look: &Look| {
            let Look { revision, observed, rules, plan, .. } = look;
            let digests = Digests::of(revision.clone(), observed, rules, &subject.target, plan);
            let about = About {
                target: &subject.target,
                owner: &rules.owner,
                paths: &subject.sources.join(" "),
                observed_at: observed.at,
            };
            of_loop(&about, plan, &digests)
        };
        Dashboard {
            board: Arc::clone(&self.board),
            state,
            look_now: Arc::clone(&self.look_now),
            plan: Box::new(plan),
            access,
            webhook: self.webhook.clone(),
            more_metrics,
        }
    }

    /// Everybody who listens is let go; the last messages have a moment to leave.
    pub async fn end(self) {
        const LAST: Duration = Duration::from_secs(3);
        self.board.close();
        self.tending.abort();
        if let Some(messages) = self.messages {
            let _ = tokio::time::timeout(LAST, messages).await;
        }
    }
}

fn messages(url: &str, insecure: bool, template: Option<&Path>) -> Result<Messages, Failure> {
    let usage = |why: String| Failure::new(Exit::Usage, why);
    if let Err(plain @ AddressError::Plain(_)) = (Calling { insecure, ..Calling::default() }).check(url) {
        return Err(usage(format!("--notify: {plain}")).hint("use https, or pass --insecure-notify"));
    }
    let to = Hook::new(url, insecure).map_err(|why| usage(format!("--notify: {why}")))?;
    let template = match template {
        None => Template::parse(USUAL).map(Reloaded::fixed),
        Some(file) => {
            let path = file.to_owned();
            follow(vec![file.to_owned()], move || {
                let text = std::fs::read_to_string(&path).map_err(|error| error.to_string());
                text.and_then(|text| Template::parse(&text))
                    .map_err(|why| format!("{}: {why}", path.display()))
            })
        }
    };
    Ok(Messages { to, template: template.map_err(|why| usage(format!("--notify-template: {why}")))? })
}

/// Connections at once.
const CONNECTIONS: usize = 1024;

/// A listener that serves.
pub struct Listening {
    pub url: String,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl Listening {
    pub fn begin(socket: TcpListener, address: SocketAddr, router: Router) -> Listening {
        let (stop, stopped) = watch::channel(false);
        let listener =
            Listener { socket, tls: None, connections: CONNECTIONS, header_time: Duration::from_secs(10) };
        let serving = tokio::spawn(serve(listener, router, stopped));
        Listening { url: format!("http://{address}"), stop, serving }
    }

    pub async fn end(self) {
        let _ = self.stop.send(true);
        let _ = self.serving.await;
    }
}
