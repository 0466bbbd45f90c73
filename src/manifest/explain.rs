//! What a field is, for people; and, in a tree of manifests, which file gave it its value.

use serde_yaml::Value;

use super::check::Declared;
use super::grammar::{self, Entry, Section, Shape};
use super::problem::{Path, did_you_mean};
use super::{Limits, Loaded};
use crate::model::{Place, ProcessKey};

/// A field, or a section with its fields.
#[derive(Debug)]
pub struct Explanation {
    /// From the document's root.
    pub path: String,
    pub kind: &'static Section,
    /// `None`: the kind as a whole.
    pub entry: Option<&'static Entry>,
    pub inside: Option<&'static Section>,
}

/// Finds a field by its path from a document's root; a leading `spec.` may be left out, a kind may stand before.
/// `Err` holds the path that was likely meant.
pub fn find(path: &str) -> Result<Explanation, Option<String>> {
    let path: String =
        path.split('.').map(|name| name.split('[').next().unwrap_or(name)).collect::<Vec<_>>().join(".");
    for kind in grammar::ALL_KINDS {
        let own = path.strip_prefix(kind.name).map(|rest| rest.trim_start_matches('.'));
        if own == Some("") {
            return Ok(Explanation { path, kind, entry: None, inside: Some(kind) });
        }
        let tries = [Some(path.clone()), Some(format!("spec.{path}")), own.map(str::to_owned)];
        for path in tries.into_iter().flatten() {
            if let Some((entry, inside)) = walk(kind, &path) {
                return Ok(Explanation { path, kind, entry: Some(entry), inside });
            }
        }
    }
    let all: Vec<String> =
        grammar::ALL_KINDS.iter().flat_map(|kind| paths(kind)).map(|(path, _)| path).collect();
    let last = path.rsplit('.').next().unwrap_or(&path);
    let ends = all.iter().find(|known| known.rsplit('.').next() == Some(last)).map(String::as_str);
    let short = all.iter().map(|known| known.strip_prefix("spec.").unwrap_or(known));
    Err(ends.or_else(|| did_you_mean(&path, short)).map(str::to_owned))
}

fn walk(section: &'static Section, path: &str) -> Option<(&'static Entry, Option<&'static Section>)> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let entry = section.entry(name)?;
    let inside = inner(&entry.shape);
    match rest {
        None => Some((entry, inside)),
        Some(rest) => match (&entry.shape, inside) {
            // `env.PATH` is a value of env; `env.PATH.file` is a field of it.
            (Shape::Map(_), inside) => match (rest.split_once('.'), inside) {
                (Some((_, rest)), Some(inside)) => walk(inside, rest),
                _ => Some((entry, inside)),
            },
            (_, Some(inside)) => walk(inside, rest),
            (_, None) => None,
        },
    }
}

/// The section that a value of this shape is, or consists of.
fn inner(shape: &'static Shape) -> Option<&'static Section> {
    match shape {
        Shape::Section(section) => Some(section),
        Shape::List(of) | Shape::Map(of) => inner(of),
        Shape::OneOf(shapes) => shapes.iter().find_map(inner),
        _ => None,
    }
}

/// Every path of a kind, with its entry, in the order of the grammar.
pub fn paths(kind: &'static Section) -> Vec<(String, &'static Entry)> {
    fn collect(section: &'static Section, path: &str, all: &mut Vec<(String, &'static Entry)>) {
        for entry in section.entries.iter().filter(|e| e.need != grammar::Need::IgnoredInBody) {
            let here = if path.is_empty() { entry.name.to_owned() } else { format!("{path}.{}", entry.name) };
            all.push((here.clone(), entry));
            if let Some(inside) = inner(&entry.shape).filter(|_| !matches!(entry.shape, Shape::Map(_))) {
                collect(inside, &here, all);
            }
        }
    }
    let mut all = Vec::new();
    collect(kind, "", &mut all);
    all
}

/// A value that a process has for a field, and who gave it.
#[derive(Debug)]
pub struct Given {
    pub process: ProcessKey,
    /// The path, down to the key for maps, which merge key by key.
    pub path: String,
    pub value: Option<String>,
    /// The file, line and column; unset: nobody gave it.
    pub place: Option<Place>,
    /// It came from a Defaults document.
    pub inherited: bool,
}

/// For every process of a tree: the value of a spec field, and the place that gave it.
pub fn given(loaded: &Loaded, path: &str, limits: &Limits) -> Vec<Given> {
    let mut all = Vec::new();
    for (at, document) in loaded.documents.iter().enumerate() {
        let Declared::Process(process) = &document.declared else {
            continue;
        };
        let Some(key) = &process.key else { continue };
        // The process itself, then Defaults from the nearest directory outwards.
        let mut layers = vec![(at, serde_yaml::to_value(&process.entry).unwrap_or_default())];
        for home in document.home.ancestors() {
            for (other, defaults) in loaded.documents.iter().enumerate().filter(|(_, d)| d.home == home) {
                if let Declared::Defaults(entry) = &defaults.declared {
                    layers.push((other, serde_yaml::to_value(entry).unwrap_or_default()));
                }
            }
        }
        let names: Vec<&str> = path.strip_prefix("spec.").unwrap_or(path).split('.').collect();
        for names in leaves(&layers, &names) {
            let found = layers.iter().find_map(|(document, value)| Some((*document, get(value, &names)?)));
            let place = found.map(|(document, _)| {
                let way = names.iter().fold(Path::of("spec"), |way, name| way.entry(name));
                loaded.place_of(document, &way, limits)
            });
            all.push(Given {
                process: key.clone(),
                path: names.join("."),
                value: found.map(|(_, value)| shown(&names, value)),
                inherited: found.is_some_and(|(document, _)| document != at),
                place,
            });
        }
    }
    all
}

/// The path itself, or one path a key where it leads to a map.
fn leaves(layers: &[(usize, Value)], names: &[&str]) -> Vec<Vec<String>> {
    let own = || names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let owned = own();
    let mut keys = std::collections::BTreeSet::new();
    for (_, value) in layers {
        if let Some(Value::Mapping(map)) = get(value, &owned) {
            keys.extend(map.keys().filter_map(Value::as_str).map(str::to_owned));
        }
    }
    if keys.is_empty() {
        return vec![owned];
    }
    keys.into_iter().map(|key| own().into_iter().chain([key]).collect()).collect()
}

fn get<'v>(value: &'v Value, names: &[String]) -> Option<&'v Value> {
    names.iter().try_fold(value, |value, name| value.get(name.as_str()))
}

/// A secret is not shown, wherever it stands.
fn shown(names: &[String], value: &Value) -> String {
    let secret = |value: &Value| value.get("secret").and_then(Value::as_bool) == Some(true);
    if names.first().is_some_and(|name| name == "env") && secret(value) {
        return "(secret)".to_owned();
    }
    match value {
        Value::String(text) => format!("{text:?}"),
        other => serde_json::to_string(other).unwrap_or_default(),
    }
}
