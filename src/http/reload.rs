//! Reloadable values: parsed from files and reloaded on change. An invalid file is logged once and changes nothing.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::body::{Body, Bytes};
use futures_util::{StreamExt, stream};
use tokio::sync::watch;
use tracing::{error, info};

use crate::error_chain::chain;

/// Interval between checks of the files.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The current value, shared by all handles.
pub struct Reloadable<T>(Arc<watch::Sender<Arc<T>>>);

impl<T> Clone for Reloadable<T> {
    fn clone(&self) -> Self {
        Reloadable(Arc::clone(&self.0))
    }
}

impl<T> Reloadable<T> {
    /// A value without a file.
    pub fn fixed(value: T) -> Reloadable<T> {
        Reloadable(Arc::new(watch::Sender::new(Arc::new(value))))
    }

    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.borrow())
    }

    /// The current value and each later one.
    pub fn subscribe(&self) -> watch::Receiver<Arc<T>> {
        self.0.subscribe()
    }

    pub fn set(&self, value: T) {
        self.0.send_replace(Arc::new(value));
    }
}

/// Resolves when the credential that opened a stream is no longer valid.
pub type Revocation = Pin<Box<dyn Future<Output = ()> + Send>>;

impl<T: Send + Sync + 'static> Reloadable<T> {
    /// Resolves when the value no longer contains a credential.
    pub fn revocation(&self, holds: impl Fn(&T) -> bool + Send + Sync + 'static) -> Revocation {
        let mut values = self.0.subscribe();
        Box::pin(async move {
            // Without a sender the value never changes.
            if values.wait_for(|value| !holds(value)).await.is_err() {
                std::future::pending::<()>().await;
            }
        })
    }
}

/// Ends a stream when its credential is revoked, with a last line for its reader unless that is empty.
pub fn end_on_revocation(body: Body, revoked: Revocation, last: &'static str) -> Body {
    let open = Some((body.into_data_stream(), revoked));
    Body::from_stream(stream::unfold(open, move |state| async move {
        let (mut pieces, mut revoked) = state?;
        tokio::select! {
            biased;
            () = &mut revoked => (!last.is_empty()).then(|| (Ok(Bytes::from_static(last.as_bytes())), None)),
            piece = pieces.next() => piece.map(|piece| (piece, Some((pieces, revoked)))),
        }
    }))
}

/// Reads files now, and again on each change until the program ends.
pub fn watch_file<T: Send + Sync + 'static, E: Error + 'static>(
    files: Vec<PathBuf>,
    read: impl Fn() -> Result<T, E> + Send + 'static,
) -> Result<Reloadable<T>, E> {
    let mut known: Vec<_> = files.iter().map(|file| stamp(file)).collect();
    let value = Reloadable::fixed(read()?);
    let reloaded = value.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let now: Vec<_> = files.iter().map(|file| stamp(file)).collect();
            if now == known {
                continue;
            }
            known = now;
            let file = files.first().map(|file| file.display().to_string()).unwrap_or_default();
            match read() {
                Ok(new) => {
                    reloaded.set(new);
                    info!(%file, "file reloaded");
                }
                Err(error) => {
                    error!(why = %chain(&error), "reload failed: the previous content stays active")
                }
            }
        }
    });
    Ok(value)
}

/// A value that differs after a file was written or replaced.
fn stamp(file: &Path) -> Option<(SystemTime, u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(file).ok()?;
    Some((meta.modified().ok()?, meta.len(), meta.ino()))
}
