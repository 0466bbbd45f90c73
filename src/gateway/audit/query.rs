//! Reads of audit files: pages of entries, filtered by namespace, caller and time.

use std::path::Path;

use axum::http::request::Parts;

use super::AuditError;
use super::files::{AuditFile, AuditLine, AuditLines, HeaderLine, list};
use crate::access::Grant;
use crate::clock;
use crate::contract::{AuditEntry, AuditInstances, AuditPage};
use crate::gateway::ApiError;
use crate::gateway::decode::{numeric_parameter, parameter};
use crate::model::Time;

/// Maximum entries of a page of a gateway.
const MAX_PAGE: usize = 1000;
/// Maximum bytes of the entries of a page.
const MAX_PAGE_BYTES: usize = 8 << 20;
/// Maximum bytes that are read for a page.
const MAX_READ_BYTES: u64 = 256 << 20;

/// Selection of entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditQuery {
    pub namespace: Option<String>,
    /// Name of the caller, or of the user that it claims.
    pub who: Option<String>,
    pub since: Option<Time>,
    /// Entries after this number only.
    pub after: u64,
    /// Maximum entries of a page.
    pub limit: usize,
}

impl AuditQuery {
    /// The query of a request. A namespace that it names has to be granted.
    pub(in crate::gateway) fn read(grant: &Grant, parts: &Parts) -> Result<AuditQuery, ApiError> {
        let since = match parameter(parts, "since").map(|text| clock::read(&text)) {
            None => None,
            Some(Some(since)) => Some(since),
            Some(None) => return Err(ApiError::BadRequest("since is not a time in RFC 3339".to_owned())),
        };
        let namespace = parameter(parts, "namespace");
        namespace.as_deref().map_or(Ok(()), |namespace| grant.check_namespace(namespace))?;
        let limit = match usize::try_from(numeric_parameter(parts, "limit")?).unwrap_or(MAX_PAGE) {
            0 => MAX_PAGE,
            limit => limit.min(MAX_PAGE),
        };
        let after = numeric_parameter(parts, "after")?;
        Ok(AuditQuery { namespace, who: parameter(parts, "who"), since, after, limit })
    }

    fn selects(&self, entry: &AuditEntry) -> bool {
        let in_namespace = |name: &String| {
            let is_in = |one: &AuditInstances| namespace_of(&one.process) == name;
            entry.what.instances.iter().any(is_in)
        };
        let is_caller = |name: &String| entry.who.name == *name || entry.who.user == *name;
        let is_late = |since: &Time| clock::read(&entry.time).is_none_or(|time| time >= *since);
        self.namespace.as_ref().is_none_or(in_namespace)
            && self.who.as_ref().is_none_or(is_caller)
            && self.since.as_ref().is_none_or(is_late)
    }
}

/// The namespace of `NAMESPACE/NAME`.
pub fn namespace_of(process: &str) -> &str {
    process.split_once('/').map_or(process, |(namespace, _)| namespace)
}

/// Reads a page. `shown`: the part of an entry that the reader may see. Lines that are not entries are left out: a
/// verification reports them.
pub fn read_page(
    folder: &Path,
    query: &AuditQuery,
    shown: impl Fn(AuditEntry) -> Option<AuditEntry>,
) -> Result<AuditPage, AuditError> {
    let mut page = AuditPage::default();
    let (mut bytes, mut read) = (0, 0);
    for file in files_of(folder, query)? {
        // A file that was deleted meanwhile is too old to be kept.
        let Ok(mut lines) = AuditLines::open(&file) else { continue };
        let HeaderLine::Valid(_) = lines.header()? else { continue };
        while let Some(AuditLine::Whole(line)) = lines.next()? {
            read += line.len() as u64;
            let Ok(entry) = serde_json::from_slice::<AuditEntry>(&line) else { continue };
            let seq = entry.seq;
            if seq <= query.after {
                continue;
            }
            if query.selects(&entry)
                && let Some(entry) = shown(entry)
            {
                bytes += line.len();
                page.entries.push(entry);
            }
            if page.entries.len() >= query.limit || bytes >= MAX_PAGE_BYTES || read >= MAX_READ_BYTES {
                page.more = Some(seq);
                return Ok(page);
            }
        }
    }
    Ok(page)
}

/// The files that may have selected entries.
fn files_of(folder: &Path, query: &AuditQuery) -> Result<Vec<AuditFile>, AuditError> {
    let files = list(folder)?;
    let is_past = |next: &AuditFile| {
        let is_early = |since: Time| first_time(next).is_some_and(|time| time < since);
        next.first <= query.after || query.since.is_some_and(is_early)
    };
    let skipped = files.iter().skip(1).take_while(|next| is_past(next)).count();
    Ok(files.into_iter().skip(skipped).collect())
}

/// The time of a file's first entry.
fn first_time(file: &AuditFile) -> Option<Time> {
    let mut lines = AuditLines::open(file).ok()?;
    let HeaderLine::Valid(_) = lines.header().ok()? else { return None };
    let Some(AuditLine::Whole(line)) = lines.next().ok()? else { return None };
    clock::read(&serde_json::from_slice::<AuditEntry>(&line).ok()?.time)
}
