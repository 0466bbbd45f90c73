//! Secret comparison in constant time, and verification of signatures.

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
    from_hex(hex).is_some_and(|tag| hmac::verify(&key, bytes, &tag).is_ok())
}

/// Whether `tag` is the HMAC-SHA256 of the bytes under the key.
pub fn verify_hmac(key: &[u8], bytes: &[u8], tag: &[u8]) -> bool {
    hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, key), bytes, tag).is_ok()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || text.len() % 2 == 1 {
        return None;
    }
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()).collect()
}

/// Decodes base64, the encoding of HTTP Basic credentials and Standard Webhooks.
pub fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let (mut bits, mut held) = (0u32, 0u32);
    for c in text.trim_end_matches('=').bytes() {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        (bits, held) = (bits << 6 | u32::from(value), held + 6);
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held & 0xff) as u8);
        }
    }
    Some(bytes)
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
    }
}
