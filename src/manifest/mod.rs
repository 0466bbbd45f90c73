//! Manifest loading: finds, reads, checks and expands manifests into [`Desired`].
//!
//! An invalid document does not affect the others, and all problems of all files are reported in one run.
//!
//! ```text
//! paths ─find→ files ─read→ documents ─check→ declarations ─expand→ Desired
//!                 └──────────┴── problems, located only now ──┴────────┘
//! ```
//! The first three steps run on all cores, one document at a time; expansion needs all documents. An event parser
//! computes locations last, and only for documents with a problem, of a kind other than Process, or in a YAML list.

pub mod check;
pub mod document;
mod expand;
pub mod explain;
pub(crate) mod find;
pub mod forms;
pub mod grammar;
mod incremental;
pub mod init;
pub mod inventory;
pub(crate) mod layers;
pub(crate) mod limits;
pub(crate) mod locate;
pub(crate) mod node;
mod parallel;
mod parse;
pub mod print;
pub(crate) mod problem;
pub mod provenance;
pub(crate) mod read;
pub mod render;
pub mod rows;
pub mod schema;
mod splice;
pub(crate) mod structure;
pub(crate) mod text;
pub(crate) mod tree;
pub(crate) mod variable_scopes;
pub(crate) mod variables;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

pub use find::{
    CONFIG, FileContent, LEADS_OUT, OverlayTree, ReplacementText, display_path, is_manifest, overlays,
    too_large,
};
use incremental::CachedSlices;
pub use incremental::{ChangedFile, IncrementalLoader};
pub use limits::Limits;
pub use problem::{Code, Excerpt, FieldPath, Problem, Severity, did_you_mean};
pub use splice::SpliceResult;
pub(crate) use text::SourceText;

use self::check::DeclaredObject;
use self::check::short_form::SHORT_FIELDS;
pub use self::expand::DesiredCounts;
use self::expand::Purpose;
use self::layers::{AppliedPatches, LayerPlan, LayerSet, PatchBudget};
use self::locate::{Locator, ReportLimit};
use self::parse::{CheckedDocument, ParsedSlice, ParsedSlices, Patching, parse_slice};
use self::problem::{PathPart, PathProblem, Span, SpanProblem};
use crate::model::{Desired, SourceLocation};

/// Result of loading a tree of manifests.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Desired state of the valid documents.
    pub desired: Desired,
    /// Sorted by file and location.
    pub problems: Vec<Problem>,
    pub files: usize,
    pub documents: Vec<Declaration>,
    /// Counts of `desired`.
    pub counts: DesiredCounts,
    purpose: Purpose,
    sources: Vec<SourceText>,
    /// For each source, the directory in which Defaults and policies apply to it.
    scope_dirs: Vec<PathBuf>,
    /// Defaults and policies, for incremental expansion.
    context: Option<expand::Context>,
    /// Pairs of files that claim the same instance or identity.
    conflicting_files: Vec<(Arc<str>, Arc<str>)>,
    layers: LayerPlan,
}

/// Problems with the indexes of their documents.
type PathProblems = Vec<(usize, PathProblem)>;

/// One document and its position.
#[derive(Debug)]
pub struct Declaration {
    source: usize,
    slice: usize,
    nth: usize,
    /// Line and column of the first content.
    begin: (u32, u32),
    /// Directory that decides which Defaults and policies apply.
    scope_dir: PathBuf,
    declared: DeclaredObject,
    /// Invalid fields that were dropped.
    dropped: HashSet<FieldPath>,
    /// The document, or a Defaults above it, has an error.
    bad: bool,
    /// Overlays of its file.
    layers: LayerSet,
    applied: AppliedPatches,
}

/// Loads all manifests below the paths (`-` is standard input).
pub fn load(paths: &[PathBuf], limits: &Limits) -> Loaded {
    load_with(paths, limits, &BTreeMap::new())
}

/// Like [`load`], for problems and counts only: `desired` stays empty.
pub fn check(paths: &[PathBuf], limits: &Limits) -> Loaded {
    check_with(paths, limits, &BTreeMap::new())
}

/// Like [`check`], with snapshots of inventories. An inventory without a snapshot is not a problem.
pub fn check_with(
    paths: &[PathBuf],
    limits: &Limits,
    stand_ins: &BTreeMap<String, ReplacementText>,
) -> Loaded {
    load_found(&find::find(paths, limits), limits, stand_ins, None, Purpose::Checks)
}

/// Like [`load`], with stand-in texts for some files.
pub fn load_with(
    paths: &[PathBuf],
    limits: &Limits,
    stand_ins: &BTreeMap<String, ReplacementText>,
) -> Loaded {
    load_found(&find::find(paths, limits), limits, stand_ins, None, Purpose::Instances)
}

