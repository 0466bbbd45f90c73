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

mod again;
pub mod check;
pub mod convert;
pub mod document;
mod expand;
pub mod explain;
mod find;
pub mod grammar;
pub mod import;
pub mod init;
mod limits;
mod node;
mod parallel;
mod places;
pub mod print;
mod problem;
mod read;
pub mod rows;
pub mod schema;
mod splice;
mod structure;
mod text;
mod tree;
mod variables;
pub mod whence;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use again::{Again, Changed};
pub use find::{CONFIG, Given, LEADS_OUT, StandIn, is_manifest, shown, too_large};
pub use limits::Limits;
pub use problem::{Code, Path, Problem, Severity, did_you_mean};
pub use splice::Spliced;

use self::check::Declared;
pub use self::expand::Counts;
use self::expand::Purpose;
use self::places::{Places, Told};
use self::problem::{At, Fault, Finding, MOST_OF_DOCUMENT, MOST_OF_FILE, OTHER, Span};
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
    /// Of what the good documents want.
    pub counts: Counts,
    purpose: Purpose,
    sources: Vec<Source>,
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
    home: PathBuf,
    declared: Declared,
    /// Left out because it was wrong.
    dropped: HashSet<Path>,
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
pub fn load_given(
    files: Vec<Given>,
    problems: Vec<Problem>,
    limits: &Limits,
    stand_ins: &BTreeMap<String, StandIn>,
) -> Loaded {
    load_found(&find::given(files, problems), limits, stand_ins, None, Purpose::Instances)
}

