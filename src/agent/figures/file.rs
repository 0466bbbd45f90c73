//! Figures file: the samples of the last hour on disk, so that the graphs of an instance survive a restart of the agent.
//!
//! The file begins with the samples of all rings, and each pass appends its own. When it has as many appended samples as
//! rings can hold, a new file replaces it in one rename. Samples are not synced: a kill of the agent loses none, a crash of
//! the host the last ones. A damaged file loses the samples after the damage. Figures are not state: an error of this
//! file is logged, and changes nothing else.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use tracing::warn;

use super::ring::MAX_POINTS;
use super::{FigureSlot, SlotState, locked};
use crate::agent_protocol::{FigurePoint, TreeFigures};
use crate::clock;
use crate::model::InstanceKey;

/// First bytes of the file: its format.
const MAGIC: [u8; 8] = *b"abidefg1";
/// Minimum number of appended samples before a new file replaces this one.
const MIN_APPENDED: usize = 1000;
/// Interval between two attempts to write a file that could not be written.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Samples outside of this time before and after now are not read back, in milliseconds.
const READ_WINDOW: (i64, i64) = (3_600_000, 60_000);

/// Tags of the records.
const NAME: u8 = 1;
const SAMPLE: u8 = 2;
const FORGOTTEN: u8 = 3;

/// The figures file of an agent.
#[derive(Default)]
pub struct FigureFile {
    path: PathBuf,
    file: Option<File>,
    /// Number of the file. A slot whose name it lacks is named before its first sample.
    generation: u32,
    appended: usize,
    is_restored: bool,
    is_failing: bool,
    retry_at: Option<Instant>,
}

impl FigureFile {
    pub fn in_folder(agent: &Path) -> FigureFile {
        FigureFile { path: agent.join("figures"), ..FigureFile::default() }
    }

    /// Reads the samples of an earlier agent back, once. Can block.
    pub fn restore(&mut self, slots: &[Arc<FigureSlot>]) {
        if std::mem::replace(&mut self.is_restored, true) || self.path.as_os_str().is_empty() {
            return;
        }
        if let Err(error) = read_back(&self.path, slots, clock::now().0)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(file = %self.path.display(), %error, "cannot read all figures of the last hour");
        }
        self.replace(slots);
    }

    /// Adds the newest samples of slots, and the ids of slots that are gone. `slots`: all of them. Can block.
    pub fn append(&mut self, sampled: &[&Arc<FigureSlot>], gone: &[u32], slots: &[Arc<FigureSlot>]) {
        if self.path.as_os_str().is_empty() || !self.is_restored {
            return;
        }
        let is_due = self.retry_at.is_some_and(|at| at <= Instant::now());
        let is_full = self.appended >= MIN_APPENDED.max(slots.len().saturating_mul(MAX_POINTS));
        if is_due || is_full {
            return self.replace(slots);
        }
        let Some(file) = self.file.as_mut().filter(|_| !sampled.is_empty() || !gone.is_empty()) else {
            return;
        };
        let mut bytes = Vec::new();
        for id in gone {
            bytes.push(FORGOTTEN);
            bytes.extend(id.to_le_bytes());
        }
        for slot in sampled {
            let mut state = locked(&slot.0);
            if let Some(point) = state.ring.newest() {
                put_name(&mut bytes, &mut state, self.generation);
                put_sample(&mut bytes, state.id, point);
            }
        }
        self.appended = self.appended.saturating_add(sampled.len()).saturating_add(gone.len());
        if let Err(error) = file.write_all(&bytes) {
            self.fail(&error);
        }
    }

    /// Replaces the file by one with the samples of all rings.
    fn replace(&mut self, slots: &[Arc<FigureSlot>]) {
        self.generation = self.generation.wrapping_add(1).max(1);
        (self.file, self.appended, self.retry_at) = (None, 0, None);
        match self.write_all(slots) {
            Ok(file) => (self.file, self.is_failing) = (Some(file), false),
            Err(error) => self.fail(&error),
        }
    }

    fn write_all(&self, slots: &[Arc<FigureSlot>]) -> io::Result<File> {
        let new = self.path.with_extension("new");
        if let Err(error) = std::fs::remove_file(&new)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        let mut writer = BufWriter::new(file);
        writer.write_all(&MAGIC)?;
        let mut bytes = Vec::new();
        for slot in slots {
            bytes.clear();
            let mut state = locked(&slot.0);
            let points = state.ring.points();
            if !points.is_empty() {
                put_name(&mut bytes, &mut state, self.generation);
            }
            let id = state.id;
            drop(state);
            points.into_iter().for_each(|point| put_sample(&mut bytes, id, point));
            writer.write_all(&bytes)?;
        }
        let file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
        std::fs::rename(&new, &self.path)?;
        Ok(file)
    }

    /// Nothing is appended to a file that misses a part: a later pass replaces it.
    fn fail(&mut self, error: &io::Error) {
        (self.file, self.retry_at) = (None, Some(Instant::now() + RETRY_INTERVAL));
        if !std::mem::replace(&mut self.is_failing, true) {
            let file = self.path.display();
            warn!(%file, %error, "figures are not written: a restart of the agent loses them");
        }
    }
}

