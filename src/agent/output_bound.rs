//! Bound on captured output: all but the last part is freed while the output is written.
//!
//! One thread waits for writes to all captured outputs (inotify). A silent daemon costs nothing. A command that prints
//! endlessly uses at most [`BOUND`] plus the output of one [`PAUSE`]. The kernel bounds a single write of a hostile process
//! at 2 GiB until it returns.
//!
//! The output is memory, and writes to it always succeed, also while no agent runs: a pipe would block or kill a daemon
//! whose agent is gone, and a fixed size would cause write errors. An output is trimmed while any process can write to it,
//! also after its command ended.

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
/// Largest page size of the supported machines.
const PAGE: u64 = 65_536;
/// Bytes that a trim leaves: more than a message shows, and more than the longest value of an environment.
const TRIMMED_BYTES: u64 = 8 * PAGE;
/// Pause between two passes: a busy writer does not wake the thread for each write.
const PAUSE: Duration = Duration::from_millis(2);
/// Maximum watched outputs of one user's ended commands that left a writer behind, and of all users. Each needs a
/// descriptor of the agent. Above it, the oldest of the user with the most is no longer trimmed.
const MAX_LEFT_PER_USER: usize = 32;
const MAX_LEFT: usize = 256;

/// Guard that keeps an output trimmed. After its drop the output is trimmed while a process can write to it.
pub struct BoundedOutput(i32);

struct Watched {
    file: Arc<File>,
    /// The user of the command.
    uid: u32,
    /// Number of [`BoundedOutput`] guards.
    uses: usize,
}

struct Trimmer {
    inotify: OwnedFd,
    outputs: Mutex<BTreeMap<i32, Watched>>,
}

static TRIMMER: LazyLock<Option<Arc<Trimmer>>> = LazyLock::new(|| match Trimmer::start() {
    Ok(trimmer) => Some(trimmer),
    Err(error) => {
        warn!(%error, "captured output is not bounded: cannot use inotify");
        None
    }
});

/// Starts to trim an output of a user's command. `None`: inotify failed, and a warning is logged.
pub fn bound(file: &Arc<File>, uid: u32) -> Option<BoundedOutput> {
    let trimmer = TRIMMER.as_ref()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let events = inotify::WatchFlags::MODIFY | inotify::WatchFlags::CLOSE_WRITE;
    let mut outputs = trimmer.outputs();
    match inotify::add_watch(&trimmer.inotify, path, events) {
        Ok(id) => {
            outputs.entry(id).or_insert_with(|| Watched { file: Arc::clone(file), uid, uses: 0 }).uses += 1;
            Some(BoundedOutput(id))
        }
        Err(error) => {
            warn!(error = %std::io::Error::from(error), "output of a command is not bounded: cannot watch it");
            None
        }
    }
}

impl Drop for BoundedOutput {
    fn drop(&mut self) {
        let Some(trimmer) = TRIMMER.as_ref() else { return };
        let mut outputs = trimmer.outputs();
        if let Some(watched) = outputs.get_mut(&self.0) {
            watched.uses = watched.uses.saturating_sub(1);
        }
        trimmer.remove_unused(&mut outputs, self.0);
        if let Some(oldest) = excess(outputs.iter().map(|(id, watched)| (*id, watched.uid, watched.uses))) {
            trimmer.remove(&mut outputs, oldest);
        }
    }
}

/// The output that is no longer watched: the oldest left one of the user with the most. `None`: all are within the
/// limits. Each output has an id, which grows, a user, and a number of uses.
fn excess(outputs: impl Iterator<Item = (i32, u32, usize)>) -> Option<i32> {
    let mut left: BTreeMap<u32, (usize, i32)> = BTreeMap::new();
    let mut all = 0;
    for (id, uid, uses) in outputs {
        if uses == 0 {
            let (count, oldest) = left.entry(uid).or_insert((0, id));
            *count += 1;
            *oldest = id.min(*oldest);
            all += 1;
        }
    }
    let (count, oldest) = left.into_values().max_by_key(|(count, oldest)| (*count, -i64::from(*oldest)))?;
    (count > MAX_LEFT_PER_USER || all > MAX_LEFT).then_some(oldest)
}