/// `again`: what is known from an earlier reading, and will be known to the next one.
fn load_found(
    found: &find::Found,
    limits: &Limits,
    stand_ins: &BTreeMap<String, StandIn>,
    again: Option<&mut Again>,
    purpose: Purpose,
) -> Loaded {
    let unseen = found.unseen(stand_ins);
    let mut whole: Vec<&find::Candidate> = found.files.iter().chain(&unseen).collect();
    whole.sort_by(|a, b| a.name.cmp(&b.name));
    let mut loaded =
        Loaded { problems: found.problems.clone(), files: found.files.len(), purpose, ..Loaded::default() };
    let earlier = again.as_deref();
    let read = |file: &&find::Candidate| match stand_ins.get(&*file.name) {
        Some(StandIn { text, .. }) => {
            let json = text::is_json(text) && file.name.to_ascii_lowercase().ends_with(".json");
            Ok((Source::new(file.name.clone(), text.to_string(), json, limits.documents), None))
        }
        None => match earlier.and_then(|earlier| earlier.known(file)) {
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
    let homes: Vec<PathBuf> = files.iter().map(|file| file.home.clone()).collect();
    let (findings, told) = match again {
        None => loaded.parse(&homes, limits),
        Some(again) => {
            let parts = loaded.parts_again(known, limits);
            // A stand-in is what the file used to be, not what it is.
            let own = |(file, _): &(&&find::Candidate, _)| !stand_ins.contains_key(&*file.name);
            let read = files.iter().zip(loaded.sources.iter().zip(&parts)).filter(own);
            again.keep(read.map(|(file, (source, parts))| (*file, source, Arc::clone(parts))));
            loaded.gather(&homes, parts.iter().map(|parts| parts.iter().cloned()), limits)
        }
    };
    loaded.homes = homes;
    loaded.judge(findings, told, limits);
    loaded
}

/// The same for a text that is at hand, under any name.
pub fn load_text(name: &str, text: String, limits: &Limits) -> Loaded {
    load_source(Source::new(name.into(), text, false, limits.documents), limits)
}

pub(crate) fn load_source(source: Source, limits: &Limits) -> Loaded {
    let name = source.name.to_string();
    let mut loaded = Loaded { files: 1, sources: vec![source], ..Loaded::default() };
    let homes = vec![PathBuf::from(name)];
    let (findings, told) = loaded.parse(&homes, limits);
    loaded.homes = homes;
    loaded.judge(findings, told, limits);
    loaded
}

impl Loaded {
    /// Every file, the directory that Defaults reach it by, and its text.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &std::path::Path, &Arc<str>)> {
        let files = self.sources.iter().zip(&self.homes);
        files.map(|(source, home)| (&*source.name, home.as_path(), &source.text))
    }

    /// Every file as it was read, for [`load_given`] to read it again another day. Texts are shared, not copied.
    pub fn given(&self) -> Vec<Given> {
        self.sources.iter().zip(&self.homes).map(|(source, home)| source.given(home)).collect()
    }

    /// The file that a document stands in.
    pub fn file_of(&self, document: &Declaration) -> &str {
        &self.sources[document.source].name
    }

    /// Pairs of files that claim the same thing: of the two, a problem names one.
    pub fn rivals(&self) -> &[(Arc<str>, Arc<str>)] {
        &self.rivals
    }

    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.severity == Severity::Error).count()
    }

    /// Texts → declarations, on all cores, and what is wrong with each by itself.
    fn parse(&mut self, homes: &[PathBuf], limits: &Limits) -> (Vec<(usize, Finding)>, Told) {
        let parts = self.parts(|_| true, limits);
        self.gather(homes, parts.into_iter().map(Vec::into_iter), limits)
    }

    /// What each slice of each text says; nothing of a text that is left out, or has too many.
    fn parts(&self, means: impl Fn(usize) -> bool, limits: &Limits) -> Vec<Parts> {
        let mut jobs = Vec::new();
        for (at, source) in self.sources.iter().enumerate() {
            if source.slices.len() <= limits.documents && means(at) {
                jobs.extend((0..source.slices.len()).map(|slice| (at, slice)));
            }
        }
        let sources = &self.sources;
        let counts: Vec<AtomicUsize> = sources.iter().map(|_| AtomicUsize::new(0)).collect();
        let read = parallel::map(&jobs, |&(at, slice)| look(&sources[at], slice, &counts[at], limits));
        let mut parts: Vec<Parts> = sources.iter().map(|_| Parts::new()).collect();
        jobs.into_iter().zip(read).for_each(|((at, _), part)| parts[at].push(part));
        parts
    }

    /// The same, without parsing what is known.
    fn parts_again(&self, known: Vec<Option<Arc<Parts>>>, limits: &Limits) -> Vec<Arc<Parts>> {
        let fresh = self.parts(|at| known[at].is_none(), limits);
        known.into_iter().zip(fresh).map(|(known, fresh)| known.unwrap_or_else(|| Arc::new(fresh))).collect()
    }

    fn gather(
        &mut self,
        homes: &[PathBuf],
        parts: impl Iterator<Item = impl Iterator<Item = Part>>,
        limits: &Limits,
    ) -> (Vec<(usize, Finding)>, Told) {
        let mut told = Told::new(&self.sources);
        let mut findings = Vec::new();
        for (source, parts) in parts.enumerate() {
            let text = &self.sources[source];
            if let Some(beyond) = text.slices.get(limits.documents) {
                let span = Span::at(beyond.line, beyond.skipped + 1);
                self.problems.push(text.problem(Fault::too_many_documents(limits.documents, span)));
                continue;
            }
            for (slice, part) in parts.enumerate() {
                let checked = match part {
                    Ok(checked) => checked,
                    Err(fault) => {
                        told.tell(source, text, fault, &mut self.problems);
                        continue;
                    }
                };
                for Checked { nth, begin, declared, faults, dropped, findings: found, bad, more } in checked {
                    told.skip(source, more);
                    faults.into_iter().for_each(|fault| told.tell(source, text, fault, &mut self.problems));
                    findings.extend(found.into_iter().map(|finding| (self.documents.len(), finding)));
                    let home = homes[source].clone();
                    let declaration = Declaration { source, slice, nth, begin, home, declared, dropped, bad };
                    self.documents.push(declaration);
                }
            }
        }
        (findings, told)
    }

    /// Declarations → Desired, and what is wrong with them together; then every finding gets its place.
    fn judge(&mut self, mut findings: Vec<(usize, Finding)>, mut told: Told, limits: &Limits) {
        let places: Vec<Place> = self.documents.iter().map(|document| self.beginning(document)).collect();
        let unread = self.problems.iter().any(|problem| problem.code.hides_documents());
        let expanded = expand::expand(&mut self.documents, places, &findings, unread, limits, self.purpose);
        findings.extend(expanded.findings);
        expanded.more.into_iter().for_each(|(source, more)| told.skip(source, more));
        self.desired = expanded.desired;
        self.counts = expanded.counts;
        self.context = Some(expanded.context);
        findings.retain(|(document, finding)| !follows_from_dropped(&self.documents[*document], finding));
        let rivals = findings.iter().filter(|(_, finding)| finding.code.names_a_rival()).filter_map(
            |(document, finding)| {
                let (other, _) = finding.other.as_ref()?;
                Some((self.source(*document).name.clone(), self.source(*other).name.clone()))
            },
        );
        self.rivals = rivals.collect();
        let placed = self.place_all(findings, told, limits);
        self.problems.extend(placed);
        self.problems.sort();
        self.problems.dedup();
    }

    fn beginning(&self, document: &Declaration) -> Place {
        let (line, column) = document.begin;
        Place { file: self.sources[document.source].name.clone(), line, column }
    }

    /// In the order of documents, so that each tree is built once and kept no longer than needed.
    fn place_all(
        &self,
        mut findings: Vec<(usize, Finding)>,
        mut told: Told,
        limits: &Limits,
    ) -> Vec<Problem> {
        findings.sort_by_key(|(document, _)| *document);
        let (mut places, mut others) = (Places::new(self, limits), Places::new(self, limits));
        let mut problems = Vec::new();
        for found in findings.chunk_by(|(a, _), (b, _)| a == b) {
            let source = self.documents[found[0].0].source;
            for (document, finding) in &found[..found.len().min(MOST_OF_DOCUMENT)] {
                if told.is_full(source) {
                    told.skip(source, 1);
                    continue;
                }
                let span = places.span(*document, &finding.path, finding.at);
                let mut message = finding.message.clone();
                if let Some((other, path)) = &finding.other {
                    let at = others.span(*other, path, At::Value);
                    let file = &self.source(*other).name;
                    message = message.replace(OTHER, &format!("{file}:{}:{}", at.line, at.column));
                }
                let private = finding.path.starts_with(&Path::of("spec.env"));
                let fault =
                    Fault { private, ..Fault::new(finding.code, span, message, finding.hint.clone()) };
                told.tell(source, &self.sources[source], fault, &mut problems);
            }
            if let Some((document, _)) = found.get(MOST_OF_DOCUMENT) {
                let span = places.span(*document, &Path::root(), At::Value);
                let fault = Fault::more(found.len() - MOST_OF_DOCUMENT, "document", span);
                told.tell(source, &self.sources[source], fault, &mut problems);
            }
        }
        told.finish(&self.sources, &mut problems);
        problems
    }

    fn source(&self, document: usize) -> &Source {
        &self.sources[self.documents[document].source]
    }
}

