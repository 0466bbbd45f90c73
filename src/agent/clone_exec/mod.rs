//! Process creation: clone and execve, with a user, a session and a control group, which posix_spawn cannot set.
//!
//! There are two modes. A process of the agent's own user shares the agent's memory until `execve`
//! (`CLONE_VM | CLONE_VFORK`): nothing is copied, and the calling thread sleeps until then. A process of another user is
//! forked: that user can stop the process before `execve`, so the agent must not wait for shared memory. A forked process
//! reports a failed step by a pipe that closes on `execve`, and is killed after [`EXEC_TIMEOUT`].
//!
//! In both modes all data is prepared before the clone; until `execve` the child makes system calls and nothing else. It
//! first closes every other descriptor, so that a stopped child holds no pipe of another launch.
//!
//! An agent of a thousand processes has a thousand pidfds. They have high numbers ([`held_descriptor`]): a child begins with
//! the agent's descriptor table and copies only the low part of it, since copying and closing each pidfd would take longer
//! than the rest of the launch.

mod child;
mod image;
mod restrict;
mod stage;

use std::ffi::{CString, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use self::child::{TABLE_COPIED, exec_child};
use self::image::Image;
pub use self::restrict::Restrictions;
pub use self::stage::ExecStage;
use super::process::ProcessIdentity;
use super::reaper;

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
}

/// The program, environment and identity of a new process.
pub struct ExecRequest<'a> {
    /// Candidate paths, tried in order like the search of PATH by a shell.
    pub programs: Vec<CString>,
    pub args: Vec<CString>,
    pub env: Vec<CString>,
    pub folder: CString,
    pub input: BorrowedFd<'a>,
    pub output: BorrowedFd<'a>,
    pub code: Option<BorrowedFd<'a>>,
    /// Directory of the control group. The process is created in it, because moving it later waits for a kernel lock.
    pub group: Option<BorrowedFd<'a>>,
    /// User, group and supplementary groups; `None`: those of the agent.
    pub ids: Option<(u32, u32, Vec<u32>)>,
    pub restrictions: Restrictions,
    /// The mount namespace that the process enters; `None`: the agent's own.
    pub namespace: Option<BorrowedFd<'a>>,
    /// The user is the agent's own: no other user can stop the process before `execve`.
    pub is_own: bool,
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
        let spawn = |shares_table: bool| match self.is_own {
            true => self.vfork(vfork, shares_table),
            false => self.fork(shares_table),
        };
        match spawn(CAN_LEAVE_TABLE.load(Ordering::Relaxed)) {
            Err((ExecStage::Table, _)) => {
                CAN_LEAVE_TABLE.store(false, Ordering::Relaxed);
                spawn(false)
            }
            spawned => spawned,
        }
    }

    /// Sleeps until the process has called `execve` or is gone.
    fn vfork(
        &self,
        vfork: &VforkGuard,
        shares_table: bool,
    ) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        let image = self.image(-1, shares_table)?;
        vfork.begin();
        let sharing = libc::CLONE_VM | libc::CLONE_VFORK | files_flag(shares_table);
        let made = self.make(&image, sharing, vfork.pidfd.as_ptr());
        *vfork.over.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = true;
        let made = made?;
        match image.failed() {
            None => Ok(made),
            Some((stage, error)) => {
                reap_failed(made.pid, &made.fd);
                Err((stage, io::Error::from_raw_os_error(error)))
            }
        }
    }

    /// Waits until the process has called `execve` or failed, at most [`EXEC_TIMEOUT`].
    fn fork(&self, shares_table: bool) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        let (report, status) = io::pipe().map_err(|error| (ExecStage::Descriptors, error))?;
        let image = self.image(status.as_raw_fd(), shares_table)?;
        let mut pidfd: c_int = 0;
        crate::malloc::exclude_heap_from_forks();
        let made = self.make(&image, files_flag(shares_table), &mut pidfd)?;
        // While the process shares the table, closing a descriptor here would close it there.
        let status = shares_table.then_some(status);
        let failed = match wait_for_report(&report, status, &made.fd) {
            Ok(None) => return Ok(made),
            Ok(Some(failed)) => failed,
            Err(error) => {
                let _ = pidfd_send_signal(&made.fd, Signal::KILL);
                (ExecStage::TimedOut, error)
            }
        };
        reap_failed(made.pid, &made.fd);
        Err(failed)
    }

    fn image(&self, status: RawFd, shares_table: bool) -> Result<Image, (ExecStage, io::Error)> {
        Image::of(self, status, shares_table).map_err(|error| (ExecStage::Clone, error))
    }

    fn make(
        &self,
        image: &Image,
        sharing: c_int,
        pidfd: *mut c_int,
    ) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        // Until the process is claimed, the reaper would take it for an orphan.
        let _guard = reaper::spawn_guard();
        let group = self.group.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut cloned = clone(image, sharing, pidfd, group);
        if cloned.is_err() && self.group.is_some() {
            // A control group that refuses the process does not prevent the launch.
            cloned = clone(image, sharing, pidfd, -1);
        }
        if cloned.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENOSYS)) {
            cloned = clone_without_clone3(image, sharing, pidfd);
        }
        let pid = cloned.map_err(|error| (ExecStage::Clone, error))?;
        reaper::spawned();
        let started = ProcessIdentity::of(pid).map(|identity| identity.started);
        if let Some(started) = started {
            reaper::claim(pid, started);
        }
        // SAFETY: the kernel wrote this descriptor, and no other code owns it.
        Ok(SpawnedProcess { pid, started, fd: unsafe { OwnedFd::from_raw_fd(*pidfd) } })
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

