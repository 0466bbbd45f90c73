//! User variables: the values that Defaults, HostGroups and hosts define, by layer, and who may see them.
//!
//! The first layer with a name wins: overlays from the outermost inwards, the host, its group, then Defaults from the
//! nearest directory outwards. A value may
//! use other variables; [`variables`](super::variables) expands them within limits.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Declaration;
use super::check::{DeclaredObject, ValueChecker};
use super::document::{Map, Scalar};
use super::node::shorten;
use super::problem::{Code, FieldPath, OTHER_LOCATION, PathProblem, did_you_mean};
use super::variables::{self, ExpandError, InstanceVariables, NAMES, NamedVariable, VariableUse};
use crate::model::{Host, HostKey, InstanceKey, ProcessKey};

/// Variables of one layer, as text.
pub type VarMap = BTreeMap<String, String>;

/// Variables in reach of the instances of a process.
#[derive(Clone, Debug, Default)]
pub struct VarScope {
    /// Of overlays, from the outermost inwards.
    overlays: Vec<Arc<VarMap>>,
    /// Variables of a host and of its group, which win.
    hosts: BTreeMap<HostKey, Vec<Arc<VarMap>>>,
    /// Of Defaults, from the nearest directory outwards.
    defaults: Vec<Arc<VarMap>>,
}

/// Variables of the hosts of a process: each host with the layers that it has.
pub type HostVars = BTreeMap<HostKey, Vec<Arc<VarMap>>>;

impl VarScope {
    pub fn new(overlays: Vec<Arc<VarMap>>, defaults: Vec<Arc<VarMap>>, hosts: HostVars) -> VarScope {
        VarScope { overlays, hosts, defaults }
    }

    pub fn get(&self, host: &HostKey, name: &str) -> Option<&str> {
        let of_host = self.hosts.get(host).into_iter().flatten();
        self.overlays
            .iter()
            .chain(of_host)
            .chain(&self.defaults)
            .find_map(|layer| layer.get(name))
            .map(String::as_str)
    }

    /// Whether two hosts may have different values.
    pub fn is_per_host(&self) -> bool {
        !self.hosts.is_empty()
    }

    fn names(&self) -> BTreeSet<&str> {
        let layers = self.overlays.iter().chain(self.hosts.values().flatten()).chain(&self.defaults);
        layers.flat_map(|layer| layer.keys()).map(String::as_str).collect()
    }
}

/// Checks the variables that a document defines, and returns them as text.
pub fn check(path: &FieldPath, map: Option<&Map<Scalar>>, values: &mut ValueChecker) -> Option<Arc<VarMap>> {
    let mut all = VarMap::new();
    for (name, value) in map.iter().flat_map(|map| &map.0) {
        let at = path.entry(name);
        if !variables::is_identifier(name) || is_reserved(name) {
            let message = match is_reserved(name) {
                true => format!("variable {name:?} is reserved: Abide sets it"),
                false => format!("variable {:?} has an invalid name", shorten(name)),
            };
            let hint = "use letters, digits and `_`; name, namespace, instance and host are reserved";
            values.report(PathProblem::new(Code::BadVariableName, at, message).hint(hint).at_key());
            continue;
        }
        let text = value.to_string();
        if let Some((message, hint)) = variables::first_error(&text, true, &mut |_, _| {}) {
            values.report(PathProblem::new(Code::BadVariable, at, message).hint(hint));
            continue;
        }
        all.insert(name.clone(), text);
    }
    (!all.is_empty()).then(|| Arc::new(all))
}

pub(super) fn is_reserved(name: &str) -> bool {
    name == "host" || NAMES.contains(&name)
}

/// Variables of Defaults, per directory.
#[derive(Debug, Default)]
pub struct DefaultVars {
    by_dir: BTreeMap<PathBuf, Arc<VarMap>>,
    /// Every name that any document defines.
    known: HashSet<String>,
    /// The hosts of some inventories are not known: they may define any name.
    has_unknown: bool,
}

impl DefaultVars {
    /// `report`: a problem of a document.
    pub fn collect(documents: &[Declaration], report: &mut dyn FnMut(usize, PathProblem)) -> DefaultVars {
        let mut all = DefaultVars::default();
        let mut set: HashMap<(&Path, &str), usize> = HashMap::new();
        let (mut unread, mut read) = (BTreeSet::new(), BTreeSet::new());
        for (at, document) in documents.iter().enumerate() {
            match &document.declared {
                DeclaredObject::Defaults(defaults) => {
                    let Some(vars) = &defaults.vars else { continue };
                    let layer = all.by_dir.entry(document.scope_dir.clone()).or_default();
                    for (name, value) in vars.iter() {
                        let other = *set.entry((&document.scope_dir, name)).or_insert(at);
                        if layer.get(name).is_some_and(|known| known != value) {
                            let path = FieldPath::of("vars").entry(name);
                            let message = format!(
                                "variable {name} has another value at {OTHER_LOCATION}, in the same directory"
                            );
                            let finding = PathProblem::new(Code::DefaultsConflict, path.clone(), message);
                            report(at, finding.hint("keep one of them").other(other, path));
                        }
                    }
                    Arc::make_mut(layer)
                        .extend(vars.iter().map(|(name, value)| (name.clone(), value.clone())));
                    all.known.extend(vars.keys().cloned());
                }
                DeclaredObject::Group(group) => {
                    unread.extend(group.from.as_ref().map(|from| from.inventory.as_str()));
                    let hosts = group.hosts.iter().filter_map(|host| host.vars.as_ref());
                    all.known.extend(group.vars.iter().chain(hosts).flat_map(|vars| vars.keys()).cloned());
                }
                DeclaredObject::Process(process) => {
                    let hosts = process.hosts.iter().filter_map(|(_, placement)| placement.vars());
                    all.known.extend(hosts.flat_map(|vars| vars.keys()).cloned());
                }
                DeclaredObject::Overlay(overlay) => {
                    all.known.extend(overlay.vars.iter().flat_map(|vars| vars.keys()).cloned());
                }
                DeclaredObject::Inventory(inventory) => {
                    read.insert(inventory.name.as_str());
                    let hosts = inventory.hosts.iter().filter_map(|host| host.vars.as_ref());
                    hosts.flat_map(|vars| vars.keys()).for_each(|name| {
                        if !all.known.contains(name) {
                            all.known.insert(name.clone());
                        }
                    });
                }
                DeclaredObject::Policy(_) | DeclaredObject::Nothing => {}
            }
        }
        all.has_unknown = !unread.is_subset(&read);
        all
    }

