//! Defaults resolution: default fields for a directory and below. The nearest Defaults wins, field by field.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use serde_yaml::Value;

use super::super::Declaration;
use super::super::check::{self, DeclaredObject, Process, ProcessForm, ValueChecker};
use super::super::document::{Overlay, SpecEntry};
use super::super::problem::{Code, FieldPath, OTHER_LOCATION, PathProblem};
use super::super::variable_scopes::DefaultVars;
use super::super::variables::VariableUse;
use super::{Findings, with_values};
use crate::model::HashedSpec;

/// Merged Defaults per directory, and whether one of them has an error.
#[derive(Debug)]
pub struct Defaults {
    by_dir: BTreeMap<PathBuf, Layer>,
}

#[derive(Debug, Default)]
struct Layer {
    entry: SpecEntry,
    /// Problems of the Defaults themselves, which are not repeated for each process below.
    known: HashSet<(Code, FieldPath)>,
    bad: bool,
}

impl Defaults {
    pub fn collect(
        documents: &[Declaration],
        findings: &[(usize, PathProblem)],
        vars: &DefaultVars,
        found: &mut Findings,
    ) -> Defaults {
        let mut by_dir: BTreeMap<PathBuf, Layer> = BTreeMap::new();
        let mut set: HashMap<(&FilePath, FieldPath), (usize, Value)> = HashMap::new();
        for (at, document) in documents.iter().enumerate() {
            let DeclaredObject::Defaults(values) = &document.declared else { continue };
            let entry = &values.entry;
            let mut conflict = None;
            for (path, value) in leaves(entry) {
                let (other, earlier) = set
                    .entry((document.scope_dir.as_path(), path.clone()))
                    .or_insert_with(|| (at, value.clone()));
                if *earlier != value {
                    conflict = conflict.or(Some((*other, path)));
                }
            }
            if let Some((other, path)) = conflict {
                let message =
                    format!("{path} has another default at {OTHER_LOCATION}, in the same directory");
                let finding = PathProblem::new(Code::DefaultsConflict, path.clone(), message);
                found.push((at, finding.hint("keep one of them").other(other, path)));
            }
            let layer = by_dir.entry(document.scope_dir.clone()).or_default();
            layer.entry.fill_from(entry);
            layer.bad |= document.bad;
            for finding in vars.undefined(&values.uses) {
                layer.bad = true;
                layer.known.insert((finding.code, finding.path.clone()));
                found.push((at, finding));
            }
        }
        for (at, finding) in findings {
            if let (DeclaredObject::Defaults(_), Some(layer)) =
                (&documents[*at].declared, by_dir.get_mut(&documents[*at].scope_dir))
            {
                layer.known.insert((finding.code, finding.path.clone()));
            }
        }
        Defaults { by_dir }
    }

    /// Whether a Defaults above a document has an error, so that its inherited fields are not known.
    pub fn has_error_above(&self, document: &Declaration) -> bool {
        document.scope_dir.ancestors().any(|dir| self.by_dir.get(dir).is_some_and(|layer| layer.bad))
    }

    /// Whether a Defaults above a document has this problem itself.
    pub fn is_known(&self, document: &Declaration, finding: &PathProblem) -> bool {
        let reported = (finding.code, finding.path.clone());
        let mut layers = document.scope_dir.ancestors().filter_map(|dir| self.by_dir.get(dir));
        layers.any(|layer| layer.known.contains(&reported))
    }

    /// Merges a process's spec with the Defaults above it, and checks the result.
    pub fn apply(
        &self,
        at: usize,
        document: &Declaration,
        process: &Process,
        found: &mut Findings,
    ) -> (Arc<HashedSpec>, VariableUse) {
        let layers: Vec<&Layer> =
            document.scope_dir.ancestors().filter_map(|dir| self.by_dir.get(dir)).collect();
        if !layers.is_empty() {
            return self.merge_layers(at, process, &layers, found);
        }
        with_values(at, found, |values| check::require(&process.entry, process.state, process.form, values));
        (Arc::clone(&process.spec), process.uses.clone())
    }

    fn merge_layers(
        &self,
        at: usize,
        process: &Process,
        layers: &[&Layer],
        found: &mut Findings,
    ) -> (Arc<HashedSpec>, VariableUse) {
        let numbered = process.instances.is_some();
        let root = FieldPath::of("spec");
        let mut entry = SpecEntry::clone(&process.entry);
        layers.iter().for_each(|layer| entry.fill_from(&layer.entry));
        let mut own = ValueChecker::default();
        check::spec(&process.entry, &root, numbered, &mut own);
        let mut values = ValueChecker::default();
        let mut spec = check::spec(&entry, &root, numbered, &mut values);
        spec.labels.clone_from(&process.labels);
        let mut uses = values.uses;
        if let Some(key) = process.key.as_ref().filter(|_| process.form == ProcessForm::Short) {
            check::short_form::complete(&mut spec, key, numbered, &mut uses);
        }
        let known = |finding: &PathProblem| {
            let reported = (finding.code, finding.path.clone());
            own.findings.contains(finding) || layers.iter().any(|layer| layer.known.contains(&reported))
        };
        found.extend(
            values.findings.into_iter().filter(|finding| !known(finding)).map(|finding| (at, finding)),
        );
        // An invalid Defaults might have set the field: do not report it as missing.
        if !layers.iter().any(|layer| layer.bad) {
            with_values(at, found, |values| check::require(&entry, process.state, process.form, values));
        }
        (Arc::new(HashedSpec::new(spec)), uses)
    }
}

/// All values of a Defaults with their paths. A list is one value.
fn leaves(entry: &SpecEntry) -> Vec<(FieldPath, Value)> {
    fn walk(value: Value, path: FieldPath, all: &mut Vec<(FieldPath, Value)>) {
        match value {
            Value::Mapping(map) => {
                for (key, value) in map {
                    walk(value, path.entry(key.as_str().unwrap_or_default()), all);
                }
            }
            value => all.push((path, value)),
        }
    }
    let mut all = Vec::new();
    walk(serde_yaml::to_value(entry).unwrap_or_default(), FieldPath::of("spec"), &mut all);
    all
}
