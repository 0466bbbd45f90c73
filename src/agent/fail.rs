//! Places where a test can let the agent die, one for each effect: `ABIDE_DIE_AT=PLACE`. Not in a release.

/// Dies here, without a word, if that was asked for.
pub fn point(place: &str) {
    if cfg!(debug_assertions) && std::env::var("ABIDE_DIE_AT").is_ok_and(|at| at == place) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is on its way; nothing more is done.
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
}
