//! Telling somebody at an address that is a secret as a whole: of it, only the host is ever shown.

use std::time::Duration;

use reqwest::{Client, Url};

use super::{ClientConfig, describe, redirect};

pub struct WebhookClient {
    client: Client,
    url: Url,
}

impl WebhookClient {
    /// `insecure`: plain http is accepted to an address that is not loopback, too.
    pub fn new(url: &str, insecure: bool) -> Result<WebhookClient, String> {
        // What is wrong with it is not repeated: it may be the secret.
        let parsed = url.parse::<Url>().ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let parsed = parsed.ok_or("it is no http or https address")?;
        let calling = ClientConfig { insecure, ..ClientConfig::default() };
        Ok(WebhookClient { client: calling.client(url)?, url: parsed })
    }

    /// All of the address that may be shown.
    pub fn shown(&self) -> String {
        format!("{}://{}/…", self.url.scheme(), self.url.host_str().unwrap_or_default())
    }

    /// Sends JSON. If it fails: why, and whether that may change.
    pub async fn post(&self, body: String, time: Duration) -> Result<(), (String, bool)> {
        let request = self
            .client
            .post(self.url.clone())
            .header("Content-Type", "application/json")
            .timeout(time)
            .body(body);
        let answer = request.send().await.map_err(|error| (describe(&error.without_url()), true))?;
        if let Some(why) = redirect(&answer) {
            return Err((why, false));
        }
        let status = answer.status();
        match status.as_u16() {
            _ if status.is_success() => Ok(()),
            408 | 429 | 500.. => Err((format!("HTTP {status}"), true)),
            _ => Err((format!("HTTP {status}"), false)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_not_shown() {
        let hook = WebhookClient::new("https://hooks.example/T0/s3cret?key=k", false).expect("an address");
        assert_eq!(hook.shown(), "https://hooks.example/…");
        for wrong in ["hooks/s3cret", "file:///s3cret", "http://hooks.example/s3cret", ""] {
            assert!(WebhookClient::new(wrong, false).is_err_and(|why| !why.contains("s3cret")), "{wrong}");
        }
    }
}
