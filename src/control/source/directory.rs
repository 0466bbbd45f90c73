//! Directories and files that are watched: what is broken stays in force as it last was.
//!
//! # Theory of operation
//! The kernel tells of changes below each path, and in every folder that a link on the way to it stands in: so it is seen
//! when an editor replaces a file, and when a whole tree is exchanged by swapping a link. Before each reading it is made
//! sure that what is watched is still what the path leads to. Where the kernel cannot tell (no watches left, a network
//! file system, or on request), the files' metadata are compared every two seconds.
//!
//! A reading on which something is missing is confirmed by another before anything may be pruned. Files that did not change
//! are not read again. Where the kernel tells everything, only what it names is looked at, and the tree is walked now and
//! then, in case that it was not everything after all.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use notify::event::{CreateKind, RemoveKind};
use notify::{EventKind, RecursiveMode, Watcher};

use super::kept::Kept;
use super::{Finish, Reading, Seen};
use crate::manifest::{Again, Changed, Limits};

pub struct Directory {
    paths: Vec<PathBuf>,
    limits: Limits,
    debounce: Duration,
    /// Never ask the kernel.
    only_poll: bool,
    again: Again,
    kept: Kept,
    last: Reading,
    seen: Arc<Seen>,
    watching: Watching,
    walked: Option<Instant>,
}

/// For so long the kernel is believed to have told everything.
const BELIEVED: Duration = Duration::from_secs(20);
/// More paths than this at once are not looked at one by one.
const MANY: usize = 1000;

/// Where nobody tells of changes, files are looked at this often.
const POLL: Duration = Duration::from_secs(2);
/// More links than this on the way to a file lead nowhere, as for the kernel.
const MOST_LINKS: usize = 40;

/// How changes come to be known.
#[derive(Default)]
struct Watching {
    /// What the paths led to when it was set up.
    roots: Vec<Root>,
    _watcher: Option<notify::RecommendedWatcher>,
    /// Where the kernel does not tell everything: when metadata were last compared, and what they were.
    polled: Option<(Instant, blake3::Hash)>,
}

/// A path's real place, and its device and number: a folder of the same name may be another one.
type Root = Option<(PathBuf, u64, u64)>;

impl Directory {
    pub fn new(
        paths: Vec<PathBuf>,
        limits: Limits,
        debounce: Duration,
        only_poll: bool,
        finish: Finish,
    ) -> Directory {
        let seen = Arc::new(Seen::default());
        let watching = Watching::begin(&paths, only_poll, &seen);
        let (again, kept, last) = (Again::default(), Kept::new(finish), Reading::default());
        Directory { paths, limits, debounce, only_poll, again, kept, last, seen, watching, walked: None }
    }

    pub(super) fn seen(&self) -> &Arc<Seen> {
        &self.seen
    }

    pub(super) fn last(&self) -> &Reading {
        &self.last
    }

    /// Did something change, and has it been quiet since? Or did somebody ask?
    pub fn changed(&mut self) -> bool {
        if self.watching.polls_a_change(&self.paths) {
            self.seen.changed_now();
        }
        let quiet = self.debounce;
        let changed = self.seen.at().take_if(|at| at.elapsed() >= quiet).is_some();
        self.seen.asked.swap(false, Ordering::SeqCst) || changed
    }

    /// How long until it will have been quiet.
    pub fn wait(&self) -> Duration {
        self.seen.at().map_or(POLL, |at| self.debounce.saturating_sub(at.elapsed()))
    }

