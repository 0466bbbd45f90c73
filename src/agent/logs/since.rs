//! Times of log lines: finds the first line of a file that was written since a time.
//!
//! Abide adds no time to a line. A line that begins with a date and time is compared by it, and a line without one belongs
//! to the line before it. A file without such lines is shown as a whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::clock;

/// Bytes that are searched for one line with a time.
const PROBE: u64 = 64 << 10;

/// Offset of the first line with a time at or after `since`, in milliseconds since 1970. The length of the file: every
/// time in it is earlier. `None`: the lines have no times.
pub fn first_line(file: &File, len: u64, since: i64) -> io::Result<Option<u64>> {
    let (mut low, mut high) = (0, len);
    // Times increase in a log. `low` is the start of a line with an earlier time, or of the file.
    while high - low > PROBE {
        let middle = low + (high - low) / 2;
        match timed_lines(file, middle, len)?.first() {
            None => return Ok(None),
            Some((at, time)) if *time < since && *at < high => low = *at,
            Some(_) => high = middle,
        }
    }
    let mut is_timed = false;
    let mut from = low;
    // The line may begin before `high` and after the first probe.
    while from < len {
        let lines = timed_lines(file, from, len)?;
        is_timed |= !lines.is_empty();
        if let Some((at, _)) = lines.iter().find(|(_, time)| *time >= since) {
            return Ok(Some(*at));
        }
        if from > high {
            break;
        }
        // A line that begins at the end of a probe is in the next one as well.
        from += PROBE - 64;
    }
    Ok(is_timed.then_some(len))
}

/// Offsets and times of the lines that begin in one probe.
fn timed_lines(file: &File, from: u64, len: u64) -> io::Result<Vec<(u64, i64)>> {
    let mut probe = vec![0; usize::try_from(PROBE.min(len - from)).unwrap_or(0)];
    let count = file.read_at(&mut probe, from)?;
    probe.truncate(count);
    let mut lines = Vec::new();
    let mut at = 0;
    while at < probe.len() {
        let end = probe[at..].iter().position(|byte| *byte == b'\n').map_or(probe.len(), |end| at + end);
        // In the middle of a file, the probe begins inside a line.
        if (at > 0 || from == 0)
            && let Some(time) = line_time(&probe[at..end])
        {
            lines.push((from + at as u64, time));
        }
        at = end + 1;
    }
    Ok(lines)
}

/// The time at the beginning of a line, in milliseconds since 1970: a date and a time, in brackets or not. Without a zone
/// it is the host's local time.
fn line_time(line: &[u8]) -> Option<i64> {
    let line = line.strip_prefix(b"[").unwrap_or(line);
    let text: String = line.iter().take(40).map(|byte| char::from(*byte)).collect();
    let civil = text.get(..19)?;
    let separators = [(4, "-/"), (7, "-/"), (10, "T "), (13, ":"), (16, ":")];
    let is_date = civil.char_indices().all(|(at, c)| match separators.iter().find(|(nth, _)| *nth == at) {
        Some((_, allowed)) => allowed.contains(c),
        None => c.is_ascii_digit(),
    });
    if !is_date {
        return None;
    }
    let civil = civil.replace('/', "-").replace(' ', "T");
    let rest = text[19..].trim_start_matches(['.', ',']);
    let zone = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    let zone = match zone.as_bytes() {
        [b'Z', ..] => Some("Z"),
        [b'+' | b'-', ..] => zone.get(..6),
        _ => None,
    };
    let with_zone = zone.and_then(|zone| clock::read(&format!("{civil}{zone}")));
    with_zone.or_else(|| clock::read_local(&civil)).map(|time| time.0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_usual_forms_of_a_time_are_read() {
        let utc = clock::read("2026-11-18T10:00:05Z").map(|time| time.0);
        for line in
            ["2026-11-18T10:00:05Z up", "2026-11-18T10:00:05.123Z up", "[2026-11-18T12:00:05+02:00] up"]
        {
            assert_eq!(line_time(line.as_bytes()), utc, "{line}");
        }
        let local = clock::read_local("2026-11-18T10:00:05").map(|time| time.0);
        for line in ["2026-11-18 10:00:05 up", "2026/11/18 10:00:05 [error] up", "2026-11-18 10:00:05,123 up"]
        {
            assert_eq!(line_time(line.as_bytes()), local, "{line}");
        }
        for line in ["", "up", "2026-11-18", "2026-13-45T10:00:05Z", "20261118T100005Z and so on", "\u{fffd}"]
        {
            assert_eq!(line_time(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn the_first_line_since_a_time_is_found() {
        let mut file = tempfile::tempfile().expect("a file");
        let start = clock::read("2026-11-18T00:00:00Z").expect("a time").0;
        let mut offsets = Vec::new();
        let mut text = String::from("a banner\n");
        for second in 0..20_000_i64 {
            offsets.push(text.len() as u64);
            text.push_str(&format!(
                "{} line {second}\n  more of it\n",
                crate::model::Time(start + second * 1000)
            ));
        }
        file.write_all(text.as_bytes()).expect("a text");
        let len = text.len() as u64;
        for second in [0, 1, 777, 10_000, 19_999] {
            let found = first_line(&file, len, start + second * 1000).expect("it is read");
            assert_eq!(found, Some(offsets[usize::try_from(second).expect("a number")]), "{second}");
        }
        assert_eq!(first_line(&file, len, start + 20_000_000).expect("it is read"), Some(len));
        let mut plain = tempfile::tempfile().expect("a file");
        plain.write_all("no time\n".repeat(50_000).as_bytes()).expect("a text");
        assert_eq!(first_line(&plain, 400_000, start).expect("it is read"), None);
    }
}
