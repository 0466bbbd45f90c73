//! Appends to the current audit file: continuation after a restart, rotation, and retry after a failed write.
//!
//! A batch is one write. A write that fails leaves no part of itself: the file is cut to its length before it.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tracing::{error, warn};

use super::anchor::AuditAnchor;
use super::chain::{ChainHead, FileHeader};
use super::files::{AuditFile, AuditLine, AuditLines, HeaderLine, list};
use super::{AuditError, AuditSettings};
use crate::contract::AuditEntry;
use crate::ids;

/// The current file of a chain.
pub struct AuditAppender {
    folder: PathBuf,
    settings: AuditSettings,
    file: File,
    path: PathBuf,
    bytes: u64,
    head: ChainHead,
    /// The file has bytes that are not on disk.
    is_dirty: bool,
}

/// The end of the last file, as a start finds it.
struct FoundEnd {
    head: ChainHead,
    /// Bytes of whole lines. `None`: the file is not continued.
    offset: Option<u64>,
    /// The difference from the anchor, or within the file.
    problem: Option<String>,
}

impl AuditAppender {
    /// Continues the chain of a folder. The text describes what was found: it becomes an entry.
    pub fn open(
        folder: &Path,
        settings: AuditSettings,
        anchor: Option<&AuditAnchor>,
    ) -> Result<(AuditAppender, Option<String>), AuditError> {
        let anchored = anchor.and_then(AuditAnchor::head);
        let mut files = list(folder)?;
        // A crash while a file was created leaves a file without a whole header.
        while let Some(last) = files.last().filter(|file| is_unfinished(file, anchored.as_ref())) {
            std::fs::remove_file(&last.path)
                .map_err(|source| AuditError::Write { file: last.path.clone(), source })?;
            files.pop();
        }
        let end = match files.last() {
            Some(last) => find_end(last, anchored.as_ref())?,
            None => {
                let head = anchored.unwrap_or_else(|| ChainHead::new(ids::fresh_id()));
                let problem = (head.seq > 0).then(|| format!("entries up to {} are missing", head.seq));
                FoundEnd { head, offset: None, problem }
            }
        };
        if let Some(problem) = &end.problem {
            error!(folder = %folder.display(), problem, "the audit log is not intact: run `abide audit --verify`");
        }
        let FoundEnd { head, offset, problem } = end;
        match (offset, files.last()) {
            (Some(offset), Some(last)) => AuditAppender::resume(folder, settings, last, (head, offset)),
            _ => Ok((AuditAppender::create(folder, settings, head)?, problem)),
        }
    }

