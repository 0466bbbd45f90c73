//! `abide logs`: the log file of a local process.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::args::parse_switch;
use crate::cli::output::print::Printer;
use crate::cli::target::{LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::model::ProcessKey;

/// Print the log of a local process
///
/// The log is the file at its log_path: the agent writes the output of foreground processes there.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide logs sample/hello -f --tail 20")]
pub struct LogsArgs {
    /// Process to print the log of
    #[arg(value_name = "NS/NAME")]
    pub process: ProcessKey,
    /// Follow the log until Ctrl-C
    #[arg(short, long, env = "ABIDE_FOLLOW", value_parser = parse_switch)]
    pub follow: bool,
    /// Start with the last N lines
    #[arg(long, value_name = "N", env = "ABIDE_TAIL")]
    pub tail: Option<usize>,
}

/// Interval between reads of a followed log.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub fn run(args: &LogsArgs, printer: &Printer) -> Result<Exit, Failure> {
    let path = log_path(args)?;
    let failed = |error: std::io::Error| {
        Failure::new(Exit::Failed, format!("cannot read the log {}: {error}", path.display()))
    };
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && args.follow => wait_for(&path),
        Err(error) => return Err(failed(error)),
    };
    if let Some(lines) = args.tail {
        seek_to_last(&mut file, lines).map_err(failed)?;
    }
    let mut reader = BufReader::new(file);
    loop {
        let mut bytes = Vec::new();
        // Prints whole lines: a partial line is printed once it is complete.
        while reader.read_until(b'\n', &mut bytes).map_err(failed)? > 0 {
            if bytes.ends_with(b"\n") || !args.follow {
                printer.data(&String::from_utf8_lossy(&bytes));
                bytes.clear();
            }
        }
        if !args.follow || printer.failed() {
            return Ok(Exit::Done);
        }
        std::thread::sleep(POLL_INTERVAL);
        let back = i64::try_from(bytes.len()).unwrap_or(0);
        reader.seek_relative(-back).map_err(failed)?;
        // A rotated or truncated log continues in a new file.
        let here = reader.stream_position().map_err(failed)?;
        if let Ok(now) = std::fs::metadata(&path)
            && (now.len() < here || is_rotated(&now, reader.get_ref()))
            && let Ok(file) = File::open(&path)
        {
            reader = BufReader::new(file);
        }
    }
}

fn is_rotated(now: &std::fs::Metadata, open: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    open.metadata().is_ok_and(|meta| (meta.ino(), meta.dev()) != (now.ino(), now.dev()))
}

fn wait_for(path: &Path) -> File {
    loop {
        if let Ok(file) = File::open(path) {
            return file;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The file that the process's registered spec names.
fn log_path(args: &LogsArgs) -> Result<PathBuf, Failure> {
    let process = &args.process;
    let unknown = || {
        Failure::new(Exit::Failed, format!("the local system has no process {process}"))
            .hint("`abide get processes` lists them")
    };
    let live = TargetArgs::local().connect_local(LocalStart::Never)?.ok_or_else(unknown)?;
    let query = format!("&attempts=1&namespace={}&name={}", process.namespace, process.name);
    let rows = runtime()?.block_on(live.rows(&query))?;
    let row = rows.first().ok_or_else(unknown)?;
    let path = row.spec().and_then(|spec| spec["identity"]["log_path"].as_str());
    let path = path.ok_or_else(|| {
        Failure::new(Exit::Failed, format!("{process} has no log_path: its output is not stored"))
    })?;
    let path = PathBuf::from(path);
    Ok(if path.is_dir() { path.join(format!("{}.log", process.name)) } else { path })
}

/// Seeks to the start of the last lines, reading backwards in pieces.
fn seek_to_last(file: &mut File, lines: usize) -> std::io::Result<()> {
    const PIECE: u64 = 64 << 10;
    let end = file.seek(SeekFrom::End(0))?;
    if lines == 0 {
        return Ok(());
    }
    let (mut at, mut left) = (end, lines);
    // The final newline does not start another line.
    let mut last = true;
    while at > 0 {
        let from = at.saturating_sub(PIECE);
        let mut piece = vec![0; usize::try_from(at - from).unwrap_or(0)];
        file.seek(SeekFrom::Start(from))?;
        file.read_exact(&mut piece)?;
        for (nth, byte) in piece.iter().enumerate().rev() {
            if *byte == b'\n' && !std::mem::take(&mut last) {
                if left <= 1 {
                    file.seek(SeekFrom::Start(from + nth as u64 + 1))?;
                    return Ok(());
                }
                left -= 1;
            }
            last = false;
        }
        at = from;
    }
    file.seek(SeekFrom::Start(0)).map(|_| ())
}
