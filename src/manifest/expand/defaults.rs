//! Defaults: fields for a directory and below. The nearest wins, field by field.

use std::collections::BTreeMap;
use std::path::{Path as FilePath, PathBuf};

use serde_yaml::Value;

use super::super::Declaration;
use super::super::check::{self, Declared, Process, Values};
use super::super::document::{Overlay, SpecEntry};
use super::super::problem::{Code, Finding, Path};
use super::with_values;
use crate::model::Spec;

/// Per directory: all Defaults written there, laid over each other, and whether one of them has an error.
pub struct Defaults {
    by_home: BTreeMap<PathBuf, Layer>,
}

#[derive(Default)]
struct Layer {
    entry: SpecEntry,
    /// What is wrong with the Defaults themselves: not to be said again for each process below.
    known: Vec<(Code, Path)>,
    bad: bool,
}

impl Defaults {
    pub fn collect(
        documents: &[Declaration],
        findings: &[(usize, Finding)],
        found: &mut Vec<(usize, Finding)>,
    ) -> Defaults {
        let mut by_home: BTreeMap<PathBuf, Layer> = BTreeMap::new();
        let mut first: BTreeMap<&FilePath, Vec<usize>> = BTreeMap::new();
        for (at, document) in documents.iter().enumerate() {
            let Declared::Defaults(entry) = &document.declared else {
                continue;
            };
            let earlier = first.entry(&document.home).or_default();
            for &other in earlier.iter() {
                let Declared::Defaults(theirs) = &documents[other].declared else {
                    continue;
                };
                if let Some(path) = conflict(theirs, entry) {
                    let message =
                        format!("{path} is given another value at {{other}}, for the same directory");
                    let finding = Finding::new(Code::DefaultsConflict, path.clone(), message);
                    found.push((at, finding.hint("keep one of them").other(other, path)));
                }
            }
            earlier.push(at);
            let layer = by_home.entry(document.home.clone()).or_default();
            layer.entry.over(entry);
            layer.bad |= document.bad;
            let own = findings.iter().filter(|(document, _)| *document == at);
            layer.known.extend(own.map(|(_, finding)| (finding.code, finding.path.clone())));
        }
        Defaults { by_home }
    }

    /// Does something above a document have an error? What it would inherit is then not known.
    pub fn spoil(&self, document: &Declaration) -> bool {
        document.home.ancestors().any(|home| self.by_home.get(home).is_some_and(|layer| layer.bad))
    }

    /// A process's spec with the Defaults above it, and what is wrong with the two together.
    pub fn apply(
        &self,
        at: usize,
        document: &Declaration,
        process: &Process,
        found: &mut Vec<(usize, Finding)>,
    ) -> Spec {
        let layers: Vec<&Layer> =
            document.home.ancestors().filter_map(|home| self.by_home.get(home)).collect();
        let mut spec = if layers.is_empty() {
            with_values(at, found, |values| {
                check::require(&process.entry, process.state, process.in_body, values)
            });
            process.spec.clone()
        } else {
            self.merged(at, process, &layers, found)
        };
        spec.labels.clone_from(&process.labels);
        spec
    }

    fn merged(
        &self,
        at: usize,
        process: &Process,
        layers: &[&Layer],
        found: &mut Vec<(usize, Finding)>,
    ) -> Spec {
        let numbered = process.instances.is_some();
        let root = Path::of("spec");
        let mut entry = process.entry.clone();
        layers.iter().for_each(|layer| entry.over(&layer.entry));
        let mut own = Values::default();
        check::spec(&process.entry, &root, numbered, &mut own);
        let mut values = Values::default();
        let spec = check::spec(&entry, &root, numbered, &mut values);
        let known = |finding: &Finding| {
            let said = |(code, path): &(Code, Path)| *code == finding.code && *path == finding.path;
            own.findings.contains(finding) || layers.iter().any(|layer| layer.known.iter().any(said))
        };
        found.extend(
            values.findings.into_iter().filter(|finding| !known(finding)).map(|finding| (at, finding)),
        );
        with_values(at, found, |values| check::require(&entry, process.state, process.in_body, values));
        spec
    }
}

/// The first field that two Defaults set differently.
fn conflict(a: &SpecEntry, b: &SpecEntry) -> Option<Path> {
    fn walk(a: &Value, b: &Value, path: &Path) -> Option<Path> {
        match (a, b) {
            (Value::Mapping(a), Value::Mapping(b)) => a.iter().find_map(|(key, a)| {
                let name = key.as_str()?;
                walk(a, b.get(name)?, &path.entry(name))
            }),
            _ => (a != b).then(|| path.clone()),
        }
    }
    let value = |entry| serde_yaml::to_value(entry).unwrap_or_default();
    walk(&value(a), &value(b), &Path::of("spec"))
}
