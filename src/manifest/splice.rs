//! Splicing of changed files into the previous result, without a full reload.
//!
//! Most edits change one process and no reference between documents: name, hosts, state, dependencies and identity stay
//! the same. Cross-document checks then still hold, and only the instances of that process are expanded again. Any other
//! edit, and any problem, requires a full reload.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::check::{DeclaredObject, Process};
use super::find::FileContent;
use super::incremental::{CachedFile, ChangedFile, IncrementalLoader};
use super::layers::PatchBudget;
use super::parse::{CheckedDocument, ParsedSlices, Patching, parse_slice};
use super::{Declaration, Limits};
use crate::model::{Desired, DesiredInstance, Host, HostKey, InstanceKey, SourceLocation};

/// Desired instances of a few changed files, replacing their previous ones.
#[derive(Debug)]
pub struct SpliceResult {
    /// The same instance keys as before.
    pub wants: Vec<(InstanceKey, DesiredInstance)>,
    /// Each changed file, as stored content and as text.
    pub texts: Vec<(FileContent, Arc<str>)>,
}

/// If more than one file in this many changed, a full reload on all cores is faster.
const FULL_RELOAD_DIVISOR: usize = 4;

impl IncrementalLoader {
    /// The desired instances of the changed files. `None` if the change affects other documents. `desired` is the previous
    /// result.
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
        // Every instance that these files declared before must still be declared.
        if !earlier.is_empty() {
            return None;
        }
        let content = |file: &ChangedFile| {
            let text = Arc::clone(&file.source.text);
            (file.source.file_content(&self.found.files[file.at].scope_dir), text)
        };
        let texts = changed.iter().map(content).collect();
        for (file, parts) in known {
            let (stamp, source) = (file.stamp, file.source.clone());
            let layers = self.files.get(&source.name).map(|known| known.layers.clone()).unwrap_or_default();
            self.files.insert(source.name.clone(), CachedFile { stamp, source, parts, layers });
        }
        Some(SpliceResult { wants, texts })
    }

    /// Compares the documents of one file with its previous ones, and expands them.
    fn splice_file(
        &self,
        file: &ChangedFile,
        earlier: &mut BTreeMap<&SourceLocation, Vec<(&InstanceKey, &DesiredInstance)>>,
        wants: &mut Vec<(InstanceKey, DesiredInstance)>,
        limits: &Limits,
    ) -> Option<ParsedSlices> {
        let (source, context) = (&file.source, self.context.as_ref()?);
        let known = self.files.get(&source.name)?;
        // A problem of this file may be fixed now, and problems of other files may quote its lines.
        let concerns = |problem: &super::Problem| {
            problem.file == source.name || problem.code.concerns_several_documents()
        };
        if source.slices.len() != known.parts.len() || self.problems.iter().any(concerns) {
            return None;
        }
        let count = AtomicUsize::new(0);
        let slices = 0..source.slices.len();
        let budget = PatchBudget::default();
        let patching = Patching { layers: &known.layers, budget: &budget };
        let parts: ParsedSlices =
            slices.map(|slice| parse_slice(source, slice, &count, limits, patching)).collect();
        for (slice, (then, now)) in known.parts.iter().zip(&parts).enumerate() {
            let (Ok(then), Ok(now)) = (then, now) else { return None };
            if then.len() != now.len() {
                return None;
            }
            for (then, now) in then.iter().zip(now) {
                if !has_same_references(then, now) {
                    return None;
                }
                let location = |(line, column)| SourceLocation { file: source.name.clone(), line, column };
                let before = earlier.remove(&location(then.begin))?;
                let declaration = Declaration {
                    source: 0,
                    slice,
                    nth: now.nth,
                    begin: now.begin,
                    scope_dir: self.found.files[file.at].scope_dir.clone(),
                    declared: now.declared.clone(),
                    dropped: HashSet::new(),
                    bad: false,
                    layers: known.layers.clone(),
                    applied: now.applied.clone(),
                };
                let policies = before.first()?.1.origin.policies.clone();
                let expanded = context.expand(&declaration, location(now.begin), hosts(&before), policies)?;
                if !claims_same_identities(&before, &expanded) {
                    return None;
                }
                wants.extend(expanded);
            }
        }
        Some(parts)
    }
}

/// Whether two valid processes are equal in all that other documents refer to.
fn has_same_references(then: &CheckedDocument, now: &CheckedDocument) -> bool {
    let is_good = |checked: &CheckedDocument| {
        checked.faults.is_empty() && checked.findings.is_empty() && checked.dropped.is_empty() && !checked.bad
    };
    let (DeclaredObject::Process(a), DeclaredObject::Process(b)) = (&then.declared, &now.declared) else {
        return false;
    };
    let references = |process: &Process| {
        let Process { key, hosts, state, instances, depends_on, moved_from, .. } = process;
        (key.clone(), *state, *instances, depends_on.clone(), moved_from.clone(), hosts.len())
    };
    // A patch that matches no process any more is a problem.
    then.applied == now.applied
        && is_good(then)
        && is_good(now)
        && references(a) == references(b)
        && a.hosts == b.hosts
}

/// Hosts of a process, each once.
fn hosts(before: &[(&InstanceKey, &DesiredInstance)]) -> Vec<(usize, Host)> {
    let hosts: BTreeMap<&HostKey, &Host> = before.iter().map(|(key, want)| (&key.host, &want.host)).collect();
    // The index of the hosts entry matters only for problems, and a problem causes a full reload.
    hosts.into_values().map(|host| (0, host.clone())).collect()
}

/// Whether the instances and their identities are the same as before, so that no new conflict is possible.
fn claims_same_identities(
    before: &[(&InstanceKey, &DesiredInstance)],
    expanded: &[(InstanceKey, DesiredInstance)],
) -> bool {
    let identities: BTreeMap<&InstanceKey, String> =
        before.iter().map(|(key, want)| (*key, want.spec.identity.index_key())).collect();
    let same = |(key, want): &(InstanceKey, DesiredInstance)| {
        identities.get(key) == Some(&want.spec.identity.index_key())
    };
    expanded.len() == before.len() && expanded.iter().all(same)
}
