//! Messages: the JSON document of a batch of incidents, its title and text, and the alerts of Alertmanager.

use serde_json::{Value, json};

use super::conditions::IncidentKey;
use super::tracker::{Incident, IncidentBatch};
use crate::contract::{AlertIncident, AlertKind, AlertMessage, AlertPhase};
use crate::model::Time;

/// Maximum incidents in the JSON document, and maximum lines of the text.
const MAX_INCIDENTS: usize = 50;
const MAX_LINES: usize = 10;
/// Alertmanager ends an alert that is not sent again for this long.
pub const ALERTMANAGER_REFRESH_SECS: u64 = 60;
const ALERTMANAGER_LIFETIME_SECS: u64 = 4 * ALERTMANAGER_REFRESH_SECS;
/// Maximum alerts per request.
pub const ALERTMANAGER_BATCH: usize = 500;

/// Fields that all messages of a route share.
#[derive(Clone, Debug, Default)]
pub struct MessageOrigin {
    pub owner: String,
    pub target: String,
    pub route: String,
    pub revision: String,
    pub commit: Option<String>,
}

/// Placeholders of a webhook template.
pub const PLACEHOLDERS: &[&str] = &[
    "title",
    "text",
    "owner",
    "target",
    "route",
    "revision",
    "commit",
    "level",
    "status",
    "kind",
    "namespaces",
    "total",
    "instances",
    "time",
    "timestamp",
    "sign",
];

/// The message of a batch.
pub fn message(batch: &IncidentBatch, origin: &MessageOrigin, now: Time) -> AlertMessage {
    let MessageOrigin { owner, target, route, revision, commit } = origin.clone();
    let instances = batch.incidents.iter().map(|(_, one)| one.extent.instances).sum();
    let incidents: Vec<AlertIncident> = batch
        .incidents
        .iter()
        .take(MAX_INCIDENTS)
        .map(|(key, one)| AlertIncident {
            subject: key.subject.to_string(),
            namespace: key.subject.namespace().map(str::to_owned),
            since: one.since.to_string(),
            ended: one.ended.map(|time| time.to_string()),
            instances: one.extent.instances,
            first_instances: one.extent.named.iter().map(ToString::to_string).collect(),
            detail: one.extent.detail.clone(),
        })
        .collect();
    let total = batch.incidents.len();
    let who = match &batch.incidents[..] {
        [(key, _)] => key.subject.to_string(),
        many => format!("{} {}", many.len(), noun(batch.kind)),
    };
    let subject = subject_text(batch.kind, batch.phase, &who);
    AlertMessage {
        version: 1,
        status: batch.phase,
        kind: batch.kind,
        severity: batch.kind.severity(),
        title: format!("abide {target}/{owner}: {subject}"),
        text: text(&incidents, total),
        owner,
        target,
        route,
        revision,
        commit,
        at: now.to_string(),
        total,
        instances,
        incidents,
    }
}

fn noun(kind: AlertKind) -> &'static str {
    if kind == AlertKind::HostUnknown { "hosts" } else { "processes" }
}

/// "3 processes unhealthy", "web/api healthy again".
fn subject_text(kind: AlertKind, phase: AlertPhase, who: &str) -> String {
    let state = |firing: &str, resolved: &str| match phase {
        AlertPhase::Firing => firing.to_owned(),
        AlertPhase::Resolved => resolved.to_owned(),
    };
    let rest = match kind {
        AlertKind::Unhealthy => state("unhealthy", "healthy again"),
        AlertKind::CrashLoop => state("in a crash loop", "no longer in a crash loop"),
        AlertKind::Failed => state("failed", "no longer failed"),
        AlertKind::HeldByBudget => state("held by a budget", "no longer held by a budget"),
        AlertKind::Suspended => state("suspended", "no longer suspended"),
        AlertKind::Drift => state("drifted", "drifted and repaired"),
        AlertKind::HostUnknown => state("cannot be observed", "observed again"),
        AlertKind::RolloutPaused => state("waiting for a promotion", "no longer waiting for a promotion"),
        AlertKind::RolloutFinished => "rolled out".to_owned(),
        AlertKind::RolledBack => "rolled back".to_owned(),
        AlertKind::ManifestErrors => {
            return state("errors in the manifests", "manifest errors resolved");
        }
        AlertKind::SourceNotFollowed => {
            return state("the source is not followed", "the source is followed again");
        }
        AlertKind::TargetUnreachable => {
            return state("the target is unreachable", "the target is reachable again");
        }
    };
    format!("{who} {rest}")
}

