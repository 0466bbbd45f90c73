//! A plan as people read it: what changes alike on many hosts is one line, and what may hurt comes first.

use std::collections::BTreeMap;

use crate::cli::output::print::{quoted, visible};
use crate::model::{HeldChange, HostKey, InstanceKey, Op, Plan, ProcessKey, Rule, Step, Why};

/// The same steps, for the same reason, on some hosts.
pub struct Group<'a> {
    pub process: ProcessKey,
    pub ops: Vec<Op>,
    pub whys: Vec<&'a Why>,
    pub hosts: Vec<&'a HostKey>,
    /// The first and the last wave, counted from 1.
    pub waves: (usize, usize),
}

/// The same reason for leaving alone, on some hosts.
pub struct HeldGroup<'a> {
    pub process: ProcessKey,
    pub held: &'a HeldChange,
    pub detail: String,
    pub hosts: Vec<&'a HostKey>,
}

/// Destructive ones first.
pub fn groups(plan: &Plan) -> Vec<Group<'_>> {
    let mut chains: BTreeMap<&InstanceKey, Vec<(usize, &Step)>> = BTreeMap::new();
    for (wave, steps) in plan.waves.iter().enumerate() {
        for step in &steps.steps {
            chains.entry(&step.instance).or_default().push((wave + 1, step));
        }
    }
    type Alike<'a> =
        (ProcessKey, Vec<Op>, Vec<(Rule, &'a Option<String>, &'a Option<String>, &'a Option<String>)>);
    let mut alike: BTreeMap<Alike<'_>, Group<'_>> = BTreeMap::new();
    for (key, steps) in chains {
        let ops: Vec<Op> = steps.iter().map(|(_, step)| step.op).collect();
        let mut whys: Vec<&Why> = Vec::new();
        for why in steps.iter().flat_map(|(_, step)| &step.why) {
            // That a field differs from what runs says more than that it differs from what is held.
            let same = |other: &&Why| {
                let sides = |why: &Why| (why.field.clone(), why.old.clone(), why.new.clone());
                *other == why || (why.field.is_some() && sides(other) == sides(why))
            };
            match whys.iter().position(same) {
                Some(at) => whys[at] = if whys[at].rule < why.rule { why } else { whys[at] },
                None => whys.push(why),
            }
        }
        let signs = whys.iter().map(|why| (why.rule, &why.field, &why.old, &why.new)).collect();
        let wave = |at: Option<&(usize, &Step)>| at.map_or(1, |(wave, _)| *wave);
        let (first, last) = (wave(steps.first()), wave(steps.last()));
        let group = alike.entry((key.process(), ops.clone(), signs)).or_insert_with(|| Group {
            process: key.process(),
            ops,
            whys,
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

/// Those that are left alone, reason by reason.
pub fn held(plan: &Plan) -> Vec<HeldGroup<'_>> {
    let mut alike: BTreeMap<(ProcessKey, &'static str, String), HeldGroup<'_>> = BTreeMap::new();
    for held in &plan.held {
        let process = held.instance.process();
        // What only repeats where it is does not keep hosts apart.
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

/// How much what a chain does may hurt: a process that goes, one that is interrupted, one that is told something.
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

/// A reason in words.
pub fn reason(why: &Why) -> String {
    let Why { rule, field, old, new, .. } = why;
    let side = |value: &Option<String>| value.as_deref().map_or("unset".to_owned(), quoted);
    if let Some(field) = field {
        return format!("{}: {} → {}", visible(field), side(old), side(new));
    }
    match rule {
        Rule::NotRegistered => "not registered yet".to_owned(),
        Rule::NotRunning => "not running".to_owned(),
        Rule::NotHosted => "not guarded".to_owned(),
        Rule::Hosted => "guarded, and not to be".to_owned(),
        Rule::NotRun => "has not run as it is wanted".to_owned(),
        Rule::StateStopped => "to be stopped".to_owned(),
        Rule::StateAbsent => "to be absent".to_owned(),
        Rule::Orphan => "ours, and in no manifest any more".to_owned(),
        Rule::Adopted => "adopted: nobody owned it".to_owned(),
        Rule::Moved => format!("renamed: {} → {}", side(old), side(new)),
        Rule::SpecUnknown => match (old, new) {
            (Some(old), Some(new)) => format!("the spec differs, only digests are known: {old} → {new}"),
            _ => "what it was given is not known".to_owned(),
        },
        Rule::GivenDiffers | Rule::LiveDiffers => "its spec differs".to_owned(),
    }
}
