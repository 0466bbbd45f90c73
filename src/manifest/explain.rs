//! Field explanations for `abide explain`: meaning of a field, and which file sets its value in a tree.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_yaml::Value;

use super::check::DeclaredObject;
use super::check::short_form::SHORT_FIELDS;
use super::grammar::{self, Entry, Section, Shape};
use super::locate::Locator;
use super::problem::{FieldPath, PathPart, did_you_mean};
use super::{Limits, Loaded};
use crate::model::{ProcessKey, SourceLocation};

/// A field, or a section with its fields.
#[derive(Debug)]
pub struct Explanation {
    /// Path from the document's root.
    pub path: String,
    pub kind: &'static Section,
    /// `None` for the kind itself.
    pub entry: Option<&'static Entry>,
    pub inside: Option<&'static Section>,
}

/// Finds a field by its path from a document's root. The leading `spec.` is optional, and so is a kind as prefix.
/// `Err` holds a similar path, if there is one.
pub fn find(path: &str) -> Result<Explanation, Option<String>> {
    let path: String =
        path.split('.').map(|name| name.split('[').next().unwrap_or(name)).collect::<Vec<_>>().join(".");
    for kind in grammar::ALL_KINDS {
        let own = path.strip_prefix(kind.name).map(|rest| rest.trim_start_matches('.'));
        if own == Some("") {
            return Ok(Explanation { path, kind, entry: None, inside: Some(kind) });
        }
        let mut tries = [Some(path.clone()), Some(format!("spec.{path}")), own.map(str::to_owned)];
        // The variables of a process have one documentation, that of the spec.
        if path == "env" || path.starts_with("env.") {
            tries.swap(0, 1);
        }
        for path in tries.into_iter().flatten() {
            if let Some((entry, inside)) = walk(kind, &path) {
                return Ok(Explanation { path, kind, entry: Some(entry), inside });
            }
        }
    }
    // A bare name such as `start_check_secs`, if it is unique.
    let mut same: BTreeMap<String, &'static Section> = BTreeMap::new();
    for kind in grammar::ALL_KINDS.into_iter().rev() {
        let known = paths(kind).into_iter().map(|(path, _)| path);
        same.extend(known.filter(|known| known.rsplit('.').next() == Some(&path)).map(|path| (path, kind)));
    }
    if same.len() == 1
        && let Some((path, kind)) = same.pop_first()
        && let Some((entry, inside)) = walk(kind, &path)
    {
        return Ok(Explanation { path, kind, entry: Some(entry), inside });
    }
    Err(closest_field(&path))
}

/// The path of a field with the same or a similar name, in any section.
fn closest_field(path: &str) -> Option<String> {
    let all = grammar::ALL_KINDS.iter().flat_map(|kind| paths(kind)).map(|(path, _)| path);
    let all: Vec<String> = all.map(|path| path.strip_prefix("spec.").unwrap_or(&path).to_owned()).collect();
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let names: Vec<String> = all.iter().map(|path| last(path)).collect();
    let name = did_you_mean(&last(path), names.iter().map(String::as_str))?;
    let at = names.iter().position(|known| known == name)?;
    Some(all[at].clone())
}

fn walk(section: &'static Section, path: &str) -> Option<(&'static Entry, Option<&'static Section>)> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let entry = section.entry(name)?;
    let inside = inner(&entry.shape);
    match rest {
        None => Some((entry, inside)),
        Some(rest) => match (&entry.shape, inside) {
            // `env.PATH` is a value of env; `env.PATH.file` is a field of that value.
            (Shape::Map(_), inside) => match (rest.split_once('.'), inside) {
                (Some((_, rest)), Some(inside)) => walk(inside, rest),
                _ => Some((entry, inside)),
            },
            (_, Some(inside)) => walk(inside, rest),
            (_, None) => None,
        },
    }
}

/// The section of a value of this shape, or of its items.
fn inner(shape: &'static Shape) -> Option<&'static Section> {
    match shape {
        Shape::Section(section) => Some(section),
        Shape::List(of) | Shape::Map(of) => inner(of),
        Shape::OneOf(shapes) => shapes.iter().find_map(inner),
        _ => None,
    }
}

/// All paths of a kind with their entries, in grammar order.
pub fn paths(kind: &'static Section) -> Vec<(String, &'static Entry)> {
    fn collect(section: &'static Section, path: &str, all: &mut Vec<(String, &'static Entry)>) {
        for entry in section.entries.iter().filter(|e| e.need != grammar::Requirement::IgnoredInBody) {
            let here = if path.is_empty() { entry.name.to_owned() } else { format!("{path}.{}", entry.name) };
            all.push((here.clone(), entry));
            // The fields of a short form are those of its long form.
            let is_short = path.is_empty() && SHORT_FIELDS.iter().any(|(short, _)| *short == entry.name);
            let has_own_fields = !is_short && !matches!(entry.shape, Shape::Map(_));
            if let Some(inside) = inner(&entry.shape).filter(|_| has_own_fields) {
                collect(inside, &here, all);
            }
        }
    }
    let mut all = Vec::new();
    collect(kind, "", &mut all);
    all
}

