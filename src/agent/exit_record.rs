//! Exit records: the exit code of a command or run, written by its own shell, so that it survives a kill of the agent.
//!
//! A record is a file in the agent's folder. The recording shell writes its own pid before the command starts, and the exit
//! code after the command ended; the command itself has no descriptor of the file. The next agent reads whether the
//! command began, still runs, or ended, and its code. Records are not synced to disk: they are proof within one boot only.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::proc_scan;
use super::process::{ProcessHandle, ProcessIdentity, boot_id};
use super::process_table::{ProcessTable, ScannedProcess};

/// The descriptor of the record in the recording shell.
const DESCRIPTOR: i32 = super::clone_exec::EXIT_RECORD_FD;

/// Arguments of the recording shell, which writes its own pid, runs the command and writes the exit code.
pub fn recording_shell_args(command: &str) -> Vec<String> {
    // The command runs in a second shell without the record: no text of the command is parsed by the recording shell, which
    // keeps the descriptor while it waits.
    let script = r#"echo pid $$ >&3; (exec /bin/sh -c "$1") 3>&-; code=$?; echo $code >&3; exit $code"#;
    ["sh", "-c", script, "sh", command].map(str::to_owned).to_vec()
}

/// All records of an agent.
#[derive(Clone, Debug)]
pub struct ExitRecords(PathBuf);

/// The content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitRecord {
    /// No launch created the record.
    Missing,
    /// The record exists, and its shell has not started the command.
    Empty,
    /// The command began. The recording shell has this pid.
    Begun(u32),
    Ended(i32),
    /// The record exists but cannot be read: the command may have begun.
    Unreadable,
}

/// Maximum bytes of a record that are read. The user of the shell can write anything to its descriptor.
const MAX_RECORD_BYTES: u64 = 256;

impl ExitRecords {
    pub fn in_folder(folder: &Path) -> io::Result<ExitRecords> {
        let path = folder.join("exits");
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        Ok(ExitRecords(path))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.0.join(id)
    }

    /// Creates an empty record.
    pub fn create(&self, id: &str) -> Result<File, ExitRecordError> {
        let path = self.path(id);
        let _ = std::fs::remove_file(&path);
        let file = File::options().append(true).create_new(true).mode(0o600).open(&path);
        file.map_err(|source| ExitRecordError::Create { path, source })
    }

