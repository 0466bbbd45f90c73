//! Timer of figure updates to the gateway: one batch per interval, and all rows after a failed one.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, interval_at};

/// Delay of the first batch of a session: the first samples of new processes are in it.
const FIRST_BATCH: Duration = Duration::from_secs(3);

/// The times of the batches of one session.
pub struct FiguresTimer {
    ticks: Interval,
    /// The batch in flight.
    in_flight: Option<JoinHandle<bool>>,
    /// The gateway lacks rows: the next batch has all.
    is_behind: bool,
}

impl FiguresTimer {
    pub fn new(interval: Duration) -> FiguresTimer {
        let mut ticks = interval_at(Instant::now() + FIRST_BATCH.min(interval), interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        FiguresTimer { ticks, in_flight: None, is_behind: true }
    }

    /// Waits for the next batch. True: it has all rows.
    pub async fn next(&mut self) -> bool {
        self.ticks.tick().await;
        match self.in_flight.take() {
            // A batch that is not sent by now counts as lost.
            Some(sent) => !sent.is_finished() || !sent.await.unwrap_or(false),
            None => self.is_behind,
        }
    }

    pub fn sent_by(&mut self, task: JoinHandle<bool>) {
        (self.in_flight, self.is_behind) = (Some(task), false);
    }
}