    /// Layers above a document, nearest first.
    pub fn above(&self, document: &Declaration) -> Vec<Arc<VarMap>> {
        if self.by_dir.is_empty() {
            return Vec::new();
        }
        document.scope_dir.ancestors().filter_map(|dir| self.by_dir.get(dir)).cloned().collect()
    }

    /// Variables in a Defaults that no document defines.
    pub fn undefined(&self, uses: &VariableUse) -> Vec<PathProblem> {
        if self.has_unknown {
            return Vec::new();
        }
        let is_undefined = |named: &&NamedVariable| !named.has_default && !self.known.contains(&named.name);
        let known = self.known.iter().map(String::as_str).collect();
        uses.named.iter().filter(is_undefined).map(|named| unknown(named, &known)).collect()
    }
}

fn unknown(named: &NamedVariable, known: &BTreeSet<&str>) -> PathProblem {
    let name = shorten(&named.name);
    let mut all: Vec<String> = NAMES.iter().map(|name| format!("${{{name}}}")).collect();
    all.extend(known.iter().take(20).map(|name| format!("${{{name}}}")));
    let shell = format!("write $${{{name}}} (or ${name}) for a variable of the shell");
    let hint = match did_you_mean(&name, known.iter().copied()) {
        Some(meant) => format!("did you mean ${{{meant}}}? {shell}"),
        None => format!("known variables: {}; {shell}", all.join(" ")),
    };
    let message = format!("unknown variable ${{{name}}}");
    PathProblem::new(Code::BadVariable, named.path.clone(), message).hint(hint)
}

/// Checks the variables of a process on each of its hosts, each variable once.
pub fn check_uses(
    key: &ProcessKey,
    uses: &VariableUse,
    scope: &VarScope,
    hosts: &[(usize, Host)],
    report: &mut dyn FnMut(PathProblem),
) {
    let mut reported: HashSet<(&FieldPath, &str)> = HashSet::new();
    // Hosts without variables of their own have equal values: one of them is enough.
    let (special, plain): (Vec<_>, Vec<_>) =
        hosts.iter().partition(|(_, host)| scope.hosts.contains_key(&host.key));
    let one_of_each = special.into_iter().chain(plain.into_iter().take(1));
    let mut keys: Vec<HostKey> = one_of_each.map(|(_, host)| host.key.clone()).collect();
    if keys.is_empty() && !uses.named.is_empty() {
        // Its hosts have problems of their own: the variables of Defaults are known all the same.
        keys.push(HostKey::Address { cloud: 0, ip: std::net::Ipv4Addr::UNSPECIFIED.into() });
    }
    for host in keys {
        let instance = InstanceKey { host, namespace: key.namespace.clone(), name: key.name.clone() };
        let values = InstanceVariables { key: &instance, instance: Some(1), scope };
        for named in &uses.named {
            if reported.contains(&(&named.path, named.name.as_str())) {
                continue;
            }
            if let Some(problem) = check_one(named, &values) {
                reported.insert((&named.path, named.name.as_str()));
                report(problem);
            }
        }
    }
}

fn check_one(named: &NamedVariable, values: &InstanceVariables<'_>) -> Option<PathProblem> {
    let (scope, host) = (values.scope, &values.key.host);
    let problem = |code, message: String| PathProblem::new(code, named.path.clone(), message);
    if scope.get(host, &named.name).is_none() {
        let names = scope.names();
        return match (named.has_default, names.contains(named.name.as_str())) {
            (true, _) => None,
            (false, false) => Some(unknown(named, &names)),
            (false, true) => Some(
                problem(
                    Code::BadVariable,
                    format!("variable ${{{}}} is not set for host {host}", named.name),
                )
                .hint(format!("set it in a Defaults, or write ${{{}:-DEFAULT}}", named.name)),
            ),
        };
    }
    match variables::expand(&format!("${{{}}}", named.name), values) {
        Ok(text) if named.begins_path && !variables::is_absolute(&text) => Some(
            problem(
                Code::RelativePath,
                format!("{} begins with ${{{}}}, which is {:?}", named.path, named.name, shorten(&text)),
            )
            .hint("use an absolute path, with a leading /"),
        ),
        Ok(_) => None,
        Err(ExpandError::Unknown(inner)) => Some(
            problem(
                Code::BadVariable,
                format!("variable ${{{}}} uses ${{{}}}, which is unknown", named.name, shorten(&inner)),
            )
            .hint("write $${ for a variable of the shell"),
        ),
        Err(ExpandError::Cycle(names)) => Some(
            problem(
                Code::VariableCycle,
                format!("variables refer to each other in a cycle: {}", names.join(" → ")),
            )
            .hint("give one of them a value without variables"),
        ),
        Err(ExpandError::TooLarge) => Some(
            problem(Code::VariableCycle, format!("variable ${{{}}} expands to too much text", named.name))
                .hint("use fewer variables inside of variables"),
        ),
    }
}
