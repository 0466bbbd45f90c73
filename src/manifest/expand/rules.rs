//! What must hold between documents: policies, one declaration an instance, one process an identity.

use std::collections::HashMap;
use std::path::{Path as FilePath, PathBuf};

use super::super::Declaration;
use super::super::check::{Declared, Process};
use super::super::problem::{Code, Finding, OTHER, Path};
use super::Found;
use crate::model::{Allow, Host, Place, Policy, Spec, glob};

/// All policies, each with its document, its place and its reach; and where each applies.
#[derive(Debug, Default)]
pub struct Policies {
    pub all: Vec<Policy>,
    by_home: HashMap<PathBuf, Vec<usize>>,
    /// Those that forbid something, by directory.
    strict: HashMap<PathBuf, Vec<(usize, Policy)>>,
}

impl Policies {
    pub fn collect(documents: &[Declaration], places: &[Place], found: &mut Found) -> Policies {
        let mut policies = Policies::default();
        let mut names: HashMap<(&FilePath, &str), usize> = HashMap::new();
        for (at, document) in documents.iter().enumerate() {
            let Declared::Policy(policy) = &document.declared else { continue };
            let other = *names.entry((&document.home, &policy.name)).or_insert(at);
            if other != at {
                let message = format!("policy {:?} is defined at {OTHER} already", policy.name);
                let path = Path::of("meta.name");
                let finding = Finding::new(Code::SameName, path.clone(), message);
                found.push((at, finding.hint("give one of them another name").other(other, path)));
            }
            let policy =
                Policy { place: places[at].clone(), reach: document.home.clone(), ..(**policy).clone() };
            if policy.allow != Allow::default() {
                policies.strict.entry(document.home.clone()).or_default().push((at, policy.clone()));
            }
            policies.by_home.entry(document.home.clone()).or_default().push(policies.all.len());
            policies.all.push(policy);
        }
        policies
    }

    /// Those that bind a document, as they stand in `all`.
    pub fn over(&self, document: &Declaration) -> Vec<usize> {
        if self.all.is_empty() {
            return Vec::new();
        }
        let mut over: Vec<usize> =
            document.home.ancestors().filter_map(|home| self.by_home.get(home)).flatten().copied().collect();
        over.sort_unstable();
        over
    }

    /// Those that bind a document and forbid something.
    fn above<'a>(&'a self, document: &'a Declaration) -> impl Iterator<Item = &'a (usize, Policy)> {
        document.home.ancestors().filter_map(|home| self.strict.get(home)).flatten()
    }
}

/// How many patterns a hint names.
const SHOWN: usize = 20;

/// Does a process keep to every policy above it?
pub fn check(
    at: usize,
    document: &Declaration,
    process: &Process,
    spec: &Spec,
    hosts: &[(usize, Host)],
    policies: &Policies,
    found: &mut Found,
) {
    for (from, policy) in policies.above(document) {
        let mut violated = |list: &'static str, path: Path, what: String, allowed: &[String]| {
            let message = format!("policy {:?} at {OTHER} does not allow {what}", policy.name);
            let hint = match allowed {
                [] => format!("it allows no {list}"),
                _ => format!(
                    "it allows {}",
                    allowed.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ")
                ),
            };
            let finding = Finding::new(Code::PolicyViolated, path, message).hint(hint);
            found.push((at, finding.other(*from, Path::of("allow").key(list))));
        };
        let allows = |patterns: &[String], text: &str| patterns.iter().any(|pattern| glob(pattern, text));
        if let (Some(allowed), Some(key)) = (&policy.allow.namespaces, &process.key)
            && !allows(allowed, key.namespace.as_str())
        {
            let what = format!("namespace {:?}", key.namespace.as_str());
            violated("namespaces", Path::of("meta.namespace"), what, allowed);
        }
        if let Some(allowed) = &policy.allow.users {
            let user = spec.identity.user.as_deref();
            if !user.is_some_and(|user| allows(allowed, user)) {
                let what =
                    user.map_or("leaving out identity.user".to_owned(), |user| format!("user {user:?}"));
                violated("users", Path::of("spec.identity.user"), what, allowed);
            }
        }
        if let Some(allowed) = &policy.allow.hosts {
            let mut outside = hosts.iter().filter(|(_, host)| !allows(allowed, &host.key.to_string()));
            if let Some((entry, host)) = outside.next() {
                let more = match outside.count() {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                violated(
                    "hosts",
                    Path::of("hosts").index(*entry),
                    format!("host {}{more}", host.key),
                    allowed,
                );
            }
        }
    }
}
