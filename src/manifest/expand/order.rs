//! Names that refer to other processes: depends_on, moved_from, and the circles people build with them.

use std::collections::BTreeMap;

use super::super::Declaration;
use super::super::check::{Declared, Process};
use super::super::problem::{Code, Finding, Path, did_you_mean};
use super::{Names, instance_name};
use crate::model::ProcessKey;

/// Does what a process names exist (depends_on), or not any more (moved_from)?
pub fn check_names(
    at: usize,
    process: &Process,
    names: &Names,
    unread: bool,
    found: &mut Vec<(usize, Finding)>,
) {
    for (entry, key) in &process.depends_on {
        if names.written(key).is_none() {
            let mut hint = match (found.len() < SUGGESTIONS).then(|| similar(key, names)).flatten() {
                Some(meant) => format!("did you mean {meant}?"),
                None => {
                    "NAMESPACE/NAME of a process in these manifests, or NAME in the same namespace".to_owned()
                }
            };
            if unread {
                hint.push_str(" (some documents could not be read; it may be in one of them)");
            }
            let message = format!("depends_on names {key}, which no manifest declares");
            found.push((
                at,
                Finding::new(Code::UndefinedDependency, Path::of("depends_on").index(*entry), message)
                    .hint(hint),
            ));
        }
    }
    let still = process.moved_from.as_ref().and_then(|from| Some((from, names.declared.get(from)?.first()?)));
    if let Some((from, other)) = still {
        let message = format!("moved_from names {from}, which is still declared at {{other}}");
        let finding = Finding::new(Code::BadMove, Path::of("moved_from"), message);
        found.push((at, finding.hint("remove the old declaration").other(*other, Path::of("meta.name"))));
    }
}

/// Looking for a likely name costs as much as there are names: the first hundred problems are worth that.
const SUGGESTIONS: usize = 100;

fn similar(key: &ProcessKey, names: &Names) -> Option<String> {
    let mut all: Vec<String> = names.declared.keys().map(ToString::to_string).collect();
    all.sort();
    did_you_mean(&key.to_string(), all.iter().map(String::as_str)).map(str::to_owned)
}

/// Circles, each reported once, at the process whose name comes first. Iterative: a chain may be as long as it likes.
pub fn check_cycles(documents: &[Declaration], names: &Names, found: &mut Vec<(usize, Finding)>) {
    let mut edges: BTreeMap<&ProcessKey, Vec<(usize, usize, &ProcessKey)>> = BTreeMap::new();
    for (at, document) in documents.iter().enumerate() {
        let Declared::Process(process) = &document.declared else {
            continue;
        };
        let Some(key) = &process.key else { continue };
        let known =
            process.depends_on.iter().filter_map(|(entry, to)| Some((at, *entry, names.written(to)?)));
        edges.entry(key).or_default().extend(known);
        for (entry, to) in &process.depends_on {
            down(at, *entry, process, to, documents, names, found);
        }
    }
    let mut state: BTreeMap<&ProcessKey, Visit> = BTreeMap::new();
    for start in edges.keys().copied() {
        if state.contains_key(start) {
            continue;
        }
        let mut path = vec![(start, 0)];
        state.insert(start, Visit::Open);
        while let Some((node, next)) = path.last_mut() {
            let node = *node;
            let Some(&(document, entry, to)) = edges.get(node).and_then(|list| list.get(*next)) else {
                state.insert(node, Visit::Closed);
                path.pop();
                continue;
            };
            *next += 1;
            match state.get(to) {
                None => {
                    state.insert(to, Visit::Open);
                    path.push((to, 0));
                }
                Some(Visit::Open) => {
                    let begin = path.iter().position(|(node, _)| *node == to).unwrap_or(0);
                    let circle: Vec<&ProcessKey> = path[begin..].iter().map(|(node, _)| *node).collect();
                    found.push((document, cycle(&circle, entry)));
                }
                Some(Visit::Closed) => {}
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    Open,
    Closed,
}

fn cycle(circle: &[&ProcessKey], entry: usize) -> Finding {
    const SHOWN: usize = 10;
    let mut steps: Vec<String> = circle.iter().take(SHOWN).map(ToString::to_string).collect();
    if circle.len() > SHOWN {
        steps.push(format!("… {} more", circle.len() - SHOWN));
    }
    steps.extend(circle.first().map(ToString::to_string));
    let message = format!("these processes wait for each other: {}", steps.join(" → "));
    Finding::new(Code::DependencyCycle, Path::of("depends_on").index(entry), message)
        .hint("remove one of the dependencies")
}

/// What runs cannot wait for what is not to run.
fn down(
    at: usize,
    entry: usize,
    process: &Process,
    to: &ProcessKey,
    documents: &[Declaration],
    names: &Names,
    found: &mut Vec<(usize, Finding)>,
) {
    let Some(written) = names.written(to) else {
        return;
    };
    let states = names.declared[written].iter().filter_map(|&document| match &documents[document].declared {
        Declared::Process(process) => Some(process.state),
        _ => None,
    });
    let states: Vec<_> = states.collect();
    if let (true, Some(state)) =
        (process.state.needs_start() && states.iter().all(|s| !s.needs_start()), states.first())
    {
        let message =
            format!("depends_on names {to}, which is to be {}: the start would wait for ever", state.word());
        found.push((at, Finding::new(Code::DependsOnDown, Path::of("depends_on").index(entry), message)));
    }
}

/// A name that is fine by itself and too long with the number of an instance.
pub fn name_too_long(process: &Process) -> Option<String> {
    let (key, count) = (process.key.as_ref()?, process.instances?);
    instance_name(key, count).is_none().then(|| format!("{}_{count}", key.name))
}
