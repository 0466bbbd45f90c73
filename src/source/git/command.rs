//! Git command: `git` without prompts, foreign code, or unbounded time, memory and disk space.
//!
//! [`Program::remote`] contacts the server, with the user's configuration for credentials and keys.
//! [`Program::local`] works on the mirror and reads only our configuration. Neither prompts, runs hooks, collects
//! garbage automatically, or uses protocols that start programs. A command that exceeds its time limit, or the limit of
//! its messages, is killed with its process group. A fetched pack is at most [`GitCommand::max_pack`] long.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::address::{Address, is_loopback, masked};
use super::version::{self, VersionError};
use crate::retry_delay::RetryDelay;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, setrlimit};

/// Time limit of commands on our own mirror.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time between SIGTERM, on which git removes its lock files, and SIGKILL.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// Maximum length of git's messages. A server can send text without end.
const MAX_STDERR_BYTES: u64 = 1 << 20;
/// Maximum length of a quoted message of git.
const MAX_STDERR_CHARS: usize = 600;
/// Allowed protocols. `ext`, `fd` and other installed helpers run programs or use our descriptors.
pub const PROTOCOLS: [&str; 5] = ["file", "git", "http", "https", "ssh"];
/// Environment variables about the connection, which are passed on; every other `GIT_…` is removed.
const PASSED_ENV_PREFIXES: [&str; 4] = ["GIT_CONFIG_", "GIT_SSH", "GIT_SSL_", "GIT_HTTP_"];
const PASSED_ENV: [&str; 2] = ["GIT_EXEC_PATH", "GIT_PROXY_COMMAND"];

/// Settings of every command, whatever the user's configuration says.
const CONFIG: [&str; 16] = [
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.pager=cat",
    "credential.interactive=false",
    "fetch.recurseSubmodules=false",
    "fetch.writeCommitGraph=false",
    "gc.auto=0",
    "gc.autoDetach=false",
    "init.defaultBranch=none",
    "maintenance.auto=false",
    "protocol.ext.allow=never",
    "protocol.fd.allow=never",
    "submodule.recurse=false",
    // Credentials and trust are for the host that the user named.
    "http.followRedirects=false",
    // An idle connection is closed before the time limit.
    "http.lowSpeedLimit=1",
    "http.lowSpeedTime=60",
];

pub struct GitCommand {
    /// The bare repository.
    pub mirror: PathBuf,
    /// Time limit of commands that contact the server.
    pub timeout: Duration,
    /// Maximum size in bytes of a file that such a command writes.
    pub max_pack: u64,
    pub stop: Arc<AtomicBool>,
}

/// Reason why a command has no result.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Version(#[from] VersionError),
    #[error("cannot share a lock: {0}")]
    ShareLock(#[source] io::Error),
    #[error("cannot run {name}: {source}")]
    Run { name: String, source: io::Error },
    #[error("cannot wait for {name}: {source}")]
    Wait { name: String, source: io::Error },
    #[error("cannot read the output of {name}: {source}")]
    Output { name: String, source: io::Error },
    #[error("cannot read the messages of {name}: {source}")]
    Stderr { name: String, source: io::Error },
    #[error("{name} printed more than {most} bytes")]
    TooMuchOutput { name: String, most: u64 },
    #[error("{name} printed more than {MAX_STDERR_BYTES} bytes of messages and was killed")]
    TooManyMessages { name: String },
    #[error("the server sent a pack of more than {0} bytes (--git-max-size); the fetch was cancelled")]
    PackTooLarge(u64),
    #[error("{name} was cancelled: the controller stops")]
    Stopped { name: String },
    #[error("{name} took longer than {limit:?} and was killed")]
    TimedOut { name: String, limit: Duration },
}

/// Result of a command: its exit code and output.
pub struct CommandOutput {
    pub code: i32,
    pub out: Vec<u8>,
    pub stderr: String,
}

impl CommandOutput {
    pub fn is_well(&self) -> bool {
        self.code == 0
    }

    /// Whether a fetch failed because the server has no such reference. git has no exit code for it; its messages are
    /// not translated here.
    pub fn lacks_reference(&self) -> bool {
        !self.is_well() && self.stderr.contains("couldn't find remote ref")
    }
}

