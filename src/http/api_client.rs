//! Calls to a gateway or platform that speaks JSON in envelopes, with an app's credentials.

use std::time::Duration;

use reqwest::{Client, Method, StatusCode};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::error::{describe, was_canceled, was_not_sent};
use super::{ClientConfig, redirect};
use crate::failpoint;

/// Whom to call, and as whom.
#[derive(Clone)]
pub struct ApiEndpoint {
    pub url: String,
    pub code: String,
    pub secret: String,
    pub username: Option<String>,
    pub client_config: ClientConfig,
}

impl std::fmt::Debug for ApiEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiEndpoint")
            .field("url", &self.url)
            .field("code", &self.code)
            .finish_non_exhaustive()
    }
}

#[derive(Clone)]
pub struct ApiClient {
    client: Client,
    base: String,
    /// `X-Bkapi-Authorization`.
    authorization: String,
}

/// Why a call came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// It never left: it was not carried out.
    Unreachable(String),
    /// It was redirected, and redirects are not followed.
    Redirected { why: String, may_have_run: bool },
    /// It left, and no whole answer came: it may have been carried out.
    NoAnswer(String),
    /// There was an answer, and it says no.
    Refused { status: u16, code: i64, message: String },
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CallError::Unreachable(why) | CallError::Redirected { why, .. } => {
                write!(f, "it cannot be reached: {why}")
            }
            CallError::NoAnswer(why) => write!(f, "it did not answer: {why}"),
            CallError::Refused { status: 200, code, message } => {
                write!(f, "it refuses: {message} (code {code})")
            }
            CallError::Refused { status, message, .. } => write!(f, "it refuses: {message} (HTTP {status})"),
        }
    }
}

/// What every answer stands in.
#[derive(Deserialize)]
struct Envelope<'a> {
    result: Option<bool>,
    code: Option<i64>,
    message: Option<String>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

impl ApiClient {
    pub fn new(access: &ApiEndpoint) -> Result<ApiClient, String> {
        let authorization = serde_json::json!({
            "bk_app_code": access.code,
            "bk_app_secret": access.secret,
            "bk_username": access.username.as_deref().unwrap_or("admin"),
        });
        Ok(ApiClient {
            client: access.client_config.client(&access.url)?,
            base: access.url.trim_end_matches('/').to_owned(),
            authorization: authorization.to_string(),
        })
    }

    pub fn url(&self) -> &str {
        &self.base
    }

    /// One call: the text of its `data`, if the answer says that all went well.
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
            .header("X-Bkapi-Authorization", &self.authorization)
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
            true => CallError::Unreachable(describe(&error)),
            false => CallError::NoAnswer(describe(&error)),
        })?;
        if let Some(why) = redirect(&response) {
            return Err(CallError::Redirected {
                why,
                may_have_run: changes && may_have_run(response.status()),
            });
        }
        let status = response.status();
        let bytes = response.bytes().await.map_err(|error| CallError::NoAnswer(describe(&error)))?;
        if counts {
            failpoint::step(path);
        }
        let text = String::from_utf8_lossy(&bytes);
        let Ok(envelope) = serde_json::from_str::<Envelope<'_>>(&text) else {
            return Err(match status {
                // Something before the gateway answered for it.
                status if status.is_success() => CallError::NoAnswer("the answer is no envelope".to_owned()),
                status => {
                    CallError::Refused { status: status.as_u16(), code: 0, message: status_reason(&status) }
                }
            });
        };
        if status == StatusCode::OK && envelope.result == Some(true) && envelope.code.unwrap_or(0) == 0 {
            return Ok(envelope.data.map_or("null", RawValue::get).to_owned());
        }
        let message =
            envelope.message.filter(|text| !text.is_empty()).unwrap_or_else(|| status_reason(&status));
        Err(CallError::Refused { status: status.as_u16(), code: envelope.code.unwrap_or(0), message })
    }
}

/// May a POST that is answered with this redirect have been carried out? Only 307 and 308 ask for the same request at
/// another address; after the others a client continues with GET, as after a form that was processed.
fn may_have_run(status: StatusCode) -> bool {
    !matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
}

/// How often a call is made again that found its connection gone before it was sent.
const MAX_RESENDS: usize = 2;

/// The answer. What was never sent is sent again: the next time the peer says why it hangs up, or does not.
async fn send_with_retry(mut request: reqwest::RequestBuilder) -> reqwest::Result<reqwest::Response> {
    for _ in 0..MAX_RESENDS {
        let Some(again) = request.try_clone() else { break };
        match request.send().await {
            Err(error) if was_canceled(&error) => request = again,
            asked => return asked,
        }
    }
    request.send().await
}

/// An answer that goes on and on, line by line.
pub struct LineStream {
    response: reqwest::Response,
    /// What came after the last whole line.
    rest: Vec<u8>,
}

impl ApiClient {
    /// A call whose answer is lines, for as long as somebody reads them.
    pub async fn lines(&self, path: &str, time: Duration) -> Result<LineStream, CallError> {
        let request = self
            .client
            .get(format!("{}{path}", self.base))
            .header("X-Bkapi-Authorization", &self.authorization);
        let asked = tokio::time::timeout(time, request.send()).await;
        let response = asked
            .map_err(|_| CallError::NoAnswer("no answer came in time".to_owned()))?
            .map_err(|error| CallError::Unreachable(describe(&error)))?;
        if let Some(why) = redirect(&response) {
            return Err(CallError::Redirected { why, may_have_run: false });
        }
        let status = response.status();
        match status {
            StatusCode::OK => Ok(LineStream { response, rest: Vec::new() }),
            status => {
                Err(CallError::Refused { status: status.as_u16(), code: 0, message: status_reason(&status) })
            }
        }
    }
}

impl LineStream {
    /// The next whole lines, all that are there, each with its end; nothing when it is over.
    pub async fn next(&mut self) -> Result<Vec<u8>, CallError> {
        loop {
            let piece = self.response.chunk().await.map_err(|error| CallError::NoAnswer(describe(&error)))?;
            let Some(piece) = piece else { return Ok(Vec::new()) };
            self.rest.extend_from_slice(&piece);
            if let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') {
                let more = self.rest.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.rest, more));
            }
        }
    }
}

/// How often somebody asks for results, or renews a lease, is a matter of time: no step that could be counted.
fn is_polling_call(path: &str, body: &[u8]) -> bool {
    let results = path.contains("get_proc_operate_result") || path.contains("get_proc_result");
    results || body.starts_with(br#"{"renew_lease""#)
}

fn status_reason(status: &StatusCode) -> String {
    status.canonical_reason().unwrap_or("no reason given").to_owned()
}
