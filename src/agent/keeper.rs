//! One instance's keeper: a task that owns it. Operations come to it one after the other, so they never overlap; between
//! them it waits for its process to end, or for the time to launch it again.
//!
//! What it is about to do is in the store before it is done, and what became of it is written before it is told.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Semaphore, mpsc};
use tracing::{info, warn};

use super::kernel::Hold;
use super::life::{Effect, Event, Phase, Policy, Series, step};
use super::now_ms;
use super::row::{Row, intent_key, row_key, writing};
use super::spawn::Output;
use crate::clock::next_run;
use crate::gse::channel::{Held, OpRequest, OpResult, Order, Told};
use crate::gse::codes::RowCode;
use crate::model::{AutoType, InstanceKey, Monitor, Time};
use crate::store::{Embedded, Store, Txn};

/// What all keepers share.
pub struct Shared {
    pub store: Embedded,
    /// What is to be told to the gateway.
    pub up: mpsc::UnboundedSender<Told>,
    /// Where runs that come to an end leave their exit codes.
    pub exits: std::path::PathBuf,
    /// How many launches and commands run at once.
    pub room: Semaphore,
}

/// What a keeper is asked.
pub enum Ask {
    Op(Box<OpRequest>),
    /// What is registered now.
    Give(Option<Held>, u64),
    /// It is known by another name now; its old name is forgotten.
    Rename(InstanceKey, Box<OpRequest>),
    Report,
}

pub struct Keeper {
    pub(super) key: InstanceKey,
    pub(super) row: Row,
    pub(super) hold: Option<Hold>,
    pub(super) series: Series,
    /// When its schedule runs it next.
    pub(super) next: Option<i64>,
    /// Where a daemon writes that kept its starter's output.
    pub(super) output: Option<Output>,
    pub(super) shared: Arc<Shared>,
}

/// How often what such a daemon wrote is forgotten.
const FORGET: Duration = Duration::from_secs(2);

/// How an operation ended.
pub(super) type Said = (RowCode, String);

pub(super) fn done() -> Said {
    (RowCode::DONE, "success".to_owned())
}

pub(super) fn failed(message: impl Into<String>) -> Said {
    (RowCode::COMMAND_FAILED, message.into())
}

impl Keeper {
    pub fn new(key: InstanceKey, row: Row, hold: Option<Hold>, shared: Arc<Shared>) -> Keeper {
        let output = hold.as_ref().and_then(|hold| Output::of(hold.identity.pid));
        Keeper { key, row, hold, series: Series::default(), next: None, output, shared }
    }

    /// Until nobody can ask any more.
    pub async fn keep(mut self, mut asks: mpsc::UnboundedReceiver<Ask>) {
        // What ended while nobody looked has ended now.
        if self.hold.is_none() && self.row.run.is_some() {
            self.ended(None).await;
        }
        loop {
            enum Next {
                Ask(Option<Ask>),
                Ended(Option<i32>),
                Woke,
                Forget,
            }
            self.plan_next_run();
            let (hold, writes) = (self.hold.as_ref(), self.output.is_some());
            let wake = match self.series.phase {
                Phase::Calm => self.next,
                Phase::Waiting { until } | Phase::Failed { until } => Some(until),
            };
            let next = tokio::select! {
                biased;
                code = async { match hold { Some(hold) => hold.ended().await, None => std::future::pending().await } } => Next::Ended(code),
                ask = asks.recv() => Next::Ask(ask),
                () = async { match wake { Some(at) => sleep_until(at).await, None => std::future::pending().await } } => Next::Woke,
                () = tokio::time::sleep(FORGET), if writes => Next::Forget,
            };
            match next {
                Next::Forget => self.output.iter().for_each(Output::forget),
                Next::Ask(None) => return,
                Next::Ask(Some(ask)) => self.asked(ask).await,
                Next::Ended(code) => self.ended(code).await,
                Next::Woke if self.series.phase == Phase::Calm => self.run_by_schedule().await,
                Next::Woke => self.guard(Event::Woke).await,
            }
        }
    }

    /// A schedule is kept while it is hosted. A time that was missed is not made up for: the next one counts.
    fn plan_next_run(&mut self) {
        let periodic = |held: &&Held| held.spec.monitor.auto_type == AutoType::Periodic;
        let Some(given) = self.row.given.as_ref().filter(periodic).filter(|_| self.row.hosted) else {
            self.next = None;
            return;
        };
        let now = now_ms();
        if self.next.is_some_and(|next| next > now) {
            return;
        }
        let cycle = given.spec.job.cycle_time.filter(|secs| *secs > 0).map(|secs| i64::from(secs) * 1000);
        self.next = match &given.spec.monitor.crontab_rule {
            Some(rule) => next_run(rule, Time(now)).map(|time| time.0),
            None => cycle.map(|cycle| self.row.started.saturating_add(cycle).max(now)),
        };
        self.report();
    }

