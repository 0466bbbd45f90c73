//! Inventory feed of a controller: polls the inventories that its manifests name, and keeps the last good hosts.
//!
//! The source asks for snapshots and problems in each read; a change requests a read. A new snapshot is stored before
//! it is used, so that a restart begins with it. The feed never blocks the control loop: a read runs on its own task.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::last_good::{changed_hosts, lost_hosts, read_last_good, store_last_good};
use super::{InventoryFault, InventorySnapshot, InventorySource};
use crate::manifest::inventory::{file_name, stand_ins};
use crate::manifest::{Code, Problem, ReplacementText};
use crate::store::Store;

/// Interval after a failed read, if it is shorter than that of the inventory.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

pub struct InventoryFeed {
    sources: BTreeMap<String, Arc<InventorySource>>,
    owner: String,
    entries: Mutex<BTreeMap<String, FeedEntry>>,
    /// Signals the first read of an inventory to waiting threads.
    first_read: Condvar,
    /// Changes whenever snapshots or problems change.
    version: AtomicU64,
    /// An inventory is due.
    wake: Notify,
}

/// An inventory that the manifests name.
#[derive(Clone, Debug, Default)]
struct FeedEntry {
    text: Option<Arc<str>>,
    fault: Option<String>,
    was_attempted: bool,
    in_flight: bool,
    due: Option<Instant>,
}

