//! Declarations → [`Desired`]: Defaults under, groups out, instances numbered, variables replaced; and everything
//! that can be wrong only because of another document.
//!
//! A document with an error wants nothing, but its name still counts: others may depend on it.

mod claims;
mod defaults;
mod dependencies;
mod hosts;
mod policies;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use self::claims::ProcessTemplate;
use self::defaults::Defaults;
use self::hosts::HostIndex;
use self::policies::Policies;
use super::check::{self, DeclaredObject, Process, ValueChecker};
use super::problem::{Code, FieldPath, MAX_PER_FILE, PathProblem};
use super::variables::{self, InstanceVariables};
use super::{Declaration, Limits};
use crate::model::{
    DeclaredProcess, Desired, DesiredInstance, HashedSpec, Host, HostKey, InstanceKey, ProcessKey,
    SourceLocation,
};

pub struct Expansion {
    pub desired: Desired,
    pub context: Context,
    /// Of each file: how many findings were not kept.
    pub more: Vec<(usize, usize)>,
    pub findings: Vec<(usize, PathProblem)>,
    pub counts: DesiredCounts,
}

/// What is above documents: enough to expand one of them again, if it says nothing else to the others.
#[derive(Debug)]
pub struct Context {
    defaults: Defaults,
    policies: Policies,
}

impl Context {
    /// A process again, on the hosts and under the policies that it had. `None`: something is wrong with it now.
    pub fn expand(
        &self,
        document: &Declaration,
        place: SourceLocation,
        hosts: Vec<(usize, Host)>,
        policies: Vec<usize>,
    ) -> Option<Vec<(InstanceKey, DesiredInstance)>> {
        let DeclaredObject::Process(process) = &document.declared else { return None };
        let mut found = Findings::of(std::slice::from_ref(document));
        let (spec, uses) = self.defaults.apply(0, document, process, &mut found);
        policies::check(0, document, process, &spec, &hosts, &self.policies, &mut found);
        let key = process.key.as_ref().filter(|_| !self.defaults.has_error_above(document))?;
        if uses.host {
            check_host_ip(0, &hosts, &mut found);
        }
        let origin = declared_process(key, process, place, policies);
        let wants = resolve(&ProcessTemplate::new(0, key, process, spec, uses, hosts), origin);
        found.list.is_empty().then_some(wants)
    }
}

/// How many instances are wanted, and on how many hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DesiredCounts {
    pub instances: usize,
    pub hosts: usize,
}

/// What an expansion is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// The instances themselves.
    #[default]
    Instances,
    /// Problems and counts alone: a million instances cost no more than their claims.
    Checks,
}

/// All documents at once. `findings` is what is known already; `unread`: something could not even be parsed.
pub fn expand(
    documents: &mut [Declaration],
    places: Vec<SourceLocation>,
    findings: &[(usize, PathProblem)],
    unread: bool,
    limits: &Limits,
    purpose: Purpose,
) -> Expansion {
    let mut found = Findings::of(documents);
    let mut policies = Policies::collect(documents, &places, &mut found);
    let defaults = Defaults::collect(documents, findings, &mut found);
    let hosts = HostIndex::collect(documents, unread, &mut found);
    let names = ProcessIndex::collect(documents);
    let (mut templates, mut origins) = (Vec::new(), Vec::new());
    let mut total = 0usize;
    for (at, document) in documents.iter().enumerate() {
        let DeclaredObject::Process(process) = &document.declared else {
            continue;
        };
        let (spec, uses) = defaults.apply(at, document, process, &mut found);
        let hosts = hosts.hosts_of(at, process, &mut found);
        policies::check(at, document, process, &spec, &hosts, &policies, &mut found);
        dependencies::check_names(at, process, &names, unread, &mut found);
        let Some(key) = process.key.as_ref().filter(|_| !defaults.has_error_above(document)) else {
            continue;
        };
        let before = total;
        total = total.saturating_add(hosts.len().saturating_mul(process.instances.unwrap_or(1) as usize));
        if total > limits.instances {
            // Said once, where it happens; the other documents are still checked.
            if before <= limits.instances {
                found.push((at, too_many(limits.instances)));
            }
            continue;
        }
        if uses.host {
            check_host_ip(at, &hosts, &mut found);
        }
        if purpose == Purpose::Instances {
            origins.push(declared_process(key, process, places[at].clone(), policies.policies_for(document)));
        }
        templates.push(ProcessTemplate::new(at, key, process, spec, uses, hosts));
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
    let message = format!("with this process there are more than {limit} instances");
    let finding = PathProblem::new(Code::TooLarge, FieldPath::of("hosts"), message);
    finding.hint("if that is meant, raise --max-instances").at_key()
}

/// Which documents declare a name, and how many instances each name has.
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

    /// The name under which a process was written, from that name or an instance's (`web/api_2` → `web/api`).
    fn declared_name(&self, key: &ProcessKey) -> Option<&ProcessKey> {
        if let Some((key, _)) = self.declared.get_key_value(key) {
            return Some(key);
        }
        let (name, number) = key.name.as_str().rsplit_once('_')?;
        // Only as it would be written: no sign, no leading zero.
        let number: u32 = number.parse().ok().filter(|n: &u32| *n > 0 && n.to_string() == number)?;
        let base = ProcessKey { namespace: key.namespace.clone(), name: name.parse().ok()? };
        let (key, most) = self.instances.get_key_value(&base)?;
        (number <= *most).then_some(key)
    }
}

