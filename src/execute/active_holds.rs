//! Active holds and pauses while a plan is executed: each applies as soon as it is created.

use std::time::Duration;

use tokio::sync::watch;

use crate::model::{Hold, InstanceKey, Pause, Time};
use crate::reconcile::{Rules, active_hold, paused};

/// Interval between two reads of holds and pauses.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Holds and pauses as of the last read.
#[derive(Clone, Debug, Default)]
pub struct ActiveHolds {
    holds: Vec<Hold>,
    pauses: Vec<Pause>,
}

impl ActiveHolds {
    /// All of them, without the holds that these rules override.
    pub fn of((holds, pauses): (Vec<Hold>, Vec<Pause>), rules: &Rules) -> ActiveHolds {
        let holds = if rules.override_holds { Vec::new() } else { holds };
        ActiveHolds { holds, pauses }
    }

    /// Reason why an instance is held. A pause does not stop an instance that already has an executed step.
    pub fn means(&self, key: &InstanceKey, from: Option<&InstanceKey>, is_begun: bool) -> Option<String> {
        // Expired entries were removed when they were read.
        let ever = Time(i64::MIN);
        let paused = paused(&self.pauses, key, ever).filter(|_| !is_begun);
        paused.or_else(|| active_hold(&self.holds, key, from, ever))
    }
}

/// Runs `work` and refreshes holds and pauses in parallel. If a read fails, the previous state stays.
pub async fn with_hold_refresh<T, A, E>(
    holds: &watch::Sender<ActiveHolds>,
    rules: &Rules,
    read: impl Fn() -> A,
    work: impl Future<Output = T>,
) -> T
where
    A: Future<Output = Result<(Vec<Hold>, Vec<Pause>), E>>,
{
    tokio::pin!(work);
    loop {
        let refreshed = async {
            tokio::time::sleep(REFRESH_INTERVAL).await;
            read().await
        };
        tokio::select! {
            done = &mut work => return done,
            restraints = refreshed => {
                if let Ok(restraints) = restraints {
                    holds.send_replace(ActiveHolds::of(restraints, rules));
                }
            }
        }
    }
}
