//! Processes of the kernel: identity, liveness, exit and signals.
//!
//! A pid alone does not identify a process, because the kernel reuses it. Boot, pid and start time together do. A pidfd
//! holds a process, and never refers to another one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

use super::clone_exec::{SpawnedProcess, held_descriptor};
use super::environment::LAUNCH_ID_VARIABLE;
use super::exit_record::RECORD_VARIABLE;
use super::reaper;
pub use crate::proc::boot_id;
use crate::proc::{ProcStat, ProcessStrings, UnreadableProcess};

/// Identity of a process, unique over pid reuse and reboots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub boot: String,
    pub pid: u32,
    /// Start time in ticks since that boot.
    pub started: u64,
}

/// Whether a process was forked and has not called `execve`: it may be about to run its program.
pub fn is_before_exec(pid: u32) -> bool {
    ProcStat::of(pid).is_some_and(|stat| stat.is_before_exec() && stat.is_alive())
}

/// The name of a process, as `ps` shows it.
pub fn name(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim_end().to_owned()
}

pub fn parent(pid: u32) -> Option<u32> {
    ProcStat::of(pid).map(|stat| stat.parent)
}

/// User ids of a process: real, effective, saved, file system.
pub fn uids(pid: u32) -> Option<[u32; 4]> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let ids: Vec<u32> = line.split_whitespace().filter_map(|id| id.parse().ok()).collect();
    ids.try_into().ok()
}

/// Current time of the clock of [`ProcessIdentity::started`].
pub fn ticks_since_boot() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    let now = clock_gettime(ClockId::Boottime);
    let nanos = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    let per_second = i128::from(rustix::param::clock_ticks_per_second().max(1));
    u64::try_from(nanos * per_second / 1_000_000_000).unwrap_or(0)
}

impl ProcessIdentity {
    /// The process that currently has this pid.
    pub fn of(pid: u32) -> Option<ProcessIdentity> {
        let stat = ProcStat::of(pid)?;
        Some(ProcessIdentity { boot: boot_id().to_owned(), pid, started: stat.started })
    }

    /// Whether the pid still names this process, and the process is alive.
    pub fn is_current(&self) -> bool {
        let same = |stat: ProcStat| stat.started == self.started && stat.is_alive();
        self.boot == boot_id() && ProcStat::of(self.pid).is_some_and(same)
    }

    /// Whether an instance, or a command of one, holds this process.
    pub fn is_claimed(&self) -> bool {
        reaper::is_claimed(self.pid, self.started)
    }
}

/// A claimed process, held by a pidfd. Its pid is not reused until it is reaped.
pub struct ProcessHandle {
    fd: AsyncFd<OwnedFd>,
    pub identity: ProcessIdentity,
    /// The session of the process when the handle was opened.
    pub session: u32,
    /// This agent created the process in the control group of its launch.
    pub is_grouped: bool,
    /// The exit code, once the process has ended.
    exit: OnceLock<Option<i32>>,
    /// The process was killed by a signal.
    is_signalled: AtomicBool,
    /// Ticks since boot right before the process was reaped, while it was in its session.
    reaped: OnceLock<Option<u64>>,
}

impl ProcessHandle {
    /// The real user id of the process.
    pub fn uid(&self) -> Option<u32> {
        uids(self.identity.pid).map(|[real, ..]| real)
    }

    /// Opens a handle, if the process is still this one, alive and not claimed: two holders would each supervise and stop
    /// it.
    pub fn open(identity: &ProcessIdentity) -> Option<ProcessHandle> {
        if identity.boot != boot_id() {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(identity.pid).ok()?)?;
        let fd = pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
        // Checked after the open: only then does the pidfd pin the process whose start time is read.
        let stat = ProcStat::of(identity.pid)?;
        if stat.started != identity.started || !stat.is_alive() {
            return None;
        }
        let (fd, session, exit) = (register_fd(fd)?, stat.session, OnceLock::new());
        let is_signalled = AtomicBool::new(false);
        reaper::claim(identity.pid, identity.started).then(|| ProcessHandle {
            fd,
            identity: identity.clone(),
            session,
            is_grouped: false,
            exit,
            is_signalled,
            reaped: OnceLock::new(),
        })
    }

