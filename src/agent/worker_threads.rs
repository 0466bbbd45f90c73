//! Worker threads: blocking work outside the async runtime, on threads that are reused.
//!
//! A launch waits for one of these threads, so an idle one is kept. A thread runs either with the agent's rights or, for
//! good, with the file rights of one account; it never changes sides. There is no limit here: work that hangs occupies its
//! own thread, and the next work gets another one. Limits are permits per user ([`super::permits`]).

use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use super::account::FileCredentials;

/// How long a thread stays idle. The last idle thread with the agent's rights stays.
const IDLE: Duration = Duration::from_secs(5);
const STACK: usize = 256 << 10;

/// Work for a thread. The argument says whether the thread has the rights that were asked for.
type Work = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Whose rights a thread has; `None`: the agent's.
type Side = Option<FileCredentials>;

/// Idle threads, by their rights: each waits for work at the other end.
static WAITING: LazyLock<Mutex<HashMap<Side, Vec<Waiting>>>> = LazyLock::new(Mutex::default);

struct Waiting {
    thread: std::thread::ThreadId,
    work: SyncSender<Work>,
}

fn waiting() -> MutexGuard<'static, HashMap<Side, Vec<Waiting>>> {
    WAITING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs work with the agent's rights.
pub fn run(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    hand_over(None, Box::new(|_| work()), |_| Ok(()))
}

/// Runs work with the file rights of an account, and waits for it. `assume_user` gives them to the calling thread.
pub fn run_as<T: Send + 'static>(
    credentials: FileCredentials,
    take_rights: fn(&FileCredentials) -> io::Result<()>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (send, receive) = sync_channel(1);
    let work = move |taken: io::Result<()>| {
        let _ = send.send(taken.map(|()| work()));
    };
    hand_over(Some(credentials), Box::new(work), take_rights)?;
    receive.recv().unwrap_or_else(|_| Err(io::Error::other("the helper thread failed")))
}

/// To an idle thread with these rights, or to a new one.
fn hand_over(side: Side, work: Work, take_rights: fn(&FileCredentials) -> io::Result<()>) -> io::Result<()> {
    let idle = waiting().get_mut(&side).and_then(Vec::pop);
    let work = match idle {
        None => work,
        // An idle thread receives, so this fails only if the thread is gone.
        Some(idle) => match idle.work.send(work) {
            Ok(()) => return Ok(()),
            Err(unsent) => unsent.0,
        },
    };
    let name = if side.is_none() { "worker" } else { "user-files" };
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK);
    thread.spawn(move || serve(side, work, take_rights)).map(drop)
}

/// The first work, and then whatever comes while it waits.
fn serve(side: Side, first: Work, take_rights: fn(&FileCredentials) -> io::Result<()>) {
    if let Err(error) = side.as_ref().map_or(Ok(()), take_rights) {
        // A thread with half of the rights does no work.
        first(Err(error));
        return;
    }
    first(Ok(()));
    let (send, receive) = sync_channel(1);
    while let Some(work) = next(&side, &send, &receive) {
        work(Ok(()));
    }
}

fn next(side: &Side, send: &SyncSender<Work>, receive: &Receiver<Work>) -> Option<Work> {
    let thread = std::thread::current().id();
    waiting().entry(side.clone()).or_default().push(Waiting { thread, work: send.clone() });
    loop {
        match receive.recv_timeout(IDLE) {
            Ok(work) => return Some(work),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        let mut waiting = waiting();
        let Some(idle) = waiting.get_mut(side) else { continue };
        let Some(at) = idle.iter().position(|one| one.thread == thread) else {
            // Chosen at the last moment: its work is on its way.
            continue;
        };
        if side.is_none() && idle.len() == 1 {
            continue;
        }
        idle.remove(at);
        if idle.is_empty() {
            waiting.remove(side);
        }
        return None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::{ThreadId, current};

    /// Of a user id that no other test uses.
    fn credentials(groups: &[u32]) -> FileCredentials {
        FileCredentials { uid: 4_000_000_001, gid: 4_000_000_001, groups: groups.to_vec() }
    }

    fn thread_of(groups: &[u32]) -> ThreadId {
        run_as(credentials(groups), |_| Ok(()), || current().id()).expect("a thread")
    }

    #[test]
    fn an_idle_thread_is_used_again_for_the_same_rights_only() {
        let first = thread_of(&[1]);
        let is_idle = || waiting().get(&Some(credentials(&[1]))).is_some_and(|idle| idle.len() == 1);
        while !is_idle() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_ne!(thread_of(&[1, 2]), first, "another group is another right");
        assert_ne!(thread_of(&[]), first);
        assert_eq!(thread_of(&[1]), first);
    }

    #[test]
    fn work_that_hangs_keeps_no_thread_from_other_work() {
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
        let failed = run_as(credentials(&[4]), |_| Ok(()), || panic!("as this test wants"));
        assert!(failed.is_err_and(|error| error.to_string() == "the helper thread failed"));
    }
}
