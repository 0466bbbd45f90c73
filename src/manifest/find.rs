//! Manifest discovery: walks paths, and reads files into texts.
//!
//! Reads never block: a FIFO, a device or a link out of the tree is a problem. An oversized file is rejected before it is
//! read.

mod bases;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::bases::PendingBases;
pub use self::bases::{OverlayTree, overlays};
use super::inventory;
use super::layers::header::is_overlay_file;
use super::limits::Limits;
use super::problem::{Code, Problem};
use super::text::{self, SourceText};

/// A file to read.
#[derive(Debug)]
pub struct Candidate {
    /// Display name.
    pub name: Arc<str>,
    at: FileOrigin,
    /// Directory that decides which Defaults and policies apply.
    pub scope_dir: PathBuf,
    bytes: u64,
    /// Metadata from before the file is read. `None` if the origin is not a file.
    pub stamp: Option<FileStamp>,
}

impl Candidate {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the candidate was found at this path.
    pub fn is_path(&self, path: &Path) -> bool {
        matches!(&self.at, FileOrigin::File(at) if at == path)
    }

    /// Replaces size and stamp by newer metadata.
    pub fn update_metadata(&mut self, meta: &fs::Metadata) {
        (self.bytes, self.stamp) = (meta.len(), Some(FileStamp::of(meta)));
    }
}

/// Metadata that detect a change without reading the file: device, inode, size, mode, mtime and ctime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp([u64; 4], [i64; 4]);

impl FileStamp {
    fn of(meta: &fs::Metadata) -> FileStamp {
        FileStamp(
            [meta.dev(), meta.ino(), meta.len(), u64::from(meta.mode())],
            [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()],
        )
    }

    /// Time of the last change in seconds, by the file system's clock.
    pub fn changed_secs(&self) -> i64 {
        self.1[0].max(self.1[2])
    }
}

#[derive(Debug)]
enum FileOrigin {
    Stdin,
    File(PathBuf),
    Content(Arc<[u8]>),
}

/// A file that the caller has read, for example from a commit.
#[derive(Clone, Debug)]
pub struct FileContent {
    /// Display name.
    pub name: String,
    /// Directory that decides which Defaults and policies apply.
    pub scope_dir: PathBuf,
    /// File size. `content` may be empty for an oversized file.
    pub bytes: u64,
    pub content: Arc<[u8]>,
}

/// A text that replaces a file's, such as its last good version.
#[derive(Clone, Debug)]
pub struct ReplacementText {
    pub scope_dir: PathBuf,
    pub text: Arc<str>,
}

/// Name of `-` in problems.
pub const STDIN: &str = "<stdin>";
/// Name of Abide's configuration file, which may be in the root of a manifest tree.
pub const CONFIG: &str = "abide.yaml";

#[derive(Debug, Default)]
pub struct FoundFiles {
    pub files: Vec<Candidate>,
    pub problems: Vec<Problem>,
    /// The tree contains links, so a file may have several names.
    pub has_links: bool,
    /// Dangling links whose names are not manifest names. A link may have pointed to a directory before.
    pub lost: Vec<String>,
    /// Files and directories that are read with the paths, because overlays name them.
    pub bases: Vec<PathBuf>,
}

/// Finds all manifest files below the paths, each real file once, sorted by name.
pub fn find(paths: &[PathBuf], limits: &Limits) -> FoundFiles {
    let mut walk = FileWalker::new(limits);
    for path in paths {
        walk.root(path);
    }
    walk.pending_bases();
    let mut found = walk.found;
    found.files.sort_by(|a, b| a.name.cmp(&b.name));
    // The limit applies to all paths together.
    let too_large =
        |path: &PathBuf| too_large(&display_path(path), found.files.iter().map(|file| file.bytes), limits);
    let problems: Vec<Problem> = paths.iter().filter_map(too_large).collect();
    if !problems.is_empty() {
        found.problems.extend(problems);
        found.files.clear();
    }
    found
}

