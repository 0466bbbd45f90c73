//! Checks of an Overlay: its bases, variables and patches.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_yaml::{Mapping, Value};

use super::ValueChecker;
use crate::manifest::document::{Document, MatchEntry, PatchEntry};
use crate::manifest::problem::{Code, FieldPath, PathProblem};
use crate::manifest::variable_scopes::{self, VarMap};
use crate::model::{Selector, glob};

/// Maximum number of patches of an overlay whose match has a pattern: each is compared with every process.
const MAX_PATTERNS: usize = 1_000;

/// Maximum number of patches of an overlay: a problem is looked up in all patches of its process.
const MAX_PATCHES: usize = 20_000;

/// An Overlay with its valid fields.
#[derive(Debug, Default)]
pub struct DeclaredOverlay {
    /// As written.
    pub bases: Vec<String>,
    pub vars: Option<Arc<VarMap>>,
    pub patches: Vec<Patch>,
    /// Patches of one process, by namespace and name.
    exact: HashMap<(String, String), Vec<usize>>,
    /// All other patches.
    patterns: Vec<usize>,
}

/// A change of the processes that match.
#[derive(Debug)]
pub struct Patch {
    namespace: String,
    name: String,
    labels: Option<Selector>,
    pub fields: Mapping,
    /// The same fields as a document, if they merge field by field without a conversion.
    pub typed: Option<Box<Document>>,
    pub optional: bool,
    /// Number of values in `fields`.
    pub values: usize,
}

impl Patch {
    /// A patch of all processes.
    #[cfg(test)]
    pub fn of_fields(fields: Mapping) -> Patch {
        let (namespace, name) = ("*".to_owned(), "*".to_owned());
        let typed = typed_fields(&fields);
        Patch { namespace, name, labels: None, fields, typed, optional: false, values: 0 }
    }

    fn matches(&self, namespace: &str, name: &str, labels: &BTreeMap<String, String>) -> bool {
        glob(&self.namespace, namespace)
            && glob(&self.name, name)
            && self.labels.as_ref().is_none_or(|selector| selector.matches(labels))
    }

