//! Child side of a launch: the steps between clone and execve.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::RawFd;

use super::own_pid_file::ChildPidFile;
use super::restrict::Restrictions;
use super::syscall::{call, exit};
use super::{EXIT_RECORD_FD, ExecStage};

/// The descriptor by which a process of the launcher reports a failed step. It closes on `execve`.
const STATUS_FD: RawFd = 4;
/// The descriptor of the mount namespace until the process has entered it.
const NAMESPACE_FD: RawFd = 5;

/// The step of a launch that failed, and the number of its error.
pub type FailedStep = (ExecStage, c_int);

/// Input of the new process. Plain data: the child reads it in a copy of its creator's memory, or in that memory itself.
pub struct ChildContext {
    /// Each list ends with a null pointer.
    pub programs: *const *const c_char,
    pub args: *const *const c_char,
    pub env: *const *const c_char,
    /// Offset and number of all pointers of the lists, in the image.
    pub lists: (usize, usize),
    pub folder: *const c_char,
    pub streams: ChildStreams,
    /// Pipe for the report of a process of the launcher; -1: the process reports in `failed` alone.
    pub status: RawFd,
    pub creator: ChildCreator,
    pub ids: Option<(u32, u32, *const u32, usize)>,
    pub restrictions: Restrictions,
    /// The pid file that the process writes.
    pub pid_file: Option<ChildPidFile>,
    pub failed: Option<FailedStep>,
}

/// Relation of a process to its creator, the agent or the launcher.
pub struct ChildCreator {
    /// The process shares the agent's descriptor table, and copies only the descriptors below this one; -1: it has a copy
    /// of the whole table.
    pub copied: RawFd,
    /// The agent, as the parent that a process of the launcher needs to run its program; 0: not checked.
    pub agent: c_int,
    /// The creator has signal actions, which the process must not run.
    pub resets_signals: bool,
}

/// The numbers of the [`Streams`](super::Streams) in this process; -1: none.
pub struct ChildStreams {
    pub input: RawFd,
    pub output: RawFd,
    pub code: RawFd,
}

impl ChildContext {
    /// Moves all pointers by a number of bytes. `lists`: all pointers of the lists, in one range.
    ///
    /// SAFETY: the range must be valid, and no other code may use it.
    pub unsafe fn relocate(&mut self, by: isize, lists: &mut [*const c_char]) {
        let moved = |text: *const c_char| if text.is_null() { text } else { text.wrapping_byte_offset(by) };
        lists.iter_mut().for_each(|text| *text = moved(*text));
        for list in [&mut self.programs, &mut self.args, &mut self.env] {
            *list = list.wrapping_byte_offset(by);
        }
        self.folder = moved(self.folder);
        self.ids = self.ids.map(|(user, group, at, count)| (user, group, at.wrapping_byte_offset(by), count));
        self.pid_file = self.pid_file.map(|file| ChildPidFile {
            folder: moved(file.folder),
            name: moved(file.name),
            temporary: moved(file.temporary),
            existing: file.existing,
            follows_links: file.follows_links,
        });
    }
}

/// Entry point of the new process. It has one thread and its own signal actions, and leaves the descriptor table that it
/// may share with the agent in its first step; its memory may be the agent's or the launcher's.
pub extern "C" fn exec_child(arg: *mut c_void) -> c_int {
    // SAFETY: `clone` passes a `ChildContext` that its creator does not touch until this process has called `execve` or is
    // gone. The memory may be shared, and with it all state of libc: this process makes system calls without libc, allocates
    // nothing, takes no lock and reads no heap memory. Users and groups are set for this process alone: libc would signal
    // the other threads of this memory, which belong to another process.
    unsafe {
        let context = &mut *arg.cast::<ChildContext>();
        let failed = match prepare(context) {
            Err(failed) => failed,
            Ok(()) => {
                let error = execute(context);
                context.pid_file.iter().for_each(|file| file.remove());
                (ExecStage::Program, error)
            }
        };
        report(context, failed);
        exit(127)
    }
}

