//! `abide convert`: GSE and JOB request bodies to manifests, and back.

use std::collections::BTreeMap;

use crate::cli::args::ConvertArgs;
use crate::cli::output::print::{self, Printer};
use crate::cli::{Exit, Failure};
use crate::gse::{self, BodyContent, Dialect, JobBody, Loss};
use crate::import::convert::{self, Body};
use crate::manifest::document::Document;
use crate::manifest::{self, Loaded, Problem};
use crate::manifest::{forms, print as manifests};
use crate::model::{DesiredInstance, InstanceKey, ProcessKey};

pub fn run(args: &ConvertArgs, printer: &Printer) -> Result<Exit, Failure> {
    let limits = args.limits.limits();
    let mut read = match convert::read::<JobBody>(&args.file, &limits) {
        Ok(read) => read,
        Err(problems) => return Ok(invalid(&problems, printer)),
    };
    printer.to_stderr(&shown(&read.warnings));
    let (documents, any_body) = documents(std::mem::take(&mut read.bodies), args, printer);
    if documents.is_empty() {
        printer.warning(&format!("{} contains no request body and no manifest", args.file.display()));
        return Ok(Exit::Done);
    }
    let reaching = documents.iter().any(|d| matches!(d.kind.as_deref(), Some("Defaults" | "Policy")));
    if read.spread && reaching && (any_body || args.to.is_none()) {
        let message = "cannot merge several files: Defaults and Policy documents apply to their directory";
        return Err(Failure::new(Exit::Usage, message).hint("convert each file separately"));
    }
    if (args.full || args.short) && !any_body {
        // Only a valid document has one meaning in both forms.
        let loaded = match read.load(&limits) {
            Some(loaded) => loaded,
            None => manifest::load(std::slice::from_ref(&args.file), &limits),
        };
        if loaded.errors_in_files() > 0 {
            return Ok(invalid(&loaded.problems, printer));
        }
        printer.data(&manifests::yaml(&in_form(documents, args)));
        return Ok(Exit::Done);
    }
    let documents = in_form(documents, args);
    let text = manifests::yaml(&documents);
    let Some(dialect) = args.to else {
        printer.data(&text);
        let loaded = manifest::load_text("the manifest", text, &limits);
        if any_body && loaded.errors() > 0 {
            printer.warning("the manifest is incomplete; `abide validate` reports:");
            printer.to_stderr(&shown(&loaded.problems));
        }
        return Ok(Exit::Done);
    };
    // Manifests are loaded from their files, so that problems have the locations of those files.
    let loaded = match any_body {
        true => manifest::load_text("the converted manifest", text, &limits),
        false => match read.load(&limits) {
            Some(loaded) => loaded,
            None => manifest::load(std::slice::from_ref(&args.file), &limits),
        },
    };
    if loaded.errors() > 0 {
        return Ok(invalid(&loaded.problems, printer));
    }
    to_bodies(&loaded, dialect, args, printer)
}

/// The documents in the form that the flags name.
fn in_form(documents: Vec<Document>, args: &ConvertArgs) -> Vec<Document> {
    let inherited = forms::inherited(&documents);
    let convert = |document: Document| match (args.full, args.short) {
        (true, _) => forms::long(document, &inherited),
        (false, true) => forms::short(document, &inherited),
        (false, false) => document,
    };
    documents.into_iter().map(convert).collect()
}

/// The manifests of the bodies, and whether any of them was a request body.
fn documents(bodies: Vec<Body<JobBody>>, args: &ConvertArgs, printer: &Printer) -> (Vec<Document>, bool) {
    let (mut documents, mut any_body) = (Vec::new(), false);
    for body in bodies {
        match body {
            Body::Manifest { document, was_body } => {
                any_body |= was_body;
                documents.push(*document);
            }
            Body::Job(job) => {
                any_body = true;
                let (subjects, notes) = job.contents(args.job_api.unwrap_or_else(|| job.api()));
                notes.iter().for_each(|note| printer.warning(note));
                documents
                    .extend(subjects.iter().map(|s| manifests::process(&s.key, &s.hosts, s.state, &s.spec)));
            }
        }
    }
    (documents, any_body)
}

fn to_bodies(
    loaded: &Loaded,
    dialect: Dialect,
    args: &ConvertArgs,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let (bodies, mut losses) = gse::bodies(&subjects(loaded), dialect, args.job_api);
    losses.extend(abide_only_fields(loaded));
    losses.sort();
    losses.dedup();
    for Loss { key, what, why } in &losses {
        printer.labelled_warning("not converted", &format!("{key}: {what} ({why})"));
    }
    if args.strict && !losses.is_empty() {
        let message = format!("dialect {} cannot express every field", dialect.name());
        return Err(Failure::new(Exit::InvalidManifest, message)
            .hint("without --strict the other fields are written"));
    }
    for body in bodies {
        let json = serde_json::to_string_pretty(&body);
        let json = json.map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))?;
        printer.data(&(json + "\n"));
    }
    Ok(Exit::Done)
}

/// Groups instances that differ only in their host: they share one body.
fn subjects(loaded: &Loaded) -> Vec<BodyContent> {
    let mut by_process: BTreeMap<ProcessKey, Vec<(&InstanceKey, &DesiredInstance)>> = BTreeMap::new();
    for (key, want) in &loaded.desired.instances {
        by_process.entry(key.process()).or_default().push((key, want));
    }
    let mut subjects: Vec<BodyContent> = Vec::new();
    for (key, wants) in by_process {
        let first = subjects.len();
        for (_, want) in wants {
            let same = |s: &&mut BodyContent| s.state == want.origin.state && s.spec == **want.spec;
            match subjects[first..].iter_mut().find(same) {
                Some(subject) => subject.hosts.push(want.host.clone()),
                None => subjects.push(BodyContent {
                    key: key.clone(),
                    hosts: vec![want.host.clone()],
                    state: want.origin.state,
                    spec: (**want.spec).clone(),
                }),
            }
        }
    }
    subjects
}

/// Fields that no request body has.
fn abide_only_fields(loaded: &Loaded) -> Vec<Loss> {
    let mut losses = Vec::new();
    for (key, DesiredInstance { origin, .. }) in &loaded.desired.instances {
        let renamed = |from: &ProcessKey| *from != origin.declared;
        let set = [
            ("depends_on", !origin.depends_on.is_empty()),
            ("protect", !origin.protect.is_empty()),
            ("adopt", origin.adopt),
            ("moved_from", origin.moved_from.iter().any(renamed)),
            ("on_change", !origin.on_change.is_empty()),
            ("rollout", origin.rollout.is_some()),
        ];
        losses.extend(set.into_iter().filter(|(_, there)| *there).map(|(what, _)| Loss {
            key: key.process(),
            what: what.to_owned(),
            why: "only Abide has this field".to_owned(),
        }));
    }
    losses
}

fn invalid(problems: &[Problem], printer: &Printer) -> Exit {
    printer.to_stderr(&shown(problems));
    Exit::InvalidManifest
}

fn shown(problems: &[Problem]) -> String {
    problems.iter().map(print::problem).collect::<Vec<_>>().join("\n")
}
