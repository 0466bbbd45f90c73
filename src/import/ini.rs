//! INI parsers with line numbers: supervisord's dialect and systemd's unit dialect.

use super::FileReader;

#[derive(Debug)]
pub struct IniSection {
    pub name: String,
    pub line: u32,
    pub entries: Vec<IniEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IniEntry {
    pub key: String,
    pub value: String,
    pub line: u32,
}

impl IniSection {
    /// The last value of a setting, which overrides earlier ones.
    pub fn last(&self, key: &str) -> Option<&IniEntry> {
        self.entries.iter().rev().find(|entry| entry.key == key)
    }
}

/// Parses supervisord's dialect (Python's configparser): `=` or `:`, case-insensitive keys, indented continuation lines,
/// comments at the start of a line or after a space.
pub fn supervisord(file: &mut FileReader<'_, '_>) -> Vec<IniSection> {
    let mut sections: Vec<IniSection> = Vec::new();
    for (line, raw) in numbered(&file.source.text.clone()) {
        let begins = raw.trim_start();
        if begins.is_empty() || begins.starts_with([';', '#']) {
            continue;
        }
        let text = without_comment(raw).trim();
        let indented = raw.starts_with([' ', '\t']);
        if let Some(entry) =
            sections.last_mut().and_then(|section| section.entries.last_mut()).filter(|_| indented)
        {
            entry.value.push('\n');
            entry.value.push_str(text);
            continue;
        }
        if let Some(name) = head(text) {
            // Duplicate sections are merged; later settings override earlier ones.
            match sections.iter().position(|section| section.name == name) {
                Some(at) => {
                    file.note(line, &format!("[{name}]"), "duplicate section; merged with the first");
                    let existing = sections.remove(at);
                    sections.push(existing);
                }
                None => sections.push(IniSection { name: name.to_owned(), line, entries: Vec::new() }),
            }
            continue;
        }
        match (text.find(['=', ':']), sections.last_mut()) {
            (Some(at), Some(section)) if at > 0 => section.entries.push(IniEntry {
                key: text[..at].trim().to_ascii_lowercase(),
                value: text[at + 1..].trim().to_owned(),
                line,
            }),
            _ => file.reject(line, "neither a section nor a setting", "use [program:NAME] or NAME=VALUE"),
        }
    }
    sections
}

/// Parses systemd's dialect: case-sensitive keys, continuation by a backslash, comments only at the start of a line.
pub fn systemd(file: &mut FileReader<'_, '_>) -> Vec<IniSection> {
    let mut sections: Vec<IniSection> = Vec::new();
    let mut open: Option<(u32, String)> = None;
    for (line, raw) in numbered(&file.source.text.clone()) {
        let text = raw.trim();
        // systemd also skips comments between continuation lines.
        if text.starts_with(['#', ';']) || (text.is_empty() && open.is_none()) {
            continue;
        }
        let (line, mut whole) = open.take().unwrap_or((line, String::new()));
        match text.strip_suffix('\\') {
            Some(begun) => {
                whole.push_str(begun);
                whole.push(' ');
                open = Some((line, whole));
                continue;
            }
            None => whole.push_str(text),
        }
        setting(line, &whole, &mut sections, file);
    }
    if let Some((line, whole)) = open {
        setting(line, &whole, &mut sections, file);
    }
    sections
}

fn setting(line: u32, text: &str, sections: &mut Vec<IniSection>, file: &mut FileReader<'_, '_>) {
    if let Some(name) = head(text.trim()) {
        // Duplicate sections are merged.
        match sections.iter().position(|section| section.name == name) {
            Some(at) => {
                let existing = sections.remove(at);
                sections.push(existing);
            }
            None => sections.push(IniSection { name: name.to_owned(), line, entries: Vec::new() }),
        }
        return;
    }
    match (text.split_once('='), sections.last_mut()) {
        (Some((key, value)), Some(section)) if !key.trim().is_empty() => section.entries.push(IniEntry {
            key: key.trim().to_owned(),
            value: value.trim().to_owned(),
            line,
        }),
        _ => file.reject(line, "neither a section nor a setting", "use [Service] or Name=value"),
    }
}

fn numbered(text: &str) -> impl Iterator<Item = (u32, &str)> {
    text.lines().enumerate().map(|(at, line)| (u32::try_from(at).unwrap_or(u32::MAX - 1) + 1, line))
}

fn head(text: &str) -> Option<&str> {
    text.strip_prefix('[')?.strip_suffix(']').filter(|name| !name.is_empty())
}

/// Removes an inline comment, which follows a space.
fn without_comment(line: &str) -> &str {
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        if matches!(c, ';' | '#') && before.is_whitespace() {
            return &line[..at];
        }
        before = c;
    }
    line
}
