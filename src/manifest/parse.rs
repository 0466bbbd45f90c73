//! Parsing of one slice: documents, patched by the overlays of their file and checked.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::check::{self, DeclaredObject};
use super::layers::{AppliedPatches, LayerSet, PatchBudget};
use super::problem::{Code, FieldPath, MAX_PER_FILE, PathProblem, SpanProblem};
use super::text::{self, SourceText};
use super::{Limits, inventory, read};

/// Checked documents of one slice, or the syntax error.
pub type ParsedSlice = Result<Vec<CheckedDocument>, SpanProblem>;
/// All slices of a file.
pub type ParsedSlices = Vec<ParsedSlice>;

/// A document after the checks that need no other document.
#[derive(Clone)]
pub struct CheckedDocument {
    pub nth: usize,
    pub begin: (u32, u32),
    pub declared: DeclaredObject,
    pub faults: Vec<SpanProblem>,
    pub dropped: HashSet<FieldPath>,
    pub findings: Vec<PathProblem>,
    pub bad: bool,
    /// Number of problems that were dropped.
    pub more: usize,
    pub applied: AppliedPatches,
}

/// The patches of a file's documents, and how much all patches may add.
#[derive(Clone, Copy)]
pub struct Patching<'a> {
    pub layers: &'a LayerSet,
    pub budget: &'a PatchBudget,
}

/// Parses and checks one slice of a file. `count` is the number of problems in the file.
pub fn parse_slice(
    source: &SourceText,
    slice: usize,
    count: &AtomicUsize,
    limits: &Limits,
    patching: Patching<'_>,
) -> ParsedSlice {
    if let Some(snapshot) = inventory::parse_source(source) {
        return snapshot;
    }
    let reads = read::slice(source, &source.slices[slice], limits)?;
    let checked = |read: read::ParsedDocument| {
        let (declared, mut findings, applied) = match read.document {
            Some(document) => match patching.layers.apply(document, patching.budget) {
                Ok((document, applied)) => {
                    let (declared, findings) = check::document(document);
                    (declared, findings, applied)
                }
                Err(why) => {
                    let message = format!("the patches of this process do not fit: {why}");
                    let problem = PathProblem::new(Code::WrongType, FieldPath::root(), message);
                    (DeclaredObject::Nothing, vec![problem], AppliedPatches::default())
                }
            },
            None => (DeclaredObject::Nothing, Vec::new(), AppliedPatches::default()),
        };
        let bad = !read.faults.is_empty() || findings.iter().any(PathProblem::is_error);
        // Far more problems than are reported: keep only their number.
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
            applied,
        }
    };
    Ok(read::collect_exact(reads.into_iter().map(checked)))
}
