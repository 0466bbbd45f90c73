//! Inventory snapshots in a manifest set: the hosts of an inventory as one more file, with a host per line.
//!
//! A snapshot has the name `<inventory NAME>`, which no file in a tree can have. It is stored with the other texts of a
//! revision, so that a rollback sees the hosts of its time. The format is internal: a header, then JSON lines sorted by
//! host.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::check::{DeclaredObject, GroupMember};
use super::find::ReplacementText;
use super::parse::{CheckedDocument, ParsedSlice};
use super::problem::{Code, Problem, Severity, Span, SpanProblem};
use super::text::SourceText;
use super::variable_scopes::{self, VarMap};
use super::{Declaration, Loaded, variables};
use crate::model::{AgentId, Host, HostKey};

/// The hosts of an inventory.
#[derive(Debug)]
pub struct InventoryHosts {
    pub name: String,
    /// `entry` is the line in the snapshot.
    pub hosts: Vec<GroupMember>,
}

/// A host of an inventory, before it is written to a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InventoryHost {
    pub host: Host,
    pub labels: BTreeMap<String, String>,
    /// Literal values: `${` in them is not a variable.
    pub vars: VarMap,
}

/// A line of a snapshot.
#[derive(Serialize)]
struct HostLine {
    host: HostKey,
    #[serde(skip_serializing_if = "Option::is_none")]
    supplier: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<AgentId>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    vars: VarMap,
}

/// The same line as it is read.
#[derive(Deserialize)]
struct ReadLine<'a> {
    host: HostKey,
    #[serde(default)]
    supplier: Option<u64>,
    #[serde(default)]
    agent: Option<AgentId>,
    #[serde(borrow, default)]
    labels: BTreeMap<Cow<'a, str>, Cow<'a, str>>,
    #[serde(borrow, default)]
    vars: Option<&'a RawValue>,
}

/// The first line of a snapshot.
const HEADER: &str = "{\"inventory\":1}";
const PREFIX: &str = "<inventory ";

/// Whether a text can be the name of an inventory.
pub fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 100 && name.chars().all(is_plain)
}

/// The name of an inventory's snapshot among the files.
pub fn file_name(inventory: &str) -> String {
    format!("{PREFIX}{inventory}>")
}

/// The inventory of a snapshot; `None` for every other file.
pub fn name_of_file(file: &str) -> Option<&str> {
    file.strip_prefix(PREFIX)?.strip_suffix('>').filter(|name| is_name(name))
}

/// Whether an inventory may define a variable of this name.
pub fn is_variable_name(name: &str) -> bool {
    variables::is_identifier(name) && !variable_scopes::is_reserved(name)
}

/// The line of a host in a snapshot.
pub fn snapshot_line(host: InventoryHost) -> String {
    let InventoryHost { host, labels, vars } = host;
    let vars = vars.into_iter().map(|(name, value)| (name, variables::escape(&value))).collect();
    let line = HostLine { host: host.key, supplier: host.supplier, agent: host.agent_id, labels, vars };
    // A map with text keys has no values that JSON cannot express.
    serde_json::to_string(&line).unwrap_or_default()
}

/// The snapshot of these lines, which are sorted by host. Equal hosts give equal bytes.
pub fn snapshot<'a>(lines: impl Iterator<Item = &'a str> + Clone) -> String {
    let bytes: usize = lines.clone().map(|line| line.len() + 1).sum();
    let mut text = String::with_capacity(HEADER.len() + 1 + bytes);
    for line in std::iter::once(HEADER).chain(lines) {
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// Texts and variables that many hosts share, each in memory once.
#[derive(Default)]
struct SharedTexts<'a> {
    texts: HashSet<Arc<str>>,
    /// By their JSON.
    vars: HashMap<&'a str, Arc<VarMap>>,
}

impl<'a> SharedTexts<'a> {
    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        let new: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&new));
        new
    }

    fn vars(&mut self, json: &'a str) -> Result<Arc<VarMap>, serde_json::Error> {
        if let Some(known) = self.vars.get(json) {
            return Ok(Arc::clone(known));
        }
        let vars: Arc<VarMap> = Arc::new(serde_json::from_str(json)?);
        self.vars.insert(json, Arc::clone(&vars));
        Ok(vars)
    }
}

