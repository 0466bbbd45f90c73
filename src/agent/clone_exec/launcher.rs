//! Launcher: a small process of the agent's own program that forks the processes of other users.
//!
//! The launcher ([`super::launcher_process`]) has one thread and a few pages of memory, so a fork copies little. It runs with
//! the agent's rights and serves one socket, which only the agent has. It waits for nothing but the next request: no user
//! can delay it. A new process is a child of the agent (`CLONE_PARENT`) and does nothing until the agent permits it, so a
//! launch whose agent or launcher was killed before the permission has not run, and can be repeated.
//!
//! The first launch for another user starts the launcher. If it is killed, the next launch starts another one. It ends with
//! the agent, by the end of its socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::{Signal, pidfd_send_signal};

use super::image::{Image, ImageContent};
use super::{ExecRequest, ExecStage, Restrictions, SpawnedProcess, Streams, VforkGuard, reap_failed};
use crate::agent::reaper;

/// The argument that makes this program a launcher. Its standard input is the socket.
pub const LAUNCHER_ARGUMENT: &str = "agent-launcher";

/// Maximum duration of one fork by the launcher. It takes well below a millisecond.
const FORK_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of descriptors in one message.
pub const MAX_DESCRIPTORS: usize = 8;

/// Why the launcher created no process.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    #[error("cannot start the launcher: {0}")]
    Start(#[source] io::Error),
    #[error("cannot prepare the request to the launcher: {0}")]
    Request(#[source] io::Error),
    /// The launcher did not reply. It may have created a process, which gets no permission to run.
    #[error("the launcher did not reply: {0}")]
    Lost(#[source] io::Error),
    #[error("{0}")]
    Fork(#[source] io::Error),
}

/// A process to fork: its image and descriptors.
pub struct ForkRequest<'a> {
    pub image: &'a Image,
    pub streams: Streams<'a>,
    pub status: BorrowedFd<'a>,
    pub group: Option<BorrowedFd<'a>>,
    pub namespace: Option<BorrowedFd<'a>>,
}

/// The message of a request. The data of a small image follows it. The descriptors travel with it: the three that every
/// process has, then those that the message announces, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkMessage {
    pub address: u64,
    pub length: u64,
    /// The image is a memory file.
    pub has_file: bool,
    pub has_code: bool,
    pub has_group: bool,
    pub has_namespace: bool,
}

impl ForkMessage {
    pub const BYTES: usize = 20;

    fn encode(self) -> [u8; ForkMessage::BYTES] {
        let mut bytes = [0; ForkMessage::BYTES];
        bytes[..8].copy_from_slice(&self.address.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.length.to_ne_bytes());
        let announced = [self.has_file, self.has_code, self.has_group, self.has_namespace];
        bytes[16..].copy_from_slice(&announced.map(u8::from));
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<ForkMessage> {
        let (address, rest) = bytes.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let [has_file, has_code, has_group, has_namespace] = *rest else { return None };
        Some(ForkMessage {
            address: u64::from_ne_bytes(*address),
            length: u64::from_ne_bytes(*length),
            has_file: has_file == 1,
            has_code: has_code == 1,
            has_group: has_group == 1,
            has_namespace: has_namespace == 1,
        })
    }
}

/// The reply: a pid, whose pidfd travels with it, or the number of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkReply(pub Result<u32, i32>);

impl ForkReply {
    pub const BYTES: usize = 5;

    pub fn encode(self) -> [u8; ForkReply::BYTES] {
        let (kind, number) = match self.0 {
            Ok(pid) => (0, pid.to_ne_bytes()),
            Err(errno) => (1, errno.to_ne_bytes()),
        };
        let [one, two, three, four] = number;
        [kind, one, two, three, four]
    }

    fn decode(bytes: &[u8]) -> Option<ForkReply> {
        let (kind, number) = bytes.split_first()?;
        let number: [u8; 4] = number.try_into().ok()?;
        match kind {
            0 => Some(ForkReply(Ok(u32::from_ne_bytes(number)))),
            _ => Some(ForkReply(Err(i32::from_ne_bytes(number)))),
        }
    }
}

/// A running launcher.
struct Launcher {
    socket: OwnedFd,
    process: SpawnedProcess,
}

static LAUNCHER: Mutex<Option<Launcher>> = Mutex::new(None);

/// Lets the launcher fork a process. The process is claimed, and waits for the permission to run. Blocks.
pub fn fork(request: &ForkRequest<'_>) -> Result<SpawnedProcess, LauncherError> {
    let mut launcher = LAUNCHER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let running = match launcher.take() {
        Some(running) => running,
        None => Launcher::start()?,
    };
    let forked = running.fork(request);
    match forked {
        Err(LauncherError::Lost(_)) => running.end(),
        Ok(_) | Err(_) => *launcher = Some(running),
    }
    forked
}

impl Launcher {
    fn start() -> Result<Launcher, LauncherError> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let start = |error: io::Error| LauncherError::Start(error);
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (socket, served) = pair.map_err(|error| start(error.into()))?;
        let timeout = rustix::net::sockopt::Timeout::Recv;
        rustix::net::sockopt::set_socket_timeout(&socket, timeout, Some(FORK_TIMEOUT))
            .map_err(|error| start(error.into()))?;
        let null = std::fs::File::options().write(true).open("/dev/null").map_err(start)?;
        let args = launcher_args();
        let request = ExecRequest {
            programs: vec![c"/proc/self/exe".to_owned()],
            args,
            env: launcher_env(),
            folder: c"/".to_owned(),
            streams: Streams { input: served.as_fd(), output: null.as_fd(), code: None },
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
        Ok(Launcher { socket, process })
    }

    fn fork(&self, request: &ForkRequest<'_>) -> Result<SpawnedProcess, LauncherError> {
        let invalid = || LauncherError::Request(io::ErrorKind::InvalidInput.into());
        let (address, length, content) = request.image.share().ok_or_else(invalid)?;
        let (file, data) = match content {
            ImageContent::File(file) => (Some(file), &[][..]),
            ImageContent::Data(data) => (None, data),
        };
        let Streams { input, output, code } = request.streams;
        let message = ForkMessage {
            address: address as u64,
            length: length as u64,
            has_file: file.is_some(),
            has_code: code.is_some(),
            has_group: request.group.is_some(),
            has_namespace: request.namespace.is_some(),
        };
        let mut descriptors = vec![input, output, request.status];
        descriptors.extend(file);
        descriptors.extend(code);
        descriptors.extend(request.group);
        descriptors.extend(request.namespace);
        // Until the process is claimed, the reaper would take it for an orphan.
        let _guard = reaper::spawn_guard();
        send(&self.socket, [&message.encode(), data], &descriptors).map_err(LauncherError::Lost)?;
        let mut bytes = [0; ForkReply::BYTES];
        let (length, mut descriptors) =
            receive(&self.socket, [&mut bytes, &mut []]).map_err(LauncherError::Lost)?;
        let lost = || LauncherError::Lost(io::ErrorKind::UnexpectedEof.into());
        match ForkReply::decode(&bytes[..length]).ok_or_else(lost)? {
            ForkReply(Ok(pid)) => Ok(SpawnedProcess::claim(pid, descriptors.pop().ok_or_else(lost)?)),
            ForkReply(Err(errno)) => Err(LauncherError::Fork(io::Error::from_raw_os_error(errno))),
        }
    }

    /// Ends a launcher that did not reply.
    fn end(self) {
        let SpawnedProcess { pid, started, fd } = self.process;
        let _ = pidfd_send_signal(&fd, Signal::KILL);
        reap_failed(pid, &fd);
        if let Some(started) = started {
            reaper::remove_helper(pid, started);
        }
    }
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
    fn the_launcher_forks_children_of_this_process_and_a_killed_one_is_replaced() {
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
    fn without_permission_nothing_runs() {
        let (null, folder) = (null(), tempfile::tempdir().expect("a folder"));
        let path = CString::new(folder.path().display().to_string()).expect("a path");
        let mut request = request(&null, &path);
        request.args[2] = c"touch ran; exit 7".to_owned();
        let image = Image::shared(&request).expect("memory");
        let (process, report) = request.fork_by_launcher(&image).expect("a process");
        drop(report);
        assert_eq!(exit_code(&process), Some(127));
        assert!(!folder.path().join("ran").exists());
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let message = ForkMessage {
            address: 64 << 30,
            length: 70_000,
            has_file: true,
            has_code: false,
            has_group: false,
            has_namespace: true,
        };
        assert_eq!(ForkMessage::decode(&message.encode()), Some(message));
        assert_eq!(ForkMessage::decode(&message.encode()[1..]), None);
        for reply in [ForkReply(Ok(7)), ForkReply(Err(libc::EAGAIN))] {
            assert_eq!(ForkReply::decode(&reply.encode()), Some(reply));
        }
        assert_eq!(ForkReply::decode(&[]), None);
    }
}
