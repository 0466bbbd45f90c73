//! Checks of references between processes: depends_on, moved_from and dependency cycles.

use std::collections::{BTreeMap, HashMap};

use super::super::Declaration;
use super::super::check::{DeclaredObject, Process};
use super::super::problem::{Code, FieldPath, OTHER_LOCATION, PathProblem, did_you_mean};
use super::{Findings, ProcessIndex};
use crate::model::{ProcessKey, State};

/// Checks that the names in depends_on are declared, and that moved_from is not.
pub fn check_names(at: usize, process: &Process, names: &ProcessIndex, unread: bool, found: &mut Findings) {
    for (entry, key) in &process.depends_on {
        if names.declared_name(key).is_none() {
            let mut hint =
                match (found.may_suggest(names.declared.len())).then(|| similar(key, names)).flatten() {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => "NAMESPACE/NAME of a process in these manifests, or NAME in the same namespace"
                        .to_owned(),
                };
            if unread {
                hint.push_str(" (some documents are unreadable; the process may be in one of them)");
            }
            let message = format!("depends_on names {key}, which no manifest declares");
            found.push((
                at,
                PathProblem::new(
                    Code::UndefinedDependency,
                    FieldPath::of("depends_on").index(*entry),
                    message,
                )
                .hint(hint),
            ));
        }
    }
    let still = process
        .moved_from
        .as_ref()
        .and_then(|from| Some((from, names.declared.get(names.declared_name(from)?)?.first()?)));
    if let Some((from, other)) = still {
        let message = format!("moved_from names {from}, which is still declared at {OTHER_LOCATION}");
        let finding = PathProblem::new(Code::BadMove, FieldPath::of("moved_from"), message);
        found
            .push((at, finding.hint("remove the old declaration").other(*other, FieldPath::of("meta.name"))));
    }
}

fn similar(key: &ProcessKey, names: &ProcessIndex) -> Option<String> {
    let mut all: Vec<String> = names.declared.keys().map(ToString::to_string).collect();
    all.sort();
    did_you_mean(&key.to_string(), all.iter().map(String::as_str)).map(str::to_owned)
}

/// Finds cycles; each is reported at the dependency that closes it. Iterative, because chains have no length limit.
pub fn check_cycles(documents: &[Declaration], names: &ProcessIndex, found: &mut Findings) {
    let mut edges: BTreeMap<&ProcessKey, Vec<(usize, usize, &ProcessKey)>> = BTreeMap::new();
    for (at, document) in documents.iter().enumerate() {
        let DeclaredObject::Process(process) = &document.declared else {
            continue;
        };
        let Some(key) = &process.key else { continue };
        let known =
            process.depends_on.iter().filter_map(|(entry, to)| Some((at, *entry, names.declared_name(to)?)));
        edges.entry(key).or_default().extend(known);
    }
    let mut circles = 0;
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
                // A report costs the length of the cycle: stop after a hundred.
                Some(Visit::Open) if circles < MAX_CYCLES => {
                    circles += 1;
                    let begin = path.iter().position(|(node, _)| *node == to).unwrap_or(0);
                    let circle: Vec<&ProcessKey> = path[begin..].iter().map(|(node, _)| *node).collect();
                    found.push((document, cycle(&circle, entry)));
                }
                Some(Visit::Open | Visit::Closed) => {}
            }
        }
    }
}

const MAX_CYCLES: usize = 100;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    Open,
    Closed,
}

fn cycle(circle: &[&ProcessKey], entry: usize) -> PathProblem {
    const SHOWN: usize = 10;
    let mut steps: Vec<String> = circle.iter().take(SHOWN).map(ToString::to_string).collect();
    if circle.len() > SHOWN {
        steps.push(format!("… {} more", circle.len() - SHOWN));
    }
    steps.extend(circle.first().map(ToString::to_string));
    let message = format!("dependency cycle: {}", steps.join(" → "));
    PathProblem::new(Code::DependencyCycle, FieldPath::of("depends_on").index(entry), message)
        .hint("remove one of the dependencies")
}

/// Checks that no running process depends on a process that is not declared running.
pub fn check_states(documents: &[Declaration], names: &ProcessIndex, found: &mut Findings) {
    // States other than running, where all documents of a name agree.
    let mut down: HashMap<&ProcessKey, Option<State>> = HashMap::new();
    for (key, process) in documents.iter().filter_map(process_of) {
        let state = Some(process.state).filter(|state| !state.needs_start());
        down.entry(key).and_modify(|all| *all = all.and(state)).or_insert(state);
    }
    for (at, document) in documents.iter().enumerate() {
        let Some((_, process)) = process_of(document).filter(|(_, process)| process.state.needs_start())
        else {
            continue;
        };
        for (entry, to) in &process.depends_on {
            let state = names.declared_name(to).and_then(|written| down.get(written).copied().flatten());
            if let Some(state) = state {
                let word = state.word();
                let message =
                    format!("depends_on names {to}, whose state is {word}: the start would never proceed");
                let finding =
                    PathProblem::new(Code::DependsOnDown, FieldPath::of("depends_on").index(*entry), message);
                found.push((at, finding.hint("remove the dependency, or set its state to running")));
            }
        }
    }
}

fn process_of(document: &Declaration) -> Option<(&ProcessKey, &Process)> {
    match &document.declared {
        DeclaredObject::Process(process) => Some((process.key.as_ref()?, process)),
        _ => None,
    }
}
