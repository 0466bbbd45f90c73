//! Process of the gateway: `GET /api/abide/v1/processes` and its watch, with all facts and both specs.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::figures::FigureDetails;
use super::instance_history::{ExitDetails, ProbeDetails, RunDetails};
use super::present;
use super::process_row::{Hosting, ListedProcess, ProcessRow};
use crate::model::{Health, HostKey, InstanceKey, Name, SpecRevision, SyncStatus};

/// State of a file with the content that the configmap states.
const AS_STATED: &str = "as_stated";

/// One process. `S` is the form of a spec: a reader may parse repeated specs once. Fields after `hosting` may be missing
/// in the rows of another version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "GatewayProcess", bound = "")]
pub struct GatewayProcess<S = Value> {
    pub instance: InstanceKey,
    pub namespace: Name,
    pub name: Name,
    pub host: HostKey,
    pub labels: BTreeMap<String, String>,
    /// Whether it runs is not known: its report cannot be read.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unknown: bool,
    pub registered: bool,
    pub hosted: bool,
    pub running: bool,
    /// Present only if true: the process ended, and its restart policy leaves it stopped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub completed: bool,
    pub pid: Option<u32>,
    pub owner: Option<String>,
    pub revision: Option<SpecRevision>,
    pub live_revision: Option<SpecRevision>,
    /// Id of the key of every digest and revision in this row. Absent: the process has no secrets, or they have no key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key: Option<String>,
    /// Present only if true: the process was adopted and not restarted since. The live spec is the spec of its adoption,
    /// and not known to be in effect.
    #[serde(default, skip_serializing_if = "is_false")]
    pub live_spec_unknown: bool,
    #[schemars(with = "Health")]
    pub health: String,
    pub hosting: Hosting,
    pub since: Option<String>,
    #[serde(default)]
    pub started: Option<String>,
    pub report_time: Option<String>,
    #[serde(default)]
    pub registered_at: Option<String>,
    /// Lease generation of the last change.
    #[serde(default)]
    pub generation: Option<u64>,
    #[serde(default)]
    pub supplier: Option<u64>,
    /// Whether the host's agent is connected.
    #[serde(default = "default_true")]
    pub agent: bool,
    #[serde(default)]
    pub message: String,
    /// Output of `version_cmd`.
    #[serde(default)]
    pub version: String,
    /// Exit code of the last run.
    #[serde(default)]
    pub exit: Option<i32>,
    /// Time of the agent's next action.
    #[serde(default)]
    pub next: Option<String>,
    /// Percent of the host, as in GSE; 0: unknown.
    #[serde(default)]
    pub cpu: f64,
    #[serde(default)]
    pub mem: f64,
    /// Figures of its tree; `null`: unknown, or the process does not run.
    #[serde(default)]
    pub figures: Option<FigureDetails>,
    /// State of each file in the configmap.
    #[serde(default)]
    pub config: Map<String, Value>,
    /// Relaunches by supervision since the registration.
    #[serde(default)]
    pub restarts: u64,
    #[serde(default)]
    pub last_exit: Option<ExitDetails>,
    /// The last health probe of the running process; absent in a brief list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeDetails>,
    /// The last exits, newest first; absent in a brief list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exits: Option<Vec<ExitDetails>>,
    /// The last scheduled runs, newest first; only of a scheduled process, absent in a brief list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs: Option<Vec<RunDetails>>,
    /// The next three runs; only of a scheduled process, absent in a brief list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_runs: Option<Vec<String>>,
    /// Pid file and log in the agent's folder, of a process that names none; absent in a brief list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_files: Option<AgentFilePaths>,
    /// The registered spec; absent in a brief list, `null` if it has secrets.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schemars(with = "Option<Map<String, Value>>")]
    pub spec: Option<Option<S>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<ReportedSpec>")]
    pub spec_redacted: Option<S>,
    /// The spec in effect; absent in a brief list, `null` if the process does not run, or if it has secrets.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schemars(with = "Option<Map<String, Value>>")]
    pub live_spec: Option<Option<S>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<ReportedSpec>")]
    pub live_spec_redacted: Option<S>,
    /// The last run of a one-shot process; absent in a brief list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran: Option<RunReport>,
}

fn is_false(value: &bool) -> bool {
    !value
}

fn default_true() -> bool {
    true
}

/// Pid file and log in the agent's folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AgentFilePaths {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_path: Option<String>,
}

