//! Restrictions that a new process applies to itself between clone and execve.
//!
//! One plain value holds all of them, without pointers, so that it is valid in a copy of the agent's memory wherever the
//! process is created. A restriction that cannot be applied ends the process, and is reported with its field.

use std::ffi::c_int;
use std::os::fd::RawFd;

use super::ExecStage;
use super::child::FailedStep;
use super::syscall::call;
use crate::agent::launch_mark::{self, LaunchMark};

/// Restrictions of a new process. The default restricts nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restrictions {
    /// The mount namespace that the process enters; -1: the agent's own.
    pub namespace: RawFd,
    /// Soft and hard limit by the number of the resource.
    pub limits: [Option<(u64, u64)>; 16],
    pub oom_score_adj: Option<i32>,
    pub nice: Option<i32>,
    /// The capabilities that stay in the bounding set, as a bit mask.
    pub bounding: Option<u64>,
    pub umask: u32,
    pub no_new_privs: bool,
    /// The launch mark. It restricts nothing.
    pub mark: Option<LaunchMark>,
}

/// The umask of a process whose spec sets none.
pub const DEFAULT_UMASK: u32 = 0o022;

impl Default for Restrictions {
    fn default() -> Restrictions {
        Restrictions {
            namespace: -1,
            limits: [None; 16],
            oom_score_adj: None,
            nice: None,
            bounding: None,
            umask: DEFAULT_UMASK,
            no_new_privs: false,
            mark: None,
        }
    }
}

/// Highest number that a capability can have.
const MAX_CAPABILITY: u32 = 63;

impl Restrictions {
    /// The same with this limit of open files, unless it sets one.
    pub fn with_file_limit(mut self, limit: Option<(u64, u64)>) -> Restrictions {
        let set = &mut self.limits[libc::RLIMIT_NOFILE as usize];
        *set = set.or(limit);
        self
    }

    /// The same with this mark, unless a limit of the spec takes its place.
    pub fn with_mark(mut self, mark: Option<LaunchMark>) -> Restrictions {
        self.mark = mark.filter(|_| self.limits[launch_mark::RESOURCE].is_none());
        self
    }

    /// Whether a file that the process creates before `execve` differs from one without restrictions.
    pub fn affect_files(&self) -> bool {
        self.namespace >= 0 || self.limits.iter().any(Option::is_some) || self.umask != DEFAULT_UMASK
    }

    /// Whether a process with these restrictions can share the launcher's memory. The kernel sets the out-of-memory score of all
    /// processes with the same memory.
    pub fn permit_shared_memory(&self) -> bool {
        self.oom_score_adj.is_none()
    }

    /// Applies the restrictions that need the agent's rights: before the change of the user.
    ///
    /// SAFETY: may only be called by a new process before `execve`, with its own descriptor table.
    pub unsafe fn apply_as_agent(&self) -> Result<(), FailedStep> {
        // SAFETY: system calls on this process alone, with local buffers.
        unsafe {
            // Opens a file of /proc: before the mount namespace is entered, and before a limit of descriptors.
            if let Some(score) = self.oom_score_adj {
                write_oom_score_adj(score).map_err(at(ExecStage::OomScoreAdj))?;
            }
            if let Ok(namespace) = usize::try_from(self.namespace) {
                let entered = call(libc::SYS_setns, [namespace, libc::CLONE_NEWNS as usize]);
                entered.map_err(at(ExecStage::MountNamespace))?;
            }
            for (resource, limit) in self.limits.iter().enumerate() {
                let Some((soft, hard)) = *limit else { continue };
                let limit = [soft, hard];
                let set = call(libc::SYS_prlimit64, [0, resource, limit.as_ptr() as usize, 0]);
                set.map_err(at(ExecStage::Ulimit(resource as u8)))?;
            }
            if let Some(mark) = self.mark {
                // Without the right to set it, the launch has no mark: nothing depends on it but the end of its tree.
                let limit = [mark.limit(); 2];
                let _ = call(libc::SYS_prlimit64, [0, launch_mark::RESOURCE, limit.as_ptr() as usize, 0]);
            }
            if let Some(nice) = self.nice {
                let set = call(libc::SYS_setpriority, [libc::PRIO_PROCESS as usize, 0, nice as usize]);
                set.map_err(at(ExecStage::Nice))?;
            }
            if let Some(bounding) = self.bounding {
                drop_capabilities(bounding).map_err(at(ExecStage::Capabilities))?;
            }
        }
        Ok(())
    }

