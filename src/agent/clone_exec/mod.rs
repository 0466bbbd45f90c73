//! Process creation: clone and execve, with a user, a session and a control group, which posix_spawn cannot set.
//!
//! A new process shares the memory of its creator until `execve`, so nothing is copied. There are two modes. A process of the
//! agent's own user is created by the agent (`CLONE_VM | CLONE_VFORK`), and the calling thread sleeps until `execve`. A
//! process of another user is created by a small process, the launcher ([`launcher`]), which shares its memory (`CLONE_VM`) and does not wait:
//! that user can stop the process before `execve`. A failed step is reported by a pipe that closes on `execve`, and the process is killed
//! after [`EXEC_TIMEOUT`]. The user cannot read or trace the process while it shares memory: the kernel sets its memory to
//! `fs.suid_dumpable` at the change of the user, and where that permits tracing, the launcher forks the process instead.
//!
//! In both modes all data is prepared before the clone, in one mapping ([`image`], [`slot`]). The child first closes every other
//! descriptor, so that a stopped child holds no pipe of another launch.
//!
//! An agent of a thousand processes has a thousand pidfds. They have high numbers ([`held_descriptor`]): a child that shares
//! the agent's memory begins with its descriptor table and copies only the low part of it, since copying and closing each
//! pidfd would take longer than the rest of the launch.

mod child;
mod clone3;
mod launch_block;
mod launcher;
mod launcher_process;
mod own_pid_file;
mod pid_words;
mod restrict;
mod slot;
mod stage;
mod syscall;

use std::ffi::{CString, c_int};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use self::clone3::CloneWords;
use self::launch_block::LaunchBlock;
use self::launcher::{CreateRequest, LauncherError};
pub use self::launcher_process::serve_if_launcher;
pub use self::own_pid_file::OwnPidFile;
pub use self::restrict::Restrictions;
pub use self::stage::ExecStage;
use super::process::ProcessIdentity;
use super::reaper;
use super::worker_threads;

/// Maximum time between clone and `execve`.
pub const EXEC_TIMEOUT: Duration = Duration::from_secs(10);

/// The descriptor that the recording shell writes the exit code to. The command itself does not have it.
pub const EXIT_RECORD_FD: RawFd = 3;

/// The first number of descriptors that are held as long as a process lives.
const HELD_FROM: RawFd = 256;

/// Moves a descriptor that is held for long to a high number. It stays where it is if the limit of descriptors is lower.
pub fn held_descriptor(fd: OwnedFd) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(&fd, HELD_FROM).unwrap_or(fd)
}

/// Whether a new process can leave the agent's descriptor table; a seccomp filter may forbid it.
static CAN_LEAVE_TABLE: AtomicBool = AtomicBool::new(true);

/// A process that has called `execve`. It is claimed.
pub struct SpawnedProcess {
    pub pid: u32,
    /// The start time, as in [`ProcessIdentity`]; `None`: /proc cannot be read.
    pub started: Option<u64>,
    pub fd: OwnedFd,
    /// It was created in the control group of its request.
    pub is_grouped: bool,
}

/// The program, environment and identity of a new process.
pub struct ExecRequest<'a> {
    /// Candidate paths, tried in order like the search of PATH by a shell.
    pub programs: Vec<CString>,
    pub args: Vec<CString>,
    pub env: Vec<CString>,
    pub folder: CString,
    pub streams: Streams<'a>,
    /// Directory of the control group. The process is created in it, because moving it later waits for a kernel lock.
    pub group: Option<BorrowedFd<'a>>,
    /// User, group and supplementary groups; `None`: those of the agent.
    pub ids: Option<(u32, u32, Vec<u32>)>,
    pub restrictions: Restrictions,
    /// The mount namespace that the process enters; `None`: the agent's own.
    pub namespace: Option<BorrowedFd<'a>>,
    /// The user is the agent's own: no other user can stop the process before `execve`.
    pub is_own: bool,
    /// The pid file that the process writes itself, with its user's rights, right before `execve`.
    pub pid_file: Option<OwnPidFile>,
}

/// The descriptors that a new process keeps.
#[derive(Clone, Copy, Debug)]
pub struct Streams<'a> {
    pub input: BorrowedFd<'a>,
    /// Standard output and standard error.
    pub output: BorrowedFd<'a>,
    /// The file of the exit record.
    pub code: Option<BorrowedFd<'a>>,
}

/// Handle on a vfork launch, for the task that waits for it. The launching thread sleeps until `execve`.
#[derive(Default)]
pub struct VforkGuard {
    /// Written by the kernel when the process is created; 0 before.
    pidfd: AtomicI32,
    /// The launching thread woke up, and the descriptor may be closed.
    over: Mutex<bool>,
}

impl VforkGuard {
    fn begin(&self) {
        let mut over = self.over.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        (*over, _) = (false, self.pidfd.store(0, Ordering::Release));
    }

