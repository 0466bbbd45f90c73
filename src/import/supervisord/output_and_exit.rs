//! Output and exit handling of supervisord programs: several settings that map to one manifest field.

use super::expand::SupervisordProgram;
use super::parse_bool;
use crate::import::FileReader;
use crate::import::draft::{Draft, Log};
use crate::import::ini::{IniEntry, IniSection};
use crate::model::State;

/// Sets log_path: manifests have one file for all output.
pub fn output(
    section: &IniSection,
    it: &SupervisordProgram<'_>,
    draft: &mut Draft,
    file: &mut FileReader<'_, '_>,
) {
    let joined = section.last("redirect_stderr").and_then(|entry| parse_bool(&entry.value)).unwrap_or(false);
    let out = section.last("stdout_logfile");
    let err = section.last("stderr_logfile").filter(|_| !joined);
    let log = |entry: &IniEntry, file: &mut FileReader<'_, '_>| match entry.value.as_str() {
        "" | "AUTO" | "auto" | "Automatic" => Log::Unspecified,
        "NONE" | "none" | "off" => Log::Discard,
        "syslog" => {
            file.note(entry.line, &entry.key, "output is written to a file, not to syslog");
            Log::Unspecified
        }
        value if value.starts_with("/dev/") && value != "/dev/null" => {
            file.note(
                entry.line,
                &entry.key,
                "output is written to a file: the agent's own output is not shared",
            );
            Log::Unspecified
        }
        "/dev/null" => Log::Discard,
        _ => it.template(entry, file).map_or(Log::Unspecified, Log::File),
    };
    draft.log = out.map_or(Log::Unspecified, |entry| log(entry, file));
    if let Some(IniEntry { line, key, .. }) = err {
        let errors = err.map_or(Log::Unspecified, |entry| log(entry, file));
        if out.is_none() && errors != Log::Unspecified {
            draft.log = errors;
            file.note(*line, key, "manifests have one file for all output: this one");
        } else if errors != draft.log {
            file.note(*line, key, "manifests have one file for all output: that of stdout");
        }
    }
    if let Some(entry) = section.last("redirect_stderr").filter(|_| !joined && err.is_none()) {
        file.note(entry.line, &entry.key, "manifests have one file for all output");
    }
    if let Log::File(path) = &draft.log
        && !path.starts_with('/')
        && draft.spec.identity.setup_path.is_none()
    {
        let entry = out.or(err);
        file.note(
            entry.map_or(section.line, |entry| entry.line),
            "stdout_logfile",
            "relative to the directory where supervisord was started, which is unknown",
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
                    "rotation is not imported: set log.max_size and log.keep manually",
                );
            }
            Some(_) if parse_bool(&entry.value) == Some(false) => {}
            Some(_) => file.note(entry.line, &entry.key, "no equivalent in manifests"),
        }
    }
}

/// Converts autorestart. supervisord has three modes; a manifest has only supervised or not.
pub fn restarts(section: &IniSection, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
    let Some(entry) = section.last("autorestart") else { return };
    let at_once = section.last("startsecs").is_some_and(|entry| entry.value.trim() == "0");
    match (entry.value.to_ascii_lowercase().as_str(), parse_bool(&entry.value)) {
        (_, Some(true)) => {}
        ("unexpected", _) => {
            let message = "supervised: the agent also restarts the process after an expected exit code";
            file.note(entry.line, &entry.key, message);
        }
        (_, Some(false)) if at_once => {
            draft.spec.monitor.auto_type = Some(2);
            let message =
                "with startsecs=0 the process is a one-shot (auto_type: 2): it runs once per change";
            file.note(entry.line, &entry.key, message);
        }
        (_, Some(false)) => {
            if draft.state == State::Running {
                draft.state = State::Unhosted;
            }
            let message = "not supervised (state: unhosted); if it exits, the next apply starts it again";
            file.note(entry.line, &entry.key, message);
        }
        (_, None) => {
            file.reject(entry.line, "autorestart is not a known value", "use true, false or unexpected")
        }
    }
}
