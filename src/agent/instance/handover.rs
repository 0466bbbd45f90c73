//! Handover: a command, or the process itself, replaces the main process by another one of the same tree.
//!
//! A reload_cmd or restart_cmd may start a successor (`haproxy -sf`, a binary upgrade of nginx). The pid file names it, and
//! it is taken over with proof: the launch's control group, descent from a command of the instance, or the launch id. The
//! old process may drain inside the tree. A main process that ends is replaced the same way, before supervision
//! relaunches: it never starts a second one.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, timeout};
use tracing::info;

use super::ending::named_signal;
use super::operations::POLL_INTERVAL;
use super::{InstanceTask, OpReply, done, failed};
use crate::agent::cgroup::Cgroup;
use crate::agent::error::AgentError;
use crate::agent::exit_record::{ExitRecordError, command_id};
use crate::agent::ownership::{self, LaunchEvidence, OwnershipError, OwnershipProof};
use crate::agent::process::ProcessHandle;
use crate::agent::restart_policy::{RelaunchLimits, RestartSeries};
use crate::agent::spawn::CommandExit;
use crate::agent::start_output::with_output;
use crate::agent::state::ProcessRun;
use crate::agent::tree::LaunchTraces;
use crate::agent::user_files::Rights;
use crate::agent_protocol::OwnedSpec;
use crate::clock;
use crate::failpoint;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Field, Monitor, Spec, live_after_registration};

/// Maximum wait for a process of the launch that has not called `execve` or written its pid file, beyond the start check.
pub(super) const START_GRACE: Duration = Duration::from_secs(2);

/// Time without any process of the launch after which it counts as ended.
const EXEC_SETTLE: Duration = Duration::from_millis(100);

/// Maximum scans for a process that took over.
const MAX_SCANS: u32 = 3;

/// Searches in a row without any process of the launch after which it counts as ended.
const MAX_MISSES: u32 = 4;

/// Time in which a process ends that does not handle the signal of a reload.
const SIGNAL_SETTLE: Duration = Duration::from_millis(500);

/// Method of a reload.
enum ReloadBy {
    Command(String),
    Signal(Signal),
}

impl ReloadBy {
    fn field(&self) -> &'static str {
        match self {
            ReloadBy::Command(_) => "reload_cmd",
            ReloadBy::Signal(_) => "reload_signal",
        }
    }
}

/// The launch that a command of the instance belongs to.
struct CommandContext {
    launch_id: String,
    group: Option<Cgroup>,
    /// The group was created for this command.
    is_new: bool,
    since: u64,
    replaces: Option<ProcessRun>,
}

impl CommandContext {
    fn evidence(&self) -> LaunchEvidence<'_> {
        LaunchEvidence {
            launch_id: &self.launch_id,
            group: self.group.as_ref(),
            since: self.since,
            replaces: self.replaces.as_ref(),
        }
    }
}

impl InstanceTask {
    /// The launch in which a command of the operation runs: the launch of the process or, for a process that the agent did
    /// not launch, a new one.
    fn command_context(&self, spec: &Spec) -> CommandContext {
        let (new_id, since) = self.launch_of_operation();
        let groups = &self.shared.groups;
        let is_new = self.own_launch().is_none();
        let (launch_id, group) = self.own_launch().unwrap_or_else(|| {
            let group = groups.make(&new_id, spec);
            (new_id, group)
        });
        CommandContext { launch_id, group, is_new, since, replaces: self.state.run.clone() }
    }

    /// Runs a command that may replace the main process, which is reaped when it ends.
    async fn run_replacing_command(
        &mut self,
        owned: &OwnedSpec,
        command: &str,
        record: Option<String>,
        context: &CommandContext,
    ) -> Result<CommandExit, AgentError> {
        let launch = Some((context.launch_id.as_str(), context.group.clone()));
        let Some(handle) = self.handle.take() else {
            return Box::pin(self.command(&owned.spec, command, record, launch)).await;
        };
        let ended = handle.reaping(Box::pin(self.command(&owned.spec, command, record, launch))).await;
        self.handle = Some(handle);
        ended
    }

