//! Paths → files → texts. Nothing here waits: a FIFO, a device or a link out of the tree is a problem, and a file
//! is refused by its size before it is read.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::limits::Limits;
use super::problem::{Code, Problem};
use super::text::{self, SourceText};

/// A file to be read.
#[derive(Debug)]
pub struct Candidate {
    /// As people write it.
    pub name: Arc<str>,
    at: FileOrigin,
    /// The directory that Defaults and policies reach it by.
    pub scope_dir: PathBuf,
    bytes: u64,
    /// What its metadata said before it was read; of what is no file, nothing.
    pub stamp: Option<FileStamp>,
}

impl Candidate {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Is this the file itself, under this name?
    pub fn is_path(&self, path: &Path) -> bool {
        matches!(&self.at, FileOrigin::File(at) if at == path)
    }

    /// Its metadata are others than when it was found.
    pub fn update_metadata(&mut self, meta: &fs::Metadata) {
        (self.bytes, self.stamp) = (meta.len(), Some(FileStamp::of(meta)));
    }
}

/// What tells that a file is the same as before without reading it: device, number, size, mode, and both times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp([u64; 4], [i64; 4]);

impl FileStamp {
    fn of(meta: &fs::Metadata) -> FileStamp {
        FileStamp(
            [meta.dev(), meta.ino(), meta.len(), u64::from(meta.mode())],
            [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()],
        )
    }

    /// The second in which it last changed, by the file system's clock.
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

/// A file that somebody else has read, out of a commit, say.
#[derive(Clone, Debug)]
pub struct FileContent {
    /// As people know it.
    pub name: String,
    /// The directory that Defaults and policies reach it by.
    pub scope_dir: PathBuf,
    /// How large it is; one that is too large need not have been read.
    pub bytes: u64,
    pub content: Arc<[u8]>,
}

/// A text in place of a file's: the last good one, say.
#[derive(Clone, Debug)]
pub struct StandIn {
    pub scope_dir: PathBuf,
    pub text: Arc<str>,
}

/// What `-` is called in problems.
pub const STDIN: &str = "<stdin>";
/// The configuration of Abide itself, where people keep it beside their manifests.
pub const CONFIG: &str = "abide.yaml";

#[derive(Debug, Default)]
pub struct FoundFiles {
    pub files: Vec<Candidate>,
    pub problems: Vec<Problem>,
    /// A file may have another name as well.
    pub has_links: bool,
    /// Links that lead nowhere, by names that no manifest has: perhaps once to a folder.
    pub lost: Vec<String>,
}

/// Every manifest file below the paths, each real file once, in the order of their names.
pub fn find(paths: &[PathBuf], limits: &Limits) -> FoundFiles {
    let mut walk = FileWalker { found: FoundFiles::default(), seen: HashSet::new() };
    for path in paths {
        walk.root(path);
    }
    let mut found = walk.found;
    found.files.sort_by(|a, b| a.name.cmp(&b.name));
    // All of it, wherever it stands.
    let too_large =
        |path: &PathBuf| too_large(&display_path(path), found.files.iter().map(|file| file.bytes), limits);
    let problems: Vec<Problem> = paths.iter().filter_map(too_large).collect();
    if !problems.is_empty() {
        found.problems.extend(problems);
        found.files.clear();
    }
    found
}

/// Files of these sizes are too much together: nothing of it is read.
pub fn too_large(name: &str, sizes: impl Iterator<Item = u64>, limits: &Limits) -> Option<Problem> {
    // A file that is too large by itself is refused by itself, when it comes to be read.
    let total = sizes.filter(|bytes| *bytes <= limits.file_bytes).fold(0, u64::saturating_add);
    if total <= limits.tree_bytes {
        return None;
    }
    let message = format!("the manifests hold {total} bytes, more than {} in all", limits.tree_bytes);
    let hint = Some("if that is meant, raise --max-tree-bytes".to_owned());
    Some(Problem::of_file(name.into(), Code::TooLarge, message, hint))
}

impl FoundFiles {
    /// Files that were not found, and have a stand-in.
    pub fn missing_stand_ins(&self, stand_ins: &BTreeMap<String, StandIn>) -> Vec<Candidate> {
        let is_seen = |name: &str| self.files.binary_search_by(|file| (*file.name).cmp(name)).is_ok();
        let unseen = stand_ins.iter().filter(|(name, _)| !is_seen(name));
        let candidate = |(name, StandIn { scope_dir, text }): (&String, &StandIn)| Candidate {
            name: name.as_str().into(),
            at: FileOrigin::Content(Arc::from(Arc::clone(text))),
            scope_dir: scope_dir.clone(),
            bytes: text.len() as u64,
            stamp: None,
        };
        unseen.map(candidate).collect()
    }
}

/// What somebody else has found and read, in the order of the names.
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
    FoundFiles { files, problems, has_links: false, lost: Vec::new() }
}

struct FileWalker {
    found: FoundFiles,
    /// Real paths, so that a link and its target are read once.
    seen: HashSet<PathBuf>,
}

impl FileWalker {
    fn problem(&mut self, path: &Path, message: String, hint: Option<&str>) {
        let problem =
            Problem::of_file(display_path(path).into(), Code::Unreadable, message, hint.map(str::to_owned));
        self.found.problems.push(problem);
    }

