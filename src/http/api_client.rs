//! API client: JSON calls in GSE envelopes to a gateway or platform, with the credentials of an app or a person.

use std::time::Duration;

use reqwest::{Client, Method, StatusCode};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::client::ClientError;
use super::error::{TransportError, UnreadableResponse, was_canceled, was_not_sent};
use super::{ClientConfig, redirect};
use crate::failpoint;

/// Address and credentials of an API.
#[derive(Clone)]
pub struct ApiEndpoint {
    pub url: String,
    pub credentials: ApiCredentials,
    pub client_config: ClientConfig,
}

/// Credentials of a caller.
#[derive(Clone)]
pub enum ApiCredentials {
    App {
        code: String,
        secret: String,
        username: Option<String>,
    },
    /// The token of a person.
    Token(String),
}

impl ApiCredentials {
    /// Name and value of the header with the credentials.
    fn header(&self) -> (&'static str, String) {
        match self {
            ApiCredentials::App { code, secret, username } => {
                let fields = serde_json::json!({
                    "bk_app_code": code,
                    "bk_app_secret": secret,
                    "bk_username": username.as_deref().unwrap_or("admin"),
                });
                ("X-Bkapi-Authorization", fields.to_string())
            }
            ApiCredentials::Token(token) => ("Authorization", format!("Bearer {token}")),
        }
    }
}

impl std::fmt::Debug for ApiEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiEndpoint").field("url", &self.url).finish_non_exhaustive()
    }
}

#[derive(Clone)]
pub struct ApiClient {
    client: Client,
    base: String,
    /// Header with the credentials.
    authorization: (&'static str, String),
}

/// Reason why a call failed, and whether the server may have run it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The request was not sent, so it did not run.
    #[error("cannot reach the server: {0}")]
    Unreachable(#[source] TransportError),
    /// The server answered with a redirect, which the client does not follow.
    #[error("cannot reach the server: {why}")]
    Redirected { why: String, may_have_run: bool },
    /// The request was sent and no complete response arrived: it may have run.
    #[error("no response from the server: {0}")]
    NoAnswer(#[source] TransportError),
    /// A response arrived that is not of the expected form: the request may have run.
    #[error("cannot read the answer of the server: {0}")]
    Unreadable(#[source] UnreadableResponse),
    /// The server refused the call.
    #[error("the server refused the call: {message} ({})", number_shown(*status, *code))]
    Refused { status: u16, code: i64, message: String },
}

/// The more specific number: the envelope's code if HTTP reports success.
fn number_shown(status: u16, code: i64) -> String {
    if status == 200 { format!("code {code}") } else { format!("HTTP {status}") }
}

/// The envelope of every response.
#[derive(Deserialize)]
struct Envelope<'a> {
    result: Option<bool>,
    code: Option<i64>,
    message: Option<String>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

impl ApiClient {
    pub fn new(access: &ApiEndpoint) -> Result<ApiClient, ClientError> {
        Ok(ApiClient {
            client: access.client_config.client(&access.url)?,
            base: access.url.trim_end_matches('/').to_owned(),
            authorization: access.credentials.header(),
        })
    }

    pub fn url(&self) -> &str {
        &self.base
    }

    /// Makes one call. Returns the text of `data` if the envelope reports success.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        headers: &[(&str, String)],
        time: Duration,
    ) -> Result<String, CallError> {
        let counts = !is_polling_call(path, &body);
        let changes = method == Method::POST;
        let mut request = self
            .client
            .request(method, format!("{}{path}", self.base))
            .header(self.authorization.0, &self.authorization.1)
            .header("Content-Type", "application/json")
            .timeout(time)
            .body(body);
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        if counts {
            failpoint::step(path);
        }
        let response = send_with_retry(request).await.map_err(|error| match was_not_sent(&error) {
            true => CallError::Unreachable(error.into()),
            false => CallError::NoAnswer(error.into()),
        })?;
        if let Some(why) = redirect(&response) {
            return Err(CallError::Redirected {
                why,
                may_have_run: changes && may_have_run(response.status()),
            });
        }
        let status = response.status();
        let bytes = read_body(response).await?;
        if counts {
            failpoint::step(path);
        }
        let text = String::from_utf8_lossy(&bytes);
        let envelope: Envelope<'_> =
            serde_json::from_str(&text).map_err(|error| not_an_envelope(status, &error, &bytes))?;
        if status == StatusCode::OK && envelope.result == Some(true) && envelope.code.unwrap_or(0) == 0 {
            return Ok(envelope.data.map_or("null", RawValue::get).to_owned());
        }
        let message =
            envelope.message.filter(|text| !text.is_empty()).unwrap_or_else(|| status_reason(&status));
        Err(CallError::Refused { status: status.as_u16(), code: envelope.code.unwrap_or(0), message })
    }
}

/// Maximum bytes of a response.
const MAX_RESPONSE: usize = 512 << 20;

/// The whole body of a response. The beginning of one that ends early is part of the error.
async fn read_body(mut response: reqwest::Response) -> Result<Vec<u8>, CallError> {
    let status = response.status().as_u16();
    let mut bytes = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(piece)) => bytes.extend_from_slice(&piece),
            Ok(None) => return Ok(bytes),
            Err(error) if bytes.is_empty() => return Err(CallError::NoAnswer(error.into())),
            Err(error) => {
                let why = format!("incomplete: {}", TransportError::from(error));
                return Err(CallError::Unreadable(UnreadableResponse::new(status, &why, &bytes)));
            }
        }
        if bytes.len() > MAX_RESPONSE {
            return Err(CallError::Unreadable(UnreadableResponse::new(status, "too large", &bytes)));
        }
    }
}

