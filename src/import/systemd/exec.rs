//! systemd command lines: prefixes, quotes, specifiers such as `%i`, and variables.

use super::service::Service;
use crate::import::FileReader;
use crate::import::draft::Draft;
use crate::import::ini::IniEntry;
use crate::import::words::{self, END, MARKS, QuoteStyle, SPLIT_VARIABLE, VARIABLE};
use crate::manifest::document::Text;

/// Prefixes of a program.
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
        draft.spec.identity.proc_name = Some(Text(words::program(&first)));
        let command = match starts {
            [start] => {
                let (prefix, words) = self.words(start, file)?;
                if prefix.may_fail {
                    file.note(
                        start.line,
                        "ExecStart",
                        "`-` before the program is ignored: a failing exit code stays a failure",
                    );
                }
                format!("exec {}", words::command(&words))
            }
            _ => self.sequence(starts, file)?,
        };
        draft.foreground(command);
        Some(())
    }

    /// Joins commands with `&&`.
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

    /// Parses a command line into prefixes and words, with variables marked.
    pub(super) fn words(
        &self,
        entry: &IniEntry,
        file: &mut FileReader<'_, '_>,
    ) -> Option<(ExecPrefix, Vec<String>)> {
        let words = match words::split(&entry.value, QuoteStyle::Systemd) {
            Ok(words) => words,
            Err(why) => {
                file.reject(entry.line, format!("{} cannot be read: {why}", entry.key), "close the quote");
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
            file.reject(entry.line, format!("{} has no program", entry.key), "add the path of a program");
            return None;
        }
        if prefix.privileged {
            file.note(
                entry.line,
                &entry.key,
                "`+`, `!` or `|` before the program is ignored: all commands run as user",
            );
        }
        words[0] = program;
        if prefix.first_argument && words.len() > 1 {
            file.note(entry.line, &entry.key, format!("`@` is ignored: argv[0] is not {:?}", words[1]));
            words.remove(1);
        }
        if !prefix.literal {
            words.iter_mut().for_each(|word| *word = variables(word));
        }
        Some((prefix, words))
    }

    /// Expands specifiers such as `%i` that follow from the unit's name or from standard paths.
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
                    let message = format!("%{shown} is known only to a running systemd; left unchanged");
                    file.note(entry.line, &entry.key, message);
                    out.push('%');
                    out.push_str(&shown);
                }
            }
        }
        out
    }

    /// A text outside of commands.
    pub(super) fn text(&self, entry: &IniEntry, file: &mut FileReader<'_, '_>) -> String {
        words::escaped(&self.expand_specifiers(&entry.value, entry, file))
    }
}

/// Marks variables: a word `$NAME` is split into words, `${NAME}` is one word, `$$` is `$`.
fn variables(word: &str) -> String {
    let name_of = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        (end > 0 && !text.starts_with(|c: char| c.is_ascii_digit())).then(|| text[..end].to_owned())
    };
    let renamed = |name: String| if name == "MAINPID" { "ABIDE_PID".to_owned() } else { name };
    if let Some(name) = word.strip_prefix('$').and_then(name_of)
        && name.len() + 1 == word.len()
    {
        return format!("{SPLIT_VARIABLE}{}{END}", renamed(name));
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
            out.push_str(&format!("{VARIABLE}{}{END}", renamed(name)));
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    debug_assert!(!word.contains(MARKS), "files with mark characters are rejected");
    out
}
