//! Controller metrics in the Prometheus text format.

use std::collections::BTreeMap;

use super::api::{converged, health_of, hosting_of};
use crate::clock;
use crate::contract::Hosting;
use crate::control::status::{
    BUCKETS, ControllerStatus, DurationHistogram, Role, Severity, StatusBoard, SyncStatus,
};
use crate::metrics::MetricsText;
use crate::model::Health;

pub fn text(board: &StatusBoard, readers: usize) -> String {
    let status = board.status();
    let mut page = MetricsText::default();
    instances(&mut page, &status);
    times(
        &mut page,
        "abide_reconcile_seconds",
        "Duration of reconcile passes: load, observe, plan.",
        &status.pass.durations,
    );
    times(
        &mut page,
        "abide_run_seconds",
        "Duration of plan executions, per component.",
        &status.work.durations,
    );
    page.head("abide_operations_total", "counter", "Finished operations by operation and outcome.");
    for ((op, outcome), n) in &status.work.operations {
        page.line("abide_operations_total", &[("op", op), ("outcome", outcome)], n);
    }
    page.head("abide_looks_total", "counter", "Observations of the target by result.");
    page.line("abide_looks_total", &[("result", "ok")], status.pass.observations);
    page.line("abide_looks_total", &[("result", "failed")], status.pass.failed_observations);
    let subject = &board.subject;
    page.head("abide_revision_info", "gauge", "Active revision as labels; always 1.");
    let commit = status.source.commit.as_deref().unwrap_or_default();
    let labels = [
        ("revision", status.source.revision.as_str()),
        ("commit", commit),
        ("owner", &subject.owner),
        ("target", &subject.target),
    ];
    page.line("abide_revision_info", &labels, 1);
    page.head("abide_problems", "gauge", "Problems in the manifests by severity.");
    for (label, severity) in [("error", Severity::Error), ("warning", Severity::Warning)] {
        let many = status.source.problems.iter().filter(|problem| problem.severity == severity).count();
        page.line("abide_problems", &[("severity", label)], many);
    }
    single_values(&mut page, board, &status, readers);
    page.into_text()
}

fn instances(page: &mut MetricsText, status: &ControllerStatus) {
    let mut axes: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
    // Series used in alerts exist from the start.
    for sync in SyncStatus::ALL {
        axes.insert((sync.word(), Health::Healthy.word(), Hosting::Hosted.word()), 0);
    }
    for row in status.rows().iter() {
        *axes.entry((row.sync.word(), health_of(row).word(), hosting_of(row).word())).or_default() += 1;
    }
    page.head("abide_instances", "gauge", "Instances by sync, health and hosting.");
    for ((sync, health, hosting), n) in axes {
        page.line("abide_instances", &[("sync", sync), ("health", health), ("hosting", hosting)], n);
    }
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for held in status.pass.last.iter().flat_map(|pass| &pass.plan.held) {
        *reasons.entry(held.reason.word()).or_default() += 1;
    }
    page.head("abide_held", "gauge", "Held changes by reason.");
    for (reason, n) in reasons {
        page.line("abide_held", &[("reason", reason)], n);
    }
}

fn single_values(page: &mut MetricsText, board: &StatusBoard, status: &ControllerStatus, readers: usize) {
    let now = clock::now();
    let pass = status.pass.last.as_deref();
    let observed_at = pass.map_or(0.0, |pass| pass.observed.at.0 as f64 / 1000.0);
    let since = pass.map_or(board.began, |pass| pass.observed.at);
    let leads = matches!(status.role, Role::Leading { .. });
    let to_do = pass.map_or(0, |pass| pass.plan.steps().count());
    let backing_off = pass.map_or(0, |pass| pass.backing_off.len());
    for (name, help, value) in [
        ("abide_queue", "Steps in flight or queued.", status.work.queue as f64),
        ("abide_under_way", "Plans and plan components in flight.", status.work.in_flight as f64),
        ("abide_to_do", "Steps in the plan of the last pass.", to_do as f64),
        ("abide_backing_off", "Failed instances in backoff.", backing_off as f64),
        (
            "abide_last_look_timestamp_seconds",
            "Time of the last observation of the target; 0 before the first.",
            observed_at,
        ),
        (
            "abide_last_look_age_seconds",
            "Age of the last observation; before the first, time since the start.",
            (now.0 - since.0).max(0) as f64 / 1000.0,
        ),
        ("abide_leader", "1 if this controller holds the lease.", f64::from(u8::from(leads))),
        (
            "abide_converged",
            "1 if no step is to do and nothing is held.",
            f64::from(u8::from(converged(status))),
        ),
        (
            "abide_source_followed",
            "0 if the current content of the source is not active.",
            f64::from(u8::from(status.source.not_followed.is_none())),
        ),
        ("abide_event_readers", "Open event streams.", readers as f64),
        ("abide_started_timestamp_seconds", "Start time of the controller.", board.began.0 as f64 / 1000.0),
    ] {
        page.single(name, "gauge", help, value);
    }
}

fn times(page: &mut MetricsText, name: &str, help: &str, times: &DurationHistogram) {
    let buckets = BUCKETS.into_iter().zip(times.buckets);
    page.histogram(name, help, buckets, times.seconds, times.all);
}