/// Like [`load_with`], for files that the caller has read, with the problems that it found.
pub fn load_files(
    files: Vec<FileContent>,
    problems: Vec<Problem>,
    limits: &Limits,
    stand_ins: &BTreeMap<String, ReplacementText>,
) -> Loaded {
    load_found(&find::from_contents(files, problems), limits, stand_ins, None, Purpose::Instances)
}

/// `loader`: cache of the previous load, updated for the next one.
fn load_found(
    found: &find::FoundFiles,
    limits: &Limits,
    stand_ins: &BTreeMap<String, ReplacementText>,
    loader: Option<&mut IncrementalLoader>,
    purpose: Purpose,
) -> Loaded {
    let missing = found.missing_stand_ins(stand_ins);
    let mut candidates: Vec<&find::Candidate> = found.files.iter().chain(&missing).collect();
    candidates.sort_by(|a, b| a.name.cmp(&b.name));
    let mut loaded =
        Loaded { problems: found.problems.clone(), files: found.len(), purpose, ..Loaded::default() };
    let (files, known) = loaded.read_files(&candidates, limits, stand_ins, loader.as_deref());
    loaded.scope_dirs = files.iter().map(|file| file.scope_dir.clone()).collect();
    loaded.layers.resolve(&loaded.sources, &loaded.scope_dirs, limits);
    let (findings, reports) = match loader {
        None => loaded.parse(limits),
        Some(loader) => {
            let parts = loaded.parse_unknown(known, limits);
            // A stand-in is an earlier text of the file, so it is not cached.
            let own = |(at, file): &(usize, &&find::Candidate)| {
                (!stand_ins.contains_key(&*file.name)).then_some(*at)
            };
            let own = files.iter().enumerate().filter_map(|file| own(&file));
            let cached = own.map(|at| {
                (files[at], loaded.sources[at].clone(), Arc::clone(&parts[at]), loaded.layers.set(at))
            });
            loader.store_cache(cached);
            loaded.collect(parts.iter().map(|parts| parts.iter().cloned()), limits)
        }
    };
    loaded.expand_and_report(findings, reports, limits);
    loaded
}

/// Like [`load`], for one text under any name.
pub fn load_text(name: &str, text: String, limits: &Limits) -> Loaded {
    load_source(SourceText::new(name.into(), text, false, limits.documents), limits)
}

pub(crate) fn load_source(source: SourceText, limits: &Limits) -> Loaded {
    let name = source.name.to_string();
    let mut loaded = Loaded { files: 1, sources: vec![source], ..Loaded::default() };
    loaded.scope_dirs = vec![PathBuf::from(name)];
    loaded.layers.resolve(&loaded.sources, &loaded.scope_dirs, limits);
    let (findings, reports) = loaded.parse(limits);
    loaded.expand_and_report(findings, reports, limits);
    loaded
}

