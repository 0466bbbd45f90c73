//! Incremental loader: reloads a manifest tree without reading or parsing unchanged files.
//!
//! A file is unchanged if its metadata are equal and were older than [`RACY_SECS`] when it was read: two writes within one
//! tick of the file system's clock have equal metadata. Any other file is read, and parsed only if its text differs.
//!
//! If the caller knows which files changed, the directory walk is skipped ([`IncrementalLoader::refresh_paths`]). If a
//! change affects no other document, it is patched into the previous result ([`IncrementalLoader::splice`]). Otherwise
//! cross-document checks run again on parsed values.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::expand::Context;
use super::expand::Purpose;
use super::find::{self, Candidate, FileContent, FileStamp, FoundFiles, ReplacementText};
use super::inventory;
use super::layers::LayerSet;
use super::layers::header::{is_overlay_file, normalize};
use super::parse::ParsedSlices;
use super::text::SourceText;
use super::{Limits, Loaded, Problem, load_found};

/// Cache of a tree between two loads, which must use the same limits.
#[derive(Default)]
pub struct IncrementalLoader {
    pub(super) found: FoundFiles,
    pub(super) files: HashMap<Arc<str>, CachedFile>,
    /// Defaults and policies of the last load, if it had no error.
    pub(super) context: Option<Context>,
    /// Problems of the last load.
    pub(super) problems: Vec<Problem>,
}

pub(super) struct CachedFile {
    pub stamp: Option<FileStamp>,
    pub source: SourceText,
    pub parts: Arc<ParsedSlices>,
    /// The overlays with which it was parsed.
    pub layers: LayerSet,
}

/// Parsed slices, and the overlays with which they were parsed.
pub(super) type CachedSlices = (Arc<ParsedSlices>, LayerSet);

/// A known file kind text changed.
pub struct ChangedFile {
    /// Index into the found files.
    pub(super) at: usize,
    pub(super) source: SourceText,
    /// File metadata, if the next change is certain to alter them.
    pub(super) stamp: Option<FileStamp>,
}

/// A file modified within this time may change again with equal metadata.
const RACY_SECS: i64 = 2;

impl IncrementalLoader {
    /// Walks the paths and returns the files kind text changed. `None` if files were added or removed, or one is not
    /// readable.
    pub fn rescan(&mut self, paths: &[PathBuf], limits: &Limits) -> Option<Vec<ChangedFile>> {
        let found = find::find(paths, limits);
        let before = std::mem::replace(&mut self.found, found);
        let same =
            |(now, then): (&Candidate, &Candidate)| now.name == then.name && now.scope_dir == then.scope_dir;
        if self.found.problems != before.problems
            || self.found.lost != before.lost
            || self.found.bases != before.bases
            || self.found.files.len() != before.files.len()
            || !self.found.files.iter().zip(&before.files).all(same)
        {
            return None;
        }
        // A file without conclusive metadata is read.
        self.read(0..self.found.files.len(), limits, |known, file| {
            known.stamp.is_some() && known.stamp == file.stamp
        })
    }

    /// Like [`IncrementalLoader::rescan`], for known changed paths and without a walk. The value of `touched` is true if the
    /// path is certainly not a directory. `None` if a walk is required.
    pub fn refresh_paths(
        &mut self,
        paths: &[PathBuf],
        touched: &BTreeMap<PathBuf, bool>,
        limits: &Limits,
    ) -> Option<Vec<ChangedFile>> {
        if self.found.has_links || !self.found.problems.is_empty() {
            return None;
        }
        let mut which = Vec::new();
        for (path, is_file) in touched {
            // An overlay decides which files are read.
            if is_overlay_file(&path.to_string_lossy()) {
                return None;
            }
            match self.classify_path(paths, path) {
                PathKind::Irrelevant => {}
                PathKind::File(at) => {
                    let meta = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
                    self.found.files[at].update_metadata(&meta);
                    which.push(at);
                }
                // A new file, or a directory.
                PathKind::Unknown if find::is_manifest(path) => return None,
                PathKind::Unknown => match fs::symlink_metadata(path) {
                    Ok(meta) if meta.is_file() => {}
                    Err(_) if *is_file => {}
                    Ok(_) | Err(_) => return None,
                },
            }
        }
        let sizes = self.found.files.iter().map(Candidate::bytes);
        if find::too_large("", sizes, limits).is_some() {
            return None;
        }
        self.read(which.into_iter(), limits, |_, _| false)
    }

