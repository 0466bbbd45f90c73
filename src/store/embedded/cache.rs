//! In-memory cache: all entries, kept in step with the file.
//!
//! A store that is rarely read caches only the sequence numbers of its entries.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use rusqlite::Connection;

use super::file::{DatabaseFileError, data_version, last_number, logged, read_entries};
use super::seal::Sealer;
use crate::store::{Change, Entry, Seq};

/// All entries, in memory.
#[derive(Default)]
pub(super) struct Cache {
    /// Whether the entries are in memory. Otherwise they are read from the file.
    pub(super) has_entries: bool,
    pub(super) entries: BTreeMap<Arc<str>, Entry>,
    /// Number of keys per `a/b/` prefix, for paging readers.
    folders: HashMap<String, usize>,
    pub(super) last: Seq,
    /// SQLite's `data_version`: changes when another connection writes.
    pub(super) data_version: i64,
    /// `None`: the store keeps no log.
    pub(super) recent: Option<RecentChanges>,
}

/// The last changes, for readers that follow them closely.
#[derive(Default)]
pub(super) struct RecentChanges {
    changes: VecDeque<Change>,
    bytes: usize,
    /// The changes after this number are complete.
    after: Seq,
}

/// Maximum recent changes, and their maximum bytes.
const MAX_RECENT: usize = 4096;
const MAX_RECENT_BYTES: usize = 4 << 20;

impl RecentChanges {
    fn add(&mut self, change: Change) {
        self.bytes += size_of_change(&change);
        self.changes.push_back(change);
        while self.changes.len() > MAX_RECENT || self.bytes > MAX_RECENT_BYTES {
            let Some(oldest) = self.changes.pop_front() else { return };
            self.bytes -= size_of_change(&oldest);
            self.after = oldest.number;
        }
    }

    /// Changes after a number of the keys with a prefix, in order; `None`: only the log may have all of them.
    pub(super) fn after(&self, prefix: &str, after: Seq) -> Option<Vec<Change>> {
        if after < self.after {
            return None;
        }
        let first = self.changes.partition_point(|change| change.number <= after);
        let later = self.changes.range(first..);
        Some(later.filter(|change| change.key.starts_with(prefix)).cloned().collect())
    }
}

fn size_of_change(change: &Change) -> usize {
    change.key.len() + change.value.as_ref().map_or(0, |value| value.len())
}

impl Cache {
    pub(super) fn load(&mut self, connection: &Connection, sealer: &Sealer) -> Result<(), DatabaseFileError> {
        self.data_version = data_version(connection)?;
        self.last = last_number(connection)?;
        if let Some(recent) = &mut self.recent {
            *recent = RecentChanges { after: self.last, ..RecentChanges::default() };
        }
        self.entries.clear();
        self.folders.clear();
        read_entries(connection, sealer, "", |entry| {
            self.put(entry);
            true
        })
    }

    /// Applies the changes since the last one, or loads everything if the log no longer has them.
    pub(super) fn catch_up(
        &mut self,
        connection: &Connection,
        sealer: &Sealer,
    ) -> Result<(), DatabaseFileError> {
        match logged(connection, sealer, "", self.last)? {
            Some(changes) => changes.into_iter().for_each(|change| self.apply(change)),
            None => self.load(connection, sealer)?,
        }
        Ok(())
    }

    fn put(&mut self, entry: Entry) {
        if !self.has_entries {
            return;
        }
        let key = Arc::clone(&entry.key);
        if let Some(folder) = folder(&key)
            && !self.entries.contains_key(&key)
        {
            match self.folders.get_mut(folder) {
                Some(count) => *count += 1,
                None => drop(self.folders.insert(folder.to_owned(), 1)),
            }
        }
        self.entries.insert(key, entry);
    }

    /// Number of keys with a prefix, if it is known without counting.
    pub(super) fn count(&self, prefix: &str) -> Option<usize> {
        (folder(prefix) == Some(prefix)).then(|| self.folders.get(prefix).copied().unwrap_or(0))
    }

