//! Text → [`Desired`]: find, read, check, expand. One bad document spoils nothing but itself, and every problem
//! of every file is reported at once.
//!
//! ```text
//! paths ─find→ files ─read→ documents ─check→ declarations ─expand→ Desired
//!                 └──────────┴── problems, located only now ──┴────────┘
//! ```
//! The first three steps run on all cores and look at one document at a time; the last looks at all of them.
//! Places are found last, by an event parser, and only in documents that have a problem.

pub mod check;
pub mod convert;
pub mod document;
mod expand;
pub mod explain;
mod find;
pub mod grammar;
pub mod init;
mod limits;
mod node;
mod parallel;
pub mod print;
mod problem;
mod read;
pub mod schema;
mod structure;
mod text;
mod tree;
mod variables;

use std::path::PathBuf;

pub use limits::Limits;
pub use problem::{Code, Path, Problem, Severity, did_you_mean};

use self::check::Declared;
use self::problem::{At, Fault, Finding, MOST_PROBLEMS, Span};
use self::text::Source;
use crate::model::{Desired, Place};

/// A tree of manifests, read.
#[derive(Debug, Default)]
pub struct Loaded {
    /// What the good documents want.
    pub desired: Desired,
    /// Sorted by file and place.
    pub problems: Vec<Problem>,
    pub files: usize,
    pub documents: Vec<Declaration>,
    sources: Vec<Source>,
}

/// One document, and where it stands.
#[derive(Debug)]
pub struct Declaration {
    source: usize,
    slice: usize,
    nth: usize,
    /// The directory that Defaults and policies reach it by.
    home: PathBuf,
    declared: Declared,
    /// Left out because it was wrong.
    dropped: Vec<Path>,
    /// It has an error, or stands under something that has.
    bad: bool,
}

/// Reads everything below the paths (`-` is standard input).
pub fn load(paths: &[PathBuf], limits: &Limits) -> Loaded {
    let found = find::find(paths, limits);
    let mut loaded = Loaded { problems: found.problems, files: found.files.len(), ..Loaded::default() };
    let mut homes = Vec::new();
    for (file, source) in found.files.iter().zip(parallel::map(&found.files, |file| find::read(file, limits)))
    {
        match source {
            Ok(source) => {
                homes.push(file.home.clone());
                loaded.sources.push(source);
            }
            Err(problem) => loaded.problems.push(problem),
        }
    }
    let findings = loaded.parse(&homes, limits);
    loaded.judge(findings, limits);
    loaded
}

/// The same for a text that is at hand, under any name.
pub fn load_text(name: &str, text: String, limits: &Limits) -> Loaded {
    let source = Source::new(name.into(), text, false);
    let mut loaded = Loaded { files: 1, sources: vec![source], ..Loaded::default() };
    let findings = loaded.parse(&[PathBuf::from(name)], limits);
    loaded.judge(findings, limits);
    loaded
}