/// The names that a process has on each host, with their numbers.
fn instance_names(
    key: &ProcessKey,
    instances: Option<u32>,
) -> impl Iterator<Item = (Option<u32>, ProcessKey)> {
    let many = instances.into_iter().flat_map(|count| 1..=count).filter_map(|number| {
        // A name that is too long with its number was refused as such.
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

/// A process with everything put in, instance by instance.
fn resolve(template: &ProcessTemplate, origin: DeclaredProcess) -> Vec<(InstanceKey, DesiredInstance)> {
    let ProcessTemplate { key, spec: shared, uses, hosts, .. } = template;
    let mut wants = Vec::with_capacity(template.len());
    if hosts.is_empty() {
        return wants;
    }
    // Giving a process a number is a rename of the first one.
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
            let meaning = InstanceVariables { key: &key, instance: number };
            let replaced = || Arc::new(HashedSpec::new(variables::replace(shared, &meaning)));
            let spec = match (uses.any, uses.host) {
                (false, _) => Arc::clone(shared),
                (true, true) => replaced(),
                (true, false) => Arc::clone(same.get_or_insert_with(replaced)),
            };
            wants.push((key, DesiredInstance { host: host.clone(), spec, origin: Arc::clone(origin) }));
        }
    }
    wants
}

fn declared_process(
    key: &ProcessKey,
    process: &Process,
    place: SourceLocation,
    policies: Vec<usize>,
) -> DeclaredProcess {
    let mut depends_on: Vec<ProcessKey> = process.depends_on.iter().map(|(_, key)| key.clone()).collect();
    depends_on.sort();
    depends_on.dedup();
    let mut protect = process.protect.clone();
    protect.sort();
    protect.dedup();
    DeclaredProcess {
        place,
        declared: key.clone(),
        state: process.state,
        depends_on,
        protect,
        adopt: process.adopt,
        moved_from: process.moved_from.clone().into_iter().collect(),
        on_change: process.on_change.clone(),
        rollout: process.rollout.clone(),
        policies,
    }
}

/// `${host.ip}` means nothing on a host that is known only by its agent.
fn check_host_ip(at: usize, hosts: &[(usize, Host)], found: &mut Findings) {
    let agent = hosts.iter().find(|(_, host)| matches!(host.key, HostKey::Agent(_)));
    let Some((entry, host)) = agent else { return };
    let message = format!("the spec uses ${{host.…}}, and host {} is known only by its agent", host.key);
    let finding = PathProblem::new(Code::BadVariable, FieldPath::of("hosts").index(*entry), message);
    found.push((at, finding.hint("add its ip and bk_cloud_id, here or in a HostGroup")));
}

/// What is wrong so far. A bomb may have millions of faults: past a number they are counted, not kept.
pub struct Findings {
    list: Vec<(usize, PathProblem)>,
    bad: HashSet<usize>,
    /// The file of each document, and how many findings each file has.
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
            // Of two declarations of one thing neither is better than the other.
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

    /// Looking for a likely name costs as much as there are names: only the first problems are worth that.
    fn may_suggest(&self, names: usize) -> bool {
        self.list.len().saturating_mul(names) < 300_000
    }

    /// How many of each file were not kept.
    fn more(&self) -> Vec<(usize, usize)> {
        let more = |(file, count): (&usize, &usize)| (*file, count.saturating_sub(2 * MAX_PER_FILE));
        self.counts.iter().map(more).collect()
    }
}

/// Runs a check and keeps what it finds, for one document.
fn with_values(at: usize, found: &mut Findings, run: impl FnOnce(&mut ValueChecker)) {
    let mut values = check::ValueChecker::default();
    run(&mut values);
    found.extend(values.findings.into_iter().map(|finding| (at, finding)));
}
