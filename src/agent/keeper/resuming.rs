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
use crate::agent::row::{Pending, pending_key, results_txn};
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

    /// Puts the operation in progress into the store, with whatever else is written before its first effect. It replaces the
    /// entry of an operation whose result could not be written: that result goes with it.
    pub(in crate::agent) fn pending(&mut self) -> Txn {
        match &mut self.operation {
            Some(operation) if !operation.1 => {
                operation.1 = true;
                let value = serde_json::to_vec(&operation.0).unwrap_or_default();
                results_txn(&self.unwritten).and(Txn::put(pending_key(&self.key), value))
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::agent::cgroup::Groups;
    use crate::agent::exit_record::ExitRecords;
    use crate::agent::keeper::Shared;
    use crate::agent::permits::Permits;
    use crate::agent::policy::HostPolicy;
    use crate::agent::pools::Pools;
    use crate::agent::row::{Row, all};
    use crate::gse::channel::OpResult;
    use crate::store::{Embedded, Store};

    fn keeper(folder: &std::path::Path) -> Keeper {
        let shared = Shared {
            store: Embedded::open(&folder.join("agent.db")).expect("it opens"),
            up: tokio::sync::mpsc::unbounded_channel().0,
            exits: ExitRecords::in_folder(folder).expect("a folder"),
            user_permits: Arc::default(),
            root_may: Arc::new(|_| false),
            commands: Permits::new(1),
            looks: Permits::new(1),
            groups: Groups::below_ours(folder),
            pools: Pools::default(),
            policy: HostPolicy::default(),
            look_every: Duration::from_secs(10),
        };
        let key = "0:127.0.0.1:web:api".parse().expect("a key");
        Keeper::new(key, Row::default(), None, Arc::new(shared))
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
        let mut keeper = keeper(folder.path());
        let store = keeper.shared.store.clone();
        let results = async || {
            let all: Vec<(String, OpResult)> = all(&store, "up/").await.expect("it is read");
            all.into_iter().map(|(op, _)| op).collect::<Vec<_>>()
        };
        let pending = async || -> Option<String> {
            let entry = store.get(&pending_key(&keeper_key())).await.expect("it is read")?;
            Some(serde_json::from_slice::<Pending>(&entry.value).expect("an operation").request.op_id)
        };
        let disk = rusqlite::Connection::open(folder.path().join("agent.db")).expect("it opens");
        let refuse = "CREATE TRIGGER full BEFORE INSERT ON entry BEGIN SELECT RAISE(ABORT, 'full'); END";
        let (code, message) = super::super::done();

        let first = request("first");
        keeper.begin_operation(&first);
        keeper.write_pending().await.expect("it is written");
        disk.execute_batch(refuse).expect("a trigger");
        keeper.finish(&first, code, message.clone(), None, Txn::default()).await;
        assert_eq!((results().await.len(), pending().await.as_deref()), (0, Some("first")));

        disk.execute_batch("DROP TRIGGER full").expect("no trigger");
        let second = request("second");
        keeper.begin_operation(&second);
        keeper.write_pending().await.expect("it is written");
        assert_eq!((results().await, pending().await.as_deref()), (vec!["first".to_owned()], Some("second")));
        keeper.write(None).await;
        assert_eq!(pending().await.as_deref(), Some("second"), "in progress");
        keeper.finish(&second, code, message, None, Txn::default()).await;
        assert_eq!((results().await, pending().await), (vec!["first".to_owned(), "second".to_owned()], None));
    }

    fn keeper_key() -> crate::model::InstanceKey {
        "0:127.0.0.1:web:api".parse().expect("a key")
    }
}
