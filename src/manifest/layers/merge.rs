//! Patches of overlays, applied to a document before it is checked.
//!
//! Maps merge, lists and values of env are replaced, null removes a field. A field keeps the form in which the process
//! sets it: a patch of `spec.control.start_cmd` changes the `run` of a process in the short form.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_yaml::{Mapping, Value};

use super::LayerSet;
use crate::manifest::Declaration;
use crate::manifest::check::Patch;
use crate::manifest::check::short_form::{SHORT_FIELDS, ShortForm};
use crate::manifest::document::{Document, Overlay};
use crate::manifest::grammar::PROCESS_TYPES;
use crate::manifest::problem::{FieldPath, PathSegment};

/// Maximum number of values that the patches add to all documents together.
const MAX_VALUES: usize = 2_000_000;

/// Number of values that patches have added so far.
#[derive(Debug, Default)]
pub struct PatchBudget(AtomicUsize);

impl PatchBudget {
    /// Whether this many values more are within the limit.
    fn take(&self, values: usize) -> bool {
        self.0.fetch_add(values, Ordering::Relaxed).saturating_add(values) <= MAX_VALUES
    }

    pub fn too_large() -> String {
        format!("the patches add more than {MAX_VALUES} values to the processes that they match")
    }
}

/// Whether the patches of all documents, cached ones included, exceed the limit.
pub fn is_exceeded(documents: &[Declaration]) -> bool {
    let values = |document: &Declaration| {
        let layers = document.layers.layers();
        let patch = |at: &PatchIndex| &layers[at.layer].overlay.patches[at.patch];
        document.applied.patches.iter().map(|at| patch(at).values).sum::<usize>()
    };
    documents.iter().map(values).sum::<usize>() > MAX_VALUES
}

/// A patched document that is not valid.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PatchError(#[source] serde_yaml::Error);

/// A patch: the overlay in the set of the file, and the patch in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchIndex {
    pub layer: usize,
    pub patch: usize,
}

/// Two patches of one overlay that set a field to different values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConflictingPatches {
    pub layer: usize,
    pub first: usize,
    pub second: usize,
    pub path: FieldPath,
}

/// The patches of a document, in the order in which they were applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppliedPatches {
    pub patches: Box<[PatchIndex]>,
    pub conflict: Option<Box<ConflictingPatches>>,
}

impl LayerSet {
    /// Applies the patches that match a document.
    pub fn apply(
        &self,
        document: Document,
        budget: &PatchBudget,
    ) -> Result<(Document, AppliedPatches), PatchError> {
        let has_patches = self.layers().iter().any(|layer| !layer.overlay.patches.is_empty());
        if !has_patches || document.kind.as_deref().is_some_and(|kind| kind != "Process") {
            return Ok((document, AppliedPatches::default()));
        }
        let mut whole = DocumentFields::Typed(Box::new(document));
        let (mut applied, mut conflict) = (Vec::new(), None);
        for (nth, layer) in self.layers().iter().enumerate() {
            let Some((namespace, name, labels)) = whole.identity() else { break };
            let matching = layer.overlay.patches_of(&namespace, &name, &labels);
            let patches: Vec<(usize, &Patch)> =
                matching.into_iter().map(|at| (at, &layer.overlay.patches[at])).collect();
            if conflict.is_none() && patches.len() > 1 {
                conflict = find_conflict(&patches).map(|(first, second, path)| {
                    Box::new(ConflictingPatches { layer: nth, first, second, path })
                });
            }
            for (at, patch) in patches {
                applied.push(PatchIndex { layer: nth, patch: at });
                if budget.take(patch.values) {
                    whole.merge(patch)?;
                }
            }
        }
        Ok((whole.into_document()?, AppliedPatches { patches: applied.into(), conflict }))
    }
}

/// Namespace, name and labels of a document.
type DocumentIdentity = (String, String, BTreeMap<String, String>);

/// A document, as a map once a patch has matched.
enum DocumentFields {
    Typed(Box<Document>),
    Fields(Mapping),
}

impl DocumentFields {
    /// Namespace, name and labels as written. `None`: the document has no name.
    fn identity(&self) -> Option<DocumentIdentity> {
        match self {
            DocumentFields::Typed(document) => {
                let meta = document.meta.as_ref()?;
                let labels = meta.labels.iter().flat_map(|labels| &labels.0);
                let labels = labels.map(|(name, value)| (name.clone(), value.to_string())).collect();
                Some((meta.namespace.as_ref()?.to_string(), meta.name.as_ref()?.to_string(), labels))
            }
            DocumentFields::Fields(fields) => {
                let meta = fields.get("meta")?;
                let text = |value: &Value| match value {
                    Value::String(text) => Some(text.clone()),
                    Value::Number(number) => Some(number.to_string()),
                    _ => None,
                };
                let labels = meta.get("labels").and_then(Value::as_mapping).into_iter().flatten();
                let labels = labels.filter_map(|(name, value)| Some((text(name)?, text(value)?))).collect();
                Some((text(meta.get("namespace")?)?, text(meta.get("name")?)?, labels))
            }
        }
    }

