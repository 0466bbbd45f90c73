//! Audit files of a folder: `audit-FIRST.jsonl`, named by the number of their first entry, and their lines.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::AuditError;
use super::chain::{ChainHead, FileHeader};

/// Maximum bytes of a line: longer than the entry of a call with the largest body.
const MAX_LINE_BYTES: u64 = 256 << 20;

/// An audit file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditFile {
    pub path: PathBuf,
    /// Number of its first entry, by its name.
    pub first: u64,
}

impl AuditFile {
    pub fn new(folder: &Path, first: u64) -> AuditFile {
        AuditFile { path: folder.join(format!("audit-{first:012}.jsonl")), first }
    }

    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// The files of a folder, oldest first. A folder that does not exist has none.
pub fn list(folder: &Path) -> Result<Vec<AuditFile>, AuditError> {
    let failed = |source| AuditError::Read { file: folder.to_owned(), source };
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let number = name.strip_prefix("audit-").and_then(|rest| rest.strip_suffix(".jsonl"));
        if let Some(first) = number.and_then(|digits| digits.parse().ok()) {
            files.push(AuditFile { path, first });
        }
    }
    files.sort_by_key(|file| file.first);
    Ok(files)
}

/// A line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditLine {
    /// Without its line end.
    Whole(Vec<u8>),
    /// Bytes at the end of a file without a line end: a line that is being written, or that a crash cut.
    Unfinished(u64),
}

/// Reads a file line by line.
pub struct AuditLines {
    reader: BufReader<File>,
    path: PathBuf,
    /// Number of the last line, from 1.
    pub number: u64,
    /// Bytes of whole lines so far.
    pub offset: u64,
}

impl AuditLines {
    pub fn open(file: &AuditFile) -> Result<AuditLines, AuditError> {
        let opened = File::open(&file.path);
        let opened = opened.map_err(|source| AuditError::Read { file: file.path.clone(), source })?;
        let reader = BufReader::with_capacity(1 << 18, opened);
        Ok(AuditLines { reader, path: file.path.clone(), number: 0, offset: 0 })
    }

    /// The next line; `None` at the end.
    pub fn next(&mut self) -> Result<Option<AuditLine>, AuditError> {
        let failed = |source| AuditError::Read { file: self.path.clone(), source };
        let mut line = Vec::new();
        let read = (&mut self.reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(failed)?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        if line.pop() == Some(b'\n') {
            self.offset += read as u64;
            return Ok(Some(AuditLine::Whole(line)));
        }
        let rest = io::copy(&mut self.reader, &mut io::sink()).map_err(failed)?;
        Ok(Some(AuditLine::Unfinished(read as u64 + rest)))
    }

    /// Reads the header.
    pub fn header(&mut self) -> Result<HeaderLine, AuditError> {
        Ok(match self.next()? {
            Some(AuditLine::Whole(line)) => {
                let head = FileHeader::parse(&line).and_then(|header| header.head());
                head.map_or(HeaderLine::Invalid, HeaderLine::Valid)
            }
            Some(AuditLine::Unfinished(_)) | None => HeaderLine::Unfinished,
        })
    }
}

/// First line of a file.
pub enum HeaderLine {
    /// The position before the first entry of the file.
    Valid(ChainHead),
    Invalid,
    /// The file has no whole line.
    Unfinished,
}
