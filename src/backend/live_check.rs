//! Live status check (operation 2): the facts that its content holds, and the start time of the process.

use serde_json::Value;

use crate::clock;
use crate::gse::response::{LiveInstance, LiveStatus};
use crate::model::{ObservedInstance, RunningProcess, Time};

/// The facts in the content of a result row. `asked` and `replied`: this host's clock before and after the call.
pub fn live(content: &Value, asked: Time, replied: Time) -> ObservedInstance {
    let Some(status) = LiveStatus::read(content) else {
        return ObservedInstance { unknown: true, ..ObservedInstance::default() };
    };
    // An empty list: neither running nor supervised.
    let first =
        status.process.iter().flat_map(|process| &process.instance).next().cloned().unwrap_or_default();
    let pid = u32::try_from(first.pid).ok().filter(|pid| *pid > 0);
    let age = pid.and_then(|_| age_ms(&status.utctime, &first));
    let started = age.map(|age| Time(replied.0.saturating_sub(age)));
    let process = RunningProcess { pid, started, not_owned: first.not_owned };
    ObservedInstance { process, ..facts(pid, first.is_auto, asked) }
}

pub fn facts(pid: Option<u32>, guarded: bool, at: Time) -> ObservedInstance {
    let running = pid.is_some();
    ObservedInstance {
        registered: Some(running || guarded),
        hosted: Some(guarded),
        running: Some(running),
        report_time: Some(at),
        process: RunningProcess { pid, ..RunningProcess::default() },
        ..ObservedInstance::default()
    }
}

/// Age of the process by the clock of its host alone: clocks of two hosts are never compared.
fn age_ms(utctime: &str, instance: &LiveInstance) -> Option<i64> {
    let by_clock = clock::read(utctime).zip(clock::read(&instance.start_time));
    let by_clock = by_clock.map(|(now, then)| now.0.saturating_sub(then.0)).filter(|age| *age >= 0);
    // Some platforms always send 0, which is not an age.
    let elapsed =
        instance.elapsed_time.as_i64().filter(|secs| *secs > 0).map(|secs| secs.saturating_mul(1000));
    by_clock.or(elapsed)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn started(instance: Value) -> Option<Time> {
        let content = json!({"ip": "10.0.0.1", "utctime": "2026-11-18T10:00:00Z", "process": [{"procname": "api", "instance": [instance]}]});
        // The clock of this host is far behind that of the other one.
        live(&content, Time(50_000), Time(60_000)).process.started
    }

    #[test]
    fn a_start_time_is_an_age_before_the_reply() {
        let at = |time: &str| started(json!({"pid": 7, "startTime": time}));
        assert_eq!(at("2026-11-18T09:59:50Z"), Some(Time(50_000)));
        assert_eq!(at("1970-01-01T00:00:00Z").map(|time| time < Time(0)), Some(true));
        assert_eq!(started(json!({"pid": 7, "startTime": "", "elapsedTime": 20})), Some(Time(40_000)));
    }

    #[test]
    fn unreadable_facts_are_unknown() {
        assert_eq!(started(json!({"pid": 7, "startTime": "Tue Nov 18", "elapsedTime": 0})), None);
        assert_eq!(started(json!({"pid": 7, "startTime": "2026-11-18T10:00:01Z"})), None, "not started yet");
        assert_eq!(started(json!({"pid": -1, "startTime": "2026-11-18T09:00:00Z"})), None);
    }
}