    /// Opens a handle on a claimed child of the agent that has not been reaped, so that its pid is not reused.
    /// On failure the child is killed: no instance could stop it later.
    pub fn from_child(child: SpawnedProcess) -> Option<ProcessHandle> {
        let SpawnedProcess { pid, started, fd, is_grouped } = child;
        let Some(started) = started else {
            kill_unclaimed(pid, &fd);
            return None;
        };
        let identity = ProcessIdentity { boot: boot_id().to_owned(), pid, started };
        let Some(fd) = register_fd(fd) else {
            // The child is claimed and therefore not reaped: the pid is still its own.
            let _ =
                Pid::from_raw(pid.cast_signed()).map(|pid| rustix::process::kill_process(pid, Signal::KILL));
            reaper::release_pid(pid);
            return None;
        };
        // A launched process is the leader of its session.
        Some(ProcessHandle {
            fd,
            identity,
            session: pid,
            is_grouped,
            exit: OnceLock::new(),
            is_signalled: AtomicBool::new(false),
            reaped: OnceLock::new(),
        })
    }

    /// The last time, in ticks since boot, at which the process is known to be in its session; `None`: it has left it. The
    /// kernel does not reuse the number of a session while a process is in it, also one that ended and is not reaped.
    pub fn last_in_session(&self) -> Option<u64> {
        match self.reaped.get() {
            Some(reaped) => *reaped,
            None => self.is_in_session().then(ticks_since_boot),
        }
    }

    /// A leader never leaves its session.
    fn is_in_session(&self) -> bool {
        let is_member =
            |stat: ProcStat| (stat.session, stat.started) == (self.session, self.identity.started);
        self.session == self.identity.pid || ProcStat::of(self.identity.pid).is_some_and(is_member)
    }

    /// Waits for the end of the process, and reaps it. Returns the exit code of a child of the agent; signal n is 128 + n.
    pub async fn wait_exit(&self) -> Option<i32> {
        if let Some(code) = self.exit.get() {
            return *code;
        }
        // Without readiness events from the pidfd, poll for the end.
        if self.fd.readable().await.is_err() {
            Box::pin(self.poll_for_end()).await;
        }
        let fd = std::os::fd::AsFd::as_fd(self.fd.get_ref());
        self.reaped.get_or_init(|| self.is_in_session().then(ticks_since_boot));
        let status = waitid(WaitId::PidFd(fd), WaitIdOptions::EXITED | WaitIdOptions::NOHANG).ok().flatten();
        let is_signalled = status.as_ref().is_some_and(|status| status.terminating_signal().is_some());
        self.is_signalled.fetch_or(is_signalled, Ordering::Relaxed);
        let code = status.and_then(|status| {
            status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal))
        });
        *self.exit.get_or_init(|| code)
    }

    async fn poll_for_end(&self) {
        while ProcStat::of(self.identity.pid)
            .is_some_and(|stat| stat.started == self.identity.started && stat.state != 'Z')
        {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    /// Whether a signal ended the process. Known once [`wait_exit`](Self::wait_exit) returned its code.
    pub fn was_signalled(&self) -> bool {
        self.is_signalled.load(Ordering::Relaxed)
    }

    /// Does the work, and reaps the process as soon as it ends: a script that waits with `kill -0` sees a process that was
    /// not reaped as running.
    pub async fn reaping<T>(&self, work: impl Future<Output = T>) -> T {
        let reap = async {
            self.wait_exit().await;
            std::future::pending::<std::convert::Infallible>().await
        };
        tokio::select! {
            biased;
            done = work => done,
            never = reap => match never {},
        }
    }

    /// Duplicates a descriptor of the process. Opens no file and follows no path.
    pub fn descriptor(&self, number: i32) -> Option<OwnedFd> {
        use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
        pidfd_getfd(self.fd.get_ref(), number, PidfdGetfdFlags::empty()).ok()
    }

    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(pidfd_send_signal(self.fd.get_ref(), signal)?)
    }
}

