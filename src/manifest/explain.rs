//! Field explanations for `abide explain`: meaning of a field, and which file sets its value in a tree.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use serde_yaml::Value;

use super::check::short_form::SHORT_FIELDS;
use super::check::{DeclaredObject, Placement};
use super::grammar::{self, Entry, Section, Shape};
use super::locate::Locator;
use super::problem::{FieldPath, PathPart, did_you_mean};
use super::{Limits, Loaded, variables};
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
        // The match of a patch repeats fields of a Process.
        let known = paths(kind).into_iter().map(|(path, _)| path).filter(|path| !path.contains(".match."));
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
    pub origin: ValueOrigin,
}

/// The kind of object that sets a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    Process,
    /// A patch of an overlay.
    Patch,
    Defaults,
    /// Variables of an overlay, of a host group or of a host.
    Overlay,
    HostGroup,
    Host,
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
    let mut names: Vec<&str> = path.strip_prefix("spec.").unwrap_or(path).split('.').collect();
    if names[0] == "env" {
        // An env entry is inherited as a whole, in either form.
        names.truncate(2);
    }
    let mut values = ProcessValues::new(loaded, limits);
    let mut all = Vec::new();
    for (at, key) in processes(loaded, only) {
        let layers = values.layers(at);
        for names in leaves(&layers, &names) {
            let value = values.value(at, &layers, &names);
            all.push(FieldValue { process: key.clone(), path: names.join("."), value });
        }
    }
    all
}

/// Every value of every process of a tree, or of one, with the variables in it.
pub fn every_value(loaded: &Loaded, only: Option<&ProcessKey>, limits: &Limits) -> Vec<FieldValue> {
    let mut values = ProcessValues::new(loaded, limits);
    let mut all = Vec::new();
    for (at, key) in processes(loaded, only) {
        let field =
            |path: String, value: Option<ExplainedValue>| FieldValue { process: key.clone(), path, value };
        all.push(field("hosts".to_owned(), values.hosts(at)));
        let layers = values.layers(at);
        let mut paths = BTreeSet::new();
        layers.iter().for_each(|(_, value)| every_leaf(value, &mut Vec::new(), &mut paths));
        let mut names = BTreeSet::new();
        for path in paths {
            let value = values.value(at, &layers, &path);
            if let Some(ExplainedValue { shown: PrintableValue::Plain(text), .. }) = &value {
                names.extend(variables_in(text));
            }
            all.push(field(path.join("."), value));
        }
        // A variable may use others.
        let mut known = BTreeSet::new();
        while let Some(name) = names.pop_first() {
            if !known.insert(name.clone()) {
                continue;
            }
            for value in values.variable(at, &name) {
                if let PrintableValue::Plain(text) = &value.shown {
                    names.extend(variables_in(text));
                }
                all.push(field(format!("${{{name}}}"), Some(value)));
            }
        }
    }
    all
}

/// The processes of a tree, or one, with the indexes of their documents.
fn processes<'a>(
    loaded: &'a Loaded,
    only: Option<&'a ProcessKey>,
) -> impl Iterator<Item = (usize, &'a ProcessKey)> {
    loaded.documents.iter().enumerate().filter_map(move |(at, document)| match &document.declared {
        DeclaredObject::Process(process) => {
            let key = process.key.as_ref().filter(|key| only.is_none_or(|only| only == *key))?;
            Some((at, key))
        }
        _ => None,
    })
}

/// Names of the user's variables in a value.
fn variables_in(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    variables::first_error(text, true, &mut |name, _| names.push(name.to_owned()));
    names
}

/// Paths of all values. A list is one value, and so is an entry of env.
fn every_leaf(value: &Value, path: &mut Vec<String>, all: &mut BTreeSet<Vec<String>>) {
    match value {
        Value::Mapping(map) if !(path.len() == 2 && path[0] == "env") => {
            for (key, value) in map {
                path.push(key.as_str().unwrap_or_default().to_owned());
                every_leaf(value, path, all);
                path.pop();
            }
        }
        _ => {
            all.insert(path.clone());
        }
    }
}

/// The documents with values for a process: their indexes and specs, the process first.
type ValueLayers = Vec<(usize, Value)>;

/// Values of processes with their locations.
struct ProcessValues<'a> {
    loaded: &'a Loaded,
    locator: Locator<'a>,
    /// Defaults by directory.
    defaults: HashMap<&'a Path, ValueLayers>,
}

