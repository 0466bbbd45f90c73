//! Segments of a log: the files that hold it, oldest first, and reads of whole lines across them.
//!
//! A log has two parts: the stored outputs of runs, and the log file with its rotated files. A position in a part names a
//! segment by its identity and not by its path, so that it stays valid when the file is rotated.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use serde::{Deserialize, Serialize};

use super::since;
use crate::clock;

/// Bytes that a tail searches backwards. A longer tail begins there.
const MAX_TAIL_BYTES: u64 = 64 << 20;
/// Bytes of one read while lines are counted.
const PIECE: u64 = 64 << 10;

/// Identity of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SegmentId {
    /// Device and inode of a log file.
    #[serde(rename = "f")]
    File(u64, u64),
    /// Id of a run. Ids of later runs are larger.
    #[serde(rename = "r")]
    Run(String),
}

/// One file of a log.
pub struct Segment {
    pub id: SegmentId,
    file: File,
    /// First byte that exists: the beginning of a stored output may be freed.
    start: u64,
    len: u64,
    /// Last write, in milliseconds since 1970.
    modified: i64,
    /// No process writes to it any more, so that a last line without a line end is complete.
    is_closed: bool,
}

impl Segment {
    pub fn of_file(file: File) -> io::Result<Segment> {
        let meta = file.metadata()?;
        let id = SegmentId::File(meta.dev(), meta.ino());
        let modified = clock::of_file(meta.modified()?).0;
        Ok(Segment { id, start: 0, len: meta.len(), modified, is_closed: false, file })
    }

    /// The stored output of a run.
    pub fn of_run(id: String, file: File) -> io::Result<Segment> {
        let segment = Segment { id: SegmentId::Run(id), ..Segment::of_file(file)? };
        // The beginning may be freed, as far as the file system can do that.
        let start = match rustix::fs::seek(&segment.file, rustix::fs::SeekFrom::Data(0)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => segment.len,
            Err(_) => 0,
        };
        Ok(Segment { start, ..segment })
    }

    fn read_at(&self, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let mut piece = vec![0; usize::try_from(bytes).unwrap_or(0)];
        let mut filled = 0;
        while filled < piece.len() {
            match self.file.read_at(&mut piece[filled..], offset + filled as u64)? {
                0 => break,
                count => filled += count,
            }
        }
        // The file may have been truncated since its length was read.
        piece.truncate(filled);
        Ok(piece)
    }
}

/// A position in one part of a log: the end of the last line that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPosition(pub SegmentId, pub u64);

/// Index of a segment, and offset in it.
type SegmentOffset = (usize, u64);

/// One part of a log: segments, oldest first.
#[derive(Default)]
pub struct LogPart(Vec<Segment>);

/// Lines of one segment.
pub struct Lines {
    pub id: SegmentId,
    pub bytes: Vec<u8>,
    /// The lines begin with the first byte of the segment.
    pub first: bool,
    pub next: LogPosition,
}

