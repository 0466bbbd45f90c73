//! Other supervisors' files → manifests: supervisord's ini, systemd's units and timers, pm2's processes, and lists of
//! hosts as CSV.
//!
//! Promises: the same files give the same bytes; every setting of a file becomes part of a manifest or is told in a
//! [`Note`]; what cannot be read at all is a problem with its place, and then there is no manifest at all. Nothing is
//! looked up on this machine: what a file leaves to its supervisor's surroundings is told, not guessed.

mod calendar;
mod draft;
mod hosts;
mod ini;
mod pm2;
mod supervisord;
mod systemd;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use self::draft::Draft;
use super::document::Document;
use super::find::{self, STDIN};
use super::limits::Limits;
use super::problem::{Code, Problem, Severity, Span, SpanProblem};
use super::text::{self, SourceText};
use crate::model::{HostKey, Name};

/// Whose file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Supervisord,
    Systemd,
    Pm2,
    Csv,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Supervisord, Kind::Systemd, Kind::Pm2, Kind::Csv];

    pub fn word(self) -> &'static str {
        match self {
            Kind::Supervisord => "supervisord",
            Kind::Systemd => "systemd",
            Kind::Pm2 => "pm2",
            Kind::Csv => "csv",
        }
    }
}

/// What no file says.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// `None`: told by each file's name and content.
    pub from: Option<Kind>,
    pub namespace: Name,
    pub hosts: Vec<HostKey>,
    /// Where pid files go that no file names.
    pub run_dir: String,
    /// Where output goes for which no file names a place.
    pub log_dir: String,
}

/// A file's text, and where it stands.
#[derive(Clone, Debug)]
pub struct ImportFile {
    pub name: Arc<str>,
    pub text: String,
    /// Its directory, from the root; standard input has none.
    pub here: Option<String>,
}

/// A setting that has no counterpart, or means something else in a manifest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImportNote {
    pub file: Arc<str>,
    pub line: u32,
    pub setting: String,
    pub message: String,
}

#[derive(Debug, Default)]
pub struct ImportResult {
    pub documents: Vec<Document>,
    /// Sorted by file and line.
    pub notes: Vec<ImportNote>,
    /// Folders of generated pid and log paths, with the users other than root that write there.
    pub folders: BTreeMap<String, BTreeSet<String>>,
}

/// Reads the files (`-`: standard input). A byte order mark is no part of a text here: it was not written for us.
pub fn read(paths: &[PathBuf], limits: &Limits) -> Result<Vec<ImportFile>, Vec<Problem>> {
    let (folders, files): (Vec<&PathBuf>, Vec<&PathBuf>) = paths.iter().partition(|path| path.is_dir());
    let files: Vec<PathBuf> = files.into_iter().cloned().collect();
    let found = find::find(&files, limits);
    let mut problems = found.problems;
    problems.extend(folders.into_iter().map(|folder| {
        let hint = Some("name the files in it".to_owned());
        let message = "it is a directory, and files of many kinds stand in one".to_owned();
        Problem::of_file(folder.to_string_lossy().into(), Code::Unreadable, message, hint)
    }));
    let mut given = Vec::new();
    for file in &found.files {
        let text = find::bytes(file, limits).and_then(|bytes| {
            let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").map(<[u8]>::to_vec).unwrap_or(bytes);
            text::decode(bytes)
                .map_err(|(fault, text)| SourceText::new(file.name.clone(), text, false, 0).problem(fault))
        });
        match text {
            Ok(text) => {
                let here = (&*file.name != STDIN).then(|| file.scope_dir.to_string_lossy().into_owned());
                given.push(ImportFile { name: file.name.clone(), text, here });
            }
            Err(problem) => problems.push(problem),
        }
    }
    problems.sort();
    if problems.is_empty() { Ok(given) } else { Err(problems) }
}

/// Everything that the files say, as manifests; or everything that is wrong with them.
pub fn import(
    files: &[ImportFile],
    terms: &ImportOptions,
    limits: &Limits,
) -> Result<ImportResult, Vec<Problem>> {
    let mut reader =
        ImportContext { terms, limits, notes: Vec::new(), folders: BTreeMap::new(), problems: Vec::new() };
    let (mut drafts, mut timers, mut listed) = (Vec::new(), Vec::new(), Vec::new());
    for given in files {
        let kind = match terms.from.or_else(|| kind_of(&given.name, &given.text)) {
            Some(kind) => kind,
            None => {
                reader.problems.push(unknown_format(given));
                continue;
            }
        };
        let json = kind == Kind::Pm2 && text::is_json(&given.text);
        let source = SourceText::new(given.name.clone(), given.text.clone(), json, limits.documents);
        let mut file = FileReader { source: &source, here: given.here.as_deref(), reader: &mut reader };
        if let Some(at) = given.text.find(words::MARKS) {
            let (line, _) = text::position(&given.text, at);
            file.reject(line, "the file contains a character for private use", "remove it");
            continue;
        }
        if given.text.trim().is_empty() {
            file.reject(
                1,
                "there is nothing in it",
                "a file of supervisord, systemd or pm2, or a CSV of hosts",
            );
            continue;
        }
        match kind {
            Kind::Supervisord => drafts.extend(supervisord::read(&mut file)),
            Kind::Systemd => match systemd::read(&mut file) {
                Some(systemd::UnitFile::Service(draft)) => drafts.push(*draft),
                Some(systemd::UnitFile::Timer(timer)) => timers.push(timer),
                None => {}
            },
            Kind::Pm2 => drafts.extend(pm2::read(&mut file)),
            Kind::Csv => listed.extend(hosts::read(&mut file)),
        }
    }
    systemd::schedule(&mut drafts, timers, &mut reader);
    let mut documents = hosts::documents(listed, &mut reader);
    documents.extend(draft::documents(drafts, &mut reader));
    let ImportContext { mut notes, folders, mut problems, .. } = reader;
    if documents.is_empty() && problems.is_empty() {
        let file = files.first().map_or_else(|| STDIN.into(), |given| given.name.clone());
        let message = "there is nothing to import".to_owned();
        problems.push(Problem::of_file(file, Code::MissingField, message, None));
    }
    problems.sort();
    if problems.iter().any(|problem| problem.severity == Severity::Error) {
        return Err(problems);
    }
    notes.sort();
    notes.dedup();
    Ok(ImportResult { documents, notes, folders })
}

