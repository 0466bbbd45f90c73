//! Relaunches and scheduled runs of an instance: applies the restart policy and the schedule.
//!
//! Pure functions decide whether and when ([`step`], [`Schedule`]). This module performs their decisions.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::adoption::not_owned;
use super::history::ExitCause;
use super::launch::LaunchChecks;
use super::{InstanceTask, failed, read_clocks};
use crate::agent::restart_policy::{RelaunchLimits, RestartAction, RestartEvent, RestartSeries, step};
use crate::agent::schedule::Schedule;
use crate::agent_protocol::OwnedSpec;
use crate::clock;
use crate::failpoint;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Time};

impl InstanceTask {
    /// Computes the next scheduled run of a supervised periodic process.
    pub(super) fn plan_next_run(&mut self) {
        let periodic = |owned: &&OwnedSpec| owned.spec.monitor.auto_type == AutoType::Periodic;
        let Some(given) = self.state.given.as_ref().filter(periodic).filter(|_| self.state.hosted) else {
            self.launches.next = None;
            return;
        };
        let now = read_clocks();
        if self.launches.next.is_some_and(|next| !next.is_stale(now)) {
            return;
        }
        let passed = |at: Instant| i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX);
        // With cycle_time, the next run is due one cycle after the last one that started or was skipped.
        let began = self.state.started.max(self.state.skipped);
        let by_clock = (began > 0).then(|| now.wall.saturating_sub(began));
        let last = self.launches.last.max(self.launches.skipped);
        self.launches.next = Schedule::of(&given.spec, now, last.map(passed).or(by_clock));
        self.report();
    }

    /// Starts a scheduled run that is due. The run is skipped while the previous one is still in progress.
    pub(super) async fn run_scheduled(&mut self) {
        if !self.launches.next.is_some_and(|next| next.is_due(read_clocks())) {
            return;
        }
        self.launches.next = None;
        let Some(given) = self.state.given.clone() else { return };
        if self.is_running() {
            info!(instance = %self.key, "scheduled run skipped: the previous run is still in progress");
            (self.state.skipped, self.launches.skipped) = (clock::now().0, Some(Instant::now()));
            self.state.history.skip_run();
            self.write(None).await;
            self.report();
            return;
        }
        let (code, message) = self.launch(&given, None, LaunchChecks::NONE).await;
        if code != RowCode::DONE {
            warn!(instance = %self.key, code = code.0, %message, "scheduled run failed");
            (self.state.message, self.state.started, self.launches.last) =
                (message, clock::now().0, Some(Instant::now()));
            self.state.history.add_failed_run(clock::now().0, &self.state.message);
            self.write(None).await;
            self.report();
        }
    }

    /// Time since the launch of the process; by the wall clock, if an earlier agent launched it.
    pub(super) fn uptime(&self) -> Duration {
        let by_clock = || clock::now().0.saturating_sub(self.state.started);
        self.launches
            .last
            .map_or_else(|| Duration::from_millis(u64::try_from(by_clock()).unwrap_or(0)), |at| at.elapsed())
    }

    /// Time since the launch of the process, in milliseconds.
    pub(super) fn uptime_ms(&self) -> i64 {
        i64::try_from(self.uptime().as_millis()).unwrap_or(i64::MAX)
    }

    /// Handles the end of a process that no operation stopped.
    pub(super) async fn handle_exit(&mut self, code: Option<i32>) {
        // Read before the group is removed.
        let limit = self.kernel_limit();
        if !self.has_ended_with_tree().await {
            if self.take_over_after_exit().await {
                return;
            }
            self.end_tree().await;
            failpoint::point("tree-ended");
        }
        let up_ms = self.uptime_ms();
        let run = self.state.run.as_ref().map(|run| (run.live.clone(), run.by.clone()));
        let kind = run.as_ref().map(|(live, _)| live.spec.monitor.auto_type);
        let end = self.process_end(code);
        self.launches.is_unobserved = self.handle.is_none();
        let cause = match limit.clone() {
            Some(limit) => ExitCause::Limit(limit),
            None if self.handle.is_some() => ExitCause::Itself,
            None => ExitCause::Unobserved,
        };
        self.clear_process(code, cause);
        let code = self.state.exit;
        let how = code.map_or("ended".to_owned(), |code| format!("ended with code {code}"));
        info!(instance = %self.key, ?code, up_ms, "process ended");
        self.state.message = limit.map_or(how, |limit| format!("process was over its {limit}"));
        let mut is_complete = false;
        if let Some((live, by)) = run {
            is_complete = self.complete(&live, end);
            self.record_unknown_run(&live, by);
        }
        if is_complete {
            self.launches.series = RestartSeries::default();
        } else if kind == Some(AutoType::Resident) && self.state.hosted {
            self.apply_restart_policy(RestartEvent::Ended { up_ms }).await;
            return;
        }
        self.remove_old_pid_file().await;
        self.write(None).await;
        self.observe_foreign_process().await;
        self.report();
        self.forget_unregistered();
    }

    /// Steps the restart policy with an event, and performs its actions.
    pub(super) async fn apply_restart_policy(&mut self, event: RestartEvent) {
        let Some(given) = self.state.given.clone().filter(|_| self.state.hosted) else {
            self.launches.series = RestartSeries::default();
            self.write(None).await;
            self.observe_foreign_process().await;
            self.report();
            return;
        };
        let policy = RelaunchLimits::of(&given.spec);
        let mut event = event;
        // Between the end of a process and its first relaunch, no other process takes its identity.
        let mut may_be_taken =
            event == RestartEvent::TimerFired || std::mem::take(&mut self.launches.is_unobserved);
        loop {
            if matches!(event, RestartEvent::Ended { .. }) && self.complete_failed() {
                self.launches.series = RestartSeries::default();
                break;
            }
            let now = read_clocks();
            let (series, effect) = step(self.launches.series, event, now.passed, &policy);
            self.launches.series = series;
            match effect {
                RestartAction::Nothing | RestartAction::WakeAt(_) => break,
                RestartAction::GiveUpUntil(until) => {
                    let next = Time(now.wall.saturating_add(until - now.passed));
                    warn!(instance = %self.key, %next, message = %self.state.message, "process failed: relaunching with backoff");
                    break;
                }
                RestartAction::Launch => {
                    let foreign = if may_be_taken { self.foreign_successor(&given).await } else { Ok(None) };
                    let (code, message) = match foreign {
                        Ok(Some(pid)) => (RowCode::ALREADY_RUNNING, not_owned(pid)),
                        Ok(None) => self.launch(&given, None, LaunchChecks::NONE).await,
                        Err(error) => failed(error),
                    };
                    if code == RowCode::DONE {
                        self.pid_file.old = None;
                        return;
                    }
                    may_be_taken = true;
                    self.state.message = message;
                    event = RestartEvent::Ended { up_ms: 0 };
                }
            }
        }
        self.remove_old_pid_file().await;
        self.write(None).await;
        self.observe_foreign_process().await;
        self.report();
    }
}
