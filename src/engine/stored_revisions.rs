//! Stored revisions: the texts of every revision that was applied, so that `rollback` can return to it.
//!
//! ```text
//! source/OWNER/taken         the active revision: its digest, its commit, and its source
//! snap/OWNER/rev/REVISION    its file lists
//! snap/OWNER/list/SUM        some of its files: names, and the sums of their texts
//! snap/OWNER/text/SUM        a text, or a chunk of a long one
//! ```
//!
//! The list of a file follows from its name, and lists are short: a revision with one changed file adds one list and
//! one text, and shares all others. The last [`MAX_REVISIONS`] are kept. The active revision and its snapshot are
//! written in one transaction, and only if no other client activated a revision in between: a listed snapshot is
//! complete.
//!
//! The texts are the original manifests, including any secrets in them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::pin::{self, Pin};
use crate::clock;
use crate::manifest::FileContent;
use crate::model::{ManifestRevision, Time};
use crate::store::{Entry, Error, Seq, Store, Txn, TxnOutcome, keys};

/// Maximum number of revisions per owner.
pub const MAX_REVISIONS: usize = 20;
/// Maximum number of sources of an owner whose last revision is kept.
const MAX_SOURCES: usize = 20;
/// Size of a chunk of a long text, and of one request: stores limit requests.
const CHUNK_BYTES: usize = 1 << 20;
/// Approximate number of files per list.
const FILES_PER_LIST: usize = 64;
/// Above this number, keys are read by prefix instead of one by one.
const MAX_SINGLE_READS: usize = 16;
/// Attempts after conflicts with other clients.
const MAX_ATTEMPTS: usize = 10;

/// A revision to activate.
pub struct NewRevision<'a> {
    pub owner: &'a str,
    pub source: &'a str,
    pub revision: &'a ManifestRevision,
    pub commit: Option<&'a str>,
    pub texts: &'a [FileContent],
}

/// The active revision, and its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActiveRevision {
    pub source: String,
    pub revision: ManifestRevision,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub at: Time,
}

/// A stored revision, without its texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub revision: ManifestRevision,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub source: String,
    /// When it was last activated or stored.
    pub at: Time,
    /// The sums of its lists.
    lists: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredFile {
    name: String,
    home: PathBuf,
    /// The sums of its chunks.
    parts: Vec<String>,
}

/// The active revision, and its sequence number (0: none was ever active).
pub async fn active<S: Store>(state: &S, owner: &str) -> Result<(Option<ActiveRevision>, Seq), Error> {
    match state.get(&keys::active_revision(owner)).await? {
        Some(entry) => Ok((serde_json::from_slice(&entry.value).ok(), entry.mod_seq)),
        None => Ok((None, 0)),
    }
}

/// Owners with a stored revision.
pub async fn owners<S: Store>(state: &S) -> Result<BTreeSet<String>, Error> {
    let page = state.range(keys::SOURCE_PREFIX, None, usize::MAX).await?;
    let owner = |entry: &crate::store::Entry| keys::active_revision_owner(&entry.key).map(str::to_owned);
    Ok(page.entries.iter().filter_map(owner).collect())
}

/// All stored revisions, newest first.
pub async fn list<S: Store>(state: &S, owner: &str) -> Result<Vec<Snapshot>, Error> {
    Ok(list_readable(state, owner).await?.0)
}

/// The same, and whether all of them can be read.
pub async fn list_readable<S: Store>(state: &S, owner: &str) -> Result<(Vec<Snapshot>, bool), Error> {
    let page = state.range(&keys::snapshots_prefix(owner), None, usize::MAX).await?;
    let read = |entry: &crate::store::Entry| serde_json::from_slice::<Snapshot>(&entry.value).ok();
    let mut all: Vec<Snapshot> = page.entries.iter().filter_map(read).collect();
    let are_all_read = all.len() == page.entries.len();
    all.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.at));
    Ok((all, are_all_read))
}

