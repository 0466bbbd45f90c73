//! Launch mark: a resource limit that every process of a launch inherits, as proof of its descent.
//!
//! Without a control group, a process may leave its parent, its session and its environment. The kernel copies resource
//! limits at `fork` and keeps them over `execve`. A launch without a control group therefore gets a limit of real-time cpu
//! time (`RLIMIT_RTTIME`) whose number is derived from the launch id. The limit is above 100,000 years, so it limits nothing.
//!
//! The mark is not secret: every user can read the limits of a process, and set the same number for own processes. It
//! proves nothing to grant rights; it only decides which processes of the account are ended.

use super::environment::LAUNCH_ID_VARIABLE;

/// The resource whose limit is the mark.
pub const RESOURCE: usize = libc::RLIMIT_RTTIME as usize;

/// Lowest number of a mark, in microseconds.
const LOWEST: u64 = 1 << 62;

/// The mark of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchMark(u64);

impl LaunchMark {
    pub fn of(launch_id: &str) -> LaunchMark {
        let hash = blake3::hash(launch_id.as_bytes());
        let number = hash.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        LaunchMark(LOWEST | number >> 2)
    }

    /// The mark of a launch with these variables; `None`: they name no launch.
    pub fn of_variables(variables: &[(String, String)]) -> Option<LaunchMark> {
        let (_, launch_id) = variables.iter().find(|(name, _)| name == LAUNCH_ID_VARIABLE)?;
        (!launch_id.is_empty()).then(|| LaunchMark::of(launch_id))
    }

    /// The limit that a marked process has.
    pub fn limit(self) -> u64 {
        self.0
    }

    /// The mark of a process; `None`: it has none.
    pub fn on(pid: u32) -> Option<LaunchMark> {
        hard_limit(pid).filter(|limit| (LOWEST..LOWEST * 2).contains(limit)).map(LaunchMark)
    }

    /// Whether a process has inherited the mark.
    pub fn is_on(self, pid: u32) -> bool {
        hard_limit(pid) == Some(self.0)
    }
}

/// The hard limit of real-time cpu time of a process.
fn hard_limit(pid: u32) -> Option<u64> {
    let (mut limit, new) = ([0u64; 2], std::ptr::null::<u64>());
    let pid_number = libc::pid_t::try_from(pid).ok().filter(|pid| *pid > 0)?;
    // SAFETY: the kernel writes soft and hard limit, 16 bytes, into a local variable.
    match unsafe { libc::syscall(libc::SYS_prlimit64, pid_number, RESOURCE, new, limit.as_mut_ptr()) } {
        0 => Some(limit[1]),
        // The call needs the same user or a capability; the file needs neither.
        _ if std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) => read_hard_limit(pid),
        _ => None,
    }
}

fn read_hard_limit(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let values = text.lines().find_map(|line| line.strip_prefix("Max realtime timeout"))?;
    values.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_far_beyond_any_use_and_differs_per_launch() {
        let (one, other) = (LaunchMark::of("one"), LaunchMark::of("other"));
        assert_ne!(one, other);
        assert!(one.limit() >= LOWEST && one.limit() < u64::MAX);
        let variables =
            |id: &str| vec![("A".to_owned(), "x".to_owned()), (LAUNCH_ID_VARIABLE.to_owned(), id.to_owned())];
        assert_eq!(LaunchMark::of_variables(&variables("one")), Some(one));
        assert_eq!(LaunchMark::of_variables(&variables("")), None);
        assert_eq!(LaunchMark::of_variables(&[]), None);
    }

    /// A plain directory refuses the process, as a group at its limit of processes does.
    #[tokio::test]
    async fn a_process_that_its_control_group_refuses_has_the_mark() {
        use crate::agent::account::Account;
        use crate::agent::cgroup::Cgroup;
        use crate::agent::sandbox::LaunchSandbox;
        use crate::agent::spawn::{Launch, Sink};
        use crate::agent::user_files::{Rights, UserPermits};
        use std::sync::Arc;

        let folder = tempfile::tempdir().expect("a folder");
        let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).expect("users").expect("a name").name;
        let account = Account::named(&me).expect("an account");
        let launch = Launch {
            command: "/bin/sleep 100".to_owned(),
            folder: "/".into(),
            rights: Rights::new(account, Arc::new(UserPermits::default()), Arc::new(|_| false)),
            env: vec![(LAUNCH_ID_VARIABLE.to_owned(), "refused".to_owned())],
            output: Sink::Nowhere,
            record: None,
            pid_file: None,
            foreign: None,
            group: Some(Cgroup::at(&folder.path().display().to_string())),
            sandbox: LaunchSandbox::default(),
        };
        let process = launch.spawn().await.expect("it starts without the group");
        assert!(LaunchMark::of("refused").is_on(process.identity.pid));
        process.signal(rustix::process::Signal::KILL).expect("it runs");
        process.wait_exit().await;
    }

    #[test]
    fn both_ways_to_read_a_limit_agree() {
        let own = std::process::id();
        let unlimited = |limit: Option<u64>| limit.filter(|limit| *limit != u64::MAX);
        assert_eq!(unlimited(hard_limit(own)), read_hard_limit(own));
        assert_eq!(hard_limit(u32::MAX), None);
    }
}
