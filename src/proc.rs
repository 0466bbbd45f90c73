//! Kernel information from /proc: boot id, host name, and state of processes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::sync::LazyLock;

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

    /// The second field, a name in parentheses, may contain anything. Later fields are counted from the third.
    fn parse(line: &str) -> Option<ProcStat> {
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

/// Arguments of a process; empty if it has none, or does not exist.
pub fn arguments(pid: u32) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect()
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
    fn this_process_is_alive() {
        let stat = ProcStat::of(std::process::id()).expect("this process");
        assert!(stat.is_alive() && stat.resident_pages > 0 && pid_namespace() > 0 && !boot_id().is_empty());
    }
}
