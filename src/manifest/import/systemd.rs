//! systemd's units: a `.service` is a process, and a `.timer` makes the service beside it periodic.

use std::sync::Arc;

use super::calendar::{crontab, seconds as whole_seconds, span_ms};
use super::draft::{Draft, Log, NOT_KILLED, retries, seconds, signal};
use super::ini::{self, Entry, Section};
use super::words::{self, END, MARKS, SPLIT_VARIABLE, Style, VARIABLE};
use super::{File, Reader};
use crate::manifest::document::{Real, Text};
use crate::model::{Percent, State};

pub enum Read {
    Service(Box<Draft>),
    Timer(Timer),
}

/// When a service runs.
pub struct Timer {
    file: Arc<str>,
    line: u32,
    /// The service.
    unit: String,
    rule: Option<String>,
    cycle_time: Option<i64>,
}

pub fn read(file: &mut File<'_, '_>) -> Option<Read> {
    let sections = ini::systemd(file);
    let name = file.base().map(str::to_owned);
    for section in &sections {
        let known = ["Unit", "Service", "Timer", "Install"].contains(&section.name.as_str());
        if !known && !section.name.starts_with("X-") {
            file.note(section.line, &format!("[{}]", section.name), "manifests have nothing like it");
        }
    }
    let section = |name: &str| sections.iter().find(|section| section.name == name);
    match (section("Service"), section("Timer")) {
        (Some(service), _) => Service::new(name, service, section("Unit"))
            .read(file)
            .map(|draft| Read::Service(Box::new(draft))),
        (None, Some(section)) => timer(name.unwrap_or_default(), section, file).map(Read::Timer),
        (None, None) => {
            file.wrong(
                1,
                "it has neither [Service] nor [Timer]",
                "only services and timers become manifests",
            );
            None
        }
    }
}

/// Timers of services that were imported with them.
pub fn schedule(drafts: &mut [Draft], timers: Vec<Timer>, reader: &mut Reader<'_>) {
    for Timer { file, line, unit, rule, cycle_time } in timers {
        let Some(draft) = drafts.iter_mut().find(|draft| draft.alias == unit) else {
            let message = format!("{unit} is not imported with it, so there is nothing to run");
            reader.note(&file, line, "[Timer]", message);
            continue;
        };
        if rule.is_none() && cycle_time.is_none() {
            continue;
        }
        draft.monitor.auto_type = Some(0);
        draft.state = State::Running;
        draft.monitor.crontab_rule = rule.map(Text);
        draft.cycle_time = cycle_time;
    }
}

fn timer(name: String, section: &Section, file: &mut File<'_, '_>) -> Option<Timer> {
    let stem = name.strip_suffix(".timer").unwrap_or(&name);
    let mut timer = Timer {
        file: file.source.name.clone(),
        line: section.line,
        unit: format!("{stem}.service"),
        rule: None,
        cycle_time: None,
    };
    for Entry { key, value, line } in &section.entries {
        match key.as_str() {
            "Unit" => timer.unit.clone_from(value),
            "OnCalendar" if value.is_empty() => timer.rule = None,
            "OnCalendar" if timer.rule.is_some() => {
                file.note(*line, key, "a manifest has one crontab_rule: the first");
            }
            "OnCalendar" => {
                timer.rule = crontab(value);
                if timer.rule.is_none() {
                    file.note(*line, key, format!("no crontab says {value:?}: choose a crontab_rule"));
                }
            }
            "OnUnitActiveSec" if let Some(ms) = span_ms(value).filter(|ms| *ms > 0) => {
                timer.cycle_time = Some(whole_seconds(ms).min(366 * 86_400));
            }
            // A run whose time passed while nobody could run it takes place once.
            "Persistent" if yes(value) => {}
            _ => file.note(*line, key, "manifests have nothing like it"),
        }
    }
    if timer.rule.is_some() && timer.cycle_time.take().is_some() {
        file.note(section.line, "OnUnitActiveSec", "the crontab_rule of OnCalendar stands alone");
    }
    Some(timer)
}