/// Executes the first program that exists. Returns the number of the error.
///
/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn execute(context: &ChildContext) -> c_int {
    let (args, env) = (context.args as usize, context.env as usize);
    let (mut error, mut program) = (libc::ENOENT, context.programs);
    // SAFETY: the lists are valid, and end with a null pointer.
    unsafe {
        while !(*program).is_null() {
            let why = call(libc::SYS_execve, [*program as usize, args, env]).err().unwrap_or(0);
            program = program.add(1);
            // The next directory of PATH may have the program. A file that exists but cannot be executed is the better
            // error than a missing one.
            if why != libc::ENOENT && why != libc::ENOTDIR {
                error = why;
            }
        }
    }
    error
}

/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn report(context: &mut ChildContext, failed: FailedStep) {
    context.failed = Some(failed);
    if let Ok(status) = usize::try_from(context.status) {
        let bytes = encode(failed);
        // SAFETY: writes a local buffer to the status pipe, by its current number.
        let _ = unsafe { call(libc::SYS_write, [status, bytes.as_ptr() as usize, bytes.len()]) };
    }
}

/// The bytes of a report.
pub fn encode((stage, error): FailedStep) -> [u8; 5] {
    let [one, two, three, four] = error.to_ne_bytes();
    [stage.code(), one, two, three, four]
}

/// The failed step in a report; `None`: it is empty.
pub fn decode(report: &[u8]) -> Option<FailedStep> {
    let [stage, errno @ ..] = report else { return None };
    let errno = errno.try_into().map(c_int::from_ne_bytes).unwrap_or(libc::EIO);
    Some((ExecStage::of_code(*stage), errno))
}

/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn prepare(context: &mut ChildContext) -> Result<(), FailedStep> {
    let at = |stage: ExecStage| move |error: c_int| (stage, error);
    // SAFETY: system calls on this process alone; the pointers of the context are valid until `execve`.
    unsafe {
        if context.creator.copied >= 0 {
            copy_descriptors(context)?;
        }
        if context.creator.resets_signals {
            reset_signals();
        }
        call(libc::SYS_setsid, []).map_err(at(ExecStage::Session))?;
        install_descriptors(context).map_err(at(ExecStage::Descriptors))?;
        context.restrictions.apply_as_agent()?;
        if let Some((user, group, groups, count)) = context.ids {
            leave_session_keyring();
            let (user, group) = (user as usize, group as usize);
            call(libc::SYS_setgroups, [count, groups as usize]).map_err(at(ExecStage::User))?;
            call(libc::SYS_setresgid, [group; 3]).map_err(at(ExecStage::User))?;
            call(libc::SYS_setresuid, [user; 3]).map_err(at(ExecStage::User))?;
        }
        context.restrictions.apply_as_user()?;
        if context.status >= 0 {
            // The user must not read this memory. `execve` resets this.
            let _ = call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as usize, 0, 0, 0, 0]);
        }
        // After the switch of the user: the folder is entered with the user's rights.
        call(libc::SYS_chdir, [context.folder as usize]).map_err(at(ExecStage::Folder))?;
        require_agent(context);
        if let Some(file) = &context.pid_file {
            file.write().map_err(at(ExecStage::PidFile))?;
            require_agent(context);
        }
        let none = 0u64;
        let unblock = [libc::SIG_SETMASK as usize, &raw const none as usize, 0, size_of::<u64>()];
        call(libc::SYS_rt_sigprocmask, unblock).map(drop).map_err(at(ExecStage::Session))
    }
}

/// Ends a process of the launcher whose agent is gone: the request may have waited in the launcher while the agent was
/// killed. The next agent repeats the launch, unless it finds this process.
///
/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn require_agent(context: &ChildContext) {
    // SAFETY: the call changes nothing.
    if context.creator.agent != 0
        && unsafe { call(libc::SYS_getppid, []) } != Ok(context.creator.agent as usize)
    {
        exit(127);
    }
}