    /// Restarts a daemon by its restart_cmd, which replaces the process.
    pub(super) async fn restart_with_command(
        &mut self,
        owned: &OwnedSpec,
        command: &str,
        op_id: Option<&str>,
    ) -> OpReply {
        let rights = match self.shared.rights_of(&owned.spec) {
            Ok(rights) => rights,
            Err(why) => return failed(AgentError::from(why)),
        };
        self.state.ending = op_id.map(str::to_owned);
        if let Err(reply) = self.write_pending().await {
            return reply;
        }
        let live = self.state.run.as_ref().map_or_else(|| owned.clone(), |run| run.live.clone());
        if let Err(reply) = self.run_before_stop(&live.spec, op_id.unwrap_or_default()).await {
            self.state.ending = None;
            return reply;
        }
        let context = self.command_context(&owned.spec);
        let record = op_id.map(|op_id| command_id(op_id, "restart"));
        let reply = self.replace_with_command(owned, command, record, &rights, &context).await;
        // The processes of a failed command in a launch of its own do not belong to the instance.
        let is_used = self.state.run.as_ref().is_some_and(|run| run.incarnation == context.launch_id);
        if !context.is_new || is_used {
            return reply;
        }
        let group = context.group.as_ref().map(Cgroup::path);
        let uid = Some(rights.account().uid());
        self.end_failed_launch(uid, (context.launch_id, group), LaunchTraces::default(), reply).await
    }

    async fn replace_with_command(
        &mut self,
        owned: &OwnedSpec,
        command: &str,
        record: Option<String>,
        rights: &Rights,
        context: &CommandContext,
    ) -> OpReply {
        match self.run_replacing_command(owned, command, record, context).await {
            // A new process shows that the command did its work.
            Err(AgentError::Record(why @ ExitRecordError::OutcomeUnknown)) => {
                return match wait_for_successor(&owned.spec, rights, context).await {
                    Ok((handle, proof)) => {
                        self.take_over(handle, owned.clone(), false, proof, context);
                        done()
                    }
                    Err(_) => failed(AgentError::from(why)),
                };
            }
            Err(why) => return failed(why),
            Ok(CommandExit::Success) => {}
            Ok(CommandExit::Failure(code, output)) => {
                return failed(with_output(&format!("restart_cmd ended with {code}"), &output));
            }
            Ok(CommandExit::TimedOut(output)) => {
                return failed(with_output("restart_cmd timed out", &output));
            }
        }
        match wait_for_successor(&owned.spec, rights, context).await {
            Ok((handle, proof)) => {
                self.take_over(handle, owned.clone(), false, proof, context);
                done()
            }
            Err(why) => (RowCode::CHECK_FAILED, format!("no new process started after restart_cmd: {why}")),
        }
    }

    pub(super) async fn reload(
        &mut self,
        owned: &OwnedSpec,
        takes: Option<&[String]>,
        op_id: &str,
    ) -> OpReply {
        // A resumed reload may have replaced the process before the agent was killed.
        let is_resumed = self.progress.operation.as_ref().is_some_and(|operation| operation.1);
        let may_have_replaced = is_resumed && self.state.run.is_some();
        if !self.is_running() && !may_have_replaced {
            return self.not_running(owned).await;
        }
        let control = &owned.spec.control;
        let signal = control.reload_signal.as_deref().and_then(named_signal);
        let how = match (control.reload_cmd.clone(), signal) {
            (Some(command), _) => ReloadBy::Command(command),
            (None, Some(signal)) => ReloadBy::Signal(signal),
            (None, None) => return failed("the spec has no reload_cmd"),
        };
        if let Err(reply) = self.write_pending().await {
            return reply;
        }
        let rights = match self.shared.rights_of(&owned.spec) {
            Ok(rights) => rights,
            Err(why) => return failed(AgentError::from(why)),
        };
        let context = self.command_context(&owned.spec);
        let ran = match &how {
            ReloadBy::Command(command) => {
                let record = Some(command_id(op_id, "reload"));
                self.run_replacing_command(owned, command, record, &context).await
            }
            ReloadBy::Signal(signal) => self.send_reload_signal(*signal).await,
        };
        let reply = match ran {
            Err(why) => failed(why),
            Ok(CommandExit::Failure(code, output)) => {
                failed(with_output(&format!("reload_cmd ended with {code}"), &output))
            }
            Ok(CommandExit::TimedOut(output)) => failed(with_output("reload_cmd timed out", &output)),
            Ok(CommandExit::Success) => {
                self.finish_reload(owned, takes, how.field(), &rights, &context).await
            }
        };
        // A successor whose pid file comes late may be in the group: only an empty one is removed.
        if let Some(group) = context.group.filter(|_| context.is_new) {
            group.remove_if_empty();
        }
        reply
    }

