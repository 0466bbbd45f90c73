//! What the kernel knows of processes: which one a pid is, whether it lives, when it ends.
//!
//! A pid alone proves nothing: it may be somebody else's by now. A process is known by boot, pid and start time together,
//! and held by a pidfd, which never becomes another process.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::LazyLock;

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

use super::reaper;

/// Which process, of all that ever were.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub boot: String,
    pub pid: u32,
    /// Ticks since that boot.
    pub started: u64,
}

pub fn boot_id() -> &'static str {
    static ID: LazyLock<String> = LazyLock::new(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        id.map(|id| id.trim().to_owned()).unwrap_or_default()
    });
    &ID
}

/// One line of /proc/PID/stat. The name in parentheses may contain anything.
struct Stat {
    state: char,
    parent: u32,
    started: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    // Whole by one read: the kernel's line is shorter, and a file of unknown length would take several.
    let mut line = [0; 1024];
    let length = File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read(&mut line)).ok()?;
    // The name is bytes; the numbers after it are text.
    let text = String::from_utf8_lossy(&line[..length]);
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Stat { state, parent, started: fields.nth(17)?.parse().ok()? })
}

pub fn parent(pid: u32) -> Option<u32> {
    stat(pid).map(|stat| stat.parent)
}

/// The users of a process: real, effective, saved, of the filesystem.
pub fn uids(pid: u32) -> Option<[u32; 4]> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let ids: Vec<u32> = line.split_whitespace().filter_map(|id| id.parse().ok()).collect();
    ids.try_into().ok()
}

/// The clock that [`Identity::started`] is read from, now.
pub fn ticks_since_boot() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    let now = clock_gettime(ClockId::Boottime);
    let nanos = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    let per_second = i128::from(rustix::param::clock_ticks_per_second().max(1));
    u64::try_from(nanos * per_second / 1_000_000_000).unwrap_or(0)
}

impl ProcessIdentity {
    /// The process that has this pid now.
    pub fn of(pid: u32) -> Option<ProcessIdentity> {
        let stat = stat(pid)?;
        Some(ProcessIdentity { boot: boot_id().to_owned(), pid, started: stat.started })
    }

    /// Does the pid still name this process, alive?
    pub fn is_current(&self) -> bool {
        let same = |stat: Stat| stat.started == self.started && !matches!(stat.state, 'Z' | 'X');
        self.boot == boot_id() && stat(self.pid).is_some_and(same)
    }

    /// Does an instance, or a command of one, hold this process?
    pub fn is_claimed(&self) -> bool {
        reaper::is_claimed(self.pid, self.started)
    }
}

/// A process that is held: it is the one that it was when it was taken hold of, until it is reaped.
pub struct ProcessHandle {
    fd: AsyncFd<OwnedFd>,
    pub identity: ProcessIdentity,
}

impl ProcessHandle {
    /// Takes hold of a process, if it is still the one that is meant, alive, and not held already: two holders would
    /// each supervise and stop it.
    pub fn open(identity: &ProcessIdentity) -> Option<ProcessHandle> {
        if identity.boot != boot_id() {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(identity.pid).ok()?)?;
        let fd = pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
        // Only now is it certain that what is looked at is what is held.
        let stat = stat(identity.pid)?;
        if stat.started != identity.started || matches!(stat.state, 'Z' | 'X') {
            return None;
        }
        let fd = register_fd(fd)?;
        reaper::claim(identity.pid, identity.started)
            .then(|| ProcessHandle { fd, identity: identity.clone() })
    }

    /// Takes hold of a child of ours that has not been waited for: its pid is its own.
    /// On failure the child is killed: no instance could stop it later.
    pub fn from_child(pid: u32, fd: OwnedFd) -> Option<ProcessHandle> {
        let Some(identity) = ProcessIdentity::of(pid) else {
            kill_unclaimed(pid, &fd);
            return None;
        };
        reaper::claim(identity.pid, identity.started);
        let Some(fd) = register_fd(fd) else {
            // A held child is not reaped, so the pid is still its own.
            let _ =
                Pid::from_raw(pid.cast_signed()).map(|pid| rustix::process::kill_process(pid, Signal::KILL));
            reaper::release_pid(pid);
            return None;
        };
        Some(ProcessHandle { fd, identity })
    }

    /// Waits until it has ended. The exit code, where it was our child; a signal n is 128 + n.
    pub async fn wait_exit(&self) -> Option<i32> {
        // An error would mean that nobody tells us of its end: then it is asked about.
        if self.fd.readable().await.is_err() {
            while stat(self.identity.pid)
                .is_some_and(|stat| stat.started == self.identity.started && stat.state != 'Z')
            {
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
        let fd = std::os::fd::AsFd::as_fd(self.fd.get_ref());
        let status =
            waitid(WaitId::PidFd(fd), WaitIdOptions::EXITED | WaitIdOptions::NOHANG).ok().flatten()?;
        status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal))
    }

