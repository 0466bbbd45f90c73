//! Files of a commit: listed and read from the objects of a repository, without a work tree.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::Arc;

use super::super::SourceError;
use super::command::GitCommand;
use super::commit_overlays;
use super::error::{EmptyCommit, ReadError, RepositoryError};
use super::tree::{FoundFile, FoundManifests, Tree};
use crate::manifest::{self, FileContent, Limits, Loaded, Problem, ReplacementText};

/// Maximum size of a commit's listing: about two million files.
const MAX_LISTING_BYTES: u64 = 256 << 20;
/// Maximum length of a symlink's target.
const MAX_LINK_BYTES: u64 = 4096;

/// The files of a commit, valid or not.
pub struct CommitFiles {
    pub files: Vec<FileContent>,
    pub problems: Vec<Problem>,
    /// Dangling symlinks.
    pub lost: Vec<String>,
}

/// The manifests of a commit below a path.
pub fn files(
    program: &GitCommand,
    commit: &str,
    path: &Path,
    limits: &Limits,
) -> Result<CommitFiles, SourceError> {
    let cannot = |source: ReadError| RepositoryError::Read {
        commit: commit.to_owned(),
        mirror: program.mirror.clone(),
        source,
    };
    let empty = |source| SourceError::Empty { tip: commit.to_owned(), source };
    let name = path.to_string_lossy();
    let mut tree = list(program, commit, &name).map_err(cannot)?;
    if tree.is_empty() {
        return Err(empty(match name.is_empty() {
            true => EmptyCommit::NoFiles,
            false => EmptyCommit::NoPath(name.into_owned()),
        }));
    }
    let found = find(program, commit, &mut tree, path).map_err(cannot)?;
    if found.files.is_empty() && found.problems.is_empty() {
        return Err(empty(EmptyCommit::NoManifests(path_prefix(path))));
    }
    let found = commit_overlays::with_bases(program, commit, path, found, limits).map_err(cannot)?;
    Ok(read(program, found, &name, limits).map_err(cannot)?)
}

/// The entries of a commit below a path.
pub fn list(program: &GitCommand, commit: &str, path: &str) -> Result<Tree, ReadError> {
    let mut args = vec!["ls-tree", "-r", "-t", "-l", "-z", "--full-tree", commit];
    args.extend((!path.is_empty()).then_some(path));
    let listed = program.local(&args, &[], MAX_LISTING_BYTES)?;
    match listed.is_well() {
        true => Ok(Tree::parse(&listed.out)?),
        false => Err(ReadError::Git { stderr: listed.stderr }),
    }
}

/// The manifests among the entries. Symlinks are resolved.
pub fn find(
    program: &GitCommand,
    commit: &str,
    tree: &mut Tree,
    path: &Path,
) -> Result<FoundManifests, ReadError> {
    let links = tree.links().into_iter().filter(|(_, bytes)| *bytes <= MAX_LINK_BYTES);
    let links: Vec<(String, u64)> = links.map(|(object, bytes)| (object.to_owned(), bytes)).collect();
    let targets = contents(program, &links)?;
    let targets = targets.into_iter().map(|target| OsString::from_vec(target.to_vec()));
    tree.targets = links.into_iter().map(|(object, _)| object).zip(targets).collect();
    let mut found = tree.find_manifests(path);
    for (link, there) in std::mem::take(&mut found.outside) {
        let there = there.to_string_lossy();
        let args = ["ls-tree", "-l", "-z", "--full-tree", commit, &*there];
        let listed = program.local(&args, &[], MAX_LISTING_BYTES)?;
        match Tree::parse(&listed.out)?.is_folder(Path::new(&*there)) {
            Some(true) => found.leads_out(&link),
            Some(false) => {}
            None => found.lost.push(manifest::display_path(&link)),
        }
    }
    Ok(found)
}

/// The contents of the found files.
fn read(
    program: &GitCommand,
    found: FoundManifests,
    path: &str,
    limits: &Limits,
) -> Result<CommitFiles, ReadError> {
    let FoundManifests { files: chosen, mut problems, lost, .. } = found;
    if let Some(problem) = manifest::too_large(path, chosen.iter().map(|file| file.bytes), limits) {
        problems.push(problem);
        return Ok(CommitFiles { files: Vec::new(), problems, lost });
    }
    // Files that are too large are not requested.
    let (small, large): (Vec<FoundFile>, Vec<FoundFile>) =
        chosen.into_iter().partition(|file| file.bytes <= limits.file_bytes);
    let objects: Vec<(String, u64)> = small.iter().map(|file| (file.object.clone(), file.bytes)).collect();
    let contents = contents(program, &objects)?;
    let none = large.iter().map(|_| Arc::from([]));
    let files =
        small.iter().chain(&large).zip(contents.into_iter().chain(none)).map(|(file, content)| FileContent {
            name: file.path.to_string_lossy().into_owned(),
            scope_dir: file.scope_dir(),
            bytes: file.bytes,
            content,
        });
    Ok(CommitFiles { files: files.collect(), problems, lost })
}

/// The contents of objects, in the same order.
pub fn contents(program: &GitCommand, objects: &[(String, u64)]) -> Result<Vec<Arc<[u8]>>, ReadError> {
    if objects.is_empty() {
        return Ok(Vec::new());
    }
    let asked: String = objects.iter().map(|(object, _)| format!("{object}\n")).collect();
    // Each object has a header line before it and a newline after it.
    let most = objects.iter().map(|(_, bytes)| bytes + 200).sum();
    let ended = program.local(&["cat-file", "--batch", "--buffer"], asked.as_bytes(), most)?;
    if !ended.is_well() {
        return Err(ReadError::Git { stderr: ended.stderr });
    }
    let mut rest = &ended.out[..];
    let mut contents = Vec::with_capacity(objects.len());
    for (object, bytes) in objects {
        let head = format!("{object} blob {bytes}\n");
        let (content, after) = rest
            .strip_prefix(head.as_bytes())
            .and_then(|rest| rest.split_at_checked(usize::try_from(*bytes).ok()?))
            .ok_or_else(|| ReadError::Object(object.clone()))?;
        contents.push(Arc::from(content));
        rest = after.strip_prefix(b"\n").unwrap_or(after);
    }
    Ok(contents)
}

pub fn load(files: &CommitFiles, limits: &Limits, stand_ins: &BTreeMap<String, ReplacementText>) -> Loaded {
    manifest::load_files(files.files.clone(), files.problems.clone(), limits, stand_ins)
}

/// Location of a path in the repository, for messages.
pub fn path_prefix(path: &Path) -> String {
    match path.as_os_str().is_empty() {
        true => "in it".to_owned(),
        false => format!("below {}", path.display()),
    }
}
