//! Signatures of chat webhooks: DingTalk signs the URL, Feishu (Lark) the body.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;

use crate::model::Time;

/// Signature scheme of a webhook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignatureScheme {
    /// Query parameters `timestamp` (milliseconds) and `sign`.
    DingTalk,
    /// Fields `timestamp` (seconds) and `sign` of the body.
    Feishu,
}

impl SignatureScheme {
    pub const ALL: [SignatureScheme; 2] = [SignatureScheme::DingTalk, SignatureScheme::Feishu];

    pub fn word(self) -> &'static str {
        match self {
            SignatureScheme::DingTalk => "dingtalk",
            SignatureScheme::Feishu => "feishu",
        }
    }

    /// Timestamp and signature.
    pub fn sign(self, secret: &str, now: Time) -> (String, String) {
        let mac = |key: &str, data: &str| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes());
            STANDARD.encode(hmac::sign(&key, data.as_bytes()))
        };
        match self {
            SignatureScheme::DingTalk => {
                let timestamp = now.0.to_string();
                let sign = mac(secret, &format!("{timestamp}\n{secret}"));
                (timestamp, sign)
            }
            SignatureScheme::Feishu => {
                let timestamp = now.0.div_euclid(1000).to_string();
                let sign = mac(&format!("{timestamp}\n{secret}"), "");
                (timestamp, sign)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_equal_those_of_openssl() {
        // printf '1700000000000\nSECabc' | openssl dgst -sha256 -hmac SECabc -binary | base64
        assert_eq!(
            SignatureScheme::DingTalk.sign("SECabc", Time(1_700_000_000_000)),
            ("1700000000000".to_owned(), "jcUpW0QmtKduN03n4JqQ0PBosVjqnM8gU7fIIvsDmCM=".to_owned())
        );
        // printf '' | openssl dgst -sha256 -hmac $'1700000000\nsecret' -binary | base64
        assert_eq!(
            SignatureScheme::Feishu.sign("secret", Time(1_700_000_000_999)),
            ("1700000000".to_owned(), "fiWS2+gh28DOydAv7hzONH/mDn9+b1Y4Y5ivXWXy8vA=".to_owned())
        );
    }
}
