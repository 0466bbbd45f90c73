//! Source locations of problems: field paths are resolved in parsed trees; reports per file are limited.

use std::collections::{HashMap, VecDeque};

use super::check::DeclaredObject;
use super::check::short_form::SHORT_FIELDS;
use super::grammar;
use super::node::{Kind, Node};
use super::problem::{
    FieldPath, MAX_PER_DOCUMENT, MAX_PER_FILE, OTHER_LOCATION, PathPart, PathSegment, Problem, Span,
    SpanProblem,
};
use super::text::SourceText;
use super::{Declaration, Limits, Loaded, PathProblems, read, tree};

/// Number of reported and skipped problems per file. A hostile file may have millions.
pub struct ReportLimit(Vec<(usize, usize)>);

impl ReportLimit {
    pub fn new(sources: &[SourceText]) -> ReportLimit {
        ReportLimit(vec![(0, 0); sources.len()])
    }

    pub fn is_full(&self, source: usize) -> bool {
        self.0[source].0 >= MAX_PER_FILE
    }

    pub fn skip(&mut self, source: usize, count: usize) {
        self.0[source].1 += count;
    }

    pub fn report(
        &mut self,
        source: usize,
        text: &SourceText,
        problem: SpanProblem,
        problems: &mut Vec<Problem>,
    ) {
        if self.is_full(source) {
            return self.skip(source, 1);
        }
        self.0[source].0 += 1;
        problems.push(text.problem(problem));
    }

    pub fn finish(self, sources: &[SourceText], problems: &mut Vec<Problem>) {
        for (source, (_, more)) in sources.iter().zip(self.0).filter(|(_, (_, more))| *more > 0) {
            problems.push(source.problem(SpanProblem::more(more, "file", Span::at(1, 1))));
        }
    }
}

/// Resolves field paths to spans, with a cache of the most recent trees.
pub struct Locator<'a> {
    loaded: &'a Loaded,
    limits: &'a Limits,
    /// Most recent first. Consecutive problems often refer to the same second document.
    trees: VecDeque<((usize, usize), Vec<Node>)>,
    /// The Overlay document of each file that has one.
    overlays: HashMap<usize, usize>,
}

const TREES: usize = 4;

impl<'a> Locator<'a> {
    pub fn new(loaded: &'a Loaded, limits: &'a Limits) -> Locator<'a> {
        let mut overlays = HashMap::new();
        for (at, document) in loaded.documents.iter().enumerate() {
            if let DeclaredObject::Overlay(_) = document.declared {
                overlays.entry(document.source).or_insert(at);
            }
        }
        Locator { loaded, limits, trees: VecDeque::new(), overlays }
    }

    pub fn span(&mut self, document: usize, path: &FieldPath, at: PathPart) -> Span {
        let (line, column) = self.loaded.documents[document].begin;
        if self.is_snapshot(document) {
            return Span::at(path.first_index().map_or(line, |at| at as u32), 1);
        }
        match self.node(document) {
            Some(node) => locate(node, path, at == PathPart::Key),
            // The event parser rejects some input that the YAML crate accepts; the document's start is still correct.
            None => Span::at(line, column),
        }
    }

    /// The Overlay document of a file.
    pub fn overlay_of(&self, source: usize) -> Option<usize> {
        self.overlays.get(&source).copied()
    }

    /// The file and span of a path: in the last patch that sets it, otherwise in the document.
    pub fn location(&mut self, document: usize, path: &FieldPath, at: PathPart) -> (usize, Span) {
        let loaded = self.loaded;
        let Declaration { layers, applied, source, .. } = &loaded.documents[document];
        for patch in applied.patches.iter().rev() {
            let layer = &layers.layers()[patch.layer];
            let Some(overlay) = self.overlay_of(layer.source) else { continue };
            let fields = FieldPath::of("patches").index(patch.patch).key("patch");
            let fields = self.node(overlay).and_then(|root| node_at(root, &fields));
            if let Some(fields) = fields.filter(|fields| sets(fields, path)) {
                return (layer.source, locate(fields, path, at == PathPart::Key));
            }
        }
        (*source, self.span(document, path, at))
    }

    /// The short form in which the document sets the field, and its long form.
    pub fn short_field(&mut self, document: usize, path: &FieldPath) -> Option<(&'static str, &'static str)> {
        if self.is_snapshot(document) {
            return None;
        }
        short_field(self.node(document)?, path)
    }

    /// Whether a document is a snapshot of an inventory, where `hosts[N]` is line N.
    pub fn is_snapshot(&self, document: usize) -> bool {
        matches!(self.loaded.documents[document].declared, DeclaredObject::Inventory(_))
    }

    /// The tree of a document.
    fn node(&mut self, document: usize) -> Option<&Node> {
        let Declaration { source, slice, nth, .. } = self.loaded.documents[document];
        let text = &self.loaded.sources[source];
        let of = (source, slice);
        if let Some(at) = self.trees.iter().position(|(tree, _)| *tree == of) {
            self.trees.swap(0, at);
        } else {
            let nodes = tree::nodes(text, &text.slices[slice], self.limits).unwrap_or_default();
            self.trees.truncate(TREES - 1);
            self.trees.push_front((of, read::items(nodes, text.json)));
        }
        self.trees.front().and_then(|(_, nodes)| nodes.get(nth))
    }
}

