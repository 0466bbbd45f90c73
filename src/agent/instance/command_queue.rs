//! Command queue of an instance task: unbounded, and without memory while it is empty.
//!
//! Nearly all of an agent's queues are empty nearly all the time. A channel of the runtime would reserve a kilobyte for each.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use super::InstanceCommand;

struct CommandQueue {
    content: Mutex<QueueContent>,
    changed: Notify,
}

#[derive(Default)]
struct QueueContent {
    commands: VecDeque<InstanceCommand>,
    state: QueueState,
}

/// Whether the task of a queue runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueState {
    #[default]
    Open,
    /// One of the two ends is gone.
    Ended,
    /// The task has ended, and the store has the state of its instance.
    EndedWithState,
}

/// The end that the supervisor holds. The task ends when it is dropped.
pub struct CommandSender(Arc<CommandQueue>);

/// The end of the instance task.
pub struct CommandReceiver(Arc<CommandQueue>);

/// Creates the queue of an instance task.
pub fn command_queue() -> (CommandSender, CommandReceiver) {
    let queue = Arc::new(CommandQueue { content: Mutex::default(), changed: Notify::new() });
    (CommandSender(Arc::clone(&queue)), CommandReceiver(queue))
}

impl CommandQueue {
    fn content(&self) -> MutexGuard<'_, QueueContent> {
        self.content.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl CommandSender {
    /// Sends a command, or returns it if the task has ended.
    pub fn send(&self, command: InstanceCommand) -> Result<(), InstanceCommand> {
        let mut content = self.0.content();
        if content.state != QueueState::Open {
            return Err(command);
        }
        content.commands.push_back(command);
        drop(content);
        self.0.changed.notify_one();
        Ok(())
    }

    pub fn state(&self) -> QueueState {
        self.0.content().state
    }
}

impl Drop for CommandSender {
    fn drop(&mut self) {
        self.0.content().end(QueueState::Ended);
        self.0.changed.notify_one();
    }
}

impl QueueContent {
    fn end(&mut self, state: QueueState) {
        if self.state == QueueState::Open {
            self.state = state;
        }
    }
}

impl Drop for CommandReceiver {
    fn drop(&mut self) {
        let commands = {
            let mut content = self.0.content();
            content.end(QueueState::Ended);
            std::mem::take(&mut content.commands)
        };
        drop(commands);
    }
}

impl CommandReceiver {
    /// Ends the queue, unless it has a command. The task ends then, and no command is lost.
    pub fn end_if_empty(&mut self, state: QueueState) -> bool {
        let mut content = self.0.content();
        let is_empty = content.commands.is_empty();
        if is_empty {
            content.end(state);
        }
        is_empty
    }

    /// The next command; `None`: the sender is gone, and no command is left. A call that is cancelled loses no command.
    pub async fn recv(&mut self) -> Option<InstanceCommand> {
        loop {
            {
                let mut content = self.0.content();
                if let Some(command) = content.commands.pop_front() {
                    if content.commands.is_empty() {
                        content.commands = VecDeque::new();
                    }
                    return Some(command);
                }
                if content.state != QueueState::Open {
                    return None;
                }
            }
            // A notification between the check and this wait is stored, and ends the wait at once.
            self.0.changed.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn commands_arrive_in_order_and_a_dropped_sender_ends_the_queue() {
        let (send, mut receive) = command_queue();
        let sender = tokio::spawn(async move {
            for nth in 0..100u64 {
                assert!(send.send(InstanceCommand::SetSpec(Box::new((None, nth)))).is_ok());
                tokio::task::yield_now().await;
            }
        });
        for expected in 0..100 {
            // A cancelled call loses nothing.
            let cancelled = tokio::time::timeout(std::time::Duration::ZERO, receive.recv()).await;
            let command = match cancelled {
                Ok(command) => command,
                Err(_) => receive.recv().await,
            };
            let Some(InstanceCommand::SetSpec(spec)) = command else { panic!("no command {expected}") };
            assert_eq!(spec.1, expected);
        }
        assert!(receive.recv().await.is_none());
        sender.await.expect("it sends");
        let (send, receive) = command_queue();
        drop(receive);
        assert!(send.send(InstanceCommand::Wake).is_err(), "a task that ended takes no command");
    }

    #[tokio::test]
    async fn a_queue_ends_only_without_a_command() {
        let (send, mut receive) = command_queue();
        assert!(send.send(InstanceCommand::Wake).is_ok());
        assert!(!receive.end_if_empty(QueueState::Ended));
        assert!(matches!(receive.recv().await, Some(InstanceCommand::Wake)));
        assert!(receive.end_if_empty(QueueState::EndedWithState));
        assert!(matches!(send.send(InstanceCommand::Report), Err(InstanceCommand::Report)));
        drop(receive);
        assert_eq!(send.state(), QueueState::EndedWithState);
    }
}
