//! Paths in a git work tree: their source, and their earlier versions.
//!
//! git never runs in the work tree itself. Its repository is located manually, so that it may belong to another user,
//! as on many CI runners. It is read like our mirrors, with its own configuration and ours only.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::address::without_credentials;
use super::command::GitCommand;
use super::commit_files::{files, load};
use super::config::GitConfig;
use super::poll::mirror;
use crate::manifest::{FileContent, Limits, Loaded};

/// Maximum number of commits searched.
const MAX_COMMITS_ARG: &str = "-200";

/// Relation of a commit to the checked-out one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Containment {
    Head,
    Earlier,
    No,
}

/// A path in a work tree, or in one of our mirrors.
pub struct RepositoryPath {
    program: GitCommand,
    /// The newest commit to search.
    tip: String,
    /// From the root of the repository; empty for all of it.
    path: PathBuf,
}

/// The repository of a path; `None`: not in a work tree.
pub fn find(path: &Path) -> Option<RepositoryPath> {
    let real = path.canonicalize().ok()?;
    let root = real.ancestors().find(|folder| folder.join(".git").exists())?;
    let path = real.strip_prefix(root).ok()?.to_path_buf();
    Some(RepositoryPath { program: program(repository(root)?), tip: "HEAD".to_owned(), path })
}

/// A path in the mirror of the git source, from a commit on.
pub fn in_mirror(config: &GitConfig, commit: &str) -> RepositoryPath {
    let path = config.path.clone();
    RepositoryPath { program: program(mirror(config)), tip: commit.to_owned(), path }
}

fn program(mirror: PathBuf) -> GitCommand {
    // Nothing is fetched.
    let (timeout, max_pack) = (Duration::from_secs(10), 0);
    GitCommand { mirror, timeout, max_pack, stop: Arc::new(AtomicBool::new(false)) }
}

/// The repository of a work tree: inside it, or where its `.git` file points.
fn repository(root: &Path) -> Option<PathBuf> {
    let there = root.join(".git");
    if there.is_dir() {
        return Some(there);
    }
    let text = std::fs::read_to_string(&there).ok()?;
    root.join(text.strip_prefix("gitdir:")?.trim()).canonicalize().ok()
}

impl RepositoryPath {
    /// The remote's URL, or the first commit, and the path below it. `None`: there is neither.
    pub fn source(&self) -> Option<String> {
        let below = self.path.to_string_lossy();
        let named = self.url().or_else(|| self.first_commit())?;
        Some(source(&named, &below))
    }

    fn url(&self) -> Option<String> {
        let url = |name: &str| self.git_output(&["config", "--get", &format!("remote.{name}.url")]);
        url("origin").or_else(|| {
            let remotes =
                self.git_output(&["config", "--name-only", "--get-regexp", r"^remote\..*\.url$"])?;
            let mut names: Vec<&str> = remotes.lines().collect();
            names.sort_unstable();
            self.git_output(&["config", "--get", names.first()?])
        })
    }

    fn first_commit(&self) -> Option<String> {
        let roots = self.git_output(&["rev-list", "--max-parents=0", "HEAD"])?;
        roots.lines().min().map(str::to_owned)
    }

    fn git_output(&self, args: &[&str]) -> Option<String> {
        let ended = self.program.local(args, &[], 1 << 20).ok().filter(|ended| ended.is_well())?;
        let text = String::from_utf8(ended.out).ok()?.trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// Whether the checked-out commit is a commit, or has it in its history. `None`: there is no commit.
    pub fn contains(&self, commit: &str) -> Option<Containment> {
        let head = self.git_output(&["rev-parse", "HEAD"])?;
        if head == commit {
            return Some(Containment::Head);
        }
        // A commit id only: it may come from a store.
        let is_id = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_hexdigit());
        let args = ["merge-base", "--is-ancestor", commit, "HEAD"];
        let is_ancestor = is_id && self.program.local(&args, &[], 1 << 10).is_ok_and(|ended| ended.is_well());
        Some(if is_ancestor { Containment::Earlier } else { Containment::No })
    }

    /// Declarations at the path, commit by commit, newest first, until `seen` is satisfied or the time limit passes.
    pub fn history(&self, limits: &Limits, deadline: Instant, mut seen: impl FnMut(&Loaded) -> bool) {
        let path = self.path.to_string_lossy();
        let mut args = vec!["rev-list", MAX_COMMITS_ARG, &self.tip, "--"];
        // The bases of an overlay are outside of the path.
        let is_outside = |file: &FileContent| !Path::new(&file.name).starts_with(&self.path);
        let has_bases = files(&self.program, &self.tip, &self.path, limits)
            .is_ok_and(|files| files.files.iter().any(is_outside));
        args.extend((!path.is_empty() && !has_bases).then_some(&*path));
        let commits = self.git_output(&args).unwrap_or_default();
        for commit in commits.lines() {
            if Instant::now() >= deadline {
                return;
            }
            let Ok(files) = files(&self.program, commit, &self.path, limits) else { continue };
            if seen(&load(&files, limits, &BTreeMap::new())) {
                return;
            }
        }
    }
}

/// One name per source for all readers: without credentials and optional suffixes.
pub fn source(url: &str, path: &str) -> String {
    let url = without_credentials(url);
    let url = url.trim_end_matches('/');
    let url = url.strip_suffix(".git").unwrap_or(url).trim_end_matches('/');
    match path.is_empty() {
        true => url.to_owned(),
        false => format!("{url}//{path}"),
    }
}

/// The canonical path, except for its last symlink: a swapped or dangling symlink stays the same source.
fn resolve_location(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let is_link = whole.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
    let real = whole.canonicalize().ok().filter(|_| !is_link);
    let unresolved = || Some(whole.parent()?.canonicalize().ok()?.join(whole.file_name()?));
    real.or_else(unresolved).unwrap_or(whole)
}

/// Source of manifests: for each path its repository and path in it, otherwise its path on this machine.
pub fn of_paths(paths: &[PathBuf]) -> String {
    let of = |path: &PathBuf| {
        if path.as_os_str() == "-" {
            return "standard input".to_owned();
        }
        find(path)
            .and_then(|inside| inside.source())
            .unwrap_or_else(|| resolve_location(path).to_string_lossy().into_owned())
    };
    let mut all: Vec<String> = paths.iter().map(of).collect();
    all.sort();
    all.dedup();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_has_one_name() {
        for (url, path, name) in [
            ("https://u:p@h/x.git", "", "https://h/x"),
            ("https://token@h/x/", "m/a", "https://h/x//m/a"),
            ("ssh://git:p@h/x.git", "", "ssh://git@h/x"),
            ("https://u:p@s/s@h/x.git", "", "https://***@h/x"),
            ("https://h/x?private_token=t", "m", "https://h/x?private_token=***//m"),
            ("git@h:x.git", "m", "git@h:x//m"),
            ("/srv/x.git", "m", "/srv/x//m"),
        ] {
            assert_eq!(source(url, path), name);
        }
    }
}
