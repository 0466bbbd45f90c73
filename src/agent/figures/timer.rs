//! Timer of figure updates: one batch to the gateway per interval.
//!
//! The first samples of a process shorten the interval, and a failed batch sends all rows again.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, interval_at, sleep_until};

use super::FigureTable;

/// Delay of the first batch of a session: the first samples of new processes are in it.
const FIRST_BATCH: Duration = Duration::from_secs(3);
/// Minimum interval between a batch and the one that first samples bring forward: many starts share a batch.
const MIN_INTERVAL: Duration = Duration::from_secs(2);

/// The times of the batches of one session.
pub struct FiguresTimer {
    table: Arc<FigureTable>,
    ticks: Interval,
    last: Instant,
    /// The batch in flight.
    in_flight: Option<JoinHandle<bool>>,
    /// The gateway lacks rows: the next batch has all.
    is_behind: bool,
}

impl FiguresTimer {
    pub(super) fn new(interval: Duration, table: Arc<FigureTable>) -> FiguresTimer {
        let now = Instant::now();
        let mut ticks = interval_at(now + FIRST_BATCH.min(interval), interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        FiguresTimer { table, ticks, last: now, in_flight: None, is_behind: true }
    }

    /// Waits for the next batch. True: it has all rows.
    pub async fn next(&mut self) -> bool {
        let early = async {
            self.table.wait_for_first_samples().await;
            sleep_until(self.last + MIN_INTERVAL).await;
        };
        tokio::select! {
            _ = self.ticks.tick() => {}
            () = early => {}
        }
        self.last = Instant::now();
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
