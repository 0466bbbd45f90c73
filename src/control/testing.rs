//! Fixtures of unit tests: pass results in which everything is as wanted, and steps.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use super::PassResult;
use crate::manifest::{Limits, load_text};
use crate::model::{
    Health, Host, InstanceKey, KnownSpec, ManifestRevision, Now, Observed, ObservedInstance, ObservedSpecs,
    Op, SpecSide, Step, Time,
};
use crate::reconcile::{Caps, Rules, reconcile};

/// The pass over these manifests. `adjust` changes the observation before it is planned.
pub fn pass_result(manifests: &str, adjust: impl FnOnce(&mut Observed)) -> Arc<PassResult> {
    let loaded = load_text("m.yaml", manifests.to_owned(), &Limits::default());
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let (desired, rules) = (Arc::new(loaded.desired), Rules::new(Caps::LOCAL));
    let mut observed = Observed { at: Time(1_000), ..Observed::default() };
    for (key, want) in &desired.instances {
        let spec = KnownSpec::Full(Arc::clone(&want.spec));
        let seen = ObservedInstance {
            registered: Some(true),
            hosted: Some(true),
            running: Some(true),
            owner: Some(rules.owner.as_str().into()),
            specs: ObservedSpecs { registered: spec.clone(), live: spec, ..ObservedSpecs::default() },
            health: Health::Healthy,
            ..ObservedInstance::default()
        };
        observed.instances.insert(key.clone(), seen);
    }
    adjust(&mut observed);
    let plan = reconcile(&desired, &observed, &rules, &Now { at: Time(1_000), offsets: BTreeMap::new() });
    Arc::new(PassResult {
        revision: ManifestRevision::from_text("r1"),
        desired,
        observed: Arc::new(observed),
        rules,
        backing_off: Vec::new(),
        plan,
        rows: OnceLock::new(),
    })
}

/// A start without reasons.
pub fn start_step(instance: InstanceKey) -> Step {
    let host = Host { key: instance.host.clone(), supplier: None, agent_id: None };
    Step {
        id: 1,
        instance,
        host,
        op: Op::Start,
        spec_side: SpecSide::New,
        spec: None,
        revision: None,
        reloaded_fields: Vec::new(),
        pid_stays: false,
        needs_live_check: false,
        from: None,
        why: Vec::new(),
    }
}

/// A process on some hosts.
pub fn process(name: &str, hosts: usize) -> String {
    let hosts: Vec<String> =
        (0..hosts).map(|n| format!("{{ip: 10.1.{}.{}, bk_cloud_id: 0}}", n / 250, n % 250)).collect();
    format!(
        "---\napiVersion: abide/v1\nkind: Process\nmeta: {{namespace: web, name: {name}}}\nhosts: [{}]\n\
         spec:\n  identity: {{proc_name: {name}, setup_path: /opt/{name}, pid_path: /run/{name}.pid, user: app}}\n  \
         control: {{start_cmd: ./{name}}}\n  monitor_policy: {{auto_type: 1}}\n",
        hosts.join(", ")
    )
}