/// Names the slot, if the file lacks its name.
fn put_name(bytes: &mut Vec<u8>, state: &mut SlotState, generation: u32) {
    if state.named_in == generation {
        return;
    }
    state.named_in = generation;
    let name = state.key.to_string();
    bytes.push(NAME);
    bytes.extend(state.id.to_le_bytes());
    // The parts of a key are bounded, so its length fits.
    bytes.extend(u16::try_from(name.len()).unwrap_or(u16::MAX).to_le_bytes());
    bytes.extend(name.as_bytes());
}

fn put_sample(bytes: &mut Vec<u8>, id: u32, FigurePoint(at, figures): FigurePoint) {
    let TreeFigures { cpu_milli, mem_kb, fds, threads, processes: _ } = figures;
    bytes.push(SAMPLE);
    bytes.extend(id.to_le_bytes());
    bytes.extend(at.to_le_bytes());
    bytes.extend(u32::try_from(mem_kb).unwrap_or(u32::MAX).to_le_bytes());
    for number in [cpu_milli, fds, threads] {
        bytes.extend(number.to_le_bytes());
    }
}

/// Fills the rings of slots with the samples of a file. An error: the samples before it were read.
fn read_back(path: &Path, slots: &[Arc<FigureSlot>], now: i64) -> io::Result<()> {
    // A FIFO or a link at this path must not block or mislead the agent.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let known: HashMap<InstanceKey, &Arc<FigureSlot>> =
        slots.iter().map(|slot| (locked(&slot.0).key.clone(), slot)).collect();
    let mut points: HashMap<u32, (InstanceKey, Vec<FigurePoint>)> = HashMap::new();
    let result = read_records(&mut BufReader::new(file), now, &mut |record| match record {
        Record::Name(id, key) => match (points.get_mut(&id), known.contains_key(&key)) {
            // A renamed instance keeps its samples.
            (Some(entry), true) => entry.0 = key,
            (None, true) => drop(points.insert(id, (key, Vec::new()))),
            (_, false) => drop(points.remove(&id)),
        },
        Record::Sample(id, point) => {
            if let Some((_, points)) = points.get_mut(&id) {
                points.push(point);
            }
        }
        Record::Forgotten(id) => drop(points.remove(&id)),
    });
    for (key, points) in points.into_values() {
        let Some(slot) = known.get(&key) else { continue };
        let mut state = locked(&slot.0);
        for FigurePoint(at, figures) in points {
            state.ring.add(at, figures);
        }
    }
    result
}

/// A record of the file.
#[derive(Clone, Debug, PartialEq)]
enum Record {
    Name(u32, InstanceKey),
    Sample(u32, FigurePoint),
    Forgotten(u32),
}

/// Reads records up to the end of the file, without samples outside of the window around `now`.
fn read_records(file: &mut impl Read, now: i64, each: &mut impl FnMut(Record)) -> io::Result<()> {
    let damaged = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    if array::<8>(file)? != MAGIC {
        return Err(damaged("not a figures file of this version"));
    }
    let window = now.saturating_sub(READ_WINDOW.0)..=now.saturating_add(READ_WINDOW.1);
    loop {
        let mut tag = [0];
        if file.read(&mut tag)? == 0 {
            return Ok(());
        }
        let id = u32::from_le_bytes(array(file)?);
        match tag[0] {
            NAME => {
                let mut name = vec![0; usize::from(u16::from_le_bytes(array(file)?))];
                file.read_exact(&mut name)?;
                let key = std::str::from_utf8(&name).ok().and_then(|name| name.parse().ok());
                each(Record::Name(id, key.ok_or_else(|| damaged("a name is not an instance"))?));
            }
            SAMPLE => {
                let at = i64::from_le_bytes(array(file)?);
                let mut number = || Ok::<u32, io::Error>(u32::from_le_bytes(array(file)?));
                let (mem_kb, cpu_milli, fds, threads) = (number()?.into(), number()?, number()?, number()?);
                let figures = TreeFigures { cpu_milli, mem_kb, fds, threads, processes: 0 };
                if window.contains(&at) {
                    each(Record::Sample(id, FigurePoint(at, figures)));
                }
            }
            FORGOTTEN => each(Record::Forgotten(id)),
            _ => return Err(damaged("a record has an unknown type")),
        }
    }
}