    /// Reads the given files, and returns those kind text changed.
    fn read(
        &mut self,
        which: impl Iterator<Item = usize>,
        limits: &Limits,
        is_same: impl Fn(&CachedFile, &Candidate) -> bool,
    ) -> Option<Vec<ChangedFile>> {
        let (is_old, mut changed) = (is_past_racy_window(), Vec::new());
        for at in which {
            let file = &self.found.files[at];
            let known = self.files.get_mut(&file.name)?;
            if is_same(known, file) {
                continue;
            }
            let (source, stamp) = (find::read(file, limits).ok()?, file.stamp.filter(&is_old));
            if source.text == known.source.text {
                known.stamp = stamp;
            } else {
                changed.push(ChangedFile { at, source, stamp });
            }
        }
        Some(changed)
    }

    /// Relation of a path to the found files.
    fn classify_path(&self, paths: &[PathBuf], path: &Path) -> PathKind {
        let mut kind = PathKind::Irrelevant;
        for root in paths.iter().chain(&self.found.bases) {
            let absolute = std::path::absolute(root).unwrap_or_else(|_| root.clone());
            let absolute =
                normalize(&absolute).filter(|_| self.found.bases.contains(root)).unwrap_or(absolute);
            let Ok(rest) = path.strip_prefix(&absolute) else { continue };
            if rest.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(b".")) {
                continue;
            }
            let named = if rest.as_os_str().is_empty() { root.clone() } else { root.join(rest) };
            let name = find::display_path(&named);
            match self.found.files.binary_search_by(|file| (*file.name).cmp(&name)) {
                Ok(at) if self.found.files[at].is_path(&named) => return PathKind::File(at),
                Ok(_) | Err(_) => kind = PathKind::Unknown,
            }
        }
        kind
    }

    /// Replaces the found files by files that the caller has read, with the problems that it found.
    pub fn set_files(&mut self, files: Vec<FileContent>, problems: Vec<Problem>) {
        self.found = find::from_contents(files, problems);
    }

    /// Files and directories that the overlays of the paths are based on.
    pub fn bases(&self) -> &[PathBuf] {
        &self.found.bases
    }

    /// Dangling links kind names are not manifest names.
    pub fn dangling_links(&self) -> impl Iterator<Item = &str> {
        self.found.lost.iter().map(String::as_str)
    }

    /// Loads the found files, with stand-in texts for some of them.
    pub fn load(&mut self, limits: &Limits, stand_ins: &BTreeMap<String, ReplacementText>) -> Loaded {
        let found = std::mem::take(&mut self.found);
        let mut loaded = load_found(&found, limits, stand_ins, Some(self), Purpose::Instances);
        self.found = found;
        // A snapshot of an inventory replaces no file.
        let is_snapshot = |name: &String| inventory::name_of_file(name).is_some();
        let is_good = stand_ins.keys().all(is_snapshot) && loaded.errors() == 0;
        self.context = loaded.context.take().filter(|_| is_good);
        self.problems.clone_from(&loaded.problems);
        loaded
    }

    /// Cached text and slices of a file with unchanged metadata.
    pub(super) fn cached(&self, file: &Candidate) -> Option<(SourceText, CachedSlices)> {
        let known = self.files.get(&file.name)?;
        (known.stamp.is_some() && known.stamp == file.stamp)
            .then(|| (known.source.clone(), (Arc::clone(&known.parts), known.layers.clone())))
    }

    /// Cached slices of an unchanged text.
    pub(super) fn parsed(&self, source: &SourceText) -> Option<CachedSlices> {
        let known = self.files.get(&source.name)?;
        (known.source.text == source.text && known.source.json == source.json)
            .then(|| (Arc::clone(&known.parts), known.layers.clone()))
    }

    /// Replaces the cache by these files.
    pub(super) fn store_cache<'a>(
        &mut self,
        read: impl Iterator<Item = (&'a Candidate, SourceText, Arc<ParsedSlices>, LayerSet)>,
    ) {
        let is_old = is_past_racy_window();
        self.files = read
            .map(|(file, source, parts, layers)| {
                let stamp = file.stamp.filter(&is_old);
                (source.name.clone(), CachedFile { stamp, source, parts, layers })
            })
            .collect();
    }
}

enum PathKind {
    /// Outside of the paths, or hidden.
    Irrelevant,
    File(usize),
    Unknown,
}

fn is_past_racy_window() -> impl Fn(&FileStamp) -> bool {
    let now = crate::clock::now().0 / 1000;
    move |stamp| stamp.changed_secs() + RACY_SECS < now
}
