//! Process row: the JSON of `get processes`, `get orphans`, `describe` and `GET /api/v1/processes`.
//!
//! `plan --observed` reads the same rows.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::gateway_process::GatewayProcess;
use super::history::InstanceChange;
use super::hold::HoldDetails;
use super::instance_history::ExitDetails;
use crate::model::{Health, HoldReason, HostKey, InstanceKey, Name, Op, SpecRevision, SyncStatus};

/// The fields that every row has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessRow {
    pub instance: InstanceKey,
    pub namespace: Name,
    pub name: Name,
    pub host: HostKey,
    pub labels: BTreeMap<String, String>,
    /// `null`: unknown, as for the other facts.
    pub registered: Option<bool>,
    pub hosted: Option<bool>,
    pub running: Option<bool>,
    pub pid: Option<u32>,
    pub owner: Option<String>,
    /// Of the registered spec.
    pub revision: Option<SpecRevision>,
    /// Of the spec in effect.
    pub live_revision: Option<SpecRevision>,
    /// Present only if the process has secrets: id of the key of both revisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key: Option<String>,
    /// Present only if true: the process was adopted and not restarted since. The live spec is the spec of its adoption,
    /// and not known to be in effect.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub live_spec_unknown: bool,
    pub sync: SyncStatus,
    /// The word of the agent.
    #[schemars(with = "Health")]
    pub health: String,
    pub hosting: Hosting,
    /// Time of the last state change.
    pub since: Option<String>,
    pub report_time: Option<String>,
}

/// Names of the fields that every [`ProcessRow`] has.
pub const ROW_FIELDS: [&str; 17] = [
    "instance",
    "namespace",
    "name",
    "host",
    "labels",
    "registered",
    "hosted",
    "running",
    "pid",
    "owner",
    "revision",
    "live_revision",
    "sync",
    "health",
    "hosting",
    "since",
    "report_time",
];

/// Additional fields of an [`OfflineRow`].
const EXTRA_FIELDS: [&str; 6] = ["spec", "live_spec", "live_spec_unknown", "ran", "secret_key", "unknown"];

/// Fields of a [`ListedProcess`] that decide nothing in a plan.
const LISTED_FIELDS: [&str; 15] = [
    "message",
    "version",
    "exit",
    "next",
    "restarts",
    "last_exit",
    "cpu",
    "mem",
    "fds",
    "threads",
    "cores",
    "memory",
    "source",
    "drifted_files",
    "why",
];

/// Every field that `plan --observed` reads.
pub fn row_fields() -> impl Iterator<Item = &'static str> {
    ROW_FIELDS.into_iter().chain(EXTRA_FIELDS)
}

/// Whether `plan --observed` accepts a field: it reads it, or `get processes` writes it.
pub fn is_row_field(name: &str) -> bool {
    row_fields().chain(LISTED_FIELDS).any(|known| known == name)
}

/// Whether the agent supervises a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Hosting {
    Hosted,
    NotHosted,
    Unknown,
}

impl Hosting {
    pub const ALL: [Hosting; 3] = [Hosting::Hosted, Hosting::NotHosted, Hosting::Unknown];

    pub fn word(self) -> &'static str {
        match self {
            Hosting::Hosted => "Hosted",
            Hosting::NotHosted => "NotHosted",
            Hosting::Unknown => "Unknown",
        }
    }
}

impl From<Option<bool>> for Hosting {
    fn from(hosted: Option<bool>) -> Hosting {
        match hosted {
            Some(true) => Hosting::Hosted,
            Some(false) => Hosting::NotHosted,
            None => Hosting::Unknown,
        }
    }
}

/// A row of `get processes`; of `get orphans` with the reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ListedProcess {
    #[serde(flatten)]
    pub row: ProcessRow,
    pub message: Option<String>,
    /// Output of `version_cmd`.
    pub version: Option<String>,
    /// Exit code of the last run.
    pub exit: Option<i32>,
    /// Time of the agent's next action.
    pub next: Option<String>,
    /// Relaunches by supervision since the registration; `null`: unknown.
    #[serde(default)]
    pub restarts: Option<u64>,
    #[serde(default)]
    pub last_exit: Option<ExitDetails>,
    /// Figures of its process tree; `null`: unknown. Percent of the host.
    #[serde(default)]
    pub cpu: Option<f64>,
    #[serde(default)]
    pub mem: Option<f64>,
    #[serde(default)]
    pub fds: Option<u32>,
    #[serde(default)]
    pub threads: Option<u32>,
    /// CPU time per elapsed time, in cores.
    #[serde(default)]
    pub cores: Option<f64>,
    /// Bytes.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Location of its declaration in the active revision of its owner: `file:line:column`; `null`: unknown.
    #[serde(default)]
    pub source: Option<String>,
    /// Files of the configmap that differ on the host, or are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drifted_files: Vec<String>,
    /// Reason why it is an orphan, or held: the held reason and its sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A row of the controller, as of its last observation; its details are those of the target's own row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ControllerProcess {
    #[serde(flatten)]
    pub row: ProcessRow,
    pub held: Option<HeldDetail>,
    /// `file:line:column`
    pub declared: Option<String>,
    /// The same as `declared`, as in `get processes`.
    #[serde(default)]
    pub source: Option<String>,
    #[serde(flatten)]
    pub details: ReportedDetails,
}

