//! Sources of manifests: watched directories, a branch of a git repository, or a program.
//!
//! All return a [`SourceState`] with the same guarantee: a file that is unreadable, suddenly empty or has an error
//! changes nothing ([`last_good`]), and nothing is pruned on such a read. A problem of a source as a whole is a
//! [`SourceError`].

mod blocking_reader;
pub mod directory;
pub mod git;
pub mod in_memory;
mod last_good;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use self::blocking_reader::BlockingReader;
use self::directory::Directory;
use self::git::Git;
use self::git::error::{EmptyCommit, RepositoryError, SignatureRefusal};
use self::in_memory::InMemory;
use crate::inventory::InventoryFeed;
use crate::manifest::{FileContent, Limits, Problem};
use crate::model::{Desired, HashedSpec, InstanceKey, ManifestRevision};
use crate::store::{Error, Store};

/// State of a source after a read.
#[derive(Clone, Debug, Default)]
pub struct SourceState {
    pub desired: Arc<Desired>,
    /// Digest: two states with the same one declare the same.
    pub revision: ManifestRevision,
    pub problems: Vec<Problem>,
    /// Something is unreadable: a missing declaration may only be unread.
    pub is_incomplete: bool,
    /// Something is unreadable, and has no last good version.
    pub has_unknown_files: bool,
    /// A declaration that is missing is no longer wanted: two reads agree, or it is a commit, which is complete.
    pub may_prune: bool,
    /// Problems or commit differ from the last read.
    pub changed_since_last: bool,
    pub files: usize,
    /// The commit, for a git source.
    pub commit: Option<String>,
    /// The texts that it was read from.
    pub texts: Arc<Vec<FileContent>>,
}

/// Post-processing of the desired state, such as the local agent's default user.
pub type PostProcess = Box<dyn FnMut(&mut Desired) + Send>;

/// Reason why a source is not followed. The active revision stays.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SourceError {
    /// The repository could not be fetched or read.
    #[error(transparent)]
    Unreachable(Arc<RepositoryError>),
    /// The branch no longer contains the last accepted commit.
    #[error("{what} was rewound: tip {tip} does not descend from {taken}, the last accepted commit")]
    Rewound { taken: String, tip: String, what: String },
    /// The tip has no valid signature of a trusted key.
    #[error("commit {tip} is refused: {source}")]
    NotSigned { tip: String, source: Arc<SignatureRefusal> },
    /// The tip declares nothing.
    #[error("commit {tip} is not followed: {source}")]
    Empty { tip: String, source: EmptyCommit },
}

impl From<RepositoryError> for SourceError {
    fn from(error: RepositoryError) -> SourceError {
        SourceError::Unreachable(Arc::new(error))
    }
}

impl SourceError {
    /// Stable word for scripts and metrics.
    pub fn word(&self) -> &'static str {
        match self {
            SourceError::Unreachable(_) => "Unreachable",
            SourceError::Rewound { .. } => "Rewound",
            SourceError::NotSigned { .. } => "NotSigned",
            SourceError::Empty { .. } => "Empty",
        }
    }

    /// Whether a report of this error reads like the last one. git quotes durations: another number is not a
    /// difference, unless it is part of a commit id.
    pub fn is_same_report(&self, other: &SourceError) -> bool {
        let words = |error: &SourceError| match error {
            SourceError::Unreachable(why) => why.to_string().replace(|c: char| c.is_ascii_digit(), ""),
            SourceError::Rewound { .. } | SourceError::NotSigned { .. } | SourceError::Empty { .. } => {
                error.to_string()
            }
        };
        self.word() == other.word() && words(self) == words(other)
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            SourceError::Rewound { tip, .. } => Some(format!(
                "find out who rewrote the branch; if that was intended, restart with --accept-rewind {tip}"
            )),
            SourceError::Unreachable(_) | SourceError::NotSigned { .. } | SourceError::Empty { .. } => None,
        }
    }
}

pub enum Source {
    Directory(Box<BlockingReader<Directory>>),
    Git(Box<Git>),
    InMemory(InMemory),
}

impl Source {
    /// Watched directories and files.
    pub fn new(paths: Vec<PathBuf>, limits: Limits, debounce: Duration, finish: PostProcess) -> Source {
        Source::Directory(Box::new(Directory::new(paths, limits, debounce, false, finish)))
    }

    /// Adds the hosts of inventories. To be called before the first read.
    pub fn use_inventories(&self, feed: Arc<InventoryFeed>) {
        match self {
            Source::Directory(directory) => {
                if let Some(mut files) = directory.idle_source() {
                    files.use_inventories(feed);
                }
            }
            Source::Git(git) => git.use_inventories(feed),
            // A program supplies hosts itself.
            Source::InMemory(_) => {}
        }
    }

    /// Whether something changed and a read is due.
    pub fn changed(&mut self) -> bool {
        match self {
            Source::Directory(directory) => directory.changed(),
            Source::Git(git) => git.changed(),
            Source::InMemory(handed) => handed.changed(),
        }
    }