    /// The match as `NAMESPACE/NAME`, for messages.
    pub fn target(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

impl DeclaredOverlay {
    /// The patches of a process, in the order of the overlay.
    pub fn patches_of(&self, namespace: &str, name: &str, labels: &BTreeMap<String, String>) -> Vec<usize> {
        let exact = match self.exact.is_empty() {
            true => None,
            false => self.exact.get(&(namespace.to_owned(), name.to_owned())),
        };
        let all = exact.into_iter().flatten().chain(&self.patterns);
        let mut all: Vec<usize> =
            all.copied().filter(|at| self.patches[*at].matches(namespace, name, labels)).collect();
        all.sort_unstable();
        all
    }
}

pub fn overlay(document: Document, values: &mut ValueChecker) -> DeclaredOverlay {
    let vars = variable_scopes::check(&FieldPath::of("vars"), document.vars.as_ref(), values);
    let bases = document.base.iter().flat_map(|base| base.paths());
    let bases = bases.map(|path| path.to_string()).collect();
    let mut declared = DeclaredOverlay { bases, vars, ..DeclaredOverlay::default() };
    let mut patterns = 0;
    let patches = document.patches.unwrap_or_default();
    if patches.len() > MAX_PATCHES {
        let message = format!("the overlay has {} patches, more than {MAX_PATCHES}", patches.len());
        let problem = PathProblem::new(Code::TooLarge, FieldPath::of("patches"), message).at_key();
        values.report(problem.hint("use variables, or patches with patterns"));
    }
    for (at, entry) in patches.into_iter().take(MAX_PATCHES).enumerate() {
        let path = FieldPath::of("patches").index(at);
        let patch = patch(entry, &path, values);
        let is_exact = !patch.namespace.contains('*') && !patch.name.contains('*');
        if is_exact {
            let key = (patch.namespace.clone(), patch.name.clone());
            declared.exact.entry(key).or_default().push(at);
        } else {
            patterns += 1;
            if patterns <= MAX_PATTERNS {
                declared.patterns.push(at);
            }
        }
        declared.patches.push(patch);
    }
    if patterns > MAX_PATTERNS {
        let message = format!("the overlay has {patterns} patches with patterns, more than {MAX_PATTERNS}");
        let problem = PathProblem::new(Code::TooLarge, FieldPath::of("patches"), message).at_key();
        values.report(problem.hint("name the namespace and the process, or use labels"));
    }
    declared
}

fn patch(entry: PatchEntry, path: &FieldPath, values: &mut ValueChecker) -> Patch {
    if entry.target.is_none() {
        let message = format!("{path}.match is missing");
        let problem = PathProblem::new(Code::MissingField, path.key("match"), message);
        values.report(problem.hint("match: {namespace: NS, name: NAME}; {} matches all processes").at_key());
    }
    if entry.patch.is_none() {
        let message = format!("{path}.patch is missing");
        let problem = PathProblem::new(Code::MissingField, path.key("patch"), message);
        values.report(problem.hint("the fields of the process to change").at_key());
    }
    let MatchEntry { namespace, name, labels } = entry.target.unwrap_or_default();
    for (field, text) in [("namespace", &namespace), ("name", &name), ("labels", &labels)] {
        if text.as_deref().is_some_and(str::is_empty) {
            let message = format!("{path}.match.{field} is empty");
            let problem = PathProblem::new(Code::WrongType, path.key("match").key(field), message);
            values.report(problem.hint("omit it to match every process"));
        }
    }
    let pattern = |text: Option<&str>| text.filter(|text| !text.is_empty()).unwrap_or("*").to_owned();
    let labels = labels.filter(|text| !text.is_empty()).and_then(|text| match text.parse() {
        Ok(selector) => Some(selector),
        Err(error) => {
            let at = path.key("match").key("labels");
            values.report(
                PathProblem::new(Code::BadSelector, at, format!("the selector is invalid: {error}"))
                    .hint("such as tier=front,rack in (a,b),!old"),
            );
            None
        }
    });
    let fields = entry.patch.unwrap_or_default().0;
    Patch {
        namespace: pattern(namespace.as_deref()),
        name: pattern(name.as_deref()),
        labels,
        values: fields.values().map(count).sum(),
        typed: typed_fields(&fields),
        fields,
        optional: entry.optional.unwrap_or_default(),
    }
}

/// The fields as a document: without nulls, fields of the short form, and values with a short and a long form.
fn typed_fields(fields: &Mapping) -> Option<Box<Document>> {
    const TYPED: [&str; 7] = ["meta", "hosts", "state", "instances", "depends_on", "protect", "spec"];
    const UNTYPED: [&str; 3] = ["health", "restart", "hooks"];
    let is_typed = |key: &Value| key.as_str().is_some_and(|name| TYPED.contains(&name));
    let is_untyped = |key: &Value| key.as_str().is_some_and(|name| UNTYPED.contains(&name));
    let spec = fields.get("spec").and_then(Value::as_mapping);
    if !fields.keys().all(is_typed)
        || spec.is_some_and(|spec| spec.keys().any(is_untyped))
        || fields.values().any(has_null)
    {
        return None;
    }
    serde_yaml::from_value(Value::Mapping(fields.clone())).ok().map(Box::new)
}

fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Mapping(map) => map.values().any(has_null),
        Value::Sequence(items) => items.iter().any(has_null),
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Tagged(_) => false,
    }
}

/// Number of values, keys included. The parser limits the depth.
fn count(value: &Value) -> usize {
    match value {
        Value::Sequence(items) => items.iter().map(count).sum::<usize>() + 1,
        Value::Mapping(map) => map.values().map(count).sum::<usize>() + map.len() + 1,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Tagged(_) => 1,
    }
}
