//! Webhook client: posts JSON to a URL that is a secret; messages show only its host.

use std::time::Duration;

use reqwest::{Client, Url};

use super::client::ClientError;
use super::error::TransportError;
use super::{ClientConfig, redirect};

/// A message that was not delivered.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct PostError {
    #[source]
    pub why: TransportError,
    /// Whether a retry may succeed.
    pub may_retry: bool,
}

/// Maximum bytes of an answer that are read.
const MAX_ANSWER: usize = 64 << 10;

/// The answer of a receiver that accepted a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookAnswer {
    pub status: u16,
    /// The first part of the body.
    pub body: String,
}

pub struct WebhookClient {
    client: Client,
    url: Url,
}

impl WebhookClient {
    /// `insecure`: allow plain http to an address that is not loopback.
    pub fn new(url: &str, insecure: bool) -> Result<WebhookClient, ClientError> {
        WebhookClient::with_config(url, &ClientConfig { insecure, ..ClientConfig::default() })
    }

    pub fn with_config(url: &str, config: &ClientConfig) -> Result<WebhookClient, ClientError> {
        let parsed = url.parse::<Url>().ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let parsed = parsed.ok_or(ClientError::InvalidUrl)?;
        Ok(WebhookClient { client: config.client(url)?, url: parsed })
    }

    /// The part of the URL that may be logged.
    pub fn shown(&self) -> String {
        format!("{}://{}/…", self.url.scheme(), self.url.host_str().unwrap_or_default())
    }

    /// Sends JSON.
    pub async fn post(&self, body: String, time: Duration) -> Result<(), PostError> {
        self.post_signed(&[], body, time).await.map(drop)
    }

    /// Sends JSON with further query parameters, and returns the answer.
    pub async fn post_signed(
        &self,
        parameters: &[(&str, &str)],
        body: String,
        time: Duration,
    ) -> Result<WebhookAnswer, PostError> {
        let failed = |why: TransportError, may_retry| PostError { why, may_retry };
        let mut url = self.url.clone();
        if !parameters.is_empty() {
            url.query_pairs_mut().extend_pairs(parameters);
        }
        let request =
            self.client.post(url).header("Content-Type", "application/json").timeout(time).body(body);
        let answer = request.send().await.map_err(|error| failed(error.without_url().into(), true))?;
        if let Some(why) = redirect(&answer) {
            return Err(failed(why.into(), false));
        }
        let status = answer.status();
        match status.as_u16() {
            _ if status.is_success() => {
                let body = first_part(answer).await.map_err(|error| failed(error.into(), true))?;
                Ok(WebhookAnswer { status: status.as_u16(), body })
            }
            408 | 429 | 500.. => Err(failed(format!("HTTP {status}").into(), true)),
            _ => Err(failed(format!("HTTP {status}").into(), false)),
        }
    }
}

/// The first part of a body.
async fn first_part(mut answer: reqwest::Response) -> Result<String, reqwest::Error> {
    let mut bytes = Vec::new();
    while bytes.len() < MAX_ANSWER
        && let Some(chunk) = answer.chunk().await.map_err(reqwest::Error::without_url)?
    {
        bytes.extend_from_slice(&chunk);
    }
    bytes.truncate(MAX_ANSWER);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_chain::chain;

    #[test]
    fn messages_omit_the_secret_url() {
        let hook = WebhookClient::new("https://hooks.example/T0/s3cret?key=k", false).expect("an address");
        assert_eq!(hook.shown(), "https://hooks.example/…");
        for wrong in ["hooks/s3cret", "file:///s3cret", "http://hooks.example/s3cret", ""] {
            assert!(
                WebhookClient::new(wrong, false).is_err_and(|why| !chain(&why).contains("s3cret")),
                "{wrong}"
            );
        }
    }
}