impl Loaded {
    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count()
    }

    /// Texts → declarations, on all cores, and what is wrong with each by itself.
    fn parse(&mut self, homes: &[PathBuf], limits: &Limits) -> Vec<(usize, Finding)> {
        let mut jobs = Vec::new();
        for (at, source) in self.sources.iter().enumerate() {
            if source.slices.len() > limits.documents {
                let fault = Fault {
                    code: Code::TooLarge,
                    span: Span::at(source.slices[limits.documents].line, 1),
                    message: format!("the file has more than {} documents", limits.documents),
                    hint: Some("if that is meant, raise --max-documents".to_owned()),
                };
                self.problems.push(source.problem(fault));
                continue;
            }
            jobs.extend((0..source.slices.len()).map(|slice| (at, slice)));
        }
        let sources = &self.sources;
        let read = parallel::map(&jobs, |&(source, slice)| {
            let source = &sources[source];
            let reads = read::slice(source, &source.slices[slice], limits)?;
            let checked = reads.into_iter().map(|read| {
                let (declared, findings) = match read.document {
                    Some(document) => check::document(document),
                    None => (Declared::Nothing, Vec::new()),
                };
                (read.nth, declared, read.faults, read.dropped, findings)
            });
            Ok(checked.collect::<Vec<_>>())
        });
        let mut findings = Vec::new();
        for ((source, slice), result) in jobs.into_iter().zip(read) {
            let text = &self.sources[source];
            let checked = match result {
                Ok(checked) => checked,
                Err(fault) => {
                    self.problems.push(text.problem(fault));
                    continue;
                }
            };
            for (nth, declared, faults, dropped, found) in checked {
                let bad = !faults.is_empty();
                self.problems.extend(faults.into_iter().map(|fault| text.problem(fault)));
                findings.extend(found.into_iter().map(|finding| (self.documents.len(), finding)));
                let home = homes[source].clone();
                self.documents.push(Declaration { source, slice, nth, home, declared, dropped, bad });
            }
        }
        findings
    }

    /// Declarations → Desired, and what is wrong with them together; then every finding gets its place.
    fn judge(&mut self, mut findings: Vec<(usize, Finding)>, limits: &Limits) {
        mark_bad(&mut self.documents, &findings);
        let places: Vec<Place> = self.documents.iter().map(|document| self.beginning(document)).collect();
        let unread = self.problems.iter().any(|problem| problem.code.hides_documents());
        let expanded = expand::expand(&mut self.documents, places, &findings, unread, limits);
        findings.extend(expanded.findings);
        self.desired = expanded.desired;
        findings.retain(|(document, finding)| !follows_from_dropped(&self.documents[*document], finding));
        let placed = self.place_all(findings, limits);
        self.problems.extend(placed);
        self.problems.sort();
        self.problems.dedup();
    }

    /// Where a document's content begins. No parser needed: this is on the good path.
    fn beginning(&self, document: &Declaration) -> Place {
        let source = &self.sources[document.source];
        let (line, column) = text::content_start(&source.text, &source.slices[document.slice]);
        Place { file: source.name.clone(), line, column }
    }

    /// In the order of documents, so that each tree is built once and kept no longer than needed.
    fn place_all(&self, mut findings: Vec<(usize, Finding)>, limits: &Limits) -> Vec<Problem> {
        findings.sort_by_key(|(document, _)| *document);
        let (mut places, mut others) = (Places::new(self, limits), Places::new(self, limits));
        let mut problems = Vec::new();
        for found in findings.chunk_by(|(a, _), (b, _)| a == b) {
            let kept = &found[..found.len().min(MOST_PROBLEMS)];
            for (document, finding) in kept {
                let span = places.span(*document, &finding.path, finding.at);
                let mut message = finding.message.clone();
                if let Some((other, path)) = &finding.other {
                    let at = others.span(*other, path, At::Value);
                    let file = &self.source(*other).name;
                    message = message.replace("{other}", &format!("{file}:{}:{}", at.line, at.column));
                }
                let fault = Fault { code: finding.code, span, message, hint: finding.hint.clone() };
                problems.push(self.source(*document).problem(fault));
            }
            if let Some((document, _)) = found.get(MOST_PROBLEMS) {
                let span = places.span(*document, &Path::root(), At::Value);
                problems.push(self.source(*document).problem(Fault::more(found.len() - MOST_PROBLEMS, span)));
            }
        }
        problems
    }

    fn source(&self, document: usize) -> &Source {
        &self.sources[self.documents[document].source]
    }

    /// Where a field of a document stands, for who asks for a single one.
    fn place_of(&self, document: usize, path: &Path, limits: &Limits) -> Place {
        let span = Places::new(self, limits).span(document, path, At::Value);
        Place { file: self.source(document).name.clone(), line: span.line, column: span.column }
    }
}

/// The tree of the slice in which something was last located.
struct Places<'a> {
    loaded: &'a Loaded,
    limits: &'a Limits,
    tree: Option<((usize, usize), Vec<node::Node>)>,
}

impl<'a> Places<'a> {
    fn new(loaded: &'a Loaded, limits: &'a Limits) -> Places<'a> {
        Places { loaded, limits, tree: None }
    }

    fn span(&mut self, document: usize, path: &Path, at: At) -> Span {
        let Declaration { source, slice, nth, .. } = self.loaded.documents[document];
        let text = &self.loaded.sources[source];
        if self.tree.as_ref().is_none_or(|(of, _)| *of != (source, slice)) {
            let nodes = tree::nodes(&text.text, &text.slices[slice], self.limits).unwrap_or_default();
            self.tree = Some(((source, slice), nodes));
        }
        let nodes = self.tree.iter().flat_map(|(_, nodes)| nodes);
        match nodes.flat_map(read::items).nth(nth) {
            Some(node) => structure::locate(node, path, at == At::Key),
            // The event parser refuses what the YAML crate took: the document's beginning is still right.
            None => {
                let (line, column) = text::content_start(&text.text, &text.slices[slice]);
                Span::at(line, column)
            }
        }
    }
}

fn mark_bad(documents: &mut [Declaration], findings: &[(usize, Finding)]) {
    for (document, finding) in findings {
        documents[*document].bad |= finding.code.severity() == Severity::Error;
    }
}

/// A field that was there and wrong is not missing as well.
fn follows_from_dropped(document: &Declaration, finding: &Finding) -> bool {
    let schedule = [Path::of("spec.monitor_policy"), Path::of("spec.job")];
    document.dropped.iter().any(|dropped| {
        finding.path.starts_with(dropped)
            || (finding.code == Code::NoSchedule
                && schedule.iter().any(|section| dropped.starts_with(section)))
    })
}