    pub fn read(&self, id: &str) -> ExitRecord {
        let mut bytes = Vec::new();
        let read =
            File::open(self.path(id)).and_then(|file| file.take(MAX_RECORD_BYTES).read_to_end(&mut bytes));
        match read {
            Ok(_) => parse(&String::from_utf8_lossy(&bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => ExitRecord::Missing,
            Err(_) => ExitRecord::Unreadable,
        }
    }

    pub fn code(&self, id: &str) -> Option<i32> {
        match self.read(id) {
            ExitRecord::Ended(code) => Some(code),
            ExitRecord::Missing | ExitRecord::Empty | ExitRecord::Begun(_) | ExitRecord::Unreadable => None,
        }
    }

    /// The recording shell, if it still runs. Its descriptor is the proof: only that shell has this file open there.
    pub fn shell(&self, id: &str) -> Option<ProcessHandle> {
        let ExitRecord::Begun(pid) = self.read(id) else { return None };
        let handle = ProcessHandle::open(&ProcessIdentity::of(pid)?)?;
        let descriptor = std::fs::metadata(format!("/proc/{pid}/fd/{DESCRIPTOR}")).ok()?;
        let record = std::fs::metadata(self.path(id)).ok()?;
        ((descriptor.dev(), descriptor.ino()) == (record.dev(), record.ino())).then_some(handle)
    }

    /// Whether a process has the record open, so that the command may still begin: a child of a killed agent has it open
    /// before it executes the recording shell, and a slow file system can delay that. Opens no file of another process. True
    /// also if the processes of this host are unknown.
    pub async fn is_open(&self, id: &str) -> bool {
        let (records, id) = (self.clone(), id.to_owned());
        proc_scan::run(move || records.has_opener(&id)).await.unwrap_or(true)
    }

    fn has_opener(&self, id: &str) -> bool {
        let (Ok(record), Ok(processes)) = (self.path(id).canonicalize(), std::fs::read_dir("/proc")) else {
            return false;
        };
        let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        let open = processes.flatten().filter(|entry| is_process(&entry.file_name()));
        let open = open.filter_map(|entry| std::fs::read_dir(entry.path().join("fd")).ok());
        open.flat_map(|files| files.flatten())
            .any(|file| std::fs::read_link(file.path()).is_ok_and(|target| target == record))
    }

    pub fn remove(&self, id: &str) {
        let _ = std::fs::remove_file(self.path(id));
    }

    /// Removes the records that no instance refers to any more.
    pub fn remove_unused(&self, in_use: impl Fn(&str) -> bool) {
        let Ok(folder) = std::fs::read_dir(&self.0) else { return };
        for entry in folder.flatten() {
            if entry.file_name().to_str().is_some_and(|id| !in_use(id)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Parses a record. One of an earlier version has only the code and no pid.
fn parse(text: &str) -> ExitRecord {
    let complete = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    complete.fold(ExitRecord::Empty, |record, line| match line.strip_prefix("pid ") {
        Some(pid) => pid.trim().parse().map_or(record, ExitRecord::Begun),
        None => line.trim().parse().map_or(record, ExitRecord::Ended),
    })
}

/// The record id of one command of an operation: stable over restarts of the agent, different after a boot.
pub fn command_id(op_id: &str, command: &str) -> String {
    format!("command-{}-{command}", boot_scoped_id(op_id))
}

fn boot_scoped_id(name: &str) -> String {
    blake3::hash(format!("{} {name}", boot_id()).as_bytes()).to_hex()[..32].to_owned()
}

/// The record id of a daemon's start_cmd. The record of a run is a different one, and has the exit code of the process.
pub fn start_id(launch_id: &str) -> String {
    format!("start-{}", boot_scoped_id(launch_id))
}

/// The record id of the hook before a launch that no operation requested.
pub fn hook_id(launch_id: &str) -> String {
    format!("hook-{}", boot_scoped_id(launch_id))
}

/// The record id of the `after_start` of a relaunch.
pub fn after_start_id(launch_id: &str) -> String {
    hook_id(&format!("{launch_id} after_start"))
}

/// The launch id of the check commands of a process. They have no record.
pub fn probe_id(main: &ProcessIdentity) -> String {
    format!("probe-{}", boot_scoped_id(&format!("{} {}", main.pid, main.started)))
}

/// Whether a launch id is that of a command, and not of the process of an instance.
pub fn is_command_id(launch_id: &str) -> bool {
    ["command-", "start-", "hook-", "probe-"].iter().any(|kind| launch_id.starts_with(kind))
}

/// Reason why the exit record of a command cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExitRecordError {
    #[error("cannot create the exit record {}: {source}", path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("an earlier launch of this command neither began nor ended")]
    Stuck,
    #[error("cannot read the exit record {id} of this command")]
    Unreadable { id: String },
    #[error(
        "outcome unknown: the command and the agent were killed before the exit code was recorded; it is not run again"
    )]
    OutcomeUnknown,
}

/// Waits until a launched shell has written its pid. `Empty`: no shell was launched.
///
/// A shell that was launched right before the agent was killed may not have written its first line yet; its environment
/// identifies it. Before `execve` the open record identifies it.
pub async fn wait_for_record(records: &ExitRecords, id: &str) -> Result<ExitRecord, ExitRecordError> {
    const MAX_WAIT: Duration = Duration::from_secs(5);
    let begun = tokio::time::Instant::now();
    let mut may_begin = true;
    loop {
        let record = records.read(id);
        if record != ExitRecord::Empty || !may_begin {
            return Ok(record);
        }
        if begun.elapsed() > MAX_WAIT {
            return Err(ExitRecordError::Stuck);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        may_begin = is_in_any_environment(id).await || records.is_open(id).await;
    }
}

/// Waits for the processes of a command whose recording shell was killed, at most `time`. `false`: some are still alive.
///
/// They are in the session of the shell. A daemon that the command started has left it, and is not waited for. A process of
/// that session that cannot be read may belong to the command.
pub async fn wait_for_orphans(id: &str, shell: u32, time: Duration) -> bool {
    const INTERVAL: Duration = Duration::from_millis(200);
    let begun = tokio::time::Instant::now();
    let is_orphan = |process: &ScannedProcess| {
        let may_have_record = process.is_unreadable() || process.record() == Some(id);
        process.stat.session == shell && process.stat.is_alive() && may_have_record
    };
    let has_orphan = |table: &ProcessTable| table.iter().any(|(_, process)| is_orphan(process));
    while ProcessTable::current().await.map_or(true, |table| has_orphan(&table)) {
        if begun.elapsed() > time {
            return false;
        }
        tokio::time::sleep(INTERVAL).await;
    }
    true
}

/// The environment variable with the record id of a recorded command.
pub const RECORD_VARIABLE: &str = "ABIDE_RECORD";

/// Whether the environment of a process contains the record id. A process that cannot be read has the record open
/// ([`ExitRecords::is_open`]) if it runs the command.
async fn is_in_any_environment(id: &str) -> bool {
    let has_record = |table: &ProcessTable| table.iter().any(|(_, process)| process.record() == Some(id));
    ProcessTable::current().await.map_or(true, |table| has_record(&table))
}

/// Kills a recording shell and its process group.
pub fn kill_group(shell: &ProcessHandle) {
    if let Some(pid) = i32::try_from(shell.identity.pid).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
    }
    let _ = shell.signal(rustix::process::Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_line_by_line() {
        for (text, record) in [
            ("", ExitRecord::Empty),
            ("pid 1", ExitRecord::Empty),
            ("pid 17\n", ExitRecord::Begun(17)),
            ("pid 17\n2", ExitRecord::Begun(17)),
            ("pid 17\n2\n", ExitRecord::Ended(2)),
            ("137\n", ExitRecord::Ended(137)),
            ("nonsense\n", ExitRecord::Empty),
        ] {
            assert_eq!(parse(text), record, "{text:?}");
        }
    }

    #[tokio::test]
    async fn a_command_whose_shell_is_still_to_come_is_waited_for() {
        use std::io::Write;
        let folder = tempfile::tempdir().expect("a folder");
        let records = ExitRecords::in_folder(folder.path()).expect("a folder");
        drop(records.create("one").expect("a record"));
        let empty = wait_for_record(&records, "one").await.expect("a record");
        assert_eq!(empty, ExitRecord::Empty, "no process has it open");
        let mut file = records.create("one").expect("a record");
        let later = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            file.write_all(b"pid 17\n0\n").expect("it is written");
        };
        let ended = tokio::join!(wait_for_record(&records, "one"), later).0.expect("a record");
        assert_eq!(ended, ExitRecord::Ended(0));
    }

    #[test]
    fn a_shell_records_its_command() {
        let folder = tempfile::tempdir().expect("a folder");
        let records = ExitRecords::in_folder(folder.path()).expect("a folder");
        let path = records.path("one");
        assert_eq!(records.read("one"), ExitRecord::Missing);
        // Text that would close a parenthesis or a quote of the recording shell stays the command's own.
        for command in ["exit 9", ":\n)\necho 1 >&3; exit 9\n(", "echo '\"' \"$1\" >&3; exit 9"] {
            let _ = std::fs::remove_file(&path);
            let words: Vec<String> = recording_shell_args(command);
            let outer = format!("exec 3>> {}; exec \"$0\" \"$@\"", path.display());
            let mut shell = std::process::Command::new("sh");
            let status = shell.arg("-c").arg(outer).args(words).stderr(std::process::Stdio::null()).status();
            let code = status.expect("a shell").code().expect("a code");
            assert_eq!(records.read("one"), ExitRecord::Ended(code), "{command:?}");
            assert_ne!(code, 0, "{command:?}");
        }
        std::fs::File::options()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(20 << 30))
            .expect("a file");
        assert!(
            matches!(records.read("one"), ExitRecord::Ended(_)),
            "a huge record is read at its beginning"
        );
    }
}
