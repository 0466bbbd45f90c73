//! Kernel information from /proc: boot id, host name, and state of processes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::failpoint;

/// Identity of the current boot; empty if the kernel has none.
pub fn boot_id() -> &'static str {
    static ID: LazyLock<String> = LazyLock::new(|| trimmed("/proc/sys/kernel/random/boot_id"));
    &ID
}

/// May change while this process runs.
pub fn host_name() -> String {
    trimmed("/proc/sys/kernel/hostname")
}

/// Inode of the PID namespace; 0: unknown.
pub fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// The text of a small file without surrounding white space; empty if it cannot be read.
pub fn trimmed(file: &str) -> String {
    std::fs::read_to_string(file).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Fields of /proc/PID/stat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcStat {
    pub state: char,
    pub parent: u32,
    pub session: u32,
    flags: u64,
    /// Start time in ticks since boot.
    pub started: u64,
    /// CPU time in user and kernel mode, in ticks.
    pub cpu_ticks: u64,
    /// The part of it in user mode.
    pub user_ticks: u64,
    /// The same of its reaped children.
    pub child_ticks: u64,
    pub threads: u32,
    /// Virtual memory in bytes.
    pub virtual_bytes: u64,
    /// Resident memory in pages.
    pub resident_pages: u64,
}

impl ProcStat {
    /// `None`: no process has this pid.
    pub fn of(pid: u32) -> Option<ProcStat> {
        // One read: the line is shorter than the buffer, and `read_to_string` would need several reads.
        let mut line = [0; 1024];
        let length =
            File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read(&mut line)).ok()?;
        // The name is bytes; the numbers after it are text.
        ProcStat::parse(&String::from_utf8_lossy(&line[..length]))
    }

    /// Parses a line of /proc/PID/stat. The second field, a name in parentheses, may contain anything. Later fields are
    /// counted from the third.
    pub fn parse(line: &str) -> Option<ProcStat> {
        let (_, rest) = line.rsplit_once(") ")?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        // The third of the following fields, the terminal's process group, may be -1.
        let session = fields.nth(1)?.parse().ok()?;
        let flags = fields.nth(2)?.parse().ok()?;
        let mut numbers = fields.map(|field| field.parse::<u64>());
        let (user, system) = (numbers.nth(4)?.ok()?, numbers.next()?.ok()?);
        let (child_user, child_system) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        // Priority and nice value are skipped: they may be negative.
        let threads = u32::try_from(numbers.nth(2)?.ok()?).ok()?;
        let started = numbers.nth(1)?.ok()?;
        let (virtual_bytes, resident_pages) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        let (cpu_ticks, user_ticks) = (user.saturating_add(system), user);
        let child_ticks = child_user.saturating_add(child_system);
        Some(ProcStat {
            state,
            parent,
            session,
            flags,
            started,
            cpu_ticks,
            user_ticks,
            child_ticks,
            threads,
            virtual_bytes,
            resident_pages,
        })
    }

    /// Whether the process was forked and has not called `execve`.
    pub fn is_before_exec(&self) -> bool {
        // PF_FORKNOEXEC of the kernel.
        self.flags & 0x40 != 0
    }

    /// A zombie is dead.
    pub fn is_alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }
}

/// Maximum bytes of the arguments or the environment of a process. The kernel passes at most 6 MiB to a program, but a
/// process may declare any part of its memory as its arguments or environment.
const MAX_STRINGS: u64 = 8 << 20;

/// Time after which a read of arguments or an environment counts as blocked.
pub const READ_STALL: Duration = Duration::from_secs(1);

/// The arguments and the environment of this process cannot be read now: an earlier read of them is blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the kernel blocks reads of process {0}")]
pub struct UnreadableProcess(pub u32);

/// A read of arguments or an environment that has not ended. The kernel takes a lock of the memory of the process for it, and
/// a process that hangs may hold that lock without a limit.
struct OpenRead {
    pid: u32,
    thread: ThreadId,
    since: Instant,
}

static OPEN_READS: Mutex<Vec<OpenRead>> = Mutex::new(Vec::new());

fn open_reads() -> MutexGuard<'static, Vec<OpenRead>> {
    OPEN_READS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Whether a read by this thread is blocked.
pub fn is_blocked(thread: ThreadId) -> bool {
    open_reads().iter().any(|read| read.thread == thread && read.since.elapsed() >= READ_STALL)
}

/// Ends the read of this thread.
struct ReadGuard(ThreadId);

impl ReadGuard {
    /// An error: another read of the process is blocked, and this one would be too.
    fn begin(pid: u32) -> Result<ReadGuard, UnreadableProcess> {
        let (thread, since, mut reads) = (std::thread::current().id(), Instant::now(), open_reads());
        if reads.iter().any(|read| read.pid == pid && read.since.elapsed() >= READ_STALL) {
            return Err(UnreadableProcess(pid));
        }
        reads.push(OpenRead { pid, thread, since });
        Ok(ReadGuard(thread))
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        open_reads().retain(|read| read.thread != self.0);
    }
}

