//! Import drafts: processes as imported, before names are made unique and required fields are filled in.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::words::{absolute_path, join_path};
use super::{ImportContext, LOG_DIR, RUN_DIR};
use crate::manifest::document::{
    ControlEntry, Document, EnvEntry, HookValue, HooksEntry, HostEntry, HostValue, IdentityEntry, JobEntry,
    Map, Meta, MonitorEntry, ResourceEntry, SandboxEntry, SpecEntry, Text, TextOrNumber,
};
use crate::manifest::grammar::{API_VERSION, RETRIES, SECONDS};
use crate::model::{HostKey, State};

/// An imported process. Texts are in manifest syntax: a literal `${` is escaped.
#[derive(Debug)]
pub struct Draft {
    pub file: Arc<str>,
    pub line: u32,
    /// Name in the source file; it may not be a valid manifest name.
    pub name: String,
    /// Name in references of other files, such as `db.service`.
    pub alias: String,
    pub labels: BTreeMap<String, String>,
    pub state: State,
    pub instances: Option<u32>,
    /// Aliases of processes that start before this one, each with line and name of the setting.
    pub after: Vec<(u32, String, String)>,
    /// Aliases of processes that start after this one.
    pub before: Vec<(u32, String, String)>,
    pub spec: DraftSpec,
    pub log: Log,
}

/// The spec of an imported process.
#[derive(Debug, Default)]
pub struct DraftSpec {
    pub identity: IdentityEntry,
    pub control: ControlEntry,
    pub resource: ResourceEntry,
    pub monitor: MonitorEntry,
    pub env: BTreeMap<String, String>,
    pub cycle_time: Option<i64>,
    pub sandbox: SandboxEntry,
    pub env_file: Option<Text>,
    pub before_start: Option<Text>,
}

/// Destination of the output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Log {
    /// Not set in the source file: a path is generated.
    #[default]
    Unspecified,
    Discard,
    File(String),
}

impl Draft {
    pub fn new(file: Arc<str>, line: u32, name: String) -> Draft {
        Draft {
            file,
            line,
            alias: name.clone(),
            name,
            labels: BTreeMap::new(),
            state: State::Running,
            instances: None,
            after: Vec::new(),
            before: Vec::new(),
            spec: DraftSpec {
                monitor: MonitorEntry { auto_type: Some(1), ..MonitorEntry::default() },
                ..DraftSpec::default()
            },
            log: Log::Unspecified,
        }
    }

    /// Sets foreground mode: `start_cmd` is the process.
    pub fn foreground(&mut self, command: String) {
        self.spec.control.start_mode = Some("foreground".into());
        self.spec.control.start_cmd = Some(Text(command));
    }

    /// Sets a stop_cmd for a signal other than TERM, the agent's default.
    pub fn stop_by(&mut self, signal: &str) {
        self.spec.control.stop_cmd = Some(Text(format!("kill -{signal} $ABIDE_PID")));
    }
}

/// Note for a stop signal other than TERM.
pub const NOT_KILLED: &str = "converted to a stop_cmd; no KILL follows a stop_cmd, so a stop may fail";

/// A valid signal name without `SIG`. It becomes part of a command, so others are rejected.
pub fn signal(text: &str) -> Option<String> {
    let upper = text.trim().to_ascii_uppercase();
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    let fits = !bare.is_empty() && bare.len() <= 12;
    let number = bare.parse::<u8>().is_ok_and(|number| (1..=64).contains(&number));
    let name = bare.starts_with(|c: char| c.is_ascii_uppercase())
        && bare.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || "+-".contains(c));
    (fits && (number || name)).then(|| bare.to_owned())
}

/// Seconds within the range of a manifest.
pub fn seconds(value: i64) -> Option<i64> {
    SECONDS.contains(&value).then_some(value)
}

pub fn retries(value: i64) -> Option<i64> {
    RETRIES.contains(&value).then_some(value)
}

/// Converts drafts to documents in order, with valid and unique names.
pub fn documents(drafts: Vec<Draft>, reader: &mut ImportContext<'_>) -> Vec<Document> {
    let names = names(&drafts, reader);
    let waits = dependency_order(&drafts, reader);
    let all = drafts.into_iter().zip(names).collect::<Vec<_>>();
    let called: Vec<String> = all.iter().map(|(_, name)| name.clone()).collect();
    all.into_iter()
        .zip(waits)
        .map(|((draft, name), waits)| {
            let depends_on = waits.into_iter().map(|at| Text(called[at].clone())).collect();
            document(draft, name, depends_on, reader)
        })
        .collect()
}

