//! Expansion of declarations to [`Desired`]: Defaults, host groups, instances and variables, and cross-document checks.
//!
//! A document with an error declares no instances. Its name stays known, because other documents may depend on it.

mod claims;
mod defaults;
mod dependencies;
mod hosts;
mod inventories;
mod policies;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use self::claims::ProcessTemplate;
use self::defaults::Defaults;
use self::hosts::HostIndex;
use self::policies::Policies;
use super::check::{self, DeclaredObject, Process, ValueChecker};
use super::problem::{Code, FieldPath, MAX_PER_FILE, PathProblem};
use super::variable_scopes::{self, DefaultVars, VarScope};
use super::variables::{self, InstanceVariables, VariableUse};
use super::{Declaration, Limits};
use crate::model::{
    DeclaredProcess, Desired, DesiredInstance, HashedSpec, Host, HostKey, InstanceKey, ProcessKey, Rollout,
    SourceLocation,
};

pub struct Expansion {
    pub desired: Desired,
    pub context: Context,
    /// Number of dropped problems per file.
    pub more: Vec<(usize, usize)>,
    pub findings: Vec<(usize, PathProblem)>,
    pub counts: DesiredCounts,
}

/// Defaults and policies: enough to expand one document again, if its references to others are unchanged.
#[derive(Debug)]
pub struct Context {
    defaults: Defaults,
    policies: Policies,
}

impl Context {
    /// Expands a process again with the same hosts and policies. `None` if it has a problem.
    pub fn expand(
        &self,
        document: &Declaration,
        location: SourceLocation,
        hosts: Vec<(usize, Host)>,
        policies: Vec<usize>,
    ) -> Option<Vec<(InstanceKey, DesiredInstance)>> {
        let DeclaredObject::Process(process) = &document.declared else { return None };
        let mut found = Findings::of(std::slice::from_ref(document));
        let (spec, uses) = self.defaults.apply(0, document, process, &mut found);
        // Variables of hosts are in other documents.
        if !uses.named.is_empty() {
            return None;
        }
        policies::check(0, document, process, &spec, &hosts, &self.policies, &mut found);
        let key = process.key.as_ref().filter(|_| !self.defaults.has_error_above(document))?;
        if uses.host {
            check_host_ip(0, &hosts, &mut found);
        }
        // The groups of a rollout are those of other documents.
        let rollout = process.changes.rollout.clone();
        if rollout.as_ref().is_some_and(|rollout| !rollout.groups.is_empty()) {
            return None;
        }
        let origin = declared_process(key, process, rollout, location, policies);
        let uses = (uses, VarScope::default());
        let instances = resolve(&ProcessTemplate::new(0, key, process, spec, uses, hosts), origin);
        found.list.is_empty().then_some(instances)
    }
}

/// Number of desired instances and of their hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DesiredCounts {
    pub instances: usize,
    pub hosts: usize,
}

/// Purpose of an expansion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// Build the instances.
    #[default]
    Instances,
    /// Problems and counts only: a million instances cost only their claims.
    Checks,
}

/// Expands all documents. `findings` are the problems so far; `unread` is true if some documents are unreadable.
pub fn expand(
    documents: &mut [Declaration],
    locations: Vec<SourceLocation>,
    findings: &[(usize, PathProblem)],
    unread: bool,
    limits: &Limits,
    purpose: Purpose,
) -> Expansion {
    let mut found = Findings::of(documents);
    let mut policies = Policies::collect(documents, &locations, &mut found);
    let vars = DefaultVars::collect(documents, &mut |at, finding| found.push((at, finding)));
    let defaults = Defaults::collect(documents, findings, &vars, &mut found);
    let index = HostIndex::collect(documents, unread, purpose, &mut found);
    let names = ProcessIndex::collect(documents);
    let (mut templates, mut origins) = (Vec::new(), Vec::new());
    let mut total = 0usize;
    for (at, document) in documents.iter().enumerate() {
        let DeclaredObject::Process(process) = &document.declared else {
            continue;
        };
        let (spec, uses) = defaults.apply(at, document, process, &mut found);
        let (hosts, host_vars) = index.hosts_of(at, process, &mut found);
        policies::check(at, document, process, &spec, &hosts, &policies, &mut found);
        dependencies::check_names(at, process, &names, unread, &mut found);
        let Some(key) = process.key.as_ref().filter(|_| !defaults.has_error_above(document)) else {
            continue;
        };
        let scope = match uses.named.is_empty() {
            true => VarScope::default(),
            false => VarScope::new(document.layers.vars(), vars.above(document), host_vars),
        };
        let has_unknown_hosts = index.has_unknown_hosts(process);
        if has_unknown_hosts && purpose == Purpose::Instances {
            // The inventory is reported once, at its group.
            found.bad.insert(at);
        }
        // Unknown hosts may define any variable.
        let checked = if has_unknown_hosts { &VariableUse::default() } else { &uses };
        variable_scopes::check_uses(key, checked, &scope, &hosts, &mut |finding| {
            if !defaults.is_known(document, &finding) {
                found.push((at, finding));
            }
        });
        let before = total;
        total = total.saturating_add(hosts.len().saturating_mul(process.instances.unwrap_or(1) as usize));
        if total > limits.instances {
            // Reported once; the other documents are still checked.
            if before <= limits.instances {
                found.push((at, too_many(limits.instances)));
            }
            continue;
        }
        if uses.host {
            check_host_ip(at, &hosts, &mut found);
        }
        if purpose == Purpose::Instances {
            let rollout = index.rollout_of(at, process, &mut found);
            let (place, policies) = (locations[at].clone(), policies.policies_for(document));
            origins.push(declared_process(key, process, rollout, place, policies));
        } else {
            index.rollout_of(at, process, &mut found);
        }
        templates.push(ProcessTemplate::new(at, key, process, spec, (uses, scope), hosts));
    }
    dependencies::check_cycles(documents, &names, &mut found);
    dependencies::check_states(documents, &names, &mut found);
    claims::check(&templates, &mut found);
    found.bad.iter().for_each(|document| documents[*document].bad = true);
    let good = |template: &&ProcessTemplate| !documents[template.document].bad;
    let counts = counts(templates.iter().filter(good));
    let wanted = templates.iter().zip(origins).filter(|(template, _)| good(template));
    let instances = wanted.flat_map(|(template, origin)| resolve(template, origin)).collect();
    Expansion {
        counts,
        desired: Desired { instances, policies: std::mem::take(&mut policies.all) },
        context: Context { defaults, policies },
        more: found.more(),
        findings: found.list,
    }
}

