//! Launcher: a small process of the agent's own program that creates the processes of other users.
//!
//! The launcher ([`super::launcher_process`]) has one thread and a few pages of memory. It runs with the agent's rights and serves
//! one socket, which only the agent has. It waits for nothing but the next request: no user can delay it. A new process is a
//! child of the agent (`CLONE_PARENT`). The kernel writes its pid to memory of agent and launcher before it runs
//! ([`super::pid_words`]), so the agent knows whether a launcher that was killed created it. It runs its program only as a
//! child of the agent that requested it, so a request that is left when the agent is killed runs nothing, and the launch can
//! be repeated.
//!
//! The agent sleeps until the process has called `execve` or is gone, which closes a pipe. The first launch for another user
//! starts the launcher. If it is killed, the next launch starts another one. It ends with the agent, by the end of its socket.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::child;
use super::launch_block::{LaunchBlock, MAX_INLINE};
use super::pid_words::{LaunchPid, PidTable, PidWords};
use super::{
    EXEC_TIMEOUT, ExecRequest, ExecStage, Restrictions, SpawnedProcess, Streams, VforkGuard, reap_failed,
};
use crate::agent::reaper::{self, StartingPid, StartingProcess};

/// The argument that makes this program a launcher. Its standard input is the socket, and descriptor 3 the memory of the pids.
pub const LAUNCHER_ARGUMENT: &str = "agent-launcher";

/// Maximum wait until the launcher takes a request. It needs well below a millisecond.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of descriptors in one message.
pub const MAX_DESCRIPTORS: usize = 8;

/// Reason why the launcher created no process.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    #[error("cannot start the launcher: {0}")]
    Start(#[source] io::Error),
    #[error("cannot prepare the request to the launcher: {0}")]
    Request(#[source] io::Error),
    /// The launcher is gone or hangs, and has created no process for this launch.
    #[error("the launcher did not reply: {0}")]
    Lost(#[source] io::Error),
    #[error("{0}")]
    Create(#[source] io::Error),
}

/// A process to create: its data and descriptors.
pub struct CreateRequest<'a> {
    pub image: &'a LaunchBlock,
    pub streams: Streams<'a>,
    pub group: Option<BorrowedFd<'a>>,
    pub namespace: Option<BorrowedFd<'a>>,
}

/// The message of a request. The data of the image follows it, or is in a memory file. The descriptors travel with it: the
/// three that every process has, then those that the message announces, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateMessage {
    /// Length of the data.
    pub length: u64,
    /// The word for the pid.
    pub word: u32,
    pub has_file: bool,
    pub has_code: bool,
    pub has_group: bool,
    pub has_namespace: bool,
}

impl CreateMessage {
    pub const BYTES: usize = 16;

    fn encode(self) -> [u8; CreateMessage::BYTES] {
        let mut bytes = [0; CreateMessage::BYTES];
        bytes[..8].copy_from_slice(&self.length.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.word.to_ne_bytes());
        let announced = [self.has_file, self.has_code, self.has_group, self.has_namespace];
        bytes[12..].copy_from_slice(&announced.map(u8::from));
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<CreateMessage> {
        let (length, rest) = bytes.split_first_chunk()?;
        let (word, rest) = rest.split_first_chunk()?;
        let [has_file, has_code, has_group, has_namespace] = *rest else { return None };
        Some(CreateMessage {
            length: u64::from_ne_bytes(*length),
            word: u32::from_ne_bytes(*word),
            has_file: has_file == 1,
            has_code: has_code == 1,
            has_group: has_group == 1,
            has_namespace: has_namespace == 1,
        })
    }
}

/// A running launcher.
struct Launcher {
    socket: OwnedFd,
    process: SpawnedProcess,
    pids: Arc<PidTable>,
}

static LAUNCHER: Mutex<Option<Arc<Launcher>>> = Mutex::new(None);

/// Lets the launcher create a process, and waits until it has called `execve` or failed. The process is claimed. Blocks.
pub fn create(
    request: &CreateRequest<'_>,
) -> Result<Result<SpawnedProcess, child::FailedStep>, LauncherError> {
    begin(request)?.wait()
}

/// Sends a request to the launcher.
fn begin(request: &CreateRequest<'_>) -> Result<RequestedProcess, LauncherError> {
    let launcher = {
        let mut running = LAUNCHER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match &*running {
            Some(running) => Arc::clone(running),
            None => Arc::clone(running.insert(Arc::new(Launcher::start()?))),
        }
    };
    launcher.request(request).inspect_err(|error| {
        if matches!(error, LauncherError::Lost(_)) {
            launcher.end();
        }
    })
}

/// A process that the launcher was asked to create.
struct RequestedProcess {
    launcher: Arc<Launcher>,
    pid: Arc<LaunchPid>,
    /// Keeps the reaper from taking the process for an orphan.
    _starting: StartingProcess,
    /// Closed by `execve` or by the end of the process. It has the report of a failed step.
    report: OwnedFd,
}

impl RequestedProcess {
    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.pid.word().load(Ordering::Acquire))
    }

    /// The inner error: the process was created, and failed before `execve`, with the number of its error.
    fn wait(self) -> Result<Result<SpawnedProcess, child::FailedStep>, LauncherError> {
        let is_over = wait_for_hangup(&self.report, EXEC_TIMEOUT).map_err(LauncherError::Request)?;
        if !is_over && self.pid().is_none() {
            // Afterwards this launcher creates no process any more.
            self.launcher.end();
        }
        let failed = if is_over { read_report(&self.report) } else { None };
        let Some(pid) = self.pid() else {
            if let Some((_, error)) = failed {
                return Err(LauncherError::Create(io::Error::from_raw_os_error(error)));
            }
            self.launcher.end();
            return Err(LauncherError::Lost(io::ErrorKind::UnexpectedEof.into()));
        };
        // A child that was not reaped: the pid is still its own.
        let fd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| LauncherError::Create(error.into()))?;
        let process = SpawnedProcess::claim(pid.as_raw_nonzero().get().cast_unsigned(), fd);
        if is_over && failed.is_none() {
            return Ok(Ok(process));
        }
        let _ = pidfd_send_signal(&process.fd, Signal::KILL);
        reap_failed(process.pid, &process.fd);
        Ok(Err(failed.unwrap_or((ExecStage::TimedOut, libc::ETIMEDOUT))))
    }
}

