//! Directory source: watched files and directories, where last good versions replace broken files.
//!
//! # Theory of operation
//!
//! inotify watches each path, and every directory that contains a symlink on the way to it. So it notices an editor
//! that replaces a file, and a tree that is exchanged by swapping a symlink. Before each read the watches are checked
//! against the current targets of the paths. Where notifications are incomplete (no watches left, a network file
//! system, or on request), file metadata is compared every two seconds.
//!
//! A read with missing declarations is confirmed by a second one before anything is pruned. Unchanged files are not
//! read again. With complete notifications only the named files are read, and the tree is rescanned periodically, in
//! case an event was lost.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use notify::event::{CreateKind, RemoveKind};
use notify::{EventKind, RecursiveMode, Watcher};

use super::blocking_reader::{BlockingReader, BlockingSource};
use super::last_good::{ExpectedRoots, LastGood};
use super::{ChangeSignal, PostProcess, SourceState};
use crate::inventory::InventoryFeed;
use crate::malloc;
use crate::manifest::layers::header::normalize;
use crate::manifest::{ChangedFile, FileContent, IncrementalLoader, Limits, display_path};
use crate::model::ManifestRevision;

pub struct Directory {
    paths: Vec<PathBuf>,
    limits: Limits,
    debounce: Duration,
    /// Always poll.
    only_poll: bool,
    again: IncrementalLoader,
    last_good: LastGood,
    last: SourceState,
    seen: Arc<ChangeSignal>,
    watching: FileWatch,
    progress: ReadProgress,
    sure: StableRevision,
}

/// Result of the reads so far.
#[derive(Default)]
struct ReadProgress {
    /// The last scan of the whole tree.
    scanned: Option<Instant>,
    /// At least one read succeeded.
    is_read: bool,
    /// New last good versions became available.
    has_new_stand_ins: bool,
}

/// Interval between rescans with complete notifications; longer during changes, so that a saved file does not wait
/// for a rescan.
const WATCH_TRUST_PERIOD: Duration = Duration::from_secs(20);
const WATCH_TRUST_PERIOD_ACTIVE: Duration = Duration::from_secs(90);
/// Above this number of changed paths the tree is rescanned.
const MAX_TOUCHED_PATHS: usize = 1000;
/// Maximum number of symlinks on the way to a file, as in the kernel.
const MAX_SYMLINKS: usize = 40;

/// Method of change detection.
#[derive(Default)]
struct FileWatch {
    /// Targets of the paths when the watch was set up.
    roots: Vec<Root>,
    _watcher: Option<notify::RecommendedWatcher>,
    /// Without complete notifications: digest of the metadata at the last comparison.
    polled: Option<blake3::Hash>,
}

/// Canonical path, device and inode: a directory of the same name may be another one.
type Root = Option<(PathBuf, u64, u64)>;

impl Directory {
    pub fn new(
        paths: Vec<PathBuf>,
        limits: Limits,
        debounce: Duration,
        only_poll: bool,
        finish: PostProcess,
    ) -> BlockingReader<Directory> {
        let seen = Arc::new(ChangeSignal::default());
        // Watches are set up before the first read.
        let watching = FileWatch::default();
        let (again, last_good, last) =
            (IncrementalLoader::default(), LastGood::new(finish), SourceState::default());
        let signal = Arc::clone(&seen);
        let directory = Directory {
            paths,
            limits,
            debounce,
            only_poll,
            again,
            last_good,
            last,
            seen,
            watching,
            progress: ReadProgress::default(),
            sure: StableRevision::default(),
        };
        BlockingReader::new(directory, signal, debounce)
    }

    pub(super) fn use_inventories(&mut self, feed: Arc<InventoryFeed>) {
        self.last_good.use_inventories(feed);
    }

