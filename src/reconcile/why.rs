//! Step reasons by field: rule, field, old and new value. A secret is shown as a digest only.

use std::collections::{BTreeMap, BTreeSet};

use super::assess::TargetSpec;
use super::diff::changes;
use super::effect::digest;
use crate::model::{Effect, EnvValue, Field, KnownSpec, Rule, SourceLocation, Spec, Value, Why};

impl Why {
    pub fn plain(rule: Rule, at: Option<&SourceLocation>) -> Why {
        Why { rule, field: None, old: None, new: None, at: at.cloned() }
    }
}

/// The fields with one of these effects in which the old spec differs from the wanted one.
///
/// `known_specs`: other specs of the instance; a value that any of them marks as secret is redacted in all.
pub fn differences(
    rule: Rule,
    old: &KnownSpec,
    target: &TargetSpec<'_>,
    effects: &[Effect],
    known_specs: &[&Spec],
    at: Option<&SourceLocation>,
) -> Vec<Why> {
    match old {
        KnownSpec::Full(old) => changes(old, target.spec, &target.plain)
            .into_iter()
            .filter(|change| effects.contains(&target.effects.effect(change.field)))
            .flat_map(|change| parts(change.field, old, target.spec, known_specs))
            .map(|(field, old, new)| Why { rule, field: Some(field), old, new, at: at.cloned() })
            .collect(),
        KnownSpec::Digests(old) if old != target.revision() => vec![Why {
            rule: Rule::SpecUnknown,
            field: None,
            old: Some(old.to_string()),
            new: Some(target.revision().to_string()),
            at: at.cloned(),
        }],
        KnownSpec::Digests(_) => Vec::new(),
        KnownSpec::Unknown => vec![Why::plain(Rule::SpecUnknown, at)],
    }
}

/// A part of a field: its path, the old value and the new one.
pub type Part = (String, Option<String>, Option<String>);

/// The changed parts of a field: the keys of a map, the entries of a list.
pub fn parts(field: Field, old: &Spec, new: &Spec, known_specs: &[&Spec]) -> Vec<Part> {
    match field {
        Field::Labels => keyed(field, &old.labels, &new.labels, |_, value| value.clone()),
        Field::Env => {
            // A value that is secret in one spec is redacted in all.
            let secret = |key: &str| {
                let all = [old, new].into_iter().chain(known_specs.iter().copied());
                all.into_iter()
                    .any(|spec| matches!(spec.env.get(key), Some(EnvValue::Secret(_) | EnvValue::Digest(_))))
            };
            keyed(field, &old.env, &new.env, |key, value| match value {
                EnvValue::File(path) => format!("file {path}"),
                EnvValue::Exec(argv) => format!("exec {}", argv.join(" ")),
                EnvValue::Text(text) if !secret(key) => text.clone(),
                EnvValue::Text(text) => format!("secret {}", digest(text)),
                EnvValue::Secret(text) => format!("secret {}", digest(text.expose())),
                EnvValue::Digest(digest) => format!("secret {}", digest.chars().take(8).collect::<String>()),
            })
        }
        Field::Configmap => files(old, new),
        Field::Health | Field::Restart | Field::Log | Field::Limits | Field::Sandbox | Field::Hooks => {
            let parts = |spec: &Spec| match spec.values()[field as usize].1.clone() {
                Value::Section(parts) => parts.into_iter().collect(),
                _ => BTreeMap::new(),
            };
            keyed(field, &parts(old), &parts(new), |_, value| value.clone())
        }
        _ => {
            let value = |spec| value(field, spec);
            vec![(field.path().to_owned(), value(old), value(new))]
        }
    }
}

fn keyed<V: PartialEq>(
    field: Field,
    old: &BTreeMap<String, V>,
    new: &BTreeMap<String, V>,
    shown: impl Fn(&str, &V) -> String,
) -> Vec<Part> {
    let keys: BTreeSet<&String> =
        old.keys().chain(new.keys()).filter(|key| !key.starts_with("abide_")).collect();
    let differ = keys.into_iter().filter(|key| old.get(*key) != new.get(*key));
    differ
        .map(|key| {
            let part = |map: &BTreeMap<String, V>| map.get(key).map(|value| shown(key, value));
            (format!("{field}.{key}"), part(old), part(new))
        })
        .filter(|(_, old, new)| old != new)
        .collect()
}

/// Entries are matched by path and numbered by the wanted list; removed entries by the old list.
fn files(old: &Spec, new: &Spec) -> Vec<Part> {
    let md5 = |spec: &Spec, at: usize| spec.configmap[at].md5.as_ref().map(|md5| md5.to_ascii_lowercase());
    let find = |spec: &Spec, path: &Option<String>| spec.configmap.iter().position(|file| file.path == *path);
    let mut all = Vec::new();
    for (at, file) in new.configmap.iter().enumerate() {
        match find(old, &file.path) {
            Some(was) if md5(old, was) == md5(new, at) => {}
            Some(was) => all.push((format!("configmap[{at}].md5"), md5(old, was), md5(new, at))),
            None => all.push((format!("configmap[{at}].path"), None, file.path.clone())),
        }
    }
    let gone = old.configmap.iter().enumerate().filter(|(_, file)| find(new, &file.path).is_none());
    all.extend(gone.map(|(at, file)| (format!("configmap[{at}].path"), file.path.clone(), None)));
    // The same entries, in another number.
    if all.is_empty() {
        let count = |spec: &Spec| Some(spec.configmap.len().to_string());
        all.push((Field::Configmap.path().to_owned(), count(old), count(new)));
    }
    all
}

fn value(field: Field, spec: &Spec) -> Option<String> {
    match &spec.values()[field as usize].1 {
        Value::Text("") => None,
        Value::Text(text) => Some((*text).to_owned()),
        Value::Number(number) => Some(number.to_string()),
        Value::Share(share) => Some(share.get().to_string()),
        Value::Unset | Value::Labels(_) | Value::Files(_) | Value::Env(_) | Value::Section(_) => None,
    }
}
