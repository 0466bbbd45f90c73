//! Blocking reads on a thread: a file system that hangs blocks only that thread.
//!
//! A read is awaited for a limited time. After that the last read stays active and a problem is reported; when the
//! thread returns, the files are read again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{ChangeSignal, SourceState};
use crate::manifest::{Code, FileContent, Problem};

/// Maximum wait for a read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval where no change notifications are available.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// After this many debounce intervals the files are read even if changes continue.
const MAX_DEBOUNCE_FACTOR: u32 = 10;

/// A source that is read on a thread.
pub trait BlockingSource: Send + 'static {
    fn read(&mut self);
    fn last(&self) -> &SourceState;
    fn restore_last_good(&mut self, texts: Vec<FileContent>) -> bool;
    /// Whether changes have to be polled.
    fn is_polled(&self) -> bool;
    /// Polls for changes, where there are no notifications.
    fn poll(&mut self);
    /// Display name.
    fn name(&self) -> String;
}

pub struct BlockingReader<F> {
    name: String,
    debounce: Duration,
    seen: Arc<ChangeSignal>,
    /// `None` while the thread uses it.
    files: Arc<Mutex<F>>,
    /// A read is running.
    away: Option<oneshot::Receiver<()>>,
    polled: Instant,
    last: SourceState,
    /// The read timed out, and that was reported.
    is_silent: bool,
    /// Texts of the active revision, to add when the thread returns.
    to_recall: Option<Vec<FileContent>>,
}

impl<F: BlockingSource> BlockingReader<F> {
    pub(super) fn new(files: F, seen: Arc<ChangeSignal>, debounce: Duration) -> BlockingReader<F> {
        BlockingReader {
            name: files.name(),
            debounce,
            seen,
            files: Arc::new(Mutex::new(files)),
            away: None,
            polled: Instant::now(),
            last: SourceState::default(),
            is_silent: false,
            to_recall: None,
        }
    }

    /// The source, if no read is running.
    pub(super) fn idle_source(&self) -> Option<MutexGuard<'_, F>> {
        self.away.is_none().then(|| lock(&self.files))
    }

    pub(super) fn change_signal(&self) -> &Arc<ChangeSignal> {
        &self.seen
    }

    pub(super) fn last(&self) -> &SourceState {
        &self.last
    }

    /// Whether something changed and the debounce interval has passed, or a read was requested.
    pub fn changed(&mut self) -> bool {
        self.on_reader_done();
        if self.polled.elapsed() >= POLL_INTERVAL && self.idle_source().is_some_and(|files| files.is_polled())
        {
            self.polled = Instant::now();
            self.spawn_reader(F::poll);
        }
        let is_due = self.wait_after(self.seen.at().as_ref()).is_some_and(|left| left.is_zero());
        let changed = is_due && self.seen.at().take().is_some();
        self.seen.asked.swap(false, Ordering::SeqCst) || changed
    }

    /// Time until the debounce interval has passed.
    pub fn wait(&self) -> Duration {
        self.wait_after(self.seen.at().as_ref()).unwrap_or(POLL_INTERVAL)
    }

    /// Time until the debounce interval has passed; continuous changes are not awaited indefinitely.
    fn wait_after(&self, at: Option<&(Instant, Instant)>) -> Option<Duration> {
        let (first, last) = at?;
        let longest = self.debounce.saturating_mul(MAX_DEBOUNCE_FACTOR);
        let quiet = self.debounce.saturating_sub(last.elapsed());
        Some(quiet.min(longest.saturating_sub(first.elapsed())))
    }

    /// See [`super::Source::recall`].
    pub fn restore_last_good(&mut self, texts: Vec<FileContent>) -> bool {
        if let Some(mut files) = self.idle_source() {
            return files.restore_last_good(texts);
        }
        self.to_recall = Some(texts);
        false
    }

    /// The manifests, with last good versions of files that are broken or cannot be read in time.
    pub async fn read(&mut self) -> &SourceState {
        self.on_reader_done();
        // After a timeout the thread is not awaited again until it returns.
        let timeout = if self.is_silent && self.away.is_some() { Duration::ZERO } else { READ_TIMEOUT };
        self.read_within(timeout).await
    }

    async fn read_within(&mut self, timeout: Duration) -> &SourceState {
        let until = tokio::time::Instant::now() + timeout;
        // The result may be from before the timeout.
        if !self.wait_for_reader(until).await {
            return self.report_timeout();
        }
        self.spawn_reader(F::read);
        if !self.wait_for_reader(until).await {
            return self.report_timeout();
        }
        self.is_silent = false;
        let last = lock(&self.files).last().clone();
        self.last = last;
        &self.last
    }

    fn spawn_reader(&mut self, what: fn(&mut F)) {
        let texts = self.to_recall.take();
        let (back, away) = oneshot::channel();
        let (files, seen) = (Arc::clone(&self.files), Arc::clone(&self.seen));
        let work = move || {
            let mut files = lock(&files);
            texts.map(|texts| files.restore_last_good(texts));
            what(&mut files);
            drop(files);
            let _ = back.send(());
            seen.wake.notify_one();
        };
        match std::thread::Builder::new().name("files".to_owned()).spawn(work) {
            Ok(_) => self.away = Some(away),
            Err(error) => tracing::warn!(%error, "cannot start a thread: the manifests are read later"),
        }
    }

    /// Waits for the running read.
    async fn wait_for_reader(&mut self, until: tokio::time::Instant) -> bool {
        if let Some(away) = &mut self.away
            && tokio::time::timeout_at(until, away).await.is_ok()
        {
            self.away = None;
        }
        self.away.is_none()
    }

    /// The thread returned after a timeout: the files are read again.
    fn on_reader_done(&mut self) {
        let is_still_away = |away: &mut oneshot::Receiver<()>| {
            matches!(away.try_recv(), Err(oneshot::error::TryRecvError::Empty))
        };
        if self.away.take_if(|away| !is_still_away(away)).is_some() && self.is_silent {
            self.seen.asked.store(true, Ordering::SeqCst);
        }
    }

    fn report_timeout(&mut self) -> &SourceState {
        let is_new = !std::mem::replace(&mut self.is_silent, true);
        if is_new {
            let message = format!(
                "no answer from the file system within {} s: the last good version stays active",
                READ_TIMEOUT.as_secs()
            );
            let hint = Some("check the file system, for example a network mount".to_owned());
            self.last.problems.push(Problem::of_file(
                self.name.as_str().into(),
                Code::Unreadable,
                message,
                hint,
            ));
        }
        self.last.has_unknown_files |= self.last.desired.instances.is_empty();
        (self.last.is_incomplete, self.last.may_prune, self.last.changed_since_last) = (true, false, is_new);
        &self.last
    }
}

