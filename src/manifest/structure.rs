//! Does a tree have the shape that the grammar gives? Finds every unknown field, wrong type and double key,
//! with its place, and makes a [`Document`] of what remains, so that the other checks still run.

use std::collections::{HashMap, HashSet};

use serde_yaml::{Mapping, Value};

use super::document::Document;
use super::grammar::{self, Requirement, Section, Shape};
use super::node::{Kind, Node, shorten};
use super::problem::{self, Code, FieldPath, PathSegment, Span, SpanProblem, did_you_mean};

/// A document as far as it could be understood.
#[derive(Debug, Default)]
pub struct ShapeResult {
    pub document: Option<Document>,
    pub faults: Vec<SpanProblem>,
    /// What was left out because it was wrong: nobody should call it missing.
    pub dropped: HashSet<FieldPath>,
}

pub fn check_shape(node: &Node) -> ShapeResult {
    let mut reader = ShapeChecker::default();
    let Kind::Map(_) = &node.kind else {
        reader.fault(Code::WrongType, node.span, || {
            let found = node.describe();
            (format!("a document is a map with meta, hosts and spec, and this is {found}"), None)
        });
        return reader.done(node);
    };
    if let Some(at) = node.get("process_infos") {
        reader.fault(Code::UnknownKind, at.span, || {
            let hint = "`abide convert FILE` makes manifests of it";
            ("this is a request body of JOB, not a manifest".into(), Some(hint.into()))
        });
        return reader.done(node);
    }
    let kind = node.get("kind").and_then(Node::text);
    let section = grammar::section(kind);
    reader.root = Some(section);
    reader.in_body = node.get("apiVersion").is_none() && node.get("kind").is_none();
    let value = reader.section(node, section, &FieldPath::root());
    reader.finish(node, value)
}

/// The same for any other section: `T` is its type.
pub fn check_shape_as<T: serde::de::DeserializeOwned>(
    node: &Node,
    section: &'static Section,
) -> (Option<T>, Vec<SpanProblem>) {
    let mut reader = ShapeChecker { strict: true, ..ShapeChecker::default() };
    let value = match &node.kind {
        Kind::Map(_) => reader.section(node, section, &FieldPath::root()),
        _ => {
            reader.fault(Code::WrongType, node.span, || {
                (format!("a {} is a map, and this is {}", section.name, node.describe()), None)
            });
            Value::Null
        }
    };
    let typed = match reader.more {
        0 => serde_yaml::from_value(value)
            .map_err(|error| reader.fault(Code::WrongType, node.span, || (error.to_string(), None)))
            .ok(),
        _ => None,
    };
    (typed, reader.done(node).faults)
}

#[derive(Default)]
struct ShapeChecker {
    understood: ShapeResult,
    /// Faults so far, listed or not.
    more: usize,
    in_body: bool,
    /// Inside of an environment, whose values may be secrets.
    private: bool,
    /// The section of the whole document: where else a field may belong.
    root: Option<&'static Section>,
    /// Required fields and ranges are checked here too: nobody else will.
    strict: bool,
}

impl ShapeChecker {
    fn finish(mut self, node: &Node, value: Value) -> ShapeResult {
        match serde_yaml::from_value(value) {
            Ok(document) => self.understood.document = Some(document),
            // The grammar and the structs disagree. A test keeps that from happening; a user still gets a sentence.
            Err(error) => self.fault(Code::WrongType, node.span, || (error.to_string(), None)),
        }
        self.done(node)
    }

    /// Notes a fault. The words are made only if they will be read.
    fn fault(&mut self, code: Code, span: Span, say: impl FnOnce() -> (String, Option<String>)) {
        self.more += 1;
        if self.more <= problem::MAX_PER_DOCUMENT {
            let (message, hint) = say();
            let private = self.private;
            self.understood
                .faults
                .push(SpanProblem { private, ..SpanProblem::new(code, span, message, hint) });
        }
    }

    /// Nobody will read on.
    fn is_full(&self) -> bool {
        self.more > problem::MAX_PER_DOCUMENT
    }