    pub(super) fn apply(&mut self, change: Change) {
        if let Some(recent) = &mut self.recent {
            recent.add(change.clone());
        }
        let Change { number, key, value } = change;
        match value {
            Some(value) => self.put(Entry { key, value, mod_seq: number }),
            None => {
                if self.entries.remove(&key).is_some()
                    && let Some(folder) = folder(&key)
                    && let Some(count) = self.folders.get_mut(folder)
                {
                    *count -= 1;
                    if *count == 0 {
                        self.folders.remove(folder);
                    }
                }
            }
        }
        self.last = self.last.max(number);
    }
}

/// `a/b/` of `a/b/c`.
fn folder(key: &str) -> Option<&str> {
    let first = key.find('/')? + 1;
    let second = key[first..].find('/')? + 1;
    Some(&key[..first + second])
}

/// Range of the keys with a prefix.
pub(super) struct Within {
    first: String,
    end: Option<String>,
}

pub(super) fn beginning_with(prefix: &str) -> Within {
    // The end is the prefix with its last character incremented, or dropped if it has no successor.
    let next = |last: char| match last {
        '\u{D7FF}' => Some('\u{E000}'),
        last => char::from_u32(last as u32 + 1),
    };
    let mut end = None;
    let mut rest = prefix.to_owned();
    while let Some(last) = rest.pop() {
        if let Some(next) = next(last) {
            rest.push(next);
            end = Some(rest);
            break;
        }
    }
    Within { first: prefix.to_owned(), end }
}

impl Within {
    pub(super) fn as_range(&self) -> (Bound<&str>, Bound<&str>) {
        let end = self.end.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        (Bound::Included(&self.first), end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_changes_are_complete_or_not_returned() {
        let change = |number: Seq, key: &str, bytes: usize| Change {
            number,
            key: key.into(),
            value: Some(vec![0; bytes].into()),
        };
        let mut recent = RecentChanges { after: 10, ..RecentChanges::default() };
        for (number, key) in [(11, "a/1"), (11, "b/1"), (12, "a/2")] {
            recent.add(change(number, key, 1));
        }
        let keys = |recent: &RecentChanges, prefix: &str, after: Seq| {
            let found = recent.after(prefix, after)?;
            Some(found.iter().map(|change| change.key.to_string()).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(keys(&recent, "a/", 10).as_deref(), Some("a/1 a/2"));
        assert_eq!(keys(&recent, "", 11).as_deref(), Some("a/2"));
        assert_eq!(keys(&recent, "", 99).as_deref(), Some(""));
        assert_eq!(keys(&recent, "", 9), None, "the log has earlier ones");
        // The first change of number 11 is dropped, so its second one alone is not complete.
        recent.add(change(13, "large", MAX_RECENT_BYTES - 9));
        assert_eq!(keys(&recent, "", 10), None);
        assert_eq!(keys(&recent, "", 11).as_deref(), Some("a/2 large"));
        for number in 14..14 + MAX_RECENT as Seq {
            recent.add(change(number, "small", 0));
        }
        assert_eq!(recent.changes.len(), MAX_RECENT);
        assert!(keys(&recent, "", 13).is_some() && keys(&recent, "", 12).is_none());
    }

    #[test]
    fn the_end_of_a_prefix_is_after_all_that_begin_with_it() {
        for (prefix, end) in
            [("", None), ("reg/", Some("reg0")), ("a\u{D7FF}", Some("a\u{E000}")), ("a\u{10FFFF}", Some("b"))]
        {
            assert_eq!(beginning_with(prefix).end.as_deref(), end, "{prefix:?}");
        }
        let within = beginning_with("é");
        let end = within.end.expect("there is one");
        assert!("é" < end.as_str() && *"é\u{10FFFF}" < *end && *end <= *"ê");
    }
}
