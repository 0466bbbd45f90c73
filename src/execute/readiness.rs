//! Readiness of a changed instance: whether a later step may rely on it. Pure: time and observations are inputs.
//!
//! - A one-shot process is ready when its run has ended with success. Its run has no time limit of its own.
//! - A resident process is ready when it is healthy. While it is starting, it has its start period and the retries of
//!   its health check to become healthy.
//! - A periodic process is ready when it is supervised.
//!
//! A target without health reports has no exit codes either: there, a one-shot is ready when its run has ended.

use std::time::Duration;

use crate::model::{AutoType, Health, HealthCheck, InstanceKey, Monitor, Observed, ObservedInstance, Spec};

/// Time beyond the start period for the report of an agent, which may be reconnecting.
const REPORT_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    Pending,
    /// With the reason.
    Failed(String),
}

/// Time for which an instance was waited for, and its state in the first observation.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadinessWait<'a> {
    pub time: Duration,
    pub first: Option<&'a ObservedInstance>,
}

/// The readiness of an instance whose step succeeded.
pub(super) fn readiness(
    spec: Option<&Spec>,
    key: &InstanceKey,
    observed: &Observed,
    waited: ReadinessWait<'_>,
    reads_health: bool,
) -> Readiness {
    let limit = spec.map_or(REPORT_TIMEOUT, time_to_become_healthy);
    let pending_until_limit = |why: &str| match waited.time < limit {
        true => Readiness::Pending,
        false => Readiness::Failed(why.to_owned()),
    };
    if observed.gaps.contains_key(&key.host) {
        return pending_until_limit("host could not be observed after the change");
    }
    let seen = observed.instances.get(key);
    let auto_type = spec.map_or(AutoType::Resident, |spec| spec.monitor.auto_type);
    match (auto_type, reads_health) {
        (AutoType::OneShot, _) if seen.is_some_and(|seen| seen.running != Some(false)) => Readiness::Pending,
        (AutoType::Resident, false) => unchanged_pid(spec, seen, waited),
        (AutoType::OneShot | AutoType::Periodic, false) => Readiness::Ready,
        (_, true) => match seen.map(|seen| seen.health) {
            None => pending_until_limit("instance does not exist after the change"),
            Some(Health::Starting) => pending_until_limit("instance did not become healthy in time"),
            Some(Health::Failed) if auto_type == AutoType::OneShot => {
                Readiness::Failed("run ended with failure".to_owned())
            }
            Some(Health::Degraded | Health::Failed) => {
                Readiness::Failed("instance is unhealthy after the change".to_owned())
            }
            Some(Health::Healthy | Health::Unknown | Health::NotReported) => Readiness::Ready,
        },
    }
}

/// The same process in two observations, a start check apart.
fn unchanged_pid(
    spec: Option<&Spec>,
    seen: Option<&ObservedInstance>,
    waited: ReadinessWait<'_>,
) -> Readiness {
    let start_check =
        spec.and_then(|spec| spec.monitor.start_check_secs).unwrap_or(Monitor::START_CHECK_SECS);
    if waited.time < Duration::from_secs(start_check.into()) {
        return Readiness::Pending;
    }
    let (then, now) =
        (waited.first.and_then(|first| first.process.pid), seen.and_then(|seen| seen.process.pid));
    match now {
        None => Readiness::Failed("process is not running after the change".to_owned()),
        Some(_) if then.is_some() && then != now => {
            Readiness::Failed("process was replaced after the change: its pid differs".to_owned())
        }
        Some(_) => Readiness::Ready,
    }
}