    fn drop(&mut self, path: FieldPath) {
        if !self.is_full() {
            self.understood.dropped.insert(path);
        }
    }

    /// What was found, and how much more there was.
    fn done(mut self, root: &Node) -> ShapeResult {
        let more = self.more.saturating_sub(problem::MAX_PER_DOCUMENT);
        if more > 0 {
            self.understood.faults.push(SpanProblem::more(more, "document", root.span));
        }
        self.understood
    }

    fn section(&mut self, node: &Node, section: &'static Section, path: &FieldPath) -> Value {
        let Kind::Map(entries) = &node.kind else {
            return Value::Null;
        };
        let mut seen: HashMap<&str, (&str, Span)> = HashMap::new();
        let mut kept = Mapping::new();
        for (key, value) in entries {
            let Some(name) = key.text() else {
                self.bad_key(key);
                continue;
            };
            let Some(entry) =
                section.entry(name).filter(|e| e.need != Requirement::IgnoredInBody || self.in_body)
            else {
                self.unknown(name, key.span, section, path);
                continue;
            };
            if let Some((earlier, at)) = seen.insert(entry.name, (name, key.span)) {
                self.duplicate_key(name, key.span, earlier, at);
                continue;
            }
            let path = path.key(entry.name);
            self.private |= entry.name == "env";
            match &value.kind {
                Kind::Null => {}
                _ => match self.shape(value, &entry.shape, &path) {
                    Some(value) => {
                        kept.insert(Value::String(entry.name.to_owned()), value);
                    }
                    None => self.drop(path),
                },
            }
            self.private &= entry.name != "env";
        }
        if self.strict {
            let missing = section
                .entries
                .iter()
                .filter(|e| e.need == Requirement::Required && !seen.contains_key(e.name));
            missing.for_each(|entry| self.missing(node.span, &path.key(entry.name), entry.meaning));
        }
        Value::Mapping(kept)
    }

    fn missing(&mut self, span: Span, path: &FieldPath, meaning: &str) {
        self.fault(Code::MissingField, span, || (format!("{path} is missing"), Some(meaning.to_owned())));
    }

    /// A value that has its type and not its range.
    fn range(&mut self, node: &Node, shape: &Shape, path: &FieldPath) -> bool {
        let code = match (shape, &node.kind) {
            (Shape::Int(range), Kind::Int(n)) if !range.contains(n) => Code::OutOfRange,
            (Shape::Percent, Kind::Int(n)) if !(0..=100).contains(n) => Code::BadPercent,
            (Shape::Percent, Kind::Float(x)) if !(0.0..=100.0).contains(x) => Code::BadPercent,
            (Shape::Ip, Kind::Text(text)) if text.parse::<std::net::IpAddr>().is_err() => Code::BadIp,
            _ => return true,
        };
        self.fault(code, node.span, || {
            (format!("{path} must be {}, and this is {}", article(&shape.describe()), node.describe()), None)
        });
        false
    }

    /// The value without what is wrong in it; `None` if nothing is left.
    fn shape(&mut self, node: &Node, shape: &'static Shape, path: &FieldPath) -> Option<Value> {
        match (shape, &node.kind) {
            _ if self.strict && !self.range(node, shape, path) => None,
            (Shape::Text | Shape::Name | Shape::Ip | Shape::Word(_) | Shape::AbsolutePath, Kind::Text(_))
            | (Shape::LooseText | Shape::Amount | Shape::Duration, Kind::Text(_) | Kind::Int(_))
            | (Shape::Int(_), Kind::Int(_))
            | (Shape::Percent, Kind::Int(_) | Kind::Float(_))
            | (Shape::Bool, Kind::Bool(_)) => Some(node.to_value()),
            (Shape::Section(section), Kind::Map(_)) => Some(self.section(node, section, path)),
            (Shape::List(of), Kind::List(items)) => {
                let mut kept = Vec::new();
                for (at, item) in items.iter().enumerate() {
                    if self.is_full() {
                        break;
                    }
                    let path = path.index(at);
                    // A wrong item leaves a hole, so that the others keep their numbers.
                    kept.push(self.shape(item, of, &path).unwrap_or_else(|| {
                        self.drop(path);
                        placeholder(of)
                    }));
                }
                Some(Value::Sequence(kept))
            }
            (Shape::Map(of), Kind::Map(entries)) => Some(self.map(entries, of, path)),
            (Shape::OneOf(shapes), _) => match shapes.iter().find(|shape| fits(shape, &node.kind)) {
                Some(shape) => self.shape(node, shape, path),
                None => self.type_mismatch(node, shape, path),
            },
            _ => self.type_mismatch(node, shape, path),
        }
    }

