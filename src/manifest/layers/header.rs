//! Overlay headers: which files have an Overlay, and the paths of its bases.

use std::path::{Component, Path, PathBuf};

use crate::manifest::locate::locate;
use crate::manifest::node::Node;
use crate::manifest::problem::{Code, FieldPath, Problem, SpanProblem};
use crate::manifest::text::SourceText;
use crate::manifest::{Limits, read, tree};

/// Names of the files that may have an Overlay.
pub const OVERLAY_FILES: [&str; 3] = ["overlay.yaml", "overlay.yml", "overlay.json"];

/// Whether a file may have an Overlay.
pub fn is_overlay_file(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|name| OVERLAY_FILES.iter().any(|known| name == *known))
}

/// The bases of an overlay, before the tree is read.
#[derive(Debug, Default)]
pub struct OverlayHeader {
    /// As written, each with its problem if it cannot be read.
    pub bases: Vec<NamedBase>,
}

/// A base as written.
#[derive(Debug)]
pub struct NamedBase {
    pub path: String,
    /// The problem of the base, without its message.
    place: Problem,
}

impl NamedBase {
    /// A problem at the location of the base.
    pub fn problem(&self, why: &str, hint: Option<&str>) -> Problem {
        let path = crate::manifest::node::shorten(&self.path);
        let message = format!("base {path:?} {why}");
        Problem { message, hint: hint.map(str::to_owned), ..self.place.clone() }
    }
}

/// The header of a text. `None`: it has no Overlay, or one that cannot be parsed.
pub fn header(source: &SourceText, limits: &Limits) -> Option<OverlayHeader> {
    if !source.text.contains("Overlay") || source.slices.len() > limits.documents {
        return None;
    }
    for slice in &source.slices {
        let Ok(nodes) = tree::nodes(source, slice, limits) else { continue };
        for node in read::items(nodes, source.json) {
            if node.get("kind").and_then(Node::text) == Some("Overlay") {
                return Some(OverlayHeader { bases: named_bases(source, &node) });
            }
        }
    }
    None
}

fn named_bases(source: &SourceText, node: &Node) -> Vec<NamedBase> {
    use crate::manifest::node::Kind;
    let paths: Vec<&str> = match node.get("base").map(|base| &base.kind) {
        Some(Kind::Text(path)) => vec![path],
        Some(Kind::List(items)) => items.iter().filter_map(Node::text).collect(),
        _ => Vec::new(),
    };
    let named = paths.iter().enumerate().map(|(nth, path)| {
        let span = locate(node, &base_path(paths.len(), nth), false);
        let place = source.problem(SpanProblem::new(Code::BadBase, span, String::new(), None));
        NamedBase { path: (*path).to_owned(), place }
    });
    named.collect()
}

/// The path of a base in its document: an item of a list, or one text. (A path into a text is the text itself.)
pub fn base_path(count: usize, nth: usize) -> FieldPath {
    let base = FieldPath::of("base");
    if count > 1 { base.index(nth) } else { base }
}

/// The path of a base, from the directory of its overlay. `Err`: why it cannot be a base.
pub fn resolve_base(dir: &Path, base: &str) -> Result<PathBuf, &'static str> {
    if base.is_empty() {
        return Err("is empty");
    }
    if base.contains('\0') {
        return Err("contains a NUL character");
    }
    if Path::new(base).is_absolute() {
        return Err("is an absolute path");
    }
    normalize(&dir.join(base)).ok_or("is outside of the tree")
}

/// A path without `.` and `..`. `None`: it leads above the root.
pub fn normalize(path: &Path) -> Option<PathBuf> {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                if !matches!(whole.components().next_back(), Some(Component::Normal(_))) {
                    return None;
                }
                whole.pop();
            }
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => whole.push(part),
        }
    }
    Some(whole)
}

/// Like [`normalize`], for a path as displayed: it keeps a leading `..`.
pub fn normalize_shown(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if matches!(whole.components().next_back(), Some(Component::Normal(_))) => {
                whole.pop();
            }
            Component::ParentDir | Component::Prefix(_) | Component::RootDir | Component::Normal(_) => {
                whole.push(part);
            }
        }
    }
    if whole.as_os_str().is_empty() { PathBuf::from(".") } else { whole }
}
