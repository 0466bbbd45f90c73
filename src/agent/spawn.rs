//! Spawning: starts a process in a new session, as its user, in its folder, with no variable of the agent's environment.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::process::Signal;

use super::account::Account;
use super::captured_output::{CapturedOutput, OutputError};
use super::cgroup::Cgroup;
use super::clone_exec::{self, ExecRequest, ExecStage, OwnPidFile, SpawnedProcess, Streams, VforkGuard};
use super::environment::Environment;
use super::error::LaunchError;
use super::exit_record::{ExitRecords, kill_group, recording_shell_args};
use super::launch_mark::LaunchMark;
use super::ownership;
use super::process::{ProcessHandle, UnclaimedProcess};
use super::sandbox::{LaunchSandbox, SandboxError};
use super::simple_command::split_simple_command;
use super::start_output::{LogStart, LogTarget};
use super::user_files::{self, ExistingPidFile, PidFile, Rights};
use crate::model::Spec;

/// Destination of the output of a launch.
pub enum Sink {
    Nowhere,
    /// An open file or pipe.
    File(File),
    /// The log at its path; for a directory, NAME.log in it.
    Log(LogTarget),
}

/// Maximum duration of a launch: opening its files, clone and `execve`.
pub const LAUNCH_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum wait for the user's permit: longer than [`LAUNCH_TIMEOUT`], since a long queue of successful launches is not an
/// error.
pub const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);

/// One launch. Its files are opened after it has its user's permit: any number of launches may wait for one.
pub struct Launch {
    pub command: String,
    pub folder: PathBuf,
    pub rights: Rights,
    pub env: Vec<(String, String)>,
    pub output: Sink,
    /// The exit record of the process.
    pub record: Option<(ExitRecords, String)>,
    pub pid_file: Option<PathBuf>,
    /// The spec under whose identity a foreign process may run, which refuses the launch; `None`: none can.
    pub foreign: Option<Arc<Spec>>,
    pub group: Option<Cgroup>,
    pub sandbox: LaunchSandbox,
}

/// The descriptors of a launch.
struct LaunchFiles {
    null: &'static File,
    output: Option<File>,
    code: Option<File>,
    group: Option<File>,
}

impl Launch {
    /// Launches the process on a worker thread. It is claimed from its creation on.
    ///
    /// Boxed: thousands of launches may wait for a permit.
    pub fn spawn(self) -> impl Future<Output = Result<ProcessHandle, LaunchError>> + Send {
        Box::new(self).spawn_boxed()
    }

    async fn spawn_boxed(self: Box<Self>) -> Result<ProcessHandle, LaunchError> {
        let (command, user) = (self.command.clone(), self.rights.account().name().to_owned());
        let permit = tokio::time::timeout(QUEUE_TIMEOUT, self.rights.launch_permit()).await;
        let Ok(permit) = permit else { return Err(LaunchError::Queue { command, user }) };
        let vfork = Arc::new(VforkGuard::default());
        let timed_out = Arc::new(AtomicBool::new(false));
        let (send, mut receive) = tokio::sync::oneshot::channel();
        let (watched, gave_up) = (Arc::clone(&vfork), Arc::clone(&timed_out));
        let work = move || {
            let launched = self.launch(&watched, || send.is_closed());
            // Released by the thread, so that stuck launches count against their user.
            drop(permit);
            let unclaimed = |process| UnclaimedProcess::new(process, gave_up);
            drop(send.send(launched.map(unclaimed)));
        };
        user_files::spawn_thread(work)?;
        // By reference: a result that arrives at the last moment is dropped after `timed_out` is set, and so killed.
        match tokio::time::timeout(LAUNCH_TIMEOUT, &mut receive).await {
            Ok(Ok(launched)) => launched?.into_handle().ok_or(LaunchError::NoHandle { command, user }),
            Ok(Err(_)) => Err(LaunchError::ThreadFailed { command, user }),
            Err(_) => {
                timed_out.store(true, Ordering::Release);
                vfork.end();
                Err(LaunchError::TimedOut { command, user })
            }
        }
    }

