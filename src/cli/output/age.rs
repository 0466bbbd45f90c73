//! Ages: elapsed time in at most two units, for columns of tables.

use crate::clock;
use crate::model::Time;

/// Time since `earlier`: `45s`, `12m`, `3h12m`, `5d4h`. A time in the future is `0s`.
pub fn age(earlier: Time, now: Time) -> String {
    let seconds = now.secs_since(earlier);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |large: u64, unit: char, rest: u64, small: char| match rest {
        0 => format!("{large}{unit}"),
        rest => format!("{large}{unit}{rest}{small}"),
    };
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) if minutes < 10 => two(minutes, 'm', seconds % 60, 's'),
        (0, 0, _) => format!("{minutes}m"),
        (0, _, _) => two(hours, 'h', minutes % 60, 'm'),
        (days, ..) if days < 10 => two(days, 'd', hours % 24, 'h'),
        (days, ..) => format!("{days}d"),
    }
}

/// The age of an RFC 3339 time; `None`: no time.
pub fn age_of(text: &str, now: Time) -> Option<String> {
    clock::read(text).map(|earlier| age(earlier, now))
}

/// A time of the host's zone with its age: `2026-11-18 20:04:11 (5m ago)`.
pub fn local_and_age(text: &str, now: Time) -> Option<String> {
    let moment = clock::read(text)?;
    Some(format!("{} ({} ago)", clock::local_text(moment), age(moment, now)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_at_most_two_units() {
        let ages = [0, 59, 60, 61, 599, 660, 3600, 11_520, 86_400, 450_000, 864_000];
        let shown = ages.map(|seconds| age(Time(0), Time(seconds * 1000)));
        let expected = ["0s", "59s", "1m", "1m1s", "9m59s", "11m", "1h", "3h12m", "1d", "5d5h", "10d"];
        assert_eq!(shown, expected);
        assert_eq!(age(Time(5000), Time(0)), "0s");
    }
}