    /// The manifests as they are, or as they last were where they are broken.
    pub fn read(&mut self) -> &Reading {
        let missed = self.seen.missed.swap(false, Ordering::SeqCst);
        if missed || self.watching.roots != roots(&self.paths) {
            // First the watch, then the reading: nothing is lost in between.
            self.watching = Watching::begin(&self.paths, self.only_poll, &self.seen);
            self.walked = None;
        }
        let changed = self.look();
        let (again, limits) = (&mut self.again, &self.limits);
        if changed.as_ref().is_some_and(Vec::is_empty) {
            // The same files say the same.
            self.last.is_news = false;
            self.last.may_prune = !self.last.is_incomplete;
            return &self.last;
        }
        // On a reading that was whole and confirmed, what a few files say only of themselves takes nothing away.
        if let Some(changed) = changed.filter(|_| self.last.may_prune)
            && let Some(spliced) = again.splice(&changed, &self.last.desired, limits)
        {
            self.kept.put_in(spliced, &mut self.last);
            return &self.last;
        }
        let reading = self.kept.take(|stand_ins| again.load(limits, stand_ins));
        let before = self.last.revision.clone();
        let mut reading = Kept::unless_gone(reading, &mut self.last);
        reading.may_prune = !reading.is_incomplete && reading.revision == before;
        // The next look confirms it.
        if !reading.may_prune && !reading.is_incomplete {
            self.seen.changed_now();
        }
        self.last = reading;
        &self.last
    }

    /// Which files have another text. `None`: everything is to be read.
    fn look(&mut self) -> Option<Vec<Changed>> {
        let touched = std::mem::take(&mut *self.seen.touched());
        let is_believed = self.watching.polled.is_none()
            && touched.len() < MANY
            && self.walked.is_some_and(|walked| walked.elapsed() < BELIEVED);
        // What may be missing is looked for, not believed.
        if is_believed
            && self.last.may_prune
            && let Some(changed) = self.again.look_at(&self.paths, &touched, &self.limits)
        {
            return Some(changed);
        }
        self.walked = Some(Instant::now());
        self.again.walk(&self.paths, &self.limits)
    }
}

impl Watching {
    fn begin(paths: &[PathBuf], only_poll: bool, seen: &Arc<Seen>) -> Watching {
        let roots = roots(paths);
        let asks = !only_poll && !paths.iter().any(|path| is_far(path));
        let (watcher, tells_all) = if asks { watcher(paths, seen) } else { (None, false) };
        let polled = (!tells_all).then(|| (Instant::now(), metadata(paths)));
        Watching { roots, _watcher: watcher, polled }
    }

    /// Where nobody tells: are the files others than two seconds ago?
    fn polls_a_change(&mut self, paths: &[PathBuf]) -> bool {
        let Some((at, before)) = &mut self.polled else { return false };
        if at.elapsed() < POLL {
            return false;
        }
        let now = metadata(paths);
        let changed = *before != now;
        (*at, *before) = (Instant::now(), now);
        changed
    }
}

fn roots(paths: &[PathBuf]) -> Vec<Root> {
    let root = |path: &PathBuf| {
        let real = path.canonicalize().ok()?;
        let meta = fs::metadata(&real).ok()?;
        Some((real, meta.dev(), meta.ino()))
    };
    paths.iter().map(root).collect()
}

/// And whether it tells of everything below the paths.
fn watcher(paths: &[PathBuf], seen: &Arc<Seen>) -> (Option<notify::RecommendedWatcher>, bool) {
    let told = Arc::clone(seen);
    let made = notify::recommended_watcher(move |event: notify::Result<notify::Event>| note(&event, &told));
    let Ok(mut watcher) = made else { return (None, false) };
    let mut tells_all = true;
    for path in paths {
        for folder in folders_on_the_way(path) {
            // One that is not ours to look into is not where links are swapped.
            let _ = watcher.watch(&folder, RecursiveMode::NonRecursive);
        }
        tells_all &= watcher.watch(path, RecursiveMode::Recursive).is_ok();
    }
    (Some(watcher), tells_all)
}

fn note(event: &notify::Result<notify::Event>, seen: &Seen) {
    match event {
        // Who only reads changes nothing.
        Ok(event) if matches!(event.kind, EventKind::Access(_)) && !event.need_rescan() => return,
        Ok(event) if !event.need_rescan() => {
            let is_file = matches!(
                event.kind,
                EventKind::Create(CreateKind::File) | EventKind::Remove(RemoveKind::File)
            );
            let mut touched = seen.touched();
            for path in event.paths.iter().take(MANY.saturating_sub(touched.len())) {
                *touched.entry(path.clone()).or_default() |= is_file;
            }
        }
        // Events were lost, perhaps that of a new folder: everything is looked at, and watched anew.
        Ok(_) | Err(_) => seen.missed.store(true, Ordering::SeqCst),
    }
    seen.changed_now();
}

