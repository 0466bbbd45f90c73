//! Claims of instances: detects duplicate names and identities per host, with sixteen bytes per instance.
//!
//! A claim is a hash. If two hashes are equal, both instances are expanded and compared. A million instances can so be
//! checked without a spec for each.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::super::check::Process;
use super::super::problem::{Code, FieldPath, OTHER_LOCATION, PathProblem};
use super::super::variable_scopes::VarScope;
use super::super::variables::{self, InstanceVariables, VariableUse};
use super::{Findings, instance_name};
use crate::model::{HashedSpec, Host, HostKey, InstanceKey, ProcessKey, Spec, State};

/// A process before its instances are expanded.
pub struct ProcessTemplate {
    pub document: usize,
    pub key: ProcessKey,
    pub instances: Option<u32>,
    pub spec: Arc<HashedSpec>,
    pub uses: VariableUse,
    pub vars: VarScope,
    pub hosts: Vec<(usize, Host)>,
    /// An absent process claims no identity.
    pub is_wanted: bool,
}

/// Two equal claims, as template and instance index.
struct Collision<K> {
    key: K,
    first: (usize, usize),
    second: (usize, usize),
}

impl ProcessTemplate {
    pub fn new(
        document: usize,
        key: &ProcessKey,
        process: &Process,
        spec: Arc<HashedSpec>,
        (uses, vars): (VariableUse, VarScope),
        hosts: Vec<(usize, Host)>,
    ) -> ProcessTemplate {
        let is_wanted = process.state != State::Absent;
        ProcessTemplate {
            document,
            key: key.clone(),
            instances: process.instances,
            spec,
            uses,
            vars,
            hosts,
            is_wanted,
        }
    }

    /// Number of instances: instances per host times hosts.
    pub fn len(&self) -> usize {
        self.hosts.len().saturating_mul(self.instances.unwrap_or(1) as usize)
    }

    fn key(&self, at: usize) -> Option<InstanceKey> {
        let (_, host) = self.hosts.get(at % self.hosts.len().max(1))?;
        let name = match self.number(at) {
            Some(number) => instance_name(&self.key, number)?,
            None => self.key.clone(),
        };
        Some(InstanceKey { host: host.key.clone(), namespace: name.namespace, name: name.name })
    }

    fn number(&self, at: usize) -> Option<u32> {
        self.instances.and_then(|_| u32::try_from(at / self.hosts.len().max(1) + 1).ok())
    }

    /// Host and identity of an instance. `None` if it claims no identity, or its name is not known.
    fn identity(&self, at: usize) -> Option<(HostKey, String)> {
        let identity = &self.spec.identity;
        // A missing field has its own problem.
        let is_whole = !identity.proc_name.is_empty() && !identity.setup_path.is_empty();
        if !self.is_wanted || !(identity.value_key.is_some() || is_whole) {
            return None;
        }
        let key = self.key(at)?;
        let index = match self.uses.any {
            false => identity.index_key(),
            true => {
                let spec = Spec { identity: identity.clone(), ..Spec::default() };
                let meaning = InstanceVariables { key: &key, instance: self.number(at), scope: &self.vars };
                variables::replace(&spec, &meaning).identity.index_key()
            }
        };
        Some((key.host, index))
    }
}

/// Checks that no instance is declared twice and no two processes of a host share an identity.
pub fn check(templates: &[ProcessTemplate], found: &mut Findings) {
    for Collision { key, first, second } in collisions(templates, ProcessTemplate::key) {
        let message = format!("instance {key} is already declared at {OTHER_LOCATION}");
        let path = FieldPath::of("meta.name");
        found.push((
            templates[second.0].document,
            PathProblem::new(Code::SameInstance, path.clone(), message)
                .hint("remove or rename one, or give them different hosts")
                .other(templates[first.0].document, path),
        ));
    }
    for Collision { key: (host, identity), first, second } in collisions(templates, ProcessTemplate::identity)
    {
        let name = |(template, at): (usize, usize)| templates[template].key(at).map(|key| key.process());
        let (Some(a), Some(b)) = (name(first), name(second)) else { continue };
        if a == b {
            continue; // a duplicate instance has its own problem
        }
        let message =
            format!("{b} and {a} at {OTHER_LOCATION} have the same identity {identity:?} on host {host}");
        let hint = match first.0 == second.0 {
            true => "set value_key: NAME-${instance}",
            false => "set value_key in one of them",
        };
        let path = FieldPath::of("spec.identity");
        found.push((
            templates[second.0].document,
            PathProblem::new(Code::SameIdentity, path.clone(), message)
                .hint(hint)
                .other(templates[first.0].document, path)
                .at_key(),
        ));
    }
}

/// The first shared claim of each pair of documents, in claim order.
fn collisions<K: Ord + std::hash::Hash>(
    templates: &[ProcessTemplate],
    claim: impl Fn(&ProcessTemplate, usize) -> Option<K>,
) -> Vec<Collision<K>> {
    let hasher = RandomState::new();
    let mut all: Vec<(u64, u32, u32)> = Vec::with_capacity(templates.iter().map(ProcessTemplate::len).sum());
    for (nth, template) in templates.iter().enumerate() {
        for at in 0..template.len() {
            if let Some(key) = claim(template, at) {
                all.push((hasher.hash_one(&key), nth as u32, at as u32));
            }
        }
    }
    all.sort_unstable();
    let mut shared: HashMap<(u32, u32), Collision<K>> = HashMap::new();
    for pair in all.windows(2) {
        let [(hash, a, i), (other, b, j)] = pair else { continue };
        if hash != other {
            continue;
        }
        let (first, second) = ((*a as usize, *i as usize), (*b as usize, *j as usize));
        let (Some(key), Some(same)) =
            (claim(&templates[first.0], first.1), claim(&templates[second.0], second.1))
        else {
            continue;
        };
        if key != same {
            continue; // only their hashes are equal
        }
        match shared.entry((*a, *b)) {
            Entry::Vacant(vacant) => {
                vacant.insert(Collision { key, first, second });
            }
            Entry::Occupied(mut earlier) => {
                if key < earlier.get().key {
                    earlier.insert(Collision { key, first, second });
                }
            }
        }
    }
    let mut list: Vec<Collision<K>> = shared.into_values().collect();
    list.sort_by(|a, b| (&a.key, a.first, a.second).cmp(&(&b.key, b.first, b.second)));
    list
}
