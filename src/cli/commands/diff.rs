//! `abide diff`: field-level differences between manifests, registered specs and running processes.

use std::collections::{BTreeMap, BTreeSet};

use anstyle::{AnsiColor, Style};
use similar::{ChangeTag, InlineChange, TextDiff};

use crate::cli::args::PlainForm;
use crate::cli::commands::plan::args::DiffArgs;
use crate::cli::commands::plan::groups::format_hosts;
use crate::cli::commands::plan::input::{PlanInput, read_and_plan};
use crate::cli::commands::plan::refusal;
use crate::cli::output::print::{BOLD, DIM, Printer, quoted, visible};
use crate::cli::{Exit, Failure};
use crate::contract::{self, FieldDifference, Sides};
use crate::model::{
    AutoType, DesiredInstance, Field, HoldReason, HostKey, InstanceKey, KnownSpec, Op, Plan, Presence,
    Present, ProcessKey, Spec, State,
};
use crate::reconcile::drifted_files;
use crate::reconcile::field_differences::{ChangedPart, SecretView, parts};

pub fn run(args: &DiffArgs, printer: &Printer) -> Result<Exit, Failure> {
    if let [old, new] = &args.between[..] {
        return super::diff_between::run(old, new, args, printer);
    }
    // Exit code 1 means differences, so errors exit with 2.
    let planned = read_and_plan(&args.input, printer).map_err(|failure| match failure.exit {
        Exit::InvalidManifest | Exit::Unreachable | Exit::Forbidden => failure,
        _ => Failure { exit: Exit::Changes, ..failure },
    });
    let (input, plan) = planned.inspect_err(|failure| {
        if let (true, Some(reason)) = (args.output == PlainForm::Json, failure.reason) {
            printer.data(&refusal(failure.exit, Some(reason)));
        }
    })?;
    let differences = differences(&input, &plan);
    match args.output {
        PlainForm::Text => printer.styled(&text(&differences)),
        PlainForm::Json => {
            let rows: Vec<contract::Difference> = differences.iter().map(document).collect();
            let json = serde_json::to_string_pretty(&rows);
            let json =
                json.map_err(|error| Failure::new(Exit::Changes, format!("cannot write JSON: {error}")))?;
            printer.data(&(json + "\n"));
        }
    }
    Ok(if differences.is_empty() { Exit::Done } else { Exit::Failed })
}

/// One instance that differs from its manifest.
struct Difference<'a> {
    key: &'a InstanceKey,
    /// The previous name of a moved process.
    from: Option<&'a InstanceKey>,
    want: Option<&'a DesiredInstance>,
    /// The observed instance; `Err`: why its state is unknown.
    seen: Result<Option<Present<'a>>, &'a str>,
    state: (String, &'static str),
    owner: (Option<&'a str>, &'a str),
    given: Option<Vec<ChangedPart>>,
    live: Option<Vec<ChangedPart>>,
    /// Files of the configmap that differ on the host.
    files: Vec<&'a String>,
    /// Reason the plan holds it.
    held: Option<HoldReason>,
}

/// The instances that a plan changes or holds.
fn differences<'a>(input: &'a PlanInput, plan: &Plan) -> Vec<Difference<'a>> {
    let held: BTreeMap<&InstanceKey, HoldReason> =
        plan.held.iter().map(|held| (&held.instance, held.reason)).collect();
    // A moved process is compared with its observed state under the old name.
    let moved: BTreeMap<&InstanceKey, &InstanceKey> =
        plan.steps().filter_map(|step| Some((&step.instance, step.from.as_ref()?))).collect();
    let old: BTreeSet<&InstanceKey> = moved.values().copied().collect();
    let starts: BTreeSet<&InstanceKey> =
        plan.steps().filter(|step| step.op == Op::Start).map(|step| &step.instance).collect();
    let drifted = drifted(input);
    let touched = plan.steps().map(|step| &step.instance).chain(held.keys().copied());
    let touched = touched.chain(drifted.keys().copied());
    let touched: BTreeSet<&InstanceKey> = touched.filter(|key| !old.contains(key)).collect();
    let mut all = Vec::new();
    for key in touched {
        let wanted = input.loaded.desired.instances.get_key_value(key);
        let row = input.observed.instances.get_key_value(key);
        let Some(key) = wanted.map(|(key, _)| key).or(row.map(|(key, _)| key)) else { continue };
        let want = wanted.map(|(_, want)| want);
        let from = moved.get(key).and_then(|from| input.observed.instances.get_key_value(*from));
        let from = from.map(|(from, _)| from);
        let seen = match input.observed.get(from.unwrap_or(key)) {
            Presence::Present(present) => Ok(Some(present)),
            Presence::Absent => Ok(None),
            Presence::Unknown(why) => Err(why),
        };
        let held = held.get(key).copied();
        let files = drifted.get(key).cloned().unwrap_or_default();
        let mut one = Difference { from, files, ..difference(key, want, seen, held, &input.rules.owner) };
        one.ignore_pending_run(starts.contains(key));
        all.push(one);
    }
    all
}

