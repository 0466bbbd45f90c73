//! A store of either kind: whoever keeps state does not care where.
//!
//! A target's own store holds what concerns that target, and nothing else. Elsewhere several targets may keep their state
//! side by side, each in a place of its own.

use std::sync::Arc;
use std::time::Duration;

use super::lease::{Holder, Lease, LeaseAttempt, Record, Reset};
use super::{Change, Embedded, Entry, Error, Outcome, Page, Remote, Seq, Store, Txn, Write};

#[derive(Clone)]
pub struct AnyStore {
    kind: Kind,
    /// What every key begins with there.
    place: String,
}

#[derive(Clone)]
enum Kind {
    /// A file of this machine.
    Here(Embedded),
    /// A gateway's.
    There(Remote),
}

macro_rules! whichever {
    ($self:ident.$($call:tt)*) => {
        match &$self.kind {
            Kind::Here(store) => store.$($call)*.await,
            Kind::There(store) => store.$($call)*.await,
        }
    };
}

impl AnyStore {
    /// The target's own.
    pub fn own(store: Remote) -> AnyStore {
        AnyStore { kind: Kind::There(store), place: String::new() }
    }

    /// A gateway's, for another target.
    pub fn there(store: Remote, target: &str) -> AnyStore {
        AnyStore { kind: Kind::There(store), place: place(target) }
    }

    /// A file of this machine.
    pub fn here(store: Embedded, target: &str) -> AnyStore {
        AnyStore { kind: Kind::Here(store), place: place(target) }
    }

    /// Is it the target itself that keeps it? Then its numbers of leases are the target's.
    pub fn is_own(&self) -> bool {
        self.place.is_empty()
    }

    /// All leases of this target by name. A lease's key begins with `lease/`, also where targets share a store.
    pub async fn leases(&self) -> Result<Vec<(String, Record)>, Error> {
        let prefix = format!("lease/{}", self.place);
        let page = whichever!(self.range(&prefix, None, usize::MAX))?;
        let lease = |entry: &Entry| {
            let name = entry.key.strip_prefix(&prefix)?.to_owned();
            Some((name, serde_json::from_slice(&entry.value).ok()?))
        };
        Ok(page.entries.iter().filter_map(lease).collect())
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.place)
    }

    fn short(&self, key: &Arc<str>) -> Arc<str> {
        key.strip_prefix(&self.place).map_or_else(|| Arc::clone(key), Arc::from)
    }

    fn entry(&self, entry: Entry) -> Entry {
        Entry { key: self.short(&entry.key), ..entry }
    }
}

fn place(target: &str) -> String {
    format!("at/{target}/")
}

impl Store for AnyStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let key = self.key(key);
        Ok(whichever!(self.get(&key))?.map(|entry| self.entry(entry)))
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        let (prefix, after) = (self.key(prefix), after.map(|after| self.key(after)));
        let page = whichever!(self.range(&prefix, after.as_deref(), limit))?;
        Ok(Page {
            entries: page.entries.into_iter().map(|entry| self.entry(entry)).collect(),
            more: page.more.map(|more| self.short(&more)),
            as_of: page.as_of,
        })
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        let prefix = self.key(prefix);
        let (entries, count) = whichever!(self.slice(&prefix, skip, limit))?;
        Ok((entries.into_iter().map(|entry| self.entry(entry)).collect(), count))
    }

    async fn txn(&self, mut txn: Txn) -> Result<Outcome, Error> {
        txn.compares.iter_mut().for_each(|compare| compare.key = self.key(&compare.key));
        for write in &mut txn.writes {
            match write {
                Write::Put(key, _) | Write::Delete(key) => *key = self.key(key),
            }
        }
        Ok(match whichever!(self.txn(txn))? {
            Outcome::Conflict(key) => Outcome::Conflict(self.short(&key.into()).to_string()),
            written @ Outcome::Written(_) => written,
        })
    }

    async fn changes(&self, prefix: &str, after: Seq) -> Result<Vec<Change>, Error> {
        let prefix = self.key(prefix);
        let changes = whichever!(self.changes(&prefix, after))?;
        Ok(changes.into_iter().map(|change| Change { key: self.short(&change.key), ..change }).collect())
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<LeaseAttempt, Error> {
        let name = self.key(name);
        whichever!(self.take_lease(&name, holder, lives))
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        whichever!(self.renew_lease(lease, lives))
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        whichever!(self.release_lease(lease))
    }

    async fn reset_lease(&self, name: &str, above: u64, force: bool) -> Result<Reset, Error> {
        let name = self.key(name);
        whichever!(self.reset_lease(&name, above, force))
    }
}