impl Drop for ProcessHandle {
    fn drop(&mut self) {
        reaper::release(self.identity.pid, self.identity.started);
    }
}

/// A launched process without a handle. If it is dropped after the launch timed out, it is killed: the launch has failed.
/// If it is dropped because the agent ends, it lives on like every other process, and the next agent finds it by its launch
/// id.
pub struct UnclaimedProcess {
    process: Option<SpawnedProcess>,
    timed_out: Arc<AtomicBool>,
}

impl UnclaimedProcess {
    /// `timed_out`: set before the receiver of this process is dropped because it waited too long.
    pub fn new(process: SpawnedProcess, timed_out: Arc<AtomicBool>) -> UnclaimedProcess {
        UnclaimedProcess { process: Some(process), timed_out }
    }

    pub fn into_handle(mut self) -> Option<ProcessHandle> {
        ProcessHandle::from_child(self.process.take()?)
    }
}

impl Drop for UnclaimedProcess {
    fn drop(&mut self) {
        if self.timed_out.load(Ordering::Acquire) {
            self.process.iter().for_each(|one| kill_unclaimed(one.pid, &one.fd));
        }
    }
}

/// Kills a child that no instance holds. The reaper reaps it.
pub fn kill_unclaimed(pid: u32, fd: &OwnedFd) {
    reaper::release_pid(pid);
    let _ = pidfd_send_signal(fd, Signal::KILL);
}

/// Sets close-on-exec on all inherited descriptors above 2: launched processes must not inherit them.
pub fn set_cloexec() {
    use rustix::io::{FdFlags, fcntl_setfd};
    let Ok(folder) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for number in numbers.filter(|number| *number > 2) {
        // SAFETY: the borrow is used for one fcntl that sets a flag. A descriptor that was closed since gives EBADF, which
        // is ignored.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
    }
}

fn register_fd(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and keeps its number as long as it lives.
    unsafe { AsyncFd::register(held_descriptor(fd)) }.ok()
}

/// Whether a process runs this program: by its executable, its first argument or, under an interpreter, its script. Can block.
pub fn runs_program(pid: u32, name: &str) -> Result<bool, UnreadableProcess> {
    let base = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    let exe = std::fs::read_link(format!("/proc/{pid}/exe"))
        .map(|exe| exe.display().to_string())
        .unwrap_or_default();
    let exe = base(exe.trim_end_matches(" (deleted)"));
    if exe == name {
        return Ok(true);
    }
    let args = ProcessStrings::arguments(pid)?;
    let first = args.iter().next().map(String::from_utf8_lossy).unwrap_or_default();
    // Some programs replace their arguments by a title that begins with their name: `redis-server 127.0.0.1:6379`.
    let title = first.split_whitespace().next().unwrap_or_default();
    if [&*first, title].iter().any(|word| base(word.trim_start_matches('-').trim_end_matches(':')) == name) {
        return Ok(true);
    }
    const INTERPRETERS: [&str; 8] = ["sh", "bash", "dash", "python", "perl", "ruby", "node", "java"];
    let interpreted = INTERPRETERS.iter().any(|one| exe.starts_with(one)) || exe == "busybox";
    let script = args.iter().skip(1).find(|arg| !arg.starts_with(b"-"));
    Ok(interpreted && script.is_some_and(|script| base(&String::from_utf8_lossy(script)) == name))
}

/// Whether a forked process of this executable has closed nearly all of its descriptors, as a launched child does before
/// `execve`.
pub fn has_unexecuted_child() -> bool {
    const DESCRIPTORS: usize = 6;
    let program = |pid: &str| {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        let name = exe.file_name()?.to_str()?.to_owned();
        Some(name.trim_end_matches(" (deleted)").to_owned())
    };
    let (Some(own), Ok(folder)) = (program("self"), std::fs::read_dir("/proc")) else { return false };
    let me = std::process::id().to_string();
    folder.flatten().filter_map(|entry| entry.file_name().into_string().ok()).any(|pid| {
        let is_process = pid.bytes().all(|byte| byte.is_ascii_digit()) && pid != me;
        is_process
            && program(&pid).as_ref() == Some(&own)
            && pid.parse().is_ok_and(is_before_exec)
            && std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|fds| fds.count() <= DESCRIPTORS)
    })
}

