//! Observed state: every instance that a target reports, and the hosts that could not be observed.
//!
//! An instance is present, absent or unknown. Stopping or removing an instance needs a [`Present`], which only
//! [`Observed::presence`] returns, and only when every fact is known: an unknown instance cannot be deleted by mistake.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Desired, DigestKeyRef, HashedSpec, HostKey, InstanceKey, Protection, SpecRevision, Time};

/// All observed instances.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    pub instances: BTreeMap<InstanceKey, ObservedInstance>,
    /// Hosts that could not be observed, with the cause.
    pub gaps: BTreeMap<HostKey, String>,
    /// Time of the observation.
    pub at: Time,
}

/// One instance as its target reports it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedInstance {
    /// The state of the instance is unknown, whatever the other fields contain.
    pub unknown: bool,
    /// `None`: not known.
    pub registered: Option<bool>,
    pub hosted: Option<bool>,
    pub running: Option<bool>,
    /// The process ended as its restart policy allows. With the wanted spec registered, it is not started again.
    pub completed: bool,
    /// User labels, without the `abide_*` labels.
    pub labels: BTreeMap<String, String>,
    pub owner: Option<Arc<str>>,
    pub specs: ObservedSpecs,
    pub health: Health,
    pub process: RunningProcess,
    /// Time of the last state change; `None`: long ago.
    pub since: Option<Time>,
    /// Time of the host's report; `None`: the time of the observation.
    pub report_time: Option<Time>,
}

/// The specs of an observed instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedSpecs {
    /// The spec registered with the engine.
    pub registered: KnownSpec,
    /// The spec in effect in the running process.
    pub live: KnownSpec,
    /// The process was adopted and not restarted since: `live` is the spec of its adoption.
    pub is_live_assumed: bool,
    /// The spec of the last run.
    pub ran: LastRun,
    /// Paths of the registered configmap whose files on the host differ from it, or are missing.
    pub drifted_files: Vec<String>,
    /// Protections by the label of the target. On targets without that label they are in the state only.
    pub protections: Vec<Protection>,
    /// Key of the digests of the secrets. `None`: no secrets, or the target's digests have no key.
    pub digest_key: Option<DigestKeyRef>,
}

/// The running process of an observed instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunningProcess {
    pub pid: Option<u32>,
    /// Start time, by a live status check; `None`: not known.
    pub started: Option<Time>,
    /// The agent reports that it neither started nor adopted the process.
    pub not_owned: bool,
}

/// Known part of a spec.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum KnownSpec {
    #[default]
    Unknown,
    /// Only its digests.
    Digests(SpecRevision),
    Full(Arc<HashedSpec>),
}

impl KnownSpec {
    pub fn spec(&self) -> Option<&Arc<HashedSpec>> {
        match self {
            KnownSpec::Full(spec) => Some(spec),
            KnownSpec::Unknown | KnownSpec::Digests(_) => None,
        }
    }
}

/// The last run of a one-shot process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastRun {
    #[default]
    Unknown,
    Never,
    /// The registered spec.
    Given,
    /// The run digest of a revision.
    Digest(u32),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    Healthy,
    Starting,
    Degraded,
    /// The agent gave up, or a one-shot exited with a code other than 0.
    Failed,
    Unknown,
    #[default]
    NotReported,
}

impl Health {
    pub const ALL: [Health; 6] = [
        Health::Healthy,
        Health::Starting,
        Health::Degraded,
        Health::Failed,
        Health::Unknown,
        Health::NotReported,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Health::Healthy => "Healthy",
            Health::Starting => "Starting",
            Health::Degraded => "Degraded",
            Health::Failed => "Failed",
            Health::Unknown => "Unknown",
            Health::NotReported => "NotReported",
        }
    }
}

/// Whether an instance exists on its target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Presence<'a> {
    Present(Present<'a>),
    Absent,
    /// With the cause.
    Unknown(&'a str),
}

/// An observed instance of which every fact is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Present<'a> {
    seen: &'a ObservedInstance,
    pub registered: bool,
    pub hosted: bool,
    pub running: bool,
}

impl<'a> Present<'a> {
    pub fn seen(&self) -> &'a ObservedInstance {
        self.seen
    }
}

impl Observed {
    pub fn get(&self, key: &InstanceKey) -> Presence<'_> {
        self.presence(&key.host, self.instances.get(key))
    }

    /// Merges a live check of some instances: its facts replace the observed ones, specs and owners are kept.
    pub fn merge_live_check(&mut self, live: Observed) {
        for (key, new) in live.instances {
            let nothing = !new.unknown && new.running == Some(false) && new.hosted == Some(false);
            let unregistered = new.unknown && new.registered == Some(false);
            if (nothing || unregistered) && !self.instances.contains_key(&key) {
                continue;
            }
            let seen = self.instances.entry(key).or_default();
            seen.unknown = new.unknown;
            (seen.hosted, seen.running) = (new.hosted, new.running);
            seen.registered = seen.registered.or(new.registered);
            (seen.process, seen.report_time) = (new.process, new.report_time);
        }
        self.gaps.extend(live.gaps);
    }

    /// Age of an instance's report at the time of the observation, in seconds.
    pub fn age(&self, seen: &ObservedInstance) -> u64 {
        seen.report_time.map_or(0, |reported| self.at.secs_since(reported))
    }

    /// Moves rows and gaps under a host's agent id to its address, where the manifests state both. `Err`: an instance has a
    /// row under each.
    pub fn normalize_host_keys(mut self, desired: &Desired) -> Result<Observed, InstanceKey> {
        let known = desired.addresses_of_agents();
        if known.is_empty() {
            return Ok(self);
        }
        let address = |host: HostKey| known.get(&host).cloned().unwrap_or(host);
        self.gaps = self.gaps.into_iter().map(|(host, why)| (address(host), why)).collect();
        for (key, seen) in std::mem::take(&mut self.instances) {
            let key = InstanceKey { host: address(key.host), ..key };
            if self.instances.insert(key.clone(), seen).is_some() {
                return Err(key);
            }
        }
        Ok(self)
    }

    /// The presence of an instance whose observed state the caller has looked up.
    pub fn presence<'a>(&'a self, host: &HostKey, seen: Option<&'a ObservedInstance>) -> Presence<'a> {
        if let Some(why) = self.gaps.get(host) {
            return Presence::Unknown(why);
        }
        match seen {
            None => Presence::Absent,
            Some(seen) if seen.unknown => Presence::Unknown("the state of the process is unknown"),
            Some(seen) => match (seen.registered, seen.hosted, seen.running) {
                (Some(registered), Some(hosted), Some(running)) => {
                    Presence::Present(Present { seen, registered, hosted, running })
                }
                (None, _, _) => {
                    Presence::Unknown("the target does not report whether the process is registered")
                }
                (_, None, _) => {
                    Presence::Unknown("the target does not report whether the process is supervised")
                }
                (_, _, None) => Presence::Unknown("the target does not report whether the process runs"),
            },
        }
    }
}
