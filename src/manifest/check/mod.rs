//! Checks of one document: converts it to the object that it declares.
//!
//! Each value is converted once. The result is typed and within its range; any other value becomes a `PathProblem`.
//! Checks across documents are in `expand`.

mod hosts;
mod overlay;
mod policy;
pub mod short_form;
mod spec;
mod supervision;
mod values;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

pub use hosts::{GroupMember, HostGroup, InventorySelection, LabelList, Placement, parse_address};
use hosts::{group, host_value};
pub use overlay::{DeclaredOverlay, Patch};
pub use spec::{require, spec};
pub use values::ValueChecker;

use super::document::{Document, Meta, RolloutEntry, SpecEntry, Text};
use super::grammar::{self, API_VERSION};
use super::inventory::InventoryHosts;
use super::problem::{Code, FieldPath, PathProblem, did_you_mean};
use super::variable_scopes::{self, VarMap};
use super::variables::VariableUse;
use crate::model::{
    Effect, Field, HashedSpec, HostKey, Name, OnChange, Policy, ProcessKey, Protection, Rollout,
    RolloutGroup, Spec, State,
};

/// The object that a document declares, with its valid fields. Clones are cheap, so that a reload shares unchanged ones.
#[derive(Clone, Debug)]
pub enum DeclaredObject {
    Process(Arc<Process>),
    Group(Arc<HostGroup>),
    Defaults(Arc<DefaultValues>),
    Policy(Arc<Policy>),
    Overlay(Arc<DeclaredOverlay>),
    /// The hosts of an inventory, from a snapshot.
    Inventory(Arc<InventoryHosts>),
    Nothing,
}

/// A process before Defaults, groups and variables are resolved.
#[derive(Debug)]
pub struct Process {
    /// `None` if the name is missing or invalid, which is reported.
    pub key: Option<ProcessKey>,
    pub labels: BTreeMap<String, String>,
    /// With the index of the entry in `hosts`.
    pub hosts: Vec<(usize, Placement)>,
    pub state: State,
    pub instances: Option<u32>,
    pub depends_on: Vec<(usize, ProcessKey)>,
    pub moved_from: Option<ProcessKey>,
    pub changes: ChangeRules,
    /// Spec as written; Defaults are merged into it. `spec` is the checked form.
    pub entry: Arc<SpecEntry>,
    pub spec: Arc<HashedSpec>,
    pub uses: VariableUse,
    pub form: ProcessForm,
}

/// The form of a process, which decides what it must set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessForm {
    /// A request body, which has more required fields.
    Body,
    Long,
    /// With `run`: the identity may be left out.
    Short,
}

/// Rules of a process for its changes.
#[derive(Debug)]
pub struct ChangeRules {
    pub protect: Vec<Protection>,
    pub adopt: bool,
    pub on_change: OnChange,
    pub rollout: Option<Rollout>,
}

/// Default fields and variables of a directory.
#[derive(Debug, Default)]
pub struct DefaultValues {
    pub entry: SpecEntry,
    pub vars: Option<Arc<VarMap>>,
    pub uses: VariableUse,
}

/// Checks one document. Problems are in field order, not in file order.
pub fn document(document: Document) -> (DeclaredObject, Vec<PathProblem>) {
    let mut values = ValueChecker::default();
    let in_body = document.api_version.is_none() && document.kind.is_none() && document.run.is_none();
    if let Some(version) = document.api_version.as_deref().filter(|v| *v != API_VERSION) {
        let message = format!("apiVersion {version:?} is unknown");
        values.report(
            PathProblem::new(Code::UnknownKind, FieldPath::of("apiVersion"), message)
                .hint("this version of Abide supports abide/v1"),
        );
    }
    let declared = match document.kind.as_deref() {
        None | Some("Process") => DeclaredObject::Process(Arc::new(process(document, in_body, &mut values))),
        Some("HostGroup") => DeclaredObject::Group(Arc::new(group(&document, &mut values))),
        Some("Defaults") => {
            let vars = variable_scopes::check(&FieldPath::of("vars"), document.vars.as_ref(), &mut values);
            if document.spec.is_none() && document.vars.is_none() {
                values.report_missing(FieldPath::of("spec"));
            }
            let entry = document.spec.unwrap_or_default();
            spec(&entry, &FieldPath::of("spec"), true, &mut values);
            let uses = std::mem::take(&mut values.uses);
            DeclaredObject::Defaults(Arc::new(DefaultValues { entry: *entry, vars, uses }))
        }
        Some("Policy") => DeclaredObject::Policy(Arc::new(policy::policy(document, &mut values))),
        Some("Overlay") => DeclaredObject::Overlay(Arc::new(overlay::overlay(document, &mut values))),
        Some(kind) => {
            let hint = match did_you_mean(kind, grammar::KINDS.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => format!("kinds: {}", grammar::KINDS.join(", ")),
            };
            let message = format!("kind {:?} is unknown", super::node::shorten(kind));
            values.report(PathProblem::new(Code::UnknownKind, FieldPath::of("kind"), message).hint(hint));
            DeclaredObject::Nothing
        }
    };
    (declared, values.findings)
}

