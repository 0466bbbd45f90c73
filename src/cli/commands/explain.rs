//! `abide explain`: manifest fields, held reasons, states and codes.
//!
//! A field has a type, a default, the effect of a change, and with --in the location of its value.

use crate::cli::args::ExplainArgs;
use crate::cli::output::print::{BOLD, DIM, Printer};
use crate::cli::output::table::{Align, pad};
use crate::cli::word_meanings::{self, WordMeaning};
use crate::cli::{Exit, Failure};
use crate::manifest::check::short_form::SHORT_FIELDS;
use crate::manifest::explain::{self, Explanation, FieldValue, PrintableValue, ValueOrigin};
use crate::manifest::grammar::{self, Entry, Requirement, Section};
use crate::manifest::{self, Code, did_you_mean};
use crate::model::{Effect, Field, ProcessKey, StartMode};
use crate::reconcile::spec_effects::base_effect;

pub fn run(args: &ExplainArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(field) = &args.field else {
        if !args.paths.is_empty() {
            return provenance(args, None, printer);
        }
        printer.styled(&overview());
        return Ok(Exit::Done);
    };
    if field == "problems" {
        printer.styled(&Code::ALL.iter().map(|code| problem(*code)).collect::<String>());
        return Ok(Exit::Done);
    }
    if field == "words" {
        printer.styled(&word_meanings::all_words().iter().map(word_line).collect::<String>());
        return Ok(Exit::Done);
    }
    if let Some(code) = Code::ALL.iter().find(|code| code.text().eq_ignore_ascii_case(field)) {
        printer.styled(&problem(*code));
        return Ok(Exit::Done);
    }
    let found = match explain::find(field) {
        Ok(found) => found,
        Err(meant) => {
            let meanings = word_meanings::meanings(field);
            if meanings.is_empty() {
                return Err(unknown(field, meant));
            }
            printer.styled(&meanings.iter().map(word).collect::<Vec<_>>().join("\n"));
            return Ok(Exit::Done);
        }
    };
    if args.paths.is_empty() {
        printer.styled(&explanation(&found));
        return Ok(Exit::Done);
    }
    provenance(args, Some(&found), printer)
}

fn unknown(field: &str, meant: Option<String>) -> Failure {
    let words = word_meanings::all_words();
    let meant = meant.or_else(|| did_you_mean(field, words.iter().map(|one| &*one.word)).map(str::to_owned));
    let hint = match meant {
        Some(meant) => format!("did you mean {meant}?"),
        None => "`abide explain` lists all fields, `abide explain words` all reasons and states".to_owned(),
    };
    Failure::new(Exit::Usage, format!("{field:?} is not a manifest field, reason, state or code")).hint(hint)
}

/// A held reason, a state or a code: its meaning, and the action that follows.
fn word(one: &WordMeaning) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}  {DIM}{}{DIM:#}\n", one.word, one.used_as);
    text.push_str(&format!("{BOLD}{:<9}{BOLD:#} {}\n", "meaning", one.meaning));
    if let Some(action) = one.action {
        text.push_str(&format!("{BOLD}{:<9}{BOLD:#} {action}\n", "action"));
    }
    text
}

fn word_line(one: &WordMeaning) -> String {
    let (name, used_as) = (pad(&one.word, 20, Align::Left), pad(one.used_as, 23, Align::Left));
    format!("{BOLD}{name}{BOLD:#} {DIM}{used_as}{DIM:#} {}\n", one.meaning)
}

fn problem(code: Code) -> String {
    format!("{BOLD}{}{BOLD:#}  {:<8} {}\n", code.text(), code.severity().to_string(), code.title())
}

