//! supervisord import: each `[program:x]` becomes a process in foreground mode.

mod expand;
mod output_and_exit;

use std::collections::BTreeMap;

use self::expand::{ProcessNumber, SupervisordProgram, pairs};
use super::FileReader;
use super::draft::{Draft, NOT_KILLED, retries, seconds, signal};
use super::ini::{self, IniEntry, IniSection};
use super::words::{self, QuoteStyle};
use crate::manifest::document::Text;
use crate::model::{State, octal_mask};

/// Section prefixes that identify a supervisord file.
pub const SECTIONS: [&str; 9] = [
    "program:",
    "supervisord]",
    "group:",
    "eventlistener:",
    "fcgi-program:",
    "unix_http_server]",
    "inet_http_server]",
    "supervisorctl]",
    "include]",
];

/// Maximum number of processes that are written out separately.
const MAX_SEPARATE_PROCESSES: u32 = 1_000;

pub fn read(file: &mut FileReader<'_, '_>) -> Vec<Draft> {
    let sections = ini::supervisord(file);
    let whole = SharedSettings::of(&sections, file);
    let mut drafts = Vec::new();
    for section in &sections {
        match section.name.split_once(':') {
            Some(("program", name)) => drafts.extend(program(name.trim(), section, &whole, file)),
            Some((kind @ ("eventlistener" | "fcgi-program"), _)) => {
                let why = if kind == "eventlistener" {
                    "an event listener depends on supervisord; ignored"
                } else {
                    "a FastCGI program needs a socket of supervisord; ignored"
                };
                file.note(section.line, &format!("[{}]", section.name), why);
            }
            Some(("group", _)) => {}
            _ if section.name == "supervisord" => {}
            _ if section.name == "include" => {
                let files = section.last("files");
                let what = files.map_or("other files".to_owned(), |entry| entry.value.replace('\n', " "));
                file.note(section.line, "[include]", format!("{what} is not read: pass the files to import"));
            }
            _ => file.note(
                section.line,
                &format!("[{}]", section.name),
                "configures supervisord itself; ignored",
            ),
        }
    }
    if drafts.is_empty() && file.reader.problems.is_empty() {
        file.reject(1, "the file has no programs", "add [program:NAME] with command=…");
    }
    drafts
}

/// Settings that apply to all programs.
#[derive(Default)]
struct SharedSettings {
    /// Program → group.
    groups: BTreeMap<String, String>,
    directory: Option<IniEntry>,
    user: Option<IniEntry>,
    environment: Option<IniEntry>,
}

impl SharedSettings {
    fn of(sections: &[IniSection], file: &mut FileReader<'_, '_>) -> SharedSettings {
        let mut whole = SharedSettings::default();
        for section in sections {
            if let Some(group) = section.name.strip_prefix("group:") {
                whole.group(group.trim(), section, file);
            }
            if section.name != "supervisord" {
                continue;
            }
            let mut own = Vec::new();
            for entry in &section.entries {
                match entry.key.as_str() {
                    "directory" => whole.directory = Some(entry.clone()),
                    "user" => whole.user = Some(entry.clone()),
                    "environment" => whole.environment = Some(entry.clone()),
                    key => own.push(key),
                }
            }
            if !own.is_empty() {
                let message = format!("{} are settings of supervisord itself; ignored", own.join(", "));
                file.note(section.line, "[supervisord]", message);
            }
        }
        whole
    }

    fn group(&mut self, group: &str, section: &IniSection, file: &mut FileReader<'_, '_>) {
        for entry in &section.entries {
            match entry.key.as_str() {
                "programs" => {
                    let programs = entry.value.split([',', '\n']).map(str::trim);
                    let named = programs.filter(|program| !program.is_empty());
                    self.groups.extend(named.map(|program| (program.to_owned(), group.to_owned())));
                }
                key => file.note(entry.line, key, "manifests have no start order except depends_on"),
            }
        }
    }
}

