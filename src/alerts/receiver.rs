//! Alert receivers: a JSON webhook with an optional template and signature, a command, and Alertmanager.

use std::time::Duration;

use serde_json::Value;

use super::message::{ALERTMANAGER_BATCH, MessageOrigin, alertmanager_alerts, message, placeholders};
pub use super::sign::SignatureScheme;
use super::template::MessageTemplate;
use super::tracker::IncidentBatch;
use crate::contract;
use crate::http::{PostError, WebhookAnswer, WebhookClient};
use crate::model::Time;
use crate::subprocess::{self, SubprocessError, SubprocessLimits};

/// Maximum output of a command, and maximum quoted characters of an answer.
const MAX_OUTPUT: usize = 64 << 10;
const MAX_QUOTED: usize = 200;

/// The destination of a route's messages.
pub enum AlertReceiver {
    Webhook {
        client: WebhookClient,
        /// `None`: the JSON document as it is.
        template: Option<MessageTemplate>,
        signature: Option<(SignatureScheme, String)>,
    },
    /// Its arguments; the JSON document is its input.
    Command(Vec<String>),
    /// `POST /api/v2/alerts`
    Alertmanager(WebhookClient),
}

/// A message that was not delivered.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    #[error("{}", .0.why)]
    Post(#[source] PostError),
    #[error(transparent)]
    Command(#[from] SubprocessError),
    /// Chat services answer 200 and an error in the body.
    #[error("the receiver refused the message: {0}")]
    Refused(String),
}

impl SendError {
    /// Whether the same message may be accepted soon.
    pub fn may_retry(&self) -> bool {
        match self {
            SendError::Post(error) => error.may_retry,
            SendError::Command(SubprocessError::Empty | SubprocessError::Start { .. }) => false,
            SendError::Command(_) | SendError::Refused(_) => true,
        }
    }
}

impl AlertReceiver {
    /// The receiver without its secrets.
    pub fn shown(&self) -> String {
        match self {
            AlertReceiver::Webhook { client, .. } => client.shown(),
            AlertReceiver::Command(argv) => {
                format!("command {}", argv.first().map(String::as_str).unwrap_or_default())
            }
            AlertReceiver::Alertmanager(client) => format!("Alertmanager {}", client.shown()),
        }
    }

    /// Whether firing incidents must be sent again within a minute.
    pub fn needs_refresh(&self) -> bool {
        matches!(self, AlertReceiver::Alertmanager(_))
    }

    /// Delivers a batch, and returns the answer in one line.
    pub async fn send(
        &self,
        batch: &IncidentBatch,
        origin: &MessageOrigin,
        now: Time,
        timeout: Duration,
    ) -> Result<String, SendError> {
        match self {
            AlertReceiver::Webhook { client, template, signature } => {
                let (timestamp, sign) = match signature {
                    Some((scheme, secret)) => scheme.sign(secret, now),
                    None => Default::default(),
                };
                let document = message(batch, origin, now);
                let body = match template {
                    None => contract::compact(&document),
                    Some(template) => {
                        let values = placeholders(&document, &timestamp, &sign);
                        let values: Vec<(&str, &str)> =
                            values.iter().map(|(name, value)| (*name, value.as_str())).collect();
                        template.render(&values)
                    }
                };
                let signed =
                    signature.as_ref().is_some_and(|(scheme, _)| *scheme == SignatureScheme::DingTalk);
                let parameters = [("timestamp", timestamp.as_str()), ("sign", sign.as_str())];
                let parameters = if signed { &parameters[..] } else { &[] };
                let answer = client.post_signed(parameters, body, timeout).await.map_err(SendError::Post)?;
                accepted(&answer)
            }
            AlertReceiver::Command(argv) => {
                let input = contract::compact(&message(batch, origin, now)).into_bytes();
                let limits = SubprocessLimits { timeout, max_output: MAX_OUTPUT };
                let out = subprocess::run(argv.clone(), input, limits).await?;
                Ok(with_text("exit 0", &String::from_utf8_lossy(&out)))
            }
            AlertReceiver::Alertmanager(client) => {
                let alerts = alertmanager_alerts(batch, origin, now);
                let mut last = String::new();
                for chunk in alerts.chunks(ALERTMANAGER_BATCH) {
                    let body = serde_json::to_string(chunk).unwrap_or_default();
                    let answer = client.post_signed(&[], body, timeout).await.map_err(SendError::Post)?;
                    last = described(&answer);
                }
                Ok(last)
            }
        }
    }
}

/// The answer, unless it is an error in the form of DingTalk and WeCom (`errcode`) or Feishu (`code`).
fn accepted(answer: &WebhookAnswer) -> Result<String, SendError> {
    if let Ok(Value::Object(fields)) = serde_json::from_str(&answer.body) {
        let forms = [("errcode", "errmsg"), ("code", "msg")];
        for (code, text) in forms {
            let number = fields.get(code).and_then(Value::as_i64).filter(|code| *code != 0);
            if let (Some(number), Some(text)) = (number, fields.get(text).and_then(Value::as_str)) {
                return Err(SendError::Refused(format!("{code} {number}: {}", quoted(text))));
            }
        }
    }
    Ok(described(answer))
}

fn described(answer: &WebhookAnswer) -> String {
    with_text(&format!("HTTP {}", answer.status), &answer.body)
}

/// A result with the first line of its text.
fn with_text(result: &str, text: &str) -> String {
    match quoted(text) {
        text if text.is_empty() => result.to_owned(),
        text => format!("{result}: {text}"),
    }
}

/// The first line of a text, shortened.
fn quoted(text: &str) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    crate::escape::visible(&line.chars().take(MAX_QUOTED).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_the_body_is_no_delivery() {
        let answer = |body: &str| accepted(&WebhookAnswer { status: 200, body: body.to_owned() });
        for body in ["ok", "", "{\"errcode\":0,\"errmsg\":\"ok\"}", "{\"code\":0,\"msg\":\"success\"}", "[1]"]
        {
            assert!(answer(body).is_ok(), "{body}");
        }
        let refused = answer("{\"errcode\":310000,\"errmsg\":\"sign not match\"}").expect_err("an error");
        assert_eq!(refused.to_string(), "the receiver refused the message: errcode 310000: sign not match");
        assert!(answer("{\"code\":19021,\"msg\":\"sign match fail\",\"data\":{}}").is_err());
    }
}
