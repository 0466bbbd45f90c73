//! One poll of the repository: fetch, verify the tip, read its files. Runs on its own thread, and may take minutes.
//!
//! A tip is accepted only if it descends from the last accepted commit (or was accepted by id), has a valid signature
//! where required, and declares something. Otherwise the last commit stays active, and a [`SourceError`] is reported.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::super::last_good::{ExpectedRoots, LastGood};
use super::super::{PostProcess, SourceError, SourceState};
use super::command::GitCommand;
use super::config::{GitConfig, Signatures};
use super::signature;
use super::tree::{FoundFile, FoundManifests, Tree};
use crate::manifest::{self, FileContent, Limits, Loaded, Problem, StandIn};

/// Maximum size of a commit's listing: about two million files.
const MAX_LISTING_BYTES: u64 = 256 << 20;
/// Maximum number of commits that `--signatures all` verifies at once.
const MAX_VERIFIED: usize = 10_000;
/// Maximum length of a symlink's target.
const MAX_LINK_BYTES: u64 = 4096;

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

/// The files of a commit, valid or not.
pub struct CommitFiles {
    pub files: Vec<FileContent>,
    pub problems: Vec<Problem>,
    /// Dangling symlinks.
    pub lost: Vec<String>,
}

impl Poller {
    pub fn new(config: Arc<GitConfig>, finish: PostProcess, stop: Arc<AtomicBool>) -> Poller {
        let mirror = mirror(&config);
        let program = GitCommand { mirror, timeout: config.timeout, stop };
        let again = manifest::IncrementalLoader::default();
        let mut last_good = LastGood::new(finish);
        // The active revision is known by its commit.
        last_good.restore_last_good(Vec::new());
        Poller { config, program, again, last_good, good: None, is_untidy: false }
    }

