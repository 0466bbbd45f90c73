//! Tables and status lines, aligned and cut by display width: a Chinese character takes two columns.

use anstyle::Style;
use rustix::termios::tcgetwinsize;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::print::BOLD;

/// Space between two columns.
const GAP: &str = "  ";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Rows of cells below a heading. The caller escapes control characters.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(columns: impl IntoIterator<Item = (impl Into<String>, Align)>) -> Table {
        let columns = columns.into_iter().map(|(name, align)| (name.into(), align)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Cells beyond the columns are ignored; missing ones are empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The heading and all rows, one line each, without spaces at the end.
    pub fn text(&self) -> String {
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let width = |at: usize| {
            let cells = self.rows.iter().chain([&heading]).filter_map(|row| row.get(at));
            cells.map(|cell| cell.width()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = self.line(&heading, &widths, BOLD);
        for row in &self.rows {
            text.push_str(&self.line(row, &widths, Style::new()));
        }
        text
    }

    fn line(&self, cells: &[String], widths: &[usize], style: Style) -> String {
        let empty = String::new();
        let padded = self
            .columns
            .iter()
            .zip(widths)
            .enumerate()
            .map(|(at, ((_, align), width))| pad(cells.get(at).unwrap_or(&empty), *width, *align));
        let line = padded.collect::<Vec<_>>().join(GAP);
        format!("{style}{}{style:#}\n", line.trim_end())
    }
}

/// A text with spaces up to a display width.
pub fn pad(text: &str, width: usize, align: Align) -> String {
    let space = " ".repeat(width.saturating_sub(text.width()));
    match align {
        Align::Left => format!("{text}{space}"),
        Align::Right => format!("{space}{text}"),
    }
}

/// A text cut to a display width. A cut text ends with `…`.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let (mut out, mut used) = (String::new(), 1);
    for c in text.chars() {
        used += c.width().unwrap_or(0);
        if used > width {
            break;
        }
        out.push(c);
    }
    if width > 0 {
        out.push('…');
    }
    out
}

/// Columns of the terminal on stderr; `None`: not a terminal, or its size is unknown.
pub fn stderr_width() -> Option<usize> {
    let size = tcgetwinsize(std::io::stderr()).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_by_display_width() {
        let columns = [("NAME", Align::Left), ("COUNT", Align::Right), ("MESSAGE", Align::Left)];
        let mut table = Table::new(columns);
        for (name, n, message) in
            [("网关服务", "1", "运行中"), ("api", "12,000", ""), ("a-long-name-of-a-process", "7", "ok")]
        {
            table.row(vec![name.to_owned(), n.to_owned(), message.to_owned()]);
        }
        let expected = format!(
            "{BOLD}NAME                       COUNT  MESSAGE{BOLD:#}\n\
             网关服务                       1  运行中\n\
             api                       12,000\n\
             a-long-name-of-a-process       7  ok\n"
        );
        assert_eq!(table.text(), expected);
    }

    #[test]
    fn a_wide_label_widens_its_column() {
        let mut table = Table::new([("处理数量", Align::Left), ("X", Align::Left)]);
        table.row(vec!["1".to_owned()]);
        table.row(vec!["2".to_owned(), "y".to_owned()]);
        assert_eq!(table.text(), format!("{BOLD}处理数量  X{BOLD:#}\n1\n2         y\n"));
    }

    #[test]
    fn a_line_is_cut_between_characters() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "ab…");
        assert_eq!(cut("网关服务", 8), "网关服务");
        assert_eq!(cut("网关服务", 7), "网关服…");
        assert_eq!(cut("网关服务", 6), "网关…");
        assert_eq!([cut("ab", 1), cut("ab", 0)], ["…", ""]);
    }
}