    fn launch(&self, vfork: &VforkGuard, given_up: impl Fn() -> bool) -> Result<SpawnedProcess, LaunchError> {
        let opened = self.open()?;
        let explain = |(stage, error)| self.explain(stage, error);
        if let Some(file) = self.own_pid_file() {
            if given_up() {
                return Err(LaunchError::GivenUp);
            }
            match self.exec_or_shell(&opened, vfork, Some(&file)) {
                // The process ended before `execve`. Its error is found, or another way to write the file.
                Err((ExecStage::PidFile, _)) => {}
                spawned => return spawned.map_err(explain),
            }
        }
        let pid_file = self.pid_file.as_ref().map(|path| self.prepare_pid_file(path)).transpose()?;
        if given_up() {
            pid_file.iter().for_each(|file| self.rights.discard_pid_file(file));
            return Err(LaunchError::GivenUp);
        }
        let spawned = self.exec_or_shell(&opened, vfork, None).map_err(explain);
        let written = spawned.and_then(|process| match self.name(pid_file.as_ref(), process.pid) {
            Ok(()) => Ok(process),
            Err(why) => {
                kill_and_reap(&process);
                Err(why)
            }
        });
        if written.is_err() {
            pid_file.iter().for_each(|file| self.rights.discard_pid_file(file));
        }
        written
    }

    /// Prepares the pid file. An existing one may name a foreign process, which refuses the launch.
    fn prepare_pid_file(&self, path: &Path) -> Result<Arc<PidFile>, LaunchError> {
        if let Some(spec) = &self.foreign {
            match self.rights.prepare_pid_file(path, ExistingPidFile::Refuse) {
                Err(error) if error.is_existing() => {}
                prepared => return Ok(prepared?),
            }
            let foreign = ownership::foreign_pid_blocking(spec, &self.rights);
            if let Some(pid) = foreign.map_err(|error| LaunchError::MayBeForeign(Box::new(error)))? {
                return Err(LaunchError::Foreign(pid));
            }
        }
        Ok(self.rights.prepare_pid_file(path, ExistingPidFile::Replace)?)
    }

    /// The pid file, if the process itself can write it: with its user's rights, and not inside its sandbox.
    fn own_pid_file(&self) -> Option<OwnPidFile> {
        if self.sandbox.namespace().is_some() || self.sandbox.restrictions.affect_files() {
            return None;
        }
        let existing = match self.foreign {
            Some(_) => ExistingPidFile::Refuse,
            None => ExistingPidFile::Replace,
        };
        let path = self.pid_file.as_ref()?;
        match self.rights.account().is_own() {
            true => OwnPidFile::without_links(path, existing),
            false => OwnPidFile::new(path, existing),
        }
    }

    fn name(&self, pid_file: Option<&Arc<PidFile>>, pid: u32) -> Result<(), LaunchError> {
        pid_file.map_or(Ok(()), |file| Ok(self.rights.write_pid_file(file, pid)?))
    }

    fn open(&self) -> Result<LaunchFiles, LaunchError> {
        let null = null().map_err(LaunchError::Null)?;
        let output = match &self.output {
            Sink::Nowhere => None,
            Sink::File(file) => Some(file.try_clone().map_err(OutputError)?),
            Sink::Log(log) => Some(self.open_log(log)?),
        };
        let code = self.record.as_ref().map(|(records, id)| records.create(id)).transpose()?;
        Ok(LaunchFiles { null, output, code, group: self.group.as_ref().and_then(Cgroup::open_dir) })
    }

    fn open_log(&self, log: &LogTarget) -> Result<File, LaunchError> {
        let file = self.rights.open_log(&log.path, &log.name)?;
        if let Some(start) = LogStart::of(&file) {
            let _ = log.start.set(start);
        }
        Ok(file)
    }

