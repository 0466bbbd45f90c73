//! Import of other supervisors' files: supervisord ini, systemd units and timers, pm2 processes, crontabs, inventories of
//! Ansible, and CSV lists of hosts.
//!
//! Guarantees: output is deterministic. Every setting becomes part of a manifest or of a [`Note`]. An unreadable setting is
//! a located problem, and then no manifest is written. The import does not inspect this machine: a value that depends on
//! the supervisor's environment is noted, not guessed.

pub mod ansible;
mod calendar;
pub mod convert;
mod crontab;
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

pub use self::hosts::{HostColumn, is_header as is_hosts_header};

use self::draft::Draft;
use crate::manifest::document::Document;
use crate::manifest::find::{self, STDIN};
use crate::manifest::limits::Limits;
use crate::manifest::problem::{Code, Problem, Severity, Span, SpanProblem};
use crate::manifest::text::{self, SourceText};
use crate::model::{HostKey, Name};

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Supervisord,
    Systemd,
    Pm2,
    Csv,
    /// An inventory of Ansible.
    Ansible,
    /// A crontab of one user.
    Crontab,
    /// A crontab with a column for the user, such as /etc/crontab.
    SystemCrontab,
}

impl Kind {
    pub const ALL: [Kind; 7] = [
        Kind::Supervisord,
        Kind::Systemd,
        Kind::Pm2,
        Kind::Csv,
        Kind::Ansible,
        Kind::Crontab,
        Kind::SystemCrontab,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Kind::Supervisord => "supervisord",
            Kind::Systemd => "systemd",
            Kind::Pm2 => "pm2",
            Kind::Csv => "csv",
            Kind::Ansible => "ansible",
            Kind::Crontab => "crontab",
            Kind::SystemCrontab => "system-crontab",
        }
    }
}

/// Directories of daemons, which write their own pid and log files.
pub const RUN_DIR: &str = "/run/abide";
pub const LOG_DIR: &str = "/var/log/abide";

/// Options of an import that no file contains.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// `None`: detected from each file's name and content.
    pub from: Option<Kind>,
    pub namespace: Name,
    pub hosts: Vec<HostKey>,
    /// Directory for generated pid paths. `None`: the agent's own folder, and [`RUN_DIR`] for daemons.
    pub run_dir: Option<String>,
    /// Directory for generated log paths. `None`: the agent's own folder, and [`LOG_DIR`] for daemons.
    pub log_dir: Option<String>,
}

/// A file's text and directory.
#[derive(Clone, Debug)]
pub struct ImportFile {
    pub name: Arc<str>,
    pub text: String,
    /// Absolute directory; `None` for standard input.
    pub here: Option<String>,
}

/// A setting without an exact equivalent in a manifest.
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
    /// Directories of generated pid and log paths, with the non-root users that write there.
    pub folders: BTreeMap<String, BTreeSet<String>>,
}

/// Reads the files (`-`: standard input). A byte order mark is removed: other supervisors accept it.
pub fn read(paths: &[PathBuf], limits: &Limits) -> Result<Vec<ImportFile>, Vec<Problem>> {
    let (folders, files): (Vec<&PathBuf>, Vec<&PathBuf>) = paths.iter().partition(|path| path.is_dir());
    let files: Vec<PathBuf> = files.into_iter().cloned().collect();
    let found = find::find(&files, limits);
    let mut problems = found.problems;
    problems.extend(folders.into_iter().map(|folder| {
        let hint = Some("pass the files in the directory".to_owned());
        let message = "the path is a directory; import takes files".to_owned();
        Problem::of_file(folder.to_string_lossy().into(), Code::Unreadable, message, hint)
    }));
    let mut texts = Vec::new();
    for file in &found.files {
        let text = find::bytes(file, limits).and_then(|bytes| {
            let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").map(<[u8]>::to_vec).unwrap_or(bytes);
            text::decode(bytes)
                .map_err(|(fault, text)| SourceText::new(file.name.clone(), text, false, 0).problem(fault))
        });
        match text {
            Ok(text) => {
                let here = (&*file.name != STDIN).then(|| file.scope_dir.to_string_lossy().into_owned());
                texts.push(ImportFile { name: file.name.clone(), text, here });
            }
            Err(problem) => problems.push(problem),
        }
    }
    problems.sort();
    if problems.is_empty() { Ok(texts) } else { Err(problems) }
}

