//! Worker threads: blocking work outside the async runtime, on threads that are reused.
//!
//! A launch needs one of these threads, so an idle one is kept, and one that has launched a process stays: when a thread
//! ends, its children become children of the first thread, which then has a long list of them ([`super::reaper::orphans`]).
//! A thread has either the agent's rights or the file rights of
//! one account, and never changes them. This module sets no limit: work that hangs occupies its own thread, and the next
//! work gets another one. The limits are permits per user ([`super::permits`]).

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use super::account::FileCredentials;

/// Maximum idle time of a thread. The last idle thread with the agent's rights stays.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum threads that stay because of their children.
const MAX_KEPT: usize = 64;
/// Threads that stay so far.
static KEPT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static IS_KEPT: Cell<bool> = const { Cell::new(false) };
}

/// Keeps this thread as long as the agent runs: it has created a process. A thread of another module is not affected.
pub fn keep_this_thread() {
    if !IS_KEPT.get() && KEPT.fetch_add(1, Ordering::Relaxed) < MAX_KEPT {
        IS_KEPT.set(true);
    }
}
const STACK: usize = 256 << 10;

/// Work for a thread. The argument is an error if the thread could not assume the requested rights.
type Work = Box<dyn FnOnce(io::Result<()>) + Send>;

/// The account whose file rights a thread has; `None`: the agent's own rights.
type ThreadRights = Option<FileCredentials>;

/// Idle threads by their rights. Each waits for work on its channel.
static IDLE_THREADS: LazyLock<Mutex<HashMap<ThreadRights, Vec<IdleThread>>>> = LazyLock::new(Mutex::default);

struct IdleThread {
    thread: std::thread::ThreadId,
    work: SyncSender<Work>,
}

fn idle_threads() -> MutexGuard<'static, HashMap<ThreadRights, Vec<IdleThread>>> {
    IDLE_THREADS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs work with the agent's rights.
pub fn run(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    dispatch(None, Box::new(|_| work()), |_| Ok(()))
}

/// Runs work with the file rights of an account, and waits for it. `assume_rights` sets them on a new thread.
pub fn run_as<T: Send + 'static>(
    credentials: FileCredentials,
    assume_rights: fn(&FileCredentials) -> io::Result<()>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (send, receive) = sync_channel(1);
    let work = move |assumed: io::Result<()>| {
        let _ = send.send(assumed.map(|()| work()));
    };
    dispatch(Some(credentials), Box::new(work), assume_rights)?;
    receive.recv().unwrap_or_else(|_| Err(io::Error::other("the helper thread failed")))
}

/// Dispatches work to an idle thread with these rights, or to a new one.
fn dispatch(
    rights: ThreadRights,
    work: Work,
    assume_rights: fn(&FileCredentials) -> io::Result<()>,
) -> io::Result<()> {
    let idle = idle_threads().get_mut(&rights).and_then(Vec::pop);
    let work = match idle {
        None => work,
        // An idle thread is receiving, so the send fails only if the thread is gone.
        Some(idle) => match idle.work.send(work) {
            Ok(()) => return Ok(()),
            Err(unsent) => unsent.0,
        },
    };
    let name = if rights.is_none() { "worker" } else { "user-files" };
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK);
    thread.spawn(move || serve(rights, work, assume_rights)).map(drop)
}

/// Runs the first work, then further work until the idle timeout.
fn serve(rights: ThreadRights, first: Work, assume_rights: fn(&FileCredentials) -> io::Result<()>) {
    if let Err(error) = rights.as_ref().map_or(Ok(()), assume_rights) {
        // A thread whose rights are incomplete must not do any work.
        first(Err(error));
        return;
    }
    first(Ok(()));
    let (send, receive) = sync_channel(1);
    while let Some(work) = next(&rights, &send, &receive) {
        work(Ok(()));
    }
}

fn next(rights: &ThreadRights, send: &SyncSender<Work>, receive: &Receiver<Work>) -> Option<Work> {
    let thread = std::thread::current().id();
    idle_threads().entry(rights.clone()).or_default().push(IdleThread { thread, work: send.clone() });
    loop {
        if rights.is_none() && IS_KEPT.get() {
            return receive.recv().ok();
        }
        match receive.recv_timeout(IDLE_TIMEOUT) {
            Ok(work) => return Some(work),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        let mut threads = idle_threads();
        let Some(idle) = threads.get_mut(rights) else { continue };
        let Some(at) = idle.iter().position(|one| one.thread == thread) else {
            // Selected at the last moment: its work is about to arrive.
            continue;
        };
        if rights.is_none() && idle.len() == 1 {
            continue;
        }
        idle.remove(at);
        if idle.is_empty() {
            threads.remove(rights);
        }
        return None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::{ThreadId, current};

    /// Credentials of a user id that no other test uses.
    fn credentials(groups: &[u32]) -> FileCredentials {
        FileCredentials { uid: 4_000_000_001, gid: 4_000_000_001, groups: groups.to_vec() }
    }

    fn thread_of(groups: &[u32]) -> ThreadId {
        run_as(credentials(groups), |_| Ok(()), || current().id()).expect("a thread")
    }

    #[test]
    fn an_idle_thread_is_used_again_for_the_same_rights_only() {
        let first = thread_of(&[1]);
        let is_idle = || idle_threads().get(&Some(credentials(&[1]))).is_some_and(|idle| idle.len() == 1);
        while !is_idle() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_ne!(thread_of(&[1, 2]), first, "another group is another right");
        assert_ne!(thread_of(&[]), first);
        assert_eq!(thread_of(&[1]), first);
    }

    #[test]
    fn work_that_hangs_does_not_block_other_work() {
        let (release, hangs) = sync_channel::<()>(0);
        let (begun, begins) = sync_channel(0);
        run(move || {
            let _ = begun.send(());
            let _ = hangs.recv();
        })
        .expect("a thread");
        begins.recv().expect("it runs");
        let (done, result) = sync_channel(1);
        run(move || done.send(7).expect("a receiver")).expect("a thread");
        assert_eq!(result.recv(), Ok(7));
        drop(release);
    }

    #[test]
    fn without_the_rights_nothing_runs() {
        let denied = |_: &FileCredentials| Err(io::Error::from_raw_os_error(libc::EPERM));
        for _ in 0..2 {
            let done = run_as(credentials(&[3]), denied, || panic!("it ran"));
            assert_eq!(done.map_err(|error| error.raw_os_error()), Err(Some(libc::EPERM)));
        }
        let failed = run_as(credentials(&[4]), |_| Ok(()), || panic!("expected by this test"));
        assert!(failed.is_err_and(|error| error.to_string() == "the helper thread failed"));
    }
}