    /// Executes the command directly if possible, by a shell if necessary. `pid_file`: written by the process itself.
    fn exec_or_shell(
        &self,
        opened: &LaunchFiles,
        vfork: &VforkGuard,
        pid_file: Option<&OwnPidFile>,
    ) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        let shell =
            |script: String| (vec![c"/bin/sh".to_owned()], vec!["sh".to_owned(), "-c".to_owned(), script]);
        let by_shell = match &self.record {
            None => shell(self.command.clone()),
            Some(_) => (vec![c"/bin/sh".to_owned()], recording_shell_args(&self.command)),
        };
        let (programs, words) = match split_simple_command(&self.command).filter(|_| self.record.is_none()) {
            Some(words) => (self.search_path(&words[0]).map_err(not_a_program)?, words),
            None => by_shell.clone(),
        };
        match self.begin(opened, vfork, (programs, &words), pid_file) {
            // A script without an interpreter line runs in a shell.
            Err((ExecStage::Program, error)) if error.raw_os_error() == Some(libc::ENOEXEC) => {
                self.begin(opened, vfork, (by_shell.0, &by_shell.1), pid_file)
            }
            begun => begun,
        }
    }

    /// The candidate paths of a program, like the search of PATH by a shell.
    fn search_path(&self, program: &str) -> Result<Vec<CString>, LaunchError> {
        if program.contains('/') {
            return Ok(vec![c_string(program)?]);
        }
        let path =
            self.env.iter().rev().find(|(name, _)| name == "PATH").map_or("", |(_, value)| value.as_str());
        path.split(':').map(|folder| c_string(&format!("{folder}/{program}"))).collect()
    }

    fn begin(
        &self,
        opened: &LaunchFiles,
        vfork: &VforkGuard,
        (programs, words): (Vec<CString>, &[String]),
        pid_file: Option<&OwnPidFile>,
    ) -> Result<SpawnedProcess, (ExecStage, io::Error)> {
        let texts = |texts: &[String]| {
            texts.iter().map(|text| c_string(text)).collect::<Result<_, _>>().map_err(not_a_program)
        };
        let path = |path: &PathBuf| c_string(&path.display().to_string()).map_err(not_a_program);
        let env: Vec<String> = self.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let account = self.rights.account();
        let Account { uid, gid, groups, .. } = account;
        let mark = LaunchMark::of_variables(&self.env);
        // The mark is for launches without a control group.
        let restrictions =
            |is_grouped: bool| self.sandbox.restrictions.with_mark(mark.filter(|_| !is_grouped));
        let mut request = ExecRequest {
            programs,
            args: texts(words)?,
            env: texts(&env)?,
            folder: path(&self.folder)?,
            streams: Streams {
                input: opened.null.as_fd(),
                output: opened.output.as_ref().unwrap_or(opened.null).as_fd(),
                code: opened.code.as_ref().map(AsFd::as_fd),
            },
            group: opened.group.as_ref().map(AsFd::as_fd),
            ids: nix::unistd::geteuid().is_root().then(|| (*uid, *gid, groups.clone())),
            restrictions: restrictions(opened.group.is_some()),
            namespace: self.sandbox.namespace(),
            is_own: account.is_own(),
            pid_file: pid_file.cloned(),
        };
        match request.spawn(vfork) {
            // A control group that refuses the process does not prevent the launch.
            Err((ExecStage::Clone, _)) if request.group.is_some() => {
                (request.group, request.restrictions) = (None, restrictions(false));
                request.spawn(vfork)
            }
            spawned => spawned,
        }
    }

    fn explain(&self, stage: ExecStage, source: io::Error) -> LaunchError {
        let source = match SandboxError::of_stage(stage, &self.sandbox, source) {
            Ok(restriction) => return restriction.into(),
            Err(source) => source,
        };
        let (command, folder) = (self.command.clone(), self.folder.clone());
        let user = self.rights.account().name().to_owned();
        match stage {
            ExecStage::Folder if source.raw_os_error() == Some(libc::ENOENT) => {
                LaunchError::NoFolder { folder }
            }
            ExecStage::Folder => LaunchError::Folder { folder, user, source },
            ExecStage::User => LaunchError::User { user, source },
            ExecStage::TimedOut => LaunchError::ExecTimedOut { command, user },
            ExecStage::Clone
            | ExecStage::Table
            | ExecStage::Session
            | ExecStage::Descriptors
            | ExecStage::MountNamespace
            | ExecStage::Ulimit(_)
            | ExecStage::OomScoreAdj
            | ExecStage::Nice
            | ExecStage::Capabilities
            | ExecStage::NoNewPrivs
            | ExecStage::PidFile
            | ExecStage::Program => LaunchError::Exec { command, source },
        }
    }
}

/// The null device, opened once.
fn null() -> io::Result<&'static File> {
    static NULL: OnceLock<File> = OnceLock::new();
    match NULL.get() {
        Some(null) => Ok(null),
        None => {
            let opened = File::options().read(true).write(true).open("/dev/null")?;
            Ok(NULL.get_or_init(|| opened))
        }
    }
}

/// Kills and reaps a process whose launch failed after its creation.
fn kill_and_reap(process: &SpawnedProcess) {
    let _ = rustix::process::pidfd_send_signal(&process.fd, Signal::KILL);
    clone_exec::reap_failed(process.pid, &process.fd);
}

/// The error of a command that cannot be passed to the kernel.
fn not_a_program(error: LaunchError) -> (ExecStage, io::Error) {
    (ExecStage::Program, io::Error::other(error))
}

fn c_string(text: &str) -> Result<CString, LaunchError> {
    CString::new(text).map_err(|_| LaunchError::Nul)
}

/// The end of a command of a spec.
#[derive(Debug, PartialEq, Eq)]
pub enum CommandExit {
    Success,
    /// Exit code, and the end of the output.
    Failure(i32, String),
    /// The command timed out and was killed. The end of the output.
    TimedOut(String),
}