/// Waits until the other end of a pipe is closed. False: it is still open after `time`.
fn wait_for_hangup(pipe: &OwnedFd, time: Duration) -> io::Result<bool> {
    let until = Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        // Without POLLIN: a report alone does not wake this thread.
        match poll(&mut [PollFd::new(pipe, PollFlags::empty())], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

/// The report in a closed pipe.
fn read_report(pipe: &OwnedFd) -> Option<child::FailedStep> {
    let mut bytes = [0; 8];
    let length = rustix::io::read(pipe, &mut bytes).unwrap_or(0);
    child::decode(&bytes[..length])
}

impl Launcher {
    fn start() -> Result<Launcher, LauncherError> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
        let start = |error: io::Error| LauncherError::Start(error);
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (socket, served) = pair.map_err(|error| start(error.into()))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(SEND_TIMEOUT))
            .map_err(|error| start(error.into()))?;
        let (words, file) = PidWords::create().map_err(start)?;
        let null = std::fs::File::options().write(true).open("/dev/null").map_err(start)?;
        let request = ExecRequest {
            programs: vec![c"/proc/self/exe".to_owned()],
            args: launcher_args(),
            env: launcher_env(),
            folder: c"/".to_owned(),
            streams: Streams { input: served.as_fd(), output: null.as_fd(), code: Some(file.as_fd()) },
            group: None,
            ids: None,
            restrictions: Restrictions::default(),
            namespace: None,
            is_own: true,
            pid_file: None,
        };
        let spawned = request.spawn(&VforkGuard::default());
        let process = spawned.map_err(|(_, error): (ExecStage, io::Error)| start(error))?;
        if let Some(started) = process.started {
            reaper::add_helper(process.pid, started);
        }
        Ok(Launcher { socket, process, pids: PidTable::new(words) })
    }

    fn request(self: &Arc<Launcher>, request: &CreateRequest<'_>) -> Result<RequestedProcess, LauncherError> {
        let prepare = |error: io::Error| LauncherError::Request(error);
        let data = request.image.content().ok_or_else(|| prepare(io::ErrorKind::InvalidInput.into()))?;
        let (file, sent) = match data.len() > MAX_INLINE {
            true => (Some(memory_file(data).map_err(prepare)?), &[][..]),
            false => (None, data),
        };
        let pid = Arc::new(self.pids.take().ok_or_else(|| prepare(io::ErrorKind::ResourceBusy.into()))?);
        let (report, status) = std::io::pipe().map_err(prepare)?;
        let Streams { input, output, code } = request.streams;
        let message = CreateMessage {
            length: data.len() as u64,
            word: pid.nth as u32,
            has_file: file.is_some(),
            has_code: code.is_some(),
            has_group: request.group.is_some(),
            has_namespace: request.namespace.is_some(),
        };
        let mut descriptors = vec![input, output, status.as_fd()];
        descriptors.extend(file.as_ref().map(AsFd::as_fd));
        descriptors.extend(code);
        descriptors.extend(request.group);
        descriptors.extend(request.namespace);
        let _starting = StartingProcess::of(pid.clone());
        send(&self.socket, [&message.encode(), sent], &descriptors).map_err(LauncherError::Lost)?;
        let report = report.into();
        Ok(RequestedProcess { launcher: Arc::clone(self), pid, _starting, report })
    }

    /// Ends a launcher that does not reply. It creates no process afterwards.
    fn end(self: &Arc<Launcher>) {
        let mut running = LAUNCHER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if running.take_if(|running| Arc::ptr_eq(running, self)).is_none() {
            return;
        }
        let SpawnedProcess { pid, started, fd, .. } = &self.process;
        let _ = pidfd_send_signal(fd, Signal::KILL);
        reap_failed(*pid, fd);
        if let Some(started) = started {
            reaper::remove_helper(*pid, *started);
        }
    }
}

