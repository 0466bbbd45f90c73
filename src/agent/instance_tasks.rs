//! Instance tasks: the running tasks of an agent, by instance.
//!
//! A task ends when nothing of its instance is left: it is not registered, does not run and has no failed start. So the
//! memory of an agent depends on the instances that it has, not on all that it ever had. The next command for the instance
//! starts another task, which reads what the store still keeps, such as the run of a one-shot.

use std::collections::HashMap;
use std::sync::Arc;

use super::context::AgentContext;
use super::instance::{CommandSender, InstanceCommand, InstanceTask, QueueState, command_queue};
use super::process::ProcessHandle;
use super::recovery::Resumption;
use super::state::InstanceState;
use crate::model::InstanceKey;

/// Number of entries from which ended tasks are removed.
const MIN_PRUNED: usize = 256;

/// The tasks by instance, with the entries of ended ones.
pub struct InstanceTasks {
    senders: HashMap<InstanceKey, CommandSender>,
    /// Number of entries at which the next search for removable ones begins.
    prune_at: usize,
    shared: Arc<AgentContext>,
}

impl InstanceTasks {
    pub fn new(shared: Arc<AgentContext>) -> InstanceTasks {
        InstanceTasks { senders: HashMap::new(), prune_at: MIN_PRUNED, shared }
    }

    /// Starts the task of an instance with its state.
    pub fn spawn(
        &mut self,
        instance: InstanceKey,
        state: InstanceState,
        handle: Option<ProcessHandle>,
        resumption: Option<Resumption>,
    ) {
        let mut task = InstanceTask::new(instance.clone(), state, handle, Arc::clone(&self.shared));
        task.progress.resumption = resumption.map(Box::new);
        self.start(instance, task, None);
    }

    fn start(&mut self, instance: InstanceKey, task: InstanceTask, first: Option<InstanceCommand>) {
        self.prune();
        let (send, commands) = command_queue();
        // Before the task runs: it could end without a command.
        first.into_iter().for_each(|command| drop(send.send(command)));
        tokio::spawn(Box::new(task).run(commands));
        self.senders.insert(instance, send);
    }

    /// Removes the entries of ended tasks whose store entry is gone too. Twice as many entries are searched next time: the
    /// cost per new entry is constant.
    fn prune(&mut self) {
        if self.senders.len() >= self.prune_at {
            self.senders.retain(|_, sender| sender.state() != QueueState::Ended);
            self.prune_at = self.senders.len().saturating_mul(2).max(MIN_PRUNED);
        }
    }

    /// Sends a command, to a new task if there is none.
    pub fn send(&mut self, instance: &InstanceKey, command: InstanceCommand) {
        let (command, is_stored) = match self.senders.get(instance) {
            None => (command, false),
            Some(sender) => match sender.send(command) {
                Ok(()) => return,
                Err(command) => (command, sender.state() == QueueState::EndedWithState),
            },
        };
        let (key, shared) = (instance.clone(), Arc::clone(&self.shared));
        let mut task = InstanceTask::new(key, InstanceState::default(), None, shared);
        task.progress.is_stored = is_stored;
        self.start(instance.clone(), task, Some(command));
    }

    /// Sends a command to all running tasks.
    pub fn send_all(&self, command: impl Fn() -> InstanceCommand) {
        self.send_to(|_| true, command);
    }

    /// Sends a command to the running tasks of these instances. An ended task has no use for it.
    pub fn send_to(&self, which: impl Fn(&InstanceKey) -> bool, command: impl Fn() -> InstanceCommand) {
        for (_, sender) in self.senders.iter().filter(|(instance, _)| which(instance)) {
            let _ = sender.send(command());
        }
    }

    pub fn contains(&self, instance: &InstanceKey) -> bool {
        self.senders.contains_key(instance)
    }