impl GitCommand {
    /// Runs a command that contacts the server. The child holds `lock` open, so that others wait for its end even if
    /// we are killed.
    pub fn remote(
        &self,
        args: &[&str],
        lock: &File,
        address: &Address,
    ) -> Result<CommandOutput, CommandError> {
        version::check()?;
        let mut settings = credentials(address);
        let direct = is_loopback(&address.url);
        if direct && !address.site.is_empty() {
            // A remote proxy would receive the request and its credentials unencrypted.
            settings.push(format!("http.{}.proxy=", address.site));
        }
        let config: Vec<&str> = settings.iter().flat_map(|setting| ["-c", setting.as_str()]).collect();
        let mut command = self.command(&[&config, args].concat());
        if direct {
            // `git://` has its own proxy setting.
            command.env_remove("GIT_PROXY_COMMAND");
        }
        // Only this user can read the environment; every user can read arguments.
        if let Some(user) = &address.user {
            let count =
                std::env::var("GIT_CONFIG_COUNT").ok().and_then(|count| count.parse().ok()).unwrap_or(0u32);
            command.env("GIT_CONFIG_COUNT", (count + 1).to_string());
            command.env(format!("GIT_CONFIG_KEY_{count}"), format!("credential.{}.username", address.site));
            command.env(format!("GIT_CONFIG_VALUE_{count}"), user);
            command.env(USER, user).env(PASSWORD, address.password.as_deref().unwrap_or_default());
        }
        let own = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if !own("GIT_SSH_COMMAND") && !own("GIT_SSH") && !self.has_ssh_command() {
            command.env("GIT_SSH_COMMAND", "ssh -o BatchMode=yes");
        }
        let lock = lock.try_clone().map_err(CommandError::ShareLock)?;
        command.stdin(lock);
        let limit = Rlimit { current: Some(self.max_pack), maximum: Some(self.max_pack) };
        // SAFETY: between fork and exec, one system call that neither allocates nor locks.
        unsafe {
            command.pre_exec(move || setrlimit(Resource::Fsize, limit).map_err(Into::into));
        }
        let fetched = self.run(command, &[], 0, self.timeout);
        match self.remove_partial_packs() {
            Some(longest) if longest >= self.max_pack => Err(CommandError::PackTooLarge(self.max_pack)),
            _ => fetched,
        }
    }

    /// Removes the packs of an interrupted fetch, which git would keep for two weeks. Returns the size of the longest.
    fn remove_partial_packs(&self) -> Option<u64> {
        let files = std::fs::read_dir(self.mirror.join("objects/pack")).ok()?;
        let partial = files.flatten().filter(|file| file.file_name().as_encoded_bytes().starts_with(b"tmp_"));
        let sizes = partial.map(|file| {
            let size = file.metadata().map_or(0, |found| found.len());
            let _ = std::fs::remove_file(file.path());
            size
        });
        sizes.max()
    }

    /// Runs a command on our own mirror, with an input and a limit for its output.
    pub fn local(&self, args: &[&str], input: &[u8], most: u64) -> Result<CommandOutput, CommandError> {
        self.local_with(args, input, most, &[])
    }

