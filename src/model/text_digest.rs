//! Digest of a list of texts, in hex.

use std::fmt::{Display, Write};

use blake3::Hasher;

/// Length-prefixed texts, so that no two lists of texts have the same bytes.
#[derive(Default)]
pub struct TextDigest {
    hasher: Hasher,
    /// Bytes that are not hashed yet: one large update is much faster than many small ones.
    pending: Vec<u8>,
    /// Reused for values that are displayed.
    buffer: String,
}

/// Maximum number of pending bytes.
const MAX_PENDING: usize = 64 << 10;

impl TextDigest {
    pub fn put(&mut self, text: &str) {
        self.update(&(text.len() as u64).to_le_bytes());
        self.update(text.as_bytes());
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
        self.update(&number.to_le_bytes());
    }

    /// Bytes of a fixed length.
    pub fn put_bytes<const N: usize>(&mut self, bytes: [u8; N]) {
        self.update(&bytes);
    }

    fn update(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= MAX_PENDING {
            self.hasher.update(&self.pending);
            self.pending.clear();
        }
    }

    /// The first 16 bytes, as 32 hex digits.
    pub fn hex(&self) -> String {
        let mut hasher = self.hasher.clone();
        hasher.update(&self.pending);
        hasher.finalize().to_hex()[..32].to_owned()
    }
}
