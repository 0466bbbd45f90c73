//! The numbers, in the text form that Prometheus reads.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

use super::api::{HOSTING, converged, health_of, hosting_of};
use crate::clock;
use crate::control::status::{
    BUCKETS, ControllerStatus, DurationHistogram, Role, Severity, StatusBoard, SyncStatus,
};
use crate::model::Health;

pub fn text(board: &StatusBoard, readers: usize) -> String {
    let known = board.status();
    let mut page = MetricsText(String::new());
    instances(&mut page, &known);
    page.times("abide_reconcile_seconds", "How long passes took: reading, looking, planning.", &known.passes);
    page.times("abide_run_seconds", "How long it took to carry plans out, or parts of them.", &known.runs);
    page.head("abide_operations_total", "counter", "Operations that ended, by operation and outcome.");
    for ((op, outcome), n) in &known.operations {
        page.line("abide_operations_total", &[("op", op), ("outcome", outcome)], n);
    }
    page.head("abide_looks_total", "counter", "Looks at the target, by result.");
    page.line("abide_looks_total", &[("result", "ok")], known.observations);
    page.line("abide_looks_total", &[("result", "failed")], known.failed_observations);
    let subject = &board.subject;
    page.head("abide_revision_info", "gauge", "What is kept true: always 1.");
    let commit = known.commit.as_deref().unwrap_or_default();
    let labels = [
        ("revision", known.revision.as_str()),
        ("commit", commit),
        ("owner", &subject.owner),
        ("target", &subject.target),
    ];
    page.line("abide_revision_info", &labels, 1);
    page.head("abide_problems", "gauge", "Problems in the manifests, by severity.");
    for (word, severity) in [("error", Severity::Error), ("warning", Severity::Warning)] {
        let many = known.problems.iter().filter(|problem| problem.severity == severity).count();
        page.line("abide_problems", &[("severity", word)], many);
    }
    single_values(&mut page, board, &known, readers);
    page.0
}

fn instances(page: &mut MetricsText, known: &ControllerStatus) {
    let mut axes: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
    // The words that an alert asks for are there from the start.
    for sync in SyncStatus::ALL {
        axes.insert((sync.word(), Health::Healthy.word(), HOSTING[0]), 0);
    }
    for row in known.rows().iter() {
        *axes.entry((row.sync.word(), health_of(row).word(), hosting_of(row))).or_default() += 1;
    }
    page.head("abide_instances", "gauge", "Instances by how they stand.");
    for ((sync, health, hosting), n) in axes {
        page.line("abide_instances", &[("sync", sync), ("health", health), ("hosting", hosting)], n);
    }
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for held in known.last_pass.iter().flat_map(|look| &look.plan.held) {
        *reasons.entry(held.reason.word()).or_default() += 1;
    }
    page.head("abide_held", "gauge", "Differences that are left alone, by reason.");
    for (reason, n) in reasons {
        page.line("abide_held", &[("reason", reason)], n);
    }
}

fn single_values(page: &mut MetricsText, board: &StatusBoard, known: &ControllerStatus, readers: usize) {
    let now = clock::now();
    let look = known.last_pass.as_deref();
    let looked = look.map_or(0.0, |look| look.observed.at.0 as f64 / 1000.0);
    let since = look.map_or(board.began, |look| look.observed.at);
    let leads = matches!(known.role, Role::Leading { .. });
    let to_do = look.map_or(0, |look| look.plan.steps().count());
    let backing_off = look.map_or(0, |look| look.backing_off.len());
    for (name, help, value) in [
        ("abide_queue", "Steps that are under way or wait for their turn.", known.queue as f64),
        ("abide_under_way", "Plans, or parts of plans, that are being carried out.", known.in_flight as f64),
        ("abide_to_do", "Steps that the last look asked for.", to_do as f64),
        ("abide_backing_off", "Instances left alone because they failed.", backing_off as f64),
        ("abide_last_look_timestamp_seconds", "When the target was last looked at; 0: never.", looked),
        (
            "abide_last_look_age_seconds",
            "How long ago that was; before the first, since the start.",
            (now.0 - since.0).max(0) as f64 / 1000.0,
        ),
        ("abide_leader", "1 when this one leads.", f64::from(u8::from(leads))),
        (
            "abide_converged",
            "1 when there is nothing to do and nothing is held.",
            f64::from(u8::from(converged(known))),
        ),
        (
            "abide_source_followed",
            "0 when what the source holds now is not taken.",
            f64::from(u8::from(known.not_followed.is_none())),
        ),
        ("abide_event_readers", "Who reads events now.", readers as f64),
        ("abide_started_timestamp_seconds", "When this one began.", board.began.0 as f64 / 1000.0),
    ] {
        page.head(name, "gauge", help);
        page.line(name, &[], value);
    }
}

struct MetricsText(String);

impl MetricsText {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn times(&mut self, name: &str, help: &str, times: &DurationHistogram) {
        self.head(name, "histogram", help);
        let (bucket, mut sum) = (format!("{name}_bucket"), 0);
        for (most, n) in BUCKETS.iter().zip(times.buckets) {
            sum += n;
            self.line(&bucket, &[("le", &most.to_string())], sum);
        }
        self.line(&bucket, &[("le", "+Inf")], times.all);
        self.line(&format!("{name}_sum"), &[], times.seconds);
        self.line(&format!("{name}_count"), &[], times.all);
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let pairs: Vec<String> =
            labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
        let labels = if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }
}
