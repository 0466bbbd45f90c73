//! Incoming webhooks: verification of signed requests that trigger an observation.
//!
//! Three schemes: GitHub and Gitea sign the body, GitLab sends the secret, and Standard Webhooks sign the body with
//! an id and a timestamp. A signed timestamp must be within five minutes of the local clock, and each id counts once:
//! a repeated request is acknowledged and triggers nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};

use super::reply::{ErrorResponse, error_response};
use crate::http::{CredentialCheck, Reloadable, base64, constant_time_eq, verify_hex_signature, verify_hmac};

/// Maximum difference between the sender's clock and the local one, in seconds.
const TIMESTAMP_WINDOW_SECS: i64 = 300;
/// Maximum stored ids. Only requests with a valid signature add one.
const MAX_IDS: usize = 100_000;
/// Prefix of a Standard Webhooks secret; the rest is base64.
const PREFIX: &str = "whsec_";

/// The webhook secret, and the recently accepted requests.
#[derive(Clone)]
pub struct Webhook {
    secret: Reloadable<String>,
    /// Timestamps by id.
    accepted: Arc<Mutex<BTreeMap<String, i64>>>,
}

/// Whether a signed request was accepted before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    First,
    /// A retry of the sender, or a replayed request. It has no effect.
    Repeated,
}

impl Webhook {
    pub fn new(secret: Reloadable<String>) -> Webhook {
        Webhook { secret, accepted: Arc::default() }
    }

    /// Checks whether the secret is unchanged.
    pub(super) fn credential_check(&self) -> CredentialCheck {
        let (secret, first) = (self.secret.clone(), self.secret.get());
        Box::new(move || constant_time_eq(&secret.get(), &first))
    }

    /// Accepts a request once. `now`: seconds since 1970.
    pub(super) fn accept(&self, parts: &Parts, body: &[u8], now: i64) -> Result<Delivery, ErrorResponse> {
        let unsigned = |why: &str| Err(error_response(StatusCode::UNAUTHORIZED, why));
        let secret = self.secret.get();
        if secret.is_empty() {
            return unsigned("no webhook secret is configured");
        }
        if let Some(signatures) = text(&parts.headers, "webhook-signature") {
            return self.accept_timed(&secret, &parts.headers, signatures, body, now);
        }
        let hex = text(&parts.headers, "x-hub-signature-256").and_then(|text| text.strip_prefix("sha256="));
        let token = text(&parts.headers, "x-gitlab-token");
        match hex.is_some_and(|hex| verify_hex_signature(&secret, body, hex))
            || token.is_some_and(|token| constant_time_eq(token, &secret))
        {
            true => Ok(Delivery::First),
            false => unsigned(
                "invalid webhook signature: neither X-Hub-Signature-256 nor X-Gitlab-Token matches the secret",
            ),
        }
    }

    /// Standard Webhooks: the signature covers `id.timestamp.body`.
    fn accept_timed(
        &self,
        secret: &str,
        headers: &HeaderMap,
        signatures: &str,
        body: &[u8],
        now: i64,
    ) -> Result<Delivery, ErrorResponse> {
        let unsigned = |why: &str| Err(error_response(StatusCode::UNAUTHORIZED, why));
        let (id, timestamp) = (text(headers, "webhook-id"), text(headers, "webhook-timestamp"));
        let (Some(id), Some(timestamp)) = (id, timestamp) else {
            return unsigned("webhook-signature requires webhook-id and webhook-timestamp");
        };
        let key = match secret.strip_prefix(PREFIX) {
            Some(encoded) => base64(encoded).unwrap_or_default(),
            None => secret.as_bytes().to_vec(),
        };
        let signed = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].concat();
        let tags = signatures.split_ascii_whitespace().filter_map(|one| base64(one.strip_prefix("v1,")?));
        if key.is_empty() || !tags.into_iter().any(|tag| verify_hmac(&key, &signed, &tag)) {
            return unsigned("invalid webhook-signature for this id, timestamp and body");
        }
        let Some(at) =
            timestamp.parse::<i64>().ok().filter(|at| at.abs_diff(now) <= TIMESTAMP_WINDOW_SECS as u64)
        else {
            return unsigned("webhook-timestamp is not within five minutes of the controller's clock");
        };
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.retain(|_, at| at.abs_diff(now) <= TIMESTAMP_WINDOW_SECS as u64);
        if accepted.len() >= MAX_IDS {
            return Err(error_response(
                StatusCode::TOO_MANY_REQUESTS,
                "too many webhooks within five minutes",
            ));
        }
        match accepted.insert(id.to_owned(), at) {
            None => Ok(Delivery::First),
            Some(first) => {
                // The later timestamp keeps the id stored for longer.
                accepted.insert(id.to_owned(), first.max(at));
                Ok(Delivery::Repeated)
            }
        }
    }
}

