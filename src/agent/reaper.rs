//! Subreaper: orphaned descendants are re-parented to the agent and reaped.
//!
//! The starter of a daemon ends and leaves the daemon behind. The agent is its subreaper, so it gets the daemon's exit code,
//! and no zombie remains. An instance task waits for a claimed process itself, and a process that is being launched is not
//! claimed yet; the reaper skips both and reaps the others.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, RwLock, RwLockReadGuard};
use std::time::Duration;

use tracing::warn;

/// Processes that an instance or a command of one holds, by pid and start time.
static CLAIMED: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());
/// Processes that are being created and are not claimed yet: 0 until the kernel writes the pid.
static STARTING: Mutex<Vec<Arc<dyn StartingPid>>> = Mutex::new(Vec::new());
/// Read-locked by each launch whose pid is unknown until the process is claimed; write-locked by the reaper.
static SPAWN_LOCK: RwLock<()> = RwLock::new(());
/// Number of launches so far, for a reaper that waits for the first child.
static SPAWNS: Mutex<u64> = Mutex::new(0);
static SPAWNED: Condvar = Condvar::new();
/// Processes of the agent's own, by pid and start time: children that belong to no launch.
static HELPERS: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());
/// Stack of the reaper's thread.
const STACK: usize = 128 << 10;

fn claimed() -> MutexGuard<'static, BTreeSet<(u32, u64)>> {
    CLAIMED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Claims a process. False: it is claimed already.
pub fn claim(pid: u32, started: u64) -> bool {
    claimed().insert((pid, started))
}

pub fn release(pid: u32, started: u64) {
    claimed().remove(&(pid, started));
}

/// Releases a child that was not reaped, so that its pid is not reused.
pub fn release_pid(pid: u32) {
    claimed().retain(|(one, _)| *one != pid);
}

/// Names a process of the agent's own. When it ends, the reaper reaps it.
pub fn add_helper(pid: u32, started: u64) {
    helpers().insert((pid, started));
    release(pid, started);
}

fn helpers() -> MutexGuard<'static, BTreeSet<(u32, u64)>> {
    HELPERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Forgets a process of the agent's own that has ended.
pub fn remove_helper(pid: u32, started: u64) {
    helpers().remove(&(pid, started));
}

pub fn is_claimed(pid: u32, started: u64) -> bool {
    claimed().contains(&(pid, started))
}

/// Keeps the reaper from taking a new, unclaimed process for an orphan while the guard lives.
pub fn spawn_guard() -> RwLockReadGuard<'static, ()> {
    SPAWN_LOCK.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The pid of a process that is being created: 0 until the kernel writes it.
pub trait StartingPid: Send + Sync {
    fn word(&self) -> &AtomicI32;
}

impl StartingPid for AtomicI32 {
    fn word(&self) -> &AtomicI32 {
        self
    }
}

/// A process that is being created. The reaper skips it, and reaps others: a process can hang before `execve`.
pub struct StartingProcess(Arc<dyn StartingPid>);

impl StartingProcess {
    pub fn begin() -> StartingProcess {
        StartingProcess::of(Arc::new(AtomicI32::new(0)))
    }

    pub fn of(pid: Arc<dyn StartingPid>) -> StartingProcess {
        starting().push(Arc::clone(&pid));
        StartingProcess(pid)
    }

    /// Address at which the kernel writes the pid, before the process runs.
    pub fn pid_at(&self) -> *mut i32 {
        self.0.word().as_ptr()
    }
}

impl Drop for StartingProcess {
    fn drop(&mut self) {
        starting().retain(|one| !Arc::ptr_eq(one, &self.0));
    }
}

fn starting() -> MutexGuard<'static, Vec<Arc<dyn StartingPid>>> {
    STARTING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Whether a process is claimed, is being created, or is a command outside of the agent.
fn is_held(pid: u32) -> bool {
    let is_starting = starting().iter().any(|one| one.word().load(Ordering::Acquire).cast_unsigned() == pid);
    // In this order: a process is claimed before it is no longer starting.
    is_starting || is_pid_claimed(pid) || crate::subprocess::is_command(pid)
}

/// Wait before the next pass while an ended process is left to its holder.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Becomes the subreaper of this process's descendants, and reaps orphans on a thread of its own as long as this process
/// lives: a task would be woken for each process that ends, before the instance task that has to relaunch it.
pub fn start() {
    static STARTED: Once = Once::new();
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        warn!(%error, "cannot become subreaper: orphaned descendants go to pid 1");
    }
    STARTED.call_once(|| {
        let thread = std::thread::Builder::new().name("reaper".to_owned()).stack_size(STACK);
        if let Err(error) = thread.spawn(reap) {
            warn!(%error, "cannot start the reaper: ended orphans remain as zombies");
        }
    });
}

fn reap() {
    loop {
        let spawns = *SPAWNS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match wait_for_end() {
            Err(libc::ECHILD) => wait_for_spawn_after(spawns),
            Err(_) => std::thread::sleep(RETRY_INTERVAL),
            Ok(()) => {
                let mut skip_held = false;
                while reap_orphans(skip_held) {
                    std::thread::sleep(RETRY_INTERVAL);
                    skip_held = true;
                }
            }
        }
    }
}

