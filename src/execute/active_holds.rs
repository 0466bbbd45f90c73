//! What people want left alone, while a plan is carried out: a hold or a pause counts from the moment that it is made.

use std::time::Duration;

use tokio::sync::watch;

use crate::model::{Hold, InstanceKey, Pause, Time};
use crate::reconcile::{Rules, active_hold, paused};

/// How often it is asked.
const PACE: Duration = Duration::from_secs(1);

/// As it was last asked.
#[derive(Clone, Debug, Default)]
pub struct ActiveHolds {
    holds: Vec<Hold>,
    pauses: Vec<Pause>,
}

impl ActiveHolds {
    /// What was asked for, as far as these rules do not override it.
    pub fn of((holds, pauses): (Vec<Hold>, Vec<Pause>), rules: &Rules) -> ActiveHolds {
        let holds = if rules.override_holds { Vec::new() } else { holds };
        ActiveHolds { holds, pauses }
    }

    /// Why an instance is left alone. One of which something was done already is not left half-way for a pause.
    pub fn means(&self, key: &InstanceKey, from: Option<&InstanceKey>, is_begun: bool) -> Option<String> {
        // What is over was left out by whoever was asked, a moment ago.
        let ever = Time(i64::MIN);
        let paused = paused(&self.pauses, key, ever).filter(|_| !is_begun);
        paused.or_else(|| active_hold(&self.holds, key, from, ever))
    }
}

/// Does something, and meanwhile asks what is to be left alone. What cannot be asked stays as it was.
pub async fn with_hold_refresh<T, A, E>(
    tell: &watch::Sender<ActiveHolds>,
    rules: &Rules,
    ask: impl Fn() -> A,
    work: impl Future<Output = T>,
) -> T
where
    A: Future<Output = Result<(Vec<Hold>, Vec<Pause>), E>>,
{
    tokio::pin!(work);
    loop {
        let asked = async {
            tokio::time::sleep(PACE).await;
            ask().await
        };
        tokio::select! {
            done = &mut work => return done,
            told = asked => {
                if let Ok(told) = told {
                    tell.send_replace(ActiveHolds::of(told, rules));
                }
            }
        }
    }
}
