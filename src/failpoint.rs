//! Failpoints: points at which a test can kill this process, and a clock shift. Debug builds only.
//!
//! `ABIDE_DIE_AT=NAME` kills the process at the named failpoint. `ABIDE_DIE_AFTER=N` kills it at the Nth step of any kind,
//! counted from 1; each step is appended to `ABIDE_STEPS_FILE`. `ABIDE_CLOCK_SHIFT_MS=N` shifts the wall clock of this
//! process; `ABIDE_CLOCK_SHIFT_FILE` is a file with the shift, which may change. `ABIDE_BLOCKED_FILE` is a file with the pids of
//! processes whose arguments and environment cannot be read: a read of them blocks while the file names the process.

use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Kills the process if `ABIDE_DIE_AT` has this name.
pub fn point(name: &str) {
    if cfg!(debug_assertions) && std::env::var("ABIDE_DIE_AT").is_ok_and(|at| at == name) {
        die();
    }
}

/// Counts and records an externally visible effect.
pub fn step(what: &str) {
    static STEPS: Mutex<u64> = Mutex::new(0);
    if !cfg!(debug_assertions) {
        return;
    }
    // Locked until the end, so that the lines are in step order.
    let mut steps = STEPS.lock().unwrap_or_else(PoisonError::into_inner);
    *steps += 1;
    if let Ok(file) = std::env::var("ABIDE_STEPS_FILE") {
        let file = std::fs::File::options().append(true).create(true).open(file);
        let _ = file.and_then(|mut file| file.write_all(format!("{what}\n").as_bytes()));
    }
    if std::env::var("ABIDE_DIE_AFTER").is_ok_and(|at| at.parse() == Ok(*steps)) {
        die();
    }
}

/// Clock shift of a test, in milliseconds.
pub fn clock_shift_ms() -> i64 {
    static SHIFT: LazyLock<i64> = LazyLock::new(|| {
        let shift = std::env::var("ABIDE_CLOCK_SHIFT_MS").ok().filter(|_| cfg!(debug_assertions));
        shift.and_then(|text| text.parse().ok()).unwrap_or(0)
    });
    static FILE: LazyLock<Option<std::path::PathBuf>> = LazyLock::new(|| {
        let file = std::env::var_os("ABIDE_CLOCK_SHIFT_FILE").filter(|_| cfg!(debug_assertions));
        file.map(std::path::PathBuf::from)
    });
    let text = FILE.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(*SHIFT)
}

/// Blocks while `ABIDE_BLOCKED_FILE` names this process.
pub fn block_read(pid: u32) {
    static FILE: LazyLock<Option<std::path::PathBuf>> = LazyLock::new(|| {
        let file = std::env::var_os("ABIDE_BLOCKED_FILE").filter(|_| cfg!(debug_assertions));
        file.map(std::path::PathBuf::from)
    });
    let Some(file) = &*FILE else { return };
    let is_named = |text: String| text.split_whitespace().any(|one| one.parse() == Ok(pid));
    while std::fs::read_to_string(file).is_ok_and(is_named) {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn die() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // Wait for the signal; do nothing more.
    std::thread::sleep(std::time::Duration::from_secs(60));
}