struct Service<'a> {
    /// Such as `web@1.service`; standard input has no name.
    unit: Option<String>,
    section: &'a Section,
    about: Option<&'a Section>,
}

/// What stands before a program.
#[derive(Default)]
struct Prefix {
    /// `-`
    may_fail: bool,
    /// `@`
    first_argument: bool,
    /// `+`, `!`, `!!`
    privileged: bool,
    /// `:`
    literal: bool,
}

impl<'a> Service<'a> {
    fn new(unit: Option<String>, section: &'a Section, about: Option<&'a Section>) -> Service<'a> {
        Service { unit, section, about }
    }

    fn read(&self, file: &mut File<'_, '_>) -> Option<Draft> {
        let kind = self.last("Type").map_or("simple", |entry| entry.value.as_str());
        let oneshot = kind == "oneshot";
        let starts = self.all("ExecStart");
        if starts.is_empty() {
            let hint = "a drop-in is no whole unit: `systemctl cat NAME` prints it with its drop-ins";
            file.wrong(self.section.line, "the service has no ExecStart", hint);
            return None;
        }
        let name = match &self.unit {
            Some(unit) => unit.strip_suffix(".service").unwrap_or(unit).to_owned(),
            None => {
                let (_, words) = self.words(starts[0], file)?;
                let name = words::program(&words);
                file.note(
                    starts[0].line,
                    "ExecStart",
                    format!("the unit's name is not known: it is called {name}"),
                );
                name
            }
        };
        let mut draft = file.draft(self.section.line, name);
        draft.alias = self.unit.clone().unwrap_or_default();
        self.start(&starts, oneshot, &mut draft, file)?;
        for entry in &self.section.entries {
            self.setting(entry, kind, &mut draft, file);
        }
        self.kind(kind, &mut draft, file);
        self.restarts(oneshot, &mut draft, file);
        self.commands(&mut draft, file);
        self.order(&mut draft, file);
        Some(draft)
    }

    fn last(&self, key: &str) -> Option<&'a Entry> {
        self.section.last(key).filter(|entry| !entry.value.is_empty())
    }

    /// Values that add up; an empty one begins anew.
    fn all(&self, key: &str) -> Vec<&'a Entry> {
        let mut all = Vec::new();
        for entry in self.section.entries.iter().filter(|entry| entry.key == key) {
            if entry.value.is_empty() {
                all.clear();
            } else {
                all.push(entry);
            }
        }
        all
    }

    fn start(
        &self,
        starts: &[&Entry],
        oneshot: bool,
        draft: &mut Draft,
        file: &mut File<'_, '_>,
    ) -> Option<()> {
        if starts.len() > 1 && !oneshot {
            file.wrong(starts[1].line, "only a oneshot service has several ExecStart", "keep one of them");
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
    fn sequence(&self, entries: &[&Entry], file: &mut File<'_, '_>) -> Option<String> {
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
    fn words(&self, entry: &Entry, file: &mut File<'_, '_>) -> Option<(Prefix, Vec<String>)> {
        let words = match words::split(&entry.value, Style::Systemd) {
            Ok(words) => words,
            Err(why) => {
                file.wrong(entry.line, format!("{} cannot be read: {why}", entry.key), "close it");
                return None;
            }
        };
        let mut words: Vec<String> =
            words.into_iter().map(|word| self.specified(&word, entry, file)).collect();
        let mut prefix = Prefix::default();
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
            file.wrong(entry.line, format!("{} names no program", entry.key), "the path of a program");
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
    fn specified(&self, text: &str, entry: &Entry, file: &mut File<'_, '_>) -> String {
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
    fn text(&self, entry: &Entry, file: &mut File<'_, '_>) -> String {
        words::escaped(&self.specified(&entry.value, entry, file))
    }

    fn setting(&self, entry: &Entry, kind: &str, draft: &mut Draft, file: &mut File<'_, '_>) {
        let Entry { key, value, line } = entry;
        let line = *line;
        let wins = self.section.last(key) == Some(entry);
        let adds_up = matches!(key.as_str(), "Environment" | "EnvironmentFile" | "PassEnvironment")
            || key.starts_with("Exec");
        let counts = if adds_up { self.all(key).contains(&entry) } else { wins };
        if value.is_empty() || !counts {
            return;
        }
        match key.as_str() {
            "User" => self.user(entry, draft, file),
            "WorkingDirectory" => self.directory(entry, draft, file),
            "Environment" => self.environment(entry, draft, file),
            "PIDFile" => {
                let path = self.text(entry, file);
                draft.identity.pid_path = Some(Text(words::in_setup(&path, "/run")));
            }
            "RestartSec" => draft.monitor.start_interval = span(entry, file),
            "StartLimitBurst" => draft.monitor.start_retries = count(entry, file),
            "TimeoutStopSec" => draft.monitor.stop_check_secs = span(entry, file),
            "TimeoutStartSec" if kind == "forking" => draft.monitor.op_timeout = span(entry, file),
            "TimeoutSec" => {
                draft.monitor.stop_check_secs = span(entry, file);
                match kind {
                    "forking" => draft.monitor.op_timeout = draft.monitor.stop_check_secs,
                    _ => file.note(line, key, "only a stop has a time limit here"),
                }
            }
            "MemoryMax" | "MemoryLimit" => match percent(value) {
                Some(share) => draft.resource.mem = Some(Real(share)),
                None if value == "infinity" => {}
                None => file.note(line, key, "resource.mem is a percentage of the host's memory: choose one"),
            },
            "CPUQuota" => {
                let message =
                    "it is a share of one processor; resource.cpu is one of the whole host: choose one";
                file.note(line, key, message);
            }
            "StandardOutput" => output(entry, draft, file),
            "StandardError" => match value.as_str() {
                "inherit" => {}
                same if self.last("StandardOutput").is_some_and(|out| out.value == same) => {}
                _ => file.note(line, key, "there is one file for all output: that of StandardOutput"),
            },
            "UMask" if matches!(value.as_str(), "022" | "0022") => {}
            "KillSignal" if signal(value).as_deref() == Some("TERM") => {}
            "KillMode" if value == "control-group" => {}
            "SendSIGKILL" if yes(value) => {}
            "RemainAfterExit" if !yes(value) => {}
            "RemainAfterExit" if kind == "oneshot" => {
                file.note(
                    line,
                    key,
                    "a one-shot that has run counts as done; its ExecStop is for a stop alone",
                );
            }
            // Read elsewhere.
            "Type" | "ExecStart" | "ExecReload" | "ExecStop" | "Restart" | "KillSignal" => {}
            "ExecStartPre" | "ExecStartPost" | "ExecStopPost" | "ExecCondition" => {
                file.note(line, key, "a manifest has one start_cmd and one stop_cmd: put it into them");
            }
            "EnvironmentFile" => {
                file.note(
                    line,
                    key,
                    "the agent reads no such file: write its variables as env, or {file: PATH} for one",
                );
            }
            "Group" | "SupplementaryGroups" => {
                file.note(line, key, "a process has the groups of its user");
            }
            "TimeoutStartSec" => {
                file.note(line, key, "a process in the foreground has no time limit; start_check_secs is when it counts as started");
            }
            _ => file.note(line, key, "manifests have nothing like it"),
        }
    }

    fn user(&self, entry: &Entry, draft: &mut Draft, file: &mut File<'_, '_>) {
        let user = self.specified(&entry.value, entry, file);
        match user.parse::<u32>() {
            Ok(0) => draft.identity.user = Some("root".into()),
            Ok(_) => file.note(entry.line, &entry.key, "a manifest knows users by name, not by number"),
            Err(_) if user.contains("${") => file.note(entry.line, &entry.key, "it is no user's name"),
            Err(_) => draft.identity.user = Some(Text(user)),
        }
    }

    fn directory(&self, entry: &Entry, draft: &mut Draft, file: &mut File<'_, '_>) {
        let path = self.text(entry, file);
        let (path, optional) = match path.strip_prefix('-') {
            Some(path) => (path.to_owned(), true),
            None => (path, false),
        };
        let path = match path.as_str() {
            "~" => {
                let user = self.last("User").map_or("root", |user| user.value.as_str());
                let home = if user == "root" {
                    "/root".to_owned()
                } else {
                    format!("/home/{}", words::escaped(user))
                };
                file.note(entry.line, &entry.key, format!("the home of {user} is taken to be {home}"));
                home
            }
            _ => path,
        };
        if optional {
            file.note(entry.line, &entry.key, "`-`: here it must be there");
        }
        match path.starts_with('/') {
            true => draft.identity.setup_path = Some(Text(path)),
            false => file.note(entry.line, &entry.key, "it is no path from the root, and is left out"),
        }
    }

    fn environment(&self, entry: &Entry, draft: &mut Draft, file: &mut File<'_, '_>) {
        let words = match words::split(&entry.value, Style::Systemd) {
            Ok(words) => words,
            Err(why) => {
                return file.wrong(entry.line, format!("Environment cannot be read: {why}"), "close it");
            }
        };
        for word in words {
            let word = self.specified(&word, entry, file);
            match word.split_once('=') {
                Some((name, value)) if !name.is_empty() && !name.contains('\0') => {
                    draft.env.insert(name.to_owned(), words::escaped(value));
                }
                _ => {
                    file.note(entry.line, "Environment", "a word without `=` is no variable, and is left out")
                }
            }
        }
    }

    fn kind(&self, kind: &str, draft: &mut Draft, file: &mut File<'_, '_>) {
        let line = self.last("Type").map_or(self.section.line, |entry| entry.line);
        match kind {
            "simple" | "exec" => {}
            "oneshot" => draft.monitor.auto_type = Some(2),
            "forking" => {
                draft.control.start_mode = Some("daemon".into());
                // The shell that runs it waits for it; there is nothing to become.
                if let Some(Text(command)) = &mut draft.control.start_cmd
                    && let Some(rest) = command.strip_prefix("exec ")
                {
                    *command = rest.to_owned();
                }
                if draft.identity.pid_path.is_none() {
                    file.note(
                        line,
                        "Type",
                        "a daemon is found by its pid file, and PIDFile is not there: see to pid_path",
                    );
                }
                // What it says to its own log is its own matter.
                draft.log = match std::mem::take(&mut draft.log) {
                    Log::Unsaid => Log::Nowhere,
                    said => said,
                };
            }
            "notify" | "notify-reload" | "dbus" | "idle" => {
                file.note(
                    line,
                    "Type",
                    format!("{kind}: it counts as started when start_check_secs are over"),
                );
            }
            other => file.wrong(
                line,
                format!("there is no Type {other:?}"),
                "simple, exec, forking, oneshot, notify",
            ),
        }
        if kind != "forking" && draft.identity.pid_path.take().is_some() {
            let line = self.last("PIDFile").map_or(line, |entry| entry.line);
            file.note(
                line,
                "PIDFile",
                "the agent writes the pid file of what is its child, at a place of its own",
            );
        }
    }

    fn restarts(&self, oneshot: bool, draft: &mut Draft, file: &mut File<'_, '_>) {
        let restart = self.last("Restart");
        match (restart.map_or("no", |entry| entry.value.as_str()), restart) {
            ("no", None) | ("no", Some(_)) if oneshot => {}
            // Nobody brings it back: neither do we.
            ("no", _) => draft.state = State::Unhosted,
            (_, Some(Entry { line, key, .. })) if oneshot => {
                file.note(*line, key, "a one-shot (auto_type: 2) is not run again when it fails");
            }
            ("always", _) => {}
            (
                word @ ("on-failure" | "on-abnormal" | "on-abort" | "on-watchdog" | "on-success"),
                Some(entry),
            ) => {
                let message = format!(
                    "{word}: it is guarded, and any end that nobody asked for is answered by a new start"
                );
                file.note(entry.line, &entry.key, message);
            }
            (_, Some(entry)) => {
                file.wrong(entry.line, "Restart is none of its words", "no, always or on-failure")
            }
            (_, None) => {}
        }
    }

    /// What is not its start.
    fn commands(&self, draft: &mut Draft, file: &mut File<'_, '_>) {
        let reloads = self.all("ExecReload");
        if !reloads.is_empty() {
            draft.control.reload_cmd = self.sequence(&reloads, file).map(Text);
        }
        let stops = self.all("ExecStop");
        if !stops.is_empty() {
            draft.control.stop_cmd = self.sequence(&stops, file).map(Text);
            file.note(stops[0].line, "ExecStop", NOT_KILLED);
        }
        let Some(entry) = self.last("KillSignal") else { return };
        match signal(&entry.value) {
            Some(signal) if signal == "TERM" || signal == "15" => {}
            Some(_) if !stops.is_empty() => {
                file.note(entry.line, &entry.key, "ExecStop becomes the stop_cmd, and no signal follows it");
            }
            Some(signal) => {
                draft.stop_by(&signal);
                file.note(entry.line, &entry.key, NOT_KILLED);
            }
            None => file.wrong(entry.line, "KillSignal is no signal", "such as SIGTERM or SIGINT"),
        }
    }

    fn order(&self, draft: &mut Draft, file: &mut File<'_, '_>) {
        for entry in self.about.iter().flat_map(|section| &section.entries) {
            let Entry { key, value, line } = entry;
            let units = || value.split_whitespace().map(|unit| (*line, key.clone(), unit.to_owned()));
            match key.as_str() {
                // What it is, in words: a comment.
                "Description" | "Documentation" => {}
                "After" => draft.after.extend(units()),
                "Before" => draft.before.extend(units()),
                "Requires" | "Requisite" | "BindsTo" => {
                    draft.after.extend(units());
                    file.note(
                        *line,
                        key,
                        "it becomes an order (depends_on): a stop of the other stops nothing here",
                    );
                }
                "StartLimitBurst" => draft.monitor.start_retries = count(entry, file),
                _ => file.note(*line, key, "manifests have nothing like it"),
            }
        }
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

fn output(entry: &Entry, draft: &mut Draft, file: &mut File<'_, '_>) {
    let path = ["append:", "file:", "truncate:"].iter().find_map(|kind| entry.value.strip_prefix(kind));
    match (entry.value.as_str(), path) {
        (_, Some(path)) => {
            draft.log = Log::File(words::escaped(path));
            if !entry.value.starts_with("append:") {
                file.note(entry.line, &entry.key, "the agent appends to it");
            }
        }
        ("null", None) => draft.log = Log::Nowhere,
        _ => file.note(entry.line, &entry.key, "output goes to a file here (log_path)"),
    }
}

fn yes(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "yes" | "true" | "on" | "1")
}

fn percent(value: &str) -> Option<f64> {
    let share = value.strip_suffix('%')?.trim().parse().ok()?;
    Percent::new(share).map(|share| share.get())
}

fn span(entry: &Entry, file: &mut File<'_, '_>) -> Option<i64> {
    let Some(ms) = span_ms(&entry.value) else {
        if entry.value == "infinity" {
            file.note(entry.line, &entry.key, "manifests have no time without end; it is left out");
        } else {
            file.wrong(entry.line, format!("{} is no time", entry.key), "such as 30s or 1min 30s");
        }
        return None;
    };
    if ms % 1000 != 0 {
        file.note(entry.line, &entry.key, format!("it is rounded up to {} s", whole_seconds(ms)));
    }
    let fitting = seconds(whole_seconds(ms));
    if fitting.is_none() {
        file.note(entry.line, &entry.key, "it is longer than a manifest can say, and is left out");
    }
    fitting
}

fn count(entry: &Entry, file: &mut File<'_, '_>) -> Option<i64> {
    let value = entry.value.parse::<i64>().ok();
    if value.is_none() {
        file.wrong(entry.line, format!("{} is no whole number", entry.key), "such as 5");
    }
    let fitting = value.and_then(retries);
    if value.is_some() && fitting.is_none() {
        file.note(entry.line, &entry.key, "it is out of the range that a manifest has, and is left out");
    }
    fitting
}
