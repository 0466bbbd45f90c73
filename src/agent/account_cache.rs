//! Account lookups: results that are used again, one lookup per name at a time, and a bounded wait for each.
//!
//! A source of accounts such as LDAP can hang. A lookup therefore runs on a worker thread. While it does, a recent good
//! result counts at once, and an older one after a short wait; without one, callers get an error after [`FIRST_WAIT`]. A
//! lookup that hangs occupies one thread per name.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::account::{Account, AccountError};
use super::worker_threads;

/// Age of a lookup after which its next use begins another one. A change of the local files is noticed at once; a change
/// of another source of accounts, such as LDAP, at the use after that.
const MAX_AGE: Duration = Duration::from_secs(1);
/// Maximum age of a result that counts while the next lookup runs: a relaunch does not wait for it.
const MAX_STALE: Duration = Duration::from_secs(30);
/// Maximum age of a result that counts while a lookup hangs.
const MAX_LAST_GOOD: Duration = Duration::from_secs(3600);
/// Maximum time of a lookup until its callers go on without it: without an earlier result, and with one.
const FIRST_WAIT: Duration = Duration::from_secs(2);
const REFRESH_WAIT: Duration = Duration::from_millis(200);
/// Part of the wait in which the thread stays a runtime thread: nearly all lookups are faster.
const BRIEF_WAIT: Duration = Duration::from_millis(10);

/// The inode, length and time of a file that defines accounts; `None`: there is no such file.
type FileStamp = Option<(u64, u64, i64, i64)>;
pub type FileStamps = [FileStamp; 2];

/// The state of the local files that define accounts.
pub fn file_stamps() -> FileStamps {
    ["/etc/passwd", "/etc/group"].map(|path| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.ino(), meta.len(), meta.ctime(), meta.ctime_nsec()))
    })
}

#[derive(Clone, Default)]
pub struct AccountCache(Arc<CacheState>);

#[derive(Default)]
struct CacheState {
    names: Mutex<BTreeMap<String, CachedName>>,
    finished: Condvar,
}

#[derive(Default)]
struct CachedName {
    last: Option<LastLookup>,
    /// Start of the lookup in flight.
    in_flight: Option<Instant>,
    /// Lookups that have finished.
    finished: u64,
}

/// The last lookup that finished.
struct LastLookup {
    result: Result<Account, AccountError>,
    at: Instant,
    /// The local files when it began.
    stamps: FileStamps,
}

impl LastLookup {
    fn good(&self, stamps: &FileStamps, max_age: Duration) -> Option<&Account> {
        let is_valid = self.at.elapsed() < max_age && self.stamps == *stamps;
        self.result.as_ref().ok().filter(|_| is_valid)
    }
}

impl AccountCache {
    fn names(&self) -> MutexGuard<'_, BTreeMap<String, CachedName>> {
        self.0.names.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The account with a name. `look_up` runs on a worker thread, unless a recent result exists.
    pub fn get(
        &self,
        name: &str,
        stamps: FileStamps,
        look_up: impl FnOnce(&str) -> Result<Account, AccountError> + Send + 'static,
    ) -> Result<Account, AccountError> {
        let mut names = self.names();
        let last_good =
            |cached: &CachedName, max_age| Some(cached.last.as_ref()?.good(&stamps, max_age)?.clone());
        if let Some(account) = names.get(name).and_then(|cached| last_good(cached, MAX_AGE)) {
            return Ok(account);
        }
        let is_old = |last: &LastLookup| last.at.elapsed() > MAX_LAST_GOOD;
        names.retain(|_, cached| cached.in_flight.is_some() || !cached.last.as_ref().is_none_or(is_old));
        let cached = names.entry(name.to_owned()).or_default();
        let (stale, fallback) = (last_good(cached, MAX_STALE), last_good(cached, MAX_LAST_GOOD));
        let (before, is_new) = (cached.finished, cached.in_flight.is_none());
        let begun = *cached.in_flight.get_or_insert_with(Instant::now);
        drop(names);
        if is_new {
            self.begin(name, stamps, look_up);
        }
        if let Some(account) = stale {
            return Ok(account);
        }
        let until = begun + if fallback.is_some() { REFRESH_WAIT } else { FIRST_WAIT };
        match self.wait(name, before, until) {
            Some(result) => result,
            None => fallback.ok_or_else(|| AccountError::TimedOut { name: name.to_owned() }),
        }
    }

