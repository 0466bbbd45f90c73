//! JSON Schema (2020-12) of the manifest grammar, for editors.
//!
//! One schema covers all kinds. `kind` selects the branch, so that an editor completes only the fields of that kind.

use serde_json::{Map, Value, json};

use super::grammar::{self, Entry, Requirement, Section, Shape};
use crate::model::Field;

pub fn schema() -> Value {
    let branches = grammar::ALL_KINDS.iter().map(|kind| {
        let applies = if kind.name == "Process" {
            // A document without a kind is a Process.
            json!({"anyOf": [{"properties": {"kind": {"const": "Process"}}, "required": ["kind"]}, {"not": {"required": ["kind"]}}]})
        } else {
            json!({"properties": {"kind": {"const": kind.name}}, "required": ["kind"]})
        };
        json!({"if": applies, "then": {"$ref": format!("#/$defs/{}", kind.name)}})
    });
    let branches: Vec<Value> = branches.collect();
    let defs: Map<String, Value> =
        grammar::ALL_KINDS.iter().map(|kind| (kind.name.to_owned(), section(kind))).collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://abide.example/schema/v1.json",
        "title": "Abide manifest",
        "description": "Manifest of Abide (apiVersion abide/v1): a Process, HostGroup, Defaults, Policy or Overlay.",
        "type": "object",
        "properties": {
            "apiVersion": {"const": grammar::API_VERSION, "description": "Version of the manifest syntax."},
            "kind": {"enum": grammar::KINDS, "default": "Process", "description": "Kind of object that the document declares."},
        },
        "allOf": branches,
        "$defs": defs,
    })
}

fn section(section: &Section) -> Value {
    let mut properties = Map::new();
    for entry in section.entries {
        let value = self::entry(entry);
        for alias in entry.aliases {
            let mut other = value.clone();
            mark_deprecated(&mut other);
            other["description"] = json!(format!("Alias of {}.", entry.name));
            properties.insert((*alias).to_owned(), other);
        }
        properties.insert(entry.name.to_owned(), value);
    }
    let required: Vec<_> =
        section.entries.iter().filter(|e| is_required(section, e)).map(|e| e.name).collect();
    let mut value = json!({
        "type": "object",
        "description": section.about,
        "properties": properties,
        "additionalProperties": false,
    });
    if !required.is_empty() {
        value["required"] = json!(required);
    }
    if section.entry("ip").is_some() {
        value["dependentRequired"] = json!({"ip": ["bk_cloud_id"]});
    }
    value
}

/// Whether the schema requires a field. Required fields of a spec may come from a Defaults, which an editor does not see.
fn is_required(section: &Section, entry: &Entry) -> bool {
    entry.need == Requirement::Required && !matches!(section.name, "identity" | "spec")
}

fn entry(entry: &Entry) -> Value {
    let mut value = shape(&entry.shape);
    value["description"] = json!(entry.meaning);
    if entry.need == Requirement::IgnoredInBody {
        mark_deprecated(&mut value);
    }
    match entry.name {
        "on_change" => {
            value["propertyNames"] = json!({"anyOf": [
                {"enum": field_paths()},
                {"pattern": "^(spec\\.)?env\\.[^=]+$"},
            ]})
        }
        "labels" if value["type"] == "object" => value["propertyNames"] = json!({"pattern": "^(?!abide_)"}),
        _ => {}
    }
    // An editor would insert a default of the wrong type; such a default goes into the description.
    if let Some(default) = entry.default {
        let typed: Option<Value> = match &entry.shape {
            Shape::Int(_) | Shape::Bool => serde_json::from_str(default).ok(),
            Shape::Word(words) if words.contains(&default) => Some(json!(default)),
            _ => None,
        };
        match typed {
            Some(typed) => value["default"] = typed,
            None => value["description"] = json!(format!("{} Default: {default}.", entry.meaning)),
        }
    }
    value
}

/// Marks a field as accepted but not suggested. Editors use `doNotSuggest`.
fn mark_deprecated(value: &mut Value) {
    value["deprecated"] = json!(true);
    value["doNotSuggest"] = json!(true);
}

/// Field paths with and without the leading `spec.`.
fn field_paths() -> Vec<String> {
    let all = Field::ALL.iter().map(|field| field.path());
    all.flat_map(|path| [path.to_owned(), format!("spec.{path}")]).collect()
}

fn shape(shape: &Shape) -> Value {
    match shape {
        Shape::Text | Shape::Ip => json!({"type": "string"}),
        Shape::Name => json!({"type": "string", "pattern": "^[^:/\\s]+$"}),
        Shape::LooseText => json!({"type": ["string", "integer"]}),
        Shape::Word(words) => json!({"enum": words}),
        Shape::AbsolutePath => {
            json!({"type": "string", "pattern": "^$|^/|^[A-Za-z]:[\\\\/]|^\\\\\\\\"})
        }
        Shape::Int(range) => {
            let mut value = json!({"type": "integer"});
            if *range.start() != i64::MIN {
                value["minimum"] = json!(range.start());
            }
            if *range.end() != i64::MAX {
                value["maximum"] = json!(range.end());
            }
            value
        }
        Shape::Percent => json!({"type": "number", "minimum": 0, "maximum": 100}),
        Shape::Bool => json!({"type": "boolean"}),
        Shape::Amount => json!({"anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?%$"},
        ]}),
        Shape::Duration => json!({"anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^([0-9]+[smhd])+$"},
        ]}),
        Shape::Size => json!({"anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^[0-9]+ ?([kKMGT]i?)?B?$"},
        ]}),
        Shape::Number => json!({"type": "number"}),
        Shape::Section(section) => self::section(section),
        Shape::Patch => json!({"type": "object", "propertyNames": {"enum": grammar::patch_fields()}}),
        Shape::List(of) => json!({"type": "array", "items": self::shape(of)}),
        Shape::Map(of) => json!({"type": "object", "additionalProperties": self::shape(of)}),
        Shape::OneOf(shapes) => {
            json!({"anyOf": shapes.iter().map(self::shape).collect::<Vec<_>>()})
        }
    }
}
