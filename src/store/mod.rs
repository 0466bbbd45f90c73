//! Persistent store: keys and values with a total order of changes, compare-and-write, watches and leases.
//!
//! All durable state (registrations, tasks, journals, holds, leases) is in one [`Store`]. An acknowledged write is on
//! disk. Every change has a sequence number; a reader can request all changes after a number. [`Embedded`] is SQLite in
//! a file that several processes may open, with encrypted values; [`Remote`] is the store of a gateway over HTTP. Both pass the same tests.

mod any;
mod embedded;
mod key_file;
mod key_scope;
pub mod keys;
pub mod lease;
mod remote;

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::http::{CallError, UnreadableResponse};

pub use any::AnyStore;
pub use embedded::{Embedded, TrimChoice, is_encrypted, print_set_aside};
pub use key_file::{KeyFileError, KeyId, KeySource};
pub use key_scope::KeyScope;
pub use lease::{Holder, Lease, LeaseAttempt, Reset};
pub use remote::Remote;

/// Sequence number of a change. 0: before the first.
pub type Seq = u64;

/// A key, its value, and the change that wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Arc<[u8]>,
    pub mod_seq: Seq,
}

/// Atomic writes, conditional on compares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Txn {
    pub compares: Vec<Compare>,
    pub writes: Vec<Write>,
}

/// A key, and the change that must have written its value; 0: the key must not exist.
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

    /// Adds the condition that this change wrote the key's value (0: that the key does not exist).
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

/// Result of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TxnOutcome {
    /// Everything was written, with this number.
    Written(Seq),
    /// Nothing was written: the compare of this key failed.
    Conflict(String),
}

/// Entries in key order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    pub entries: Vec<Entry>,
    /// More entries exist after this key.
    pub more: Option<Arc<str>>,
    /// The last change that the page includes.
    pub as_of: Seq,
}

/// One change to one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub number: Seq,
    pub key: Arc<str>,
    /// `None`: deleted.
    pub value: Option<Arc<[u8]>>,
}

pub trait Store: Send + Sync + 'static {
    fn get(&self, key: &str) -> impl Future<Output = Result<Option<Entry>, Error>> + Send;

    /// Up to `limit` entries whose keys start with `prefix` and are greater than `after`.
    fn range(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> impl Future<Output = Result<Page, Error>> + Send;

    /// Entries by offset, and the total count.
    fn slice(
        &self,
        prefix: &str,
        skip: usize,
        limit: usize,
    ) -> impl Future<Output = Result<(Vec<Entry>, usize), Error>> + Send;

    /// Writes all or nothing. An acknowledged write is on disk.
    fn txn(&self, txn: Txn) -> impl Future<Output = Result<TxnOutcome, Error>> + Send;

    /// All changes after a number to keys that start with `prefix`; waits for the first. [`Error::Compacted`]: the log no
    /// longer has all of them, and the reader has to read all entries again.
    fn changes(&self, prefix: &str, after: Seq) -> impl Future<Output = Result<Vec<Change>, Error>> + Send;

    /// Takes, renews or takes over a lease.
    fn take_lease(
        &self,
        name: &str,
        holder: &Holder,
        lives: Duration,
    ) -> impl Future<Output = Result<LeaseAttempt, Error>> + Send;

    /// Renews a lease. `false`: another holder has it.
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

impl Entry {
    /// The value as JSON.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Error> {
        decode(&self.key, &self.value)
    }

    /// The value as text of a type.
    pub fn parse<T: FromStr>(&self) -> Result<T, Error> {
        let parsed = std::str::from_utf8(&self.value).ok().and_then(|text| text.parse().ok());
        parsed.ok_or_else(|| Error::InvalidValue { key: self.key.to_string(), line: 1, column: 1 })
    }
}

/// A stored value as JSON. The error names the key.
pub fn decode<T: DeserializeOwned>(key: &str, value: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(value).map_err(|error| Error::InvalidValue {
        key: key.to_owned(),
        line: error.line(),
        column: error.column(),
    })
}

/// Errors of a store.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The disk is full: nothing was written. Reads work, and writes work again once there is space.
    #[error("the disk is full: nothing was written")]
    Full,
    /// Any other disk error: nothing was written.
    #[error("the disk failed: {what}: {source}; nothing was written")]
    Disk { what: String, source: DiskError },
    /// The file does not exist.
    #[error("the disk failed: {file} does not exist; nothing was written")]
    Missing { file: String },
    /// The files of the store are not safe to open.
    #[error("the disk failed: {0}; nothing was written")]
    Unsafe(#[source] Arc<crate::permissions::PermissionError>),
    /// A remote store could not be reached.
    #[error("the store at {url}: {source}")]
    Unreachable { url: String, source: CallError },
    /// A remote store sent a response that cannot be read.
    #[error("the store at {url}: invalid response: {source}")]
    InvalidResponse { url: String, source: UnreadableResponse },
    /// A remote store authenticated the caller and refused the call.
    #[error("the store at {url}: {source}")]
    Refused { url: String, source: CallError },
    /// The key was changed by another writer at every attempt.
    #[error("{key} keeps changing: concurrent activations")]
    Contended { key: String },
    /// The file is damaged, and is not served.
    #[error(
        "{file} is damaged ({what}). Move it away, with {file}-wal, {file}-shm and {file}-mark, and restore it from a backup, \
         or start with an empty store"
    )]
    Corrupt { file: String, what: String },
    /// A stored value does not have the expected form. It may contain secrets, which the text of its parse error could
    /// quote.
    #[error("the stored value of {key} is not valid (line {line}, column {column})")]
    InvalidValue { key: String, line: usize, column: usize },
    /// A line of a file of set-aside entries is damaged.
    #[error("{file}, line {line}: not an entry that was set aside")]
    InvalidLine { file: String, line: usize },
    /// The file was written by a newer Abide.
    #[error("{file} has format {version}, from a newer abide: use that version, or another folder")]
    TooNew { file: String, version: i64 },
    /// The file is encrypted, and its key is missing. Nothing was changed.
    #[error(
        "{file} is encrypted, and {keys}. Nothing was changed: restore the key file from a backup, or pass the right one with \
         --key-file FILE (ABIDE_KEY_FILE)"
    )]
    KeyMissing { file: String, keys: String },
    /// The key file cannot be used.
    #[error("{}", crate::error_chain::chain(&**.0))]
    KeyFile(Arc<KeyFileError>),
    /// Another process has the file open exclusively.
    #[error("{file} is in use: another abide serves it")]
    InUse { file: String },
    /// The log no longer has changes this old.
    #[error("changes this old are compacted: read all entries again")]
    Compacted,
    /// The store was shut down.
    #[error("the store is shut down")]
    Closed,
}

impl Error {
    pub(crate) fn io(what: impl std::fmt::Display, error: std::io::Error) -> Error {
        Error::Disk { what: what.to_string(), source: DiskError::Io(Arc::new(error)) }
    }
}

/// Cause of a disk error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DiskError {
    #[error(transparent)]
    Io(Arc<std::io::Error>),
    #[error(transparent)]
    Sqlite(Arc<rusqlite::Error>),
}
