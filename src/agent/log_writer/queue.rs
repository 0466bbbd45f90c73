//! Queue between the pipe and the log: bounded, and never a reason for the process to wait forever.
//!
//! A disk that is slow makes the reader wait, as a plain file would. A disk that makes no progress for [`STALL`] makes it
//! drop output, which is counted.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Maximum queued bytes.
const MAX_BYTES: usize = 4 << 20;
/// Maximum wait of a full queue for the disk.
const STALL: Duration = Duration::from_secs(1);

/// An item of the queue.
#[derive(Debug, PartialEq, Eq)]
pub enum QueueItem {
    Bytes(Vec<u8>),
    /// Number of bytes that are missing here.
    Dropped(u64),
    /// No item arrived in time.
    Nothing,
}

#[derive(Default)]
pub struct OutputQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    items: VecDeque<QueueItem>,
    bytes: usize,
    /// No item was taken within [`STALL`], although the queue was full.
    is_stalled: bool,
    is_closed: bool,
}

impl OutputQueue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds output. Waits while the queue is full and the disk makes progress.
    pub fn push(&self, bytes: &[u8]) {
        let mut state = self.state();
        let mut until = Instant::now() + STALL;
        while state.bytes > 0 && state.bytes + bytes.len() > MAX_BYTES && !state.is_stalled {
            let before = state.bytes;
            let left = until.saturating_duration_since(Instant::now());
            let (next, waited) = match self.changed.wait_timeout(state, left) {
                Ok(woken) => woken,
                Err(poisoned) => poisoned.into_inner(),
            };
            state = next;
            if state.bytes != before {
                until = Instant::now() + STALL;
            } else if waited.timed_out() {
                state.is_stalled = true;
            }
        }
        if state.bytes > 0 && state.bytes + bytes.len() > MAX_BYTES {
            match state.items.back_mut() {
                Some(QueueItem::Dropped(count)) => *count += bytes.len() as u64,
                _ => state.items.push_back(QueueItem::Dropped(bytes.len() as u64)),
            }
            return;
        }
        state.bytes += bytes.len();
        state.items.push_back(QueueItem::Bytes(bytes.to_vec()));
        self.changed.notify_all();
    }

    /// No more output follows.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// The next item, after at most this time; `None`: the queue is closed and empty.
    pub fn take(&self, wait: Duration) -> Option<QueueItem> {
        let until = Instant::now().checked_add(wait);
        let mut state = self.state();
        loop {
            if let Some(item) = state.items.pop_front() {
                if let QueueItem::Bytes(bytes) = &item {
                    state.bytes -= bytes.len();
                }
                state.is_stalled = false;
                self.changed.notify_all();
                return Some(item);
            }
            if state.is_closed {
                return None;
            }
            state = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(Duration::ZERO) => return Some(QueueItem::Nothing),
                Some(left) => match self.changed.wait_timeout(state, left) {
                    Ok((state, _)) => state,
                    Err(poisoned) => poisoned.into_inner().0,
                },
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_is_not_emptied_drops_and_counts() {
        let queue = OutputQueue::default();
        let chunk = vec![b'x'; MAX_BYTES / 4];
        (0..4).for_each(|_| queue.push(&chunk));
        let begun = Instant::now();
        queue.push(&chunk);
        assert!(begun.elapsed() >= STALL, "it waits once");
        queue.push(&chunk);
        assert!(begun.elapsed() < STALL * 2, "and then no more");
        assert_eq!(queue.take(Duration::MAX), Some(QueueItem::Bytes(chunk.clone())));
        queue.push(b"after");
        queue.close();
        let items: Vec<QueueItem> = std::iter::from_fn(|| queue.take(Duration::MAX)).skip(3).collect();
        assert_eq!(OutputQueue::default().take(Duration::from_millis(1)), Some(QueueItem::Nothing));
        assert_eq!(items, [QueueItem::Dropped(2 * chunk.len() as u64), QueueItem::Bytes(b"after".to_vec())]);
    }

    #[test]
    fn a_slow_reader_loses_nothing() {
        let queue = OutputQueue::default();
        let chunk = vec![b'x'; MAX_BYTES / 2];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..6).for_each(|_| queue.push(&chunk));
                queue.close();
            });
            let mut all = 0;
            while let Some(item) = queue.take(Duration::MAX) {
                assert!(
                    matches!(&item, QueueItem::Bytes(bytes) if bytes.len() == chunk.len()),
                    "{item:.40?}"
                );
                std::thread::sleep(Duration::from_millis(20));
                all += 1;
            }
            assert_eq!(all, 6);
        });
    }
}