    /// `pin` is the last accepted commit, `have` the active one.
    pub fn poll(&mut self, pin: Option<&LastCommit>, have: Option<&str>) -> PollResult {
        // The lock excludes other users of the mirror until this returns.
        let lock = self.lock();
        let tip = lock.as_ref().map_err(String::clone).and_then(|lock| self.fetch(lock));
        let judged = tip.map_err(|why| SourceError::Unreachable { why }).and_then(|tip| {
            self.check_not_shallow(&tip)?;
            self.check_tip(&tip, pin)?;
            match have == Some(&tip) {
                true => Ok(None),
                false => self.load_commit(&tip, pin).map(Some),
            }
        });
        match judged {
            Ok(taken) => PollResult { taken, trouble: None },
            // After a restart the last accepted commit is in the mirror, and becomes active again.
            Err(trouble) => PollResult {
                taken: pin.filter(|_| have.is_none()).and_then(|pin| self.reload_last_commit(pin)),
                trouble: Some(trouble),
            },
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
    fn lock(&self) -> Result<File, String> {
        let (folder, mirror) = (&self.config.folder, &self.program.mirror);
        let failed = |what: &Path, error: std::io::Error| format!("cannot use {}: {error}", what.display());
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
            if begin.elapsed() > self.config.timeout || self.program.stop.load(Ordering::SeqCst) {
                return Err(format!("another process uses {} and does not release it", mirror.display()));
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
    fn fetch(&self, lock: &File) -> Result<String, String> {
        let name = &self.config.reference;
        let address = self.config.address()?;
        let shown = self.config.shown_url();
        if !self.program.mirror.join("HEAD").is_file() {
            let mirror = self.program.mirror.display().to_string();
            let made = self.program.local(&["init", "--quiet", "--bare", "--template=", &mirror], &[], 0)?;
            if !made.is_well() {
                return Err(format!("cannot create the mirror {mirror}: {}", made.stderr));
            }
        }
        let seen = format!("refs/abide/seen/{}", digest(name));
        if self.verifies_all() {
            // git keeps the reference and reports success when it refuses a shallow history.
            self.program.local(&["update-ref", "-d", &seen], &[], 1000)?;
        }
        // A server that declares a commit shallow hides its ancestors.
        let shallow = if self.verifies_all() { "--no-update-shallow" } else { "--update-shallow" };
        let cannot = |why: &str| format!("cannot fetch {name} from {shown}: {why}");
        let mut missing = String::new();
        for name in candidate_refs(name) {
            let what = format!("+{name}:{seen}");
            let flags = ["fetch", "--quiet", "--no-tags", "--no-prune", "--no-write-fetch-head"];
            let more = ["--no-recurse-submodules", shallow, "--", &address.url, &what];
            let args: Vec<&str> = flags.into_iter().chain(more).collect();
            let fetched = self.program.remote(&args, lock, &address).map_err(|why| cannot(&why))?;
            if fetched.is_well() {
                missing.clear();
                break;
            }
            if !fetched.stderr.contains("couldn't find remote ref") {
                return Err(cannot(&fetched.stderr));
            }
            missing = fetched.stderr;
        }
        if !missing.is_empty() {
            return Err(cannot(&missing));
        }
        if self.verifies_all() && !self.program.local(&["show-ref", "--verify", &seen], &[], 1000)?.is_well()
        {
            return Err(cannot(
                "the server declares a shallow history, and --signatures all needs every commit",
            ));
        }
        let commit = format!("{seen}^{{commit}}");
        let tip = self.program.local(&["rev-parse", "--verify", &commit], &[], 1000)?;
        match (tip.is_well(), String::from_utf8(tip.out)) {
            (true, Ok(tip)) => Ok(tip.trim().to_owned()),
            (true, Err(_)) | (false, _) => Err(cannot(&tip.stderr)),
        }
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
        let mirror = self.program.mirror.display();
        let why = format!("the mirror {mirror} is shallow, so not every commit can be verified; delete it");
        Err(SourceError::NotSigned { tip: tip.to_owned(), why })
    }

    fn check_tip(&self, tip: &str, pin: Option<&LastCommit>) -> Result<(), SourceError> {
        let broken = |why: String| SourceError::Unreachable { why };
        let Some(pin) = pin.filter(|pin| pin.commit != tip) else { return self.verify(tip) };
        let args = ["merge-base", "--is-ancestor", &pin.commit, tip];
        // An unknown commit is not an ancestor, either.
        let follows = self.program.local(&args, &[], 1000).map_err(broken)?.is_well();
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
        let refused = |why: String| SourceError::NotSigned { tip: tip.to_owned(), why };
        let most = (MAX_VERIFIED + 1).to_string();
        let (without, count) = (format!("^{last}"), format!("--max-count={most}"));
        let listed = self.program.local(&["rev-list", &count, tip, &without], &[], 1 << 20);
        let listed = listed.map_err(|why| SourceError::Unreachable { why })?;
        if !listed.is_well() {
            // Only a tip that was accepted by id gets here without the last accepted commit.
            return Err(refused(format!("cannot list the commits since {last}: {}", listed.stderr)));
        }
        let commits = String::from_utf8_lossy(&listed.out).into_owned();
        let commits: Vec<&str> = commits.lines().filter(|commit| *commit != tip).collect();
        if commits.len() >= MAX_VERIFIED {
            return Err(refused(format!("it brings more than {MAX_VERIFIED} commits, too many to verify")));
        }
        let Some(signers) = &self.config.signers else { return Ok(()) };
        signature::verify_all(&self.program, &commits, signers)
            .map_err(|(commit, why)| refused(format!("it contains commit {commit}: {why}")))
    }

    fn verify(&self, commit: &str) -> Result<(), SourceError> {
        let Some(signers) = &self.config.signers else { return Ok(()) };
        let refused = |why| SourceError::NotSigned { tip: commit.to_owned(), why };
        signature::verify(&self.program, commit, signers).map_err(refused)
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
            let why = format!("no process is declared {}", path_prefix(&self.config.path));
            return Err(SourceError::Empty { tip: commit.to_owned(), why });
        }
        // A commit is complete: nothing in it is unread, unless it is broken.
        reading.may_prune = !reading.is_incomplete;
        reading.commit = Some(commit.to_owned());
        if !reading.is_incomplete {
            good = Some(commit.to_owned());
        }
        self.good.clone_from(&good);
        // A reference protects the commit from garbage collection if the branch is rewound.
        let taken = format!(
            "refs/abide/taken/{}",
            digest(&format!("{}\n{}", self.config.owner, self.config.reference))
        );
        let kept = self.program.local(&["update-ref", &taken, commit], &[], 1000);
        match kept {
            Ok(kept) if kept.is_well() => {}
            Ok(kept) => {
                return Err(SourceError::Unreachable {
                    why: format!("cannot keep {commit}: {}", kept.stderr),
                });
            }
            Err(why) => return Err(SourceError::Unreachable { why }),
        }
        self.is_untidy = true;
        Ok((reading, LastCommit { commit: commit.to_owned(), good }))
    }

    /// The commit that was active before a restart, if it is still in the mirror and still acceptable.
    fn reload_last_commit(&mut self, pin: &LastCommit) -> Option<(SourceState, LastCommit)> {
        self.verify(&pin.commit).and_then(|()| self.load_commit(&pin.commit, Some(pin))).ok()
    }

    fn files(&self, commit: &str) -> Result<CommitFiles, SourceError> {
        files(&self.program, commit, &self.config.path, &self.config.limits)
    }
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

/// The manifests of a commit below a path.
pub fn files(
    program: &GitCommand,
    commit: &str,
    path: &Path,
    limits: &Limits,
) -> Result<CommitFiles, SourceError> {
    let cannot = |why: String| SourceError::Unreachable {
        why: format!(
            "cannot read commit {commit}: {why}; the mirror {} can be deleted: it is fetched again",
            program.mirror.display()
        ),
    };
    let root = path;
    let path = path.to_string_lossy().into_owned();
    let mut args = vec!["ls-tree", "-r", "-t", "-l", "-z", "--full-tree", commit];
    args.extend((!path.is_empty()).then_some(path.as_str()));
    let listed = program.local(&args, &[], MAX_LISTING_BYTES).map_err(cannot)?;
    if !listed.is_well() {
        return Err(cannot(listed.stderr));
    }
    let mut tree = Tree::parse(&listed.out).map_err(cannot)?;
    let empty = |why: String| SourceError::Empty { tip: commit.to_owned(), why };
    if tree.is_empty() {
        return Err(empty(match path.is_empty() {
            true => "it holds nothing".to_owned(),
            false => format!("it has no {path}"),
        }));
    }
    let links = tree.links().into_iter().filter(|(_, bytes)| *bytes <= MAX_LINK_BYTES);
    let links: Vec<(String, u64)> = links.map(|(object, bytes)| (object.to_owned(), bytes)).collect();
    let targets = contents(program, &links).map_err(cannot)?;
    let targets = targets.into_iter().map(|target| OsString::from_vec(target.to_vec()));
    tree.targets = links.into_iter().map(|(object, _)| object).zip(targets).collect();
    let mut choice = tree.find_manifests(root);
    for (link, there) in std::mem::take(&mut choice.outside) {
        let there = there.to_string_lossy();
        let args = ["ls-tree", "-l", "-z", "--full-tree", commit, &*there];
        let listed = program.local(&args, &[], MAX_LISTING_BYTES).map_err(cannot)?;
        match Tree::parse(&listed.out).map_err(cannot)?.is_folder(Path::new(&*there)) {
            Some(true) => choice.leads_out(&link),
            Some(false) => {}
            None => choice.lost.push(manifest::display_path(&link)),
        }
    }
    let FoundManifests { files: chosen, mut problems, lost, .. } = choice;
    if chosen.is_empty() && problems.is_empty() {
        return Err(empty(format!("there is no *.yaml, *.yml or *.json {}", path_prefix(root))));
    }
    if let Some(problem) = manifest::too_large(&path, chosen.iter().map(|file| file.bytes), limits) {
        problems.push(problem);
        return Ok(CommitFiles { files: Vec::new(), problems, lost });
    }
    // Files that are too large are not requested.
    let (small, large): (Vec<FoundFile>, Vec<FoundFile>) =
        chosen.into_iter().partition(|file| file.bytes <= limits.file_bytes);
    let objects: Vec<(String, u64)> = small.iter().map(|file| (file.object.clone(), file.bytes)).collect();
    let contents = contents(program, &objects).map_err(cannot)?;
    let none = large.iter().map(|_| Arc::from([]));
    let files =
        small.iter().chain(&large).zip(contents.into_iter().chain(none)).map(|(file, content)| FileContent {
            name: file.path.to_string_lossy().into_owned(),
            scope_dir: file.scope_dir(),
            bytes: file.bytes,
            content,
        });
    Ok(CommitFiles { files: files.collect(), problems, lost })
}

/// The contents of objects, in the same order.
fn contents(program: &GitCommand, objects: &[(String, u64)]) -> Result<Vec<Arc<[u8]>>, String> {
    if objects.is_empty() {
        return Ok(Vec::new());
    }
    let asked: String = objects.iter().map(|(object, _)| format!("{object}\n")).collect();
    // Each object has a header line before it and a newline after it.
    let most = objects.iter().map(|(_, bytes)| bytes + 200).sum();
    let ended = program.local(&["cat-file", "--batch", "--buffer"], asked.as_bytes(), most)?;
    if !ended.is_well() {
        return Err(ended.stderr);
    }
    let mut rest = &ended.out[..];
    let mut contents = Vec::with_capacity(objects.len());
    for (object, bytes) in objects {
        let head = format!("{object} blob {bytes}\n");
        let (content, after) = rest
            .strip_prefix(head.as_bytes())
            .and_then(|rest| rest.split_at_checked(usize::try_from(*bytes).ok()?))
            .ok_or_else(|| format!("object {object} is missing or damaged"))?;
        contents.push(Arc::from(content));
        rest = after.strip_prefix(b"\n").unwrap_or(after);
    }
    Ok(contents)
}

pub fn load(files: &CommitFiles, limits: &Limits, stand_ins: &BTreeMap<String, StandIn>) -> Loaded {
    manifest::load_files(files.files.clone(), files.problems.clone(), limits, stand_ins)
}

fn path_prefix(path: &Path) -> String {
    match path.as_os_str().is_empty() {
        true => "in it".to_owned(),
        false => format!("below {}", path.display()),
    }
}

/// A name for a directory or a reference.
fn digest(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
}
