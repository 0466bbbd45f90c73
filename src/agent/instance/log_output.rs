//! Output of a foreground process: its log, directly or by a log writer, or a stored output.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::{InstanceTask, OpReply, failed};
use crate::agent::captured_output::{CapturedOutput, OutputError};
use crate::agent::error::{AgentError, LaunchError};
use crate::agent::log_writer::{self, LogOpening, LogWriterError, OutputPipe, WriterConfig};
use crate::agent::masking::SecretTexts;
use crate::agent::proc_scan;
use crate::agent::process::{ProcessHandle, ProcessIdentity};
use crate::agent::process_files::has_log;
use crate::agent::run_output::RunOutput;
use crate::agent::spawn::{QUEUE_TIMEOUT, Sink};
use crate::agent::start_output::{LogStart, LogTarget, StartAttempt};
use crate::agent::user_files::{FileWork, Rights, UserFileError};
use crate::failpoint;
use crate::model::{AutoType, Spec, SpecSection, StartMode};

/// Maximum wait for the writer of an ended process, which empties its pipe.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Delay before the next writer, after one that could not start or ended at once. It doubles with each failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum wait of a running process's next writer for a permit: the instance handles no operation meanwhile.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Failures after which the next writer opens its log later: a process must not wait for a log without end.
const MAX_FAILURES: u32 = 3;

/// The output pipe of a run and its writer, for the next agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipeRecord {
    /// Inode of the pipe.
    pub pipe: u64,
    pub writer: ProcessIdentity,
    pub config: WriterConfig,
}

/// The output of an instance's process.
#[derive(Default)]
pub struct ProcessOutput {
    /// The log writer of the process, or of an ended one whose pipe is not empty yet.
    pub(super) writer: Option<Box<RunningWriter>>,
    /// Time of the next attempt to start a writer.
    pub(super) retry_at: Option<Instant>,
    /// Writers that could not start since the last one that did.
    failures: u32,
    /// Pid of a process whose output is not a pipe of the agent.
    plain: Option<u32>,
    /// The stored output of a run in progress.
    stored: Option<RunOutput>,
}

pub struct RunningWriter {
    pub(super) handle: ProcessHandle,
    config: WriterConfig,
    pipe: u64,
    started: Instant,
}

impl ProcessOutput {
    /// The pipe of the process that was just launched.
    pub(super) fn record(&self) -> Option<Box<PipeRecord>> {
        let writer = self.writer.as_ref()?;
        let (pipe, config) = (writer.pipe, writer.config.clone());
        Some(Box::new(PipeRecord { pipe, writer: writer.handle.identity.clone(), config }))
    }

    /// Waits until the writer of an ended process has emptied its pipe.
    pub(super) async fn drain(&self) {
        if let Some(writer) = &self.writer {
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, writer.handle.wait_exit()).await;
        }
    }

    /// Whether a process still writes, or a writer has to be started.
    pub(super) fn is_active(&self) -> bool {
        self.writer.is_some() || self.stored.is_some() || self.retry_at.is_some()
    }

    /// The process has ended.
    pub(super) fn end(&mut self) {
        self.stored.take().into_iter().for_each(RunOutput::end);
    }
}

impl InstanceTask {
    /// The destination of the output of a foreground process. `captures`: output without a log is captured for the message
    /// of a failed start.
    pub(super) async fn foreground_output(
        &mut self,
        spec: &Spec,
        launch_id: &str,
        rights: &Rights,
        secrets: SecretTexts,
        captures: bool,
    ) -> Result<Sink, OpReply> {
        let location = self.shared.log_of(&self.key, spec);
        let location = location.map_err(|error| failed(AgentError::from(error)))?;
        let log = location.as_ref().map(|log| LogTarget::new(&log.path, self.key.name.to_string()));
        let config =
            location.as_ref().and_then(|log| log_writer::config_of(spec, self.key.name.as_str(), log));
        if location.as_ref().is_some_and(|log| log.is_agents)
            && let Err(error) = self.shared.logs.files().prepare(&self.key)
        {
            return Err(failed(format!("cannot create the folder of the log: {error}")));
        }
        let wrong = |error: OutputError| failed(AgentError::from(LaunchError::from(error)));
        let is_resident = spec.monitor.auto_type == AutoType::Resident;
        // The writer of the last process writes to the same log: its lines come first.
        self.process_output.drain().await;
        (self.process_output.writer, self.process_output.retry_at) = (None, None);
        self.process_output.failures = 0;
        // The log's own rights: a log of the agent is not opened with those of the process.
        let log_rights = location.map_or_else(|| rights.clone(), |log| log.rights);
        let sink = match (&log, config) {
            (Some(log), Some(config)) => {
                let piped = self.start_pipe((rights, &log_rights), config, log, captures).await;
                piped.map_err(|error| failed(AgentError::from(LaunchError::from(error))))?
            }
            (Some(log), None) => Sink::Log(log.clone()),
            (None, _) if !is_resident => self.store_output(launch_id, rights.account().uid()),
            (None, _) if captures => {
                let output = CapturedOutput::new(rights.account().uid()).map_err(wrong)?;
                let descriptor = output.descriptor().map_err(wrong)?;
                self.output = Some(output);
                Sink::File(descriptor)
            }
            (None, _) => Sink::Nowhere,
        };
        let log = log.map(|log| (log, log_rights));
        self.progress.attempt = captures.then(|| Box::new(StartAttempt { log, secrets }));
        Ok(sink)
    }

