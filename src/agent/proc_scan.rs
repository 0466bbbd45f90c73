//! Scans of /proc: reads of processes on worker threads, shared by the callers that wait for one, within a time limit.
//!
//! The kernel can block a read of the arguments or the environment of a process without a limit. A scan of a hundred
//! thousand processes takes seconds. Neither may occupy a runtime thread of the agent. A scan whose thread is blocked by a
//! process is begun again on another thread, which does not read that process ([`UnreadableProcess`]).
//!
//! A failed scan proves nothing: its callers must not conclude that a process is gone.
//!
//! [`UnreadableProcess`]: crate::proc::UnreadableProcess

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::worker_threads;
use crate::proc::is_blocked;

/// Maximum duration of a scan.
pub const SCAN_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two checks whether the thread of a scan is blocked.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Reason why processes are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    #[error("a scan of processes did not end within {} s", SCAN_TIMEOUT.as_secs())]
    TimedOut,
    #[error("no thread for a scan of processes can be started")]
    NoThread,
    #[error("a scan of processes failed")]
    Failed,
}

/// Reads something of /proc on a worker thread.
pub async fn run<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> Result<T, ScanError> {
    let (send, receive) = oneshot::channel();
    worker_threads::run(move || drop(send.send(read()))).map_err(|_| ScanError::NoThread)?;
    match timeout(SCAN_TIMEOUT, receive).await {
        Ok(read) => read.map_err(|_| ScanError::Failed),
        Err(_) => Err(ScanError::TimedOut),
    }
}

/// A scan with one reader at a time, whose result all waiting callers share.
pub struct SharedScan<T> {
    read: fn() -> T,
    queue: Mutex<ScanQueue<T>>,
}

/// The callers that wait for the next scan.
struct ScanQueue<T> {
    callers: Vec<oneshot::Sender<Arc<T>>>,
    reader: Option<Arc<ScanReader>>,
}

/// The thread that scans, once it runs.
#[derive(Default)]
struct ScanReader(OnceLock<ThreadId>);

impl<T> ScanQueue<T> {
    fn is_read_by(&self, reader: &Arc<ScanReader>) -> bool {
        self.reader.as_ref().is_some_and(|one| Arc::ptr_eq(one, reader))
    }
}

impl<T: Send + Sync + 'static> SharedScan<T> {
    pub const fn new(read: fn() -> T) -> SharedScan<T> {
        SharedScan { read, queue: Mutex::new(ScanQueue { callers: Vec::new(), reader: None }) }
    }

    /// The result of a scan that begins after this call.
    pub async fn current(&'static self) -> Result<Arc<T>, ScanError> {
        let until = Instant::now() + SCAN_TIMEOUT;
        let (mut receive, mut reader) = self.enqueue()?;
        loop {
            match timeout(CHECK_INTERVAL, &mut receive).await {
                Ok(scanned) => return scanned.map_err(|_| ScanError::Failed),
                Err(_) if Instant::now() >= until => return Err(ScanError::TimedOut),
                Err(_) if self.is_replaced(&reader) => (receive, reader) = self.enqueue()?,
                Err(_) => {}
            }
        }
    }

    /// Adds a caller, and begins a scan unless another reader does.
    fn enqueue(&'static self) -> Result<(oneshot::Receiver<Arc<T>>, Arc<ScanReader>), ScanError> {
        let (send, receive) = oneshot::channel();
        let mut queue = self.queue();
        queue.callers.push(send);
        if let Some(reader) = &queue.reader {
            return Ok((receive, Arc::clone(reader)));
        }
        let reader = Arc::new(ScanReader::default());
        queue.reader = Some(Arc::clone(&reader));
        drop(queue);
        let of_thread = Arc::clone(&reader);
        if worker_threads::run(move || self.serve(&of_thread)).is_err() {
            drop(ReaderGuard { scan: self, reader: &reader });
            return Err(ScanError::NoThread);
        }
        Ok((receive, reader))
    }

    /// Whether another reader is needed. A blocked one is replaced: it ends when the read of its process does.
    fn is_replaced(&self, reader: &Arc<ScanReader>) -> bool {
        let mut queue = self.queue();
        if queue.is_read_by(reader) {
            if !reader.0.get().is_some_and(|thread| is_blocked(*thread)) {
                return false;
            }
            queue.reader = None;
        }
        true
    }

    /// Scans until no caller waits.
    fn serve(&self, reader: &Arc<ScanReader>) {
        let _guard = ReaderGuard { scan: self, reader };
        let _ = reader.0.set(std::thread::current().id());
        loop {
            let callers = {
                let mut queue = self.queue();
                if !queue.is_read_by(reader) {
                    return;
                }
                if queue.callers.is_empty() {
                    // Under the same lock as the check: the next caller starts another reader.
                    queue.reader = None;
                    return;
                }
                std::mem::take(&mut queue.callers)
            };
            let scanned = Arc::new((self.read)());
            callers.into_iter().for_each(|caller| drop(caller.send(Arc::clone(&scanned))));
        }
    }

    fn queue(&self) -> MutexGuard<'_, ScanQueue<T>> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Ends a reader that failed: its callers get an error.
struct ReaderGuard<'a, T: Send + Sync + 'static> {
    scan: &'a SharedScan<T>,
    reader: &'a Arc<ScanReader>,
}

impl<T: Send + Sync + 'static> Drop for ReaderGuard<'_, T> {
    fn drop(&mut self) {
        let mut queue = self.scan.queue();
        if queue.is_read_by(self.reader) {
            queue.reader = None;
            queue.callers.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn callers_share_scans_that_begin_after_their_call() {
        static SCANS: AtomicUsize = AtomicUsize::new(0);
        static SCAN: SharedScan<usize> = SharedScan::new(|| {
            let scan = SCANS.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(20));
            scan
        });
        let first = futures_util::future::join_all((0..100).map(|_| SCAN.current())).await;
        let last = first.into_iter().map(|scan| *scan.expect("a scan")).max().expect("a scan");
        assert!(last < 10, "{last} scans for 100 callers");
        let before = SCANS.load(Ordering::SeqCst);
        assert!(*SCAN.current().await.expect("a scan") >= before, "a scan that begins after the call");
    }

    #[tokio::test]
    async fn a_slow_scan_is_an_error_and_occupies_no_runtime_thread() {
        static RELEASED: Mutex<bool> = Mutex::new(false);
        static SCAN: SharedScan<()> = SharedScan::new(|| {
            while !*RELEASED.lock().expect("no panic") {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        // The only thread of this runtime counts meanwhile.
        let ticks = async {
            let mut count = 0;
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                count += 1;
                if count == 20 {
                    return;
                }
            }
        };
        let begun = Instant::now();
        let (scanned, ()) = tokio::join!(SCAN.current(), ticks);
        assert_eq!(scanned.err(), Some(ScanError::TimedOut));
        assert!(begun.elapsed() < SCAN_TIMEOUT * 2);
        *RELEASED.lock().expect("no panic") = true;
        assert!(SCAN.current().await.is_ok(), "the next scan");
    }

    #[tokio::test]
    async fn a_scan_that_fails_is_an_error() {
        static SCAN: SharedScan<()> = SharedScan::new(|| panic!("expected by this test"));
        assert_eq!(SCAN.current().await.err(), Some(ScanError::Failed));
        assert_eq!(run(|| panic!("expected by this test")).await, Err::<(), _>(ScanError::Failed));
        assert_eq!(run(|| 7).await, Ok(7));
    }
}
