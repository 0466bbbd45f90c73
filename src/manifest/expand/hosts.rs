//! Where a process runs: hosts and groups → hosts, each one once and under one key.

use std::collections::{BTreeMap, HashMap};

use super::super::Declaration;
use super::super::check::{Declared, Process, Where};
use super::super::problem::{Code, Finding, Path, did_you_mean};
use crate::model::{AgentId, Host, HostKey};

/// The groups of all documents, and what is known of each host anywhere.
pub struct Hosts<'a> {
    groups: BTreeMap<&'a str, (usize, &'a super::super::check::Group)>,
    /// A host that is named by its agent here and by its address there is one host.
    by_agent: HashMap<&'a AgentId, &'a Host>,
    unread: bool,
}

impl<'a> Hosts<'a> {
    pub fn collect(
        documents: &'a [Declaration],
        unread: bool,
        found: &mut Vec<(usize, Finding)>,
    ) -> Hosts<'a> {
        let mut hosts = Hosts { groups: BTreeMap::new(), by_agent: HashMap::new(), unread };
        let mut described: HashMap<&HostKey, (usize, Path, &Host)> = HashMap::new();
        let mut agents: HashMap<&AgentId, (usize, Path, &Host)> = HashMap::new();
        for (at, document) in documents.iter().enumerate() {
            if let Declared::Group(group) = &document.declared {
                hosts.group(at, group, found);
            }
            for (path, host) in named(document) {
                let HostKey::Address { .. } = host.key else {
                    continue;
                };
                let (other, other_path, earlier) =
                    described.entry(&host.key).or_insert_with(|| (at, path.clone(), host)).clone();
                let differs =
                    |a: Option<String>, b: Option<String>| matches!((a, b), (Some(a), Some(b)) if a != b);
                let supplier =
                    differs(host.supplier.map(|s| s.to_string()), earlier.supplier.map(|s| s.to_string()));
                let agent = differs(
                    host.agent_id.as_ref().map(|a| a.to_string()),
                    earlier.agent_id.as_ref().map(|a| a.to_string()),
                );
                if supplier || agent {
                    let what = if supplier { "bk_supplier_id" } else { "bk_agent_id" };
                    let message = format!("host {} has another {what} at {{other}}", host.key);
                    found.push((
                        at,
                        Finding::new(Code::HostConflict, path.clone(), message).other(other, other_path),
                    ));
                } else if host.agent_id.is_some() && earlier.agent_id.is_none() {
                    described.insert(&host.key, (at, path.clone(), host));
                }
                if let Some(id) = &host.agent_id {
                    let (other, other_path, earlier) =
                        agents.entry(id).or_insert_with(|| (at, path.clone(), host)).clone();
                    if earlier.key != host.key {
                        let message = format!(
                            "agent {id} is on host {} here, and on {} at {{other}}",
                            host.key, earlier.key
                        );
                        found.push((
                            at,
                            Finding::new(Code::HostConflict, path, message).other(other, other_path),
                        ));
                    }
                }
            }
        }
        hosts.by_agent = agents.into_iter().map(|(id, (_, _, host))| (id, host)).collect();
        hosts
    }

    fn group(&mut self, at: usize, group: &'a super::super::check::Group, found: &mut Vec<(usize, Finding)>) {
        let Some(name) = group.name.as_deref() else {
            return;
        };
        match self.groups.get(name) {
            None => {
                self.groups.insert(name, (at, group));
            }
            Some((other, _)) => {
                let message = format!("host group {name:?} is defined at {{other}} already");
                let path = Path::of("meta.name");
                found.push((
                    at,
                    Finding::new(Code::SameName, path.clone(), message)
                        .hint("put all hosts into one document")
                        .other(*other, path),
                ));
            }
        }
    }

    /// The hosts of a process, sorted, with the number of the entry that named each.
    pub fn of(&self, at: usize, process: &Process, found: &mut Vec<(usize, Finding)>) -> Vec<(usize, Host)> {
        let mut hosts: BTreeMap<HostKey, (usize, Host)> = BTreeMap::new();
        for (entry, place) in &process.hosts {
            let named: Vec<&Host> = match place {
                Where::Host(host) => vec![host],
                Where::Group { name, chosen } => {
                    let path = Path::of("hosts").index(*entry).key("group");
                    let Some((_, group)) = self.groups.get(name.as_str()) else {
                        found.push((at, self.undefined(name, process, path)));
                        continue;
                    };
                    let some = |labels| chosen.as_ref().is_none_or(|selector| selector.matches(labels));
                    let hosts: Vec<_> = group
                        .hosts
                        .iter()
                        .filter(|(_, _, labels)| some(labels))
                        .map(|(_, host, _)| host)
                        .collect();
                    if hosts.is_empty() {
                        let (message, path) = match chosen {
                            Some(selector) if !group.hosts.is_empty() => (
                                format!("no host of group {name:?} has the labels {selector}"),
                                Path::of("hosts").index(*entry).key("labels"),
                            ),
                            Some(_) | None => (format!("host group {name:?} has no hosts"), path),
                        };
                        found.push((at, Finding::new(Code::EmptyGroup, path, message)));
                    }
                    hosts
                }
            };
            for host in named {
                let host = self.known(host);
                hosts.entry(host.key.clone()).or_insert((*entry, host));
            }
        }
        hosts.into_values().collect()
    }

    /// The same host with its address, if that is known anywhere.
    fn known(&self, host: &Host) -> Host {
        match &host.key {
            HostKey::Agent(id) => self.by_agent.get(id).copied().unwrap_or(host).clone(),
            HostKey::Address { .. } => host.clone(),
        }
    }

    fn undefined(&self, name: &str, process: &Process, path: Path) -> Finding {
        let who = process
            .key
            .as_ref()
            .map(|key| format!("process \"{key}\""))
            .unwrap_or_else(|| "this process".to_owned());
        let name = super::super::node::shorten(name);
        let known: Vec<_> = self.groups.keys().copied().collect();
        let mut hint = match did_you_mean(&name, known.iter().copied()) {
            Some(meant) => format!("did you mean {meant:?}?"),
            None if known.is_empty() => {
                "no HostGroup is defined here; name the directory that has it as a PATH too".to_owned()
            }
            None => format!(
                "groups defined here: {}",
                known.iter().take(20).copied().collect::<Vec<_>>().join(", ")
            ),
        };
        if self.unread {
            hint.push_str(" (some documents could not be read; it may be in one of them)");
        }
        let message = format!("{who} names host group {name:?}, which no manifest defines");
        Finding::new(Code::UndefinedGroup, path, message).hint(hint)
    }
}

/// Every host that a document names itself.
fn named(document: &Declaration) -> Vec<(Path, &Host)> {
    let path = |at: usize| Path::of("hosts").index(at);
    match &document.declared {
        Declared::Process(process) => process
            .hosts
            .iter()
            .filter_map(|(at, place)| match place {
                Where::Host(host) => Some((path(*at), host)),
                Where::Group { .. } => None,
            })
            .collect(),
        Declared::Group(group) => group.hosts.iter().map(|(at, host, _)| (path(*at), host)).collect(),
        Declared::Defaults(_) | Declared::Policy(_) | Declared::Nothing => Vec::new(),
    }
}