    /// Starts the log writer of a launch. The rights are those of the process, which writes to the pipe, and of the log.
    async fn start_pipe(
        &mut self,
        (writing, rights): (&Rights, &Rights),
        config: WriterConfig,
        log: &LogTarget,
        captures: bool,
    ) -> Result<Sink, LogWriterError> {
        let pipe = OutputPipe::new(writing.account())?;
        self.start_writer(rights, &pipe, config, LogOpening::First, QUEUE_TIMEOUT).await?;
        failpoint::point("writer-started");
        if captures {
            let (log, start) = (log.clone(), log.start.clone());
            let look = move |rights: &Rights| {
                let newest = rights.open_log_files(&log.path, &log.name, None)?.into_iter().next();
                Ok::<_, UserFileError>(newest.and_then(|file| LogStart::of(&file)))
            };
            if let Ok(Some(found)) = rights.run(FileWork::Launch, "read the log", look).await {
                let _ = start.set(found);
            }
        }
        Ok(Sink::File(pipe.descriptor()?))
    }

    async fn start_writer(
        &mut self,
        rights: &Rights,
        pipe: &OutputPipe,
        config: WriterConfig,
        opening: LogOpening,
        queue: Duration,
    ) -> Result<(), LogWriterError> {
        let handle = log_writer::start(rights, pipe, config.clone(), opening, queue).await?;
        let pipe = pipe.inode().unwrap_or(0);
        let writer = RunningWriter { handle, config, pipe, started: Instant::now() };
        self.process_output.writer = Some(Box::new(writer));
        Ok(())
    }

    /// Stores the output of a one-shot or scheduled run without a log.
    fn store_output(&mut self, launch_id: &str, uid: u32) -> Sink {
        match self.shared.logs.outputs().create(&self.key, launch_id, uid) {
            Ok((output, file)) => {
                self.process_output.stored = Some(output);
                Sink::File(file)
            }
            Err(error) => {
                warn!(instance = %self.key, %error, "output of the run is not stored");
                Sink::Nowhere
            }
        }
    }

    /// Stores the output of a start that failed.
    pub(super) fn store_failed_output(&self, launch_id: &str, text: &str) {
        if !text.is_empty()
            && let Err(error) = self.shared.logs.outputs().store(&self.key, launch_id, text)
        {
            warn!(instance = %self.key, %error, "output of the failed start is not stored");
        }
    }

    /// Keeps the output of a process that an earlier agent launched bounded.
    pub(super) fn adopt_output(&mut self) {
        let (Some(run), Some(handle)) = (&self.state.run, &self.handle) else { return };
        if run.live.spec.monitor.auto_type == AutoType::Resident {
            return;
        }
        if run.live.spec.identity.log_path.is_none()
            && let Some(uid) = handle.uid()
        {
            let outputs = self.shared.logs.outputs();
            self.process_output.stored = outputs.of_launch(&self.key, &run.incarnation, uid);
        }
    }

    /// Whether the process has a log writer, or may need one.
    pub(super) fn uses_log_writer(&self) -> bool {
        let Some(run) = self.state.run.as_ref().filter(|_| self.handle.is_some()) else { return false };
        let spec = &run.live.spec;
        let is_foreground = spec.monitor.auto_type != AutoType::Resident
            || spec.control.start_mode == Some(StartMode::Foreground);
        let may_have_pipe = self.process_output.plain != Some(run.identity.pid);
        run.log.is_some() || (spec.log.is_set() || has_log(spec)) && is_foreground && may_have_pipe
    }

