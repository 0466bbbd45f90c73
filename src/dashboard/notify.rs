//! Notifications: a webhook request for each notable event of the control loop.
//!
//! A separate task reads the log of the status board, so the control loop never waits for a delivery. An undelivered
//! message is dropped with a warning in the log. The URL is a secret; messages show only its host.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::alerts::MessageTemplate;
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

/// Placeholders of `--notify-template`.
pub const PLACEHOLDERS: &[&str] = &["title", "text", "owner", "target", "revision", "commit", "level"];

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
        let body = self.template.get().render(&message.placeholders());
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