/// The value of a field for one process, and its source.
#[derive(Debug)]
pub struct FieldValue {
    pub process: ProcessKey,
    /// The path; for maps, which merge by key, it includes the key.
    pub path: String,
    /// `None` if unset.
    pub value: Option<ExplainedValue>,
}

#[derive(Debug)]
pub struct ExplainedValue {
    pub shown: PrintableValue,
    pub place: SourceLocation,
    /// The value comes from a Defaults document.
    pub inherited: bool,
}

/// Printable form of a value.
#[derive(Debug)]
pub enum PrintableValue {
    Plain(String),
    /// Not printed, also not as a digest: the file has no key.
    Secret,
}

/// The value of a spec field and its source location, for every process of a tree or for one.
pub fn field_values(
    loaded: &Loaded,
    path: &str,
    only: Option<&ProcessKey>,
    limits: &Limits,
) -> Vec<FieldValue> {
    let mut defaults: HashMap<&std::path::Path, Vec<(usize, Value)>> = HashMap::new();
    for (at, document) in loaded.documents.iter().enumerate() {
        if let DeclaredObject::Defaults(defaults_of) = &document.declared {
            let value = serde_yaml::to_value(&defaults_of.entry).unwrap_or_default();
            defaults.entry(&document.scope_dir).or_default().push((at, value));
        }
    }
    let mut names: Vec<&str> = path.strip_prefix("spec.").unwrap_or(path).split('.').collect();
    if names[0] == "env" {
        // An env entry is inherited as a whole, in either form.
        names.truncate(2);
    }
    let mut locator = Locator::new(loaded, limits);
    let mut all = Vec::new();
    for (at, document) in loaded.documents.iter().enumerate() {
        let DeclaredObject::Process(process) = &document.declared else { continue };
        let Some(key) = process.key.as_ref().filter(|key| only.is_none_or(|only| only == *key)) else {
            continue;
        };
        let own = (at, serde_yaml::to_value(&*process.entry).unwrap_or_default());
        // The process itself, then Defaults from the nearest directory outwards.
        let inherited = document.scope_dir.ancestors().filter_map(|dir| defaults.get(dir)).flatten();
        let layers: Vec<&(usize, Value)> = std::iter::once(&own).chain(inherited).collect();
        for names in leaves(&layers, &names) {
            let found = layers.iter().find_map(|(document, value)| Some((*document, get(value, &names)?)));
            let value = found.map(|(document, value)| {
                let path = names.iter().fold(FieldPath::of("spec"), |path, name| path.entry(name));
                let span = locator.span(document, &path, PathPart::Value);
                let file = loaded.source(document).name.clone();
                let place = SourceLocation { file, line: span.line, column: span.column };
                ExplainedValue { shown: printable(&names, value), place, inherited: document != at }
            });
            all.push(FieldValue { process: key.clone(), path: names.join("."), value });
        }
    }
    all
}

/// The path itself, or one path per key if it leads to a section or to env.
fn leaves(layers: &[&(usize, Value)], names: &[&str]) -> Vec<Vec<String>> {
    let own: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut keys = BTreeSet::new();
    for (_, value) in layers {
        if let Some(Value::Mapping(map)) = get(value, &own).filter(|_| names.len() == 1) {
            keys.extend(map.keys().filter_map(Value::as_str).map(str::to_owned));
        }
    }
    if keys.is_empty() {
        return vec![own];
    }
    keys.into_iter().map(|key| own.iter().cloned().chain([key]).collect()).collect()
}

fn get<'v>(value: &'v Value, names: &[String]) -> Option<&'v Value> {
    names.iter().try_fold(value, |value, name| value.get(name.as_str()))
}

fn printable(names: &[String], value: &Value) -> PrintableValue {
    let secret = value.get("secret").and_then(Value::as_bool) == Some(true);
    if names[0] == "env" && secret {
        return PrintableValue::Secret;
    }
    PrintableValue::Plain(match value {
        Value::String(text) => format!("{text:?}"),
        other => serde_json::to_string(other).unwrap_or_default(),
    })
}
