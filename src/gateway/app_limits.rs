//! Limits of a caller that need the store: registered instances per namespace, and open tasks.
//!
//! A call above a limit gets 429. [`super::namespace_limits`] has the limits of namespaces.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::tasks::{GatewayTask, TaskItem, Tasks};
use super::{ApiError, Caller, Gateway};
use crate::agent_protocol::AgentOp;
use crate::model::count;
use crate::store::{Store, keys};

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
        let registered = self.store.slice(&keys::registrations_prefix(namespace), 0, 0).await?.1;
        if registered + new <= limit {
            return Ok(());
        }
        Err(ApiError::Busy(format!(
            "{} may have at most {} in namespace {namespace}: {registered} registered, {new} more in the call",
            caller.grant.principal,
            count(limit, "instance")
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
            let caller = &caller.grant.principal;
            let message = format!("{caller} has {}: at most {limit} allowed", count(open, "open task"));
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
