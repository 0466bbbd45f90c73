//! CSV import of hosts: converts lines to HostGroups. The header names the columns; unknown columns become labels.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::draft::{host, sanitize_name};
use super::{FileReader, ImportContext};
use crate::manifest::document::{Document, HostEntry, HostLabels, HostValue, Map, Meta, Text, TextOrNumber};
use crate::manifest::grammar::API_VERSION;
use crate::model::{AgentId, HostKey};

/// A line: a host and its group.
pub struct CsvHost {
    file: Arc<str>,
    line: u32,
    group: String,
    key: HostKey,
    entry: HostEntry,
}

/// Meaning of a column in a list of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostColumn {
    Ip,
    Cloud,
    Supplier,
    Agent,
    Group,
    /// Several labels, such as `a=1;b=2`.
    Labels,
    Label(String),
}

impl HostColumn {
    pub fn of(title: &str) -> HostColumn {
        match title.to_ascii_lowercase().replace([' ', '-'], "_").as_str() {
            "ip" | "address" | "inner_ip" | "bk_host_innerip" | "host_ip" | "ip_address" => HostColumn::Ip,
            "cloud" | "cloud_id" | "bk_cloud_id" => HostColumn::Cloud,
            "supplier" | "supplier_id" | "bk_supplier_id" => HostColumn::Supplier,
            "agent" | "agent_id" | "bk_agent_id" => HostColumn::Agent,
            "group" | "host_group" | "hostgroup" => HostColumn::Group,
            "labels" => HostColumn::Labels,
            _ => HostColumn::Label(title.to_owned()),
        }
    }

    /// The separator of a file with this header.
    pub fn separator(header: &str) -> char {
        [',', ';', '\t'].into_iter().find(|c| header.contains(*c)).unwrap_or(',')
    }
}

/// Whether a line is the header of a hosts file.
pub fn is_header(line: &str) -> bool {
    let mut titles = line.split(HostColumn::separator(line)).map(|title| title.trim().trim_matches('"'));
    titles.any(|title| matches!(HostColumn::of(title), HostColumn::Ip | HostColumn::Agent))
}

pub fn read(file: &mut FileReader<'_, '_>) -> Vec<CsvHost> {
    let text = file.source.text.clone();
    let is_record = |line: &&str| !line.trim().is_empty() && !line.starts_with('#');
    let header = text.lines().find(is_record).unwrap_or_default();
    let records = match records(&text, HostColumn::separator(header)) {
        Ok(records) => records,
        Err(line) => {
            file.reject(line, "a quote is not closed", "\"such as this\"");
            return Vec::new();
        }
    };
    let mut records = records.into_iter();
    let Some((line, titles)) = records.next() else { return Vec::new() };
    let columns: Vec<HostColumn> = titles.iter().map(|title| HostColumn::of(title)).collect();
    if !columns.contains(&HostColumn::Ip) && !columns.contains(&HostColumn::Agent) {
        file.reject(
            line,
            "the header has no column for hosts",
            "the first line is the header, such as ip,cloud,group,rack",
        );
        return Vec::new();
    }
    if columns.contains(&HostColumn::Ip) && !columns.contains(&HostColumn::Cloud) {
        file.note(line, "cloud", "the column is missing: all hosts are assumed to be in cloud area 0");
    }
    for (at, title) in titles.iter().enumerate() {
        if columns[..at].contains(&columns[at]) {
            file.reject(line, format!("column {title:?} occurs twice"), "keep one of them");
            return Vec::new();
        }
        if matches!(&columns[at], HostColumn::Label(name) if name.is_empty() || name.starts_with("abide_") || name.len() > 253)
        {
            file.note(line, title, "not a valid label name; the column is ignored");
        }
    }
    let own = file.base().map_or("hosts", |name| name.split('.').next().unwrap_or(name)).to_owned();
    let mut listed = Vec::new();
    for (line, cells) in records {
        if cells.len() > columns.len() {
            let hint = "quote values that contain the separator";
            file.reject(line, "the line has more columns than the header", hint);
            continue;
        }
        if let Some((group, key, entry)) = parse_host(&columns, &cells, line, file) {
            let group = group.unwrap_or_else(|| own.clone());
            listed.push(CsvHost { file: file.source.name.clone(), line, group, key, entry });
        }
    }
    if listed.is_empty() && file.reader.problems.is_empty() {
        file.reject(line, "the file has no hosts", "add one line per host after the header");
    }
    listed
}