/// The short form in which the document sets a spec field, and its long form. A field that is set in both is searched in
/// the form that the path names.
pub fn short_field(root: &Node, path: &FieldPath) -> Option<(&'static str, &'static str)> {
    let has_key = |name: &str| match &root.kind {
        Kind::Map(entries) => entries.iter().any(|(key, _)| key.text().is_some_and(|text| text == name)),
        _ => false,
    };
    let is_set =
        |(short, long): &(&str, &'static str)| path.starts_with(&FieldPath::of(long)) && has_key(short);
    SHORT_FIELDS.into_iter().find(is_set).filter(|_| !has_path(root, path))
}

/// The path of a spec field that the document has at its top level.
fn short_path(root: &Node, path: &FieldPath) -> Option<FieldPath> {
    let (short, long) = short_field(root, path)?;
    let mut segments = FieldPath::of(short).0;
    segments.extend(path.0.iter().skip(FieldPath::of(long).0.len()).cloned());
    Some(FieldPath(segments))
}

/// Whether a document, or a patch of one, sets a field, in either form.
pub fn sets(root: &Node, path: &FieldPath) -> bool {
    has_path(root, path) || short_path(root, path).is_some_and(|path| has_path(root, &path))
}

/// The value at a path.
pub fn node_at<'n>(root: &'n Node, path: &FieldPath) -> Option<&'n Node> {
    path.0.iter().try_fold(root, |node, step| match (step, &node.kind) {
        (PathSegment::Key(name), Kind::Map(_)) => node.get(name),
        (PathSegment::Index(at), Kind::List(items)) => items.get(*at),
        _ => None,
    })
}

/// Whether a tree has a value at the path.
fn has_path(root: &Node, path: &FieldPath) -> bool {
    let mut node = root;
    for step in &path.0 {
        let found = match (step, &node.kind) {
            (PathSegment::Key(name), Kind::Map(entries)) => entries
                .iter()
                .find(|(key, _)| key.text().is_some_and(|text| grammar::same_field(text, name)))
                .map(|(_, value)| value),
            (PathSegment::Index(at), Kind::List(items)) => items.get(*at),
            _ => None,
        };
        match found {
            Some(value) => node = value,
            None => return false,
        }
    }
    true
}

/// Span of a path in a tree, or of its nearest existing ancestor.
pub fn locate(root: &Node, path: &FieldPath, key_wanted: bool) -> Span {
    let short = short_path(root, path);
    let path = short.as_ref().unwrap_or(path);
    let mut node = root;
    let mut span = root.span;
    for (nth, step) in path.0.iter().enumerate() {
        let last = nth + 1 == path.0.len();
        let next = match (step, &node.kind) {
            (PathSegment::Key(name), Kind::Map(entries)) => entries
                .iter()
                .find(|(key, _)| key.text().is_some_and(|text| grammar::same_field(text, name)))
                .map(|(key, value)| (key.span, value)),
            (PathSegment::Index(at), Kind::List(items)) => items.get(*at).map(|item| (item.span, item)),
            _ => None,
        };
        let Some((key_span, value)) = next else {
            return span;
        };
        let single = !matches!(value.kind, Kind::List(_) | Kind::Map(_) | Kind::Null);
        span = if last && single && !key_wanted { value.span } else { key_span };
        node = value;
    }
    span
}

impl Loaded {
    /// Locates problems in document order, so that each tree is built once and dropped early.
    pub(super) fn locate_all(
        &self,
        mut findings: PathProblems,
        mut reports: ReportLimit,
        limits: &Limits,
    ) -> Vec<Problem> {
        findings.sort_by_key(|(document, _)| *document);
        let (mut locator, mut other_locator) = (Locator::new(self, limits), Locator::new(self, limits));
        let mut problems = Vec::new();
        for found in findings.chunk_by(|(a, _), (b, _)| a == b) {
            let source = self.documents[found[0].0].source;
            for (document, finding) in &found[..found.len().min(MAX_PER_DOCUMENT)] {
                if reports.is_full(source) {
                    reports.skip(source, 1);
                    continue;
                }
                let (at, span) = locator.location(*document, &finding.path, finding.at);
                let mut message = finding.message.clone();
                if let Some((short, long)) = locator.short_field(*document, &finding.path) {
                    message = message.replacen(long, short, 1);
                }
                if let Some((other, path)) = &finding.other {
                    let (source, span) = other_locator.location(*other, path, PathPart::Value);
                    let place = format!("{}:{}:{}", self.sources[source].name, span.line, span.column);
                    message = message.replace(OTHER_LOCATION, &place);
                }
                // Variables of a host may be secrets.
                let private =
                    finding.path.starts_with(&FieldPath::of("spec.env")) || locator.is_snapshot(*document);
                let fault = SpanProblem {
                    private,
                    ..SpanProblem::new(finding.code, span, message, finding.hint.clone())
                };
                reports.report(at, &self.sources[at], fault, &mut problems);
            }
            if let Some((document, _)) = found.get(MAX_PER_DOCUMENT) {
                let span = locator.span(*document, &FieldPath::root(), PathPart::Value);
                let fault = SpanProblem::more(found.len() - MAX_PER_DOCUMENT, "document", span);
                reports.report(source, &self.sources[source], fault, &mut problems);
            }
        }
        reports.finish(&self.sources, &mut problems);
        problems
    }
}
