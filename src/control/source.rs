//! A directory of manifests that is watched: what is broken stays in force as it last was.
//!
//! A file that cannot be read or has an error is replaced by the last text of it that was good; a directory that cannot be
//! read, or is suddenly empty, changes nothing. Nothing is pruned on such a reading, nor on one that the next does not
//! confirm.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use notify::{RecursiveMode, Watcher};
use tokio::sync::Notify;

use crate::manifest::{self, Limits, Problem, Severity};
use crate::model::{Desired, Stamped};
use crate::reconcile::of_desired;

/// One reading of the manifests.
#[derive(Debug, Default)]
pub struct Reading {
    pub desired: Desired,
    pub problems: Vec<Problem>,
    /// Something could not be read as it is now: what is missing may only be unread.
    pub is_incomplete: bool,
    /// Two readings agree: what is in neither is wanted no more.
    pub may_prune: bool,
    /// Its problems are not those of the last reading.
    pub is_news: bool,
    pub files: usize,
}

/// How a want is changed on its way: the local agent's user, say.
pub type Finish = Box<dyn Fn(&mut Desired) + Send>;

pub struct Source {
    paths: Vec<PathBuf>,
    limits: Limits,
    debounce: Duration,
    finish: Finish,
    /// The last good text of each file.
    good: BTreeMap<String, Arc<str>>,
    last: Reading,
    last_revision: String,
    seen: Arc<Seen>,
    _watcher: Option<notify::RecommendedWatcher>,
}

#[derive(Default)]
struct Seen {
    /// When something last changed.
    at: std::sync::Mutex<Option<Instant>>,
    wake: Notify,
}

/// Where nobody tells of changes, files are looked at this often.
const POLL: Duration = Duration::from_secs(2);

impl Source {
    pub fn new(paths: Vec<PathBuf>, limits: Limits, debounce: Duration, finish: Finish) -> Source {
        let seen = Arc::new(Seen::default());
        let watcher = watcher(&paths, &seen);
        Source {
            paths,
            limits,
            debounce,
            finish,
            good: BTreeMap::new(),
            last: Reading::default(),
            last_revision: String::new(),
            seen,
            _watcher: watcher,
        }
    }

    fn at(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.seen.at.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Did something change, and has it been quiet since?
    pub fn changed(&mut self) -> bool {
        let quiet = self.debounce;
        self.at().take_if(|at| at.elapsed() >= quiet).is_some()
    }

    /// How long until it will have been quiet.
    pub fn wait(&self) -> Duration {
        self.at().map_or(POLL, |at| self.debounce.saturating_sub(at.elapsed()))
    }

    /// Something changed just now.
    pub fn woken(&self) -> impl Future<Output = ()> + '_ {
        self.seen.wake.notified()
    }

    /// The manifests as they are, or as they last were where they are broken.
    pub fn read(&mut self) -> &Reading {
        let mut loaded = manifest::load(&self.paths, &self.limits);
        let problems = std::mem::take(&mut loaded.problems);
        let bad: Vec<&Problem> =
            problems.iter().filter(|problem| problem.severity == Severity::Error).collect();
        let mut incomplete = !bad.is_empty();
        if bad.is_empty() {
            self.good = loaded.texts().map(|(name, text)| (name.to_owned(), Arc::clone(text))).collect();
        } else {
            let stand_ins = bad.iter().filter_map(|problem| {
                Some((problem.file.to_string(), Arc::clone(self.good.get(&*problem.file)?)))
            });
            let stand_ins: BTreeMap<String, Arc<str>> = stand_ins.collect();
            if !stand_ins.is_empty() {
                loaded = manifest::load_with(&self.paths, &self.limits, &stand_ins);
            }
        }
        // All files gone at once is a directory that is not there, more often than a wish.
        if loaded.desired.instances.is_empty() && !self.last.desired.instances.is_empty() {
            incomplete = true;
            loaded.desired = self.last.desired.clone();
        } else {
            (self.finish)(&mut loaded.desired);
        }
        let revision = of_desired(&loaded.desired);
        let told = |problems: &[Problem]| -> Vec<String> {
            problems
                .iter()
                .map(|problem| {
                    format!("{}:{}:{} {}", problem.file, problem.line, problem.column, problem.message)
                })
                .collect()
        };
        let reading = Reading {
            is_news: told(&problems) != told(&self.last.problems),
            may_prune: !incomplete && revision == self.last_revision,
            files: loaded.files,
            desired: loaded.desired,
            problems,
            is_incomplete: incomplete,
        };
        // The next look confirms it.
        if !reading.may_prune && !incomplete {
            *self.at() = Some(Instant::now());
        }
        self.last_revision = revision;
        self.last = reading;
        &self.last
    }
}

fn watcher(paths: &[PathBuf], seen: &Arc<Seen>) -> Option<notify::RecommendedWatcher> {
    let told = Arc::clone(seen);
    let handler = move |event: notify::Result<notify::Event>| {
        // Who only reads changes nothing. An error means that something was missed: then everything is looked at.
        if event.is_ok_and(|event| matches!(event.kind, notify::EventKind::Access(_))) {
            return;
        }
        *told.at.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Instant::now());
        told.wake.notify_one();
    };
    let mut watcher = notify::recommended_watcher(handler).ok()?;
    for path in paths {
        // The folder around it: editors and git-sync replace what is watched.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let _ = watcher.watch(parent, RecursiveMode::NonRecursive);
        let _ = watcher.watch(path, RecursiveMode::Recursive);
    }
    Some(watcher)
}

/// Gives every want a user where none is named, each shared spec once.
pub fn name_users(desired: &mut Desired, user: &str) {
    let mut named: BTreeMap<usize, (Arc<Stamped>, Arc<Stamped>)> = BTreeMap::new();
    for want in desired.instances.values_mut().filter(|want| want.spec.identity.user.is_none()) {
        let old = Arc::clone(&want.spec);
        // The old one is kept, so that no other spec gets its address meanwhile.
        let (_, new) = named.entry(Arc::as_ptr(&old) as usize).or_insert_with(|| {
            let mut spec = (**old).clone();
            spec.identity.user = Some(user.to_owned());
            (old, Arc::new(Stamped::new(spec)))
        });
        want.spec = Arc::clone(new);
    }
}