    fn map(&mut self, entries: &[(Node, Node)], of: &'static Shape, path: &FieldPath) -> Value {
        let mut seen: HashMap<&str, Span> = HashMap::new();
        let mut kept = Mapping::new();
        for (key, value) in entries {
            let Some(name) = key.text() else {
                self.bad_key(key);
                continue;
            };
            if let Some(at) = seen.insert(name, key.span) {
                self.duplicate_key(name, key.span, name, at);
                continue;
            }
            let path = path.entry(name);
            match self.shape(value, of, &path) {
                Some(value) => {
                    kept.insert(Value::String(name.to_owned()), value);
                }
                None => self.drop(path),
            }
        }
        Value::Mapping(kept)
    }

    fn type_mismatch(&mut self, node: &Node, shape: &Shape, path: &FieldPath) -> Option<Value> {
        let private = self.private;
        self.fault(Code::WrongType, node.span, || {
            let wanted = article(&shape.describe());
            // What is written there may be a secret in the wrong place.
            let found = if private { node.kind.name().to_owned() } else { node.describe() };
            (format!("{path} must be {wanted}, and this is {found}"), type_hint(&node.kind, shape))
        });
        None
    }

    fn bad_key(&mut self, key: &Node) {
        self.fault(Code::WrongType, key.span, || {
            let message = format!("a key must be text, and this is {}", key.describe());
            (message, Some("put it in quotes".into()))
        });
    }

    fn duplicate_key(&mut self, name: &str, span: Span, earlier: &str, at: Span) {
        self.fault(Code::DuplicateKey, span, || {
            let place = format!("line {}, column {}", at.line, at.column);
            let message = if name == earlier {
                format!("key {:?} stands twice in this map; the first is at {place}", shorten(name))
            } else {
                format!("{name:?} is another name of {earlier:?}, which stands at {place}")
            };
            (message, Some("remove one of them".into()))
        });
    }

    fn unknown(&mut self, name: &str, span: Span, section: &Section, path: &FieldPath) {
        let root = self.root;
        // A misspelt field is not missing as well.
        if !self.is_full()
            && let Some(meant) = closest_field(name, section)
        {
            self.drop(path.key(meant));
        }
        self.fault(Code::UnknownField, span, || {
            let place = if path.0.is_empty() { format!("a {}", section.name) } else { path.to_string() };
            (format!("{place} has no field {:?}", shorten(name)), Some(hint_for(name, section, root)))
        });
    }
}

/// The field of a section that a misspelt name stands for.
fn closest_field(name: &str, section: &Section) -> Option<&'static str> {
    let known = section.entries.iter().filter(|e| e.need != Requirement::IgnoredInBody);
    did_you_mean(name, known.map(|e| e.name))
}

/// What somebody who wrote this value there most likely wants to know.
fn type_hint(found: &Kind, wanted: &Shape) -> Option<String> {
    let hint = match (found, wanted) {
        (
            Kind::Bool(_) | Kind::Int(_) | Kind::Float(_),
            Shape::Text | Shape::Name | Shape::Ip | Shape::LooseText | Shape::Word(_) | Shape::AbsolutePath,
        ) => "put it in quotes if text is meant".to_owned(),
        (Kind::Text(text), Shape::Int(_) | Shape::Percent) if text.parse::<f64>().is_ok() => {
            format!("write {text} without quotes")
        }
        (Kind::Text(text), Shape::Bool) if matches!(text.as_str(), "yes" | "no" | "on" | "off") => {
            "YAML 1.2 knows only true and false".to_owned()
        }
        (Kind::Map(_), Shape::List(_)) => "begin each item with `- `".to_owned(),
        (_, Shape::List(_)) => "put it in [ ]".to_owned(),
        (_, Shape::Section(section)) => {
            let names: Vec<_> = section.entries.iter().map(|e| e.name).collect();
            format!("it has the fields {}", names.join(", "))
        }
        _ => return None,
    };
    Some(hint)
}

