//! Command queue of an instance task: unbounded, and without memory while it is empty.
//!
//! Nearly all of an agent's queues are empty nearly all the time. A channel of the runtime would reserve a kilobyte for each.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use super::InstanceCommand;

struct CommandQueue {
    state: Mutex<QueueState>,
    changed: Notify,
}

#[derive(Default)]
struct QueueState {
    commands: VecDeque<InstanceCommand>,
    /// One of the two ends is gone.
    is_closed: bool,
}

/// The end that the supervisor holds. The task ends when it is dropped.
pub struct CommandSender(Arc<CommandQueue>);

/// The end of the instance task.
pub struct CommandReceiver(Arc<CommandQueue>);

/// Creates the queue of an instance task.
pub fn command_queue() -> (CommandSender, CommandReceiver) {
    let queue = Arc::new(CommandQueue { state: Mutex::default(), changed: Notify::new() });
    (CommandSender(Arc::clone(&queue)), CommandReceiver(queue))
}

impl CommandQueue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl CommandSender {
    /// Sends a command. A task that has ended ignores it.
    pub fn send(&self, command: InstanceCommand) {
        let mut state = self.0.state();
        if !state.is_closed {
            state.commands.push_back(command);
            drop(state);
            self.0.changed.notify_one();
        }
    }
}

impl Drop for CommandSender {
    fn drop(&mut self) {
        self.0.state().is_closed = true;
        self.0.changed.notify_one();
    }
}

impl Drop for CommandReceiver {
    fn drop(&mut self) {
        let commands = {
            let mut state = self.0.state();
            state.is_closed = true;
            std::mem::take(&mut state.commands)
        };
        drop(commands);
    }
}

impl CommandReceiver {
    /// The next command; `None`: the sender is gone, and no command is left. A call that is cancelled loses no command.
    pub async fn recv(&mut self) -> Option<InstanceCommand> {
        loop {
            {
                let mut state = self.0.state();
                if let Some(command) = state.commands.pop_front() {
                    if state.commands.is_empty() {
                        state.commands = VecDeque::new();
                    }
                    return Some(command);
                }
                if state.is_closed {
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
                send.send(InstanceCommand::SetSpec(Box::new((None, nth))));
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
        send.send(InstanceCommand::Wake);
        assert!(send.0.state().commands.is_empty(), "a task that ended keeps no command");
    }
}
