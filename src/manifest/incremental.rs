//! Reading a tree again: what did not change is neither read nor parsed anew.
//!
//! A file is the same if its metadata are, and they had been the same for a while when it was read: two writes within one
//! tick of a file system's clock look alike. A file of which that is not certain is read, and parsed only if its text
//! is another. Who was told which files changed need not even walk ([`IncrementalLoader::look_at`]), and what a change says to nobody
//! else is put into what was read before ([`IncrementalLoader::splice`]). Otherwise what documents say of each other is judged anew:
//! that looks at values, not at texts.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::expand::Context;
use super::expand::Purpose;
use super::find::{self, Candidate, FileContent, FileStamp, FoundFiles, StandIn};
use super::text::SourceText;
use super::{Limits, Loaded, ParsedSlices, Problem, load_found};

/// What is remembered of a tree between two readings, all of which are under the same limits.
#[derive(Default)]
pub struct IncrementalLoader {
    pub(super) found: FoundFiles,
    pub(super) files: HashMap<Arc<str>, CachedFile>,
    /// What is above all documents, if the last reading had no error.
    pub(super) context: Option<Context>,
    /// Of the last reading.
    pub(super) problems: Vec<Problem>,
}

pub(super) struct CachedFile {
    pub stamp: Option<FileStamp>,
    pub source: SourceText,
    pub parts: Arc<ParsedSlices>,
}

/// A file that is there as it was, with another text.
pub struct ChangedFile {
    /// Which of those that were found.
    pub(super) at: usize,
    pub(super) source: SourceText,
    /// Its metadata, if they will tell of the next change.
    pub(super) stamp: Option<FileStamp>,
}

/// A file that changed so lately may change again without its metadata telling.
const RACY_SECS: i64 = 2;

impl IncrementalLoader {
    /// Walks the paths. Which files have another text than when they were last read? `None`: there are others, or some
    /// cannot be read.
    pub fn rescan(&mut self, paths: &[PathBuf], limits: &Limits) -> Option<Vec<ChangedFile>> {
        let found = find::find(paths, limits);
        let before = std::mem::replace(&mut self.found, found);
        let same =
            |(now, then): (&Candidate, &Candidate)| now.name == then.name && now.scope_dir == then.scope_dir;
        if self.found.problems != before.problems
            || self.found.lost != before.lost
            || self.found.files.len() != before.files.len()
            || !self.found.files.iter().zip(&before.files).all(same)
        {
            return None;
        }
        // A file whose metadata do not tell is read.
        self.read(0..self.found.files.len(), limits, |known, file| {
            known.stamp.is_some() && known.stamp == file.stamp
        })
    }

    /// The same without a walk, where it is known which paths something happened to, and whether that is surely no folder.
    /// `None`: only a walk can tell.
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
            match self.classify_path(paths, path) {
                PathKind::Irrelevant => {}
                PathKind::File(at) => {
                    let meta = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
                    self.found.files[at].update_metadata(&meta);
                    which.push(at);
                }
                // A new one, or a folder.
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

    /// Those of some files whose text is another.
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
            let (source, facts) = (find::read(file, limits).ok()?, file.stamp.filter(&is_old));
            if source.text == known.source.text {
                known.stamp = facts;
            } else {
                changed.push(ChangedFile { at, source, stamp: facts });
            }
        }
        Some(changed)
    }

    /// What a path is to the files that were found.
    fn classify_path(&self, paths: &[PathBuf], path: &Path) -> PathKind {
        let mut whose = PathKind::Irrelevant;
        for root in paths {
            let whole = std::path::absolute(root).unwrap_or_else(|_| root.clone());
            let Ok(rest) = path.strip_prefix(&whole) else { continue };
            if rest.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(b".")) {
                continue;
            }
            let named = if rest.as_os_str().is_empty() { root.clone() } else { root.join(rest) };
            let name = find::display_path(&named);
            match self.found.files.binary_search_by(|file| (*file.name).cmp(&name)) {
                Ok(at) if self.found.files[at].is_path(&named) => return PathKind::File(at),
                Ok(_) | Err(_) => whose = PathKind::Unknown,
            }
        }
        whose
    }

    /// The same for files that somebody else has found and read, with the problems he met.
    pub fn set_files(&mut self, files: Vec<FileContent>, problems: Vec<Problem>) {
        self.found = find::from_contents(files, problems);
    }

    /// Links that lead nowhere, and that nobody would miss if they never led anywhere.
    pub fn dangling_links(&self) -> impl Iterator<Item = &str> {
        self.found.lost.iter().map(String::as_str)
    }

    /// What was last walked or taken, with other texts in place of some files'.
    pub fn load(&mut self, limits: &Limits, stand_ins: &BTreeMap<String, StandIn>) -> Loaded {
        let found = std::mem::take(&mut self.found);
        let mut loaded = load_found(&found, limits, stand_ins, Some(self), Purpose::Instances);
        self.found = found;
        let is_good = stand_ins.is_empty() && loaded.errors() == 0;
        self.context = loaded.context.take().filter(|_| is_good);
        self.problems.clone_from(&loaded.problems);
        loaded
    }

    /// A file that need not be read.
    pub(super) fn cached(&self, file: &Candidate) -> Option<(SourceText, Arc<ParsedSlices>)> {
        let known = self.files.get(&file.name)?;
        (known.stamp.is_some() && known.stamp == file.stamp)
            .then(|| (known.source.clone(), Arc::clone(&known.parts)))
    }

    /// A text that need not be parsed.
    pub(super) fn parsed(&self, source: &SourceText) -> Option<Arc<ParsedSlices>> {
        let known = self.files.get(&source.name)?;
        (known.source.text == source.text && known.source.json == source.json)
            .then(|| Arc::clone(&known.parts))
    }

    /// From here on, these files are known, and no others.
    pub(super) fn store_cache<'a>(
        &mut self,
        read: impl Iterator<Item = (&'a Candidate, &'a SourceText, Arc<ParsedSlices>)>,
    ) {
        let is_old = is_past_racy_window();
        self.files = read
            .map(|(file, source, parts)| {
                let facts = file.stamp.filter(&is_old);
                (source.name.clone(), CachedFile { stamp: facts, source: source.clone(), parts })
            })
            .collect();
    }
}

enum PathKind {
    /// It is not below the paths, or hidden.
    Irrelevant,
    File(usize),
    Unknown,
}

fn is_past_racy_window() -> impl Fn(&FileStamp) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
    move |facts| facts.changed_secs() + RACY_SECS < now
}