impl Loaded {
    /// Every file: its name, scope directory and text.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &std::path::Path, &Arc<str>)> {
        let files = self.sources.iter().zip(&self.scope_dirs);
        files.map(|(source, dir)| (&*source.name, dir.as_path(), &source.text))
    }

    /// Every file as input for [`load_files`]. Texts are shared, not copied.
    pub fn file_contents(&self) -> Vec<FileContent> {
        self.sources.iter().zip(&self.scope_dirs).map(|(source, dir)| source.file_content(dir)).collect()
    }

    /// The file of a document.
    pub fn file_of(&self, document: &Declaration) -> &str {
        &self.sources[document.source].name
    }

    /// Pairs of files that claim the same instance or identity. A problem is reported for only one of the two.
    pub fn conflicting_files(&self) -> &[(Arc<str>, Arc<str>)] {
        &self.conflicting_files
    }

    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count()
    }

    /// Reads files into texts, each with its cached slices.
    fn read_files<'f>(
        &mut self,
        candidates: &[&'f find::Candidate],
        limits: &Limits,
        stand_ins: &BTreeMap<String, ReplacementText>,
        earlier: Option<&IncrementalLoader>,
    ) -> (Vec<&'f find::Candidate>, Vec<Option<CachedSlices>>) {
        let read_file = |file: &&find::Candidate| match stand_ins.get(&*file.name) {
            Some(ReplacementText { text, .. }) => {
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
        for (file, read) in candidates.iter().copied().zip(parallel::map(candidates, read_file)) {
            match read {
                Ok((source, parts)) => {
                    files.push(file);
                    known.push(parts);
                    self.sources.push(source);
                }
                Err(problem) => {
                    self.layers.add_unreadable(&file.name, &file.scope_dir);
                    self.problems.push(problem);
                }
            }
        }
        (files, known)
    }

    /// Parses all texts on all cores, with the problems of each document.
    fn parse(&mut self, limits: &Limits) -> (PathProblems, ReportLimit) {
        let parts = self.parse_all(|_| true, limits);
        self.collect(parts.into_iter().map(Vec::into_iter), limits)
    }

    /// Parsed slices of each selected text; none for a text with too many documents.
    fn parse_all(&self, selects: impl Fn(usize) -> bool, limits: &Limits) -> Vec<ParsedSlices> {
        let mut jobs = Vec::new();
        for (at, source) in self.sources.iter().enumerate() {
            if source.slices.len() <= limits.documents && selects(at) {
                jobs.extend((0..source.slices.len()).map(|slice| (at, slice)));
            }
        }
        let sources = &self.sources;
        let counts: Vec<AtomicUsize> = sources.iter().map(|_| AtomicUsize::new(0)).collect();
        let sets: Vec<LayerSet> = (0..sources.len()).map(|at| self.layers.set(at)).collect();
        let budget = PatchBudget::default();
        let read = parallel::map(&jobs, |&(at, slice)| {
            let patching = Patching { layers: &sets[at], budget: &budget };
            parse_slice(&sources[at], slice, &counts[at], limits, patching)
        });
        let mut parts: Vec<ParsedSlices> = sources.iter().map(|_| ParsedSlices::new()).collect();
        jobs.into_iter().zip(read).for_each(|((at, _), part)| parts[at].push(part));
        parts
    }

    /// Like [`Loaded::parse_all`], without texts whose slices are cached with the same overlays.
    fn parse_unknown(&self, known: Vec<Option<CachedSlices>>, limits: &Limits) -> Vec<Arc<ParsedSlices>> {
        let is_same = |(at, known): (usize, Option<CachedSlices>)| {
            known.filter(|(_, layers)| *layers == self.layers.set(at)).map(|(parts, _)| parts)
        };
        let known: Vec<Option<Arc<ParsedSlices>>> = known.into_iter().enumerate().map(is_same).collect();
        let fresh = self.parse_all(|at| known[at].is_none(), limits);
        known.into_iter().zip(fresh).map(|(known, fresh)| known.unwrap_or_else(|| Arc::new(fresh))).collect()
    }

    fn collect(
        &mut self,
        parts: impl Iterator<Item = impl Iterator<Item = ParsedSlice>>,
        limits: &Limits,
    ) -> (PathProblems, ReportLimit) {
        let mut reports = ReportLimit::new(&self.sources);
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
                        reports.report(source, text, fault, &mut self.problems);
                        continue;
                    }
                };
                for document in checked {
                    reports.skip(source, document.more);
                    let CheckedDocument { nth, begin, declared, dropped, bad, applied, .. } = document;
                    let faults = document.faults.into_iter();
                    faults.for_each(|fault| reports.report(source, text, fault, &mut self.problems));
                    let at = self.documents.len();
                    let found = document.findings.into_iter();
                    findings.extend(found.map(|finding| (at, finding.in_document(at))));
                    let (scope_dir, layers) = (self.scope_dirs[source].clone(), self.layers.set(source));
                    let declaration = Declaration {
                        source,
                        slice,
                        nth,
                        begin,
                        scope_dir,
                        declared,
                        dropped,
                        bad,
                        layers,
                        applied,
                    };
                    self.documents.push(declaration);
                }
            }
        }
        self.check_layers(&mut findings);
        (findings, reports)
    }

    /// Adds the problems of overlays. Patches that exceed their limit declare nothing.
    fn check_layers(&mut self, findings: &mut PathProblems) {
        let is_exceeded = layers::is_exceeded(&self.documents);
        if is_exceeded {
            let is_patched = |document: &Declaration| !document.layers.layers().is_empty();
            findings.retain(|(at, _)| !is_patched(&self.documents[*at]));
            let patched = self.documents.iter_mut().filter(|document| is_patched(document));
            let processes =
                patched.filter(|document| matches!(document.declared, DeclaredObject::Process(_)));
            processes.for_each(|document| document.declared = DeclaredObject::Nothing);
        }
        findings.extend(layers::findings(&self.documents, &self.sources, &self.layers, is_exceeded));
        // Without its overlays, a process is another one.
        let errors: HashSet<usize> =
            findings.iter().filter(|(_, finding)| finding.is_error()).map(|(at, _)| *at).collect();
        let overlays = self.documents.iter().enumerate().filter(|(at, document)| {
            matches!(document.declared, DeclaredObject::Overlay(_)) && (document.bad || errors.contains(at))
        });
        let bad: HashSet<usize> = overlays.map(|(_, document)| document.source).collect();
        for document in &mut self.documents {
            document.bad |= self.layers.is_unknown(document, &bad);
        }
    }

    /// Sets the locations of windows. Policies are in the order of their documents.
    fn locate_windows(&mut self, limits: &Limits) {
        let is_policy = |at: &usize| matches!(self.documents[*at].declared, DeclaredObject::Policy(_));
        let policies = (0..self.documents.len()).filter(is_policy).zip(&self.desired.policies);
        let mut locator = Locator::new(self, limits);
        let mut places: Vec<Vec<SourceLocation>> = Vec::new();
        for (document, policy) in policies {
            let place = |at: usize| {
                let path = FieldPath::of("windows").index(at);
                let span = locator.span(document, &path, PathPart::Value);
                SourceLocation { line: span.line, column: span.column, ..policy.place.clone() }
            };
            places.push((0..policy.windows.len()).map(place).collect());
        }
        for (policy, places) in self.desired.policies.iter_mut().zip(places) {
            policy.windows.iter_mut().zip(places).for_each(|(window, place)| window.place = place);
        }
    }

    /// Expands the declarations, runs cross-document checks and locates all problems.
    fn expand_and_report(&mut self, mut findings: PathProblems, mut reports: ReportLimit, limits: &Limits) {
        let locations: Vec<SourceLocation> =
            self.documents.iter().map(|document| self.start_location(document)).collect();
        let has_unread = self.problems.iter().any(|problem| problem.code.hides_documents());
        let expanded =
            expand::expand(&mut self.documents, locations, &findings, has_unread, limits, self.purpose);
        findings.extend(expanded.findings);
        expanded.more.into_iter().for_each(|(source, more)| reports.skip(source, more));
        self.desired = expanded.desired;
        self.locate_windows(limits);
        self.counts = expanded.counts;
        self.context = Some(expanded.context);
        findings.retain(|(document, finding)| !follows_from_dropped(&self.documents[*document], finding));
        let conflicts = findings.iter().filter(|(_, finding)| finding.code.names_conflict()).filter_map(
            |(document, finding)| {
                let (other, _) = finding.other.as_ref()?;
                Some((self.source(*document).name.clone(), self.source(*other).name.clone()))
            },
        );
        self.conflicting_files = conflicts.collect();
        let mut located = self.locate_all(findings, reports, limits);
        // Discovery reports why a base cannot be read; that it has no manifests follows.
        let is_known = |problem: &Problem| {
            let same = |known: &Problem| {
                (&known.file, known.line, known.column) == (&problem.file, problem.line, problem.column)
            };
            problem.code == Code::BadBase
                && self.problems.iter().any(|known| known.code == Code::BadBase && same(known))
        };
        located.retain(|problem| !is_known(problem));
        self.problems.extend(located);
        self.problems.sort();
        self.problems.dedup();
    }

    fn start_location(&self, document: &Declaration) -> SourceLocation {
        let (line, column) = document.begin;
        SourceLocation { file: self.sources[document.source].name.clone(), line, column }
    }

    fn source(&self, document: usize) -> &SourceText {
        &self.sources[self.documents[document].source]
    }
}

