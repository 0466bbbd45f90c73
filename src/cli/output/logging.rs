//! Logging on stderr: text lines, or JSON objects with the fields of the events of `watch`.

use std::fmt;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::cli::args::{GlobalArgs, LogFormat};
use crate::cli::output::print::visible;
use crate::cli::output::stderr;
use crate::clock::now;

pub fn start(common: &GlobalArgs, default_level: LevelFilter) {
    let level = match (common.quiet, common.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => default_level,
        (false, 1) => LevelFilter::INFO,
        (false, 2) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(|| stderr::StderrWriter)
        .with_target(false);
    match common.log_format {
        LogFormat::Text => {
            log.with_ansi(common.colour_on_stderr()).fmt_fields(debug_fn(write_field).delimited(" ")).init();
        }
        LogFormat::Json => log.event_format(JsonFormat).init(),
    }
}

/// Writes one field of a text line. It may contain output of a command, a spec or a peer: it is escaped, so that it can
/// neither forge a log line nor control the terminal.
fn write_field(to: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let text = visible(&format!("{value:?}"));
    match field.name() {
        "message" => write!(to, "{text}"),
        name => write!(to, "{name}={text}"),
    }
}

struct JsonFormat;

impl<S, N> FormatEvent<S, N> for JsonFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let mut fields = Fields(Map::new());
        fields.put("time", now().to_string().into());
        fields.put("level", level.into());
        fields.put("event", "log".into());
        event.record(&mut fields);
        writeln!(to, "{}", Value::Object(fields.0))
    }
}

/// Fields in order. A field with a reserved name gets the suffix `_`.
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, name: &str, value: Value) {
        let name = if self.0.contains_key(name) { format!("{name}_") } else { name.to_owned() };
        self.0.insert(name, value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field.name(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field.name(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field.name(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field.name(), json!(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field.name(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex, PoisonError};

    use super::*;

    #[derive(Clone, Default)]
    struct CapturedLog(Arc<Mutex<Vec<u8>>>);

    impl Write for CapturedLog {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn logged_values_cannot_forge_a_line() {
        let captured = CapturedLog::default();
        let writer = captured.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .fmt_fields(debug_fn(write_field).delimited(" "))
            .finish();
        let output =
            "boom\n2026-11-18T00:00:00Z  INFO operation instance=web/root code=0\r\u{1b}[2K\u{1b}]0;x\u{7}";
        tracing::subscriber::with_default(log, || {
            tracing::warn!(%output, debug = output, "operation {output}");
        });
        let bytes = captured.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let text = String::from_utf8(bytes).expect("text");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.trim_end().chars().all(|c| !c.is_control()), "{text:?}");
        assert!(text.contains("boom\\n2026"), "{text}");
    }
}