fn program(
    name: &str,
    section: &IniSection,
    whole: &SharedSettings,
    file: &mut FileReader<'_, '_>,
) -> Vec<Draft> {
    if section.last("command").is_none_or(|entry| entry.value.is_empty()) {
        file.reject(section.line, format!("program {name:?} has no command"), "command=…");
        return Vec::new();
    }
    let mut count = |key: &str, default: u32| match section.last(key).map(|entry| entry.value.parse::<u32>())
    {
        None => default,
        Some(Ok(n)) => n,
        Some(Err(_)) => {
            let line = section.last(key).map_or(section.line, |entry| entry.line);
            file.reject(line, format!("{key} is not a number"), "use a whole number from 0");
            default
        }
    };
    let (numprocs, first) = (count("numprocs", 1).max(1), count("numprocs_start", 0));
    let group = whole.groups.get(name).map_or(name, String::as_str);
    let known = |number| SupervisordProgram { name, process_name: None, group, number, numprocs };
    if numprocs == 1 {
        return draft(known(ProcessNumber::Fixed(first)), section, whole, file).into_iter().collect();
    }
    let matters = |entry: &IniEntry| entry.key != "process_name" && entry.value.contains("%(process_num)");
    let plain = |entry: &IniEntry| {
        let uses = entry.value.matches("%(process_num)").count();
        let simple = ["%(process_num)d", "%(process_num)s", "%(process_num)1d"];
        uses == simple.iter().map(|form| entry.value.matches(form).count()).sum::<usize>()
    };
    let uses: Vec<&IniEntry> = section.entries.iter().filter(|entry| matters(entry)).collect();
    if uses.is_empty() || (first == 1 && uses.iter().all(|entry| plain(entry))) {
        let line = section.last("process_name").map_or(section.line, |entry| entry.line);
        let message = format!("the {numprocs} processes are named {name}_1 to {name}_{numprocs}");
        file.note(line, "process_name", message);
        let draft = draft(known(ProcessNumber::Variable), section, whole, file);
        return draft.map(|draft| Draft { instances: Some(numprocs), ..draft }).into_iter().collect();
    }
    // `${instance}` counts from 1 without leading zeros; any other numbering needs separate processes.
    if numprocs > MAX_SEPARATE_PROCESSES {
        let message = format!(
            "program {name:?} has {numprocs} processes with a numbering that manifests do not support"
        );
        file.reject(section.line, message, "count from 1 (numprocs_start=1), without leading zeros");
        return Vec::new();
    }
    let numbers = (0..numprocs).map(|nth| first.saturating_add(nth));
    numbers.filter_map(|number| draft(known(ProcessNumber::Fixed(number)), section, whole, file)).collect()
}

fn draft(
    mut it: SupervisordProgram<'_>,
    section: &IniSection,
    whole: &SharedSettings,
    file: &mut FileReader<'_, '_>,
) -> Option<Draft> {
    let own = match (it.number, section.last("process_name")) {
        (ProcessNumber::Variable, _) => it.name.to_owned(),
        (ProcessNumber::Fixed(_), Some(entry)) => it.expand(entry, file)?,
        (ProcessNumber::Fixed(n), None) if it.numprocs > 1 => format!("{}_{n}", it.name),
        (ProcessNumber::Fixed(_), None) => it.name.to_owned(),
    };
    it.process_name = Some(own.clone());
    let mut draft = file.draft(section.line, own);
    if it.group != it.name {
        draft.labels.insert("group".to_owned(), it.group.to_owned());
    }
    for entry in [&whole.directory, &whole.user, &whole.environment].into_iter().flatten() {
        it.setting(entry, section, &mut draft, file);
    }
    let last_ones = section.entries.iter().filter(|entry| section.last(&entry.key) == Some(entry));
    for entry in last_ones {
        it.setting(entry, section, &mut draft, file);
    }
    output_and_exit::output(section, &it, &mut draft, file);
    output_and_exit::restarts(section, &mut draft, file);
    Some(draft)
}