fn process(mut document: Document, in_body: bool, values: &mut ValueChecker) -> Process {
    let is_short = document.run.is_some();
    let short = short_form::ShortForm::take(&mut document);
    let meta = document.meta.unwrap_or_default();
    let key = process_key(&meta, values);
    let state = values
        .word(&FieldPath::of("state"), document.state.as_ref(), grammar::STATES)
        .and_then(|word| State::ALL.into_iter().find(|state| state.word() == word))
        .unwrap_or_default();
    let instances =
        values.int(&FieldPath::of("instances"), document.instances, grammar::INSTANCES, Code::OutOfRange);
    if let (Some(key), Some(count)) = (&key, instances) {
        numbered_name(key, count, values);
    }
    let labels = values.labels(&FieldPath::of("meta.labels"), meta.labels.as_ref());
    if document.hosts.as_ref().is_none_or(Vec::is_empty) {
        values.report_missing(FieldPath::of("hosts"));
    }
    let hosts = document.hosts.iter().flatten().enumerate();
    let hosts = hosts
        .filter_map(|(at, value)| Some((at, host_value(value, &FieldPath::of("hosts").index(at), values)?)))
        .collect();
    let entry = short_form::fold(*document.spec.unwrap_or_default(), short, values);
    let mut spec = spec(&entry, &FieldPath::of("spec"), instances.is_some(), values);
    spec.labels.clone_from(&labels);
    if let Some(key) = key.as_ref().filter(|_| is_short) {
        short_form::complete(&mut spec, key, instances.is_some(), &mut values.uses);
    }
    let (depends_on, moved_from) = match &key {
        Some(key) => (
            depends_on(document.depends_on.unwrap_or_default(), &key.namespace, values),
            document.moved_from.and_then(|text| moved_from(&text, key, values)),
        ),
        None => (Vec::new(), None),
    };
    if in_body {
        warn_ignored(
            &[
                ("op_type", document.op_type.is_some()),
                ("bk_app_code", document.bk_app_code.is_some()),
                ("bk_app_secret", document.bk_app_secret.is_some()),
                ("bk_token", document.bk_token.is_some()),
                ("bk_username", document.bk_username.is_some()),
            ],
            values,
        );
    }
    Process {
        key,
        labels,
        hosts,
        state,
        instances,
        depends_on,
        moved_from,
        changes: ChangeRules {
            protect: values
                .words(&FieldPath::of("protect"), document.protect.as_deref(), grammar::PROTECTIONS)
                .filter_map(|word| Protection::ALL.into_iter().find(|guard| guard.word() == word))
                .collect(),
            adopt: document.adopt.unwrap_or_default(),
            on_change: on_change(document.on_change.unwrap_or_default().0, values),
            rollout: document.rollout.map(|entry| rollout(&entry, values)),
        },
        entry: shared_entry(entry),
        spec: shared_spec(spec),
        uses: std::mem::take(&mut values.uses),
        form: match (in_body, is_short) {
            (true, _) => ProcessForm::Body,
            (false, true) => ProcessForm::Short,
            (false, false) => ProcessForm::Long,
        },
    }
}

/// Shared empty entry for documents without a spec.
fn shared_entry(entry: SpecEntry) -> Arc<SpecEntry> {
    static EMPTY: LazyLock<Arc<SpecEntry>> = LazyLock::new(Arc::default);
    if entry == SpecEntry::default() { Arc::clone(&EMPTY) } else { Arc::new(entry) }
}