fn array<const N: usize>(file: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::FigureTable;
    use super::*;

    const NOW: i64 = 1_800_000_000_000;

    fn key(name: &str) -> InstanceKey {
        format!("0:127.0.0.1:web:{name}").parse().expect("a key")
    }

    fn figures(number: u32) -> TreeFigures {
        TreeFigures { cpu_milli: number * 10, mem_kb: number.into(), fds: number, threads: 1, processes: 0 }
    }

    /// A table with a slot per name, and what a later agent reads back from its file.
    struct Files {
        folder: tempfile::TempDir,
        table: FigureTable,
        file: FigureFile,
    }

    impl Files {
        fn new() -> Files {
            let folder = tempfile::tempdir().expect("a folder");
            let mut file = FigureFile::in_folder(folder.path());
            file.restore(&[]);
            Files { folder, table: FigureTable::default(), file }
        }

        fn sample(&mut self, slot: &Arc<FigureSlot>, at: i64, number: u32) {
            locked(&slot.0).ring.add(at, figures(number));
            let slots = self.table.slots();
            self.file.append(&[slot], &self.table.take_gone(), &slots);
        }

        /// The read samples of these instances.
        fn read(&self, names: &[&str], now: i64) -> (io::Result<()>, Vec<Vec<FigurePoint>>) {
            let table = FigureTable::default();
            let slots: Vec<Arc<FigureSlot>> = names.iter().map(|name| table.add(&key(name))).collect();
            let result = read_back(&self.folder.path().join("figures"), &slots, now);
            (result, slots.iter().map(|slot| locked(&slot.0).ring.points()).collect())
        }
    }

    #[test]
    fn samples_are_read_back_by_instance_for_an_hour() {
        let mut files = Files::new();
        let (one, two) = (files.table.add(&key("one")), files.table.add(&key("two")));
        for minute in 0..70i64 {
            files.sample(&one, NOW + minute * 60_000, minute as u32);
            files.sample(&two, NOW + minute * 60_000, 100);
        }
        let now = NOW + 69 * 60_000;
        let (result, read) = files.read(&["one", "two", "three"], now);
        result.expect("it is read");
        assert_eq!(read[0], locked(&one.0).ring.points());
        assert_eq!((read[0].len(), read[1].len(), read[2].len()), (MAX_POINTS, MAX_POINTS, 0));
        // Older than an hour, or in the future of a clock that was set back.
        assert_eq!(files.read(&["one"], now + 30 * 60_000).1[0].len(), 31);
        assert!(files.read(&["one"], NOW - 3_600_000).1[0].is_empty());
    }

    #[test]
    fn a_renamed_instance_keeps_its_samples_and_a_removed_one_loses_them() {
        let mut files = Files::new();
        let (one, two) = (files.table.add(&key("one")), files.table.add(&key("two")));
        files.sample(&one, NOW, 1);
        files.sample(&two, NOW, 2);
        one.set(&key("renamed"), None);
        files.sample(&one, NOW + 1000, 3);
        drop(two);
        files.sample(&one, NOW + 2000, 4);
        let (result, read) = files.read(&["renamed", "one", "two"], NOW);
        result.expect("it is read");
        assert_eq!(read.iter().map(Vec::len).collect::<Vec<_>>(), [3, 0, 0]);
        // The same name again begins with no samples.
        let again = files.table.add(&key("two"));
        files.sample(&again, NOW + 3000, 5);
        assert_eq!(files.read(&["two"], NOW).1[0], [FigurePoint(NOW + 3000, figures(5))]);
    }

    #[test]
    fn the_file_is_replaced_before_it_grows_without_end() {
        let mut files = Files::new();
        let slot = files.table.add(&key("one"));
        let path = files.folder.path().join("figures");
        let mut largest = 0;
        for nth in 0..5 * MIN_APPENDED as i64 {
            files.sample(&slot, NOW + nth * 1000, 1);
            largest = largest.max(std::fs::metadata(&path).expect("a file").len());
        }
        assert!(largest < 35_000, "{largest} bytes");
        assert_eq!(files.read(&["one"], NOW + 5_000_000).1[0], locked(&slot.0).ring.points());
    }

    #[test]
    fn a_damaged_file_loses_only_the_samples_after_the_damage() {
        let mut files = Files::new();
        let slot = files.table.add(&key("one"));
        for nth in 0..10 {
            files.sample(&slot, NOW + nth, 1);
        }
        let path = files.folder.path().join("figures");
        let whole = std::fs::read(&path).expect("a file");
        let mut lengths = Vec::new();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).expect("it is written");
            lengths.push(files.read(&["one"], NOW).1[0].len());
        }
        assert!(lengths.is_sorted() && lengths.last() == Some(&9), "{lengths:?}");
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            let mut damaged = whole.clone();
            for _ in 0..random.usize(1..8) {
                let at = random.usize(0..damaged.len());
                damaged[at] = random.u8(..);
            }
            std::fs::write(&path, &damaged).expect("it is written");
            // Any bytes: no panic, and no more samples than a ring has.
            assert!(files.read(&["one"], NOW).1[0].len() <= MAX_POINTS);
        }
        // The next agent replaces it.
        let mut next = FigureFile::in_folder(files.folder.path());
        next.restore(&[]);
        assert_eq!(std::fs::read(&path).expect("a file"), MAGIC);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_tried_again_later() {
        let mut files = Files::new();
        let slot = files.table.add(&key("one"));
        files.file.fail(&io::Error::other("full"));
        files.sample(&slot, NOW, 1);
        assert!(files.read(&["one"], NOW).1[0].is_empty());
        files.file.retry_at = Some(Instant::now());
        files.sample(&slot, NOW + 1, 2);
        assert_eq!(files.read(&["one"], NOW).1[0].len(), 2);
    }
}
