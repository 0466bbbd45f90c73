//! `abide validate`: prints all problems of all files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use tracing::info;

use crate::cli::args::{ProblemForm, ValidateArgs};
use crate::cli::inventories;
use crate::cli::output::print::{self, Printer, count};
use crate::cli::target::TargetArgs;
use crate::cli::{Exit, Failure};
use crate::contract::ManifestProblem;
use crate::manifest::inventory::file_name;
use crate::manifest::{self, Loaded, OverlayTree, Problem, ReplacementText, Severity};

pub fn run(args: &ValidateArgs, printer: &Printer) -> Result<Exit, Failure> {
    if args.all {
        return validate_all(args, printer);
    }
    let begin = Instant::now();
    let loaded = Checker::new(args, printer).check(&args.paths)?;
    let (files, documents) = (loaded.files, loaded.documents.len());
    info!(files, documents, instances = loaded.counts.instances, took = ?begin.elapsed(), "manifests read");
    let exit = if loaded.errors() > 0 { Exit::InvalidManifest } else { Exit::Done };
    print_problems(args, &loaded.problems, printer)?;
    printer.info(&summary(&loaded));
    // The process exits next: freeing a large tree would only take time.
    std::mem::forget(loaded);
    Ok(exit)
}

/// Checks every overlay on its own, then the files that no overlay has.
fn validate_all(args: &ValidateArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut checker = Checker::new(args, printer);
    let OverlayTree { overlays, files, mut problems } =
        manifest::overlays(&args.paths, &args.limits.limits());
    let (mut summaries, mut read) = (Vec::new(), BTreeSet::new());
    for overlay in &overlays {
        let loaded = checker.check(std::slice::from_ref(overlay))?;
        read.extend(loaded.texts().map(|(name, _, _)| name.to_owned()));
        summaries.push(format!("{}: {}", manifest::display_path(overlay), summary(&loaded)));
        problems.extend(loaded.problems);
    }
    let others = files.iter().filter(|file| !read.contains(&manifest::display_path(file))).count();
    if overlays.is_empty() {
        let loaded = checker.check(&files)?;
        summaries.push(summary(&loaded));
        problems.extend(loaded.problems);
    } else if others > 0 {
        // With the files of the bases, which may have their groups and policies.
        let mut found = checker.check(&files)?.problems;
        found.retain(|problem| !read.contains(&*problem.file));
        summaries.push(format!("other files: {}: {}", count(others, "file"), verdict(&found)));
        problems.extend(found);
    }
    // A file of a base has the same problem in each of its overlays.
    problems.sort();
    problems.dedup();
    print_problems(args, &problems, printer)?;
    summaries.iter().for_each(|line| printer.info(line));
    let is_invalid = problems.iter().any(|problem| problem.severity == Severity::Error);
    Ok(if is_invalid { Exit::InvalidManifest } else { Exit::Done })
}

fn print_problems(args: &ValidateArgs, problems: &[Problem], printer: &Printer) -> Result<(), Failure> {
    match args.output {
        ProblemForm::Text => {
            printer.styled(&problems.iter().map(|p| print::problem(p) + "\n").collect::<String>())
        }
        ProblemForm::Json => printer.data(&json(problems)?),
        ProblemForm::Github => printer.data(&problems.iter().map(annotation).collect::<String>()),
    }
    Ok(())
}

/// Checks manifests. Without --inventories, the hosts of inventories are not known, which is not a problem.
struct Checker<'a> {
    args: &'a ValidateArgs,
    printer: &'a Printer,
    /// Hosts of the inventories that were read. Several overlays may name one inventory.
    snapshots: BTreeMap<String, ReplacementText>,
    /// Inventories that were read, or reported as not read.
    seen: BTreeSet<String>,
}

impl<'a> Checker<'a> {
    fn new(args: &'a ValidateArgs, printer: &'a Printer) -> Checker<'a> {
        Checker { args, printer, snapshots: BTreeMap::new(), seen: BTreeSet::new() }
    }

    fn check(&mut self, paths: &[PathBuf]) -> Result<Loaded, Failure> {
        let limits = self.args.limits.limits();
        let loaded = manifest::check(paths, &limits);
        let named = loaded.unread_inventories();
        if named.is_empty() {
            return Ok(loaded);
        }
        let new: BTreeSet<String> = named.difference(&self.seen).cloned().collect();
        if self.args.inventories {
            let target = TargetArgs { config: self.args.config.clone(), ..TargetArgs::local() };
            let resolved = inventories::read_without_state(&new, &target, self.printer)?;
            self.snapshots.extend(resolved.stand_ins());
            self.seen.extend(new);
            let of_these = |file: &String| named.iter().any(|name| *file == file_name(name));
            let snapshots = self.snapshots.iter().filter(|(file, _)| of_these(file));
            let snapshots = snapshots.map(|(file, text)| (file.clone(), text.clone())).collect();
            return Ok(manifest::check_with(paths, &limits, &snapshots));
        }
        for name in &new {
            let message = format!("inventory {name:?} was not read, so its hosts are not checked");
            self.printer.info(&format!("{message}: --inventories reads it"));
        }
        self.seen.extend(new);
        Ok(loaded)
    }
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
    let read = format!("{} in {}", count(loaded.documents.len(), "document"), count(loaded.files, "file"));
    let wanted =
        format!("{} on {}", count(loaded.counts.instances, "instance"), count(loaded.counts.hosts, "host"));
    if loaded.files == 0 && loaded.errors() == 0 {
        return "no manifests found (*.yaml, *.yml, *.json)".to_owned();
    }
    format!("{read}, {wanted}: {}", verdict(&loaded.problems))
}

/// Numbers of errors and warnings.
fn verdict(problems: &[Problem]) -> String {
    let number = |severity| problems.iter().filter(|problem| problem.severity == severity).count();
    match (number(Severity::Error), number(Severity::Warning)) {
        (0, 0) => "no problems".to_owned(),
        (0, warnings) => count(warnings, "warning"),
        (errors, 0) => count(errors, "error"),
        (errors, warnings) => format!("{}, {}", count(errors, "error"), count(warnings, "warning")),
    }
}
