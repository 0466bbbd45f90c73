//! Manifest selection in a commit: files below a path, by the same rules as in directories.
//!
//! Pure: a listing in, a selection out.
//!
//! Names with a leading dot, files without a manifest extension, Abide's own configuration and submodules are skipped.
//! Symlinks are followed inside of the path only; each file is read once, by its own name rather than by a symlink's.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use crate::manifest::{self, Code, Problem};

/// Maximum number of symlinks on the way to a file, as in a file system.
const MAX_SYMLINKS: usize = 40;

/// A commit's entries below the path, and the path itself, by their paths in the repository.
#[derive(Debug, Default)]
pub struct Tree {
    entries: BTreeMap<PathBuf, TreeEntry>,
    /// Targets of symlinks, by object id.
    pub targets: BTreeMap<String, OsString>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeEntry {
    kind: Kind,
    pub object: String,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Link,
    Folder,
}

/// The selection below a path.
#[derive(Debug, Default)]
pub struct FoundManifests {
    pub files: Vec<FoundFile>,
    pub problems: Vec<Problem>,
    /// Symlinks without a manifest extension that leave the path, and their targets: if a target is a directory, its
    /// files are not read.
    pub outside: Vec<(PathBuf, PathBuf)>,
    /// The same for symlinks that are dangling, or leave the repository.
    pub lost: Vec<String>,
}

impl FoundManifests {
    pub fn problem(&mut self, path: &Path, message: String, hint: &str) {
        let name = manifest::display_path(path).into();
        self.problems.push(Problem::of_file(name, Code::Unreadable, message, Some(hint.to_owned())));
    }

    pub fn leads_out(&mut self, link: &Path) {
        let hint = "copy the target into the tree, or pass --path of a directory that contains both";
        self.problem(link, manifest::LEADS_OUT.to_owned(), hint);
    }
}

/// A file to read.
#[derive(Debug, PartialEq, Eq)]
pub struct FoundFile {
    pub path: PathBuf,
    pub object: String,
    pub bytes: u64,
}

impl FoundFile {
    /// The directory that Defaults and policies apply to it by.
    pub fn scope_dir(&self) -> PathBuf {
        Path::new("/").join(self.path.parent().unwrap_or(Path::new("")))
    }
}

/// A line of git's listing that is not understood.
#[derive(Debug, thiserror::Error)]
#[error("git lists {0:?}")]
pub struct ListingError(String);

impl Tree {
    /// Parses the output of `ls-tree -r -t -l -z`.
    pub fn parse(listing: &[u8]) -> Result<Tree, ListingError> {
        let mut tree = Tree::default();
        for line in listing.split(|byte| *byte == 0).filter(|line| !line.is_empty()) {
            let wrong = || ListingError(String::from_utf8_lossy(line).into_owned());
            let tab = line.iter().position(|byte| *byte == b'\t').ok_or_else(wrong)?;
            let head = std::str::from_utf8(&line[..tab]).map_err(|_| wrong())?;
            let words: Vec<&str> = head.split_ascii_whitespace().collect();
            let [mode, _, object, size] = words[..] else { return Err(wrong()) };
            let kind = match mode {
                "120000" => Kind::Link,
                "040000" => Kind::Folder,
                // A submodule: its files are not in this repository.
                "160000" => continue,
                _ => Kind::File,
            };
            let bytes = if kind == Kind::Folder { 0 } else { size.parse().map_err(|_| wrong())? };
            let path = PathBuf::from(OsStr::from_bytes(&line[tab + 1..]));
            tree.entries.insert(path, TreeEntry { kind, object: object.to_owned(), bytes });
        }
        Ok(tree)
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The objects with the targets of symlinks.
    pub fn links(&self) -> BTreeMap<&str, u64> {
        let links = self.entries.values().filter(|entry| entry.kind == Kind::Link);
        links.map(|entry| (entry.object.as_str(), entry.bytes)).collect()
    }

    /// Whether a path is a directory or another entry. `None`: it does not exist.
    pub fn is_folder(&self, path: &Path) -> Option<bool> {
        self.entries.get(path).map(|entry| entry.kind == Kind::Folder)
    }

    /// Why a path cannot be the base of an overlay.
    pub fn why_not_base(&self, path: &Path) -> Option<&'static str> {
        let kinds = path.ancestors().filter_map(|above| self.entries.get(above)).map(|entry| entry.kind);
        let is_there = path.as_os_str().is_empty() || self.entries.contains_key(path);
        match (is_there, kinds.into_iter().any(|kind| kind == Kind::Link)) {
            (_, true) => Some("is reached through a symbolic link"),
            (false, false) => Some("does not exist in the commit"),
            (true, false) => None,
        }
    }

