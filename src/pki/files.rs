//! Files of keys: written atomically, readable by their owner only.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file that only its owner can read. After a crash the path has the old content or the new one.
pub fn write_private(file: &Path, content: &str) -> std::io::Result<()> {
    let mut temporary = file.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = Path::new(&temporary);
    // A crash may have left one; an existing file could have other permissions.
    match std::fs::remove_file(temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
    written.write_all(content.as_bytes())?;
    written.sync_all()?;
    std::fs::rename(temporary, file)?;
    match file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => File::open(folder)?.sync_all(),
        None => File::open(".")?.sync_all(),
    }
}
