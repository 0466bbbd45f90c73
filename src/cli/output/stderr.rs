//! Standard error. What stands for long has it written by a thread of its own, so that nobody who does not read can make
//! the work wait: what is too much is dropped, and a line says how much that was.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::json;

use crate::clock::now;

/// So many bytes wait to be read, and no more.
const MAX_QUEUED_BYTES: usize = 1 << 20;
/// At the end a reader who takes nothing for this long is left behind.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

static QUEUE: Queue = Queue { waiting: Mutex::new(QueueState::EMPTY), news: Condvar::new() };

struct Queue {
    waiting: Mutex<QueueState>,
    news: Condvar,
}

struct QueueState {
    pieces: VecDeque<Chunk>,
    bytes: usize,
    /// There is a thread that writes; until there is, everybody does it himself.
    has_writer: bool,
    in_json: bool,
    /// A piece is being written.
    busy: bool,
    written: u64,
}

enum Chunk {
    Text(Vec<u8>),
    /// So many lines that had no room.
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
        // Whatever its size, there is room for one.
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
    let message = format!("not written, because nobody read: lines: {lines}");
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

/// From here on nobody who writes waits.
pub fn start_writer(in_json: bool) {
    lock_queue().in_json = in_json;
    let begun = std::thread::Builder::new().name("stderr".to_owned()).spawn(write_loop);
    lock_queue().has_writer = begun.is_ok();
}

fn write_loop() {
    let mut queue = lock_queue();
    loop {
        match queue.pop() {
            Some(text) => {
                queue.busy = true;
                drop(queue);
                // A reader who went away is not an error.
                let _ = std::io::stderr().write_all(&text);
                queue = lock_queue();
                (queue.busy, queue.written) = (false, queue.written + 1);
                QUEUE.news.notify_all();
            }
            None => queue = QUEUE.news.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner()),
        }
    }
}

/// To standard error: at once, or as soon as somebody reads.
pub fn write(text: &[u8]) {
    let mut queue = lock_queue();
    if queue.has_writer {
        queue.push(text);
        QUEUE.news.notify_all();
        return;
    }
    drop(queue);
    let _ = std::io::stderr().write_all(text);
}

/// Waits until everything is written, or nobody reads.
pub fn flush_queue() {
    let mut queue = lock_queue();
    while queue.busy || !queue.pieces.is_empty() {
        let before = queue.written;
        let is_still = |queue: &mut QueueState| queue.written == before;
        let waited = QUEUE.news.wait_timeout_while(queue, DRAIN_TIMEOUT, is_still);
        let (now, waited) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        if waited.timed_out() {
            return;
        }
        queue = now;
    }
}

/// The same for whoever wants something to write to.
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
        assert_eq!(queue.pop().map(|text| text.len()), Some(MAX_QUEUED_BYTES + 1), "there is room for one");
        queue.push(b"four\n");
        let rest: Vec<String> = std::iter::from_fn(|| queue.pop())
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .collect();
        assert_eq!(rest, ["warning: not written, because nobody read: lines: 3\n", "four\n"]);
        assert_eq!(queue.bytes, 0);
    }
}
