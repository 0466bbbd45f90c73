//! Places where a test can let us die, one for each effect. Not in a release.
//!
//! `ABIDE_DIE_AT=PLACE` dies at a place by its name. `ABIDE_DIE_AFTER=N` dies at the Nth step of any kind, counted from 1,
//! and `ABIDE_STEPS_FILE` gets a line for each of them. `ABIDE_CLOCK_SHIFT_MS=N` shifts the wall clock of this process;
//! `ABIDE_CLOCK_SHIFT_FILE` names a file with the shift, which may change.

use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Dies here, without a word, if that was asked for.
pub fn point(place: &str) {
    if cfg!(debug_assertions) && std::env::var("ABIDE_DIE_AT").is_ok_and(|at| at == place) {
        die();
    }
}

/// One more thing that others can notice, and what it is.
pub fn step(what: &str) {
    static STEPS: Mutex<u64> = Mutex::new(0);
    if !cfg!(debug_assertions) {
        return;
    }
    // Held to the end: the lines are in the order of the numbers.
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

/// How far a test shifts the wall clock of this process, in milliseconds.
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

fn die() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // The signal is on its way; nothing more is done.
    std::thread::sleep(std::time::Duration::from_secs(60));
}
