//! `abide plan`: the steps of an apply with their reasons, without executing them.

pub mod args;
pub mod groups;
pub mod input;
pub mod json;
pub mod markdown;
pub mod owner;
pub mod policy;
mod sign;
pub mod signatures;
pub mod source;
pub mod text;

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use tracing::info;

pub use args::PlanArgs;
pub use json::refusal;

use self::args::{PlanAction, PlanForm};
use self::input::{PlanDigests, read_and_plan};
use crate::cli::output::print::Printer;
use crate::cli::{Exit, Failure};
use crate::model;

pub fn run(args: &PlanArgs, printer: &Printer) -> Result<Exit, Failure> {
    if let Some(PlanAction::Sign(args)) = &args.action {
        return sign::run(args, printer);
    }
    let in_json = args.output == PlanForm::Json;
    let (input, mut plan) = read_and_plan(&args.input, printer).inspect_err(|failure| {
        if let (true, Some(reason)) = (in_json, failure.reason) {
            printer.data(&json::refusal(failure.exit, Some(reason)));
        }
    })?;
    input.locate(&mut plan, &args.input.limits.limits());
    if let Some(file) = &args.out {
        let text = json::plan_with_inputs(&input, &plan, &input.digests(&plan), &args.input)?;
        check_out_file(file, &args.input)?;
        write_atomically(file, &text).map_err(|error| {
            Failure::new(Exit::Failed, format!("cannot write the plan to {}: {error}", file.display()))
        })?;
    }
    let changes = !plan.is_empty();
    // Digests cover the whole plan, also with --only. The text form does not print them.
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
        printer.info(&format!("plan written to {}", file.display()));
    }
    // The process exits next: freeing a large tree would only take time.
    std::mem::forget((input, plan));
    Ok(if args.detailed_exitcode && changes { Exit::Changes } else { Exit::Done })
}

/// Keeps the steps with these operations, and held changes that have or may have one of them.
fn keep_only(plan: &mut model::Plan, only: &[model::Op]) {
    if only.is_empty() {
        return;
    }
    plan.waves.iter_mut().for_each(|wave| wave.steps.retain(|step| only.contains(&step.op)));
    plan.waves.retain(|wave| !wave.steps.is_empty());
    plan.held.retain(|held| held.steps.is_empty() || held.steps.iter().any(|op| only.contains(op)));
}

/// Refuses to overwrite a device, a pipe or an input, and to write a file that would be loaded as a manifest.
fn check_out_file(file: &Path, input: &args::InputArgs) -> Result<(), Failure> {
    let refuse = |why: &str| {
        let message = format!("--out {}: {why}", file.display());
        Err(Failure::new(Exit::Usage, message).hint("name another file"))
    };
    if file == Path::new("-") {
        return refuse("standard output is not supported; `-o json` prints the plan");
    }
    if file.metadata().is_ok_and(|meta| !meta.is_file()) {
        return refuse("exists and is not a regular file");
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A missing folder is reported by the write.
    let Ok(folder) = folder.canonicalize() else { return Ok(()) };
    let own = file.canonicalize().unwrap_or_else(|_| folder.join(file.file_name().unwrap_or_default()));
    let read = input.paths.iter().chain(&input.offline.observed).filter_map(|path| path.canonicalize().ok());
    let is_manifest =
        own.extension().is_some_and(|e| ["json", "yaml", "yml"].iter().any(|known| e == *known));
    for path in read {
        if path == own {
            return refuse("the file is an input of the plan");
        }
        if path.is_dir() && own.starts_with(&path) && is_manifest {
            return refuse("the file would be loaded as a manifest");
        }
    }
    Ok(())
}

/// Writes a temporary file and renames it: a reader never sees half a plan. A symlink is followed.
fn write_atomically(file: &Path, text: &str) -> std::io::Result<()> {
    let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = file.with_file_name(name);
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&temporary)
        .and_then(|mut out| out.write_all(text.as_bytes()).and_then(|()| out.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, &file));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
