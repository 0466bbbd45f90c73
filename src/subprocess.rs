//! Subprocess: a command with input and output, bounded in time and memory.
//!
//! The command is a list of arguments, without a shell. It runs in a process group of its own, which is killed at the
//! time limit, when the output exceeds its limit, or when the command has ended.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// Running commands, by pid. `abide up` has an agent in the same process, which reaps orphans: it skips these.
static COMMANDS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn commands() -> MutexGuard<'static, BTreeSet<u32>> {
    COMMANDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this child is a command that [`run`] waits for.
pub fn is_command(pid: u32) -> bool {
    commands().contains(&pid)
}

/// Limits of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubprocessLimits {
    pub timeout: Duration,
    /// Maximum bytes of stdout.
    pub max_output: usize,
}

/// Maximum bytes of stderr that are kept. More is read and dropped.
const MAX_STDERR: usize = 4096;
/// Time for the readers to finish after the group was killed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Reason why a command has no output.
#[derive(Debug, thiserror::Error)]
pub enum SubprocessError {
    #[error("the command is empty")]
    Empty,
    #[error("cannot run {program}: {source}")]
    Start { program: String, source: io::Error },
    #[error("cannot wait for {program}: {source}")]
    Wait { program: String, source: io::Error },
    #[error("{program} took longer than {limit:?}, and was killed")]
    TimedOut { program: String, limit: Duration },
    #[error("{program} wrote more than {limit} bytes, and was killed")]
    TooMuchOutput { program: String, limit: usize },
    #[error("the command was killed because abide is stopping")]
    Cancelled,
    #[error("{program} {status}{stderr}")]
    Failed { program: String, status: String, stderr: String },
}

/// Runs a command to its end and returns its stdout. A dropped future ends the command.
pub async fn run(
    argv: Vec<String>,
    input: Vec<u8>,
    limits: SubprocessLimits,
) -> Result<Vec<u8>, SubprocessError> {
    let cancel = CancelOnDrop(Arc::default());
    let is_cancelled = Arc::clone(&cancel.0);
    let running = tokio::task::spawn_blocking(move || run_blocking(&argv, &input, limits, &is_cancelled));
    running.await.unwrap_or(Err(SubprocessError::Cancelled))
}

struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run_blocking(
    argv: &[String],
    input: &[u8],
    limits: SubprocessLimits,
    is_cancelled: &AtomicBool,
) -> Result<Vec<u8>, SubprocessError> {
    let (program, args) = argv.split_first().ok_or(SubprocessError::Empty)?;
    let named = || program.clone();
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let child = spawn(&mut command).map_err(|source| SubprocessError::Start { program: named(), source })?;
    let mut running = Running::new(child, input.to_vec(), limits.max_output);
    let has_ended = running.wait_until(Instant::now() + limits.timeout, is_cancelled);
    let status = running.kill();
    let status = match has_ended.and_then(|ended| Ok((ended, status?))) {
        Ok((true, status)) => status,
        Ok((false, _)) if running.is_flooded() => {
            return Err(SubprocessError::TooMuchOutput { program: named(), limit: limits.max_output });
        }
        Ok((false, _)) if is_cancelled.load(Ordering::Relaxed) => return Err(SubprocessError::Cancelled),
        Ok((false, _)) => return Err(SubprocessError::TimedOut { program: named(), limit: limits.timeout }),
        Err(source) => return Err(SubprocessError::Wait { program: named(), source }),
    };
    let (out, err) = running.output();
    // The command may have ended before its last output was read.
    if out.len() > limits.max_output {
        return Err(SubprocessError::TooMuchOutput { program: named(), limit: limits.max_output });
    }
    match status.success() {
        true => Ok(out),
        false => {
            let stderr = match String::from_utf8_lossy(&err).trim() {
                "" => String::new(),
                text => format!(": {}", text.lines().last().unwrap_or_default()),
            };
            Err(SubprocessError::Failed { program: named(), status: describe(status), stderr })
        }
    }
}

/// Starts a command and records its pid before a reaper can see that it ended.
fn spawn(command: &mut Command) -> io::Result<Child> {
    let mut commands = commands();
    let child = command.spawn()?;
    commands.insert(child.id());
    Ok(child)
}

fn describe(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("exited with {code}"),
        None => format!("ended with {status}"),
    }
}

/// A command with threads that write its input and read its output.
struct Running {
    child: Child,
    group: Option<Pid>,
    flooded: Arc<AtomicBool>,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
}

impl Running {
    fn new(mut child: Child, input: Vec<u8>, max_output: usize) -> Running {
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let Some(mut stdin) = child.stdin.take() {
            // A command that does not read its input closes the pipe.
            std::thread::spawn(move || drop(stdin.write_all(&input)));
        }
        let flooded = Arc::new(AtomicBool::new(false));
        let stdout = child.stdout.take().map(|pipe| {
            let flooded = Arc::clone(&flooded);
            std::thread::spawn(move || read_bounded(pipe, max_output, &flooded))
        });
        let stderr = child.stderr.take().map(|pipe| std::thread::spawn(move || read_end(pipe, MAX_STDERR)));
        Running { child, group, flooded, stdout, stderr }
    }