fn shared_spec(spec: Spec) -> Arc<HashedSpec> {
    static EMPTY: LazyLock<Arc<HashedSpec>> = LazyLock::new(Arc::default);
    if spec == Spec::default() { Arc::clone(&EMPTY) } else { Arc::new(HashedSpec::new(spec)) }
}

fn process_key(meta: &Meta, values: &mut ValueChecker) -> Option<ProcessKey> {
    let namespace = literal_name(&FieldPath::of("meta.namespace"), meta.namespace.as_ref(), values);
    let name = literal_name(&FieldPath::of("meta.name"), meta.name.as_ref(), values);
    Some(ProcessKey { namespace: namespace?, name: name? })
}

/// Rejects `*` as a name: in `allow`, in an app's `namespaces` and in queries it matches every name.
fn literal_name(path: &FieldPath, value: Option<&Text>, values: &mut ValueChecker) -> Option<Name> {
    let name = name(path, value, values)?;
    if name.as_str().bytes().any(|byte| byte != b'*') {
        return Some(name);
    }
    let message =
        format!("{path} {:?} cannot be used: it is the pattern that matches every name", name.as_str());
    values.report(
        PathProblem::new(Code::BadName, path.clone(), message)
            .hint("use the name of one process; `hosts` lists its hosts"),
    );
    None
}

/// Checks that a name is not too long with an instance number.
fn numbered_name(key: &ProcessKey, count: u32, values: &mut ValueChecker) {
    let name = format!("{}_{count}", key.name);
    if name.parse::<Name>().is_err() {
        let message = format!("with `instances`, the instance name {name:?} is too long");
        values.report(
            PathProblem::new(Code::BadName, FieldPath::of("meta.name"), message).hint("use a shorter name"),
        );
    }
}

fn name(path: &FieldPath, value: Option<&Text>, values: &mut ValueChecker) -> Option<Name> {
    let Some(text) = value.filter(|text| !text.is_empty()) else {
        values.report_missing(path.clone());
        return None;
    };
    match text.parse() {
        Ok(name) => Some(name),
        Err(error) => {
            let message = format!("{path} {:?} cannot be used: {error}", super::node::shorten(text));
            values.report(
                PathProblem::new(Code::BadName, path.clone(), message)
                    .hint("use letters, digits, `-`, `_` and `.`"),
            );
            None
        }
    }
}

fn depends_on(entries: Vec<Text>, namespace: &Name, values: &mut ValueChecker) -> Vec<(usize, ProcessKey)> {
    let path = FieldPath::of("depends_on");
    let mut keys = Vec::new();
    for (at, text) in entries.into_iter().enumerate() {
        match ProcessKey::within(namespace, &text) {
            Ok(key) => keys.push((at, key)),
            Err(error) => {
                let message =
                    format!("depends_on {:?} is not a process name: {error}", super::node::shorten(&text));
                values.report(
                    PathProblem::new(Code::BadName, path.index(at), message)
                        .hint("use NAMESPACE/NAME, or NAME in the same namespace"),
                );
            }
        }
    }
    keys
}

fn moved_from(text: &str, to: &ProcessKey, values: &mut ValueChecker) -> Option<ProcessKey> {
    let path = FieldPath::of("moved_from");
    let problem = match ProcessKey::within(&to.namespace, text) {
        Ok(key) if key == *to => "a process cannot be moved from its own name".to_owned(),
        Ok(_) if names_host(text) => ACROSS_HOSTS.to_owned(),
        Ok(key) => return Some(key),
        Err(_) if text.contains(':') => ACROSS_HOSTS.to_owned(),
        Err(error) => error.to_string(),
    };
    let message = format!("moved_from {:?} is invalid: {problem}", super::node::shorten(text));
    values.report(
        PathProblem::new(Code::BadMove, path, message)
            .hint("use NAMESPACE/NAME, or NAME in the same namespace, of a process on the same hosts"),
    );
    None
}

const ACROSS_HOSTS: &str = "a process cannot move across hosts";

/// Whether a text is `NS/NAME@HOST`, the instance syntax of the command line.
fn names_host(text: &str) -> bool {
    let host = text.rsplit_once('@').map(|(_, host)| host);
    host.is_some_and(|host| host.parse::<HostKey>().is_ok() || host.parse::<std::net::IpAddr>().is_ok())
}

