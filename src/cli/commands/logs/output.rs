//! Output of logs: lines with the name of their instance, if there are several.

use std::io::IsTerminal;

use anstyle::{AnsiColor, Style};

use super::reader::LogEvent;
use super::shown;
use crate::cli::output::print::Printer;
use crate::escape::terminal_text;
use crate::model::InstanceKey;

/// Colours of the prefixes.
const COLORS: [AnsiColor; 6] = [
    AnsiColor::Cyan,
    AnsiColor::Yellow,
    AnsiColor::Green,
    AnsiColor::Magenta,
    AnsiColor::Blue,
    AnsiColor::BrightCyan,
];

pub struct LogPrinter<'a> {
    printer: &'a Printer,
    /// One per instance; empty: a single instance has none.
    prefixes: Vec<String>,
    names: Vec<String>,
    /// Control sequences in a log must not reach a terminal.
    is_terminal: bool,
}

impl<'a> LogPrinter<'a> {
    pub fn new(printer: &'a Printer, keys: &[InstanceKey]) -> LogPrinter<'a> {
        let names: Vec<String> = keys.iter().map(shown).collect();
        let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let prefix = |(nth, name): (usize, &String)| {
            let text = format!("{name:<width$} |");
            let style = Style::new().fg_color(Some(COLORS[nth % COLORS.len()].into()));
            if printer.colours_stdout() { format!("{style}{text}{style:#} ") } else { format!("{text} ") }
        };
        let prefixes =
            if names.len() > 1 { names.iter().enumerate().map(prefix).collect() } else { Vec::new() };
        LogPrinter { printer, prefixes, names, is_terminal: std::io::stdout().is_terminal() }
    }

    pub fn print(&mut self, nth: usize, event: &LogEvent) {
        match event {
            LogEvent::Text(text) => {
                let safe = if self.is_terminal { terminal_text(text) } else { text.clone() };
                self.printer.data(&self.prefixed(nth, safe));
            }
            LogEvent::Run(started) => self.printer.info(&format!("{}: run of {started}", self.names[nth])),
            LogEvent::Notice(text) => self.printer.warning(&format!("{}: {text}", self.names[nth])),
            LogEvent::Failed { .. } => {}
        }
    }

    fn prefixed(&self, nth: usize, text: String) -> String {
        let Some(prefix) = self.prefixes.get(nth) else { return text };
        let line = |line: &str| format!("{prefix}{line}\n");
        text.split_inclusive('\n').map(|text| line(text.strip_suffix('\n').unwrap_or(text))).collect()
    }
}