impl Trimmer {
    fn start() -> std::io::Result<Arc<Trimmer>> {
        let inotify = inotify::init(inotify::CreateFlags::CLOEXEC)?;
        let trimmer = Arc::new(Trimmer { inotify, outputs: Mutex::default() });
        let shared = Arc::clone(&trimmer);
        std::thread::Builder::new().name("output".to_owned()).spawn(move || shared.run())?;
        Ok(trimmer)
    }

    fn outputs(&self) -> MutexGuard<'_, BTreeMap<i32, Watched>> {
        self.outputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn run(&self) {
        prefer_this_thread();
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
            // Dropped events may concern any output.
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

    /// Handles a write to an output, or a close by a writer.
    fn written(&self, id: i32) {
        let Some(file) = self.outputs().get(&id).map(|watched| Arc::clone(&watched.file)) else { return };
        // Without the lock: freeing memory may take long.
        if file.metadata().is_ok_and(|meta| meta.blocks().saturating_mul(512) > BOUND) {
            trim(&file, TRIMMED_BYTES);
        }
        self.remove_unused(&mut self.outputs(), id);
    }

    /// Stops watching an output that no command uses and no process can write to.
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

/// Lets the kernel run this thread before the writers, which fill memory while it waits. Needs privilege.
fn prefer_this_thread() {
    const NICE: i32 = -10;
    // The kernel counts priorities by thread.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
}

/// Frees all pages except the last `keep` bytes (whole pages), including pages reserved behind the end.
pub fn trim(file: &File, keep: u64) {
    const END: u64 = i64::MAX as u64;
    let Ok(meta) = file.metadata() else { return };
    let punch = |from: u64, to: u64| {
        if from < to {
            let _ = fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to - from);
        }
    };
    // The kernel frees whole pages only.
    let end = meta.len().checked_next_multiple_of(PAGE).map_or(END, |end| end.min(END));
    punch(0, end.saturating_sub(keep));
    punch(end, END);
}

/// Whether another open file description can write to the file. The kernel grants a write lease only if there is none.
fn has_writers(file: &File) -> bool {
    // From the kernel's uapi/asm-generic/fcntl.h; the libc crate does not define it.
    const F_SETSIG: libc::c_int = 10;
    let fd = file.as_raw_fd();
    // SAFETY: fcntl with integer arguments on a descriptor that is open for this call.
    unsafe {
        // A broken lease signals its holder. SIGURG is ignored by default; the default SIGIO would end the agent.
        libc::fcntl(fd, F_SETSIG, libc::SIGURG);
        let is_last = libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) == 0;
        if is_last {
            libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK);
        }
        !is_last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_output_of_the_user_with_the_most_is_dropped() {
        let of = |uid: u32, from: i32, count: usize, uses: usize| {
            (from..).take(count).map(move |id| (id, uid, uses))
        };
        assert_eq!(excess(of(1000, 1, MAX_LEFT_PER_USER, 0)), None);
        let used = of(1000, 1, 100, 1).chain(of(1000, 200, MAX_LEFT_PER_USER, 0));
        assert_eq!(excess(used), None, "outputs in use do not count");
        let noisy = of(0, 1, 2, 0).chain(of(1000, 10, MAX_LEFT_PER_USER + 1, 0));
        assert_eq!(excess(noisy), Some(10), "another user's are not affected");
        let users = MAX_LEFT / MAX_LEFT_PER_USER + 1;
        let many = (0..users).flat_map(|nth| of(nth as u32, 1000 * nth as i32, MAX_LEFT_PER_USER, 0));
        assert_eq!(excess(many), Some(0));
    }
}