    /// Continues a file after its last whole line.
    fn resume(
        folder: &Path,
        settings: AuditSettings,
        last: &AuditFile,
        (head, offset): (ChainHead, u64),
    ) -> Result<(AuditAppender, Option<String>), AuditError> {
        let failed = |source| AuditError::Write { file: last.path.clone(), source };
        let file = File::options().append(true).open(&last.path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let cut = length.saturating_sub(offset);
        if cut > 0 {
            warn!(file = %last.path.display(), bytes = cut, "removed an unfinished audit entry");
            file.set_len(offset).map_err(failed)?;
        }
        let (folder, path) = (folder.to_owned(), last.path.clone());
        let note = (cut > 0).then(|| format!("removed an unfinished entry of {cut} bytes"));
        Ok((AuditAppender { folder, settings, file, path, bytes: offset, head, is_dirty: cut > 0 }, note))
    }

    /// Begins a file after an entry.
    fn create(folder: &Path, settings: AuditSettings, head: ChainHead) -> Result<AuditAppender, AuditError> {
        let (file, path, bytes) = create_file(folder, &head)?;
        Ok(AuditAppender { folder: folder.to_owned(), settings, file, path, bytes, head, is_dirty: true })
    }

    pub fn head(&self) -> &ChainHead {
        &self.head
    }

    /// Appends entries as one write, each with its number and hash.
    pub fn append(&mut self, entries: &mut [AuditEntry]) -> Result<(), AuditError> {
        if self.bytes >= self.settings.max_bytes {
            self.rotate()?;
        }
        let (mut head, mut lines) = (self.head.clone(), Vec::new());
        for entry in entries {
            head.append(entry, &mut lines);
        }
        if let Err(source) = self.file.write_all(&lines) {
            // A part of the batch would be a part of the chain.
            let _ = self.file.set_len(self.bytes);
            return Err(AuditError::Write { file: self.path.clone(), source });
        }
        self.bytes += lines.len() as u64;
        (self.head, self.is_dirty) = (head, true);
        Ok(())
    }

    fn rotate(&mut self) -> Result<(), AuditError> {
        self.sync()?;
        let (file, path, bytes) = create_file(&self.folder, &self.head)?;
        (self.file, self.path, self.bytes, self.is_dirty) = (file, path, bytes, true);
        Ok(())
    }

    /// Writes everything to disk.
    pub fn sync(&mut self) -> Result<(), AuditError> {
        if self.is_dirty {
            self.file.sync_data().map_err(|source| AuditError::Write { file: self.path.clone(), source })?;
            self.is_dirty = false;
        }
        Ok(())
    }

    /// The number of the first entry in the oldest file.
    pub fn oldest(&self) -> Result<u64, AuditError> {
        Ok(list(&self.folder)?.first().map_or(self.head.seq + 1, |file| file.first))
    }

    /// Files beyond the number to keep, and the oldest entry without them. `None`: there are none.
    pub fn excess(&self) -> Result<Option<(u64, Vec<AuditFile>)>, AuditError> {
        let mut files = list(&self.folder)?;
        let kept = files.split_off(files.len().saturating_sub(self.settings.keep.max(1)));
        let first = kept.first().map_or(self.head.seq + 1, |file| file.first);
        Ok(Some((first, files)).filter(|(_, files)| !files.is_empty()))
    }
}

/// Creates a file with its header, for the owner alone.
fn create_file(folder: &Path, head: &ChainHead) -> Result<(File, PathBuf, u64), AuditError> {
    let path = AuditFile::new(folder, head.seq + 1).path;
    let failed = |source| AuditError::Write { file: path.clone(), source };
    let mut options = File::options();
    let mut file = options.append(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
    let header = FileHeader::after(head).line();
    if let Err(source) = file.write_all(&header).and_then(|()| File::open(folder)?.sync_all()) {
        let _ = std::fs::remove_file(&path);
        return Err(AuditError::Write { file: path, source });
    }
    Ok((file, path, header.len() as u64))
}

fn is_unfinished(file: &AuditFile, anchored: Option<&ChainHead>) -> bool {
    let header = AuditLines::open(file).and_then(|mut lines| lines.header());
    matches!(header, Ok(HeaderLine::Unfinished)) && anchored.is_none_or(|anchor| anchor.seq < file.first)
}

/// Finds the last entry of the last file. A file that is damaged, or that the anchor contradicts, stays as it is: the
/// chain continues in a new file, and a verification finds the problem.
fn find_end(last: &AuditFile, anchored: Option<&ChainHead>) -> Result<FoundEnd, AuditError> {
    let mut lines = AuditLines::open(last)?;
    let broken = |line: u64, seq: u64, why: &str| {
        // The numbers of a damaged file are not used twice.
        let head = anchored.cloned().unwrap_or_else(|| ChainHead::new(ids::fresh_id()));
        let seq = seq.max(head.seq).max(last.first);
        let problem = Some(format!("{} line {line}: {why}", last.name()));
        FoundEnd { head: ChainHead { seq, ..head }, offset: None, problem }
    };
    let HeaderLine::Valid(mut head) = lines.header()? else {
        return Ok(broken(1, 0, "the header of the file is not valid"));
    };
    let mut at_anchor = anchored.filter(|anchor| anchor.seq == head.seq).map(|_| head.clone());
    while let Some(AuditLine::Whole(line)) = lines.next()? {
        if let Err(error) = head.check(&line) {
            return Ok(broken(lines.number, count_rest(&mut lines, head.seq)?, &error.to_string()));
        }
        if anchored.is_some_and(|anchor| anchor.seq == head.seq) {
            at_anchor = Some(head.clone());
        }
    }
    let Some(anchor) = anchored else {
        return Ok(FoundEnd { head, offset: Some(lines.offset), problem: None });
    };
    let wrong = match at_anchor {
        _ if anchor.chain != head.chain => {
            Some("the file belongs to the chain of another gateway".to_owned())
        }
        Some(found) if found != *anchor => {
            Some(format!("entry {} differs from the digest in the store", found.seq))
        }
        None if anchor.seq > head.seq => Some(format!("entries up to {} are missing", anchor.seq)),
        Some(_) | None => None,
    };
    Ok(match wrong {
        Some(why) => broken(lines.number, head.seq, &why),
        None => FoundEnd { head, offset: Some(lines.offset), problem: None },
    })
}

/// An upper bound of the numbers in the rest of a damaged file.
fn count_rest(lines: &mut AuditLines, seq: u64) -> Result<u64, AuditError> {
    let mut most = seq + 1;
    while let Some(AuditLine::Whole(_)) = lines.next()? {
        most += 1;
    }
    Ok(most)
}
