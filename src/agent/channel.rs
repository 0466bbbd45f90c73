//! Agent channel: the connection from the agent to the gateway, with reconnection and acknowledged delivery.
//!
//! Results are in the agent's store until the gateway acknowledges them. Reports are not stored: after a reconnect the agent
//! reports all instances again. So no result is lost. The gateway may receive a result twice, and ignores the second one: a
//! final row does not change.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt;
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::Supervisor;
use super::enrollment::{Renewal, SessionCredential, credential};
use super::idle_memory::IdleMemory;
use super::stream_clock::StreamClock;
use crate::agent_protocol::{
    Acked, AgentMessage, CertificateLife, FiguresUpdate, FromAgent, HEARTBEAT_SECS, Join, Joined, LogChunk,
    OpResult, ToAgent,
};
use crate::clock;
use crate::error_chain::chain;
use crate::gse::response::Envelope;
use crate::http::{ClientConfig, ClientError, TransportError, redirect};
use crate::model::HostKey;
use crate::permissions::PermissionError;
use crate::pki::AgentKeyError;
use crate::retry_delay::RetryDelay;
use crate::store::Error;

/// The gateway that an agent joins, and the identity that it joins with.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    pub url: String,
    /// Read for every session: a token may be replaced. `None`: the agent has a certificate of an external CA.
    pub token_file: Option<PathBuf>,
    /// The agent's data folder, for its key and certificate.
    pub folder: PathBuf,
    /// The agent's name, stored in its folder.
    pub agent: String,
    pub hosts: Vec<HostKey>,
    pub calling: ClientConfig,
}

/// Maximum messages per call.
const BATCH: usize = 1000;
/// Messages for which the outbox keeps memory.
const IDLE_MESSAGES: usize = 64;
/// A gateway that is silent for this long counts as gone.
const STREAM_TIMEOUT: Duration = Duration::from_secs(3 * HEARTBEAT_SECS + 1);
/// A stream whose heartbeats are older than this is reopened: the gateway then stamps open operations again.
const LAG_MS: u64 = 5_000;
/// Capacity that the buffer of the stream keeps.
const IDLE_BUFFER_BYTES: usize = 16 << 10;
/// Delays between attempts to join. Half of a delay is jitter: agents of a restarted gateway return at different times.
const BACKOFF: RetryDelay =
    RetryDelay::doubling(Duration::from_millis(50), Duration::from_secs(5)).with_jitter(0.5);

