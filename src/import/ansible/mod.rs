//! Ansible inventories: hosts, groups, children and variables, from INI or YAML.
//!
//! Variables have the precedence of Ansible: `all`, then groups from the outermost to the innermost (by name within one
//! depth), then the host. Files in `group_vars` and `host_vars` are not read, and Jinja templates are not evaluated.

mod ini;
mod ranges;
mod yaml;

use std::collections::{BTreeMap, BTreeSet};

use super::draft::sanitize_name;
use super::{FileReader, ImportContext};
use crate::manifest::check::parse_address;
use crate::manifest::document::{
    Document, HostEntry, HostLabels, HostValue, Map, Meta, Scalar, Text, TextOrNumber,
};
use crate::manifest::inventory::is_variable_name;
use crate::manifest::variables::escape;

/// Maximum number of hosts, also after ranges are expanded.
const MAX_HOSTS: usize = 1_000_000;
/// Maximum size of YAML.
const MAX_YAML_BYTES: usize = 8 << 20;
/// Maximum number of groups.
const MAX_GROUPS: usize = 10_000;
/// Maximum depth of groups inside of groups.
const MAX_DEPTH: usize = 64;
/// Maximum size of the names and variables of all hosts and groups, after ranges are expanded.
const MAX_BYTES: usize = 64 << 20;
/// Sets of groups whose effective variables are kept.
const MAX_KNOWN_SETS: usize = 256;

/// Variables by name. `None`: the value is a list or a map.
pub type AnsibleVars = BTreeMap<String, Option<String>>;

#[derive(Debug, Default)]
pub struct AnsibleInventory {
    pub hosts: BTreeMap<String, AnsibleHost>,
    pub groups: BTreeMap<String, AnsibleGroup>,
    /// Size of names and variables.
    bytes: usize,
}

#[derive(Debug, Default)]
pub struct AnsibleHost {
    /// Line of the first mention; 0 in YAML.
    pub line: u32,
    pub vars: AnsibleVars,
    groups: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub struct AnsibleGroup {
    pub line: u32,
    pub vars: AnsibleVars,
    parents: BTreeSet<String>,
}

/// An invalid line; 0: unknown.
#[derive(Debug, PartialEq, Eq)]
pub struct AnsibleError {
    pub line: u32,
    pub message: String,
}

/// The variables and groups that a host has.
#[derive(Clone, Debug, Default)]
pub struct EffectiveGroups {
    /// All groups of the host, without `all` and `ungrouped`.
    pub names: BTreeSet<String>,
    pub vars: AnsibleVars,
}

/// Parses an inventory. The extension selects INI or YAML, otherwise the content does.
pub fn parse(text: &str, extension: Option<&str>) -> Result<AnsibleInventory, AnsibleError> {
    let is_yaml = match extension.map(str::to_ascii_lowercase).as_deref() {
        Some("yml" | "yaml" | "json") => true,
        Some("ini" | "cfg") => false,
        _ => is_yaml(text),
    };
    if is_yaml && text.len() > MAX_YAML_BYTES {
        // The parser needs many times the size of the text.
        let message = format!("more than {} MiB of YAML: use INI", MAX_YAML_BYTES >> 20);
        return Err(AnsibleError { line: 0, message });
    }
    let inventory = if is_yaml { yaml::parse(text) } else { ini::parse(text) }?;
    inventory.check_groups()?;
    Ok(inventory)
}

/// Whether a text is a YAML inventory: a map of groups with known keys.
pub fn is_yaml(text: &str) -> bool {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let first = lines.find(|line| line.trim() != "---");
    first
        .is_some_and(|line| line.starts_with('{') || line.trim_end().ends_with(':') && !line.starts_with('['))
}

impl AnsibleInventory {
    fn add_host(&mut self, name: &str, group: &str, line: u32) -> Result<&mut AnsibleHost, AnsibleError> {
        if self.hosts.len() >= MAX_HOSTS && !self.hosts.contains_key(name) {
            return Err(AnsibleError { line, message: format!("more than {MAX_HOSTS} hosts") });
        }
        self.take_bytes(name.len() + group.len(), line)?;
        let host = self.hosts.entry(name.to_owned()).or_default();
        if host.groups.is_empty() {
            host.line = line;
        }
        if !host.groups.contains(group) {
            host.groups.insert(group.to_owned());
        }
        Ok(host)
    }

    fn group(&mut self, name: &str, line: u32) -> &mut AnsibleGroup {
        let group = self.groups.entry(name.to_owned()).or_default();
        if group.line == 0 {
            group.line = line;
        }
        group
    }

