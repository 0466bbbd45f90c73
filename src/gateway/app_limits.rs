//! Limits of an app: registered instances per namespace, open tasks, requests in flight and their bytes. A call above a
//! limit gets 429. [`super::namespace_limits`] has the limits of namespaces.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use super::tasks::{GatewayTask, TaskItem, Tasks};
use super::{ApiError, Caller, Gateway};
use crate::agent_protocol::AgentOp;
use crate::http::{CredentialLimits, LimitedResource};
use crate::store::{Store, keys};

/// Tasks of one app with rows that are not final.
const DEFAULT_TASKS: usize = 10_000;

/// Limits of an app.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppLimits {
    /// Registered instances of a namespace, after a call of this app. `None`: no limit.
    pub instances: Option<usize>,
    /// Open tasks of this app.
    pub tasks: usize,
    /// Requests in flight and their bytes.
    pub in_flight: CredentialLimits,
}

/// Limits as written in the apps file.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct LimitsEntry {
    instances: Option<usize>,
    tasks: Option<usize>,
    requests: Option<usize>,
    bytes: Option<usize>,
}

impl AppLimits {
    /// The app's own values, else those of the file, else the defaults.
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
    pub(super) fn refusal(self, app: &str, resource: LimitedResource) -> Option<String> {
        let CredentialLimits { requests, bytes } = self.in_flight;
        match resource {
            LimitedResource::CredentialRequests => {
                let most = requests?;
                Some(format!("app {app} may have at most {most} requests in flight (limits.requests)"))
            }
            LimitedResource::CredentialBytes => {
                let most = bytes?;
                Some(format!("app {app} may have at most {most} bytes of requests in flight (limits.bytes)"))
            }
            LimitedResource::Connections
            | LimitedResource::KnownCallers
            | LimitedResource::Agents
            | LimitedResource::BodyMemory
            | LimitedResource::CredentialShare => None,
        }
    }
}

impl Tasks {
    /// The number of open tasks of an app; 0 while fewer than `limit` tasks are in memory.
    fn open_of(&self, app: &str, limit: usize) -> usize {
        let known = self.in_memory();
        if known.len() < limit {
            return 0;
        }
        let is_of = |task: &&Arc<GatewayTask>| {
            !task.is_done() && task.items.first().is_some_and(|item| item.app.as_deref() == Some(app))
        };
        known.values().filter(is_of).count()
    }
}

impl<S: Store> Gateway<S> {
    /// Checks the number of instances in a namespace after `new` registrations.
    pub(super) async fn check_instances(
        &self,
        caller: &Caller,
        namespace: &str,
        new: usize,
    ) -> Result<(), ApiError> {
        let Some(limit) = caller.limits.instances.filter(|_| new > 0) else { return Ok(()) };
        let count = self.store.slice(&keys::registrations_prefix(namespace), 0, 0).await?.1;
        if count + new <= limit {
            return Ok(());
        }
        Err(ApiError::Busy(format!(
            "app {} may have at most {limit} instances in namespace {namespace}: {count} are registered, and the call \
             adds {new}",
            caller.app
        )))
    }

    /// Checks a task before it is stored: the open tasks of its app, and the instances that it registers.
    pub(super) async fn check_task_limits(
        &self,
        caller: &Caller,
        items: &[TaskItem],
    ) -> Result<(), ApiError> {
        let limit = caller.limits.tasks;
        let open = self.tasks.open_of(&caller.app, limit);
        if open >= limit {
            let app = &caller.app;
            let message = format!("app {app} has {open} open tasks: at most {limit} are allowed");
            return Err(ApiError::Busy(message));
        }
        if caller.limits.instances.is_none() {
            return Ok(());
        }
        let mut new: BTreeMap<&str, usize> = BTreeMap::new();
        for item in items.iter().filter(|item| item.op.as_ref().is_some_and(AgentOp::registers_spec)) {
            if self.store.get(&keys::registration(&item.instance)).await?.is_none() {
                *new.entry(item.instance.namespace.as_str()).or_default() += 1;
            }
        }
        for (namespace, new) in new {
            self.check_instances(caller, namespace, new).await?;
        }
        Ok(())
    }
}
