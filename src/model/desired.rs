//! Desired state: every instance fully resolved, with the source location of its declaration.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::{AutoType, HashedSpec, Host, HostKey, InstanceKey, OnChange, Percent, ProcessKey, Rollout};

/// All desired instances, and the policies that apply to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    pub instances: BTreeMap<InstanceKey, DesiredInstance>,
    pub policies: Vec<Policy>,
}

/// One desired instance. Instances of one process share their spec and declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredInstance {
    pub host: Host,
    pub spec: Arc<HashedSpec>,
    pub origin: Arc<DeclaredProcess>,
}

impl Desired {
    /// Address of each host whose manifests state both its address and its agent id, by the agent id.
    pub fn addresses_of_agents(&self) -> BTreeMap<HostKey, HostKey> {
        let hosts = self.instances.values().map(|want| &want.host);
        hosts.filter_map(|host| Some((HostKey::Agent(host.agent_id.clone()?), host.key.clone()))).collect()
    }

    /// Whether both request the same for an instance. An instance that neither contains is the same.
    pub fn is_same_request(&self, other: &Desired, key: &InstanceKey) -> bool {
        match (self.instances.get(key), other.instances.get(key)) {
            (Some(one), Some(other)) => one.is_same_request(other),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
}

impl DesiredInstance {
    /// Whether both request the same. The source location and the policies are not compared.
    pub fn is_same_request(&self, other: &DesiredInstance) -> bool {
        let same_origin =
            Arc::ptr_eq(&self.origin, &other.origin) || request_of(&self.origin) == request_of(&other.origin);
        let same_spec = Arc::ptr_eq(&self.spec, &other.spec) || self.spec == other.spec;
        self.host == other.host && same_origin && same_spec
    }
}

fn request_of(origin: &DeclaredProcess) -> impl PartialEq + '_ {
    let DeclaredProcess {
        place: _,
        declared,
        state,
        depends_on,
        protect,
        adopt,
        moved_from,
        on_change,
        rollout,
        policies: _,
    } = origin;
    (declared, state, depends_on, protect, adopt, moved_from, on_change, rollout)
}

/// The part of a declaration that all of its instances share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredProcess {
    pub place: SourceLocation,
    /// The name in the manifest: `web/api`, also for its instance `web/api_2`.
    pub declared: ProcessKey,
    pub state: State,
    /// Sorted. A name refers to all instances declared under it, or to the instance with that name.
    pub depends_on: Vec<ProcessKey>,
    pub protect: Vec<Protection>,
    pub adopt: bool,
    /// Earlier names, the most recent first. Moving a process from one of them needs no restart.
    pub moved_from: Vec<ProcessKey>,
    pub on_change: OnChange,
    pub rollout: Option<Rollout>,
    /// Indexes of the policies that apply to it.
    pub policies: Vec<usize>,
}

/// Position in a source file. Lines and columns count from 1, columns in characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceLocation {
    pub file: Arc<str>,
    pub line: u32,
    pub column: u32,
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    #[default]
    Running,
    Stopped,
    /// Running, and not supervised by the agent.
    Unhosted,
    Absent,
}

impl State {
    pub const ALL: [State; 4] = [State::Running, State::Stopped, State::Unhosted, State::Absent];

    pub fn word(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Stopped => "stopped",
            State::Unhosted => "unhosted",
            State::Absent => "absent",
        }
    }

    /// The state that a GSE operation requests (0 start … 9 kill); `None`: no such operation.
    pub fn wanted_by(op_type: i64, auto_type: AutoType) -> Option<State> {
        match op_type {
            0 | 2 | 3 | 7 | 8 => Some(State::Running),
            1 | 9 => Some(State::Stopped),
            4 => Some(State::unsupervised(auto_type)),
            _ => None,
        }
    }

    /// The state after supervision ends. A one-shot process is not kept running, so it counts as stopped.
    pub fn unsupervised(auto_type: AutoType) -> State {
        match auto_type {
            AutoType::OneShot => State::Stopped,
            AutoType::Periodic | AutoType::Resident => State::Unhosted,
        }
    }

    pub fn needs_start(self) -> bool {
        match self {
            State::Running | State::Unhosted => true,
            State::Stopped | State::Absent => false,
        }
    }
}

/// An operation that `protect:` forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protection {
    Delete,
    Restart,
    Stop,
}