impl InventoryFeed {
    pub fn new(sources: BTreeMap<String, InventorySource>, owner: String) -> Arc<InventoryFeed> {
        let sources = sources.into_iter().map(|(name, source)| (name, Arc::new(source))).collect();
        Arc::new(InventoryFeed {
            sources,
            owner,
            entries: Mutex::default(),
            first_read: Condvar::new(),
            version: AtomicU64::new(0),
            wake: Notify::new(),
        })
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, FeedEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that changes with the snapshots and problems.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Sets the inventories to poll. Returns whether some of them were never read.
    pub fn set_wanted(&self, names: &BTreeSet<&str>) -> bool {
        let mut entries = self.entries();
        entries.retain(|name, entry| names.contains(name.as_str()) || entry.in_flight);
        for name in names {
            entries.entry((*name).to_owned()).or_default();
        }
        let has_unread = entries.values().any(|entry| !entry.was_attempted);
        drop(entries);
        if has_unread {
            self.wake.notify_one();
        }
        has_unread
    }

    /// Blocks this thread until every wanted inventory was read once, or the time is over.
    pub fn wait_for_first_read(&self, at_most: Duration) {
        let is_pending =
            |entries: &mut BTreeMap<String, FeedEntry>| entries.values().any(|entry| !entry.was_attempted);
        let waited = self.first_read.wait_timeout_while(self.entries(), at_most, is_pending);
        drop(waited);
    }

    /// Current snapshots as files of the manifest set.
    pub fn stand_ins(&self) -> BTreeMap<String, ReplacementText> {
        let entries = self.entries();
        stand_ins(entries.iter().filter_map(|(name, entry)| Some((name.as_str(), entry.text.as_ref()?))))
    }

    /// Problems of the inventories.
    pub fn problems(&self) -> Vec<Problem> {
        let entries = self.entries();
        let problem = |(name, entry): (&String, &FeedEntry)| {
            let fault = entry.fault.as_ref()?;
            let message = match &entry.text {
                Some(_) => format!("inventory {name:?}: {fault}; its last good hosts stay"),
                None => format!("inventory {name:?}: {fault}"),
            };
            let hint = format!(
                "`abide inventory show {name}` reads it; `abide inventory accept {name}` accepts lost hosts"
            );
            Some(Problem::of_file(file_name(name).into(), Code::InventoryFailed, message, Some(hint)))
        };
        entries.iter().filter_map(problem).collect()
    }

    /// Polls until it is dropped. `on_change`: snapshots or problems changed.
    pub async fn run<S: Store + Clone>(self: Arc<Self>, state: S, on_change: impl Fn() + Send + Sync) {
        let mut reads = JoinSet::new();
        loop {
            let (due, next) = self.take_due();
            for name in due {
                let (feed, state) = (Arc::clone(&self), state.clone());
                reads.spawn(async move { feed.poll(&name, &state).await });
            }
            tokio::select! {
                () = self.wake.notified() => {}
                () = tokio::time::sleep(next) => {}
                Some(changed) = reads.join_next() => {
                    if changed.unwrap_or(false) {
                        on_change();
                    }
                }
            }
        }
    }

    /// The inventories to read now, and the time until the next one.
    fn take_due(&self) -> (Vec<String>, Duration) {
        let (now, mut due, mut next) = (Instant::now(), Vec::new(), RETRY_INTERVAL);
        for (name, entry) in self.entries().iter_mut().filter(|(_, entry)| !entry.in_flight) {
            match entry.due.map(|due| due.saturating_duration_since(now)).filter(|left| !left.is_zero()) {
                Some(left) => next = next.min(left),
                None => {
                    entry.in_flight = true;
                    due.push(name.clone());
                }
            }
        }
        (due, next)
    }

    /// Reads one inventory. Returns whether snapshots or problems changed.
    async fn poll<S: Store>(&self, name: &str, state: &S) -> bool {
        let source = self.sources.get(name).map(Arc::clone);
        let mut last = self.entries().get(name).and_then(|entry| entry.text.clone());
        let mut fault = None;
        if last.is_none() {
            match read_last_good(state, &self.owner, name).await {
                Ok(stored) => last = stored.map(|stored| stored.text),
                Err(error) => fault = Some(InventoryFault::LastGoodUnread(error)),
            }
        }
        let mut new = None;
        match (&source, &fault) {
            (_, Some(_)) => {}
            (None, None) => fault = Some(InventoryFault::NotDefined),
            (Some(source), None) => match source.read().await {
                Err(error) => fault = Some(error.into()),
                Ok(read) => match self.accept(&read, last.as_ref(), source, state).await {
                    Ok(()) => new = Some(read.text),
                    Err(why) => fault = Some(why),
                },
            },
        }
        self.record(name, new.or(last), fault.map(|fault| fault.to_string()))
    }

    /// Checks a new snapshot against the last good one, and stores it. `Err`: the reason why it is not used.
    async fn accept<S: Store>(
        &self,
        new: &InventorySnapshot,
        last: Option<&Arc<str>>,
        source: &InventorySource,
        state: &S,
    ) -> Result<(), InventoryFault> {
        if last.is_some_and(|last| *last == new.text) {
            return Ok(());
        }
        let lost = last.and_then(|last| lost_hosts(last, &new.text, source.max_shrink));
        if let Some(lost) = lost {
            // A person may have accepted other hosts since.
            let stored = read_last_good(state, &self.owner, &source.name).await;
            let stored = stored.map_err(InventoryFault::LastGoodUnread)?;
            let is_accepted = stored.is_some_and(|stored| {
                last.is_none_or(|last| *last != stored.text)
                    && lost_hosts(&stored.text, &new.text, source.max_shrink).is_none()
            });
            if !is_accepted {
                return Err(InventoryFault::Lost(lost));
            }
        }
        let written = store_last_good(state, &self.owner, &source.name, new).await;
        written.map_err(InventoryFault::NotStored)?;
        let (added, lost) = last.map_or((new.hosts, 0), |last| changed_hosts(last, &new.text));
        tracing::info!(inventory = %source.name, hosts = new.hosts, added, lost, "inventory changed");
        Ok(())
    }

    fn record(&self, name: &str, text: Option<Arc<str>>, fault: Option<String>) -> bool {
        let interval = self.sources.get(name).map_or(RETRY_INTERVAL, |source| source.interval);
        let delay = if fault.is_some() { interval.min(RETRY_INTERVAL) } else { interval };
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(name) else { return false };
        let has_changed = entry.text != text || !is_same_fault(entry.fault.as_deref(), fault.as_deref());
        entry.text = text;
        (entry.was_attempted, entry.in_flight, entry.due) = (true, false, Some(Instant::now() + delay));
        if has_changed {
            if let Some(why) = &fault {
                tracing::warn!(inventory = %name, %why, "inventory not used");
            }
            entry.fault = fault;
            self.version.fetch_add(1, Ordering::SeqCst);
        }
        drop(entries);
        self.first_read.notify_all();
        has_changed
    }
}

/// Whether two faults are one report: other numbers are not a difference.
fn is_same_fault(one: Option<&str>, other: Option<&str>) -> bool {
    let words = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    one.map(words) == other.map(words)
}