/// A command of a spec, and its maximum duration.
pub struct SpecCommand<'a> {
    pub command: &'a str,
    pub folder: &'a Path,
    pub rights: &'a Rights,
    pub env: Environment,
    pub time: Duration,
    pub sandbox: LaunchSandbox,
}

/// Runs a command to its end, within its maximum duration. Secrets are masked in the returned output. The output goes to
/// memory, not to a pipe: a daemon that the command leaves behind may keep a pipe open, and nothing must wait for it.
/// `record`: the exit record.
pub async fn run(
    program: SpecCommand<'_>,
    record: Option<(ExitRecords, String)>,
    group: Option<Cgroup>,
) -> Result<(CommandExit, CapturedOutput), LaunchError> {
    let SpecCommand { command, folder, rights, env: Environment { variables, secrets }, time, sandbox } =
        program;
    let output = CapturedOutput::new(rights.account().uid())?;
    let recorded = record.is_some();
    let launch = Launch {
        command: command.to_owned(),
        folder: folder.to_owned(),
        rights: rights.clone(),
        env: variables,
        output: Sink::File(output.descriptor()?),
        record,
        pid_file: None,
        foreign: None,
        group,
        sandbox,
    };
    let handle = launch.spawn().await?;
    if recorded {
        crate::failpoint::point("command-begun");
    }
    let code = match tokio::time::timeout(time, handle.wait_exit()).await {
        Ok(code) => code,
        Err(_) => {
            kill_group(&handle);
            handle.wait_exit().await;
            return Ok((CommandExit::TimedOut(output.tail(&secrets)), output));
        }
    };
    match code {
        Some(0) => Ok((CommandExit::Success, output)),
        code => Ok((CommandExit::Failure(code.unwrap_or(-1), output.tail(&secrets)), output)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Poll;

    use crate::agent::user_files::{MAX_PER_USER, UserPermits};

    /// Launches that hang use up the permits of their user. The next launch of that user fails with the reason.
    #[tokio::test]
    async fn a_launch_without_a_permit_fails_with_the_reason_and_delays_no_other_user() {
        let permits = Arc::new(UserPermits::default());
        let rights = |name: &str| {
            let account = Account::named(name).expect("an account");
            Rights::new(account, Arc::clone(&permits), Arc::new(|_| false))
        };
        let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).expect("users").expect("a name").name;
        let mut held = Vec::new();
        for _ in 0..MAX_PER_USER {
            held.push(rights(&me).launch_permit().await);
        }
        if nix::unistd::geteuid().is_root() {
            assert!(rights("nobody").launch_permit().await.is_some());
        }
        let launch = Launch {
            command: "./run".to_owned(),
            folder: PathBuf::from("/"),
            rights: rights(&me),
            env: Vec::new(),
            output: Sink::Nowhere,
            record: None,
            pid_file: None,
            foreign: None,
            group: None,
            sandbox: LaunchSandbox::default(),
        };
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        let why = launch.spawn().await.err().expect("no permit").to_string();
        assert!(begun.elapsed() >= QUEUE_TIMEOUT);
        for part in
            ["\"./run\"", &me, "waited 60 s for the 8 launches of this user", "log_path, pid_path or program"]
        {
            assert!(why.contains(part), "{part} in {why}");
        }
    }

    #[tokio::test]
    async fn a_launched_process_outlives_an_agent_that_ends_before_it_holds_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let line = |name: &str| folder.path().join(name).exists();
        let me = Account::of(&Spec::default()).expect("an account");
        let launch = Launch {
            command: "touch begun; sleep 0.2; touch ended".to_owned(),
            folder: folder.path().to_owned(),
            rights: Rights::new(me, Arc::default(), Arc::new(|_| false)),
            env: vec![("PATH".to_owned(), "/usr/bin:/bin".to_owned())],
            output: Sink::Nowhere,
            record: None,
            pid_file: None,
            foreign: None,
            group: None,
            sandbox: LaunchSandbox::default(),
        };
        let until = async |name: &str| {
            let appears = async {
                while !line(name) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(10), appears).await.is_ok()
        };
        {
            let mut launching = Box::pin(launch.spawn());
            // Polled once and dropped, as when the runtime shuts down during a launch.
            let polled = std::future::poll_fn(|context| Poll::Ready(launching.as_mut().poll(context))).await;
            assert!(polled.is_pending());
            assert!(until("begun").await);
        }
        assert!(until("ended").await, "the process was killed");
    }
}
