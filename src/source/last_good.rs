//! Last good versions of broken files: the rule that all sources share.
//!
//! A file that is unreadable or has an error is replaced by its last good text, and so is everything below an
//! unreadable directory. A source without any declaration counts as broken. If two files claim the same thing, the
//! one that had it keeps it. If a last good text is no longer valid (another file no longer declares its group, for
//! example), the whole last state stays active. The texts are kept here, the last state by the source.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{PostProcess, SourceState};
use crate::inventory::InventoryFeed;
use crate::manifest::{Code, FileContent, Loaded, Problem, ReplacementText, Severity, SpliceResult};
use crate::model::{Desired, ManifestRevision};

pub struct LastGood {
    finish: PostProcess,
    /// The last good text of each file.
    good: BTreeMap<String, ReplacementText>,
    /// The problems of the last read.
    reported: Vec<String>,
    /// The active revision's texts were added.
    is_recalled: bool,
    inventories: Option<InventoryInput>,
}

/// The inventories of the manifests.
struct InventoryInput {
    feed: Arc<InventoryFeed>,
    /// The feed's version at the last load.
    version: Option<u64>,
}

/// Maximum wait for the first read of an inventory. After that the manifests are loaded without it, and again later.
const FIRST_READ_TIMEOUT: Duration = Duration::from_secs(8);

/// Expected contents, and what of it is unreachable.
#[derive(Default)]
pub struct ExpectedRoots {
    /// Each of these must declare something.
    pub roots: Vec<String>,
    /// Dangling symlinks.
    pub lost: Vec<String>,
}

type FileSet = BTreeSet<Arc<str>>;

impl LastGood {
    pub fn new(finish: PostProcess) -> LastGood {
        LastGood {
            finish,
            good: BTreeMap::new(),
            reported: Vec::new(),
            is_recalled: false,
            inventories: None,
        }
    }

    pub fn use_inventories(&mut self, feed: Arc<InventoryFeed>) {
        self.inventories = Some(InventoryInput { feed, version: None });
    }

    /// Whether inventories changed since the last load.
    pub fn has_new_inventories(&self) -> bool {
        let is_new =
            |input: &InventoryInput| input.version.is_some_and(|version| version != input.feed.version());
        self.inventories.as_ref().is_some_and(is_new)
    }

    /// Adds texts that are known to be good.
    pub fn prime(&mut self, loaded: &Loaded) {
        self.store_good(loaded, &bad_files(&loaded.problems));
    }

    /// Reads with `load`, and again with last good texts in place of broken files.
    pub fn load_with_fallback(
        &mut self,
        places: &ExpectedRoots,
        mut load: impl FnMut(&BTreeMap<String, ReplacementText>) -> Loaded,
    ) -> SourceState {
        let feed = self.inventories.as_ref().map(|input| Arc::clone(&input.feed));
        // A last good version takes precedence: it is part of a state that was good as a whole.
        let mut load = |stand_ins: &BTreeMap<String, ReplacementText>| {
            let mut all = feed.as_ref().map(|feed| feed.stand_ins()).unwrap_or_default();
            all.extend(stand_ins.iter().map(|(name, text)| (name.clone(), text.clone())));
            load(&all)
        };
        let mut loaded = self.load_with_inventories(&mut load);
        let is_empty = loaded.desired.instances.is_empty() && loaded.errors() == 0;
        let unseen = self.missing_problems(places, &loaded);
        loaded.problems.extend(unseen);
        let problems = std::mem::take(&mut loaded.problems);
        let mut bad = bad_files(&problems);
        let is_incomplete = !bad.is_empty();
        let lacks = bad.iter().any(|file| self.good_below(file).next().is_none());
        let (known, mut blank): (FileSet, FileSet) = self
            .broken_binding_files(&loaded, &bad)
            .into_iter()
            .partition(|file| self.good.contains_key(&**file));
        bad.extend(known);
        let mut is_frozen = false;
        self.resolve_conflicts(&loaded, &mut bad, &mut blank);
        while !is_frozen {
            let stand_ins = self.stand_ins(&bad, &blank, &loaded);
            if stand_ins.is_empty() {
                break;
            }
            loaded = load(&stand_ins);
            // An unreadable file has only its last good text.
            loaded.problems.retain(|problem| !matches!(problem.code, Code::Unreadable | Code::TooLarge));
            let still = bad_files(&loaded.problems);
            // A last good text is no longer valid: another file changed something that it needs.
            is_frozen = still.iter().any(|file| bad.contains(file) && self.good.contains_key(&**file));
            let known = (bad.len(), blank.len());
            bad.extend(still);
            self.resolve_conflicts(&loaded, &mut bad, &mut blank);
            if known == (bad.len(), blank.len()) {
                break;
            }
        }
        if is_frozen {
            let all = loaded.texts().map(|(name, _, _)| Arc::from(name));
            let (known, unknown): (FileSet, FileSet) =
                all.partition(|name: &Arc<str>| self.good.contains_key(&**name));
            let known =
                known.into_iter().chain(self.good.keys().map(|name| Arc::from(name.as_str()))).collect();
            loaded = load(&self.stand_ins(&known, &unknown, &loaded));
        } else if !is_empty {
            bad.extend(blank);
            self.store_good(&loaded, &bad);
        }
        (self.finish)(&mut loaded.desired);
        let has_changed = self.record_problems(&problems);
        let texts = Arc::new(loaded.file_contents());
        let (files, desired) = (loaded.files, loaded.desired);
        let revision = ManifestRevision::of(&desired);
        SourceState {
            desired: Arc::new(desired),
            revision,
            problems,
            is_incomplete,
            has_unknown_files: lacks,
            may_prune: false,
            changed_since_last: has_changed,
            files,
            commit: None,
            texts,
        }
    }

