//! Checks of hosts: addresses, groups and their entries.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use super::ValueChecker;
use crate::manifest::document::{Document, FromEntry, HostEntry, HostLabels, HostValue};
use crate::manifest::grammar;
use crate::manifest::inventory;
use crate::manifest::problem::{Code, FieldPath, PathProblem};
use crate::manifest::variable_scopes::{self, VarMap};
use crate::model::{Host, HostKey, Name, Selector};

#[derive(Debug, PartialEq, Eq)]
pub enum Placement {
    Host { host: Host, vars: Option<Arc<VarMap>> },
    Group { name: String, chosen: Option<Selector>, vars: Option<Arc<VarMap>> },
}

impl Placement {
    /// Variables of the entry's hosts.
    pub fn vars(&self) -> Option<&Arc<VarMap>> {
        match self {
            Placement::Host { vars, .. } | Placement::Group { vars, .. } => vars.as_ref(),
        }
    }
}

#[derive(Debug)]
pub struct HostGroup {
    pub name: Option<String>,
    pub hosts: Vec<GroupMember>,
    pub from: Option<InventorySelection>,
    pub vars: Option<Arc<VarMap>>,
}

/// The hosts of an inventory that belong to a group.
#[derive(Debug)]
pub struct InventorySelection {
    pub inventory: String,
    pub select: Option<Selector>,
}

/// A host of a group.
#[derive(Debug)]
pub struct GroupMember {
    /// Index of the entry in `hosts`.
    pub entry: usize,
    pub host: Host,
    pub labels: LabelList,
    pub vars: Option<Arc<VarMap>>,
}

/// Labels of a host, sorted by name. Compact, because an inventory may have a million hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelList(Box<[(Arc<str>, Arc<str>)]>);

impl LabelList {
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    pub fn is_selected(&self, selector: &Selector) -> bool {
        selector.matches_with(|name| self.get(name))
    }
}

impl FromIterator<(Arc<str>, Arc<str>)> for LabelList {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, Arc<str>)>>(labels: I) -> LabelList {
        LabelList(labels.into_iter().collect())
    }
}

pub(super) fn host_value(
    value: &HostValue,
    path: &FieldPath,
    values: &mut ValueChecker,
) -> Option<Placement> {
    match value {
        HostValue::Entry(entry) => host_entry(entry, path, values),
        HostValue::Address(text) => {
            address(text, path, values).map(|host| Placement::Host { host, vars: None })
        }
    }
}

/// Cloud area and address of a host as text: IP, or CLOUD:IP. An IPv6 address after a cloud area is in brackets, because
/// `1:2::3` is an address itself.
pub fn parse_address(text: &str) -> Option<(u64, IpAddr)> {
    let ip = |text: &str| -> Option<IpAddr> {
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        match inner {
            Some(inner) => inner.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            None => text.parse().ok(),
        }
    };
    if let Some(ip) = ip(text) {
        return Some((0, ip));
    }
    let (cloud, address) = text.split_once(':')?;
    let is_number = !cloud.is_empty() && cloud.bytes().all(|byte| byte.is_ascii_digit());
    let cloud = cloud.parse::<u64>().ok().filter(|cloud| is_number && i64::try_from(*cloud).is_ok())?;
    if address.parse::<Ipv6Addr>().is_ok() {
        return None;
    }
    Some((cloud, ip(address)?))
}

fn address(text: &str, path: &FieldPath, values: &mut ValueChecker) -> Option<Host> {
    if let Some((cloud, ip)) = parse_address(text) {
        return Some(Host { key: HostKey::Address { cloud, ip }, supplier: None, agent_id: None });
    }
    let message = format!("{:?} is neither IP nor CLOUD:IP", crate::manifest::node::shorten(text));
    let is_word = text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.parse::<Name>().is_ok();
    let hint = match is_word {
        true => format!(
            "for a host group, write {{group: {}}}; host names are not resolved",
            crate::manifest::node::shorten(text)
        ),
        false => "such as 10.0.0.1, \"1:10.0.0.2\", 2001:db8::1 or \"1:[2001:db8::1]\"".to_owned(),
    };
    values.report(PathProblem::new(Code::BadIp, path.clone(), message).hint(hint));
    None
}

fn host_entry(entry: &HostEntry, path: &FieldPath, values: &mut ValueChecker) -> Option<Placement> {
    let vars = variable_scopes::check(&path.key("vars"), entry.vars.as_ref(), values);
    let Some(group) = &entry.group else {
        if entry.labels.is_some() {
            let message = "labels select hosts of a group, but this entry has no group";
            values.report(
                PathProblem::new(Code::BadHost, path.key("labels"), message)
                    .hint("add `group: NAME`")
                    .at_key(),
            );
        }
        return host(entry, path, values).map(|host| Placement::Host { host, vars });
    };
    if entry.ip.is_some()
        || entry.bk_cloud_id.is_some()
        || entry.bk_agent_id.is_some()
        || entry.bk_supplier_id.is_some()
    {
        let message = "an entry of hosts must be either a group or a host, not both";
        values.report(
            PathProblem::new(Code::BadHost, path.key("group"), message)
                .hint("split it into two entries")
                .at_key(),
        );
        return None;
    }
    let chosen = match &entry.labels {
        None | Some(HostLabels::Have(_)) => None,
        Some(HostLabels::Selector(text)) => match text.parse::<Selector>() {
            Ok(selector) => Some(selector),
            Err(error) => {
                values.report(
                    PathProblem::new(Code::BadSelector, path.key("labels"), error.to_string())
                        .hint("such as rack=a,tier in (x,y),!old"),
                );
                return None;
            }
        },
    };
    Some(Placement::Group { name: group.to_string(), chosen, vars })
}