impl Protection {
    pub const ALL: [Protection; 3] = [Protection::Delete, Protection::Restart, Protection::Stop];

    pub fn word(self) -> &'static str {
        match self {
            Protection::Delete => "delete",
            Protection::Restart => "restart",
            Protection::Stop => "stop",
        }
    }

    /// The value of the label that keeps protections with a process of GSE; `None`: no label.
    pub fn label(protections: &[Protection]) -> Option<String> {
        let words = Protection::ALL.into_iter().filter(|one| protections.contains(one));
        let words: Vec<&str> = words.map(Protection::word).collect();
        (!words.is_empty()).then(|| words.join(","))
    }

    /// Reads that label. A word of a later version forbids everything.
    pub fn of_label(text: &str) -> Vec<Protection> {
        let words = || text.split(',').map(str::trim).filter(|word| !word.is_empty());
        let of_word = |word: &str| Protection::ALL.into_iter().find(|one| one.word() == word);
        words().map(of_word).collect::<Option<Vec<_>>>().unwrap_or_else(|| Protection::ALL.to_vec())
    }
}

/// A count, or a share of a total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    Count(u64),
    Share(Percent),
}

impl Amount {
    /// Reads `10%`.
    pub fn share(text: &str) -> Option<Percent> {
        text.trim().strip_suffix('%').and_then(|number| number.trim().parse().ok()).and_then(Percent::new)
    }
}

impl std::str::FromStr for Amount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(count) => Ok(Amount::Count(count)),
            Err(_) => {
                Amount::share(text).map(Amount::Share).ok_or("a count such as 3, or a share such as 10%")
            }
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Count(n) => write!(f, "{n}"),
            Amount::Share(p) => write!(f, "{}%", p.get()),
        }
    }
}

/// The owner of manifests that name none.
pub const DEFAULT_OWNER: &str = "default";

/// Rules for a directory tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub name: String,
    pub place: SourceLocation,
    /// Applies to manifests in this directory or below.
    pub reach: PathBuf,
    pub owner: Option<String>,
    pub allow: Allow,
    pub budgets: Budgets,
    pub windows: Vec<Window>,
}

/// Patterns (`*` matches any text). `None` allows everything, an empty list nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allow {
    pub namespaces: Option<Vec<String>>,
    pub users: Option<Vec<String>>,
    pub hosts: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    pub delete: Option<Amount>,
    pub restart: Option<Amount>,
}

/// A maintenance window. Operations that some window names are held outside of all windows that name them, and inside
/// each window that denies them.
#[derive(Clone, PartialEq, Eq)]
pub struct Window {
    pub days: Days,
    pub from: TimeOfDay,
    pub to: TimeOfDay,
    /// A name of the IANA time zone database.
    pub tz: String,
    pub operations: Vec<Disruption>,
    /// The operations are held inside the window.
    pub deny: bool,
    pub place: SourceLocation,
}

impl Window {
    pub fn allows(&self, operation: Disruption) -> bool {
        !self.deny && self.operations.contains(&operation)
    }

    pub fn denies(&self, operation: Disruption) -> bool {
        self.deny && self.operations.contains(&operation)
    }
}

/// The text is part of manifest revisions: it has no location, and names only fields that are set.
impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Window { days, from, to, tz, operations, deny, place: _ } = self;
        let mut text = f.debug_struct("Window");
        text.field("days", days).field("from", from).field("to", to).field("tz", tz);
        text.field("operations", operations);
        if *deny {
            text.field("deny", deny);
        }
        text.finish()
    }
}

/// Days of the week, Monday first.
pub type Days = [bool; 7];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeOfDay {
    pub hour: u8,
    pub minute: u8,
}

/// An operation that a window, a budget or a protection restricts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disruption {
    Start,
    Stop,
    Restart,
    Reload,
    Delete,
}

impl Disruption {
    pub const ALL: [Disruption; 5] =
        [Disruption::Start, Disruption::Stop, Disruption::Restart, Disruption::Reload, Disruption::Delete];

    pub fn word(self) -> &'static str {
        match self {
            Disruption::Start => "start",
            Disruption::Stop => "stop",
            Disruption::Restart => "restart",
            Disruption::Reload => "reload",
            Disruption::Delete => "delete",
        }
    }
}