/// Parses a line into group, host key and manifest entry.
fn parse_host(
    columns: &[HostColumn],
    cells: &[String],
    line: u32,
    file: &mut FileReader<'_, '_>,
) -> Option<(Option<String>, HostKey, HostEntry)> {
    let cell = |column: &HostColumn| {
        let at = columns.iter().position(|one| one == column)?;
        cells.get(at).map(|text| text.trim()).filter(|text| !text.is_empty())
    };
    let mut id = |column: &HostColumn, what: &str| match cell(column).map(str::parse::<u32>) {
        None => Some(None),
        Some(Ok(id)) => Some(Some(i64::from(id))),
        Some(Err(_)) => {
            file.reject(line, format!("the {what} is not a number"), "use a whole number from 0");
            None
        }
    };
    let (cloud, supplier) = (id(&HostColumn::Cloud, "cloud area")?, id(&HostColumn::Supplier, "supplier")?);
    let agent = match cell(&HostColumn::Agent).map(str::parse::<AgentId>) {
        None => None,
        Some(Ok(agent)) => Some(agent),
        Some(Err(error)) => {
            file.reject(
                line,
                format!("the agent id cannot be used: {error}"),
                "use the id that the agent reports",
            );
            return None;
        }
    };
    let key = match (cell(&HostColumn::Ip).map(str::parse::<IpAddr>), &agent) {
        (Some(Ok(ip)), _) => HostKey::Address { cloud: u64::try_from(cloud.unwrap_or(0)).unwrap_or(0), ip },
        (Some(Err(_)), _) => {
            file.reject(line, "not an IP address", "such as 10.0.0.1; host names are not resolved");
            return None;
        }
        (None, Some(agent)) => HostKey::Agent(agent.clone()),
        (None, None) => {
            file.reject(line, "the line has no host", "add an address or an agent id");
            return None;
        }
    };
    let mut labels = BTreeMap::new();
    for (column, value) in columns.iter().zip(cells) {
        let value = value.trim();
        match column {
            HostColumn::Label(name) if !value.is_empty() => {
                labels.insert(name.clone(), value.to_owned());
            }
            HostColumn::Labels => {
                for pair in value.split([';', ',']).map(str::trim).filter(|pair| !pair.is_empty()) {
                    match pair.split_once('=') {
                        Some((name, value)) => labels.insert(name.trim().to_owned(), value.trim().to_owned()),
                        None => labels.insert(pair.to_owned(), String::new()),
                    };
                }
            }
            HostColumn::Ip
            | HostColumn::Cloud
            | HostColumn::Supplier
            | HostColumn::Agent
            | HostColumn::Group
            | HostColumn::Label(_) => {}
        }
    }
    labels.retain(|name, _| !name.is_empty() && !name.starts_with("abide_") && name.len() <= 253);
    let labels: BTreeMap<String, TextOrNumber> =
        labels.into_iter().map(|(name, value)| (name, TextOrNumber::Text(value))).collect();
    let entry = HostEntry {
        bk_supplier_id: supplier,
        bk_agent_id: agent.map(|agent| agent.as_str().into()),
        labels: (!labels.is_empty()).then_some(HostLabels::Have(Map(labels))),
        ..host(&key)
    };
    Some((cell(&HostColumn::Group).map(str::to_owned), key, entry))
}

/// Collects lines into groups, each host once. Two files may add to one group.
pub fn documents(listed: Vec<CsvHost>, reader: &mut ImportContext<'_>) -> Vec<Document> {
    let mut groups: BTreeMap<String, (HashSet<HostKey>, Vec<HostEntry>)> = BTreeMap::new();
    for CsvHost { file, line, group, key, entry } in listed {
        let name = sanitize_name(&group);
        if name != group {
            reader.note(&file, line, &group, format!("not a valid manifest name; renamed to {name}"));
        }
        let (known, hosts) = groups.entry(name.clone()).or_default();
        if known.insert(key.clone()) {
            hosts.push(entry);
        } else {
            let message = format!("the host is already in group {name}; the first entry is used");
            reader.note(&file, line, &key.to_string(), message);
        }
    }
    let document = |(name, (_, hosts)): (String, (HashSet<HostKey>, Vec<HostEntry>))| Document {
        api_version: Some(API_VERSION.into()),
        kind: Some("HostGroup".into()),
        meta: Some(Meta { name: Some(Text(name)), ..Meta::default() }),
        hosts: Some(hosts.into_iter().map(HostValue::Entry).collect()),
        ..Document::default()
    };
    groups.into_iter().map(document).collect()
}

/// Cells of each non-empty line, with its number. `Err` is the line of an unclosed quote.
fn records(text: &str, separator: char) -> Result<Vec<(u32, Vec<String>)>, u32> {
    let (mut records, mut cells, mut cell) = (Vec::new(), Vec::new(), String::new());
    let (mut line, mut begun) = (1, 1);
    let mut chars = text.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '\n' if quoted => {
                line += 1;
                cell.push(c);
            }
            '"' if quoted && chars.next_if_eq(&'"').is_some() => cell.push('"'),
            '"' if quoted => quoted = false,
            c if quoted => cell.push(c),
            '"' if cell.trim().is_empty() => {
                cell.clear();
                quoted = true;
            }
            '\n' => {
                cells.push(std::mem::take(&mut cell).trim().to_owned());
                let record: Vec<String> = std::mem::take(&mut cells);
                if record.iter().any(|cell| !cell.is_empty()) && !record[0].starts_with('#') {
                    records.push((begun, record));
                }
                line += 1;
                begun = line;
            }
            c if c == separator => cells.push(std::mem::take(&mut cell).trim().to_owned()),
            c => cell.push(c),
        }
    }
    if quoted {
        return Err(begun);
    }
    cells.push(cell.trim().to_owned());
    if cells.iter().any(|cell| !cell.is_empty()) && !cells[0].starts_with('#') {
        records.push((begun, cells));
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_read_with_their_quotes() {
        let read = |text: &str| records(text, ',').unwrap();
        assert_eq!(
            read("a,\"b,\n\"\"c\"\"\", d\r\n\n# x,y\n1,,3"),
            [
                (1, vec!["a".to_owned(), "b,\n\"c\"".to_owned(), "d".to_owned()]),
                (5, vec!["1".to_owned(), String::new(), "3".to_owned()])
            ]
        );
        assert_eq!(records("a\nb,\"c", ','), Err(2));
    }
}
