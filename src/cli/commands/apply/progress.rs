//! Progress of an apply on stderr.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crate::cli::commands::plan::args::PlanForm;
use crate::cli::output::print::{Printer, count};
use crate::cli::output::table::{cut, stderr_width};
use crate::execute::ExecutionEvent;

/// Progress output: one line that is overwritten on a terminal, else a new line every few seconds.
pub struct Progress<'a> {
    all: usize,
    done: usize,
    bad: usize,
    shows: bool,
    over: bool,
    last: Instant,
    printer: &'a Printer,
}

impl<'a> Progress<'a> {
    pub fn new(all: usize, output: PlanForm, printer: &'a Printer) -> Progress<'a> {
        let over = std::io::stderr().is_terminal();
        let shows = !printer.is_quiet() && (over || output == PlanForm::Text);
        Progress { all, done: 0, bad: 0, shows, over, last: Instant::now(), printer }
    }

    pub fn on_event(&mut self, event: &ExecutionEvent<'_>) {
        let mut waits_for = None;
        match event {
            ExecutionEvent::Ended(ended) => {
                self.done += 1;
                self.bad += usize::from(!ended.outcome.is_well());
            }
            ExecutionEvent::Soaking { process, secs } => {
                self.line(&format!("{process}: soaking for {secs} s"))
            }
            ExecutionEvent::Waiting { longest, .. } => waits_for = *longest,
            ExecutionEvent::Wave { .. } | ExecutionEvent::Sent { .. } | ExecutionEvent::Noted => {}
        }
        let (often, seldom) = (Duration::from_millis(80), Duration::from_secs(5));
        if self.shows && self.last.elapsed() >= if self.over { often } else { seldom } {
            self.last = Instant::now();
            let bad = if self.bad > 0 { format!(", {} failed", self.bad) } else { String::new() };
            let longest = waits_for.map(|key| format!("  waiting for {key}")).unwrap_or_default();
            let text = format!("{} of {}{bad}{longest}", self.done, count(self.all, "step"));
            match self.over {
                // A longer line wraps, and only its last row is overwritten.
                true => {
                    let text = stderr_width().map_or_else(|| text.clone(), |width| cut(&text, width));
                    self.printer.to_stderr(&format!("\r\u{1b}[2K{text}"));
                }
                false => self.printer.info(&text),
            }
        }
    }

    fn line(&mut self, text: &str) {
        if self.shows {
            self.clear();
            self.printer.info(text);
        }
    }

    pub fn clear(&mut self) {
        if self.shows && self.over {
            self.printer.to_stderr("\r\u{1b}[2K");
        }
    }
}