    /// The manifests below a path of the repository, or the path itself if it is one.
    pub fn find_manifests(&self, root: &Path) -> FoundManifests {
        let mut walk = TreeWalker {
            tree: self,
            root,
            inside: BTreeMap::new(),
            seen: BTreeSet::new(),
            choice: FoundManifests::default(),
        };
        for path in self.entries.keys() {
            walk.inside.entry(path.parent().unwrap_or(Path::new(""))).or_default().push(path);
        }
        match self.entries.get(root).map(|entry| entry.kind) {
            Some(Kind::File) => walk.file(root, root),
            Some(Kind::Link) => {
                let message = "--path is a symbolic link".to_owned();
                walk.choice.problem(root, message, "pass the target of the link");
            }
            Some(Kind::Folder) | None => walk.directory(),
        }
        walk.choice
    }
}

struct TreeWalker<'a> {
    tree: &'a Tree,
    root: &'a Path,
    /// Entries of each directory.
    inside: BTreeMap<&'a Path, Vec<&'a Path>>,
    /// Resolved paths, so that a symlink and its target are read once.
    seen: BTreeSet<PathBuf>,
    choice: FoundManifests,
}

/// Target of a symlink.
enum LinkTarget {
    To(PathBuf),
    /// Outside of the path; `None`: outside of the repository.
    Out(Option<PathBuf>),
    Nowhere,
}

impl TreeWalker<'_> {
    fn directory(&mut self) {
        // Symlinks come last: a file is read by its own name rather than by a symlink's.
        let mut links = BTreeSet::new();
        self.below(self.root.to_path_buf(), self.root.to_path_buf(), &mut links);
        while let Some((link, real)) = links.pop_first() {
            self.link(&link, &real, &mut links);
        }
    }

    /// `path` is the displayed path, with names of symlinks; `real` the resolved one.
    fn below(&mut self, path: PathBuf, real: PathBuf, links: &mut BTreeSet<(PathBuf, PathBuf)>) {
        let mut pending = vec![(path, real)];
        while let Some((path, real)) = pending.pop() {
            if !self.seen.insert(real.clone()) {
                continue;
            }
            let is_root = path == self.root;
            for real in self.inside.get(real.as_path()).cloned().unwrap_or_default() {
                let (Some(name), Some(entry)) = (real.file_name(), self.tree.entries.get(real)) else {
                    continue;
                };
                if name.as_encoded_bytes().starts_with(b".") {
                    continue;
                }
                let path = path.join(name);
                match entry.kind {
                    Kind::Folder => pending.push((path, real.to_path_buf())),
                    Kind::Link => {
                        links.insert((path, real.to_path_buf()));
                    }
                    Kind::File if !manifest::is_manifest(&path) || (is_root && name == manifest::CONFIG) => {}
                    Kind::File => self.file(&path, real),
                }
            }
        }
    }

    fn link(&mut self, path: &Path, link: &Path, links: &mut BTreeSet<(PathBuf, PathBuf)>) {
        let real = match self.follow(link) {
            LinkTarget::To(real) => real,
            LinkTarget::Out(Some(there)) if !manifest::is_manifest(path) => {
                return self.choice.outside.push((path.to_path_buf(), there));
            }
            LinkTarget::Nowhere | LinkTarget::Out(_) if !manifest::is_manifest(path) => {
                return self.choice.lost.push(manifest::display_path(path));
            }
            LinkTarget::Nowhere => {
                let hint = "add the target to the repository";
                return self.choice.problem(path, "dangling symbolic link".to_owned(), hint);
            }
            LinkTarget::Out(_) => return self.choice.leads_out(path),
        };
        match self.tree.entries.get(&real).map(|entry| entry.kind) {
            Some(Kind::File) if manifest::is_manifest(path) => self.file(path, &real),
            Some(Kind::File) => {}
            Some(Kind::Folder | Kind::Link) | None => self.below(path.to_path_buf(), real, links),
        }
    }

    /// Resolves component by component, as a file system does. Outside of the path, only its parents are known.
    fn follow(&self, link: &Path) -> LinkTarget {
        let mut pending: VecDeque<OsString> = path_components(link);
        let (mut here, mut links) = (PathBuf::new(), 0);
        while let Some(part) = pending.pop_front() {
            match part.as_bytes() {
                b"." => continue,
                b"/" => return LinkTarget::Out(None),
                b".." => {
                    if !here.pop() {
                        return LinkTarget::Out(None);
                    }
                    continue;
                }
                _ => here.push(&part),
            }
            if !here.starts_with(self.root) {
                match self.root.starts_with(&here) {
                    true => continue,
                    false => return LinkTarget::Out(by_name(here, pending)),
                }
            }
            match self.tree.entries.get(&here) {
                Some(TreeEntry { kind: Kind::Link, object, .. }) => {
                    links += 1;
                    let Some(target) = self.tree.targets.get(object) else { return LinkTarget::Nowhere };
                    if links > MAX_SYMLINKS || target.is_empty() {
                        return LinkTarget::Nowhere;
                    }
                    here.pop();
                    path_components(Path::new(target))
                        .into_iter()
                        .rev()
                        .for_each(|part| pending.push_front(part));
                }
                Some(TreeEntry { kind: Kind::File, .. }) if !pending.is_empty() => {
                    return LinkTarget::Nowhere;
                }
                Some(_) => {}
                None if here == self.root => {}
                None => return LinkTarget::Nowhere,
            }
        }
        if here.starts_with(self.root) { LinkTarget::To(here) } else { LinkTarget::Out(Some(here)) }
    }

    fn file(&mut self, path: &Path, real: &Path) {
        let Some(TreeEntry { object, bytes, .. }) = self.tree.entries.get(real) else { return };
        if self.seen.insert(real.to_path_buf()) {
            self.choice.files.push(FoundFile {
                path: path.to_path_buf(),
                object: object.clone(),
                bytes: *bytes,
            });
        }
    }
}