    fn refresh(&mut self) {
        let missed = self.seen.missed.swap(false, Ordering::SeqCst);
        let watched = self.watched_paths();
        if missed || self.watching.roots != roots(&watched) {
            // The watch comes before the read: no change is lost in between.
            self.watching = FileWatch::start(&watched, self.only_poll, &self.seen);
            self.progress.scanned = None;
        }
        let changed = self.changed_files();
        let rewatched = self.watched_paths();
        if rewatched != watched {
            // The overlays have other bases. They were read before they were watched: another read follows.
            self.watching = FileWatch::start(&rewatched, self.only_poll, &self.seen);
            self.progress.scanned = None;
            self.seen.changed_now();
        }
        let (again, limits) = (&mut self.again, &self.limits);
        let has_new_inventories = self.last_good.has_new_inventories();
        let has_new_stand_ins = std::mem::take(&mut self.progress.has_new_stand_ins) || has_new_inventories;
        if std::mem::replace(&mut self.progress.is_read, true)
            && !has_new_stand_ins
            && changed.as_ref().is_some_and(Vec::is_empty)
        {
            self.last.changed_since_last = false;
            return self.confirm();
        }
        // On a complete and confirmed read, a change inside a few files removes nothing else.
        if let Some(mod_seq) = changed.filter(|_| self.last.may_prune && !has_new_inventories)
            && let Some(spliced) = again.splice(&mod_seq, &self.last.desired, limits)
        {
            self.last_good.apply_splice(spliced, &mut self.last);
            self.sure.carry_over(&self.last.revision);
            return;
        }
        let roots = self.paths.iter().map(|path| display_path(path)).collect();
        let places = ExpectedRoots { roots, lost: again.dangling_links().map(str::to_owned).collect() };
        let reading = self.last_good.load_with_fallback(&places, |stand_ins| again.load(limits, stand_ins));
        self.last = LastGood::reject_empty(reading, &mut self.last);
        self.confirm();
        // Parsing a whole tree used far more memory than its result keeps.
        malloc::give_freed_back();
    }

    /// The paths, and the bases of their overlays.
    fn watched_paths(&self) -> Vec<PathBuf> {
        // An absolute path without `..`, as events have it.
        let absolute = |path: &PathBuf| {
            std::path::absolute(path).ok().and_then(|path| normalize(&path)).unwrap_or_else(|| path.clone())
        };
        self.paths.iter().cloned().chain(self.again.bases().iter().map(absolute)).collect()
    }

    /// Prune is allowed if the read is complete and equals the one a debounce interval ago.
    fn confirm(&mut self) {
        let SourceState { revision, is_incomplete, .. } = &self.last;
        let now = Instant::now();
        self.last.may_prune = self.sure.is_stable(revision, *is_incomplete, now, self.debounce);
        // The next read confirms it.
        if !self.last.may_prune && !self.last.is_incomplete {
            self.seen.changed_now();
        }
    }

    /// Files with new content. `None`: everything has to be read.
    fn changed_files(&mut self) -> Option<Vec<ChangedFile>> {
        let touched = std::mem::take(&mut *self.seen.touched());
        let believed = if touched.is_empty() { WATCH_TRUST_PERIOD } else { WATCH_TRUST_PERIOD_ACTIVE };
        let is_believed = self.watching.polled.is_none()
            && touched.len() < MAX_TOUCHED_PATHS
            && self.progress.scanned.is_some_and(|scanned| scanned.elapsed() < believed);
        // A path that may be missing is checked, whatever the event says.
        if is_believed
            && self.last.may_prune
            && let Some(changed) = self.again.refresh_paths(&self.paths, &touched, &self.limits)
        {
            return Some(changed);
        }
        self.progress.scanned = Some(Instant::now());
        self.again.rescan(&self.paths, &self.limits)
    }
}

impl BlockingSource for Directory {
    fn read(&mut self) {
        self.refresh();
    }

    fn last(&self) -> &SourceState {
        &self.last
    }

    fn restore_last_good(&mut self, texts: Vec<FileContent>) -> bool {
        let is_new = self.last_good.restore_last_good(texts);
        self.progress.has_new_stand_ins |= is_new;
        is_new
    }

    fn is_polled(&self) -> bool {
        self.watching.polled.is_some()
    }

    fn poll(&mut self) {
        let watched = self.watched_paths();
        if self.watching.poll_changed(&watched) {
            self.seen.changed_now();
        }
    }

    fn name(&self) -> String {
        self.paths.iter().map(|path| display_path(path)).collect::<Vec<_>>().join(", ")
    }
}

/// Revision of consecutive complete reads, and since when.
#[derive(Default)]
struct StableRevision(Option<(ManifestRevision, Instant)>);

impl StableRevision {
    /// Whether this read is stable: two equal reads, this far apart, with nothing else in between.
    fn is_stable(
        &mut self,
        revision: &ManifestRevision,
        is_incomplete: bool,
        now: Instant,
        apart: Duration,
    ) -> bool {
        match &self.0 {
            _ if is_incomplete => self.0 = None,
            Some((stable, since)) if stable == revision => {
                return now.saturating_duration_since(*since) >= apart;
            }
            Some(_) | None => self.0 = Some((revision.clone(), now)),
        }
        false
    }