/// The problem of a tree that exceeds the total size limit. None of its files is read.
pub fn too_large(name: &str, sizes: impl Iterator<Item = u64>, limits: &Limits) -> Option<Problem> {
    // An oversized file has its own problem, reported when it is read.
    let total = sizes.filter(|bytes| *bytes <= limits.file_bytes).fold(0, u64::saturating_add);
    if total <= limits.tree_bytes {
        return None;
    }
    let message = format!("the manifests have {total} bytes in total, more than {}", limits.tree_bytes);
    let hint = Some("if this is intended, raise --max-tree-bytes".to_owned());
    Some(Problem::of_file(name.into(), Code::TooLarge, message, hint))
}

impl FoundFiles {
    /// Number of files. Snapshots of inventories do not count.
    pub fn len(&self) -> usize {
        self.files.iter().filter(|file| inventory::name_of_file(&file.name).is_none()).count()
    }

    /// Candidates for stand-ins of files that were not found.
    pub fn missing_stand_ins(&self, stand_ins: &BTreeMap<String, ReplacementText>) -> Vec<Candidate> {
        let is_seen = |name: &str| self.files.binary_search_by(|file| (*file.name).cmp(name)).is_ok();
        let missing = stand_ins.iter().filter(|(name, _)| !is_seen(name));
        let candidate =
            |(name, ReplacementText { scope_dir, text }): (&String, &ReplacementText)| Candidate {
                name: name.as_str().into(),
                at: FileOrigin::Content(Arc::from(Arc::clone(text))),
                scope_dir: scope_dir.clone(),
                bytes: text.len() as u64,
                stamp: None,
            };
        missing.map(candidate).collect()
    }
}

/// Found files from contents that the caller has read, sorted by name.
pub fn from_contents(files: Vec<FileContent>, problems: Vec<Problem>) -> FoundFiles {
    let candidate = |file: FileContent| Candidate {
        name: display_path(Path::new(&file.name)).into(),
        at: FileOrigin::Content(file.content),
        scope_dir: file.scope_dir,
        bytes: file.bytes,
        stamp: None,
    };
    let mut files: Vec<Candidate> = files.into_iter().map(candidate).collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    FoundFiles { files, problems, ..FoundFiles::default() }
}

struct FileWalker<'a> {
    found: FoundFiles,
    /// Canonical paths, so that a link and its target are read once.
    seen: HashSet<PathBuf>,
    limits: &'a Limits,
    bases: PendingBases,
}

impl<'a> FileWalker<'a> {
    fn new(limits: &'a Limits) -> FileWalker<'a> {
        FileWalker {
            found: FoundFiles::default(),
            seen: HashSet::new(),
            limits,
            bases: PendingBases::default(),
        }
    }

    fn problem(&mut self, path: &Path, message: String, hint: Option<&str>) {
        let problem =
            Problem::of_file(display_path(path).into(), Code::Unreadable, message, hint.map(str::to_owned));
        self.found.problems.push(problem);
    }

    fn root(&mut self, path: &Path) {
        if path.as_os_str() == "-" {
            if self.seen.insert(PathBuf::from(STDIN)) {
                let scope_dir = PathBuf::from(STDIN);
                let (name, at) = (STDIN.into(), FileOrigin::Stdin);
                self.found.files.push(Candidate { name, at, scope_dir, bytes: 0, stamp: None });
            }
            return;
        }
        // A root may be a link; a link below it must not point out of the tree.
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(error) => {
                return self.problem(path, format!("cannot read the file: {}", reason(&error)), None);
            }
        };
        if real.is_dir() {
            let is_layered = self.enter_overlay(path, &real);
            self.directory(path, &real, is_layered);
        } else if is_overlay_file(&display_path(path)) && self.is_overlay(path) {
            // The file means its directory.
            let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            self.found.bases.push(dir.to_path_buf());
            self.root(dir);
        } else {
            let scope_dir = real.parent().unwrap_or(Path::new("/")).to_path_buf();
            // A shell glob such as `*.yaml` may name links whose targets the user did not check.
            if real.is_file() && leads_out(path, &real) {
                return self.problem(path, LEADS_OUT.to_owned(), Some("pass the target file instead"));
            }
            self.file(path, real, scope_dir);
        }
    }

