//! Checks of overlays that need the documents they apply to.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use super::header::is_overlay_file;
use super::merge::PatchBudget;
use super::{LayerPlan, LayerProblem};
use crate::manifest::check::DeclaredObject;
use crate::manifest::problem::{Code, FieldPath, OTHER_LOCATION, PathProblem, did_you_mean};
use crate::manifest::text::SourceText;
use crate::manifest::{Declaration, PathProblems};

/// Unmatched patches with a suggestion: each costs a comparison with all names.
const MAX_SUGGESTIONS: usize = 10;

/// The problems of all overlays, each with the index of its document.
pub fn findings(
    documents: &[Declaration],
    sources: &[SourceText],
    plan: &LayerPlan,
    is_exceeded: bool,
) -> PathProblems {
    let overlays = documents.iter().enumerate().filter_map(|(at, document)| match &document.declared {
        DeclaredObject::Overlay(_) => Some((at, document)),
        _ => None,
    });
    let overlays: Vec<(usize, &Declaration)> = overlays.collect();
    if overlays.is_empty() {
        return Vec::new();
    }
    let mut first_of: HashMap<usize, usize> = HashMap::new();
    for (at, document) in &overlays {
        first_of.entry(document.source).or_insert(*at);
    }
    // The document of each layer.
    let of_layer: Vec<Option<usize>> =
        plan.layers.iter().map(|layer| first_of.get(&layer.source).copied()).collect();
    let mut found = misplaced(&overlays, sources, &of_layer);
    for LayerProblem { layer, path, code, message, hint, other } in &plan.problems {
        let Some(document) = of_layer[*layer] else { continue };
        let problem = PathProblem::new(*code, path.clone(), message.clone()).hint(*hint);
        let other = other.and_then(|other| of_layer[other]);
        found.push((
            document,
            match other {
                Some(other) => problem.other(other, FieldPath::root()),
                None => problem,
            },
        ));
    }
    if is_exceeded {
        let document = of_layer.iter().flatten().next().copied().unwrap_or_default();
        let problem = PathProblem::new(Code::TooLarge, FieldPath::of("patches"), PatchBudget::too_large());
        found.push((document, problem.hint("use host groups and variables in place of long lists").at_key()));
    } else if plan.problems.is_empty() {
        found.extend(unmatched(documents, plan, &of_layer));
    }
    found.extend(conflicts(documents, &of_layer_by_dir(plan, &of_layer)));
    found
}

fn of_layer_by_dir<'p>(plan: &'p LayerPlan, of_layer: &[Option<usize>]) -> HashMap<&'p Path, usize> {
    let layers = plan.layers.iter().zip(of_layer);
    layers.filter_map(|(layer, document)| Some((layer.dir.as_path(), (*document)?))).collect()
}

/// Overlays in other files, and second ones of a directory.
fn misplaced(
    overlays: &[(usize, &Declaration)],
    sources: &[SourceText],
    of_layer: &[Option<usize>],
) -> PathProblems {
    let active: HashSet<usize> = of_layer.iter().flatten().copied().collect();
    let mut found = Vec::new();
    for (at, document) in overlays.iter().filter(|(at, _)| !active.contains(at)) {
        let same_dir = |(_, other): &&(usize, &Declaration)| other.scope_dir == document.scope_dir;
        let other = overlays.iter().filter(|(at, _)| active.contains(at)).find(same_dir);
        let path = FieldPath::of("kind");
        let problem = |message: &str| PathProblem::new(Code::MisplacedOverlay, path.clone(), message);
        found.push((
            *at,
            match other {
                Some((other, _)) if is_overlay_file(&sources[document.source].name) => {
                    problem(&format!("the directory already has an Overlay, at {OTHER_LOCATION}"))
                        .hint("a directory has one Overlay")
                        .other(*other, path.clone())
                }
                Some(_) | None => problem("an Overlay applies only in a file overlay.yaml")
                    .hint("move it to overlay.yaml in a directory of its own"),
            },
        ));
    }
    found
}

/// Patches that match no process.
fn unmatched(documents: &[Declaration], plan: &LayerPlan, of_layer: &[Option<usize>]) -> PathProblems {
    let mut matched: HashSet<(&Path, usize)> = HashSet::new();
    for document in documents {
        let layers = document.layers.layers();
        matched.extend(
            document.applied.patches.iter().map(|patch| (layers[patch.layer].dir.as_path(), patch.patch)),
        );
    }
    let mut names: Option<Vec<String>> = None;
    let (mut found, mut suggested) = (Vec::new(), 0);
    let active: BTreeSet<usize> = plan.active.iter().copied().collect();
    for layer in active {
        let Some(document) = of_layer[layer] else { continue };
        let dir = plan.layers[layer].dir.as_path();
        let patches = plan.layers[layer].overlay.patches.iter().enumerate();
        for (at, patch) in patches.filter(|(at, patch)| !patch.optional && !matched.contains(&(dir, *at))) {
            suggested += 1;
            let names = names.get_or_insert_with(|| process_names(documents));
            let meant = match suggested <= MAX_SUGGESTIONS {
                true => did_you_mean(&patch.target(), names.iter().map(String::as_str)),
                false => None,
            };
            let hint = match meant {
                Some(meant) => {
                    format!("did you mean {meant:?}? `optional: true` allows a patch without match")
                }
                None => "correct the match, or add `optional: true`".to_owned(),
            };
            let path = FieldPath::of("patches").index(at).key("match");
            let problem = PathProblem::new(Code::PatchUnmatched, path, "the patch matches no process");
            found.push((document, problem.hint(hint).at_key()));
        }
    }
    found
}

fn process_names(documents: &[Declaration]) -> Vec<String> {
    let name = |document: &Declaration| match &document.declared {
        DeclaredObject::Process(process) => process.key.as_ref().map(ToString::to_string),
        _ => None,
    };
    documents.iter().filter_map(name).collect()
}

/// Pairs of patches that set a field of one process to different values, each pair once.
fn conflicts(documents: &[Declaration], of_dir: &HashMap<&Path, usize>) -> PathProblems {
    let mut pairs: BTreeMap<(usize, usize, usize), (&FieldPath, String)> = BTreeMap::new();
    for document in documents {
        let Some(conflict) = &document.applied.conflict else { continue };
        let Some(at) = of_dir.get(document.layers.layers()[conflict.layer].dir.as_path()) else { continue };
        let process = match &document.declared {
            DeclaredObject::Process(process) => process.key.as_ref().map(ToString::to_string),
            _ => None,
        };
        let pair = pairs.entry((*at, conflict.first, conflict.second));
        pair.or_insert((&conflict.path, process.unwrap_or_default()));
    }
    let problem =
        |((document, first, second), (path, process)): ((usize, usize, usize), (&FieldPath, String))| {
            let in_patch = |patch: usize| {
                let mut whole = FieldPath::of("patches").index(patch).key("patch");
                whole.0.extend(path.0.iter().cloned());
                whole
            };
            let message =
                format!("two patches set {path} of process {process:?}; the other is at {OTHER_LOCATION}");
            let problem = PathProblem::new(Code::PatchConflict, in_patch(second), message);
            (document, problem.hint("keep one of them").other(document, in_patch(first)))
        };
    pairs.into_iter().map(problem).collect()
}
