//! What changes at a target, as it tells of it, so that nobody need look at everything again and again.
//!
//! A target that tells numbers its changes. Whoever has taken in everything up to the number that the target has reached
//! knows what a look would show. After [`ChangeEvent::Over`], or when the numbers do not come, only a look helps.

use tokio::sync::mpsc;

use crate::model::{InstanceKey, ObservedInstance};

/// Something that the target told.
#[derive(Clone, Debug, PartialEq)]
pub enum ChangeEvent {
    /// Rows as they are now, `None` where one is gone; and the number of the last change that is known by that.
    Rows { number: u64, rows: Vec<(InstanceKey, Option<ObservedInstance>)> },
    /// It tells no more, and why.
    Over(String),
}

/// The reader's end.
#[derive(Debug)]
pub struct ChangeStream {
    /// The number of the look that they come after.
    pub from: u64,
    told: mpsc::Receiver<ChangeEvent>,
}

/// So many may wait until they are read; whoever tells waits then.
const WAITING: usize = 256;

impl ChangeStream {
    pub fn new(from: u64) -> (mpsc::Sender<ChangeEvent>, ChangeStream) {
        let (tell, told) = mpsc::channel(WAITING);
        (tell, ChangeStream { from, told })
    }

    /// Waits for the next. Nothing is lost by not waiting to its end.
    pub async fn next(&mut self) -> ChangeEvent {
        let gone = || ChangeEvent::Over("nobody tells of changes any more".to_owned());
        self.told.recv().await.unwrap_or_else(gone)
    }
}