/// Whether a request carries a signature or a secret, valid or not.
pub(super) fn has_signature(parts: &Parts) -> bool {
    let names = ["webhook-signature", "x-hub-signature-256", "x-gitlab-token"];
    names.into_iter().any(|name| parts.headers.contains_key(name))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    const SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const BODY: &[u8] = br#"{"email":"test@example.com","username":"test_user"}"#;
    const AT: i64 = 1_674_087_231;

    fn ask(webhook: &Webhook, headers: &[(&str, &str)], body: &[u8], now: i64) -> u16 {
        let mut request = Request::builder();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        match webhook.accept(&parts, body, now) {
            Ok(Delivery::First) => 202,
            Ok(Delivery::Repeated) => 208,
            Err(refused) => refused.status().as_u16(),
        }
    }

    #[test]
    fn a_repeated_webhook_has_no_effect() {
        let webhook = Webhook::new(Reloadable::fixed(SECRET.to_owned()));
        let id = ("webhook-id", "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk");
        let (at, other) = (("webhook-timestamp", "1674087231"), ("webhook-timestamp", "1674087232"));
        let sign = ("webhook-signature", "v1,AAAA v2,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5=");
        let tag = ring::hmac::sign(
            &ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &base64(&SECRET[6..]).expect("base64")),
            &[id.1.as_bytes(), b".", at.1.as_bytes(), b".", BODY].concat(),
        );
        let good = format!("v1,AAAA v1,{}", encoded(tag.as_ref()));
        let good = ("webhook-signature", good.as_str());
        assert_eq!(ask(&webhook, &[id, at, sign], BODY, AT), 401);
        assert_eq!(ask(&webhook, &[id, other, good], BODY, AT), 401, "another time");
        assert_eq!(ask(&webhook, &[("webhook-id", "x"), at, good], BODY, AT), 401, "another id");
        assert_eq!(ask(&webhook, &[id, at, good], b"{}", AT), 401, "another body");
        assert_eq!(ask(&webhook, &[id, good], BODY, AT), 401, "no time");
        assert_eq!(ask(&webhook, &[id, at, good], BODY, AT + 301), 401, "too late");
        assert_eq!(ask(&webhook, &[id, at, good], BODY, AT - 301), 401, "too early");
        assert_eq!(ask(&webhook, &[id, at, good], BODY, AT + 299), 202);
        assert_eq!(ask(&webhook, &[id, at, good], BODY, AT + 300), 208, "again");
        // GitLab's token does not replace an invalid signature.
        assert_eq!(ask(&webhook, &[id, at, sign, ("x-gitlab-token", SECRET)], BODY, AT), 401);
        assert_eq!(ask(&webhook, &[("x-gitlab-token", SECRET)], BODY, AT), 202);
    }

    fn encoded(bytes: &[u8]) -> String {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for three in bytes.chunks(3) {
            let bits =
                three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
            let letters =
                (0..=three.len()).map(|nth| LETTERS[(bits >> (18 - 6 * nth) & 63) as usize] as char);
            text.extend(letters);
        }
        text
    }
}