impl LogPart {
    /// The segments, oldest first. All but the newest are closed.
    pub fn of(mut segments: Vec<Segment>) -> LogPart {
        let older = segments.len().saturating_sub(1);
        segments[..older].iter_mut().for_each(|segment| segment.is_closed = true);
        LogPart(segments)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads whole lines after a position, at most `max_bytes`. `None`: no more lines. `holds_partial`: a last line
    /// without a line end is not read, since its process may still write it.
    pub fn read_after(
        &self,
        position: Option<&LogPosition>,
        max_bytes: usize,
        holds_partial: bool,
    ) -> io::Result<Option<Lines>> {
        let (first, mut offset) = self.find(position);
        for segment in self.0.iter().skip(first) {
            // A file that was truncated starts over.
            let from = if offset > segment.len { segment.start } else { offset.max(segment.start) };
            offset = 0;
            let bytes = segment.read_at(from, segment.len.saturating_sub(from).min(max_bytes as u64))?;
            let is_last = from + bytes.len() as u64 >= segment.len;
            let mut length = whole_lines(&bytes, max_bytes);
            if length == 0 && is_last && (segment.is_closed || !holds_partial) {
                length = bytes.len();
            }
            if length > 0 {
                let next = LogPosition(segment.id.clone(), from + length as u64);
                let bytes = bytes[..length].to_vec();
                return Ok(Some(Lines { id: segment.id.clone(), bytes, first: from == segment.start, next }));
            }
        }
        Ok(None)
    }

    /// The spot of a position. A segment that is gone was the oldest: the part continues with the oldest that is left, and
    /// runs with the next run.
    fn find(&self, position: Option<&LogPosition>) -> SegmentOffset {
        let Some(LogPosition(id, offset)) = position else { return (0, 0) };
        if let Some(index) = self.0.iter().position(|segment| segment.id == *id) {
            return (index, *offset);
        }
        let is_later = |segment: &Segment| match (&segment.id, id) {
            (SegmentId::Run(run), SegmentId::Run(before)) => run > before,
            _ => true,
        };
        (self.0.iter().position(is_later).unwrap_or(self.0.len()), 0)
    }

    /// The end of the part at present.
    pub fn end(&self) -> Option<LogPosition> {
        self.0.last().map(|segment| LogPosition(segment.id.clone(), segment.len))
    }

    /// Whether a position is at or after another one.
    pub fn has_reached(&self, position: Option<&LogPosition>, end: Option<&LogPosition>) -> bool {
        end.is_some() && self.find(position) >= self.find(end)
    }

    fn position(&self, (index, offset): SegmentOffset) -> Option<LogPosition> {
        match self.0.get(index) {
            Some(segment) => Some(LogPosition(segment.id.clone(), offset.max(segment.start))),
            None => self.end(),
        }
    }

    /// Offset of the last `left` lines, and the number of lines that are missing in this part.
    fn tail(&self, mut left: u64, budget: &mut u64) -> io::Result<(SegmentOffset, u64)> {
        if left == 0 {
            return Ok(((self.0.len(), 0), 0));
        }
        for (index, segment) in self.0.iter().enumerate().rev() {
            let mut at = segment.len;
            // The final line end does not start another line. A last line without one counts.
            let mut ends_line = true;
            while at > segment.start {
                if *budget == 0 {
                    return Ok(((index, at), 0));
                }
                let from = at.saturating_sub(PIECE.min(*budget)).max(segment.start);
                let piece = segment.read_at(from, at - from)?;
                *budget = budget.saturating_sub(at - from);
                for (nth, byte) in piece.iter().enumerate().rev() {
                    if *byte == b'\n' && !ends_line {
                        left -= 1;
                        if left == 0 {
                            return Ok(((index, from + nth as u64 + 1), 0));
                        }
                    }
                    ends_line = false;
                }
                at = from;
            }
            // The first line of a segment has no line end before it.
            if segment.len > segment.start {
                left -= 1;
                if left == 0 {
                    return Ok(((index, segment.start), 0));
                }
            }
        }
        Ok(((0, 0), left))
    }

    /// Offset of the lines since a time: in the first file that was written since, at the first line with that time.
    fn since(&self, time: i64) -> io::Result<SegmentOffset> {
        for (index, segment) in self.0.iter().enumerate().filter(|(_, one)| one.modified >= time) {
            let found = match &segment.id {
                SegmentId::File(..) => since::first_line(&segment.file, segment.len, time)?,
                SegmentId::Run(_) => None,
            };
            match found {
                // Every line is older, although the file was written since.
                Some(offset) if offset >= segment.len => {}
                found => return Ok((index, found.unwrap_or(segment.start))),
            }
        }
        Ok((self.0.len(), 0))
    }
}

/// The positions in both parts from which a log is read: the last lines, and those since a time.
pub fn start(
    runs: &LogPart,
    files: &LogPart,
    lines: Option<u64>,
    time: Option<i64>,
) -> io::Result<[Option<LogPosition>; 2]> {
    let mut budget = MAX_TAIL_BYTES;
    let (mut in_runs, mut in_files) = ((0, 0), (0, 0));
    if let Some(lines) = lines {
        let (spot, left) = files.tail(lines, &mut budget)?;
        (in_files, in_runs) = (spot, runs.tail(left, &mut budget)?.0);
    }
    if let Some(time) = time {
        (in_files, in_runs) = (in_files.max(files.since(time)?), in_runs.max(runs.since(time)?));
    }
    Ok([runs.position(in_runs), files.position(in_files)])
}

/// Length of the whole lines at the beginning. A line that fills the buffer is cut between two characters.
fn whole_lines(bytes: &[u8], max_bytes: usize) -> usize {
    match bytes.iter().rposition(|byte| *byte == b'\n') {
        Some(end) => end + 1,
        None if bytes.len() < max_bytes => 0,
        None => {
            let tail = bytes.iter().rev().take(4).position(|byte| byte & 0xc0 != 0x80);
            // The last character may be incomplete; without one in sight the bytes are not text.
            tail.filter(|at| bytes[bytes.len() - 1 - at] >= 0xc0)
                .map_or(bytes.len(), |at| bytes.len() - 1 - at)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn part(folder: &std::path::Path, texts: &[&str]) -> LogPart {
        let segment = |(nth, text): (usize, &&str)| {
            let path = folder.join(nth.to_string());
            std::fs::File::create(&path).expect("a file").write_all(text.as_bytes()).expect("a text");
            Segment::of_file(File::open(path).expect("a file")).expect("a segment")
        };
        LogPart::of(texts.iter().enumerate().map(segment).collect())
    }

    fn read_all(part: &LogPart, mut position: Option<LogPosition>, max: usize, holds: bool) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(lines) = part.read_after(position.as_ref(), max, holds).expect("it is read") {
            all.push(String::from_utf8(lines.bytes).expect("text"));
            position = Some(lines.next);
        }
        all
    }

    /// The beginning of a stored output is freed between the two system calls that find its length and its first byte.
    #[test]
    fn a_segment_that_was_freed_beyond_its_known_length_is_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut part = part(folder.path(), &["a\nb\n", "c\n"]);
        part.0[0].start = part.0[0].len + 10;
        assert_eq!(read_all(&part, None, 100, false), ["c\n"]);
    }

    #[test]
    fn lines_are_read_whole_and_in_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let part = part(folder.path(), &["a\nbb\nccc", "", "d\né\npart"]);
        assert_eq!(read_all(&part, None, 4, true), ["a\n", "bb\n", "ccc", "d\n", "é\n", "part"]);
        assert_eq!(read_all(&part, None, 100, true), ["a\nbb\n", "ccc", "d\né\n"], "the last line may grow");
        assert_eq!(read_all(&part, None, 100, false), ["a\nbb\n", "ccc", "d\né\n", "part"]);
        let gone = LogPosition(SegmentId::File(0, 0), 7);
        assert_eq!(read_all(&part, Some(gone), 100, true).len(), 3, "from the oldest that is left");
    }

