//! Host resolution: expands hosts and groups of a process to hosts, each once and under one key.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::super::Declaration;
use super::super::check::{DeclaredObject, GroupMember, HostGroup, LabelList, Placement, Process};
use super::super::node::shorten;
use super::super::problem::{Code, FieldPath, OTHER_LOCATION, PathProblem, did_you_mean};
use super::super::variable_scopes::{HostVars, VarMap};
use super::inventories::InventoryIndex;
use super::{Findings, Purpose};
use crate::model::{AgentId, Host, HostKey, Rollout, Selector};

/// Host groups and host data of all documents.
pub struct HostIndex<'a> {
    groups: BTreeMap<&'a str, IndexedGroup<'a>>,
    suppliers: HashMap<&'a HostKey, LocatedValue<u64>>,
    agents: HashMap<&'a HostKey, LocatedValue<&'a AgentId>>,
    /// Address of each agent: a host named by agent id in one document and by address in another is one host.
    by_agent: HashMap<&'a AgentId, LocatedValue<&'a HostKey>>,
    unread: bool,
}

/// A group with its hosts, its own or those of an inventory.
struct IndexedGroup<'a> {
    document: usize,
    group: &'a HostGroup,
    members: Vec<&'a GroupMember>,
    /// The hosts of its inventory are not known.
    is_unknown: bool,
}

/// Maximum number of hosts that the selectors of one process may test.
const MAX_SELECTOR_CHECKS: usize = 5_000_000;

/// A value with the location that set it.
#[derive(Clone)]
struct LocatedValue<T> {
    value: T,
    document: usize,
    path: FieldPath,
}

