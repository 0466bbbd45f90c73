//! INI form of Ansible inventories.

use super::ranges::expand;
use super::{AnsibleError, AnsibleInventory, AnsibleVars};

/// The kind of a section.
enum Section {
    Hosts,
    Children,
    Vars,
}

pub fn parse(text: &str) -> Result<AnsibleInventory, AnsibleError> {
    let mut inventory = AnsibleInventory::default();
    let (mut group, mut section) = ("ungrouped".to_owned(), Section::Hosts);
    for (line, text) in (1..).zip(text.lines()) {
        let failed = |message: String| AnsibleError { line, message };
        let text = text.trim();
        if text.is_empty() || text.starts_with(['#', ';']) {
            continue;
        }
        if let Some(head) = text.strip_prefix('[').filter(|_| !is_host_pattern(text)) {
            let head = head.split(']').next().filter(|_| text.contains(']'));
            let head = head.ok_or_else(|| failed("the section is not closed".to_owned()))?.trim();
            let (name, kind) = head.split_once(':').unwrap_or((head, ""));
            section = match kind {
                "" => Section::Hosts,
                "children" => Section::Children,
                "vars" => Section::Vars,
                _ => return Err(failed(format!("unknown section [{head}]"))),
            };
            group = name.trim().to_owned();
            inventory.group(&group, line);
            continue;
        }
        match section {
            Section::Hosts => host_line(&mut inventory, &group, text, line)?,
            Section::Children => {
                let child = without_comment(text);
                inventory.group(child, line).parents.insert(group.clone());
            }
            Section::Vars => {
                let (name, value) =
                    text.split_once('=').ok_or_else(|| failed("a variable is NAME=VALUE".to_owned()))?;
                let value = unquoted(value.trim());
                inventory.group(&group, line).vars.insert(name.trim().to_owned(), Some(value));
            }
        }
    }
    Ok(inventory)
}

/// `[a:c].example`: a host whose name begins with a range.
fn is_host_pattern(text: &str) -> bool {
    let Some((inside, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) else {
        return false;
    };
    let rest = rest.trim_start();
    inside.contains(':') && !rest.is_empty() && !rest.starts_with(['#', ';'])
}

fn without_comment(text: &str) -> &str {
    text.split([' ', '\t']).next().unwrap_or_default()
}

fn host_line(
    inventory: &mut AnsibleInventory,
    group: &str,
    text: &str,
    line: u32,
) -> Result<(), AnsibleError> {
    let mut words =
        words(text).map_err(|error| AnsibleError { line, message: error.to_string() })?.into_iter();
    let Some(pattern) = words.next() else { return Ok(()) };
    let mut vars = AnsibleVars::new();
    for (nth, word) in words.enumerate() {
        // The word may be a part of a secret.
        let (name, value) = word.split_once('=').ok_or_else(|| {
            let message = format!("word {} is not a variable: NAME=VALUE", nth + 2);
            AnsibleError { line, message }
        })?;
        vars.insert(name.to_owned(), Some(value.to_owned()));
    }
    let (pattern, port) = split_port(&pattern);
    if let Some(port) = port {
        vars.entry("ansible_port".to_owned()).or_insert(Some(port.to_owned()));
    }
    for name in expand(pattern).map_err(|error| AnsibleError { line, message: error.to_string() })? {
        inventory.add_host_with(&name, group, &vars, line)?;
    }
    Ok(())
}

/// `HOST:PORT`. An IPv6 address with a port is in brackets.
fn split_port(pattern: &str) -> (&str, Option<&str>) {
    let is_port = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match pattern.rsplit_once(':') {
        Some((host, port)) if is_port(port) && (!host.contains(':') || host.ends_with(']')) => {
            let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            (inner.filter(|host| host.parse::<std::net::Ipv6Addr>().is_ok()).unwrap_or(host), Some(port))
        }
        Some(_) | None => (pattern, None),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("a quote is not closed")]
struct UnclosedQuote;

/// Splits at spaces outside of quotes, as a shell does; a word that begins with `#` or `;` begins a comment.
fn words(text: &str) -> Result<Vec<String>, UnclosedQuote> {
    let (mut words, mut word, mut quote, mut has_word) = (Vec::new(), String::new(), None, false);
    for c in text.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => (quote, has_word) = (Some(c), true),
            (None, c) if c.is_whitespace() => {
                if std::mem::take(&mut has_word) {
                    words.push(std::mem::take(&mut word));
                }
            }
            (None, '#' | ';') if !has_word => return Ok(words),
            (None, c) => {
                word.push(c);
                has_word = true;
            }
        }
    }
    if quote.is_some() {
        return Err(UnclosedQuote);
    }
    if has_word {
        words.push(word);
    }
    Ok(words)
}

fn unquoted(text: &str) -> String {
    let inner = |quote: char| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    inner('"').or_else(|| inner('\'')).unwrap_or(text).to_owned()
}
