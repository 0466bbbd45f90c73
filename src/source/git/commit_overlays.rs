//! Overlays of a commit: the bases of the overlay at the path are read with it, from anywhere in the commit.
//!
//! The rules are those of directories: a directory with an Overlay does not belong to a path above it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::command::GitCommand;
use super::commit_files::{contents, find, list};
use super::error::ReadError;
use super::tree::{FoundFile, FoundManifests};
use crate::manifest::layers::header::{
    NamedBase, OverlayHeader, header, is_overlay_file, normalize, resolve_base,
};
use crate::manifest::{Code, Limits, Problem, SourceText, display_path};

/// Maximum number of bases that are read. The layers report more as a problem.
const MAX_BASES: usize = 1_000;

/// The files of a path without those of other overlays, and with the bases of its own.
pub fn with_bases(
    program: &GitCommand,
    commit: &str,
    path: &Path,
    found: FoundManifests,
    limits: &Limits,
) -> Result<FoundManifests, ReadError> {
    let headers = headers(program, &found.files, limits)?;
    if headers.is_empty() {
        return Ok(found);
    }
    let mut all = CommitOverlays { program, commit, limits, found: FoundManifests::default(), headers };
    let is_overlay = all.headers.contains_key(path);
    all.add(path, found, !is_overlay);
    if is_overlay {
        all.add_bases(path)?;
    }
    let mut found = all.found;
    let mut seen = BTreeSet::new();
    found.files.retain(|file| seen.insert(file.path.clone()));
    Ok(found)
}

struct CommitOverlays<'a> {
    program: &'a GitCommand,
    commit: &'a str,
    limits: &'a Limits,
    found: FoundManifests,
    /// The overlays that are known so far, by directory.
    headers: BTreeMap<PathBuf, OverlayHeader>,
}

impl CommitOverlays<'_> {
    /// Adds what was found below a root, without the directories of other overlays.
    fn add(&mut self, root: &Path, found: FoundManifests, reports: bool) {
        let others: Vec<&PathBuf> =
            self.headers.keys().filter(|dir| dir.starts_with(root) && *dir != root).collect();
        let is_other = |path: &Path| others.iter().any(|dir| path.starts_with(dir));
        let shown: Vec<String> = others.iter().map(|dir| format!("{}/", display_path(dir))).collect();
        let is_other_name = |name: &str| shown.iter().any(|dir| name.starts_with(dir));
        if reports {
            for file in found.files.iter().filter(|file| is_overlay_file(&file.path.to_string_lossy())) {
                if file.path.parent().is_some_and(|dir| others.iter().any(|other| *other == dir)) {
                    let message = "the Overlay is skipped: manifests are read from a directory above it";
                    let hint = "pass --path of one overlay";
                    let problem = Problem::of_file(
                        display_path(&file.path).into(),
                        Code::MisplacedOverlay,
                        message.to_owned(),
                        Some(hint.to_owned()),
                    );
                    self.found.problems.push(problem);
                }
            }
        }
        let FoundManifests { files, problems, outside, lost } = found;
        self.found.files.extend(files.into_iter().filter(|file| !is_other(&file.path)));
        self.found.problems.extend(problems.into_iter().filter(|problem| !is_other_name(&problem.file)));
        self.found.outside.extend(outside);
        self.found.lost.extend(lost.into_iter().filter(|name| !is_other_name(name)));
    }

    /// Adds the bases of an overlay, and their bases.
    fn add_bases(&mut self, path: &Path) -> Result<(), ReadError> {
        let mut tree = list(self.program, self.commit, "")?;
        let mut pending: VecDeque<(PathBuf, NamedBase)> = VecDeque::new();
        self.name_bases(path, &mut pending);
        let mut walked: BTreeSet<PathBuf> = [path.to_path_buf()].into();
        let mut count = 0;
        while let Some((dir, named)) = pending.pop_front() {
            count += 1;
            // The layers report a base that is not a path in the commit.
            let below_root = Path::new("/").join(&dir);
            let Ok(base) = resolve_base(&below_root, &named.path) else { continue };
            let base = base.strip_prefix("/").unwrap_or(&base).to_path_buf();
            if count > MAX_BASES || !walked.insert(base.clone()) {
                continue;
            }
            if let Some(why) = tree.why_not_base(&base) {
                self.found.problems.push(named.problem(why, Some("name a file or directory of the commit")));
                continue;
            }
            let found = find(self.program, self.commit, &mut tree, &base)?;
            self.headers.extend(headers(self.program, &found.files, self.limits)?);
            self.add(&base, found, false);
            self.name_bases(&base, &mut pending);
        }
        Ok(())
    }

    /// Takes the bases of an overlay.
    fn name_bases(&mut self, dir: &Path, pending: &mut VecDeque<(PathBuf, NamedBase)>) {
        if let Some(header) = self.headers.get_mut(dir) {
            let named = std::mem::take(&mut header.bases).into_iter();
            pending.extend(named.map(|base| (dir.to_path_buf(), base)));
        }
    }
}

/// The overlays among the files, by directory.
fn headers(
    program: &GitCommand,
    files: &[FoundFile],
    limits: &Limits,
) -> Result<BTreeMap<PathBuf, OverlayHeader>, ReadError> {
    let is_small = |file: &&FoundFile| file.bytes <= limits.file_bytes;
    let named = files.iter().filter(|file| is_overlay_file(&file.path.to_string_lossy())).filter(is_small);
    let named: Vec<&FoundFile> = named.collect();
    let objects: Vec<(String, u64)> = named.iter().map(|file| (file.object.clone(), file.bytes)).collect();
    let mut all = BTreeMap::new();
    for (file, content) in named.iter().zip(contents(program, &objects)?) {
        let Ok(text) = String::from_utf8(content.to_vec()) else { continue };
        let name: Arc<str> = display_path(&file.path).into();
        let json = name.ends_with(".json");
        let source = SourceText::new(name, text, json, limits.documents);
        let dir = file.path.parent().unwrap_or(Path::new("")).to_path_buf();
        if let Some(header) = header(&source, limits) {
            all.entry(normalize(&dir).unwrap_or(dir)).or_insert(header);
        }
    }
    Ok(all)
}
