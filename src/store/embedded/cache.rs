//! In-memory cache of all entries, kept in step with the file.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use rusqlite::Connection;

use super::file::{Fault, data_version, last_number, logged, number, sum};
use super::seal::Sealer;
use crate::store::{Change, Entry, Seq};

/// All entries, in memory.
#[derive(Default)]
pub(super) struct Cache {
    pub(super) entries: BTreeMap<Arc<str>, Entry>,
    /// Number of keys per `a/b/` prefix, for paging readers.
    folders: HashMap<String, usize>,
    pub(super) last: Seq,
    /// SQLite's `data_version`: changes when another connection writes.
    pub(super) data_version: i64,
}

impl Cache {
    pub(super) fn load(&mut self, connection: &Connection, sealer: &Sealer) -> Result<(), Fault> {
        self.data_version = data_version(connection)?;
        self.last = last_number(connection)?;
        let mut rows = connection.prepare("SELECT key, value, changed, sum FROM entry")?;
        let mut rows = rows.query([])?;
        self.entries.clear();
        self.folders.clear();
        while let Some(row) = rows.next()? {
            let key: Arc<str> = row.get::<_, String>(0)?.into();
            let stored: Vec<u8> = row.get(1)?;
            let changed = row.get(2)?;
            if sum(&key, &stored, changed) != row.get::<_, i64>(3)? {
                return Err(Fault::Entry(format!("the entry {key:?} has a wrong checksum")));
            }
            let value = sealer.open(&key, changed, stored)?.into();
            let changed = number(changed);
            self.put(key, value, changed);
        }
        Ok(())
    }

    /// Applies the changes since the last one, or loads everything if the log no longer has them.
    pub(super) fn catch_up(&mut self, connection: &Connection, sealer: &Sealer) -> Result<(), Fault> {
        match logged(connection, sealer, "", self.last)? {
            Some(changes) => changes.into_iter().for_each(|change| self.apply(change)),
            None => self.load(connection, sealer)?,
        }
        Ok(())
    }

    fn put(&mut self, key: Arc<str>, value: Arc<[u8]>, changed: Seq) {
        let entry = Entry { key: Arc::clone(&key), value, mod_seq: changed };
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

    pub(super) fn apply(&mut self, Change { number, key, value }: Change) {
        match value {
            Some(value) => self.put(key, value, number),
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
