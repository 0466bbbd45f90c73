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

/// Whether this field holds a command line or an environment value.
pub fn is_private(field: &str) -> bool {
    field.ends_with("_cmd") || field == "env" || field.starts_with("env.")
}

/// Whether this text may quote one.
pub fn may_quote(text: &str) -> bool {
    text.contains("_cmd") || text.contains("env")
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
        EventEntry { redacted: Some(true), ..event }
    }
}
