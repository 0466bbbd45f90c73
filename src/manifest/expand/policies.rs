//! Policy checks: policies per directory, and processes that violate them.

use std::collections::HashMap;
use std::path::{Path as FilePath, PathBuf};

use super::super::Declaration;
use super::super::check::{DeclaredObject, Process};
use super::super::problem::{Code, FieldPath, OTHER_LOCATION, PathProblem};
use super::Findings;
use crate::model::{Allow, Host, Policy, SourceLocation, Spec, glob};

/// All policies, and the directories that they apply to.
#[derive(Debug, Default)]
pub struct Policies {
    pub all: Vec<Policy>,
    by_dir: HashMap<PathBuf, Vec<usize>>,
    /// Policies with `allow`, by directory.
    strict: HashMap<PathBuf, Vec<(usize, Policy)>>,
}

impl Policies {
    pub fn collect(
        documents: &[Declaration],
        locations: &[SourceLocation],
        found: &mut Findings,
    ) -> Policies {
        let mut policies = Policies::default();
        let mut names: HashMap<(&FilePath, &str), usize> = HashMap::new();
        for (at, document) in documents.iter().enumerate() {
            let DeclaredObject::Policy(policy) = &document.declared else { continue };
            let other = *names.entry((&document.scope_dir, &policy.name)).or_insert(at);
            if other != at {
                let message = format!("policy {:?} is already defined at {OTHER_LOCATION}", policy.name);
                let path = FieldPath::of("meta.name");
                let finding = PathProblem::new(Code::SameName, path.clone(), message);
                found.push((at, finding.hint("give one of them another name").other(other, path)));
            }
            let policy = Policy {
                place: locations[at].clone(),
                reach: document.scope_dir.clone(),
                ..(**policy).clone()
            };
            if policy.allow != Allow::default() {
                policies.strict.entry(document.scope_dir.clone()).or_default().push((at, policy.clone()));
            }
            policies.by_dir.entry(document.scope_dir.clone()).or_default().push(policies.all.len());
            policies.all.push(policy);
        }
        policies
    }

    /// Indexes into `all` of the policies that apply to a document.
    pub fn policies_for(&self, document: &Declaration) -> Vec<usize> {
        if self.all.is_empty() {
            return Vec::new();
        }
        let dirs = document.layers.policy_dirs(&document.scope_dir).into_iter();
        let mut over: Vec<usize> = dirs.filter_map(|dir| self.by_dir.get(dir)).flatten().copied().collect();
        over.sort_unstable();
        over
    }

    /// Policies with `allow` that apply to a document.
    fn strict_for<'a>(&'a self, document: &'a Declaration) -> impl Iterator<Item = &'a (usize, Policy)> {
        let dirs = match self.strict.is_empty() {
            true => Vec::new(),
            false => document.layers.policy_dirs(&document.scope_dir),
        };
        dirs.into_iter().filter_map(|dir| self.strict.get(dir)).flatten()
    }
}

/// Maximum number of patterns in a hint.
const SHOWN: usize = 20;

/// Checks a process against all policies that apply to it.
pub fn check(
    at: usize,
    document: &Declaration,
    process: &Process,
    spec: &Spec,
    hosts: &[(usize, Host)],
    policies: &Policies,
    found: &mut Findings,
) {
    for (from, policy) in policies.strict_for(document) {
        let mut violated = |list: &'static str, path: FieldPath, what: String, allowed: &[String]| {
            let message = format!("policy {:?} at {OTHER_LOCATION} does not allow {what}", policy.name);
            let hint = match allowed {
                [] => format!("allowed {list}: none"),
                _ => format!(
                    "allowed {list}: {}",
                    allowed.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ")
                ),
            };
            let finding = PathProblem::new(Code::PolicyViolated, path, message).hint(hint);
            found.push((at, finding.other(*from, FieldPath::of("allow").key(list))));
        };
        let allows = |patterns: &[String], text: &str| patterns.iter().any(|pattern| glob(pattern, text));
        if let (Some(allowed), Some(key)) = (&policy.allow.namespaces, &process.key)
            && !allows(allowed, key.namespace.as_str())
        {
            let what = format!("namespace {:?}", key.namespace.as_str());
            violated("namespaces", FieldPath::of("meta.namespace"), what, allowed);
        }
        if let Some(allowed) = &policy.allow.users {
            let user = spec.identity.user.as_deref();
            if !user.is_some_and(|user| allows(allowed, user)) {
                let what = user
                    .map_or("a process without identity.user".to_owned(), |user| format!("user {user:?}"));
                violated("users", FieldPath::of("spec.identity.user"), what, allowed);
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
                    FieldPath::of("hosts").index(*entry),
                    format!("host {}{more}", host.key),
                    allowed,
                );
            }
        }
    }
}