fn document(draft: Draft, name: String, depends_on: Vec<Text>, reader: &mut ImportContext<'_>) -> Document {
    let Draft { labels, state, instances, spec, .. } = draft;
    let DraftSpec {
        mut identity,
        control,
        resource,
        monitor,
        env,
        cycle_time,
        sandbox,
        env_file,
        before_start,
    } = spec;
    let hooks = before_start
        .map(|Text(run)| HooksEntry { before_start: Some(HookValue::Run(run)), ..HooksEntry::default() });
    let terms = reader.terms;
    let own = if instances.is_some() { "${name}" } else { name.as_str() };
    let under = |folder: &str, end: &str| {
        Text(join_path(&super::words::escaped(folder), &format!("{}/{own}.{end}", terms.namespace)))
    };
    let user = identity.user.as_deref().filter(|user| !["root", "0"].contains(user));
    // The agent has files of its own for a process that it starts in the foreground.
    let is_daemon = control.start_mode.as_deref() != Some("foreground");
    let folder = |chosen: &Option<String>, default: &'static str| {
        chosen.clone().or_else(|| is_daemon.then(|| default.to_owned()))
    };
    let run_dir = folder(&terms.run_dir, RUN_DIR).filter(|_| identity.pid_path.is_none());
    let log_dir = folder(&terms.log_dir, LOG_DIR).filter(|_| draft.log == Log::Unspecified);
    for folder in [&run_dir, &log_dir].into_iter().flatten() {
        let folder = join_path(folder, terms.namespace.as_str());
        reader.folders.entry(folder).or_default().extend(user.map(str::to_owned));
    }
    identity.pid_path = identity.pid_path.take().or_else(|| Some(under(run_dir.as_ref()?, "pid")));
    identity.setup_path.get_or_insert_with(|| "/".into());
    identity.value_key = Some(Text(format!("{}/{own}", terms.namespace)));
    identity.log_path = match draft.log {
        Log::Unspecified => log_dir.as_ref().map(|folder| under(folder, "log")),
        Log::Discard => None,
        Log::File(path) => Some(Text(absolute_path(&path, identity.setup_path.as_deref().unwrap_or("/")))),
    };
    let env: BTreeMap<String, EnvEntry> =
        env.into_iter().map(|(name, value)| (name, EnvEntry::Plain(TextOrNumber::Text(value)))).collect();
    let labels: BTreeMap<String, TextOrNumber> =
        labels.into_iter().map(|(name, value)| (name, TextOrNumber::Text(value))).collect();
    Document {
        api_version: Some(API_VERSION.into()),
        kind: Some("Process".into()),
        meta: Some(Meta {
            namespace: Some(terms.namespace.as_str().into()),
            name: Some(Text(name)),
            labels: (!labels.is_empty()).then_some(Map(labels)),
        }),
        hosts: Some(terms.hosts.iter().map(|key| HostValue::Entry(host(key))).collect()),
        state: (state != State::Running).then(|| state.word().into()),
        instances: instances.map(i64::from),
        depends_on: (!depends_on.is_empty()).then_some(depends_on),
        spec: Some(Box::new(SpecEntry {
            identity: Some(identity),
            control: Some(control),
            resource: (resource != ResourceEntry::default()).then_some(resource),
            monitor_policy: Some(monitor),
            env: (!env.is_empty()).then_some(Map(env)),
            job: cycle_time.map(|secs| JobEntry { cycle_time: Some(secs), ..JobEntry::default() }),
            env_file,
            sandbox: (sandbox != SandboxEntry::default()).then(|| Box::new(sandbox)),
            hooks: hooks.map(Box::new),
            ..SpecEntry::default()
        })),
        ..Document::default()
    }
}

pub fn host(key: &HostKey) -> HostEntry {
    match key {
        HostKey::Address { cloud, ip } => HostEntry {
            ip: Some(Text(ip.to_string())),
            bk_cloud_id: i64::try_from(*cloud).ok(),
            ..HostEntry::default()
        },
        HostKey::Agent(id) => HostEntry { bk_agent_id: Some(id.as_str().into()), ..HostEntry::default() },
    }
}

/// A text as a process name that is valid in keys, file names and `NS/NAME@HOST`.
pub fn sanitize_name(text: &str) -> String {
    // Leaves room for an instance number.
    const MOST: usize = 100;
    let fits = |c: char| c.is_alphanumeric() || "-_.".contains(c);
    let name: String = text.chars().map(|c| if fits(c) { c } else { '-' }).take(MOST).collect();
    match name.trim_matches(['-', '.']) {
        "" => "unnamed".to_owned(),
        trimmed => trimmed.to_owned(),
    }
}