/// Details that the agent reports; `null`: unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ReportedDetails {
    /// `null` without credentials: it may quote output of the process.
    pub message: Option<String>,
    /// Relaunches by supervision since the registration.
    pub restarts: Option<u64>,
    pub last_exit: Option<ExitDetails>,
    /// Figures of its process tree: percent of the host.
    pub cpu: Option<f64>,
    pub mem: Option<f64>,
    pub fds: Option<u32>,
    pub threads: Option<u32>,
    /// CPU time per elapsed time, in cores.
    pub cores: Option<f64>,
    /// Bytes.
    pub memory: Option<u64>,
}

impl From<ListedProcess> for ReportedDetails {
    fn from(listed: ListedProcess) -> ReportedDetails {
        let ListedProcess { message, restarts, last_exit, cpu, mem, fds, threads, cores, memory, .. } =
            listed;
        ReportedDetails { message, restarts, last_exit, cpu, mem, fds, threads, cores, memory }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HeldDetail {
    pub reason: HoldReason,
    pub detail: String,
}

/// A process of a target that is not an Abide gateway, as observed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlatformProcess {
    #[serde(flatten)]
    pub row: ProcessRow,
    #[schemars(with = "Option<Map<String, Value>>")]
    pub spec: Option<Value>,
    #[schemars(with = "Option<Map<String, Value>>")]
    pub live_spec: Option<Value>,
    pub message: Option<String>,
}

/// A process of any target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TargetProcess {
    /// Only this row has a sync status before a comparison.
    Observed(Box<PlatformProcess>),
    Gateway(Box<GatewayProcess>),
}

impl TargetProcess {
    pub fn instance(&self) -> &InstanceKey {
        match self {
            TargetProcess::Observed(process) => &process.row.instance,
            TargetProcess::Gateway(process) => &process.instance,
        }
    }

    pub fn labels(&self) -> &BTreeMap<String, String> {
        match self {
            TargetProcess::Observed(process) => &process.row.labels,
            TargetProcess::Gateway(process) => &process.labels,
        }
    }

    pub fn message(&self) -> Option<&str> {
        match self {
            TargetProcess::Observed(process) => process.message.as_deref(),
            TargetProcess::Gateway(process) => Some(&process.message),
        }
    }

    /// The registered spec, where it is known.
    pub fn spec(&self) -> Option<&Value> {
        match self {
            TargetProcess::Observed(process) => process.spec.as_ref(),
            TargetProcess::Gateway(process) => process.spec.as_ref()?.as_ref(),
        }
    }

    /// Exit code of the last run.
    pub fn exit(&self) -> Option<i32> {
        match self {
            TargetProcess::Observed(_) => None,
            TargetProcess::Gateway(process) => process.exit,
        }
    }

    /// The row of `get processes`. Without a live agent the last report is not current.
    pub fn listed(self, sync: SyncStatus) -> ListedProcess {
        match self {
            TargetProcess::Observed(process) => {
                let PlatformProcess { row, message, .. } = *process;
                let row = ProcessRow { sync, ..row };
                ListedProcess {
                    row,
                    message,
                    version: None,
                    exit: None,
                    next: None,
                    restarts: None,
                    last_exit: None,
                    cpu: None,
                    mem: None,
                    fds: None,
                    threads: None,
                    cores: None,
                    memory: None,
                    source: None,
                    drifted_files: Vec::new(),
                    why: None,
                }
            }
            TargetProcess::Gateway(process) => process.listed(sync),
        }
    }
}

/// `abide describe -o json`: all details of one instance. Only written: `sync` occurs twice, which a reader could not tell apart.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ProcessDetails {
    #[serde(flatten)]
    pub process: TargetProcess,
    pub hold: Option<HoldDetails>,
    /// Of a gateway's process, where its owner has an active revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync: Option<SyncStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_action: Option<Vec<NextAction>>,
    pub changes: Vec<InstanceChange>,
}

