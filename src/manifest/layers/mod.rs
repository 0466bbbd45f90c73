//! Layers: the overlays that apply to each file, from the files alone.
//!
//! An Overlay is in a file `overlay.yaml`. Its directory belongs to it, down to directories with an Overlay of their own,
//! and so do the files and directories in `base`. An overlay in `base` is a layer below it. The result depends on the
//! names and texts of the files only: a stored revision has the same layers as the tree that it was read from.

mod check;
pub mod header;
mod merge;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::check::findings;
pub use self::merge::{AppliedPatches, PatchBudget, is_exceeded};
use super::check::{DeclaredObject, DeclaredOverlay};
use super::problem::{Code, FieldPath, OTHER_LOCATION, SpanProblem};
use super::text::SourceText;
use super::variable_scopes::VarMap;
use super::{Declaration, Limits, read};

/// Maximum number of bases of all overlays together.
const MAX_BASES: usize = 1_000;

/// Maximum number of overlays on top of each other: each compares its patches with every process.
const MAX_DEPTH: usize = 10;

/// An overlay.
#[derive(Debug)]
pub struct Layer {
    /// Index of its file.
    pub source: usize,
    pub dir: PathBuf,
    pub overlay: Arc<DeclaredOverlay>,
    text: Arc<str>,
}

/// The overlays that apply to a file, the innermost first.
#[derive(Clone, Debug, Default)]
pub struct LayerSet(Arc<[Arc<Layer>]>);

/// Two sets are equal if they have the same effect on a file.
impl PartialEq for LayerSet {
    fn eq(&self, other: &LayerSet) -> bool {
        let is_same = |(a, b): (&Arc<Layer>, &Arc<Layer>)| {
            Arc::ptr_eq(a, b) || (a.dir == b.dir && (Arc::ptr_eq(&a.text, &b.text) || a.text == b.text))
        };
        Arc::ptr_eq(&self.0, &other.0)
            || (self.0.len() == other.0.len() && self.0.iter().zip(other.0.iter()).all(is_same))
    }
}

impl LayerSet {
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.0
    }

    /// Variables of the overlays, the outermost first.
    pub fn vars(&self) -> Vec<Arc<VarMap>> {
        self.0.iter().rev().filter_map(|layer| layer.overlay.vars.clone()).collect()
    }

    /// The directories whose policies apply to a document: those above it, and those above its overlays.
    pub fn policy_dirs<'a>(&'a self, scope_dir: &'a Path) -> Vec<&'a Path> {
        let mut dirs: Vec<&Path> = scope_dir.ancestors().collect();
        for dir in self.0.iter().flat_map(|layer| layer.dir.ancestors()) {
            if !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        dirs
    }
}

/// A problem of an overlay.
#[derive(Debug)]
struct LayerProblem {
    layer: usize,
    path: FieldPath,
    code: Code,
    message: String,
    hint: &'static str,
    /// The overlay at the second location of the message.
    other: Option<usize>,
}

impl LayerProblem {
    fn new(layer: usize, path: FieldPath, code: Code, message: String, hint: &'static str) -> LayerProblem {
        LayerProblem { layer, path, code, message, hint, other: None }
    }

    fn other(self, other: usize) -> LayerProblem {
        LayerProblem { other: Some(other), ..self }
    }
}

/// The overlays of a tree, and the set of each file.
#[derive(Debug, Default)]
pub struct LayerPlan {
    layers: Vec<Arc<Layer>>,
    /// Of each file; empty if the tree has no overlay.
    sets: Vec<LayerSet>,
    /// Overlays that apply to something.
    active: HashSet<usize>,
    problems: Vec<LayerProblem>,
    /// Directories whose Overlay cannot be read.
    broken: Vec<PathBuf>,
}

impl LayerPlan {
    /// Records a file that cannot be read.
    pub fn add_unreadable(&mut self, name: &str, scope_dir: &Path) {
        if header::is_overlay_file(name) {
            self.broken.push(scope_dir.to_path_buf());
        }
    }

    /// Finds the overlays of these files, and what they apply to.
    pub fn resolve(&mut self, sources: &[SourceText], scope_dirs: &[PathBuf], limits: &Limits) {
        let mut by_dir: HashMap<&Path, usize> = HashMap::new();
        for (source, (text, dir)) in sources.iter().zip(scope_dirs).enumerate() {
            if !header::is_overlay_file(&text.name) || by_dir.contains_key(dir.as_path()) {
                continue;
            }
            match declared(text, limits) {
                Ok(Some(overlay)) => {
                    by_dir.insert(dir, self.layers.len());
                    let text = Arc::clone(&text.text);
                    self.layers.push(Arc::new(Layer { source, dir: dir.clone(), overlay, text }));
                }
                Ok(None) => {}
                Err(_) => self.broken.push(dir.clone()),
            }
        }
        if !self.layers.is_empty() {
            let files = FileIndex::new(sources, scope_dirs, &by_dir);
            self.assign(&files, &by_dir);
        }
    }

