//! What people are told without asking: a request to a chat's webhook for every pass that did something, for failures,
//! problems of the manifests, what does not converge, trouble, and who leads.
//!
//! A task of its own reads the board's notes, like any reader of events: the loop never waits for it, and what it cannot
//! deliver in time is lost with a word in the log. The address is a secret: of it, only the host is ever shown.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tracing::{info, warn};

use crate::control::status::{Kind, LogEntry, StatusBoard};
use crate::http::{Reloadable, WebhookClient};

/// What is sent unless somebody has another wish.
pub const DEFAULT_TEMPLATE: &str = r#"{"text": "{{title}}\n{{text}}"}"#;

/// How long one try may take, how often it is tried, and how long to wait between.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_ATTEMPTS: u32 = 6;
const FIRST_DELAY: Duration = Duration::from_millis(500);

/// A JSON text with places for words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageTemplate(String);

/// What is filled in.
#[derive(Clone, Debug, Default)]
pub struct Message {
    pub title: String,
    pub text: String,
    pub owner: String,
    pub target: String,
    pub revision: String,
    /// Empty: it is none.
    pub commit: String,
    pub level: String,
}

impl MessageTemplate {
    /// It must be JSON, whatever is filled in.
    pub fn parse(text: &str) -> Result<MessageTemplate, String> {
        let template = MessageTemplate(text.to_owned());
        let example = template.render(&Message { title: "\"\\\n".to_owned(), ..Message::default() });
        serde_json::from_str::<Value>(&example)
            .map_err(|error| format!("it is no JSON once its places are filled: {error}"))?;
        match text.split("{{").skip(1).find_map(|rest| {
            let name = rest.split("}}").next().unwrap_or_default();
            (!Message::default().placeholders().iter().any(|(known, _)| *known == name)).then_some(name)
        }) {
            Some(name) => Err(format!(
                "there is no {{{{{name}}}}}: title, text, owner, target, revision, commit and level are there"
            )),
            None => Ok(template),
        }
    }

    /// In one go: what is filled in is not looked at again.
    fn render(&self, message: &Message) -> String {
        let mut out = String::new();
        let mut rest = self.0.as_str();
        while let Some((before, after)) = rest.split_once("{{") {
            out.push_str(before);
            let place = message
                .placeholders()
                .into_iter()
                .find(|(name, _)| after.strip_prefix(name).is_some_and(|after| after.starts_with("}}")));
            match place {
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

/// As it stands between quotes in JSON.
fn json_escape(text: &str) -> String {
    let quoted = Value::String(text.to_owned()).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Where to, and in which form.
pub struct Notifier {
    pub to: WebhookClient,
    pub template: Reloadable<MessageTemplate>,
}

impl Notifier {
    /// Goes on until the board is closed, and all that was noted till then is sent.
    pub async fn run(self, board: Arc<StatusBoard>) {
        let mut news = board.subscribe();
        let mut last = board.began.0.try_into().unwrap_or(0);
        let mut failed = String::new();
        loop {
            let is_over = news.borrow_and_update().is_none();
            let later = board.entries_after(last, usize::MAX);
            if later.missed {
                warn!(to = %self.to.shown(), "some messages were not sent in time, and are lost");
            }
            for note in later.notes {
                last = note.number;
                if is_notifiable(&note) && !is_repeated_failure(&note, &mut failed) {
                    self.send(&note, &board).await;
                }
            }
            if is_over || news.changed().await.is_err() {
                return;
            }
        }
    }

    async fn send(&self, note: &LogEntry, board: &StatusBoard) {
        let (subject, known) = (&board.subject, board.status());
        let short = |id: &str| id.chars().take(12).collect();
        let message = Message {
            title: format!("abide {}/{}: {}", subject.target, subject.owner, note.title),
            text: note.text.clone(),
            owner: subject.owner.clone(),
            target: subject.target.clone(),
            revision: short(&known.revision),
            commit: short(known.commit.as_deref().unwrap_or_default()),
            level: note.level.word().to_owned(),
        };
        let body = self.template.get().render(&message);
        let mut wait = FIRST_DELAY;
        for nth in 1..=MAX_ATTEMPTS {
            match self.to.post(body.clone(), SEND_TIMEOUT).await {
                Ok(()) => {
                    info!(to = %self.to.shown(), kind = note.kind.word(), "told");
                    return;
                }
                Err((why, true)) if nth < MAX_ATTEMPTS => {
                    warn!(to = %self.to.shown(), %why, "a message could not be sent: trying again");
                }
                Err((why, _)) => {
                    warn!(to = %self.to.shown(), %why, "a message could not be sent, and is lost");
                    return;
                }
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
    }
}

fn is_notifiable(note: &LogEntry) -> bool {
    match note.kind {
        Kind::ExecutionFinished | Kind::Problems | Kind::ProblemsFixed | Kind::NotConverging => true,
        Kind::Leading | Kind::Failure | Kind::Recovered | Kind::RolledBack | Kind::Source => true,
        Kind::Read | Kind::Waiting | Kind::Changed | Kind::Held | Kind::ExecutionStarted => false,
        Kind::Step | Kind::Soaking | Kind::Relaunched | Kind::Converged | Kind::Requested => false,
    }
}

/// What fails in the same way at every try is told once, until something else was done.
fn is_repeated_failure(note: &LogEntry, failed: &mut String) -> bool {
    if note.kind != Kind::ExecutionFinished {
        return false;
    }
    let did = note.more.get("summary").and_then(Value::as_object).is_some_and(|did| !did.is_empty());
    let same = !did && !note.text.is_empty() && *failed == note.text;
    failed.clone_from(&note.text);
    same
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_in_cannot_break_out() {
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
        assert!(MessageTemplate::parse("{\"a\": \"{{titel}}\"}").is_err_and(|why| why.contains("titel")));
        assert!(MessageTemplate::parse("{\"nested\": {\"a\": {\"b\": 1}}, \"t\": \"{{ text }}\"}").is_err());
        assert!(MessageTemplate::parse("{\"nested\": {\"a\": {\"b\": 1}}, \"t\": \"{{text}}\"}").is_ok());
    }
}
