//! CSV inventories: the header names the columns; unknown columns are labels, and `var.NAME` columns are variables.

use super::InventoryError;
use super::rows::{Row, RowError, RowList, RowPlace, shown};
use crate::import::HostColumn;

/// Maximum number of columns.
const MAX_COLUMNS: usize = 1_000;

/// Meaning of a column.
#[derive(PartialEq, Eq)]
enum Column {
    Host(HostColumn),
    Variable(String),
}

impl Column {
    fn of(title: &str) -> Column {
        match title.strip_prefix("var.") {
            Some(name) => Column::Variable(name.to_owned()),
            None => Column::Host(HostColumn::of(title)),
        }
    }
}

pub fn parse(text: &str) -> Result<RowList, InventoryError> {
    let is_record = |line: &&str| !line.trim().is_empty() && !line.starts_with('#');
    let separator = HostColumn::separator(text.lines().find(is_record).unwrap_or_default());
    let mut records = Records { rest: text, separator, line: 1 };
    let mut rows = RowList::default();
    let Some(header) = records.next() else { return Ok(rows) };
    let (line, titles) = header?;
    let columns: Vec<Column> = titles.iter().map(|title| Column::of(title)).collect();
    let has = |column| columns.contains(&Column::Host(column));
    if !has(HostColumn::Ip) && !has(HostColumn::Agent) {
        let message = "the header has no column for hosts: the first line is such as ip,cloud,set,module";
        return Err(InventoryError::Syntax(format!("line {line}: {message}")));
    }
    for (at, title) in titles.iter().enumerate() {
        if columns[..at].contains(&columns[at]) {
            let message = format!("line {line}: column {:?} occurs twice", shown(title));
            return Err(InventoryError::Syntax(message));
        }
    }
    for record in records {
        let (line, cells) = record?;
        let at_line = |why: String| InventoryError::Syntax(format!("line {line}: {why}"));
        if cells.len() > columns.len() {
            return Err(at_line("the line has more columns than the header".to_owned()));
        }
        rows.push(RowPlace::Line(line), row(&columns, cells).map_err(|error| at_line(error.to_string()))?)?;
    }
    Ok(rows)
}

fn row(columns: &[Column], cells: Vec<String>) -> Result<Row, RowError> {
    let number = |text: &str, what: &str| {
        text.parse::<u64>().map(Some).map_err(|_| RowError::not_a_number(what, text))
    };
    let mut row = Row::default();
    for (column, cell) in columns.iter().zip(cells) {
        if cell.is_empty() {
            continue;
        }
        match column {
            Column::Host(HostColumn::Ip) => row.ip = Some(cell),
            Column::Host(HostColumn::Cloud) => row.cloud = number(&cell, "cloud area")?,
            Column::Host(HostColumn::Supplier) => row.supplier = number(&cell, "supplier")?,
            Column::Host(HostColumn::Agent) => row.agent = Some(cell),
            Column::Host(HostColumn::Group) => drop(row.labels.insert("group".to_owned(), cell)),
            Column::Host(HostColumn::Label(name)) => drop(row.labels.insert(name.clone(), cell)),
            Column::Host(HostColumn::Labels) => {
                for pair in cell.split([';', ',']).map(str::trim).filter(|pair| !pair.is_empty()) {
                    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
                    row.labels.insert(name.trim().to_owned(), value.trim().to_owned());
                }
            }
            Column::Variable(name) => drop(row.vars.insert(name.clone(), cell)),
        }
    }
    Ok(row)
}

/// Non-empty records with their line numbers, one at a time. Comments begin with `#`.
struct Records<'a> {
    rest: &'a str,
    separator: char,
    line: u32,
}

impl Iterator for Records<'_> {
    type Item = Result<(u32, Vec<String>), InventoryError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if self.rest.is_empty() {
                return None;
            }
            let begun = self.line;
            if self.rest.starts_with('#') {
                let end = self.rest.find('\n').map_or(self.rest.len(), |at| at + 1);
                self.rest = &self.rest[end..];
                self.line += 1;
                continue;
            }
            match self.record() {
                Ok(cells) if cells.iter().all(String::is_empty) => {}
                Ok(cells) => return Some(Ok((begun, cells))),
                Err(why) => {
                    self.rest = "";
                    return Some(Err(InventoryError::Syntax(format!("line {begun}: {why}"))));
                }
            }
        }
    }
}

impl Records<'_> {
    /// The cells up to the end of the line, without surrounding spaces.
    fn record(&mut self) -> Result<Vec<String>, &'static str> {
        let (mut cells, mut cell, mut quoted) = (Vec::new(), String::new(), false);
        let mut chars = self.rest.char_indices().peekable();
        let mut end = self.rest.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' if quoted && chars.next_if(|(_, next)| *next == '"').is_some() => cell.push('"'),
                '"' if quoted => quoted = false,
                c if quoted => {
                    self.line += u32::from(c == '\n');
                    cell.push(c);
                }
                '"' if cell.trim().is_empty() => {
                    cell.clear();
                    quoted = true;
                }
                '\n' => {
                    end = at + 1;
                    self.line += 1;
                    break;
                }
                c if c == self.separator => {
                    cells.push(std::mem::take(&mut cell).trim().to_owned());
                    if cells.len() > MAX_COLUMNS {
                        return Err("the line has more than 1000 columns");
                    }
                }
                c => cell.push(c),
            }
        }
        if quoted {
            return Err("a quote is not closed");
        }
        cells.push(cell.trim().to_owned());
        self.rest = &self.rest[end..];
        Ok(cells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(text).expect_err("an error").to_string()
    }

    #[test]
    fn columns_are_hosts_labels_and_variables() {
        let text = "ip,cloud,set,var.port,labels\n# old\n\n10.0.0.1,1,\"eu, west\",8080,a=1;b\n10.0.0.2\n";
        let (count, snapshot) = parse(text).expect("valid").into_snapshot().expect("hosts");
        let lines: Vec<&str> = snapshot.lines().skip(1).collect();
        let first = "{\"host\":\"1:10.0.0.1\",\"labels\":{\"a\":\"1\",\"b\":\"\",\"set\":\"eu, west\"},\"vars\":{\"port\":\"8080\"}}";
        assert_eq!(
            parse(&format!("# a; b\n{text}")).expect("valid").into_snapshot().expect("hosts").1,
            snapshot
        );
        assert_eq!((count, lines), (2, vec!["{\"host\":\"0:10.0.0.2\"}", first]));
        let twice = parse("ip\n10.0.0.1\n\n10.0.0.1\n").expect("valid").into_snapshot().expect_err("twice");
        assert_eq!(twice.to_string(), "line 4: host 0:10.0.0.1 is already at line 2");
    }

    #[test]
    fn errors_have_lines() {
        assert!(error("name,rack\nx,y\n").starts_with("line 1: the header has no column for hosts"));
        assert_eq!(error("ip,a,a\n"), "line 1: column \"a\" occurs twice");
        assert_eq!(error("ip,cloud\n10.0.0.1,x\n"), "line 2: the cloud area \"x\" is not a number");
        assert_eq!(error("ip\n10.0.0.1,x\n"), "line 2: the line has more columns than the header");
        assert_eq!(error("ip\n\"10.0.0.1\n"), "line 2: a quote is not closed");
        assert_eq!(
            error(&format!("ip{}\n", ",".repeat(5_000))),
            "line 1: the line has more than 1000 columns"
        );
        assert_eq!(parse("").expect("empty").into_snapshot().expect("no problem").0, 0);
    }
}