/// Whether a problem follows from a dropped field: an invalid field is not reported as missing too.
fn follows_from_dropped(document: &Declaration, finding: &PathProblem) -> bool {
    if document.dropped.is_empty() {
        return false;
    }
    // Without `run` the process is taken for one in the long form, which has more required fields.
    if document.dropped.contains(&FieldPath::of("run")) && finding.code == Code::MissingField {
        return true;
    }
    let short = SHORT_FIELDS.iter().find(|(_, long)| finding.path.starts_with(&FieldPath::of(long)));
    if short.is_some_and(|(short, _)| document.dropped.contains(&FieldPath::of(short))) {
        return true;
    }
    let steps = &finding.path.0;
    let above = (1..=steps.len()).any(|len| document.dropped.contains(&FieldPath(steps[..len].to_vec())));
    let schedule = [FieldPath::of("spec.monitor_policy.crontab_rule"), FieldPath::of("spec.job.cycle_time")];
    let sections = [FieldPath::of("spec.monitor_policy"), FieldPath::of("spec.job")];
    let schedule_field = FieldPath::of("schedule");
    let unscheduled = document.dropped.contains(&schedule_field)
        || schedule.iter().chain(&sections).any(|path| document.dropped.contains(path));
    above || (finding.code == Code::NoSchedule && unscheduled)
}