/// One line per incident, for the first ones.
fn text(incidents: &[AlertIncident], total: usize) -> String {
    let mut lines: Vec<String> = incidents.iter().take(MAX_LINES).map(line).collect();
    if total > lines.len() {
        lines.push(format!("and {} more", total - lines.len()));
    }
    lines.join("\n")
}

fn line(incident: &AlertIncident) -> String {
    let AlertIncident { subject, since, ended, instances, first_instances, detail, .. } = incident;
    let mut line = if subject.is_empty() { String::new() } else { format!("{subject}: ") };
    line.push_str(detail);
    // The host of an incident of one instance is needed to act on it.
    match first_instances.len() {
        0 => {}
        named if *instances > named => {
            line.push_str(&format!(" ({instances} instances, such as {})", first_instances[0]));
        }
        _ => line.push_str(&format!(" ({})", first_instances.join(", "))),
    }
    match ended {
        Some(ended) => line.push_str(&format!("; from {since} to {ended}")),
        None => line.push_str(&format!("; since {since}")),
    }
    line
}

/// The values of the placeholders. `timestamp` and `sign`: of a signed request.
pub fn placeholders(message: &AlertMessage, timestamp: &str, sign: &str) -> Vec<(&'static str, String)> {
    let mut namespaces: Vec<&str> =
        message.incidents.iter().filter_map(|one| one.namespace.as_deref()).collect();
    namespaces.sort_unstable();
    namespaces.dedup();
    let commit = message.commit.as_deref().unwrap_or_default();
    let values = [
        message.title.clone(),
        message.text.clone(),
        message.owner.clone(),
        message.target.clone(),
        message.route.clone(),
        message.revision.clone(),
        commit.chars().take(12).collect(),
        message.severity.word().to_owned(),
        message.status.word().to_owned(),
        message.kind.word().to_owned(),
        namespaces.join(", "),
        message.total.to_string(),
        message.instances.to_string(),
        message.at.clone(),
        timestamp.to_owned(),
        sign.to_owned(),
    ];
    PLACEHOLDERS.iter().copied().zip(values).collect()
}

/// The alerts of a batch for `POST /api/v2/alerts`. A firing alert ends unless it is sent again.
pub fn alertmanager_alerts(batch: &IncidentBatch, origin: &MessageOrigin, now: Time) -> Vec<Value> {
    let alert = |(key, one): &(IncidentKey, Incident)| {
        let mut labels = json!({
            "alertname": alert_name(batch.kind),
            "kind": batch.kind.word(),
            "severity": batch.kind.severity().word(),
            "owner": origin.owner,
            "target": origin.target,
        });
        let subject = key.subject.to_string();
        if let Some(namespace) = key.subject.namespace() {
            labels["namespace"] = json!(namespace);
            labels["process"] = json!(subject);
        } else if !subject.is_empty() {
            labels["host"] = json!(subject);
        }
        let named: Vec<String> = one.extent.named.iter().map(ToString::to_string).collect();
        let ends = one.ended.unwrap_or_else(|| now.after_secs(ALERTMANAGER_LIFETIME_SECS));
        json!({
            "labels": labels,
            "annotations": {
                "summary": subject_text(batch.kind, batch.phase, &subject),
                "description": one.extent.detail,
                "instances": one.extent.instances.to_string(),
                "first_instances": named.join(", "),
                "revision": origin.revision,
            },
            "startsAt": one.since.to_string(),
            "endsAt": ends.to_string(),
        })
    };
    batch.incidents.iter().map(alert).collect()
}

