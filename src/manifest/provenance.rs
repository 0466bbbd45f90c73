//! Provenance of values: the source line of a field, in the process, in a patch or in a Defaults above it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use serde_yaml::Value;

use super::check::DeclaredObject;
use super::layers::header::is_overlay_file;
use super::locate::Locator;
use super::problem::{FieldPath, PathPart};
use super::{FileContent, Limits, Loaded, load_files};
use crate::model::{Plan, Reason, SourceLocation};

/// Points each reason of a plan that names a field to the field's own line.
pub fn locate(plan: &mut Plan, loaded: &Loaded, limits: &Limits) {
    let mut named = fields(plan).peekable();
    if named.peek().is_none() {
        return;
    }
    let mut provenance = Provenance::new(loaded, limits);
    for why in named {
        if let (Some(field), Some(at)) = (&why.field, &why.at)
            && let Some(location) = provenance.field(at, field)
        {
            why.at = Some(location);
        }
    }
}

/// All reasons that name a field.
fn fields(plan: &mut Plan) -> impl Iterator<Item = &mut Reason> {
    let steps = plan.waves.iter_mut().flat_map(|wave| &mut wave.steps).flat_map(|step| &mut step.why);
    let all = steps.chain(plan.held.iter_mut().flat_map(|held| &mut held.why));
    all.filter(|why| why.field.is_some())
}

/// Like [`locate`], from file contents sorted by name. Parses at most a few files, and none if more are named.
pub fn locate_in(plan: &mut Plan, texts: &[FileContent], limits: &Limits) {
    const FEW: usize = 32;
    let named: BTreeSet<Arc<str>> =
        fields(plan).filter_map(|why| why.at.as_ref()).map(|at| Arc::clone(&at.file)).take(FEW + 1).collect();
    if named.is_empty() || named.len() > FEW {
        return;
    }
    let of = |name: &Arc<str>| {
        let at = texts.binary_search_by(|text| text.name.as_str().cmp(name)).ok()?;
        Some(texts[at].clone())
    };
    let mut files: Vec<FileContent> = named.iter().filter_map(of).collect();
    let scope_dirs: BTreeSet<PathBuf> = files.iter().map(|file| file.scope_dir.clone()).collect();
    // A field that the process does not set may come from a Defaults above it.
    let above = |text: &&FileContent| scope_dirs.iter().any(|dir| dir.starts_with(&text.scope_dir));
    let has_defaults =
        |text: &&FileContent| std::str::from_utf8(&text.content).is_ok_and(|text| text.contains("Defaults"));
    let is_known = |text: &&FileContent| named.contains(text.name.as_str());
    files.extend(
        texts.iter().filter(|text| !is_known(text) && above(text) && has_defaults(text)).take(FEW).cloned(),
    );
    // A patch of an overlay may set it.
    let is_added = |text: &&FileContent| files.iter().any(|file| file.name == text.name);
    let overlays = texts.iter().filter(|text| is_overlay_file(&text.name) && !is_added(text));
    let overlays: Vec<FileContent> = overlays.take(FEW).cloned().collect();
    files.extend(overlays);
    locate(plan, &load_files(files, Vec::new(), limits, &BTreeMap::new()), limits);
}

pub struct Provenance<'a> {
    loaded: &'a Loaded,
    locator: Locator<'a>,
    /// Documents by file, line and column of their start.
    begins: HashMap<(&'a str, u32, u32), usize>,
    defaults: HashMap<&'a FilePath, Vec<usize>>,
    known: HashMap<(usize, String), Option<SourceLocation>>,
}

impl<'a> Provenance<'a> {
    pub fn new(loaded: &'a Loaded, limits: &'a Limits) -> Provenance<'a> {
        let mut provenance = Provenance {
            loaded,
            locator: Locator::new(loaded, limits),
            begins: HashMap::new(),
            defaults: HashMap::new(),
            known: HashMap::new(),
        };
        for (at, document) in loaded.documents.iter().enumerate() {
            match &document.declared {
                DeclaredObject::Process(_) => {
                    let (line, column) = document.begin;
                    provenance.begins.insert((&loaded.source(at).name, line, column), at);
                }
                DeclaredObject::Defaults(_) => {
                    provenance.defaults.entry(&document.scope_dir).or_default().push(at)
                }
                _ => {}
            }
        }
        provenance
    }

    /// The location of a field (`control.start_cmd`, `env.PATH`, `configmap[0].md5`) of the process declared at
    /// `declared`. `None` if the field is not set.
    pub fn field(&mut self, declared: &SourceLocation, field: &str) -> Option<SourceLocation> {
        let SourceLocation { file, line, column } = declared;
        let document = *self.begins.get(&(&**file, *line, *column))?;
        let key = (document, field.to_owned());
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let found = self.find(document, field);
        self.known.insert(key, found.clone());
        found
    }

    fn find(&mut self, document: usize, field: &str) -> Option<SourceLocation> {
        let path = path(field);
        if field.starts_with("meta.") {
            return Some(self.location(document, &path));
        }
        let DeclaredObject::Process(process) = &self.loaded.documents[document].declared else { return None };
        let inside = FieldPath(path.0[1..].to_vec());
        if serde_yaml::to_value(&*process.entry).is_ok_and(|entry| has(&entry, &inside)) {
            return Some(self.location(document, &path));
        }
        let above = self.loaded.documents[document].scope_dir.ancestors();
        let above: Vec<usize> = above.filter_map(|dir| self.defaults.get(dir)).flatten().copied().collect();
        let sets = |at: &&usize| match &self.loaded.documents[**at].declared {
            DeclaredObject::Defaults(defaults) => {
                serde_yaml::to_value(&defaults.entry).is_ok_and(|entry| has(&entry, &inside))
            }
            _ => false,
        };
        let setter = above.iter().find(sets).copied()?;
        Some(self.location(setter, &path))
    }

    fn location(&mut self, document: usize, path: &FieldPath) -> SourceLocation {
        let (source, span) = self.locator.location(document, path, PathPart::Value);
        SourceLocation {
            file: self.loaded.sources[source].name.clone(),
            line: span.line,
            column: span.column,
        }
    }
}

/// Field path from the document's root. A map key may contain dots: all text after the map's name is one key.
fn path(field: &str) -> FieldPath {
    for (map, path) in [("meta.labels.", FieldPath::of("meta.labels")), ("env.", FieldPath::of("spec.env"))] {
        if let Some(key) = field.strip_prefix(map) {
            return path.entry(key);
        }
    }
    let root = if field.starts_with("meta.") { FieldPath::root() } else { FieldPath::of("spec") };
    field.split('.').fold(root, |path, part| match part.split_once('[') {
        None => path.entry(part),
        Some((name, number)) => {
            path.entry(name).index(number.trim_end_matches(']').parse().unwrap_or_default())
        }
    })
}

fn has(value: &Value, path: &FieldPath) -> bool {
    use super::problem::PathSegment;
    let next = |value: &'_ Value, step: &PathSegment| match step {
        PathSegment::Key(name) => value.get(&**name).cloned(),
        PathSegment::Index(at) => value.get(*at).cloned(),
    };
    path.0.iter().try_fold(value.clone(), |value, step| next(&value, step)).is_some()
}
