//! What was seen: every instance that a target knows, and where it could not be looked.
//!
//! There are three answers to a look, because there are three. What is to be stopped or removed needs a
//! [`Present`], which only a look can give, and only when every fact is known.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Desired, HashedSpec, HostKey, InstanceKey, SpecRevision, Time};

/// All instances seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    pub instances: BTreeMap<InstanceKey, ObservedInstance>,
    /// Hosts that could not be looked at, and why.
    pub gaps: BTreeMap<HostKey, String>,
    /// When this look was taken.
    pub at: Time,
}

/// One instance as a target tells of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedInstance {
    /// Somebody says that nothing of it is known.
    pub unknown: bool,
    /// `None`: not known.
    pub registered: Option<bool>,
    pub hosted: Option<bool>,
    pub running: Option<bool>,
    /// The users' labels, without ours.
    pub labels: BTreeMap<String, String>,
    pub owner: Option<Arc<str>>,
    /// The spec the engine holds.
    pub registered_spec: KnownSpec,
    /// The spec in effect in the running process.
    pub live: KnownSpec,
    pub ran: LastRun,
    pub health: Health,
    pub pid: Option<u32>,
    /// Start time of the running process, by a live status check; `None`: not known.
    pub started: Option<Time>,
    /// The agent reports that it neither started nor adopted the running process.
    pub not_owned: bool,
    /// Since when it is as it is; `None`: long ago.
    pub since: Option<Time>,
    /// When the host told so; `None`: just now.
    pub report_time: Option<Time>,
}

/// How much is known of a spec.
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

/// What is known of the last run of a one-shot process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastRun {
    #[default]
    Unknown,
    Never,
    /// What the engine holds.
    Given,
    /// The run part of a revision.
    Digest(u32),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    Healthy,
    Starting,
    Degraded,
    /// The agent gave up, or a one-shot ended with another code than 0.
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

/// The answer to a look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Presence<'a> {
    Present(Present<'a>),
    Absent,
    /// Why it is not known.
    Unknown(&'a str),
}

/// An instance that was seen, with every fact.
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

    /// Takes in a closer and newer look at some of it: facts count, specs and owners stay as they are known.
    pub fn merge_live_check(&mut self, closer: Observed) {
        for (key, new) in closer.instances {
            let nothing = !new.unknown && new.running == Some(false) && new.hosted == Some(false);
            let unheard = new.unknown && new.registered == Some(false);
            if (nothing || unheard) && !self.instances.contains_key(&key) {
                continue;
            }
            let row = self.instances.entry(key).or_default();
            row.unknown = new.unknown;
            (row.hosted, row.running) = (new.hosted, new.running);
            row.registered = row.registered.or(new.registered);
            (row.pid, row.started, row.report_time) = (new.pid, new.started, new.report_time);
            row.not_owned = new.not_owned;
        }
        self.gaps.extend(closer.gaps);
    }

    /// How long before this look a row was told, in seconds.
    pub fn age(&self, seen: &ObservedInstance) -> u64 {
        seen.report_time.map_or(0, |told| self.at.secs_since(told))
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

    /// The same for a row that is at hand.
    pub fn presence<'a>(&'a self, host: &HostKey, row: Option<&'a ObservedInstance>) -> Presence<'a> {
        if let Some(why) = self.gaps.get(host) {
            return Presence::Unknown(why);
        }
        match row {
            None => Presence::Absent,
            Some(seen) if seen.unknown => Presence::Unknown("its state is not known"),
            Some(seen) => match (seen.registered, seen.hosted, seen.running) {
                (Some(registered), Some(hosted), Some(running)) => {
                    Presence::Present(Present { seen, registered, hosted, running })
                }
                (None, _, _) => Presence::Unknown("whether it is registered is not known"),
                (_, None, _) => Presence::Unknown("whether it is hosted is not known"),
                (_, _, None) => Presence::Unknown("whether it runs is not known"),
            },
        }
    }
}
