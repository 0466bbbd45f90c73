//! systemd services: single settings, then settings that depend on each other.

use crate::import::FileReader;
use crate::import::calendar::{seconds as whole_seconds, span_ms};
use crate::import::draft::{Draft, Log, NOT_KILLED, retries, seconds, signal};
use crate::import::ini::{IniEntry, IniSection};
use crate::import::words::{self, QuoteStyle};
use crate::manifest::document::{Real, Text};
use crate::model::{Percent, State};

pub struct Service<'a> {
    /// Unit name such as `web@1.service`; `None` for standard input.
    pub unit: Option<String>,
    section: &'a IniSection,
    about: Option<&'a IniSection>,
}

impl<'a> Service<'a> {
    pub fn new(unit: Option<String>, section: &'a IniSection, about: Option<&'a IniSection>) -> Service<'a> {
        Service { unit, section, about }
    }

    pub fn read(&self, file: &mut FileReader<'_, '_>) -> Option<Draft> {
        let kind = self.last("Type").map_or("simple", |entry| entry.value.as_str());
        let oneshot = kind == "oneshot";
        let starts = self.all("ExecStart");
        if starts.is_empty() {
            let hint = "a drop-in is not a whole unit: `systemctl cat NAME` prints a unit with its drop-ins";
            file.reject(self.section.line, "the service has no ExecStart", hint);
            return None;
        }
        let name = match &self.unit {
            Some(unit) => unit.strip_suffix(".service").unwrap_or(unit).to_owned(),
            None => {
                let (_, words) = self.words(starts[0], file)?;
                let name = words::program(&words);
                file.note(starts[0].line, "ExecStart", format!("the unit's name is unknown; named {name}"));
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
        self.before_start(&mut draft, file);
        self.bounding_set(&mut draft, file);
        self.order(&mut draft, file);
        Some(draft)
    }

    fn last(&self, key: &str) -> Option<&'a IniEntry> {
        self.section.last(key).filter(|entry| !entry.value.is_empty())
    }

    /// Every line of a setting, also empty ones.
    pub(super) fn entries(&self, key: &str) -> impl Iterator<Item = &'a IniEntry> {
        self.section.entries.iter().filter(move |entry| entry.key == key)
    }

    /// Values of a cumulative setting; an empty value resets it.
    pub(super) fn all(&self, key: &str) -> Vec<&'a IniEntry> {
        let mut all = Vec::new();
        for entry in self.entries(key) {
            if entry.value.is_empty() {
                all.clear();
            } else {
                all.push(entry);
            }
        }
        all
    }

    fn setting(&self, entry: &IniEntry, kind: &str, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let IniEntry { key, value, line } = entry;
        let line = *line;
        let wins = self.section.last(key) == Some(entry);
        let lists =
            ["Environment", "EnvironmentFile", "PassEnvironment", "ReadOnlyPaths", "ReadOnlyDirectories"];
        let adds_up = lists.contains(&key.as_str()) || key.starts_with("Exec");
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
                draft.spec.identity.pid_path = Some(Text(words::absolute_path(&path, "/run")));
            }
            "RestartSec" => draft.spec.monitor.start_interval = span(entry, file),
            "StartLimitBurst" => draft.spec.monitor.start_retries = count(entry, file),
            "TimeoutStopSec" => draft.spec.monitor.stop_check_secs = span(entry, file),
            "TimeoutStartSec" if kind == "forking" => draft.spec.monitor.op_timeout = span(entry, file),
            "TimeoutSec" => {
                draft.spec.monitor.stop_check_secs = span(entry, file);
                match kind {
                    "forking" => draft.spec.monitor.op_timeout = draft.spec.monitor.stop_check_secs,
                    _ => file.note(line, key, "only a stop has a time limit in manifests"),
                }
            }
            "MemoryMax" | "MemoryLimit" => match percent(value) {
                Some(share) => draft.spec.resource.mem = Some(Real(share)),
                None if value == "infinity" => {}
                None => file.note(line, key, "bytes are not imported: set limits.memory manually"),
            },
            "CPUQuota" => {
                file.note(
                    line,
                    key,
                    "a share of one CPU is not imported: set limits.cpu, in cores, manually",
                );
            }
            "StandardOutput" => output(entry, draft, file),
            "StandardError" => match value.as_str() {
                "inherit" => {}
                same if self.last("StandardOutput").is_some_and(|out| out.value == same) => {}
                _ => file.note(line, key, "manifests have one file for all output: that of StandardOutput"),
            },
            "KillSignal" if signal(value).as_deref() == Some("TERM") => {}
            "KillMode" if value == "control-group" => {}
            "SendSIGKILL" if is_true(value) => {}
            "RemainAfterExit" if !is_true(value) => {}
            "RemainAfterExit" if kind == "oneshot" => {
                file.note(line, key, "a one-shot counts as done after its run; ExecStop runs only on a stop");
            }
            // Converted elsewhere.
            "Type" | "ExecStart" | "ExecStartPre" | "ExecReload" | "ExecStop" | "Restart" | "KillSignal"
            | "EnvironmentFile" => {}
            "ExecStartPost" | "ExecStopPost" | "ExecCondition" => {
                file.note(line, key, "manifests have one start_cmd and one stop_cmd: add the command there");
            }
            "Group" | "SupplementaryGroups" => {
                file.note(line, key, "a process has the groups of its user in manifests");
            }
            "TimeoutStartSec" => {
                file.note(line, key, "foreground mode has no start timeout; a process counts as started after start_check_secs");
            }
            _ if self.sandbox(entry, draft, file) => {}
            _ => file.note(line, key, "no equivalent in manifests"),
        }
    }

    fn user(&self, entry: &IniEntry, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let user = self.expand_specifiers(&entry.value, entry, file);
        match user.parse::<u32>() {
            Ok(0) => draft.spec.identity.user = Some("root".into()),
            Ok(_) => file.note(entry.line, &entry.key, "manifests have user names, not user ids"),
            Err(_) if user.contains("${") => file.note(entry.line, &entry.key, "not a valid user name"),
            Err(_) => draft.spec.identity.user = Some(Text(user)),
        }
    }

    fn directory(&self, entry: &IniEntry, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
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
                file.note(
                    entry.line,
                    &entry.key,
                    format!("the home directory of {user} is assumed to be {home}"),
                );
                home
            }
            _ => path,
        };
        if optional {
            file.note(entry.line, &entry.key, "`-` is ignored: the directory must exist");
        }
        match path.starts_with('/') {
            true => draft.spec.identity.setup_path = Some(Text(path)),
            false => file.note(entry.line, &entry.key, "not an absolute path; ignored"),
        }
    }

    fn environment(&self, entry: &IniEntry, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let words = match words::split(&entry.value, QuoteStyle::Systemd) {
            Ok(words) => words,
            Err(why) => {
                return file.reject_private(
                    entry.line,
                    format!("Environment cannot be read: {why}"),
                    "close the quote",
                );
            }
        };
        for word in words {
            let word = self.expand_specifiers(&word, entry, file);
            match word.split_once('=') {
                Some((name, value)) if !name.is_empty() && !name.contains('\0') => {
                    draft.spec.env.insert(name.to_owned(), words::escaped(value));
                }
                _ => file.note(entry.line, "Environment", "a word without `=` is not a variable; ignored"),
            }
        }
    }

    fn kind(&self, kind: &str, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let line = self.last("Type").map_or(self.section.line, |entry| entry.line);
        match kind {
            "simple" | "exec" => {}
            "oneshot" => draft.spec.monitor.auto_type = Some(2),
            "forking" => {
                draft.spec.control.start_mode = Some("daemon".into());
                // The shell waits for a forking command, so `exec` is not needed.
                if let Some(Text(command)) = &mut draft.spec.control.start_cmd
                    && let Some(rest) = command.strip_prefix("exec ")
                {
                    *command = rest.to_owned();
                }
                if draft.spec.identity.pid_path.is_none() {
                    file.note(
                        line,
                        "Type",
                        "PIDFile is not set, but a daemon is identified by its pid file: check pid_path",
                    );
                }
                // A daemon writes its own log.
                draft.log = match std::mem::take(&mut draft.log) {
                    Log::Unspecified => Log::Discard,
                    log => log,
                };
            }
            "notify" | "notify-reload" | "dbus" | "idle" => {
                file.note(
                    line,
                    "Type",
                    format!("{kind}: the process counts as started after start_check_secs"),
                );
            }
            other => file.reject(
                line,
                format!("unknown Type {other:?}"),
                "use simple, exec, forking, oneshot or notify",
            ),
        }
        if kind != "forking" && draft.spec.identity.pid_path.take().is_some() {
            let line = self.last("PIDFile").map_or(line, |entry| entry.line);
            file.note(
                line,
                "PIDFile",
                "the agent writes the pid file of a foreground process, at a generated path",
            );
        }
    }

    fn restarts(&self, oneshot: bool, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let restart = self.last("Restart");
        match (restart.map_or("no", |entry| entry.value.as_str()), restart) {
            ("no", None) | ("no", Some(_)) if oneshot => {}
            // systemd does not restart the service, so the agent does not either.
            ("no", _) => draft.state = State::Unhosted,
            (_, Some(IniEntry { line, key, .. })) if oneshot => {
                file.note(*line, key, "a one-shot (auto_type: 2) is not retried after a failure");
            }
            ("always", _) => {}
            (
                word @ ("on-failure" | "on-abnormal" | "on-abort" | "on-watchdog" | "on-success"),
                Some(entry),
            ) => {
                let message =
                    format!("{word}: supervised; the agent restarts the process after any unexpected exit");
                file.note(entry.line, &entry.key, message);
            }
            (_, Some(entry)) => {
                file.reject(entry.line, "Restart is not a known value", "use no, always or on-failure")
            }
            (_, None) => {}
        }
    }

    /// Reload and stop commands.
    fn commands(&self, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let reloads = self.all("ExecReload");
        if !reloads.is_empty() {
            draft.spec.control.reload_cmd = self.sequence(&reloads, file).map(Text);
        }
        let stops = self.all("ExecStop");
        if !stops.is_empty() {
            draft.spec.control.stop_cmd = self.sequence(&stops, file).map(Text);
            file.note(stops[0].line, "ExecStop", NOT_KILLED);
        }
        let Some(entry) = self.last("KillSignal") else { return };
        match signal(&entry.value) {
            Some(signal) if signal == "TERM" || signal == "15" => {}
            Some(_) if !stops.is_empty() => {
                file.note(
                    entry.line,
                    &entry.key,
                    "ignored: ExecStop becomes the stop_cmd, and no signal follows it",
                );
            }
            Some(signal) => {
                draft.stop_by(&signal);
                file.note(entry.line, &entry.key, NOT_KILLED);
            }
            None => file.reject(entry.line, "KillSignal is not a signal", "such as SIGTERM or SIGINT"),
        }
    }

    fn order(&self, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        for entry in self.about.iter().flat_map(|section| &section.entries) {
            let IniEntry { key, value, line } = entry;
            let units = || value.split_whitespace().map(|unit| (*line, key.clone(), unit.to_owned()));
            match key.as_str() {
                // Documentation only.
                "Description" | "Documentation" => {}
                "After" => draft.after.extend(units()),
                "Before" => draft.before.extend(units()),
                "Requires" | "Requisite" | "BindsTo" => {
                    draft.after.extend(units());
                    file.note(
                        *line,
                        key,
                        "converted to start order (depends_on): a stop of the dependency does not stop this process",
                    );
                }
                "StartLimitBurst" => draft.spec.monitor.start_retries = count(entry, file),
                _ => file.note(*line, key, "no equivalent in manifests"),
            }
        }
    }
}

