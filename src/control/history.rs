//! The history of an owner, and what it says of single instances: who changed what, when, and how it ended.
//!
//! `history/OWNER/TIME` is one run that did something: it is there from its beginning, with `exit` null, so that nothing is
//! missing of one that was killed. The newest [`KEPT`] are kept.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::clock;
use crate::execute::StepResult;
use crate::model::{HeldChange, InstanceKey, Op, Plan, Step, Time};
use crate::store::{Error, Store, Txn};

/// So long a word in the history is waited for.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// So many steps of a run are told one by one.
const MAX_STEPS: usize = 1000;
/// So many entries of an owner are kept.
pub const MAX_ENTRIES: usize = 1000;
/// So many older ones go with a new one, at most: where there never was an end to it, it is reached bit by bit.
const MAX_PRUNED_PER_WRITE: usize = 100;

/// A place that no other entry has: two may begin at the same moment, and both are told of.
fn entry_key(owner: &str, at: Time) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let nth = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("history/{owner}/{:013}-{}-{nth}", at.0, std::process::id())
}

/// Adds an entry, and the oldest go with that.
pub async fn add<S: Store>(state: &S, owner: &str, at: Time, entry: &Value) -> Result<(), Error> {
    add_at(state, owner, &entry_key(owner, at), entry).await
}

async fn add_at<S: Store>(state: &S, owner: &str, place: &str, entry: &Value) -> Result<(), Error> {
    // Where it cannot be counted now, it is counted with the next one.
    let (oldest, count) =
        state.slice(&format!("history/{owner}/"), 0, MAX_PRUNED_PER_WRITE).await.unwrap_or_default();
    let over = (count + 1).saturating_sub(MAX_ENTRIES);
    let new = Txn::put(place, entry.to_string());
    let txn = oldest.iter().take(over).fold(new, |txn, old| txn.and(Txn::delete(&*old.key)));
    state.txn(txn).await.map(|_| ())
}

/// The newest entries of an owner, the newest first.
pub async fn newest<S: Store>(state: &S, owner: &str, most: usize) -> Result<Vec<Value>, Error> {
    let place = format!("history/{owner}/");
    let (_, count) = state.slice(&place, 0, 0).await?;
    let (entries, _) = state.slice(&place, count.saturating_sub(most), most).await?;
    Ok(entries.iter().rev().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect())
}

/// Does something, and writes down that it is being done, and how it ended, in one entry. What cannot be written down does
/// not hold it up.
pub async fn record_run<S: Store, T>(
    state: &S,
    owner: &str,
    begun: Value,
    work: impl Future<Output = (T, Value)>,
) -> T {
    let at = clock::now();
    let entry = |more: Value| {
        let mut entry = begun.clone();
        entry["at"] = at.to_string().into();
        entry["by"] = user_at_host().into();
        if let (Some(entry), Value::Object(more)) = (entry.as_object_mut(), more) {
            entry.extend(more);
        }
        entry
    };
    let first = entry(json!({"exit": null}));
    let place = entry_key(owner, at);
    let adding = tokio::time::timeout(WRITE_TIMEOUT, add_at(state, owner, &place, &first));
    let ((done, end), _) = tokio::join!(work, adding);
    // Whatever became of the first word, the last one is at the same place.
    let ending = state.txn(Txn::put(&place, entry(end).to_string()));
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

/// What a plan is about to do, for the entry of its beginning: nobody knows yet how it ends.
pub fn planned_steps(plan: &Plan) -> Value {
    let step = |step: &Step| json!({"instance": step.instance, "op": step.op.word(), "outcome": "Unknown"});
    plan.steps().take(MAX_STEPS).map(step).collect()
}

/// The last changes of an instance: when, by whom, to which revision, and how they ended.
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

/// What a run did, instance by instance, for its entry in the history; of a very large one only the beginning.
pub fn steps(ended: &[StepResult]) -> Value {
    let step = |one: &StepResult| json!({"instance": one.instance, "op": one.op.word(), "outcome": one.outcome.word()});
    ended.iter().take(MAX_STEPS).map(step).collect()
}

/// Whoever runs this: as he says, else as the machine knows him.
pub fn user() -> String {
    use nix::unistd::{User, geteuid};
    let said = std::env::var("USER").ok().filter(|name| !name.is_empty());
    let known = || User::from_uid(geteuid()).ok().flatten().map(|user| user.name);
    said.or_else(known).unwrap_or_else(|| format!("uid {}", geteuid()))
}

/// Whoever runs this, and where.
pub fn user_at_host() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}@{}", user(), host.trim())
}
