//! Join token: a one-time secret that an agent exchanges for a certificate.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::ids::{fresh_id, fresh_secret};

/// Start of every join token. No static token begins with it by accident.
const PREFIX: &str = "abide-join.";
/// Hex digits of an id and of a secret.
const ID_DIGITS: usize = 16;
const SECRET_DIGITS: usize = 48;

/// A token of the form `abide-join.ID.SECRET`. The id is public; the secret has 192 random bits.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    id: String,
    secret: String,
}

/// The text is not a join token. The message does not contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a join token")]
pub struct NotJoinToken;

impl JoinToken {
    pub fn generate() -> JoinToken {
        let mut id = fresh_id();
        id.truncate(ID_DIGITS);
        JoinToken { id, secret: fresh_secret() }
    }

    /// Whether a text is meant to be a join token, also if it is incomplete.
    pub fn is_intended(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// The token as text. It is a secret.
    pub fn reveal(&self) -> String {
        format!("{PREFIX}{}.{}", self.id, self.secret)
    }

    /// SHA-256 of the secret in hex, as the store keeps it.
    pub fn digest(&self) -> String {
        hex::encode(Sha256::digest(self.secret.as_bytes()))
    }

    /// Compares the secret with a stored digest in constant time.
    pub fn matches(&self, digest: &str) -> bool {
        bool::from(self.digest().as_bytes().ct_eq(digest.as_bytes()))
    }
}

impl FromStr for JoinToken {
    type Err = NotJoinToken;

    fn from_str(text: &str) -> Result<JoinToken, NotJoinToken> {
        let (id, secret) =
            text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('.')).ok_or(NotJoinToken)?;
        let is_hex = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        match is_hex(id, ID_DIGITS) && is_hex(secret, SECRET_DIGITS) {
            true => Ok(JoinToken { id: id.to_owned(), secret: secret.to_owned() }),
            false => Err(NotJoinToken),
        }
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_back_and_shows_no_secret() {
        let token = JoinToken::generate();
        let text = token.reveal();
        assert_eq!(text.parse(), Ok(token.clone()));
        assert!(token.matches(&token.digest()) && !token.matches(&JoinToken::generate().digest()));
        assert!(!format!("{token:?}").contains(&token.secret));
        for wrong in ["", "abide-join.", &text[..text.len() - 1], &format!("{text}0"), &text.to_uppercase()] {
            assert_eq!(wrong.parse::<JoinToken>(), Err(NotJoinToken), "{wrong}");
        }
    }
}
