//! The folder of the local system: its location, lock, address and secrets.
//!
//! `$ABIDE_HOME` (else `~/.abide`) belongs to one local system at a time, which holds `system.lock` while it runs. Its
//! address and secrets are in the same folder, readable only by this user.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::commands::serve::private_folder;
use super::key_file::KeyFileArgs;
use super::{Exit, Failure};
use crate::engine::local_endpoint;
use crate::http::ApiEndpoint;
use crate::model::HostKey;
use crate::proc::ProcessStrings;

/// The flag of a local system that a verb starts on demand.
const BACKGROUND: &str = "--background";

/// Locked while `abide down --stop-processes` runs.
const PROCESS_STOP_LOCK: &str = "process-stop.lock";

pub use crate::engine::LOCAL_APP as APP;

#[derive(Clone, Debug)]
pub struct Home(PathBuf);

/// The lock of a running local system.
pub struct ServerLock {
    _lock: File,
}

fn failed(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Exit::Failed, format!("{what} {}: {error}", path.display()))
}

impl Home {
    pub fn find() -> Result<Home, Failure> {
        let own = std::env::var_os("ABIDE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
        let usual = || {
            std::env::var_os("HOME")
                .filter(|path| !path.is_empty())
                .map(|home| PathBuf::from(home).join(".abide"))
        };
        match own.or_else(usual) {
            // The background system has another current directory: a relative path would be another folder.
            Some(path) => Ok(Home(std::path::absolute(&path).unwrap_or(path))),
            None => Err(Failure::new(Exit::Usage, "cannot find the folder of the local system")
                .hint("set ABIDE_HOME or HOME")),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn create(&self) -> Result<(), Failure> {
        private_folder(&self.0)
    }

    fn lock_file(&self, name: &str) -> Result<File, Failure> {
        let path = self.path(name);
        let file =
            File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        file.map_err(|error| failed("cannot open", &path, &error))
    }

    /// Waits for a lock file of the folder. The lock is held until the file is dropped.
    pub fn lock(&self, name: &str) -> Result<File, Failure> {
        let file = self.lock_file(name)?;
        let locked = flock(&file, FlockOperation::LockExclusive);
        locked.map_err(|error| failed("cannot lock", &self.path(name), &error.into()))?;
        Ok(file)
    }

    /// Records that a verb stops the processes of the local system, until the file is dropped.
    pub fn record_stop_of_processes(&self) -> Result<File, Failure> {
        let file = self.lock_file(PROCESS_STOP_LOCK)?;
        let locked = flock(&file, FlockOperation::LockShared);
        locked.map_err(|error| failed("cannot lock", &self.path(PROCESS_STOP_LOCK), &error.into()))?;
        Ok(file)
    }

    /// Whether a verb stops the processes of the local system.
    pub fn stops_processes(&self) -> bool {
        File::open(self.path(PROCESS_STOP_LOCK))
            .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_err())
    }

    /// Locks the folder. `None`: another local system holds the lock.
    pub fn acquire_server_lock(&self) -> Result<Option<ServerLock>, Failure> {
        let mut lock = self.lock_file("system.lock")?;
        // Verbs that check for a running system hold the lock briefly, and so do processes that a dead one was launching.
        let begin = Instant::now();
        while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begin.elapsed() > Duration::from_secs(1) {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Removes the address of an earlier system.
        self.remove_address();
        let written = lock
            .set_len(0)
            .and_then(|()| lock.rewind())
            .and_then(|()| writeln!(lock, "{}", std::process::id()));
        written.map_err(|error| failed("cannot write", &self.path("system.lock"), &error))?;
        Ok(Some(ServerLock { _lock: lock }))
    }

    /// The pid of the running local system.
    pub fn server_pid(&self) -> Option<u32> {
        self.running_server().map(|(pid, _)| pid)
    }

    /// The pid of the running local system, and whether it runs in the background.
    pub fn running_server(&self) -> Option<(u32, bool)> {
        let mut lock = File::open(self.path("system.lock")).ok()?;
        // A shared lock succeeds only if no system holds the exclusive one.
        if flock(&lock, FlockOperation::NonBlockingLockShared).is_ok() {
            return None;
        }
        let mut text = String::new();
        lock.read_to_string(&mut text).ok()?;
        let pid: u32 = text.trim().parse().ok()?;
        Some((
            pid,
            ProcessStrings::arguments(pid)
                .is_ok_and(|words| words.iter().any(|word| word == BACKGROUND.as_bytes())),
        ))
    }

    /// Whether the last local system crashed: its address remains, and no system runs.
    pub fn is_abandoned(&self) -> bool {
        self.server_pid().is_none() && self.path("address").exists()
    }

    /// Reads a secret, or generates it once.
    pub fn secret(&self, name: &str) -> Result<String, Failure> {
        let path = self.path(name);
        if let Ok(text) = std::fs::read_to_string(&path)
            && !text.trim().is_empty()
        {
            return Ok(text.trim().to_owned());
        }
        let secret = crate::ids::fresh_secret();
        self.write(name, &secret)?;
        Ok(secret)
    }

    /// Writes a file atomically, readable only by this user.
    pub fn write(&self, name: &str, text: &str) -> Result<(), Failure> {
        let (path, temporary) = (self.path(name), self.path(&format!("{name}.{}", std::process::id())));
        let written = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .and_then(|mut file| writeln!(file, "{text}"))
            .and_then(|()| std::fs::rename(&temporary, &path));
        written.map_err(|error| failed("cannot write", &path, &error))
    }

    /// The hosts that local systems of this folder have served: a background system serves them all, so that it finds the
    /// processes of each.
    pub fn served_hosts(&self) -> BTreeSet<HostKey> {
        let text = std::fs::read_to_string(self.path("hosts")).unwrap_or_default();
        text.lines().filter_map(|line| line.trim().parse().ok()).collect()
    }

    pub fn add_served_hosts(&self, hosts: &[HostKey]) -> Result<(), Failure> {
        let before = self.served_hosts();
        let all: BTreeSet<HostKey> = before.iter().chain(hosts).cloned().collect();
        if all == before {
            return Ok(());
        }
        let lines: Vec<String> = all.iter().map(HostKey::to_string).collect();
        self.write("hosts", &lines.join("\n"))
    }

    pub fn remove_address(&self) {
        let _ = std::fs::remove_file(self.path("address"));
    }

    /// Address and credentials of the running local system.
    pub fn access(&self) -> Option<ApiEndpoint> {
        self.server_pid()?;
        local_endpoint(&self.0)
    }

    /// Starts a local system in the background unless one runs. Concurrent callers start only one.
    pub fn start(&self) -> Result<ApiEndpoint, Failure> {
        self.create()?;
        if let Some(access) = self.access() {
            return Ok(access);
        }
        let starting = self.lock_file("start.lock")?;
        flock(&starting, FlockOperation::LockExclusive)
            .map_err(|error| failed("cannot lock", &self.path("start.lock"), &error.into()))?;
        if let Some(access) = self.access() {
            return Ok(access);
        }
        let program = std::env::current_exe()
            .map_err(|error| Failure::new(Exit::Failed, format!("cannot find this program: {error}")))?;
        let path = self.path("system.log");
        let log = File::options().append(true).create(true).mode(0o600).open(&path);
        let log = log.map_err(|error| failed("cannot write", &path, &error))?;
        use std::os::unix::process::CommandExt;
        let mut child = Command::new(program)
            // The caller's ABIDE_LISTEN and systemd variables do not apply to the background system.
            .args(["up", BACKGROUND, "--listen", "127.0.0.1:0"])
            .args(self.served_hosts().iter().map(|host| format!("--as-host={host}")))
            .env_remove("ABIDE_AS_HOST")
            .envs(KeyFileArgs::from_env().absolute().map(|file| ("ABIDE_KEY_FILE", file)))
            .env("ABIDE_HOME", &self.0)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            .spawn()
            .map_err(|error| Failure::new(Exit::Failed, format!("cannot start the local system: {error}")))?;
        let begin = Instant::now();
        loop {
            if let Some(access) = self.access() {
                return Ok(access);
            }
            let ended = child.try_wait().ok().flatten();
            if ended.is_some() || begin.elapsed() > Duration::from_secs(20) {
                let how = ended
                    .map_or("is not ready after 20 s".to_owned(), |status| format!("exited with {status}"));
                let message = format!("the local system {how}");
                return Err(Failure::new(Exit::Unreachable, message).hint(format!("see {}", path.display())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops the local system; its processes keep running. Returns whether one was running.
    pub fn stop(&self) -> Result<bool, Failure> {
        let Some(pid) = self.server_pid() else { return Ok(false) };
        let target = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(target) = target {
            let _ = rustix::process::kill_process(target, rustix::process::Signal::TERM);
        }
        let begin = Instant::now();
        while self.server_pid().is_some() {
            if begin.elapsed() > Duration::from_secs(30) {
                let message = format!("the local system (process {pid}) did not stop within 30 s");
                return Err(Failure::new(Exit::Failed, message));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }
}
