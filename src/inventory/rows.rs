//! Rows of an inventory: checks hosts, labels and variables, and finds hosts that occur twice.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use super::{InventoryError, MAX_BYTES, MAX_HOSTS};
use crate::manifest::check::parse_address;
use crate::manifest::inventory::{InventoryHost, is_variable_name, snapshot, snapshot_line};
use crate::model::{AgentId, Host, HostKey, KeyError};

/// Maximum number of problems in a message.
const MAX_PROBLEMS: usize = 5;
/// Maximum number of labels, and of variables, of a host.
const MAX_ENTRIES: usize = 1_000;
/// Maximum bytes of a label's or variable's name and of its value.
const MAX_NAME: usize = 253;
const MAX_VALUE: usize = 16 << 10;

/// Location of a row in its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowPlace {
    Line(u32),
    /// From 1.
    Item(u32),
    Named(Box<str>),
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowPlace::Line(line) => write!(f, "line {line}"),
            RowPlace::Item(item) => write!(f, "item {item}"),
            RowPlace::Named(name) => write!(f, "host {}", shown(name)),
        }
    }
}

/// A host as written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// An IP address, or CLOUD:IP.
    pub ip: Option<String>,
    pub cloud: Option<u64>,
    pub supplier: Option<u64>,
    pub agent: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub vars: BTreeMap<String, String>,
}

