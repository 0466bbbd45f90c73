//! Text → [`Desired`]: find, read, check, expand. One bad document spoils nothing but itself, and every problem
//! of every file is reported at once.
//!
//! ```text
//! paths ─find→ files ─read→ documents ─check→ declarations ─expand→ Desired
//!                 └──────────┴── problems, located only now ──┴────────┘
//! ```
//! The first three steps run on all cores and look at one document at a time; the last looks at all of them.
//! Places are found last, by an event parser, and only in documents that have a problem (or are another kind than
//! Process, or items of a YAML list: few, and checked by the same tree).

pub mod check;
pub mod convert;
pub mod document;
mod expand;
pub mod explain;
mod find;
pub mod grammar;
pub mod import;
mod incremental;
pub mod init;
mod limits;
mod locate;
mod node;
mod parallel;
pub mod print;
mod problem;
pub mod provenance;
mod read;
pub mod rows;
pub mod schema;
mod splice;
mod structure;
mod text;
mod tree;
mod variables;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use find::{CONFIG, FileContent, LEADS_OUT, StandIn, display_path, is_manifest, too_large};
pub use incremental::{ChangedFile, IncrementalLoader};
pub use limits::Limits;
pub use problem::{Code, FieldPath, Problem, Severity, did_you_mean};
pub use splice::SpliceResult;

use self::check::DeclaredObject;
pub use self::expand::DesiredCounts;
use self::expand::Purpose;
use self::locate::{Locator, ReportLimit};
use self::problem::{
    MAX_PER_DOCUMENT, MAX_PER_FILE, OTHER_LOCATION, PathPart, PathProblem, Span, SpanProblem,
};
use self::text::SourceText;
use crate::model::{Desired, SourceLocation};

/// A tree of manifests, read.
#[derive(Debug, Default)]
pub struct Loaded {
    /// What the good documents want.
    pub desired: Desired,
    /// Sorted by file and place.
    pub problems: Vec<Problem>,
    pub files: usize,
    pub documents: Vec<Declaration>,
    /// Of what the good documents want.
    pub counts: DesiredCounts,
    purpose: Purpose,
    sources: Vec<SourceText>,
    /// The directory of each source that Defaults and policies reach it by.
    homes: Vec<PathBuf>,
    /// What is above all documents.
    context: Option<expand::Context>,
    /// Files that claim the same thing, pair by pair.
    rivals: Vec<(Arc<str>, Arc<str>)>,
}

/// One document, and where it stands.
#[derive(Debug)]
pub struct Declaration {
    source: usize,
    slice: usize,
    nth: usize,
    /// Line and column of its first content.
    begin: (u32, u32),
    /// The directory that Defaults and policies reach it by.
    scope_dir: PathBuf,
    declared: DeclaredObject,
    /// Left out because it was wrong.
    dropped: HashSet<FieldPath>,
    /// It has an error, or stands under something that has.
    bad: bool,
}

/// Reads everything below the paths (`-` is standard input).
pub fn load(paths: &[PathBuf], limits: &Limits) -> Loaded {
    load_with(paths, limits, &BTreeMap::new())
}

/// The same for problems and counts alone: `desired` stays empty.
pub fn check(paths: &[PathBuf], limits: &Limits) -> Loaded {
    load_found(&find::find(paths, limits), limits, &BTreeMap::new(), None, Purpose::Checks)
}

/// The same with other texts in place of some files'.
pub fn load_with(paths: &[PathBuf], limits: &Limits, stand_ins: &BTreeMap<String, StandIn>) -> Loaded {
    load_found(&find::find(paths, limits), limits, stand_ins, None, Purpose::Instances)
}

/// The same for files that somebody else has found and read, with the problems he met.
pub fn load_files(
    files: Vec<FileContent>,
    problems: Vec<Problem>,
    limits: &Limits,
    stand_ins: &BTreeMap<String, StandIn>,
) -> Loaded {
    load_found(&find::from_contents(files, problems), limits, stand_ins, None, Purpose::Instances)
}