    fn begin(
        &self,
        name: &str,
        stamps: FileStamps,
        look_up: impl FnOnce(&str) -> Result<Account, AccountError> + Send + 'static,
    ) {
        let (cache, owned) = (self.clone(), name.to_owned());
        let started = worker_threads::run(move || {
            let result = look_up(&owned);
            cache.finish(&owned, result, stamps);
        });
        if let Err(error) = started {
            let source = error.raw_os_error().map_or(nix::Error::EAGAIN, nix::Error::from_raw);
            self.finish(name, Err(AccountError::LookUp { name: name.to_owned(), source }), stamps);
        }
    }

    fn finish(&self, name: &str, result: Result<Account, AccountError>, stamps: FileStamps) {
        if let Some(cached) = self.names().get_mut(name) {
            cached.last = Some(LastLookup { result, at: Instant::now(), stamps });
            (cached.in_flight, cached.finished) = (None, cached.finished + 1);
        }
        self.0.finished.notify_all();
    }

    /// The result of the lookup in flight; `None`: it takes too long.
    fn wait(&self, name: &str, before: u64, until: Instant) -> Option<Result<Account, AccountError>> {
        use tokio::runtime::{Handle, RuntimeFlavor};
        let brief = until.min(Instant::now() + BRIEF_WAIT);
        if let Some(result) = self.wait_until(name, before, brief) {
            return Some(result);
        }
        // Other tasks of the runtime go on with another thread.
        match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
            Ok(RuntimeFlavor::MultiThread) => {
                tokio::task::block_in_place(|| self.wait_until(name, before, until))
            }
            _ => self.wait_until(name, before, until),
        }
    }

    fn wait_until(&self, name: &str, before: u64, until: Instant) -> Option<Result<Account, AccountError>> {
        let mut names = self.names();
        loop {
            let cached = names.get(name)?;
            if cached.finished > before {
                return cached.last.as_ref().map(|last| last.result.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            names = match self.0.finished.wait_timeout(names, left) {
                Ok((names, _)) => names,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn root() -> Account {
        Account::look_up("root").expect("root exists")
    }

    #[test]
    fn a_lookup_that_hangs_delays_its_callers_once_and_runs_once() {
        let (cache, stamps) = (AccountCache::default(), file_stamps());
        let (release, hang) = mpsc::channel::<()>();
        let hangs = move |_: &str| {
            let _ = hang.recv();
            Ok(root())
        };
        let begun = Instant::now();
        assert!(matches!(cache.get("a", stamps, hangs), Err(AccountError::TimedOut { .. })));
        assert!(begun.elapsed() >= FIRST_WAIT);
        let again = Instant::now();
        let refused = cache.get("a", stamps, |_| unreachable!("one lookup per name"));
        assert!(matches!(refused, Err(AccountError::TimedOut { .. })) && again.elapsed() < FIRST_WAIT / 2);
        assert_eq!(cache.get("b", stamps, |_| Ok(root())).expect("another name").uid(), 0);
        drop(release);
        let found = cache.wait_until("a", 0, Instant::now() + Duration::from_secs(10)).expect("it ends");
        assert_eq!(found.expect("an account").uid(), 0);
    }

    #[test]
    fn the_last_good_result_counts_while_a_lookup_hangs() {
        let (cache, stamps) = (AccountCache::default(), file_stamps());
        assert!(cache.get("a", stamps, |_| Ok(root())).is_ok());
        std::thread::sleep(MAX_AGE);
        let (_release, hang) = mpsc::channel::<()>();
        let begun = Instant::now();
        let hangs = move |_: &str| {
            let _ = hang.recv();
            Ok(root())
        };
        assert!(cache.get("a", stamps, hangs).is_ok(), "the last good result");
        assert!(begun.elapsed() < FIRST_WAIT, "{:?}", begun.elapsed());
        // A change of the local files makes it obsolete.
        assert!(matches!(cache.get("a", [None, None], |_| Ok(root())), Err(AccountError::TimedOut { .. })));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_go_on_while_a_lookup_hangs() {
        let (cache, stamps) = (AccountCache::default(), file_stamps());
        let (_release, hang) = mpsc::channel::<()>();
        let waits = tokio::spawn(async move {
            let hangs = move |_: &str| {
                let _ = hang.recv();
                Ok(root())
            };
            cache.get("a", stamps, hangs).is_err()
        });
        let begun = Instant::now();
        tokio::spawn(tokio::time::sleep(Duration::from_millis(50))).await.expect("it runs");
        assert!(begun.elapsed() < FIRST_WAIT, "{:?}", begun.elapsed());
        assert!(waits.await.expect("it ends"));
    }
}