/// `abide why -o json`: the events of an instance, oldest first, its present state and its next action.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceTimeline {
    pub instance: InstanceKey,
    /// Location of its declaration in the active revision of its owner: `file:line:column`.
    pub declared: Option<String>,
    /// Oldest first.
    pub events: Vec<TimelineEvent>,
    /// The state in one or two words, as in `get processes`.
    pub state: String,
    /// `null`: no active revision declares it.
    pub next_action: Option<Vec<NextAction>>,
    pub process: ListedProcess,
}

/// An event in the story of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TimelineEvent {
    pub at: String,
    /// `manifest`, `registered`, `operation`, `start` or `exit`.
    pub kind: String,
    pub text: String,
}

/// The next step of an instance, or why it is held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum NextAction {
    Step { op: Op, why: Vec<String> },
    Held { held: HoldReason, detail: String },
}

/// A row of `plan --observed`: a [`ProcessRow`], or a host that could not be observed. A missing flag is false; a `null`
/// flag is unknown. Texts that repeat in many rows are parsed later, each once.
#[derive(Deserialize)]
#[serde(rename = "Row")]
pub struct OfflineRow<'a> {
    pub instance: Option<InstanceKey>,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub host: Option<HostKey>,
    #[serde(default)]
    pub unknown: bool,
    #[serde(borrow)]
    pub labels: Option<&'a RawValue>,
    #[serde(default = "default_false")]
    pub registered: Option<bool>,
    #[serde(default = "default_false")]
    pub hosted: Option<bool>,
    #[serde(default = "default_false")]
    pub running: Option<bool>,
    #[serde(default)]
    pub completed: bool,
    pub pid: Option<u32>,
    pub owner: Option<String>,
    pub revision: Option<SpecRevision>,
    pub live_revision: Option<SpecRevision>,
    /// Id of the key of the digests: they are not comparable here.
    pub secret_key: Option<String>,
    #[serde(default)]
    pub live_spec_unknown: bool,
    pub health: Option<String>,
    pub since: Option<String>,
    pub report_time: Option<String>,
    #[serde(borrow)]
    pub spec: Option<&'a RawValue>,
    #[serde(borrow)]
    pub live_spec: Option<&'a RawValue>,
    #[serde(borrow)]
    pub ran: Option<&'a RawValue>,
}

fn default_false() -> Option<bool> {
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> ProcessRow {
        ProcessRow {
            instance: "0:10.0.0.1:web:api".parse().expect("a key"),
            namespace: "web".parse().expect("a name"),
            name: "api".parse().expect("a name"),
            host: "0:10.0.0.1".parse().expect("a host"),
            labels: BTreeMap::new(),
            registered: Some(true),
            hosted: None,
            running: Some(false),
            pid: None,
            owner: None,
            revision: None,
            live_revision: None,
            secret_key: None,
            live_spec_unknown: false,
            sync: SyncStatus::InSync,
            health: "Healthy".to_owned(),
            hosting: Hosting::Unknown,
            since: None,
            report_time: None,
        }
    }

    #[test]
    fn the_reader_accepts_every_field_that_get_processes_writes() {
        let schema = schemars::schema_for!(ListedProcess);
        let properties = schema.get("properties").and_then(Value::as_object).expect("properties");
        assert!(properties.len() > LISTED_FIELDS.len(), "{properties:?}");
        for name in properties.keys() {
            assert!(is_row_field(name), "{name}");
        }
        assert!(!is_row_field("ownr") && LISTED_FIELDS.iter().all(|name| properties.contains_key(*name)));
    }

    #[test]
    fn a_written_row_has_the_fields_that_the_reader_knows() {
        let written = serde_json::to_value(row()).expect("JSON");
        let names: Vec<&str> = written.as_object().expect("an object").keys().map(String::as_str).collect();
        assert_eq!(names, ROW_FIELDS);
        let text = written.to_string();
        let read: OfflineRow<'_> = serde_json::from_str(&text).expect("a row");
        assert_eq!((read.registered, read.hosted, read.running), (Some(true), None, Some(false)));
    }

    #[test]
    fn details_follow_the_row_of_each_kind_of_target() {
        let observed = PlatformProcess { row: row(), spec: None, live_spec: None, message: None };
        let details = ProcessDetails {
            process: TargetProcess::Observed(Box::new(observed)),
            hold: None,
            sync: None,
            next_action: None,
            changes: Vec::new(),
        };
        let text = serde_json::to_string(&details).expect("JSON");
        assert!(
            text.ends_with(r#""spec":null,"live_spec":null,"message":null,"hold":null,"changes":[]}"#),
            "{text}"
        );
        let process: TargetProcess = serde_json::from_str(&text).expect("a process");
        assert_eq!(process, details.process);
    }
}