/// `again`: what is known from an earlier reading, and will be known to the next one.
fn load_found(
    found: &find::FoundFiles,
    limits: &Limits,
    stand_ins: &BTreeMap<String, StandIn>,
    again: Option<&mut IncrementalLoader>,
    purpose: Purpose,
) -> Loaded {
    let unseen = found.missing_stand_ins(stand_ins);
    let mut whole: Vec<&find::Candidate> = found.files.iter().chain(&unseen).collect();
    whole.sort_by(|a, b| a.name.cmp(&b.name));
    let mut loaded =
        Loaded { problems: found.problems.clone(), files: found.files.len(), purpose, ..Loaded::default() };
    let earlier = again.as_deref();
    let read = |file: &&find::Candidate| match stand_ins.get(&*file.name) {
        Some(StandIn { text, .. }) => {
            let json = text::is_json(text) && file.name.to_ascii_lowercase().ends_with(".json");
            Ok((SourceText::new(file.name.clone(), text.to_string(), json, limits.documents), None))
        }
        None => match earlier.and_then(|earlier| earlier.cached(file)) {
            Some((source, parts)) => Ok((source, Some(parts))),
            None => find::read(file, limits).map(|source| {
                let parts = earlier.and_then(|earlier| earlier.parsed(&source));
                (source, parts)
            }),
        },
    };
    let (mut files, mut known) = (Vec::new(), Vec::new());
    for (file, read) in whole.iter().copied().zip(parallel::map(&whole, read)) {
        match read {
            Ok((source, parts)) => {
                files.push(file);
                known.push(parts);
                loaded.sources.push(source);
            }
            Err(problem) => loaded.problems.push(problem),
        }
    }
    let homes: Vec<PathBuf> = files.iter().map(|file| file.scope_dir.clone()).collect();
    let (findings, told) = match again {
        None => loaded.parse(&homes, limits),
        Some(again) => {
            let parts = loaded.parse_unknown(known, limits);
            // A stand-in is what the file used to be, not what it is.
            let own = |(file, _): &(&&find::Candidate, _)| !stand_ins.contains_key(&*file.name);
            let read = files.iter().zip(loaded.sources.iter().zip(&parts)).filter(own);
            again.store_cache(read.map(|(file, (source, parts))| (*file, source, Arc::clone(parts))));
            loaded.collect(&homes, parts.iter().map(|parts| parts.iter().cloned()), limits)
        }
    };
    loaded.homes = homes;
    loaded.expand_and_report(findings, told, limits);
    loaded
}

/// The same for a text that is at hand, under any name.
pub fn load_text(name: &str, text: String, limits: &Limits) -> Loaded {
    load_source(SourceText::new(name.into(), text, false, limits.documents), limits)
}

pub(crate) fn load_source(source: SourceText, limits: &Limits) -> Loaded {
    let name = source.name.to_string();
    let mut loaded = Loaded { files: 1, sources: vec![source], ..Loaded::default() };
    let homes = vec![PathBuf::from(name)];
    let (findings, told) = loaded.parse(&homes, limits);
    loaded.homes = homes;
    loaded.expand_and_report(findings, told, limits);
    loaded
}