impl<'a> HostIndex<'a> {
    pub fn collect(
        documents: &'a [Declaration],
        unread: bool,
        purpose: Purpose,
        found: &mut Findings,
    ) -> HostIndex<'a> {
        let mut inventories = InventoryIndex::collect(documents, purpose);
        let mut hosts = HostIndex {
            groups: BTreeMap::new(),
            suppliers: HashMap::new(),
            agents: HashMap::new(),
            by_agent: HashMap::new(),
            unread,
        };
        for (at, document) in documents.iter().enumerate() {
            if let DeclaredObject::Group(group) = &document.declared {
                hosts.group(at, group, &mut inventories, found);
            }
            for (path, host) in named_hosts(document) {
                hosts.record_host(at, path, host, found);
            }
        }
        hosts
    }

    /// Records the ids of a host, and reports conflicts with earlier ones.
    fn record_host(&mut self, at: usize, path: FieldPath, host: &'a Host, found: &mut Findings) {
        let HostKey::Address { .. } = host.key else { return };
        let mut conflict = |message: String, other: usize, other_path: FieldPath| {
            found.push((
                at,
                PathProblem::new(Code::HostConflict, path.clone(), message)
                    .other(other, other_path)
                    .hint("correct one of the two"),
            ));
        };
        if let Some(supplier) = host.supplier {
            let located = LocatedValue { value: supplier, document: at, path: path.clone() };
            let earlier = self.suppliers.entry(&host.key).or_insert(located).clone();
            if earlier.value != supplier {
                let message = format!("host {} has another bk_supplier_id at {OTHER_LOCATION}", host.key);
                conflict(message, earlier.document, earlier.path);
            }
        }
        let Some(id) = &host.agent_id else { return };
        let located = LocatedValue { value: id, document: at, path: path.clone() };
        let earlier = self.agents.entry(&host.key).or_insert(located).clone();
        if earlier.value != id {
            let message = format!("host {} has another bk_agent_id at {OTHER_LOCATION}", host.key);
            conflict(message, earlier.document, earlier.path);
        }
        let located = LocatedValue { value: &host.key, document: at, path: path.clone() };
        let earlier = self.by_agent.entry(id).or_insert(located).clone();
        if *earlier.value != host.key {
            let message = format!(
                "agent {id} is on host {} here, but on {} at {OTHER_LOCATION}",
                host.key, earlier.value
            );
            conflict(message, earlier.document, earlier.path);
        }
    }

    fn group(
        &mut self,
        at: usize,
        group: &'a HostGroup,
        inventories: &mut InventoryIndex<'a>,
        found: &mut Findings,
    ) {
        let Some(name) = group.name.as_deref() else { return };
        let index = || {
            let selected = match &group.from {
                None => Some(group.hosts.iter().collect()),
                Some(from) => inventories.select(at, from, found),
            };
            let is_unknown = selected.is_none();
            IndexedGroup { document: at, group, members: selected.unwrap_or_default(), is_unknown }
        };
        let other = self.groups.entry(name).or_insert_with(index).document;
        if other != at {
            let message = format!("host group {name:?} is already defined at {OTHER_LOCATION}");
            let path = FieldPath::of("meta.name");
            let finding = PathProblem::new(Code::SameName, path.clone(), message);
            found.push((at, finding.hint("put all hosts of the group into one document").other(other, path)));
        }
    }

    /// The hosts of a process, sorted, each with the index of its entry; and the variables of its hosts.
    pub fn hosts_of(
        &self,
        at: usize,
        process: &Process,
        found: &mut Findings,
    ) -> (Vec<(usize, Host)>, HostVars) {
        let mut hosts: BTreeMap<HostKey, (usize, Host)> = BTreeMap::new();
        // Variables of hosts take precedence over those of groups, whichever entry names the host first.
        let (mut host_vars, mut group_vars) = (HostVars::new(), HostVars::new());
        let mut groups = HashSet::new();
        let mut tested = 0;
        for (entry, placement) in &process.hosts {
            match placement {
                Placement::Host { host, vars } => {
                    let host = self.merged_host(host);
                    add_vars(&mut host_vars, &host.key, [vars.as_ref()]);
                    hosts.entry(host.key.clone()).or_insert((*entry, host));
                }
                Placement::Group { name, chosen, vars } => {
                    // A repeated selection adds no hosts: skip its cost.
                    if !groups.insert((name, chosen.as_ref().map(ToString::to_string))) {
                        continue;
                    }
                    tested += self.groups.get(name.as_str()).map_or(0, |group| group.members.len());
                    if tested > MAX_SELECTOR_CHECKS {
                        let message = format!(
                            "the selectors of this process test more than {MAX_SELECTOR_CHECKS} hosts"
                        );
                        let finding =
                            PathProblem::new(Code::TooLarge, FieldPath::of("hosts").index(*entry), message);
                        found.push((at, finding.hint("use fewer entries in hosts")));
                        break;
                    }
                    let of_group = self.groups.get(name.as_str()).and_then(|one| one.group.vars.as_ref());
                    for member in self.select_hosts(at, *entry, name, chosen.as_ref(), process, found) {
                        let host = self.merged_host(&member.host);
                        add_vars(&mut host_vars, &host.key, [vars.as_ref(), member.vars.as_ref()]);
                        add_vars(&mut group_vars, &host.key, [of_group]);
                        hosts.entry(host.key.clone()).or_insert((*entry, host));
                    }
                }
            }
        }
        for (host, layers) in group_vars {
            host_vars.entry(host).or_default().extend(layers);
        }
        (hosts.into_values().collect(), host_vars)
    }

    /// Whether a process is on hosts of an inventory that are not known.
    pub fn has_unknown_hosts(&self, process: &Process) -> bool {
        process.hosts.iter().any(|(_, placement)| match placement {
            Placement::Host { .. } => false,
            Placement::Group { name, .. } => self.groups.get(name.as_str()).is_some_and(|one| one.is_unknown),
        })
    }

    /// The rollout of a process, with the hosts of its groups.
    pub fn rollout_of(&self, at: usize, process: &Process, found: &mut Findings) -> Option<Rollout> {
        let mut rollout = process.changes.rollout.clone()?;
        for (nth, named) in rollout.groups.iter_mut().enumerate() {
            let Some(group) = self.groups.get(named.name.as_str()) else {
                let suggest = found.may_suggest(self.groups.len());
                let path = FieldPath::of("rollout").key("order").index(nth);
                found.push((at, self.undefined_group(&named.name, process, path, suggest)));
                continue;
            };
            named.hosts = group.members.iter().map(|member| self.merged_host(&member.host).key).collect();
        }
        Some(rollout)
    }

    fn select_hosts(
        &self,
        at: usize,
        entry: usize,
        name: &str,
        chosen: Option<&Selector>,
        process: &Process,
        found: &mut Findings,
    ) -> Vec<&'a GroupMember> {
        let path = FieldPath::of("hosts").index(entry);
        let Some(group) = self.groups.get(name) else {
            let suggest = found.may_suggest(self.groups.len());
            found.push((at, self.undefined_group(name, process, path.key("group"), suggest)));
            return Vec::new();
        };
        let some = |labels: &LabelList| chosen.is_none_or(|selector| labels.is_selected(selector));
        let hosts: Vec<&GroupMember> =
            group.members.iter().copied().filter(|member| some(&member.labels)).collect();
        if hosts.is_empty() && !group.is_unknown {
            let finding = match (chosen, &group.group.from) {
                (Some(selector), _) if !group.members.is_empty() => {
                    let message = format!("no host of group {name:?} has the labels {selector}");
                    PathProblem::new(Code::EmptyGroup, path.key("labels"), message)
                        .hint("change the selector: a process needs at least one host")
                }
                (_, Some(from)) => {
                    let message =
                        format!("host group {name:?} selects no host of inventory {:?}", from.inventory);
                    PathProblem::new(Code::EmptyGroup, path.key("group"), message).hint(format!(
                        "`abide inventory show {}` lists its hosts with their labels",
                        from.inventory
                    ))
                }
                (Some(_) | None, None) => {
                    let message = format!("host group {name:?} has no hosts");
                    PathProblem::new(Code::EmptyGroup, path.key("group"), message)
                        .hint("add hosts to the group, or remove the process")
                }
            };
            found.push((at, finding));
        }
        hosts
    }

    /// A host with the ids that any document sets for it.
    fn merged_host(&self, host: &Host) -> Host {
        let key = match &host.key {
            HostKey::Agent(id) => self.by_agent.get(id).map_or(&host.key, |located| located.value),
            HostKey::Address { .. } => &host.key,
        };
        Host {
            key: key.clone(),
            supplier: host.supplier.or_else(|| self.suppliers.get(key).map(|located| located.value)),
            agent_id: host
                .agent_id
                .clone()
                .or_else(|| self.agents.get(key).map(|located| located.value.clone())),
        }
    }

    fn undefined_group(&self, name: &str, process: &Process, path: FieldPath, suggest: bool) -> PathProblem {
        let who = match &process.key {
            Some(key) => format!("process \"{key}\""),
            None => "this process".to_owned(),
        };
        let name = shorten(name);
        let known: Vec<_> = self.groups.keys().copied().collect();
        let meant = if suggest { did_you_mean(&name, known.iter().copied()) } else { None };
        let mut hint = match meant {
            Some(meant) => format!("did you mean {meant:?}?"),
            None if known.is_empty() => {
                "no HostGroup is defined; pass the directory that defines it as a PATH too".to_owned()
            }
            None => {
                let some: Vec<_> = known.iter().take(20).copied().collect();
                format!("defined groups: {}", some.join(", "))
            }
        };
        if self.unread {
            hint.push_str(" (some documents are unreadable; the group may be in one of them)");
        }
        let message = format!("{who} names host group {name:?}, which no manifest defines");
        PathProblem::new(Code::UndefinedGroup, path, message).hint(hint)
    }
}