/// Error of a response without an envelope: an intermediary answered instead of the gateway. Below 500 it refused the
/// request; else the request may have run.
fn not_an_envelope(status: StatusCode, error: &serde_json::Error, bytes: &[u8]) -> CallError {
    let why = match error.classify() {
        _ if bytes.is_empty() => "empty",
        serde_json::error::Category::Eof => "JSON that ends early",
        serde_json::error::Category::Data => "not a GSE envelope",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => "not JSON",
    };
    let response = UnreadableResponse::new(status.as_u16(), why, bytes);
    match status.is_client_error() {
        true => {
            let message = format!("{}: {response}", status_reason(&status));
            CallError::Refused { status: status.as_u16(), code: 0, message }
        }
        false => CallError::Unreadable(response),
    }
}

/// Whether a POST answered with this redirect may have run. Only 307 and 308 ask for the same request at another
/// address; after the others a client continues with GET, as after a processed form.
fn may_have_run(status: StatusCode) -> bool {
    !matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
}

/// Maximum resends of a call whose connection closed before the request was sent. On a busy machine several attempts in a
/// row lose the race against the server's alert, and only an attempt that wins it returns the reason.
const MAX_RESENDS: usize = 16;

/// Sends a request, and resends it if it was never written: a second attempt often returns the reason of the close.
async fn send_with_retry(mut request: reqwest::RequestBuilder) -> reqwest::Result<reqwest::Response> {
    for _ in 0..MAX_RESENDS {
        let Some(copy) = request.try_clone() else { break };
        match request.send().await {
            Err(error) if was_canceled(&error) => request = copy,
            result => return result,
        }
    }
    request.send().await
}

/// A streamed response, read line by line.
pub struct LineStream {
    response: reqwest::Response,
    /// Bytes after the last complete line.
    rest: Vec<u8>,
}

impl ApiClient {
    /// Opens a streamed response of lines.
    pub async fn lines(&self, path: &str, time: Duration) -> Result<LineStream, CallError> {
        let request = self
            .client
            .get(format!("{}{path}", self.base))
            .header(self.authorization.0, &self.authorization.1);
        let sent = tokio::time::timeout(time, request.send()).await;
        let response = sent
            .map_err(|_| CallError::NoAnswer("the request timed out".into()))?
            .map_err(|error| CallError::Unreachable(error.into()))?;
        if let Some(why) = redirect(&response) {
            return Err(CallError::Redirected { why, may_have_run: false });
        }
        let status = response.status();
        let kind = response.headers().get("content-type").and_then(|kind| kind.to_str().ok());
        // A refusal is an envelope, not a stream.
        if status == StatusCode::OK && kind != Some("application/json") {
            return Ok(LineStream { response, rest: Vec::new() });
        }
        let bytes = response.bytes().await.map_err(|error| CallError::NoAnswer(error.into()))?;
        let text = String::from_utf8_lossy(&bytes);
        let envelope = serde_json::from_str::<Envelope<'_>>(&text).ok();
        let code = envelope.as_ref().and_then(|envelope| envelope.code).unwrap_or(0);
        let message = envelope.and_then(|envelope| envelope.message).filter(|text| !text.is_empty());
        let message = message.unwrap_or_else(|| status_reason(&status));
        Err(CallError::Refused { status: status.as_u16(), code, message })
    }
}

impl LineStream {
    /// The available complete lines, each with its line end; empty at the end of the stream.
    pub async fn next(&mut self) -> Result<Vec<u8>, CallError> {
        loop {
            let piece = self.response.chunk().await.map_err(|error| CallError::NoAnswer(error.into()))?;
            let Some(piece) = piece else { return Ok(Vec::new()) };
            self.rest.extend_from_slice(&piece);
            if let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') {
                let more = self.rest.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.rest, more));
            }
        }
    }
}

/// The number of result polls and lease renewals depends on timing, so failpoints do not count them.
fn is_polling_call(path: &str, body: &[u8]) -> bool {
    let results = path.contains("get_proc_operate_result") || path.contains("get_proc_result");
    results || body.starts_with(br#"{"renew_lease""#)
}

fn status_reason(status: &StatusCode) -> String {
    status.canonical_reason().unwrap_or("no reason given").to_owned()
}