/// Waits until a child has ended, without reaping it. An error: the number of the system's error.
fn wait_for_end() -> Result<(), i32> {
    // SAFETY: the kernel fills in a local siginfo, which is not used.
    let result = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &mut info, libc::WEXITED | libc::WNOWAIT)
    };
    match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    }
}

/// Without any child there is nothing to wait for: only a launch brings children.
fn wait_for_spawn_after(spawns: u64) {
    let mut now = SPAWNS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    while *now == spawns {
        now = SPAWNED.wait(now).unwrap_or_else(|poisoned| poisoned.into_inner());
    }
}

/// Tells the reaper that there is a new child.
pub fn spawned() {
    *SPAWNS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += 1;
    SPAWNED.notify_one();
}

/// Reaps ended orphans. True: an ended process remains for its holder. The kernel returns the same ended child until it is
/// reaped; with `skip_held` every child is tried, since a holder may be busy for minutes.
fn reap_orphans(skip_held: bool) -> bool {
    let Ok(_no_spawn) = SPAWN_LOCK.try_write() else { return true };
    while let Some(pid) = first_zombie() {
        if is_held(pid) {
            if skip_held {
                children().into_iter().filter(|pid| !is_held(*pid)).for_each(wait_for);
            }
            return true;
        }
        wait_for(pid);
    }
    false
}

/// The children of this process that no instance holds, including ended ones: the orphans of launches.
///
/// The kernel gives an orphan to the first thread of its subreaper. A launched process is a child of the thread that created
/// it, and such threads stay ([`worker_threads::keep_this_thread`]). The list is therefore short, however many processes run.
///
/// [`worker_threads::keep_this_thread`]: super::worker_threads::keep_this_thread
pub fn orphans() -> Vec<u32> {
    let own = std::process::id();
    let mut orphans = children_of_thread(Path::new(&format!("/proc/{own}/task/{own}")));
    orphans.retain(|pid| !is_held(*pid));
    // Copied: the helpers are locked no longer than that.
    let helpers = helpers().clone();
    orphans.retain(|pid| helpers.range((*pid, 0)..=(*pid, u64::MAX)).next().is_none());
    orphans
}

/// Whether the process with this pid is claimed.
pub fn is_pid_claimed(pid: u32) -> bool {
    claimed().range((pid, 0)..=(pid, u64::MAX)).next().is_some()
}

/// All children of this process, including ended ones. The kernel lists them per thread.
fn children() -> Vec<u32> {
    children_of(std::process::id())
}

/// All children of a process, including ended ones.
pub fn children_of(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    threads.flatten().flat_map(|thread| children_of_thread(&thread.path())).collect()
}

/// The children of a thread, by its directory in /proc.
fn children_of_thread(thread: &Path) -> Vec<u32> {
    let list = std::fs::read_to_string(thread.join("children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// A child that has ended, without reaping it.
fn first_zombie() -> Option<u32> {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel fills in a local siginfo; without an ended child its pid stays 0.
    let (result, pid) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let result = libc::waitid(libc::P_ALL, 0, &mut info, flags);
        (result, info.si_pid())
    };
    u32::try_from(pid).ok().filter(|pid| result == 0 && *pid != 0)
}

fn wait_for(pid: u32) {
    // SAFETY: the kernel fills in a local siginfo, which is not used.
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
        // In its own process, because the reaper takes every child of the test program.
        if std::env::var_os("ABIDE_TEST_REAPER").is_none() {
            let test = "agent::reaper::tests::a_held_process_that_ended_does_not_stop_the_reaping_of_others";
            let program = std::env::current_exe().expect("a path");
            let mut again = std::process::Command::new(program);
            let out = again.args(["--exact", test]).env("ABIDE_TEST_REAPER", "1").output().expect("it runs");
            let stdout = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && stdout.contains("1 passed"), "{stdout}");
            return;
        }
        let child = || std::process::Command::new("sleep").arg("1000").spawn().expect("it starts");
        let [mut first, mut second, mut third] = [child(), child(), child()];
        // The first one hangs before the kernel creates its process, the other one before `execve`.
        let (_creating, starting) = (StartingProcess::begin(), StartingProcess::begin());
        starting.0.word().store(third.id().cast_signed(), Ordering::Release);
        let identity = ProcessIdentity::of(first.id()).expect("it runs");
        assert!(claim(identity.pid, identity.started));
        let ended = |pid: u32| ProcessIdentity::of(pid).is_some_and(|one| !one.is_current());
        for one in [&mut first, &mut second, &mut third] {
            one.kill().expect("a child");
        }
        let [first, second, third] = [first.id(), second.id(), third.id()];
        while !(ended(first) && ended(second) && ended(third)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(reap_orphans(true), "the held one is left");
        assert_eq!(ProcessIdentity::of(second), None, "the orphan was reaped");
        assert!(ProcessIdentity::of(first).is_some(), "its holder waits for it");
        assert!(ProcessIdentity::of(third).is_some(), "it is being created");
        release_pid(first);
        drop(starting);
        assert!(!reap_orphans(false));
        assert_eq!(ProcessIdentity::of(third), None);
        assert_eq!(ProcessIdentity::of(first), None);
    }
}