/// Records the layers of a host that have variables.
fn add_vars<const N: usize>(all: &mut HostVars, host: &HostKey, layers: [Option<&Arc<VarMap>>; N]) {
    for layer in layers.into_iter().flatten() {
        all.entry(host.clone()).or_default().push(Arc::clone(layer));
    }
}

/// All hosts that a document names directly.
fn named_hosts(document: &Declaration) -> Vec<(FieldPath, &Host)> {
    let path = |at: usize| FieldPath::of("hosts").index(at);
    match &document.declared {
        DeclaredObject::Process(process) => process
            .hosts
            .iter()
            .filter_map(|(at, placement)| match placement {
                Placement::Host { host, .. } => Some((path(*at), host)),
                Placement::Group { .. } => None,
            })
            .collect(),
        DeclaredObject::Group(group) => {
            group.hosts.iter().map(|member| (path(member.entry), &member.host)).collect()
        }
        // Most hosts of an inventory have an address only, which is in conflict with nothing.
        DeclaredObject::Inventory(inventory) => {
            let has_ids = |host: &Host| host.supplier.is_some() || host.agent_id.is_some();
            let hosts = inventory.hosts.iter().filter(|member| has_ids(&member.host));
            hosts.map(|member| (path(member.entry), &member.host)).collect()
        }
        DeclaredObject::Defaults(_)
        | DeclaredObject::Policy(_)
        | DeclaredObject::Overlay(_)
        | DeclaredObject::Nothing => Vec::new(),
    }
}
