//! The JSON schema: it accepts and refuses the same documents as the checker, as far as a schema can.

use abide::manifest::grammar::{self, Requirement, Section, Shape};
use abide::manifest::schema::schema;
use serde_json::{Value, json};

use crate::support::{GOOD, Tree, project, with};

/// A validator for the words that our schema uses; any other word is a failure of the test.
fn valid(root: &Value, schema: &Value, value: &Value) -> bool {
    let rules = schema.as_object().expect("a schema is a map");
    rules.iter().all(|(rule, by)| match rule.as_str() {
        "$schema" | "$id" | "title" | "description" | "default" | "deprecated" | "doNotSuggest" | "$defs" => {
            true
        }
        "type" => {
            let types = by.as_array().cloned().unwrap_or_else(|| vec![by.clone()]);
            types.iter().any(|name| match name.as_str().expect("a name") {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "integer" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                other => panic!("type {other}"),
            })
        }
        "$ref" => {
            let name = by.as_str().and_then(|path| path.strip_prefix("#/$defs/")).expect("a definition");
            valid(root, &root["$defs"][name], value)
        }
        "properties" => value.as_object().is_none_or(|map| {
            by.as_object()
                .expect("a map")
                .iter()
                .all(|(name, schema)| map.get(name).is_none_or(|v| valid(root, schema, v)))
        }),
        "additionalProperties" => value.as_object().is_none_or(|map| {
            let known = |name: &str| rules.get("properties").is_some_and(|known| known.get(name).is_some());
            map.iter()
                .filter(|(name, _)| !known(name))
                .all(|(_, v)| by.as_bool().unwrap_or_else(|| valid(root, by, v)))
        }),
        "required" => value.as_object().is_none_or(|map| {
            by.as_array().expect("a list").iter().all(|name| map.contains_key(name.as_str().expect("a name")))
        }),
        "items" => value.as_array().is_none_or(|items| items.iter().all(|item| valid(root, by, item))),
        "enum" => by.as_array().expect("a list").contains(value),
        "const" => by == value,
        "minimum" => value.as_f64().is_none_or(|n| n >= by.as_f64().expect("a number")),
        "maximum" => value.as_f64().is_none_or(|n| n <= by.as_f64().expect("a number")),
        "anyOf" => by.as_array().expect("a list").iter().any(|schema| valid(root, schema, value)),
        "allOf" => by.as_array().expect("a list").iter().all(|schema| valid(root, schema, value)),
        "not" => !valid(root, by, value),
        "if" => !valid(root, by, value) || valid(root, &rules["then"], value),
        "then" => true,
        "propertyNames" => {
            value.as_object().is_none_or(|map| map.keys().all(|name| valid(root, by, &json!(name))))
        }
        "dependentRequired" => value.as_object().is_none_or(|map| {
            let needed = by.as_object().expect("a map").iter().filter(|(name, _)| map.contains_key(*name));
            needed
                .flat_map(|(_, names)| names.as_array().expect("a list"))
                .all(|name| map.contains_key(name.as_str().expect("a name")))
        }),
        "pattern" => value.as_str().is_none_or(|text| matches_pattern(by.as_str().expect("a pattern"), text)),
        other => panic!("the schema uses {other:?}"),
    })
}

/// The patterns of the schema, without a crate for regular expressions.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    match pattern {
        "^$|^/|^[A-Za-z]:[\\\\/]|^\\\\\\\\" => {
            text.is_empty()
                || text.starts_with('/')
                || text.starts_with("\\\\")
                || text.get(1..2) == Some(":")
        }
        "^[0-9]+(\\.[0-9]+)?%$" => text.strip_suffix('%').is_some_and(|n| n.parse::<f64>().is_ok()),
        "^([0-9]+[smhd])+$" => {
            text.ends_with(['s', 'm', 'h', 'd']) && text.starts_with(|c: char| c.is_ascii_digit())
        }
        "^[0-9]+ ?([kKMGT]i?)?B?$" => text.starts_with(|c: char| c.is_ascii_digit()),
        "^[^:/\\s]+$" => !text.is_empty() && !text.contains([':', '/', ' ']),
        "^(spec\\.)?env\\.[^=]+$" => {
            let text = text.strip_prefix("spec.").unwrap_or(text);
            text.strip_prefix("env.").is_some_and(|name| !name.is_empty() && !name.contains('='))
        }
        "^(?!abide_)" => !text.starts_with("abide_"),
        other => panic!("pattern {other}"),
    }
}

fn documents(text: &str) -> Vec<Value> {
    let all = serde_yaml::Deserializer::from_str(text);
    all.map(|document| serde::Deserialize::deserialize(document).expect("YAML")).collect()
}