fn provenance(args: &ExplainArgs, found: Option<&Explanation>, printer: &Printer) -> Result<Exit, Failure> {
    let limits = args.limits.limits();
    let only: Option<ProcessKey> = match args.process.as_deref().map(str::parse) {
        None => None,
        Some(Ok(key)) => Some(key),
        Some(Err(error)) => return Err(Failure::new(Exit::Usage, format!("--process: {error}"))),
    };
    let path = match found.map(|found| (found, spec_path(&found.path))) {
        None => None,
        Some((_, Some(path))) => Some(path),
        Some((found, None)) => {
            let message =
                format!("{} is not inherited: only fields of a spec come from Defaults", found.path);
            return Err(Failure::new(Exit::Usage, message));
        }
    };
    let loaded = manifest::load(&args.paths, &limits);
    // Hosts of inventories have no fields of a spec: they are not read.
    if loaded.errors_in_files() > 0 {
        printer.warning("the manifests have errors; `abide validate` lists them");
    }
    let all = match path {
        Some(path) => explain::field_values(&loaded, &path, only.as_ref(), &limits),
        None => explain::every_value(&loaded, only.as_ref(), &limits),
    };
    if all.is_empty() {
        return Err(Failure::new(Exit::Failed, "the manifests declare no such process"));
    }
    printer.styled(&all.iter().map(line).collect::<String>());
    Ok(Exit::Done)
}

/// The path of a field in the spec. A field of the short form has one, too.
fn spec_path(path: &str) -> Option<String> {
    if let Some(path) = path.strip_prefix("spec.") {
        return Some(path.to_owned());
    }
    let (first, rest) = path.split_once('.').map_or((path, ""), |(first, rest)| (first, rest));
    let (_, long) = SHORT_FIELDS.iter().find(|(short, _)| *short == first)?;
    let long = long.strip_prefix("spec.").unwrap_or(long);
    Some(if rest.is_empty() { long.to_owned() } else { format!("{long}.{rest}") })
}

fn line(given: &FieldValue) -> String {
    let FieldValue { process, path, value } = given;
    let Some(value) = value else { return format!("{process}  {path}: {DIM}unset{DIM:#}\n") };
    let from = match value.origin {
        ValueOrigin::Process => "",
        ValueOrigin::Patch => ", from a patch",
        ValueOrigin::Defaults => ", from Defaults",
        ValueOrigin::Overlay => ", from Overlay",
        ValueOrigin::HostGroup => ", from HostGroup",
        ValueOrigin::Host => ", from a host",
    };
    let shown = match &value.shown {
        PrintableValue::Plain(text) => text.clone(),
        PrintableValue::Secret => "(secret)".to_owned(),
    };
    format!("{process}  {path}: {shown}  {DIM}{}{from}{DIM:#}\n", value.place)
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
    text.push_str(
        "`abide explain FIELD` explains a field, `abide explain words` lists held reasons and states.\n",
    );
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
    for entry in section.entries.iter().filter(|entry| entry.need != Requirement::IgnoredInBody) {
        text.push_str(&format!("  {} {}\n", pad(entry.name, 24, Align::Left), entry.meaning));
    }
    text
}

fn required(entry: &Entry) -> &'static str {
    match entry.need {
        Requirement::Required => "yes",
        Requirement::Optional => "no",
        Requirement::RequiredInBody => "no (yes in a request body without apiVersion and kind)",
        Requirement::IgnoredInBody => "no (ignored)",
    }
}

/// The effect of a field's change on a running process.
fn change(field: Field) -> String {
    let daemon = base_effect(field, StartMode::Daemon);
    let foreground = base_effect(field, StartMode::Foreground);
    let describe = |effect: Effect| format!("{effect}: {}", meaning(effect));
    let mut text = match daemon == foreground {
        true => describe(daemon),
        false => format!("in daemon mode {}; in foreground mode {}", describe(daemon), describe(foreground)),
    };
    text.push_str(match daemon.max(foreground) {
        Effect::None | Effect::Register | Effect::Replace => "",
        Effect::Reload => "; without a reload_cmd it restarts. For auto_type 0 the next run uses it",
        Effect::Restart => ". For auto_type 0 the next run uses it",
    });
    text.push_str(match daemon.max(foreground) {
        Effect::None | Effect::Register => ". `on_change` overrides this",
        Effect::Reload | Effect::Restart | Effect::Replace => {
            "; for auto_type 2 it starts a new run. `on_change` overrides this"
        }
    });
    text
}

fn meaning(effect: Effect) -> &'static str {
    match effect {
        Effect::None => "no operation",
        Effect::Register => "the spec is registered again, the process is not changed",
        Effect::Reload => "the process reloads its configuration, its pid stays",
        Effect::Restart => "the process is restarted",
        Effect::Replace => "the old process is stopped and a new one started",
    }
}