impl SupervisordProgram<'_> {
    fn setting(
        &self,
        entry: &IniEntry,
        section: &IniSection,
        draft: &mut Draft,
        file: &mut FileReader<'_, '_>,
    ) {
        let IniEntry { key, line, .. } = entry;
        let line = *line;
        match key.as_str() {
            "command" => self.command(entry, section, draft, file),
            "directory" => {
                if let Some(path) = self.path(entry, file) {
                    draft.spec.identity.setup_path = Some(Text(path));
                }
            }
            "user" => {
                if let Some(user) = self.template(entry, file).filter(|user| !user.contains("${")) {
                    draft.spec.identity.user = Some(Text(user));
                }
            }
            "environment" => self.environment(entry, draft, file),
            "autostart" if parse_bool(&entry.value) == Some(false) => draft.state = State::Stopped,
            "startsecs" => draft.spec.monitor.start_check_secs = number(entry, seconds, file),
            "startretries" => draft.spec.monitor.start_retries = number(entry, retries, file),
            "stopwaitsecs" => draft.spec.monitor.stop_check_secs = number(entry, seconds, file),
            "stopsignal" => match signal(&entry.value) {
                Some(signal) if signal == "TERM" || signal == "15" => {}
                Some(signal) => {
                    draft.stop_by(&signal);
                    file.note(line, key, NOT_KILLED);
                }
                None => file.reject(line, format!("{key}: unknown signal"), "such as TERM, INT, QUIT"),
            },
            "exitcodes" => {
                file.note(
                    line,
                    key,
                    "not imported: the agent relaunches the process after any exit code; set restart manually",
                );
            }
            "priority" => file.note(line, key, "manifests have no start order except depends_on"),
            // Converted below, or without effect on a single process.
            "autostart" | "autorestart" | "numprocs" | "numprocs_start" | "process_name" => {}
            key if key.starts_with("stdout_") || key.starts_with("stderr_") || key == "redirect_stderr" => {}
            "stopasgroup" | "killasgroup" if parse_bool(&entry.value) == Some(false) => {}
            "killasgroup" => {
                file.note(line, key, "with cgroups, KILL applies to the whole process tree");
            }
            "umask" if matches!(entry.value.as_str(), "022" | "0022" | "22") => {}
            "umask" if let Some(mask) = octal_mask(&entry.value) => {
                draft.spec.sandbox.umask = Some(Text(format!("{mask:04o}")));
            }
            _ => file.note(line, key, "no equivalent in manifests"),
        }
    }

    fn command(
        &self,
        entry: &IniEntry,
        section: &IniSection,
        draft: &mut Draft,
        file: &mut FileReader<'_, '_>,
    ) {
        let Some(text) = self.expand(entry, file) else { return };
        match words::split(&text, QuoteStyle::Shlex) {
            Ok(words) if !words.is_empty() => {
                let relative = words[0].contains('/') && !words[0].starts_with('/');
                if relative && section.last("directory").is_none() && draft.spec.identity.setup_path.is_none()
                {
                    let message = "relative to the directory where supervisord was started, which is unknown";
                    file.note(entry.line, &entry.key, message);
                }
                draft.spec.identity.proc_name = Some(Text(words::program(&words)));
                draft.foreground(format!("exec {}", words::command(&words)));
            }
            Ok(_) => file.reject(entry.line, "command is empty", "command=…"),
            Err(why) => file.reject(entry.line, format!("command cannot be read: {why}"), "close the quote"),
        }
    }

    fn environment(&self, entry: &IniEntry, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let pairs = match pairs(&entry.value) {
            Ok(pairs) => pairs,
            Err(why) => {
                return file.reject_private(
                    entry.line,
                    format!("environment cannot be read: {why}"),
                    r#"A="1",B="2""#,
                );
            }
        };
        for (name, value) in pairs {
            let one = IniEntry { key: format!("environment {name}"), value, line: entry.line };
            if let Some(value) = self.template(&one, file) {
                draft.spec.env.insert(name, value);
            }
        }
    }
}

fn parse_bool(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some(true),
        "false" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

fn number(entry: &IniEntry, fits: fn(i64) -> Option<i64>, file: &mut FileReader<'_, '_>) -> Option<i64> {
    let value = entry.value.parse::<i64>().ok();
    if value.is_none() {
        file.reject(entry.line, format!("{} is not a whole number", entry.key), "such as 10");
    }
    let fitting = value.and_then(fits);
    if value.is_some() && fitting.is_none() {
        file.note(entry.line, &entry.key, "out of the range of manifests; ignored");
    }
    fitting
}
