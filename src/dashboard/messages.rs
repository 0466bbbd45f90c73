//! What people are told without asking: a request to a chat's webhook for every pass that did something, for failures,
//! problems of the manifests, what does not converge, trouble, and who leads.
//!
//! A task of its own reads the board's notes, like any reader of events: the loop never waits for it, and what it cannot
//! deliver in time is lost with a word in the log. The address is a secret: of it, only the host is ever shown.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tracing::{info, warn};

use crate::control::board::{Board, Kind, Note};
use crate::http::{Hook, Reloaded};

/// What is sent unless somebody has another wish.
pub const USUAL: &str = r#"{"text": "{{title}}\n{{text}}"}"#;

/// How long one try may take, how often it is tried, and how long to wait between.
const TIME: Duration = Duration::from_secs(10);
const TRIES: u32 = 6;
const FIRST: Duration = Duration::from_millis(500);

/// A JSON text with places for words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(String);

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

impl Template {
    /// It must be JSON, whatever is filled in.
    pub fn parse(text: &str) -> Result<Template, String> {
        let template = Template(text.to_owned());
        let example = template.filled(&Message { title: "\"\\\n".to_owned(), ..Message::default() });
        serde_json::from_str::<Value>(&example)
            .map_err(|error| format!("it is no JSON once its places are filled: {error}"))?;
        match text.split("{{").skip(1).find_map(|rest| {
            let name = rest.split("}}").next().unwrap_or_default();
            (!Message::default().places().iter().any(|(known, _)| *known == name)).then_some(name)
        }) {
            Some(name) => Err(format!(
                "there is no {{{{{name}}}}}: title, text, owner, target, revision, commit and level are there"
            )),
            None => Ok(template),
        }
    }

    /// In one go: what is filled in is not looked at again.
    fn filled(&self, message: &Message) -> String {
        let mut out = String::new();
        let mut rest = self.0.as_str();
        while let Some((before, after)) = rest.split_once("{{") {
            out.push_str(before);
            let place = message
                .places()
                .into_iter()
                .find(|(name, _)| after.strip_prefix(name).is_some_and(|after| after.starts_with("}}")));
            match place {
                Some((name, value)) => {
                    out.push_str(&escaped(value));
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
    fn places(&self) -> [(&'static str, &str); 7] {
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
fn escaped(text: &str) -> String {
    let quoted = Value::String(text.to_owned()).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Where to, and in which form.
pub struct Messages {
    pub to: Hook,
    pub template: Reloaded<Template>,
}

impl Messages {
    /// Goes on until the board is closed, and all that was noted till then is sent.
    pub async fn run(self, board: Arc<Board>) {
        let mut news = board.news();
        let mut last = board.began.0.try_into().unwrap_or(0);
        let mut failed = String::new();
        loop {
            let is_over = news.borrow_and_update().is_none();
            let later = board.after(last, usize::MAX);
            if later.missed {
                warn!(to = %self.to.shown(), "some messages were not sent in time, and are lost");
            }
            for note in later.notes {
                last = note.number;
                if is_for_people(&note) && !is_the_same_again(&note, &mut failed) {
                    self.send(&note, &board).await;
                }
            }
            if is_over || news.changed().await.is_err() {
                return;
            }
        }
    }

    async fn send(&self, note: &Note, board: &Board) {
        let (subject, known) = (&board.subject, board.known());
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
        let body = self.template.get().filled(&message);
        let mut wait = FIRST;
        for nth in 1..=TRIES {
            match self.to.post(body.clone(), TIME).await {
                Ok(()) => {
                    info!(to = %self.to.shown(), kind = note.kind.word(), "told");
                    return;
                }
                Err((why, true)) if nth < TRIES => {
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

fn is_for_people(note: &Note) -> bool {
    match note.kind {
        Kind::Done | Kind::Problems | Kind::Mended | Kind::NotConverging => true,
        Kind::Leading | Kind::Trouble | Kind::Recovered | Kind::RolledBack | Kind::Source => true,
        Kind::Read | Kind::Waiting | Kind::Changed | Kind::Held | Kind::Doing => false,
        Kind::Step | Kind::Soaking | Kind::Relaunched | Kind::Converged | Kind::Asked => false,
    }
}

/// What fails in the same way at every try is told once, until something else was done.
fn is_the_same_again(note: &Note, failed: &mut String) -> bool {
    if note.kind != Kind::Done {
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
        let filled = Template::parse(USUAL).expect("a template").filled(&message);
        let value: Value = serde_json::from_str(&filled).expect("JSON");
        assert_eq!(value["text"], "say \"hi\"\n{{level}}\nC:\\x");
        assert!(Template::parse("{\"a\": {{title}}}").is_err(), "not between quotes");
        assert!(Template::parse("{\"a\": \"{{titel}}\"}").is_err_and(|why| why.contains("titel")));
        assert!(Template::parse("{\"nested\": {\"a\": {\"b\": 1}}, \"t\": \"{{ text }}\"}").is_err());
        assert!(Template::parse("{\"nested\": {\"a\": {\"b\": 1}}, \"t\": \"{{text}}\"}").is_ok());
    }
}
