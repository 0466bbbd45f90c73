//! What must hold between documents: policies, one declaration an instance, one process an identity.

use super::super::Declaration;
use super::super::check::{Declared, Process, glob};
use super::super::problem::{Code, Finding, Path};
use super::{Once, Resolved, claims, order};
use crate::model::{Host, HostKey, Place, Policy, Spec};

/// All policies, each with its document, its place and its reach.
pub fn policies(
    documents: &[Declaration],
    places: &[Place],
    found: &mut Vec<(usize, Finding)>,
) -> Vec<(usize, Policy)> {
    let mut policies: Vec<(usize, Policy)> = Vec::new();
    for (at, document) in documents.iter().enumerate() {
        let Declared::Policy(policy) = &document.declared else {
            continue;
        };
        if let Some((other, _)) = policies.iter().find(|(_, earlier)| earlier.name == policy.name) {
            let message = format!("policy {:?} is defined at {{other}} already", policy.name);
            let path = Path::of("meta.name");
            found.push((at, Finding::new(Code::SameName, path.clone(), message).other(*other, path)));
        }
        policies
            .push((at, Policy { place: places[at].clone(), reach: document.home.clone(), ..policy.clone() }));
    }
    policies
}

/// Does a process keep to every policy above it?
pub fn check(
    at: usize,
    document: &Declaration,
    process: &Process,
    spec: &Spec,
    hosts: &[(usize, Host)],
    policies: &[(usize, Policy)],
    found: &mut Vec<(usize, Finding)>,
) {
    if let Some(name) = order::name_too_long(process) {
        let message = format!("with `instances` a name becomes {name:?}, which is too long");
        found.push((at, Finding::new(Code::BadName, Path::of("meta.name"), message)));
    }
    for (from, policy) in policies.iter().filter(|(_, policy)| document.home.starts_with(&policy.reach)) {
        let mut violated = |list: &'static str, path: Path, what: String, allowed: &[String]| {
            let message = format!("policy {:?} at {{other}} does not allow {what}", policy.name);
            let hint = match allowed {
                [] => format!("it allows no {list}"),
                _ => format!("it allows {}", allowed.join(", ")),
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

/// No instance is declared twice, and no two processes of a host share an identity.
pub fn check_instances(resolved: &[Resolved], found: &mut Vec<(usize, Finding)>) {
    let mut once = Once::default();
    let all =
        resolved.iter().flat_map(|process| process.wants.iter().map(move |(key, _)| (key, process.document)));
    let mut keys: Vec<_> = all.collect();
    keys.sort_unstable();
    for pair in keys.windows(2) {
        let [(a, first), (b, second)] = pair else {
            continue;
        };
        if a == b && once.first(*first, *second) {
            let message = format!("instance {b} is declared at {{other}} already");
            let path = Path::of("meta.name");
            found.push((
                *second,
                Finding::new(Code::SameInstance, path.clone(), message)
                    .hint("remove one, or give them different hosts")
                    .other(*first, path),
            ));
        }
    }
    check_identities(resolved, found);
}

fn check_identities(resolved: &[Resolved], found: &mut Vec<(usize, Finding)>) {
    let mut once = Once::default();
    let mut claimed: Vec<(&HostKey, String, usize, usize)> = Vec::new();
    for process in resolved.iter().filter(|process| claims(process)) {
        for (at, (key, want)) in process.wants.iter().enumerate() {
            // What is missing is reported as missing.
            let identity = &want.spec.identity;
            if identity.value_key.is_some()
                || (!identity.proc_name.is_empty() && !identity.setup_path.is_empty())
            {
                claimed.push((&key.host, identity.index_key(), process.document, at));
            }
        }
    }
    claimed.sort_unstable();
    let key_of = |document: usize, at: usize| {
        let process = resolved.binary_search_by_key(&document, |process| process.document).ok();
        process.and_then(|process| resolved[process].wants.get(at)).map(|(key, _)| key.process())
    };
    for pair in claimed.windows(2) {
        let [(host, identity, first, a), (other_host, other_identity, second, b)] = pair else {
            continue;
        };
        if host != other_host || identity != other_identity || !once.first(*first, *second) {
            continue;
        }
        let (Some(a), Some(b)) = (key_of(*first, *a), key_of(*second, *b)) else {
            continue;
        };
        if a == b {
            continue; // one instance twice: said already
        }
        let message =
            format!("{b} has the identity {identity:?} on host {host}, and so has {a} at {{other}}");
        let hint = match first == second {
            true => "give each instance its own: value_key: NAME-${instance}",
            false => "give one of them a value_key",
        };
        let path = Path::of("spec.identity");
        found.push((
            *second,
            Finding::new(Code::SameIdentity, path.clone(), message).hint(hint).other(*first, path).at_key(),
        ));
    }
}