    #[test]
    fn the_last_lines_are_found_across_segments() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = part(folder.path(), &["1\n2\n", "3\n4"]);
        let none = LogPart::default();
        for (lines, expected) in [(0, ""), (1, "4"), (2, "3\n4"), (3, "2\n3\n4"), (9, "1\n2\n3\n4")] {
            let [_, position] = start(&none, &files, Some(lines), None).expect("a start");
            assert_eq!(read_all(&files, position, 100, false).concat(), expected, "{lines}");
        }
        let long = format!("{}\n", "x".repeat(200_000)).repeat(3);
        let folder = tempfile::tempdir().expect("a folder");
        let files = part(folder.path(), &[&long]);
        let [_, position] = start(&none, &files, Some(2), None).expect("a start");
        assert_eq!(position.map(|position| position.1), Some(200_001));
    }

    #[test]
    fn a_truncated_file_starts_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = part(folder.path(), &["1\n2\n3\n"]);
        let end = first.end();
        let path = folder.path().join("0");
        std::fs::File::options()
            .write(true)
            .truncate(true)
            .open(&path)
            .and_then(|mut file| file.write_all(b"4\n"))
            .expect("a text");
        let now = LogPart::of(vec![Segment::of_file(File::open(&path).expect("a file")).expect("a segment")]);
        assert_eq!(read_all(&now, end, 100, true), ["4\n"]);
    }
}
