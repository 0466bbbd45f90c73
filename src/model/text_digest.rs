//! Digest of a list of texts, in hex.

use std::fmt::{Display, Write};

use blake3::Hasher;

/// Length-prefixed texts, so that no two lists of texts have the same bytes.
#[derive(Default)]
pub struct TextDigest {
    hasher: Hasher,
    /// Reused for values that are displayed.
    buffer: String,
}

impl TextDigest {
    pub fn put(&mut self, text: &str) {
        self.hasher.update(&(text.len() as u64).to_le_bytes());
        self.hasher.update(text.as_bytes());
    }

    /// The displayed text of a value.
    pub fn put_display(&mut self, value: impl Display) {
        let mut text = std::mem::take(&mut self.buffer);
        text.clear();
        // Writing to a String does not fail.
        let _ = write!(text, "{value}");
        self.put(&text);
        self.buffer = text;
    }

    /// A number, with a fixed length.
    pub fn put_number(&mut self, number: u64) {
        self.hasher.update(&number.to_le_bytes());
    }

    /// Bytes of a fixed length.
    pub fn put_bytes<const N: usize>(&mut self, bytes: [u8; N]) {
        self.hasher.update(&bytes);
    }

    /// The first 16 bytes, as 32 hex digits.
    pub fn hex(&self) -> String {
        self.hasher.finalize().to_hex()[..32].to_owned()
    }
}
