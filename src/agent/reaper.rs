//! Whose parent died becomes ours, and is waited for when it ends.
//!
//! A daemon's starter ends and leaves the daemon behind: since the agent is its subreaper, the daemon's exit code is the
//! agent's to know, and no zombie is left. What a keeper holds is its own to wait for; what is just being born is nobody's
//! yet; the rest is ended here.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tracing::warn;

/// Processes that an instance or a command of one holds, by pid and start time.
static HELD: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());
static BIRTHS: RwLock<()> = RwLock::new(());

fn held() -> MutexGuard<'static, BTreeSet<(u32, u64)>> {
    HELD.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Enters a holder of a process. False: it has one already.
pub fn hold_alone(pid: u32, started: u64) -> bool {
    held().insert((pid, started))
}

pub fn release(pid: u32, started: u64) {
    held().remove(&(pid, started));
}

pub fn is_held(pid: u32, started: u64) -> bool {
    held().contains(&(pid, started))
}

/// As long as this lives, what is born and not held yet is not taken for an orphan.
pub fn birth() -> RwLockReadGuard<'static, ()> {
    BIRTHS.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What a keeper has not waited for yet is looked at again after this.
const AGAIN: Duration = Duration::from_millis(100);

/// For ever.
pub async fn reap() {
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        warn!(%error, "orphans go to the first process, not to us");
    }
    let Ok(mut ended) = signal(SignalKind::child()) else { return };
    loop {
        while all_ended_orphans() {
            tokio::time::sleep(AGAIN).await;
        }
        if ended.recv().await.is_none() {
            return;
        }
    }
}

/// Waits for each that ended and is nobody's. Is there one that somebody is about to wait for?
fn all_ended_orphans() -> bool {
    let Ok(_no_birth) = BIRTHS.try_write() else { return true };
    while let Some(pid) = first_ended() {
        if held().range((pid, 0)..=(pid, u64::MAX)).next().is_some() {
            return true;
        }
        wait_for(pid);
    }
    false
}

/// Some child that has ended and was not waited for; it still is not.
fn first_ended() -> Option<u32> {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel fills in what is ours; without an ended child its pid stays 0.
    let (result, pid) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let result = libc::waitid(libc::P_ALL, 0, &mut info, flags);
        (result, info.si_pid())
    };
    u32::try_from(pid).ok().filter(|pid| result == 0 && *pid != 0)
}

fn wait_for(pid: u32) {
    // SAFETY: as above; nobody asks for what it ended with.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_PID, pid, &mut info, libc::WEXITED | libc::WNOHANG);
    }
}