fn too_many(limit: usize) -> PathProblem {
    let message = format!("this process exceeds the limit of {limit} instances in total");
    let finding = PathProblem::new(Code::TooLarge, FieldPath::of("hosts"), message);
    finding.hint("if this is intended, raise --max-instances").at_key()
}

/// Documents and instance count of each process name.
pub struct ProcessIndex {
    declared: HashMap<ProcessKey, Vec<usize>>,
    instances: HashMap<ProcessKey, u32>,
}

impl ProcessIndex {
    fn collect(documents: &[Declaration]) -> ProcessIndex {
        let mut names = ProcessIndex { declared: HashMap::new(), instances: HashMap::new() };
        for (at, document) in documents.iter().enumerate() {
            let DeclaredObject::Process(process) = &document.declared else {
                continue;
            };
            let Some(key) = &process.key else { continue };
            names.declared.entry(key.clone()).or_default().push(at);
            let most = names.instances.entry(key.clone()).or_default();
            *most = (*most).max(process.instances.unwrap_or_default());
        }
        names
    }

    /// The declared name of a process, from that name or from an instance's (`web/api_2` → `web/api`).
    fn declared_name(&self, key: &ProcessKey) -> Option<&ProcessKey> {
        if let Some((key, _)) = self.declared.get_key_value(key) {
            return Some(key);
        }
        let (name, number) = key.name.as_str().rsplit_once('_')?;
        // Canonical numbers only: no sign, no leading zero.
        let number: u32 = number.parse().ok().filter(|n: &u32| *n > 0 && n.to_string() == number)?;
        let base = ProcessKey { namespace: key.namespace.clone(), name: name.parse().ok()? };
        let (key, most) = self.instances.get_key_value(&base)?;
        (number <= *most).then_some(key)
    }
}

/// Instance names of a process per host, with their numbers.
fn instance_names(
    key: &ProcessKey,
    instances: Option<u32>,
) -> impl Iterator<Item = (Option<u32>, ProcessKey)> {
    let many = instances.into_iter().flat_map(|count| 1..=count).filter_map(|number| {
        // `check` rejects a name that is too long with its number.
        Some((Some(number), instance_name(key, number)?))
    });
    let one = instances.is_none().then(|| (None, key.clone()));
    one.into_iter().chain(many)
}

fn instance_name(key: &ProcessKey, number: u32) -> Option<ProcessKey> {
    let name = format!("{}_{number}", key.name).parse().ok()?;
    Some(ProcessKey { namespace: key.namespace.clone(), name })
}

fn counts<'a>(templates: impl Iterator<Item = &'a ProcessTemplate>) -> DesiredCounts {
    let (mut instances, mut hosts) = (0, HashSet::new());
    for template in templates {
        instances += template.len();
        hosts.extend(template.hosts.iter().map(|(_, host)| &host.key));
    }
    DesiredCounts { instances, hosts: hosts.len() }
}

