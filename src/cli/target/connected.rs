//! Rows, hosts, holds and pins of a connected target, and errors of the engine as failures of a verb.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use super::access::forbidden;
use crate::backend::{Abide, AnyBackend, Backend, BackendError, RefusalReason};
use crate::cli::commands::plan::source::source_changed;
use crate::cli::output::print::count;
use crate::cli::{Exit, Failure};
use crate::contract::{HostEntry, Hosting, PlatformProcess, ProcessRow, TargetProcess};
use crate::engine::pin::Pin;
use crate::engine::{ApplyError, ConnectedTarget};
use crate::model::{
    Desired, Dialect, Hold, HoldReason, HostKey, InstanceKey, KnownSpec, Name, Observed, ObservedInstance,
    Pause, SyncStatus, Time,
};
use crate::observe::{Observation, ObserveError, Target, TargetError, observe_target};
use crate::store::{Error, Store, keys};

/// The cause of an error of a target or of its state store.
pub trait TargetCause: Display {
    /// Whether the credentials do not permit the call.
    fn is_forbidden(&self) -> bool;
}

impl TargetCause for Error {
    fn is_forbidden(&self) -> bool {
        matches!(self, Error::Refused { source, .. } if RefusalReason::of(source) == RefusalReason::NotPermitted)
    }
}

impl TargetCause for BackendError {
    fn is_forbidden(&self) -> bool {
        matches!(self, BackendError::Refused(refusal) if refusal.reason == RefusalReason::NotPermitted)
    }
}

impl TargetCause for ObserveError {
    fn is_forbidden(&self) -> bool {
        match self {
            ObserveError::Target(fault) => fault.is_forbidden(),
            ObserveError::State(error) => error.is_forbidden(),
            ObserveError::Ambiguous(_) => false,
        }
    }
}

impl ConnectedTarget {
    /// The failure of a verb for an error of the target or its state store.
    pub fn failure(&self, why: &dyn TargetCause) -> Failure {
        if why.is_forbidden() {
            return forbidden(format!("target {}: {why}", self.name));
        }
        let failure = Failure::new(Exit::Unreachable, format!("target {}: {why}", self.name));
        match &self.defined_in {
            Some(file) => failure.hint(format!("target {} is defined in {file}", self.name)),
            None => failure,
        }
    }

    /// The failure of a verb for an error of the target.
    pub fn target_failure(&self, error: &TargetError) -> Failure {
        match error {
            TargetError::Backend { cause, .. } => self.failure(cause),
            TargetError::State { cause, .. } => self.failure(cause),
            TargetError::Ledger { cause, .. } => self.failure(&ObserveError::State(cause.clone())),
            TargetError::Ambiguous(cause) => two_rows(cause),
        }
    }

    /// The failure of a verb for an apply that did nothing.
    pub fn apply_failure(&self, error: &ApplyError) -> Failure {
        let message = || error.to_string();
        match error {
            ApplyError::Target(error) => self.target_failure(error),
            ApplyError::Locked { .. } => {
                Failure::new(Exit::Locked, message()).hint("wait for it, or pass a longer --lock-timeout")
            }
            ApplyError::Unfinished(_) => Failure::new(Exit::TimedOut, message()),
            ApplyError::TimedOut => Failure::new(Exit::TimedOut, message())
                .hint("check the target with `abide doctor`, or pass a longer --timeout"),
            ApplyError::SourceChanged { owner, last, source_now } => source_changed(owner, last, source_now),
            ApplyError::OverBudget { reason, instances, detail } => {
                let flag = if *reason == HoldReason::DeleteBudget { "--max-delete" } else { "--max-restart" };
                let message =
                    format!("{} over a budget: {detail}; nothing was done", count(*instances, "instance"));
                let hint = format!("`abide plan` shows them; {flag} allows more");
                Failure::refused(reason.word(), message).hint(hint)
            }
            ApplyError::SavedPlanStale { .. } => {
                Failure::refused("StalePlan", message()).hint("plan again, and review the new plan")
            }
            ApplyError::AlreadyApplied { .. } => Failure::refused("NotSigned", message())
                .hint("`abide plan PATH --out FILE` makes a new plan to sign"),
            ApplyError::PlanChanged => {
                Failure::refused("StalePlan", message()).hint("apply again, and review the new plan")
            }
            ApplyError::NotApproved => Failure::refused("NoApproval", message()),
            ApplyError::NothingSelected { meant, .. } => {
                Failure::new(Exit::Usage, message()).hint(match meant {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => "`abide get processes` lists them".to_owned(),
                })
            }
        }
    }

    /// The Abide backend, for requests that other dialects do not support.
    pub fn abide(&self) -> Result<&Abide, Failure> {
        match &self.backend {
            AnyBackend::Abide(abide) => Ok(abide),
            AnyBackend::Platform(_) => {
                let message = format!(
                    "target {} has dialect {}, which does not support this request: use an Abide gateway",
                    self.name,
                    self.backend.dialect().name()
                );
                Err(Failure::new(Exit::Failed, message))
            }
        }
    }

    /// Observes the instances of these manifests. With `whole`, also all instances of these namespaces and of the ledger.
    pub async fn observe_for(
        &self,
        desired: &Desired,
        whole: Option<BTreeSet<Name>>,
    ) -> Result<Observation, Failure> {
        let observed = observe_target(self, desired, whole).await;
        observed.map_err(|error| self.target_failure(&error))
    }

