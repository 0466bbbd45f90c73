//! Run history per owner, and the changes of single instances in it: who changed what, when, and the result.
//!
//! `history/OWNER/TIME` is one run that executed steps. It is written when the run starts, with `exit` null, so that
//! a killed run has an entry, too. The newest [`MAX_ENTRIES`] are kept.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::clock;
use crate::contract::{HistoryEntry, HistoryStep, InstanceChange, OperationCounts, StepSummary};
use crate::execute::StepResult;
use crate::ids;
use crate::model::{HeldChange, InstanceKey, Plan, Step, StepOutcome, Time};
use crate::store::{Error, Store, Txn, keys};

/// Timeout of a history write: it must not delay the run.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of steps listed per entry.
const MAX_STEPS: usize = 1000;
/// Maximum number of failed steps with a message per entry, and its length.
const MAX_MESSAGES: usize = 20;
const MAX_MESSAGE_CHARS: usize = 500;
/// Maximum number of entries per owner.
pub const MAX_ENTRIES: usize = 1000;
/// Maximum number of old entries deleted with a new one: a long backlog is reduced over several writes.
const MAX_PRUNED_PER_WRITE: usize = 100;

fn entry_key(owner: &str, at: Time) -> String {
    keys::history(owner, &ids::ordered_id(at))
}

/// Adds an entry and deletes the oldest ones beyond the limit.
pub async fn add<S: Store>(state: &S, owner: &str, at: Time, entry: &HistoryEntry) -> Result<(), Error> {
    add_at(state, owner, &entry_key(owner, at), entry).await
}

async fn add_at<S: Store>(state: &S, owner: &str, key: &str, entry: &HistoryEntry) -> Result<(), Error> {
    // If the count fails, the next write prunes.
    let (oldest, count) =
        state.slice(&keys::owner_history_prefix(owner), 0, MAX_PRUNED_PER_WRITE).await.unwrap_or_default();
    let over = (count + 1).saturating_sub(MAX_ENTRIES);
    let new = Txn::put(key, text(entry));
    let txn = oldest.iter().take(over).fold(new, |txn, old| txn.and(Txn::delete(&*old.key)));
    state.txn(txn).await.map(|_| ())
}

/// The newest entries of an owner, newest first.
pub async fn newest<S: Store>(state: &S, owner: &str, most: usize) -> Result<Vec<HistoryEntry>, Error> {
    let key = keys::owner_history_prefix(owner);
    let (_, count) = state.slice(&key, 0, 0).await?;
    let (entries, _) = state.slice(&key, count.saturating_sub(most), most).await?;
    Ok(entries.iter().rev().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect())
}

/// The result of a run.
pub struct RunEnd {
    pub exit: u8,
    /// Only of an apply; `Some(None)`: not verified.
    pub converged: Option<Option<bool>>,
    pub failed: usize,
    pub steps: Vec<HistoryStep>,
}

fn text(entry: &HistoryEntry) -> String {
    serde_json::to_string(entry).unwrap_or_default()
}

/// Runs `work` and records its start and its result in one entry. A failed write does not delay `work`.
pub async fn record_run<S: Store, T>(
    state: &S,
    owner: &str,
    started: HistoryEntry,
    work: impl Future<Output = (T, RunEnd)>,
) -> T {
    let at = clock::now();
    let initial = HistoryEntry { at: at.to_string(), by: user_at_host(), ..started };
    let key = entry_key(owner, at);
    let adding = tokio::time::timeout(WRITE_TIMEOUT, add_at(state, owner, &key, &initial));
    let ((done, end), _) = tokio::join!(work, adding);
    // The result replaces the first entry, or is the only one if that write failed.
    let RunEnd { exit, converged, failed, steps } = end;
    let entry = HistoryEntry { exit: Some(exit), converged, failed: Some(failed), steps, ..initial };
    let ending = state.txn(Txn::put(&key, text(&entry)));
    let _ = tokio::time::timeout(WRITE_TIMEOUT, ending).await;
    done
}

/// Number of steps per operation, of instances that they change, and of instances that are held. `plan` may be a component
/// of a larger plan: held instances belong to no component, so the caller passes those of the whole plan.
pub fn summary(plan: &Plan, held: &[HeldChange]) -> OperationCounts {
    let mut summary = OperationCounts::default();
    plan.steps().for_each(|step| *summary.of(step.op) += 1);
    summary.instances = plan.steps().map(|step| &step.instance).collect::<BTreeSet<_>>().len();
    summary.held = held.len();
    summary.unknown = held.iter().filter(|held| held.reason.is_unknown()).count();
    summary
}

/// The steps of a plan for the entry at its start: their outcome is not known yet.
pub fn planned_steps(plan: &Plan) -> Vec<HistoryStep> {
    let step = |step: &Step| HistoryStep {
        instance: step.instance.clone(),
        op: step.op,
        outcome: StepOutcome::Unknown,
        message: String::new(),
    };
    plan.steps().take(MAX_STEPS).map(step).collect()
}

/// The last changes of an instance: when, by whom, to which revision, and their outcome.
pub fn changes(history: &[HistoryEntry], instance: &InstanceKey) -> Vec<InstanceChange> {
    const SHOWN: usize = 10;
    let of_it = |entry: &HistoryEntry| {
        let steps = entry.steps.iter().filter(|step| step.instance == *instance);
        let did: Vec<StepSummary> =
            steps.map(|step| StepSummary { op: step.op, outcome: step.outcome }).collect();
        let HistoryEntry { at, by, source, revision, commit, .. } = entry;
        (!did.is_empty()).then(|| InstanceChange {
            at: at.clone(),
            by: by.clone(),
            source: source.clone(),
            revision: revision.clone(),
            commit: commit.clone(),
            did,
        })
    };
    history.iter().rev().filter_map(of_it).take(SHOWN).collect()
}

/// The results of a run per instance, for its history entry; of a very large run only the first ones.
pub fn steps(ended: &[StepResult]) -> Vec<HistoryStep> {
    let mut left = MAX_MESSAGES;
    let mut step = |one: &StepResult| {
        let shows = !one.outcome.is_well() && one.outcome != StepOutcome::Skipped && left > 0;
        left -= usize::from(shows);
        let message = if shows { shorten(&one.message) } else { String::new() };
        HistoryStep { instance: one.instance.clone(), op: one.op, outcome: one.outcome, message }
    };
    ended.iter().take(MAX_STEPS).map(&mut step).collect()
}

/// The beginning of a message.
fn shorten(message: &str) -> String {
    match message.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message.to_owned(),
    }
}

/// The user who runs this: from `USER`, otherwise by uid.
pub fn user() -> String {
    use nix::unistd::{User, geteuid};
    let from_env = std::env::var("USER").ok().filter(|name| !name.is_empty());
    let from_uid = || User::from_uid(geteuid()).ok().flatten().map(|user| user.name);
    from_env.or_else(from_uid).unwrap_or_else(|| format!("uid {}", geteuid()))
}

/// The user who runs this, and the host name.
pub fn user_at_host() -> String {
    format!("{}@{}", user(), crate::proc::host_name())
}