    /// Adds a host with variables.
    fn add_host_with(
        &mut self,
        name: &str,
        group: &str,
        vars: &AnsibleVars,
        line: u32,
    ) -> Result<(), AnsibleError> {
        self.take_bytes(size(vars), line)?;
        let host = self.add_host(name, group, line)?;
        host.vars.extend(vars.iter().map(|(name, value)| (name.clone(), value.clone())));
        Ok(())
    }

    /// Adds to the size of names and variables, which is limited.
    fn take_bytes(&mut self, bytes: usize, line: u32) -> Result<(), AnsibleError> {
        self.bytes += bytes;
        if self.bytes > MAX_BYTES {
            let message = format!("names and variables of all hosts have more than {} MiB", MAX_BYTES >> 20);
            return Err(AnsibleError { line, message });
        }
        Ok(())
    }

    /// Refuses groups inside of themselves, too many groups, and groups that are nested too deeply.
    fn check_groups(&self) -> Result<(), AnsibleError> {
        if self.groups.len() > MAX_GROUPS {
            return Err(AnsibleError { line: 0, message: format!("more than {MAX_GROUPS} groups") });
        }
        let mut heights: BTreeMap<&str, usize> = BTreeMap::new();
        for name in self.groups.keys() {
            self.height(name, &mut Vec::new(), &mut heights)?;
        }
        Ok(())
    }

    /// Number of groups above a group, on the longest way. `below`: the groups on the way to it.
    fn height<'a>(
        &'a self,
        name: &'a str,
        below: &mut Vec<&'a str>,
        heights: &mut BTreeMap<&'a str, usize>,
    ) -> Result<usize, AnsibleError> {
        let Some(group) = self.groups.get(name) else { return Ok(0) };
        if let Some(known) = heights.get(name) {
            return Ok(*known);
        }
        let failed = |message| Err(AnsibleError { line: group.line, message });
        if below.contains(&name) {
            return failed(format!("group {name:?} is inside of itself"));
        }
        if below.len() > MAX_DEPTH {
            return failed(format!("group {name:?} is more than {MAX_DEPTH} groups deep"));
        }
        below.push(name);
        let mut height = 0;
        for parent in &group.parents {
            height = height.max(self.height(parent, below, heights)? + 1);
        }
        below.pop();
        heights.insert(name, height);
        match height > MAX_DEPTH {
            true => failed(format!("group {name:?} is more than {MAX_DEPTH} groups deep")),
            false => Ok(height),
        }
    }

    /// The distance of each group from `all`.
    fn depths(&self) -> BTreeMap<&str, usize> {
        let mut depths: BTreeMap<&str, usize> = self.groups.keys().map(|name| (name.as_str(), 1)).collect();
        depths.insert("all", 0);
        for _ in 0..MAX_DEPTH {
            let mut has_changed = false;
            for (name, group) in &self.groups {
                let above = group.parents.iter().filter_map(|parent| depths.get(parent.as_str())).max();
                let depth = above.map_or(1, |above| above + 1);
                if name != "all" && depths.get(name.as_str()).is_some_and(|known| *known < depth) {
                    depths.insert(name, depth);
                    has_changed = true;
                }
            }
            if !has_changed {
                break;
            }
        }
        depths
    }

