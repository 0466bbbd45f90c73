//! Groups of plan steps for display: the same change on several hosts is one group, destructive groups come first.

use std::collections::BTreeMap;

use crate::cli::output::print::{quoted, visible};
use crate::model::{HeldChange, HostKey, InstanceKey, Op, Plan, ProcessKey, Reason, Rule, Step};

/// Hosts with the same steps for the same reasons.
pub struct Group<'a> {
    pub process: ProcessKey,
    pub ops: Vec<Op>,
    pub reasons: Vec<&'a Reason>,
    pub hosts: Vec<&'a HostKey>,
    /// The first and the last wave, counted from 1.
    pub waves: (usize, usize),
}

/// Hosts whose change is held for the same reason.
pub struct HeldGroup<'a> {
    pub process: ProcessKey,
    pub held: &'a HeldChange,
    pub detail: String,
    pub hosts: Vec<&'a HostKey>,
}

/// The steps of a plan in groups, destructive groups first.
pub fn groups(plan: &Plan) -> Vec<Group<'_>> {
    let mut chains: BTreeMap<&InstanceKey, Vec<(usize, &Step)>> = BTreeMap::new();
    for (wave, steps) in plan.waves.iter().enumerate() {
        for step in &steps.steps {
            chains.entry(&step.instance).or_default().push((wave + 1, step));
        }
    }
    type GroupKey<'a> =
        (ProcessKey, Vec<Op>, Vec<(Rule, &'a Option<String>, &'a Option<String>, &'a Option<String>)>);
    let mut alike: BTreeMap<GroupKey<'_>, Group<'_>> = BTreeMap::new();
    for (key, steps) in chains {
        let ops: Vec<Op> = steps.iter().map(|(_, step)| step.op).collect();
        let mut reasons: Vec<&Reason> = Vec::new();
        for why in steps.iter().flat_map(|(_, step)| &step.why) {
            // A difference from the running process is shown rather than one from the registered spec.
            let same = |other: &&Reason| {
                let sides = |why: &Reason| (why.field.clone(), why.old.clone(), why.new.clone());
                *other == why || (why.field.is_some() && sides(other) == sides(why))
            };
            match reasons.iter().position(same) {
                Some(at) => reasons[at] = if reasons[at].rule < why.rule { why } else { reasons[at] },
                None => reasons.push(why),
            }
        }
        let signs = reasons.iter().map(|why| (why.rule, &why.field, &why.old, &why.new)).collect();
        let wave = |at: Option<&(usize, &Step)>| at.map_or(1, |(wave, _)| *wave);
        let (first, last) = (wave(steps.first()), wave(steps.last()));
        let group = alike.entry((key.process(), ops.clone(), signs)).or_insert_with(|| Group {
            process: key.process(),
            ops,
            reasons,
            hosts: Vec::new(),
            waves: (first, last),
        });
        group.hosts.push(&key.host);
        group.waves = (group.waves.0.min(first), group.waves.1.max(last));
    }
    let mut groups: Vec<Group<'_>> = alike.into_values().collect();
    groups.sort_by_key(|group| (severity(&group.ops), group.waves, group.process.clone()));
    groups
}

/// The held changes of a plan, grouped by reason.
pub fn held(plan: &Plan) -> Vec<HeldGroup<'_>> {
    let mut alike: BTreeMap<(ProcessKey, &'static str, String), HeldGroup<'_>> = BTreeMap::new();
    for held in &plan.held {
        let process = held.instance.process();
        // The host's name in a detail does not separate groups.
        let host = held.instance.host.to_string();
        let detail =
            held.detail.replace(&format!("host {host}: "), "").replace(&format!("host {host} "), "the host ");
        let key = (process.clone(), held.reason.word(), detail.clone());
        let group = alike.entry(key).or_insert_with(|| HeldGroup {
            process,
            held,
            detail: visible(&detail),
            hosts: Vec::new(),
        });
        group.hosts.push(&held.instance.host);
    }
    alike.into_values().collect()
}

/// Severity of a chain of operations, 0 is the worst: deletion, stop, restart, reload, supervision change, start.
pub fn severity(ops: &[Op]) -> u8 {
    let has = |op: Op| ops.contains(&op);
    let (stops, starts) = (has(Op::Stop) || has(Op::Kill), has(Op::Start));
    match () {
        () if has(Op::Unregister) => 0,
        () if stops && !starts => 1,
        () if stops || has(Op::Restart) => 2,
        () if has(Op::Reload) => 3,
        () if has(Op::Unsupervise) => 4,
        () if starts => 5,
        () => 6,
    }
}

/// "on 0:10.0.0.1", "on 412 hosts (0:10.0.0.1, 0:10.0.0.2, …)".
pub fn format_hosts(hosts: &[&HostKey]) -> String {
    const SHOWN: usize = 5;
    let some: Vec<String> = hosts.iter().take(SHOWN).map(|host| visible(&host.to_string())).collect();
    match hosts.len() {
        1 => format!("on {}", some.join("")),
        all if all <= SHOWN => format!("on {all} hosts ({})", some.join(", ")),
        all => format!("on {all} hosts ({} and {} more)", some.join(", "), all - SHOWN),
    }
}

/// A reason as text.
pub fn reason(why: &Reason) -> String {
    let Reason { rule, field, old, new, .. } = why;
    let side = |value: &Option<String>| value.as_deref().map_or("unset".to_owned(), quoted);
    if let Some(field) = field {
        return format!("{}: {} → {}", visible(field), side(old), side(new));
    }
    match rule {
        Rule::NotRegistered => "not registered yet".to_owned(),
        Rule::NotRunning => "not running".to_owned(),
        Rule::NotHosted => "not supervised".to_owned(),
        Rule::Hosted => "supervised, and should not be".to_owned(),
        Rule::NotRun => "has not run with this spec".to_owned(),
        Rule::StateStopped => "state is stopped".to_owned(),
        Rule::StateAbsent => "state is absent".to_owned(),
        Rule::Orphan => "owned, and declared by no manifest".to_owned(),
        Rule::Adopted => "adopted: had no owner".to_owned(),
        Rule::Moved => format!("renamed: {} → {}", side(old), side(new)),
        Rule::SpecUnknown => match (old, new) {
            (Some(old), Some(new)) => format!("the spec differs, only digests are known: {old} → {new}"),
            _ => "the registered spec is unknown".to_owned(),
        },
        Rule::GivenDiffers | Rule::LiveDiffers => "the spec differs".to_owned(),
    }
}
