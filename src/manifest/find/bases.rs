//! Discovery of overlays: bases are read with the overlay that names them, and other overlays of a tree are skipped.
//!
//! A base is inside the git work tree of its overlay or, without one, below a common directory other than `/`. It is not
//! reached through a symbolic link, so that the tree shows what is read.

use std::collections::{HashSet, VecDeque};
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};

use super::super::layers::header::{
    NamedBase, OVERLAY_FILES, OverlayHeader, header, normalize_shown, resolve_base,
};
use super::super::limits::Limits;
use super::super::problem::{Code, Problem};
use super::{Candidate, FileOrigin, FileStamp, FileWalker, display_path, is_manifest, read};

/// Maximum number of bases that are walked. The layers report more as a problem.
const MAX_WALKED: usize = 1_000;

/// Bases that are not walked yet.
#[derive(Default)]
pub struct PendingBases {
    pending: VecDeque<PendingBase>,
    /// Real paths of walked roots.
    walked: HashSet<PathBuf>,
    /// The directory that is walked belongs to an overlay.
    pub(super) is_layered: bool,
    /// Directories of overlays that were skipped.
    skipped: Vec<PathBuf>,
}

struct PendingBase {
    named: NamedBase,
    /// The directory of the overlay, as displayed and canonical.
    dir: PathBuf,
    real_dir: PathBuf,
}

impl FileWalker<'_> {
    /// The Overlay of a file.
    fn overlay_header(&self, path: &Path) -> Option<OverlayHeader> {
        let meta = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let candidate = Candidate {
            name: display_path(path).into(),
            at: FileOrigin::File(path.to_path_buf()),
            scope_dir: PathBuf::new(),
            bytes: meta.len(),
            stamp: Some(FileStamp::of(&meta)),
        };
        header(&read(&candidate, self.limits).ok()?, self.limits)
    }

    pub(super) fn is_overlay(&self, path: &Path) -> bool {
        self.overlay_header(path).is_some()
    }

    /// Notes the bases of a root's Overlay. Returns whether it has one.
    pub(super) fn enter_overlay(&mut self, path: &Path, real: &Path) -> bool {
        self.bases.walked.insert(real.to_path_buf());
        let mut headers = OVERLAY_FILES.iter().filter_map(|name| self.overlay_header(&path.join(name)));
        let Some(header) = headers.next() else { return false };
        let pending = header.bases.into_iter().map(|named| PendingBase {
            named,
            dir: path.to_path_buf(),
            real_dir: real.to_path_buf(),
        });
        self.bases.pending.extend(pending.take(MAX_WALKED));
        true
    }

    /// Whether a directory below a root has an Overlay, and so is not part of it.
    pub(super) fn is_other_overlay(&mut self, entries: &[DirEntry]) -> bool {
        let named = entries.iter().filter(|entry| {
            let name = entry.file_name();
            OVERLAY_FILES.iter().any(|known| name == *known)
        });
        let Some(file) = named.map(DirEntry::path).find(|path| self.is_overlay(path)) else { return false };
        if !self.bases.is_layered {
            let message = "the Overlay is skipped: manifests are read from a directory above it".to_owned();
            let hint = "pass the directory of one overlay as PATH; `abide validate --all` checks all of them";
            let name = display_path(&file).into();
            let problem = Problem::of_file(name, Code::MisplacedOverlay, message, Some(hint.to_owned()));
            self.found.problems.push(problem);
        }
        self.bases.skipped.extend(file.parent().map(Path::to_path_buf));
        true
    }

    /// Walks the bases of all overlays, and their bases.
    pub(super) fn pending_bases(&mut self) {
        let mut count = 0;
        while let Some(base) = self.bases.pending.pop_front() {
            count += 1;
            if count > MAX_WALKED {
                return;
            }
            if let Err((why, hint)) = self.base(&base) {
                self.found.problems.push(base.named.problem(&why, hint));
            }
        }
    }

    fn base(&mut self, base: &PendingBase) -> Result<(), (String, Option<&'static str>)> {
        let PendingBase { named, dir, real_dir } = base;
        // The layers report a base that no file system has.
        let Ok(real) = resolve_base(real_dir, &named.path) else { return Ok(()) };
        if !is_in_tree(real_dir, &real) {
            let hint = "a base is in the git repository of its overlay";
            return Err(("is outside of the tree".to_owned(), Some(hint)));
        }
        let found = real
            .canonicalize()
            .map_err(|error| (format!("cannot be read: {}", super::reason(&error)), None))?;
        if found != real {
            let hint = "name the target of the link";
            return Err(("is reached through a symbolic link".to_owned(), Some(hint)));
        }
        if !self.bases.walked.insert(real.clone()) {
            return Ok(());
        }
        let shown = normalize_shown(&dir.join(&named.path));
        let shown = if shown.canonicalize().is_ok_and(|path| path == real) { shown } else { real.clone() };
        self.found.bases.push(shown.clone());
        if real.is_dir() {
            self.enter_overlay(&shown, &real);
            self.directory(&shown, &real, true);
        } else if is_manifest(&real) {
            let scope_dir = real.parent().unwrap_or(Path::new("/")).to_path_buf();
            self.file(&shown, real, scope_dir);
        }
        Ok(())
    }
}

/// Whether a base is in the tree of its overlay.
fn is_in_tree(dir: &Path, base: &Path) -> bool {
    match dir.ancestors().find(|above| above.join(".git").exists()) {
        Some(root) => base.starts_with(root),
        None => base.components().nth(1).is_some() && base.components().nth(1) == dir.components().nth(1),
    }
}

/// The overlays of a tree.
pub struct OverlayTree {
    /// Their directories, sorted.
    pub overlays: Vec<PathBuf>,
    /// The files that are in the directory of no overlay, sorted.
    pub files: Vec<PathBuf>,
    /// Problems of files that cannot be read.
    pub problems: Vec<Problem>,
}

/// Finds the overlays below the paths.
pub fn overlays(paths: &[PathBuf], limits: &Limits) -> OverlayTree {
    let (mut found, mut files, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    let mut pending: VecDeque<(PathBuf, bool)> = paths.iter().map(|path| (path.clone(), true)).collect();
    let mut known = HashSet::new();
    while let Some((path, is_named)) = pending.pop_front() {
        let real = match path.canonicalize() {
            Ok(real) if real.is_dir() => real,
            // Reading it reports the problem.
            Ok(_) | Err(_) => {
                files.push(path);
                continue;
            }
        };
        if !known.insert(real.clone()) {
            continue;
        }
        let mut walk = FileWalker::new(limits);
        let is_overlay = walk.enter_overlay(&path, &real);
        walk.directory(&path, &real, true);
        pending.extend(std::mem::take(&mut walk.bases.skipped).into_iter().map(|dir| (dir, false)));
        // Every overlay is checked, so none is skipped.
        let is_fault = |problem: &Problem| problem.code != Code::MisplacedOverlay;
        problems.extend(std::mem::take(&mut walk.found.problems).into_iter().filter(is_fault));
        if is_overlay {
            found.push(path);
        } else if is_named {
            files.extend(walk.found.files.iter().map(|file| PathBuf::from(&*file.name)));
        }
    }
    found.sort();
    files.sort();
    OverlayTree { overlays: found, files, problems }
}