fn output(entry: &IniEntry, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
    let path = ["append:", "file:", "truncate:"].iter().find_map(|kind| entry.value.strip_prefix(kind));
    match (entry.value.as_str(), path) {
        (_, Some(path)) => {
            draft.log = Log::File(words::escaped(path));
            if !entry.value.starts_with("append:") {
                file.note(entry.line, &entry.key, "the agent appends to the file");
            }
        }
        ("null", None) => draft.log = Log::Discard,
        _ => file.note(entry.line, &entry.key, "output is written to a file (log_path)"),
    }
}

pub fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "yes" | "true" | "on" | "1")
}

fn percent(value: &str) -> Option<f64> {
    let share = value.strip_suffix('%')?.trim().parse().ok()?;
    Percent::new(share).map(|share| share.get())
}

fn span(entry: &IniEntry, file: &mut FileReader<'_, '_>) -> Option<i64> {
    let Some(ms) = span_ms(&entry.value) else {
        if entry.value == "infinity" {
            file.note(entry.line, &entry.key, "manifests have no infinite duration; ignored");
        } else {
            file.reject(entry.line, format!("{} is not a duration", entry.key), "such as 30s or 1min 30s");
        }
        return None;
    };
    if ms % 1000 != 0 {
        file.note(entry.line, &entry.key, format!("rounded up to {} s", whole_seconds(ms)));
    }
    let fitting = seconds(whole_seconds(ms));
    if fitting.is_none() {
        file.note(entry.line, &entry.key, "longer than manifests allow; ignored");
    }
    fitting
}

fn count(entry: &IniEntry, file: &mut FileReader<'_, '_>) -> Option<i64> {
    let value = entry.value.parse::<i64>().ok();
    if value.is_none() {
        file.reject(entry.line, format!("{} is not a whole number", entry.key), "such as 5");
    }
    let fitting = value.and_then(retries);
    if value.is_some() && fitting.is_none() {
        file.note(entry.line, &entry.key, "out of the range of manifests; ignored");
    }
    fitting
}