    /// Its time has come. A run that is still under way is left alone, and this one does not take place.
    async fn run_by_schedule(&mut self) {
        self.next = None;
        let Some(given) = self.row.given.clone() else { return };
        if self.is_running() {
            info!(instance = %self.key, "its last run is still under way: this one is left out");
            // By a cycle the next one is a whole cycle away.
            self.row.started = now_ms();
            return;
        }
        let (code, message) = self.launch(&given, None, false).await;
        if code != RowCode::DONE {
            warn!(instance = %self.key, code = code.0, %message, "a run by schedule failed");
            (self.row.message, self.row.started) = (message, now_ms());
            self.write(None).await;
            self.report();
        }
    }

    async fn asked(&mut self, ask: Ask) {
        match ask {
            Ask::Report => self.report(),
            Ask::Give(given, changed) => {
                if changed > self.row.changed {
                    (self.row.given, self.row.changed) = (given, changed);
                    self.next = None;
                    self.write(None).await;
                }
            }
            Ask::Op(request) => {
                let (code, message, content) = self.operate(&request).await;
                self.finish(&request, code, message, content).await;
            }
            Ask::Rename(to, request) => {
                let from = std::mem::replace(&mut self.key, to);
                let forget = Txn::delete(row_key(&from)).and(Txn::delete(intent_key(&from)));
                if let Err(error) = self.shared.store.txn(forget).await {
                    warn!(%error, "a renamed process's old row stays");
                }
                if let Some(held) = request.spec.clone() {
                    self.row.given = Some(held);
                }
                let (code, message) = done();
                self.finish(&request, code, message, None).await;
            }
        }
    }

    async fn operate(&mut self, request: &OpRequest) -> (RowCode, String, Option<Value>) {
        let held = request.spec.clone();
        let held = held
            .or_else(|| self.row.run.as_ref().map(|run| run.live.clone()))
            .or_else(|| self.row.given.clone());
        let Some(held) = held else {
            return (
                RowCode::COMMAND_FAILED,
                "nothing is known of it, and no spec was sent".to_owned(),
                None,
            );
        };
        let op_id = Some(request.op_id.clone());
        self.adopt(&held);
        let (code, message) = match &request.op {
            Order::Status => return (RowCode::DONE, "success".to_owned(), Some(self.look(&held))),
            Order::Start => self.start(&held, op_id).await,
            Order::Stop => self.stop(&held).await,
            Order::Kill => self.kill(&held).await,
            Order::Restart => self.restart(&held, op_id).await,
            Order::Reload => self.reload(&held).await,
            Order::Host => {
                (self.row.given, self.row.hosted, self.next) = (Some(held), true, None);
                done()
            }
            Order::Unhost => {
                self.row.hosted = false;
                self.series = Series::default();
                done()
            }
            Order::Rename { .. } => {
                self.row.given = Some(held);
                done()
            }
        };
        (code, message, None)
    }

    async fn finish(&mut self, request: &OpRequest, code: RowCode, message: String, content: Option<Value>) {
        let result = OpResult { op_id: request.op_id.clone(), code: code.0, message, content };
        if !request.op.looks() {
            info!(instance = %self.key, op = ?request.op, code = code.0, message = %result.message, "operation");
            self.write(Some(&result)).await;
            self.report();
        }
        let _ = self.shared.up.send(Told::Result(result));
    }

    /// Writes how it stands. What cannot be written is still so; the next write says it.
    pub(super) async fn write(&mut self, result: Option<&OpResult>) {
        let txn = writing(&self.key, &self.row, result).and(Txn::delete(intent_key(&self.key)));
        if let Err(error) = self.shared.store.txn(txn).await {
            warn!(instance = %self.key, %error, "cannot be written down");
        }
    }

    /// It ended, and nobody asked for that.
    async fn ended(&mut self, code: Option<i32>) {
        let up_ms = now_ms().saturating_sub(self.row.started);
        let kind = self.row.run.as_ref().map(|run| run.live.spec.monitor.auto_type);
        self.gone(code);
        let code = self.row.exit;
        let how = code.map_or("ended".to_owned(), |code| format!("ended with code {code}"));
        info!(instance = %self.key, ?code, up_ms, "ended");
        self.row.message = how;
        if kind == Some(AutoType::Resident) && self.row.hosted {
            self.guard(Event::Ended { up_ms }).await;
            return;
        }
        self.write(None).await;
        self.report();
    }

    /// Decides what the guard does, and does it.
    pub(super) async fn guard(&mut self, event: Event) {
        let Some(given) = self.row.given.clone().filter(|_| self.row.hosted) else {
            self.series = Series::default();
            self.write(None).await;
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
            let (series, effect) = step(self.series, event, now_ms(), &policy);
            self.series = series;
            match effect {
                Effect::Nothing | Effect::WakeAt(_) => break,
                Effect::GiveUpUntil(until) => {
                    let next = Time(until);
                    warn!(instance = %self.key, %next, message = %self.row.message, "failed");
                    break;
                }
                Effect::Launch => {
                    let (code, message) = self.launch(&given, None, false).await;
                    if code == RowCode::DONE {
                        return;
                    }
                    self.row.message = message;
                    event = Event::Ended { up_ms: 0 };
                }
            }
        }
        self.write(None).await;
        self.report();
    }
}

async fn sleep_until(at: i64) {
    let left = u64::try_from(at.saturating_sub(now_ms())).unwrap_or(0);
    tokio::time::sleep(Duration::from_millis(left)).await;
}