/// Reason why a session with the gateway ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("cannot read token file {}", file.display())]
    TokenFile { file: PathBuf, source: std::io::Error },
    #[error("{} contains an incomplete join token", file.display())]
    InvalidJoinToken { file: PathBuf },
    #[error("a join token needs a gateway with https: its certificate identifies TLS connections")]
    JoinNeedsTls,
    #[error("cannot use the key file {}", file.display())]
    KeyFile { file: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Key(#[from] AgentKeyError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the certificate was renewed")]
    Renewed,
    #[error(transparent)]
    UnsafeTokenFile(#[from] PermissionError),
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the gateway refused the request (HTTP {status}): {message}")]
    Refused { status: StatusCode, message: String },
    #[error("cannot open the stream: HTTP {0}")]
    NoStream(StatusCode),
    #[error("the stream broke: {0}")]
    StreamBroke(#[source] reqwest::Error),
    #[error("the gateway ended the stream")]
    StreamEnded,
    #[error("the gateway has been silent for too long")]
    Silent,
    #[error("the stream lags by {age_ms} ms")]
    Lags { age_ms: u64 },
    #[error(transparent)]
    Sender(#[from] tokio::task::JoinError),
    #[error(transparent)]
    Store(#[from] Error),
}

/// Serves a gateway until `stop` is set. `ready` is called at the start of each session.
pub async fn run(
    config: JoinConfig,
    mut supervisor: Supervisor,
    mut messages: mpsc::UnboundedReceiver<AgentMessage>,
    mut ready: impl FnMut(),
    mut stop: watch::Receiver<bool>,
) -> Result<(), ClientError> {
    let client = config.calling.client(&config.url)?;
    let mut wait = BACKOFF.first();
    loop {
        let begun = Instant::now();
        let error = tokio::select! {
            error = session(&config, &client, &mut supervisor, &mut messages, &mut ready) => error,
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => return Ok(()),
        };
        if matches!(error, SessionError::Renewed) {
            info!("joining again with the renewed certificate");
            wait = BACKOFF.first();
            continue;
        }
        // A session that lasted resets the backoff.
        if begun.elapsed() > BACKOFF.max() {
            wait = BACKOFF.first();
        }
        warn!(why = %chain(&error), retry_in = ?wait, "session with the gateway ended");
        tokio::select! {
            () = tokio::time::sleep(BACKOFF.jittered(wait, fastrand::f64())) => {}
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => return Ok(()),
        }
        wait = BACKOFF.next(wait);
    }
}

/// Runs one session until it ends. Returns the reason.
async fn session(
    config: &JoinConfig,
    client: &Client,
    supervisor: &mut Supervisor,
    messages: &mut mpsc::UnboundedReceiver<AgentMessage>,
    ready: &mut impl FnMut(),
) -> SessionError {
    match try_session(config, client, supervisor, messages, ready).await {
        Ok(()) => SessionError::StreamEnded,
        Err(error) => error,
    }
}

/// Sends answers to queries of figures, if there are any.
fn send_figure_answers(outbox: &Outbox, supervisor: &mut Supervisor) {
    let answers = supervisor.take_figure_answers();
    if !answers.is_empty() {
        tokio::spawn(outbox.send_figures(FiguresUpdate { answers, ..FiguresUpdate::default() }));
    }
}

async fn try_session(
    config: &JoinConfig,
    client: &Client,
    supervisor: &mut Supervisor,
    messages: &mut mpsc::UnboundedReceiver<AgentMessage>,
    ready: &mut impl FnMut(),
) -> Result<(), SessionError> {
    let gateway = GatewayClient::new(config, credential(config, client).await?);
    let mut outbox = join(config, gateway.clone(), supervisor, messages).await?;
    supervisor.report_all();
    let mut clock = StreamClock::start();
    let session = outbox.session.clone();
    let mut stream = gateway.stream(&session).await?;
    info!(url = %config.url, hosts = config.hosts.len(), "joined");
    ready();
    let mut buffer = Vec::new();
    let mut last_received = Instant::now();
    let mut heartbeat = tokio::time::interval(Duration::from_secs(HEARTBEAT_SECS));
    let mut memory = IdleMemory::of_session();
    let mut send_task: Option<tokio::task::JoinHandle<Result<Vec<OpResult>, SessionError>>> = None;
    let mut figures = supervisor.figures_timer();
    let mut renewal = Renewal::start(outbox.certificate, gateway.clone(), config.folder.clone());
    loop {
        if send_task.is_none() && !outbox.waiting.is_empty() {
            send_task = Some(tokio::spawn(outbox.batch()));
        }
        tokio::select! {
            chunk = stream.next() => match chunk {
                None => return Ok(()),
                Some(Err(error)) => return Err(SessionError::StreamBroke(error)),
                Some(Ok(bytes)) => {
                    last_received = Instant::now();
                    buffer.extend_from_slice(&bytes);
                    handle_lines(&mut buffer, &mut clock, supervisor).await?;
                    send_figure_answers(&outbox, supervisor);
                }
            },
            complete = figures.next(), if outbox.takes_figures => {
                let update = supervisor.figures(complete);
                if complete || !update.rows.is_empty() {
                    figures.sent_by(tokio::spawn(outbox.send_figures(update)));
                }
            }
            Some(message) = messages.recv() => {
                memory.set_busy();
                outbox.waiting.push(message);
                while outbox.waiting.len() < BATCH && let Ok(more) = messages.try_recv() {
                    outbox.waiting.push(more);
                }
            }
            chunk = supervisor.next_log_chunk() => {
                memory.set_busy();
                tokio::spawn(gateway.clone().send_log_chunk(session.clone(), chunk));
            }
            renewed = renewal.done() => return renewed.and(Err(SessionError::Renewed)),
            sent = async { match &mut send_task { Some(send_task) => send_task.await, None => std::future::pending().await } } => {
                send_task = None;
                let acknowledged = sent??;
                supervisor.acknowledged(acknowledged).await?;
                if outbox.waiting.is_empty() {
                    memory.after_heartbeat();
                }
            }
            _ = heartbeat.tick() => {
                memory.at_heartbeat();
                if last_received.elapsed() > STREAM_TIMEOUT {
                    return Err(SessionError::Silent);
                }
                if send_task.is_none() && outbox.waiting.is_empty() {
                    send_task = Some(tokio::spawn(outbox.batch()));
                }
            }
        }
    }
}

/// Joins the gateway. The outbox contains the results that it has not acknowledged, and no report of an earlier session.
async fn join(
    config: &JoinConfig,
    gateway: GatewayClient,
    supervisor: &mut Supervisor,
    messages: &mut mpsc::UnboundedReceiver<AgentMessage>,
) -> Result<Outbox, SessionError> {
    let request = Join {
        agent: config.agent.clone(),
        hosts: config.hosts.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        clock: Some(clock::now().0),
        floors: true,
        figures: true,
        last_seq: supervisor.last_seq(),
        logs: true,
    };
    let Joined { session, acked, store, figures, certificate } = gateway.call("join", &[], &request).await?;
    supervisor.session_started(&store).await?;
    let (waiting, takes_figures) = (Vec::new(), figures);
    let mut outbox = Outbox { gateway, session, seq: acked, waiting, takes_figures, certificate };
    // Messages of the broken session: results are in the store, and reports are sent again. Only a result that is not
    // in the store (a live status check, a refusal) is taken from the queue.
    let unacknowledged = supervisor.unacknowledged_results().await?;
    let known: HashSet<String> = unacknowledged.iter().map(|result| result.op_id.clone()).collect();
    while let Ok(old) = messages.try_recv() {
        if matches!(&old, AgentMessage::Result(result) if !known.contains(&result.op_id)) {
            outbox.waiting.push(old);
        }
    }
    outbox.waiting.extend(unacknowledged.into_iter().map(AgentMessage::Result));
    Ok(outbox)
}

/// Handles the complete lines of the stream, and leaves an incomplete one in the buffer.
async fn handle_lines(
    buffer: &mut Vec<u8>,
    clock: &mut StreamClock,
    supervisor: &mut Supervisor,
) -> Result<(), SessionError> {
    let mut begin = 0;
    while let Some(length) = buffer[begin..].iter().position(|byte| *byte == b'\n') {
        let line = &buffer[begin..begin + length];
        begin += length + 1;
        if !line.is_empty() {
            // A newer gateway may send messages that this agent does not know.
            match serde_json::from_slice::<ToAgent>(line) {
                Ok(message) => {
                    let age_ms = clock.age_ms_of(&message)?;
                    supervisor.handle_message(message, age_ms).await;
                }
                Err(error) => warn!(%error, "message of the gateway ignored: unknown kind"),
            }
        }
    }
    buffer.drain(..begin);
    // A burst makes it as long as a chunk of the stream.
    buffer.shrink_to(IDLE_BUFFER_BYTES);
    Ok(())
}

impl StreamClock {
    /// The age of a message. An error: the stream lags, or one of the two clocks stood still.
    fn age_ms_of(&mut self, message: &ToAgent) -> Result<u64, SessionError> {
        match message {
            // An older gateway does not stamp its messages.
            ToAgent::Op(request) => Ok(request.ttl_ms.map_or(0, |_| self.age_ms(request.sent_ms))),
            ToAgent::Heartbeat { sent_ms, .. } => {
                let age_ms = self.age_ms(*sent_ms);
                match age_ms > LAG_MS {
                    true => Err(SessionError::Lags { age_ms }),
                    false => Ok(age_ms),
                }
            }
            ToAgent::SetSpec { .. }
            | ToAgent::Synced { .. }
            | ToAgent::Groups { .. }
            | ToAgent::ReadLog(_)
            | ToAgent::CancelLog { .. }
            | ToAgent::Measure { .. } => Ok(0),
        }
    }
}

/// Messages that wait to be sent, and the sequence number of the last one sent.
struct Outbox {
    gateway: GatewayClient,
    session: String,
    seq: u64,
    waiting: Vec<AgentMessage>,
    /// The gateway takes figures.
    takes_figures: bool,
    /// Life of the certificate that the session uses.
    certificate: Option<CertificateLife>,
}

impl Outbox {
    /// Sends figures. They are neither numbered nor repeated.
    fn send_figures(&self, update: FiguresUpdate) -> impl Future<Output = bool> + Send + 'static {
        let (gateway, session) = (self.gateway.clone(), self.session.clone());
        async move {
            let query = [("session", session.as_str())];
            let sent: Result<serde_json::Value, SessionError> =
                gateway.call("figures", &query, &update).await;
            if let Err(error) = &sent {
                debug!(error = %chain(error), "figures not sent");
            }
            sent.is_ok()
        }
    }

    /// Sends the waiting messages, or none as a heartbeat. Returns the acknowledged results.
    fn batch(&mut self) -> impl Future<Output = Result<Vec<OpResult>, SessionError>> + Send + 'static {
        let count = self.waiting.len().min(BATCH);
        let mut batch = Vec::with_capacity(count);
        for what in self.waiting.drain(..count) {
            self.seq += 1;
            batch.push(FromAgent { seq: self.seq, what });
        }
        self.waiting.shrink_to(IDLE_MESSAGES);
        let (gateway, session) = (self.gateway.clone(), self.session.clone());
        async move {
            let clock = clock::now().0.to_string();
            let query = [("session", session.as_str()), ("clock", clock.as_str())];
            let acked: Acked = gateway.call("tell", &query, &batch).await?;
            debug!(messages = batch.len(), acked = acked.acked, "messages sent");
            let results = batch.into_iter().filter(|message| message.seq <= acked.acked);
            Ok(results
                .filter_map(|message| match message.what {
                    AgentMessage::Result(result) => Some(result),
                    AgentMessage::Report(_) => None,
                })
                .collect())
        }
    }
}

/// Client for the agent API of the gateway.
#[derive(Clone)]
pub(super) struct GatewayClient {
    client: Client,
    base: String,
    /// A static token; `None`: the client has a certificate.
    token: Option<String>,
}

impl GatewayClient {
    fn new(config: &JoinConfig, credential: SessionCredential) -> GatewayClient {
        let base = format!("{}/api/abide/v1/agent", config.url.trim_end_matches('/'));
        let SessionCredential { client, token } = credential;
        GatewayClient { client, base, token }
    }

    fn authorized(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        call: &str,
        query: &[(&str, &str)],
        body: &impl serde::Serialize,
    ) -> Result<T, SessionError> {
        let query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let url = format!("{}/{call}?{}", self.base, query.join("&"));
        let request = self.authorized(self.client.post(url)).json(body).timeout(STREAM_TIMEOUT);
        let response = request.send().await.map_err(TransportError::from)?;
        // The token is for the gateway, not for the address of a redirect.
        if let Some(why) = redirect(&response) {
            return Err(TransportError::from(why).into());
        }
        let status = response.status();
        let bytes = response.bytes().await.map_err(TransportError::from)?;
        parse_response(status, &bytes)
    }

    /// Sends the answer to a read of a log. A lost answer is not repeated: the gateway reads again.
    async fn send_log_chunk(self, session: String, chunk: LogChunk) {
        let sent: Result<bool, SessionError> = self.call("logs", &[("session", &session)], &chunk).await;
        if let Err(error) = sent {
            debug!(why = %chain(&error), "log not sent");
        }
    }

    async fn stream(
        &self,
        session: &str,
    ) -> Result<impl futures_util::Stream<Item = reqwest::Result<axum::body::Bytes>> + Unpin, SessionError>
    {
        let url = format!("{}/stream?session={session}&after=0", self.base);
        let request = self.authorized(self.client.get(url));
        let response = request.send().await.map_err(TransportError::from)?;
        if let Some(why) = redirect(&response) {
            return Err(TransportError::from(why).into());
        }
        let status = response.status();
        if status != StatusCode::OK {
            let bytes = response.bytes().await.map_err(TransportError::from)?;
            return parse_response::<serde_json::Value>(status, &bytes)
                .and_then(|_| Err(SessionError::NoStream(status)));
        }
        Ok(Box::pin(response.bytes_stream()))
    }
}

pub(super) fn parse_response<T: DeserializeOwned>(
    status: StatusCode,
    bytes: &[u8],
) -> Result<T, SessionError> {
    #[derive(Deserialize)]
    struct ErrorBody {
        message: String,
    }
    if status == StatusCode::OK
        && let Ok(Envelope { data: Some(data), result: true, .. }) =
            serde_json::from_slice::<Envelope<T>>(bytes)
    {
        return Ok(data);
    }
    let message = serde_json::from_slice::<ErrorBody>(bytes).map(|refused| refused.message);
    let message = message.unwrap_or_else(|_| "no reason given".to_owned());
    Err(SessionError::Refused { status, message })
}