fn host(entry: &HostEntry, path: &FieldPath, values: &mut ValueChecker) -> Option<Host> {
    let cloud = values.int(&path.key("bk_cloud_id"), entry.bk_cloud_id, grammar::ANY_COUNT, Code::OutOfRange);
    let supplier =
        values.int(&path.key("bk_supplier_id"), entry.bk_supplier_id, grammar::ANY_COUNT, Code::OutOfRange);
    let agent_id = match entry.bk_agent_id.as_deref().filter(|id| !id.is_empty()).map(str::parse) {
        None => None,
        Some(Ok(id)) => Some(id),
        Some(Err(error)) => {
            values.report(
                PathProblem::new(
                    Code::BadName,
                    path.key("bk_agent_id"),
                    format!("bk_agent_id cannot be used: {error}"),
                )
                .hint("use the id that the agent reports"),
            );
            return None;
        }
    };
    let Some(ip) = entry.ip.as_deref().filter(|ip| !ip.is_empty()) else {
        let Some(id) = agent_id else {
            let message = "a host needs ip and bk_cloud_id, or bk_agent_id";
            values.report(
                PathProblem::new(Code::BadHost, path.clone(), message)
                    .hint("such as {ip: 10.0.0.1, bk_cloud_id: 0}"),
            );
            return None;
        };
        return Some(Host { key: HostKey::Agent(id), supplier, agent_id: None });
    };
    let Ok(ip) = ip.parse() else {
        let message = format!("{:?} is not an IP address", crate::manifest::node::shorten(ip));
        values.report(
            PathProblem::new(Code::BadIp, path.key("ip"), message)
                .hint("such as 10.0.0.1 or 2001:db8::1; host names are not resolved"),
        );
        return None;
    };
    if entry.bk_cloud_id.is_none() {
        let message = format!("{path}.bk_cloud_id is missing: one address may exist in several cloud areas");
        values.report(
            PathProblem::new(Code::MissingField, path.key("bk_cloud_id"), message)
                .hint("use bk_cloud_id: 0 for the default area"),
        );
        return None;
    }
    Some(Host { key: HostKey::Address { cloud: cloud?, ip }, supplier, agent_id })
}

pub(super) fn group(document: &Document, values: &mut ValueChecker) -> HostGroup {
    let name = document.meta.as_ref().and_then(|meta| meta.name.as_ref());
    let name = super::name(&FieldPath::of("meta.name"), name, values);
    let mut hosts = Vec::new();
    for (at, value) in document.hosts.iter().flatten().enumerate() {
        let path = FieldPath::of("hosts").index(at);
        let entry = match value {
            HostValue::Entry(entry) => entry,
            HostValue::Address(text) => {
                let host = address(text, &path, values);
                hosts.extend(host.map(|host| GroupMember {
                    entry: at,
                    host,
                    labels: LabelList::default(),
                    vars: None,
                }));
                continue;
            }
        };
        let labels = match &entry.labels {
            Some(HostLabels::Have(labels)) => values.labels(&path.key("labels"), Some(labels)),
            None | Some(HostLabels::Selector(_)) => BTreeMap::new(),
        };
        let labels = labels.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let vars = variable_scopes::check(&path.key("vars"), entry.vars.as_ref(), values);
        if let Some(host) = host(entry, &path, values) {
            hosts.push(GroupMember { entry: at, host, labels, vars });
        }
    }
    let from = document.from.as_ref().and_then(|entry| inventory_selection(entry, values));
    let from = from.filter(|_| document.hosts.is_none());
    match (&document.hosts, &document.from) {
        (None, None) => values.report_missing(FieldPath::of("hosts")),
        (Some(_), Some(_)) => {
            let message = "a host group has either hosts or from, not both";
            values.report(
                PathProblem::new(Code::BadHost, FieldPath::of("from"), message)
                    .hint("split it into two groups")
                    .at_key(),
            );
        }
        (Some(_), None) | (None, Some(_)) => {}
    }
    let vars = variable_scopes::check(&FieldPath::of("vars"), document.vars.as_ref(), values);
    HostGroup { name: name.map(|name| name.to_string()), hosts, from, vars }
}

fn inventory_selection(entry: &FromEntry, values: &mut ValueChecker) -> Option<InventorySelection> {
    let path = FieldPath::of("from");
    let Some(inventory) = entry.inventory.as_deref() else {
        values.report_missing(path.key("inventory"));
        return None;
    };
    if !inventory::is_name(inventory) {
        let message =
            format!("{:?} is not the name of an inventory", crate::manifest::node::shorten(inventory));
        values.report(
            PathProblem::new(Code::BadName, path.key("inventory"), message)
                .hint("use a name of `inventories` in the config file: letters, digits, `-`, `_` and `.`"),
        );
        return None;
    }
    let select = match entry.select.as_deref().map(str::parse::<Selector>) {
        None => None,
        Some(Ok(selector)) => Some(selector),
        Some(Err(error)) => {
            values.report(
                PathProblem::new(Code::BadSelector, path.key("select"), error.to_string())
                    .hint("such as set=eu,module in (api,worker),!old"),
            );
            return None;
        }
    };
    Some(InventorySelection { inventory: inventory.to_owned(), select })
}