/// What all files have in common while they are read.
pub(super) struct ImportContext<'a> {
    terms: &'a ImportOptions,
    limits: &'a Limits,
    notes: Vec<ImportNote>,
    folders: BTreeMap<String, BTreeSet<String>>,
    problems: Vec<Problem>,
}

impl ImportContext<'_> {
    fn note(&mut self, file: &Arc<str>, line: u32, setting: &str, message: impl Into<String>) {
        let setting = super::node::shorten(setting);
        self.notes.push(ImportNote { file: file.clone(), line, setting, message: message.into() });
    }
}

/// One file while it is read.
pub(super) struct FileReader<'r, 'a> {
    source: &'r SourceText,
    here: Option<&'r str>,
    reader: &'r mut ImportContext<'a>,
}

impl FileReader<'_, '_> {
    /// The manifest says less than this setting, or something else.
    fn note(&mut self, line: u32, setting: &str, message: impl Into<String>) {
        self.reader.note(&self.source.name, line, setting, message);
    }

    /// There is no manifest for this.
    fn reject(&mut self, line: u32, message: impl Into<String>, hint: &str) {
        self.refuse(line, message.into(), hint, false);
    }

    /// The same for a line that may hold a secret, and is not shown.
    fn reject_private(&mut self, line: u32, message: impl Into<String>, hint: &str) {
        self.refuse(line, message.into(), hint, true);
    }

    fn refuse(&mut self, line: u32, message: String, hint: &str, private: bool) {
        let fault = SpanProblem::new(Code::Syntax, Span::at(line, 1), message, Some(hint.to_owned()));
        self.reader.problems.push(self.source.problem(SpanProblem { private, ..fault }));
    }

    fn draft(&self, line: u32, name: impl Into<String>) -> Draft {
        Draft::new(self.source.name.clone(), line, name.into())
    }

    /// The file's name without its folders; `None`: it has none.
    fn base(&self) -> Option<&str> {
        let name = &*self.source.name;
        if name == STDIN { None } else { FilePath::new(name).file_name().and_then(|name| name.to_str()) }
    }
}

fn unknown_format(given: &ImportFile) -> Problem {
    let (message, hint) = match given.name.rsplit('.').next() {
        Some("js" | "cjs" | "mjs" | "ts") => (
            "it is a program, which only pm2 can run",
            "give its result: pm2 start it once, then `pm2 jlist | abide import -`",
        ),
        _ => ("it cannot be told whose file it is", "say so: --from supervisord|systemd|pm2|csv"),
    };
    Problem::of_file(given.name.clone(), Code::UnknownKind, message.to_owned(), Some(hint.to_owned()))
}

/// By the name, where it decides; else by what stands in it.
fn kind_of(name: &str, text: &str) -> Option<Kind> {
    let extension = name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase()).unwrap_or_default();
    match extension.as_str() {
        "service" | "timer" => return Some(Kind::Systemd),
        "csv" | "tsv" => return Some(Kind::Csv),
        "json" => return Some(Kind::Pm2),
        "js" | "cjs" | "mjs" | "ts" => return None,
        _ => {}
    }
    let heads = text.lines().map(str::trim).filter(|line| line.starts_with('[') && line.ends_with(']'));
    for head in heads {
        match head {
            "[Service]" | "[Unit]" | "[Timer]" => return Some(Kind::Systemd),
            _ if supervisord::SECTIONS.iter().any(|section| head.starts_with(&format!("[{section}"))) => {
                return Some(Kind::Supervisord);
            }
            _ => {}
        }
    }
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'))?;
    match first {
        _ if first.starts_with(['{', '[']) || first.starts_with("apps:") => Some(Kind::Pm2),
        _ if hosts::is_header(first) => Some(Kind::Csv),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_name_and_by_what_stands_in_it() {
        for (name, text, kind) in [
            ("a.service", "", Some(Kind::Systemd)),
            ("a.timer", "", Some(Kind::Systemd)),
            ("<stdin>", "# x\n[Unit]\nDescription=x\n[Service]\n", Some(Kind::Systemd)),
            ("a.conf", "; x\n[program:web]\ncommand=x\n", Some(Kind::Supervisord)),
            ("supervisord.conf", "[supervisord]\nnodaemon=true\n", Some(Kind::Supervisord)),
            ("ecosystem.json", "{}", Some(Kind::Pm2)),
            ("<stdin>", "[{\"name\":\"x\"}]", Some(Kind::Pm2)),
            ("<stdin>", "[\n  {\"name\": 1}\n]", Some(Kind::Pm2)),
            ("processes.yml", "apps:\n  - name: x\n", Some(Kind::Pm2)),
            ("<stdin>", "ip,cloud,rack\n", Some(Kind::Csv)),
            ("hosts.csv", "anything", Some(Kind::Csv)),
            ("ecosystem.config.js", "module.exports = {apps: []}", None),
            ("notes.txt", "buy milk, ip telephone\n", None),
        ] {
            assert_eq!(kind_of(name, text), kind, "{name}: {text}");
        }
    }
}
