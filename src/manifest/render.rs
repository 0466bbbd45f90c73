//! Rendered manifests: the processes of a desired state as documents in the long form, after Defaults, host groups,
//! variables and overlays.
//!
//! A plan of the rendered manifests equals one of the originals, except for secret values, which are left out. Policies
//! are not rendered.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::document::{Document, Map, Meta, RolloutEntry, Text, TextOrNumber};
use super::print;
use crate::model::{
    Amount, DeclaredProcess, Desired, DesiredInstance, EnvValue, Field, Host, HostKey, InstanceKey, OnChange,
    ProcessKey, Rollout, Spec,
};

/// As of `HashedSpec::digest`.
type SpecDigest = ([u8; 16], u64);

/// The documents: host groups that rollouts name, then one process for all hosts with the same spec.
pub fn documents(desired: &Desired) -> Vec<Document> {
    let mut groups: BTreeMap<&str, &BTreeSet<HostKey>> = BTreeMap::new();
    let mut found: Vec<(ProcessKey, &DesiredInstance, Vec<Host>)> = Vec::new();
    // Index into `found`, by process, document and spec.
    let mut indexes: HashMap<(ProcessKey, String, SpecDigest), usize> = HashMap::new();
    let mut instances: Vec<(&InstanceKey, &DesiredInstance)> = desired.instances.iter().collect();
    instances.sort_by_key(|(key, _)| key.process());
    for (key, want) in instances {
        for group in want.origin.rollout.iter().flat_map(|rollout| &rollout.groups) {
            groups.insert(&group.name, &group.hosts);
        }
        let next = found.len();
        let same = (key.process(), want.origin.place.to_string(), want.spec.digest());
        match *indexes.entry(same).or_insert(next) {
            at if at == next => found.push((key.process(), want, vec![want.host.clone()])),
            at => found[at].2.push(want.host.clone()),
        }
    }
    let groups = groups.into_iter().map(|(name, hosts)| host_group(name, hosts));
    groups.chain(found.iter().map(|(key, want, hosts)| process(key, want, hosts))).collect()
}

fn host_group(name: &str, hosts: &BTreeSet<HostKey>) -> Document {
    let host = |key: &HostKey| print::host_value(&Host { key: key.clone(), supplier: None, agent_id: None });
    Document {
        api_version: Some("abide/v1".into()),
        kind: Some("HostGroup".into()),
        meta: Some(Meta { name: Some(name.into()), ..Meta::default() }),
        hosts: Some(hosts.iter().map(host).collect()),
        ..Document::default()
    }
}

fn process(key: &ProcessKey, want: &DesiredInstance, hosts: &[Host]) -> Document {
    let DeclaredProcess {
        place: _,
        declared: _,
        state,
        depends_on,
        protect,
        adopt,
        moved_from,
        on_change,
        rollout,
        policies: _,
    } = &*want.origin;
    let texts = |texts: Vec<String>| (!texts.is_empty()).then(|| texts.into_iter().map(Text).collect());
    Document {
        depends_on: texts(depends_on.iter().map(ToString::to_string).collect()),
        protect: texts(protect.iter().map(|protection| protection.word().to_owned()).collect()),
        adopt: adopt.then_some(true),
        moved_from: moved_from.iter().find(|from| *from != key).map(|from| Text(from.to_string())),
        on_change: on_change_map(on_change),
        rollout: rollout.as_ref().map(rollout_entry),
        ..print::process(key, hosts, *state, &without_secrets(&want.spec))
    }
}

/// The spec without the values of secrets.
fn without_secrets(spec: &Spec) -> Spec {
    let mut spec = spec.clone();
    for value in spec.env.values_mut() {
        if matches!(value, EnvValue::Secret(_)) {
            *value = EnvValue::Digest(String::new());
        }
    }
    spec
}

fn on_change_map(rules: &OnChange) -> Option<Map<Text>> {
    let word = |word: &str| Text(word.to_owned());
    let fields = Field::ALL
        .iter()
        .filter_map(|field| rules.get(*field).map(|effect| (field.path().to_owned(), word(effect.word()))));
    let variables =
        rules.variables().iter().map(|(name, effect)| (format!("env.{name}"), word(effect.word())));
    let all: BTreeMap<String, Text> = fields.chain(variables).collect();
    (!all.is_empty()).then_some(Map(all))
}

fn rollout_entry(rollout: &Rollout) -> RolloutEntry {
    let Rollout { groups, max_unavailable, pauses, batch, canary, soak_secs, max_failures, auto_rollback } =
        rollout;
    let amount = |amount: &Option<Amount>| match amount {
        Some(Amount::Count(count)) => i64::try_from(*count).ok().map(TextOrNumber::Number),
        Some(share) => Some(TextOrNumber::Text(share.to_string())),
        None => None,
    };
    let order: Vec<Text> = groups.iter().map(|group| Text(group.name.clone())).collect();
    RolloutEntry {
        batch: amount(batch),
        canary: amount(canary),
        soak: soak_secs.map(|secs| TextOrNumber::Text(format!("{secs}s"))),
        max_failures: max_failures.and_then(|most| i64::try_from(most).ok()),
        auto_rollback: *auto_rollback,
        order: (!order.is_empty()).then_some(order),
        max_unavailable: amount(max_unavailable),
        pause: pauses.then(|| "promoted".into()),
    }
}
