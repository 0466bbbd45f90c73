//! What is broken stays as it last was: the rule that all sources share.
//!
//! A file that cannot be read or has an error is replaced by the last text of it that was good, and so is everything below
//! a folder that cannot be read; what suddenly declares nothing at all is no wish. The texts are kept here, the last reading by the source.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Finish, Reading};
use crate::manifest::{Given, Loaded, Problem, Severity, Spliced, StandIn};
use crate::model::Desired;
use crate::reconcile::of_desired;

pub struct Kept {
    finish: Finish,
    /// The last good text of each file.
    good: BTreeMap<String, StandIn>,
    /// The problems of the last reading.
    told: Vec<String>,
}

impl Kept {
    pub fn new(finish: Finish) -> Kept {
        Kept { finish, good: BTreeMap::new(), told: Vec::new() }
    }

    /// Texts that are known to have been good.
    pub fn prime(&mut self, loaded: &Loaded) {
        self.keep(loaded, &bad_files(&loaded.problems));
    }

    /// A reading of what `load` finds, which is asked a second time with the good texts of what is bad.
    pub fn take(&mut self, mut load: impl FnMut(&BTreeMap<String, StandIn>) -> Loaded) -> Reading {
        let mut loaded = load(&BTreeMap::new());
        let bad = bad_files(&loaded.problems);
        self.keep(&loaded, &bad);
        let problems = std::mem::take(&mut loaded.problems);
        let is_incomplete = !bad.is_empty();
        let stand_ins: BTreeMap<String, StandIn> = bad.iter().flat_map(|file| self.below(file)).collect();
        let lacks = bad.iter().any(|file| self.below(file).next().is_none());
        if !stand_ins.is_empty() {
            loaded = load(&stand_ins);
        }
        (self.finish)(&mut loaded.desired);
        let told: Vec<String> = problems
            .iter()
            .map(|problem| {
                format!("{}:{}:{} {}", problem.file, problem.line, problem.column, problem.message)
            })
            .collect();
        let is_news = told != self.told;
        self.told = told;
        let texts = loaded.given();
        let (files, desired) = (loaded.files, loaded.desired);
        let revision = of_desired(&desired);
        Reading {
            desired: Arc::new(desired),
            revision,
            problems,
            is_incomplete,
            lacks,
            may_prune: false,
            is_news,
            files,
            commit: None,
            texts,
        }
    }

    /// Puts a few files into a reading that was whole: nothing else is touched.
    pub fn put_in(&mut self, spliced: Spliced, last: &mut Reading) {
        let instances = spliced.wants.into_iter().collect();
        let mut some = Desired { instances, policies: Vec::new() };
        (self.finish)(&mut some);
        // Whoever shows the last look may still have it.
        Arc::make_mut(&mut last.desired).instances.extend(some.instances);
        for (given, text) in spliced.texts {
            self.good.insert(given.name.clone(), StandIn { home: given.home.clone(), text });
            if let Ok(at) = last.texts.binary_search_by(|text| text.name.cmp(&given.name)) {
                last.texts[at] = given;
            }
        }
        last.revision = of_desired(&last.desired);
        last.is_news = false;
    }

    /// A reading without a single instance, after one with some: a directory that is not there, more often than a wish.
    pub fn unless_gone(mut reading: Reading, last: &mut Reading) -> Reading {
        if reading.desired.instances.is_empty() && !last.desired.instances.is_empty() {
            reading.is_incomplete = true;
            reading.desired = std::mem::take(&mut last.desired);
            reading.texts = std::mem::take(&mut last.texts);
            reading.revision = std::mem::take(&mut last.revision);
        }
        reading
    }

    fn keep(&mut self, loaded: &Loaded, bad: &BTreeSet<Arc<str>>) {
        // What is gone is kept only while something is broken: it may only be out of sight.
        if bad.is_empty() {
            self.good.clear();
        }
        let good = loaded.texts().filter(|(name, _, _)| !bad.contains(*name));
        self.good.extend(good.map(|(name, home, text)| {
            (name.to_owned(), StandIn { home: home.to_owned(), text: Arc::clone(text) })
        }));
    }

    /// The good texts of a file, or of everything below a folder.
    fn below(&self, name: &str) -> impl Iterator<Item = (String, StandIn)> {
        let folder = format!("{}/", name.trim_end_matches('/'));
        let own = self.good.get_key_value(name);
        let inside = self.good.range(folder.clone()..).take_while(move |(name, _)| name.starts_with(&folder));
        own.into_iter().chain(inside).map(|(name, good)| (name.clone(), good.clone()))
    }

    /// Texts that were in force before this began, for files of which nothing better is known. Are there any?
    pub fn recall(&mut self, texts: Vec<Given>) -> bool {
        let before = self.good.len();
        for Given { name, home, content, .. } in texts {
            if let Ok(text) = std::str::from_utf8(&content) {
                self.good.entry(name).or_insert_with(|| StandIn { home, text: text.into() });
            }
        }
        self.good.len() > before
    }
}

fn bad_files(problems: &[Problem]) -> BTreeSet<Arc<str>> {
    let errors = problems.iter().filter(|problem| problem.severity == Severity::Error);
    errors.map(|problem| Arc::clone(&problem.file)).collect()
}