    /// Loads without last good versions, and adds the problems of inventories. New ones are read first.
    fn load_with_inventories(
        &mut self,
        load: &mut impl FnMut(&BTreeMap<String, ReplacementText>) -> Loaded,
    ) -> Loaded {
        let Some(InventoryInput { feed, version }) = &mut self.inventories else {
            return load(&BTreeMap::new());
        };
        *version = Some(feed.version());
        let mut loaded = load(&BTreeMap::new());
        if feed.set_wanted(&loaded.inventories()) {
            feed.wait_for_first_read(FIRST_READ_TIMEOUT);
            *version = Some(feed.version());
            loaded = load(&BTreeMap::new());
        }
        loaded.problems.extend(feed.problems());
        loaded
    }

    /// Whether the problems differ from those of the last read.
    fn record_problems(&mut self, problems: &[Problem]) -> bool {
        let line = |problem: &Problem| {
            format!("{}:{}:{} {}", problem.file, problem.line, problem.column, problem.message)
        };
        let reported: Vec<String> = problems.iter().map(line).collect();
        let has_changed = reported != self.reported;
        self.reported = reported;
        has_changed
    }

    /// Problems of roots that declare nothing, and of dangling symlinks.
    fn missing_problems(&self, places: &ExpectedRoots, loaded: &Loaded) -> Vec<Problem> {
        let is_empty = loaded.desired.instances.is_empty() && loaded.errors() == 0;
        let is_bare = |root: &&String| {
            let mut files = loaded.documents.iter().map(|document| loaded.file_of(document));
            !files.any(|file| is_below(file, root))
                && !loaded.problems.iter().any(|one| is_below(&one.file, root))
        };
        let bare =
            places.roots.iter().filter(|root| is_empty || is_bare(root)).map(|root| empty_problem(root));
        // Whether there ever was a file behind it is known once the active revision is.
        let matters = |link: &&String| !self.is_recalled || self.good_below(link).next().is_some();
        let lost = places.lost.iter().filter(matters).map(|link| {
            let message =
                "dangling symbolic link: the last good version of its target stays active".to_owned();
            Problem::of_file(link.as_str().into(), Code::Unreadable, message, None)
        });
        bare.chain(lost).collect()
    }

    /// Of files that claim the same thing, those that were good before keep their version, and the others are left
    /// out.
    fn resolve_conflicts(&self, loaded: &Loaded, bad: &mut FileSet, blank: &mut FileSet) {
        for (one, other) in loaded.conflicting_files() {
            let known = [one, other].map(|file| self.good.contains_key(&**file));
            if known == [false, false] {
                continue;
            }
            for (file, is_known) in [one, other].into_iter().zip(known) {
                let files = if is_known { &mut *bad } else { &mut *blank };
                files.insert(Arc::clone(file));
            }
        }
    }

    /// Broken files that were never good and may apply to others (a Policy, Defaults, an Overlay): without them, the desired
    /// state of others is unknown.
    fn broken_binding_files(&self, loaded: &Loaded, bad: &FileSet) -> FileSet {
        let unknown =
            loaded.texts().filter(|(name, _, _)| bad.contains(*name) && !self.good.contains_key(*name));
        let homes: Vec<&Path> =
            unknown.filter(|(_, _, text)| binds_others(text)).map(|(_, home, _)| home).collect();
        let below = |home: &Path| homes.iter().any(|above| home.starts_with(above));
        loaded.texts().filter(|(_, home, _)| below(home)).map(|(name, _, _)| Arc::from(name)).collect()
    }