    /// Whether the overlays of a document are unknown or have an error, so that it declares nothing. `bad`: the files of
    /// overlays with an error.
    pub fn is_unknown(&self, document: &Declaration, bad: &HashSet<usize>) -> bool {
        !self.problems.is_empty()
            || document.layers.layers().iter().any(|layer| bad.contains(&layer.source))
            || self.broken.iter().any(|dir| document.scope_dir.starts_with(dir))
    }

    /// The overlays of a file.
    pub fn set(&self, source: usize) -> LayerSet {
        self.sets.get(source).cloned().unwrap_or_default()
    }

    /// Assigns every file to the overlays that apply to it, from the outermost overlay inwards.
    fn assign(&mut self, files: &FileIndex<'_>, by_dir: &HashMap<&Path, usize>) {
        self.sets = vec![LayerSet::default(); files.enclosing.len()];
        let targets: Vec<Vec<Result<PathBuf, &'static str>>> = self.layers.iter().map(bases).collect();
        let named: HashSet<usize> =
            targets.iter().flatten().flatten().filter_map(|dir| by_dir.get(dir.as_path()).copied()).collect();
        let mut outermost = (0..self.layers.len()).filter(|layer| !named.contains(layer));
        let first = outermost.next().unwrap_or_default();
        for other in outermost {
            let message = format!("two overlays are read at once: the other is at {}", OTHER_LOCATION);
            let hint = "pass the directory of one overlay; `abide validate --all` checks all of them";
            let problem = LayerProblem::new(other, FieldPath::root(), Code::MisplacedOverlay, message, hint);
            self.problems.push(problem.other(first));
        }
        let mut count = 0;
        let mut pending = vec![(first, Vec::<usize>::new(), None)];
        while let Some((layer, outer, named_at)) = pending.pop() {
            let mut chain = vec![layer];
            chain.extend(&outer);
            if !self.enter(layer, &outer, named_at) {
                continue;
            }
            let set = LayerSet(chain.iter().map(|layer| Arc::clone(&self.layers[*layer])).collect());
            for (source, _) in files.enclosing.iter().enumerate().filter(|(_, by)| **by == Some(layer)) {
                self.sets[source] = set.clone();
            }
            for (nth, target) in targets[layer].iter().enumerate() {
                count += 1;
                if count > MAX_BASES {
                    let message = format!("the overlays have more than {MAX_BASES} bases");
                    let hint = "name directories instead of files";
                    let path = FieldPath::of("base");
                    self.problems.push(LayerProblem::new(layer, path, Code::TooLarge, message, hint));
                    return;
                }
                match target {
                    Ok(dir) if by_dir.contains_key(dir.as_path()) && chain.len() >= MAX_DEPTH => {
                        let message = format!("more than {MAX_DEPTH} overlays are on top of each other");
                        let (path, hint) = (self.base_path(layer, nth), "join some of them");
                        self.problems.push(LayerProblem::new(layer, path, Code::TooLarge, message, hint));
                    }
                    Ok(dir) if by_dir.contains_key(dir.as_path()) => {
                        pending.push((by_dir[dir.as_path()], chain.clone(), Some((layer, nth))));
                    }
                    Ok(path) => self.add_plain_base((layer, nth), path, &set, files),
                    Err(why) => {
                        let message = format!("base {:?} {why}", self.shown_base(layer, nth));
                        let hint = "name a file or directory of the same repository, relative to the overlay";
                        self.report_base((layer, nth), message, hint);
                    }
                }
            }
        }
    }

    /// Whether an overlay has not been reached before. `named_at`: the overlay and the base that name it.
    fn enter(&mut self, layer: usize, outer: &[usize], named_at: Option<(usize, usize)>) -> bool {
        if self.active.insert(layer) {
            return true;
        }
        let Some((by, nth)) = named_at else { return false };
        let path = self.base_path(by, nth);
        if outer.contains(&layer) {
            let message = format!("this base leads back to the overlay at {}", OTHER_LOCATION);
            let hint = "remove one of the two bases";
            let problem = LayerProblem::new(by, path, Code::BaseCycle, message, hint);
            self.problems.push(problem.other(layer));
        } else {
            let message = format!("base {:?} is named by two overlays of this set", self.shown_base(by, nth));
            self.report_base((by, nth), message, ONE_BASE);
        }
        false
    }

