//! Hash chain: the form of an audit line and of a file's header, and the digest of an entry.
//!
//! A line is an entry without `hash`, followed by its `hash`: the digest of the previous hash and of the bytes before it.
//! The header of a file has the hash of the last line of the previous file. The bytes are hashed as written, so that a
//! verification depends on no form of JSON. Lines are ASCII: no text of a caller is a control sequence.

use serde::{Deserialize, Serialize};

use crate::contract::AuditEntry;

/// Format version of the files.
const FORMAT: u32 = 1;
/// Bytes of a hash in hexadecimal.
const HEX_BYTES: usize = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainHash([u8; 32]);

impl ChainHash {
    /// The hash before the first entry of a chain.
    pub fn genesis(chain: &str) -> ChainHash {
        ChainHash(*blake3::hash(format!("abide audit {chain}").as_bytes()).as_bytes())
    }

    pub fn parse(hex: &str) -> Option<ChainHash> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(hex, &mut bytes).ok()?;
        // One form only: a line has no byte that can change without notice.
        Some(ChainHash(bytes)).filter(|hash| hash.to_hex() == hex)
    }

    fn next(self, body: &[u8]) -> ChainHash {
        ChainHash(*blake3::Hasher::new().update(&self.0).update(body).finalize().as_bytes())
    }

    pub fn to_hex(self) -> String {
        hex::encode(self.0)
    }
}

/// Position in a chain: the last entry and its hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChainHead {
    pub chain: String,
    pub seq: u64,
    pub hash: ChainHash,
}

impl ChainHead {
    /// The head of an empty chain.
    pub fn new(chain: String) -> ChainHead {
        ChainHead { seq: 0, hash: ChainHash::genesis(&chain), chain }
    }

    /// Appends the line of an entry, with its number and hash.
    pub fn append(&mut self, entry: &mut AuditEntry, lines: &mut Vec<u8>) {
        self.seq += 1;
        entry.seq = self.seq;
        entry.hash.clear();
        let begin = lines.len();
        push_ascii(&serde_json::to_string(entry).unwrap_or_default(), lines);
        // The closing brace follows the hash.
        lines.pop();
        self.hash = self.hash.next(lines.get(begin..).unwrap_or_default());
        lines.extend_from_slice(HASH_FIELD);
        lines.extend_from_slice(self.hash.to_hex().as_bytes());
        lines.extend_from_slice(b"\"}\n");
    }

    /// Checks the next line, without its line end.
    pub fn check(&mut self, line: &[u8]) -> Result<(), LineError> {
        let (body, hash) = split(line).ok_or(LineError::Form)?;
        #[derive(Deserialize)]
        struct Numbered {
            seq: u64,
        }
        let Numbered { seq } = serde_json::from_slice(line).map_err(|_| LineError::Form)?;
        if seq != self.seq + 1 {
            return Err(LineError::Sequence { expected: self.seq + 1, found: seq });
        }
        let next = self.hash.next(body);
        if next != hash {
            return Err(LineError::Hash { seq });
        }
        (self.seq, self.hash) = (seq, next);
        Ok(())
    }
}

const HASH_FIELD: &[u8] = b",\"hash\":\"";

/// The hashed part of a line, and its hash.
fn split(line: &[u8]) -> Option<(&[u8], ChainHash)> {
    let rest = line.strip_suffix(b"\"}")?;
    let (rest, hex) = rest.split_at_checked(rest.len().checked_sub(HEX_BYTES)?)?;
    let hash = ChainHash::parse(std::str::from_utf8(hex).ok()?)?;
    Some((rest.strip_suffix(HASH_FIELD)?, hash))
}

/// Reason why a line is not the next one of a chain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    #[error("the line is not an audit entry")]
    Form,
    #[error("entry {expected} is missing: the line has number {found}")]
    Sequence { expected: u64, found: u64 },
    #[error("entry {seq} was changed, or the entry before it: its hash does not match")]
    Hash { seq: u64 },
}

/// First line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHeader {
    format: u32,
    pub chain: String,
    /// Number of the first entry of this file.
    pub first: u64,
    /// Hash of the entry before it.
    prev: String,
}

impl FileHeader {
    pub fn after(head: &ChainHead) -> FileHeader {
        let (chain, prev) = (head.chain.clone(), head.hash.to_hex());
        FileHeader { format: FORMAT, chain, first: head.seq + 1, prev }
    }

    pub fn line(&self) -> Vec<u8> {
        let mut line = Vec::new();
        push_ascii(&serde_json::to_string(self).unwrap_or_default(), &mut line);
        line.push(b'\n');
        line
    }

    /// Parses a line. `None`: it is not a header of this format.
    pub fn parse(line: &[u8]) -> Option<FileHeader> {
        let header: FileHeader = serde_json::from_slice(line).ok()?;
        (header.format == FORMAT && header.first > 0).then_some(header)
    }

    /// The position before the first entry of the file.
    pub fn head(&self) -> Option<ChainHead> {
        let hash = ChainHash::parse(&self.prev)?;
        Some(ChainHead { chain: self.chain.clone(), seq: self.first.checked_sub(1)?, hash })
    }
}

/// JSON with every character outside of printable ASCII escaped.
fn push_ascii(json: &str, line: &mut Vec<u8>) {
    for c in json.chars() {
        match c {
            ' '..='~' => line.push(c as u8),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    line.extend_from_slice(format!("\\u{unit:04x}").as_bytes());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(text: &str) -> AuditEntry {
        let mut entry = AuditEntry::default();
        entry.what.detail = text.to_owned();
        entry
    }

    #[test]
    fn a_line_is_ascii_and_its_text_is_kept() {
        let mut head = ChainHead::new("c".to_owned());
        let text = "a\nb\r\u{1b}[2J \u{9b}x \u{202e} \u{1f600} \"}";
        let mut lines = Vec::new();
        head.append(&mut entry(text), &mut lines);
        assert_eq!(lines.iter().filter(|byte| !(32..127).contains(*byte)).count(), 1, "only its line end");
        let line = lines.strip_suffix(b"\n").expect("a line");
        let read: AuditEntry = serde_json::from_slice(line).expect("an entry");
        assert_eq!((read.what.detail.as_str(), read.hash), (text, head.hash.to_hex()));
        assert_eq!(ChainHead::new("c".to_owned()).check(line), Ok(()));
        assert_eq!(ChainHead::new("d".to_owned()).check(line), Err(LineError::Hash { seq: 1 }));
    }

    #[test]
    fn every_changed_byte_and_every_other_order_is_found() {
        let (mut head, mut lines) = (ChainHead::new("c".to_owned()), Vec::new());
        for text in ["one", "two", "three"] {
            head.append(&mut entry(text), &mut lines);
        }
        let lines: Vec<&[u8]> = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
        let check = |lines: &[&[u8]]| {
            let mut head = ChainHead::new("c".to_owned());
            lines.iter().position(|line| head.check(line).is_err())
        };
        assert_eq!(check(&lines), None);
        for at in 0..lines[1].len() {
            let mut changed = lines[1].to_vec();
            changed[at] ^= 1;
            let found = check(&[lines[0], &changed, lines[2]]);
            assert_eq!(found, Some(1), "byte {at}: {}", String::from_utf8_lossy(&changed));
        }
        assert_eq!(check(&[lines[1], lines[0], lines[2]]), Some(0));
        assert_eq!(check(&[lines[0], lines[2]]), Some(1));
        assert_eq!(check(&[lines[0], lines[0], lines[1]]), Some(1));
    }
}
