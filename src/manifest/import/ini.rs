//! Sections of settings, each with its line: supervisord's ini and systemd's units, which look alike and are not.

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
    /// The last value of a setting: it wins over those before.
    pub fn last(&self, key: &str) -> Option<&IniEntry> {
        self.entries.iter().rev().find(|entry| entry.key == key)
    }
}

/// As Python's configparser reads it for supervisord: `=` or `:`, keys in any case, lines that go on are indented,
/// comments begin a line or follow a space.
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
            // A section that stands twice is one; what comes later wins.
            match sections.iter().position(|section| section.name == name) {
                Some(at) => {
                    file.note(line, &format!("[{name}]"), "this section stands twice; they are taken as one");
                    let again = sections.remove(at);
                    sections.push(again);
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
            _ => {
                file.reject(line, "this is neither a section nor a setting", "[program:NAME], or NAME=VALUE")
            }
        }
    }
    sections
}

/// As systemd reads it: keys as they are, a backslash at a line's end goes on, comments only begin a line.
pub fn systemd(file: &mut FileReader<'_, '_>) -> Vec<IniSection> {
    let mut sections: Vec<IniSection> = Vec::new();
    let mut open: Option<(u32, String)> = None;
    for (line, raw) in numbered(&file.source.text.clone()) {
        let text = raw.trim();
        // Also between the lines of one setting.
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
        // A section that stands twice goes on.
        match sections.iter().position(|section| section.name == name) {
            Some(at) => {
                let again = sections.remove(at);
                sections.push(again);
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
        _ => file.reject(line, "this is neither a section nor a setting", "[Service], or Name=value"),
    }
}

fn numbered(text: &str) -> impl Iterator<Item = (u32, &str)> {
    text.lines().enumerate().map(|(at, line)| (u32::try_from(at).unwrap_or(u32::MAX - 1) + 1, line))
}

fn head(text: &str) -> Option<&str> {
    text.strip_prefix('[')?.strip_suffix(']').filter(|name| !name.is_empty())
}

/// A comment in a line follows a space.
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