/// Arguments or environment of a process. The process controls both: no entry proves anything alone.
pub struct ProcessStrings(Vec<u8>);

impl ProcessStrings {
    /// Empty if the process has no arguments or too many, or does not exist. Can block.
    pub fn arguments(pid: u32) -> Result<ProcessStrings, UnreadableProcess> {
        ProcessStrings::read(pid, "cmdline")
    }

    /// Empty if the process has no environment or too large a one, or does not exist. Can block.
    pub fn environment(pid: u32) -> Result<ProcessStrings, UnreadableProcess> {
        ProcessStrings::read(pid, "environ")
    }

    fn read(pid: u32, file: &str) -> Result<ProcessStrings, UnreadableProcess> {
        let _read = ReadGuard::begin(pid)?;
        failpoint::block_read(pid);
        let mut bytes = Vec::new();
        let read = File::open(format!("/proc/{pid}/{file}"))
            .and_then(|file| file.take(MAX_STRINGS + 1).read_to_end(&mut bytes));
        Ok(match read {
            Ok(length) if length as u64 <= MAX_STRINGS => ProcessStrings(bytes),
            _ => ProcessStrings(Vec::new()),
        })
    }

    /// The strings, without the zero bytes that end them.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split_inclusive(|byte| *byte == 0).map(|one| one.strip_suffix(&[0]).unwrap_or(one))
    }

    /// The value of a variable; `None`: unset, not text, or longer than `max` bytes.
    pub fn variable(&self, name: &str, max: usize) -> Option<&str> {
        let mut values = self.iter().filter_map(|one| one.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        let value = values.next().filter(|value| value.len() <= max)?;
        std::str::from_utf8(value).ok()
    }
}

/// The pids of all processes of this host.
pub fn pids() -> Vec<u32> {
    let Ok(folder) = std::fs::read_dir("/proc") else { return Vec::new() };
    folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_fields_follow_the_last_parenthesis() {
        let line = "7 (a) b (x) S 4 7 7 0 -1 4194560 190 0 0 0 11 22 4 5 20 -5 3 0 8612 3497984 451 18446744073709551615 1 1";
        let stat = ProcStat::parse(line).expect("a line of the kernel");
        assert_eq!((stat.state, stat.parent, stat.started), ('S', 4, 8612));
        assert_eq!((stat.cpu_ticks, stat.resident_pages), (33, 451));
        assert_eq!((stat.user_ticks, stat.threads, stat.virtual_bytes), (11, 3, 3_497_984));
        assert_eq!(stat.child_ticks, 9);
        assert_eq!(ProcStat::parse("7 (a) S 4"), None);
    }

    #[test]
    fn strings_end_with_a_zero_byte() {
        let strings = ProcessStrings(b"A=1\0\0AB=two\0A=3\0LAST=\xff".to_vec());
        let all: Vec<&[u8]> = strings.iter().collect();
        assert_eq!(all, [&b"A=1"[..], b"", b"AB=two", b"A=3", b"LAST=\xff"]);
        assert_eq!((strings.variable("A", 9), strings.variable("AB", 3)), (Some("1"), Some("two")));
        assert_eq!(
            [strings.variable("AB", 2), strings.variable("LAST", 9), strings.variable("B", 9)],
            [None; 3]
        );
        let own = ProcessStrings::arguments(std::process::id()).expect("no read is blocked");
        assert!(own.iter().next().is_some());
    }

    #[test]
    fn a_process_with_a_blocked_read_is_not_read_again() {
        let (pid, thread) = (std::process::id(), std::thread::current().id());
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("it starts");
        let first = ReadGuard::begin(child.id()).expect("no read is blocked");
        assert!(ReadGuard::begin(child.id()).is_ok() && !is_blocked(thread), "the first read may still end");
        drop(first);
        open_reads().push(OpenRead { pid: child.id(), thread, since: Instant::now() - READ_STALL });
        assert!(is_blocked(thread));
        let refused = ProcessStrings::environment(child.id()).err();
        assert_eq!(refused, Some(UnreadableProcess(child.id())));
        let other = std::thread::spawn(move || ProcessStrings::environment(pid).is_ok());
        assert!(other.join().expect("it ends"), "other processes are read");
        open_reads().retain(|read| read.thread != thread);
        assert!(!is_blocked(thread) && ProcessStrings::environment(child.id()).is_ok());
        let _ = (child.kill(), child.wait());
    }

    #[test]
    fn this_process_is_alive() {
        let stat = ProcStat::of(std::process::id()).expect("this process");
        assert!(stat.is_alive() && stat.resident_pages > 0 && pid_namespace() > 0 && !boot_id().is_empty());
    }
}
