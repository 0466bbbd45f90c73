//! Where several settings of a program have one answer in a manifest: its output, and what follows its end.

use super::expand::SupervisordProgram;
use super::parse_bool;
use crate::manifest::import::FileReader;
use crate::manifest::import::draft::{Draft, Log};
use crate::manifest::import::ini::{IniEntry, IniSection};
use crate::model::State;

/// A manifest has one place for all output.
pub fn output(
    section: &IniSection,
    it: &SupervisordProgram<'_>,
    draft: &mut Draft,
    file: &mut FileReader<'_, '_>,
) {
    let joined = section.last("redirect_stderr").and_then(|entry| parse_bool(&entry.value)).unwrap_or(false);
    let out = section.last("stdout_logfile");
    let err = section.last("stderr_logfile").filter(|_| !joined);
    let place = |entry: &IniEntry, file: &mut FileReader<'_, '_>| match entry.value.as_str() {
        "" | "AUTO" | "auto" | "Automatic" => Log::Unspecified,
        "NONE" | "none" | "off" => Log::Discard,
        "syslog" => {
            file.note(entry.line, &entry.key, "output goes to a file here, not to syslog");
            Log::Unspecified
        }
        value if value.starts_with("/dev/") && value != "/dev/null" => {
            file.note(entry.line, &entry.key, "output goes to a file here: the agent's own is not shared");
            Log::Unspecified
        }
        "/dev/null" => Log::Discard,
        _ => it.template(entry, file).map_or(Log::Unspecified, Log::File),
    };
    draft.log = out.map_or(Log::Unspecified, |entry| place(entry, file));
    if let Some(IniEntry { line, key, .. }) = err {
        let errors = err.map_or(Log::Unspecified, |entry| place(entry, file));
        if out.is_none() && errors != Log::Unspecified {
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
        draft.log = Log::Unspecified;
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
            Some(_) if parse_bool(&entry.value) == Some(false) => {}
            Some(_) => file.note(entry.line, &entry.key, "manifests have nothing like it"),
        }
    }
}

/// supervisord knows three answers to an exit; a manifest knows whether it is guarded.
pub fn restarts(section: &IniSection, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
    let Some(entry) = section.last("autorestart") else { return };
    let at_once = section.last("startsecs").is_some_and(|entry| entry.value.trim() == "0");
    match (entry.value.to_ascii_lowercase().as_str(), parse_bool(&entry.value)) {
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
        (_, None) => file.reject(entry.line, "autorestart is none of its words", "true, false or unexpected"),
    }
}