    /// The same with additional variables.
    pub fn local_with(
        &self,
        args: &[&str],
        input: &[u8],
        most: u64,
        variables: &[(&str, &Path)],
    ) -> Result<CommandOutput, CommandError> {
        // These two read no objects, so nothing is ever fetched for them.
        if !matches!(args.first(), Some(&"config" | &"init")) {
            version::check()?;
        }
        let mut command = self.command(args);
        for (name, _) in std::env::vars_os().filter(|(name, _)| has_prefix(name, "GIT_CONFIG_")) {
            command.env_remove(name);
        }
        command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
        command.envs(variables.iter().copied());
        command.stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() });
        self.run(command, input, most, LOCAL_TIMEOUT)
    }

    /// Runs another program with the same limits.
    pub fn run_other(&self, command: Command) -> Result<CommandOutput, CommandError> {
        self.run(command, &[], 1 << 20, LOCAL_TIMEOUT)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("git");
        // Options of Abide in variables have credentials of targets and of other sources.
        for (name, _) in std::env::vars_os().filter(|(name, _)| has_prefix(name, "ABIDE_")) {
            command.env_remove(name);
        }
        for (name, _) in std::env::vars_os().filter(|(name, _)| has_prefix(name, "GIT_")) {
            if !PASSED_ENV_PREFIXES.iter().any(|passed| has_prefix(&name, passed))
                && !PASSED_ENV.iter().any(|passed| name == *passed)
            {
                command.env_remove(name);
            }
        }
        command
            .arg("--git-dir")
            .arg(&self.mirror)
            .args(CONFIG.iter().flat_map(|setting| ["-c", setting]))
            .args(args)
            .current_dir(self.mirror.parent().unwrap_or(Path::new("/")))
            .env("GIT_ALLOW_PROTOCOL", PROTOCOLS.join(":"))
            // Set and empty: no prompt. Unset, git would search for other programs.
            .env("GIT_ASKPASS", "")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("GCM_INTERACTIVE", "never")
            .env("SSH_ASKPASS_REQUIRE", "never")
            .env("GIT_LITERAL_PATHSPECS", "1")
            .env("GIT_NO_LAZY_FETCH", "1")
            .env("GIT_NO_REPLACE_OBJECTS", "1")
            .env("GIT_LFS_SKIP_SMUDGE", "1")
            .env_remove("GIT_CONFIG_PARAMETERS")
            .env_remove("SSH_ASKPASS")
            .env("LC_ALL", "C");
        command
    }

    /// Whether the user's configuration names an ssh command, which then has to avoid prompts itself.
    fn has_ssh_command(&self) -> bool {
        let mut command = self.command(&["config", "--get", "core.sshCommand"]);
        command.stdin(Stdio::null());
        self.run(command, &[], 1 << 16, LOCAL_TIMEOUT).is_ok_and(|ended| ended.is_well())
    }

    fn run(
        &self,
        mut command: Command,
        input: &[u8],
        most: u64,
        limit: Duration,
    ) -> Result<CommandOutput, CommandError> {
        // A file instead of a pipe: a background process (a shared ssh connection) would keep a pipe open.
        let cannot_run = |source: io::Error| CommandError::Run { name: "git".to_owned(), source };
        let mut stderr_file = rustix::fs::memfd_create("said", rustix::fs::MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(|error| cannot_run(error.into()))?;
        let stderr = stderr_file.try_clone().map_err(cannot_run)?;
        command.stdout(if most > 0 { Stdio::piped() } else { Stdio::null() }).stderr(stderr).process_group(0);
        let name = command.get_program().to_string_lossy().into_owned();
        // If we are killed, git is killed, too: the next process finds the mirror unused.
        // SAFETY: between fork and exec, one system call that neither allocates nor locks.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(Signal::TERM)).map_err(Into::into)
            });
        }
        let mut child = command.spawn().map_err(|source| CommandError::Run { name: name.clone(), source })?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (status, out) = std::thread::scope(|threads| {
            if let Some(mut to) = to {
                // A program that does not read all of its input reports why.
                threads.spawn(move || drop(to.write_all(input)));
            }
            let reader = from.map(|from| {
                threads.spawn(move || {
                    let mut out = Vec::new();
                    from.take(most.saturating_add(1)).read_to_end(&mut out).map(|_| out)
                })
            });
            let status = self.wait(&mut child, &stderr_file, &name, limit);
            let out = reader.map(|reader| reader.join().unwrap_or_else(|_| Ok(Vec::new())));
            (status, out.unwrap_or_else(|| Ok(Vec::new())))
        });
        let status = status?;
        let out = out.map_err(|source| CommandError::Output { name: name.clone(), source })?;
        if out.len() as u64 > most {
            return Err(CommandError::TooMuchOutput { name, most });
        }
        let mut bytes = Vec::new();
        let read = stderr_file
            .seek(SeekFrom::Start(0))
            .and_then(|_| (&stderr_file).take(1 << 16).read_to_end(&mut bytes));
        read.map_err(|source| CommandError::Stderr { name, source })?;
        Ok(CommandOutput { code: status.code().unwrap_or(-1), out, stderr: stderr_line(&bytes) })
    }

    /// Waits until the child ends, exceeds a limit, or we are stopped.
    fn wait(
        &self,
        child: &mut Child,
        stderr: &File,
        name: &str,
        limit: Duration,
    ) -> Result<ExitStatus, CommandError> {
        let begin = Instant::now();
        let poll = RetryDelay::doubling(Duration::from_millis(1), Duration::from_millis(20));
        let mut pause = poll.first();
        loop {
            let name = || name.to_owned();
            let ended = child.try_wait();
            if let Some(status) = ended.map_err(|source| CommandError::Wait { name: name(), source })? {
                return Ok(status);
            }
            let is_flooded = stderr.metadata().is_ok_and(|found| found.len() > MAX_STDERR_BYTES);
            let error = match self.stop.load(Ordering::SeqCst) {
                true => Some(CommandError::Stopped { name: name() }),
                false if is_flooded => Some(CommandError::TooManyMessages { name: name() }),
                false if begin.elapsed() >= limit => Some(CommandError::TimedOut { name: name(), limit }),
                false => None,
            };
            if let Some(error) = error {
                kill_group(child);
                return Err(error);
            }
            std::thread::sleep(pause);
            pause = poll.next(pause);
        }
    }
}