    /// `is_layered`: the directory belongs to an overlay, so that others below it are skipped.
    fn directory(&mut self, path: &Path, real: &Path, is_layered: bool) {
        // Links are followed last, so that a file keeps its own name rather than a link's.
        let mut links = BTreeSet::new();
        self.bases.is_layered = is_layered;
        self.below(path.to_path_buf(), real.to_path_buf(), real, &mut links);
        self.found.has_links |= !links.is_empty();
        while let Some((link, scope_dir)) = links.pop_first() {
            self.link(&link, &scope_dir, real, &mut links);
        }
    }

    /// `scope_dir` is the position of `path` in the tree: the canonical root, then the names as the user sees them.
    fn below(
        &mut self,
        path: PathBuf,
        scope_dir: PathBuf,
        root: &Path,
        links: &mut BTreeSet<(PathBuf, PathBuf)>,
    ) {
        let mut pending = vec![(path, scope_dir)];
        while let Some((path, scope_dir)) = pending.pop() {
            let folder = match path.canonicalize() {
                Ok(real) if self.seen.insert(real.clone()) => real,
                Ok(_) => continue,
                Err(error) => {
                    self.problem(&path, format!("cannot read the directory: {}", reason(&error)), None);
                    continue;
                }
            };
            let entries =
                match fs::read_dir(&path).and_then(|entries| entries.collect::<io::Result<Vec<_>>>()) {
                    Ok(entries) => entries,
                    Err(error) => {
                        self.problem(&path, format!("cannot read the directory: {}", reason(&error)), None);
                        continue;
                    }
                };
            if scope_dir != *root && self.is_other_overlay(&entries) {
                self.seen.remove(&folder);
                continue;
            }
            for entry in entries {
                let (name, path) = (entry.file_name(), entry.path());
                if name.as_encoded_bytes().starts_with(b".") {
                    continue;
                }
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => pending.push((path, scope_dir.join(name))),
                    Ok(kind) if kind.is_symlink() => {
                        links.insert((path, scope_dir.join(name)));
                    }
                    Ok(_) if !is_manifest(&path) || (scope_dir == *root && name == CONFIG) => {}
                    Ok(kind) if kind.is_file() => {
                        // Not a link: the canonical path is known.
                        self.file(&path, folder.join(&name), scope_dir.clone());
                    }
                    Ok(_) => self.problem(&path, NOT_A_FILE.to_owned(), None),
                    Err(error) => {
                        self.problem(&path, format!("cannot read the file: {}", reason(&error)), None)
                    }
                }
            }
        }
    }

    fn link(&mut self, link: &Path, scope_dir: &Path, root: &Path, links: &mut BTreeSet<(PathBuf, PathBuf)>) {
        let real = match link.canonicalize() {
            Ok(real) => real,
            // A dangling or looping link matters only if it pointed to manifests before.
            Err(_) if !is_manifest(link) => return self.found.lost.push(display_path(link)),
            Err(error) => {
                return self.problem(link, format!("cannot follow the link: {}", reason(&error)), None);
            }
        };
        let is_dir = real.is_dir();
        if !is_dir && !is_manifest(link) {
            return;
        }
        if !real.starts_with(root) {
            let hint = "copy the target into the tree, or pass the other tree as a second PATH";
            return self.problem(link, LEADS_OUT.to_owned(), Some(hint));
        }
        if is_dir {
            self.below(link.to_path_buf(), scope_dir.to_path_buf(), root, links);
        } else {
            self.file(link, real, scope_dir.parent().unwrap_or(root).to_path_buf());
        }
    }

    fn file(&mut self, path: &Path, real: PathBuf, scope_dir: PathBuf) {
        if !self.seen.insert(real) {
            return;
        }
        match fs::metadata(path) {
            Ok(meta) if meta.is_file() => {
                let name = display_path(path).into();
                self.found.files.push(Candidate {
                    name,
                    at: FileOrigin::File(path.to_path_buf()),
                    scope_dir,
                    bytes: meta.len(),
                    stamp: Some(FileStamp::of(&meta)),
                });
            }
            Ok(_) => self.problem(path, NOT_A_FILE.to_owned(), Some("`-` reads standard input")),
            Err(error) => self.problem(path, format!("cannot read the file: {}", reason(&error)), None),
        }
    }
}

