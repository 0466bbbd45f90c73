//! A connected target: observation, rows, hosts, holds and pins, and its errors as failures of a verb.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use crate::backend::{Abide, AnyBackend, Backend, BackendError};
use crate::cli::{Exit, Failure};
use crate::contract::{HostEntry, Hosting, ObservedProcess, ProcessRow, TargetProcess};
use crate::control::pin::{self, Pin};
use crate::execute::world::{Observation, ObserveError, ObserveRequest};
use crate::gse::codes::EnvelopeCode;
use crate::model::{
    Desired, Dialect, Hold, HostKey, InstanceKey, KnownSpec, Name, Observed, ObservedInstance, Pause,
    SyncStatus, Time,
};
use crate::reconcile::Caps;
use crate::store::{AnyStore, Error, Store};

/// A target with its backend and state store.
pub struct ConnectedTarget {
    pub name: String,
    pub backend: AnyBackend,
    pub state: AnyStore,
    /// The config file that defines it.
    pub defined_in: Option<String>,
}

/// Hint for an app that is restricted to namespaces; the error names the app.
pub const NAMESPACES_HINT: &str = "the `abide` command needs an app with every namespace: remove `namespaces:` from this app in the \
     gateway's apps file, or use another app (auth.app_code)";

/// An error of a target or of its state store.
pub trait TargetError: Display {
    /// Whether the app is restricted to namespaces, and the call needs all of them.
    fn needs_every_namespace(&self) -> bool;
}

impl TargetError for Error {
    fn needs_every_namespace(&self) -> bool {
        matches!(self, Error::Refused { code, .. } if *code == EnvelopeCode::NOT_ALLOWED.0)
    }
}

impl TargetError for BackendError {
    fn needs_every_namespace(&self) -> bool {
        // Wrong credentials have the same code.
        let code = format!("(code {})", EnvelopeCode::NOT_ALLOWED.0);
        matches!(self, BackendError::Refused(why) if why.ends_with(&code) && !why.contains("credentials"))
    }
}

impl TargetError for ObserveError {
    fn needs_every_namespace(&self) -> bool {
        match self {
            ObserveError::Target(fault) => fault.needs_every_namespace(),
            ObserveError::State(error) => error.needs_every_namespace(),
            ObserveError::Ambiguous(_) => false,
        }
    }
}

impl ConnectedTarget {
    /// The failure of a verb for an error of the target or its state store.
    pub fn failure(&self, why: &dyn TargetError) -> Failure {
        let failure = Failure::new(Exit::Unreachable, format!("target {}: {why}", self.name));
        if why.needs_every_namespace() {
            return failure.hint(NAMESPACES_HINT);
        }
        match &self.defined_in {
            Some(file) => failure.hint(format!("target {} is defined in {file}", self.name)),
            None => failure,
        }
    }

    pub fn caps(&self) -> Caps {
        Caps::of(self.backend.dialect())
    }

    /// Adds the lease generation to later calls, if the target itself stores the lease.
    pub fn act_as(&self, generation: u64) {
        if self.state.is_own() {
            self.backend.act_as(generation);
        }
    }

    /// The Abide backend, for requests that other dialects do not support.
    pub fn abide(&self) -> Result<&Abide, Failure> {
        match &self.backend {
            AnyBackend::Abide(abide) => Ok(abide),
            AnyBackend::Platform(_) => {
                let message = format!(
                    "target {} speaks {}, which cannot tell that",
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
        let request = ObserveRequest { target: &self.name, caps: &self.caps(), desired, whole };
        let observation = Observation::observe(&self.backend, &self.state, &request).await;
        observation.map_err(|error| match &error {
            ObserveError::Ambiguous(_) => two_rows(&error),
            ObserveError::Target(_) | ObserveError::State(_) => self.failure(&error),
        })
    }

    /// Observes every instance of the target.
    pub async fn observe_all(&self) -> Result<Observed, Failure> {
        let world = self.observe_for(&Desired::default(), Some(BTreeSet::new())).await?;
        Ok(world.observed)
    }

    /// Every process of the target, as rows of the contract. An Abide gateway filters by `query`.
    pub async fn rows(&self, query: &str) -> Result<Vec<TargetProcess>, Failure> {
        if let AnyBackend::Abide(abide) = &self.backend {
            let rows = abide.rows(query).await.map_err(|fault| self.failure(&fault))?;
            return Ok(rows.into_iter().map(|row| TargetProcess::Gateway(Box::new(row))).collect());
        }
        let observed = self.observe_all().await?;
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
            HostEntry { host, agent, version: None, heard, clock_skew_ms: None, processes: Some(processes) }
        };
        Ok(hosts.into_iter().map(host).collect())
    }

    /// Holds and pauses that have not expired.
    pub async fn restraints(&self) -> Result<(Vec<Hold>, Vec<Pause>), Failure> {
        let now = crate::clock::now();
        let (mut holds, mut pauses): (Vec<Hold>, Vec<Pause>) =
            (self.list_prefix("hold/").await?, self.list_prefix("pause/").await?);
        holds.retain(|hold| hold.until.is_none_or(|until| until > now));
        pauses.retain(|pause| pause.until.is_none_or(|until| until > now));
        Ok((holds, pauses))
    }

    /// Pinned revisions, with their owners.
    pub async fn pins(&self) -> Result<Vec<(String, Pin)>, Failure> {
        let page = self.state.range(pin::KEY_PREFIX, None, usize::MAX).await;
        let page = page.map_err(|error| self.failure(&error))?;
        let pin = |entry: &crate::store::Entry| {
            let owner = entry.key.strip_prefix(pin::KEY_PREFIX)?.to_owned();
            Some((owner, serde_json::from_slice(&entry.value).ok()?))
        };
        Ok(page.entries.iter().filter_map(pin).collect())
    }

    async fn list_prefix<T: serde::de::DeserializeOwned>(&self, prefix: &str) -> Result<Vec<T>, Failure> {
        let page = self.state.range(prefix, None, usize::MAX).await.map_err(|error| self.failure(&error))?;
        Ok(page.entries.iter().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect())
    }
}

/// The namespaces of manifests and their policies.
pub fn namespaces(desired: &Desired) -> BTreeSet<Name> {
    let allowed = desired.policies.iter().filter_map(|policy| policy.allow.namespaces.as_ref()).flatten();
    // A pattern is not a name: its namespaces are known only after the observation.
    let named = allowed.filter(|pattern| !pattern.contains('*')).filter_map(|name| name.parse().ok());
    desired.instances.keys().map(|key| key.namespace.clone()).chain(named).collect()
}

/// The row of an instance, for targets other than an Abide gateway.
fn row(key: &InstanceKey, seen: &ObservedInstance, observed: &Observed) -> ObservedProcess {
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
        pid: seen.pid,
        owner: seen.owner.as_deref().map(str::to_owned),
        revision: revision(&seen.registered_spec),
        live_revision: revision(&seen.live),
        sync: SyncStatus::Unknown,
        health: seen.health.word().to_owned(),
        hosting: Hosting::from(fact(seen.hosted)),
        since: time(seen.since),
        report_time: time(seen.report_time),
    };
    let (spec, live_spec) = (spec(&seen.registered_spec), spec(&seen.live));
    ObservedProcess { row, spec, live_spec, message: observed.gaps.get(&key.host).cloned() }
}

/// The target did answer: an instance has a row under its host's address and one under its agent id.
pub fn two_rows(error: &ObserveError) -> Failure {
    Failure::new(Exit::Failed, error.to_string()).hint("remove one of the two registrations")
}