    fn is_flooded(&self) -> bool {
        self.flooded.load(Ordering::Relaxed)
    }

    /// Whether it has ended. `false`: it still runs at the deadline, or it wrote too much.
    fn wait_until(&self, deadline: Instant, is_cancelled: &AtomicBool) -> io::Result<bool> {
        let mut pause = Duration::from_millis(1);
        // It stays a zombie, so that its group cannot become one of other processes before it is killed.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        loop {
            let group = self.group.ok_or(io::ErrorKind::InvalidInput)?;
            if waitid(WaitId::Pid(group), options)?.is_some() {
                return Ok(true);
            }
            if self.is_flooded() || is_cancelled.load(Ordering::Relaxed) || Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Kills the group: also the descendants that hold the pipes open.
    fn kill(&mut self) -> io::Result<ExitStatus> {
        if let Some(group) = self.group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let status = self.child.wait();
        commands().remove(&self.child.id());
        status
    }

    /// A descendant that left the group may still hold a pipe open: its output is not waited for.
    fn output(&mut self) -> (Vec<u8>, Vec<u8>) {
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        let join = |reader: Option<JoinHandle<Vec<u8>>>| {
            let Some(reader) = reader else { return Vec::new() };
            while !reader.is_finished() {
                if Instant::now() >= deadline {
                    return Vec::new();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            reader.join().unwrap_or_default()
        };
        (join(self.stdout.take()), join(self.stderr.take()))
    }
}

/// Reads up to one byte more than the limit.
fn read_bounded(pipe: impl Read, limit: usize, flooded: &AtomicBool) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = pipe.take(limit as u64 + 1).read_to_end(&mut bytes);
    if bytes.len() > limit {
        flooded.store(true, Ordering::Relaxed);
    }
    bytes
}

/// Reads everything and keeps the last bytes.
fn read_end(mut pipe: impl Read, limit: usize) -> Vec<u8> {
    let (mut kept, mut part) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = pipe.read(&mut part) {
        kept.extend_from_slice(&part[..n]);
        if kept.len() > limit {
            kept.drain(..kept.len() - limit);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, input: &[u8], limits: SubprocessLimits) -> Result<String, String> {
        let argv = ["sh", "-c", script].map(str::to_owned);
        let out = run_blocking(&argv, input, limits, &AtomicBool::new(false));
        let out = out.map_err(|error| error.to_string())?;
        Ok(String::from_utf8(out).expect("UTF-8"))
    }

    const LIMITS: SubprocessLimits =
        SubprocessLimits { timeout: Duration::from_secs(20), max_output: 100_000 };

    #[test]
    fn a_command_reads_its_input_and_writes_its_output() {
        let input = vec![b'x'; 90_000];
        assert_eq!(shell("cat", &input, LIMITS).map(|out| out.len()), Ok(90_000));
        assert_eq!(shell("exec 0<&-; echo done", &input, LIMITS), Ok("done\n".to_owned()));
        assert_eq!(
            shell("echo first >&2; echo 'no such group' >&2; exit 3", b"", LIMITS),
            Err("sh exited with 3: no such group".to_owned())
        );
        let no_cancel = AtomicBool::new(false);
        let empty = run_blocking(&[], b"", LIMITS, &no_cancel);
        assert!(empty.is_err_and(|error| matches!(error, SubprocessError::Empty)));
        let missing = run_blocking(&["/does/not/exist".to_owned()], b"", LIMITS, &no_cancel);
        assert!(missing.is_err_and(|error| error.to_string().contains("cannot run /does/not/exist")));
    }

    #[test]
    fn a_command_is_bounded_in_time_and_output() {
        let quick = SubprocessLimits { timeout: Duration::from_millis(200), ..LIMITS };
        let begin = Instant::now();
        // The grandchild holds the pipes open.
        let error = shell("sleep 1000 & sleep 1000", b"", quick).expect_err("it hangs");
        assert!(error.starts_with("sh took longer than 200ms"), "{error}");
        let error = shell("yes", b"", LIMITS).expect_err("endless output");
        assert!(error.starts_with("sh wrote more than 100000 bytes"), "{error}");
        let cancelled = AtomicBool::new(true);
        let argv = ["sleep", "1000"].map(str::to_owned);
        let error = run_blocking(&argv, b"", LIMITS, &cancelled).expect_err("it is cancelled");
        assert!(matches!(error, SubprocessError::Cancelled));
        assert!(begin.elapsed() < Duration::from_secs(15));
    }
}