impl Loaded {
    /// Every file, the directory that Defaults reach it by, and its text.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &std::path::Path, &Arc<str>)> {
        let files = self.sources.iter().zip(&self.homes);
        files.map(|(source, home)| (&*source.name, home.as_path(), &source.text))
    }

    /// Every file as it was read, for [`load_files`] to read it again another day. Texts are shared, not copied.
    pub fn file_contents(&self) -> Vec<FileContent> {
        self.sources.iter().zip(&self.homes).map(|(source, home)| source.file_content(home)).collect()
    }

    /// The file that a document stands in.
    pub fn file_of(&self, document: &Declaration) -> &str {
        &self.sources[document.source].name
    }

    /// Pairs of files that claim the same thing: of the two, a problem names one.
    pub fn conflicting_files(&self) -> &[(Arc<str>, Arc<str>)] {
        &self.rivals
    }

    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count()
    }

    /// Texts → declarations, on all cores, and what is wrong with each by itself.
    fn parse(&mut self, homes: &[PathBuf], limits: &Limits) -> (Vec<(usize, PathProblem)>, ReportLimit) {
        let parts = self.parse_all(|_| true, limits);
        self.collect(homes, parts.into_iter().map(Vec::into_iter), limits)
    }

    /// What each slice of each text says; nothing of a text that is left out, or has too many.
    fn parse_all(&self, means: impl Fn(usize) -> bool, limits: &Limits) -> Vec<ParsedSlices> {
        let mut jobs = Vec::new();
        for (at, source) in self.sources.iter().enumerate() {
            if source.slices.len() <= limits.documents && means(at) {
                jobs.extend((0..source.slices.len()).map(|slice| (at, slice)));
            }
        }
        let sources = &self.sources;
        let counts: Vec<AtomicUsize> = sources.iter().map(|_| AtomicUsize::new(0)).collect();
        let read = parallel::map(&jobs, |&(at, slice)| parse_slice(&sources[at], slice, &counts[at], limits));
        let mut parts: Vec<ParsedSlices> = sources.iter().map(|_| ParsedSlices::new()).collect();
        jobs.into_iter().zip(read).for_each(|((at, _), part)| parts[at].push(part));
        parts
    }

    /// The same, without parsing what is known.
    fn parse_unknown(
        &self,
        known: Vec<Option<Arc<ParsedSlices>>>,
        limits: &Limits,
    ) -> Vec<Arc<ParsedSlices>> {
        let fresh = self.parse_all(|at| known[at].is_none(), limits);
        known.into_iter().zip(fresh).map(|(known, fresh)| known.unwrap_or_else(|| Arc::new(fresh))).collect()
    }

    fn collect(
        &mut self,
        homes: &[PathBuf],
        parts: impl Iterator<Item = impl Iterator<Item = ParsedSlice>>,
        limits: &Limits,
    ) -> (Vec<(usize, PathProblem)>, ReportLimit) {
        let mut told = ReportLimit::new(&self.sources);
        let mut findings = Vec::new();
        for (source, parts) in parts.enumerate() {
            let text = &self.sources[source];
            if let Some(beyond) = text.slices.get(limits.documents) {
                let span = Span::at(beyond.line, beyond.skipped + 1);
                self.problems.push(text.problem(SpanProblem::too_many_documents(limits.documents, span)));
                continue;
            }
            for (slice, part) in parts.enumerate() {
                let checked = match part {
                    Ok(checked) => checked,
                    Err(fault) => {
                        told.report(source, text, fault, &mut self.problems);
                        continue;
                    }
                };
                for CheckedDocument { nth, begin, declared, faults, dropped, findings: found, bad, more } in
                    checked
                {
                    told.skip(source, more);
                    faults.into_iter().for_each(|fault| told.report(source, text, fault, &mut self.problems));
                    findings.extend(found.into_iter().map(|finding| (self.documents.len(), finding)));
                    let home = homes[source].clone();
                    let declaration =
                        Declaration { source, slice, nth, begin, scope_dir: home, declared, dropped, bad };
                    self.documents.push(declaration);
                }
            }
        }
        (findings, told)
    }

    /// Declarations → Desired, and what is wrong with them together; then every finding gets its place.
    fn expand_and_report(
        &mut self,
        mut findings: Vec<(usize, PathProblem)>,
        mut told: ReportLimit,
        limits: &Limits,
    ) {
        let places: Vec<SourceLocation> =
            self.documents.iter().map(|document| self.start_location(document)).collect();
        let unread = self.problems.iter().any(|problem| problem.code.hides_documents());
        let expanded = expand::expand(&mut self.documents, places, &findings, unread, limits, self.purpose);
        findings.extend(expanded.findings);
        expanded.more.into_iter().for_each(|(source, more)| told.skip(source, more));
        self.desired = expanded.desired;
        self.counts = expanded.counts;
        self.context = Some(expanded.context);
        findings.retain(|(document, finding)| !follows_from_dropped(&self.documents[*document], finding));
        let rivals = findings.iter().filter(|(_, finding)| finding.code.names_conflict()).filter_map(
            |(document, finding)| {
                let (other, _) = finding.other.as_ref()?;
                Some((self.source(*document).name.clone(), self.source(*other).name.clone()))
            },
        );
        self.rivals = rivals.collect();
        let placed = self.locate_all(findings, told, limits);
        self.problems.extend(placed);
        self.problems.sort();
        self.problems.dedup();
    }

    fn start_location(&self, document: &Declaration) -> SourceLocation {
        let (line, column) = document.begin;
        SourceLocation { file: self.sources[document.source].name.clone(), line, column }
    }

    /// In the order of documents, so that each tree is built once and kept no longer than needed.
    fn locate_all(
        &self,
        mut findings: Vec<(usize, PathProblem)>,
        mut told: ReportLimit,
        limits: &Limits,
    ) -> Vec<Problem> {
        findings.sort_by_key(|(document, _)| *document);
        let (mut places, mut others) = (Locator::new(self, limits), Locator::new(self, limits));
        let mut problems = Vec::new();
        for found in findings.chunk_by(|(a, _), (b, _)| a == b) {
            let source = self.documents[found[0].0].source;
            for (document, finding) in &found[..found.len().min(MAX_PER_DOCUMENT)] {
                if told.is_full(source) {
                    told.skip(source, 1);
                    continue;
                }
                let span = places.span(*document, &finding.path, finding.at);
                let mut message = finding.message.clone();
                if let Some((other, path)) = &finding.other {
                    let at = others.span(*other, path, PathPart::Value);
                    let file = &self.source(*other).name;
                    message = message.replace(OTHER_LOCATION, &format!("{file}:{}:{}", at.line, at.column));
                }
                let private = finding.path.starts_with(&FieldPath::of("spec.env"));
                let fault = SpanProblem {
                    private,
                    ..SpanProblem::new(finding.code, span, message, finding.hint.clone())
                };
                told.report(source, &self.sources[source], fault, &mut problems);
            }
            if let Some((document, _)) = found.get(MAX_PER_DOCUMENT) {
                let span = places.span(*document, &FieldPath::root(), PathPart::Value);
                let fault = SpanProblem::more(found.len() - MAX_PER_DOCUMENT, "document", span);
                told.report(source, &self.sources[source], fault, &mut problems);
            }
        }
        told.finish(&self.sources, &mut problems);
        problems
    }

    fn source(&self, document: usize) -> &SourceText {
        &self.sources[self.documents[document].source]
    }
}

