//! `abide import`: files of other supervisors, crontabs and lists of hosts, to manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::cli::args::{InvalidValue, LimitArgs, parse_switch};
use crate::cli::output::print::{self, Printer, count, visible};
use crate::cli::{Exit, Failure};
use crate::import::{self, ImportNote, ImportOptions, Kind};
use crate::manifest::document::{Document, SpecEntry};
use crate::manifest::forms::short;
use crate::manifest::print as manifests;
use crate::manifest::{self, Problem};
use crate::model::{HostKey, Name};

/// Convert supervisord, systemd, pm2, cron, Ansible or CSV files
///
/// Reads supervisord's ini, systemd services and timers, pm2's ecosystem.json or the output of `pm2 jlist`, crontabs,
/// inventories of Ansible, and CSV with the columns ip and cloud. Settings that a manifest cannot express, or expresses differently, are listed on stderr with
/// file and line.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide import /etc/supervisor/conf.d/*.conf -n web > web.yaml\n  abide import db.service backup.service backup.timer\n  pm2 jlist | abide import -\n  abide import fleet.csv > hosts.yaml\n  crontab -l | abide import crontab - -n jobs > jobs.yaml\n  abide import ansible inventory.ini > hosts.yaml"
)]
pub struct ImportArgs {
    /// Files, or - for standard input. A kind before them is the same as --from
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Kind of the files [default: detected from names and content]
    #[arg(long, value_name = "KIND", env = "ABIDE_FROM", value_parser = kind_parser())]
    pub from: Option<Kind>,
    /// Namespace of the processes
    #[arg(short, long, value_name = "NAMESPACE", env = "ABIDE_IMPORT_NAMESPACE", default_value = "imported")]
    pub namespace: Name,
    /// Host of the processes, as CLOUD:IP (repeatable)
    #[arg(
        long,
        value_name = "CLOUD:IP",
        env = "ABIDE_IMPORT_HOST",
        value_delimiter = ',',
        default_value = "0:127.0.0.1"
    )]
    pub host: Vec<HostKey>,
    /// Folder of pid files that no imported file sets [default: the agent's own; /run/abide for daemons]
    #[arg(long, value_name = "DIR", env = "ABIDE_RUN_DIR", value_parser = folder)]
    pub run_dir: Option<String>,
    /// Folder of log files that no imported file sets [default: the agent's own; /var/log/abide for daemons]
    #[arg(long, value_name = "DIR", env = "ABIDE_LOG_DIR", value_parser = folder)]
    pub log_dir: Option<String>,
    /// Exit with 65 and write nothing if a manifest cannot express every setting
    #[arg(long, env = "ABIDE_STRICT", value_parser = parse_switch)]
    pub strict: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_IMPORT_OUTPUT", value_name = "FORMAT")]
    pub output: ManifestForm,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ManifestForm {
    #[default]
    Yaml,
    Json,
}

fn kind_parser() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(Kind::ALL.map(Kind::word))
        .map(|word| Kind::ALL.into_iter().find(|kind| kind.word() == word).unwrap_or(Kind::Supervisord))
}

fn folder(text: &str) -> Result<String, InvalidValue> {
    if text.starts_with('/') { Ok(text.to_owned()) } else { Err(InvalidValue("must be an absolute path")) }
}

pub fn run(args: &ImportArgs, printer: &Printer) -> Result<Exit, Failure> {
    let limits = args.limits.limits();
    let (from, files) = kind_and_files(args);
    let options = ImportOptions {
        from,
        namespace: args.namespace.clone(),
        hosts: args.host.clone(),
        run_dir: args.run_dir.clone(),
        log_dir: args.log_dir.clone(),
    };
    let imported = import::read(files, &limits).and_then(|given| import::import(&given, &options, &limits));
    let imported = match imported {
        Ok(imported) => imported,
        Err(problems) => return Ok(invalid(&problems, printer)),
    };
    for ImportNote { file, line, setting, message } in &imported.notes {
        let setting = visible(setting);
        printer.warning(&format!("{file}:{line}: {setting}: {}", visible(message)));
    }
    for warning in folder_warnings(&imported.folders) {
        printer.warning(&visible(&warning));
    }
    let documents: Vec<Document> =
        imported.documents.into_iter().map(|document| short(document, &SpecEntry::default())).collect();
    let text = manifests::yaml(&documents);
    // Only valid manifests are printed.
    let loaded = manifest::load_text("the manifest", text.clone(), &limits);
    if loaded.errors() > 0 {
        printer.to_stderr(&render_problems(&loaded.problems));
        return Err(Failure::new(
            Exit::InvalidManifest,
            "the imported manifest is invalid: nothing was written",
        ));
    }
    if args.strict && !imported.notes.is_empty() {
        let message =
            format!("{} that a manifest cannot express exactly", count(imported.notes.len(), "setting"));
        return Err(Failure::new(Exit::InvalidManifest, message)
            .hint("without --strict the other settings are written"));
    }
    match args.output {
        ManifestForm::Yaml => printer.data(&text),
        ManifestForm::Json => {
            let json = serde_json::to_string_pretty(&documents);
            let json =
                json.map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))?;
            printer.data(&(json + "\n"));
        }
    }
    Ok(Exit::Done)
}

/// `abide import crontab FILE`: the first of several words is a kind, unless it is a file.
fn kind_and_files(args: &ImportArgs) -> (Option<Kind>, &[PathBuf]) {
    let (first, rest) = match args.files.as_slice() {
        [first, rest @ ..] if !rest.is_empty() && args.from.is_none() && !first.exists() => (first, rest),
        files => return (args.from, files),
    };
    match Kind::ALL.into_iter().find(|kind| first.as_os_str() == kind.word()) {
        Some(kind) => (Some(kind), rest),
        None => (None, &args.files),
    }
}

/// Warnings about folders that an administrator must create: the agent opens files with the rights of the spec's user.
fn folder_warnings(folders: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut of_user: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut warnings = Vec::new();
    for (folder, users) in folders {
        let names: Vec<&str> = users.iter().map(String::as_str).collect();
        match names.as_slice() {
            [] => {}
            [user] => of_user.entry(user).or_default().push(folder.clone()),
            users => warnings.push(format!(
                "{folder}: users {} share it, and each needs write access: import them with a namespace (-n) per user",
                users.join(", ")
            )),
        }
    }
    warnings.extend(of_user.into_iter().map(|(user, folders)| {
        let words =
            ["install", "-d", "-o", user].into_iter().map(str::to_owned).chain(folders.iter().cloned());
        let command = words.map(|word| quoted(&word)).collect::<Vec<_>>().join(" ");
        format!("user {user} needs write access to {}; on each host: {command}", folders.join(" and "))
    }));
    warnings
}

/// Quotes a word for a shell command.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    match word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

fn invalid(problems: &[Problem], printer: &Printer) -> Exit {
    printer.to_stderr(&render_problems(problems));
    Exit::InvalidManifest
}

fn render_problems(problems: &[Problem]) -> String {
    problems.iter().map(print::problem).collect::<Vec<_>>().join("\n")
}
