//! Process table of `get processes`: one line per instance, state in one word, the reason last.
//!
//! Instances of one process on one host that are alike and have no message fold into one line, `workers (3/3)`.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::output::age::age_of;
use super::output::print::visible;
use super::output::table::{Align, Table};
use crate::contract::ListedProcess;
use crate::model::{Health, HostKey, InstanceKey, ProcessKey, Time};

/// Order of the rows, in every output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SortKey {
    #[default]
    Name,
    Host,
    /// Worst first
    Health,
    /// Most first
    Restarts,
    /// Newest first
    Age,
    /// Most first
    Cpu,
    /// Most first
    Mem,
}

/// Columns and lines of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableForm {
    pub wide: bool,
    /// One line per instance.
    pub expand: bool,
}

pub fn sort(rows: &mut [ListedProcess], key: SortKey) {
    match key {
        SortKey::Name => rows.sort_by(|a, b| name(a).cmp(&name(b))),
        SortKey::Host => rows.sort_by(|a, b| (&a.row.host, name(a)).cmp(&(&b.row.host, name(b)))),
        SortKey::Health => rows.sort_by_key(|row| Reverse(severity(&row.row.health))),
        SortKey::Restarts => rows.sort_by_key(|row| Reverse(row.restarts)),
        SortKey::Age => rows.sort_by(|a, b| b.row.since.cmp(&a.row.since)),
        SortKey::Cpu => rows.sort_by(|a, b| b.cores.unwrap_or(-1.0).total_cmp(&a.cores.unwrap_or(-1.0))),
        SortKey::Mem => rows.sort_by_key(|row| Reverse(row.memory)),
    }
}

fn name(row: &ListedProcess) -> (String, &HostKey) {
    (row.row.instance.process().to_string(), &row.row.host)
}

/// Severity of a health word; an unknown word is as bad as an unknown state.
fn severity(word: &str) -> u8 {
    match Health::ALL.into_iter().find(|health| health.word() == word) {
        Some(Health::Healthy) => 0,
        Some(Health::NotReported) => 1,
        Some(Health::Starting) => 2,
        Some(Health::Unknown) | None => 3,
        Some(Health::Degraded) => 4,
        Some(Health::Failed) => 5,
    }
}

/// The table. `declared` has the declared name of each instance of an active revision.
pub fn table(
    rows: &[ListedProcess],
    declared: &BTreeMap<InstanceKey, ProcessKey>,
    form: TableForm,
    now: Time,
) -> String {
    let mut columns = vec![
        ("NAMESPACE", Align::Left),
        ("NAME", Align::Left),
        ("HOST", Align::Left),
        ("SYNC", Align::Left),
        ("HEALTH", Align::Left),
        ("STATE", Align::Left),
        ("PID", Align::Right),
        ("RESTARTS", Align::Right),
        ("AGE", Align::Left),
    ];
    if form.wide {
        let more =
            ["HOSTING", "CPU", "MEM", "FDS", "THREADS", "VERSION", "REVISION", "OWNER", "NEXT", "LAST_EXIT"];
        columns.extend(more.map(|name| (name, Align::Left)));
    }
    columns.push(("MESSAGE", Align::Left));
    let mut table = Table::new(columns);
    for line in lines(rows, declared, form.expand) {
        table.row(line.cells(form.wide, now));
    }
    table.text()
}

/// A line of the table: one instance, or several that are alike.
struct Line<'a> {
    first: &'a ListedProcess,
    /// The declared name, the instances on this line, and those of the name on the host.
    folded: Option<(&'a ProcessKey, usize, usize)>,
    restarts: Option<u64>,
    /// The newest state change.
    since: Option<&'a str>,
}

