//! Where things are kept: keys and values in one order of changes, with compare-and-write, watches and leases.
//!
//! Everything that must survive (what is registered, tasks, journals, holds, leases) lives in one [`Store`]. What was
//! acknowledged is on disk. A change is numbered; a reader who knows a number can ask for everything after it.
//! [`Embedded`] is SQLite in a file that several processes may open; other engines pass the same tests.

mod any;
mod embedded;
pub mod keeping;
pub mod lease;
mod remote;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use any::AnyStore;
pub use embedded::Embedded;
pub use lease::{Holder, Lease, LeaseAttempt, Reset};
pub use remote::Remote;

/// The number of a change. 0: before the first.
pub type Seq = u64;

/// A key's value, and the change that made it so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Arc<[u8]>,
    pub mod_seq: Seq,
}

/// Writes that happen together, if everything is still as it is said to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Txn {
    pub compares: Vec<Compare>,
    pub writes: Vec<Write>,
}

/// A key, and the change that its value must be from; 0: it must not be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compare {
    pub key: String,
    pub mod_seq: Seq,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    Put(String, Vec<u8>),
    Delete(String),
}

impl Txn {
    pub fn put(key: impl Into<String>, value: impl Into<Vec<u8>>) -> Txn {
        Txn { compares: Vec::new(), writes: vec![Write::Put(key.into(), value.into())] }
    }

    pub fn delete(key: impl Into<String>) -> Txn {
        Txn { compares: Vec::new(), writes: vec![Write::Delete(key.into())] }
    }

    /// Only if the key's value is from that change (0: only if there is none).
    pub fn only_if(mut self, key: impl Into<String>, changed: Seq) -> Txn {
        self.compares.push(Compare { key: key.into(), mod_seq: changed });
        self
    }

    pub fn and(mut self, other: Txn) -> Txn {
        self.compares.extend(other.compares);
        self.writes.extend(other.writes);
        self
    }
}

/// What became of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of it was written, under this number.
    Written(Seq),
    /// Nothing was: this key is not as it was said to be.
    Conflict(String),
}

/// Keys in order, from one place to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    pub entries: Vec<Entry>,
    /// There is more, after this key.
    pub more: Option<Arc<str>>,
    /// As of this change.
    pub as_of: Seq,
}

/// One change to one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub number: Seq,
    pub key: Arc<str>,
    /// `None`: it was deleted.
    pub value: Option<Arc<[u8]>>,
}

pub trait Store: Send + Sync + 'static {
    fn get(&self, key: &str) -> impl Future<Output = Result<Option<Entry>, Error>> + Send;

    /// Up to `limit` entries whose keys begin with `prefix` and come after `after`.
    fn range(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> impl Future<Output = Result<Page, Error>> + Send;

    /// The same by place instead of key, and how many there are: for readers who count.
    fn slice(
        &self,
        prefix: &str,
        skip: usize,
        limit: usize,
    ) -> impl Future<Output = Result<(Vec<Entry>, usize), Error>> + Send;

    /// Writes all or nothing. What is acknowledged is on disk.
    fn txn(&self, txn: Txn) -> impl Future<Output = Result<Outcome, Error>> + Send;

    /// Changes after a number to keys that begin with `prefix`, as many as there are now; waits for the first if there
    /// is none. [`Error::Compacted`]: they are no longer all known, and the reader has to look at everything anew.
    fn changes(&self, prefix: &str, after: Seq) -> impl Future<Output = Result<Vec<Change>, Error>> + Send;

    /// Takes, keeps or takes over a lease; see [`Taken`].
    fn take_lease(
        &self,
        name: &str,
        holder: &Holder,
        lives: Duration,
    ) -> impl Future<Output = Result<LeaseAttempt, Error>> + Send;

    /// Keeps a lease for another while. `false`: it is somebody else's by now.
    fn renew_lease(&self, lease: &Lease, lives: Duration)
    -> impl Future<Output = Result<bool, Error>> + Send;

    fn release_lease(&self, lease: &Lease) -> impl Future<Output = Result<(), Error>> + Send;

    /// Frees a lease for an administrator; see [`lease::Record::reset`].
    fn reset_lease(
        &self,
        name: &str,
        above: u64,
        force: bool,
    ) -> impl Future<Output = Result<Reset, Error>> + Send;
}

/// Why the store cannot do its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// Nothing was written; reading goes on, and writing when there is space again.
    Full,
    /// The same for any other failure of the disk.
    Disk(String),
    /// A store elsewhere could not be asked.
    Unreachable(String),
    /// A store elsewhere knows the caller and refuses the call with this code.
    Refused { code: i64, why: String },
    /// The file is not what was written to it. It is not served.
    Corrupt { file: String, what: String },
    /// The file was written by a newer Abide.
    TooNew { file: String, version: i64 },
    /// Somebody else has it for himself.
    InUse { file: String },
    /// So old changes are no longer known one by one.
    Compacted,
    /// The store was shut down.
    Closed,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Full => f.write_str("the disk is full: nothing was written"),
            Error::Disk(what) => write!(f, "the disk failed: {what}; nothing was written"),
            Error::Unreachable(why) | Error::Refused { why, .. } => f.write_str(why),
            Error::Corrupt { file, what } => write!(
                f,
                "{file} is damaged ({what}). Move it away, with {file}-wal, {file}-shm and {file}-mark, and restore it from a backup, \
                 or let it be made anew"
            ),
            Error::TooNew { file, version } => {
                write!(f, "{file} has format {version}, from a newer abide: use that one, or another folder")
            }
            Error::InUse { file } => write!(f, "{file} is in use: another abide serves it"),
            Error::Compacted => f.write_str("changes that old are no longer kept: look at everything anew"),
            Error::Closed => f.write_str("the store is shut down"),
        }
    }
}

impl std::error::Error for Error {}
