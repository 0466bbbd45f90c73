//! Standard error: a queued writer that never blocks a daemon.
//!
//! A separate thread writes from a bounded queue. Lines beyond the queue are dropped and counted.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::json;

use crate::clock::now;
use crate::model::count;

/// Maximum queued bytes.
const MAX_QUEUED_BYTES: usize = 1 << 20;
/// Maximum wait at exit for a reader that reads nothing.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

static QUEUE: Queue = Queue { waiting: Mutex::new(QueueState::EMPTY), changed: Condvar::new() };

struct Queue {
    waiting: Mutex<QueueState>,
    changed: Condvar,
}

struct QueueState {
    pieces: VecDeque<Chunk>,
    bytes: usize,
    /// A writer thread runs; without it, callers write directly.
    has_writer: bool,
    in_json: bool,
    /// A chunk is being written.
    busy: bool,
    written: u64,
}

enum Chunk {
    Text(Vec<u8>),
    /// Number of dropped lines.
    Dropped(usize),
}

impl QueueState {
    const EMPTY: QueueState = QueueState {
        pieces: VecDeque::new(),
        bytes: 0,
        has_writer: false,
        in_json: false,
        busy: false,
        written: 0,
    };

    fn push(&mut self, text: &[u8]) {
        // An empty queue accepts a chunk of any size.
        if self.bytes == 0 || self.bytes + text.len() <= MAX_QUEUED_BYTES {
            self.bytes += text.len();
            return self.pieces.push_back(Chunk::Text(text.to_owned()));
        }
        let lines = text.iter().filter(|byte| **byte == b'\n').count().max(1);
        match self.pieces.back_mut() {
            Some(Chunk::Dropped(before)) => *before += lines,
            Some(Chunk::Text(_)) | None => self.pieces.push_back(Chunk::Dropped(lines)),
        }
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        match self.pieces.pop_front()? {
            Chunk::Text(text) => {
                self.bytes -= text.len();
                Some(text)
            }
            Chunk::Dropped(lines) => Some(dropped_message(lines, self.in_json).into_bytes()),
        }
    }
}

fn dropped_message(lines: usize, in_json: bool) -> String {
    let message = format!("dropped {}: stderr is not being read", count(lines, "log line"));
    match in_json {
        true => {
            let time = now().to_string();
            let line = json!({"time": time, "level": "warning", "event": "dropped", "lines": lines, "message": message});
            format!("{line}\n")
        }
        false => format!("warning: {message}\n"),
    }
}

fn lock_queue() -> MutexGuard<'static, QueueState> {
    QUEUE.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Starts the writer thread. Later writes do not block.
pub fn start_writer(in_json: bool) {
    lock_queue().in_json = in_json;
    let started = std::thread::Builder::new().name("stderr".to_owned()).spawn(write_loop);
    lock_queue().has_writer = started.is_ok();
}

fn write_loop() {
    let mut queue = lock_queue();
    loop {
        match queue.pop() {
            Some(text) => {
                queue.busy = true;
                drop(queue);
                // A broken pipe is not an error.
                let _ = std::io::stderr().write_all(&text);
                queue = lock_queue();
                (queue.busy, queue.written) = (false, queue.written + 1);
                QUEUE.changed.notify_all();
            }
            None => queue = QUEUE.changed.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner()),
        }
    }
}

/// Writes to stderr: directly, or through the queue if a writer thread runs.
pub fn write(text: &[u8]) {
    let mut queue = lock_queue();
    if queue.has_writer {
        queue.push(text);
        QUEUE.changed.notify_all();
        return;
    }
    drop(queue);
    let _ = std::io::stderr().write_all(text);
}

/// Waits until the queue is written, or the reader stalls.
pub fn flush_queue() {
    let mut queue = lock_queue();
    while queue.busy || !queue.pieces.is_empty() {
        let before = queue.written;
        let is_still = |queue: &mut QueueState| queue.written == before;
        let waited = QUEUE.changed.wait_timeout_while(queue, DRAIN_TIMEOUT, is_still);
        let (now, waited) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        if waited.timed_out() {
            return;
        }
        queue = now;
    }
}

/// [`write()`] as an [`std::io::Write`].
pub struct StderrWriter;

impl Write for StderrWriter {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self::write(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_lines_are_counted_in_place() {
        let mut queue = QueueState::EMPTY;
        queue.push(&vec![b'a'; MAX_QUEUED_BYTES + 1]);
        queue.push(b"one\ntwo\n");
        queue.push(b"three\n");
        assert_eq!(
            queue.pop().map(|text| text.len()),
            Some(MAX_QUEUED_BYTES + 1),
            "an empty queue accepts any size"
        );
        queue.push(b"four\n");
        let rest: Vec<String> = std::iter::from_fn(|| queue.pop())
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .collect();
        assert_eq!(rest, ["warning: dropped 3 log lines: stderr is not being read\n", "four\n"]);
        assert_eq!(queue.bytes, 0);
    }
}
