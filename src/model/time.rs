//! Time as a value. No function here reads a clock: callers pass the time, with the UTC offsets of the zones.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{TimeOfDay, Window};

/// Milliseconds since 1970, UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Time(pub i64);

impl Time {
    pub fn after_secs(self, seconds: u64) -> Time {
        Time(self.0.saturating_add_unsigned(seconds.saturating_mul(1000)))
    }

    pub fn before_secs(self, seconds: u64) -> Time {
        Time(self.0.saturating_sub_unsigned(seconds.saturating_mul(1000)))
    }

    /// Whole seconds since an earlier time; 0 if it is not earlier.
    pub fn secs_since(self, earlier: Time) -> u64 {
        u64::try_from(self.0.saturating_sub(earlier.0) / 1000).unwrap_or(0)
    }
}

/// RFC 3339, in UTC.
impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, millis) = (self.0.div_euclid(1000), self.0.rem_euclid(1000));
        let (days, second) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
        let (year, month, day) = civil(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")?;
        if millis != 0 {
            write!(f, ".{millis:03}")?;
        }
        f.write_str("Z")
    }
}

const DAY: i64 = 86_400;

/// The Gregorian date of a day counted from 1970. Years begin in March here, so that the odd day comes last.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468; // from 0000-03-01
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// The time of a decision, with the offsets of all zones that it needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Now {
    pub at: Time,
    /// UTC offset in seconds of every zone that a policy names.
    pub offsets: BTreeMap<String, i32>,
}

impl Now {
    /// Whether a window is open. A window in a zone without a known offset is closed.
    pub fn is_in(&self, window: &Window) -> bool {
        self.local(window).is_some_and(|local| end_of_opening(window, local).is_some())
    }

    /// Whether a window denies operations now. A window in a zone without a known offset does.
    pub fn is_denied_by(&self, window: &Window) -> bool {
        window.deny && (self.local(window).is_none() || self.is_in(window))
    }

    /// The end of an open window by the clock of its zone, as in `Mon 17:00`. `None`: it is closed, or has no end.
    pub fn end_of(&self, window: &Window) -> Option<String> {
        const NAMES: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
        let mut end = end_of_opening(window, self.local(window)?)?;
        // The next day of the window may begin where this one ends.
        for _ in 0..8 {
            let Some(next) = end_of_opening(window, end) else {
                let (day, second) = (end.div_euclid(DAY), end.rem_euclid(DAY));
                return Some(format!("{} {:02}:{:02}", NAMES[weekday(day)], second / 3600, second / 60 % 60));
            };
            end = next;
        }
        None
    }

    /// Seconds by the clock of a window's zone, since 1970 there.
    fn local(&self, window: &Window) -> Option<i64> {
        Some(self.at.0.div_euclid(1000) + i64::from(*self.offsets.get(&window.tz)?))
    }
}

/// The day of the week, from Monday. 1970 began on a Thursday.
fn weekday(day: i64) -> usize {
    (day + 3).rem_euclid(7) as usize
}

/// The end of the opening that contains a local time. `None`: the window is closed then.
fn end_of_opening(window: &Window, local: i64) -> Option<i64> {
    let (day, second) = (local.div_euclid(DAY), local.rem_euclid(DAY));
    let on = |day: i64| window.days[weekday(day)];
    let at = |time: TimeOfDay| i64::from(time.hour) * 3600 + i64::from(time.minute) * 60;
    let (from, to) = (at(window.from), at(window.to));
    if from < to {
        return (on(day) && (from..to).contains(&second)).then_some(day * DAY + to);
    }
    // Across midnight: the window belongs to the day on which it opens.
    if on(day) && second >= from {
        return Some((day + 1) * DAY + to);
    }
    (on(day - 1) && second < to).then_some(day * DAY + to)
}

/// Human-readable duration: "4 min", "2 h 30 min".
pub fn span(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let parts = match seconds {
        0..60 => return format!("{seconds} s"),
        60..3600 => [(minutes, "min"), (seconds % 60, "s")],
        3600..86_400 => [(hours, "h"), (minutes, "min")],
        _ => [(days, "d"), (hours, "h")],
    };
    let shown: Vec<String> =
        parts.iter().filter(|(n, _)| *n > 0).map(|(n, unit)| format!("{n} {unit}")).collect();
    shown.join(" ")
}