    fn merge(&mut self, patch: &Patch) -> Result<(), PatchError> {
        if let (DocumentFields::Typed(document), Some(typed)) = (&mut *self, &patch.typed)
            && merge_typed(document, typed)
        {
            return Ok(());
        }
        let patch = &patch.fields;
        if let DocumentFields::Typed(document) = self {
            *self = match serde_yaml::to_value(&**document) {
                Ok(Value::Mapping(fields)) => DocumentFields::Fields(fields),
                Ok(_) => DocumentFields::Fields(Mapping::new()),
                Err(error) => return Err(PatchError(error)),
            };
        }
        if let DocumentFields::Fields(fields) = self {
            match in_form_of(fields, patch) {
                Some(patch) => merge(fields, &patch, false),
                None => merge(fields, patch, false),
            }
        }
        Ok(())
    }

    fn into_document(self) -> Result<Document, PatchError> {
        match self {
            DocumentFields::Typed(document) => Ok(*document),
            DocumentFields::Fields(fields) => {
                serde_yaml::from_value(Value::Mapping(fields)).map_err(PatchError)
            }
        }
    }
}

/// Merges a patch into a document, without a conversion to maps. Returns false if the forms of the two differ.
fn merge_typed(document: &mut Document, patch: &Document) -> bool {
    let Document { meta, hosts, state, instances, depends_on, protect, spec, .. } = patch;
    // A value of env stays secret, which the merge of maps ensures.
    let has_env = spec.as_ref().is_some_and(|spec| spec.env.is_some());
    if has_env || spec.is_some() && ShortForm::is_used(document) {
        return false;
    }
    if let Some(meta) = meta {
        let own = document.meta.get_or_insert_default();
        set(&mut own.namespace, &meta.namespace);
        set(&mut own.name, &meta.name);
        if let Some(labels) = &meta.labels {
            own.labels.get_or_insert_default().0.extend(labels.0.clone());
        }
    }
    set(&mut document.hosts, hosts);
    set(&mut document.state, state);
    set(&mut document.instances, instances);
    set(&mut document.depends_on, depends_on);
    set(&mut document.protect, protect);
    if let Some(spec) = spec {
        let mut merged = spec.clone();
        if let Some(own) = &document.spec {
            merged.fill_from(own);
        }
        document.spec = Some(merged);
    }
    true
}

fn set<T: Clone>(own: &mut Option<T>, patch: &Option<T>) {
    if patch.is_some() {
        own.clone_from(patch);
    }
}

/// Merges a patch into a map. `replaces`: the values of the map, which is env, are replaced as a whole, and a secret one
/// stays secret.
fn merge(fields: &mut Mapping, patch: &Mapping, replaces: bool) {
    for (key, value) in patch {
        if value.is_null() {
            fields.remove(key);
            continue;
        }
        if let (Some(Value::Mapping(own)), Value::Mapping(patch), false) =
            (fields.get_mut(key), value, replaces)
        {
            merge(own, patch, key.as_str() == Some("env"));
            continue;
        }
        let is_secret = replaces && fields.get(key).is_some_and(is_secret);
        let new = without_nulls(value);
        fields.insert(key.clone(), if is_secret { as_secret(new) } else { new });
    }
}

fn is_secret(value: &Value) -> bool {
    value.get("secret").and_then(Value::as_bool) == Some(true)
}

/// A value in place of a secret one. Only `secret: false` makes it public.
fn as_secret(value: Value) -> Value {
    let mut entry = match value {
        Value::Mapping(entry) => entry,
        text => Mapping::from_iter([("value".into(), text)]),
    };
    if entry.contains_key("value") && !entry.contains_key("secret") {
        entry.insert("secret".into(), true.into());
    }
    Value::Mapping(entry)
}

/// A value of a patch for a field that is not set: there is nothing to remove.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Mapping(map) => {
            let entries = map.iter().filter(|(_, value)| !value.is_null());
            Value::Mapping(entries.map(|(key, value)| (key.clone(), without_nulls(value))).collect())
        }
        other => other.clone(),
    }
}