    /// The task of an instance continues under another name.
    pub fn rename(&mut self, from: &InstanceKey, to: InstanceKey) {
        if let Some(sender) = self.senders.remove(from) {
            self.senders.insert(to, sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::agent::state::{load_all, state_txn};
    use crate::agent_protocol::{AgentMessage, OwnedSpec, ReportedRun};
    use crate::model::{AutoType, Spec};
    use crate::store::{Store, keys};

    fn key(nth: usize) -> InstanceKey {
        format!("0:127.0.0.1:web:p{nth}").parse().expect("a key")
    }

    fn one_shot() -> OwnedSpec {
        let mut spec = Spec::default();
        spec.monitor.auto_type = AutoType::OneShot;
        OwnedSpec { spec: Arc::new(spec), owner: None, revision: None }
    }

    fn set_spec(given: Option<OwnedSpec>, changed: u64) -> InstanceCommand {
        InstanceCommand::SetSpec(Box::new((given, changed)))
    }

    async fn until_ended(tasks: &InstanceTasks, nth: usize) -> QueueState {
        for _ in 0..1000 {
            match tasks.senders.get(&key(nth)).map(CommandSender::state) {
                None => return QueueState::Ended,
                Some(QueueState::Open) => tokio::time::sleep(Duration::from_millis(5)).await,
                Some(state) => return state,
            }
        }
        QueueState::Open
    }

    #[tokio::test]
    async fn tasks_of_instances_that_are_gone_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let (shared, _sent) = AgentContext::for_test(folder.path());
        let mut tasks = InstanceTasks::new(Arc::clone(&shared));
        for nth in 0..2000 {
            tasks.send(&key(nth), set_spec(Some(one_shot()), 1));
            tasks.send(&key(nth), set_spec(None, 2));
            if nth % 100 == 0 {
                assert_eq!(until_ended(&tasks, nth).await, QueueState::Ended);
            }
        }
        assert!(tasks.senders.len() <= 2 * MIN_PRUNED, "{} entries", tasks.senders.len());
        assert_eq!(until_ended(&tasks, 1999).await, QueueState::Ended);
        let left: Vec<(String, InstanceState)> =
            load_all(&shared.store, keys::INSTANCE_STATE_PREFIX).await.expect("it is read");
        assert!(left.is_empty(), "{left:?}");
        // A registered instance keeps its task.
        tasks.send(&key(7), set_spec(Some(one_shot()), 3));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(tasks.senders[&key(7)].state(), QueueState::Open);
    }

    #[tokio::test]
    async fn the_next_task_continues_from_the_stored_state() {
        let folder = tempfile::tempdir().expect("a folder");
        let (shared, mut sent) = AgentContext::for_test(folder.path());
        let mut tasks = InstanceTasks::new(Arc::clone(&shared));
        // A one-shot that ran and is not registered any more.
        let state = InstanceState { ran: Some(one_shot()), ..InstanceState::default() };
        shared.store.txn(state_txn(&key(1), &state)).await.expect("it is written");
        tasks.spawn(key(1), state, None, None);
        tasks.send_all(|| InstanceCommand::Report);
        assert_eq!(until_ended(&tasks, 1).await, QueueState::EndedWithState);
        // Its entry stays, whatever else comes.
        for nth in 2..3 * MIN_PRUNED {
            tasks.send(&key(nth), set_spec(None, 1));
        }
        tasks.send(&key(1), set_spec(Some(one_shot()), 3));
        // A write keeps what was read.
        tasks.send(&key(1), set_spec(None, 4));
        tasks.send(&key(1), set_spec(Some(one_shot()), 5));
        tasks.send(&key(1), InstanceCommand::Report);
        let ran = async {
            loop {
                if let Some(AgentMessage::Report(report)) = sent.recv().await
                    && report.instance == key(1)
                    && let Some(ran) = report.ran
                {
                    return ran;
                }
            }
        };
        let ran = tokio::time::timeout(Duration::from_secs(10), ran).await.expect("a report");
        assert_eq!(ran, ReportedRun::With(one_shot()));
        tasks.rename(&key(1), key(0));
        assert!(tasks.contains(&key(0)) && !tasks.contains(&key(1)));
    }
}
