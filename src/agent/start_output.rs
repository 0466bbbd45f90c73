//! Output of a start attempt: the last lines that a process wrote before its start failed, for the message.
//!
//! The output of a foreground process is in its log, which is read with the rights of its user, from the length that it
//! had before the launch; without a log it is captured in memory. The output of a daemon is that of its start_cmd. Secrets
//! are masked and control characters escaped, so that no output forges a line of a message.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use super::captured_output::CapturedOutput;
use super::masking::SecretTexts;
use super::user_files::{FileWork, Rights, UserFileError};
use crate::escape::visible;

/// Lines of output in a message, and characters of each.
const LINES: usize = 6;
const LINE_CHARS: usize = 240;

/// A log when a process was launched: its file, and the length before the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStart {
    pub device: u64,
    pub inode: u64,
    pub length: u64,
}

impl LogStart {
    pub fn of(file: &File) -> Option<LogStart> {
        let meta = file.metadata().ok()?;
        Some(LogStart { device: meta.dev(), inode: meta.ino(), length: meta.len() })
    }
}

/// The log of a launch. The launch sets `start` when it opens the log.
#[derive(Clone)]
pub struct LogTarget {
    pub path: PathBuf,
    /// Name of the log, if the path is a directory.
    pub name: String,
    pub start: Arc<OnceLock<LogStart>>,
}

impl LogTarget {
    pub fn new(path: impl Into<PathBuf>, name: String) -> LogTarget {
        LogTarget { path: path.into(), name, start: Arc::default() }
    }
}

/// Location of the output of a start attempt.
pub struct StartAttempt {
    /// `None`: the output is captured.
    pub log: Option<(LogTarget, Rights)>,
    pub secrets: SecretTexts,
}

impl StartAttempt {
    /// The last lines of the output, as the end of a message; empty: there is no output.
    pub async fn last_lines(self, captured: Option<&CapturedOutput>) -> String {
        let text = match (self.log, captured) {
            (Some((log, rights)), _) => log_text(log, rights, self.secrets).await,
            (None, Some(output)) => output.tail(&self.secrets),
            (None, None) => String::new(),
        };
        match last_lines(&text) {
            lines if lines.is_empty() => lines,
            lines => format!("; output: {lines}"),
        }
    }
}

/// The masked end of what was written to a log since its launch; empty if the log cannot be read.
async fn log_text(log: LogTarget, rights: Rights, secrets: SecretTexts) -> String {
    let Some(start) = log.start.get().copied() else { return String::new() };
    let read = move |rights: &Rights| {
        let (bytes, skip) = rights.read_log(&log.path, &log.name, start, secrets.longest())?;
        Ok::<_, UserFileError>(secrets.mask(&bytes, skip))
    };
    rights.run(FileWork::Launch, "read the log", read).await.unwrap_or_default()
}

/// The last lines of a text on one line, without control characters.
pub fn last_lines(text: &str) -> String {
    let mut lines: Vec<&str> =
        text.lines().map(str::trim_end).filter(|line| !line.trim().is_empty()).collect();
    // A program that tries again prints the same line again: the cause is above it.
    lines.dedup();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    let shown = |line: &&str| {
        let line = line.trim();
        let cut: String = line.chars().take(LINE_CHARS).collect();
        visible(&if cut.len() < line.len() { cut + "…" } else { cut })
    };
    last.iter().map(shown).collect::<Vec<_>>().join(" | ")
}

/// A failure with the output of its command, if there is any.
pub fn with_output(failure: &str, output: &str) -> String {
    match output.trim_end() {
        "" => failure.to_owned(),
        output => format!("{failure}: {output}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_without_output_ends_without_a_colon() {
        assert_eq!(with_output("start_cmd ended with 1", " \n"), "start_cmd ended with 1");
        assert_eq!(with_output("start_cmd ended with 1", "no port\n"), "start_cmd ended with 1: no port");
    }

    #[test]
    fn the_last_lines_are_one_line_without_control_characters() {
        assert_eq!(last_lines(""), "");
        assert_eq!(last_lines("\n \n"), "");
        assert_eq!(last_lines("a\n\n  b\u{1b}[31m\r\n"), "a | b\\u{1b}[31m");
        let many: String = (1..=20).map(|number| format!("line {number}\n")).collect();
        assert_eq!(last_lines(&many), "line 15 | line 16 | line 17 | line 18 | line 19 | line 20");
        assert_eq!(last_lines(&format!("a\n{}b\n", "again\n".repeat(20))), "a | again | b");
        let long = last_lines(&"ä".repeat(1000));
        assert!(long.chars().count() == LINE_CHARS + 1 && long.ends_with('…'), "{long}");
    }
}