    /// Last good texts for broken files, and none for files that are left out.
    fn stand_ins(
        &self,
        bad: &FileSet,
        blank: &FileSet,
        loaded: &Loaded,
    ) -> BTreeMap<String, ReplacementText> {
        let mut all: BTreeMap<String, ReplacementText> =
            bad.iter().flat_map(|file| self.good_below(file)).collect();
        for (name, home, _) in loaded.texts().filter(|(name, _, _)| blank.contains(*name)) {
            all.insert(name.to_owned(), ReplacementText { scope_dir: home.to_owned(), text: "".into() });
        }
        all
    }

    /// Patches a few files into a complete state.
    pub fn apply_splice(&mut self, spliced: SpliceResult, last: &mut SourceState) {
        let instances = spliced.wants.into_iter().collect();
        let mut some = Desired { instances, policies: Vec::new() };
        (self.finish)(&mut some);
        // A displayed result may still share it.
        Arc::make_mut(&mut last.desired).instances.extend(some.instances);
        for (given, text) in spliced.texts {
            self.good
                .insert(given.name.clone(), ReplacementText { scope_dir: given.scope_dir.clone(), text });
            if let Ok(at) = last.texts.binary_search_by(|text| text.name.cmp(&given.name)) {
                Arc::make_mut(&mut last.texts)[at] = given;
            }
        }
        last.revision = ManifestRevision::of(&last.desired);
        last.changed_since_last = false;
    }

    /// A read without a single instance, after one with some: more often a missing directory than an intention.
    pub fn reject_empty(mut reading: SourceState, last: &mut SourceState) -> SourceState {
        if reading.desired.instances.is_empty() && !last.desired.instances.is_empty() {
            reading.is_incomplete = true;
            reading.desired = std::mem::take(&mut last.desired);
            reading.texts = std::mem::take(&mut last.texts);
            reading.revision = std::mem::take(&mut last.revision);
        }
        reading
    }

    fn store_good(&mut self, loaded: &Loaded, bad: &FileSet) {
        // Texts of missing files are kept only while something is broken: a file may only be unreachable.
        if bad.is_empty() {
            self.good.clear();
        }
        let good = loaded.texts().filter(|(name, _, _)| !bad.contains(*name));
        self.good.extend(good.map(|(name, home, text)| {
            (name.to_owned(), ReplacementText { scope_dir: home.to_owned(), text: Arc::clone(text) })
        }));
    }

    /// The last good texts of a file, or of everything below a directory.
    fn good_below(&self, name: &str) -> impl Iterator<Item = (String, ReplacementText)> {
        let folder = path_prefix(name);
        let own = self.good.get_key_value(name);
        let inside = self.good.range(folder.clone()..).take_while(move |(name, _)| name.starts_with(&folder));
        own.into_iter().chain(inside).map(|(name, good)| (name.clone(), good.clone()))
    }

    /// Adds texts of the active revision, for files without a newer good version. Returns whether there are any.
    pub fn restore_last_good(&mut self, texts: Vec<FileContent>) -> bool {
        let before = (self.good.len(), std::mem::replace(&mut self.is_recalled, true));
        for FileContent { name, scope_dir: home, content, .. } in texts {
            if let Ok(text) = std::str::from_utf8(&content) {
                self.good
                    .entry(name)
                    .or_insert_with(|| ReplacementText { scope_dir: home, text: text.into() });
            }
        }
        (self.good.len(), true) != before
    }
}

/// Prefix of the names below a path. The root of a repository and the current directory have none.
fn path_prefix(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!("{}/", name.trim_end_matches('/')) }
}

fn is_below(file: &str, place: &str) -> bool {
    file == place || file.starts_with(&path_prefix(place))
}

fn empty_problem(place: &str) -> Problem {
    let message = "no process is declared here: the last good version stays active".to_owned();
    let hint =
        "to remove processes, declare them with `state: absent`, or remove some of them and keep the others";
    Problem::of_file(place.into(), Code::Nothing, message, Some(hint.to_owned()))
}

/// Whether an unparsable text looks like a document that others depend on.
fn binds_others(text: &str) -> bool {
    text.lines().any(|line| {
        let line = line.trim_start().trim_start_matches(['{', '"', '\'', '-', ' ']);
        let value = line.strip_prefix("kind").map(|rest| rest.trim_start_matches(['"', '\'', ':', ' ']));
        value
            .is_some_and(|value| ["Policy", "Defaults", "Overlay"].iter().any(|kind| value.starts_with(kind)))
    })
}

fn bad_files(problems: &[Problem]) -> FileSet {
    let errors = problems.iter().filter(|problem| problem.severity == Severity::Error);
    errors.map(|problem| Arc::clone(&problem.file)).collect()
}
