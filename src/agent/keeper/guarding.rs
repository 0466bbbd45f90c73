//! What happens to a process that ended, or whose time has come: it is brought back, given up for a while, or run again.
//!
//! Whether and when is decided by pure functions ([`step`], [`Schedule`]); here it is done.

use std::time::Instant;

use tracing::{info, warn};

use super::{Keeper, moment};
use crate::agent::life::{Effect, Event, Policy, Series, step};
use crate::agent::now_ms;
use crate::agent::schedule::Schedule;
use crate::gse::channel::Held;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Monitor, Time};

impl Keeper {
    /// A schedule is kept while it is hosted.
    pub(super) fn plan_next_run(&mut self) {
        let periodic = |held: &&Held| held.spec.monitor.auto_type == AutoType::Periodic;
        let Some(given) = self.row.given.as_ref().filter(periodic).filter(|_| self.row.hosted) else {
            self.next = None;
            return;
        };
        let now = moment();
        if self.next.is_some_and(|next| !next.is_void(now)) {
            return;
        }
        let passed = |at: Instant| i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX);
        let by_clock = (self.row.started > 0).then(|| now.wall.saturating_sub(self.row.started));
        self.next = Schedule::of(&given.spec, now, self.launched.map(passed).or(by_clock));
        self.report();
    }

    /// Its time may have come. A run that is still under way is left alone, and this one does not take place.
    pub(super) async fn run_by_schedule(&mut self) {
        if !self.next.is_some_and(|next| next.is_due(moment())) {
            return;
        }
        self.next = None;
        let Some(given) = self.row.given.clone() else { return };
        if self.is_running() {
            info!(instance = %self.key, "its last run is still under way: this one is left out");
            // By a cycle the next one is a whole cycle away.
            (self.row.started, self.launched) = (now_ms(), Some(Instant::now()));
            return;
        }
        let (code, message) = self.launch(&given, None, false).await;
        if code != RowCode::DONE {
            warn!(instance = %self.key, code = code.0, %message, "a run by schedule failed");
            (self.row.message, self.row.started, self.launched) = (message, now_ms(), Some(Instant::now()));
            self.write(None).await;
            self.report();
        }
    }

    /// It ended, and nobody asked for that.
    pub(super) async fn ended(&mut self, code: Option<i32>) {
        let up_ms = match self.launched {
            Some(at) => i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX),
            None => now_ms().saturating_sub(self.row.started),
        };
        let run = self.row.run.as_ref().map(|run| (run.live.clone(), run.by.clone()));
        let kind = run.as_ref().map(|(live, _)| live.spec.monitor.auto_type);
        self.process_gone(code);
        let code = self.row.exit;
        let how = code.map_or("ended".to_owned(), |code| format!("ended with code {code}"));
        info!(instance = %self.key, ?code, up_ms, "ended");
        self.row.message = how;
        if let Some((live, by)) = run {
            self.note_unknown_run(&live, by);
        }
        if kind == Some(AutoType::Resident) && self.row.hosted {
            self.guard(Event::Ended { up_ms }).await;
            return;
        }
        self.remove_old_pid_file().await;
        self.write(None).await;
        self.observe_stranger().await;
        self.report();
    }

    /// Decides what the guard does, and does it.
    pub(in crate::agent) async fn guard(&mut self, event: Event) {
        let Some(given) = self.row.given.clone().filter(|_| self.row.hosted) else {
            self.series = Series::default();
            self.write(None).await;
            self.observe_stranger().await;
            self.report();
            return;
        };
        let monitor = &given.spec.monitor;
        let ms = |secs: u32| i64::from(secs) * 1000;
        let interval_ms = ms(monitor.start_interval.unwrap_or(Monitor::START_INTERVAL));
        let policy = Policy {
            retries: monitor.start_retries.unwrap_or(Monitor::START_RETRIES),
            interval_ms,
            settled_ms: interval_ms
                .max(ms(monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS)))
                .max(10_000),
        };
        let mut event = event;
        loop {
            let now = moment();
            let (series, effect) = step(self.series, event, now.passed, &policy);
            self.series = series;
            match effect {
                Effect::Nothing | Effect::WakeAt(_) => break,
                Effect::GiveUpUntil(until) => {
                    let next = Time(now.wall.saturating_add(until - now.passed));
                    warn!(instance = %self.key, %next, message = %self.row.message, "failed");
                    break;
                }
                Effect::Launch => {
                    let (code, message) = self.launch(&given, None, false).await;
                    if code == RowCode::DONE {
                        self.old_pid_file = None;
                        return;
                    }
                    self.row.message = message;
                    event = Event::Ended { up_ms: 0 };
                }
            }
        }
        self.remove_old_pid_file().await;
        self.write(None).await;
        self.observe_stranger().await;
        self.report();
    }
}
