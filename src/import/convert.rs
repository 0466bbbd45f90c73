//! Conversion of GSE and JOB request bodies to manifests, with located problems.
//!
//! In a request body, `${` belongs to the shell, `op_type` decides the state, and credentials are not converted. A document
//! with any field of Abide's own is a manifest and stays unchanged.

use std::collections::HashSet;
use std::path::{Path as FilePath, PathBuf};

use serde::de::DeserializeOwned;

use crate::manifest::check::{self, DeclaredObject, Placement, ProcessForm, ValueChecker};
use crate::manifest::document::{Document, HostValue};
use crate::manifest::limits::Limits;
use crate::manifest::node::Node;
use crate::manifest::problem::{
    Code, FieldPath, PathPart, PathProblem, Problem, Severity, Span, SpanProblem,
};
use crate::manifest::read::ParsedDocument;
use crate::manifest::text::SourceText;
use crate::manifest::{Loaded, find, grammar, load_source, locate, print, read, structure, tree, variables};
use crate::model::State;

/// One document of a file.
#[derive(Debug)]
pub enum Body<J> {
    Job(J),
    /// A manifest, as written or converted from a GSE body.
    Manifest {
        document: Box<Document>,
        was_body: bool,
    },
}

/// Converted documents and warnings.
#[derive(Debug)]
pub struct ConvertInput<J> {
    pub bodies: Vec<Body<J>>,
    pub warnings: Vec<Problem>,
    /// The files are in several directories, so Defaults and policies would apply more widely in one stream.
    pub spread: bool,
    sources: Vec<SourceText>,
}

impl<J> ConvertInput<J> {
    /// The input loaded as manifests, if it is one file: standard input can be read only once.
    pub fn load(self, limits: &Limits) -> Option<Loaded> {
        let mut sources = self.sources;
        let only = sources.pop().filter(|_| sources.is_empty())?;
        Some(load_source(only, limits))
    }
}

/// Reads all documents of a file (`-`: standard input), or returns all its problems. `J` is the type of JOB's body.
pub fn read<J: DeserializeOwned>(path: &FilePath, limits: &Limits) -> Result<ConvertInput<J>, Vec<Problem>> {
    let found = find::find(&[PathBuf::from(path)], limits);
    let mut problems = found.problems;
    let scope_dirs: HashSet<&PathBuf> = found.files.iter().map(|file| &file.scope_dir).collect();
    let spread = scope_dirs.len() > 1;
    let mut read = ConvertInput { bodies: Vec::new(), warnings: Vec::new(), spread, sources: Vec::new() };
    for file in &found.files {
        let source = match find::read(file, limits) {
            Ok(source) => source,
            Err(problem) => {
                problems.push(problem);
                continue;
            }
        };
        for slice in &source.slices {
            match read::slice(&source, slice, limits) {
                Ok(reads) => {
                    let nodes = tree::nodes(&source, slice, limits)
                        .map(|nodes| read::items(nodes, source.json))
                        .unwrap_or_default();
                    let bodies =
                        reads.into_iter().filter_map(|read| body(read, &nodes, &source, &mut problems));
                    read.bodies.extend(bodies);
                }
                Err(fault) => problems.push(source.problem(fault)),
            }
        }
        read.sources.push(source);
    }
    problems.sort();
    if problems.iter().any(|problem| problem.severity == Severity::Error) {
        return Err(problems);
    }
    read.warnings = problems;
    Ok(read)
}

fn body<J: DeserializeOwned>(
    read: ParsedDocument,
    nodes: &[Node],
    source: &SourceText,
    problems: &mut Vec<Problem>,
) -> Option<Body<J>> {
    let node = nodes.get(read.nth);
    if let Some(node) = node.filter(|node| node.get("process_infos").is_some()) {
        let (job, faults) = structure::check_shape_as::<J>(node, &grammar::JOB_BODY);
        problems.extend(faults.into_iter().map(|fault| source.problem(fault)));
        return job.map(Body::Job);
    }
    problems.extend(read.faults.into_iter().map(|fault| source.problem(fault)));
    let document = Box::new(read.document?);
    if !is_request(&document) {
        return Some(Body::Manifest { document, was_body: false });
    }
    let (document, findings) = manifest(*document);
    for finding in findings {
        let span = node
            .map_or(Span::at(1, 1), |node| locate::locate(node, &finding.path, finding.at == PathPart::Key));
        let PathProblem { code, message, hint, .. } = finding;
        problems.push(source.problem(SpanProblem::new(code, span, message, hint)));
    }
    Some(Body::Manifest { document: Box::new(document?), was_body: true })
}

/// Whether a document has only fields of GSE requests.
fn is_request(document: &Document) -> bool {
    let Document { api_version, kind, state, instances, depends_on, protect, adopt, .. } = document;
    let named = api_version.is_some() || kind.is_some() || document.run.is_some();
    let ours = state.is_some()
        || instances.is_some()
        || depends_on.is_some()
        || protect.is_some()
        || adopt.is_some();
    let Document { moved_from, on_change, rollout, hosts, .. } = document;
    let more = moved_from.is_some() || on_change.is_some() || rollout.is_some();
    !named
        && !ours
        && !more
        && hosts.iter().flatten().filter_map(HostValue::entry).all(|host| host.group.is_none())
}

/// Converts a GSE body to a manifest. Parsing and printing removes aliases and empty texts.
fn manifest(mut document: Document) -> (Option<Document>, Vec<PathProblem>) {
    document.spec.as_deref_mut().into_iter().for_each(variables::escape_spec);
    let op_type = document.op_type;
    let (declared, mut findings) = check::document(document);
    findings.retain(|finding| finding.code != Code::IgnoredField);
    let DeclaredObject::Process(process) = declared else { return (None, findings) };
    // Fields that GSE's documents require; start_cmd is not one of them.
    let mut values = ValueChecker::default();
    check::require(&process.entry, State::Stopped, ProcessForm::Body, &mut values);
    findings.extend(values.findings.into_iter().filter(|finding| finding.code == Code::MissingField));
    let auto_type = process.spec.monitor.auto_type;
    let state = match op_type.map(|op| State::wanted_by(op, auto_type).ok_or(op)) {
        None => State::Running,
        Some(Ok(state)) => state,
        Some(Err(op)) => {
            let finding = PathProblem::new(
                Code::OutOfRange,
                FieldPath::of("op_type"),
                format!("op_type {op} is unknown"),
            );
            findings.push(
                finding.hint("0 start, 1 stop, 2 status, 3 host, 4 unhost, 7 restart, 8 reload, 9 kill"),
            );
            State::Running
        }
    };
    // The printer escapes the texts again.
    let mut spec = variables::unescape(&process.spec);
    spec.labels.clone_from(&process.labels);
    let hosts: Vec<_> = process
        .hosts
        .iter()
        .filter_map(|(_, placement)| match placement {
            Placement::Host { host, .. } => Some(host.clone()),
            Placement::Group { .. } => None,
        })
        .collect();
    (process.key.as_ref().map(|key| print::process(key, &hosts, state, &spec)), findings)
}
