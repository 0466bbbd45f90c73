//! systemd time syntax: spans such as `1min 30s`, and calendar expressions such as `Mon..Fri *-*-* 09:00`.

/// A span in milliseconds. `None` if it is invalid or infinite.
pub fn span_ms(text: &str) -> Option<u64> {
    let mut rest = text.trim();
    let mut total: f64 = 0.0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let number: f64 = rest[..digits].parse().ok()?;
        rest = rest[digits..].trim_start();
        let letters = rest.find(|c: char| !c.is_alphabetic()).unwrap_or(rest.len());
        let unit = match &rest[..letters] {
            "us" | "usec" | "µs" | "μs" => 0.001,
            "ms" | "msec" => 1.0,
            "" | "s" | "sec" | "second" | "seconds" => 1e3,
            "m" | "min" | "minute" | "minutes" => 6e4,
            "h" | "hr" | "hour" | "hours" => 3.6e6,
            "d" | "day" | "days" => 8.64e7,
            "w" | "week" | "weeks" => 6.048e8,
            _ => return None,
        };
        rest = rest[letters..].trim_start();
        total += number * unit;
    }
    // Far beyond a manifest's limits, and safe from overflow.
    (total.is_finite() && total < 1e15).then_some(total as u64)
}

/// Whole seconds, rounded up.
pub fn seconds(ms: u64) -> i64 {
    i64::try_from(ms.div_ceil(1000)).unwrap_or(i64::MAX)
}

/// A calendar expression as a crontab rule, if an equivalent one exists.
pub fn crontab(text: &str) -> Option<String> {
    let rule = match text.trim().to_ascii_lowercase().as_str() {
        "minutely" => "* * * * *",
        "hourly" => "0 * * * *",
        "daily" => "0 0 * * *",
        "weekly" => "0 0 * * 1",
        "monthly" => "0 0 1 * *",
        "quarterly" => "0 0 1 1,4,7,10 *",
        "semiannually" | "semi-annually" => "0 0 1 1,7 *",
        "yearly" | "annually" => "0 0 1 1 *",
        other => return expression(other),
    };
    Some(rule.to_owned())
}

fn expression(text: &str) -> Option<String> {
    let mut parts = text.split_whitespace().peekable();
    let weekdays = match parts.peek() {
        Some(part) if part.starts_with(|c: char| c.is_ascii_alphabetic()) => weekdays(parts.next()?)?,
        _ => "*".to_owned(),
    };
    let date = parts.next_if(|part| !part.contains(':'));
    let time = parts.next();
    // A time zone, or not a calendar expression.
    if parts.next().is_some() || (date.is_none() && time.is_none() && weekdays == "*") {
        return None;
    }
    let (month, day) = match date {
        None => ("*".to_owned(), "*".to_owned()),
        Some(date) => {
            let fields: Vec<&str> = date.split('-').collect();
            let (year, month, day) = match fields.as_slice() {
                [month, day] => ("*", *month, *day),
                [year, month, day] => (*year, *month, *day),
                _ => return None,
            };
            let month = field(month, 1, 12)?;
            (month, field(day, 1, 31).filter(|_| year == "*")?)
        }
    };
    // crontab matches if either day field matches; systemd requires both.
    if weekdays != "*" && day != "*" {
        return None;
    }
    let time: Vec<&str> = time.unwrap_or("0:0").split(':').collect();
    let (hour, minute) = match time.as_slice() {
        [hour, minute] => (*hour, *minute),
        [hour, minute, second] if second.parse::<u32>() == Ok(0) => (*hour, *minute),
        _ => return None,
    };
    Some(format!("{} {} {day} {month} {weekdays}", field(minute, 0, 59)?, field(hour, 0, 23)?))
}

fn weekdays(text: &str) -> Option<String> {
    let day = |word: &str| {
        let days = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
        let names = ["sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"];
        days.iter().position(|day| *day == word).or(names.iter().position(|name| *name == word))
    };
    let mut all = Vec::new();
    for part in text.trim_end_matches(',').split(',') {
        match part.split_once("..").or_else(|| part.split_once('-')) {
            None => all.push(day(part)?),
            Some((from, to)) => {
                let (from, to) = (day(from)?, day(to)?);
                // systemd's week starts on Monday: a range may end on Sunday.
                let to = if to < from { to + 7 } else { to };
                all.extend((from..=to).map(|day| day % 7));
            }
        }
    }
    all.sort_unstable();
    all.dedup();
    let list: Vec<String> = all.iter().map(usize::to_string).collect();
    Some(if list.len() == 7 { "*".to_owned() } else { list.join(",") })
}

/// Converts a component such as `*`, `5`, `1,2`, `1..5`, `0/15` or `*/15`.
fn field(text: &str, least: u32, most: u32) -> Option<String> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|n| (least..=most).contains(n));
    let one = |part: &str| {
        let (what, step) = match part.split_once('/') {
            Some((what, step)) => (what, Some(step.parse::<u32>().ok().filter(|step| *step > 0)?)),
            None => (part, None),
        };
        let range = match (what, what.split_once("..")) {
            ("*", _) => "*".to_owned(),
            (_, Some((from, to))) => format!("{}-{}", number(from)?, number(to)?),
            (from, None) if step.is_some() => format!("{}-{most}", number(from)?),
            (from, None) => number(from)?.to_string(),
        };
        Some(step.map_or(range.clone(), |step| format!("{range}/{step}")))
    };
    text.split(',').map(one).collect::<Option<Vec<_>>>().map(|parts| parts.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_systemd_reads_them() {
        for (text, ms) in [
            ("5", Some(5_000)),
            ("100ms", Some(100)),
            ("1min 30s", Some(90_000)),
            ("1h30m", Some(5_400_000)),
            ("2.5s", Some(2_500)),
            ("infinity", None),
            ("", None),
            ("9999999999999999999d", None),
        ] {
            assert_eq!(span_ms(text), ms, "{text}");
        }
        assert_eq!((seconds(100), seconds(2_000), seconds(2_001)), (1, 2, 3));
    }

    #[test]
    fn calendar_expressions_become_crontab_rules() {
        for (text, rule) in [
            ("daily", Some("0 0 * * *")),
            ("*-*-* 04:30:00", Some("30 4 * * *")),
            ("*:0/15", Some("0-59/15 * * * *")),
            ("Mon..Fri *-*-* 09:00", Some("0 9 * * 1,2,3,4,5")),
            ("Sat,Sun 12:05", Some("5 12 * * 0,6")),
            ("Fri..Mon 1:00", Some("0 1 * * 0,1,5,6")),
            ("*-*-01 00:00:00", Some("0 0 1 * *")),
            ("*-01,07-15 8..17:00", Some("0 8-17 15 1,7 *")),
            ("Mon *-*-01 00:00", None),
            ("2026-01-01 00:00", None),
            ("*-*-* 04:30:15", None),
            ("*-*-* 04:30 UTC", None),
            ("*-*-* 25:00", None),
            ("nonsense", None),
        ] {
            assert_eq!(crontab(text).as_deref(), rule, "{text}");
        }
    }
}
