//! Putting a changed file into what was read before, without looking at the others.
//!
//! Most edits are to one process, and say nothing new to any other: its name, hosts, state, dependencies and identity are
//! what they were. Then whatever holds between documents holds as before, and only its own wants are made anew. Every
//! other edit, and everything that is not quite right, is left to a whole reading.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::check::{DeclaredObject, Process};
use super::find::FileContent;
use super::incremental::{CachedFile, ChangedFile, IncrementalLoader};
use super::{CheckedDocument, Declaration, Limits, ParsedSlices, parse_slice};
use crate::model::{Desired, DesiredInstance, Host, HostKey, InstanceKey, SourceLocation};

/// What a few files want now, in place of what they wanted.
#[derive(Debug)]
pub struct SpliceResult {
    /// The same instances as before.
    pub wants: Vec<(InstanceKey, DesiredInstance)>,
    /// Each as it is kept, and as text.
    pub texts: Vec<(FileContent, Arc<str>)>,
}

/// A file of so many is read with all the others: that is done on all cores.
const FULL_RELOAD_DIVISOR: usize = 4;

impl IncrementalLoader {
    /// What the changed files want, if that is nobody's business but their own. `desired` is what was read last.
    pub fn splice(
        &mut self,
        changed: &[ChangedFile],
        desired: &Desired,
        limits: &Limits,
    ) -> Option<SpliceResult> {
        if changed.len().saturating_mul(FULL_RELOAD_DIVISOR) > self.found.files.len().max(FULL_RELOAD_DIVISOR)
        {
            return None;
        }
        let names: HashSet<&str> = changed.iter().map(|file| &*file.source.name).collect();
        let mut earlier: BTreeMap<&SourceLocation, Vec<(&InstanceKey, &DesiredInstance)>> = BTreeMap::new();
        for (key, want) in &desired.instances {
            if names.contains(&*want.origin.place.file) {
                earlier.entry(&want.origin.place).or_default().push((key, want));
            }
        }
        let (mut wants, mut known) = (Vec::new(), Vec::new());
        for file in changed {
            let parts = self.splice_file(file, &mut earlier, &mut wants, limits)?;
            known.push((file, Arc::new(parts)));
        }
        // Whatever was wanted of these files before is wanted still.
        if !earlier.is_empty() {
            return None;
        }
        let given = |file: &ChangedFile| {
            let text = Arc::clone(&file.source.text);
            (file.source.file_content(&self.found.files[file.at].scope_dir), text)
        };
        let texts = changed.iter().map(given).collect();
        for (file, parts) in known {
            let (facts, source) = (file.stamp, file.source.clone());
            self.files.insert(source.name.clone(), CachedFile { stamp: facts, source, parts });
        }
        Some(SpliceResult { wants, texts })
    }

    /// The documents of one file, beside those that it had.
    fn splice_file(
        &self,
        file: &ChangedFile,
        earlier: &mut BTreeMap<&SourceLocation, Vec<(&InstanceKey, &DesiredInstance)>>,
        wants: &mut Vec<(InstanceKey, DesiredInstance)>,
        limits: &Limits,
    ) -> Option<ParsedSlices> {
        let (source, context) = (&file.source, self.context.as_ref()?);
        let known = self.files.get(&source.name)?;
        // What was wrong with it may be so no more; and others may have been told of its lines.
        let concerns =
            |problem: &super::Problem| problem.file == source.name || problem.message.contains(&*source.name);
        if source.slices.len() != known.parts.len() || self.problems.iter().any(concerns) {
            return None;
        }
        let count = AtomicUsize::new(0);
        let slices = 0..source.slices.len();
        let parts: ParsedSlices = slices.map(|slice| parse_slice(source, slice, &count, limits)).collect();
        for (slice, (then, now)) in known.parts.iter().zip(&parts).enumerate() {
            let (Ok(then), Ok(now)) = (then, now) else { return None };
            if then.len() != now.len() {
                return None;
            }
            for (then, now) in then.iter().zip(now) {
                if !has_same_references(then, now) {
                    return None;
                }
                let place = |(line, column)| SourceLocation { file: source.name.clone(), line, column };
                let before = earlier.remove(&place(then.begin))?;
                let declaration = Declaration {
                    source: 0,
                    slice,
                    nth: now.nth,
                    begin: now.begin,
                    scope_dir: self.found.files[file.at].scope_dir.clone(),
                    declared: now.declared.clone(),
                    dropped: HashSet::new(),
                    bad: false,
                };
                let policies = before.first()?.1.origin.policies.clone();
                let anew = context.expand(&declaration, place(now.begin), hosts(&before), policies)?;
                if !claims_same_identities(&before, &anew) {
                    return None;
                }
                wants.extend(anew);
            }
        }
        Some(parts)
    }
}

/// Two good processes that differ in nothing that another document may be about.
fn has_same_references(then: &CheckedDocument, now: &CheckedDocument) -> bool {
    let is_good = |checked: &CheckedDocument| {
        checked.faults.is_empty() && checked.findings.is_empty() && checked.dropped.is_empty() && !checked.bad
    };
    let (DeclaredObject::Process(a), DeclaredObject::Process(b)) = (&then.declared, &now.declared) else {
        return false;
    };
    let said = |process: &Process| {
        let Process { key, hosts, state, instances, depends_on, moved_from, .. } = process;
        (key.clone(), *state, *instances, depends_on.clone(), moved_from.clone(), hosts.len())
    };
    is_good(then) && is_good(now) && said(a) == said(b) && a.hosts == b.hosts
}

/// Where a process was, each host once.
fn hosts(before: &[(&InstanceKey, &DesiredInstance)]) -> Vec<(usize, Host)> {
    let hosts: BTreeMap<&HostKey, &Host> = before.iter().map(|(key, want)| (&key.host, &want.host)).collect();
    // Which entry named a host matters only to what is wrong, and then everything is read.
    hosts.into_values().map(|host| (0, host.clone())).collect()
}

/// The same instances, each with the identity that it had: no other has it.
fn claims_same_identities(
    before: &[(&InstanceKey, &DesiredInstance)],
    anew: &[(InstanceKey, DesiredInstance)],
) -> bool {
    let identities: BTreeMap<&InstanceKey, String> =
        before.iter().map(|(key, want)| (*key, want.spec.identity.index_key())).collect();
    let same = |(key, want): &(InstanceKey, DesiredInstance)| {
        identities.get(key) == Some(&want.spec.identity.index_key())
    };
    anew.len() == before.len() && anew.iter().all(same)
}
