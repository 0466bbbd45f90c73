//! `abide logs`: what a local process says.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::args::parse_switch;
use crate::cli::output::print::Printer;
use crate::cli::target::{LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::model::ProcessKey;

/// Show the log of a local process
///
/// That is the file at its log_path, where the agent sends the output of a foreground process.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide logs sample/hello -f --tail 20")]
pub struct LogsArgs {
    /// The process
    #[arg(value_name = "NS/NAME")]
    pub process: ProcessKey,
    /// Go on with what is added, until Ctrl-C
    #[arg(short, long, env = "ABIDE_FOLLOW", value_parser = parse_switch)]
    pub follow: bool,
    /// Begin with the last lines only
    #[arg(long, value_name = "N", env = "ABIDE_TAIL")]
    pub tail: Option<usize>,
}

/// How often a log is looked at again.
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
        // A line at a time: what is half written is shown when it is whole.
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
        // One that was moved away, or cut, goes on in a new file.
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
        Failure::new(Exit::Failed, format!("there is no process {process} here"))
            .hint("`abide get processes` lists them")
    };
    let live = TargetArgs::local().connect_local(LocalStart::Never)?.ok_or_else(unknown)?;
    let query = format!("&namespace={}&name={}", process.namespace, process.name);
    let rows = runtime()?.block_on(live.rows(&query))?;
    let row = rows.first().ok_or_else(unknown)?;
    let path = row["spec"]["identity"]["log_path"].as_str();
    let path = path.ok_or_else(|| {
        Failure::new(Exit::Failed, format!("{process} has no log_path: what it says is not kept"))
    })?;
    let path = PathBuf::from(path);
    Ok(if path.is_dir() { path.join(format!("{}.log", process.name)) } else { path })
}

/// From the end backwards, piece by piece.
fn seek_to_last(file: &mut File, lines: usize) -> std::io::Result<()> {
    const PIECE: u64 = 64 << 10;
    let end = file.seek(SeekFrom::End(0))?;
    if lines == 0 {
        return Ok(());
    }
    let (mut at, mut left) = (end, lines);
    // The end of the last line is not the beginning of another.
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