/// The patch in the form of the process, if it differs.
fn in_form_of(fields: &Mapping, patch: &Mapping) -> Option<Mapping> {
    let mut changed: Option<Mapping> = None;
    for (short, long) in SHORT_FIELDS {
        let path: Vec<&str> = long.split('.').collect();
        let of = changed.as_ref().unwrap_or(patch);
        let (in_short, in_long) = (of.contains_key(short), get(of, &path).is_some());
        if in_short && !in_long && !fields.contains_key(short) && get(fields, &path).is_some() {
            let patch = changed.get_or_insert_with(|| patch.clone());
            if let Some(value) = patch.remove(short) {
                put(patch, &path, convert(short, value));
            }
        } else if in_long && !in_short && fields.contains_key(short) {
            let patch = changed.get_or_insert_with(|| patch.clone());
            if let Some(value) = take(patch, &path) {
                patch.insert(short.into(), convert(short, value));
            }
        }
    }
    changed
}

/// A value in the other form: `type` has words, auto_type their codes.
fn convert(short: &str, value: Value) -> Value {
    if short != "type" {
        return value;
    }
    let code = value.as_str().and_then(|word| PROCESS_TYPES.iter().position(|known| *known == word));
    let word = value.as_u64().and_then(|code| PROCESS_TYPES.get(usize::try_from(code).ok()?));
    match (code, word) {
        (Some(code), _) => Value::Number(code.into()),
        (None, Some(word)) => Value::String((*word).to_owned()),
        (None, None) => value,
    }
}

fn get<'v>(map: &'v Mapping, path: &[&str]) -> Option<&'v Value> {
    let (first, rest) = path.split_first()?;
    let value = map.get(first)?;
    if rest.is_empty() { Some(value) } else { get(value.as_mapping()?, rest) }
}

fn take(map: &mut Mapping, path: &[&str]) -> Option<Value> {
    let (first, rest) = path.split_first()?;
    if rest.is_empty() { map.remove(first) } else { take(map.get_mut(first)?.as_mapping_mut()?, rest) }
}

fn put(map: &mut Mapping, path: &[&str], value: Value) {
    let Some((first, rest)) = path.split_first() else { return };
    if rest.is_empty() {
        map.insert((*first).into(), value);
        return;
    }
    let inner = map.entry((*first).into()).or_insert_with(|| Value::Mapping(Mapping::new()));
    if !inner.is_mapping() {
        *inner = Value::Mapping(Mapping::new());
    }
    if let Value::Mapping(inner) = inner {
        put(inner, rest, value);
    }
}

/// The first field that two patches set to different values, with the two.
fn find_conflict(patches: &[(usize, &Patch)]) -> Option<(usize, usize, FieldPath)> {
    let mut known: BTreeMap<FieldPath, (usize, Value)> = BTreeMap::new();
    for (at, patch) in patches {
        let mut own = Vec::new();
        leaves(&patch.fields, &FieldPath::root(), false, &mut own);
        for (path, value) in &own {
            let above = (1..path.0.len()).map(|len| FieldPath(path.0[..len].to_vec()));
            let above = above.filter_map(|path| known.get(&path)).next();
            let below = known.range(path..).next().filter(|(other, _)| other.starts_with(path));
            let other = above.or(below.map(|(_, known)| known));
            if let Some((first, _)) = other.filter(|(_, other)| other != *value) {
                return Some((*first, *at, path.clone()));
            }
        }
        known.extend(own.into_iter().map(|(path, value)| (path, (*at, value.clone()))));
    }
    None
}