/// Kills a child and its process group.
fn kill_group(child: &mut Child) {
    let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else { return };
    let _ = kill_process_group(group, Signal::TERM);
    let begin = Instant::now();
    while begin.elapsed() < KILL_GRACE && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Descendants may still run.
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
}

fn has_prefix(name: &std::ffi::OsStr, with: &str) -> bool {
    name.as_encoded_bytes().starts_with(with.as_bytes())
}

/// Environment variables with the credentials of an address.
const USER: &str = "ABIDE_GIT_USER";
const PASSWORD: &str = "ABIDE_GIT_PASSWORD";

/// Settings that make git use the credentials of an address for its own site only; they contain no secrets.
fn credentials(address: &Address) -> Vec<String> {
    let Address { site, user, password, .. } = address;
    let helper = |says: &str| format!("credential.{site}.helper=!f() {{ test \"$1\" != get || {says}; }}; f");
    match (user, password) {
        (None, _) => Vec::new(),
        (Some(_), Some(_)) => vec![
            // Other helpers are not used: the address has complete credentials.
            format!("credential.{site}.helper="),
            helper(&format!("printf 'username=%s\\npassword=%s\\n' \"${USER}\" \"${PASSWORD}\"")),
        ],
        // A token as the user name: the user's helpers come first, otherwise the password is empty.
        (Some(_), None) => {
            vec![helper(&format!("printf 'username=%s\\npassword=\\n' \"${USER}\""))]
        }
    }
}

/// The output of git on one line, without credentials.
fn stderr_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    // git adds these lines to every remote failure.
    let advice =
        |line: &&str| line.starts_with("Please make sure you have") || line.starts_with("and the repository");
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !advice(line));
    let lines: Vec<&str> = lines.map(|line| line.trim_end_matches('.')).collect();
    let mut text = masked(&lines.join("; "));
    if text.contains("The requested URL returned error: 30") {
        text.push_str("; redirects are never followed: name the final address");
    }
    match text.char_indices().nth(MAX_STDERR_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_over_its_time_limit_is_killed_with_its_children() {
        let stop = Arc::new(AtomicBool::new(false));
        let program =
            GitCommand { mirror: "/".into(), timeout: Duration::from_secs(1), max_pack: u64::MAX, stop };
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo $!; wait"]).stdin(Stdio::null());
        // The background process keeps the output open.
        let begin = Instant::now();
        let ended = program.run(command, &[], 100, Duration::from_millis(200));
        let error = ended.err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("sh took longer than 200ms and was killed"));
        assert!(begin.elapsed() < Duration::from_secs(20));
        // Messages without end.
        let mut command = Command::new("sh");
        command.args(["-c", "yes >&2"]).stdin(Stdio::null());
        let ended = program.run(command, &[], 100, Duration::from_secs(60));
        assert!(matches!(ended, Err(CommandError::TooManyMessages { .. })));
    }
}
