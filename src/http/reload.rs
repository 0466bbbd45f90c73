//! What comes from a file and follows it. A file that cannot be understood changes nothing, and is told of once.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use tracing::{error, info};

/// How often files are looked at.
const EVERY: Duration = Duration::from_secs(1);

/// The present value; handles share it.
pub struct Reloaded<T>(Arc<RwLock<Arc<T>>>);

impl<T> Clone for Reloaded<T> {
    fn clone(&self) -> Self {
        Reloaded(Arc::clone(&self.0))
    }
}

impl<T> Reloaded<T> {
    /// A value that no file changes.
    pub fn fixed(value: T) -> Reloaded<T> {
        Reloaded(Arc::new(RwLock::new(Arc::new(value))))
    }

    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.read().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    pub fn set(&self, value: T) {
        *self.0.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Arc::new(value);
    }
}

/// Reads files now, and again whenever one of them changes, for as long as the program runs.
pub fn follow<T: Send + Sync + 'static>(
    files: Vec<PathBuf>,
    read: impl Fn() -> Result<T, String> + Send + 'static,
) -> Result<Reloaded<T>, String> {
    let mut known: Vec<_> = files.iter().map(|file| stamp(file)).collect();
    let value = Reloaded::fixed(read()?);
    let followed = value.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(EVERY).await;
            let now: Vec<_> = files.iter().map(|file| stamp(file)).collect();
            if now == known {
                continue;
            }
            known = now;
            let file = files.first().map(|file| file.display().to_string()).unwrap_or_default();
            match read() {
                Ok(new) => {
                    followed.set(new);
                    info!(%file, "read again");
                }
                Err(why) => error!(%why, "what was read before stays in force"),
            }
        }
    });
    Ok(value)
}

/// Anything that differs when a file was written or replaced.
fn stamp(file: &Path) -> Option<(SystemTime, u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(file).ok()?;
    Some((meta.modified().ok()?, meta.len(), meta.ino()))
}