fn lines<'a>(
    rows: &'a [ListedProcess],
    declared: &'a BTreeMap<InstanceKey, ProcessKey>,
    expand: bool,
) -> Vec<Line<'a>> {
    let declared_name = |row: &ListedProcess| {
        let name = declared.get(&row.row.instance)?;
        (!expand && *name != row.row.instance.process()).then_some(name)
    };
    let mut totals: BTreeMap<(&ProcessKey, &HostKey), usize> = BTreeMap::new();
    for row in rows {
        if let Some(name) = declared_name(row) {
            *totals.entry((name, &row.row.host)).or_default() += 1;
        }
    }
    let mut lines: Vec<Line<'a>> = Vec::new();
    for row in rows {
        let total = declared_name(row).and_then(|name| Some((name, *totals.get(&(name, &row.row.host))?)));
        let alike = |line: &&mut Line<'_>| match (line.folded, total) {
            (Some((name, ..)), Some((own, _))) => name == own && looks_alike(line.first, row),
            _ => false,
        };
        match lines.iter_mut().rev().find(alike) {
            Some(line) => line.add(row),
            None => lines.push(Line {
                first: row,
                folded: total.filter(|_| message(row).is_none()).map(|(name, total)| (name, 1, total)),
                restarts: row.restarts,
                since: row.row.since.as_deref(),
            }),
        }
    }
    lines
}

/// Whether two instances of a process may share a line.
fn looks_alike(one: &ListedProcess, other: &ListedProcess) -> bool {
    one.row.host == other.row.host
        && one.row.sync == other.row.sync
        && one.row.health == other.row.health
        && state(one) == state(other)
        && message(other).is_none()
}

impl<'a> Line<'a> {
    fn add(&mut self, row: &'a ListedProcess) {
        if let Some((_, count, _)) = &mut self.folded {
            *count += 1;
        }
        self.restarts = match (self.restarts, row.restarts) {
            (Some(sum), Some(more)) => Some(sum.saturating_add(more)),
            (sum, more) => sum.or(more),
        };
        self.since = self.since.max(row.row.since.as_deref());
    }

    /// Whether the line has several instances.
    fn is_folded(&self) -> bool {
        self.folded.is_some_and(|(_, count, _)| count > 1)
    }

    fn cells(&self, wide: bool, now: Time) -> Vec<String> {
        let ListedProcess { row, .. } = self.first;
        let own = |text: Option<String>| match self.is_folded() {
            true => "-".to_owned(),
            false => text.map_or("-".to_owned(), |text| visible(&text)),
        };
        let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
        let name = match self.folded {
            Some((name, count, total)) if count > 1 => format!("{} ({count}/{total})", name.name),
            _ => row.name.to_string(),
        };
        let mut cells = vec![
            visible(&row.namespace.to_string()),
            visible(&name),
            row.host.to_string(),
            row.sync.word().to_owned(),
            visible(&row.health),
            state(self.first),
            own(row.pid.map(|pid| pid.to_string())),
            number(self.restarts),
            self.since.and_then(|since| age_of(since, now)).unwrap_or_else(|| "-".to_owned()),
        ];
        if wide {
            let process = self.first;
            let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
            cells.extend([
                row.hosting.word().to_owned(),
                own(process.cores.map(|cores| format!("{cores:.2}"))),
                own(process.memory.map(|bytes| format!("{:.1}MB", bytes as f64 / 1e6))),
                own(process.fds.map(|fds| fds.to_string())),
                own(process.threads.map(|threads| threads.to_string())),
                own(text(&process.version)),
                own(row.revision.as_ref().map(ToString::to_string)),
                own(text(&row.owner)),
                own(text(&process.next)),
                own(process.last_exit.as_ref().map(ToString::to_string)),
            ]);
        }
        cells.push(message(self.first).map_or("-".to_owned(), |text| visible(&text)));
        cells
    }
}

