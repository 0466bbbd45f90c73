//! Secret comparison in constant time, and verification of signatures.

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use ring::hmac;

/// Whether two texts are equal. The duration does not reveal where they differ.
pub fn constant_time_eq(one: &str, other: &str) -> bool {
    // An attacker cannot choose where two digests under a random key differ.
    let key = hmac::Key::new(hmac::HMAC_SHA256, b"abide");
    hmac::verify(&key, one.as_bytes(), hmac::sign(&key, other.as_bytes()).as_ref()).is_ok()
}

/// Whether a secret is short enough to be guessed. Callers accept it and log a warning.
pub fn is_weak(secret: &str) -> bool {
    secret.chars().count() < 16
}

/// Whether `hex` is the HMAC-SHA256 of the bytes under the secret.
pub fn verify_hex_signature(secret: &str, bytes: &[u8], hex: &str) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    hex::decode(hex).is_ok_and(|tag| hmac::verify(&key, bytes, &tag).is_ok())
}

/// Whether `tag` is the HMAC-SHA256 of the bytes under the key.
pub fn verify_hmac(key: &[u8], bytes: &[u8], tag: &[u8]) -> bool {
    hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, key), bytes, tag).is_ok()
}

/// Decodes base64, the encoding of HTTP Basic credentials and Standard Webhooks. Clients differ in alphabet and padding:
/// both alphabets are accepted, with padding or without.
pub fn base64(text: &str) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_allow_trailing_bits(true)
            .with_decode_padding_mode(DecodePaddingMode::RequireNone),
    );
    let standard = text.trim_end_matches('=').replace('-', "+").replace('_', "/");
    LENIENT.decode(standard).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_of_its_secret_and_its_bytes() {
        // From the documentation of GitHub's webhooks.
        let (secret, body) = ("It's a Secret to Everybody", b"Hello, World!");
        let hex = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        assert!(verify_hex_signature(secret, body, hex));
        assert!(
            !verify_hex_signature(secret, b"Hello, World?", hex) && !verify_hex_signature("other", body, hex)
        );
        assert!(
            !verify_hex_signature(secret, body, &hex[..62])
                && !verify_hex_signature(secret, body, "")
                && !verify_hex_signature(secret, body, "+1")
        );
        assert!(
            constant_time_eq("a", "a")
                && !constant_time_eq("a", "a\0")
                && !constant_time_eq("a", "b")
                && !constant_time_eq("", "a")
        );
        assert_eq!(base64("YTpi").as_deref(), Some(b"a:b".as_slice()));
        for text in ["_-8=", "/+8=", "/+8", "_+9"] {
            assert_eq!(base64(text).as_deref(), Some([255, 239].as_slice()), "{text}");
        }
        assert_eq!(base64("a b"), None);
    }
}
