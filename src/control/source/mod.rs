//! Where manifests come from: directories that are watched, a branch of a git repository, or a program.
//!
//! All give the same value, a [`SourceState`], and promise the same: what cannot be read, is suddenly empty or has an error
//! changes nothing ([`kept`]), and nothing is pruned on such a reading. What is wrong with a source as a whole, rather
//! than with a file, is its [`Trouble`].

mod blocking_reader;
pub mod directory;
pub mod git;
pub mod in_memory;
mod last_good;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use self::blocking_reader::BlockingReader;
use self::directory::Directory;
use self::git::Git;
use self::in_memory::InMemory;
use crate::manifest::{FileContent, Limits, Problem};
use crate::model::{Desired, HashedSpec, InstanceKey};
use crate::store::{Error, Store};

/// One reading of the manifests.
#[derive(Clone, Debug, Default)]
pub struct SourceState {
    pub desired: Arc<Desired>,
    /// Its digest: two readings with the same one want the same.
    pub revision: String,
    pub problems: Vec<Problem>,
    /// Something could not be read as it is now: what is missing may only be unread.
    pub is_incomplete: bool,
    /// Something could not be read, and nothing is known that it used to say.
    pub has_unknown_files: bool,
    /// What is not in it is wanted no more: two readings agree, or it is a commit, which is whole.
    pub may_prune: bool,
    /// Its problems, or its commit, are not those of the last reading.
    pub changed_since_last: bool,
    pub files: usize,
    /// The commit that it is, where it is one.
    pub commit: Option<String>,
    /// The texts that it was read from.
    pub texts: Arc<Vec<FileContent>>,
}

/// How a want is changed on its way: the local agent's user, say.
pub type PostProcess = Box<dyn FnMut(&mut Desired) + Send>;

/// Why a source is not followed. What was last taken stays in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceError {
    /// The repository could not be fetched or read.
    Unreachable { why: String },
    /// The branch no longer holds the commit that was taken last.
    Rewound { taken: String, tip: String, what: String },
    /// The tip is not signed by anybody who is to be trusted.
    NotSigned { tip: String, why: String },
    /// The tip declares nothing at all.
    Empty { tip: String, why: String },
}

impl SourceError {
    /// One word for scripts and counters.
    pub fn word(&self) -> &'static str {
        match self {
            SourceError::Unreachable { .. } => "Unreachable",
            SourceError::Rewound { .. } => "Rewound",
            SourceError::NotSigned { .. } => "NotSigned",
            SourceError::Empty { .. } => "Empty",
        }
    }

    /// Is it still the same? How many milliseconds a failure took this time is no news.
    pub fn is_same_failure(&self, other: &SourceError) -> bool {
        match (self, other) {
            (SourceError::Unreachable { why: one }, SourceError::Unreachable { why: other }) => {
                let words = |why: &str| why.replace(|c: char| c.is_ascii_digit(), "");
                words(one) == words(other)
            }
            (one, other) => one == other,
        }
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            SourceError::Rewound { tip, .. } => Some(format!(
                "find out who rewrote the branch; if it was meant, start again with --accept-rewind {tip}"
            )),
            SourceError::Unreachable { .. } | SourceError::NotSigned { .. } | SourceError::Empty { .. } => {
                None
            }
        }
    }
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceError::Unreachable { why } => f.write_str(why),
            SourceError::Rewound { taken, tip, what } => {
                write!(
                    f,
                    "{what} was rewound: its tip {tip} does not follow from {taken}, the commit last taken"
                )
            }
            SourceError::NotSigned { tip, why } => write!(f, "commit {tip} is refused: {why}"),
            SourceError::Empty { tip, why } => write!(f, "commit {tip} is not followed: {why}"),
        }
    }
}

pub enum Source {
    Directory(Box<BlockingReader<Directory>>),
    Git(Box<Git>),
    InMemory(InMemory),
}

impl Source {
    /// Directories and files, watched.
    pub fn new(paths: Vec<PathBuf>, limits: Limits, debounce: Duration, finish: PostProcess) -> Source {
        Source::Directory(Box::new(Directory::new(paths, limits, debounce, false, finish)))
    }

    /// Something changed, and it is time to read.
    pub fn changed(&mut self) -> bool {
        match self {
            Source::Directory(directory) => directory.changed(),
            Source::Git(git) => git.changed(),
            Source::InMemory(handed) => handed.changed(),
        }
    }

    /// How long until it is worth asking again, should nothing happen.
    pub fn wait(&self) -> Duration {
        match self {
            Source::Directory(directory) => directory.wait(),
            Source::Git(git) => git.wait(),
            Source::InMemory(handed) => handed.wait(),
        }
    }

    /// Something happened just now.
    pub async fn wait_for_signal(&self) {
        self.change_signal().wake.notified().await;
    }

    /// Lets others say that it is worth looking.
    pub fn trigger(&self) -> Trigger {
        Trigger(Arc::clone(self.change_signal()))
    }

    /// The manifests as they are, or as they last were where they are broken; nothing before anything was read. What must
    /// be remembered of it is in the store before this comes back.
    pub async fn read<S: Store>(&mut self, state: &S) -> Result<Option<&SourceState>, Error> {
        match self {
            Source::Directory(directory) => Ok(Some(directory.read().await)),
            Source::Git(git) => git.read(state).await,
            Source::InMemory(handed) => Ok(handed.read()),
        }
    }

    /// What was in force before this began, should something of it be out of sight. Is there something new in it?
    pub fn restore_last_good(&mut self, texts: Vec<FileContent>) -> bool {
        match self {
            Source::Directory(directory) => directory.restore_last_good(texts),
            // A commit is never out of sight, and a program says what it wants.
            Source::Git(_) | Source::InMemory(_) => false,
        }
    }

    /// Was it wanted when it was last read?
    pub fn wants(&self, key: &InstanceKey) -> bool {
        let last = match self {
            Source::Directory(directory) => Some(directory.last()),
            Source::Git(git) => git.last(),
            Source::InMemory(handed) => handed.last(),
        };
        last.is_some_and(|reading| reading.desired.instances.contains_key(key))
    }

    /// What is wrong with the source, if that is not what was last told.
    pub fn take_error_change(&mut self) -> Option<Option<&SourceError>> {
        match self {
            Source::Directory(_) | Source::InMemory(_) => None,
            Source::Git(git) => git.take_error_change(),
        }
    }

    /// Somebody else may have led meanwhile: what he took is to be asked for.
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

/// Says "look now", from anywhere. What is said during a look leads to another one.
#[derive(Clone)]
pub struct Trigger(Arc<ChangeSignal>);

impl Trigger {
    pub fn now(&self) {
        self.0.asked.store(true, Ordering::SeqCst);
        self.0.wake.notify_one();
    }
}

/// What happened since it was last asked.
#[derive(Default)]
struct ChangeSignal {
    /// When something changed first, since it was last taken note of, and last.
    at: Mutex<Option<(Instant, Instant)>>,
    /// Which paths something happened to, and whether each is surely no folder.
    touched: Mutex<BTreeMap<PathBuf, bool>>,
    /// Something may have been missed: what is watched is to be set up anew.
    missed: AtomicBool,
    /// Somebody wants it to be looked at.
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

/// Gives every want a user where none is named, each shared spec once.
pub fn set_default_user(desired: &mut Desired, user: &str) {
    DefaultUserCache::default().name(desired, user);
}

/// The same again and again: what was named before is not named anew.
#[derive(Default)]
pub struct DefaultUserCache {
    /// By the address of the spec without a user, which is no other's as long as somebody knows of it.
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
