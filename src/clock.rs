//! Clock: the current time, time zones and crontab schedules. The only module that reads the wall clock.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::model::{Desired, Now, Time};

/// The current time.
pub fn now() -> Time {
    Time(Timestamp::now().as_millisecond().saturating_add(crate::failpoint::clock_shift_ms()))
}

/// Time of a file; 0 before 1970.
pub fn of_file(time: SystemTime) -> Time {
    let passed = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Time(i64::try_from(passed.as_millis()).unwrap_or(i64::MAX))
}

/// Time of the boot clock (CLOCK_BOOTTIME): monotonic, includes suspend, independent of the wall clock.
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

/// The current time, with the UTC offsets of all zones in the policies.
pub fn with_zones(desired: &Desired) -> Now {
    at(now(), desired)
}

/// The same for a given time.
pub fn at(moment: Time, desired: &Desired) -> Now {
    let zones = desired.policies.iter().flat_map(|policy| &policy.windows).map(|window| &window.tz);
    let offsets = zones.filter_map(|zone| Some((zone.clone(), offset(zone, moment)?)));
    Now { at: moment, offsets: offsets.collect::<BTreeMap<String, i32>>() }
}

fn offset(zone: &str, moment: Time) -> Option<i32> {
    let moment = Timestamp::from_millisecond(moment.0).ok()?;
    Some(TimeZone::get(zone).ok()?.to_offset(moment).seconds())
}

/// Parses RFC 3339.
pub fn read(text: &str) -> Option<Time> {
    text.parse::<Timestamp>().ok().map(|moment| Time(moment.as_millisecond()))
}

/// Parses a date and time without a zone, such as 2026-11-16T08:00:00, in the host's time zone.
pub fn read_local(text: &str) -> Option<Time> {
    let civil = text.parse::<jiff::civil::DateTime>().ok()?;
    let moment = civil.to_zoned(TimeZone::system()).ok()?;
    Some(Time(moment.timestamp().as_millisecond()))
}

/// A time for people, in the host's time zone: `2026-11-16 08:00:00`.
pub fn local_text(moment: Time) -> String {
    let zoned =
        |moment: Timestamp| moment.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S").to_string();
    Timestamp::from_millisecond(moment.0).map_or_else(|_| moment.to_string(), zoned)
}

/// Whether the time zone database has this name.
pub fn is_zone(name: &str) -> bool {
    TimeZone::get(name).is_ok()
}

/// The next run of a crontab rule in a time zone, by default the host's. A time inside a DST gap runs right after the gap; a repeated
/// time runs once.
pub fn next_run(rule: &str, zone: Option<&str>, after: Time) -> Option<Time> {
    use croner::parser::{CronParser, Seconds, Year};
    let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
    let zone = zone.map_or_else(|| Some(TimeZone::system()), |name| TimeZone::get(name).ok())?;
    let after = Timestamp::from_millisecond(after.0).ok()?.to_zoned(zone);
    let next = parser.parse(rule).ok()?.find_next_occurrence(&after, false).ok()?;
    Some(Time(next.timestamp().as_millisecond()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_back_as_written() {
        for text in ["2026-11-16T04:15:00Z", "1969-12-31T23:59:59Z", "2024-02-29T12:00:00.250Z"] {
            assert_eq!(read(text).expect(text).to_string(), text);
        }
        assert_eq!(read("2026-11-16T12:15:00+08:00"), read("2026-11-16T04:15:00Z"));
        assert_eq!((read("yesterday"), read("2026-11-16")), (None, None));
    }

    #[test]
    fn a_crontab_rule_has_a_next_time() {
        let now = read("2026-11-16T04:15:30Z").expect("a time");
        let next = next_run("* * * * *", None, now).expect("a time");
        assert_eq!(next, read("2026-11-16T04:16:00Z").expect("a time"));
        assert!(next_run("* * * * *", None, next).expect("a time") > next, "not the same again");
        let noon = next_run("0 12 * * *", Some("Asia/Shanghai"), now).expect("a time");
        assert_eq!(
            noon,
            read("2026-11-17T04:00:00Z").expect("a time"),
            "04:15:30Z is after noon in Shanghai"
        );
        assert_eq!(next_run("* * * * *", Some("Nowhere/City"), now), None);
        assert_eq!((next_run("nonsense", None, now), next_run("0 0 31 2 *", None, now)), (None, None));
    }

    #[test]
    fn the_offset_of_a_zone_changes_with_the_season() {
        let winter = read("2026-01-15T00:00:00Z").expect("a time");
        let summer = read("2026-07-15T00:00:00Z").expect("a time");
        assert_eq!(offset("Europe/Berlin", winter), Some(3600));
        assert_eq!(offset("Europe/Berlin", summer), Some(7200));
        assert_eq!(offset("Mars/Olympus", summer), None);
    }
}
