//! supervisord's ini: each `[program:x]` is a process in foreground mode.

use std::collections::BTreeMap;

use super::File;
use super::draft::{Draft, Log, NOT_KILLED, retries, seconds, signal};
use super::ini::{self, Entry, Section};
use super::words::{self, END, INSTANCE, Style, VARIABLE};
use crate::manifest::document::Text;
use crate::model::State;

/// How its sections begin, by which a file is known.
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

/// Many more than anybody numbers by hand; as processes of their own they would be a file nobody reads.
const MOST_APART: u32 = 1_000;

pub fn read(file: &mut File<'_, '_>) -> Vec<Draft> {
    let sections = ini::supervisord(file);
    let whole = Whole::of(&sections, file);
    let mut drafts = Vec::new();
    for section in &sections {
        match section.name.split_once(':') {
            Some(("program", name)) => drafts.extend(program(name.trim(), section, &whole, file)),
            Some((kind @ ("eventlistener" | "fcgi-program"), _)) => {
                let why = if kind == "eventlistener" {
                    "it talks with supervisord itself, and is left out"
                } else {
                    "it needs the socket that supervisord opens for it, and is left out"
                };
                file.note(section.line, &format!("[{}]", section.name), why);
            }
            Some(("group", _)) => {}
            _ if section.name == "supervisord" => {}
            _ if section.name == "include" => {
                let files = section.last("files");
                let what = files.map_or("other files".to_owned(), |entry| entry.value.replace('\n', " "));
                file.note(
                    section.line,
                    "[include]",
                    format!("{what} is not read: name the files themselves"),
                );
            }
            _ => file.note(section.line, &format!("[{}]", section.name), "it is about supervisord itself"),
        }
    }
    if drafts.is_empty() && file.reader.problems.is_empty() {
        file.wrong(1, "no program is in it", "[program:NAME] with command=…");
    }
    drafts
}

/// What holds for every program.
#[derive(Default)]
struct Whole {
    /// Program → group.
    groups: BTreeMap<String, String>,
    directory: Option<Entry>,
    user: Option<Entry>,
    environment: Option<Entry>,
}

impl Whole {
    fn of(sections: &[Section], file: &mut File<'_, '_>) -> Whole {
        let mut whole = Whole::default();
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
                let message = format!("{} are about supervisord itself", own.join(", "));
                file.note(section.line, "[supervisord]", message);
            }
        }
        whole
    }

    fn group(&mut self, group: &str, section: &Section, file: &mut File<'_, '_>) {
        for entry in &section.entries {
            match entry.key.as_str() {
                "programs" => {
                    let programs = entry.value.split([',', '\n']).map(str::trim);
                    let named = programs.filter(|program| !program.is_empty());
                    self.groups.extend(named.map(|program| (program.to_owned(), group.to_owned())));
                }
                key => file.note(entry.line, key, "manifests have no order but depends_on"),
            }
        }
    }
}

/// What `%(process_num)d` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    /// `${instance}`.
    Variable,
    Is(u32),
}

/// One program, or one of its numbers.
struct Program<'a> {
    name: &'a str,
    /// As its group calls it; only known once its own name is expanded.
    process_name: Option<String>,
    group: &'a str,
    number: Number,
    numprocs: u32,
}

fn program(name: &str, section: &Section, whole: &Whole, file: &mut File<'_, '_>) -> Vec<Draft> {
    if section.last("command").is_none_or(|entry| entry.value.is_empty()) {
        file.wrong(section.line, format!("program {name:?} has no command"), "command=…");
        return Vec::new();
    }
    let mut count = |key: &str, default: u32| match section.last(key).map(|entry| entry.value.parse::<u32>())
    {
        None => default,
        Some(Ok(n)) => n,
        Some(Err(_)) => {
            let line = section.last(key).map_or(section.line, |entry| entry.line);
            file.wrong(line, format!("{key} is no number"), "a whole number from 0");
            default
        }
    };
    let (numprocs, first) = (count("numprocs", 1).max(1), count("numprocs_start", 0));
    let group = whole.groups.get(name).map_or(name, String::as_str);
    let known = |number| Program { name, process_name: None, group, number, numprocs };
    if numprocs == 1 {
        return draft(known(Number::Is(first)), section, whole, file).into_iter().collect();
    }
    let matters = |entry: &Entry| entry.key != "process_name" && entry.value.contains("%(process_num)");
    let plain = |entry: &Entry| {
        let uses = entry.value.matches("%(process_num)").count();
        let simple = ["%(process_num)d", "%(process_num)s", "%(process_num)1d"];
        uses == simple.iter().map(|form| entry.value.matches(form).count()).sum::<usize>()
    };
    let uses: Vec<&Entry> = section.entries.iter().filter(|entry| matters(entry)).collect();
    if uses.is_empty() || (first == 1 && uses.iter().all(|entry| plain(entry))) {
        let line = section.last("process_name").map_or(section.line, |entry| entry.line);
        let message = format!("the {numprocs} of them are called {name}_1 to {name}_{numprocs}");
        file.note(line, "process_name", message);
        let draft = draft(known(Number::Variable), section, whole, file);
        return draft.map(|draft| Draft { instances: Some(numprocs), ..draft }).into_iter().collect();
    }
    // `${instance}` counts from 1 and without zeros: each is a process of its own.
    if numprocs > MOST_APART {
        let message = format!("program {name:?} has {numprocs} numbers that a manifest cannot count");
        file.wrong(section.line, message, "count from 1 (numprocs_start=1), without zeros before the number");
        return Vec::new();
    }
    let numbers = (0..numprocs).map(|nth| first.saturating_add(nth));
    numbers.filter_map(|number| draft(known(Number::Is(number)), section, whole, file)).collect()
}

