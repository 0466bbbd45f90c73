//! Resumption: continues an operation that an earlier agent began.
//!
//! An operation is in the store from before its first effect ([`InstanceTask::pending`]) until its result is written. A
//! resumed operation skips its finished effects: a launched process, a command with a complete exit record.

use tracing::info;

use super::history::ExitCause;
use super::{InstanceTask, OpReply, read_clocks};
use crate::agent::fresh_id;
use crate::agent::process::{boot_id, ticks_since_boot};
use crate::agent::recovery::Resumption;
use crate::agent::recovery::UNKNOWN_OUTCOME;
use crate::agent::restart_policy::{Phase, RestartEvent};
use crate::agent::state::{PendingOperation, pending_key, results_txn};
use crate::agent_protocol::{AgentOp, OpRequest, OwnedSpec};
use crate::gse::codes::RowCode;
use crate::model::AutoType;
use crate::store::Txn;

impl InstanceTask {
    /// Continues from the stored state: an operation that has begun is resumed before supervision. A process that ended while no
    /// agent ran is handled as if it ended now.
    pub(super) async fn continue_after_restart(&mut self) {
        if let Some(resumption) = self.progress.resumption.take() {
            // Report first: the operation may take long.
            self.report();
            Box::pin(self.resume(*resumption)).await;
        }
        Box::pin(self.finish_limit_stop()).await;
        Box::pin(self.resume_relaunch()).await;
        if self.handle.is_none() && self.state.run.is_some() {
            Box::pin(self.handle_exit(None)).await;
        }
        Box::pin(self.relaunch_if_due()).await;
    }

    /// Marks the operation as in progress. It is written to the store before its first effect.
    pub(super) fn begin_operation(&mut self, request: &OpRequest) {
        if !request.op.is_read_only() {
            let (boot, since) = (boot_id().to_owned(), ticks_since_boot());
            let (launch_id, hosted) = (fresh_id(), self.state.hosted);
            let pending = PendingOperation { request: request.clone(), boot, since, launch_id, hosted };
            self.progress.operation = Some(Box::new((pending, false)));
        }
    }

    /// The launch id for processes that the operation's command starts, and the ticks since boot when the operation began.
    /// A resumed operation gets the same values.
    pub(super) fn launch_of_operation(&self) -> (String, u64) {
        match &self.progress.operation {
            Some(operation) if operation.0.boot == boot_id() => {
                (operation.0.launch_id.clone(), operation.0.since)
            }
            Some(_) | None => (fresh_id(), ticks_since_boot()),
        }
    }

    /// The write of the operation in progress, to be committed before its first effect. It replaces the entry of an
    /// operation whose result could not be written, so the same commit contains that result.
    pub(super) fn pending(&mut self) -> Txn {
        match &mut self.progress.operation {
            Some(operation) if !operation.1 => {
                operation.1 = true;
                let value = serde_json::to_vec(&operation.0).unwrap_or_default();
                results_txn(&self.unwritten.results).and(Txn::put(pending_key(&self.key), value))
            }
            _ => Txn::default(),
        }
    }

    /// Continues an operation that an earlier agent began, and reports its result.
    pub(super) async fn resume(&mut self, resumption: Resumption) {
        let Resumption { pending, launch } = resumption;
        let request = pending.request.clone();
        info!(instance = %self.key, op = ?request.op, "resuming an operation of an earlier agent");
        self.progress.operation = Some(Box::new((pending, true)));
        self.progress.interrupted = launch.map(Box::new);
        let (code, message) = match self.ended_launch_result(&request).await {
            Some(reply) => reply,
            None => {
                let known =
                    self.state.run.as_ref().map(|run| run.live.clone()).or_else(|| self.state.given.clone());
                match request.spec.clone().or(known) {
                    Some(owned) => {
                        let op_id = Some(request.op_id.clone());
                        let (code, message, _) = self.perform(&request, owned, op_id).await;
                        (code, message)
                    }
                    None => super::failed("the instance has no registered spec, and the request has none"),
                }
            }
        };
        self.progress.interrupted = None;
        self.record_failed_start(&request, code, &message);
        self.finish(&request, code, message, None, Txn::default()).await;
        self.supervise_after_failure().await;
    }

    /// Marks a one-shot run that ended without an exit code: neither the agent nor the recording shell saw its end.
    pub(super) fn record_unknown_run(&mut self, live: &OwnedSpec, by: Option<String>) {
        if live.spec.monitor.auto_type == AutoType::OneShot && self.state.exit.is_none() {
            self.state.message = UNKNOWN_OUTCOME.to_owned();
            self.state.unknown_run = Some(by.unwrap_or_default());
        }
    }

