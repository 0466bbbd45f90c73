//! What was wanted before, so that it can be wanted again: the texts of every revision that was applied or taken.
//!
//! ```text
//! source/OWNER/taken         what is in force: its revision, its commit, and the source that it came from
//! snap/OWNER/rev/REVISION    what it was read from: names, and where their texts are
//! snap/OWNER/text/SUM        a text, or a part of a long one; revisions share those that did not change
//! ```
//! The last [`MOST`] revisions are kept. What is in force, its snapshot, and the end of older ones are one change, and only if
//! nobody else took something meanwhile: a snapshot that is listed is whole.
//!
//! The texts are the manifests as they were, with whatever secrets stand in them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::pin::{self, Pin};
use crate::clock;
use crate::manifest::Given;
use crate::model::Time;
use crate::store::{Error, Number, Outcome, Store, Txn};

/// So many revisions of an owner are kept.
pub const MOST: usize = 20;
/// A longer text is kept in parts, and so much is sent at once: other ends have a limit for one question.
const PART: usize = 1 << 20;
/// Somebody else takes things too: then we look again, but not for ever.
const TRIES: usize = 10;

/// A new word: from here on this is wanted.
pub struct Word<'a> {
    pub owner: &'a str,
    pub source: &'a str,
    pub revision: &'a str,
    pub commit: Option<&'a str>,
    pub texts: &'a [Given],
}

/// What is in force, and where it came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    pub source: String,
    pub revision: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub at: Time,
}

/// A revision that is kept, without its texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub revision: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub source: String,
    /// When it was last taken.
    pub at: Time,
    files: Vec<Kept>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    name: String,
    home: PathBuf,
    /// The sums of its parts.
    parts: Vec<String>,
}

fn revisions(owner: &str) -> String {
    format!("snap/{owner}/rev/")
}

fn text(owner: &str, sum: &str) -> String {
    format!("snap/{owner}/text/{sum}")
}

fn taken_place(owner: &str) -> String {
    format!("source/{owner}/taken")
}

/// What is in force, and the change that made it so (0: nothing ever was).
pub async fn taken<S: Store>(state: &S, owner: &str) -> Result<(Option<Taken>, Number), Error> {
    match state.get(&taken_place(owner)).await? {
        Some(entry) => Ok((serde_json::from_slice(&entry.value).ok(), entry.changed)),
        None => Ok((None, 0)),
    }
}

/// Every revision that is kept, the newest first.
pub async fn list<S: Store>(state: &S, owner: &str) -> Result<Vec<Snapshot>, Error> {
    let page = state.range(&revisions(owner), None, usize::MAX).await?;
    let read = |entry: &crate::store::Entry| serde_json::from_slice::<Snapshot>(&entry.value).ok();
    let mut all: Vec<Snapshot> = page.entries.iter().filter_map(read).collect();
    all.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.at));
    Ok(all)
}

/// The texts of a revision, as they were.
pub async fn texts<S: Store>(state: &S, owner: &str, snapshot: &Snapshot) -> Result<Vec<Given>, Error> {
    let mut files = Vec::with_capacity(snapshot.files.len());
    for Kept { name, home, parts } in &snapshot.files {
        let mut content = Vec::new();
        for sum in parts {
            let key = text(owner, sum);
            let missing = || Error::Corrupt { file: key.clone(), what: "it is not there".to_owned() };
            content.extend_from_slice(&state.get(&key).await?.ok_or_else(missing)?.value);
        }
        let (name, home, bytes) = (name.clone(), home.clone(), content.len() as u64);
        files.push(Given { name, home, bytes, content: content.into() });
    }
    Ok(files)
}

/// Puts a word in force, keeps it, and ends the pin that stood against it, which comes back.
pub async fn take<S: Store>(state: &S, word: &Word<'_>) -> Result<Option<Pin>, Error> {
    for _ in 0..TRIES {
        let (_, changed) = taken(state, word.owner).await?;
        let pin = pin::read(state, word.owner).await?.map(|(pin, _)| pin);
        let known = list(state, word.owner).await?;
        let (snapshot, parts) = snapshot(word);
        let Change { add, gone, unused } = change(&known, &snapshot);
        // Texts come first and alone: without the revision that names them they are nothing.
        let mut chunk = (Txn::default(), 0);
        for (sum, part) in parts.into_iter().filter(|(sum, _)| add.contains(sum.as_str())) {
            chunk.1 += part.len();
            chunk.0 = chunk.0.and(Txn::put(text(word.owner, &sum), part));
            if chunk.1 >= PART {
                state.txn(std::mem::take(&mut chunk).0).await?;
            }
        }
        let place = taken_place(word.owner);
        let mut txn = chunk.0.only_if(&place, changed).and(Txn::put(&place, now_taken(word, snapshot.at)));
        let value = serde_json::to_vec(&snapshot).unwrap_or_default();
        txn = txn.and(Txn::put(revisions(word.owner) + word.revision, value));
        for revision in gone {
            txn = txn.and(Txn::delete(revisions(word.owner) + revision));
        }
        for sum in unused {
            txn = txn.and(Txn::delete(text(word.owner, sum)));
        }
        if pin.is_some() {
            txn = txn.and(Txn::delete(pin::place(word.owner)));
        }
        match state.txn(txn).await? {
            Outcome::Written(_) => return Ok(pin),
            Outcome::Conflict(_) => {}
        }
    }
    Err(Error::Unreachable(format!("{} is changed by others all the time", taken_place(word.owner))))
}