    /// Kills a process that has not reached `execve`, so that the launching thread wakes up.
    pub fn end(&self) {
        let over = self.over.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let pidfd = self.pidfd.load(Ordering::Acquire);
        if !*over && pidfd > 0 {
            // SAFETY: the launching thread owns the descriptor, and closes it only after it has set `over`.
            let pidfd = unsafe { BorrowedFd::borrow_raw(pidfd) };
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

impl ExecRequest<'_> {
    /// Creates the process, and returns it after `execve`. The process is claimed, so the reaper skips it.
    pub fn spawn(&self, vfork: &VforkGuard) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        let spawned = match self.is_own {
            false => self.create_by_launcher(),
            true => match self.vfork(vfork, CAN_LEAVE_TABLE.load(Ordering::Relaxed)) {
                Err((ExecStage::Table, _)) => {
                    CAN_LEAVE_TABLE.store(false, Ordering::Relaxed);
                    self.vfork(vfork, false)
                }
                spawned => spawned,
            },
        };
        spawned.map(|process| SpawnedProcess { is_grouped: self.group.is_some(), ..process })
    }

    /// Sleeps until the process has called `execve` or is gone.
    fn vfork(
        &self,
        vfork: &VforkGuard,
        shares_table: bool,
    ) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        let image = LaunchBlock::private(self, shares_table).map_err(|error| (ExecStage::Clone, error))?;
        vfork.begin();
        let files = if shares_table { libc::CLONE_FILES } else { 0 };
        let made = self.make(&image, libc::CLONE_VM | libc::CLONE_VFORK | files, vfork.pidfd.as_ptr());
        *vfork.over.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = true;
        let made = made.map_err(|error| (ExecStage::Clone, error))?;
        match image.failed() {
            None => Ok(made),
            Some((stage, error)) => {
                reap_failed(made.pid, &made.fd);
                Err((stage, io::Error::from_raw_os_error(error)))
            }
        }
    }

    fn make(&self, image: &LaunchBlock, flags: c_int, pidfd: *mut c_int) -> io::Result<SpawnedProcess> {
        // Until the process is claimed, the reaper would take it for an orphan.
        let starting = reaper::StartingProcess::begin();
        let group = self.group.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let words = CloneWords { pidfd, pid: starting.pid_at(), cleared: std::ptr::null_mut() };
        let pid = clone3::create(&image.memory(), flags, group, &words)?;
        worker_threads::keep_this_thread();
        // SAFETY: the kernel wrote this descriptor, and no other code owns it.
        Ok(SpawnedProcess::claim(pid, unsafe { OwnedFd::from_raw_fd(*pidfd) }))
    }

    /// Waits until the process has called `execve` or failed, at most [`EXEC_TIMEOUT`].
    fn create_by_launcher(&self) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        let clone_failed = |error| (ExecStage::Clone, error);
        let image = LaunchBlock::data(self).map_err(clone_failed)?;
        let request = CreateRequest {
            image: &image,
            streams: self.streams,
            group: self.group,
            namespace: self.namespace,
        };
        let created = match launcher::create(&request) {
            // The launcher was killed before it created the process.
            Err(LauncherError::Lost(_)) => launcher::create(&request),
            created => created,
        };
        let failed = |(stage, error)| (stage, io::Error::from_raw_os_error(error));
        created.map_err(|error| clone_failed(io::Error::other(error)))?.map_err(failed)
    }
}

impl SpawnedProcess {
    /// Claims a new child of the agent.
    fn claim(pid: u32, fd: OwnedFd) -> SpawnedProcess {
        reaper::spawned();
        let started = ProcessIdentity::of(pid).map(|identity| identity.started);
        if let Some(started) = started {
            reaper::claim(pid, started);
        }
        SpawnedProcess { pid, started, fd, is_grouped: false }
    }
}

/// Reaps a claimed process that failed or was killed. A process that does not end within 2 s is left to the reaper.
pub fn reap_failed(pid: u32, fd: &OwnedFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let identity = ProcessIdentity::of(pid);
    let time = Timespec { tv_sec: 2, tv_nsec: 0 };
    if poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&time)).is_ok_and(|ready| ready > 0) {
        let _ = waitid(WaitId::PidFd(std::os::fd::AsFd::as_fd(fd)), WaitIdOptions::EXITED);
    }
    if let Some(identity) = identity {
        reaper::release(pid, identity.started);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn both_modes_reach_execve() {
        let null = std::fs::File::options().read(true).write(true).open("/dev/null").expect("a file");
        let request = ExecRequest {
            programs: vec![c"/no/such/sh".to_owned(), c"/bin/sh".to_owned()],
            args: vec![c"sh".to_owned(), c"-c".to_owned(), c"exit $WITH".to_owned()],
            env: vec![c"WITH=7".to_owned()],
            folder: c"/".to_owned(),
            streams: Streams { input: null.as_fd(), output: null.as_fd(), code: None },
            group: None,
            ids: None,
            restrictions: Restrictions::default(),
            namespace: None,
            is_own: true,
            pid_file: None,
        };
        type Mode = fn(&LaunchBlock, c_int, &CloneWords) -> io::Result<u32>;
        let modes: [Mode; 2] = [
            |image, flags, words| clone3::clone(&image.memory(), flags, -1, words),
            |image, flags, words| clone3::clone_without_clone3(&image.memory(), flags, words),
        ];
        let shared = libc::CLONE_VM | libc::CLONE_VFORK;
        let sharings = [shared, shared | libc::CLONE_FILES, 0];
        for (mode, sharing) in modes.into_iter().flat_map(|mode| sharings.map(|sharing| (mode, sharing))) {
            let shares_table = sharing & libc::CLONE_FILES != 0;
            let (image, mut fd) = (LaunchBlock::private(&request, shares_table).expect("memory"), -1);
            let pid_word = AtomicI32::new(0);
            let words = CloneWords { pidfd: &mut fd, pid: pid_word.as_ptr(), cleared: std::ptr::null_mut() };
            let pid = mode(&image, sharing, &words).expect("a process");
            assert_eq!((image.failed(), pid_word.load(Ordering::Relaxed)), (None, pid.cast_signed()));
            // SAFETY: the kernel wrote this descriptor, and no other code owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            let status =
                waitid(WaitId::PidFd(fd.as_fd()), WaitIdOptions::EXITED).expect("a child").expect("its end");
            assert_eq!(status.exit_status(), Some(7));
        }
    }
}
