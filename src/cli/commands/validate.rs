//! `abide validate`: prints all problems of all files.

use std::time::Instant;

use tracing::info;

use crate::cli::args::{ProblemForm, ValidateArgs};
use crate::cli::inventories;
use crate::cli::output::print::{self, Printer, count};
use crate::cli::target::TargetArgs;
use crate::cli::{Exit, Failure};
use crate::contract::ManifestProblem;
use crate::manifest::{self, Loaded, Problem, Severity};

pub fn run(args: &ValidateArgs, printer: &Printer) -> Result<Exit, Failure> {
    let begin = Instant::now();
    let loaded = load(args, printer)?;
    let (files, documents) = (loaded.files, loaded.documents.len());
    info!(files, documents, instances = loaded.counts.instances, took = ?begin.elapsed(), "manifests read");
    let exit = if loaded.errors() > 0 { Exit::InvalidManifest } else { Exit::Done };
    match args.output {
        ProblemForm::Text => {
            printer.styled(&loaded.problems.iter().map(|p| print::problem(p) + "\n").collect::<String>())
        }
        ProblemForm::Json => printer.data(&json(&loaded.problems)?),
        ProblemForm::Github => printer.data(&loaded.problems.iter().map(annotation).collect::<String>()),
    }
    printer.info(&summary(&loaded));
    // The process exits next: freeing a large tree would only take time.
    std::mem::forget(loaded);
    Ok(exit)
}

/// Checks the manifests. Without --inventories, the hosts of inventories are not known, which is not a problem.
fn load(args: &ValidateArgs, printer: &Printer) -> Result<Loaded, Failure> {
    let limits = args.limits.limits();
    let loaded = manifest::check(&args.paths, &limits);
    let unread = loaded.unread_inventories();
    if unread.is_empty() {
        return Ok(loaded);
    }
    if args.inventories {
        let target = TargetArgs { config: args.config.clone(), ..TargetArgs::local() };
        let resolved = inventories::read_without_state(&unread, &target, printer)?;
        return Ok(manifest::check_with(&args.paths, &limits, &resolved.stand_ins()));
    }
    for name in &unread {
        let message = format!("inventory {name:?} was not read, so its hosts are not checked");
        printer.info(&format!("{message}: --inventories reads it"));
    }
    Ok(loaded)
}

pub fn json(problems: &[Problem]) -> Result<String, Failure> {
    let problems: Vec<ManifestProblem> = problems.iter().map(ManifestProblem::from).collect();
    let json = serde_json::to_string_pretty(&problems);
    json.map(|json| json + "\n")
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))
}

/// A workflow command that GitHub shows at the line of the file.
fn annotation(problem: &Problem) -> String {
    let text = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let property = |value: &str| text(value).replace(':', "%3A").replace(',', "%2C");
    let Problem { file, line, column, severity, code, message, hint, .. } = problem;
    let hint = hint.as_ref().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
    format!(
        "::{severity} file={},line={line},col={column},title={}::{}\n",
        property(file),
        code.text(),
        text(&format!("{message}{hint}")),
    )
}

fn summary(loaded: &Loaded) -> String {
    let errors = loaded.errors();
    let warnings = loaded.problems.iter().filter(|p| p.severity == Severity::Warning).count();
    let read = format!("{} in {}", count(loaded.documents.len(), "document"), count(loaded.files, "file"));
    let wanted =
        format!("{} on {}", count(loaded.counts.instances, "instance"), count(loaded.counts.hosts, "host"));
    let found = match (errors, warnings) {
        (0, 0) => "no problems".to_owned(),
        (0, _) => count(warnings, "warning"),
        (_, 0) => count(errors, "error"),
        (_, _) => format!("{}, {}", count(errors, "error"), count(warnings, "warning")),
    };
    if loaded.files == 0 && errors == 0 {
        return "no manifests found (*.yaml, *.yml, *.json)".to_owned();
    }
    format!("{read}, {wanted}: {found}")
}