    /// Time until the next check, without a trigger.
    pub fn wait(&self) -> Duration {
        match self {
            Source::Directory(directory) => directory.wait(),
            Source::Git(git) => git.wait(),
            Source::InMemory(handed) => handed.wait(),
        }
    }

    /// Waits for a change signal.
    pub async fn wait_for_signal(&self) {
        self.change_signal().wake.notified().await;
    }

    /// Handle to request a read.
    pub fn trigger(&self) -> Trigger {
        Trigger(Arc::clone(self.change_signal()))
    }

    /// The manifests, with last good versions of broken files; `None` before the first read. State that must survive
    /// a restart is stored before this returns.
    pub async fn read<S: Store>(&mut self, state: &S) -> Result<Option<&SourceState>, Error> {
        match self {
            Source::Directory(directory) => Ok(Some(directory.read().await)),
            Source::Git(git) => git.read(state).await,
            Source::InMemory(handed) => Ok(handed.read()),
        }
    }

    /// Adds the active revision as last good versions. Returns whether that adds something.
    pub fn restore_last_good(&mut self, texts: Vec<FileContent>) -> bool {
        match self {
            Source::Directory(directory) => directory.restore_last_good(texts),
            // A commit is never unreachable, and a program supplies its own state.
            Source::Git(_) | Source::InMemory(_) => false,
        }
    }

    /// Whether an instance was declared at the last read.
    pub fn wants(&self, key: &InstanceKey) -> bool {
        let last = match self {
            Source::Directory(directory) => Some(directory.last()),
            Source::Git(git) => git.last(),
            Source::InMemory(handed) => handed.last(),
        };
        last.is_some_and(|reading| reading.desired.instances.contains_key(key))
    }

    /// The source's error, if it changed since the last report.
    pub fn take_error_change(&mut self) -> Option<Option<&SourceError>> {
        match self {
            Source::Directory(_) | Source::InMemory(_) => None,
            Source::Git(git) => git.take_error_change(),
        }
    }

    /// Discards state that another leader may have changed.
    pub fn reset(&mut self) {
        match self {
            Source::Directory(_) | Source::InMemory(_) => {}
            Source::Git(git) => git.reset(),
        }
    }

    fn change_signal(&self) -> &Arc<ChangeSignal> {
        match self {
            Source::Directory(directory) => directory.change_signal(),
            Source::Git(git) => git.change_signal(),
            Source::InMemory(handed) => handed.change_signal(),
        }
    }
}

/// Requests a read, from any thread. A request during a read leads to another one.
#[derive(Clone)]
pub struct Trigger(Arc<ChangeSignal>);

impl Trigger {
    pub fn now(&self) {
        self.0.asked.store(true, Ordering::SeqCst);
        self.0.wake.notify_one();
    }
}

/// Changes since the last read.
#[derive(Default)]
struct ChangeSignal {
    /// First and last change since the last read.
    at: Mutex<Option<(Instant, Instant)>>,
    /// Changed paths, and whether each is known not to be a directory.
    touched: Mutex<BTreeMap<PathBuf, bool>>,
    /// Events may have been lost: the watches have to be set up again.
    missed: AtomicBool,
    /// A read was requested.
    asked: AtomicBool,
    wake: Notify,
}

impl ChangeSignal {
    fn at(&self) -> MutexGuard<'_, Option<(Instant, Instant)>> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touched(&self) -> MutexGuard<'_, BTreeMap<PathBuf, bool>> {
        self.touched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed_now(&self) {
        let now = Instant::now();
        let mut at = self.at();
        let first = at.map_or(now, |(first, _)| first);
        *at = Some((first, now));
        drop(at);
        self.wake.notify_one();
    }
}

/// Sets the user of every instance without one, each shared spec once.
pub fn set_default_user(desired: &mut Desired, user: &str) {
    DefaultUserCache::default().name(desired, user);
}

/// The same for repeated calls: known specs are reused.
#[derive(Default)]
pub struct DefaultUserCache {
    /// By the address of the spec without a user, which is unique while it is referenced.
    known: HashMap<usize, (Weak<HashedSpec>, Weak<HashedSpec>)>,
}

impl DefaultUserCache {
    pub fn name(&mut self, desired: &mut Desired, user: &str) {
        self.known.retain(|_, (old, new)| old.strong_count() > 0 && new.strong_count() > 0);
        for want in desired.instances.values_mut().filter(|want| want.spec.identity.user.is_none()) {
            let at = Arc::as_ptr(&want.spec) as usize;
            want.spec = match self.known.get(&at).and_then(|(_, new)| new.upgrade()) {
                Some(new) => new,
                None => {
                    let mut spec = (**want.spec).clone();
                    spec.identity.user = Some(user.to_owned());
                    let new = Arc::new(HashedSpec::new(spec));
                    self.known.insert(at, (Arc::downgrade(&want.spec), Arc::downgrade(&new)));
                    new
                }
            };
        }
    }
}
