//! Source locations of problems: field paths are resolved in parsed trees; reports per file are limited.

use std::collections::VecDeque;

use super::check::DeclaredObject;
use super::node::Node;
use super::problem::{FieldPath, MAX_PER_FILE, PathPart, Problem, Span, SpanProblem};
use super::text::SourceText;
use super::{Declaration, Limits, Loaded, read, structure, tree};

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
}

const TREES: usize = 4;

impl<'a> Locator<'a> {
    pub fn new(loaded: &'a Loaded, limits: &'a Limits) -> Locator<'a> {
        Locator { loaded, limits, trees: VecDeque::new() }
    }

    pub fn span(&mut self, document: usize, path: &FieldPath, at: PathPart) -> Span {
        let (line, column) = self.loaded.documents[document].begin;
        if self.is_snapshot(document) {
            return Span::at(path.first_index().map_or(line, |at| at as u32), 1);
        }
        match self.node(document) {
            Some(node) => structure::locate(node, path, at == PathPart::Key),
            // The event parser rejects some input that the YAML crate accepts; the document's start is still correct.
            None => Span::at(line, column),
        }
    }

    /// The short form in which the document sets the field, and its long form.
    pub fn short_field(&mut self, document: usize, path: &FieldPath) -> Option<(&'static str, &'static str)> {
        if self.is_snapshot(document) {
            return None;
        }
        structure::short_field(self.node(document)?, path)
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