/// The texts of the active revision, if it has this source.
pub async fn active_texts<S: Store>(state: &S, owner: &str, source: &str) -> Result<Vec<FileContent>, Error> {
    let Some(taken) = active(state, owner).await?.0.filter(|taken| taken.source == source) else {
        return Ok(Vec::new());
    };
    match find_revision(state, owner, &taken.revision).await? {
        Some(snapshot) => texts(state, owner, &snapshot).await,
        None => Ok(Vec::new()),
    }
}

/// The texts of a revision, in the order of their names.
pub async fn texts<S: Store>(state: &S, owner: &str, snapshot: &Snapshot) -> Result<Vec<FileContent>, Error> {
    let listed = read_lists(state, owner, snapshot.lists.iter()).await?;
    let parts: BTreeSet<&String> = listed.iter().flat_map(|file| &file.parts).collect();
    let known = values(state, &keys::snapshot_texts_prefix(owner), parts.iter().copied()).await?;
    let mut files = Vec::with_capacity(listed.len());
    for StoredFile { name, home, parts } in &listed {
        let mut content = Vec::new();
        for sum in parts {
            content.extend_from_slice(
                known.get(sum).ok_or_else(|| missing(&keys::snapshot_texts_prefix(owner), sum))?,
            );
        }
        let (name, home, bytes) = (name.clone(), home.clone(), content.len() as u64);
        files.push(FileContent { name, scope_dir: home, bytes, content: content.into() });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn missing(place: &str, sum: &str) -> Error {
    Error::Corrupt { file: format!("{place}{sum}"), what: "the entry is missing".to_owned() }
}

/// The values of these sums, each once: a few by key, many by prefix.
async fn values<S: Store>(
    state: &S,
    place: &str,
    sums: impl Iterator<Item = &String>,
) -> Result<BTreeMap<String, Vec<u8>>, Error> {
    let sums: BTreeSet<&String> = sums.collect();
    let mut found = BTreeMap::new();
    if sums.len() <= MAX_SINGLE_READS {
        for sum in sums {
            let entry = state.get(&format!("{place}{sum}")).await?;
            found.extend(entry.map(|entry| (sum.clone(), entry.value.to_vec())));
        }
        return Ok(found);
    }
    for Entry { key, value, .. } in state.range(place, None, usize::MAX).await?.entries {
        if let Some(sum) = key.strip_prefix(place).map(str::to_owned).filter(|sum| sums.contains(sum)) {
            found.insert(sum, value.to_vec());
        }
    }
    Ok(found)
}

async fn read_lists<S: Store>(
    state: &S,
    owner: &str,
    sums: impl Iterator<Item = &String> + Clone,
) -> Result<Vec<StoredFile>, Error> {
    let (place, mut all) = (keys::snapshot_lists_prefix(owner), Vec::new());
    let found = values(state, &place, sums.clone()).await?;
    for sum in sums {
        let value = found.get(sum).ok_or_else(|| missing(&place, sum))?;
        let broken = |error: serde_json::Error| Error::Corrupt {
            file: format!("{place}{sum}"),
            what: error.to_string(),
        };
        all.extend(serde_json::from_slice::<Vec<StoredFile>>(value).map_err(broken)?);
    }
    Ok(all)
}

/// Activates and stores a revision. Returns the pin that this ended.
pub async fn activate<S: Store>(state: &S, activated: &NewRevision<'_>) -> Result<Option<Pin>, Error> {
    write(state, activated, true).await
}

/// Stores a revision of another source than the active one: its instances are not orphans of the active source.
pub async fn store_inactive<S: Store>(state: &S, new: &NewRevision<'_>) -> Result<(), Error> {
    let stored = list(state, new.owner).await?;
    let last = stored.iter().find(|snapshot| snapshot.source == new.source);
    match last.is_some_and(|last| last.revision == *new.revision) {
        true => Ok(()),
        false => write(state, new, false).await.map(|_| ()),
    }
}

async fn write<S: Store>(
    state: &S,
    activated: &NewRevision<'_>,
    activates: bool,
) -> Result<Option<Pin>, Error> {
    let new = FileLists::of(activated.texts);
    for _ in 0..MAX_ATTEMPTS {
        let (taken, changed) = active(state, activated.owner).await?;
        let pin = pin::read(state, activated.owner).await?.map(|(pin, _)| pin);
        let before = match &taken {
            Some(taken) => find_revision(state, activated.owner, &taken.revision)
                .await?
                .map_or_else(Vec::new, |old| old.lists),
            None => Vec::new(),
        };
        let mut known = replaced_texts(state, activated.owner, &before, &new).await?;
        // Texts are written first: without a revision that names them they have no effect.
        let mut chunk = (Txn::default(), 0);
        for (sum, part) in new.missing_from(&before).flat_map(|list| &list.texts) {
            if !known.insert(sum.clone()) {
                continue;
            }
            chunk.1 += part.len();
            chunk.0 = chunk.0.and(Txn::put(keys::snapshot_texts_prefix(activated.owner) + sum, *part));
            if chunk.1 >= CHUNK_BYTES {
                state.txn(std::mem::take(&mut chunk).0).await?;
            }
        }
        for list in new.missing_from(&before) {
            chunk.1 += list.value.len();
            chunk.0 = chunk.0.and(Txn::put(
                keys::snapshot_lists_prefix(activated.owner) + &list.sum,
                list.value.as_slice(),
            ));
            if chunk.1 >= CHUNK_BYTES {
                state.txn(std::mem::take(&mut chunk).0).await?;
            }
        }
        let snapshot = new.snapshot(activated);
        let place = keys::active_revision(activated.owner);
        // Also written if it stays: a concurrent cleanup starts over.
        let active = match taken.filter(|_| !activates) {
            Some(taken) => serde_json::to_vec(&taken).unwrap_or_default(),
            None => encode_active(activated, snapshot.at),
        };
        let mut txn = chunk.0.only_if(&place, changed).and(Txn::put(&place, active));
        let value = serde_json::to_vec(&snapshot).unwrap_or_default();
        txn = txn.and(Txn::put(revision_key(activated.owner, activated.revision), value));
        if pin.is_some() && activates {
            txn = txn.and(Txn::delete(keys::pin(activated.owner)));
        }
        match state.txn(txn).await? {
            TxnOutcome::Written(_) => return Ok(pin),
            TxnOutcome::Conflict(_) => {}
        }
    }
    Err(Error::Contended { key: keys::active_revision(activated.owner) })
}

/// Deletes expired revisions, and lists and texts that only they use. A concurrent activation starts over: it may
/// rely on a text that is deleted here.
pub async fn gc<S: Store>(state: &S, owner: &str) -> Result<(), Error> {
    let (taken, changed) = active(state, owner).await?;
    let (Some(taken), all) = (taken, list(state, owner).await?) else { return Ok(()) };
    let (go, stay) = split_expired(all, &taken.revision);
    if go.is_empty() {
        return Ok(());
    }
    let needed: BTreeSet<&String> = stay.iter().flat_map(|snapshot| &snapshot.lists).collect();
    let unused: BTreeSet<&String> =
        go.iter().flat_map(|snapshot| &snapshot.lists).filter(|sum| !needed.contains(sum)).collect();
    let in_use = read_lists(state, owner, needed.iter().copied()).await?;
    let in_use: BTreeSet<&String> = in_use.iter().flat_map(|file| &file.parts).collect();
    let forgotten = read_lists(state, owner, unused.iter().copied()).await?;
    let place = keys::active_revision(owner);
    let value = serde_json::to_vec(&taken).unwrap_or_default();
    let mut txn = Txn::put(&place, value).only_if(&place, changed);
    for snapshot in &go {
        txn = txn.and(Txn::delete(revision_key(owner, &snapshot.revision)));
    }
    for sum in unused {
        txn = txn.and(Txn::delete(keys::snapshot_lists_prefix(owner) + sum));
    }
    let gone: BTreeSet<&String> = forgotten.iter().flat_map(|file| &file.parts).collect();
    for sum in gone.difference(&in_use) {
        txn = txn.and(Txn::delete(keys::snapshot_texts_prefix(owner) + sum));
    }
    // After a concurrent activation, the next one cleans up.
    state.txn(txn).await.map(|_| ())
}

/// The revisions beyond the newest [`MAX_REVISIONS`], and the others. The active one stays, and so does the newest one of each
/// other source: its instances are not orphans.
fn split_expired(all: Vec<Snapshot>, in_force: &ManifestRevision) -> (Vec<Snapshot>, Vec<Snapshot>) {
    let mut nth = 0;
    let mut sources: BTreeSet<String> = BTreeSet::new();
    all.into_iter().partition(|snapshot| {
        nth += 1;
        let is_last_of_source = sources.len() < MAX_SOURCES && sources.insert(snapshot.source.clone());
        nth > MAX_REVISIONS && snapshot.revision != *in_force && !is_last_of_source
    })
}

fn revision_key(owner: &str, revision: &ManifestRevision) -> String {
    keys::snapshots_prefix(owner) + revision.as_str()
}

async fn find_revision<S: Store>(
    state: &S,
    owner: &str,
    revision: &ManifestRevision,
) -> Result<Option<Snapshot>, Error> {
    let entry = state.get(&revision_key(owner, revision)).await?;
    Ok(entry.and_then(|entry| serde_json::from_slice(&entry.value).ok()))
}

/// Sums of the texts on the lists that new ones replace.
async fn replaced_texts<S: Store>(
    state: &S,
    owner: &str,
    before: &[String],
    new: &FileLists<'_>,
) -> Result<BTreeSet<String>, Error> {
    if before.len() != new.0.len() {
        return Ok(BTreeSet::new());
    }
    let replaced = before.iter().zip(&new.0).filter(|(old, new)| **old != new.sum).map(|(old, _)| old);
    let found = values(state, &keys::snapshot_lists_prefix(owner), replaced).await?;
    let read = |value: &Vec<u8>| serde_json::from_slice::<Vec<StoredFile>>(value).unwrap_or_default();
    Ok(found.values().flat_map(read).flat_map(|file| file.parts).collect())
}

fn encode_active(activated: &NewRevision<'_>, at: Time) -> Vec<u8> {
    let taken = ActiveRevision {
        source: activated.source.to_owned(),
        revision: activated.revision.clone(),
        commit: activated.commit.map(str::to_owned),
        at,
    };
    serde_json::to_vec(&taken).unwrap_or_default()
}

/// All files of a revision, on lists.
struct FileLists<'a>(Vec<FileList<'a>>);

struct FileList<'a> {
    sum: String,
    value: Vec<u8>,
    texts: TextChunks<'a>,
}

