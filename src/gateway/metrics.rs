//! Gateway metrics in the Prometheus text format.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::agent_protocol::AgentOp;
use crate::metrics::MetricsText;

/// Upper bounds of the duration buckets, in seconds.
const BUCKETS: [f64; 9] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

#[derive(Default)]
pub struct Metrics {
    counts: Mutex<Counts>,
    shed: AtomicU64,
    given_up: AtomicU64,
}

#[derive(Default)]
struct Counts {
    /// Requests by call and result.
    requests: BTreeMap<(&'static str, &'static str), u64>,
    operations: BTreeMap<(&'static str, i64), u64>,
    buckets: [u64; BUCKETS.len()],
    seconds: f64,
    all: u64,
}

/// Current values, read when metrics are scraped.
pub struct Gauges {
    pub registered: usize,
    pub sessions: usize,
    pub open_tasks: usize,
    pub log_streams: usize,
    pub ready: bool,
    /// Reports ignored since the start.
    pub ignored_reports: u64,
    pub audit_entries: u64,
    pub audit_failing: bool,
}

impl Metrics {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn request(&self, call: &'static str, result: &'static str, took: Duration) {
        let mut counts = self.counts();
        *counts.requests.entry((call, result)).or_default() += 1;
        let seconds = took.as_secs_f64();
        if let Some(bucket) = BUCKETS.iter().position(|most| seconds <= *most) {
            counts.buckets[bucket] += 1;
        }
        counts.seconds += seconds;
        counts.all += 1;
    }

    pub fn operation(&self, op: Option<&AgentOp>, code: i64) {
        let op_name = match op {
            None => "unknown",
            Some(AgentOp::Start) => "start",
            Some(AgentOp::Stop) => "stop",
            Some(AgentOp::Status) => "status",
            Some(AgentOp::Host) => "host",
            Some(AgentOp::Unhost) => "unhost",
            Some(AgentOp::Restart) => "restart",
            Some(AgentOp::Reload) => "reload",
            Some(AgentOp::Kill) => "kill",
            Some(AgentOp::Rename { .. }) => "rename",
        };
        *self.counts().operations.entry((op_name, code)).or_default() += 1;
    }

    /// Counts a request refused for overload or rate.
    pub fn count_shed(&self) {
        self.shed.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count_expired(&self, rows: usize) {
        self.given_up.fetch_add(rows as u64, Ordering::Relaxed);
    }

    pub fn text(&self, gauges: &Gauges) -> String {
        let mut page = MetricsText::default();
        let counts = self.counts();
        page.head("abide_gateway_requests_total", "counter", "Requests by call and result.");
        for ((call, result), n) in &counts.requests {
            page.line("abide_gateway_requests_total", &[("call", call), ("result", result)], n);
        }
        let buckets = BUCKETS.into_iter().zip(counts.buckets);
        page.histogram(
            "abide_gateway_request_seconds",
            "Duration of requests.",
            buckets,
            counts.seconds,
            counts.all,
        );
        page.head("abide_gateway_operations_total", "counter", "Finished operations by code.");
        for ((op, code), n) in &counts.operations {
            page.line("abide_gateway_operations_total", &[("op", op), ("code", &code.to_string())], n);
        }
        drop(counts);
        let shed = self.shed.load(Ordering::Relaxed);
        let given_up = self.given_up.load(Ordering::Relaxed);
        for (name, kind, help, value) in [
            ("abide_gateway_shed_total", "counter", "Requests refused for overload or rate.", shed),
            (
                "abide_gateway_agent_missing_total",
                "counter",
                "Operations without a result: the agent was missing or too late.",
                given_up,
            ),
            (
                "abide_gateway_reports_ignored_total",
                "counter",
                "Reports of agents ignored because of a limit of their host.",
                gauges.ignored_reports,
            ),
            (
                "abide_gateway_audit_entries_total",
                "counter",
                "Entries written to the audit log.",
                gauges.audit_entries,
            ),
            (
                "abide_gateway_audit_failing",
                "gauge",
                "1 while the audit log cannot be written.",
                u64::from(gauges.audit_failing),
            ),
            ("abide_gateway_registered", "gauge", "Registered instances.", gauges.registered as u64),
            ("abide_gateway_agent_sessions", "gauge", "Connected agents.", gauges.sessions as u64),
            ("abide_gateway_open_tasks", "gauge", "Tasks with unfinished rows.", gauges.open_tasks as u64),
            ("abide_gateway_log_streams", "gauge", "Open log streams.", gauges.log_streams as u64),
            ("abide_gateway_ready", "gauge", "1 if the gateway is ready.", u64::from(gauges.ready)),
        ] {
            page.single(name, kind, help, value);
        }
        page.into_text()
    }
}