    /// Signals the main process, and gives it time to end: one that does not handle the signal ends at once. A resumed
    /// reload sends the signal again, since nothing shows whether it arrived.
    async fn send_reload_signal(&mut self, signal: Signal) -> Result<CommandExit, AgentError> {
        if let Some(handle) = &self.handle {
            let _ = handle.signal(signal);
            failpoint::point("reload-signalled");
            let _ = timeout(SIGNAL_SETTLE, handle.wait_exit()).await;
        }
        Ok(CommandExit::Success)
    }

    /// Takes over the successor that a reload left in place of the main process, and records the reloaded fields. `by`: the
    /// field that states how to reload.
    async fn finish_reload(
        &mut self,
        owned: &OwnedSpec,
        takes: Option<&[String]>,
        by: &str,
        rights: &Rights,
        context: &CommandContext,
    ) -> OpReply {
        let Some(before) = self.state.run.as_ref().map(|run| (run.identity.pid, run.live.clone())) else {
            return failed("process is gone");
        };
        let live = reloaded(&before.1, owned, takes);
        let has_ended = match &self.handle {
            Some(handle) => timeout(Duration::ZERO, handle.wait_exit()).await.is_ok(),
            None => true,
        };
        let successor = match has_ended {
            true => wait_for_successor(&owned.spec, rights, context).await,
            false => ownership::claim_launched(&owned.spec, rights, &context.evidence()).await,
        };
        let mut reply = done();
        match successor {
            Ok((handle, proof)) => {
                let (old, new) = (before.0, handle.identity.pid);
                info!(instance = %self.key, old, new, "{by} replaced the process");
                reply.1 = format!("success; the pid changed from {old} to {new}: {by} replaced the process");
                // A reload puts only some fields of the spec into effect.
                let is_spec_unknown = self.state.run.as_ref().is_some_and(ProcessRun::is_spec_unknown);
                self.take_over(handle, live, is_spec_unknown, proof, context);
                failpoint::point("handed-over");
            }
            Err(why) if has_ended => {
                let message = format!("process ended during {by}, and has no successor: {why}");
                return (RowCode::CHECK_FAILED, message);
            }
            Err(_) => {
                if let Some(run) = &mut self.state.run {
                    run.live = live;
                }
            }
        }
        self.state.given = Some(owned.clone());
        self.register_live();
        reply
    }

    /// Makes a proven successor the main process. The old one may drain inside the tree.
    fn take_over(
        &mut self,
        handle: ProcessHandle,
        live: OwnedSpec,
        is_spec_unknown: bool,
        proof: OwnershipProof,
        context: &CommandContext,
    ) {
        let (incarnation, group) = match (proof, &context.replaces) {
            (OwnershipProof::Replaced, Some(run)) => (run.incarnation.clone(), run.group.clone()),
            (OwnershipProof::Replaced, None) | (OwnershipProof::Launch, _) => {
                (context.launch_id.clone(), context.group.as_ref().map(Cgroup::path))
            }
        };
        let adopted = Some(is_spec_unknown);
        let run = ProcessRun { incarnation, group, adopted, ..ProcessRun::of_handle(&handle, &live) };
        self.set_main(handle, run);
    }

    fn set_main(&mut self, handle: ProcessHandle, run: ProcessRun) {
        // A replaced process ends a series of relaunches as one that ends by itself does.
        if self.uptime_ms() >= RelaunchLimits::of(&run.live.spec).settled_ms {
            self.launches.series = RestartSeries::default();
        }
        // The processes of the tree stay members of it.
        let before = self.state.run.as_ref().filter(|before| before.incarnation == run.incarnation);
        let mut traces = before.map(|before| before.traces.clone()).unwrap_or_default();
        let uid = before.and_then(|before| before.uid).or_else(|| self.uid_of(&run.live.spec));
        traces.add_session(&handle, &run.incarnation, run.group.as_deref().map(Cgroup::at).as_ref());
        self.state.run = Some(ProcessRun { uid, traces, ..run });
        (self.state.since, self.state.started, self.state.exit) = (clock::now().0, clock::now().0, None);
        // The message is about the replaced process.
        self.state.message.clear();
        self.launches.last = self.launches.last.map(|_| std::time::Instant::now());
        self.handle = Some(handle);
    }

