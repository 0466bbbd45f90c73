//! Launcher process: receives images from the agent, and creates a process from each.
//!
//! It has no configuration, opens no file of others and reads nothing but its socket, `fs.suid_dumpable` and the memory limits of
//! control groups. See [`super::launcher`].

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::child::{self, reset_signals};
use super::clone3::{self, CloneWords};
use super::launch_block::MAX_IMAGE;
use super::launcher::{CreateMessage, LAUNCHER_ARGUMENT, receive};
use super::pid_words::PidWords;
use super::slot::{LaunchSlot, LaunchSlots};
use super::{EXIT_RECORD_FD, ExecStage};

/// Interval in which the data of new processes is cleared once they have called `execve`.
const CLEAR_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Serves as the launcher if this program was started as one, and does not return then.
pub fn serve_if_launcher() {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|first| first == LAUNCHER_ARGUMENT) && args.next().is_none() {
        serve();
    }
}

/// Serves the socket on standard input until the agent closes it or is gone.
pub fn serve() -> ! {
    // No other user may read this memory or trace this process, nor a process that it creates.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    // SAFETY: both descriptors are open, and this function is their only user until the process ends. No thread of this
    // process needs a signal action.
    let (socket, words) = unsafe {
        reset_signals();
        (OwnedFd::from_raw_fd(0), OwnedFd::from_raw_fd(EXIT_RECORD_FD))
    };
    let Ok(mut launcher) = LauncherState::new(&words) else { std::process::exit(1) };
    drop(words);
    loop {
        match launcher.serve_next(&socket) {
            Ok(()) => {}
            Err(_) => std::process::exit(0),
        }
    }
}

/// The state of a launcher.
struct LauncherState {
    /// The agent's pid: only its children run their programs.
    agent: c_int,
    pids: PidWords,
    slots: LaunchSlots,
    suid_dumpable: Option<File>,
}

/// The descriptors of a request.
struct Descriptors {
    input: OwnedFd,
    output: OwnedFd,
    status: OwnedFd,
    file: Option<File>,
    code: Option<OwnedFd>,
    group: Option<OwnedFd>,
    namespace: Option<OwnedFd>,
}

impl Descriptors {
    /// `None`: some are missing.
    fn of(message: &CreateMessage, received: Vec<OwnedFd>) -> Option<Descriptors> {
        let mut received = received.into_iter();
        let (input, output, status) = (received.next()?, received.next()?, received.next()?);
        let mut announced = |is_announced: bool| match is_announced {
            true => received.next().map(Some),
            false => Some(None),
        };
        let file = announced(message.has_file)?.map(File::from);
        let (code, group) = (announced(message.has_code)?, announced(message.has_group)?);
        Some(Descriptors {
            input,
            output,
            status,
            file,
            code,
            group,
            namespace: announced(message.has_namespace)?,
        })
    }
}

fn number(fd: Option<&OwnedFd>) -> c_int {
    fd.map_or(-1, AsRawFd::as_raw_fd)
}

impl LauncherState {
    fn new(words: &OwnedFd) -> io::Result<LauncherState> {
        let pids = PidWords::map(words.as_fd())?;
        pids.leave_out_of_forks()?;
        Ok(LauncherState {
            agent: rustix::process::Pid::as_raw(rustix::process::getppid()),
            pids,
            slots: LaunchSlots::default(),
            suid_dumpable: File::open("/proc/sys/fs/suid_dumpable").ok(),
        })
    }