/// One slice of a file → what its documents declare. `count` is of the findings of the whole file.
fn look(source: &Source, slice: usize, count: &AtomicUsize, limits: &Limits) -> Result<Vec<Checked>, Fault> {
    let reads = read::slice(source, &source.slices[slice], limits)?;
    let checked = |read: read::Read| {
        let (declared, mut findings) = match read.document {
            Some(document) => check::document(document),
            None => (Declared::Nothing, Vec::new()),
        };
        let bad = !read.faults.is_empty() || findings.iter().any(Finding::is_error);
        // Far more than will be told: only their number is worth memory.
        let mut more = 0;
        if count.fetch_add(findings.len(), Ordering::Relaxed) > 4 * MOST_OF_FILE {
            more = findings.len();
            findings = Vec::new();
        }
        let begin = match read.begin {
            Some(span) => (span.line, span.column),
            None => text::content_start(&source.text, &source.slices[slice]),
        };
        Checked {
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
    Ok(read::tight(reads.into_iter().map(checked)))
}

/// A slice of a file after it was looked at by itself: its documents, or why there are none.
type Part = Result<Vec<Checked>, Fault>;
/// All of a file.
type Parts = Vec<Part>;

/// A document after it was looked at by itself.
#[derive(Clone)]
struct Checked {
    nth: usize,
    begin: (u32, u32),
    declared: Declared,
    faults: Vec<Fault>,
    dropped: HashSet<Path>,
    findings: Vec<Finding>,
    bad: bool,
    /// Findings that were not kept.
    more: usize,
}

/// A field that was there and wrong is not missing as well.
fn follows_from_dropped(document: &Declaration, finding: &Finding) -> bool {
    if document.dropped.is_empty() {
        return false;
    }
    let steps = &finding.path.0;
    let above = (1..=steps.len()).any(|len| document.dropped.contains(&Path(steps[..len].to_vec())));
    let schedule = [Path::of("spec.monitor_policy.crontab_rule"), Path::of("spec.job.cycle_time")];
    let sections = [Path::of("spec.monitor_policy"), Path::of("spec.job")];
    let unscheduled = schedule.iter().chain(&sections).any(|path| document.dropped.contains(path));
    above || (finding.code == Code::NoSchedule && unscheduled)
}
