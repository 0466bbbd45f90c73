//! Output of verbs: data on stdout, messages on stderr, with or without colour. A broken pipe is not an error.
//!
//! With `--log-format json` a daemon writes each message, warning and failure as a JSON object.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};
use serde_json::{Value, json};
use unicode_width::UnicodeWidthChar;

use super::stderr;
use crate::cli::args::{Color, GlobalArgs};
use crate::cli::{Exit, Failure};
use crate::clock::{local_text, now};
use crate::escape::is_hidden;
pub use crate::escape::{visible, visible_lines};
use crate::manifest::{Problem, Severity};
use crate::model::noun_for;

pub const ERROR: Style = AnsiColor::Red.on_default().bold();
pub const WARNING: Style = AnsiColor::Yellow.on_default().bold();
pub const HINT: Style = AnsiColor::Cyan.on_default();
pub const BOLD: Style = Style::new().bold();
pub const DIM: Style = Style::new().dimmed();

pub struct Printer {
    color: Color,
    stderr_color: ColorChoice,
    quiet: bool,
    /// Messages on stderr are JSON objects, one per line.
    in_json: bool,
    failed: AtomicBool,
    /// The reader of stdout is gone.
    closed: AtomicBool,
}

impl Printer {
    pub fn new(common: &GlobalArgs, in_json: bool) -> Printer {
        let stderr_color = if common.colour_on_stderr() { ColorChoice::Always } else { ColorChoice::Never };
        Printer {
            color: common.color,
            stderr_color,
            quiet: common.quiet,
            in_json,
            failed: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// Writes data to stdout, byte for byte.
    pub fn data(&self, text: &str) {
        self.record_write_result(std::io::stdout().lock().write_all(text.as_bytes()));
    }

    /// Writes text to stdout, with colour on a terminal.
    pub fn styled(&self, text: &str) {
        let mut out = AutoStream::new(std::io::stdout(), self.color.into());
        self.record_write_result(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
    }

    fn record_write_result(&self, result: std::io::Result<()>) {
        match result {
            // A broken pipe is not an error.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                self.failure(&Failure::new(
                    Exit::Failed,
                    format!("cannot write to standard output: {error}"),
                ));
                self.failed.store(true, Ordering::Relaxed);
            }
            Ok(()) => {}
            Err(_) => self.closed.store(true, Ordering::Relaxed),
        }
    }

    /// Whether the reader of stdout is gone, so that a follow ends.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Whether data on stdout may have colour.
    pub fn colours_stdout(&self) -> bool {
        let choice = match self.color {
            Color::Auto => AutoStream::choice(&std::io::stdout()),
            always_or_never => always_or_never.into(),
        };
        !matches!(choice, ColorChoice::Never)
    }

    /// Whether a write to stdout failed.
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
            || std::io::stdout().flush().is_err_and(|e| e.kind() != std::io::ErrorKind::BrokenPipe)
    }

    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    pub fn is_json(&self) -> bool {
        self.in_json
    }

    /// Writes a message to stderr, unless --quiet.
    pub fn info(&self, text: &str) {
        match (self.quiet, self.in_json) {
            (true, _) => {}
            (false, true) => self.log("info", "remark", json!({"message": text})),
            (false, false) => self.to_stderr(&format!("{}\n", visible_lines(text))),
        }
    }

    pub fn warning(&self, text: &str) {
        self.labelled_warning("warning", text);
    }

    /// A warning under another label.
    pub fn labelled_warning(&self, label: &str, text: &str) {
        match (self.quiet, self.in_json) {
            (true, _) => {}
            (false, true) => self.log("warning", "warning", json!({"message": text})),
            (false, false) => {
                self.to_stderr(&format!("{WARNING}{label}{WARNING:#}: {}\n", visible_lines(text)));
            }
        }
    }

    /// Writes a JSON object to stderr: time, level, event, and the event's fields.
    pub fn log(&self, level: &str, event: &str, more: Value) {
        let mut line = json!({"time": now().to_string(), "level": level, "event": event});
        if let (Value::Object(line), Value::Object(more)) = (&mut line, more) {
            line.extend(more);
        }
        stderr::write(format!("{line}\n").as_bytes());
    }

    pub fn failure(&self, failure: &Failure) {
        if self.in_json {
            let Failure { exit, message, hint, reason } = failure;
            let more =
                json!({"message": message, "hint": hint, "exit": {"code": *exit as u8, "reason": reason}});
            return self.log("error", "failed", more);
        }
        // File names and arguments may contain control characters; line breaks are part of the message.
        let message = visible_lines(&failure.message);
        let mut text = format!("{ERROR}error{ERROR:#}: {message}\n");
        if let Some(hint) = &failure.hint {
            text.push_str(&format!("{HINT}hint{HINT:#}: {}\n", visible_lines(hint)));
        }
        self.to_stderr(&text);
    }

    /// A message of a long-running verb. On a terminal it begins with the time of day.
    pub fn timed(&self, text: &str) {
        if std::io::stderr().is_terminal() {
            let local = local_text(now());
            let time = local.split_once(' ').map_or(local.as_str(), |(_, time)| time);
            return self.to_stderr(&format!("{DIM}{time}{DIM:#}  {text}"));
        }
        self.to_stderr(text);
    }

    pub fn to_stderr(&self, text: &str) {
        let mut stream = AutoStream::new(Vec::new(), self.stderr_color);
        let _ = stream.write_all(text.as_bytes());
        stderr::write(&stream.into_inner());
    }
}