/// A thread that panicked left the source unchanged.
fn lock<F>(files: &Mutex<F>) -> MutexGuard<'_, F> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::model::ManifestRevision;

    /// Files that are available when the test says so.
    struct Stuck {
        go: Receiver<&'static str>,
        last: SourceState,
    }

    impl BlockingSource for Stuck {
        fn read(&mut self) {
            let revision = self.go.recv().expect("the test sends a revision");
            let revision = ManifestRevision::from_text(revision);
            self.last = SourceState { revision, may_prune: true, ..SourceState::default() };
        }

        fn last(&self) -> &SourceState {
            &self.last
        }

        fn restore_last_good(&mut self, _texts: Vec<FileContent>) -> bool {
            true
        }

        fn is_polled(&self) -> bool {
            false
        }

        fn poll(&mut self) {}

        fn name(&self) -> String {
            "m".to_owned()
        }
    }

    fn stuck() -> (BlockingReader<Stuck>, Sender<&'static str>) {
        let (let_go, go) = channel();
        let files = Stuck { go, last: SourceState::default() };
        (BlockingReader::new(files, Arc::default(), Duration::ZERO), let_go)
    }

    #[tokio::test]
    async fn a_read_without_an_answer_times_out_and_is_repeated_when_the_file_system_answers() {
        let (mut aside, let_go) = stuck();
        let_go.send("1").expect("it is there");
        assert_eq!(aside.read().await.revision.as_str(), "1");
        // The next read hangs.
        let reading = aside.read_within(Duration::from_millis(10)).await;
        assert_eq!((reading.revision.as_str(), reading.is_incomplete, reading.may_prune), ("1", true, false));
        assert!(reading.changed_since_last && reading.problems.len() == 1);
        let reading = aside.read().await;
        assert!(!reading.changed_since_last && reading.problems.len() == 1, "told once, and at once");
        assert!(!aside.changed());
        let_go.send("2").expect("it is there");
        while !aside.changed() {
            tokio::task::yield_now().await;
        }
        let_go.send("3").expect("it is there");
        let reading = aside.read_within(READ_TIMEOUT).await;
        assert_eq!(
            (reading.revision.as_str(), reading.is_incomplete, reading.problems.len()),
            ("3", false, 0)
        );
    }
}
