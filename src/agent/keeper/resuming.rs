//! Resumption: an operation that an earlier agent began is continued from what it left behind.
//!
//! An operation is in the store before its first effect ([`Keeper::pending`]) and until its result is. A resumed
//! operation skips its finished effects: a process that it launched, a command whose end is recorded.

use tracing::info;

use super::{Keeper, Said, moment};
use crate::agent::fresh_id;
use crate::agent::kernel::{boot_id, ticks_since_boot};
use crate::agent::life::{Event, Phase};
use crate::agent::recovery::Resumption;
use crate::agent::recovery::UNKNOWN_OUTCOME;
use crate::agent::row::{Pending, pending_key};
use crate::gse::channel::{Held, OpRequest, Order};
use crate::gse::codes::RowCode;
use crate::model::AutoType;
use crate::store::Txn;

impl Keeper {
    /// From now on this operation is in progress. It is written with its first effect.
    pub(super) fn begin_operation(&mut self, request: &OpRequest) {
        if !request.op.looks() {
            let (boot, since) = (boot_id().to_owned(), ticks_since_boot());
            let (launch_id, hosted) = (fresh_id(), self.row.hosted);
            let pending = Pending { request: request.clone(), boot, since, launch_id, hosted };
            self.operation = Some(Box::new((pending, false)));
        }
    }

    /// The launch id of what the operation's own command brings up, and the ticks since boot when the operation began: the
    /// same when it is resumed.
    pub(in crate::agent) fn launch_of_operation(&self) -> (String, u64) {
        match &self.operation {
            Some(operation) if operation.0.boot == boot_id() => {
                (operation.0.launch_id.clone(), operation.0.since)
            }
            Some(_) | None => (fresh_id(), ticks_since_boot()),
        }
    }

    /// Puts the operation in progress into the store, with whatever else is written before its first effect.
    pub(in crate::agent) fn pending(&mut self) -> Txn {
        match &mut self.operation {
            Some(operation) if !operation.1 => {
                operation.1 = true;
                Txn::put(pending_key(&self.key), serde_json::to_vec(&operation.0).unwrap_or_default())
            }
            _ => Txn::default(),
        }
    }

    /// Continues an operation that an earlier agent began, and reports its result.
    pub(super) async fn resume(&mut self, resumption: Resumption) {
        let Resumption { pending, launch } = resumption;
        let request = pending.request.clone();
        info!(instance = %self.key, op = ?request.op, "an operation is resumed");
        self.operation = Some(Box::new((pending, true)));
        self.interrupted = launch.map(Box::new);
        let (code, message) = match self.launch_that_ended(&request).await {
            Some(said) => said,
            None => {
                let known =
                    self.row.run.as_ref().map(|run| run.live.clone()).or_else(|| self.row.given.clone());
                match request.spec.clone().or(known) {
                    Some(held) => {
                        let op_id = Some(request.op_id.clone());
                        let (code, message, _) = self.perform(&request, held, op_id).await;
                        (code, message)
                    }
                    None => super::failed("nothing is known of the instance, and no spec was sent"),
                }
            }
        };
        self.interrupted = None;
        self.finish(&request, code, message, None, Txn::default()).await;
        self.supervise_after_failure().await;
    }

    /// A run of a one-shot that ended without an exit code: neither the agent nor the run's own shell saw its end.
    pub(super) fn note_unknown_run(&mut self, live: &Held, by: Option<String>) {
        if live.spec.monitor.auto_type == AutoType::OneShot && self.row.exit.is_none() {
            self.row.message = UNKNOWN_OUTCOME.to_owned();
            self.row.unknown_run = Some(by.unwrap_or_default());
        }
    }

    /// The process that runs no more ended while no agent looked. The result of the operation, if it had launched it.
    async fn launch_that_ended(&mut self, request: &OpRequest) -> Option<Said> {
        let run = self.row.run.as_ref().filter(|_| self.hold.is_none())?;
        let (by, live) = (run.by.clone(), run.live.clone());
        let resident = live.spec.monitor.auto_type == AutoType::Resident;
        self.gone(None).await;
        self.row.message = "ended while the agent was restarted".to_owned();
        self.note_unknown_run(&live, by.clone());
        let launched = by.as_deref() == Some(request.op_id.as_str());
        match request.op {
            Order::Start | Order::Restart if launched && resident => {
                let code = self.row.exit.map_or("an unknown code".to_owned(), |code| format!("code {code}"));
                let message = format!("the process ended with {code} while the agent was restarted");
                Some((RowCode::CHECK_FAILED, message))
            }
            Order::Start | Order::Restart if launched => {
                self.row.hosted |= request.op == Order::Start;
                self.row.given = Some(live);
                Some(match &self.row.unknown_run {
                    Some(_) => super::failed(self.row.message.clone()),
                    None => super::done(),
                })
            }
            _ => None,
        }
    }

    /// A supervised process that does not run is due, whatever its last run was; a recorded wait goes on.
    pub(super) async fn relaunch_if_due(&mut self) {
        let resident =
            self.row.given.as_ref().is_some_and(|given| given.spec.monitor.auto_type == AutoType::Resident);
        // One that was never started begins with its first start. A row of an earlier version does not record a wait: one
        // that was stopped on purpose has no message about its end.
        let ended = self.row.retry.is_some() || !self.row.message.is_empty();
        let is_due = self.row.hosted && resident && !self.row.dormant && self.row.started > 0 && ended;
        if is_due && self.hold.is_none() && self.series.phase == Phase::Calm {
            self.series.phase = Phase::Waiting { until: moment().passed };
            self.guard(Event::Woke).await;
        }
    }
}