    /// The groups above these, with their variables merged in the order of their depth.
    fn effective(&self, direct: &BTreeSet<String>, depths: &BTreeMap<&str, usize>) -> EffectiveGroups {
        let mut names: BTreeSet<&str> = BTreeSet::from(["all"]);
        let mut pending: Vec<&str> = direct.iter().map(String::as_str).collect();
        while let Some(name) = pending.pop() {
            if names.insert(name) {
                let parents = self.groups.get(name).into_iter().flat_map(|group| &group.parents);
                pending.extend(parents.map(String::as_str));
            }
        }
        let mut ordered: Vec<&str> = names.iter().copied().collect();
        ordered.sort_by_key(|name| (depths.get(name).copied().unwrap_or(1), *name));
        let mut vars = AnsibleVars::new();
        for group in ordered.iter().filter_map(|name| self.groups.get(*name)) {
            vars.extend(group.vars.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        let is_own = |name: &&str| !matches!(*name, "all" | "ungrouped");
        EffectiveGroups { names: names.into_iter().filter(is_own).map(str::to_owned).collect(), vars }
    }

    /// Each host with its groups and its variables, in the order of the names.
    pub fn effective_hosts(&self) -> impl Iterator<Item = (&String, &AnsibleHost, EffectiveGroups)> {
        let depths = self.depths();
        let mut known: BTreeMap<&BTreeSet<String>, EffectiveGroups> = BTreeMap::new();
        self.hosts.iter().map(move |(name, host)| {
            if known.len() >= MAX_KNOWN_SETS {
                known.clear();
            }
            let groups = known.entry(&host.groups).or_insert_with(|| self.effective(&host.groups, &depths));
            let mut groups = groups.clone();
            groups.vars.extend(host.vars.iter().map(|(name, value)| (name.clone(), value.clone())));
            (name, host, groups)
        })
    }

    /// The variables of a group's hosts that have no other groups.
    fn group_vars(&self, name: &str, depths: &BTreeMap<&str, usize>) -> AnsibleVars {
        self.effective(&BTreeSet::from([name.to_owned()]), depths).vars
    }
}

/// Size of variables.
fn size(vars: &AnsibleVars) -> usize {
    vars.iter().map(|(name, value)| name.len() + value.as_ref().map_or(0, String::len)).sum()
}

/// The address of a host: `ansible_host`, else its name.
pub fn address(name: &str, vars: &AnsibleVars) -> String {
    let own = vars.get("ansible_host").or_else(|| vars.get("ansible_ssh_host")).cloned().flatten();
    own.unwrap_or_else(|| name.to_owned())
}

/// Whether a variable is for Ansible itself: its connection, its interpreter.
pub fn is_connection_variable(name: &str) -> bool {
    name.starts_with("ansible_")
}

/// The variables that a manifest can have, and the names of the others.
fn manifest_vars(vars: &AnsibleVars) -> (BTreeMap<String, Scalar>, Vec<&str>) {
    let (mut valid, mut other) = (BTreeMap::new(), Vec::new());
    for (name, value) in vars.iter().filter(|(name, _)| !is_connection_variable(name)) {
        match value {
            Some(value) if is_variable_name(name) => {
                valid.insert(name.clone(), Scalar::Text(escape(value)));
            }
            _ => other.push(name.as_str()),
        }
    }
    (valid, other)
}

/// Reads an inventory as HostGroups: one for each group with hosts, and `ungrouped`.
pub(super) fn read(file: &mut FileReader<'_, '_>) -> Vec<Document> {
    let text = file.source.text.clone();
    let extension = file.base().and_then(|name| name.rsplit_once('.')).map(|(_, end)| end.to_owned());
    let inventory = match parse(&text, extension.as_deref()) {
        Ok(inventory) => inventory,
        Err(AnsibleError { line, message }) => {
            file.reject(line.max(1), message, "an inventory of Ansible, as INI or YAML");
            return Vec::new();
        }
    };
    let depths = inventory.depths();
    let mut groups: BTreeMap<String, Vec<HostEntry>> = BTreeMap::new();
    let shared: BTreeMap<&String, AnsibleVars> =
        inventory.groups.keys().map(|name| (name, inventory.group_vars(name, &depths))).collect();
    for (name, host, effective) in inventory.effective_hosts() {
        let Some((cloud, ip)) = parse_address(&address(name, &effective.vars)) else {
            let message =
                "the host has no IP address, and is left out: set ansible_host; host names are not resolved";
            file.note(host.line.max(1), name, message);
            continue;
        };
        let (vars, left_out) = manifest_vars(&effective.vars);
        for other in left_out {
            file.note(
                host.line.max(1),
                other,
                "the variable is a list or a map, or its name is reserved; left out",
            );
        }
        let mut names: Vec<&String> = effective.names.iter().collect();
        let ungrouped = "ungrouped".to_owned();
        if names.is_empty() {
            names.push(&ungrouped);
        }
        for group in names {
            // A variable that every host of the group has is at the group.
            let of_group = shared.get(group).map(|vars| manifest_vars(vars).0).unwrap_or_default();
            let own: BTreeMap<String, Scalar> = vars
                .iter()
                .filter(|(name, value)| of_group.get(*name) != Some(value))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect();
            let labels = BTreeMap::from([("name".to_owned(), TextOrNumber::Text(name.clone()))]);
            groups.entry(group.clone()).or_default().push(HostEntry {
                ip: Some(Text(ip.to_string())),
                bk_cloud_id: i64::try_from(cloud).ok(),
                labels: Some(HostLabels::Have(Map(labels))),
                vars: (!own.is_empty()).then_some(Map(own)),
                ..HostEntry::default()
            });
        }
    }
    if groups.is_empty() {
        file.reject(1, "the inventory has no hosts with an IP address", "set ansible_host for each host");
    }
    let document = |(group, hosts): (String, Vec<HostEntry>)| {
        let vars = shared.get(&group).map(|vars| manifest_vars(vars).0).unwrap_or_default();
        let line = inventory.groups.get(&group).map_or(1, |group| group.line.max(1));
        let name = valid_name(&group, line, &mut *file.reader, &file.source.name);
        Document {
            kind: Some("HostGroup".into()),
            meta: Some(Meta { name: Some(Text(name)), ..Meta::default() }),
            hosts: Some(hosts.into_iter().map(HostValue::Entry).collect()),
            vars: (!vars.is_empty()).then_some(Map(vars)),
            ..Document::default()
        }
    };
    groups.into_iter().map(document).collect()
}

fn valid_name(group: &str, line: u32, reader: &mut ImportContext<'_>, file: &std::sync::Arc<str>) -> String {
    let name = sanitize_name(group);
    if name != group {
        reader.note(file, line, group, format!("not a valid manifest name; renamed to {name}"));
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    const INI: &str = "
mail ansible_host=10.0.0.1   ; the old one
[web]
web[01:03].example ansible_port=22 rack=a
10.0.0.9:2222 port='80 81'

[web:vars]
port=8080
env=prod

[eu:children]
web
[eu:vars]
env=eu
region=eu
[all:vars]
region=none
";

    fn vars(inventory: &AnsibleInventory, host: &str) -> String {
        let found = inventory.effective_hosts().find(|(name, ..)| *name == host).expect("the host");
        let one =
            |(name, value): (&String, &Option<String>)| format!("{name}={}", value.as_deref().unwrap_or("?"));
        found.2.vars.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ini_has_ranges_children_and_the_precedence_of_ansible() {
        let inventory = parse(INI, None).expect("valid");
        let names: Vec<&str> = inventory.hosts.keys().map(String::as_str).collect();
        assert_eq!(names, ["10.0.0.9", "mail", "web01.example", "web02.example", "web03.example"]);
        assert_eq!(vars(&inventory, "mail"), "ansible_host=10.0.0.1 region=none");
        assert_eq!(vars(&inventory, "web02.example"), "ansible_port=22 env=prod port=8080 rack=a region=eu");
        assert_eq!(vars(&inventory, "10.0.0.9"), "ansible_port=2222 env=prod port=80 81 region=eu");
        let groups: Vec<BTreeSet<String>> =
            inventory.effective_hosts().map(|(_, _, effective)| effective.names).collect();
        assert_eq!(groups[1], BTreeSet::new());
        assert_eq!(groups[2], BTreeSet::from(["eu".to_owned(), "web".to_owned()]));
    }

    #[test]
    fn yaml_is_the_same_inventory() {
        let text = "
all:
  hosts: {mail: {ansible_host: 10.0.0.1}}
  vars: {region: none}
  children:
    eu:
      vars: {env: eu, region: eu}
      children:
        web:
          hosts:
            web[01:03].example: {ansible_port: 22, rack: a}
            10.0.0.9: {port: 80 81, list: [1]}
          vars: {port: 8080, env: prod}
";
        let inventory = parse(text, Some("yml")).expect("valid");
        assert_eq!(vars(&inventory, "web02.example"), "ansible_port=22 env=prod port=8080 rack=a region=eu");
        assert_eq!(vars(&inventory, "10.0.0.9"), "env=prod list=? port=80 81 region=eu");
        assert_eq!(inventory.hosts.len(), 5);
        assert!(is_yaml(text) && !is_yaml(INI));
    }

    #[test]
    fn errors_have_lines() {
        for (text, line, part) in [
            ("[a]\nb c\n", 2, "word 2 is not a variable"),
            ("[a:kids]\n", 1, "unknown section"),
            ("[a\n", 1, "not closed"),
            ("x[1:z]\n", 1, "range"),
            ("x[0:999999999]\n", 1, "more than 1000000 hosts"),
            ("[a:vars]\nx\n", 2, "a variable is NAME=VALUE"),
            ("[a:children]\nb\n[b:children]\na\n", 1, "group \"a\" is inside of itself"),
            ("a x='1\n", 1, "a quote is not closed"),
        ] {
            let error = parse(text, Some("ini")).expect_err(text);
            assert!(error.line == line && error.message.contains(part), "{text}: {error:?}");
        }
        assert!(parse("all: [1]", Some("yml")).expect_err("a list").message.contains("group \"all\""));
        assert!(parse("a: {hosts: [x]}", Some("yml")).expect_err("a list").message.contains("hosts"));
        assert!(parse(": :", Some("yml")).is_err());
    }
}