impl<'a> ProcessValues<'a> {
    fn new(loaded: &'a Loaded, limits: &'a Limits) -> ProcessValues<'a> {
        let mut defaults: HashMap<&Path, ValueLayers> = HashMap::new();
        for (at, document) in loaded.documents.iter().enumerate() {
            if let DeclaredObject::Defaults(defaults_of) = &document.declared {
                let value = serde_yaml::to_value(&defaults_of.entry).unwrap_or_default();
                defaults.entry(&document.scope_dir).or_default().push((at, value));
            }
        }
        ProcessValues { loaded, locator: Locator::new(loaded, limits), defaults }
    }

    /// The process itself, then Defaults from the nearest directory outwards.
    fn layers(&self, at: usize) -> ValueLayers {
        let document = &self.loaded.documents[at];
        let DeclaredObject::Process(process) = &document.declared else { return Vec::new() };
        let own = (at, serde_yaml::to_value(&*process.entry).unwrap_or_default());
        let inherited = document.scope_dir.ancestors().filter_map(|dir| self.defaults.get(dir)).flatten();
        std::iter::once(own).chain(inherited.cloned()).collect()
    }

    fn value(&mut self, at: usize, layers: &ValueLayers, names: &[String]) -> Option<ExplainedValue> {
        let (document, value) =
            layers.iter().find_map(|(document, value)| Some((*document, get(value, names)?)))?;
        let path = names.iter().fold(FieldPath::of("spec"), |path, name| path.entry(name));
        let (place, is_patch) = self.place(document, &path);
        let origin = match (document == at, is_patch) {
            (false, _) => ValueOrigin::Defaults,
            (true, true) => ValueOrigin::Patch,
            (true, false) => ValueOrigin::Process,
        };
        Some(ExplainedValue { shown: printable(names, value), place, origin })
    }

    /// The location of a field, and whether it is in a patch.
    fn place(&mut self, document: usize, path: &FieldPath) -> (SourceLocation, bool) {
        let (source, span) = self.locator.location(document, path, PathPart::Value);
        let file = self.loaded.sources[source].name.clone();
        let is_patch = source != self.loaded.documents[document].source;
        (SourceLocation { file, line: span.line, column: span.column }, is_patch)
    }

    fn hosts(&mut self, at: usize) -> Option<ExplainedValue> {
        let DeclaredObject::Process(process) = &self.loaded.documents[at].declared else { return None };
        let shown = |placement: &Placement| match placement {
            Placement::Host { host, .. } => host.key.to_string(),
            Placement::Group { name, chosen: None, .. } => format!("group {name}"),
            Placement::Group { name, chosen: Some(chosen), .. } => format!("group {name} with {chosen}"),
        };
        let mut texts: Vec<String> = process.hosts.iter().take(20).map(|(_, one)| shown(one)).collect();
        if process.hosts.len() > texts.len() {
            texts.push(format!("{} more", process.hosts.len() - texts.len()));
        }
        let (place, is_patch) = self.place(at, &FieldPath::of("hosts"));
        let origin = if is_patch { ValueOrigin::Patch } else { ValueOrigin::Process };
        Some(ExplainedValue { shown: PrintableValue::Plain(texts.join(", ")), place, origin })
    }

    /// The values of a variable for the hosts of a process: those of an overlay, or else of hosts, groups and Defaults.
    fn variable(&mut self, at: usize, name: &str) -> Vec<ExplainedValue> {
        let loaded = self.loaded;
        let document = &loaded.documents[at];
        for layer in document.layers.layers().iter().rev() {
            let value = layer.overlay.vars.as_ref().and_then(|vars| vars.get(name));
            if let (Some(value), Some(overlay)) = (value, self.locator.overlay_of(layer.source)) {
                return vec![self.variable_value(
                    overlay,
                    FieldPath::of("vars"),
                    name,
                    value,
                    ValueOrigin::Overlay,
                )];
            }
        }
        let DeclaredObject::Process(process) = &document.declared else { return Vec::new() };
        let mut found = Vec::new();
        let entry_vars = |entry: usize| FieldPath::of("hosts").index(entry).key("vars");
        for (entry, placement) in &process.hosts {
            if let Some(value) = placement.vars().and_then(|vars| vars.get(name)) {
                found.push((at, entry_vars(*entry), value, ValueOrigin::Host));
            }
            let Placement::Group { name: group, .. } = placement else { continue };
            for (at, other) in loaded.documents.iter().enumerate() {
                let DeclaredObject::Group(declared) = &other.declared else { continue };
                if declared.name.as_deref() != Some(group) {
                    continue;
                }
                for member in declared.hosts.iter().take(MAX_HOSTS) {
                    if let Some(value) = member.vars.as_ref().and_then(|vars| vars.get(name)) {
                        found.push((at, entry_vars(member.entry), value, ValueOrigin::Host));
                    }
                }
                if let Some(value) = declared.vars.as_ref().and_then(|vars| vars.get(name)) {
                    found.push((at, FieldPath::of("vars"), value, ValueOrigin::HostGroup));
                }
            }
        }
        let nearest = document.scope_dir.ancestors().find_map(|dir| {
            loaded.documents.iter().enumerate().filter(|(_, other)| other.scope_dir == dir).find_map(
                |(at, other)| match &other.declared {
                    DeclaredObject::Defaults(defaults) => Some((at, defaults.vars.as_ref()?.get(name)?)),
                    _ => None,
                },
            )
        });
        if let Some((at, value)) = nearest {
            found.push((at, FieldPath::of("vars"), value, ValueOrigin::Defaults));
        }
        let located = found.into_iter().take(MAX_HOSTS);
        located.map(|(at, path, value, origin)| self.variable_value(at, path, name, value, origin)).collect()
    }

    fn variable_value(
        &mut self,
        document: usize,
        vars: FieldPath,
        name: &str,
        value: &str,
        origin: ValueOrigin,
    ) -> ExplainedValue {
        let (place, _) = self.place(document, &vars.entry(name));
        ExplainedValue { shown: PrintableValue::Plain(format!("{value:?}")), place, origin }
    }
}

/// Maximum number of hosts whose values of a variable are listed.
const MAX_HOSTS: usize = 100;

/// The path itself, or one path per key if it leads to a section or to env.
fn leaves(layers: &ValueLayers, names: &[&str]) -> Vec<Vec<String>> {
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
