//! Where manifests come from: directories that are watched, a branch of a git repository, or a program.
//!
//! All give the same value, a [`Reading`], and promise the same: what cannot be read, is suddenly empty or has an error
//! changes nothing ([`kept`]), and nothing is pruned on such a reading. What is wrong with a source as a whole, rather
//! than with a file, is its [`Trouble`].

mod aside;
pub mod directory;
pub mod git;
pub mod handed;
mod kept;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use self::aside::Aside;
use self::directory::Directory;
use self::git::Git;
use self::handed::Handed;
use crate::manifest::{Given, Limits, Problem};
use crate::model::{Desired, InstanceKey, Stamped};
use crate::store::{Error, Store};

/// One reading of the manifests.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    pub desired: Arc<Desired>,
    /// Its digest: two readings with the same one want the same.
    pub revision: String,
    pub problems: Vec<Problem>,
    /// Something could not be read as it is now: what is missing may only be unread.
    pub is_incomplete: bool,
    /// Something could not be read, and nothing is known that it used to say.
    pub lacks: bool,
    /// What is not in it is wanted no more: two readings agree, or it is a commit, which is whole.
    pub may_prune: bool,
    /// Its problems, or its commit, are not those of the last reading.
    pub is_news: bool,
    pub files: usize,
    /// The commit that it is, where it is one.
    pub commit: Option<String>,
    /// The texts that it was read from.
    pub texts: Arc<Vec<Given>>,
}

/// How a want is changed on its way: the local agent's user, say.
pub type Finish = Box<dyn FnMut(&mut Desired) + Send>;

/// Why a source is not followed. What was last taken stays in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The repository could not be fetched or read.
    Unreachable { why: String },
    /// The branch no longer holds the commit that was taken last.
    Rewound { taken: String, tip: String, what: String },
    /// The tip is not signed by anybody who is to be trusted.
    NotSigned { tip: String, why: String },
    /// The tip declares nothing at all.
    Empty { tip: String, why: String },
}

impl Trouble {
    /// One word for scripts and counters.
    pub fn word(&self) -> &'static str {
        match self {
            Trouble::Unreachable { .. } => "Unreachable",
            Trouble::Rewound { .. } => "Rewound",
            Trouble::NotSigned { .. } => "NotSigned",
            Trouble::Empty { .. } => "Empty",
        }
    }

    /// Is it still the same? How many milliseconds a failure took this time is no news.
    pub fn is_as(&self, other: &Trouble) -> bool {
        match (self, other) {
            (Trouble::Unreachable { why: one }, Trouble::Unreachable { why: other }) => {
                let words = |why: &str| why.replace(|c: char| c.is_ascii_digit(), "");
                words(one) == words(other)
            }
            (one, other) => one == other,
        }
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            Trouble::Rewound { tip, .. } => Some(format!(
                "find out who rewrote the branch; if it was meant, start again with --accept-rewind {tip}"
            )),
            Trouble::Unreachable { .. } | Trouble::NotSigned { .. } | Trouble::Empty { .. } => None,
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Unreachable { why } => f.write_str(why),
            Trouble::Rewound { taken, tip, what } => {
                write!(
                    f,
                    "{what} was rewound: its tip {tip} does not follow from {taken}, the commit last taken"
                )
            }
            Trouble::NotSigned { tip, why } => write!(f, "commit {tip} is refused: {why}"),
            Trouble::Empty { tip, why } => write!(f, "commit {tip} is not followed: {why}"),
        }
    }
}

pub enum Source {
    Directory(Box<Aside<Directory>>),
    Git(Box<Git>),
    Handed(Handed),
}

impl Source {
    /// Directories and files, watched.
    pub fn new(paths: Vec<PathBuf>, limits: Limits, debounce: Duration, finish: Finish) -> Source {
        Source::Directory(Box::new(Directory::new(paths, limits, debounce, false, finish)))
    }

    /// Something changed, and it is time to read.
    pub fn changed(&mut self) -> bool {
        match self {
            Source::Directory(directory) => directory.changed(),
            Source::Git(git) => git.changed(),
            Source::Handed(handed) => handed.changed(),
        }
    }