/// Converts the files to manifests, or returns all problems.
pub fn import(
    files: &[ImportFile],
    terms: &ImportOptions,
    limits: &Limits,
) -> Result<ImportResult, Vec<Problem>> {
    let mut reader =
        ImportContext { terms, limits, notes: Vec::new(), folders: BTreeMap::new(), problems: Vec::new() };
    let (mut drafts, mut timers, mut listed, mut groups) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for input in files {
        let kind = match terms.from.or_else(|| kind_of(&input.name, &input.text)) {
            Some(kind) => kind,
            None => {
                reader.problems.push(unknown_format(input));
                continue;
            }
        };
        let json = kind == Kind::Pm2 && text::is_json(&input.text);
        let source = SourceText::new(input.name.clone(), input.text.clone(), json, limits.documents);
        let mut file = FileReader { source: &source, here: input.here.as_deref(), reader: &mut reader };
        if let Some(at) = input.text.find(words::MARKS) {
            let (line, _) = text::position(&input.text, at);
            file.reject(line, "the file contains a private-use character", "remove it");
            continue;
        }
        if input.text.trim().is_empty() {
            file.reject(
                1,
                "the file is empty",
                "pass a file of supervisord, systemd, pm2, cron or Ansible, or a CSV of hosts",
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
            Kind::Ansible => groups.extend(ansible::read(&mut file)),
            Kind::Crontab => drafts.extend(crontab::read(&mut file, false)),
            Kind::SystemCrontab => drafts.extend(crontab::read(&mut file, true)),
        }
    }
    systemd::schedule(&mut drafts, timers, &mut reader);
    let mut documents = hosts::documents(listed, &mut reader);
    documents.append(&mut groups);
    documents.extend(draft::documents(drafts, &mut reader));
    let ImportContext { mut notes, folders, mut problems, .. } = reader;
    if documents.is_empty() && problems.is_empty() {
        let file = files.first().map_or_else(|| STDIN.into(), |file| file.name.clone());
        let message = "nothing to import".to_owned();
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

/// State shared by all files of an import.
pub(super) struct ImportContext<'a> {
    terms: &'a ImportOptions,
    limits: &'a Limits,
    notes: Vec<ImportNote>,
    folders: BTreeMap<String, BTreeSet<String>>,
    problems: Vec<Problem>,
}

impl ImportContext<'_> {
    fn note(&mut self, file: &Arc<str>, line: u32, setting: &str, message: impl Into<String>) {
        let setting = crate::manifest::node::shorten(setting);
        self.notes.push(ImportNote { file: file.clone(), line, setting, message: message.into() });
    }
}

/// Reader of one file.
pub(super) struct FileReader<'r, 'a> {
    source: &'r SourceText,
    here: Option<&'r str>,
    reader: &'r mut ImportContext<'a>,
}

impl FileReader<'_, '_> {
    /// Notes a setting without an exact equivalent.
    fn note(&mut self, line: u32, setting: &str, message: impl Into<String>) {
        self.reader.note(&self.source.name, line, setting, message);
    }

    /// Reports an error; no manifest is written.
    fn reject(&mut self, line: u32, message: impl Into<String>, hint: &str) {
        self.refuse(line, message.into(), hint, false);
    }

    /// Like [`FileReader::reject`], for a line that may contain a secret and is not shown.
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

    /// File name without directories; `None` for standard input.
    fn base(&self) -> Option<&str> {
        let name = &*self.source.name;
        if name == STDIN { None } else { FilePath::new(name).file_name().and_then(|name| name.to_str()) }
    }
}

fn unknown_format(input: &ImportFile) -> Problem {
    let (message, hint) = match input.name.rsplit('.').next() {
        Some("js" | "cjs" | "mjs" | "ts") => (
            "the file is a program that only pm2 can evaluate",
            "start it with pm2, then run `pm2 jlist | abide import -`",
        ),
        _ => {
            ("unknown file format", "pass --from supervisord|systemd|pm2|csv|ansible|crontab|system-crontab")
        }
    };
    Problem::of_file(input.name.clone(), Code::UnknownKind, message.to_owned(), Some(hint.to_owned()))
}

/// Detects the format by the file name, or else by the content.
fn kind_of(name: &str, text: &str) -> Option<Kind> {
    let extension = name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase()).unwrap_or_default();
    match extension.as_str() {
        "service" | "timer" => return Some(Kind::Systemd),
        "csv" | "tsv" => return Some(Kind::Csv),
        "json" => return Some(Kind::Pm2),
        "js" | "cjs" | "mjs" | "ts" => return None,
        _ => {}
    }
    if crontab::has_user_column(name) {
        return Some(Kind::SystemCrontab);
    }
    let heads = text.lines().map(str::trim).filter(|line| line.starts_with('[') && line.ends_with(']'));
    for head in heads {
        match head {
            "[Service]" | "[Unit]" | "[Timer]" => return Some(Kind::Systemd),
            _ if supervisord::SECTIONS.iter().any(|section| head.starts_with(&format!("[{section}"))) => {
                return Some(Kind::Supervisord);
            }
            _ if head.ends_with(":children]") || head.ends_with(":vars]") => return Some(Kind::Ansible),
            _ => {}
        }
    }
    let is_content = |line: &&str| !line.is_empty() && !line.starts_with('#') && *line != "---";
    let first = text.lines().map(str::trim).find(is_content)?;
    match first {
        // A section `[web]` of an inventory begins like a list in JSON.
        _ if first == "all:" || text.contains("ansible_host=") => Some(Kind::Ansible),
        _ if first.starts_with(['{', '[']) || first.starts_with("apps:") => Some(Kind::Pm2),
        _ if hosts::is_header(first) => Some(Kind::Csv),
        _ if crontab::is_crontab(text) => Some(Kind::Crontab),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_detected_by_name_and_by_content() {
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
            ("hosts", "[web]\na ansible_host=10.0.0.1\n", Some(Kind::Ansible)),
            ("hosts", "[web]\n10.0.0.1\n[eu:children]\nweb\n", Some(Kind::Ansible)),
            ("hosts.yml", "---\nall:\n  hosts: {}\n", Some(Kind::Ansible)),
            ("<stdin>", "# m h\nMAILTO=x\n*/5 * * * * /bin/true\n", Some(Kind::Crontab)),
            ("/etc/cron.d/php", "", Some(Kind::SystemCrontab)),
        ] {
            assert_eq!(kind_of(name, text), kind, "{name}: {text}");
        }
    }
}