/// Maximum duration; within the range of every clock.
const LONGEST: u64 = 100 * 365 * 86_400;

/// `1h30m` → 5400. Capped at a hundred years.
pub fn seconds(text: &str) -> Option<u64> {
    let mut rest = text.trim();
    let mut total = 0u64;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: u64 = rest[..digits].parse().ok()?;
        let (unit, after) = match rest.as_bytes()[digits] {
            b's' => (1, &rest[digits + 1..]),
            b'm' => (60, &rest[digits + 1..]),
            b'h' => (3_600, &rest[digits + 1..]),
            b'd' => (86_400, &rest[digits + 1..]),
            _ => return None,
        };
        total = total.saturating_add(number.saturating_mul(unit));
        rest = after;
    }
    Some(total.min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SourceLocation;

    #[test]
    fn moments_are_written_in_rfc_3339() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_794_700_799, "2026-11-14T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(Time(seconds * 1000).to_string(), text);
        }
        assert_eq!(Time(1).to_string(), "1970-01-01T00:00:00.001Z");
    }

    #[test]
    fn windows_open_by_the_clock_of_their_zone() {
        let window = |days: &str, from: (u8, u8), to: (u8, u8)| Window {
            days: std::array::from_fn(|day| days.as_bytes()[day] == b'x'),
            from: TimeOfDay { hour: from.0, minute: from.1 },
            to: TimeOfDay { hour: to.0, minute: to.1 },
            tz: "Asia/Shanghai".into(),
            operations: Vec::new(),
            deny: false,
            place: SourceLocation { file: "".into(), line: 0, column: 0 },
        };
        // 2026-11-16 is a Monday; 8 hours east of UTC.
        let monday = 1_794_787_200;
        let now = |hour: i64, minute: i64| Now {
            at: Time((monday + hour * 3600 + minute * 60) * 1000),
            offsets: BTreeMap::from([("Asia/Shanghai".to_owned(), 8 * 3600)]),
        };
        let office = window("xxxxx--", (9, 0), (17, 0));
        assert!(!now(0, 59).is_in(&office) && now(1, 0).is_in(&office));
        assert!(now(8, 59).is_in(&office) && !now(9, 0).is_in(&office));
        // From Sunday evening into Monday morning.
        let night = window("------x", (22, 0), (6, 0));
        assert!(now(-3, 0).is_in(&night) && now(-10, 0).is_in(&night) && !now(-11, 0).is_in(&night));
        assert_eq!(now(1, 0).end_of(&office).as_deref(), Some("Mon 17:00"));
        assert_eq!(now(-10, 0).end_of(&night).as_deref(), Some("Mon 06:00"));
        assert_eq!(now(-3, 0).end_of(&night).as_deref(), Some("Mon 06:00"));
        assert_eq!(now(9, 0).end_of(&office), None, "it is closed");
        let days = window("xx-----", (0, 0), (24, 0));
        assert_eq!(now(1, 0).end_of(&days).as_deref(), Some("Wed 00:00"), "two days in a row");
        assert_eq!(now(1, 0).end_of(&window("xxxxxxx", (0, 0), (24, 0))), None, "always");
        // A window of an unknown zone neither allows nor stops denying.
        let unknown = Window { tz: "UTC".into(), ..night };
        assert!(!now(-3, 0).is_in(&unknown));
        let [denied, allowed] = [true, false].map(|deny| Window { deny, ..unknown.clone() });
        assert!(now(-3, 0).is_denied_by(&denied) && !now(-3, 0).is_denied_by(&allowed));
    }

    #[test]
    fn spans_read_well() {
        for (seconds, text) in
            [(7, "7 s"), (240, "4 min"), (250, "4 min 10 s"), (9000, "2 h 30 min"), (90_000, "1 d 1 h")]
        {
            assert_eq!(span(seconds), text);
        }
    }

    #[test]
    fn durations_are_read() {
        let cases = [
            ("30s", Some(30)),
            ("1h30m", Some(5400)),
            ("2d", Some(172_800)),
            ("30", None),
            ("-5s", None),
            ("", None),
            ("s", None),
            ("5µs", None),
            ("99999999999999999999s", None),
            ("18446744073709551615s", Some(LONGEST)),
            ("18446744073709551615d1s", Some(LONGEST)),
        ];
        for (text, expected) in cases {
            assert_eq!(seconds(text), expected, "{text:?}");
        }
    }
}
