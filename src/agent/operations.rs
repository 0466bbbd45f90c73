//! What a keeper does when it is asked: GSE's operations on a real process, and the codes that they answer with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::adoption::not_owned;
use super::cgroup::Group;
use super::exit_record::command_id;
use super::keeper::{Keeper, Said, Tended, done, failed};
use super::kernel::boot_id;
use super::life::{Event, Series};
use super::output::Output;
use super::ownership::{self, LaunchEvidence, Proof};
use super::row::{Intent, Run, intent_key};
use super::spawn::Ended;
use super::user_files::Rights;
use super::{fresh_id, now_ms};
use crate::fail;
use crate::gse::channel::Held;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Field, Monitor, Spec, StartMode};
use crate::store::{Store, Txn};

/// How long a stop waits unless its spec says otherwise.
const STOP_SECS: u32 = 10;
/// Maximum rest of a start's check under the next agent: a stop that was sent meanwhile waits for it.
const RESUMED_CHECK: Duration = Duration::from_secs(10);
/// How long a process may take to go after it was killed.
const AFTER_KILL: Duration = Duration::from_secs(5);
/// How often a pid file is looked at while a daemon comes up.
pub(super) const LOOK: Duration = Duration::from_millis(20);

impl Keeper {
    pub(super) fn is_running(&self) -> bool {
        self.hold.is_some()
    }

    /// Is what runs what this very operation launched, before we died and were asked again?
    fn launched_by(&self, op_id: Option<&str>) -> bool {
        let by = self.row.run.as_ref().and_then(|run| run.by.as_deref());
        self.is_running() && by.is_some() && by == op_id
    }