/// Sets the default action of every signal.
///
/// SAFETY: no other thread may share the signal actions of this process and depend on them.
pub unsafe fn reset_signals() {
    // All zero is the default action.
    let default = [0usize; 4];
    for signal in 1..=64 {
        // SAFETY: the kernel reads a local variable. It refuses SIGKILL and SIGSTOP, which have no other action.
        let _ = unsafe { call(libc::SYS_rt_sigaction, [signal, default.as_ptr() as usize, 0, 8]) };
    }
}

/// Leaves the session keyring of the agent: every process in it can read the keys of the others, whatever their user.
/// As root, so that the new keyring counts against the quota of root. Where the kernel refuses the call, it refuses it
/// to the new process as well.
///
/// SAFETY: may only be called by `exec_child`.
unsafe fn leave_session_keyring() {
    const KEYCTL_JOIN_SESSION_KEYRING: usize = 1;
    // SAFETY: a system call on this process alone; a null name makes a keyring without one.
    let _ = unsafe { call(libc::SYS_keyctl, [KEYCTL_JOIN_SESSION_KEYRING, 0]) };
}

/// Leaves the agent's descriptor table before any descriptor is changed.
///
/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn copy_descriptors(context: &ChildContext) -> Result<(), FailedStep> {
    // SAFETY: system calls on this process alone.
    unsafe {
        let unshare = libc::CLOSE_RANGE_UNSHARE as usize;
        call(libc::SYS_close_range, [context.creator.copied as usize, c_int::MAX as usize, unshare])
            .or_else(|_| call(libc::SYS_unshare, [libc::CLONE_FILES as usize]))
            .map(drop)
            .map_err(|error| (ExecStage::Table, error))
    }
}

/// Moves descriptors to their numbers and closes all others: a slow child must not hold descriptors of another launch.
///
/// SAFETY: may only be called by `exec_child`, with its context.
unsafe fn install_descriptors(context: &mut ChildContext) -> Result<(), c_int> {
    const ABOVE: usize = 16;
    // SAFETY: system calls on this process's own descriptor table.
    unsafe {
        // Moves the sources above the target numbers, so that no copy overwrites one.
        let away = |fd: RawFd| match usize::try_from(fd) {
            Err(_) => Ok(-1),
            Ok(fd) => {
                call(libc::SYS_fcntl, [fd, libc::F_DUPFD_CLOEXEC as usize, ABOVE]).map(|fd| fd as RawFd)
            }
        };
        let close = |fd: RawFd| {
            let _ = call(libc::SYS_close, [fd as usize]);
        };
        context.status = away(context.status)?;
        let (code, namespace) = (away(context.streams.code)?, away(context.restrictions.namespace)?);
        copy(context.streams.input, 0, 0)?;
        copy(context.streams.output, 1, 0)?;
        copy(context.streams.output, 2, 0)?;
        match code {
            ..0 => close(EXIT_RECORD_FD),
            code => drop(copy(code, EXIT_RECORD_FD, 0)?),
        }
        match context.status {
            ..0 => close(STATUS_FD),
            status => context.status = copy(status, STATUS_FD, libc::O_CLOEXEC)?,
        }
        match namespace {
            ..0 => close(NAMESPACE_FD),
            fd => context.restrictions.namespace = copy(fd, NAMESPACE_FD, libc::O_CLOEXEC)?,
        }
        if call(libc::SYS_close_range, [NAMESPACE_FD as usize + 1, c_int::MAX as usize, 0]).is_err() {
            // Kernels before 5.9 have no close_range. Descriptors above the limit close on `execve`.
            (NAMESPACE_FD + 1..OLD_DESCRIPTORS).for_each(close);
        }
    }
    Ok(())
}

/// Copies a descriptor to a number.
///
/// SAFETY: may only be called by `exec_child`.
unsafe fn copy(fd: RawFd, to: RawFd, flags: c_int) -> Result<RawFd, c_int> {
    if fd == to {
        return Ok(to);
    }
    // SAFETY: a system call on this process's own descriptor table.
    unsafe { call(libc::SYS_dup3, [fd as usize, to as usize, flags as usize]).map(|_| to) }
}

/// Upper bound of the descriptors that are closed one by one without close_range.
const OLD_DESCRIPTORS: c_int = 65_536;
