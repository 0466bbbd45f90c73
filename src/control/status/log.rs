//! Numbered log entries of the controller: one line for people, and JSON for programs.

use crate::contract::{EventDetails, EventEntry};
pub use crate::contract::{EventKind as Kind, EventLevel as LogLevel};
use crate::model::Time;

/// One entry.
#[derive(Clone, Debug)]
pub struct LogEntry {
    pub number: u64,
    pub at: Time,
    pub kind: Kind,
    pub level: LogLevel,
    /// One line.
    pub title: String,
    /// Further lines.
    pub text: String,
    /// Further fields of the event.
    pub details: EventDetails,
    /// Title and text without command lines and environment values, where they differ.
    pub public: Option<(String, String)>,
}

/// Replacement of a redacted value.
pub const HIDDEN: &str = "(hidden)";

/// Fields whose values are shown to every reader. The values of all others may contain a secret: command lines,
/// environment, addresses of probes.
const PUBLIC_FIELDS: [&str; 18] = [
    "configmap",
    "control.start_mode",
    "health.interval",
    "health.retries",
    "health.start_period",
    "health.timeout",
    "identity",
    "job",
    "labels",
    "limits",
    "log",
    "monitor_policy",
    "report_id",
    "resource",
    "restart",
    "sandbox",
    "state",
    "warn_report_policy",
];

/// Whether the value of this field is shown only to readers with credentials.
pub fn is_private(field: &str) -> bool {
    let is_below = |public: &str| {
        field.strip_prefix(public).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    !PUBLIC_FIELDS.into_iter().any(is_below)
}

/// Whether this text may quote the value of such a field.
pub fn may_quote(text: &str) -> bool {
    const WORDS: [&str; 8] = ["cmd", "env", "health", "hook", "before_", "after_", "run", "exec"];
    WORDS.iter().any(|word| text.contains(word))
}

impl LogEntry {
    /// Title and text for readers without credentials.
    pub fn redacted(&self) -> LogEntry {
        let Some((title, text)) = self.public.clone() else { return self.clone() };
        LogEntry { title, text, ..self.clone() }
    }

    pub fn event(&self) -> EventEntry {
        EventEntry {
            id: self.number,
            time: self.at.to_string(),
            kind: self.kind,
            level: self.level,
            title: self.title.clone(),
            text: self.text.clone(),
            details: self.details.clone(),
            redacted: None,
        }
    }

    /// The event for readers without credentials.
    pub fn redacted_event(&self) -> EventEntry {
        if self.public.is_none() {
            return self.event();
        }
        let mut event = self.redacted().event();
        if let EventDetails::Step { message, .. } = &mut event.details
            && !message.is_empty()
        {
            *message = HIDDEN.to_owned();
        }
        if let EventDetails::RolledBack { why, .. } = &mut event.details
            && !why.is_empty()
        {
            *why = HIDDEN.to_owned();
        }
        EventEntry { redacted: Some(true), ..event }
    }
}

#[cfg(test)]
mod tests {
    use super::is_private;

    #[test]
    fn a_field_is_private_unless_it_is_known_to_be_public() {
        let private = [
            "control.start_cmd",
            "env.DB",
            "health.cmd",
            "health.http",
            "health",
            "hooks",
            "new",
            "labelsx",
            "env_file",
        ];
        assert!(private.iter().all(|field| is_private(field)));
        let public =
            ["labels.tier", "resource.cpu", "health.interval", "configmap[0].md5", "control.start_mode"];
        assert!(!public.iter().any(|field| is_private(field)));
    }
}