    pub(super) async fn start(&mut self, held: &Held, op_id: Option<String>) -> Said {
        if self.launched_by(op_id.as_deref()) {
            let said = self.stays_as_launched(held).await;
            if said.0 == RowCode::DONE {
                (self.row.given, self.row.hosted) = (Some(held.clone()), true);
            }
            return said;
        }
        // A launch that an earlier agent began is continued, not taken for a stranger's process.
        let is_continued = self.interrupted.as_ref().is_some_and(|intent| intent.op_id == op_id);
        if !is_continued && let Err(why) = self.take_left_behind(held).await {
            return failed(format!("nothing was started: {why}"));
        }
        if self.is_running() {
            // A daemon of an earlier launch: from now on it is known, and supervised.
            if self.row.given.is_none() {
                (self.row.given, self.row.hosted) = (Some(held.clone()), true);
            }
            return (RowCode::ALREADY_RUNNING, "it is running already".to_owned());
        }
        match if is_continued { Ok(None) } else { self.stranger(held).await } {
            Ok(None) => {}
            Ok(Some(pid)) => return (RowCode::ALREADY_RUNNING, not_owned(pid)),
            Err(why) => return failed(format!("nothing was started: {why}")),
        }
        self.series = Series::default();
        let (given, hosted) = (self.row.given.clone(), self.row.hosted);
        let said = self.launch(held, op_id, true).await;
        // A failed start leaves what was given, and the guard, as they were.
        (self.row.given, self.row.hosted) = match said.0 {
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
        if failed && self.row.hosted && !self.row.dormant && !self.is_running() {
            self.guard(Event::Ended { up_ms: 0 }).await;
        }
    }

    /// Brings it up with a spec. `check`: waits until it has shown that it stays.
    pub(super) async fn launch(&mut self, held: &Held, op_id: Option<String>, check: bool) -> Said {
        if let Err(refused) = self.shared.check_policy(&self.key, &held.spec).await {
            return failed(refused);
        }
        // What its guard launches has its mark on disk already, and so has a launch that is resumed.
        let resumed = self.interrupted.take().filter(|intent| intent.op_id == op_id);
        let reserved = if op_id.is_none() { self.row.next.take() } else { None };
        let mark = resumed.map(|intent| intent.incarnation).or(reserved);
        let written = mark.is_some();
        let incarnation = mark.unwrap_or_else(fresh_id);
        let groups = &self.shared.groups;
        let group = groups.of(&incarnation).or_else(|| groups.make(&incarnation, &held.spec.resource));
        let path = group.as_ref().map(Group::path);
        let boot = boot_id().to_owned();
        let intent = Intent { incarnation, op_id, held: held.clone(), at: now_ms(), group: path, boot };
        if !written {
            let value = serde_json::to_vec(&intent).unwrap_or_default();
            let txn = Txn::put(intent_key(&self.key), value).and(self.pending());
            if let Err(error) = self.shared.store.txn(txn).await {
                return failed(format!("not started: the agent's store cannot be written: {error}"));
            }
        }
        fail::point("intent-written");
        let begun = match self.begin(held, &intent.incarnation, group.clone()).await {
            Ok(hold) => hold,
            Err(said) => {
                group.into_iter().for_each(Group::clear);
                return said;
            }
        };
        fail::point("born");
        let Intent { incarnation, op_id: by, group, .. } = intent;
        (self.row.dormant, self.row.unknown_run) = (false, None);
        let (identity, live) = (begun.identity.clone(), held.clone());
        let output = self.output.as_ref().and_then(Output::inode);
        self.row.run = Some(Run { identity, live, by, incarnation, group, output });
        (self.row.since, self.row.started, self.row.exit) = (now_ms(), now_ms(), None);
        (self.launched, *self.tended) = (Some(Instant::now()), Tended::default());
        self.row.message.clear();
        if held.spec.monitor.auto_type == AutoType::OneShot {
            self.row.ran = Some(held.clone());
        }
        self.hold = Some(begun);
        self.write(None).await;
        fail::point("row-written");
        self.report();
        let secs = held.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        if !check || held.spec.monitor.auto_type != AutoType::Resident {
            return done();
        }
        self.stays(Duration::from_secs(secs.into())).await
    }

    /// Does a process that this operation launched, before the agent was restarted, stay for the rest of its check?
    async fn stays_as_launched(&mut self, held: &Held) -> Said {
        let secs = held.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        if held.spec.monitor.auto_type != AutoType::Resident {
            return done();
        }
        let passed = u64::try_from(now_ms().saturating_sub(self.row.started)).unwrap_or(0);
        let rest = Duration::from_secs(secs.into()).saturating_sub(Duration::from_millis(passed));
        self.stays(rest.min(RESUMED_CHECK)).await
    }

    /// Does it stay up for so long?
    async fn stays(&mut self, time: Duration) -> Said {
        let Some(hold) = &self.hold else { return failed("it is gone") };
        let Ok(code) = tokio::time::timeout(time, hold.ended()).await else { return done() };
        self.gone(code).await;
        let code = code.map_or("an unknown code".to_owned(), |code| format!("code {code}"));
        (RowCode::CHECK_FAILED, format!("it ended with {code} within {} s", time.as_secs()))
    }

    pub(super) async fn stop(&mut self, held: &Held, op_id: &str) -> Said {
        self.end(held, held.spec.control.stop_cmd.as_deref(), Signal::TERM, op_id).await
    }

    pub(super) async fn kill(&mut self, held: &Held, op_id: &str) -> Said {
        self.end(held, held.spec.control.kill_cmd.as_deref(), Signal::KILL, op_id).await
    }

    /// Did this very operation bring it down, before we died and were asked again?
    fn ended_by(&self, op_id: Option<&str>) -> bool {
        !self.is_running() && op_id.is_some() && self.row.ending.as_deref() == op_id
    }

    /// Brings it down for good: nobody guards it any more, unless it could not be brought down.
    async fn end(&mut self, held: &Held, command: Option<&str>, signal: Signal, op_id: &str) -> Said {
        if self.ended_by(Some(op_id)) {
            return done();
        }
        if !self.is_running() {
            return self.not_running(held).await;
        }
        // Should we die on the way, it must not be launched again by whoever comes after.
        let hosted = self.operation.as_ref().map_or(self.row.hosted, |operation| operation.0.hosted);
        self.row.hosted = false;
        self.series = Series::default();
        self.row.ending = Some(op_id.to_owned());
        // A full disk does not keep a process from being stopped: to stop it twice does no harm.
        let pending = self.pending();
        let _ = self.write_with(None, pending).await;
        fail::point("unguarded");
        let said = self.bring_down(held, command, signal, Some(op_id)).await;
        if said.0 != RowCode::DONE && self.is_running() {
            self.row.hosted = hosted;
        }
        said
    }

    /// By its command, or by a signal to the process itself, and in the end by force.
    pub(super) async fn bring_down(
        &mut self,
        held: &Held,
        command: Option<&str>,
        signal: Signal,
        op_id: Option<&str>,
    ) -> Said {
        let secs = held.spec.monitor.stop_check_secs.unwrap_or(STOP_SECS);
        let wait = Duration::from_secs(secs.into());
        let Some(hold) = self.hold.take() else { return done() };
        if let Some(command) = command {
            let record = op_id.map(|op_id| command_id(op_id, "stop"));
            let output = match self.command(&held.spec, command, record, None).await {
                Err(why) => Some(why),
                Ok(Ended::Well) => None,
                Ok(Ended::Badly(code, output)) => {
                    Some(format!("stop: its command ended with {code}: {output}"))
                }
                Ok(Ended::TooLong(output)) => Some(format!("stop: its command took too long: {output}")),
            };
            let ended = tokio::time::timeout(wait, hold.ended()).await;
            return match (ended, output) {
                (Ok(code), _) => {
                    self.gone(code).await;
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
        let group = self.row.run.as_ref().and_then(Run::group);
        // By force, its whole tree goes with it.
        let force = || group.as_ref().is_some_and(Group::kill);
        if signal == Signal::KILL {
            force();
        }
        let _ = hold.signal(signal);
        fail::point("signalled");
        let mut ended = tokio::time::timeout(wait, hold.ended()).await;
        if ended.is_err() {
            force();
            let _ = hold.signal(Signal::KILL);
            ended = tokio::time::timeout(AFTER_KILL, hold.ended()).await;
        }
        match ended {
            Ok(code) => {
                self.gone(code).await;
                done()
            }
            Err(_) => {
                self.hold = Some(hold);
                (RowCode::CHECK_FAILED, "stop: it is still alive, though it was killed".to_owned())
            }
        }
    }

    pub(super) async fn restart(&mut self, held: &Held, op_id: Option<String>) -> Said {
        if self.launched_by(op_id.as_deref()) {
            let said = self.stays_as_launched(held).await;
            match said.0 {
                RowCode::DONE => self.row.given = Some(held.clone()),
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
            let said = self.restart_by(held, command, op_id.as_deref()).await;
            if said.0 == RowCode::DONE {
                self.row.given = Some(held.clone());
            }
            return said;
        }
        let live = self.row.run.as_ref().map_or_else(|| held.clone(), |run| run.live.clone());
        if !begun {
            self.row.ending.clone_from(&op_id);
            let pending = self.pending();
            if let Err(error) = self.write_with(None, pending).await {
                self.row.ending = None;
                return failed(format!("not restarted: the agent's store cannot be written: {error}"));
            }
            let stop = live.spec.control.stop_cmd.as_deref();
            let said = self.bring_down(&live, stop, Signal::TERM, op_id.as_deref()).await;
            if said.0 != RowCode::DONE {
                return said;
            }
            fail::point("down");
        }
        let (given, said) = (self.row.given.clone(), self.launch(held, op_id, true).await);
        match said.0 {
            RowCode::DONE => self.row.given = Some(held.clone()),
            _ => {
                self.row.given = given;
                self.launch_failed = true;
            }
        }
        said
    }

    /// By its own command: the process that is there afterwards is another.
    async fn restart_by(&mut self, held: &Held, command: &str, op_id: Option<&str>) -> Said {
        let rights = match self.shared.rights_of(&held.spec) {
            Ok(rights) => rights,
            Err(why) => return failed(why),
        };
        self.row.ending = op_id.map(str::to_owned);
        if let Err(said) = self.write_pending().await {
            return said;
        }
        let (launch_id, since) = self.launch_of_operation();
        let groups = &self.shared.groups;
        let group = groups.of(&launch_id).or_else(|| groups.make(&launch_id, &held.spec.resource));
        let replaced = self.row.run.clone();
        let evidence = LaunchEvidence {
            launch_id: &launch_id,
            group: group.as_ref(),
            since,
            replaces: replaced.as_ref(),
        };
        let record = op_id.map(|op_id| command_id(op_id, "restart"));
        let said = self.replace_by(held, command, record, &rights, &evidence).await;
        // An empty group is removed; what a failed command left in its group is not the instance's process.
        let is_used = self.row.run.as_ref().is_some_and(|run| run.incarnation == launch_id);
        group.into_iter().filter(|_| !is_used).for_each(Group::clear);
        said
    }

    async fn replace_by(
        &mut self,
        held: &Held,
        command: &str,
        record: Option<String>,
        rights: &Rights,
        evidence: &LaunchEvidence<'_>,
    ) -> Said {
        let launch = Some((evidence.launch_id, evidence.group.cloned()));
        match self.command(&held.spec, command, record, launch).await {
            Err(why) => return failed(why),
            Ok(Ended::Well) => {}
            Ok(Ended::Badly(code, output)) => {
                return failed(format!("restart_cmd ended with {code}: {output}"));
            }
            Ok(Ended::TooLong(output)) => return failed(format!("restart_cmd took too long: {output}")),
        }
        let secs = held.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        let until = tokio::time::Instant::now() + Duration::from_secs(secs.into());
        loop {
            let why = match ownership::launched(&held.spec, rights, evidence).await {
                Ok((hold, proof)) => {
                    let (incarnation, group) = match (proof, evidence.replaces) {
                        (Proof::Replaced, Some(run)) => (run.incarnation.clone(), run.group.clone()),
                        (Proof::Replaced, None) | (Proof::Launch, _) => {
                            (evidence.launch_id.to_owned(), evidence.group.map(Group::path))
                        }
                    };
                    self.row.run = Some(Run { incarnation, group, ..Run::found(&hold, held) });
                    (self.row.since, self.row.started, self.row.exit) = (now_ms(), now_ms(), None);
                    // The end of the replaced process does not concern this one.
                    self.row.message.clear();
                    self.hold = Some(hold);
                    return done();
                }
                Err(why) => why,
            };
            if tokio::time::Instant::now() >= until {
                return (RowCode::CHECK_FAILED, format!("no new process came up after restart_cmd: {why}"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    pub(super) async fn reload(&mut self, held: &Held, takes: Option<&[String]>, op_id: &str) -> Said {
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
            Ok(Ended::Well) => {}
            Ok(Ended::Badly(code, output)) => {
                return failed(format!("reload_cmd ended with {code}: {output}"));
            }
            Ok(Ended::TooLong(output)) => return failed(format!("reload_cmd took too long: {output}")),
        }
        if let Some(run) = &mut self.row.run {
            // Only what a reload reads is in effect now.
            let mut live = Spec::clone(&run.live.spec);
            let usual = [Field::Configmap, Field::ConfigPath];
            let named =
                |field: &&Field| takes.is_none_or(|takes| takes.iter().any(|name| name == field.path()));
            let all: &[Field] = if takes.is_some() { Field::ALL } else { &usual };
            all.iter().filter(named).for_each(|field| live.take(*field, &held.spec));
            let whole = live == *held.spec;
            let revision = held.revision.filter(|_| whole);
            run.live = Held { spec: Arc::new(live), owner: held.owner.clone(), revision };
        }
        self.row.given = Some(held.clone());
        done()
    }

    /// It is no longer there, and neither is its pid file.
    pub(super) async fn gone(&mut self, code: Option<i32>) {
        self.process_gone(code);
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
    pub(super) fn process_gone(&mut self, code: Option<i32>) {
        let left = |run: &Run| self.shared.exits.code(&run.incarnation);
        let code = code.or_else(|| self.row.run.as_ref().and_then(left));
        if let Some(run) = self.row.run.take() {
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
        (self.hold, self.output, *self.tended) = (None, None, Tended::default());
        (self.row.exit, self.row.since) = (code, now_ms());
    }
}
