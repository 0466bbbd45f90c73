//! supervisord text syntax: `%(name)s` expansions and quoted environments.

use crate::import::FileReader;
use crate::import::ini::IniEntry;
use crate::import::words::{self, END, INSTANCE, VARIABLE};

/// Value of `%(process_num)d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessNumber {
    /// `${instance}`.
    Variable,
    Fixed(u32),
}

/// A program, or one of its numbered processes.
pub struct SupervisordProgram<'a> {
    pub name: &'a str,
    /// Process name; known only after process_name is expanded.
    pub process_name: Option<String>,
    pub group: &'a str,
    pub number: ProcessNumber,
    pub numprocs: u32,
}

impl SupervisordProgram<'_> {
    /// Absolute path. A relative path is noted.
    pub fn path(&self, entry: &IniEntry, file: &mut FileReader<'_, '_>) -> Option<String> {
        let path = self.template(entry, file)?;
        if path.starts_with('/') {
            return Some(path);
        }
        file.note(
            entry.line,
            &entry.key,
            "relative to the directory where supervisord was started, which is unknown",
        );
        None
    }

    /// A text outside of commands.
    pub fn template(&self, entry: &IniEntry, file: &mut FileReader<'_, '_>) -> Option<String> {
        let expanded = self.expand(entry, file)?;
        let text = words::template(&expanded);
        if text.is_none() {
            let message = "ignored: %(ENV_…)s is known only to a running supervisord";
            file.note(entry.line, &entry.key, message);
        }
        text
    }

    /// Expands `%(name)s`. A value that only a running supervisord knows becomes an environment variable.
    pub fn expand(&self, entry: &IniEntry, file: &mut FileReader<'_, '_>) -> Option<String> {
        let (mut out, mut rest) = (String::new(), entry.value.as_str());
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix('%') {
                out.push('%');
                rest = after;
                continue;
            }
            let Some((name, form, after)) = expansion(rest) else {
                file.reject(entry.line, format!("{}: invalid % expansion", entry.key), "write %%");
                return None;
            };
            rest = after;
            match (name, name.strip_prefix("ENV_")) {
                ("process_num", _) => match self.number {
                    ProcessNumber::Variable => out.push(INSTANCE),
                    ProcessNumber::Fixed(n) => out.push_str(&padded(n, form)),
                },
                ("program_name", _) => out.push_str(self.name),
                ("group_name", _) => out.push_str(self.group),
                ("numprocs", _) => out.push_str(&padded(self.numprocs, form)),
                ("process_name", _) if self.number == ProcessNumber::Variable => {
                    out.push_str(&format!("{}_{INSTANCE}", self.name));
                }
                ("process_name", _) => out.push_str(self.process_name.as_deref().unwrap_or(self.name)),
                ("here", _) if let Some(here) = file.here => out.push_str(here),
                (_, Some(variable)) if is_variable(variable) => {
                    let message = format!(
                        "{variable} comes from supervisord's environment; add it to env, or write its value"
                    );
                    file.note(entry.line, &entry.key, message);
                    out.extend([VARIABLE].into_iter().chain(variable.chars()).chain([END]));
                }
                _ => {
                    let message = format!("%({name}) is known only to a running supervisord; left unchanged");
                    file.note(entry.line, &entry.key, message);
                    out.push_str(&format!("%({name}){form}"));
                }
            }
        }
        out.push_str(rest);
        Some(out)
    }
}

fn is_variable(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Parses `(name)02d…` into name, format and rest.
fn expansion(text: &str) -> Option<(&str, &str, &str)> {
    let (name, rest) = text.strip_prefix('(')?.split_once(')')?;
    let digits = rest.find(|c: char| !c.is_ascii_digit())?;
    let end = digits + rest[digits..].chars().next().filter(|c| matches!(c, 's' | 'd'))?.len_utf8();
    // A larger width is certainly a mistake.
    (digits <= 2).then_some((name, &rest[..end], &rest[end..]))
}

fn padded(number: u32, form: &str) -> String {
    let digits = form.trim_end_matches(['s', 'd']);
    let width = digits.parse::<usize>().unwrap_or(0);
    match digits.starts_with('0') {
        true => format!("{number:0width$}"),
        false => format!("{number:width$}"),
    }
}

/// Reason why an environment cannot be read. The texts contain no values, which may be secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    #[error("an entry has no `=`")]
    NoValue,
    #[error("an entry has no name")]
    NoName,
    #[error("the quote of {name} is not closed")]
    OpenQuote { name: String },
    #[error("unexpected text after the value of {name}")]
    ExtraText { name: String },
}

/// Parses `KEY="a,b",K2='x',K3=y`. Quoted text is literal.
pub fn pairs(text: &str) -> Result<Vec<(String, String)>, EnvironmentError> {
    let mut pairs = Vec::new();
    let mut rest = text.trim_start_matches([',', ' ', '\t', '\n', '\r']);
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=').ok_or(EnvironmentError::NoValue)?;
        let name = name.trim();
        if name.is_empty() || name.contains(['"', '\'', ',', '\n', '\0']) {
            return Err(EnvironmentError::NoName);
        }
        let after = after.trim_start();
        let (value, after) = match after.chars().next() {
            Some(quote @ ('"' | '\'')) => {
                let inner = &after[1..];
                let end =
                    inner.find(quote).ok_or_else(|| EnvironmentError::OpenQuote { name: name.to_owned() })?;
                (inner[..end].to_owned(), &inner[end + 1..])
            }
            _ => {
                let end = after.find([',', '\n']).unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        let name = name.to_owned();
        let next = after.trim_start();
        if !next.is_empty() && !next.starts_with(',') && !after.starts_with(['\n', '\r']) {
            return Err(EnvironmentError::ExtraText { name });
        }
        pairs.push((name, value));
        rest = next.trim_start_matches([',', ' ', '\t', '\n', '\r']);
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_is_read_with_its_quotes() {
        let read = |text: &str| pairs(text).unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            read(r#"A="x,y",B='it "is"', C=plain ,D="",E=1"#),
            [pair("A", "x,y"), pair("B", "it \"is\""), pair("C", "plain"), pair("D", ""), pair("E", "1")]
        );
        assert_eq!(read("A=1,\nB=2\nC=3,"), [pair("A", "1"), pair("B", "2"), pair("C", "3")]);
        assert_eq!(read(""), []);
        for bad in ["A", "A=\"x", "=x", "A=\"x\"y"] {
            assert!(pairs(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_are_padded_as_python_pads() {
        assert_eq!(expansion("(process_num)02d rest"), Some(("process_num", "02d", " rest")));
        assert_eq!(expansion("(here)s/x"), Some(("here", "s", "/x")));
        assert_eq!(expansion("(x)999999999d"), None);
        assert_eq!(expansion("d"), None);
        assert_eq!(
            (padded(3, "02d"), padded(3, "d"), padded(3, "3d")),
            ("03".into(), "3".into(), "  3".into())
        );
    }
}
