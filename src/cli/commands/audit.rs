//! `abide audit`: entries of a gateway's audit log, and its verification.

use std::path::{Path, PathBuf};

use crate::backend::AuditFilter;
use crate::cli::args::{InvalidValue, PlainForm, parse_switch};
use crate::cli::commands::token::{call, connect};
use crate::cli::key_file::KeyFileArgs;
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::TargetArgs;
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::{self, AuditAction, AuditEntry, AuditEvent, AuditPage, AuditVerification};
use crate::error_chain::chain;
use crate::gateway::audit::{AuditAnchor, AuditError, AuditQuery, read_page, verify};
use crate::model::{Name, Time, count, seconds};
use crate::store::{Embedded, keys};

/// Entries per page of a read from files.
const PAGE: usize = 1000;

/// Show the audit log of a gateway
///
/// Reads the audit log of the target, which must be an Abide gateway, or with --data the files of a gateway's data folder.
/// The app of the target needs role admin. An app with a scope sees the entries of its instances, and its own calls.
///
/// With --verify, checks the hash chain of all files against the digest in the gateway's store. Exits with 3 if
/// an entry was changed, removed or moved, and prints the file and the line. Through a gateway, --verify needs every
/// namespace, host and owner.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide audit -n web --since 1h --target prod\n  abide audit --who ci-web -o json --target prod\n  abide audit --verify --data /var/lib/abide"
)]
pub struct AuditArgs {
    /// Entries about instances of this namespace only
    #[arg(short, long, value_name = "NAMESPACE", env = "ABIDE_NAMESPACE")]
    pub namespace: Option<Name>,
    /// Entries of this app, agent or user only
    #[arg(long, value_name = "NAME", env = "ABIDE_AUDIT_WHO")]
    pub who: Option<String>,
    /// Entries since a time: a duration such as 10m, or a time such as 2026-11-16T08:00:00Z
    #[arg(long, value_name = "TIME", env = "ABIDE_SINCE", value_parser = parse_since)]
    pub since: Option<Time>,
    /// Verify the whole log instead of printing it
    #[arg(long, env = "ABIDE_AUDIT_VERIFY", value_parser = parse_switch, num_args = 0..=1, default_value_t = false, default_missing_value = "true", conflicts_with_all = ["namespace", "who", "since"])]
    pub verify: bool,
    /// Read the files in the data folder of a gateway, instead of asking the target
    #[arg(long, value_name = "DIR", env = "ABIDE_AUDIT_DATA")]
    pub data: Option<PathBuf>,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format; json: one entry per line
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_AUDIT_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

fn parse_since(text: &str) -> Result<Time, InvalidValue> {
    let since = seconds(text).map(|secs| clock::now().before_secs(secs)).or_else(|| clock::read(text));
    since.ok_or(InvalidValue("a duration such as 10m, or a time such as 2026-11-16T08:00:00Z"))
}

pub fn run(args: &AuditArgs, printer: &Printer) -> Result<Exit, Failure> {
    match (args.verify, &args.data) {
        (true, Some(data)) => report(&verify_files(data)?, args.output, printer),
        (true, None) => {
            let live = connect(&args.target)?;
            let done = call(&live, async |abide| abide.verify_audit().await)?;
            report(&done, args.output, printer)
        }
        (false, Some(data)) => {
            let folder = existing_log(data)?;
            print_pages(args, printer, |after| {
                let query = AuditQuery {
                    namespace: args.namespace.as_ref().map(ToString::to_string),
                    who: args.who.clone(),
                    since: args.since,
                    after,
                    limit: PAGE,
                };
                read_page(&folder, &query, Some).map_err(|error| failed(&error))
            })
        }
        (false, None) => {
            let live = connect(&args.target)?;
            print_pages(args, printer, |after| {
                let filter = AuditFilter {
                    namespace: args.namespace.as_ref().map(ToString::to_string),
                    who: args.who.clone(),
                    since: args.since.map(|since| since.to_string()),
                    after,
                };
                call(&live, async |abide| abide.audit(&filter).await)
            })
        }
    }
}

fn failed(error: &AuditError) -> Failure {
    Failure::new(Exit::Failed, chain(error))
}

/// The folder of the audit files.
fn existing_log(data: &Path) -> Result<PathBuf, Failure> {
    let folder = data.join("audit");
    match folder.is_dir() {
        true => Ok(folder),
        false => {
            let message = format!("{} has no audit log", data.display());
            Err(Failure::new(Exit::Usage, message).hint("pass the folder of `abide serve --data`"))
        }
    }
}

/// Verifies the files against the anchor in the store next to them. The gateway may run meanwhile.
fn verify_files(data: &Path) -> Result<AuditVerification, Failure> {
    let folder = existing_log(data)?;
    let mut anchor = read_anchor(data)?;
    loop {
        let done = verify(&folder, anchor.as_ref()).map_err(|error| failed(&error))?;
        let now = read_anchor(data)?;
        // A file may have been rotated away meanwhile.
        if done.intact || now == anchor {
            return Ok(done);
        }
        anchor = now;
    }
}

fn read_anchor(data: &Path) -> Result<Option<AuditAnchor>, Failure> {
    let file = data.join("store.db");
    let key_file = KeyFileArgs::from_env().source(data)?;
    let read = Embedded::read_value(&file, &key_file, keys::AUDIT_ANCHOR);
    let value = read.map_err(|error| Failure::new(Exit::Failed, chain(&error)))?;
    let parsed = value.map(|value| crate::store::decode(keys::AUDIT_ANCHOR, &value)).transpose();
    parsed.map_err(|error| Failure::new(Exit::Failed, chain(&error)))
}

fn report(done: &AuditVerification, form: PlainForm, printer: &Printer) -> Result<Exit, Failure> {
    if form == PlainForm::Json {
        printer.data(&contract::pretty(done));
    }
    let Some(problem) = &done.problem else {
        if form == PlainForm::Text {
            printer.data(&summary(done));
        }
        return Ok(Exit::Done);
    };
    let message = format!("{} line {}: {}", visible(&problem.file), problem.line, visible(&problem.message));
    Err(Failure::new(Exit::Incomplete, format!("the audit log is not intact: {message}")))
}

fn summary(done: &AuditVerification) -> String {
    let AuditVerification { files, entries, first, last, anchored, unfinished_bytes, .. } = done;
    let (entries, files) = (count(*entries, "entry"), count(*files, "file"));
    let mut text = format!("intact: {entries} ({first} to {last}) in {files}");
    text.push_str(&match anchored {
        Some(seq) => format!(", the store has the digest of entry {seq}"),
        None => ", the store has no digest to compare with".to_owned(),
    });
    if *unfinished_bytes > 0 {
        text.push_str(&format!("; {unfinished_bytes} bytes of an unfinished entry at the end"));
    }
    text + "\n"
}

/// Prints all pages, each as it arrives.
fn print_pages(
    args: &AuditArgs,
    printer: &Printer,
    mut page: impl FnMut(u64) -> Result<AuditPage, Failure>,
) -> Result<Exit, Failure> {
    let mut after = 0;
    loop {
        let AuditPage { entries, more } = page(after)?;
        let lines = entries.iter().map(|entry| match args.output {
            PlainForm::Json => contract::compact(entry),
            PlainForm::Text => line(entry),
        });
        printer.data(&lines.collect::<String>());
        match more.filter(|more| *more > after) {
            Some(more) => after = more,
            None => return Ok(Exit::Done),
        }
    }
}

/// An entry for a terminal. Every text of a caller is escaped.
fn line(entry: &AuditEntry) -> String {
    let AuditEntry { time, who, what, purpose, result, .. } = entry;
    let mut parts = vec![visible(time), visible(&result.status)];
    let user = if who.user.is_empty() { String::new() } else { format!(" ({})", who.user) };
    // The name of a person begins with its kind.
    let kind = if who.kind == "person" { String::new() } else { format!("{} ", who.kind) };
    parts.push(visible(&format!("{kind}{}{user}", who.name)));
    parts.extend(Some(format!("from {}", visible(&who.peer))).filter(|_| !who.peer.is_empty()));
    parts.push(match entry.event {
        AuditEvent::Login => "login".to_owned(),
        _ => visible(&what.call),
    });
    parts.extend(subjects(what));
    for (name, value) in [
        ("owner", &purpose.owner),
        ("plan", &purpose.plan),
        ("revision", &purpose.revision),
        ("commit", &purpose.commit),
        ("break-glass", &purpose.break_glass),
        ("task", &what.task),
    ] {
        parts.extend(Some(format!("{name}={}", visible(value))).filter(|_| !value.is_empty()));
    }
    parts.extend(result.failed.iter().map(|row| format!("{}={}", visible(&row.instance), row.code)));
    parts.extend(Some(format!("+{} similar", result.suppressed)).filter(|_| result.suppressed > 0));
    parts.extend(Some(format!("\"{}\"", visible(&result.message))).filter(|_| !result.message.is_empty()));
    parts.join(" ") + "\n"
}

/// Every instance, host and key that an entry names.
fn subjects(what: &AuditAction) -> Vec<String> {
    let mut parts = Vec::new();
    for group in &what.instances {
        let op = if group.op.is_empty() { String::new() } else { format!("{} ", visible(&group.op)) };
        match group.hosts.is_empty() {
            true => parts.push(format!("{op}{}", visible(&group.process))),
            false => {
                let on = |host: &String| format!("{}@{}", visible(&group.process), visible(host));
                parts.push(format!("{op}{}", group.hosts.iter().map(on).collect::<Vec<_>>().join(" ")));
            }
        }
    }
    parts.extend(what.hosts.iter().map(|host| visible(host)));
    parts.extend(what.keys.iter().map(|key| visible(key)));
    parts.extend(Some(visible(&what.detail)).filter(|detail| !detail.is_empty()));
    parts
}
