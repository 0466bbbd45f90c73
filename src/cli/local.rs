//! The local system's folder: where it is, whether somebody serves it, and how to reach it.
//!
//! `$ABIDE_HOME` (else `~/.abide`) belongs to one system at a time, which holds `system.lock` for as long as it lives. Its
//! address and its secret are beside it, for this user alone.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::commands::serve::private_folder;
use super::{Exit, Failure};
use crate::http::{ApiEndpoint, ClientConfig};

/// How one that is started on demand is told that it is.
const BACKGROUND: &str = "--background";

/// The app that local verbs call as.
pub const APP: &str = "abide";

#[derive(Clone, Debug)]
pub struct Home(PathBuf);

/// Held by the system that serves a folder.
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
            // A relative folder would be another one for whoever runs in the background.
            Some(path) => Ok(Home(std::path::absolute(&path).unwrap_or(path))),
            None => Err(Failure::new(Exit::Usage, "there is no folder for the local system")
                .hint("set ABIDE_HOME, or HOME")),
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

    /// Waits for a lock of the folder, and holds it while the file lives.
    pub fn lock(&self, name: &str) -> Result<File, Failure> {
        let file = self.lock_file(name)?;
        let locked = flock(&file, FlockOperation::LockExclusive);
        locked.map_err(|error| failed("cannot lock", &self.path(name), &error.into()))?;
        Ok(file)
    }

    /// Takes the folder, if nobody serves it.
    pub fn acquire_server_lock(&self) -> Result<Option<ServerLock>, Failure> {
        let mut lock = self.lock_file("system.lock")?;
        // Whoever only asks whether it is served has it for a moment, and so has what a dead one was just launching.
        let begin = Instant::now();
        while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begin.elapsed() > Duration::from_secs(1) {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Where a former one listened is nobody's address now.
        self.remove_address();
        let written = lock
            .set_len(0)
            .and_then(|()| lock.rewind())
            .and_then(|()| writeln!(lock, "{}", std::process::id()));
        written.map_err(|error| failed("cannot write", &self.path("system.lock"), &error))?;
        Ok(Some(ServerLock { _lock: lock }))
    }

    /// The process that serves it.
    pub fn server_pid(&self) -> Option<u32> {
        self.running_server().map(|(pid, _)| pid)
    }

    /// The same, and whether it is one in the background.
    pub fn running_server(&self) -> Option<(u32, bool)> {
        let mut lock = File::open(self.path("system.lock")).ok()?;
        // Whoever can share it proves that nobody has it.
        if flock(&lock, FlockOperation::NonBlockingLockShared).is_ok() {
            return None;
        }
        let mut text = String::new();
        lock.read_to_string(&mut text).ok()?;
        let pid: u32 = text.trim().parse().ok()?;
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        Some((pid, words.split(|byte| *byte == 0).any(|word| word == BACKGROUND.as_bytes())))
    }

    /// Did one that served it die without a word?
    pub fn is_abandoned(&self) -> bool {
        self.server_pid().is_none() && self.path("address").exists()
    }

    /// A secret that is made once.
    pub fn secret(&self, name: &str) -> Result<String, Failure> {
        let path = self.path(name);
        if let Ok(text) = std::fs::read_to_string(&path)
            && !text.trim().is_empty()
        {
            return Ok(text.trim().to_owned());
        }
        let mut bytes = [0; 24];
        let made = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes));
        made.map_err(|error| failed("cannot read", Path::new("/dev/urandom"), &error))?;
        let secret: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        self.write(name, &secret)?;
        Ok(secret)
    }

    /// For this user alone, and whole.
    pub fn write(&self, name: &str, text: &str) -> Result<(), Failure> {
        let (path, beside) = (self.path(name), self.path(&format!("{name}.{}", std::process::id())));
        let written = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)
            .and_then(|mut file| writeln!(file, "{text}"))
            .and_then(|()| std::fs::rename(&beside, &path));
        written.map_err(|error| failed("cannot write", &path, &error))
    }

    pub fn remove_address(&self) {
        let _ = std::fs::remove_file(self.path("address"));
    }

    /// How to call the system that serves this folder now.
    pub fn access(&self) -> Option<ApiEndpoint> {
        self.server_pid()?;
        let read = |name: &str| {
            let text = std::fs::read_to_string(self.path(name)).ok()?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        Some(ApiEndpoint {
            url: read("address")?,
            code: APP.to_owned(),
            secret: read("secret")?,
            username: std::env::var("USER").ok(),
            client_config: ClientConfig::default(),
        })
    }

    /// Starts a system in the background unless one is there: however many ask at once, one is started.
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
            // Where others listen, and who waits to hear from them, is not its business.
            .args(["up", BACKGROUND, "--listen", "127.0.0.1:0"])
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
                    .map_or("is not ready after 20 s".to_owned(), |status| format!("ended with {status}"));
                let message = format!("the local system {how}");
                return Err(Failure::new(Exit::Unreachable, message).hint(format!("see {}", path.display())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends whoever serves it, leaving processes as they are. Was there anybody?
    pub fn stop(&self) -> Result<bool, Failure> {
        let Some(pid) = self.server_pid() else { return Ok(false) };
        let target = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(target) = target {
            let _ = rustix::process::kill_process(target, rustix::process::Signal::TERM);
        }
        let begin = Instant::now();
        while self.server_pid().is_some() {
            if begin.elapsed() > Duration::from_secs(30) {
                let message = format!("the local system (process {pid}) does not end");
                return Err(Failure::new(Exit::Failed, message));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }
}
