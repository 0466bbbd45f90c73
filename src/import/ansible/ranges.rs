//! Ranges in host names: `web[01:50]`, `db-[a:f]`, `x[0:10:2]`.

use super::MAX_HOSTS;

/// Reason why a pattern names no hosts.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error("the range in {0:?} is not closed")]
    Unclosed(String),
    #[error("the range [{0}] is not such as [01:50] or [a:f]")]
    NotARange(String),
    #[error("{0:?} has more than {MAX_HOSTS} hosts")]
    TooMany(String),
}

/// The names of a pattern, in order.
pub fn expand(pattern: &str) -> Result<Vec<String>, PatternError> {
    let mut names = vec![String::new()];
    let mut rest = pattern;
    while let Some((before, range)) = rest.split_once('[') {
        let Some((inside, after)) = range.split_once(']') else {
            return Err(PatternError::Unclosed(pattern.to_owned()));
        };
        // `[2001:db8::1]` is an address.
        if inside.parse::<std::net::Ipv6Addr>().is_ok() {
            return Ok(vec![inside.to_owned()]);
        }
        let parts = members(inside).ok_or_else(|| PatternError::NotARange(inside.to_owned()))?;
        if names.len().saturating_mul(parts.len()) > MAX_HOSTS {
            return Err(PatternError::TooMany(pattern.to_owned()));
        }
        let mut all = Vec::with_capacity(names.len() * parts.len());
        for name in &names {
            all.extend(parts.iter().map(|part| format!("{name}{before}{part}")));
        }
        (names, rest) = (all, after);
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

/// The members of `FROM:TO` or `FROM:TO:STEP`.
fn members(range: &str) -> Option<Vec<String>> {
    let mut parts = range.split(':');
    let (from, to) = (parts.next()?, parts.next()?);
    let step = parts.next().map_or(Some(1), |step| step.parse::<usize>().ok()).filter(|step| *step > 0)?;
    if parts.next().is_some() {
        return None;
    }
    let letter = |text: &str| text.chars().next().filter(|c| text.len() == 1 && c.is_ascii_alphabetic());
    if let (Some(from), Some(to)) = (letter(from), letter(to)) {
        let all: Vec<String> = (from..=to).step_by(step).map(String::from).collect();
        return (!all.is_empty()).then_some(all);
    }
    let digits = |text: &str| !text.is_empty() && text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
    // An empty beginning is 0.
    let from = if from.is_empty() { "0" } else { from };
    if !digits(from) || !digits(to) {
        return None;
    }
    let width = if from.len() > 1 && from.starts_with('0') { from.len() } else { 0 };
    let (from, to): (u32, u32) = (from.parse().ok()?, to.parse().ok()?);
    let all = (from..=to).step_by(step).take(MAX_HOSTS + 1).map(|n| format!("{n:0width$}"));
    let all: Vec<String> = all.collect();
    (!all.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_expanded() {
        let names = |pattern: &str| expand(pattern).map(|names| names.join(" "));
        assert_eq!(names("web[08:10]"), Ok("web08 web09 web10".to_owned()));
        assert_eq!(names("db-[a:c].x"), Ok("db-a.x db-b.x db-c.x".to_owned()));
        assert_eq!(names("r[1:2]-[0:4:2]"), Ok("r1-0 r1-2 r1-4 r2-0 r2-2 r2-4".to_owned()));
        assert_eq!(names("10.0.0.1"), Ok("10.0.0.1".to_owned()));
        assert_eq!(names("[2001:db8::1]"), Ok("2001:db8::1".to_owned()));
        for bad in
            ["a[1", "a[]", "a[1:x]", "a[5:1]", "a[1:2:0]", "a[1:2:3:4]", "a[0:1000000]", "a[0:999][0:9999]"]
        {
            assert!(expand(bad).is_err(), "{bad}");
        }
    }
}