/// Texts, or chunks of long ones, and their sums.
type TextChunks<'a> = Vec<(String, &'a [u8])>;

impl<'a> FileLists<'a> {
    fn of(files: &'a [FileContent]) -> FileLists<'a> {
        let many = (files.len() / FILES_PER_LIST).max(1).next_power_of_two();
        let mut sorted: Vec<(Vec<StoredFile>, TextChunks<'_>)> = vec![Default::default(); many];
        for FileContent { name, scope_dir: home, content, .. } in files {
            let place = blake3::hash(name.as_bytes());
            let at = u32::from_le_bytes(place.as_bytes()[..4].try_into().unwrap_or_default()) as usize % many;
            let parts: TextChunks<'_> =
                split_utf8(content).into_iter().map(|part| (sum(part), part)).collect();
            let sums = parts.iter().map(|(sum, _)| sum.clone()).collect();
            sorted[at].0.push(StoredFile { name: name.clone(), home: home.clone(), parts: sums });
            sorted[at].1.extend(parts);
        }
        let list = |(files, texts): (Vec<StoredFile>, TextChunks<'a>)| {
            let value = serde_json::to_vec(&files).unwrap_or_default();
            FileList { sum: sum(&value), value, texts }
        };
        FileLists(sorted.into_iter().map(list).collect())
    }

    /// Texts that are not stored yet.
    fn missing_from(&self, before: &[String]) -> impl Iterator<Item = &FileList<'a>> {
        let before: BTreeSet<&String> = before.iter().collect();
        self.0.iter().filter(move |list| !before.contains(&list.sum))
    }

    fn snapshot(&self, activated: &NewRevision<'_>) -> Snapshot {
        Snapshot {
            revision: activated.revision.clone(),
            commit: activated.commit.map(str::to_owned),
            source: activated.source.to_owned(),
            at: clock::now(),
            lists: self.0.iter().map(|list| list.sum.clone()).collect(),
        }
    }
}

fn sum(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_owned()
}

/// Splits a text into valid chunks: at character boundaries.
fn split_utf8(mut content: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while content.len() > CHUNK_BYTES {
        let is_start = |at: &usize| content[*at] & 0b1100_0000 != 0b1000_0000;
        let at = (1..=CHUNK_BYTES).rev().find(is_start).unwrap_or(CHUNK_BYTES);
        let (part, rest) = content.split_at(at);
        parts.push(part);
        content = rest;
    }
    parts.push(content);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_twenty_stay_and_what_is_in_force() {
        let snapshot = |nth: usize| Snapshot {
            revision: ManifestRevision::from_text(nth.to_string()),
            commit: None,
            source: String::new(),
            at: Time(nth as i64),
            lists: Vec::new(),
        };
        let newest_first: Vec<Snapshot> = (0..23).rev().map(snapshot).collect();
        let (go, stay) = split_expired(newest_first.clone(), &ManifestRevision::from_text("22"));
        let names = |all: &[Snapshot]| all.iter().map(|one| one.revision.to_string()).collect::<Vec<_>>();
        assert_eq!(
            (names(&go), stay.len()),
            (vec!["2".to_owned(), "1".to_owned(), "0".to_owned()], MAX_REVISIONS)
        );
        let (go, _) = split_expired(newest_first, &ManifestRevision::from_text("1"));
        assert_eq!(names(&go), ["2", "0"]);
    }

    #[test]
    fn one_changed_file_changes_one_list() {
        let file = |nth: usize, text: &str| FileContent {
            name: format!("m/{nth}.yaml"),
            scope_dir: "/m".into(),
            bytes: text.len() as u64,
            content: text.as_bytes().into(),
        };
        let mut files: Vec<FileContent> = (0..1000).map(|nth| file(nth, &format!("text {nth}"))).collect();
        let before: Vec<String> = FileLists::of(&files).0.into_iter().map(|list| list.sum).collect();
        files[77] = file(77, "another");
        let after = FileLists::of(&files);
        assert!(before.len() > 8 && after.0.len() == before.len());
        let added: Vec<&FileList<'_>> = after.missing_from(&before).collect();
        assert_eq!(added.len(), 1);
        assert!(added[0].texts.iter().any(|(_, text)| *text == b"another"));
        assert!(added[0].texts.len() < 4 * FILES_PER_LIST);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let long = "ä".repeat(CHUNK_BYTES);
        let parts = split_utf8(long.as_bytes());
        assert!(parts.len() > 1 && parts.iter().all(|part| part.len() <= CHUNK_BYTES));
        assert!(parts.iter().all(|part| std::str::from_utf8(part).is_ok()));
        assert_eq!(parts.concat(), long.as_bytes());
        assert_eq!(split_utf8(b""), [b""]);
    }
}