/// The environment variable of a path `env.NAME`.
fn variable_of(path: &str) -> Option<&str> {
    let path = path.strip_prefix("spec.").unwrap_or(path);
    path.strip_prefix("env.").filter(|name| !name.is_empty() && !name.contains(['=', '\0']))
}

fn on_change(entries: BTreeMap<String, Text>, values: &mut ValueChecker) -> OnChange {
    let path = FieldPath::of("on_change");
    let mut known = OnChange::new();
    for (name, word) in entries {
        if let Some(variable) = variable_of(&name) {
            let word = values.word(&path.entry(&name), Some(&word), grammar::EFFECTS);
            if let Some(effect) = word.and_then(Effect::from_word)
                && known.insert_variable(variable, effect).is_some()
            {
                let message =
                    format!("on_change names env.{variable} twice, with and without the leading `spec.`");
                let finding = PathProblem::new(Code::DuplicateKey, path.entry(&name), message);
                values.report(finding.hint("remove one of them").at_key());
            }
            continue;
        }
        let Some(field) = Field::from_path(&name) else {
            let hint = match did_you_mean(&name, Field::ALL.iter().map(|field| field.path())) {
                Some(meant) => format!("did you mean {meant:?}?"),
                None => "`abide explain spec` lists the fields".to_owned(),
            };
            let message = format!("a spec has no field {:?}", super::node::shorten(&name));
            values
                .report(PathProblem::new(Code::BadFieldPath, path.entry(&name), message).hint(hint).at_key());
            continue;
        };
        let word = values.word(&path.entry(&name), Some(&word), grammar::EFFECTS);
        if let Some(effect) = word.and_then(Effect::from_word)
            && known.insert(field, effect).is_some()
        {
            let message = format!("on_change names {field} twice, with and without the leading `spec.`");
            let finding = PathProblem::new(Code::DuplicateKey, path.entry(&name), message);
            values.report(finding.hint("remove one of them").at_key());
        }
    }
    known
}

fn rollout(entry: &RolloutEntry, values: &mut ValueChecker) -> Rollout {
    let path = FieldPath::of("rollout");
    let pause = values.word(&path.key("pause"), entry.pause.as_ref(), grammar::PAUSES);
    let order = entry.order.as_deref().unwrap_or_default();
    if pause.is_some() && order.is_empty() && entry.canary.is_none() {
        let message = "rollout.pause needs `canary` or `order`: without them there is nothing to wait after";
        values.report(
            PathProblem::new(Code::MissingField, path.key("pause"), message.to_owned())
                .hint("add `canary: 1`, or list host groups in `order`"),
        );
    }
    let mut groups: Vec<RolloutGroup> = Vec::new();
    for (at, name) in order.iter().enumerate() {
        if groups.iter().any(|group| group.name == **name) {
            let message = format!("rollout.order names {:?} twice", super::node::shorten(name));
            let at = path.key("order").index(at);
            values.report(PathProblem::new(Code::DuplicateKey, at, message).hint("remove one of them"));
            continue;
        }
        groups.push(RolloutGroup { name: name.to_string(), ..RolloutGroup::default() });
    }
    Rollout {
        groups,
        max_unavailable: values.amount(&path.key("max_unavailable"), entry.max_unavailable.as_ref(), 1),
        pauses: pause.is_some(),
        batch: values.amount(&path.key("batch"), entry.batch.as_ref(), 1),
        canary: values.amount(&path.key("canary"), entry.canary.as_ref(), 0),
        soak_secs: values.duration(&path.key("soak"), entry.soak.as_ref()),
        max_failures: values.int(
            &path.key("max_failures"),
            entry.max_failures,
            grammar::ANY_COUNT,
            Code::OutOfRange,
        ),
        auto_rollback: entry.auto_rollback,
    }
}

fn warn_ignored(fields: &[(&'static str, bool)], values: &mut ValueChecker) {
    for (name, _) in fields.iter().filter(|(_, is_set)| *is_set) {
        let finding = PathProblem::new(
            Code::IgnoredField,
            FieldPath::of(name),
            format!("{name} is ignored in a manifest"),
        )
        .at_key();
        values.report(finding.hint(match *name {
            "op_type" => "remove it; `state` sets the desired state",
            "bk_app_secret" | "bk_token" => "remove it, and rotate it if this file was ever committed",
            _ => "remove it; set it in the target's configuration",
        }));
    }
}
