//! Run history per owner, and the changes of single instances in it: who changed what, when, and the result.
//!
//! `history/OWNER/TIME` is one run that executed steps. It is written when the run starts, with `exit` null, so that
//! a killed run has an entry, too. The newest [`MAX_ENTRIES`] are kept.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use crate::clock;
use crate::execute::StepResult;
use crate::ids;
use crate::model::{HeldChange, InstanceKey, Op, Plan, Step, Time};
use crate::store::{Error, Store, Txn, keys};

/// Timeout of a history write: it must not delay the run.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of steps listed per entry.
const MAX_STEPS: usize = 1000;
/// Maximum number of entries per owner.
pub const MAX_ENTRIES: usize = 1000;
/// Maximum number of old entries deleted with a new one: a long backlog is reduced over several writes.
const MAX_PRUNED_PER_WRITE: usize = 100;

fn entry_key(owner: &str, at: Time) -> String {
    keys::history(owner, &ids::ordered_id(at))
}

/// Adds an entry and deletes the oldest ones beyond the limit.
pub async fn add<S: Store>(state: &S, owner: &str, at: Time, entry: &Value) -> Result<(), Error> {
    add_at(state, owner, &entry_key(owner, at), entry).await
}

async fn add_at<S: Store>(state: &S, owner: &str, key: &str, entry: &Value) -> Result<(), Error> {
    // If the count fails, the next write prunes.
    let (oldest, count) =
        state.slice(&keys::owner_history_prefix(owner), 0, MAX_PRUNED_PER_WRITE).await.unwrap_or_default();
    let over = (count + 1).saturating_sub(MAX_ENTRIES);
    let new = Txn::put(key, entry.to_string());
    let txn = oldest.iter().take(over).fold(new, |txn, old| txn.and(Txn::delete(&*old.key)));
    state.txn(txn).await.map(|_| ())
}

/// The newest entries of an owner, newest first.
pub async fn newest<S: Store>(state: &S, owner: &str, most: usize) -> Result<Vec<Value>, Error> {
    let key = keys::owner_history_prefix(owner);
    let (_, count) = state.slice(&key, 0, 0).await?;
    let (entries, _) = state.slice(&key, count.saturating_sub(most), most).await?;
    Ok(entries.iter().rev().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect())
}

/// Runs `work` and records its start and its result in one entry. A failed write does not delay `work`.
pub async fn record_run<S: Store, T>(
    state: &S,
    owner: &str,
    started: Value,
    work: impl Future<Output = (T, Value)>,
) -> T {
    let at = clock::now();
    let entry = |more: Value| {
        let mut entry = started.clone();
        entry["at"] = at.to_string().into();
        entry["by"] = user_at_host().into();
        if let (Some(entry), Value::Object(more)) = (entry.as_object_mut(), more) {
            entry.extend(more);
        }
        entry
    };
    let initial = entry(json!({"exit": null}));
    let key = entry_key(owner, at);
    let adding = tokio::time::timeout(WRITE_TIMEOUT, add_at(state, owner, &key, &initial));
    let ((done, end), _) = tokio::join!(work, adding);
    // The result replaces the first entry, or is the only one if that write failed.
    let ending = state.txn(Txn::put(&key, entry(end).to_string()));
    let _ = tokio::time::timeout(WRITE_TIMEOUT, ending).await;
    done
}

/// Number of steps per operation, of instances that they change, and of instances that are held. `plan` may be a component
/// of a larger plan: held instances belong to no component, so the caller passes those of the whole plan.
pub fn summary(plan: &Plan, held: &[HeldChange]) -> Value {
    let mut summary = serde_json::Map::new();
    for op in Op::ALL {
        summary.insert(op.word().to_owned(), plan.steps().filter(|step| step.op == op).count().into());
    }
    let instances: BTreeSet<&InstanceKey> = plan.steps().map(|step| &step.instance).collect();
    let unknown = held.iter().filter(|held| held.reason.is_unknown()).count();
    summary.insert("instances".to_owned(), instances.len().into());
    summary.insert("held".to_owned(), held.len().into());
    summary.insert("unknown".to_owned(), unknown.into());
    Value::Object(summary)
}

/// The steps of a plan for the entry at its start: their outcome is not known yet.
pub fn planned_steps(plan: &Plan) -> Value {
    let step = |step: &Step| json!({"instance": step.instance, "op": step.op.word(), "outcome": "Unknown"});
    plan.steps().take(MAX_STEPS).map(step).collect()
}

/// The last changes of an instance: when, by whom, to which revision, and their outcome.
pub fn changes(history: &[Value], instance: &str) -> Vec<Value> {
    const SHOWN: usize = 10;
    let of_it = |entry: &Value| {
        let steps = entry["steps"].as_array()?.iter();
        let steps: Vec<&Value> = steps.filter(|step| step["instance"] == instance).collect();
        let did = |step: &&Value| json!({"op": step["op"], "outcome": step["outcome"]});
        let did: Vec<Value> = steps.iter().map(did).collect();
        (!did.is_empty()).then(|| {
            json!({"at": entry["at"], "by": entry["by"], "source": entry["source"], "revision": entry["revision"],
                   "commit": entry["commit"], "did": did})
        })
    };
    history.iter().rev().filter_map(of_it).take(SHOWN).collect()
}

/// The results of a run per instance, for its history entry; of a very large run only the first ones.
pub fn steps(ended: &[StepResult]) -> Value {
    let step = |one: &StepResult| json!({"instance": one.instance, "op": one.op.word(), "outcome": one.outcome.word()});
    ended.iter().take(MAX_STEPS).map(step).collect()
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