/// The state of a process in one or two words.
pub fn state(process: &ListedProcess) -> String {
    let row = &process.row;
    let end = process.last_exit.as_ref();
    match (row.running, row.hosted) {
        (None, _) => "unknown".to_owned(),
        (Some(true), Some(false)) => "unsupervised".to_owned(),
        (Some(true), Some(true) | None) => "running".to_owned(),
        (Some(false), _) if end.is_some_and(|end| end.reason == "stopped") => "stopped".to_owned(),
        (Some(false), _) if process.next.as_ref().is_some_and(|next| !next.is_empty()) => {
            "waiting".to_owned()
        }
        (Some(false), _) => match (process.exit, end.and_then(|end| end.signal)) {
            (Some(0), _) => "completed".to_owned(),
            (Some(code), _) => format!("exited {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "stopped".to_owned(),
        },
    }
}

/// The present state in a sentence: `running (pid 7) for 5m, Healthy, Hosted, InSync`.
pub fn state_sentence(process: &ListedProcess, now: Time) -> String {
    let row = &process.row;
    let pid = row.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
    let since = row.since.as_deref().and_then(|since| age_of(since, now));
    let since = since.map(|age| format!(" for {age}")).unwrap_or_default();
    let (hosting, sync) = (row.hosting.word(), row.sync.word());
    format!("{}{pid}{since}, {}, {hosting}, {sync}", state(process), visible(&row.health))
}

/// The first line of the message column: the held reason, the agent's message, or a file that differs.
fn message(process: &ListedProcess) -> Option<String> {
    let own = process.message.as_deref().and_then(|text| text.lines().next()).filter(|text| !text.is_empty());
    let drifted =
        process.drifted_files.first().map(|path| format!("file differs from the configmap: {path}"));
    own.map(str::to_owned).or_else(|| process.why.clone()).or(drifted)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn row(name: &str, more: Value) -> ListedProcess {
        let mut row = json!({
            "instance": format!("0:10.0.0.1:web:{name}"), "namespace": "web", "name": name, "host": "0:10.0.0.1",
            "labels": {}, "registered": true, "hosted": true, "running": true, "pid": 7, "owner": "o", "revision": null,
            "live_revision": null, "sync": "InSync", "health": "Healthy", "hosting": "Hosted",
            "since": "1970-01-01T00:00:00Z", "report_time": null, "message": null, "version": null, "exit": null,
            "next": null, "restarts": 1,
        });
        for (field, value) in more.as_object().into_iter().flatten() {
            row[field] = value.clone();
        }
        serde_json::from_value(row).expect("a row")
    }

    fn names(of: &[(&str, &str)]) -> BTreeMap<InstanceKey, ProcessKey> {
        let key = |name: &str| format!("0:10.0.0.1:web:{name}").parse().expect("a key");
        of.iter()
            .map(|(name, declared)| (key(name), format!("web/{declared}").parse().expect("a name")))
            .collect()
    }

    #[test]
    fn alike_instances_fold_and_others_have_their_own_line() {
        let rows = [
            row("api", json!({})),
            row("w_1", json!({})),
            row("w_2", json!({"health": "Failed", "running": false, "exit": 3, "message": "code 3\nmore"})),
            row("w_3", json!({"restarts": 4, "since": "1970-01-01T00:01:00Z"})),
        ];
        let declared = names(&[("api", "api"), ("w_1", "w"), ("w_2", "w"), ("w_3", "w")]);
        let form = TableForm { wide: false, expand: false };
        let text = table(&rows, &declared, form, Time(120_000));
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = text.lines().skip(1).map(cells).collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines[0], "web api 0:10.0.0.1 InSync Healthy running 7 1 2m -");
        assert_eq!(lines[1], "web w (2/3) 0:10.0.0.1 InSync Healthy running - 5 1m -");
        assert_eq!(lines[2], "web w_2 0:10.0.0.1 InSync Failed exited 3 7 1 2m code 3");
        let expanded = table(&rows, &declared, TableForm { wide: true, expand: true }, Time(120_000));
        assert_eq!(expanded.lines().count(), 5, "{expanded}");
    }

    #[test]
    fn rows_are_sorted_by_what_was_asked_for() {
        let mut rows = [
            row("a", json!({"restarts": 1, "memory": 5})),
            row("b", json!({"restarts": 3, "health": "Degraded", "since": "1970-01-02T00:00:00Z"})),
            row("c", json!({"restarts": null, "health": "Failed", "memory": 9, "cores": 0.5})),
        ];
        let mut order = |key| {
            sort(&mut rows, key);
            rows.iter().map(|row| row.row.name.to_string()).collect::<String>()
        };
        assert_eq!(order(SortKey::Name), "abc");
        assert_eq!(order(SortKey::Health), "cba");
        assert_eq!(order(SortKey::Restarts), "bac");
        assert_eq!(order(SortKey::Mem), "cab");
        assert_eq!(&order(SortKey::Age)[..1], "b");
        assert_eq!(&order(SortKey::Cpu)[..1], "c");
    }
}
