//! Bound on captured output: all but its last part is given back to the kernel while it is written.
//!
//! One thread waits for writes to all captured outputs (inotify): a silent daemon costs nothing, and a command that prints
//! without end takes [`BOUND`] and what it prints in [`PAUSE`]. A single write of a hostile process is bounded by the kernel,
//! at 2 GiB, until it returns.
//!
//! The output stays memory, and writes to it always succeed, also while no agent runs: a pipe blocks or kills a daemon
//! whose agent is gone, and a fixed size gives it write errors. An output is trimmed for as long as a process can write to
//! it, also after its command ended.

use std::collections::BTreeMap;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate, inotify};
use rustix::io::Errno;
use tracing::warn;

/// Memory of one output above which it is trimmed.
const BOUND: u64 = 1 << 20;
/// No page is larger on machines that we know.
const PAGE: u64 = 65_536;
/// How much of a trimmed output stays: more than a message shows, and than the longest value of an environment.
const KEPT: u64 = 8 * PAGE;
/// Pause between two passes: a busy writer does not wake the thread for each write.
const PAUSE: Duration = Duration::from_millis(2);
/// Maximum outputs of commands that ended and left a writer behind. The oldest is not trimmed any more.
const MAX_LEFT: usize = 1024;

/// Trims an output until it is dropped, and after that for as long as a process can write to it.
pub struct Bounded(i32);

struct Watched {
    file: Arc<File>,
    /// How many [`Bounded`] refer to it.
    uses: usize,
}

struct Trimmer {
    inotify: OwnedFd,
    outputs: Mutex<BTreeMap<i32, Watched>>,
}

static TRIMMER: LazyLock<Option<Arc<Trimmer>>> = LazyLock::new(|| match Trimmer::start() {
    Ok(trimmer) => Some(trimmer),
    Err(error) => {
        warn!(%error, "captured output is not bounded: inotify cannot be used");
        None
    }
});

/// Trims this output from now on. `None`: that is not possible, and a warning is logged.
pub fn bound(file: &Arc<File>) -> Option<Bounded> {
    let trimmer = TRIMMER.as_ref()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let events = inotify::WatchFlags::MODIFY | inotify::WatchFlags::CLOSE_WRITE;
    let mut outputs = trimmer.outputs();
    match inotify::add_watch(&trimmer.inotify, path, events) {
        Ok(id) => {
            outputs.entry(id).or_insert_with(|| Watched { file: Arc::clone(file), uses: 0 }).uses += 1;
            Some(Bounded(id))
        }
        Err(error) => {
            warn!(error = %std::io::Error::from(error), "the output of a command is not bounded: it cannot be watched");
            None
        }
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        let Some(trimmer) = TRIMMER.as_ref() else { return };
        let mut outputs = trimmer.outputs();
        if let Some(watched) = outputs.get_mut(&self.0) {
            watched.uses = watched.uses.saturating_sub(1);
        }
        trimmer.remove_unused(&mut outputs, self.0);
        let left = || outputs.iter().filter(|(_, watched)| watched.uses == 0).map(|(id, _)| *id);
        if let Some(oldest) = left().next().filter(|_| left().count() > MAX_LEFT) {
            trimmer.remove(&mut outputs, oldest);
        }
    }
}

impl Trimmer {
    fn start() -> std::io::Result<Arc<Trimmer>> {
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC)?;
        let trimmer = Arc::new(Trimmer { inotify, outputs: Mutex::default() });
        let ours = Arc::clone(&trimmer);
        std::thread::Builder::new().name("output".to_owned()).spawn(move || ours.run())?;
        Ok(trimmer)
    }

    fn outputs(&self) -> MutexGuard<'_, BTreeMap<i32, Watched>> {
        self.outputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn run(&self) {
        let mut buffer = [const { MaybeUninit::uninit() }; 4096];
        let mut events = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            let (id, what) = match events.next() {
                Ok(event) => (event.wd(), event.events()),
                Err(Errno::INTR) => continue,
                Err(error) => {
                    let error = std::io::Error::from(error);
                    return warn!(%error, "captured output is not bounded any more: inotify failed");
                }
            };
            // Events that were dropped may concern any output.
            let ids: Vec<i32> = match what.contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                true => self.outputs().keys().copied().collect(),
                false => vec![id],
            };
            ids.into_iter().for_each(|id| self.written(id));
            if events.is_buffer_empty() {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// An output was written to, or closed by a writer.
    fn written(&self, id: i32) {
        let Some(file) = self.outputs().get(&id).map(|watched| Arc::clone(&watched.file)) else { return };
        // Without the lock: giving memory back takes its time.
        if file.metadata().is_ok_and(|meta| meta.blocks().saturating_mul(512) > BOUND) {
            trim(&file, KEPT);
        }
        self.remove_unused(&mut self.outputs(), id);
    }

    /// Lets go of an output that no command uses and no process can write to.
    fn remove_unused(&self, outputs: &mut BTreeMap<i32, Watched>, id: i32) {
        if outputs.get(&id).is_some_and(|watched| watched.uses == 0 && !has_writers(&watched.file)) {
            self.remove(outputs, id);
        }
    }

    fn remove(&self, outputs: &mut BTreeMap<i32, Watched>, id: i32) {
        outputs.remove(&id);
        let _ = inotify::remove_watch(&self.inotify, id);
    }
}

/// Gives back everything but the last bytes (`keep`: whole pages), also what was reserved behind the end.
pub fn trim(file: &File, keep: u64) {
    const END: u64 = i64::MAX as u64;
    let Ok(meta) = file.metadata() else { return };
    let punch = |from: u64, to: u64| {
        if from < to {
            let _ = fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to - from);
        }
    };
    // A page is only given back whole.
    let end = meta.len().checked_next_multiple_of(PAGE).map_or(END, |end| end.min(END));
    punch(0, end.saturating_sub(keep));
    punch(end, END);
}

/// Can another open file description write to it? The kernel grants a write lease only to the last one.
fn has_writers(file: &File) -> bool {
    // As in the kernel's uapi/asm-generic/fcntl.h; libc has no name for it.
    const F_SETSIG: libc::c_int = 10;
    let fd = file.as_raw_fd();
    // SAFETY: fcntl with integer arguments on a descriptor that is open for this call.
    unsafe {
        // A lease that is broken signals its holder: by a signal that is ignored, and not by one that ends the agent.
        libc::fcntl(fd, F_SETSIG, libc::SIGURG);
        let is_last = libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) == 0;
        if is_last {
            libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK);
        }
        !is_last
    }
}
