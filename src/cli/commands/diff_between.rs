//! `abide diff --between`: field-level differences between two trees of manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::cli::args::PlainForm;
use crate::cli::commands::diff::{fields, lines};
use crate::cli::commands::plan::args::DiffArgs;
use crate::cli::commands::plan::groups::format_hosts;
use crate::cli::inventories::load_offline;
use crate::cli::output::print::{self, BOLD, DIM, Printer, count};
use crate::cli::{Exit, Failure};
use crate::contract::{self, FieldDifference, Sides};
use crate::manifest::Severity;
use crate::model::{Desired, DesiredInstance, HostKey, InstanceKey, ProcessKey, Spec};
use crate::reconcile::field_differences::{ChangedPart, SecretView};

pub fn run(old: &Path, new: &Path, args: &DiffArgs, printer: &Printer) -> Result<Exit, Failure> {
    let old = read(old, args, printer)?;
    let new = read(new, args, printer)?;
    let differences = differences(&old, &new);
    match args.output {
        PlainForm::Text => printer.styled(&text(&differences)),
        PlainForm::Json => {
            let rows: Vec<contract::Difference> = differences.iter().map(row).collect();
            let json = serde_json::to_string_pretty(&rows);
            let json =
                json.map_err(|error| Failure::new(Exit::Changes, format!("cannot write JSON: {error}")))?;
            printer.data(&(json + "\n"));
        }
    }
    Ok(if differences.is_empty() { Exit::Done } else { Exit::Failed })
}

fn read(path: &Path, args: &DiffArgs, printer: &Printer) -> Result<Desired, Failure> {
    let config = args.input.target.config.as_ref();
    let loaded = load_offline(&[path.to_path_buf()], &args.input.limits.limits(), config, printer)?;
    let shown = loaded.problems.iter().filter(|p| p.severity == Severity::Error || !printer.is_quiet());
    printer.to_stderr(&shown.map(|problem| print::problem(problem) + "\n").collect::<String>());
    match loaded.errors() {
        0 => Ok(loaded.desired),
        errors => {
            let message = format!("{} in the manifests: nothing was compared", count(errors, "error"));
            Err(Failure::new(Exit::InvalidManifest, message))
        }
    }
}

/// An instance that differs between the two.
struct Difference<'a> {
    key: &'a InstanceKey,
    /// `None`: not declared.
    old: Option<&'a DesiredInstance>,
    new: Option<&'a DesiredInstance>,
    fields: Vec<ChangedPart>,
}

impl Difference<'_> {
    fn state(of: Option<&DesiredInstance>) -> Option<String> {
        of.map(|want| want.origin.state.word().to_owned())
    }
}

fn differences<'a>(old: &'a Desired, new: &'a Desired) -> Vec<Difference<'a>> {
    let keys: BTreeSet<&InstanceKey> = old.instances.keys().chain(new.instances.keys()).collect();
    let empty = Spec::default();
    let difference = |key: &'a InstanceKey| {
        let (old, new) = (old.instances.get(key), new.instances.get(key));
        let spec = |want: Option<&'a DesiredInstance>| want.map(|want| &**want.spec);
        let mut parts =
            fields(spec(old).unwrap_or(&empty), spec(new).unwrap_or(&empty), &SecretView::default());
        if old.is_none() {
            // A process that is not declared has no values, also no defaults.
            parts.iter_mut().for_each(|(_, old, _)| *old = None);
        }
        if new.is_none() {
            parts.iter_mut().for_each(|(_, _, new)| *new = None);
        }
        let is_same = Difference::state(old) == Difference::state(new) && parts.is_empty();
        (!is_same).then_some(Difference { key, old, new, fields: parts })
    };
    keys.into_iter().filter_map(difference).collect()
}

fn row(difference: &Difference<'_>) -> contract::Difference {
    let Difference { key, old, new, fields } = difference;
    let fields = fields.iter().cloned().map(|(field, old, new)| FieldDifference { field, old, new });
    contract::Difference {
        instance: (*key).clone(),
        moved_from: None,
        state: Sides { old: Difference::state(*old), new: Difference::state(*new) },
        owner: Sides { old: None, new: None },
        given: Some(fields.collect()),
        live: None,
        unknown: None,
        files: Vec::new(),
        held: None,
        at: new.or(*old).map(|want| want.origin.place.to_string()),
    }
}

/// Groups instances of a process that have the same differences.
fn text(differences: &[Difference<'_>]) -> String {
    let mut alike: BTreeMap<(ProcessKey, String), Vec<&HostKey>> = BTreeMap::new();
    for difference in differences {
        alike.entry((difference.key.process(), body(difference))).or_default().push(&difference.key.host);
    }
    let blocks = alike.into_iter().map(|((process, body), hosts)| {
        format!("{BOLD}{process}{BOLD:#} {}\n{body}\n", format_hosts(&hosts))
    });
    let text: String = blocks.collect();
    if text.is_empty() { "no differences\n".to_owned() } else { text }
}

fn body(difference: &Difference<'_>) -> String {
    let Difference { old, new, fields, .. } = difference;
    let place = |want: Option<&DesiredInstance>| match want {
        Some(want) => want.origin.place.to_string(),
        None => "not declared".to_owned(),
    };
    let mut text = format!("  {DIM}A: {}{DIM:#}\n  {DIM}B: {}{DIM:#}\n", place(*old), place(*new));
    let (before, after) = (Difference::state(*old), Difference::state(*new));
    if before != after {
        text.push_str(&lines("", &[("state".to_owned(), before, after)]));
    }
    text + &lines("", fields)
}