/// A problem as text: message, location, the line with a marker, and a hint.
pub fn problem(problem: &Problem) -> String {
    let Problem { file, line, column, severity, code, message, hint, excerpt } = problem;
    let style = match severity {
        Severity::Error => ERROR,
        Severity::Warning => WARNING,
    };
    let code = code.text();
    let mut text =
        format!("{style}{severity}[{code}]{style:#}: {BOLD}{file}:{line}:{column}{BOLD:#}: {}\n", message);
    if !excerpt.text.trim().is_empty() {
        let number = line.to_string();
        let gutter = " ".repeat(number.len());
        let (source, pad, marks) = mark_excerpt(excerpt.text.trim_end(), excerpt.from, excerpt.len);
        text.push_str(&format!("{DIM}{gutter} |{DIM:#}\n{DIM}{number} |{DIM:#} {source}\n"));
        text.push_str(&format!("{DIM}{gutter} |{DIM:#} {pad}{style}{marks}{style:#}\n"));
    }
    if let Some(hint) = hint {
        text.push_str(&format!("{HINT}hint{HINT:#}: {}\n", hint));
    }
    text
}

/// The printable line, the padding before the marker, and the marker, by display width.
fn mark_excerpt(line: &str, from: usize, len: usize) -> (String, String, String) {
    let (mut shown, mut before, mut under) = (String::new(), 0, 0);
    for (at, c) in line.chars().enumerate() {
        let (c, width) = match c {
            '\t' => (' ', 1),
            c if is_hidden(c) => ('\u{fffd}', 1),
            c => (c, c.width().unwrap_or(1)),
        };
        shown.push(c);
        if at < from {
            before += width;
        } else if at < from + len {
            under += width;
        }
    }
    // A location past the end of the line marks a missing value.
    before += from.saturating_sub(line.chars().count());
    (shown, " ".repeat(before), "^".repeat(under.max(1)))
}

/// A value on one line, quoted if it would be ambiguous.
pub fn quoted(text: &str) -> String {
    let plain = !text.is_empty()
        && text != "unset"
        && text.trim() == text
        && !text.contains("  ")
        && !text.contains(['"', '→'])
        && visible(text) == text;
    if plain { text.to_owned() } else { format!("\"{}\"", visible(text).replace('"', "\\\"")) }
}

/// "1 file", "2 files".
pub fn count(n: usize, thing: &str) -> String {
    format!("{} {}", with_thousands_separators(n), noun_for(&n, thing))
}

/// 10,000 rather than 10000.
fn with_thousands_separators(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_aligned_with_the_excerpt() {
        assert_eq!(mark_excerpt("a: x", 3, 1), ("a: x".into(), "   ".into(), "^".into()));
        assert_eq!(mark_excerpt("\ta: x", 1, 1), (" a: x".into(), " ".into(), "^".into()));
        assert_eq!(mark_excerpt("名: 值", 3, 1), ("名: 值".into(), "    ".into(), "^^".into()));
        assert_eq!(mark_excerpt("a:", 5, 1), ("a:".into(), "     ".into(), "^".into()));
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(visible("a\u{1b}[2Jb\n\u{202e}c\u{9b}\u{200b}"), r"a\u{1b}[2Jb\n\u{202e}c\u{9b}\u{200b}");
        for (text, shown) in [
            ("./api --fast", "./api --fast"),
            ("unset", "\"unset\""),
            ("", "\"\""),
            (" a", "\" a\""),
            ("a → b", "\"a → b\""),
            ("say \"x\"", "\"say \\\"x\\\"\""),
            ("a\nb", "\"a\\nb\""),
        ] {
            assert_eq!(quoted(text), shown);
        }
    }

    #[test]
    fn counts_have_plurals_and_separators() {
        assert_eq!(count(1, "file"), "1 file");
        assert_eq!(count(2, "process"), "2 processes");
        assert_eq!(count(10_000, "document"), "10,000 documents");
        assert_eq!(count(1_234_567, "instance"), "1,234,567 instances");
    }
}