pub const LEADS_OUT: &str = "the link points outside of the tree and is not followed";
const NOT_A_FILE: &str =
    "not a regular file or directory (a FIFO, a socket or a device), so it is not opened";

/// Reads one file into text, split into documents.
pub fn read(file: &Candidate, limits: &Limits) -> Result<SourceText, Problem> {
    let bytes = bytes(file, limits)?;
    let text = text::decode(bytes)
        .map_err(|(fault, text)| SourceText::new(file.name.clone(), text, false, 0).problem(fault))?;
    let json = match Path::new(&*file.name).extension().and_then(|e| e.to_str()) {
        Some("yaml" | "yml" | "YAML" | "YML") => false,
        Some("json" | "JSON") => true,
        // Standard input and other extensions: JSON only if it parses as JSON.
        _ => text.trim_start().starts_with('{') && text::is_json(&text),
    };
    Ok(SourceText::new(file.name.clone(), text, json, limits.documents))
}

/// Content of a file, up to the size limit.
pub fn bytes(file: &Candidate, limits: &Limits) -> Result<Vec<u8>, Problem> {
    let unreadable = |error: io::Error| {
        Problem::of_file(
            file.name.clone(),
            Code::Unreadable,
            format!("cannot read the file: {}", reason(&error)),
            None,
        )
    };
    let too_large = || {
        let message = format!("the file is larger than {} bytes", limits.file_bytes);
        let hint = Some("if this is intended, raise --max-file-bytes".to_owned());
        Problem::of_file(file.name.clone(), Code::TooLarge, message, hint)
    };
    if file.bytes > limits.file_bytes {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(file.bytes as usize);
    // One byte beyond the limit detects a file that grew, or whose metadata are wrong.
    let most = limits.file_bytes.saturating_add(1);
    match &file.at {
        FileOrigin::Stdin => io::stdin().lock().take(most).read_to_end(&mut bytes).map_err(unreadable)?,
        FileOrigin::File(path) => {
            open(path).map_err(unreadable)?.take(most).read_to_end(&mut bytes).map_err(unreadable)?
        }
        FileOrigin::Content(content) => content[..].take(most).read_to_end(&mut bytes).map_err(unreadable)?,
    };
    if bytes.len() as u64 > limits.file_bytes {
        return Err(too_large());
    }
    Ok(bytes)
}

/// Whether a link points outside of its own directory.
fn leads_out(path: &Path, real: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    path.is_symlink() && parent.canonicalize().is_ok_and(|parent| !real.starts_with(parent))
}

/// Opens a file non-blocking, in case it was replaced by a FIFO since the walk.
fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other(NOT_A_FILE)) }
}

pub fn is_manifest(path: &Path) -> bool {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    ["yaml", "yml", "json"].iter().any(|known| extension.eq_ignore_ascii_case(known))
}

pub fn display_path(path: &Path) -> String {
    let text = path.strip_prefix("./").unwrap_or(path).to_string_lossy();
    // A file name may contain terminal escape sequences.
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}
