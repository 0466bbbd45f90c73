//! Checks of a Policy: patterns, budgets and windows.

use std::path::PathBuf;
use std::sync::Arc;

use super::ValueChecker;
use crate::manifest::document::{Document, Text, WindowEntry};
use crate::manifest::grammar;
use crate::manifest::problem::{Code, FieldPath, PathProblem};
use crate::model::{Allow, Budgets, Days, Disruption, Policy, SourceLocation, TimeOfDay, Window};

fn nowhere() -> SourceLocation {
    SourceLocation { file: Arc::from(""), line: 0, column: 0 }
}

/// Checks a policy. The caller sets its directory, and the locations of it and of its windows.
pub fn policy(document: Document, values: &mut ValueChecker) -> Policy {
    let name = document.meta.as_ref().and_then(|meta| meta.name.as_ref());
    let name = super::name(&FieldPath::of("meta.name"), name, values).map(|name| name.to_string());
    let allow = document.allow.unwrap_or_default();
    let budgets = document.budgets.unwrap_or_default();
    let windows = document.windows.unwrap_or_default();
    let patterns =
        |list: Option<Vec<Text>>| list.map(|list| list.into_iter().map(|Text(text)| text).collect());
    Policy {
        name: name.unwrap_or_default(),
        place: nowhere(),
        reach: PathBuf::new(),
        owner: values.text(&FieldPath::of("owner"), document.owner.as_ref()),
        allow: Allow {
            namespaces: patterns(allow.namespaces),
            users: patterns(allow.users),
            hosts: patterns(allow.hosts),
        },
        budgets: Budgets {
            delete: values.amount(&FieldPath::of("budgets.delete"), budgets.delete.as_ref(), 0),
            restart: values.amount(&FieldPath::of("budgets.restart"), budgets.restart.as_ref(), 0),
        },
        windows: windows
            .iter()
            .enumerate()
            .filter_map(|(at, entry)| window(entry, &FieldPath::of("windows").index(at), values))
            .collect(),
    }
}

fn window(entry: &WindowEntry, path: &FieldPath, values: &mut ValueChecker) -> Option<Window> {
    let mut bad = |name, value: &str, hint: &str| {
        let message = format!("{path}.{name} {:?} is invalid", crate::manifest::node::shorten(value));
        values.report(PathProblem::new(Code::BadWindow, path.key(name), message).hint(hint));
    };
    let days = entry.days.as_deref().unwrap_or("mon-sun");
    let parsed_days = self::days(days);
    if parsed_days.is_none() {
        bad("days", days, "such as mon-fri, or sat,sun");
    }
    let mut time = |name, value: Option<&Text>| {
        let parsed = value.and_then(|text| time_of_day(text));
        if let (None, Some(text)) = (parsed, value) {
            bad(name, text, "use HH:MM in quotes, such as \"09:00\"");
        }
        parsed
    };
    let (from, to) = (time("from", entry.from.as_ref()), time("to", entry.to.as_ref()));
    let tz = entry.tz.as_deref().unwrap_or("UTC");
    let known_tz = crate::clock::is_zone(tz);
    if !known_tz {
        bad("tz", tz, "use a name of the time zone database, such as Asia/Shanghai");
    }
    for (name, there) in
        [("from", entry.from.is_some()), ("to", entry.to.is_some()), ("for", entry.operations.is_some())]
    {
        if !there {
            values.report_missing(path.key(name));
        }
    }
    let operations = values
        .words(&path.key("for"), entry.operations.as_deref(), grammar::DISRUPTIONS)
        .filter_map(|word| Disruption::ALL.into_iter().find(|operation| operation.word() == word))
        .collect();
    let tz = known_tz.then(|| tz.to_owned())?;
    let deny = entry.deny.unwrap_or_default();
    Some(Window { days: parsed_days?, from: from?, to: to?, tz, operations, deny, place: nowhere() })
}

/// Parses days such as `mon-fri`, `sat,sun` or `fri-mon,wed`.
fn days(text: &str) -> Option<Days> {
    const NAMES: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
    let day = |name: &str| NAMES.iter().position(|day| name.trim().eq_ignore_ascii_case(day));
    let mut days = [false; 7];
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (day(first)?, day(last)?),
            None => (day(part)?, day(part)?),
        };
        let mut at = first;
        loop {
            days[at] = true;
            if at == last {
                break;
            }
            at = (at + 1) % 7;
        }
    }
    Some(days)
}

fn time_of_day(text: &str) -> Option<TimeOfDay> {
    let (hour, minute) = text.split_once(':')?;
    let number = |text: &str, below: u8| {
        let digits = text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|n: &u8| digits && *n < below)
    };
    // 24:00 is accepted as the end of the day.
    if text == "24:00" {
        return Some(TimeOfDay { hour: 24, minute: 0 });
    }
    Some(TimeOfDay { hour: number(hour, 24)?, minute: number(minute, 60)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_times_are_read() {
        assert_eq!(days("mon-fri"), Some([true, true, true, true, true, false, false]));
        assert_eq!(days("Sat, sun"), Some([false, false, false, false, false, true, true]));
        assert_eq!(days("sat-mon"), Some([true, false, false, false, false, true, true]));
        assert_eq!(days("monday"), None);
        assert_eq!(days(""), None);
        assert_eq!(time_of_day("09:30"), Some(TimeOfDay { hour: 9, minute: 30 }));
        assert_eq!(time_of_day("24:00"), Some(TimeOfDay { hour: 24, minute: 0 }));
        for bad in ["9:30", "09:60", "25:00", "0930", "", "+9:00"] {
            assert_eq!(time_of_day(bad), None, "{bad}");
        }
    }
}