    /// A duplicate of one of its descriptors. Nothing is opened, and no path is followed.
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

/// Kills a child that no instance holds. The reaper waits for it.
pub fn kill_unclaimed(pid: u32, fd: &OwnedFd) {
    reaper::release_pid(pid);
    let _ = pidfd_send_signal(fd, Signal::KILL);
}

/// Whatever we were given beside the three usual descriptors is not passed on to what we launch.
pub fn set_cloexec() {
    use rustix::io::{FdFlags, fcntl_setfd};
    let Ok(folder) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for number in numbers.filter(|number| *number > 2) {
        // SAFETY: only a flag is set; one that is closed by now gives an error, which says the same.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
    }
}

fn register_fd(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is the same descriptor, and open, for as long as it lives.
    unsafe { AsyncFd::register(fd) }.ok()
}

/// Does a process run this program? By its executable, its first argument, or, under an interpreter, its script.
pub fn runs_program(pid: u32, name: &str) -> bool {
    let base = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    let exe = std::fs::read_link(format!("/proc/{pid}/exe"))
        .map(|exe| exe.display().to_string())
        .unwrap_or_default();
    let exe = base(exe.trim_end_matches(" (deleted)"));
    if exe == name {
        return true;
    }
    let args = cmdline(pid);
    // Some replace their arguments by a title, whose first word is their name: `redis-server 127.0.0.1:6379`.
    let title = args.first().and_then(|first| first.split_whitespace().next()).unwrap_or_default();
    let first = args.first().map_or("", String::as_str);
    if [first, title].iter().any(|word| base(word.trim_start_matches('-').trim_end_matches(':')) == name) {
        return true;
    }
    const INTERPRETERS: [&str; 8] = ["sh", "bash", "dash", "python", "perl", "ruby", "node", "java"];
    let interpreted = INTERPRETERS.iter().any(|one| exe.starts_with(one)) || exe == "busybox";
    let script = args.iter().skip(1).find(|arg| !arg.starts_with('-'));
    interpreted && script.is_some_and(|script| base(script) == name)
}

/// Is there a process of this program that has closed nearly all of its descriptors, as a child does before it becomes
/// another program?
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
            && std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|fds| fds.count() <= DESCRIPTORS)
    })
}

pub fn cmdline(pid: u32) -> Vec<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let args = bytes.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned());
    let mut args: Vec<String> = args.collect();
    args.pop();
    args
}

/// A process whose environment names a launch. Its environment is what it says of itself, and proves nothing alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchedProcess {
    pub identity: ProcessIdentity,
    pub parent: u32,
    pub launch_id: String,
    /// The instance that it was launched as; empty, where it does not say.
    pub instance: String,
}

impl LaunchedProcess {
    pub fn of(pid: u32) -> Option<LaunchedProcess> {
        let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let value = |name: &[u8]| {
            let found = bytes.split(|byte| *byte == 0).find_map(|one| one.strip_prefix(name))?;
            std::str::from_utf8(found).ok().map(str::to_owned)
        };
        let launch_id = value(b"ABIDE_INCARNATION=")?;
        let instance = value(b"ABIDE_INSTANCE=").unwrap_or_default();
        let stat = stat(pid).filter(|stat| !matches!(stat.state, 'Z' | 'X'))?;
        let identity = ProcessIdentity { boot: boot_id().to_owned(), pid, started: stat.started };
        Some(LaunchedProcess { identity, parent: stat.parent, launch_id, instance })
    }
}

/// Every process of this host whose environment names a launch.
pub fn launched_processes() -> Vec<LaunchedProcess> {
    let Ok(folder) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(LaunchedProcess::of).collect()
}

/// Resident memory and processor time of one process: bytes, and ticks since it began.
pub fn usage(pid: u32) -> Option<(u64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    Some((
        number(21)?.saturating_mul(rustix::param::page_size() as u64),
        number(11)?.saturating_add(number(12)?),
    ))
}

/// Gives memory back that is not needed any more: what was freed, and the program's own code, most of which is for other
/// verbs or for a start. What is needed again comes from the page cache.
pub fn release_memory() {
    crate::malloc::give_freed_back();
    for (from, to) in code_mappings() {
        // SAFETY: these pages are a file's, mapped to be read or run, and nobody can have written to them: dropped,
        // they are read from the file again.
        unsafe {
            libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_DONTNEED);
        }
    }
}

/// Where this program's code is.
fn code_mappings() -> Vec<(usize, usize)> {
    let own = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let of_ours = maps.lines().filter(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (kind, offset) = (words.get(1).copied(), words.get(2).copied());
        // What is only read and begins the file was never written to; other such parts hold addresses that were.
        let never_written = kind == Some("r-xp") || (kind == Some("r--p") && offset == Some("00000000"));
        never_written && words.get(5).is_some_and(|path| Path::new(path) == own)
    });
    of_ours
        .filter_map(|line| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
        })
        .collect()
}