/// Time that a resident process may take to become healthy.
fn time_to_become_healthy(spec: &Spec) -> Duration {
    let HealthCheck { start_period, interval, timeout, retries, .. } = &spec.health;
    let start_check = spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
    let start_period = start_period.unwrap_or(HealthCheck::START_PERIOD.max(start_check));
    let attempt =
        interval.unwrap_or(HealthCheck::INTERVAL).saturating_add(timeout.unwrap_or(HealthCheck::TIMEOUT));
    let attempts = attempt.saturating_mul(retries.unwrap_or(HealthCheck::RETRIES));
    REPORT_TIMEOUT + Duration::from_secs(u64::from(start_period) + u64::from(attempts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{HostKey, RunningProcess};

    fn key() -> InstanceKey {
        "0:10.0.0.1:web:api".parse().expect("a key")
    }

    fn spec(auto_type: AutoType) -> Spec {
        let mut spec = Spec::default();
        spec.monitor.auto_type = auto_type;
        spec
    }

    fn observed(running: bool, health: Health, pid: Option<u32>) -> Observed {
        let mut observed = Observed::default();
        let process = RunningProcess { pid, ..RunningProcess::default() };
        let seen =
            ObservedInstance { running: Some(running), health, process, ..ObservedInstance::default() };
        observed.instances.insert(key(), seen);
        observed
    }

    fn after(secs: u64) -> ReadinessWait<'static> {
        ReadinessWait { time: Duration::from_secs(secs), first: None }
    }

    #[test]
    fn a_one_shot_is_ready_when_its_run_ended_with_success() {
        let spec = spec(AutoType::OneShot);
        let with = |observed: &Observed, secs| readiness(Some(&spec), &key(), observed, after(secs), true);
        let running = observed(true, Health::Healthy, Some(7));
        assert_eq!(with(&running, 0), Readiness::Pending);
        assert_eq!(with(&running, 100_000), Readiness::Pending);
        assert_eq!(with(&observed(false, Health::Healthy, None), 0), Readiness::Ready);
        let failed = with(&observed(false, Health::Failed, None), 0);
        assert_eq!(failed, Readiness::Failed("run ended with failure".to_owned()));
        let foreign =
            readiness(Some(&spec), &key(), &observed(false, Health::NotReported, None), after(0), false);
        assert_eq!(foreign, Readiness::Ready);
    }

    #[test]
    fn a_service_has_its_start_period_and_retries_to_become_healthy() {
        let mut spec = spec(AutoType::Resident);
        (spec.health.start_period, spec.health.interval) = (Some(60), Some(2));
        (spec.health.timeout, spec.health.retries) = (Some(1), Some(3));
        let with = |health, secs| {
            readiness(Some(&spec), &key(), &observed(true, health, Some(7)), after(secs), true)
        };
        assert_eq!(with(Health::Starting, 60 + 9), Readiness::Pending);
        assert!(matches!(with(Health::Starting, 60 + 9 + 30), Readiness::Failed(_)));
        assert_eq!(with(Health::Healthy, 0), Readiness::Ready);
        assert!(matches!(with(Health::Degraded, 0), Readiness::Failed(_)));
    }

    #[test]
    fn without_health_reports_the_same_process_must_run_twice() {
        let spec = spec(AutoType::Resident);
        let first = observed(true, Health::NotReported, Some(7));
        let with = |pid: Option<u32>, secs| {
            let waited =
                ReadinessWait { time: Duration::from_secs(secs), first: first.instances.get(&key()) };
            readiness(Some(&spec), &key(), &observed(pid.is_some(), Health::NotReported, pid), waited, false)
        };
        assert_eq!(with(Some(7), 4), Readiness::Pending);
        assert_eq!(with(Some(7), 5), Readiness::Ready);
        assert!(matches!(with(Some(8), 5), Readiness::Failed(_)));
        assert!(matches!(with(None, 5), Readiness::Failed(_)));
    }

    #[test]
    fn a_host_that_cannot_be_observed_may_come_back() {
        let mut observed = Observed::default();
        let host: HostKey = "0:10.0.0.1".parse().expect("a host");
        observed.gaps.insert(host, "no agent".to_owned());
        let with = |secs| readiness(None, &key(), &observed, after(secs), true);
        assert_eq!(with(29), Readiness::Pending);
        assert!(matches!(with(30), Readiness::Failed(_)));
    }
}
