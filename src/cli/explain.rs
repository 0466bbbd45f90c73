//! `abide explain`: what a field is, what changing it does, and who gave it its value.

use super::args::Explain;
use super::print::{BOLD, DIM, Printer};
use super::{Exit, Failure};
use crate::manifest::explain::{self, Explanation, Given};
use crate::manifest::grammar::{self, Entry, Need, Section};
use crate::manifest::{self, Code, Limits};
use crate::model::{Effect, Field, ProcessKey, StartMode};
use crate::reconcile::effect::base_effect;

pub fn run(args: &Explain, printer: &Printer) -> Result<Exit, Failure> {
    let Some(field) = &args.field else {
        printer.data(&overview());
        return Ok(Exit::Done);
    };
    if field == "problems" {
        printer.data(&Code::ALL.iter().map(|code| problem(*code)).collect::<String>());
        return Ok(Exit::Done);
    }
    if let Some(code) = Code::ALL.iter().find(|code| code.text().eq_ignore_ascii_case(field)) {
        printer.data(&problem(*code));
        return Ok(Exit::Done);
    }
    let found = explain::find(field).map_err(|meant| {
        let hint = match meant {
            Some(meant) => format!("did you mean {meant}?"),
            None => "`abide explain` lists all fields".to_owned(),
        };
        Failure::new(Exit::Usage, format!("no manifest has a field {field:?}")).hint(hint)
    })?;
    if args.paths.is_empty() {
        printer.data(&explanation(&found));
        return Ok(Exit::Done);
    }
    provenance(args, &found, printer)
}

fn problem(code: Code) -> String {
    format!("{BOLD}{}{BOLD:#}  {:<8} {}\n", code.text(), code.severity().to_string(), code.title())
}

fn provenance(args: &Explain, found: &Explanation, printer: &Printer) -> Result<Exit, Failure> {
    let limits = Limits::default();
    let only: Option<ProcessKey> = match args.process.as_deref().map(str::parse) {
        None => None,
        Some(Ok(key)) => Some(key),
        Some(Err(error)) => return Err(Failure::new(Exit::Usage, format!("--process: {error}"))),
    };
    let Some(path) = found.path.strip_prefix("spec.") else {
        let message = format!("{} is not inherited: only fields of a spec come from Defaults", found.path);
        return Err(Failure::new(Exit::Usage, message));
    };
    let loaded = manifest::load(&args.paths, &limits);
    if loaded.errors() > 0 {
        printer.warning("there are problems in these manifests; `abide validate` lists them");
    }
    let all = explain::given(&loaded, path, &limits);
    let wanted = |given: &&Given| only.as_ref().is_none_or(|only| given.process == *only);
    let lines: Vec<String> = all.iter().filter(wanted).map(line).collect();
    if lines.is_empty() {
        return Err(Failure::new(Exit::Failed, "no such process is declared there"));
    }
    printer.data(&lines.concat());
    Ok(Exit::Done)
}

fn line(given: &Given) -> String {
    let Given { process, path, value, place, inherited } = given;
    let from = if *inherited { ", a Defaults" } else { "" };
    match (value, place) {
        (Some(value), Some(place)) => {
            format!("{process}  {path}: {value}  {DIM}{place}{from}{DIM:#}\n")
        }
        _ => format!("{process}  {path}: {DIM}unset{DIM:#}\n"),
    }
}

fn overview() -> String {
    let mut text = String::new();
    for kind in grammar::ALL_KINDS {
        text.push_str(&format!("{BOLD}{}{BOLD:#}  {}\n", kind.name, kind.about));
        for (path, entry) in explain::paths(kind) {
            text.push_str(&format!("  {path:<44} {}\n", entry.shape.describe()));
        }
        text.push('\n');
    }
    text.push_str("`abide explain FIELD` says more of each.\n");
    text
}

fn explanation(found: &Explanation) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| text.push_str(&format!("{BOLD}{name:<9}{BOLD:#} {value}\n"));
    row("field", &found.path);
    if let Some(entry) = found.entry {
        row("type", &entry.shape.describe());
        row("required", required(entry));
        if let Some(default) = entry.default {
            row("default", default);
        }
        if !entry.aliases.is_empty() {
            row("also", &entry.aliases.join(", "));
        }
        row("meaning", entry.meaning);
        row("source", entry.source.sentence());
        if let Some(field) = Field::from_path(&found.path) {
            row("change", &change(field));
        }
    } else {
        row("meaning", found.kind.about);
    }
    if let Some(inside) = found.inside {
        text.push_str(&fields(inside));
    }
    text
}

fn fields(section: &Section) -> String {
    let mut text = format!("{BOLD}fields{BOLD:#}\n");
    for entry in section.entries.iter().filter(|entry| entry.need != Need::IgnoredInBody) {
        text.push_str(&format!("  {:<24} {}\n", entry.name, entry.meaning));
    }
    text
}

fn required(entry: &Entry) -> &'static str {
    match entry.need {
        Need::Required => "yes",
        Need::Optional => "no",
        Need::RequiredInBody => "no (yes in a request body without apiVersion and kind)",
        Need::IgnoredInBody => "no (ignored)",
    }
}

/// What changing a field does to a running process.
fn change(field: Field) -> String {
    let daemon = base_effect(field, StartMode::Daemon);
    let foreground = base_effect(field, StartMode::Foreground);
    if daemon != foreground {
        return format!(
            "{daemon} (daemon mode: {}), {foreground} (foreground mode: {})",
            meaning(daemon),
            meaning(foreground)
        );
    }
    let note = match daemon {
        Effect::None | Effect::Replace => "",
        Effect::Register => ". `on_change` can say otherwise",
        Effect::Reload => {
            "; without a reload_cmd it restarts. For auto_type 0 the next run uses it. `on_change` can say otherwise"
        }
        Effect::Restart => ". For auto_type 0 the next run uses it. `on_change` can say otherwise",
    };
    format!("{daemon}: {}{note}", meaning(daemon))
}

fn meaning(effect: Effect) -> &'static str {
    match effect {
        Effect::None => "nothing is done",
        Effect::Register => "the engine is told, the process is not touched",
        Effect::Reload => "the process reads its configuration again, its pid stays",
        Effect::Restart => "the process is restarted",
        Effect::Replace => "the old process is stopped and a new one started",
    }
}
