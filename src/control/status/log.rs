//! Numbered log entries of the controller: one line for people, and JSON for programs.

use serde_json::{Map, Value};

use crate::model::Time;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    Info,
    Warning,
    Error,
}

impl LogLevel {
    pub fn word(self) -> &'static str {
        match self {
            LogLevel::Info => "info",
            LogLevel::Warning => "warning",
            LogLevel::Error => "error",
        }
    }
}

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Read,
    Source,
    Problems,
    ProblemsFixed,
    Waiting,
    Leading,
    Changed,
    Held,
    NotConverging,
    ExecutionStarted,
    Step,
    Soaking,
    Relaunched,
    RolledBack,
    ExecutionFinished,
    Failure,
    Recovered,
    Converged,
    /// A request through the listener.
    Requested,
}

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Source => "source",
            Kind::Problems => "problems",
            Kind::ProblemsFixed => "mended",
            Kind::Waiting => "waiting",
            Kind::Leading => "leading",
            Kind::Changed => "changed",
            Kind::Held => "held",
            Kind::NotConverging => "not_converging",
            Kind::ExecutionStarted => "doing",
            Kind::Step => "step",
            Kind::Soaking => "soaking",
            Kind::Relaunched => "relaunched",
            Kind::RolledBack => "rolled_back",
            Kind::ExecutionFinished => "done",
            Kind::Failure => "trouble",
            Kind::Recovered => "recovered",
            Kind::Converged => "converged",
            Kind::Requested => "asked",
        }
    }
}

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
    /// JSON fields.
    pub more: Map<String, Value>,
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
    /// The entry for readers without credentials.
    pub fn redacted(&self) -> LogEntry {
        let Some((title, text)) = self.public.clone() else { return self.clone() };
        let mut more = self.more.clone();
        if let Some(message) = more.get_mut("message").filter(|message| **message != "") {
            *message = HIDDEN.into();
        }
        more.insert("redacted".to_owned(), true.into());
        LogEntry { title, text, more, ..self.clone() }
    }

    pub fn json(&self) -> Value {
        let mut all = Map::new();
        all.insert("id".to_owned(), self.number.into());
        all.insert("time".to_owned(), self.at.to_string().into());
        all.insert("kind".to_owned(), self.kind.word().into());
        all.insert("level".to_owned(), self.level.word().into());
        all.insert("title".to_owned(), self.title.clone().into());
        all.insert("text".to_owned(), self.text.clone().into());
        all.extend(self.more.iter().map(|(name, value)| (name.clone(), value.clone())));
        Value::Object(all)
    }
}
