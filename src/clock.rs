//! The one that knows what time it is, and what the clocks of a zone show.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::model::{Desired, Now, Time};

/// This moment.
pub fn now() -> Time {
    Time(Timestamp::now().as_millisecond().saturating_add(crate::failpoint::clock_shift_ms()))
}

/// A moment of this boot's monotonic clock, which also counts the time that the machine is suspended. No wall clock moves
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(Duration);

impl BootInstant {
    pub fn now() -> BootInstant {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        BootInstant(Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0)))
    }

    pub fn elapsed_ms(self) -> u64 {
        let passed = BootInstant::now().0.saturating_sub(self.0);
        u64::try_from(passed.as_millis()).unwrap_or(u64::MAX)
    }
}

/// This moment, with the clocks that the policies ask for.
pub fn with_zones(desired: &Desired) -> Now {
    at(now(), desired)
}

/// Any moment, in the same way.
pub fn at(moment: Time, desired: &Desired) -> Now {
    let zones = desired.policies.iter().flat_map(|policy| &policy.windows).map(|window| &window.tz);
    let offsets = zones.filter_map(|zone| Some((zone.clone(), offset(zone, moment)?)));
    Now { at: moment, offsets: offsets.collect::<BTreeMap<String, i32>>() }
}

fn offset(zone: &str, moment: Time) -> Option<i32> {
    let moment = Timestamp::from_millisecond(moment.0).ok()?;
    Some(TimeZone::get(zone).ok()?.to_offset(moment).seconds())
}

/// Reads RFC 3339.
pub fn read(text: &str) -> Option<Time> {
    text.parse::<Timestamp>().ok().map(|moment| Time(moment.as_millisecond()))
}

/// Is it a name of the time zone database?
pub fn is_zone(name: &str) -> bool {
    TimeZone::get(name).is_ok()
}

/// When a crontab rule says so next, by the clocks of this host's zone. A time that the clocks skip in spring comes right
/// after the gap; one that they show twice in autumn comes once.
pub fn next_run(rule: &str, after: Time) -> Option<Time> {
    use croner::parser::{CronParser, Seconds, Year};
    let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
    let after = Timestamp::from_millisecond(after.0).ok()?.to_zoned(TimeZone::system());
    let next = parser.parse(rule).ok()?.find_next_occurrence(&after, false).ok()?;
    Some(Time(next.timestamp().as_millisecond()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_what_is_shown() {
        for text in ["2026-11-16T04:15:00Z", "1969-12-31T23:59:59Z", "2024-02-29T12:00:00.250Z"] {
            assert_eq!(read(text).expect(text).to_string(), text);
        }
        assert_eq!(read("2026-11-16T12:15:00+08:00"), read("2026-11-16T04:15:00Z"));
        assert_eq!((read("yesterday"), read("2026-11-16")), (None, None));
    }

    #[test]
    fn a_crontab_rule_has_a_next_time() {
        let now = read("2026-11-16T04:15:30Z").expect("a time");
        let next = next_run("* * * * *", now).expect("a time");
        assert_eq!(next, read("2026-11-16T04:16:00Z").expect("a time"));
        assert!(next_run("* * * * *", next).expect("a time") > next, "not the same again");
        assert_eq!((next_run("nonsense", now), next_run("0 0 31 2 *", now)), (None, None));
    }

    #[test]
    fn the_clocks_of_a_zone_change_with_the_season() {
        let winter = read("2026-01-15T00:00:00Z").expect("a time");
        let summer = read("2026-07-15T00:00:00Z").expect("a time");
        assert_eq!(offset("Europe/Berlin", winter), Some(3600));
        assert_eq!(offset("Europe/Berlin", summer), Some(7200));
        assert_eq!(offset("Mars/Olympus", summer), None);
    }
}
