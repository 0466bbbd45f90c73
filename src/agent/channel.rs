//! The agent's side of the channel: it connects out, comes back when the connection breaks, and tells until it is heard.
//!
//! Results are in the agent's store until the gateway has taken them; reports are not, since after a break everything is
//! told of anew. So nothing is lost, and what is told twice is taken once: a row that is final stays so.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt;
use reqwest::{Client, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::stream_clock::StreamClock;
use super::{Supervisor, now_ms};
use crate::gse::agent_protocol::{
    Acked, AgentMessage, FromAgent, HEARTBEAT_SECS, Join, Joined, OpResult, ToAgent,
};
use crate::gse::response::Envelope;
use crate::http::{ClientConfig, describe, redirect};
use crate::model::HostKey;

/// Whom an agent joins, and as what.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    pub url: String,
    /// Read anew for every session: a token may be replaced.
    pub token_file: PathBuf,
    /// The same as long as the agent keeps its folder.
    pub agent: String,
    pub hosts: Vec<HostKey>,
    pub calling: ClientConfig,
}

/// The most that is told at once.
const BATCH: usize = 1000;
/// Silence for this long means that nobody is there.
const STREAM_TIMEOUT: Duration = Duration::from_secs(3 * HEARTBEAT_SECS + 1);
/// A stream whose heartbeats are later than this is opened again: the gateway then stamps open operations again.
const LAG_MS: u64 = 5_000;
/// Between two tries to join: from, to.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// Serves a gateway until told to stop. `ready` is called when the first session stands.
pub async fn run(
    joining: JoinConfig,
    mut table: Supervisor,
    mut told: mpsc::UnboundedReceiver<AgentMessage>,
    mut ready: impl FnMut(),
    mut stop: watch::Receiver<bool>,
) -> Result<(), String> {
    let client = joining.calling.client(&joining.url)?;
    let mut wait = BACKOFF.0;
    loop {
        let begun = Instant::now();
        let why = tokio::select! {
            why = session(&joining, &client, &mut table, &mut told, &mut ready) => why,
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => return Ok(()),
        };
        // One that stood for a while was a good one.
        if begun.elapsed() > BACKOFF.1 {
            wait = BACKOFF.0;
        }
        let jitter = Duration::from_millis(now_ms().unsigned_abs() % 50);
        warn!(%why, again_in = ?wait, "no session with the gateway");
        tokio::select! {
            () = tokio::time::sleep(wait + jitter) => {}
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => return Ok(()),
        }
        wait = (wait * 2).min(BACKOFF.1);
    }
}

/// One session, from joining until it breaks. Why it did.
async fn session(
    joining: &JoinConfig,
    client: &Client,
    table: &mut Supervisor,
    told: &mut mpsc::UnboundedReceiver<AgentMessage>,
    ready: &mut impl FnMut(),
) -> String {
    match try_session(joining, client, table, told, ready).await {
        Ok(()) => "the gateway ended the stream".to_owned(),
        Err(why) => why,
    }
}

async fn try_session(
    joining: &JoinConfig,
    client: &Client,
    table: &mut Supervisor,
    told: &mut mpsc::UnboundedReceiver<AgentMessage>,
    ready: &mut impl FnMut(),
) -> Result<(), String> {
    let gateway = GatewayClient::new(joining, client)?;
    let ask = Join {
        agent: joining.agent.clone(),
        hosts: joining.hosts.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        clock: Some(now_ms()),
        floors: true,
        last_seq: table.last_seq(),
    };
    let Joined { session, acked, store } = gateway.call("join", &[], &ask).await?;
    table.session_started(&store).await.map_err(|error| error.to_string())?;
    let mut outbox =
        Outbox { gateway: gateway.clone(), session: session.clone(), seq: acked, waiting: Vec::new() };
    // What was under way when the last session broke: results are in the store, and everything else is told anew.
    let untaken = table.unacknowledged_results().await.map_err(|error| error.to_string())?;
    let known: HashSet<String> = untaken.iter().map(|result| result.op_id.clone()).collect();
    while let Ok(old) = told.try_recv() {
        if matches!(&old, AgentMessage::Result(result) if !known.contains(&result.op_id)) {
            outbox.waiting.push(old);
        }
    }
    outbox.waiting.extend(untaken.into_iter().map(AgentMessage::Result));
    table.report_all();
    let mut clock = StreamClock::start();
    let mut stream = gateway.stream(&session).await?;
    info!(url = %joining.url, hosts = joining.hosts.len(), "joined");
    ready();
    let mut lines = Vec::new();
    let mut heard = Instant::now();
    let mut beat = tokio::time::interval(Duration::from_secs(HEARTBEAT_SECS));
    let mut busy = true;
    let mut telling: Option<tokio::task::JoinHandle<Result<Vec<OpResult>, String>>> = None;
    loop {
        if telling.is_none() && !outbox.waiting.is_empty() {
            telling = Some(tokio::spawn(outbox.batch()));
        }
        tokio::select! {
            piece = stream.next() => match piece {
                None => return Ok(()),
                Some(Err(error)) => return Err(format!("the stream broke: {error}")),
                Some(Ok(bytes)) => {
                    heard = Instant::now();
                    lines.extend_from_slice(&bytes);
                    while let Some(end) = lines.iter().position(|byte| *byte == b'\n') {
                        let line: Vec<u8> = lines.drain(..=end).collect();
                        if line.len() > 1 {
                            // What a newer gateway says and we do not understand is none of our business.
                            match serde_json::from_slice::<ToAgent>(&line) {
                                Ok(down) => {
                                    let age_ms = clock.age_ms_of(&down)?;
                                    table.handle_message(down, age_ms).await;
                                }
                                Err(error) => warn!(%error, "the gateway said something unknown"),
                            }
                        }
                    }
                }
            },
            Some(one) = told.recv() => {
                busy = true;
                outbox.waiting.push(one);
                while outbox.waiting.len() < BATCH && let Ok(more) = told.try_recv() {
                    outbox.waiting.push(more);
                }
            }
            ended = async { match &mut telling { Some(telling) => telling.await, None => std::future::pending().await } } => {
                telling = None;
                let taken = ended.map_err(|error| error.to_string())??;
                table.acknowledged(taken).await.map_err(|error| error.to_string())?;
            }
            _ = beat.tick() => {
                // A burst of work is over.
                if std::mem::take(&mut busy) {
                    super::process::release_memory();
                }
                if heard.elapsed() > STREAM_TIMEOUT {
                    return Err("the gateway has been silent for too long".to_owned());
                }
                if telling.is_none() && outbox.waiting.is_empty() {
                    telling = Some(tokio::spawn(outbox.batch()));
                }
            }
        }
    }
}