/// Declared instances with files that differ from the configmap.
fn drifted(input: &PlanInput) -> BTreeMap<&InstanceKey, Vec<&String>> {
    let rules = &input.rules;
    let is_drifted = |(key, want): (_, &'_ DesiredInstance)| {
        let seen = input.observed.instances.get(key).filter(|seen| !seen.specs.drifted_files.is_empty())?;
        let is_ours = seen.owner.as_deref() == Some(rules.owner.as_str());
        let is_meant = rules.selection.selects(key, Some(&want.origin.declared), &want.spec.labels);
        let files: Vec<&String> = drifted_files(seen, want).collect();
        (is_ours && is_meant && !files.is_empty()).then_some((key, files))
    };
    input.loaded.desired.instances.iter().filter_map(is_drifted).collect()
}

impl Difference<'_> {
    /// A process between two runs is as wanted: a scheduled one that is supervised, and a one-shot or a completed one that
    /// this plan does not start.
    fn ignore_pending_run(&mut self, starts: bool) {
        let Some(want) = self.want.filter(|want| want.origin.state == State::Running) else { return };
        let Ok(Some(present)) = self.seen else { return };
        let is_between_runs = match want.spec.monitor.auto_type {
            AutoType::Periodic => present.hosted,
            AutoType::OneShot => !starts,
            AutoType::Resident => !starts && present.seen().completed,
        };
        if is_between_runs && (present.registered || present.hosted) {
            self.state.0 = self.state.1.to_owned();
        }
    }
}

fn difference<'a>(
    key: &'a InstanceKey,
    want: Option<&'a DesiredInstance>,
    seen: Result<Option<Present<'a>>, &'a str>,
    held: Option<HoldReason>,
    owner: &'a str,
) -> Difference<'a> {
    let empty = Spec::default();
    let new: &Spec = want.filter(|want| want.origin.state != State::Absent).map_or(&empty, |want| &want.spec);
    let present = seen.ok().flatten();
    let secrets = present.map(|present| SecretView::of(&present.seen().specs)).unwrap_or_default();
    let compared = |there: bool, version: fn(Present<'a>) -> &'a KnownSpec| {
        let version = present.filter(|_| there).map(version)?;
        version.spec().map(|old| fields(old, new, &secrets))
    };
    let (held_spec, runs) =
        present.map_or((false, false), |present| (present.registered || present.hosted, present.running));
    let absent = seen.is_ok() && present.is_none();
    let state = match (seen, present) {
        (Err(_), _) => "unknown",
        (Ok(_), None) => "absent",
        (Ok(_), Some(present)) => match (present.running, present.hosted, present.registered) {
            (true, true, _) => "running",
            (true, false, _) => "unhosted",
            (false, true, _) => "guarded, not running",
            (false, false, true) => "stopped",
            (false, false, false) => "absent",
        },
    };
    Difference {
        key,
        from: None,
        want,
        seen,
        state: (state.to_owned(), want.map_or(State::Absent, |want| want.origin.state).word()),
        owner: (present.and_then(|present| present.seen().owner.as_deref()), owner),
        given: if absent {
            // A process that does not exist has no values, also no defaults.
            Some(
                fields(&empty, new, &secrets).into_iter().map(|(field, _, new)| (field, None, new)).collect(),
            )
        } else {
            compared(held_spec, |present| &present.seen().specs.registered)
        },
        live: compared(runs, |present| &present.seen().specs.live),
        files: Vec::new(),
        held,
    }
}

/// The parts that differ between two specs, compared by canonical values.
pub fn fields(old: &Spec, new: &Spec, secrets: &SecretView<'_>) -> Vec<ChangedPart> {
    let pairs = old.values().into_iter().zip(new.values());
    let differ: Vec<Field> =
        pairs.filter(|((_, old), (_, new))| old != new).map(|((field, _), _)| field).collect();
    differ.into_iter().flat_map(|field| parts(field, old, new, secrets)).collect()
}

