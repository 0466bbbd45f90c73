//! One poll of the repository: fetch, verify the tip, read its files. Runs on its own thread, and may take minutes.
//!
//! A tip is accepted only if it descends from the last accepted commit (or was accepted by id), has a valid signature
//! where required, and declares something. Otherwise the last commit stays active, and a [`SourceError`] is reported.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::super::last_good::{ExpectedRoots, LastGood};
use super::super::{PostProcess, SourceError, SourceState};
use super::address::Address;
use super::command::GitCommand;
use super::commit_files::{self, CommitFiles};
use super::config::{GitConfig, Signatures};
use super::error::{EmptyCommit, FetchError, RepositoryError, SignatureRefusal};
use super::signature;
use crate::inventory::InventoryFeed;
use crate::manifest;

/// Maximum number of commits that `--signatures all` verifies at once.
const MAX_VERIFIED: usize = 10_000;

/// The last accepted commit, and the last one without an error: broken files keep their version there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastCommit {
    pub commit: String,
    #[serde(default)]
    pub good: Option<String>,
}

/// Result of a poll.
pub struct PollResult {
    /// If the commit differs from the active one.
    pub taken: Option<(SourceState, LastCommit)>,
    pub trouble: Option<SourceError>,
}

pub struct Poller {
    config: Arc<GitConfig>,
    program: GitCommand,
    again: manifest::IncrementalLoader,
    last_good: LastGood,
    /// The last good commit, whose texts are cached.
    good: Option<String>,
    /// New objects arrived since the last maintenance.
    is_untidy: bool,
}

impl Poller {
    pub fn new(config: Arc<GitConfig>, finish: PostProcess, stop: Arc<AtomicBool>) -> Poller {
        let mirror = mirror(&config);
        let program =
            GitCommand { mirror, timeout: config.fetch.timeout, max_pack: config.fetch.max_pack, stop };
        let again = manifest::IncrementalLoader::default();
        let mut last_good = LastGood::new(finish);
        // The active revision is known by its commit.
        last_good.restore_last_good(Vec::new());
        Poller { config, program, again, last_good, good: None, is_untidy: false }
    }

    pub fn use_inventories(&mut self, feed: Arc<InventoryFeed>) {
        self.last_good.use_inventories(feed);
    }

    /// `pin` is the last accepted commit, `have` the active one.
    pub fn poll(&mut self, pin: Option<&LastCommit>, have: Option<&str>) -> PollResult {
        // The lock excludes other users of the mirror until this returns.
        let (_lock, taken) = match self.lock() {
            Ok(lock) => {
                let taken = self.fetch_and_load(&lock, pin, have);
                (Some(lock), taken)
            }
            Err(error) => (None, Err(error.into())),
        };
        match taken {
            Ok(taken) => PollResult { taken, trouble: None },
            // After a restart the last accepted commit is in the mirror, and becomes active again.
            Err(trouble) => PollResult {
                taken: pin.filter(|_| have.is_none()).and_then(|pin| self.reload_last_commit(pin)),
                trouble: Some(trouble),
            },
        }
    }

    /// Fetches the tip, and loads it if it is acceptable and not active yet.
    fn fetch_and_load(
        &mut self,
        lock: &File,
        pin: Option<&LastCommit>,
        have: Option<&str>,
    ) -> Result<Option<(SourceState, LastCommit)>, SourceError> {
        let tip = self.fetch(lock)?;
        self.check_not_shallow(&tip)?;
        self.check_tip(&tip, pin)?;
        match have == Some(&tip) && !self.last_good.has_new_inventories() {
            true => Ok(None),
            false => self.load_commit(&tip, pin).map(Some),
        }
    }

    /// Periodic maintenance, while no poll waits.
    pub fn gc(&mut self) {
        if std::mem::take(&mut self.is_untidy)
            && let Ok(_lock) = self.lock()
        {
            let _ = self.program.local(&["-c", "gc.auto=6700", "gc", "--auto", "--quiet"], &[], 1 << 16);
        }
    }