impl StreamClock {
    /// How long a message was on its way. An error: this stream lags, or one of the two clocks stood still.
    fn age_ms_of(&mut self, down: &ToAgent) -> Result<u64, String> {
        match down {
            // An older gateway does not stamp its messages.
            ToAgent::Op(request) => Ok(request.ttl_ms.map_or(0, |_| self.age_ms(request.sent_ms))),
            ToAgent::Heartbeat { sent_ms, .. } => {
                let age_ms = self.age_ms(*sent_ms);
                match age_ms > LAG_MS {
                    true => Err(format!("the stream lags by {age_ms} ms")),
                    false => Ok(age_ms),
                }
            }
            ToAgent::SetSpec { .. } | ToAgent::Synced { .. } | ToAgent::Groups { .. } => Ok(0),
        }
    }
}

/// What is to be told, and from which number on.
struct Outbox {
    gateway: GatewayClient,
    session: String,
    seq: u64,
    waiting: Vec<AgentMessage>,
}

impl Outbox {
    /// Tells what waits, or, if nothing does, that we are here. The results that the gateway has now.
    fn batch(&mut self) -> impl Future<Output = Result<Vec<OpResult>, String>> + Send + 'static {
        let many = self.waiting.len().min(BATCH);
        let mut ups = Vec::with_capacity(many);
        for what in self.waiting.drain(..many) {
            self.seq += 1;
            ups.push(FromAgent { seq: self.seq, what });
        }
        let (gateway, session) = (self.gateway.clone(), self.session.clone());
        async move {
            let clock = now_ms().to_string();
            let query = [("session", session.as_str()), ("clock", clock.as_str())];
            let acked: Acked = gateway.call("tell", &query, &ups).await?;
            debug!(told = ups.len(), acked = acked.acked, "told");
            let results = ups.into_iter().filter(|up| up.seq <= acked.acked);
            Ok(results
                .filter_map(|up| match up.what {
                    AgentMessage::Result(result) => Some(result),
                    AgentMessage::Report(_) => None,
                })
                .collect())
        }
    }
}

/// The gateway's agent calls.
#[derive(Clone)]
struct GatewayClient {
    client: Client,
    base: String,
    token: String,
}

impl GatewayClient {
    fn new(joining: &JoinConfig, client: &Client) -> Result<GatewayClient, String> {
        let file = joining.token_file.display();
        let token = std::fs::read_to_string(&joining.token_file)
            .map_err(|error| format!("cannot read the token in {file}: {error}"))?;
        crate::permissions::check_private(&joining.token_file)?;
        let token = token.trim().to_owned();
        let base = format!("{}/api/abide/v1/agent", joining.url.trim_end_matches('/'));
        Ok(GatewayClient { client: client.clone(), base, token })
    }

    async fn call<T: DeserializeOwned>(
        &self,
        call: &str,
        query: &[(&str, &str)],
        body: &impl serde::Serialize,
    ) -> Result<T, String> {
        let query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let url = format!("{}/{call}?{}", self.base, query.join("&"));
        let request = self.client.post(url).bearer_auth(&self.token).json(body).timeout(STREAM_TIMEOUT);
        let response = request.send().await.map_err(|error| describe(&error))?;
        // The token is for the gateway, not for the address of a redirect.
        if let Some(why) = redirect(&response) {
            return Err(why);
        }
        let status = response.status();
        let bytes = response.bytes().await.map_err(|error| describe(&error))?;
        parse_response(status, &bytes)
    }

    async fn stream(
        &self,
        session: &str,
    ) -> Result<impl futures_util::Stream<Item = reqwest::Result<axum::body::Bytes>> + Unpin, String> {
        let url = format!("{}/stream?session={session}&after=0", self.base);
        let response =
            self.client.get(url).bearer_auth(&self.token).send().await.map_err(|error| describe(&error))?;
        if let Some(why) = redirect(&response) {
            return Err(why);
        }
        let status = response.status();
        if status != StatusCode::OK {
            let bytes = response.bytes().await.map_err(|error| describe(&error))?;
            return parse_response::<serde_json::Value>(status, &bytes)
                .and_then(|_| Err(format!("HTTP {status}")));
        }
        Ok(Box::pin(response.bytes_stream()))
    }
}

fn parse_response<T: DeserializeOwned>(status: StatusCode, bytes: &[u8]) -> Result<T, String> {
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
    Err(format!(
        "the gateway refuses ({status}): {}",
        message.unwrap_or_else(|_| "no reason given".to_owned())
    ))
}