fn files_flag(shares_table: bool) -> c_int {
    if shares_table { libc::CLONE_FILES } else { 0 }
}

/// The failed step of a forked process; `None`: it called `execve` or was killed. An error: neither happened within
/// [`EXEC_TIMEOUT`]. `status`: the process's end of the pipe, which it needs until it has its own descriptor table.
fn wait_for_report(
    report: &io::PipeReader,
    mut status: Option<io::PipeWriter>,
    pidfd: &OwnedFd,
) -> io::Result<Option<(ExecStage, io::Error)>> {
    let until = std::time::Instant::now() + EXEC_TIMEOUT;
    let mut bytes = [0u8; 8];
    loop {
        // With its end open here, the pipe does not tell that the process is gone.
        let is_gone = match status {
            Some(_) => !wait_readable(report, Some(pidfd), until)?,
            None => !wait_readable(report, None, until)?,
        };
        let length = if is_gone { 0 } else { rustix::io::read(report, &mut bytes)? };
        let told = bytes[..length].strip_prefix(&[TABLE_COPIED]);
        match told.unwrap_or(&bytes[..length]) {
            [stage, errno @ ..] => {
                let errno = errno.try_into().map(c_int::from_ne_bytes).unwrap_or(libc::EIO);
                let error = io::Error::from_raw_os_error(errno);
                return Ok(Some((ExecStage::of_code(*stage), error)));
            }
            [] if told.is_some() => status = None,
            [] => return Ok(None),
        }
    }
}

/// Waits until the pipe can be read. False: the process ended, and wrote nothing.
fn wait_readable(
    report: &io::PipeReader,
    pidfd: Option<&OwnedFd>,
    until: std::time::Instant,
) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let ready = PollFlags::IN | PollFlags::HUP;
    let mut polled = vec![PollFd::new(report, PollFlags::IN)];
    polled.extend(pidfd.map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut polled, Some(&time)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(polled[0].revents().intersects(ready)),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// `struct clone_args` of the kernel.
#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Creates the process. With shared memory, waits until it has called `execve` or is gone.
fn clone(image: &Image, sharing: c_int, fd: *mut c_int, group: RawFd) -> io::Result<u32> {
    let (stack, stack_size) = image.stack();
    let flags = (sharing | libc::CLONE_PIDFD) as u64;
    let into = u64::try_from(group).ok();
    let args = CloneArgs {
        flags: flags | into.map_or(0, |_| CLONE_INTO_CGROUP),
        pidfd: fd as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack as u64,
        stack_size: stack_size as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: into.unwrap_or(0),
    };
    // SAFETY: with shared memory this thread waits (CLONE_VFORK), so the image outlives its use by the child; a forked
    // child has a copy. The child starts on its own stack and calls `exec_child`, which does not return, so it never
    // returns into this function.
    let result = with_signals_blocked(|| unsafe { clone3(&args, exec_child, image.context().cast()) });
    match u32::try_from(result) {
        Ok(pid) => Ok(pid),
        Err(_) => Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL))),
    }
}

/// `clone` for containers whose seccomp filter has no clone3. It cannot set a control group.
fn clone_without_clone3(image: &Image, sharing: c_int, fd: *mut c_int) -> io::Result<u32> {
    let (stack, stack_size) = image.stack();
    let flags = sharing | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: as for `clone`. The stack is passed by its upper end, which is aligned.
    let result = with_signals_blocked(|| unsafe {
        libc::clone(exec_child, stack.byte_add(stack_size), flags, image.context().cast(), fd)
    });
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Blocks all signals: no signal handler of the agent may run in a child that shares its memory.
fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the signal sets are local variables.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let done = work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
        done
    }
}