/// A memory file with this content.
fn memory_file(data: &[u8]) -> io::Result<OwnedFd> {
    let mut file = std::fs::File::from(memfd_create(c"abide-launch", MemfdFlags::CLOEXEC)?);
    file.write_all(data)?;
    Ok(file.into())
}

/// Sends one message of two parts, with descriptors.
pub fn send(socket: &OwnedFd, parts: [&[u8]; 2], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        match rustix::net::sendmsg(socket, &parts.map(IoSlice::new), &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Receives one message of two parts, with its descriptors. The end of the socket is a message without bytes.
pub fn receive(socket: &OwnedFd, [first, second]: [&mut [u8]; 2]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(first), IoSliceMut::new(second)];
        match rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            descriptors.extend(more);
        }
    }
    Ok((received.bytes, descriptors))
}

#[cfg(not(test))]
fn launcher_args() -> Vec<std::ffi::CString> {
    [c"abide".to_owned()].into_iter().chain(std::ffi::CString::new(LAUNCHER_ARGUMENT)).collect()
}

#[cfg(not(test))]
fn launcher_env() -> Vec<std::ffi::CString> {
    Vec::new()
}

#[cfg(test)]
use tests::{launcher_args, launcher_env};

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    use std::ffi::{CStr, CString};

    /// The test program as a launcher: it runs only [`serves`].
    pub fn launcher_args() -> Vec<CString> {
        let test = c"agent::clone_exec::launcher::tests::serves";
        vec![c"test".to_owned(), c"--exact".to_owned(), test.to_owned(), c"--nocapture".to_owned()]
    }

    pub fn launcher_env() -> Vec<CString> {
        vec![c"ABIDE_TEST_LAUNCHER=1".to_owned()]
    }

    #[test]
    fn serves() {
        if std::env::var_os("ABIDE_TEST_LAUNCHER").is_some() {
            crate::agent::clone_exec::launcher_process::serve();
        }
    }

    fn request<'a>(null: &'a std::fs::File, folder: &CStr) -> ExecRequest<'a> {
        ExecRequest {
            programs: vec![c"/no/such/sh".to_owned(), c"/bin/sh".to_owned()],
            args: vec![c"sh".to_owned(), c"-c".to_owned(), c"exit $WITH".to_owned()],
            env: vec![c"WITH=7".to_owned()],
            folder: folder.to_owned(),
            streams: Streams { input: null.as_fd(), output: null.as_fd(), code: None },
            group: None,
            ids: None,
            restrictions: Restrictions::default(),
            namespace: None,
            is_own: false,
            pid_file: None,
        }
    }

    fn null() -> std::fs::File {
        std::fs::File::options().read(true).write(true).open("/dev/null").expect("a file")
    }

    fn exit_code(process: &SpawnedProcess) -> Option<i32> {
        let status = waitid(WaitId::PidFd(process.fd.as_fd()), WaitIdOptions::EXITED);
        status.expect("a child of this process").expect("its end").exit_status()
    }

    #[test]
    fn the_launcher_creates_children_of_this_process_and_a_killed_one_is_replaced() {
        let null = null();
        let spawn = |folder: &CStr| request(&null, folder).spawn(&VforkGuard::default());
        let launcher = || {
            let launcher = LAUNCHER.lock().expect("the launcher");
            launcher.as_ref().map(|one| one.process.pid).expect("a launcher")
        };
        assert_eq!(exit_code(&spawn(c"/").expect("a process")), Some(7));
        // An image that is too large for the request itself travels as a memory file.
        let mut large = request(&null, c"/");
        large.env.extend(CString::new(format!("LARGE={}", "x".repeat(100_000))));
        large.args[2] = c"exit $((${#LARGE} / 10000))".to_owned();
        assert_eq!(exit_code(&large.spawn(&VforkGuard::default()).expect("a process")), Some(10));
        assert_eq!(exit_code(&spawn(c"/").expect("a process")), Some(7));
        let failed = spawn(c"/no/such/folder").err().expect("no such folder");
        assert_eq!((failed.0, failed.1.raw_os_error()), (ExecStage::Folder, Some(libc::ENOENT)));
        let first = launcher();
        let pid = rustix::process::Pid::from_raw(first.cast_signed()).expect("a pid");
        rustix::process::kill_process(pid, Signal::KILL).expect("the launcher");
        assert_eq!(exit_code(&spawn(c"/").expect("a process")), Some(7));
        assert_ne!(launcher(), first);
    }

    #[test]
    fn a_request_of_an_agent_that_was_killed_runs_nothing() {
        let test = "agent::clone_exec::launcher::tests::a_request_of_an_agent_that_was_killed_runs_nothing";
        if let Some(folder) = std::env::var_os("ABIDE_TEST_KILLED_AGENT") {
            return be_a_killed_agent(&CString::new(folder.as_encoded_bytes()).expect("a path"));
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut agent = std::process::Command::new(std::env::current_exe().expect("a path"));
        agent.args(["--exact", test]).env("ABIDE_TEST_KILLED_AGENT", folder.path());
        let mut agent = agent.stdout(std::process::Stdio::piped()).spawn().expect("it runs");
        assert!(agent.wait().expect("its end").code().is_none(), "it kills itself");
        let launcher = std::fs::read_to_string(folder.path().join("launcher")).expect("a file");
        let pid = Pid::from_raw(launcher.parse().expect("a pid")).expect("a pid");
        let handle = pidfd_open(pid, PidfdFlags::empty()).expect("the launcher");
        pidfd_send_signal(&handle, Signal::CONT).expect("the launcher");
        // The request has this pipe: it closes when neither the launcher nor a process of it is left.
        let mut output = agent.stdout.take().expect("a pipe");
        std::io::copy(&mut output, &mut std::io::sink()).expect("a pipe");
        assert!(folder.path().join("first").exists(), "a launch before");
        assert!(!folder.path().join("second").exists());
    }

    /// Leaves a request to a stopped launcher.
    fn be_a_killed_agent(folder: &CStr) {
        let null = null();
        let touch = |name: &str| {
            let mut request = request(&null, folder);
            request.args[2] = CString::new(format!("touch {name}; exit 7")).expect("a command");
            request
        };
        assert_eq!(exit_code(&touch("first").spawn(&VforkGuard::default()).expect("a process")), Some(7));
        let launcher = LAUNCHER.lock().expect("the launcher").as_ref().map(|one| one.process.pid);
        let pid = Pid::from_raw(launcher.expect("a launcher").cast_signed()).expect("a pid");
        rustix::process::kill_process(pid, Signal::STOP).expect("the launcher");
        std::fs::write(folder.to_str().expect("a path").to_owned() + "/launcher", pid.to_string())
            .expect("a file");
        let (mut second, stdout) = (touch("second"), std::io::stdout());
        second.streams.output = stdout.as_fd();
        let image = LaunchBlock::data(&second).expect("memory");
        let request = CreateRequest { image: &image, streams: second.streams, group: None, namespace: None };
        let _requested = begin(&request).expect("a request");
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).expect("this process");
    }

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let message = CreateMessage {
            length: 70_000,
            word: 9,
            has_file: true,
            has_code: false,
            has_group: false,
            has_namespace: true,
        };
        assert_eq!(CreateMessage::decode(&message.encode()), Some(message));
        assert_eq!(CreateMessage::decode(&message.encode()[1..]), None);
    }
}