/// The folder around a path, and that of every link on the way to it: where what it leads to can be exchanged.
fn folders_on_the_way(path: &Path) -> BTreeSet<PathBuf> {
    let mut folders = BTreeSet::new();
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    folders.extend(whole.parent().map(Path::to_path_buf));
    let (mut pending, mut links) = (vec![whole], 0);
    while let Some(path) = pending.pop() {
        let mut here = PathBuf::new();
        for part in path.components() {
            match part {
                Component::ParentDir => drop(here.pop()),
                Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::Normal(_) => {
                    here.push(part);
                }
            }
            let Ok(target) = fs::read_link(&here) else { continue };
            links += 1;
            if links > MOST_LINKS {
                return folders;
            }
            let folder = here.parent().unwrap_or(Path::new("/")).to_path_buf();
            pending.push(folder.join(&target));
            here = fs::canonicalize(&here).unwrap_or(here);
            folders.insert(folder);
        }
    }
    folders
}

/// A file system whose other users the kernel does not tell of.
fn is_far(path: &Path) -> bool {
    // NFS, SMB (three), 9P, FUSE, Ceph, AFS, Lustre, GFS2, OCFS2: as in Linux's magic.h and their own sources.
    const FAR: [u32; 11] = [
        0x6969,
        0x517b,
        0xff53_4d42,
        0xfe53_4d42,
        0x0102_1997,
        0x6573_5546,
        0x00c3_6400,
        0x5346_414f,
        0x0bd0_0bd0,
        0x0116_1970,
        0x7461_636f,
    ];
    rustix::fs::statfs(path).is_ok_and(|found| FAR.contains(&(found.f_type as u32)))
}

/// A digest of what the files' metadata say. Follows links as often as the kernel would.
fn metadata(paths: &[PathBuf]) -> blake3::Hash {
    let mut sum = blake3::Hasher::new();
    let mut seen = BTreeSet::new();
    let mut pending: Vec<PathBuf> = paths.to_vec();
    while let Some(path) = pending.pop() {
        sum.update(path.as_os_str().as_encoded_bytes());
        let Ok(meta) = fs::metadata(&path) else { continue };
        let facts = [meta.dev(), meta.ino(), meta.len(), u64::from(meta.mode())];
        let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
        for fact in facts {
            sum.update(&fact.to_le_bytes());
        }
        for time in times {
            sum.update(&time.to_le_bytes());
        }
        // A link may lead back to where it stands.
        if meta.is_dir() && seen.insert((meta.dev(), meta.ino())) {
            let mut inside: Vec<PathBuf> = fs::read_dir(&path)
                .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
                .unwrap_or_default();
            inside.sort();
            pending.extend(inside);
        }
    }
    sum.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_events_mean_that_everything_is_looked_at_and_watched_anew() {
        let seen = Seen::default();
        let access = notify::EventKind::Access(notify::event::AccessKind::Read);
        note(&Ok(notify::Event::new(access)), &seen);
        assert!(seen.at().is_none());
        let lost = notify::Event::new(notify::EventKind::Other).set_flag(notify::event::Flag::Rescan);
        note(&Ok(lost), &seen);
        assert!(seen.at().is_some() && seen.missed.load(Ordering::SeqCst));
    }

    #[test]
    fn every_folder_in_which_a_link_on_the_way_stands_is_known() {
        let folder = std::env::temp_dir().join(format!("abide-links-{}", std::process::id()));
        let folder = {
            fs::create_dir_all(folder.join("a/rev-1/m")).expect("folders");
            fs::create_dir_all(folder.join("b")).expect("a folder");
            folder.canonicalize().expect("a folder")
        };
        std::os::unix::fs::symlink("rev-1", folder.join("a/current")).expect("a link");
        std::os::unix::fs::symlink("../a/current/m", folder.join("b/here")).expect("a link");
        let found = folders_on_the_way(&folder.join("b/here"));
        fs::remove_dir_all(&folder).expect("it was there");
        assert_eq!(found, [folder.join("a"), folder.join("b")].into_iter().collect());
    }
}
