//! Plans as text for terminals.

use anstyle::{AnsiColor, Style};

use super::groups::{Group, format_hosts, groups, held, reason, severity};
use super::input::PlanInput;
use crate::cli::output::print::{BOLD, DIM, HINT, WARNING, count, visible};
use crate::model::{Op, Plan};

pub fn text(input: &PlanInput, plan: &Plan, hidden: usize) -> String {
    let mut text = String::new();
    let several = plan.waves.len() > 1;
    for group in groups(plan) {
        text.push_str(&lines(&group, several));
    }
    text.push_str(&held_text(plan));
    for gate in plan.waves.iter().flat_map(|wave| &wave.gates).map(gate).fold(Vec::new(), dedup_consecutive) {
        text.push_str(&format!("{HINT}rollout{HINT:#}: {gate}\n"));
    }
    for note in &plan.notes {
        text.push_str(&format!("{HINT}note{HINT:#}: {}\n", visible(note)));
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(&format!("{BOLD}{}{BOLD:#}\n", summary(input, plan, hidden)));
    text
}

/// The held changes of a plan, grouped by reason.
pub fn held_text(plan: &Plan) -> String {
    let mut text = String::new();
    let held = held(plan);
    if !held.is_empty() {
        text.push_str(&format!("{BOLD}held{BOLD:#}, not changed:\n"));
    }
    for group in held {
        let place = group.held.at.as_ref().map(|at| format!("  {DIM}{at}{DIM:#}")).unwrap_or_default();
        let would = match group.held.steps.as_slice() {
            [] => String::new(),
            steps => format!(" ({})", ops(steps)),
        };
        text.push_str(&format!(
            "  {WARNING}{}{WARNING:#}  {} {}{would}\n      {}{place}\n",
            group.held.reason.word(),
            visible(&group.process.to_string()),
            format_hosts(&group.hosts),
            group.detail,
        ));
        let changed = group.held.why.iter().filter(|why| why.field.is_some());
        text.extend(changed.map(|why| format!("      {DIM}{}{DIM:#}\n", reason(why))));
    }
    text
}

fn lines(group: &Group<'_>, several: bool) -> String {
    let (sign, style) = symbol(&group.ops);
    let waves = match group.waves {
        _ if !several => String::new(),
        (first, last) if first == last => format!("  {DIM}wave {first}{DIM:#}"),
        (first, last) => format!("  {DIM}waves {first}-{last}{DIM:#}"),
    };
    let process = visible(&group.process.to_string());
    let place = format_hosts(&group.hosts);
    let mut text =
        format!("{style}{sign} {}{style:#} {BOLD}{process}{BOLD:#} {place}{waves}\n", ops(&group.ops));
    let mut last = None;
    for why in &group.reasons {
        let at = why.at.as_ref().filter(|at| last != Some(*at));
        last = why.at.as_ref();
        let at = at.map(|at| format!("  {DIM}{at}{DIM:#}")).unwrap_or_default();
        text.push_str(&format!("      {}{at}\n", reason(why)));
    }
    text
}

fn symbol(ops: &[Op]) -> (char, Style) {
    match severity(ops) {
        0 | 1 => ('-', AnsiColor::Red.on_default()),
        2 => ('!', AnsiColor::Yellow.on_default()),
        3 | 4 => ('~', AnsiColor::Cyan.on_default()),
        5 => ('+', AnsiColor::Green.on_default()),
        _ => ('~', Style::new()),
    }
}

pub fn ops(ops: &[Op]) -> String {
    ops.iter().map(|op| op.word()).collect::<Vec<_>>().join(", ")
}

pub fn gate(gate: &crate::model::Gate) -> String {
    let soak = match gate.soak_secs {
        0 => String::new(),
        seconds => format!(", each healthy for {} before the next", crate::model::span(seconds)),
    };
    let back = if gate.auto_rollback { "is rolled back" } else { "stops" };
    let when = match gate.max_failures {
        0 => "at the first failure".to_owned(),
        most => format!("after more than {}", count(most as usize, "failure")),
    };
    format!("{} in batches{soak}; it {back} {when}", visible(&gate.process.to_string()))
}

pub fn dedup_consecutive(mut all: Vec<String>, next: String) -> Vec<String> {
    if !all.contains(&next) {
        all.push(next);
    }
    all
}

/// "3 to start, 1 to restart, 1 held, 20 as wanted".
pub fn summary(input: &PlanInput, plan: &Plan, hidden: usize) -> String {
    let counted = |op: Op| plan.steps().filter(|step| step.op == op).count();
    let mut parts: Vec<String> = Op::ALL
        .into_iter()
        .map(|op| (op, counted(op)))
        .filter(|(_, n)| *n > 0)
        .map(|(op, n)| format!("{n} to {op}"))
        .collect();
    if let (Some(last), 2..) = (parts.last_mut(), plan.waves.len()) {
        last.push_str(&format!(" in {} waves", plan.waves.len()));
    }
    let unknown = plan.held.iter().filter(|held| held.reason.is_unknown()).count();
    let others = plan.held.len() - unknown;
    parts.extend((others > 0).then(|| format!("{others} held")));
    parts.extend((unknown > 0).then(|| format!("{unknown} unknown")));
    let settled = count(plan.in_sync, "instance");
    if hidden > 0 {
        parts.push(format!("{} not shown (--only)", count(hidden, "other step")));
    }
    if parts.is_empty() {
        return match input.loaded.desired.instances.is_empty() {
            true => "nothing to do: the manifests declare no processes".to_owned(),
            false => format!("nothing to do: {settled} as wanted"),
        };
    }
    if plan.in_sync > 0 {
        parts.push(format!("{} as wanted", plan.in_sync));
    }
    parts.join(", ")
}
