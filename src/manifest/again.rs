//! Reading a tree again: what did not change is neither read nor parsed anew.
//!
//! A file is the same if its metadata are, and they had been the same for a while when it was read: two writes within one
//! tick of a file system's clock look alike. A file of which that is not certain is read, and parsed only if its text
//! is another. What documents say of each other is judged anew every time: that looks at values, not at texts.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::find::{self, Candidate, Facts, Found, Given};
use super::text::Source;
use super::{Limits, Loaded, Parts, Problem, load_found};

/// What is remembered of a tree between two readings, all of which are under the same limits.
#[derive(Default)]
pub struct Again {
    found: Found,
    files: HashMap<Arc<str>, Known>,
}

struct Known {
    facts: Option<Facts>,
    source: Source,
    parts: Arc<Parts>,
}

/// A file that changed so lately may change again without its metadata telling.
const YOUNG_SECS: i64 = 2;

impl Again {
    /// Walks the paths. Is every file as it was when it was last read?
    pub fn is_unchanged(&mut self, paths: &[PathBuf], limits: &Limits) -> bool {
        let found = find::find(paths, limits);
        let before = std::mem::replace(&mut self.found, found);
        let same = |(now, then): (&Candidate, &Candidate)| now.name == then.name && now.home == then.home;
        if self.found.problems != before.problems
            || self.found.files.len() != before.files.len()
            || !self.found.files.iter().zip(&before.files).all(same)
        {
            return false;
        }
        // A file whose metadata do not tell is read.
        let is_old = is_old();
        for file in &self.found.files {
            let Some(known) = self.files.get_mut(&file.name) else { return false };
            if known.facts.is_some() && known.facts == file.facts {
                continue;
            }
            match find::read(file, limits) {
                Ok(source) if source.text == known.source.text => known.facts = file.facts.filter(&is_old),
                Ok(_) | Err(_) => return false,
            }
        }
        true
    }

    /// The same for files that somebody else has found and read, with the problems he met.
    pub fn take(&mut self, files: Vec<Given>, problems: Vec<Problem>) {
        self.found = find::given(files, problems);
    }

    /// What was last walked or taken, with other texts in place of some files'.
    pub fn load(&mut self, limits: &Limits, stand_ins: &BTreeMap<String, Arc<str>>) -> Loaded {
        let found = std::mem::take(&mut self.found);
        let loaded = load_found(&found, limits, stand_ins, Some(self));
        self.found = found;
        loaded
    }

    /// A file that need not be read.
    pub(super) fn known(&self, file: &Candidate) -> Option<(Source, Arc<Parts>)> {
        let known = self.files.get(&file.name)?;
        (known.facts.is_some() && known.facts == file.facts)
            .then(|| (known.source.clone(), Arc::clone(&known.parts)))
    }

    /// A text that need not be parsed.
    pub(super) fn parsed(&self, source: &Source) -> Option<Arc<Parts>> {
        let known = self.files.get(&source.name)?;
        (known.source.text == source.text && known.source.json == source.json)
            .then(|| Arc::clone(&known.parts))
    }

    /// From here on, these files are known, and no others.
    pub(super) fn keep<'a>(&mut self, read: impl Iterator<Item = (&'a Candidate, &'a Source, Arc<Parts>)>) {
        let is_old = is_old();
        self.files = read
            .map(|(file, source, parts)| {
                let facts = file.facts.filter(&is_old);
                (source.name.clone(), Known { facts, source: source.clone(), parts })
            })
            .collect();
    }
}

fn is_old() -> impl Fn(&Facts) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
    move |facts| facts.changed_secs() + YOUNG_SECS < now
}