    /// The files of a base without an Overlay.
    fn add_plain_base(
        &mut self,
        (layer, nth): (usize, usize),
        path: &Path,
        set: &LayerSet,
        files: &FileIndex<'_>,
    ) {
        let mut is_empty = true;
        let mut is_reported = false;
        for source in files.below(path) {
            // A directory with an Overlay belongs to that one.
            let is_other = |by: usize| self.layers[by].dir.starts_with(path);
            if files.enclosing[source].is_some_and(is_other) {
                continue;
            }
            is_empty = false;
            let known = &self.sets[source];
            if known.layers().is_empty() || known == set {
                self.sets[source] = set.clone();
            } else if !std::mem::replace(&mut is_reported, true) {
                let message =
                    format!("base {:?} is named by two overlays of this set", self.shown_base(layer, nth));
                self.report_base((layer, nth), message, ONE_BASE);
            }
        }
        if is_empty {
            let message = format!("base {:?} has no manifests", self.shown_base(layer, nth));
            let hint = "name a file, or a directory with *.yaml, *.yml or *.json, relative to the overlay";
            self.report_base((layer, nth), message, hint);
        }
    }

    /// Reports a base of an overlay.
    fn report_base(&mut self, (layer, nth): (usize, usize), message: String, hint: &'static str) {
        let path = self.base_path(layer, nth);
        self.problems.push(LayerProblem::new(layer, path, Code::BadBase, message, hint));
    }

    fn shown_base(&self, layer: usize, nth: usize) -> String {
        super::node::shorten(&self.layers[layer].overlay.bases[nth])
    }

    /// The path of a base in its document, which may be a list or one text.
    fn base_path(&self, layer: usize, nth: usize) -> FieldPath {
        header::base_path(self.layers[layer].overlay.bases.len(), nth)
    }
}

const ONE_BASE: &str = "name it in one overlay only, the inner one";

/// The first Overlay of a file. `Err`: there may be one in a part that cannot be parsed.
fn declared(text: &SourceText, limits: &Limits) -> Result<Option<Arc<DeclaredOverlay>>, SpanProblem> {
    if !text.text.contains("Overlay") || text.slices.len() > limits.documents {
        return Ok(None);
    }
    let mut error = None;
    for slice in &text.slices {
        match read::slice(text, slice, limits) {
            Ok(documents) => {
                for document in documents.into_iter().filter_map(|read| read.document) {
                    if let (DeclaredObject::Overlay(overlay), _) = super::check::document(document) {
                        return Ok(Some(overlay));
                    }
                }
            }
            Err(problem) => error = Some(problem),
        }
    }
    error.map_or(Ok(None), Err)
}

fn bases(layer: &Arc<Layer>) -> Vec<Result<PathBuf, &'static str>> {
    let bases = layer.overlay.bases.iter().take(MAX_BASES + 1);
    bases.map(|base| header::resolve_base(&layer.dir, base)).collect()
}

/// The files by directory, and the overlay that each is below.
struct FileIndex<'a> {
    sources: &'a [SourceText],
    dirs: BTreeMap<&'a Path, Vec<usize>>,
    enclosing: Vec<Option<usize>>,
}

impl<'a> FileIndex<'a> {
    fn new(
        sources: &'a [SourceText],
        scope_dirs: &'a [PathBuf],
        by_dir: &HashMap<&Path, usize>,
    ) -> FileIndex<'a> {
        let mut dirs: BTreeMap<&Path, Vec<usize>> = BTreeMap::new();
        let mut enclosing = Vec::with_capacity(scope_dirs.len());
        let mut last: Option<(&Path, Option<usize>)> = None;
        for (source, dir) in scope_dirs.iter().enumerate() {
            let by = match last {
                Some((known, by)) if known == dir => by,
                Some(_) | None => dir.ancestors().find_map(|dir| by_dir.get(dir).copied()),
            };
            last = Some((dir, by));
            enclosing.push(by);
            dirs.entry(dir).or_default().push(source);
        }
        FileIndex { sources, dirs, enclosing }
    }

    /// The files below a directory, or the file itself.
    fn below(&self, path: &Path) -> Vec<usize> {
        let from = (Bound::Included(path), Bound::Unbounded);
        let folders = self.dirs.range::<Path, _>(from).take_while(|(dir, _)| dir.starts_with(path));
        let mut found: Vec<usize> = folders.flat_map(|(_, files)| files.iter().copied()).collect();
        let siblings = path.parent().and_then(|dir| self.dirs.get(dir));
        let is_file =
            |source: &&usize| Path::new(&*self.sources[**source].name).file_name() == path.file_name();
        found.extend(siblings.into_iter().flatten().filter(is_file));
        found
    }
}