/// The hosts of a snapshot, or the line that is invalid.
pub fn parse(text: &str) -> Result<Vec<GroupMember>, (u32, String)> {
    let mut lines = text.lines();
    if lines.next() != Some(HEADER) {
        return Err((1, "not a snapshot of an inventory, or one of a later version".to_owned()));
    }
    let (mut hosts, mut shared) = (Vec::new(), SharedTexts::default());
    for (line, text) in (2_u32..).zip(lines) {
        let damaged = |error: serde_json::Error| (line, error.to_string());
        let ReadLine { host, supplier, agent, labels, vars } = serde_json::from_str(text).map_err(damaged)?;
        let vars = vars.map(|vars| shared.vars(vars.get())).transpose().map_err(damaged)?;
        let labels = labels.iter().map(|(name, value)| (shared.text(name), shared.text(value))).collect();
        let host = Host { key: host, supplier, agent_id: agent };
        hosts.push(GroupMember { entry: line as usize, host, labels, vars });
    }
    hosts.shrink_to_fit();
    Ok(hosts)
}

/// The keys of the hosts of a snapshot.
pub fn host_keys(text: &str) -> Result<BTreeSet<HostKey>, (u32, String)> {
    #[derive(Deserialize)]
    struct KeyLine {
        host: HostKey,
    }
    let key = |(line, text): (u32, &str)| {
        let found: Result<KeyLine, _> = serde_json::from_str(text);
        found.map(|line| line.host).map_err(|error| (line, error.to_string()))
    };
    (2..).zip(text.lines().skip(1)).map(key).collect()
}

/// Snapshots as files of a manifest set, for [`super::load_with`].
pub fn stand_ins<'a>(
    snapshots: impl Iterator<Item = (&'a str, &'a Arc<str>)>,
) -> BTreeMap<String, ReplacementText> {
    let file = |(name, text): (&str, &Arc<str>)| {
        let file = file_name(name);
        let text = ReplacementText { scope_dir: file.clone().into(), text: Arc::clone(text) };
        (file, text)
    };
    snapshots.map(file).collect()
}

/// The declared object of a snapshot. `None` for every other text.
pub(super) fn parse_source(source: &SourceText) -> Option<ParsedSlice> {
    let name = name_of_file(&source.name)?.to_owned();
    let hosts = match parse(&source.text) {
        Ok(hosts) => hosts,
        Err((line, why)) => {
            let message = format!("the stored hosts of inventory {name:?} are damaged: {why}");
            let fault = SpanProblem::new(Code::InventoryFailed, Span::at(line, 1), message, None);
            return Some(Err(SpanProblem { private: true, ..fault }));
        }
    };
    Some(Ok(vec![CheckedDocument {
        nth: 0,
        begin: (1, 1),
        declared: DeclaredObject::Inventory(Arc::new(InventoryHosts { name, hosts })),
        faults: Vec::new(),
        dropped: Default::default(),
        findings: Vec::new(),
        bad: false,
        more: 0,
        applied: Default::default(),
    }]))
}

impl Loaded {
    /// The inventories that host groups name.
    pub fn inventories(&self) -> BTreeSet<&str> {
        fn name(document: &Declaration) -> Option<&str> {
            let DeclaredObject::Group(group) = &document.declared else { return None };
            group.from.as_ref().map(|from| from.inventory.as_str())
        }
        self.documents.iter().filter_map(name).collect()
    }

    /// Number of errors, without those of inventories that have no snapshot.
    pub fn errors_in_files(&self) -> usize {
        let is_error = |one: &&Problem| one.severity == Severity::Error && one.code != Code::InventoryUnknown;
        self.problems.iter().filter(is_error).count()
    }

    /// Those of them without a snapshot.
    pub fn unread_inventories(&self) -> BTreeSet<String> {
        let mut unread: BTreeSet<String> = self.inventories().into_iter().map(str::to_owned).collect();
        for document in &self.documents {
            if let DeclaredObject::Inventory(read) = &document.declared {
                unread.remove(&read.name);
            }
        }
        unread
    }
}