/// Reason why a row is not a host.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    #[error("the host has neither an address nor an agent id")]
    NoHost,
    #[error("{0:?} is not an IP address; host names are not resolved")]
    Address(String),
    #[error("{address} is not in cloud area {cloud}")]
    OtherCloud { address: String, cloud: u64 },
    #[error("the {what} {text:?} is not a number")]
    NotANumber { what: String, text: String },
    #[error("the {0} is too large")]
    NumberTooLarge(&'static str),
    #[error("the agent id cannot be used: {0}")]
    AgentId(#[source] KeyError),
    #[error("the host has more than {MAX_ENTRIES} {0}s")]
    TooMany(&'static str),
    #[error("{name:?} is not a valid name of a {what}")]
    Name { what: &'static str, name: String },
    #[error("{what} {name:?} is longer than {MAX_VALUE} bytes")]
    TooLong { what: &'static str, name: String },
    #[error("{what} {name:?} contains a NUL byte")]
    Nul { what: &'static str, name: String },
    #[error("field {0} is a list or a map, not a label")]
    NotALabel(String),
}

impl RowError {
    pub fn not_a_number(what: &str, text: &str) -> RowError {
        RowError::NotANumber { what: what.to_owned(), text: shown(text) }
    }
}

/// Checked rows, each as a line of the snapshot: a large inventory is in memory once.
#[derive(Debug, Default)]
pub struct RowList {
    hosts: Vec<CheckedRow>,
    problems: ProblemList,
    /// Valid and invalid rows.
    rows: usize,
    /// Size of the snapshot's lines.
    bytes: usize,
}

#[derive(Debug)]
struct CheckedRow {
    key: HostKey,
    place: RowPlace,
    line: Box<str>,
}

impl RowList {
    /// Checks and adds a row. An invalid one is reported at the end.
    pub fn push(&mut self, place: RowPlace, row: Row) -> Result<(), InventoryError> {
        self.rows += 1;
        if self.rows > MAX_HOSTS {
            return Err(InventoryError::TooManyHosts);
        }
        match check(row) {
            Ok(host) => {
                let key = host.host.key.clone();
                let line: Box<str> = snapshot_line(host).into();
                self.bytes += line.len() + 1;
                if self.bytes > MAX_BYTES {
                    return Err(InventoryError::TooLarge);
                }
                self.hosts.push(CheckedRow { key, place, line });
            }
            Err(why) => self.problems.add(|| format!("{place}: {why}")),
        }
        Ok(())
    }

    /// The number of hosts and their snapshot, or all problems.
    pub fn into_snapshot(mut self) -> Result<(usize, String), InventoryError> {
        self.hosts.sort_by(|a, b| a.key.cmp(&b.key));
        for pair in self.hosts.windows(2).filter(|pair| pair[0].key == pair[1].key) {
            let [first, second] = [&pair[0], &pair[1]];
            let (place, other) = (&second.place, &first.place);
            self.problems.add(|| format!("{place}: host {} is already at {other}", second.key));
        }
        self.problems.check()?;
        Ok((self.hosts.len(), snapshot(self.hosts.iter().map(|row| &*row.line))))
    }
}

/// The first problems, and the number of all.
#[derive(Debug, Default)]
struct ProblemList {
    first: Vec<String>,
    more: usize,
}

impl ProblemList {
    fn add(&mut self, problem: impl FnOnce() -> String) {
        match self.first.len() < MAX_PROBLEMS {
            true => self.first.push(problem()),
            false => self.more += 1,
        }
    }

    fn check(self) -> Result<(), InventoryError> {
        match self.first.is_empty() {
            true => Ok(()),
            false => Err(InventoryError::Invalid { problems: self.first, more: self.more }),
        }
    }
}

/// A text from outside, short and printable.
pub fn shown(text: &str) -> String {
    let clean: String = text.chars().take(60).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(60).is_some() { format!("{clean}…") } else { clean }
}

fn check(row: Row) -> Result<InventoryHost, RowError> {
    let Row { ip, cloud, supplier, agent, labels, vars } = row;
    let number = |value: Option<u64>, what: &'static str| match value {
        Some(number) if i64::try_from(number).is_err() => Err(RowError::NumberTooLarge(what)),
        number => Ok(number),
    };
    let (cloud, supplier) = (number(cloud, "cloud area")?, number(supplier, "supplier")?);
    let agent_id = agent.as_deref().filter(|id| !id.is_empty()).map(str::parse::<AgentId>);
    let agent_id = agent_id.transpose().map_err(RowError::AgentId)?;
    let host = match (ip.as_deref().map(str::trim).filter(|ip| !ip.is_empty()), agent_id) {
        (Some(ip), agent_id) => Host { key: address(ip, cloud)?, supplier, agent_id },
        (None, Some(id)) => Host { key: HostKey::Agent(id), supplier, agent_id: None },
        (None, None) => return Err(RowError::NoHost),
    };
    check_entries("label", &labels, |name| !name.starts_with("abide_"))?;
    check_entries("variable", &vars, is_variable_name)?;
    Ok(InventoryHost { host, labels, vars })
}

fn address(text: &str, cloud: Option<u64>) -> Result<HostKey, RowError> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(HostKey::Address { cloud: cloud.unwrap_or(0), ip });
    }
    let (own, ip) = parse_address(text).ok_or_else(|| RowError::Address(shown(text)))?;
    match cloud {
        Some(cloud) if cloud != own => Err(RowError::OtherCloud { address: shown(text), cloud }),
        Some(_) | None => Ok(HostKey::Address { cloud: own, ip }),
    }
}

fn check_entries(
    what: &'static str,
    entries: &BTreeMap<String, String>,
    is_valid: impl Fn(&str) -> bool,
) -> Result<(), RowError> {
    if entries.len() > MAX_ENTRIES {
        return Err(RowError::TooMany(what));
    }
    for (name, value) in entries {
        if name.is_empty() || name.len() > MAX_NAME || !is_valid(name) {
            return Err(RowError::Name { what, name: shown(name) });
        }
        if value.len() > MAX_VALUE {
            return Err(RowError::TooLong { what, name: shown(name) });
        }
        if name.contains('\0') || value.contains('\0') {
            return Err(RowError::Nul { what, name: shown(name) });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ip: &str) -> Row {
        Row { ip: Some(ip.to_owned()), ..Row::default() }
    }

    fn hosts(rows: Vec<Row>) -> Result<Vec<String>, String> {
        let mut list = RowList::default();
        for (row, line) in rows.into_iter().zip(1..) {
            list.push(RowPlace::Line(line), row).expect("few rows");
        }
        let (count, text) = list.into_snapshot().map_err(|error| error.to_string())?;
        let hosts = crate::manifest::inventory::parse(&text).expect("a snapshot");
        assert_eq!(hosts.len(), count);
        Ok(hosts.iter().map(|host| host.host.key.to_string()).collect())
    }

    #[test]
    fn hosts_are_sorted_and_an_address_may_name_its_cloud_area() {
        let mut third = row("10.0.0.1");
        third.cloud = Some(2);
        assert_eq!(
            hosts(vec![row("10.0.0.9"), row("1:10.0.0.2"), third]),
            Ok(vec!["0:10.0.0.9".to_owned(), "1:10.0.0.2".to_owned(), "2:10.0.0.1".to_owned()])
        );
    }

    #[test]
    fn a_host_that_occurs_twice_is_reported_with_both_places() {
        assert_eq!(
            hosts(vec![row("10.0.0.1"), row("10.0.0.2"), row("0:10.0.0.1")]),
            Err("line 3: host 0:10.0.0.1 is already at line 1".to_owned())
        );
    }

    #[test]
    fn problems_have_places_and_are_bounded() {
        let mut labels = row("10.0.0.1");
        labels.labels.insert("abide_owner".to_owned(), "x".to_owned());
        let mut vars = row("10.0.0.2");
        vars.vars.insert("host".to_owned(), "x".to_owned());
        let error = hosts(vec![row("web01"), labels, vars, Row::default()]).expect_err("problems");
        for part in [
            "line 1: \"web01\" is not an IP address",
            "line 2: \"abide_owner\" is not a valid name of a label",
            "line 3: \"host\" is not a valid name of a variable",
            "line 4: the host has neither an address nor an agent id",
        ] {
            assert!(error.contains(part), "{error}");
        }
        let error = hosts(vec![Row::default(); 10_000]).expect_err("problems");
        assert!(error.ends_with("; and 9995 more") && error.len() < 1_000, "{error}");
    }
}