    fn root(&mut self, path: &Path) {
        if path.as_os_str() == "-" {
            if self.seen.insert(PathBuf::from(STDIN)) {
                let home = PathBuf::from(STDIN);
                let (name, at) = (STDIN.into(), FileOrigin::Stdin);
                self.found.files.push(Candidate { name, at, scope_dir: home, bytes: 0, stamp: None });
            }
            return;
        }
        // What the user names may itself be a link; what is found below it may not lead out.
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(error) => {
                return self.problem(path, format!("cannot read it: {}", reason(&error)), None);
            }
        };
        if real.is_dir() {
            self.directory(path, &real);
        } else {
            let home = real.parent().unwrap_or(Path::new("/")).to_path_buf();
            // `validate *.yaml` names links too, and nobody has looked where they lead.
            if real.is_file() && leads_out(path, &real) {
                return self.problem(path, LEADS_OUT.to_owned(), Some("name the file itself"));
            }
            self.file(path, real, home);
        }
    }

    fn directory(&mut self, path: &Path, real: &Path) {
        // Links come last: a file is known by its own name rather than by a link's.
        let mut links = BTreeSet::new();
        self.below(path.to_path_buf(), real.to_path_buf(), real, &mut links);
        self.found.has_links |= !links.is_empty();
        while let Some((link, home)) = links.pop_first() {
            self.link(&link, &home, real, &mut links);
        }
    }

    /// `home` is where `path` stands in the tree: its real root, and the way from there by the names people see.
    fn below(&mut self, path: PathBuf, home: PathBuf, root: &Path, links: &mut BTreeSet<(PathBuf, PathBuf)>) {
        let mut pending = vec![(path, home)];
        while let Some((path, home)) = pending.pop() {
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
            for entry in entries {
                let (name, path) = (entry.file_name(), entry.path());
                if name.as_encoded_bytes().starts_with(b".") {
                    continue;
                }
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => pending.push((path, home.join(name))),
                    Ok(kind) if kind.is_symlink() => {
                        links.insert((path, home.join(name)));
                    }
                    Ok(_) if !is_manifest(&path) || (home == *root && name == CONFIG) => {}
                    Ok(kind) if kind.is_file() => {
                        // No link: its real place needs no asking.
                        self.file(&path, folder.join(&name), home.clone());
                    }
                    Ok(_) => self.problem(&path, NOT_A_FILE.to_owned(), None),
                    Err(error) => self.problem(&path, format!("cannot read it: {}", reason(&error)), None),
                }
            }
        }
    }

    fn link(&mut self, link: &Path, home: &Path, root: &Path, links: &mut BTreeSet<(PathBuf, PathBuf)>) {
        let real = match link.canonicalize() {
            Ok(real) => real,
            // A dangling or looping link is nobody's business, unless there was something behind it.
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
            let hint = "put a copy into the tree, or name the other tree as a second PATH";
            return self.problem(link, LEADS_OUT.to_owned(), Some(hint));
        }
        if is_dir {
            self.below(link.to_path_buf(), home.to_path_buf(), root, links);
        } else {
            self.file(link, real, home.parent().unwrap_or(root).to_path_buf());
        }
    }

    fn file(&mut self, path: &Path, real: PathBuf, home: PathBuf) {
        if !self.seen.insert(real) {
            return;
        }
        match fs::metadata(path) {
            Ok(meta) if meta.is_file() => {
                let name = display_path(path).into();
                self.found.files.push(Candidate {
                    name,
                    at: FileOrigin::File(path.to_path_buf()),
                    scope_dir: home,
                    bytes: meta.len(),
                    stamp: Some(FileStamp::of(&meta)),
                });
            }
            Ok(_) => self.problem(path, NOT_A_FILE.to_owned(), Some("`-` reads standard input")),
            Err(error) => self.problem(path, format!("cannot read it: {}", reason(&error)), None),
        }
    }
}

pub const LEADS_OUT: &str = "the link leads out of the tree, and is not followed";
const NOT_A_FILE: &str =
    "it is neither a file nor a directory (a FIFO, a socket or a device), and is not opened";

/// Reads one file into text, cut into documents.
pub fn read(file: &Candidate, limits: &Limits) -> Result<SourceText, Problem> {
    let bytes = bytes(file, limits)?;
    let text = text::decode(bytes)
        .map_err(|(fault, text)| SourceText::new(file.name.clone(), text, false, 0).problem(fault))?;
    let json = match Path::new(&*file.name).extension().and_then(|e| e.to_str()) {
        Some("yaml" | "yml" | "YAML" | "YML") => false,
        Some("json" | "JSON") => true,
        // Standard input and files of other names: what looks like JSON and is.
        _ => text.trim_start().starts_with('{') && text::is_json(&text),
    };
    Ok(SourceText::new(file.name.clone(), text, json, limits.documents))
}

/// What a file holds, within the limit.
pub fn bytes(file: &Candidate, limits: &Limits) -> Result<Vec<u8>, Problem> {
    let unreadable = |error: io::Error| {
        Problem::of_file(
            file.name.clone(),
            Code::Unreadable,
            format!("cannot read it: {}", reason(&error)),
            None,
        )
    };
    let too_large = || {
        let message = format!("the file is larger than {} bytes", limits.file_bytes);
        let hint = Some("if that is meant, raise --max-file-bytes".to_owned());
        Problem::of_file(file.name.clone(), Code::TooLarge, message, hint)
    };
    if file.bytes > limits.file_bytes {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(file.bytes as usize);
    // One byte more than allowed tells a file that grew, or that lies about its size.
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

/// Is it a link to something outside of the directory that it stands in?
fn leads_out(path: &Path, real: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    path.is_symlink() && parent.canonicalize().is_ok_and(|parent| !real.starts_with(parent))
}

/// Opens without waiting for whoever is at the other end, should the file have become a FIFO since we looked.
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
    // A name may hold anything but `/` and NUL; a terminal must not be told to do things by it.
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}
