//! Notifications: a webhook request for each execution, failure, manifest problem, instance that does not converge, and
//! change of leadership.
//!
//! A separate task reads the log of the status board, so the control loop never waits for a delivery. An undelivered
//! message is dropped with a warning in the log. The URL is a secret; messages show only its host.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tracing::{info, warn};

use crate::contract::EventDetails;
use crate::control::status::{Kind, LogEntry, StatusBoard};
use crate::http::{Reloadable, WebhookClient};
use crate::retry_delay::RetryDelay;

/// Default of `--notify-template`.
pub const DEFAULT_TEMPLATE: &str = r#"{"text": "{{title}}\n{{text}}"}"#;

/// Timeout of one attempt, maximum attempts, and the first delay between attempts.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_ATTEMPTS: u32 = 6;
const DELAYS: RetryDelay = RetryDelay::doubling(Duration::from_millis(500), Duration::from_secs(60));

/// A JSON text with placeholders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageTemplate(String);

/// Values of the placeholders.
#[derive(Clone, Debug, Default)]
pub struct Message {
    pub title: String,
    pub text: String,
    pub owner: String,
    pub target: String,
    pub revision: String,
    /// Empty without a git source.
    pub commit: String,
    pub level: String,
}

/// Why a template is not valid.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("the template is not valid JSON after its placeholders are filled in")]
    Json(#[from] serde_json::Error),
    #[error("unknown placeholder {{{{{name}}}}}: use title, text, owner, target, revision, commit or level")]
    Placeholder { name: String },
}

impl MessageTemplate {
    /// Checks that the template is valid JSON for any values, and has only known placeholders.
    pub fn parse(text: &str) -> Result<MessageTemplate, TemplateError> {
        let template = MessageTemplate(text.to_owned());
        let example = template.render(&Message { title: "\"\\\n".to_owned(), ..Message::default() });
        serde_json::from_str::<Value>(&example)?;
        match text.split("{{").skip(1).find_map(|rest| {
            let name = rest.split("}}").next().unwrap_or_default();
            (!Message::default().placeholders().iter().any(|(known, _)| *known == name)).then_some(name)
        }) {
            Some(name) => Err(TemplateError::Placeholder { name: name.to_owned() }),
            None => Ok(template),
        }
    }

    /// Fills in all placeholders in one pass: values are not expanded again.
    fn render(&self, message: &Message) -> String {
        let mut out = String::new();
        let mut rest = self.0.as_str();
        while let Some((before, after)) = rest.split_once("{{") {
            out.push_str(before);
            let placeholder = message
                .placeholders()
                .into_iter()
                .find(|(name, _)| after.strip_prefix(name).is_some_and(|after| after.starts_with("}}")));
            match placeholder {
                Some((name, value)) => {
                    out.push_str(&json_escape(value));
                    rest = &after[name.len() + 2..];
                }
                None => {
                    out.push_str("{{");
                    rest = after;
                }
            }
        }
        out.push_str(rest);
        out
    }
}

