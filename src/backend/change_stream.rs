//! Change stream of a target: replaces repeated full observations.
//!
//! The target numbers its changes. A reader that has applied all changes up to the target's watermark has the same state
//! as a full observation. After [`ChangeEvent::Over`], or when the numbers lag, a full observation is needed.

use tokio::sync::mpsc;

use crate::model::{InstanceKey, ObservedInstance};

/// A message of the target.
#[derive(Clone, Debug, PartialEq)]
pub enum ChangeEvent {
    /// Current state of instances, `None` for a removed one; `number`: the last change that is included.
    Rows { number: u64, rows: Vec<(InstanceKey, Option<ObservedInstance>)> },
    /// The stream ended, with the cause.
    Over(String),
}

/// Receiving end.
pub struct ChangeStream {
    /// The watermark of the observation that the changes follow.
    pub from: u64,
    events: mpsc::Receiver<ChangeEvent>,
    /// Starts the sender. `None`: it runs.
    start: Option<StartSender>,
}

type StartSender = Box<dyn FnOnce() + Send + Sync>;

/// Maximum queued events; the sender waits when the queue is full.
const MAX_QUEUED: usize = 256;

impl ChangeStream {
    pub fn new(from: u64) -> (mpsc::Sender<ChangeEvent>, ChangeStream) {
        let (sender, events) = mpsc::channel(MAX_QUEUED);
        (sender, ChangeStream { from, events, start: None })
    }

    /// A stream that is opened when it is first needed: an observation that is not repeated needs none.
    pub fn opened_later(
        from: u64,
        start: impl FnOnce(mpsc::Sender<ChangeEvent>) + Send + Sync + 'static,
    ) -> ChangeStream {
        let (sender, stream) = ChangeStream::new(from);
        ChangeStream { start: Some(Box::new(move || start(sender))), ..stream }
    }

    /// Opens the stream, without waiting for an event.
    pub fn open(&mut self) {
        if let Some(start) = self.start.take() {
            start();
        }
    }

    /// Waits for the next event. Cancel-safe.
    pub async fn next(&mut self) -> ChangeEvent {
        self.open();
        let closed = || ChangeEvent::Over("the change stream was closed".to_owned());
        self.events.recv().await.unwrap_or_else(closed)
    }
}
