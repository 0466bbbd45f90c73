//! Shape check of a document tree against the grammar.
//!
//! Finds and locates every unknown field, wrong type and duplicate key. The valid rest becomes a [`Document`], so that the
//! other checks still run.

use std::collections::{HashMap, HashSet};

use serde_yaml::{Mapping, Value};

use super::check::short_form::SHORT_FIELDS;
use super::document::Document;
use super::grammar::{self, Requirement, Section, Shape};
use super::node::{Kind, Node, shorten};
use super::problem::{self, Code, FieldPath, Span, SpanProblem, did_you_mean};

/// The valid part of a document, and its shape problems.
#[derive(Debug, Default)]
pub struct ShapeResult {
    pub document: Option<Document>,
    pub faults: Vec<SpanProblem>,
    /// Invalid fields that were dropped; they are not reported as missing.
    pub dropped: HashSet<FieldPath>,
}

pub fn check_shape(node: &Node) -> ShapeResult {
    let mut reader = ShapeChecker::default();
    let Kind::Map(_) = &node.kind else {
        reader.fault(Code::WrongType, node.span, || {
            let found = node.describe();
            (format!("a document must be a map with meta, hosts and spec, not {found}"), None)
        });
        return reader.done(node);
    };
    if let Some(at) = node.get("process_infos") {
        reader.fault(Code::UnknownKind, at.span, || {
            let hint = "`abide convert FILE` converts it to manifests";
            ("the document is a JOB request body, not a manifest".into(), Some(hint.into()))
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

/// Like [`check_shape`], for any other section with type `T`.
pub fn check_shape_as<T: serde::de::DeserializeOwned>(
    node: &Node,
    section: &'static Section,
) -> (Option<T>, Vec<SpanProblem>) {
    let mut reader = ShapeChecker { strict: true, ..ShapeChecker::default() };
    let value = match &node.kind {
        Kind::Map(_) => reader.section(node, section, &FieldPath::root()),
        _ => {
            reader.fault(Code::WrongType, node.span, || {
                (format!("a {} must be a map, not {}", section.name, node.describe()), None)
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
    result: ShapeResult,
    /// Number of problems, listed or not.
    more: usize,
    in_body: bool,
    /// True inside `env`, whose values may be secrets.
    private: bool,
    /// True inside the `patch` of an overlay, where a null removes a field.
    in_patch: bool,
    /// Section of the whole document, for hints on misplaced fields.
    root: Option<&'static Section>,
    /// Also check required fields and ranges, for input without later checks.
    strict: bool,
}

impl ShapeChecker {
    fn finish(mut self, node: &Node, value: Value) -> ShapeResult {
        match serde_yaml::from_value(value) {
            Ok(document) => self.result.document = Some(document),
            // The grammar and the structs differ. A test prevents this; the user still gets serde's message.
            Err(error) => self.fault(Code::WrongType, node.span, || (error.to_string(), None)),
        }
        self.done(node)
    }

    /// Records a problem. The message is built only if it will be reported.
    fn fault(&mut self, code: Code, span: Span, describe: impl FnOnce() -> (String, Option<String>)) {
        self.more += 1;
        if self.more <= problem::MAX_PER_DOCUMENT {
            let (message, hint) = describe();
            let private = self.private;
            self.result.faults.push(SpanProblem { private, ..SpanProblem::new(code, span, message, hint) });
        }
    }

    /// Further problems are only counted.
    fn is_full(&self) -> bool {
        self.more > problem::MAX_PER_DOCUMENT
    }

    fn drop(&mut self, path: FieldPath) {
        if !self.is_full() {
            self.result.dropped.insert(path);
        }
    }

    /// The result, with the number of unlisted problems.
    fn done(mut self, root: &Node) -> ShapeResult {
        let more = self.more.saturating_sub(problem::MAX_PER_DOCUMENT);
        if more > 0 {
            self.result.faults.push(SpanProblem::more(more, "document", root.span));
        }
        self.result
    }

    fn section(&mut self, node: &Node, section: &'static Section, path: &FieldPath) -> Value {
        let Kind::Map(entries) = &node.kind else {
            return Value::Null;
        };
        let mut seen: HashMap<&str, (&str, Span)> = HashMap::new();
        let mut valid = Mapping::new();
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
                Kind::Null if self.in_patch => {
                    valid.insert(Value::String(entry.name.to_owned()), Value::Null);
                }
                Kind::Null => {}
                _ => match self.shape(value, &entry.shape, &path) {
                    Some(value) => {
                        valid.insert(Value::String(entry.name.to_owned()), value);
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
        Value::Mapping(valid)
    }

    fn missing(&mut self, span: Span, path: &FieldPath, meaning: &str) {
        self.fault(Code::MissingField, span, || (format!("{path} is missing"), Some(meaning.to_owned())));
    }

    /// Checks the range of a value that has the right type.
    fn range(&mut self, node: &Node, shape: &Shape, path: &FieldPath) -> bool {
        let code = match (shape, &node.kind) {
            (Shape::Int(range), Kind::Int(n)) if !range.contains(n) => Code::OutOfRange,
            (Shape::Percent, Kind::Int(n)) if !(0..=100).contains(n) => Code::BadPercent,
            (Shape::Percent, Kind::Float(x)) if !(0.0..=100.0).contains(x) => Code::BadPercent,
            (Shape::Ip, Kind::Text(text)) if text.parse::<std::net::IpAddr>().is_err() => Code::BadIp,
            _ => return true,
        };
        self.fault(code, node.span, || {
            (format!("{path} must be {}, not {}", article(&shape.describe()), node.describe()), None)
        });
        false
    }

    /// The valid part of a value; `None` if nothing is valid.
    fn shape(&mut self, node: &Node, shape: &'static Shape, path: &FieldPath) -> Option<Value> {
        match (shape, &node.kind) {
            _ if self.strict && !self.range(node, shape, path) => None,
            (Shape::Text | Shape::Name | Shape::Ip | Shape::Word(_) | Shape::AbsolutePath, Kind::Text(_))
            | (
                Shape::LooseText | Shape::Amount | Shape::Duration | Shape::Size,
                Kind::Text(_) | Kind::Int(_),
            )
            | (Shape::Int(_), Kind::Int(_))
            | (Shape::Percent | Shape::Number, Kind::Int(_) | Kind::Float(_))
            | (Shape::Bool, Kind::Bool(_)) => Some(node.to_value()),
            (Shape::Section(section), Kind::Map(_)) => Some(self.section(node, section, path)),
            (Shape::List(of), Kind::List(items)) => {
                let mut valid = Vec::new();
                for (at, item) in items.iter().enumerate() {
                    if self.is_full() {
                        break;
                    }
                    let path = path.index(at);
                    // An invalid item is replaced, so that the others keep their indexes.
                    valid.push(self.shape(item, of, &path).unwrap_or_else(|| {
                        self.drop(path);
                        placeholder(of)
                    }));
                }
                Some(Value::Sequence(valid))
            }
            (Shape::Map(of), Kind::Map(entries)) => Some(self.map(entries, of, path)),
            (Shape::Patch, Kind::Map(_)) => Some(self.patch(node, path)),
            (Shape::OneOf(shapes), _) => match shapes.iter().find(|shape| fits(shape, &node.kind)) {
                Some(shape) => self.shape(node, shape, path),
                None => self.type_mismatch(node, shape, path),
            },
            _ => self.type_mismatch(node, shape, path),
        }
    }

    fn map(&mut self, entries: &[(Node, Node)], of: &'static Shape, path: &FieldPath) -> Value {
        let mut seen: HashMap<&str, Span> = HashMap::new();
        let mut valid = Mapping::new();
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
            if self.in_patch && matches!(value.kind, Kind::Null) {
                valid.insert(Value::String(name.to_owned()), Value::Null);
                continue;
            }
            match self.shape(value, of, &path) {
                Some(value) => {
                    valid.insert(Value::String(name.to_owned()), value);
                }
                None => self.drop(path),
            }
        }
        Value::Mapping(valid)
    }

    /// Fields of a Process, without the kind of the document.
    fn patch(&mut self, node: &Node, path: &FieldPath) -> Value {
        for name in ["kind", "apiVersion"] {
            if let Some(value) = node.get(name) {
                self.fault(Code::UnknownField, value.span, || {
                    (format!("{path} has no field {name:?}"), Some("a patch changes a Process".to_owned()))
                });
            }
        }
        let root = self.root.replace(&grammar::PROCESS);
        self.in_patch = true;
        let mut value = self.section(node, &grammar::PROCESS, path);
        if let Value::Mapping(fields) = &mut value {
            ["kind", "apiVersion"].iter().for_each(|name| drop(fields.remove(name)));
        }
        (self.in_patch, self.root) = (false, root);
        value
    }

    fn type_mismatch(&mut self, node: &Node, shape: &Shape, path: &FieldPath) -> Option<Value> {
        let private = self.private;
        self.fault(Code::WrongType, node.span, || {
            let wanted = article(&shape.describe());
            // The value may be a misplaced secret.
            let found = if private { node.kind.name().to_owned() } else { node.describe() };
            (format!("{path} must be {wanted}, not {found}"), type_hint(&node.kind, shape))
        });
        None
    }

    fn bad_key(&mut self, key: &Node) {
        self.fault(Code::WrongType, key.span, || {
            let message = format!("a key must be text, not {}", key.describe());
            (message, Some("quote the key".into()))
        });
    }

    fn duplicate_key(&mut self, name: &str, span: Span, earlier: &str, at: Span) {
        self.fault(Code::DuplicateKey, span, || {
            let first = format!("line {}, column {}", at.line, at.column);
            let message = if name == earlier {
                format!("key {:?} occurs twice in this map; the first is at {first}", shorten(name))
            } else {
                format!("{name:?} is an alias of {earlier:?}, which is set at {first}")
            };
            (message, Some("remove one of them".into()))
        });
    }

    fn unknown(&mut self, name: &str, span: Span, section: &Section, path: &FieldPath) {
        let root = self.root;
        // A misspelled field is not reported as missing too.
        if !self.is_full()
            && let Some(meant) = closest_field(name, section)
        {
            self.drop(path.key(meant));
        }
        self.fault(Code::UnknownField, span, || {
            let owner = if path.0.is_empty() { format!("a {}", section.name) } else { path.to_string() };
            (format!("{owner} has no field {:?}", shorten(name)), Some(hint_for(name, section, root)))
        });
    }
}

/// The field of a section with the most similar name.
fn closest_field(name: &str, section: &Section) -> Option<&'static str> {
    let known = section.entries.iter().filter(|e| e.need != Requirement::IgnoredInBody);
    did_you_mean(name, known.map(|e| e.name))
}

/// Hint for a value of the wrong type.
fn type_hint(found: &Kind, wanted: &Shape) -> Option<String> {
    let hint = match (found, wanted) {
        (
            Kind::Bool(_) | Kind::Int(_) | Kind::Float(_),
            Shape::Text | Shape::Name | Shape::Ip | Shape::LooseText | Shape::Word(_) | Shape::AbsolutePath,
        ) => "quote the value if text is intended".to_owned(),
        (Kind::Text(text), Shape::Int(_) | Shape::Percent) if text.parse::<f64>().is_ok() => {
            format!("write {text} without quotes")
        }
        (Kind::Text(text), Shape::Bool) if matches!(text.as_str(), "yes" | "no" | "on" | "off") => {
            "YAML 1.2 has only true and false".to_owned()
        }
        (Kind::Map(_), Shape::List(_)) => "begin each item with `- `".to_owned(),
        (_, Shape::List(_)) => "write a list: [ … ]".to_owned(),
        (_, Shape::Section(section)) => {
            let names: Vec<_> = section.entries.iter().map(|e| e.name).collect();
            format!("fields: {}", names.join(", "))
        }
        _ => return None,
    };
    Some(hint)
}

fn hint_for(name: &str, section: &Section, root: Option<&'static Section>) -> String {
    if name == "<<" {
        let defaults = "use a `kind: Defaults` document to share fields";
        return format!("YAML 1.2 has no merge keys; {defaults}");
    }
    if name == "agent_id_list" {
        return "write hosts: [{bk_agent_id: …}]".into();
    }
    if let Some(meant) = closest_field(name, section) {
        return format!("did you mean {meant:?}?");
    }
    if let Some(section) = root.and_then(|root| find_elsewhere(name, root)) {
        return format!("the field belongs to {section}");
    }
    // Without the short form, whose fields are those of `spec`: a file may have 100,000 such hints.
    let is_short =
        |name: &str| section.name == "Process" && SHORT_FIELDS.iter().any(|(short, _)| *short == name);
    let known = section.entries.iter().filter(|e| e.need != Requirement::IgnoredInBody && !is_short(e.name));
    format!("fields here: {}", known.map(|e| e.name).collect::<Vec<_>>().join(", "))
}

/// Another section with a field of this name: misplaced fields are more common than misspelled ones.
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
        (Shape::Text | Shape::Word(_), Kind::Text(_))
            | (Shape::Int(_), Kind::Int(_))
            | (Shape::Bool, Kind::Bool(_))
            | (Shape::Number, Kind::Float(_))
            | (Shape::LooseText, Kind::Text(_) | Kind::Int(_))
            | (Shape::Section(_) | Shape::Map(_), Kind::Map(_))
            | (Shape::List(_), Kind::List(_))
    )
}

/// A valid value of the given shape.
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