fn now_taken(word: &Word<'_>, at: Time) -> Vec<u8> {
    let taken = Taken {
        source: word.source.to_owned(),
        revision: word.revision.to_owned(),
        commit: word.commit.map(str::to_owned),
        at,
    };
    serde_json::to_vec(&taken).unwrap_or_default()
}

/// What is to be kept of a word, and its texts in parts by their sums.
fn snapshot(word: &Word<'_>) -> (Snapshot, BTreeMap<String, Vec<u8>>) {
    let mut all = BTreeMap::new();
    let mut files = Vec::new();
    for Given { name, home, content, .. } in word.texts {
        let mut parts = Vec::new();
        for part in cut(content) {
            let sum = blake3::hash(part).to_hex()[..32].to_owned();
            all.entry(sum.clone()).or_insert_with(|| part.to_vec());
            parts.push(sum);
        }
        files.push(Kept { name: name.clone(), home: home.clone(), parts });
    }
    let snapshot = Snapshot {
        revision: word.revision.to_owned(),
        commit: word.commit.map(str::to_owned),
        source: word.source.to_owned(),
        at: clock::moment(),
        files,
    };
    (snapshot, all)
}

/// Parts of a text that are texts themselves: no character is cut.
fn cut(mut content: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while content.len() > PART {
        let is_start = |at: &usize| content[*at] & 0b1100_0000 != 0b1000_0000;
        let at = (1..=PART).rev().find(is_start).unwrap_or(PART);
        let (part, rest) = content.split_at(at);
        parts.push(part);
        content = rest;
    }
    parts.push(content);
    parts
}

/// What a new snapshot changes in what is kept.
#[derive(Debug, PartialEq, Eq)]
struct Change<'a> {
    /// Sums of texts that are not there yet.
    add: BTreeSet<&'a str>,
    /// Revisions that are too old now.
    gone: Vec<&'a str>,
    /// Sums of texts that nobody needs any more.
    unused: BTreeSet<&'a str>,
}

fn change<'a>(known: &'a [Snapshot], new: &'a Snapshot) -> Change<'a> {
    let others: Vec<&Snapshot> = known.iter().filter(|old| old.revision != new.revision).collect();
    let (stay, go) = others.split_at(others.len().min(MOST - 1));
    let sums =
        |snapshot: &'a Snapshot| snapshot.files.iter().flat_map(|file| &file.parts).map(String::as_str);
    let there: BTreeSet<&str> = known.iter().flat_map(sums).collect();
    let needed: BTreeSet<&str> = stay.iter().copied().chain([new]).flat_map(sums).collect();
    Change {
        add: sums(new).filter(|sum| !there.contains(sum)).collect(),
        gone: go.iter().map(|old| old.revision.as_str()).collect(),
        unused: there.difference(&needed).copied().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(revision: usize, sums: &[&str]) -> Snapshot {
        let parts = sums.iter().map(|sum| (*sum).to_owned()).collect();
        let files = vec![Kept { name: "a".to_owned(), home: "/".into(), parts }];
        let (source, at) = (String::new(), Time(revision as i64));
        Snapshot { revision: revision.to_string(), commit: None, source, at, files }
    }

    #[test]
    fn the_last_twenty_stay_with_what_they_share() {
        let known: Vec<Snapshot> =
            (0..20).rev().map(|nth| snapshot(nth, &["shared", &format!("own {nth}")])).collect();
        let new = snapshot(20, &["shared", "own 20"]);
        let changed = change(&known, &new);
        assert_eq!((changed.add, changed.gone), (["own 20"].into(), vec!["0"]));
        assert_eq!(changed.unused, ["own 0"].into());
        // One that comes back takes nobody's place.
        let again = snapshot(5, &["shared", "own 5"]);
        let none = Change { add: BTreeSet::new(), gone: Vec::new(), unused: BTreeSet::new() };
        assert_eq!(change(&known, &again), none);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let long = "ä".repeat(PART);
        let parts = cut(long.as_bytes());
        assert!(parts.len() > 1 && parts.iter().all(|part| part.len() <= PART));
        assert!(parts.iter().all(|part| std::str::from_utf8(part).is_ok()));
        assert_eq!(parts.concat(), long.as_bytes());
        assert_eq!(cut(b""), [b""]);
    }
}
