//! Any store: embedded or remote, with a key prefix per target.
//!
//! A target's own store holds only the state of that target. Another store may hold the state of several targets, each
//! under its own prefix.

use std::sync::Arc;
use std::time::Duration;

use super::lease::{Holder, Lease, LeaseAttempt, Record, Reset};
use super::{Change, Embedded, Entry, Error, Page, Remote, Seq, Store, Txn, TxnOutcome, Write, keys};

#[derive(Clone)]
pub struct AnyStore {
    kind: Kind,
    /// Prefix of every key.
    prefix: String,
}

#[derive(Clone)]
enum Kind {
    /// A file on this host.
    Embedded(Embedded),
    /// The store of a gateway.
    Remote(Remote),
}

macro_rules! dispatch {
    ($self:ident.$($call:tt)*) => {
        match &$self.kind {
            Kind::Embedded(store) => store.$($call)*.await,
            Kind::Remote(store) => store.$($call)*.await,
        }
    };
}

impl AnyStore {
    /// The target's own store.
    pub fn own(store: Remote) -> AnyStore {
        AnyStore { kind: Kind::Remote(store), prefix: String::new() }
    }

    /// The store of a gateway, for another target.
    pub fn there(store: Remote, target: &str) -> AnyStore {
        AnyStore { kind: Kind::Remote(store), prefix: keys::target_prefix(target) }
    }

    /// A file on this host.
    pub fn here(store: Embedded, target: &str) -> AnyStore {
        AnyStore { kind: Kind::Embedded(store), prefix: keys::target_prefix(target) }
    }

    /// Whether it is the target's own store: then its lease generations are those that the target enforces.
    pub fn is_own(&self) -> bool {
        self.prefix.is_empty()
    }

    /// All leases of this target by name. A lease key starts with `lease/`, also where targets share a store.
    pub async fn leases(&self) -> Result<Vec<(String, Record)>, Error> {
        let prefix = keys::lease(&self.prefix);
        let page = dispatch!(self.range(&prefix, None, usize::MAX))?;
        let lease = |entry: &Entry| {
            let name = entry.key.strip_prefix(&prefix)?.to_owned();
            Some(entry.decode().map(|record| (name, record)))
        };
        page.entries.iter().filter_map(lease).collect()
    }

    /// Whether a lease of this name is stored.
    pub async fn has_lease(&self, name: &str) -> Result<bool, Error> {
        let key = format!("lease/{}{name}", self.prefix);
        Ok(dispatch!(self.get(&key))?.is_some())
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn short(&self, key: &Arc<str>) -> Arc<str> {
        key.strip_prefix(&self.prefix).map_or_else(|| Arc::clone(key), Arc::from)
    }

    fn entry(&self, entry: Entry) -> Entry {
        Entry { key: self.short(&entry.key), ..entry }
    }
}

impl Store for AnyStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let key = self.key(key);
        Ok(dispatch!(self.get(&key))?.map(|entry| self.entry(entry)))
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        let (prefix, after) = (self.key(prefix), after.map(|after| self.key(after)));
        let page = dispatch!(self.range(&prefix, after.as_deref(), limit))?;
        Ok(Page {
            entries: page.entries.into_iter().map(|entry| self.entry(entry)).collect(),
            more: page.more.map(|more| self.short(&more)),
            as_of: page.as_of,
        })
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        let prefix = self.key(prefix);
        let (entries, count) = dispatch!(self.slice(&prefix, skip, limit))?;
        Ok((entries.into_iter().map(|entry| self.entry(entry)).collect(), count))
    }

    async fn txn(&self, mut txn: Txn) -> Result<TxnOutcome, Error> {
        txn.compares.iter_mut().for_each(|compare| compare.key = self.key(&compare.key));
        for write in &mut txn.writes {
            match write {
                Write::Put(key, _) | Write::Delete(key) => *key = self.key(key),
            }
        }
        Ok(match dispatch!(self.txn(txn))? {
            TxnOutcome::Conflict(key) => TxnOutcome::Conflict(self.short(&key.into()).to_string()),
            written @ TxnOutcome::Written(_) => written,
        })
    }

    async fn changes(&self, prefix: &str, after: Seq) -> Result<Vec<Change>, Error> {
        let prefix = self.key(prefix);
        let changes = dispatch!(self.changes(&prefix, after))?;
        Ok(changes.into_iter().map(|change| Change { key: self.short(&change.key), ..change }).collect())
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<LeaseAttempt, Error> {
        let name = self.key(name);
        dispatch!(self.take_lease(&name, holder, lives))
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        dispatch!(self.renew_lease(lease, lives))
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        dispatch!(self.release_lease(lease))
    }

    async fn reset_lease(&self, name: &str, above: u64, force: bool) -> Result<Reset, Error> {
        let name = self.key(name);
        dispatch!(self.reset_lease(&name, above, force))
    }
}
