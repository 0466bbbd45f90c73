//! A target of either kind, chosen by its dialect.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Abide, Answer, Backend, Changes, Fault, Mark, Order, Platform, Scope, Subject, Task};
use crate::model::{Dialect, HostKey, Observed};

pub enum Client {
    Abide(Box<Abide>),
    Platform(Box<Platform>),
}

macro_rules! whichever {
    ($self:ident.$($call:tt)*) => {
        match $self {
            Client::Abide(target) => target.$($call)*,
            Client::Platform(target) => target.$($call)*,
        }
    };
}

impl Client {
    /// Where it is.
    pub fn url(&self) -> &str {
        match self {
            Client::Abide(target) => target.calls().url(),
            Client::Platform(target) => target.url(),
        }
    }

    /// From here on, calls carry this number, where the target knows numbers.
    pub fn act_as(&self, generation: u64) {
        match self {
            Client::Abide(target) => target.act_as(generation),
            Client::Platform(_) => {}
        }
    }
}

impl Backend for Client {
    fn dialect(&self) -> Dialect {
        whichever!(self.dialect())
    }

    async fn observe(&self, scope: &Scope) -> Result<Observed, Fault> {
        whichever!(self.observe(scope).await)
    }

    async fn follow(&self, scope: &Scope) -> Result<(Observed, Option<Changes>), Fault> {
        whichever!(self.follow(scope).await)
    }

    async fn mark(&self, hosts: &BTreeSet<HostKey>) -> Result<Mark, Fault> {
        whichever!(self.mark(hosts).await)
    }

    async fn look_closely(&self, subjects: &[Subject]) -> Result<Observed, Fault> {
        whichever!(self.look_closely(subjects).await)
    }

    async fn check_live(&self, subjects: &[Subject]) -> Result<Observed, Fault> {
        whichever!(self.check_live(subjects).await)
    }

    fn batches(&self, orders: Vec<Order>) -> Vec<Vec<Order>> {
        whichever!(self.batches(orders))
    }

    fn pace(&self) -> (Duration, Duration) {
        whichever!(self.pace())
    }

    fn at_once(&self) -> usize {
        whichever!(self.at_once())
    }

    fn knows_names(&self) -> bool {
        whichever!(self.knows_names())
    }

    async fn submit(&self, call: &str, orders: &[Order]) -> Result<Task, Fault> {
        whichever!(self.submit(call, orders).await)
    }

    async fn poll(&self, task: &Task) -> Result<Vec<Answer>, Fault> {
        whichever!(self.poll(task).await)
    }

    async fn find(&self, call: &str, steps: &[crate::model::InstanceKey]) -> Result<Option<Task>, Fault> {
        whichever!(self.find(call, steps).await)
    }
}
