//! A wish for what was there before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::model::{Desired, InstanceKey, Origin, ProcessKey, Seen};

/// These processes as they were: each instance with the spec that it ran with, or was given. What was not there before,
/// or of which nobody knows the spec, is left out.
pub fn as_before(
    desired: &Desired,
    before: &BTreeMap<InstanceKey, Seen>,
    processes: &BTreeSet<ProcessKey>,
) -> Desired {
    let mut back = Desired::default();
    for (key, want) in desired.instances.iter().filter(|(_, want)| processes.contains(&want.origin.declared))
    {
        let seen = before.get(key);
        let old = seen.and_then(|seen| match seen.running {
            Some(true) => seen.live.spec().or(seen.given.spec()),
            Some(false) | None => None,
        });
        let Some(old) = old else { continue };
        let mut want = want.clone();
        want.spec = Arc::clone(old);
        // All at once, and with everything that used to apply gone with the rollout.
        want.origin = Arc::new(Origin { rollout: None, depends_on: Vec::new(), ..(*want.origin).clone() });
        back.instances.insert(key.clone(), want);
    }
    back
}
