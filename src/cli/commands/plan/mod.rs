//! `abide plan`: what would be done, and why.

pub mod args;
pub mod groups;
pub mod input;
pub mod json;
mod markdown;
pub mod owner;
pub mod source;
pub mod text;

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use tracing::info;

pub use args::PlanArgs;
pub use json::refusal;

use self::args::PlanForm;
use self::input::{PlanDigests, PlanInput};
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};
use crate::manifest::Limits;
use crate::manifest::provenance;
use crate::model;

pub fn run(args: &PlanArgs, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let input = PlanInput::read(&args.input, printer).inspect_err(|failure| {
        if let (true, Some(reason)) = (in_json, failure.reason) {
            printer.data(&json::refusal(failure.exit, Some(reason)));
        }
    })?;
    let mut plan = input.plan();
    locate(&mut plan, &input, &args.input.limits.limits());
    if let Some(file) = &args.out {
        let text = json::plan_with_inputs(&input, &plan, &input.digests(&plan), &args.input)?;
        check_out_file(file, &args.input)?;
        write_atomically(file, &text).map_err(|error| {
            Failure::new(Exit::Failed, format!("cannot write the plan to {}: {error}", file.display()))
        })?;
    }
    let changes = !plan.is_empty();
    // Of the whole plan, whatever is shown of it; people at a terminal are shown none.
    let digests = if args.output == PlanForm::Text { PlanDigests::default() } else { input.digests(&plan) };
    let steps = plan.steps().count();
    keep_only(&mut plan, &args.only);
    let hidden = steps - plan.steps().count();
    let begin = Instant::now();
    match args.output {
        PlanForm::Text => printer.styled(&text::text(&input, &plan, hidden)),
        PlanForm::Json => printer.data(&json::plan(&input, &plan, &digests)?),
        PlanForm::Markdown => {
            printer.data(&markdown::markdown(&input, &plan, &digests, hidden, args.max_bytes))
        }
    }
    info!(took = ?begin.elapsed(), "printed");
    if let Some(file) = &args.out {
        printer.info(&format!("the plan is in {}", file.display()));
    }
    // Nothing of it is needed any more, and giving a large tree back piece by piece takes time.
    std::mem::forget((input, plan));
    Ok(if args.detailed_exitcode && changes { Exit::Changes } else { Exit::Done })
}

/// A field is shown where it is written, not where its process begins.
pub fn locate(plan: &mut model::Plan, input: &PlanInput, limits: &Limits) {
    provenance::locate(plan, &input.loaded, limits);
}

/// Leaves what is asked for; of what is held, that which would be, or may be, of that kind.
fn keep_only(plan: &mut model::Plan, only: &[model::Op]) {
    if only.is_empty() {
        return;
    }
    plan.waves.iter_mut().for_each(|wave| wave.steps.retain(|step| only.contains(&step.op)));
    plan.waves.retain(|wave| !wave.steps.is_empty());
    plan.held.retain(|held| held.steps.is_empty() || held.steps.iter().any(|op| only.contains(op)));
}

/// Not over a device or a pipe, not over what was read, and not where it would be read as a manifest.
fn check_out_file(file: &Path, input: &args::InputArgs) -> Result<(), Failure> {
    let refuse = |why: &str| {
        let message = format!("--out {}: {why}", file.display());
        Err(Failure::new(Exit::Usage, message).hint("name a file of its own"))
    };
    if file == Path::new("-") {
        return refuse("it names a file; `-o json` prints the plan");
    }
    if file.metadata().is_ok_and(|there| !there.is_file()) {
        return refuse("it is there, and is no file");
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A folder that is not there is said by whoever writes.
    let Ok(folder) = folder.canonicalize() else { return Ok(()) };
    let own = file.canonicalize().unwrap_or_else(|_| folder.join(file.file_name().unwrap_or_default()));
    let read = input.paths.iter().chain(&input.offline.observed).filter_map(|path| path.canonicalize().ok());
    let is_manifest =
        own.extension().is_some_and(|e| ["json", "yaml", "yml"].iter().any(|known| e == *known));
    for path in read {
        if path == own {
            return refuse("it is what the plan is made from");
        }
        if path.is_dir() && own.starts_with(&path) && is_manifest {
            return refuse("it would be read as a manifest there");
        }
    }
    Ok(())
}

/// All of it or nothing: a reader never sees half a plan. A link is followed.
fn write_atomically(file: &Path, text: &str) -> std::io::Result<()> {
    let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let beside = file.with_file_name(name);
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&beside)
        .and_then(|mut out| out.write_all(text.as_bytes()).and_then(|()| out.sync_all()))
        .and_then(|()| std::fs::rename(&beside, &file));
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    written
}