/// Expands a template to instances, with variables replaced.
fn resolve(template: &ProcessTemplate, origin: DeclaredProcess) -> Vec<(InstanceKey, DesiredInstance)> {
    let ProcessTemplate { key, spec: shared, uses, vars, hosts, .. } = template;
    let mut instances = Vec::with_capacity(template.len());
    if hosts.is_empty() {
        return instances;
    }
    // Setting `instances` renames the single instance to the first one.
    let mut first = origin.clone();
    first.moved_from.push(key.clone());
    let others = Arc::new(DeclaredProcess { moved_from: Vec::new(), ..origin.clone() });
    let (first, only) = (Arc::new(first), Arc::new(origin));
    for (number, name) in instance_names(key, template.instances) {
        let origin = match number {
            None => &only,
            Some(1) => &first,
            Some(_) => &others,
        };
        let mut same = None;
        for (_, host) in hosts {
            let key = InstanceKey {
                host: host.key.clone(),
                namespace: name.namespace.clone(),
                name: name.name.clone(),
            };
            let meaning = InstanceVariables { key: &key, instance: number, scope: vars };
            let replaced = || Arc::new(HashedSpec::new(variables::replace(shared, &meaning)));
            let spec = match (uses.any, uses.host || vars.is_per_host()) {
                (false, _) => Arc::clone(shared),
                (true, true) => replaced(),
                (true, false) => Arc::clone(same.get_or_insert_with(replaced)),
            };
            instances.push((key, DesiredInstance { host: host.clone(), spec, origin: Arc::clone(origin) }));
        }
    }
    instances
}

fn declared_process(
    key: &ProcessKey,
    process: &Process,
    rollout: Option<Rollout>,
    location: SourceLocation,
    policies: Vec<usize>,
) -> DeclaredProcess {
    let mut depends_on: Vec<ProcessKey> = process.depends_on.iter().map(|(_, key)| key.clone()).collect();
    depends_on.sort();
    depends_on.dedup();
    let mut protect = process.changes.protect.clone();
    protect.sort();
    protect.dedup();
    DeclaredProcess {
        place: location,
        declared: key.clone(),
        state: process.state,
        depends_on,
        protect,
        adopt: process.changes.adopt,
        moved_from: process.moved_from.clone().into_iter().collect(),
        on_change: process.changes.on_change.clone(),
        rollout,
        policies,
    }
}

/// Checks that a spec with `${host.ip}` runs only on hosts with an address.
fn check_host_ip(at: usize, hosts: &[(usize, Host)], found: &mut Findings) {
    let agent = hosts.iter().find(|(_, host)| matches!(host.key, HostKey::Agent(_)));
    let Some((entry, host)) = agent else { return };
    let message = format!("the spec uses ${{host.…}}, but host {} has only an agent id", host.key);
    let finding = PathProblem::new(Code::BadVariable, FieldPath::of("hosts").index(*entry), message);
    found.push((at, finding.hint("add its ip and bk_cloud_id, here or in a HostGroup")));
}

/// Problems so far. A hostile tree may have millions: beyond a limit they are only counted.
pub struct Findings {
    list: Vec<(usize, PathProblem)>,
    bad: HashSet<usize>,
    /// File index of each document; `counts` is the number of problems per file.
    files: Vec<usize>,
    counts: HashMap<usize, usize>,
}

impl Findings {
    fn of(documents: &[Declaration]) -> Findings {
        let files = documents.iter().map(|document| document.source).collect();
        Findings { list: Vec::new(), bad: HashSet::new(), files, counts: HashMap::new() }
    }

    fn push(&mut self, (document, finding): (usize, PathProblem)) {
        if finding.is_error() {
            self.bad.insert(document);
            // Both sides of a conflict are invalid.
            if let Some((other, _)) = finding.other.as_ref().filter(|_| finding.code.names_conflict()) {
                self.bad.insert(*other);
            }
        }
        let file = self.files[document];
        let count = self.counts.entry(file).or_default();
        *count += 1;
        if *count <= 2 * MAX_PER_FILE {
            self.list.push((document, finding));
        }
    }

    fn extend(&mut self, findings: impl IntoIterator<Item = (usize, PathProblem)>) {
        findings.into_iter().for_each(|finding| self.push(finding));
    }

    /// Whether a suggestion is affordable: each costs a comparison with all names.
    fn may_suggest(&self, names: usize) -> bool {
        self.list.len().saturating_mul(names) < 300_000
    }

    /// Number of dropped problems per file.
    fn more(&self) -> Vec<(usize, usize)> {
        let more = |(file, count): (&usize, &usize)| (*file, count.saturating_sub(2 * MAX_PER_FILE));
        self.counts.iter().map(more).collect()
    }
}

/// Runs a check and records its problems for one document.
fn with_values(at: usize, found: &mut Findings, run: impl FnOnce(&mut ValueChecker)) {
    let mut values = check::ValueChecker::default();
    run(&mut values);
    found.extend(values.findings.into_iter().map(|finding| (at, finding)));
}