#[test]
fn good_manifests_satisfy_the_schema() {
    let schema = schema();
    let mut count = 0;
    for folder in ["manifests", "tests/it/fixtures"] {
        for entry in std::fs::read_dir(project().join(folder)).expect("a folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("job_")
                || name.ends_with(".md")
                || name.ends_with(".rs")
                || entry.path().is_dir()
            {
                continue;
            }
            for document in documents(&std::fs::read_to_string(entry.path()).expect("a file")) {
                assert!(valid(&schema, &schema, &document), "{name}: {document}");
                count += 1;
            }
        }
    }
    assert!(count > 10);
    assert!(valid(&schema, &schema, &documents(GOOD)[0]));
}

#[test]
fn the_schema_refuses_what_the_shape_check_refuses() {
    let schema = schema();
    for (old, new) in [
        ("start_cmd", "strat_cmd"),
        ("name: api}", "name: 5}"),
        (", name: api", ""),
        ("kind: Process", "kind: Proces"),
        ("abide/v1", "abide/v2"),
        ("spec:", "state: runing\nspec:"),
        ("auto_type: 1", "auto_type: 3"),
        ("auto_type: 1", "start_check_secs: -1"),
        ("/opt/api", "opt/api"),
        ("hosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]", "hosts: {ip: 10.0.0.1}"),
        ("spec:", "rollout: {batch: ten}\nspec:"),
        ("spec:", "owner: me\nspec:"),
        ("kind: Process", "kind: HostGroup"),
        ("namespace: web", "namespace: a/b"),
        (", bk_cloud_id: 0", ""),
        ("spec:", "on_change: {control.strat_cmd: none}\nspec:"),
        ("spec:", "on_change: {env.: none}\nspec:"),
        ("name: api}", "name: api, labels: {abide_x: y}}"),
    ] {
        let text = with(old, new);
        assert!(!Tree::new(&[("a.yaml", &text)]).problems().is_empty(), "{new}");
        assert!(!valid(&schema, &schema, &documents(&text)[0]), "{new}");
    }
}

/// A value of a shape.
fn example(shape: &Shape) -> Value {
    match shape {
        Shape::Text | Shape::Name | Shape::LooseText => json!("text"),
        Shape::Ip => json!("10.0.0.1"),
        Shape::Word(words) => json!(words[0]),
        Shape::AbsolutePath => json!("/path"),
        Shape::Int(range) => json!(range.start().max(&1)),
        Shape::Percent => json!(12.5),
        Shape::Bool => json!(true),
        Shape::Amount => json!("10%"),
        Shape::Duration => json!("30s"),
        Shape::Size => json!("10MB"),
        Shape::Number => json!(1.5),
        Shape::Section(section) => whole(section),
        Shape::Patch => json!({"user": "app"}),
        Shape::List(of) => json!([example(of)]),
        Shape::Map(Shape::Word(words)) => json!({"control.start_cmd": words[0]}),
        Shape::Map(of) => json!({"key": example(of)}),
        Shape::OneOf(shapes) => example(&shapes[shapes.len() - 1]),
    }
}

/// Every field of a section, set.
fn whole(section: &Section) -> Value {
    let entries = section
        .entries
        .iter()
        .filter(|e| e.need != Requirement::IgnoredInBody && !["kind", "apiVersion"].contains(&e.name));
    Value::Object(entries.map(|e| (e.name.to_owned(), example(&e.shape))).collect())
}

#[test]
fn grammar_schema_and_structs_know_the_same_fields() {
    let schema = schema();
    for kind in grammar::ALL_KINDS {
        let mut document = whole(kind);
        document["kind"] = json!(kind.name);
        assert!(valid(&schema, &schema, &document), "{document:#}");
        let text = document.to_string();
        let read: Result<abide::manifest::document::Document, _> = serde_json::from_str(&text);
        let read = read.unwrap_or_else(|error| {
            panic!("{}: the structs refuse what the grammar has: {error}\n{document:#}", kind.name)
        });
        assert_eq!(serde_json::to_value(read).expect("JSON"), document, "{}: nothing is lost", kind.name);
        let problems = Tree::new(&[("a.json", &text)]).problems();
        // `whole` sets each field of the short form in its long form, too.
        let is_short_and_long = |line: &String| line.contains("are the same field");
        let shape = |line: &&String| {
            ["E0102", "E0103", "E0105"].iter().any(|code| line.contains(code)) && !is_short_and_long(line)
        };
        assert_eq!(problems.iter().filter(shape).count(), 0, "{problems:?}");
    }
}
