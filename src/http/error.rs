//! Client errors: a one-line description of a failed call, and whether the request may have run.

use std::error::Error;
use std::sync::Arc;

use rustls::AlertDescription;

use crate::error_chain::{causes, chain};
use crate::escape::visible;

/// An error and its causes in one line.
pub fn describe(error: &reqwest::Error) -> String {
    if let Some(alert) = certificate_alert(error) {
        return describe_certificate_alert(alert);
    }
    chain(error)
}

/// Reason why no response, or no complete one, arrived: one line.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct TransportError {
    text: String,
    source: Option<Arc<reqwest::Error>>,
}

impl From<reqwest::Error> for TransportError {
    fn from(error: reqwest::Error) -> TransportError {
        let text = describe(&error);
        // The description of an alert replaces the texts of all layers.
        let source = certificate_alert(&error).is_none().then(|| Arc::new(error));
        TransportError { text, source }
    }
}

impl From<String> for TransportError {
    fn from(text: String) -> TransportError {
        TransportError { text, source: None }
    }
}

impl From<&str> for TransportError {
    fn from(text: &str) -> TransportError {
        TransportError::from(text.to_owned())
    }
}

impl PartialEq for TransportError {
    fn eq(&self, other: &TransportError) -> bool {
        self.text == other.text
    }
}

impl Eq for TransportError {}

/// A response of an unexpected form: its HTTP status, what is wrong with it, and its first characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnreadableResponse(Box<str>);

impl UnreadableResponse {
    /// Characters of a response in a message.
    const MAX_SHOWN: usize = 120;

    pub fn new(status: u16, why: &str, bytes: &[u8]) -> UnreadableResponse {
        // A character has at most four bytes.
        let head = &bytes[..bytes.len().min(Self::MAX_SHOWN * 4)];
        let text = String::from_utf8_lossy(head);
        let shown: String = text.chars().take(Self::MAX_SHOWN).collect();
        let more = if shown.len() < text.len() || head.len() < bytes.len() { "…" } else { "" };
        // Quoted and escaped: a response may come from anyone.
        let start = format!("\"{}\"{more}", visible(&shown));
        let why = visible(&why.chars().take(Self::MAX_SHOWN).collect::<String>());
        let text = format!("{why} (HTTP {status}, {} bytes: {start})", bytes.len());
        UnreadableResponse(text.into())
    }
}

/// A client setup that failed. Its outer layers carry no information.
#[derive(Debug, thiserror::Error)]
#[error("{}", root_cause(.0))]
pub struct SetupError(pub(super) reqwest::Error);

/// The innermost cause, for errors whose outer layers carry no information.
pub fn root_cause(error: &reqwest::Error) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

/// Whether the server certainly did not read the request.
pub fn was_not_sent(error: &reqwest::Error) -> bool {
    error.is_connect() || error.is_builder() || certificate_alert(error).is_some() || was_canceled(error)
}

/// Whether the connection closed before the request was written, without a known reason.
pub fn was_canceled(error: &reqwest::Error) -> bool {
    causes(error).any(|error| error.downcast_ref().is_some_and(hyper::Error::is_canceled))
}

/// The TLS alert, if the server rejected the client certificate. In TLS 1.3 the alert arrives after the request was
/// sent, but a server does not read application data before it accepts the certificate.
fn certificate_alert(error: &reqwest::Error) -> Option<AlertDescription> {
    let alert = |error: &(dyn Error + 'static)| {
        // `io::Error::source` skips the error that it wraps, which may itself wrap another.
        let mut inner: &(dyn Error + 'static) = error;
        while let Some(carried) = inner.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            inner = carried;
        }
        match inner.downcast_ref() {
            Some(rustls::Error::AlertReceived(alert)) => Some(*alert),
            _ => None,
        }
    };
    causes(error).find_map(alert).filter(|alert| is_certificate_alert(*alert))
}

fn is_certificate_alert(alert: AlertDescription) -> bool {
    use AlertDescription as Alert;
    matches!(
        alert,
        Alert::CertificateRequired
            | Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::AccessDenied
            | Alert::DecryptError
    )
}

fn describe_certificate_alert(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::CertificateRequired => "the server requires a client certificate and received none",
        // Some servers send this alert for a missing certificate too.
        AlertDescription::BadCertificate => {
            "the server requires a client certificate; it rejected ours or received none"
        }
        _ => "the server rejected our client certificate",
    };
    format!("{why} (TLS alert {alert:?})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_response_is_quoted_in_part_and_on_one_line() {
        let page = format!("<html>\r\n\u{1b}[2J{}</html>", "x".repeat(1000));
        let text = UnreadableResponse::new(502, "not JSON", page.as_bytes()).to_string();
        assert!(text.starts_with("not JSON (HTTP 502, 1019 bytes: \"<html>\\r\\n\\u{1b}[2Jxxx"), "{text}");
        assert!(text.ends_with("xxx\"…)") && text.len() < 200, "{text}");
        let empty = UnreadableResponse::new(200, "empty", b"").to_string();
        assert_eq!(empty, "empty (HTTP 200, 0 bytes: \"\")");
        // Cut inside a character, and not UTF-8 at all.
        let odd = [b"\xff\xfe".as_slice(), "中".repeat(500).as_bytes()].concat();
        let text = UnreadableResponse::new(200, &"w".repeat(5000), &odd).to_string();
        assert!(text.len() < 1000 && text.contains("中…") || text.contains("中\"…"), "{text}");
    }
}