/// The command line of a process as text, at most 64 KiB of it. Can block.
pub fn command_line(pid: u32) -> String {
    const MAX_SHOWN: usize = 64 << 10;
    let Ok(args) = ProcessStrings::arguments(pid) else { return String::new() };
    let mut line = Vec::new();
    for (number, arg) in args.iter().enumerate() {
        line.extend_from_slice(if number == 0 { b"" } else { b" " });
        line.extend_from_slice(arg);
        if line.len() > MAX_SHOWN {
            line.truncate(MAX_SHOWN);
            break;
        }
    }
    String::from_utf8_lossy(&line).into_owned()
}

/// A process whose environment names a launch. The process controls its environment, so this alone proves nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchedProcess {
    pub identity: ProcessIdentity,
    pub parent: u32,
    pub launch_id: String,
    /// The instance in its environment; empty: none.
    pub instance: String,
}

/// Maximum bytes of a launch id or an instance in an environment: any user can start processes with longer ones.
const MAX_ID: usize = 4096;

/// The variables of a launch in the environment of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchVariables {
    pub launch_id: Option<String>,
    instance: Option<String>,
    /// The record id of a recorded command.
    pub record: Option<String>,
}

impl LaunchVariables {
    /// Can block.
    pub fn of(pid: u32) -> Result<LaunchVariables, UnreadableProcess> {
        let environment = ProcessStrings::environment(pid)?;
        let value = |name: &str| environment.variable(name, MAX_ID).map(str::to_owned);
        Ok(LaunchVariables {
            launch_id: value(LAUNCH_ID_VARIABLE),
            instance: value("ABIDE_INSTANCE"),
            record: value(RECORD_VARIABLE),
        })
    }
}

impl LaunchedProcess {
    /// `None`: the environment names no launch, or the process has ended. Can block.
    pub fn of(pid: u32) -> Result<Option<LaunchedProcess>, UnreadableProcess> {
        let variables = LaunchVariables::of(pid)?;
        let Some(stat) = ProcStat::of(pid).filter(ProcStat::is_alive) else { return Ok(None) };
        let identity = ProcessIdentity { boot: boot_id().to_owned(), pid, started: stat.started };
        Ok(LaunchedProcess::new(identity, stat.parent, variables))
    }

    /// `None`: the variables name no launch.
    pub fn new(
        identity: ProcessIdentity,
        parent: u32,
        variables: LaunchVariables,
    ) -> Option<LaunchedProcess> {
        let (launch_id, instance) = (variables.launch_id?, variables.instance.unwrap_or_default());
        Some(LaunchedProcess { identity, parent, launch_id, instance })
    }
}

/// Returns the pages of code to the kernel, most of which an idle agent does not use. Pages that are needed again come from
/// the page cache.
pub fn release_code() {
    static MAPPINGS: LazyLock<Vec<(usize, usize)>> = LazyLock::new(code_mappings);
    for (from, to) in MAPPINGS.iter().copied() {
        // SAFETY: these are private mappings of a file without write access and without modified pages. Dropped pages
        // are read from the file again, with the same content.
        unsafe {
            libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_DONTNEED);
        }
    }
}

/// Address ranges of the unmodified mappings of the executable and its libraries, none of which is unloaded.
fn code_mappings() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let of_ours = maps.lines().filter(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (kind, offset) = (words.get(1).copied(), words.get(2).copied());
        // Code and the read-only start of the file were never written. Other read-only parts contain relocated addresses.
        let never_written = kind == Some("r-xp") || (kind == Some("r--p") && offset == Some("00000000"));
        never_written && words.get(5).is_some_and(|path| path.starts_with('/'))
    });
    of_ours
        .filter_map(|line| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
        })
        .collect()
}