    /// Takes over the log writer of an agent that was killed before it recorded the launch.
    async fn find_unrecorded_writer(&mut self) {
        let (Some(run), Some(handle)) = (&self.state.run, &self.handle) else { return };
        if self.process_output.writer.is_some() || run.log.is_some() || run.incarnation.is_empty() {
            return;
        }
        let pipe = OutputPipe::of(handle, None).and_then(|pipe| pipe.inode());
        // The log of the agent has a writer of the agent's own user.
        let uid = if has_log(&run.live.spec) { Some(nix::unistd::geteuid().as_raw()) } else { run.uid };
        let (Some(pipe), Some(uid)) = (pipe, uid) else { return };
        let found = proc_scan::run(move || log_writer::find_writer(pipe, uid)).await.ok().flatten();
        let Some((identity, config)) = found else { return };
        let Some(handle) = ProcessHandle::open(&identity) else { return };
        let writer = RunningWriter { handle, config, pipe, started: Instant::now() };
        self.process_output.writer = Some(Box::new(writer));
        let record = self.process_output.record();
        if let Some(run) = &mut self.state.run {
            run.log = record;
        }
        self.write(None).await;
    }

    /// Keeps a log writer for the running process, with the configuration of its spec.
    pub(super) async fn maintain_log_writer(&mut self) {
        self.find_unrecorded_writer().await;
        let (Some(run), Some(handle)) = (&self.state.run, &self.handle) else { return };
        let (record, spec) = (run.log.as_deref(), &run.live.spec);
        let Ok(location) = self.shared.log_of(&self.key, spec) else { return };
        let wanted =
            location.as_ref().and_then(|log| log_writer::config_of(spec, self.key.name.as_str(), log));
        let Ok(rights) = location.map_or_else(|| self.shared.rights_of(spec), |log| Ok(log.rights)) else {
            return;
        };
        // Without `log` the writer of the pipe stays, and rotates nothing.
        let wanted = wanted.or_else(|| {
            let config = record.map(|record| record.config.clone())?;
            Some(WriterConfig { max_size: u64::MAX, ..config })
        });
        let Some(wanted) = wanted else { return };
        if self.process_output.writer.is_none()
            && let Some(record) = record
            && let Some(known) = ProcessHandle::open(&record.writer)
        {
            let (config, pipe) = (record.config.clone(), record.pipe);
            let writer = RunningWriter { handle: known, config, pipe, started: Instant::now() };
            self.process_output.writer = Some(Box::new(writer));
        }
        let is_due = self.process_output.retry_at.is_none_or(|at| at <= Instant::now());
        match &self.process_output.writer {
            Some(writer) if writer.config == wanted => return,
            // It stops reading, and its successor continues: the pipe keeps the rest.
            Some(writer) => drop(writer.handle.signal(rustix::process::Signal::TERM)),
            None if !is_due => return,
            None => {}
        }
        let Some(pipe) = OutputPipe::of(handle, record.map(|record| record.pipe)) else {
            info!(instance = %self.key, "`log` takes effect with the next start: the process writes its log itself");
            self.process_output.plain = Some(run.identity.pid);
            return;
        };
        self.process_output.retry_at = None;
        let opening = match self.process_output.failures < MAX_FAILURES {
            true => LogOpening::First,
            false => LogOpening::Deferred,
        };
        match self.start_writer(&rights, &pipe, wanted, opening, PERMIT_TIMEOUT).await {
            Ok(()) => {
                if opening == LogOpening::Deferred {
                    warn!(instance = %self.key, "cannot open the log: output of the process is dropped until the log writer can");
                }
                self.process_output.failures = 0;
                let record = self.process_output.record();
                if let Some(run) = &mut self.state.run {
                    run.log = record;
                }
                self.write(None).await;
            }
            Err(error) => {
                warn!(instance = %self.key, %error, "cannot start a log writer: output of the process waits in the pipe");
                let output = &mut self.process_output;
                let delay =
                    RETRY_INTERVAL.saturating_mul(1 << output.failures.min(6)).min(MAX_RETRY_INTERVAL);
                output.failures = output.failures.saturating_add(1);
                output.retry_at = Some(Instant::now() + delay);
            }
        }
    }

    /// A log writer ended: by itself after its process, or killed.
    pub(super) fn handle_writer_exit(&mut self) {
        let Some(writer) = self.process_output.writer.take() else { return };
        if self.handle.is_some() {
            warn!(instance = %self.key, pid = writer.handle.identity.pid, "log writer ended: starting another one");
            let is_early = writer.started.elapsed() < RETRY_INTERVAL;
            self.process_output.retry_at = is_early.then(|| Instant::now() + RETRY_INTERVAL);
        }
    }
}
