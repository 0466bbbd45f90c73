//! Active holds: holds, pauses and aborted rollouts that take effect while a plan is executed.
//!
//! An entry that cannot be read fails closed: its instance or namespace stays held, with the entry's key as the
//! reason. A person requested something with it, and only a person can know what.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::model::{Hold, InstanceKey, Pause, ProcessKey, Time};
use crate::reconcile::{Rules, aborted_rollout, active_hold, paused};
use crate::store::keys::{HOLD_PREFIX, PAUSE_PREFIX};
use crate::store::{Entry, Error, Store};

/// Interval between two reads.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Namespace part of the key of the global pause.
const EVERYWHERE: &str = "*";

/// Author of an entry that cannot be read.
const UNREADABLE: &str = "an unreadable entry";

/// A stored value that does not parse.
#[derive(Debug, thiserror::Error)]
#[error("{key} cannot be read: {source}")]
pub struct UnreadableEntry {
    pub key: String,
    source: serde_json::Error,
}

fn parse<T: DeserializeOwned>(entry: &Entry) -> Result<T, UnreadableEntry> {
    serde_json::from_slice(&entry.value)
        .map_err(|source| UnreadableEntry { key: entry.key.to_string(), source })
}

/// Holds and pauses that have not expired.
pub async fn read_active_holds<S: Store>(state: &S, now: Time) -> Result<(Vec<Hold>, Vec<Pause>), Error> {
    let holds = state.range(HOLD_PREFIX, None, usize::MAX).await?.entries;
    let pauses = state.range(PAUSE_PREFIX, None, usize::MAX).await?.entries;
    let is_active = |until: Option<Time>| until.is_none_or(|until| until > now);
    let holds = holds.iter().filter_map(hold_of).filter(|hold| is_active(hold.until));
    let pauses = pauses.iter().filter_map(pause_of).filter(|pause| is_active(pause.until));
    Ok((holds.collect(), pauses.collect()))
}

/// The hold of an entry. `None`: its value cannot be read, and its key names no instance.
fn hold_of(entry: &Entry) -> Option<Hold> {
    parse(entry).map_or_else(
        |error: UnreadableEntry| {
            let instance = entry.key.strip_prefix(HOLD_PREFIX)?.parse().ok()?;
            Some(Hold { instance, by: UNREADABLE.to_owned(), reason: Some(error.to_string()), until: None })
        },
        Some,
    )
}

/// The pause of an entry. `None`: its value cannot be read, and its key names no namespace.
fn pause_of(entry: &Entry) -> Option<Pause> {
    parse(entry).map_or_else(
        |error: UnreadableEntry| {
            let namespace = match entry.key.strip_prefix(PAUSE_PREFIX)? {
                EVERYWHERE => None,
                name => Some(name.parse().ok()?),
            };
            Some(Pause { namespace, by: UNREADABLE.to_owned(), reason: Some(error.to_string()), until: None })
        },
        Some,
    )
}

/// Holds, pauses and aborted rollouts as of the last read.
#[derive(Clone, Debug, Default)]
pub struct ActiveHolds {
    holds: Vec<Hold>,
    pauses: Vec<Pause>,
    /// Processes whose rollout of the version in execution was aborted.
    aborted: BTreeSet<ProcessKey>,
}

impl ActiveHolds {
    /// All of them, without the holds that these rules override.
    pub fn of((holds, pauses): (Vec<Hold>, Vec<Pause>), rules: &Rules) -> ActiveHolds {
        let holds = if rules.holds.override_manual { Vec::new() } else { holds };
        ActiveHolds { holds, pauses, aborted: BTreeSet::new() }
    }

    /// Adds the processes whose rollout was aborted.
    pub fn with_aborted(self, aborted: BTreeSet<ProcessKey>) -> ActiveHolds {
        ActiveHolds { aborted, ..self }
    }

    pub fn is_aborted(&self, process: &ProcessKey) -> bool {
        self.aborted.contains(process)
    }

    /// Reason why an instance is held. A pause does not stop an instance that already has an executed step.
    pub fn hold_reason(
        &self,
        key: &InstanceKey,
        from: Option<&InstanceKey>,
        is_begun: bool,
    ) -> Option<String> {
        // Expired entries were removed when they were read.
        let ever = Time(i64::MIN);
        let paused = paused(&self.pauses, key, ever).filter(|_| !is_begun);
        paused.or_else(|| active_hold(&self.holds, key, from, ever))
    }

    /// Reason why no further instance of a process changes: its rollout was aborted.
    pub fn stops_rollout(&self, process: &ProcessKey) -> Option<String> {
        self.is_aborted(process).then(|| aborted_rollout(process))
    }
}

/// Runs `work` and refreshes holds, pauses and aborted rollouts in parallel. If a read fails, the previous state stays.
pub async fn with_hold_refresh<T, A, E>(
    holds: &watch::Sender<ActiveHolds>,
    read: impl Fn() -> A,
    work: impl Future<Output = T>,
) -> T
where
    A: Future<Output = Result<ActiveHolds, E>>,
{
    tokio::pin!(work);
    loop {
        let refreshed = async {
            tokio::time::sleep(REFRESH_INTERVAL).await;
            read().await
        };
        tokio::select! {
            done = &mut work => return done,
            active_holds = refreshed => {
                if let Ok(active_holds) = active_holds {
                    holds.send_replace(active_holds);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &str) -> Entry {
        Entry { key: key.into(), value: value.as_bytes().into(), mod_seq: 1 }
    }

    #[test]
    fn an_unreadable_entry_holds_what_its_key_names() {
        let instance: InstanceKey = "0:10.0.0.1:web:api".parse().expect("a key");
        let hold = hold_of(&entry("hold/0:10.0.0.1:web:api", "garbage")).expect("a hold");
        assert_eq!((&hold.instance, hold.until), (&instance, None));
        assert!(hold.reason.is_some_and(|why| why.starts_with("hold/0:10.0.0.1:web:api cannot be read: ")));
        let pause = pause_of(&entry("pause/web", "{\"by\": 7}")).expect("a pause");
        assert_eq!(pause.namespace, Some(instance.namespace));
        assert!(pause.reason.is_some_and(|why| why.starts_with("pause/web cannot be read: ")));
        assert_eq!(pause_of(&entry("pause/*", "")).expect("a pause").namespace, None);
        // No instance has such a name.
        assert_eq!(hold_of(&entry("hold/x", "garbage")), None);
        assert_eq!(pause_of(&entry("pause/a b", "garbage")), None);
    }

    #[test]
    fn a_readable_entry_has_the_hold_of_its_value() {
        let value = "{\"namespace\": \"web\", \"by\": \"ann\", \"reason\": null, \"until\": null}";
        let pause = pause_of(&entry("pause/web", value)).expect("a pause");
        assert_eq!((pause.by.as_str(), pause.reason), ("ann", None));
    }
}