    /// Records a new revision that is as stable as the last one.
    fn carry_over(&mut self, revision: &ManifestRevision) {
        if let Some((stable, _)) = &mut self.0 {
            stable.clone_from(revision);
        }
    }
}

impl FileWatch {
    fn start(paths: &[PathBuf], only_poll: bool, seen: &Arc<ChangeSignal>) -> FileWatch {
        let roots = roots(paths);
        let asks = !only_poll && !paths.iter().any(|path| is_network_fs(path));
        let (watcher, tells_all) = if asks { watcher(paths, seen) } else { (None, false) };
        let polled = (!tells_all).then(|| metadata(paths));
        FileWatch { roots, _watcher: watcher, polled }
    }

    /// Without notifications: whether the files differ from the last comparison.
    fn poll_changed(&mut self, paths: &[PathBuf]) -> bool {
        let Some(before) = &mut self.polled else { return false };
        let now = metadata(paths);
        std::mem::replace(before, now) != now
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

/// Sets up watches; returns whether notifications cover everything below the paths.
fn watcher(paths: &[PathBuf], seen: &Arc<ChangeSignal>) -> (Option<notify::RecommendedWatcher>, bool) {
    let signal = Arc::clone(seen);
    let ways: Vec<BTreeSet<PathBuf>> = paths.iter().map(|path| path_and_symlinks(path)).collect();
    let on_the_way: BTreeSet<PathBuf> = ways.iter().flatten().cloned().collect();
    let on_event = move |event: notify::Result<notify::Event>| record_fs_event(&event, &on_the_way, &signal);
    // A symlink out of the tree is not followed by reads, either: its target is unknown.
    let config = notify::Config::default().with_follow_symlinks(false);
    let Ok(mut watcher) = notify::RecommendedWatcher::new(on_event, config) else { return (None, false) };
    let mut tells_all = true;
    for (path, ways) in paths.iter().zip(&ways) {
        for folder in ways.iter().filter_map(|way| way.parent()) {
            // An unreadable directory cannot contain a swapped symlink that matters.
            let _ = watcher.watch(folder, RecursiveMode::NonRecursive);
        }
        // A path that is itself a symlink is followed.
        let inside = if path.is_dir() { path.join(".") } else { path.clone() };
        tells_all &= watcher.watch(&inside, RecursiveMode::Recursive).is_ok();
    }
    (Some(watcher), tells_all)
}

/// Events outside of the paths are ignored: log files may be there, including our own.
fn record_fs_event(
    event: &notify::Result<notify::Event>,
    on_the_way: &BTreeSet<PathBuf>,
    seen: &ChangeSignal,
) {
    match event {
        // Reading a file is not a change.
        Ok(event) if matches!(event.kind, EventKind::Access(_)) && !event.need_rescan() => return,
        Ok(event)
            if !event.need_rescan()
                && !event.paths.iter().any(|path| on_the_way.iter().any(|way| path.starts_with(way))) =>
        {
            return;
        }
        Ok(event) if !event.need_rescan() => {
            let is_file = matches!(
                event.kind,
                EventKind::Create(CreateKind::File) | EventKind::Remove(RemoveKind::File)
            );
            let mut touched = seen.touched();
            for path in event.paths.iter().take(MAX_TOUCHED_PATHS.saturating_sub(touched.len())) {
                *touched.entry(path.clone()).or_default() |= is_file;
            }
        }
        // Events were lost: rescan everything, and set up the watches again.
        Ok(_) | Err(_) => seen.missed.store(true, Ordering::SeqCst),
    }
    seen.changed_now();
}

/// A path, and every symlink on the way to it: each is watched in its parent directory.
fn path_and_symlinks(path: &Path) -> BTreeSet<PathBuf> {
    let mut ways = BTreeSet::new();
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    ways.insert(whole.clone());
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
            if links > MAX_SYMLINKS {
                return ways;
            }
            let folder = here.parent().unwrap_or(Path::new("/")).to_path_buf();
            pending.push(folder.join(&target));
            let link = std::mem::take(&mut here);
            here = fs::canonicalize(&link).unwrap_or_else(|_| link.clone());
            ways.insert(link);
        }
    }
    ways
}

