//! The history of an owner, and what it says of single instances: who changed what, when, and how it ended.
//!
//! `history/OWNER/TIME` is one run that did something. The newest [`KEPT`] are kept.

use serde_json::{Value, json};

use crate::execute::Ended;
use crate::model::Time;
use crate::store::{Error, Outcome, Store, Txn};

/// So many entries of an owner are kept.
pub const KEPT: usize = 1000;
/// So many older ones go with a new one, at most: where there never was an end to it, it is reached bit by bit.
const AT_ONCE: usize = 100;

/// Adds an entry, and the oldest go with that.
pub async fn add<S: Store>(state: &S, owner: &str, at: Time, entry: &Value) -> Result<(), Error> {
    let place = format!("history/{owner}/");
    // Where it cannot be counted now, it is counted with the next one.
    let (oldest, count) = state.slice(&place, 0, AT_ONCE).await.unwrap_or_default();
    let over = (count + 1).saturating_sub(KEPT);
    let mut moment = at.0;
    loop {
        let key = format!("{place}{moment:013}");
        // Two may end at the same moment, and both are told of.
        let new = Txn::put(&key, entry.to_string()).only_if(&key, 0);
        let txn = oldest.iter().take(over).fold(new, |txn, old| txn.and(Txn::delete(&*old.key)));
        match state.txn(txn).await? {
            Outcome::Written(_) => return Ok(()),
            Outcome::Conflict(_) => moment += 1,
        }
    }
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
pub fn steps(ended: &[Ended]) -> Value {
    const MOST: usize = 1000;
    let step =
        |one: &Ended| json!({"instance": one.instance, "op": one.op.word(), "outcome": one.outcome.word()});
    ended.iter().take(MOST).map(step).collect()
}

/// Whoever runs this: as he says, else as the machine knows him.
pub fn user() -> String {
    use nix::unistd::{User, geteuid};
    let said = std::env::var("USER").ok().filter(|name| !name.is_empty());
    let known = || User::from_uid(geteuid()).ok().flatten().map(|user| user.name);
    said.or_else(known).unwrap_or_else(|| format!("uid {}", geteuid()))
}

/// Whoever runs this, and where.
pub fn whoever() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}@{}", user(), host.trim())
}
