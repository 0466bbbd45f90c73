//! Limits of a caller and of a namespace, as the apps file and the users file set them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::grant::Principal;
use crate::http::{CredentialLimits, LimitedResource};
use crate::model::count;

/// Tasks of one app with rows that are not final.
const DEFAULT_TASKS: usize = 10_000;

/// Limits of an app or a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppLimits {
    /// Registered instances of a namespace, after a call of this app. `None`: no limit.
    pub instances: Option<usize>,
    /// Open tasks of this app.
    pub tasks: usize,
    /// Requests in flight and their bytes.
    pub in_flight: CredentialLimits,
}

/// Limits as written in the apps file or the users file.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct LimitsEntry {
    instances: Option<usize>,
    tasks: Option<usize>,
    requests: Option<usize>,
    bytes: Option<usize>,
}

impl AppLimits {
    /// The caller's own values, else those of the file, else the defaults.
    pub(super) fn of(own: LimitsEntry, file: LimitsEntry) -> AppLimits {
        AppLimits {
            instances: own.instances.or(file.instances),
            tasks: own.tasks.or(file.tasks).unwrap_or(DEFAULT_TASKS),
            in_flight: CredentialLimits {
                requests: own.requests.or(file.requests),
                bytes: own.bytes.or(file.bytes),
            },
        }
    }

    /// The refusal of a request beyond a limit; `None`: the resource is not limited by these.
    pub fn refusal(self, caller: &Principal, resource: LimitedResource) -> Option<String> {
        let CredentialLimits { requests, bytes } = self.in_flight;
        match resource {
            LimitedResource::CredentialRequests => {
                let most = requests?;
                let most = count(most, "request");
                Some(format!("{caller} may have at most {most} in flight (limits.requests)"))
            }
            LimitedResource::CredentialBytes => {
                let most = bytes?;
                Some(format!("{caller} may have at most {most} bytes of requests in flight (limits.bytes)"))
            }
            LimitedResource::Connections
            | LimitedResource::KnownCallers
            | LimitedResource::Agents
            | LimitedResource::BodyMemory
            | LimitedResource::CredentialShare => None,
        }
    }
}

/// Limits of one namespace, as written in the apps file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NamespaceLimits {
    /// Requests in flight.
    pub requests: Option<usize>,
    /// Bytes of their bodies.
    pub bytes: Option<usize>,
}

/// Limits by namespace; `*`: each other one.
pub type NamespaceLimitTable = BTreeMap<String, NamespaceLimits>;