/// Whether the kernel sends no notifications for changes by other clients of this file system.
fn is_network_fs(path: &Path) -> bool {
    // NFS, SMB (three), 9P, FUSE, Ceph, AFS, Lustre, GFS2, OCFS2: as in Linux's magic.h and their own sources.
    const NETWORK_FS_MAGIC: [u32; 11] = [
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
    rustix::fs::statfs(path).is_ok_and(|found| NETWORK_FS_MAGIC.contains(&(found.f_type as u32)))
}

/// Digest of the files' metadata.
fn metadata(paths: &[PathBuf]) -> blake3::Hash {
    let mut sum = blake3::Hasher::new();
    let mut seen = BTreeSet::new();
    let mut pending: Vec<(PathBuf, bool)> = paths.iter().map(|path| (path.clone(), true)).collect();
    while let Some((path, is_root)) = pending.pop() {
        sum.update(path.as_os_str().as_encoded_bytes());
        // Everything below the paths is scanned; symlinks may lead anywhere.
        let meta = if is_root { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
        let Ok(meta) = meta else { continue };
        let facts = [meta.dev(), meta.ino(), meta.len(), u64::from(meta.mode())];
        let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
        for fact in facts {
            sum.update(&fact.to_le_bytes());
        }
        for time in times {
            sum.update(&time.to_le_bytes());
        }
        // A symlink may lead to one of its parents.
        if meta.is_dir() && seen.insert((meta.dev(), meta.ino())) {
            let mut inside: Vec<PathBuf> = fs::read_dir(&path)
                .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
                .unwrap_or_default();
            inside.sort();
            pending.extend(inside.into_iter().map(|path| (path, false)));
        }
    }
    sum.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_counts_after_two_complete_reads_one_debounce_apart() {
        let (now, apart) = (Instant::now(), Duration::from_millis(200));
        let mut sure = StableRevision::default();
        let revision = |text: &str| ManifestRevision::from_text(text);
        assert!(
            !sure.is_stable(&revision("1"), false, now, apart)
                && !sure.is_stable(&revision("1"), false, now, apart)
        );
        assert!(sure.is_stable(&revision("1"), false, now + apart, apart));
        assert!(!sure.is_stable(&revision("2"), false, now + apart, apart), "it says something else");
        assert!(
            !sure.is_stable(&revision("2"), true, now + 3 * apart, apart),
            "something was missing in between"
        );
        assert!(
            !sure.is_stable(&revision("2"), false, now + 3 * apart, apart)
                && sure.is_stable(&revision("2"), false, now + 4 * apart, apart)
        );
        sure.carry_over(&revision("3"));
        assert!(sure.is_stable(&revision("3"), false, now + 4 * apart, apart));
        let mut hasty = StableRevision::default();
        assert!(!hasty.is_stable(&revision("1"), false, now, Duration::ZERO), "one reading is not enough");
        assert!(hasty.is_stable(&revision("1"), false, now, Duration::ZERO));
    }

    #[test]
    fn lost_events_cause_a_full_read_and_new_watches() {
        let seen = ChangeSignal::default();
        let access = notify::EventKind::Access(notify::event::AccessKind::Read);
        let ways = [PathBuf::from("/m")].into();
        record_fs_event(&Ok(notify::Event::new(access)), &ways, &seen);
        assert!(seen.at().is_none());
        let lost = notify::Event::new(notify::EventKind::Other).set_flag(notify::event::Flag::Rescan);
        let outside = notify::Event::new(EventKind::Create(CreateKind::File)).add_path("/log".into());
        record_fs_event(&Ok(outside), &ways, &seen);
        assert!(seen.at().is_none() && seen.touched().is_empty());
        record_fs_event(&Ok(lost), &ways, &seen);
        assert!(seen.at().is_some() && seen.missed.load(Ordering::SeqCst));
        let inside = notify::Event::new(EventKind::Create(CreateKind::File)).add_path("/m/a.yaml".into());
        record_fs_event(&Ok(inside), &ways, &seen);
        assert_eq!(seen.touched().len(), 1);
    }

    #[test]
    fn every_folder_of_a_link_in_the_path_is_watched() {
        let folder = std::env::temp_dir().join(format!("abide-links-{}", std::process::id()));
        let folder = {
            fs::create_dir_all(folder.join("a/rev-1/m")).expect("folders");
            fs::create_dir_all(folder.join("b")).expect("a folder");
            folder.canonicalize().expect("a folder")
        };
        std::os::unix::fs::symlink("rev-1", folder.join("a/current")).expect("a link");
        std::os::unix::fs::symlink("../a/current/m", folder.join("b/here")).expect("a link");
        let found = path_and_symlinks(&folder.join("b/here"));
        fs::remove_dir_all(&folder).expect("it was there");
        assert_eq!(found, [folder.join("a/current"), folder.join("b/here")].into_iter().collect());
    }
}