impl Message {
    fn placeholders(&self) -> [(&'static str, &str); 7] {
        [
            ("title", &self.title),
            ("text", &self.text),
            ("owner", &self.owner),
            ("target", &self.target),
            ("revision", &self.revision),
            ("commit", &self.commit),
            ("level", &self.level),
        ]
    }
}

/// A text escaped for a JSON string, without the quotes.
fn json_escape(text: &str) -> String {
    let quoted = Value::String(text.to_owned()).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Destination and template of notifications.
pub struct Notifier {
    pub to: WebhookClient,
    pub template: Reloadable<MessageTemplate>,
}

impl Notifier {
    /// Runs until the board is closed and all its entries are sent.
    pub async fn run(self, board: Arc<StatusBoard>) {
        let mut updates = board.subscribe();
        let mut last = board.began.0.try_into().unwrap_or(0);
        let mut failed = String::new();
        loop {
            let is_over = updates.borrow_and_update().is_none();
            let later = board.entries_after(last, usize::MAX);
            if later.missed {
                warn!(to = %self.to.shown(), "dropped notifications: delivery is slower than the log");
            }
            for entry in later.notes {
                last = entry.number;
                if is_notifiable(&entry) && !is_repeated_failure(&entry, &mut failed) {
                    self.send(&entry, &board).await;
                }
            }
            if is_over || updates.changed().await.is_err() {
                return;
            }
        }
    }

    async fn send(&self, entry: &LogEntry, board: &StatusBoard) {
        let (subject, status) = (&board.subject, board.status());
        let short = |id: &str| id.chars().take(12).collect();
        let message = Message {
            title: format!("abide {}/{}: {}", subject.target, subject.owner, entry.title),
            text: entry.text.clone(),
            owner: subject.owner.clone(),
            target: subject.target.clone(),
            revision: short(status.source.revision.as_str()),
            commit: short(status.source.commit.as_deref().unwrap_or_default()),
            level: entry.level.word().to_owned(),
        };
        let body = self.template.get().render(&message);
        for nth in 1..=MAX_ATTEMPTS {
            match self.to.post(body.clone(), SEND_TIMEOUT).await {
                Ok(()) => {
                    info!(to = %self.to.shown(), kind = entry.kind.word(), "notification sent");
                    return;
                }
                Err(error) if error.may_retry && nth < MAX_ATTEMPTS => {
                    warn!(to = %self.to.shown(), why = %error, "cannot send a notification: retrying");
                }
                Err(error) => {
                    warn!(to = %self.to.shown(), why = %error, "cannot send a notification: dropped");
                    return;
                }
            }
            tokio::time::sleep(DELAYS.after(nth)).await;
        }
    }
}

fn is_notifiable(entry: &LogEntry) -> bool {
    match entry.kind {
        Kind::ExecutionFinished | Kind::Problems | Kind::ProblemsFixed | Kind::NotConverging => true,
        Kind::Leading | Kind::Failure | Kind::Recovered | Kind::RolledBack | Kind::Source => true,
        Kind::Read | Kind::Waiting | Kind::Changed | Kind::Held | Kind::ExecutionStarted => false,
        Kind::Step | Kind::Soaking | Kind::Relaunched | Kind::Converged | Kind::Requested => false,
    }
}

/// Whether an execution failed exactly as the one before: repeated failures are sent once.
fn is_repeated_failure(entry: &LogEntry, failed: &mut String) -> bool {
    if entry.kind != Kind::ExecutionFinished {
        return false;
    }
    let did =
        matches!(&entry.details, EventDetails::ExecutionFinished { summary, .. } if !summary.is_empty());
    let same = !did && !entry.text.is_empty() && *failed == entry.text;
    failed.clone_from(&entry.text);
    same
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholder_values_are_escaped() {
        let message = Message {
            title: "say \"hi\"".to_owned(),
            text: "{{level}}\nC:\\x".to_owned(),
            level: "error".to_owned(),
            ..Message::default()
        };
        let filled = MessageTemplate::parse(DEFAULT_TEMPLATE).expect("a template").render(&message);
        let value: Value = serde_json::from_str(&filled).expect("JSON");
        assert_eq!(value["text"], "say \"hi\"\n{{level}}\nC:\\x");
        assert!(MessageTemplate::parse("{\"a\": {{title}}}").is_err(), "not between quotes");
        assert!(
            MessageTemplate::parse("{\"a\": \"{{titel}}\"}")
                .is_err_and(|why| why.to_string().contains("titel"))
        );
        assert!(MessageTemplate::parse("{\"nested\": {\"a\": {\"b\": 1}}, \"t\": \"{{ text }}\"}").is_err());
        assert!(MessageTemplate::parse("{\"nested\": {\"a\": {\"b\": 1}}, \"t\": \"{{text}}\"}").is_ok());
    }
}