fn document(difference: &Difference<'_>) -> contract::Difference {
    let Difference { key, from, want, seen, state, owner, given, live, files, held } = difference;
    let fields = |parts: &Option<Vec<ChangedPart>>| {
        parts.as_ref().map(|parts| {
            let parts = parts.iter().cloned();
            parts.map(|(field, old, new)| FieldDifference { field, old, new }).collect()
        })
    };
    contract::Difference {
        instance: (*key).clone(),
        moved_from: from.cloned(),
        state: Sides { old: Some(state.0.clone()), new: Some(state.1.to_owned()) },
        owner: Sides { old: owner.0.map(str::to_owned), new: Some(owner.1.to_owned()) },
        given: fields(given),
        live: fields(live),
        unknown: seen.err().map(str::to_owned),
        files: files.iter().map(|path| (*path).clone()).collect(),
        held: *held,
        at: want.map(|want| want.origin.place.to_string()),
    }
}

const REMOVED: Style = AnsiColor::Red.on_default();
const ADDED: Style = AnsiColor::Green.on_default();

/// Groups instances of a process that have the same differences.
fn text(differences: &[Difference<'_>]) -> String {
    let mut alike: BTreeMap<(ProcessKey, String), Vec<&HostKey>> = BTreeMap::new();
    for difference in differences {
        alike.entry((difference.key.process(), body(difference))).or_default().push(&difference.key.host);
    }
    let blocks = alike.into_iter().map(|((process, body), hosts)| {
        format!("{BOLD}{process}{BOLD:#} {}\n{body}\n", format_hosts(&hosts))
    });
    let mut text: String = blocks.collect();
    if text.is_empty() {
        text.push_str("no differences\n");
    }
    text
}

fn body(difference: &Difference<'_>) -> String {
    let Difference { key, from, want, seen, state, owner, given, live, files, held } = difference;
    let mut text = String::new();
    let wanted = want.map_or("declared by no manifest".to_owned(), |want| want.origin.place.to_string());
    text.push_str(&format!("  {DIM}wanted: {wanted}{DIM:#}\n"));
    if let Some(held) = held {
        text.push_str(&format!("  {DIM}held: {}{DIM:#}\n", held.word()));
    }
    if let Err(why) = seen {
        text.push_str(&format!("  cannot compare: {why}\n"));
        return text;
    }
    if let Some(from) = from {
        let names = (from.process().to_string(), key.process().to_string());
        text.push_str(&lines("", &[("name".to_owned(), Some(names.0), Some(names.1))]));
    }
    if state.0 != state.1 {
        // The word of the JSON is older than the term.
        let old = Some(state.0.replace("guarded", "supervised")).filter(|old| old != "absent");
        text.push_str(&lines("", &[("state".to_owned(), old, Some(state.1.to_owned()))]));
    }
    if state.0 != "absent" && owner.0 != Some(owner.1) && want.is_some() {
        let old = owner.0.map(str::to_owned);
        text.push_str(&lines("", &[("owner".to_owned(), old, Some(owner.1.to_owned()))]));
    }
    match (given, live) {
        (Some(given), Some(live)) if given == live => text.push_str(&lines("", given)),
        (given, live) => {
            for (name, parts) in [("given", given), ("live", live)] {
                let both = given.is_some() && live.is_some();
                if let Some(parts) = parts.as_ref().filter(|parts| !parts.is_empty()) {
                    text.push_str(&lines(if both { name } else { "" }, parts));
                }
            }
        }
    }
    for path in files {
        let path = visible(path);
        text.push_str(&format!(
            "  {REMOVED}! {path}{REMOVED:#}: the file on the host differs from the configmap\n"
        ));
    }
    if given.is_none() && live.is_none() && state.0 != "absent" {
        text.push_str("  the process exists, and its spec is unknown\n");
    }
    text
}

/// Old and new lines, with changed words highlighted.
pub fn lines(title: &str, parts: &[ChangedPart]) -> String {
    let mut text = if title.is_empty() { String::new() } else { format!("  {BOLD}{title}{BOLD:#}\n") };
    for (field, old, new) in parts {
        let side = |value: &Option<String>| match value {
            Some(value) => format!("{}: {}\n", visible(field), quoted(value)),
            None => String::new(),
        };
        let (old, new) = (side(old), side(new));
        let diff = TextDiff::from_lines(&old, &new);
        let changes = diff.ops().iter().flat_map(|op| diff.iter_inline_changes(op));
        text.extend(changes.map(|change| line(&change)));
    }
    text
}

fn line(change: &InlineChange<'_, str>) -> String {
    let (sign, style) = match change.tag() {
        ChangeTag::Delete => ('-', REMOVED),
        ChangeTag::Insert => ('+', ADDED),
        ChangeTag::Equal => (' ', Style::new()),
    };
    let strong = style.bold().underline();
    let mut text = format!("  {style}{sign} ");
    for (changed, piece) in change.iter_strings_lossy() {
        let piece = piece.trim_end_matches('\n');
        match changed {
            true => text.push_str(&format!("{style:#}{strong}{piece}{strong:#}{style}")),
            false => text.push_str(piece),
        }
    }
    text + &format!("{style:#}\n")
}
