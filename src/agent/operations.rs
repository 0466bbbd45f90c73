//! What a keeper does when it is asked: GSE's operations on a real process, and the codes that they answer with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::adoption::not_owned;
use super::cgroup::Cgroup;
use super::exit_record::command_id;
use super::instance::{InstanceTask, Monitors, OpReply, done, failed};
use super::output::Output;
use super::ownership::{self, LaunchEvidence, OwnershipProof};
use super::process::boot_id;
use super::restart_policy::{RestartEvent, RestartSeries};
use super::spawn::CommandExit;
use super::state::{LaunchIntent, ProcessRun, intent_key};
use super::user_files::Rights;
use super::{fresh_id, now_ms};
use crate::failpoint;
use crate::gse::agent_protocol::OwnedSpec;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Field, Monitor, Spec, StartMode};
use crate::store::{Store, Txn};

/// How long a stop waits unless its spec says otherwise.
const STOP_SECS: u32 = 10;
/// Maximum rest of a start's check under the next agent: a stop that was sent meanwhile waits for it.
const RESUMED_CHECK: Duration = Duration::from_secs(10);
/// How long a process may take to go after it was killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a pid file is looked at while a daemon comes up.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl InstanceTask {
    pub(super) fn is_running(&self) -> bool {
        self.hold.is_some()
    }

    /// Is what runs what this very operation launched, before we died and were asked again?
    fn launched_by(&self, op_id: Option<&str>) -> bool {
        let by = self.state.run.as_ref().and_then(|run| run.by.as_deref());
        self.is_running() && by.is_some() && by == op_id
    }

    pub(super) async fn start(&mut self, held: &OwnedSpec, op_id: Option<String>) -> OpReply {
        if self.launched_by(op_id.as_deref()) {
            let said = self.check_after_launch(held).await;
            if said.0 == RowCode::DONE {
                (self.state.given, self.state.hosted) = (Some(held.clone()), true);
            }
            return said;
        }
        // A launch that an earlier agent began is continued, not taken for a stranger's process.
        let is_continued = self.interrupted.as_ref().is_some_and(|intent| intent.op_id == op_id);
        if !is_continued && let Err(why) = self.reclaim_orphan(held).await {
            return failed(format!("nothing was started: {why}"));
        }
        if self.is_running() {
            // A daemon of an earlier launch: from now on it is known, and supervised.
            if self.state.given.is_none() {
                (self.state.given, self.state.hosted) = (Some(held.clone()), true);
            }
            return (RowCode::ALREADY_RUNNING, "it is running already".to_owned());
        }
        match if is_continued { Ok(None) } else { self.foreign_pid(held).await } {
            Ok(None) => {}
            Ok(Some(pid)) => return (RowCode::ALREADY_RUNNING, not_owned(pid)),
            Err(why) => return failed(format!("nothing was started: {why}")),
        }
        self.series = RestartSeries::default();
        let (given, hosted) = (self.state.given.clone(), self.state.hosted);
        let said = self.launch(held, op_id, true).await;
        // A failed start leaves what was given, and the guard, as they were.
        (self.state.given, self.state.hosted) = match said.0 {
            RowCode::DONE => (Some(held.clone()), true),
            _ => (given, hosted),
        };
        self.launch_failed = said.0 != RowCode::DONE;
        said
    }

    /// A supervised process that a failed operation left down comes back with what it was given before. Once the result is
    /// written: that launch is not the operation's.
    pub(super) async fn supervise_after_failure(&mut self) {
        let failed = std::mem::take(&mut self.launch_failed);
        if failed && self.state.hosted && !self.state.dormant && !self.is_running() {
            self.apply_restart_policy(RestartEvent::Ended { up_ms: 0 }).await;
        }
    }

    /// Brings it up with a spec. `check`: waits until it has shown that it stays.
    pub(super) async fn launch(&mut self, held: &OwnedSpec, op_id: Option<String>, check: bool) -> OpReply {
        if let Err(refused) = self.shared.check_policy(&self.key, &held.spec).await {
            return failed(refused);
        }
        // What its guard launches has its mark on disk already, and so has a launch that is resumed.
        let resumed = self.interrupted.take().filter(|intent| intent.op_id == op_id);
        let reserved = if op_id.is_none() { self.state.next.take() } else { None };
        let mark = resumed.map(|intent| intent.incarnation).or(reserved);
        let written = mark.is_some();
        let incarnation = mark.unwrap_or_else(fresh_id);
        let groups = &self.shared.groups;
        let group = groups.of(&incarnation).or_else(|| groups.make(&incarnation, &held.spec.resource));
        let path = group.as_ref().map(Cgroup::path);
        let boot = boot_id().to_owned();
        let intent = LaunchIntent { incarnation, op_id, held: held.clone(), at: now_ms(), group: path, boot };
        if !written {
            let value = serde_json::to_vec(&intent).unwrap_or_default();
            let txn = Txn::put(intent_key(&self.key), value).and(self.pending());
            if let Err(error) = self.shared.store.txn(txn).await {
                return failed(format!("not started: the agent's store cannot be written: {error}"));
            }
        }
        failpoint::point("intent-written");
        let begun = match self.begin(held, &intent.incarnation, group.clone()).await {
            Ok(hold) => hold,
            Err(said) => {
                group.into_iter().for_each(Cgroup::clear);
                return said;
            }
        };
        failpoint::point("born");
        let LaunchIntent { incarnation, op_id: by, group, .. } = intent;
        (self.state.dormant, self.state.unknown_run) = (false, None);
        let (identity, live) = (begun.identity.clone(), held.clone());
        let output = self.output.as_ref().and_then(Output::inode);
        self.state.run = Some(ProcessRun { identity, live, by, incarnation, group, output });
        (self.state.since, self.state.started, self.state.exit) = (now_ms(), now_ms(), None);
        (self.launched, *self.monitors) = (Some(Instant::now()), Monitors::default());
        self.state.message.clear();
        if held.spec.monitor.auto_type == AutoType::OneShot {
            self.state.ran = Some(held.clone());
        }
        self.hold = Some(begun);
        self.write(None).await;
        failpoint::point("row-written");
        self.report();
        let secs = held.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        if !check || held.spec.monitor.auto_type != AutoType::Resident {
            return done();
        }
        self.stays_running(Duration::from_secs(secs.into())).await
    }

    /// Does a process that this operation launched, before the agent was restarted, stay for the rest of its check?
    async fn check_after_launch(&mut self, held: &OwnedSpec) -> OpReply {
        let secs = held.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        if held.spec.monitor.auto_type != AutoType::Resident {
            return done();
        }
        let passed = u64::try_from(now_ms().saturating_sub(self.state.started)).unwrap_or(0);
        let rest = Duration::from_secs(secs.into()).saturating_sub(Duration::from_millis(passed));
        self.stays_running(rest.min(RESUMED_CHECK)).await
    }

    /// Does it stay up for so long?
    async fn stays_running(&mut self, time: Duration) -> OpReply {
        let Some(hold) = &self.hold else { return failed("it is gone") };
        let Ok(code) = tokio::time::timeout(time, hold.wait_exit()).await else { return done() };
        self.record_exit(code).await;
        let code = code.map_or("an unknown code".to_owned(), |code| format!("code {code}"));
        (RowCode::CHECK_FAILED, format!("it ended with {code} within {} s", time.as_secs()))
    }

    pub(super) async fn stop(&mut self, held: &OwnedSpec, op_id: &str) -> OpReply {
        self.stop_by_operation(held, held.spec.control.stop_cmd.as_deref(), Signal::TERM, op_id).await
    }

    pub(super) async fn kill(&mut self, held: &OwnedSpec, op_id: &str) -> OpReply {
        self.stop_by_operation(held, held.spec.control.kill_cmd.as_deref(), Signal::KILL, op_id).await
    }

    /// Did this very operation bring it down, before we died and were asked again?
    fn ended_by(&self, op_id: Option<&str>) -> bool {
        !self.is_running() && op_id.is_some() && self.state.ending.as_deref() == op_id
    }

    /// Brings it down for good: nobody guards it any more, unless it could not be brought down.
    async fn stop_by_operation(
        &mut self,
        held: &OwnedSpec,
        command: Option<&str>,
        signal: Signal,
        op_id: &str,
    ) -> OpReply {
        if self.ended_by(Some(op_id)) {
            return done();
        }
        if !self.is_running() {
            return self.not_running(held).await;
        }
        // Should we die on the way, it must not be launched again by whoever comes after.
        let hosted = self.operation.as_ref().map_or(self.state.hosted, |operation| operation.0.hosted);
        self.state.hosted = false;
        self.series = RestartSeries::default();
        self.state.ending = Some(op_id.to_owned());
        // A full disk does not keep a process from being stopped: to stop it twice does no harm.
        let pending = self.pending();
        let _ = self.write_with(None, pending).await;
        failpoint::point("unguarded");
        let said = self.stop_process(held, command, signal, Some(op_id)).await;
        if said.0 != RowCode::DONE && self.is_running() {
            self.state.hosted = hosted;
        }
        said
    }

    /// By its command, or by a signal to the process itself, and in the end by force.
    pub(super) async fn stop_process(
        &mut self,
        held: &OwnedSpec,
        command: Option<&str>,
        signal: Signal,
        op_id: Option<&str>,
    ) -> OpReply {
        let secs = held.spec.monitor.stop_check_secs.unwrap_or(STOP_SECS);
        let wait = Duration::from_secs(secs.into());
        let Some(hold) = self.hold.take() else { return done() };
        if let Some(command) = command {
            let record = op_id.map(|op_id| command_id(op_id, "stop"));
            let output = match self.command(&held.spec, command, record, None).await {
                Err(why) => Some(why),
                Ok(CommandExit::Success) => None,
                Ok(CommandExit::Failure(code, output)) => {
                    Some(format!("stop: its command ended with {code}: {output}"))
                }
                Ok(CommandExit::TimedOut(output)) => {
                    Some(format!("stop: its command took too long: {output}"))
                }
            };
            let ended = tokio::time::timeout(wait, hold.wait_exit()).await;
            return match (ended, output) {
                (Ok(code), _) => {
                    self.record_exit(code).await;
                    done()
                }
                (Err(_), output) => {
                    self.hold = Some(hold);
                    match output {
                        Some(output) => failed(output),
                        None => (RowCode::CHECK_FAILED, format!("stop: it is still alive after {secs} s")),
                    }
                }
            };
        }
        let group = self.state.run.as_ref().and_then(ProcessRun::group);
        // By force, its whole tree goes with it.
        let force = || group.as_ref().is_some_and(Cgroup::kill);
        if signal == Signal::KILL {
            force();
        }
        let _ = hold.signal(signal);
        failpoint::point("signalled");
        let mut ended = tokio::time::timeout(wait, hold.wait_exit()).await;
        if ended.is_err() {
            force();
            let _ = hold.signal(Signal::KILL);
            ended = tokio::time::timeout(KILL_TIMEOUT, hold.wait_exit()).await;
        }
        match ended {
            Ok(code) => {
                self.record_exit(code).await;
                done()
            }
            Err(_) => {
                self.hold = Some(hold);
                (RowCode::CHECK_FAILED, "stop: it is still alive, though it was killed".to_owned())
            }
        }
    }

    pub(super) async fn restart(&mut self, held: &OwnedSpec, op_id: Option<String>) -> OpReply {
        if self.launched_by(op_id.as_deref()) {
            let said = self.check_after_launch(held).await;
            match said.0 {
                RowCode::DONE => self.state.given = Some(held.clone()),
                _ => self.launch_failed = true,
            }
            return said;
        }
        let begun = self.ended_by(op_id.as_deref());
        if !self.is_running() && !begun {
            return self.not_running(held).await;
        }
        let daemon = held.spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
        if let (true, Some(command)) = (daemon, &held.spec.control.restart_cmd) {
            let said = self.restart_with_command(held, command, op_id.as_deref()).await;
            if said.0 == RowCode::DONE {
                self.state.given = Some(held.clone());
            }
            return said;
        }
        let live = self.state.run.as_ref().map_or_else(|| held.clone(), |run| run.live.clone());
        if !begun {
            self.state.ending.clone_from(&op_id);
            let pending = self.pending();
            if let Err(error) = self.write_with(None, pending).await {
                self.state.ending = None;
                return failed(format!("not restarted: the agent's store cannot be written: {error}"));
            }
            let stop = live.spec.control.stop_cmd.as_deref();
            let said = self.stop_process(&live, stop, Signal::TERM, op_id.as_deref()).await;
            if said.0 != RowCode::DONE {
                return said;
            }
            failpoint::point("down");
        }
        let (given, said) = (self.state.given.clone(), self.launch(held, op_id, true).await);
        match said.0 {
            RowCode::DONE => self.state.given = Some(held.clone()),
            _ => {
                self.state.given = given;
                self.launch_failed = true;
            }
        }
        said
    }

    /// By its own command: the process that is there afterwards is another.
    async fn restart_with_command(
        &mut self,
        held: &OwnedSpec,
        command: &str,
        op_id: Option<&str>,
    ) -> OpReply {
        let rights = match self.shared.rights_of(&held.spec) {
            Ok(rights) => rights,
            Err(why) => return failed(why),
        };
        self.state.ending = op_id.map(str::to_owned);
        if let Err(said) = self.write_pending().await {
            return said;
        }
        let (launch_id, since) = self.launch_of_operation();
        let groups = &self.shared.groups;
        let group = groups.of(&launch_id).or_else(|| groups.make(&launch_id, &held.spec.resource));
        let replaced = self.state.run.clone();
        let evidence = LaunchEvidence {
            launch_id: &launch_id,
            group: group.as_ref(),
            since,
            replaces: replaced.as_ref(),
        };
        let record = op_id.map(|op_id| command_id(op_id, "restart"));
        let said = self.replace_with_command(held, command, record, &rights, &evidence).await;
        // An empty group is removed; what a failed command left in its group is not the instance's process.
        let is_used = self.state.run.as_ref().is_some_and(|run| run.incarnation == launch_id);
        group.into_iter().filter(|_| !is_used).for_each(Cgroup::clear);
        said
    }

    async fn replace_with_command(
        &mut self,
        held: &OwnedSpec,
        command: &str,
        record: Option<String>,
        rights: &Rights,
        evidence: &LaunchEvidence<'_>,
    ) -> OpReply {
        let launch = Some((evidence.launch_id, evidence.group.cloned()));
        match self.command(&held.spec, command, record, launch).await {
            Err(why) => return failed(why),
            Ok(CommandExit::Success) => {}
            Ok(CommandExit::Failure(code, output)) => {
                return failed(format!("restart_cmd ended with {code}: {output}"));
            }
            Ok(CommandExit::TimedOut(output)) => {
                return failed(format!("restart_cmd took too long: {output}"));
            }
        }
        let secs = held.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        let until = tokio::time::Instant::now() + Duration::from_secs(secs.into());
        loop {
            let why = match ownership::claim_launched(&held.spec, rights, evidence).await {
                Ok((hold, proof)) => {
                    let (incarnation, group) = match (proof, evidence.replaces) {
                        (OwnershipProof::Replaced, Some(run)) => (run.incarnation.clone(), run.group.clone()),
                        (OwnershipProof::Replaced, None) | (OwnershipProof::Launch, _) => {
                            (evidence.launch_id.to_owned(), evidence.group.map(Cgroup::path))
                        }
                    };
                    self.state.run =
                        Some(ProcessRun { incarnation, group, ..ProcessRun::adopted(&hold, held) });
                    (self.state.since, self.state.started, self.state.exit) = (now_ms(), now_ms(), None);
                    // The end of the replaced process does not concern this one.
                    self.state.message.clear();
                    self.hold = Some(hold);
                    return done();
                }
                Err(why) => why,
            };
            if tokio::time::Instant::now() >= until {
                return (RowCode::CHECK_FAILED, format!("no new process came up after restart_cmd: {why}"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    pub(super) async fn reload(
        &mut self,
        held: &OwnedSpec,
        takes: Option<&[String]>,
        op_id: &str,
    ) -> OpReply {
        if !self.is_running() {
            return self.not_running(held).await;
        }
        let Some(command) = held.spec.control.reload_cmd.clone() else {
            return failed("its spec has no reload_cmd");
        };
        if let Err(said) = self.write_pending().await {
            return said;
        }
        match self.command(&held.spec, &command, Some(command_id(op_id, "reload")), None).await {
            Err(why) => return failed(why),
            Ok(CommandExit::Success) => {}
            Ok(CommandExit::Failure(code, output)) => {
                return failed(format!("reload_cmd ended with {code}: {output}"));
            }
            Ok(CommandExit::TimedOut(output)) => {
                return failed(format!("reload_cmd took too long: {output}"));
            }
        }
        if let Some(run) = &mut self.state.run {
            // Only what a reload reads is in effect now.
            let mut live = Spec::clone(&run.live.spec);
            let usual = [Field::Configmap, Field::ConfigPath];
            let named =
                |field: &&Field| takes.is_none_or(|takes| takes.iter().any(|name| name == field.path()));
            let all: &[Field] = if takes.is_some() { Field::ALL } else { &usual };
            all.iter().filter(named).for_each(|field| live.take(*field, &held.spec));
            let whole = live == *held.spec;
            let revision = held.revision.filter(|_| whole);
            run.live = OwnedSpec { spec: Arc::new(live), owner: held.owner.clone(), revision };
        }
        self.state.given = Some(held.clone());
        done()
    }

    /// It is no longer there, and neither is its pid file.
    pub(super) async fn record_exit(&mut self, code: Option<i32>) {
        self.clear_process(code);
        self.remove_old_pid_file().await;
    }

    /// Removes the pid file of a foreground process that is gone, as long as it still names that process.
    pub(super) async fn remove_old_pid_file(&mut self) {
        let Some((spec, pid)) = self.old_pid_file.take() else { return };
        if let Ok(rights) = self.shared.rights_of(&spec) {
            rights.remove_pid_file(&spec.identity.pid_path, pid).await;
        }
    }

    /// It is no longer there. Its pid file stays for the caller: a relaunch replaces it, without a wait for its removal.
    pub(super) fn clear_process(&mut self, code: Option<i32>) {
        let left = |run: &ProcessRun| self.shared.exits.code(&run.incarnation);
        let code = code.or_else(|| self.state.run.as_ref().and_then(left));
        if let Some(run) = self.state.run.take() {
            // With the row: an agent that is killed before that reads it again.
            self.records.extend(Some(run.incarnation.clone()).filter(|id| !id.is_empty()));
            let spec = &run.live.spec;
            let ends = spec.monitor.auto_type != AutoType::Resident;
            let foreground = ends || spec.control.start_mode == Some(StartMode::Foreground);
            self.old_pid_file = foreground.then(|| (Arc::clone(spec), run.identity.pid));
            // What it left behind would stand in the way of the next. A daemon's workers may outlive it on purpose.
            if let Some(group) = run.group().filter(|group| foreground || group.processes().is_empty()) {
                group.clear();
            }
        }
        self.shared.pools.forget(&self.key);
        (self.hold, self.output, *self.monitors) = (None, None, Monitors::default());
        (self.state.exit, self.state.since) = (code, now_ms());
    }
}