    /// Applies the rest: after the change of the user.
    ///
    /// SAFETY: as above.
    pub unsafe fn apply_as_user(&self) -> Result<(), FailedStep> {
        // SAFETY: system calls on this process alone.
        unsafe {
            let _ = call(libc::SYS_umask, [self.umask as usize]);
            if self.no_new_privs {
                prctl([libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0]).map_err(at(ExecStage::NoNewPrivs))?;
            }
        }
        Ok(())
    }
}

fn at(stage: ExecStage) -> impl Fn(c_int) -> FailedStep {
    move |error| (stage, error)
}

/// SAFETY: as for [`call`].
unsafe fn prctl(args: [usize; 5]) -> Result<usize, c_int> {
    // SAFETY: as promised by the caller.
    unsafe { call(libc::SYS_prctl, args) }
}

/// Drops the capabilities outside the mask from the bounding set and from the inheritable set.
///
/// SAFETY: as for `apply_as_agent`.
unsafe fn drop_capabilities(bounding: u64) -> Result<(), c_int> {
    // SAFETY: system calls on this process alone.
    unsafe {
        for capability in 0..=MAX_CAPABILITY {
            // An error above the last capability of this kernel.
            let read = prctl([libc::PR_CAPBSET_READ as usize, capability as usize, 0, 0, 0]);
            if read.is_ok_and(|is_present| is_present > 0) && bounding & 1 << capability == 0 {
                prctl([libc::PR_CAPBSET_DROP as usize, capability as usize, 0, 0, 0])?;
            }
        }
        // Fails on kernels without ambient capabilities, where none can be set.
        let _ = prctl([libc::PR_CAP_AMBIENT as usize, libc::PR_CAP_AMBIENT_CLEAR_ALL as usize, 0, 0, 0]);
    }
    clear_inheritable()
}

/// `struct __user_cap_header_struct` and `struct __user_cap_data_struct` of the kernel.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilityData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// An inheritable capability survives `execve` although the bounding set excludes it.
fn clear_inheritable() -> Result<(), c_int> {
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = CapabilityHeader { version: VERSION_3, pid: 0 };
    let mut data = [CapabilityData::default(); 2];
    // SAFETY: the buffers are local variables of the size that version 3 has.
    unsafe {
        call(libc::SYS_capget, [&raw mut header as usize, data.as_mut_ptr() as usize])?;
        if data.iter().all(|part| part.inheritable == 0) {
            return Ok(());
        }
        data.iter_mut().for_each(|part| part.inheritable = 0);
        call(libc::SYS_capset, [&raw mut header as usize, data.as_ptr() as usize]).map(drop)
    }
}

/// SAFETY: as for `apply_as_agent`.
unsafe fn write_oom_score_adj(score: i32) -> Result<(), c_int> {
    let mut text = [0u8; 8];
    let length = write_decimal(score, &mut text);
    let (here, path) = (libc::AT_FDCWD as usize, c"/proc/self/oom_score_adj".as_ptr() as usize);
    let flags = (libc::O_WRONLY | libc::O_CLOEXEC) as usize;
    // SAFETY: system calls on this process alone, with local buffers.
    unsafe {
        let file = call(libc::SYS_openat, [here, path, flags, 0])?;
        let written = call(libc::SYS_write, [file, text.as_ptr() as usize, length]);
        let _ = call(libc::SYS_close, [file]);
        written.map(drop)
    }
}

/// Writes a number of at most 7 digits, without allocating. Returns the length.
fn write_decimal(number: i32, text: &mut [u8; 8]) -> usize {
    let (mut digits, mut left, mut count) = ([0u8; 8], number.unsigned_abs().min(9_999_999), 0);
    loop {
        (digits[count], left, count) = (b'0' + (left % 10) as u8, left / 10, count + 1);
        if left == 0 {
            break;
        }
    }
    let sign = usize::from(number < 0);
    if number < 0 {
        text[0] = b'-';
    }
    for nth in 0..count {
        text[sign + nth] = digits[count - 1 - nth];
    }
    sign + count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_in_decimal() {
        for (number, expected) in [(0, "0"), (7, "7"), (-1000, "-1000"), (1000, "1000"), (-20, "-20")] {
            let mut text = [0u8; 8];
            let length = write_decimal(number, &mut text);
            assert_eq!(std::str::from_utf8(&text[..length]), Ok(expected));
        }
    }
}
