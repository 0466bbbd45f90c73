//! Verification of an audit folder: every line of every file, and the anchor in the store.
//!
//! The anchor has the hash of the last entry at its time, and the number of the oldest entry. Entries after the anchor are
//! verified as well, but their removal is not found. An unfinished line at the end, after the anchor, is not a problem: a
//! gateway is writing it, or was killed.

use std::path::Path;

use super::anchor::AuditAnchor;
use super::chain::{ChainHead, LineError};
use super::files::{AuditFile, AuditLine, AuditLines, HeaderLine, list};
use super::{AuditError, ChainHash};
use crate::contract::{AuditProblem, AuditVerification};

/// Verifies all files. `anchor`: of the store; `None`: the store was not read, or has none.
pub fn verify(folder: &Path, anchor: Option<&AuditAnchor>) -> Result<AuditVerification, AuditError> {
    let files = list(folder)?;
    let mut walk = ChainVerifier { anchor, head: None, last_line: 0, done: AuditVerification::default() };
    walk.done.files = files.len();
    walk.done.anchored = anchor.map(|anchor| anchor.seq);
    for (nth, file) in files.iter().enumerate() {
        if let Some(problem) = walk.file(file, nth + 1 == files.len())? {
            walk.done.problem = Some(problem);
            break;
        }
    }
    if walk.done.problem.is_none() {
        walk.done.problem = walk.missing_end(folder, files.last());
    }
    walk.done.intact = walk.done.problem.is_none();
    Ok(walk.done)
}

struct ChainVerifier<'a> {
    anchor: Option<&'a AuditAnchor>,
    /// The last verified entry.
    head: Option<ChainHead>,
    /// Number of the last line of the last file.
    last_line: u64,
    done: AuditVerification,
}

impl ChainVerifier<'_> {
    fn file(&mut self, file: &AuditFile, is_last: bool) -> Result<Option<AuditProblem>, AuditError> {
        let at = |line: u64, message: String| Some(AuditProblem { file: file.name(), line, message });
        let mut lines = AuditLines::open(file)?;
        let mut head = match lines.header()? {
            HeaderLine::Valid(head) => head,
            // A crash while the file was created: the next gateway removes it.
            HeaderLine::Unfinished if is_last && file.first > self.anchored() => return Ok(None),
            HeaderLine::Unfinished | HeaderLine::Invalid => {
                return Ok(at(1, "the header of the file is not valid".to_owned()));
            }
        };
        if let Some(message) = self.wrong_begin(&head, file) {
            return Ok(at(1, message));
        }
        while let Some(line) = lines.next()? {
            match line {
                AuditLine::Whole(line) => match head.check(&line) {
                    Ok(()) => {
                        self.count(&head);
                        if let Some(message) = self.wrong_anchor(&head) {
                            return Ok(at(lines.number, message));
                        }
                    }
                    Err(error) => return Ok(at(lines.number, self.explain(&error))),
                },
                AuditLine::Unfinished(bytes) if is_last && head.seq >= self.anchored() => {
                    self.done.unfinished_bytes = bytes;
                    break;
                }
                AuditLine::Unfinished(_) => return Ok(at(lines.number, "the line is cut off".to_owned())),
            }
        }
        self.last_line = lines.number;
        self.head = Some(head);
        Ok(None)
    }

    fn anchored(&self) -> u64 {
        self.anchor.map_or(0, |anchor| anchor.seq)
    }

    /// Defect of the position at which a file begins.
    fn wrong_begin(&self, head: &ChainHead, file: &AuditFile) -> Option<String> {
        if head.seq + 1 != file.first {
            return Some(format!(
                "the file begins with entry {}, but its file name has entry {}",
                head.seq + 1,
                file.first
            ));
        }
        if self.anchor.is_some_and(|anchor| anchor.chain != head.chain) {
            return Some("the file belongs to the chain of another gateway".to_owned());
        }
        match &self.head {
            Some(before) if before.seq > head.seq => {
                Some(format!("the file begins with entry {}, which another file has as well", head.seq + 1))
            }
            Some(before) if before.seq < head.seq => Some(missing(before.seq + 1, head.seq)),
            Some(before) if before.hash != head.hash || before.chain != head.chain => Some(format!(
                "the file does not continue the file before it: the hash of entry {} differs",
                head.seq
            )),
            Some(_) => None,
            None => {
                let oldest = self.anchor.map(|anchor| anchor.first);
                let is_begin = head.seq > 0 || head.hash == ChainHash::genesis(&head.chain);
                match oldest {
                    Some(oldest) if oldest <= head.seq => Some(missing(oldest, head.seq)),
                    _ if !is_begin => Some("the file does not begin the chain that it names".to_owned()),
                    _ => None,
                }
            }
        }
    }

    fn wrong_anchor(&self, head: &ChainHead) -> Option<String> {
        let anchor = self.anchor.filter(|anchor| anchor.seq == head.seq)?;
        let is_wrong = ChainHash::parse(&anchor.hash) != Some(head.hash);
        is_wrong.then(|| {
            format!("entry {} differs from the digest in the store: entries were replaced", head.seq)
        })
    }

    fn explain(&self, error: &LineError) -> String {
        match error {
            LineError::Sequence { expected, found } if found > expected => missing(*expected, found - 1),
            error => error.to_string(),
        }
    }

    fn count(&mut self, head: &ChainHead) {
        self.done.entries += 1;
        self.done.last = head.seq;
        if self.done.first == 0 {
            self.done.first = head.seq;
        }
    }

    /// Entries up to the anchor that no file has.
    fn missing_end(&self, folder: &Path, last: Option<&AuditFile>) -> Option<AuditProblem> {
        let anchor = self.anchor.filter(|anchor| anchor.seq > self.done.last)?;
        let before = self.head.as_ref().map_or(anchor.first.saturating_sub(1), |head| head.seq);
        if before >= anchor.seq {
            return None;
        }
        let file = last.map_or_else(|| folder.display().to_string(), AuditFile::name);
        Some(AuditProblem { file, line: self.last_line + 1, message: missing(before + 1, anchor.seq) })
    }
}

fn missing(from: u64, to: u64) -> String {
    match from == to {
        true => format!("entry {from} is missing"),
        false => format!("entries {from} to {to} are missing"),
    }
}
