//! Command lines of a unit: prefixes, quotes, specifiers such as `%i`, and variables.

use super::service::Service;
use crate::manifest::document::Text;
use crate::manifest::import::FileReader;
use crate::manifest::import::draft::Draft;
use crate::manifest::import::ini::IniEntry;
use crate::manifest::import::words::{self, END, MARKS, QuoteStyle, SPLIT_VARIABLE, VARIABLE};

/// What stands before a program.
#[derive(Default)]
pub struct ExecPrefix {
    /// `-`
    may_fail: bool,
    /// `@`
    first_argument: bool,
    /// `+`, `!`, `!!`
    privileged: bool,
    /// `:`
    literal: bool,
}

impl Service<'_> {
    pub(super) fn start(
        &self,
        starts: &[&IniEntry],
        oneshot: bool,
        draft: &mut Draft,
        file: &mut FileReader<'_, '_>,
    ) -> Option<()> {
        if starts.len() > 1 && !oneshot {
            file.reject(starts[1].line, "only a oneshot service has several ExecStart", "keep one of them");
            return None;
        }
        let (_, first) = self.words(starts[0], file)?;
        draft.identity.proc_name = Some(Text(words::program(&first)));
        let command = match starts {
            [start] => {
                let (prefix, words) = self.words(start, file)?;
                if prefix.may_fail {
                    file.note(
                        start.line,
                        "ExecStart",
                        "`-` before the program: a bad exit code stays a bad one",
                    );
                }
                format!("exec {}", words::command(&words))
            }
            _ => self.sequence(starts, file)?,
        };
        draft.foreground(command);
        Some(())
    }

    /// Commands one after the other, as long as they go well.
    pub(super) fn sequence(&self, entries: &[&IniEntry], file: &mut FileReader<'_, '_>) -> Option<String> {
        let mut all = Vec::new();
        for entry in entries {
            let (prefix, words) = self.words(entry, file)?;
            let command = words::command(&words);
            all.push(match prefix.may_fail {
                true if entries.len() > 1 => format!("{{ {command} || :; }}"),
                true => format!("{command} || :"),
                false => command,
            });
        }
        Some(all.join(" && "))
    }

    /// A command line of systemd's: its prefixes, and its words with their variables marked.
    pub(super) fn words(
        &self,
        entry: &IniEntry,
        file: &mut FileReader<'_, '_>,
    ) -> Option<(ExecPrefix, Vec<String>)> {
        let words = match words::split(&entry.value, QuoteStyle::Systemd) {
            Ok(words) => words,
            Err(why) => {
                file.reject(entry.line, format!("{} cannot be read: {why}", entry.key), "close it");
                return None;
            }
        };
        let mut words: Vec<String> =
            words.into_iter().map(|word| self.expand_specifiers(&word, entry, file)).collect();
        let mut prefix = ExecPrefix::default();
        let first = words.first().cloned().unwrap_or_default();
        let program = first.trim_start_matches(|c: char| "-@+!:|".contains(c)).to_owned();
        for c in first[..first.len() - program.len()].chars() {
            match c {
                '-' => prefix.may_fail = true,
                '@' => prefix.first_argument = true,
                ':' => prefix.literal = true,
                _ => prefix.privileged = true,
            }
        }
        if program.is_empty() {
            file.reject(entry.line, format!("{} names no program", entry.key), "the path of a program");
            return None;
        }
        if prefix.privileged {
            file.note(
                entry.line,
                &entry.key,
                "`+`, `!` or `|` before the program: it runs as user, like the others",
            );
        }
        words[0] = program;
        if prefix.first_argument && words.len() > 1 {
            file.note(
                entry.line,
                &entry.key,
                format!("`@`: it is not called {:?} in its first argument", words[1]),
            );
            words.remove(1);
        }
        if !prefix.literal {
            words.iter_mut().for_each(|word| *word = variables(word));
        }
        Some((prefix, words))
    }

    /// `%i` and the like, as far as the unit's name and the usual places of a system say what they are.
    pub(super) fn expand_specifiers(
        &self,
        text: &str,
        entry: &IniEntry,
        file: &mut FileReader<'_, '_>,
    ) -> String {
        let unit = self.unit.as_deref().unwrap_or_default();
        let bare = unit.strip_suffix(".service").unwrap_or(unit);
        let (prefix, instance) = bare.split_once('@').unwrap_or((bare, ""));
        let (mut out, mut chars) = (String::new(), text.chars());
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let letter = chars.next();
            match letter {
                Some('%') => out.push('%'),
                Some('n') if !unit.is_empty() => out.push_str(unit),
                Some('N') if !unit.is_empty() => out.push_str(bare),
                Some('p') if !unit.is_empty() => out.push_str(prefix),
                Some('i') if !instance.is_empty() => out.push_str(instance),
                Some('I') if !instance.is_empty() && !instance.contains('\\') => {
                    out.push_str(&instance.replace('-', "/"));
                }
                Some('t') => out.push_str("/run"),
                Some('S') => out.push_str("/var/lib"),
                Some('C') => out.push_str("/var/cache"),
                Some('L') => out.push_str("/var/log"),
                Some('E') => out.push_str("/etc"),
                Some('T') => out.push_str("/tmp"),
                Some('V') => out.push_str("/var/tmp"),
                other => {
                    let shown: String = other.into_iter().collect();
                    let message = format!("%{shown} is known only to a running systemd; it stays as it is");
                    file.note(entry.line, &entry.key, message);
                    out.push('%');
                    out.push_str(&shown);
                }
            }
        }
        out
    }

    /// A text that no shell sees.
    pub(super) fn text(&self, entry: &IniEntry, file: &mut FileReader<'_, '_>) -> String {
        words::escaped(&self.expand_specifiers(&entry.value, entry, file))
    }
}

/// `$NAME` as a word is as many words as its value has; `${NAME}` is one; `$$` is `$`.
fn variables(word: &str) -> String {
    let name_of = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        (end > 0 && !text.starts_with(|c: char| c.is_ascii_digit())).then(|| text[..end].to_owned())
    };
    let told = |name: String| if name == "MAINPID" { "ABIDE_PID".to_owned() } else { name };
    if let Some(name) = word.strip_prefix('$').and_then(name_of)
        && name.len() + 1 == word.len()
    {
        return format!("{SPLIT_VARIABLE}{}{END}", told(name));
    }
    let (mut out, mut rest) = (String::new(), word);
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let braced = rest.strip_prefix('{').and_then(|inner| Some((name_of(inner)?, inner)));
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) =
            braced.and_then(|(name, inner)| Some((name.clone(), inner[name.len()..].strip_prefix('}')?)))
        {
            out.push_str(&format!("{VARIABLE}{}{END}", told(name)));
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    debug_assert!(!word.contains(MARKS), "whoever reads a file has looked");
    out
}