    /// Takes over the process that the pid file names, if the main process ended and the named one belongs to its tree.
    pub(super) async fn take_over_after_exit(&mut self) -> bool {
        let Some(run) = self.state.run.clone() else { return false };
        let spec = &run.live.spec;
        if spec.monitor.auto_type != AutoType::Resident {
            return false;
        }
        let (Some(tree), Ok(rights)) = (self.tree(self.handle.as_ref()), self.shared.rights_of(spec)) else {
            return false;
        };
        // A failed scan proves nothing: without a result, the tree with a healthy successor would be ended.
        let mut members = tree.members().await;
        for _ in 1..MAX_SCANS {
            if members.is_err() {
                members = tree.members().await;
            }
        }
        let Ok(members) = members else { return false };
        if members.known.is_empty() {
            return false;
        }
        let Ok(handle) = ownership::claim_member(spec, &rights, &members.known).await else { return false };
        let (old, new) = (run.identity.pid, handle.identity.pid);
        info!(instance = %self.key, old, new, "process ended, and a process of its tree took over");
        let adopted = Some(run.is_spec_unknown());
        let successor = ProcessRun::of_handle(&handle, &run.live);
        let ProcessRun { incarnation, group, .. } = run;
        self.set_main(handle, ProcessRun { incarnation, group, adopted, ..successor });
        self.write(None).await;
        self.report();
        true
    }

    /// Lets the fields of the registered spec with effect Register take effect in the running process.
    pub(super) fn register_live(&mut self) -> bool {
        let (Some(given), Some(run)) = (&self.state.given, &mut self.state.run) else { return false };
        let live = (&*run.live.spec, run.live.revision);
        match live_after_registration(live, (&given.spec, given.revision)) {
            Some((spec, _)) if spec == *given.spec => run.live = given.clone(),
            Some((spec, revision)) => {
                run.live = OwnedSpec { spec: Arc::new(spec), owner: given.owner.clone(), revision };
            }
            None => return false,
        }
        if let Some(group) = run.group() {
            group.change_limits(&run.live.spec);
        }
        true
    }
}

/// The spec in effect after a reload: only the reloaded fields change.
fn reloaded(live: &OwnedSpec, owned: &OwnedSpec, takes: Option<&[String]>) -> OwnedSpec {
    let mut spec = Spec::clone(&live.spec);
    let usual = [Field::Configmap, Field::ConfigPath];
    let named = |field: &&Field| takes.is_none_or(|takes| takes.iter().any(|name| name == field.path()));
    let all: &[Field] = if takes.is_some() { Field::ALL } else { &usual };
    all.iter().filter(named).for_each(|field| spec.take(*field, &owned.spec));
    let whole = spec == *owned.spec;
    OwnedSpec { spec: Arc::new(spec), owner: owned.owner.clone(), revision: owned.revision.filter(|_| whole) }
}

/// Waits for the successor that the pid file names, until the start check is over.
async fn wait_for_successor(
    spec: &Spec,
    rights: &Rights,
    context: &CommandContext,
) -> Result<(ProcessHandle, OwnershipProof), OwnershipError> {
    let (mut wait, evidence) = (StartWait::begin(spec), context.evidence());
    loop {
        let why = match ownership::claim_launched(spec, rights, &evidence).await {
            Ok(found) => return Ok(found),
            Err(why) => why,
        };
        if !wait.goes_on(spec, rights, &evidence).await {
            return Err(why);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The wait of a start check: until its time is over, and a little longer while the launch may still become the process that
/// the pid file names.
pub(super) struct StartWait {
    begun: Instant,
    check: Duration,
    /// Time of the last evidence that the launch may still start, after the check.
    last_seen: Option<Instant>,
    /// Searches in a row without evidence.
    misses: u32,
}

impl StartWait {
    pub(super) fn begin(spec: &Spec) -> StartWait {
        let secs = spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        StartWait {
            begun: Instant::now(),
            check: Duration::from_secs(secs.into()),
            last_seen: None,
            misses: 0,
        }
    }

    /// Whether to wait on.
    pub(super) async fn goes_on(
        &mut self,
        spec: &Spec,
        rights: &Rights,
        evidence: &LaunchEvidence<'_>,
    ) -> bool {
        let waited = self.begun.elapsed();
        if waited < self.check {
            return true;
        }
        let last_seen = *self.last_seen.get_or_insert_with(Instant::now);
        match ownership::may_still_start(spec, rights, evidence).await {
            true => (self.last_seen, self.misses) = (Some(Instant::now()), 0),
            false => self.misses = self.misses.saturating_add(1),
        }
        // A process has no arguments and no environment for a moment while it calls `execve`. A search misses a process that
        // is forked meanwhile by one that exits; on a busy host, a search takes longer than that.
        let may_be_missed = last_seen.elapsed() < EXEC_SETTLE || self.misses < MAX_MISSES;
        waited < self.check + START_GRACE && may_be_missed
    }
}
