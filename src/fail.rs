//! Places where a test can let us die, one for each effect. Not in a release.
//!
//! `ABIDE_DIE_AT=PLACE` dies at a place by its name. `ABIDE_DIE_AFTER=N` dies at the Nth step of any kind, counted from 1,
//! and `ABIDE_STEPS_FILE` gets a line for each of them.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

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

fn die() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // The signal is on its way; nothing more is done.
    std::thread::sleep(std::time::Duration::from_secs(60));
}
