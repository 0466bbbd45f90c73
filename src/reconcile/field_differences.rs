//! Field differences of two specs: rule, field, old and new value. A secret is shown as a digest only.

use std::collections::{BTreeMap, BTreeSet};

use super::assess::TargetSpec;
use super::diff::changes;
use crate::model::{
    DigestKey, DigestKeyRef, Effect, EnvValue, Field, KnownSpec, ObservedSpecs, Reason, Rule, SourceLocation,
    Spec, SpecRevision, Value, secret_digest,
};

impl Reason {
    pub fn plain(rule: Rule, at: Option<&SourceLocation>) -> Reason {
        Reason { rule, field: None, old: None, new: None, at: at.cloned() }
    }
}

/// Display of the secrets of an instance.
#[derive(Default)]
pub struct SecretView<'a> {
    /// Known specs of the instance: a value that any of them marks as secret is redacted in all.
    specs: Vec<&'a Spec>,
    /// Key of the digests. `None`: they are not shown.
    key: Option<&'a DigestKey>,
}

/// A variable's value as it is shown.
#[derive(PartialEq)]
struct ShownValue {
    text: String,
    /// Plain digest of a secret, for the comparison alone.
    digest: String,
}

impl<'a> SecretView<'a> {
    pub fn of(seen: &'a ObservedSpecs) -> SecretView<'a> {
        let versions = [&seen.registered, &seen.live].into_iter();
        let specs = versions.filter_map(|version| version.spec()).map(|spec| &***spec).collect();
        SecretView { specs, key: seen.digest_key.as_ref().and_then(DigestKeyRef::known) }
    }

    fn value(&self, value: &EnvValue, is_secret: bool) -> ShownValue {
        let plain = |text: String| ShownValue { text, digest: String::new() };
        match value {
            EnvValue::File(path) => plain(format!("file {path}")),
            EnvValue::Exec(argv) => plain(format!("exec {}", argv.join(" "))),
            EnvValue::Text(text) if !is_secret => plain(text.clone()),
            EnvValue::Text(text) => self.secret(secret_digest(text)),
            EnvValue::Secret(text) => self.secret(text.digest()),
            EnvValue::Digest(digest) => self.secret(digest.clone()),
        }
    }

    /// `secret KEY-ID.DIGEST`: equal secrets of an owner have equal digests.
    fn secret(&self, digest: String) -> ShownValue {
        let text = match self.key.and_then(|key| Some((key.id(), key.keyed_digest(&digest)?))) {
            Some((id, digest)) => format!("secret {id}.{}", &digest[..8]),
            None => "secret".to_owned(),
        };
        ShownValue { text, digest }
    }

    fn revision(&self, revision: &SpecRevision) -> String {
        self.key.map_or(*revision, |key| key.keyed_revision(revision)).to_string()
    }
}

/// The fields with one of these effects in which the old spec differs from the wanted one.
pub fn differences(
    rule: Rule,
    old: &KnownSpec,
    target: &TargetSpec<'_>,
    effects: &[Effect],
    secrets: &SecretView<'_>,
    at: Option<&SourceLocation>,
) -> Vec<Reason> {
    match old {
        KnownSpec::Full(old) => changes(old, target.spec, &target.plain)
            .into_iter()
            .filter(|change| effects.contains(&target.effects.effect(change.field)))
            .flat_map(|change| parts(change.field, old, target.spec, secrets))
            .map(|(field, old, new)| Reason { rule, field: Some(field), old, new, at: at.cloned() })
            .collect(),
        KnownSpec::Digests(old) if old != target.revision() => vec![Reason {
            rule: Rule::SpecUnknown,
            field: None,
            old: Some(secrets.revision(old)),
            new: Some(secrets.revision(target.revision())),
            at: at.cloned(),
        }],
        KnownSpec::Digests(_) => Vec::new(),
        KnownSpec::Unknown => vec![Reason::plain(Rule::SpecUnknown, at)],
    }
}

/// A part of a field: its path, the old value and the new one.
pub type ChangedPart = (String, Option<String>, Option<String>);

/// The changed parts of a field: the keys of a map, the entries of a list.
pub fn parts(field: Field, old: &Spec, new: &Spec, secrets: &SecretView<'_>) -> Vec<ChangedPart> {
    match field {
        Field::Labels => keyed(field, &old.labels, &new.labels, |_, value| value.clone()),
        Field::Env => variables(old, new, secrets),
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

/// The changed variables.
fn variables(old: &Spec, new: &Spec, secrets: &SecretView<'_>) -> Vec<ChangedPart> {
    let names: BTreeSet<&String> = old.env.keys().chain(new.env.keys()).collect();
    let part = |name: &String| {
        let all = [old, new].into_iter().chain(secrets.specs.iter().copied());
        let is_secret = all
            .into_iter()
            .any(|spec| matches!(spec.env.get(name), Some(EnvValue::Secret(_) | EnvValue::Digest(_))));
        let shown = |spec: &Spec| spec.env.get(name).map(|value| secrets.value(value, is_secret));
        let (old, new) = (shown(old), shown(new));
        if old == new {
            return None;
        }
        let text = |value: &Option<ShownValue>| value.as_ref().map(|value| value.text.clone());
        let (before, after) = (text(&old), text(&new));
        // Without a key, both are shown alike.
        let after = if before == after { after.map(|text| format!("another {text}")) } else { after };
        Some((format!("{}.{name}", Field::Env), before, after))
    };
    names.into_iter().filter_map(part).collect()
}

fn keyed<V: PartialEq>(
    field: Field,
    old: &BTreeMap<String, V>,
    new: &BTreeMap<String, V>,
    shown: impl Fn(&str, &V) -> String,
) -> Vec<ChangedPart> {
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
fn files(old: &Spec, new: &Spec) -> Vec<ChangedPart> {
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
