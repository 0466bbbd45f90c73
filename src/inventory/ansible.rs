//! Ansible inventories as hosts: groups become labels, variables stay variables.
//!
//! The label `name` is the host's name in the inventory, and `group.NAME` is set for each of its groups.

use std::path::Path;

use super::InventoryError;
use super::rows::{Row, RowList, RowPlace};
use crate::import::ansible;
use crate::manifest::inventory::is_variable_name;

/// Maximum number of names in a note.
const MAX_NAMES: usize = 10;

pub fn parse(text: &str, file: &Path) -> Result<(RowList, Vec<String>), InventoryError> {
    let extension = file.extension().and_then(|extension| extension.to_str());
    let inventory = ansible::parse(text, extension).map_err(|error| {
        let place = if error.line == 0 { String::new() } else { format!("line {}: ", error.line) };
        InventoryError::Syntax(format!("{place}{}", error.message))
    })?;
    let mut rows = RowList::default();
    let mut left_out = std::collections::BTreeSet::new();
    for (name, host, effective) in inventory.effective_hosts() {
        let mut row = Row { ip: Some(ansible::address(name, &effective.vars)), ..Row::default() };
        row.labels.insert("name".to_owned(), name.clone());
        row.labels.extend(effective.names.iter().map(|group| (format!("group.{group}"), "true".to_owned())));
        for (variable, value) in effective.vars {
            match value {
                _ if ansible::is_connection_variable(&variable) => {}
                Some(value) if is_variable_name(&variable) => drop(row.vars.insert(variable, value)),
                _ => drop(left_out.insert(variable)),
            }
        }
        let place = match host.line {
            0 => RowPlace::Named(name.as_str().into()),
            line => RowPlace::Line(line),
        };
        rows.push(place, row)?;
    }
    let mut notes = Vec::new();
    if !left_out.is_empty() {
        let names: Vec<&str> = left_out.iter().take(MAX_NAMES).map(String::as_str).collect();
        let more = if left_out.len() > MAX_NAMES { ", …" } else { "" };
        let message = "variables that are a list or a map, or have a reserved name, are left out";
        notes.push(format!("{message}: {}{more}", names.join(", ")));
    }
    Ok((rows, notes))
}