    /// Observes every instance of the target.
    pub async fn observe_all(&self) -> Result<Observed, Failure> {
        self.observe_with(BTreeSet::new()).await
    }

    /// The same. Platforms list single namespaces: those that are recorded, and `namespaces`.
    pub async fn observe_with(&self, namespaces: BTreeSet<Name>) -> Result<Observed, Failure> {
        let world = self.observe_for(&Desired::default(), Some(namespaces)).await?;
        Ok(world.observed)
    }

    /// Limits of the lists of this target, for readers.
    pub fn list_note(&self) -> Option<String> {
        let note = "JOB has no list of processes: only processes that Abide operated are known";
        (self.backend.dialect() == Dialect::Job).then(|| format!("target {}: {note}", self.name))
    }

    /// Every process of the target, as rows of the contract. An Abide gateway filters by `query`; a platform is also asked
    /// about `namespaces`.
    pub async fn rows(&self, query: &str, namespaces: BTreeSet<Name>) -> Result<Vec<TargetProcess>, Failure> {
        if let AnyBackend::Abide(abide) = &self.backend {
            let rows = abide.rows(query).await.map_err(|fault| self.failure(&fault))?;
            return Ok(rows.into_iter().map(|row| TargetProcess::Gateway(Box::new(row))).collect());
        }
        let observed = self.observe_with(namespaces).await?;
        Ok(observed
            .instances
            .iter()
            .map(|(key, seen)| row(key, seen, &observed))
            .map(|row| TargetProcess::Observed(Box::new(row)))
            .collect())
    }

    /// The hosts of the target. Platforms have no list: theirs are the hosts with observed instances or gaps.
    pub async fn hosts(&self, observed: &Observed) -> Result<Vec<HostEntry>, Failure> {
        if let AnyBackend::Abide(abide) = &self.backend {
            return abide.hosts().await.map_err(|fault| self.failure(&fault));
        }
        let mut hosts: BTreeMap<HostKey, u64> = observed.gaps.keys().map(|host| (host.clone(), 0)).collect();
        observed.instances.keys().for_each(|key| *hosts.entry(key.host.clone()).or_default() += 1);
        let host = |(host, processes): (HostKey, u64)| {
            let agent = !observed.gaps.contains_key(&host);
            let heard = observed.at.to_string();
            HostEntry {
                host,
                agent,
                version: None,
                heard,
                clock_skew_ms: None,
                certificate: None,
                processes: Some(processes),
            }
        };
        Ok(hosts.into_iter().map(host).collect())
    }

    /// Holds and pauses that have not expired. An entry that cannot be read holds what its key names.
    pub async fn holds_and_pauses(&self) -> Result<(Vec<Hold>, Vec<Pause>), Failure> {
        self.active_holds().await.map_err(|error| self.target_failure(&error))
    }

    /// Pinned revisions, with their owners.
    pub async fn pins(&self) -> Result<Vec<(String, Pin)>, Failure> {
        let page = self.state.range(keys::PIN_PREFIX, None, usize::MAX).await;
        let page = page.map_err(|error| self.failure(&error))?;
        let pin = |entry: &crate::store::Entry| {
            let owner = keys::pin_owner(&entry.key)?.to_owned();
            Some((owner, serde_json::from_slice(&entry.value).ok()?))
        };
        Ok(page.entries.iter().filter_map(pin).collect())
    }
}

/// The row of an instance, for targets other than an Abide gateway.
fn row(key: &InstanceKey, seen: &ObservedInstance, observed: &Observed) -> PlatformProcess {
    let revision = |version: &KnownSpec| match version {
        KnownSpec::Unknown => None,
        KnownSpec::Digests(revision) => Some(*revision),
        KnownSpec::Full(spec) => Some(*spec.revision()),
    };
    let is_unknown = seen.unknown || observed.gaps.contains_key(&key.host);
    let fact = |fact: Option<bool>| fact.filter(|_| !is_unknown);
    let time = |time: Option<Time>| time.map(|time| time.to_string());
    let spec = |version: &KnownSpec| version.spec().map(|spec| crate::gse::spec_body(spec, Dialect::Abide));
    let row = ProcessRow {
        instance: key.clone(),
        namespace: key.namespace.clone(),
        name: key.name.clone(),
        host: key.host.clone(),
        labels: seen.labels.clone(),
        registered: fact(seen.registered),
        hosted: fact(seen.hosted),
        running: fact(seen.running),
        pid: seen.process.pid,
        owner: seen.owner.as_deref().map(str::to_owned),
        revision: revision(&seen.specs.registered),
        live_revision: revision(&seen.specs.live),
        secret_key: None,
        live_spec_unknown: seen.specs.is_live_assumed,
        sync: SyncStatus::Unknown,
        health: seen.health.word().to_owned(),
        hosting: Hosting::from(fact(seen.hosted)),
        since: time(seen.since),
        report_time: time(seen.report_time),
    };
    let (spec, live_spec) = (spec(&seen.specs.registered), spec(&seen.specs.live));
    PlatformProcess { row, spec, live_spec, message: observed.gaps.get(&key.host).cloned() }
}

/// The target did answer: an instance has a row under its host's address and one under its agent id.
pub fn two_rows(error: &ObserveError) -> Failure {
    Failure::new(Exit::Failed, error.to_string()).hint("remove one of the two registrations")
}