fn draft(mut it: Program<'_>, section: &Section, whole: &Whole, file: &mut File<'_, '_>) -> Option<Draft> {
    let own = match (it.number, section.last("process_name")) {
        (Number::Variable, _) => it.name.to_owned(),
        (Number::Is(_), Some(entry)) => it.expand(entry, file)?,
        (Number::Is(n), None) if it.numprocs > 1 => format!("{}_{n}", it.name),
        (Number::Is(_), None) => it.name.to_owned(),
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
    output(section, &it, &mut draft, file);
    restarts(section, &mut draft, file);
    Some(draft)
}

impl Program<'_> {
    fn setting(&self, entry: &Entry, section: &Section, draft: &mut Draft, file: &mut File<'_, '_>) {
        let Entry { key, line, .. } = entry;
        let line = *line;
        match key.as_str() {
            "command" => self.command(entry, section, draft, file),
            "directory" => {
                if let Some(path) = self.path(entry, file) {
                    draft.identity.setup_path = Some(Text(path));
                }
            }
            "user" => {
                if let Some(user) = self.template(entry, file).filter(|user| !user.contains("${")) {
                    draft.identity.user = Some(Text(user));
                }
            }
            "environment" => self.environment(entry, draft, file),
            "autostart" if is(&entry.value) == Some(false) => draft.state = State::Stopped,
            "startsecs" => draft.monitor.start_check_secs = number(entry, seconds, file),
            "startretries" => draft.monitor.start_retries = number(entry, retries, file),
            "stopwaitsecs" => draft.monitor.stop_check_secs = number(entry, seconds, file),
            "stopsignal" => match signal(&entry.value) {
                Some(signal) if signal == "TERM" || signal == "15" => {}
                Some(signal) => {
                    draft.stop_by(&signal);
                    file.note(line, key, NOT_KILLED);
                }
                None => {
                    file.wrong(line, format!("{key}: there is no such signal"), "such as TERM, INT, QUIT")
                }
            },
            "exitcodes" => {
                file.note(
                    line,
                    key,
                    "every exit that nobody asked for is answered by a new start, whatever its code",
                );
            }
            "priority" => file.note(line, key, "manifests have no order but depends_on"),
            // Together with others, below; or of no effect on one process.
            "autostart" | "autorestart" | "numprocs" | "numprocs_start" | "process_name" => {}
            key if key.starts_with("stdout_") || key.starts_with("stderr_") || key == "redirect_stderr" => {}
            "stopasgroup" | "killasgroup" if is(&entry.value) == Some(false) => {}
            "killasgroup" => {
                file.note(
                    line,
                    key,
                    "where the host has control groups, what is killed by force goes with its tree",
                );
            }
            "umask" if matches!(entry.value.as_str(), "022" | "0022" | "22") => {}
            _ if section.name == "supervisord" => {}
            _ => file.note(line, key, "manifests have nothing like it"),
        }
    }

    fn command(&self, entry: &Entry, section: &Section, draft: &mut Draft, file: &mut File<'_, '_>) {
        let Some(text) = self.expand(entry, file) else { return };
        match words::split(&text, Style::Shlex) {
            Ok(words) if !words.is_empty() => {
                let relative = words[0].contains('/') && !words[0].starts_with('/');
                if relative && section.last("directory").is_none() && draft.identity.setup_path.is_none() {
                    let message = "it begins where supervisord was started, which the file does not say";
                    file.note(entry.line, &entry.key, message);
                }
                draft.identity.proc_name = Some(Text(words::program(&words)));
                draft.foreground(format!("exec {}", words::command(&words)));
            }
            Ok(_) => file.wrong(entry.line, "command is empty", "command=…"),
            Err(why) => file.wrong(entry.line, format!("command cannot be read: {why}"), "close it"),
        }
    }

    fn environment(&self, entry: &Entry, draft: &mut Draft, file: &mut File<'_, '_>) {
        let pairs = match pairs(&entry.value) {
            Ok(pairs) => pairs,
            Err(why) => {
                return file.wrong(
                    entry.line,
                    format!("environment cannot be read: {why}"),
                    r#"A="1",B="2""#,
                );
            }
        };
        for (name, value) in pairs {
            let one = Entry { key: format!("environment {name}"), value, line: entry.line };
            if let Some(value) = self.template(&one, file) {
                draft.env.insert(name, value);
            }
        }
    }

    /// A path from the root. One from nowhere is told.
    fn path(&self, entry: &Entry, file: &mut File<'_, '_>) -> Option<String> {
        let path = self.template(entry, file)?;
        if path.starts_with('/') {
            return Some(path);
        }
        file.note(
            entry.line,
            &entry.key,
            "it begins where supervisord was started, which the file does not say",
        );
        None
    }

    /// A text that no shell sees.
    fn template(&self, entry: &Entry, file: &mut File<'_, '_>) -> Option<String> {
        let expanded = self.expand(entry, file)?;
        let text = words::template(&expanded);
        if text.is_none() {
            let message = "it is left out: %(ENV_…)s is known only where supervisord runs";
            file.note(entry.line, &entry.key, message);
        }
        text
    }

    /// `%(name)s` and the like. What only a running supervisord knows becomes a variable of the environment.
    fn expand(&self, entry: &Entry, file: &mut File<'_, '_>) -> Option<String> {
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
                file.wrong(
                    entry.line,
                    format!("{}: a % that is none of supervisord's", entry.key),
                    "write %%",
                );
                return None;
            };
            rest = after;
            match (name, name.strip_prefix("ENV_")) {
                ("process_num", _) => match self.number {
                    Number::Variable => out.push(INSTANCE),
                    Number::Is(n) => out.push_str(&padded(n, form)),
                },
                ("program_name", _) => out.push_str(self.name),
                ("group_name", _) => out.push_str(self.group),
                ("numprocs", _) => out.push_str(&padded(self.numprocs, form)),
                ("process_name", _) if self.number == Number::Variable => {
                    out.push_str(&format!("{}_{INSTANCE}", self.name));
                }
                ("process_name", _) => out.push_str(self.process_name.as_deref().unwrap_or(self.name)),
                ("here", _) if let Some(here) = file.here => out.push_str(here),
                (_, Some(variable)) if is_variable(variable) => {
                    let message = format!(
                        "{variable} is set where supervisord runs; add it to env, or write its value"
                    );
                    file.note(entry.line, &entry.key, message);
                    out.extend([VARIABLE].into_iter().chain(variable.chars()).chain([END]));
                }
                _ => {
                    let message =
                        format!("%({name}) is known only where supervisord runs; it stays as it is");
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

/// `(name)02d…` → name, form, what follows.
fn expansion(text: &str) -> Option<(&str, &str, &str)> {
    let (name, rest) = text.strip_prefix('(')?.split_once(')')?;
    let digits = rest.find(|c: char| !c.is_ascii_digit())?;
    let end = digits + rest[digits..].chars().next().filter(|c| matches!(c, 's' | 'd'))?.len_utf8();
    // Wider than any number, and than any screen: nobody means it.
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

fn is(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some(true),
        "false" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

fn number(entry: &Entry, fits: fn(i64) -> Option<i64>, file: &mut File<'_, '_>) -> Option<i64> {
    let value = entry.value.parse::<i64>().ok();
    if value.is_none() {
        file.wrong(entry.line, format!("{} is no whole number", entry.key), "such as 10");
    }
    let fitting = value.and_then(fits);
    if value.is_some() && fitting.is_none() {
        file.note(entry.line, &entry.key, "it is out of the range that a manifest has, and is left out");
    }
    fitting
}

/// `KEY="a,b",K2='x',K3=y`. Quotes keep everything as it is.
fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut pairs = Vec::new();
    let mut rest = text.trim_start_matches([',', ' ', '\t', '\n', '\r']);
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=').ok_or_else(|| "an entry has no `=`".to_owned())?;
        let name = name.trim();
        if name.is_empty() || name.contains(['"', '\'', ',', '\n', '\0']) {
            return Err("an entry has no name".to_owned());
        }
        let after = after.trim_start();
        let (value, after) = match after.chars().next() {
            Some(quote @ ('"' | '\'')) => {
                let inner = &after[1..];
                let end = inner.find(quote).ok_or_else(|| format!("the quote of {name} is not closed"))?;
                (inner[..end].to_owned(), &inner[end + 1..])
            }
            _ => {
                let end = after.find([',', '\n']).unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        pairs.push((name.to_owned(), value));
        let next = after.trim_start();
        if !next.is_empty() && !next.starts_with(',') && !after.starts_with(['\n', '\r']) {
            return Err(format!("something stands behind the value of {name}"));
        }
        rest = next.trim_start_matches([',', ' ', '\t', '\n', '\r']);
    }
    Ok(pairs)
}

/// A manifest has one place for all output.
fn output(section: &Section, it: &Program<'_>, draft: &mut Draft, file: &mut File<'_, '_>) {
    let joined = section.last("redirect_stderr").and_then(|entry| is(&entry.value)).unwrap_or(false);
    let out = section.last("stdout_logfile");
    let err = section.last("stderr_logfile").filter(|_| !joined);
    let place = |entry: &Entry, file: &mut File<'_, '_>| match entry.value.as_str() {
        "" | "AUTO" | "auto" | "Automatic" => Log::Unsaid,
        "NONE" | "none" | "off" => Log::Nowhere,
        "syslog" => {
            file.note(entry.line, &entry.key, "output goes to a file here, not to syslog");
            Log::Unsaid
        }
        value if value.starts_with("/dev/") && value != "/dev/null" => {
            file.note(entry.line, &entry.key, "output goes to a file here: the agent's own is not shared");
            Log::Unsaid
        }
        "/dev/null" => Log::Nowhere,
        _ => it.template(entry, file).map_or(Log::Unsaid, Log::File),
    };
    draft.log = out.map_or(Log::Unsaid, |entry| place(entry, file));
    if let Some(Entry { line, key, .. }) = err {
        let errors = err.map_or(Log::Unsaid, |entry| place(entry, file));
        if out.is_none() && errors != Log::Unsaid {
            draft.log = errors;
            file.note(*line, key, "there is one file for all output: this one");
        } else if errors != draft.log {
            file.note(*line, key, "there is one file for all output: that of stdout");
        }
    }
    if let Some(entry) = section.last("redirect_stderr").filter(|_| !joined && err.is_none()) {
        file.note(entry.line, &entry.key, "there is one file for all output");
    }
    if let Log::File(path) = &draft.log
        && !path.starts_with('/')
        && draft.identity.setup_path.is_none()
    {
        let entry = out.or(err);
        file.note(
            entry.map_or(section.line, |entry| entry.line),
            "stdout_logfile",
            "it begins where supervisord was started, which the file does not say",
        );
        draft.log = Log::Unsaid;
    }
    for entry in &section.entries {
        let rest = entry.key.strip_prefix("stdout_").or(entry.key.strip_prefix("stderr_"));
        let of_stderr = entry.key.starts_with("stderr_");
        match rest {
            None | Some("logfile") => {}
            Some("logfile_maxbytes" | "logfile_backups") if entry.value == "0" || (of_stderr && joined) => {}
            Some("logfile_maxbytes" | "logfile_backups") => {
                file.note(
                    entry.line,
                    &entry.key,
                    "logs are not rotated by the agent: use logrotate (copytruncate)",
                );
            }
            Some(_) if is(&entry.value) == Some(false) => {}
            Some(_) => file.note(entry.line, &entry.key, "manifests have nothing like it"),
        }
    }
}

/// supervisord knows three answers to an exit; a manifest knows whether it is guarded.
fn restarts(section: &Section, draft: &mut Draft, file: &mut File<'_, '_>) {
    let Some(entry) = section.last("autorestart") else { return };
    let at_once = section.last("startsecs").is_some_and(|entry| entry.value.trim() == "0");
    match (entry.value.to_ascii_lowercase().as_str(), is(&entry.value)) {
        (_, Some(true)) => {}
        ("unexpected", _) => {
            let message = "it is guarded: an exit with an expected code is answered by a new start, too";
            file.note(entry.line, &entry.key, message);
        }
        (_, Some(false)) if at_once => {
            draft.monitor.auto_type = Some(2);
            let message = "with startsecs=0 it is a one-shot (auto_type: 2): it runs once for what it runs";
            file.note(entry.line, &entry.key, message);
        }
        (_, Some(false)) => {
            if draft.state == State::Running {
                draft.state = State::Unhosted;
            }
            let message =
                "it runs and is not guarded (state: unhosted); the next apply starts it again if it ended";
            file.note(entry.line, &entry.key, message);
        }
        (_, None) => file.wrong(entry.line, "autorestart is none of its words", "true, false or unexpected"),
    }
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
