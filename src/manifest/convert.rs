//! Request bodies → manifests: reads any of the documented bodies, with places for everything that is wrong.
//!
//! A body is somebody's call, not a manifest yet: a `${` in it is the shell's, `op_type` says which state is meant,
//! and credentials are not carried over.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;

use super::check::{self, Declared, Where};
use super::document::{ConfigEntry, Document, EnvEntry, EnvSource, Loose, SpecEntry, Text};
use super::limits::Limits;
use super::node::{Kind, Node};
use super::problem::{At, Code, Fault, Problem, Severity};
use super::text::Source;
use super::{find, grammar, print, read, structure, tree, variables};
use crate::model::{AutoType, State};

/// One document of a file.
#[derive(Debug)]
pub enum Body<J> {
    Job(J),
    /// A manifest: what was one already, or what a GSE body says.
    Manifest {
        document: Box<Document>,
        was_body: bool,
    },
}

/// What was read: the documents, and for each file its name and text, since standard input is read only once.
#[derive(Debug)]
pub struct Bodies<J> {
    pub bodies: Vec<Body<J>>,
    pub texts: Vec<(Arc<str>, Arc<str>)>,
}

/// Everything in a file (`-`: standard input), or everything that is wrong with it. `J` is JOB's body.
pub fn read<J: DeserializeOwned>(path: &Path, limits: &Limits) -> Result<Bodies<J>, Vec<Problem>> {
    let found = find::find(&[PathBuf::from(path)], limits);
    let mut problems = found.problems;
    let mut bodies = Vec::new();
    let mut texts = Vec::new();
    for file in &found.files {
        let source = match find::read(file, limits) {
            Ok(source) => source,
            Err(problem) => {
                problems.push(problem);
                continue;
            }
        };
        texts.push((source.name.clone(), source.text.clone()));
        for slice in &source.slices {
            // Reading once as serde does finds what is not JSON in a JSON file.
            let nodes =
                read::slice(&source, slice, limits).and_then(|_| tree::nodes(&source.text, slice, limits));
            match nodes {
                Ok(nodes) => {
                    let items =
                        nodes.iter().flat_map(read::items).filter(|node| !matches!(node.kind, Kind::Null));
                    bodies.extend(items.filter_map(|node| body(node, &source, &mut problems)));
                }
                Err(fault) => problems.push(source.problem(fault)),
            }
        }
    }
    let errors = problems.iter().any(|problem| problem.severity == Severity::Error);
    if errors {
        problems.sort();
        return Err(problems);
    }
    Ok(Bodies { bodies, texts })
}

fn body<J: DeserializeOwned>(node: &Node, source: &Source, problems: &mut Vec<Problem>) -> Option<Body<J>> {
    if node.get("process_infos").is_some() {
        let (job, faults) = structure::understand_as::<J>(node, &grammar::JOB_BODY);
        problems.extend(faults.into_iter().map(|fault| source.problem(fault)));
        return job.map(Body::Job);
    }
    let understood = structure::understand(node);
    problems.extend(understood.faults.into_iter().map(|fault| source.problem(fault)));
    let document = understood.document?;
    let was_body = document.api_version.is_none() && document.kind.is_none();
    if !was_body {
        return Some(Body::Manifest { document: Box::new(document), was_body });
    }
    let document = manifest(document, node, source, problems)?;
    Some(Body::Manifest { document: Box::new(document), was_body })
}

/// A GSE body as a manifest: read as such, so that aliases and empty texts are gone, then written anew.
fn manifest(
    mut document: Document,
    node: &Node,
    source: &Source,
    problems: &mut Vec<Problem>,
) -> Option<Document> {
    document.spec.iter_mut().for_each(escape);
    let op_type = document.op_type;
    let (declared, findings) = check::document(document);
    for finding in findings.into_iter().filter(|finding| finding.code != Code::IgnoredField) {
        let span = structure::locate(node, &finding.path, finding.at == At::Key);
        problems.push(source.problem(Fault {
            code: finding.code,
            span,
            message: finding.message,
            hint: finding.hint,
        }));
    }
    let Declared::Process(process) = declared else {
        return None;
    };
    let mut spec = process.spec.clone();
    spec.labels.clone_from(&process.labels);
    // Written anew, it is escaped anew.
    let spec = variables::unescape(&spec);
    let hosts: Vec<_> = process
        .hosts
        .iter()
        .filter_map(|(_, place)| match place {
            Where::Host(host) => Some(host.clone()),
            Where::Group { .. } => None,
        })
        .collect();
    let state = state(op_type, spec.monitor.auto_type);
    Some(print::process(process.key.as_ref()?, &hosts, state, &spec))
}

/// What somebody who makes this call wants to be so.
fn state(op_type: Option<i64>, auto_type: AutoType) -> State {
    match op_type {
        Some(1 | 9) => State::Stopped,
        Some(4) if auto_type == AutoType::OneShot => State::Stopped,
        Some(4) => State::Unhosted,
        _ => State::Running,
    }
}

fn escape(spec: &mut SpecEntry) {
    let text = |text: &mut Text| text.0 = variables::escape(&text.0);
    let loose = |value: &mut Loose| {
        if let Loose::Text(text) = value {
            *text = variables::escape(text);
        }
    };
    if let Some(i) = &mut spec.identity {
        [&mut i.setup_path, &mut i.pid_path, &mut i.config_path, &mut i.log_path, &mut i.value_key]
            .into_iter()
            .flatten()
            .for_each(text);
    }
    if let Some(c) = &mut spec.control {
        let commands = [
            &mut c.start_cmd,
            &mut c.stop_cmd,
            &mut c.restart_cmd,
            &mut c.reload_cmd,
            &mut c.kill_cmd,
            &mut c.version_cmd,
            &mut c.health_cmd,
        ];
        commands.into_iter().flatten().for_each(text);
    }
    for ConfigEntry { path, .. } in spec.configmap.iter_mut().flatten() {
        path.iter_mut().for_each(text);
    }
    for value in spec.env.iter_mut().flat_map(|env| env.0.values_mut()) {
        match value {
            EnvEntry::Plain(value) => loose(value),
            EnvEntry::Source(EnvSource { file, value, .. }) => {
                file.iter_mut().for_each(text);
                value.iter_mut().for_each(loose);
            }
        }
    }
}
