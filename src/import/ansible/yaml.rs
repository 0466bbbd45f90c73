//! YAML form of Ansible inventories.

use serde_yaml::{Mapping, Value};

use super::ranges::expand;
use super::{AnsibleError, AnsibleInventory, AnsibleVars, MAX_DEPTH};

pub fn parse(text: &str) -> Result<AnsibleInventory, AnsibleError> {
    let parsed: Result<Value, serde_yaml::Error> = serde_yaml::from_str(text);
    let root = parsed.map_err(|error| {
        let line = error.location().map_or(0, |at| u32::try_from(at.line()).unwrap_or(0));
        AnsibleError { line, message: error.to_string() }
    })?;
    let mut inventory = AnsibleInventory::default();
    match &root {
        Value::Null => {}
        Value::Mapping(groups) => {
            for (name, body) in entries(groups)? {
                group(&mut inventory, &name, body, 0)?;
            }
        }
        _ => return Err(failed("an inventory is a map of groups".to_owned())),
    }
    Ok(inventory)
}

fn failed(message: String) -> AnsibleError {
    AnsibleError { line: 0, message }
}

/// Entries with text keys; a number as a key is text.
fn entries(map: &Mapping) -> Result<Vec<(String, &Value)>, AnsibleError> {
    let entry = |(key, value)| match scalar(key) {
        Some(name) => Ok((name, value)),
        None => Err(failed("a key is not text".to_owned())),
    };
    map.iter().map(entry).collect()
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        Value::Null => Some(String::new()),
        Value::Sequence(_) | Value::Mapping(_) | Value::Tagged(_) => None,
    }
}

fn group(
    inventory: &mut AnsibleInventory,
    name: &str,
    body: &Value,
    depth: usize,
) -> Result<(), AnsibleError> {
    if depth > MAX_DEPTH {
        return Err(failed(format!("group {name:?} is more than {MAX_DEPTH} levels deep")));
    }
    inventory.group(name, 0);
    let body = match body {
        Value::Null => return Ok(()),
        Value::Mapping(body) => entries(body)?,
        _ => return Err(failed(format!("group {name:?} is not a map with hosts, children and vars"))),
    };
    for (key, value) in body {
        let map = match value {
            Value::Null => continue,
            Value::Mapping(map) => map,
            _ => return Err(failed(format!("group {name:?}: {key} is not a map"))),
        };
        match key.as_str() {
            "hosts" => {
                for (pattern, own) in entries(map)? {
                    hosts(inventory, name, &pattern, own)?;
                }
            }
            "children" => {
                for (child, body) in entries(map)? {
                    inventory.group(&child, 0).parents.insert(name.to_owned());
                    group(inventory, &child, body, depth + 1)?;
                }
            }
            "vars" => inventory.group(name, 0).vars.extend(vars(map)?),
            _ => return Err(failed(format!("group {name:?}: unknown key {key:?}"))),
        }
    }
    Ok(())
}

fn hosts(
    inventory: &mut AnsibleInventory,
    group: &str,
    pattern: &str,
    own: &Value,
) -> Result<(), AnsibleError> {
    let own = match own {
        Value::Null => AnsibleVars::new(),
        Value::Mapping(map) => vars(map)?,
        _ => return Err(failed(format!("host {pattern:?}: its variables are not a map"))),
    };
    for name in expand(pattern).map_err(|error| failed(error.to_string()))? {
        inventory.add_host_with(&name, group, &own, 0)?;
    }
    Ok(())
}

fn vars(map: &Mapping) -> Result<AnsibleVars, AnsibleError> {
    Ok(entries(map)?.into_iter().map(|(name, value)| (name, scalar(value))).collect())
}