/// Assigns a unique name to each draft.
fn names(drafts: &[Draft], reader: &mut ImportContext<'_>) -> Vec<String> {
    let mut taken = UsedNames::default();
    let mut names = Vec::new();
    for draft in drafts {
        let wanted = sanitize_name(&draft.name);
        let mut name = wanted.clone();
        let mut nth = 2;
        while !taken.is_free(&name, draft.instances) {
            name = format!("{wanted}-{nth}");
            nth += 1;
        }
        if wanted != draft.name {
            let message = format!("not a valid manifest name; renamed to {name}");
            reader.note(&draft.file, draft.line, &draft.name, message);
        } else if name != wanted {
            let message = format!("the name is already used; renamed to {name}");
            reader.note(&draft.file, draft.line, &draft.name, message);
        }
        taken.0.insert(name.clone(), draft.instances);
        names.push(name);
    }
    names
}

/// Names in use, with their instance counts.
#[derive(Default)]
struct UsedNames(BTreeMap<String, Option<u32>>);

impl UsedNames {
    fn is_free(&self, name: &str, instances: Option<u32>) -> bool {
        let number = |text: &str| text.parse::<u32>().ok().filter(|n| n.to_string() == text);
        let among = |base: &str, n: u32| self.0.get(base).copied().flatten().is_some_and(|many| n <= many);
        let numbered = name.rsplit_once('_').and_then(|(base, end)| Some((base, number(end)?)));
        let meets = || {
            let many = instances.unwrap_or(0);
            let prefix = format!("{name}_");
            let others = self.0.range(prefix.clone()..).take_while(|(other, _)| other.starts_with(&prefix));
            others.filter_map(|(other, _)| number(&other[prefix.len()..])).any(|n| n <= many)
        };
        !self.0.contains_key(name) && !numbered.is_some_and(|(base, n)| among(base, n)) && !meets()
    }
}

/// For each draft, the indexes of its dependencies. A dependency of a draft on itself is dropped.
fn dependency_order(drafts: &[Draft], reader: &mut ImportContext<'_>) -> Vec<Vec<usize>> {
    let by_alias: HashMap<&str, usize> =
        drafts.iter().enumerate().rev().map(|(at, draft)| (draft.alias.as_str(), at)).collect();
    let mut waits: Vec<Vec<(usize, usize, u32, &str)>> = vec![Vec::new(); drafts.len()];
    for (at, draft) in drafts.iter().enumerate() {
        let after = draft.after.iter().map(|wait| (wait, true));
        for ((line, setting, alias), waits_itself) in after.chain(draft.before.iter().map(|w| (w, false))) {
            let Some(other) = by_alias.get(alias.as_str()).copied() else {
                let message =
                    format!("{alias} is not imported in this run; manifests depend only on processes");
                reader.note(&draft.file, *line, setting, message);
                continue;
            };
            let (dependent, target) = if waits_itself { (at, other) } else { (other, at) };
            if !waits[dependent].iter().any(|(already, ..)| *already == target) {
                waits[dependent].push((target, at, *line, setting));
            }
        }
    }
    break_cycles(waits, drafts, reader)
}

/// Drops dependencies that close a cycle. Iterative, because chains have no length limit.
fn break_cycles(
    waits: Vec<Vec<(usize, usize, u32, &str)>>,
    drafts: &[Draft],
    reader: &mut ImportContext<'_>,
) -> Vec<Vec<usize>> {
    #[derive(Clone, Copy, PartialEq)]
    enum VisitState {
        New,
        Open,
        Done,
    }
    let mut marks = vec![VisitState::New; waits.len()];
    let mut dependencies: Vec<Vec<usize>> = vec![Vec::new(); waits.len()];
    for begin in 0..waits.len() {
        if marks[begin] != VisitState::New {
            continue;
        }
        marks[begin] = VisitState::Open;
        let mut path = vec![(begin, 0)];
        while let Some((at, next)) = path.last_mut() {
            let (at, nth) = (*at, *next);
            *next += 1;
            let Some((target, set_by, line, setting)) = waits[at].get(nth).copied() else {
                marks[at] = VisitState::Done;
                path.pop();
                continue;
            };
            if marks[target] == VisitState::Open {
                let message = format!("dependency on {} dropped: it closes a cycle", drafts[target].alias);
                reader.note(&drafts[set_by].file, line, setting, message);
                continue;
            }
            dependencies[at].push(target);
            if marks[target] == VisitState::New {
                marks[target] = VisitState::Open;
                path.push((target, 0));
            }
        }
    }
    dependencies
}