/// The rest of a path, resolved without symlinks.
fn by_name(mut here: PathBuf, rest: VecDeque<OsString>) -> Option<PathBuf> {
    for part in rest {
        match part.as_bytes() {
            b"." => {}
            b"/" => return None,
            b".." => here.pop().then_some(())?,
            _ => here.push(part),
        }
    }
    Some(here)
}

fn path_components(path: &Path) -> VecDeque<OsString> {
    path.components()
        .map(|part| match part {
            Component::RootDir | Component::Prefix(_) => OsString::from("/"),
            Component::CurDir => OsString::from("."),
            Component::ParentDir => OsString::from(".."),
            Component::Normal(name) => OsString::from_vec(name.as_bytes().to_vec()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(entries: &[(&str, &str)]) -> Tree {
        let mut listing = Vec::new();
        let mut targets = BTreeMap::new();
        for (at, (path, target)) in entries.iter().enumerate() {
            let (mode, size) = match *target {
                "" => ("100644 blob", "5"),
                "/" => ("040000 tree", "-"),
                _ => ("120000 blob", "9"),
            };
            listing.extend(format!("{mode} o{at} {size}\t{path}\0").into_bytes());
            targets.insert(format!("o{at}"), OsString::from(target));
        }
        Tree { targets, ..Tree::parse(&listing).expect("a listing") }
    }

    fn chosen(tree: &Tree, root: &str) -> (Vec<String>, Vec<String>) {
        let FoundManifests { files: chosen, problems, .. } = tree.find_manifests(Path::new(root));
        let mut files: Vec<String> = chosen.iter().map(|file| file.path.display().to_string()).collect();
        files.sort();
        (files, problems.iter().map(|problem| format!("{}: {}", problem.file, problem.message)).collect())
    }

    #[test]
    fn the_rules_are_those_of_directories() {
        let all = tree(&[
            ("m", "/"),
            ("m/a.yaml", ""),
            ("m/abide.yaml", ""),
            ("m/.hidden.yaml", ""),
            ("m/read.me", ""),
            ("m/sub", "/"),
            ("m/sub/b.JSON", ""),
            ("m/sub/abide.yaml", ""),
            ("m/.data", "/"),
            ("m/.data/c.yml", ""),
        ]);
        let (files, problems) = chosen(&all, "m");
        assert_eq!(files, ["m/a.yaml", "m/sub/abide.yaml", "m/sub/b.JSON"]);
        assert!(problems.is_empty());
        assert_eq!(chosen(&all, "m/sub/b.JSON").0, ["m/sub/b.JSON"]);
    }

    #[test]
    fn links_are_followed_inside_and_not_out() {
        let all = tree(&[
            ("m", "/"),
            ("m/.data", "/"),
            ("m/.data/c.yaml", ""),
            ("m/c.yaml", ".data/c.yaml"),
            ("m/again.yaml", "../m/./c.yaml"),
            ("m/data", ".data"),
            ("m/out.yaml", "../other/x.yaml"),
            ("m/passwd.yaml", "/etc/passwd"),
            ("m/gone.yaml", "nothing.yaml"),
            ("m/loop.yaml", "loop.yaml"),
            ("m/loops", "loops"),
            ("m/team", "../shared/./x/../team"),
            ("m/tmp", "/tmp"),
        ]);
        let choice = all.find_manifests(Path::new("m"));
        assert_eq!(choice.outside, [(PathBuf::from("m/team"), PathBuf::from("shared/team"))]);
        assert_eq!(choice.lost, ["m/loops", "m/tmp"]);
        let (files, problems) = chosen(&all, "m");
        assert_eq!(files, ["m/again.yaml"], "the file behind three names is read once");
        let out = "the link points outside of the tree and is not followed";
        let nowhere = "dangling symbolic link";
        assert_eq!(
            problems,
            [
                format!("m/gone.yaml: {nowhere}"),
                format!("m/loop.yaml: {nowhere}"),
                format!("m/out.yaml: {out}"),
                format!("m/passwd.yaml: {out}")
            ]
        );
    }
}