/// The values of a patch by their paths in the long form.
fn leaves<'v>(map: &'v Mapping, at: &FieldPath, is_whole: bool, all: &mut Vec<(FieldPath, &'v Value)>) {
    for (key, value) in map {
        let name = key.as_str().unwrap_or_default();
        let short = SHORT_FIELDS.iter().find(|(short, _)| at.0.is_empty() && *short == name);
        let path = match short {
            Some((_, long)) => FieldPath::of(long),
            None => at.entry(name),
        };
        match value {
            Value::Mapping(inner) if !is_whole && !inner.is_empty() => {
                let is_env = path.0.last() == Some(&PathSegment::Key("env".into()));
                leaves(inner, &path, is_env, all);
            }
            value => all.push((path, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str) -> Mapping {
        serde_yaml::from_str(text).expect("a map")
    }

    fn merged(fields: &str, patch: &str) -> String {
        let (mut fields, patch) = (map(fields), map(patch));
        let changed = in_form_of(&fields, &patch);
        merge(&mut fields, changed.as_ref().unwrap_or(&patch), false);
        serde_json::to_string(&fields).expect("JSON")
    }

    #[test]
    fn maps_merge_lists_are_replaced_and_null_removes() {
        assert_eq!(
            merged("{a: {b: 1, c: 2}, hosts: [1, 2], x: y}", "{a: {c: null, d: 3}, hosts: [3], x: null}"),
            r#"{"a":{"b":1,"d":3},"hosts":[3]}"#
        );
        assert_eq!(merged("{}", "{a: {b: null, c: 1}}"), r#"{"a":{"c":1}}"#);
        assert_eq!(
            merged("{env: {A: {value: x, secret: true}, B: b}}", "{env: {A: {file: /f}, B: null}}"),
            r#"{"env":{"A":{"file":"/f"}}}"#
        );
    }

    /// A patch has the same result with and without a conversion.
    #[test]
    fn typed_patches_merge_like_maps() {
        let long = "{meta: {namespace: a, name: b, labels: {x: y}}, hosts: [10.0.0.1], spec: {identity: {user: u, proc_name: p}, \
                    env: {A: a, B: {file: /f}}, configmap: [{path: /a}], sandbox: {ulimits: {nofile: 1}, nice: 2}}}";
        let short = "{meta: {namespace: a, name: b}, hosts: [10.0.0.1], run: ./b, env: {A: a}}";
        let patches = [
            "{meta: {namespace: c, labels: {x: z, w: v}}, hosts: [10.0.0.2], state: stopped, protect: [stop]}",
            "{spec: {identity: {user: w}, env: {B: {exec: [x]}, C: c}, configmap: [], sandbox: {ulimits: {core: 0}}}}",
            "{spec: {control: {start_cmd: ./c}, resource: {cpu: 10.5}}, instances: 2, depends_on: [x]}",
            "{spec: {health: {cmd: x}}}",
            "{spec: {env: {A: null}}}",
        ];
        for (text, patch) in [long, short].into_iter().flat_map(|text| patches.map(|patch| (text, patch))) {
            let document: Document = serde_yaml::from_str(text).expect("a document");
            let typed = Patch::of_fields(map(patch));
            let mut plain = Patch::of_fields(map(patch));
            plain.typed = None;
            let [typed, plain] = [typed, plain].map(|patch| {
                let mut whole = DocumentFields::Typed(Box::new(document.clone()));
                whole.merge(&patch).expect("it merges");
                let mut document = whole.into_document().expect("a document");
                // An emptied section means the same as none.
                document.spec.take_if(|spec| **spec == Default::default());
                document
            });
            assert_eq!(typed, plain, "{text} {patch}");
        }
        assert!(Patch::of_fields(map(patches[0])).typed.is_some());
        assert!(patches[3..].iter().all(|patch| Patch::of_fields(map(patch)).typed.is_none()));
    }

    #[test]
    fn a_patch_takes_the_form_of_the_process() {
        assert_eq!(
            merged("{run: a}", "{spec: {control: {start_cmd: b}}}"),
            r#"{"run":"b","spec":{"control":{}}}"#
        );
        assert_eq!(
            merged("{spec: {control: {start_cmd: a}}}", "{run: b}"),
            r#"{"spec":{"control":{"start_cmd":"b"}}}"#
        );
        assert_eq!(
            merged("{type: job}", "{spec: {monitor_policy: {auto_type: 1}}}"),
            r#"{"type":"service","spec":{"monitor_policy":{}}}"#
        );
        assert_eq!(merged("{spec: {env: {A: a}}}", "{env: {B: b}}"), r#"{"spec":{"env":{"A":"a","B":"b"}}}"#);
    }

    #[test]
    fn conflicts_are_found_in_both_forms_and_above_and_below() {
        let conflict = |a: &str, b: &str| {
            let (a, b) = (Patch::of_fields(map(a)), Patch::of_fields(map(b)));
            find_conflict(&[(0, &a), (1, &b)]).map(|(_, _, path)| path.to_string())
        };
        assert_eq!(conflict("{run: a}", "{run: a}"), None);
        assert_eq!(conflict("{run: a}", "{user: b}"), None);
        assert_eq!(
            conflict("{run: a}", "{spec: {control: {start_cmd: b}}}").as_deref(),
            Some("spec.control.start_cmd")
        );
        assert_eq!(
            conflict("{spec: {control: null}}", "{run: b}").as_deref(),
            Some("spec.control.start_cmd")
        );
        assert_eq!(conflict("{env: {A: a}}", "{spec: {env: null}}").as_deref(), Some("spec.env"));
        assert_eq!(conflict("{env: {A: a}}", "{spec: {env: {B: b}}}"), None);
    }
}