/// `crash_loop` → `AbideCrashLoop`.
fn alert_name(kind: AlertKind) -> String {
    let capital = |word: &str| {
        let (first, rest) = word.split_at(1);
        format!("{}{rest}", first.to_ascii_uppercase())
    };
    format!("Abide{}", kind.word().split('_').map(capital).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::super::conditions::{AlertSubject, Extent, IncidentKey};
    use super::*;

    fn batch(kind: AlertKind, phase: AlertPhase, names: &[&str]) -> IncidentBatch {
        let incident = |name: &&str| {
            let key = IncidentKey { kind, subject: AlertSubject::Process(name.parse().expect("a process")) };
            let instance = format!("0:10.0.0.1:{}", name.replace('/', ":")).parse().expect("an instance");
            let extent =
                Extent { instances: 1, named: vec![instance], detail: "the health check fails".to_owned() };
            let ended = (phase == AlertPhase::Resolved).then_some(Time(60_000));
            (key, Incident { since: Time(0), ended, sent: None, extent })
        };
        IncidentBatch { kind, phase, incidents: names.iter().map(incident).collect() }
    }

    fn origin() -> MessageOrigin {
        MessageOrigin { owner: "shop".to_owned(), target: "prod".to_owned(), ..MessageOrigin::default() }
    }

    #[test]
    fn a_message_names_what_happened_and_where() {
        let one = batch(AlertKind::Unhealthy, AlertPhase::Firing, &["web/api"]);
        let sent = message(&one, &origin(), Time(60_000));
        assert_eq!(sent.title, "abide prod/shop: web/api unhealthy");
        assert_eq!(
            sent.text,
            "web/api: the health check fails (0:10.0.0.1:web:api); since 1970-01-01T00:00:00Z"
        );
        let one = batch(AlertKind::Drift, AlertPhase::Resolved, &["web/api"]);
        assert_eq!(message(&one, &origin(), Time(0)).title, "abide prod/shop: web/api drifted and repaired");
    }

    #[test]
    fn a_message_about_thousands_is_short() {
        let names: Vec<String> = (0..10_000).map(|n| format!("web/p{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let sent = message(&batch(AlertKind::Unhealthy, AlertPhase::Firing, &names), &origin(), Time(0));
        assert_eq!((sent.total, sent.instances, sent.incidents.len()), (10_000, 10_000, MAX_INCIDENTS));
        assert!(sent.title.ends_with("10000 processes unhealthy"), "{}", sent.title);
        assert!(sent.text.lines().count() == MAX_LINES + 1 && sent.text.ends_with("and 9990 more"));
        assert!(crate::contract::compact(&sent).len() < 20_000);
    }

    #[test]
    fn alertmanager_alerts_end_unless_they_are_sent_again() {
        let firing = batch(AlertKind::CrashLoop, AlertPhase::Firing, &["web/api"]);
        let alerts = alertmanager_alerts(&firing, &origin(), Time(60_000));
        assert_eq!(alerts[0]["labels"]["alertname"], "AbideCrashLoop");
        assert_eq!(alerts[0]["labels"]["process"], "web/api");
        assert_eq!(alerts[0]["endsAt"], "1970-01-01T00:05:00Z");
        assert_eq!(alerts[0]["annotations"]["summary"], "web/api in a crash loop");
        let over = batch(AlertKind::CrashLoop, AlertPhase::Resolved, &["web/api"]);
        assert_eq!(alertmanager_alerts(&over, &origin(), Time(90_000))[0]["endsAt"], "1970-01-01T00:01:00Z");
    }
}
