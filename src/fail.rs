//! Places where a test can let us die, one for each effect. Not in a release.
//!
//! `ABIDE_DIE_AT=PLACE` dies at a place by its name. `ABIDE_DIE_AFTER=N` dies at the Nth step of any kind, counted from 1,
//! and `ABIDE_STEPS_FILE` is told how many there were.

use std::sync::atomic::{AtomicU64, Ordering};

/// Dies here, without a word, if that was asked for.
pub fn point(place: &str) {
    if cfg!(debug_assertions) && std::env::var("ABIDE_DIE_AT").is_ok_and(|at| at == place) {
        die();
    }
}

/// One more thing that others can notice.
pub fn step() {
    static STEPS: AtomicU64 = AtomicU64::new(0);
    if !cfg!(debug_assertions) {
        return;
    }
    let nth = STEPS.fetch_add(1, Ordering::Relaxed) + 1;
    if let Ok(file) = std::env::var("ABIDE_STEPS_FILE") {
        let _ = std::fs::write(file, nth.to_string());
    }
    if std::env::var("ABIDE_DIE_AFTER").is_ok_and(|at| at.parse() == Ok(nth)) {
        die();
    }
}

fn die() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // The signal is on its way; nothing more is done.
    std::thread::sleep(std::time::Duration::from_secs(60));
}
