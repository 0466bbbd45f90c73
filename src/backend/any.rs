//! Any backend: of either kind, selected by the dialect of the target.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{
    Abide, Backend, BackendError, ChangeStream, InstanceQuery, Operation, OperationStatus, Platform, Scope,
    Task, Watermark,
};
use crate::model::{Dialect, HostKey, InstanceKey, Observed};

pub enum AnyBackend {
    Abide(Box<Abide>),
    Platform(Box<Platform>),
}

macro_rules! whichever {
    ($self:ident.$($call:tt)*) => {
        match $self {
            AnyBackend::Abide(target) => target.$($call)*,
            AnyBackend::Platform(target) => target.$($call)*,
        }
    };
}

impl AnyBackend {
    /// URL of the target.
    pub fn url(&self) -> &str {
        match self {
            AnyBackend::Abide(target) => target.calls().url(),
            AnyBackend::Platform(target) => target.url(),
        }
    }

    /// Sets the lease generation of later calls, on targets that support it.
    pub fn act_as(&self, generation: u64) {
        match self {
            AnyBackend::Abide(target) => target.act_as(generation),
            AnyBackend::Platform(_) => {}
        }
    }
}

impl Backend for AnyBackend {
    fn dialect(&self) -> Dialect {
        whichever!(self.dialect())
    }

    async fn observe(&self, scope: &Scope) -> Result<Observed, BackendError> {
        whichever!(self.observe(scope).await)
    }

    async fn follow(&self, scope: &Scope) -> Result<(Observed, Option<ChangeStream>), BackendError> {
        whichever!(self.follow(scope).await)
    }

    async fn watermark(&self, hosts: &BTreeSet<HostKey>) -> Result<Watermark, BackendError> {
        whichever!(self.watermark(hosts).await)
    }

    async fn observe_live(&self, subjects: &[InstanceQuery]) -> Result<Observed, BackendError> {
        whichever!(self.observe_live(subjects).await)
    }

    async fn check_live(&self, subjects: &[InstanceQuery]) -> Result<Observed, BackendError> {
        whichever!(self.check_live(subjects).await)
    }

    async fn messages(
        &self,
        instances: &[InstanceKey],
    ) -> Result<BTreeMap<InstanceKey, String>, BackendError> {
        whichever!(self.messages(instances).await)
    }

    fn batches(&self, orders: Vec<Operation>) -> Vec<Vec<Operation>> {
        whichever!(self.batches(orders))
    }

    fn poll_interval(&self) -> (Duration, Duration) {
        whichever!(self.poll_interval())
    }

    fn max_concurrent_calls(&self) -> usize {
        whichever!(self.max_concurrent_calls())
    }

    fn has_idempotency_keys(&self) -> bool {
        whichever!(self.has_idempotency_keys())
    }

    async fn submit(&self, call: &str, orders: &[Operation]) -> Result<Task, BackendError> {
        whichever!(self.submit(call, orders).await)
    }

    async fn poll(&self, task: &Task) -> Result<Vec<OperationStatus>, BackendError> {
        whichever!(self.poll(task).await)
    }

    async fn find_task(&self, call: &str, steps: &[InstanceKey]) -> Result<Option<Task>, BackendError> {
        whichever!(self.find_task(call, steps).await)
    }
}