    /// How long until it is worth asking again, should nothing happen.
    pub fn wait(&self) -> Duration {
        match self {
            Source::Directory(directory) => directory.wait(),
            Source::Git(git) => git.wait(),
            Source::Handed(handed) => handed.wait(),
        }
    }

    /// Something happened just now.
    pub async fn woken(&self) {
        self.seen().wake.notified().await;
    }

    /// Lets others say that it is worth looking.
    pub fn nudge(&self) -> Nudge {
        Nudge(Arc::clone(self.seen()))
    }

    /// The manifests as they are, or as they last were where they are broken; nothing before anything was read. What must
    /// be remembered of it is in the store before this comes back.
    pub async fn read<S: Store>(&mut self, state: &S) -> Result<Option<&Reading>, Error> {
        match self {
            Source::Directory(directory) => Ok(Some(directory.read().await)),
            Source::Git(git) => git.read(state).await,
            Source::Handed(handed) => Ok(handed.read()),
        }
    }

    /// What was in force before this began, should something of it be out of sight. Is there something new in it?
    pub fn recall(&mut self, texts: Vec<Given>) -> bool {
        match self {
            Source::Directory(directory) => directory.recall(texts),
            // A commit is never out of sight, and a program says what it wants.
            Source::Git(_) | Source::Handed(_) => false,
        }
    }

    /// Was it wanted when it was last read?
    pub fn wants(&self, key: &InstanceKey) -> bool {
        let last = match self {
            Source::Directory(directory) => Some(directory.last()),
            Source::Git(git) => git.last(),
            Source::Handed(handed) => handed.last(),
        };
        last.is_some_and(|reading| reading.desired.instances.contains_key(key))
    }

    /// What is wrong with the source, if that is not what was last told.
    pub fn news(&mut self) -> Option<Option<&Trouble>> {
        match self {
            Source::Directory(_) | Source::Handed(_) => None,
            Source::Git(git) => git.news(),
        }
    }

    /// Somebody else may have led meanwhile: what he took is to be asked for.
    pub fn forget(&mut self) {
        match self {
            Source::Directory(_) | Source::Handed(_) => {}
            Source::Git(git) => git.forget(),
        }
    }

    fn seen(&self) -> &Arc<Seen> {
        match self {
            Source::Directory(directory) => directory.seen(),
            Source::Git(git) => git.seen(),
            Source::Handed(handed) => handed.seen(),
        }
    }
}

/// Says "look now", from anywhere. What is said during a look leads to another one.
#[derive(Clone)]
pub struct Nudge(Arc<Seen>);

impl Nudge {
    pub fn now(&self) {
        self.0.asked.store(true, Ordering::SeqCst);
        self.0.wake.notify_one();
    }
}

/// What happened since it was last asked.
#[derive(Default)]
struct Seen {
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

impl Seen {
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
pub fn name_users(desired: &mut Desired, user: &str) {
    Named::default().name(desired, user);
}

/// The same again and again: what was named before is not named anew.
#[derive(Default)]
pub struct Named {
    /// By the address of the spec without a user, which is no other's as long as somebody knows of it.
    known: HashMap<usize, (Weak<Stamped>, Weak<Stamped>)>,
}

impl Named {
    pub fn name(&mut self, desired: &mut Desired, user: &str) {
        self.known.retain(|_, (old, new)| old.strong_count() > 0 && new.strong_count() > 0);
        for want in desired.instances.values_mut().filter(|want| want.spec.identity.user.is_none()) {
            let at = Arc::as_ptr(&want.spec) as usize;
            want.spec = match self.known.get(&at).and_then(|(_, new)| new.upgrade()) {
                Some(new) => new,
                None => {
                    let mut spec = (**want.spec).clone();
                    spec.identity.user = Some(user.to_owned());
                    let new = Arc::new(Stamped::new(spec));
                    self.known.insert(at, (Arc::downgrade(&want.spec), Arc::downgrade(&new)));
                    new
                }
            };
        }
    }
}
