//! Checksums of files: md5, computed again only for a file that changed.

use std::io::Read;
use std::path::Path;
use std::time::SystemTime;

use super::walk::{FileAccess, FileError, WalkRule, parent};

/// Maximum size of a file that is summed.
const MAX_SUMMED_FILE_BYTES: u64 = 64 << 20;

/// The length, modification time and md5 of a file when it was last read.
pub type FileSum = (u64, SystemTime, String);

/// The checksum of a file; `known`: its last one.
pub fn sum(path: &Path, rule: WalkRule, known: Option<&FileSum>) -> Result<FileSum, FileError> {
    use md5::{Digest, Md5};
    let (folder, name) = parent(path, rule, false)?;
    let file = folder.open(&name, FileAccess::Compare)?;
    let meta = file.metadata()?;
    let (length, modified) = (meta.len(), meta.modified()?);
    if length > MAX_SUMMED_FILE_BYTES {
        return Err(FileError::TooLarge(MAX_SUMMED_FILE_BYTES));
    }
    if let Some(known) = known.filter(|known| (known.0, known.1) == (length, modified)) {
        return Ok(known.clone());
    }
    let (mut digest, mut piece) = (Md5::new(), vec![0; 64 << 10]);
    // Reads the length at open time: a file that grows gets another sum next time.
    let mut file = file.take(length);
    loop {
        match file.read(&mut piece)? {
            0 => break,
            count => digest.update(&piece[..count]),
        }
    }
    let sum = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((length, modified, sum))
}

/// The md5 of a file that the calling process can read. Follows all links.
pub fn own_sum(path: &Path) -> Option<String> {
    sum(path, WalkRule::Any, None).ok().map(|(_, _, sum)| sum)
}
