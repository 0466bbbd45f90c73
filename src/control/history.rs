//! What the history says of single instances: who changed what, when, and how it ended.

use serde_json::{Value, json};

use crate::execute::Ended;

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

/// Whoever runs this, and where.
pub fn whoever() -> String {
    let name = std::env::var("USER").unwrap_or_else(|_| "somebody".to_owned());
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{name}@{}", host.trim())
}