fn hint_for(name: &str, section: &Section, root: Option<&'static Section>) -> String {
    if name == "<<" {
        let defaults = "a `kind: Defaults` document gives fields to many processes";
        return format!("YAML 1.2 has no merge keys; {defaults}");
    }
    if name == "agent_id_list" {
        return "write hosts: [{bk_agent_id: …}]".into();
    }
    if let Some(meant) = closest_field(name, section) {
        return format!("did you mean {meant:?}?");
    }
    if let Some(home) = root.and_then(|root| find_elsewhere(name, root)) {
        return format!("it belongs to {home}");
    }
    let known = section.entries.iter().filter(|e| e.need != Requirement::IgnoredInBody);
    format!("fields here: {}", known.map(|e| e.name).collect::<Vec<_>>().join(", "))
}

/// Where a field of this name does exist: people misplace more than they misspell.
fn find_elsewhere(name: &str, root: &'static Section) -> Option<String> {
    fn search(section: &'static Section, name: &str, path: &str) -> Option<String> {
        section.entries.iter().filter(|e| e.need != Requirement::IgnoredInBody).find_map(|e| {
            let here = if path.is_empty() { e.name.to_owned() } else { format!("{path}.{}", e.name) };
            if e.name == name || e.aliases.contains(&name) {
                return Some(if path.is_empty() {
                    "the document's root".to_owned()
                } else {
                    path.to_owned()
                });
            }
            match &e.shape {
                Shape::Section(inner) => search(inner, name, &here),
                _ => None,
            }
        })
    }
    search(root, name, "")
}

fn fits(shape: &Shape, kind: &Kind) -> bool {
    matches!(
        (shape, kind),
        (Shape::Text, Kind::Text(_))
            | (Shape::LooseText, Kind::Text(_) | Kind::Int(_))
            | (Shape::Section(_) | Shape::Map(_), Kind::Map(_))
    )
}

/// Something harmless of the right type.
fn placeholder(shape: &Shape) -> Value {
    match shape {
        Shape::Section(_) | Shape::Map(_) => Value::Mapping(Mapping::new()),
        Shape::List(_) => Value::Sequence(Vec::new()),
        _ => Value::String(String::new()),
    }
}

fn article(thing: &str) -> String {
    match thing.chars().next() {
        Some('a' | 'e' | 'i' | 'o' | 'u') if !thing.contains(" | ") => format!("an {thing}"),
        _ if thing.contains(" | ") => format!("one of {}", thing.replace(" | ", ", ")),
        _ if thing.starts_with("text") => thing.to_owned(),
        _ => format!("a {thing}"),
    }
}

/// Finds a path in a tree: the place to point at, or the nearest thing above it that exists.
pub fn locate(root: &Node, path: &FieldPath, key_wanted: bool) -> Span {
    let mut node = root;
    let mut span = root.span;
    for (nth, step) in path.0.iter().enumerate() {
        let last = nth + 1 == path.0.len();
        let next = match (step, &node.kind) {
            (PathSegment::Key(name), Kind::Map(entries)) => entries
                .iter()
                .find(|(key, _)| key.text().is_some_and(|text| grammar::same_field(text, name)))
                .map(|(key, value)| (key.span, value)),
            (PathSegment::Index(at), Kind::List(items)) => items.get(*at).map(|item| (item.span, item)),
            _ => None,
        };
        let Some((key_span, value)) = next else {
            return span;
        };
        let single = !matches!(value.kind, Kind::List(_) | Kind::Map(_) | Kind::Null);
        span = if last && single && !key_wanted { value.span } else { key_span };
        node = value;
    }
    span
}
