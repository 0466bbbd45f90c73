//! Files are read on a thread: a file system that does not answer holds up nobody but that thread.
//!
//! Who reads waits for a moment. If nothing comes back by then, what was last read stays in force, that is told, and when
//! the thread is back, it is read again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{ChangeSignal, SourceState};
use crate::manifest::{Code, FileContent, Problem};

/// So long a reading is waited for.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Where nobody tells of changes, files are looked at this often.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// After so many times the quiet that is waited for, it is read although it is not quiet.
const MAX_DEBOUNCE_FACTOR: u32 = 10;

/// What is read aside.
pub trait BlockingSource: Send + 'static {
    fn read(&mut self);
    fn last(&self) -> &SourceState;
    fn restore_last_good(&mut self, texts: Vec<FileContent>) -> bool;
    /// Does nobody tell of its changes?
    fn is_polled(&self) -> bool;
    /// Notes whether something changed, where nobody tells.
    fn poll(&mut self);
    /// As people know it.
    fn name(&self) -> String;
}

pub struct BlockingReader<F> {
    name: String,
    debounce: Duration,
    seen: Arc<ChangeSignal>,
    /// A thread has them for as long as it works.
    files: Arc<Mutex<F>>,
    /// One is at work.
    away: Option<oneshot::Receiver<()>>,
    polled: Instant,
    last: SourceState,
    /// They did not come back in time, and that was told.
    is_silent: bool,
    /// What was in force before, for when they are back.
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

    /// They themselves, if nobody is at work.
    fn idle_source(&self) -> Option<MutexGuard<'_, F>> {
        self.away.is_none().then(|| lock(&self.files))
    }

    pub(super) fn change_signal(&self) -> &Arc<ChangeSignal> {
        &self.seen
    }

    pub(super) fn last(&self) -> &SourceState {
        &self.last
    }

    /// Did something change, and has it been quiet since? Or did somebody ask?
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

    /// How long until it will have been quiet.
    pub fn wait(&self) -> Duration {
        self.wait_after(self.seen.at().as_ref()).unwrap_or(POLL_INTERVAL)
    }

    /// How long until it was quiet for long enough; who is never quiet is not waited for for ever.
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

    /// The manifests as they are, or as they last were where they are broken or do not come.
    pub async fn read(&mut self) -> &SourceState {
        self.on_reader_done();
        // Who was waited for in vain is not waited for again, until he is back.
        let patience = if self.is_silent && self.away.is_some() { Duration::ZERO } else { READ_TIMEOUT };
        self.read_within(patience).await
    }

    async fn read_within(&mut self, patience: Duration) -> &SourceState {
        let until = tokio::time::Instant::now() + patience;
        // What is at hand may be from before the silence.
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
            Err(error) => tracing::warn!(%error, "no thread can be made: the manifests are read later"),
        }
    }

    /// Waits for whoever is away.
    async fn wait_for_reader(&mut self, until: tokio::time::Instant) -> bool {
        if let Some(away) = &mut self.away
            && tokio::time::timeout_at(until, away).await.is_ok()
        {
            self.away = None;
        }
        self.away.is_none()
    }

    /// Whoever was away for too long is back: it is read again.
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
                "it could not be read within {} s: what was last read stays in force",
                READ_TIMEOUT.as_secs()
            );
            let hint = Some("does its file system answer?".to_owned());
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

/// A thread that panicked left them as they were.
fn lock<F>(files: &Mutex<F>) -> MutexGuard<'_, F> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Files that come when somebody lets them.
    struct Stuck {
        go: Receiver<&'static str>,
        last: SourceState,
    }

    impl BlockingSource for Stuck {
        fn read(&mut self) {
            let revision = self.go.recv().expect("somebody lets them, or this thread panics").to_owned();
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
    async fn what_does_not_come_is_not_waited_for_and_is_read_again_when_it_is_back() {
        let (mut aside, let_go) = stuck();
        let_go.send("1").expect("it is there");
        assert_eq!(aside.read().await.revision, "1");
        // The next one hangs.
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
