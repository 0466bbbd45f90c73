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
static CLAIMED: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());
static SPAWN_LOCK: RwLock<()> = RwLock::new(());

fn claimed() -> MutexGuard<'static, BTreeSet<(u32, u64)>> {
    CLAIMED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Enters a holder of a process. False: it has one already.
pub fn claim(pid: u32, started: u64) -> bool {
    claimed().insert((pid, started))
}

pub fn release(pid: u32, started: u64) {
    claimed().remove(&(pid, started));
}

/// Removes the holder of a child that was not waited for: its pid is its own.
pub fn release_pid(pid: u32) {
    claimed().retain(|(one, _)| *one != pid);
}

pub fn is_claimed(pid: u32, started: u64) -> bool {
    claimed().contains(&(pid, started))
}

/// As long as this lives, what is born and not held yet is not taken for an orphan.
pub fn spawn_guard() -> RwLockReadGuard<'static, ()> {
    SPAWN_LOCK.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What a keeper has not waited for yet is looked at again after this.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// For ever.
pub async fn reap() {
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        warn!(%error, "orphans go to the first process, not to us");
    }
    let Ok(mut ended) = signal(SignalKind::child()) else { return };
    loop {
        let mut skip_held = false;
        while reap_orphans(skip_held) {
            tokio::time::sleep(RETRY_INTERVAL).await;
            skip_held = true;
        }
        if ended.recv().await.is_none() {
            return;
        }
    }
}

/// Reaps ended orphans. True: an ended process is left, which its holder waits for. The kernel returns the same ended child
/// until it is waited for; with `skip_held` every child is tried, since a holder may be busy for minutes.
fn reap_orphans(skip_held: bool) -> bool {
    let Ok(_no_birth) = SPAWN_LOCK.try_write() else { return true };
    while let Some(pid) = first_zombie() {
        if is_pid_claimed(pid) {
            if skip_held {
                children().into_iter().filter(|pid| !is_pid_claimed(*pid)).for_each(wait_for);
            }
            return true;
        }
        wait_for(pid);
    }
    false
}

fn is_pid_claimed(pid: u32) -> bool {
    claimed().range((pid, 0)..=(pid, u64::MAX)).next().is_some()
}

/// All children of this process, ended ones too. The kernel lists them per thread.
fn children() -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let lists = threads.flatten().filter_map(|one| std::fs::read_to_string(one.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Some child that has ended and was not waited for; it still is not.
fn first_zombie() -> Option<u32> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::process::ProcessIdentity;

    #[test]
    fn a_held_process_that_ended_does_not_stop_the_reaping_of_others() {
        // A process of its own: the reaper takes every child of the test program.
        if std::env::var_os("ABIDE_TEST_REAPER").is_none() {
            let test = "agent::reaper::tests::a_held_process_that_ended_does_not_stop_the_reaping_of_others";
            let program = std::env::current_exe().expect("a path");
            let mut again = std::process::Command::new(program);
            let out = again.args(["--exact", test]).env("ABIDE_TEST_REAPER", "1").output().expect("it runs");
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
            return;
        }
        let child = || std::process::Command::new("sleep").arg("1000").spawn().expect("it starts");
        let [mut first, mut second] = [child(), child()];
        let identity = ProcessIdentity::of(first.id()).expect("it runs");
        assert!(claim(identity.pid, identity.started));
        let ended = |pid: u32| ProcessIdentity::of(pid).is_some_and(|one| !one.is_current());
        for one in [&mut first, &mut second] {
            one.kill().expect("it is ours");
        }
        let [first, second] = [first.id(), second.id()];
        while !(ended(first) && ended(second)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(reap_orphans(true), "the held one is left");
        assert_eq!(ProcessIdentity::of(second), None, "the orphan was reaped");
        assert!(ProcessIdentity::of(first).is_some(), "its holder waits for it");
        release_pid(first);
        assert!(!reap_orphans(false));
        assert_eq!(ProcessIdentity::of(first), None);
    }
}