/// The clone3 system call. Returns the pid in the parent; the child calls `entry(arg)`.
///
/// SAFETY: `entry` must not return. The targets of `args` and `arg` must be valid until the child has called `execve` or is
/// gone.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(args: &CloneArgs, entry: extern "C" fn(*mut c_void) -> c_int, arg: *mut c_void) -> i64 {
    let result: i64;
    // SAFETY: the kernel clobbers rax, rcx and r11. The child has the parent's registers and its own aligned stack.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r8",
            "call r9",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") args,
            in("rsi") size_of::<CloneArgs>(),
            in("r8") arg,
            in("r9") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// The clone3 system call, as above.
///
/// SAFETY: as above.
#[cfg(target_arch = "aarch64")]
unsafe fn clone3(args: &CloneArgs, entry: extern "C" fn(*mut c_void) -> c_int, arg: *mut c_void) -> i64 {
    let result: i64;
    // SAFETY: the kernel changes x0. The child has the parent's registers and its own aligned stack.
    unsafe {
        std::arch::asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x2",
            "blr x3",
            "brk #1",
            "2:",
            inlateout("x0") args => result,
            in("x1") size_of::<CloneArgs>(),
            in("x2") arg,
            in("x3") entry,
            in("x8") libc::SYS_clone3,
            lateout("x30") _,
        );
    }
    result
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
            input: null.as_fd(),
            output: null.as_fd(),
            code: None,
            group: None,
            ids: None,
            restrictions: Restrictions::default(),
            namespace: None,
            is_own: true,
        };
        type Mode = fn(&Image, c_int, *mut c_int) -> io::Result<u32>;
        let modes: [Mode; 2] = [|image, sharing, fd| clone(image, sharing, fd, -1), clone_without_clone3];
        let shared = libc::CLONE_VM | libc::CLONE_VFORK;
        let sharings = [shared, shared | libc::CLONE_FILES, 0];
        for (mode, sharing) in modes.into_iter().flat_map(|mode| sharings.map(|sharing| (mode, sharing))) {
            let shares_table = sharing & libc::CLONE_FILES != 0;
            let (image, mut fd) = (Image::of(&request, -1, shares_table).expect("memory"), -1);
            mode(&image, sharing, &mut fd).expect("a process");
            assert_eq!(image.failed(), None);
            // SAFETY: the kernel wrote this descriptor, and no other code owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            let status =
                waitid(WaitId::PidFd(fd.as_fd()), WaitIdOptions::EXITED).expect("a child").expect("its end");
            assert_eq!(status.exit_status(), Some(7));
        }
    }

    #[test]
    fn a_forked_process_needs_nothing_of_the_heap() {
        // In its own process, because the heap stays excluded.
        if std::env::var_os("ABIDE_TEST_FORK").is_none() {
            let test = "agent::clone_exec::tests::a_forked_process_needs_nothing_of_the_heap";
            let program = std::env::current_exe().expect("a path");
            let mut again = std::process::Command::new(program);
            let out = again.args(["--exact", test]).env("ABIDE_TEST_FORK", "1").output().expect("it runs");
            let stdout = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && stdout.contains("1 passed"), "{stdout}");
            return;
        }
        crate::malloc::allocate_tightly();
        crate::malloc::fork_without_heap();
        let null = std::fs::File::options().read(true).write(true).open("/dev/null").expect("a file");
        let request = |folder: &std::ffi::CStr| ExecRequest {
            programs: vec![c"/no/such/sh".to_owned(), c"/bin/sh".to_owned()],
            args: vec![c"sh".to_owned(), c"-c".to_owned(), c"exit $WITH".to_owned()],
            env: vec![c"WITH=7".to_owned()],
            folder: folder.to_owned(),
            input: null.as_fd(),
            output: null.as_fd(),
            code: None,
            group: None,
            ids: None,
            restrictions: Restrictions::default(),
            namespace: None,
            is_own: false,
        };
        let spawned = request(c"/").spawn(&VforkGuard::default()).expect("a process");
        let status = waitid(WaitId::PidFd(spawned.fd.as_fd()), WaitIdOptions::EXITED)
            .expect("a child")
            .expect("its end");
        assert_eq!(status.exit_status(), Some(7));
        let failed = request(c"/no/such/folder").spawn(&VforkGuard::default()).err().expect("no such folder");
        assert_eq!((failed.0, failed.1.raw_os_error()), (ExecStage::Folder, Some(libc::ENOENT)));
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("maps");
        let heap = maps.lines().skip_while(|line| !line.ends_with("[heap]"));
        let flags = heap.into_iter().find(|line| line.starts_with("VmFlags:")).expect("flags");
        assert!(flags.split(' ').any(|flag| flag == "dc"), "the heap is copied: {flags}");
    }
}