    /// Records the end of a process that ended while no agent ran. The result of the operation, if it launched that process.
    async fn ended_launch_result(&mut self, request: &OpRequest) -> Option<OpReply> {
        let run = self.state.run.as_ref().filter(|_| self.handle.is_none())?;
        let (by, live) = (run.by.clone(), run.live.clone());
        let resident = live.spec.monitor.auto_type == AutoType::Resident;
        let launched = by.as_deref() == Some(request.op_id.as_str());
        // The operation itself ends the tree, or takes over a process of it: its command may still run there.
        let ends_tree = match request.op {
            AgentOp::Stop | AgentOp::Kill | AgentOp::Restart | AgentOp::Reload => !launched,
            AgentOp::Start | AgentOp::Status | AgentOp::Host | AgentOp::Unhost | AgentOp::Rename { .. } => {
                false
            }
        };
        if ends_tree {
            return None;
        }
        self.record_exit(None, ExitCause::Unobserved).await;
        self.state.message = "ended while the agent was restarted".to_owned();
        self.record_unknown_run(&live, by.clone());
        match request.op {
            AgentOp::Start | AgentOp::Restart if launched && resident => {
                let code =
                    self.state.exit.map_or("an unknown code".to_owned(), |code| format!("code {code}"));
                let message = format!("the process ended with {code} while the agent was restarted");
                Some((RowCode::CHECK_FAILED, message))
            }
            AgentOp::Start | AgentOp::Restart if launched => {
                self.state.hosted |= request.op == AgentOp::Start || request.supervises;
                self.state.given = Some(live);
                Some(match &self.state.unknown_run {
                    Some(_) => super::failed(self.state.message.clone()),
                    None => super::done(),
                })
            }
            _ => None,
        }
    }

    /// Relaunches a supervised process that is stopped. A recorded backoff continues instead.
    pub(super) async fn relaunch_if_due(&mut self) {
        let resident =
            self.state.given.as_ref().is_some_and(|given| given.spec.monitor.auto_type == AutoType::Resident);
        // Supervision of a process that was never started begins with its first start. A state of an earlier version has no
        // backoff; there, a process that was stopped on purpose has no message about its end.
        let ended = self.state.retry.is_some() || !self.state.message.is_empty();
        let is_due = self.state.hosted
            && resident
            && !self.state.dormant
            && self.state.completed.is_none()
            && self.state.started > 0
            && ended;
        if is_due && self.handle.is_none() && self.launches.series.phase == Phase::Idle {
            self.launches.series.phase = Phase::Waiting { until: read_clocks().passed };
            self.apply_restart_policy(RestartEvent::TimerFired).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::agent::context::AgentContext;
    use crate::agent::state::{InstanceState, load_all};
    use crate::agent_protocol::OpResult;
    use crate::store::Store;

    fn task(folder: &std::path::Path) -> InstanceTask {
        let (shared, _) = AgentContext::for_test(folder);
        let key = "0:127.0.0.1:web:api".parse().expect("a key");
        InstanceTask::new(key, InstanceState::default(), None, shared)
    }

    fn request(op_id: &str) -> OpRequest {
        serde_json::from_value(
            json!({"seq": 1, "op_id": op_id, "task": "t", "instance": "0:127.0.0.1:web:api",
            "op": "unhost", "spec": null, "owner": null, "generation": null, "deadline": 0}),
        )
        .expect("a request")
    }

    #[tokio::test]
    async fn a_result_that_could_not_be_written_survives_the_next_operation() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut task = task(folder.path());
        let store = task.shared.store.clone();
        let results = async || {
            let all: Vec<(String, OpResult)> = load_all(&store, "up/").await.expect("it is read");
            all.into_iter().map(|(op, _)| op).collect::<Vec<_>>()
        };
        let pending = async || -> Option<String> {
            let entry = store.get(&pending_key(&instance_key())).await.expect("it is read")?;
            Some(
                serde_json::from_slice::<PendingOperation>(&entry.value).expect("an operation").request.op_id,
            )
        };
        let disk = rusqlite::Connection::open(folder.path().join("agent.db")).expect("it opens");
        let refuse = "CREATE TRIGGER full BEFORE INSERT ON entry BEGIN SELECT RAISE(ABORT, 'full'); END";
        let (code, message) = super::super::done();

        let first = request("first");
        task.begin_operation(&first);
        task.write_pending().await.expect("it is written");
        disk.execute_batch(refuse).expect("a trigger");
        task.finish(&first, code, message.clone(), None, Txn::default()).await;
        assert_eq!((results().await.len(), pending().await.as_deref()), (0, Some("first")));

        disk.execute_batch("DROP TRIGGER full").expect("no trigger");
        let second = request("second");
        task.begin_operation(&second);
        task.write_pending().await.expect("it is written");
        assert_eq!((results().await, pending().await.as_deref()), (vec!["first".to_owned()], Some("second")));
        task.write(None).await;
        assert_eq!(pending().await.as_deref(), Some("second"), "in progress");
        task.finish(&second, code, message, None, Txn::default()).await;
        assert_eq!((results().await, pending().await), (vec!["first".to_owned(), "second".to_owned()], None));
    }

    fn instance_key() -> crate::model::InstanceKey {
        "0:127.0.0.1:web:api".parse().expect("a key")
    }
}