    /// Locks the mirror. Under the lock, git's own lock files are stale.
    fn lock(&self) -> Result<File, RepositoryError> {
        let (folder, mirror) = (&self.config.folder, &self.program.mirror);
        let failed = |path: &Path, source: std::io::Error| RepositoryError::Folder {
            path: path.to_path_buf(),
            source,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| failed(folder, error))?;
        let path = mirror.with_extension("lock");
        let file =
            File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(|error| failed(&path, error))?;
        let begin = Instant::now();
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begin.elapsed() > self.config.fetch.timeout || self.program.stop.load(Ordering::SeqCst) {
                return Err(RepositoryError::InUse { mirror: mirror.clone() });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        for folder in ["", "objects", "refs/abide/seen", "refs/abide/taken"] {
            for entry in fs::read_dir(mirror.join(folder)).into_iter().flatten().flatten() {
                let name = entry.file_name();
                if name.as_encoded_bytes().ends_with(b".lock") || name == "gc.pid" {
                    let _ = fs::remove_file(entry.path());
                }
            }
        }
        Ok(file)
    }

    /// Fetches the current tip.
    fn fetch(&self, lock: &File) -> Result<String, RepositoryError> {
        let name = &self.config.reference;
        let address = self.config.address()?;
        self.create_mirror()?;
        let seen = format!("refs/abide/seen/{}", digest(name));
        if self.verifies_all() {
            // git keeps the reference and reports success when it refuses a shallow history.
            self.program.local(&["update-ref", "-d", &seen], &[], 1000)?;
        }
        let cannot = |source: FetchError| RepositoryError::Fetch {
            reference: name.clone(),
            url: self.config.shown_url(),
            source,
        };
        self.fetch_to(&seen, &address, lock).map_err(cannot)?;
        if self.verifies_all() && !self.program.local(&["show-ref", "--verify", &seen], &[], 1000)?.is_well()
        {
            return Err(cannot(FetchError::Shallow));
        }
        let commit = format!("{seen}^{{commit}}");
        let tip = self.program.local(&["rev-parse", "--verify", &commit], &[], 1000)?;
        match (tip.is_well(), String::from_utf8(tip.out)) {
            (true, Ok(tip)) => Ok(tip.trim().to_owned()),
            (true, Err(_)) | (false, _) => Err(cannot(FetchError::Git { stderr: tip.stderr })),
        }
    }

    fn create_mirror(&self) -> Result<(), RepositoryError> {
        let mirror = &self.program.mirror;
        if mirror.join("HEAD").is_file() {
            return Ok(());
        }
        let name = mirror.display().to_string();
        let made = self.program.local(&["init", "--quiet", "--bare", "--template=", &name], &[], 0)?;
        match made.is_well() {
            true => Ok(()),
            false => Err(RepositoryError::Init { mirror: mirror.clone(), stderr: made.stderr }),
        }
    }

    /// Fetches the first reference that exists of those that the name may mean.
    fn fetch_to(&self, seen: &str, address: &Address, lock: &File) -> Result<(), FetchError> {
        // A server that declares a commit shallow hides its ancestors.
        let shallow = if self.verifies_all() { "--no-update-shallow" } else { "--update-shallow" };
        let mut stderr = String::new();
        for name in candidate_refs(&self.config.reference) {
            let what = format!("+{name}:{seen}");
            let flags = ["fetch", "--quiet", "--no-tags", "--no-prune", "--no-write-fetch-head"];
            let more = ["--no-recurse-submodules", shallow, "--", &address.url, &what];
            let args: Vec<&str> = flags.into_iter().chain(more).collect();
            let fetched = self.program.remote(&args, lock, address)?;
            if fetched.is_well() {
                return Ok(());
            }
            let is_missing = fetched.lacks_reference();
            stderr = fetched.stderr;
            if !is_missing {
                break;
            }
        }
        Err(FetchError::Git { stderr })
    }

    fn verifies_all(&self) -> bool {
        self.config.signers.is_some() && self.config.signatures == Signatures::All
    }

    /// A shallow mirror lacks the ancestors of a commit, and with them commits to verify.
    fn check_not_shallow(&self, tip: &str) -> Result<(), SourceError> {
        let file = self.program.mirror.join("shallow");
        // git removes the file when nothing is shallow any more; an unreadable file proves nothing.
        let is_shallow = match fs::symlink_metadata(&file) {
            Ok(found) => found.len() > 0,
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        };
        if !self.verifies_all() || !is_shallow {
            return Ok(());
        }
        Err(refused(tip, SignatureRefusal::Shallow { mirror: self.program.mirror.clone() }))
    }

    fn check_tip(&self, tip: &str, pin: Option<&LastCommit>) -> Result<(), SourceError> {
        let Some(pin) = pin.filter(|pin| pin.commit != tip) else { return self.verify(tip) };
        let args = ["merge-base", "--is-ancestor", &pin.commit, tip];
        // An unknown commit is not an ancestor, either.
        let follows = self.program.local(&args, &[], 1000).map_err(RepositoryError::from)?.is_well();
        let accepted = self.config.accept_rewind.as_deref().is_some_and(|commit| tip.starts_with(commit));
        if !follows && !accepted {
            let what = format!("{} of {}", self.config.reference, self.config.shown_url());
            return Err(SourceError::Rewound { taken: pin.commit.clone(), tip: tip.to_owned(), what });
        }
        self.verify(tip)?;
        match (&self.config.signers, self.config.signatures) {
            (Some(_), Signatures::All) => self.verify_since(&pin.commit, tip),
            (Some(_), Signatures::Tip) | (None, _) => Ok(()),
        }
    }

    /// Each commit that this tip adds, on any branch.
    fn verify_since(&self, last: &str, tip: &str) -> Result<(), SourceError> {
        let most = (MAX_VERIFIED + 1).to_string();
        let (without, count) = (format!("^{last}"), format!("--max-count={most}"));
        let listed = self.program.local(&["rev-list", &count, tip, &without], &[], 1 << 20);
        let listed = listed.map_err(RepositoryError::from)?;
        if !listed.is_well() {
            // Only a tip that was accepted by id gets here without the last accepted commit.
            let (last, stderr) = (last.to_owned(), listed.stderr);
            return Err(refused(tip, SignatureRefusal::List { last, stderr }));
        }
        let commits = String::from_utf8_lossy(&listed.out).into_owned();
        let commits: Vec<&str> = commits.lines().filter(|commit| *commit != tip).collect();
        if commits.len() >= MAX_VERIFIED {
            return Err(refused(tip, SignatureRefusal::TooMany { most: MAX_VERIFIED }));
        }
        let Some(signers) = &self.config.signers else { return Ok(()) };
        signature::verify_all(&self.program, &commits, signers)
            .map_err(|(commit, source)| refused(tip, SignatureRefusal::Contains { commit, source }))
    }

    fn verify(&self, commit: &str) -> Result<(), SourceError> {
        let Some(signers) = &self.config.signers else { return Ok(()) };
        signature::verify(&self.program, commit, signers).map_err(|error| refused(commit, error.into()))
    }

    fn load_commit(
        &mut self,
        commit: &str,
        pin: Option<&LastCommit>,
    ) -> Result<(SourceState, LastCommit), SourceError> {
        let mut good = pin.and_then(|pin| pin.good.clone());
        // From before a restart, or from another leader.
        if good != self.good
            && let Some(good) = &good
            && let Ok(files) = self.files(good)
        {
            let limits = &self.config.limits;
            let good = manifest::load_files(files.files, files.problems, limits, &BTreeMap::new());
            self.last_good.prime(&good);
        }
        let files = self.files(commit)?;
        let limits = &self.config.limits;
        let again = &mut self.again;
        again.set_files(files.files, files.problems);
        let places = ExpectedRoots { roots: Vec::new(), lost: files.lost };
        let mut reading =
            self.last_good.load_with_fallback(&places, |stand_ins| again.load(limits, stand_ins));
        if reading.desired.instances.is_empty() && !reading.is_incomplete {
            let source = EmptyCommit::NoProcesses(commit_files::path_prefix(&self.config.path));
            return Err(SourceError::Empty { tip: commit.to_owned(), source });
        }
        // A commit is complete: nothing in it is unread, unless it is broken.
        reading.may_prune = !reading.is_incomplete;
        reading.commit = Some(commit.to_owned());
        if !reading.is_incomplete {
            good = Some(commit.to_owned());
        }
        self.good.clone_from(&good);
        self.keep(commit)?;
        self.is_untidy = true;
        Ok((reading, LastCommit { commit: commit.to_owned(), good }))
    }

    /// Adds a reference that protects a commit from garbage collection if the branch is rewound.
    fn keep(&self, commit: &str) -> Result<(), RepositoryError> {
        let taken = format!(
            "refs/abide/taken/{}",
            digest(&format!("{}\n{}", self.config.owner, self.config.reference))
        );
        let kept = self.program.local(&["update-ref", &taken, commit], &[], 1000)?;
        match kept.is_well() {
            true => Ok(()),
            false => Err(RepositoryError::Keep { commit: commit.to_owned(), stderr: kept.stderr }),
        }
    }

    /// The commit that was active before a restart, if it is still in the mirror and still acceptable.
    fn reload_last_commit(&mut self, pin: &LastCommit) -> Option<(SourceState, LastCommit)> {
        self.verify(&pin.commit).and_then(|()| self.load_commit(&pin.commit, Some(pin))).ok()
    }

    fn files(&self, commit: &str) -> Result<CommitFiles, SourceError> {
        commit_files::files(&self.program, commit, &self.config.path, &self.config.limits)
    }
}

fn refused(tip: &str, why: SignatureRefusal) -> SourceError {
    SourceError::NotSigned { tip: tip.to_owned(), source: Arc::new(why) }
}

/// References that a name may mean, in order of precedence. git prefers a tag over a branch of the same name: then a
/// user who may only push tags could replace a protected branch.
fn candidate_refs(name: &str) -> Vec<String> {
    let is_id = name.len() >= 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    match name == "HEAD" || name.starts_with("refs/") || is_id {
        true => vec![name.to_owned()],
        false => ["refs/heads/", "refs/tags/", "refs/"].map(|place| format!("{place}{name}")).into(),
    }
}

/// Watchers of one repository share a mirror, whatever branches they follow.
pub fn mirror(config: &GitConfig) -> PathBuf {
    config.folder.join(digest(&config.shown_url()))
}

/// A name for a directory or a reference.
fn digest(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
}