/// A spec with digests in place of its secrets, and the digests computed with them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "ReportedSpec", bound = "")]
pub struct ReportedSpec<S = Value> {
    #[schemars(with = "Map<String, Value>")]
    pub spec: S,
    pub revision: SpecRevision,
    /// 32 hex digits.
    pub sum: String,
}

/// The last run of a one-shot process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum RunReport {
    /// `never` or `unknown`.
    Word(String),
    With {
        revision: Option<SpecRevision>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spec: Option<Value>,
    },
}

impl<S> GatewayProcess<S> {
    /// Files of the configmap that differ on the host, or are missing.
    pub fn drifted_files(&self) -> Vec<String> {
        let is_drift = |state: &Value| state.as_str().is_some_and(|state| state != AS_STATED);
        self.config.iter().filter(|(_, state)| is_drift(state)).map(|(path, _)| path.clone()).collect()
    }
}

impl GatewayProcess {
    /// A redacted spec takes the place of a full one.
    pub fn with_redacted_specs(mut self) -> GatewayProcess {
        let parts = [
            (&mut self.spec, self.spec_redacted.take()),
            (&mut self.live_spec, self.live_spec_redacted.take()),
        ];
        for (spec, redacted) in parts {
            if let (None | Some(None), Some(mut redacted)) = (&spec, redacted) {
                *spec = Some(Some(redacted["spec"].take()));
            }
        }
        self
    }

    /// The row of `get processes`. Without a live agent the last report is not current.
    pub(super) fn listed(self, sync: SyncStatus) -> ListedProcess {
        let (current, drifted_files) = (self.agent, self.drifted_files());
        let row = ProcessRow {
            instance: self.instance,
            namespace: self.namespace,
            name: self.name,
            host: self.host,
            labels: self.labels,
            registered: Some(self.registered),
            hosted: current.then_some(self.hosted),
            running: current.then_some(self.running),
            pid: self.pid.filter(|_| current),
            owner: self.owner,
            revision: self.revision,
            live_revision: self.live_revision,
            secret_key: self.secret_key,
            live_spec_unknown: self.live_spec_unknown,
            sync,
            health: if current { self.health } else { Health::Unknown.word().to_owned() },
            hosting: if current { self.hosting } else { Hosting::Unknown },
            since: self.since,
            report_time: self.report_time,
        };
        let (message, version) = (Some(self.message), Some(self.version));
        ListedProcess {
            row,
            message,
            version,
            exit: self.exit,
            next: self.next,
            restarts: Some(self.restarts),
            last_exit: self.last_exit,
            cpu: self.figures.as_ref().map(|_| self.cpu),
            mem: self.figures.as_ref().map(|_| self.mem),
            fds: self.figures.as_ref().map(|figures| figures.fds),
            threads: self.figures.as_ref().map(|figures| figures.threads),
            cores: self.figures.as_ref().map(|figures| figures.cores),
            memory: self.figures.as_ref().map(|figures| figures.memory),
            source: None,
            drifted_files,
            why: None,
        }
    }
}

/// A page of processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "ProcessPage", bound = "")]
pub struct ProcessPage<S = Value> {
    #[schemars(with = "Vec<GatewayProcess>")]
    pub items: Vec<GatewayProcess<S>>,
    /// `after` of the next page; `null`: this is the last.
    pub more: Option<String>,
    /// Change number of the first page: a watch after it misses no change.
    pub as_of: u64,
    /// With `digests=keyed`: the keys that the caller may have, by id, in hex.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secret_keys: BTreeMap<String, String>,
}

/// A line of a watch. With an instance: its current row, `null` if it was removed. With a number alone: no other process
/// changed up to it. `forgotten` and `error` end the stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(bound(deserialize = "S: Deserialize<'de>"))]
#[schemars(rename = "ProcessChange", bound = "")]
pub struct ProcessChange<S = Value> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceKey>,
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schemars(with = "Option<GatewayProcess>")]
    pub process: Option<Option<GatewayProcess<S>>>,
    /// The reader must list all processes again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgotten: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// With `digests=keyed`: the key of the row, if the caller may have it, by id, in hex.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secret_keys: BTreeMap<String, String>,
}

impl<S> ProcessChange<S> {
    /// A line without fields.
    pub fn empty() -> ProcessChange<S> {
        ProcessChange {
            number: None,
            instance: None,
            process: None,
            forgotten: None,
            error: None,
            secret_keys: BTreeMap::new(),
        }
    }
}