    /// Serves one request. An error: the agent is gone. All descriptors of the request are closed afterwards, so that no
    /// later process gets them.
    fn serve_next(&mut self, socket: &OwnedFd) -> io::Result<()> {
        while self.slots.are_filled()
            && poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&CLEAR_INTERVAL)) == Ok(0)
        {
            self.slots.clear_free();
        }
        let mut bytes = [0; CreateMessage::BYTES];
        let at = self.slots.free()?;
        let slot = self.slots.slot(at);
        let (received, descriptors) = receive(socket, [&mut bytes, slot.space()])?;
        slot.set_filled(received.saturating_sub(CreateMessage::BYTES));
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // Without a message the pipe closes, and the agent starts another launcher.
        let message = CreateMessage::decode(&bytes[..received.min(CreateMessage::BYTES)]);
        let Some((message, descriptors)) =
            message.and_then(|message| Some((message, Descriptors::of(&message, descriptors)?)))
        else {
            return Ok(());
        };
        if let Err(error) = self.create(at, &message, &descriptors) {
            let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
            // An error: the agent is gone, which the next request shows.
            let _ = rustix::io::write(&descriptors.status, &child::encode((ExecStage::Clone, errno)));
        }
        Ok(())
    }

    /// Creates a process from the data in a slot.
    fn create(&mut self, at: usize, message: &CreateMessage, descriptors: &Descriptors) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let length = usize::try_from(message.length).ok().filter(|length| *length <= MAX_IMAGE);
        let length = length.ok_or_else(invalid)?;
        let at = match &descriptors.file {
            None => at,
            Some(file) => self.slots.large(length, file)?,
        };
        let may_share = self.may_share_memory();
        let slot = self.slots.slot(at);
        if slot.filled() != length {
            return Err(invalid());
        }
        let word = self.pids.word(message.word as usize).ok_or_else(invalid)?;
        // Also makes sure that the kernel can write it.
        word.store(0, Ordering::Release);
        let (pid, group) = (word.as_ptr(), number(descriptors.group.as_ref()));
        let words = |cleared: *mut c_int| CloneWords { pidfd: std::ptr::null_mut(), pid, cleared };
        let may_share = may_share && !has_memory_limit(descriptors.group.as_ref());
        if may_share && slot.context()?.restrictions.permit_shared_memory() {
            fill_in(slot, self.agent, descriptors)?;
            let flags = libc::CLONE_PARENT | libc::CLONE_VM;
            let created = clone3::create(&slot.memory(), flags, group, &words(slot.begin_use()));
            return created.map(drop).inspect_err(|_| slot.end_use());
        }
        // The copy of the process has no data of other launches.
        let mut copy = slot.copy_for_fork()?;
        fill_in(&mut copy, self.agent, descriptors)?;
        clone3::create(&copy.memory(), libc::CLONE_PARENT, group, &words(std::ptr::null_mut())).map(drop)
    }

    /// Whether memory that a process of another user shares stays unreadable for that user. The kernel sets the memory to this
    /// value when the process changes its user: with 1 that user may trace the process, with 2 its core dump has the memory.
    fn may_share_memory(&self) -> bool {
        let mut value = [0];
        let read = self.suid_dumpable.as_ref().map(|file| file.read_at(&mut value, 0));
        matches!(read, Some(Ok(1))) && value == *b"0"
    }
}

/// Whether a control group limits memory. A process that exceeds it is killed, with all processes that share its memory.
fn has_memory_limit(group: Option<&OwnedFd>) -> bool {
    let Some(group) = group else { return false };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = match openat(group, c"memory.max", flags, Mode::empty()) {
        Ok(file) => file,
        Err(error) => return error != Errno::NOENT,
    };
    let mut value = [0; 4];
    !matches!(rustix::io::read(&file, &mut value), Ok(4) if value == *b"max\n")
}

/// Fills in what only the launcher knows.
fn fill_in(slot: &mut LaunchSlot, agent: c_int, descriptors: &Descriptors) -> io::Result<()> {
    slot.relocate()?;
    let context = slot.context()?;
    (context.streams.input, context.streams.output) =
        (descriptors.input.as_raw_fd(), descriptors.output.as_raw_fd());
    context.streams.code = number(descriptors.code.as_ref());
    (context.status, context.creator.copied) = (descriptors.status.as_raw_fd(), -1);
    (context.creator.agent, context.creator.resets_signals) = (agent, false);
    context.restrictions.namespace = number(descriptors.namespace.as_ref());
    Ok(())
}
