//! Inventories: hosts from a file, a command, an HTTP endpoint, Ansible or BlueKing's CMDB.
//!
//! # Theory of operation
//! ```text
//! source ─read, bounded in time and size→ text ─rows→ hosts ─→ snapshot ─judge against the last good→ manifest set
//! ```
//! A read is complete or an error: one invalid host rejects the whole inventory. A failed or empty inventory, and one
//! that lost too many hosts, never changes the hosts of a group: the last good snapshot of the state store stays.
//! Definitions come from the control host's config file, never from manifests.

mod ansible;
pub mod cmdb;
mod csv;
mod feed;
mod fetch;
mod last_good;
mod resolve;
mod rows;
mod structured;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::cmdb::Cmdb;
pub use self::feed::InventoryFeed;
pub use self::fetch::HttpInventory;
pub use self::last_good::{
    LastGoodSnapshot, LostHosts, changed_hosts, lost_hosts, read_last_good, store_last_good,
};
pub use self::resolve::{ResolvedInventories, ResolvedInventory, UnresolvedInventory, resolve};
use crate::model::{Amount, Time};
use crate::subprocess::SubprocessError;

/// Maximum number of hosts of an inventory.
pub const MAX_HOSTS: usize = 1_000_000;
/// Maximum size of an inventory's text, and of all pages of a CMDB.
pub const MAX_BYTES: usize = 64 << 20;
/// Maximum size of YAML.
const MAX_YAML_BYTES: usize = 8 << 20;
/// Maximum length of a message about the content of an inventory.
const MAX_MESSAGE_CHARS: usize = 500;

/// The definition of an inventory.
pub struct InventorySource {
    pub name: String,
    pub kind: InventoryKind,
    /// Interval between two reads of a controller.
    pub interval: Duration,
    /// Maximum time of one read.
    pub timeout: Duration,
    /// Hosts that one read may lose.
    pub max_shrink: Amount,
}

pub enum InventoryKind {
    File(PathBuf),
    /// Arguments, without a shell.
    Command(Vec<String>),
    Http(HttpInventory),
    /// An Ansible inventory, as INI or YAML.
    Ansible(PathBuf),
    Cmdb(Cmdb),
}

impl InventoryKind {
    /// The source for display, without secrets.
    pub fn describe(&self) -> String {
        match self {
            InventoryKind::File(file) => format!("file {}", file.display()),
            InventoryKind::Command(argv) => {
                format!("command {}", argv.first().map_or("", String::as_str))
            }
            InventoryKind::Http(http) => format!("url {}", http.shown()),
            InventoryKind::Ansible(file) => format!("ansible {}", file.display()),
            InventoryKind::Cmdb(cmdb) => format!("cmdb {}", cmdb.shown()),
        }
    }
}

/// The hosts of one successful read.
#[derive(Clone, Debug)]
pub struct InventorySnapshot {
    pub at: Time,
    pub hosts: usize,
    /// See [`crate::manifest::inventory`].
    pub text: Arc<str>,
    /// Values that were left out.
    pub notes: Vec<String>,
}

/// Reason why an inventory was not read.
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    #[error("cannot read {}: {source}", file.display())]
    File { file: PathBuf, source: std::io::Error },
    #[error("{} is not a regular file", file.display())]
    NotAFile { file: PathBuf },
    #[error(transparent)]
    Command(#[from] SubprocessError),
    #[error("{0}")]
    Http(String),
    #[error("the read took longer than {}", crate::model::span(.0.as_secs().max(1)))]
    TimedOut(Duration),
    #[error("more than {} MiB", MAX_BYTES >> 20)]
    TooLarge,
    #[error("more than {MAX_HOSTS} hosts")]
    TooManyHosts,
    #[error("byte {at} is not UTF-8 text")]
    NotText { at: usize },
    #[error("{}", shortened(.0))]
    Syntax(String),
    #[error("{}", list(problems, *more))]
    Invalid { problems: Vec<String>, more: usize },
    #[error("the inventory has no hosts")]
    Empty,
}

/// Reason why the last good hosts of an inventory stay.
#[derive(Debug, thiserror::Error)]
pub enum InventoryFault {
    #[error("no config file of this host defines it")]
    NotDefined,
    #[error(transparent)]
    Unread(#[from] InventoryError),
    #[error("{0}")]
    Lost(LostHosts),
    #[error("cannot read its last good hosts: {0}")]
    LastGoodUnread(#[source] crate::store::Error),
    #[error("cannot store its hosts: {0}")]
    NotStored(#[source] crate::store::Error),
}

/// A message without the end of a long text.
fn shortened(message: &str) -> String {
    match message.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message.to_owned(),
    }
}

fn list(problems: &[String], more: usize) -> String {
    let mut text = problems.join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

impl InventorySource {
    /// Reads the inventory once, within its time limit.
    pub async fn read(&self) -> Result<InventorySnapshot, InventoryError> {
        let begin = Instant::now();
        let timed = tokio::time::timeout(self.timeout, self.read_snapshot()).await;
        let snapshot = timed.map_err(|_| InventoryError::TimedOut(self.timeout))??;
        tracing::info!(inventory = %self.name, hosts = snapshot.hosts, took = ?begin.elapsed(), "inventory read");
        Ok(snapshot)
    }

    /// Parsing is not cancelled by the time limit, but bounded by the limits of size and number.
    async fn read_snapshot(&self) -> Result<InventorySnapshot, InventoryError> {
        let (rows, notes) = self.read_rows().await?;
        blocking(move || {
            let (hosts, text) = rows.into_snapshot()?;
            if hosts == 0 {
                return Err(InventoryError::Empty);
            }
            Ok(InventorySnapshot { at: crate::clock::now(), hosts, text: text.into(), notes })
        })
        .await
    }

    async fn read_rows(&self) -> Result<(rows::RowList, Vec<String>), InventoryError> {
        let plain = |rows| (rows, Vec::new());
        match &self.kind {
            InventoryKind::File(file) => {
                let (text, named) = (fetch::file(file.clone()).await?, file.clone());
                blocking(move || structured::parse(&text, named.extension().and_then(|e| e.to_str())))
                    .await
                    .map(plain)
            }
            InventoryKind::Command(argv) => {
                let text = fetch::command(argv.clone(), self.timeout).await?;
                blocking(move || structured::parse(&text, None)).await.map(plain)
            }
            InventoryKind::Http(http) => {
                let text = http.get(self.timeout).await?;
                blocking(move || structured::parse(&text, None)).await.map(plain)
            }
            InventoryKind::Ansible(file) => {
                let (text, named) = (fetch::file(file.clone()).await?, file.clone());
                blocking(move || ansible::parse(&text, &named)).await
            }
            InventoryKind::Cmdb(cmdb) => cmdb.read(self.timeout).await.map(plain),
        }
    }
}

/// Runs a computation on a thread of its own: a large inventory takes seconds.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, InventoryError> + Send + 'static,
) -> Result<T, InventoryError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(InventoryError::Syntax(format!("the parser failed: {error}"))))
}