/// One slice of a file → what its documents declare. `count` is of the findings of the whole file.
fn parse_slice(
    source: &SourceText,
    slice: usize,
    count: &AtomicUsize,
    limits: &Limits,
) -> Result<Vec<CheckedDocument>, SpanProblem> {
    let reads = read::slice(source, &source.slices[slice], limits)?;
    let checked = |read: read::ParsedDocument| {
        let (declared, mut findings) = match read.document {
            Some(document) => check::document(document),
            None => (DeclaredObject::Nothing, Vec::new()),
        };
        let bad = !read.faults.is_empty() || findings.iter().any(PathProblem::is_error);
        // Far more than will be told: only their number is worth memory.
        let mut more = 0;
        if count.fetch_add(findings.len(), Ordering::Relaxed) > 4 * MAX_PER_FILE {
            more = findings.len();
            findings = Vec::new();
        }
        let begin = match read.begin {
            Some(span) => (span.line, span.column),
            None => text::content_start(&source.text, &source.slices[slice]),
        };
        CheckedDocument {
            nth: read.nth,
            begin,
            declared,
            faults: read.faults,
            dropped: read.dropped,
            findings,
            bad,
            more,
        }
    };
    Ok(read::collect_exact(reads.into_iter().map(checked)))
}

/// A slice of a file after it was looked at by itself: its documents, or why there are none.
type ParsedSlice = Result<Vec<CheckedDocument>, SpanProblem>;
/// All of a file.
type ParsedSlices = Vec<ParsedSlice>;

/// A document after it was looked at by itself.
#[derive(Clone)]
struct CheckedDocument {
    nth: usize,
    begin: (u32, u32),
    declared: DeclaredObject,
    faults: Vec<SpanProblem>,
    dropped: HashSet<FieldPath>,
    findings: Vec<PathProblem>,
    bad: bool,
    /// Findings that were not kept.
    more: usize,
}

/// A field that was there and wrong is not missing as well.
fn follows_from_dropped(document: &Declaration, finding: &PathProblem) -> bool {
    if document.dropped.is_empty() {
        return false;
    }
    let steps = &finding.path.0;
    let above = (1..=steps.len()).any(|len| document.dropped.contains(&FieldPath(steps[..len].to_vec())));
    let schedule = [FieldPath::of("spec.monitor_policy.crontab_rule"), FieldPath::of("spec.job.cycle_time")];
    let sections = [FieldPath::of("spec.monitor_policy"), FieldPath::of("spec.job")];
    let unscheduled = schedule.iter().chain(&sections).any(|path| document.dropped.contains(path));
    above || (finding.code == Code::NoSchedule && unscheduled)
}
