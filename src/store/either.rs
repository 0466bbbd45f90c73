//! A store of either kind: whoever keeps state does not care where.

use std::time::Duration;

use super::lease::{Holder, Lease, Taken};
use super::{Change, Embedded, Entry, Error, Number, Outcome, Page, Remote, Store, Txn};

#[derive(Clone)]
pub enum Either {
    /// A file of this machine.
    Here(Embedded),
    /// A gateway's.
    There(Remote),
}

macro_rules! whichever {
    ($self:ident.$($call:tt)*) => {
        match $self {
            Either::Here(store) => store.$($call)*.await,
            Either::There(store) => store.$($call)*.await,
        }
    };
}

impl Store for Either {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        whichever!(self.get(key))
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        whichever!(self.range(prefix, after, limit))
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        whichever!(self.slice(prefix, skip, limit))
    }

    async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        whichever!(self.txn(txn))
    }

    async fn changes(&self, prefix: &str, after: Number) -> Result<Vec<Change>, Error> {
        whichever!(self.changes(prefix, after))
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<Taken, Error> {
        whichever!(self.take_lease(name, holder, lives))
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        whichever!(self.renew_lease(lease, lives))
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        whichever!(self.release_lease(lease))
    }
}
