//! Completeness of `docs/manifest-reference.md`: every field of the grammar, with its type, default and effect.

use std::collections::BTreeMap;

use abide::manifest::explain;
use abide::manifest::grammar::{self, Entry, Requirement, Section};
use abide::model::{Field, StartMode, base_effect};

use crate::support::project;

/// The cells of each row, by kind and field path.
fn rows(page: &str) -> BTreeMap<(String, String), Vec<String>> {
    let mut rows = BTreeMap::new();
    let mut kind = String::new();
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            kind = heading.to_owned();
        }
        let Some(row) = line.strip_prefix("| `").filter(|_| !kind.is_empty()) else { continue };
        let row = row.replace("\\|", "\u{1}");
        let cells: Vec<String> = row.split('|').map(|cell| cell.trim().replace('\u{1}', "|")).collect();
        let path = cells[0].trim_end_matches('`').to_owned();
        assert!(rows.insert((kind.clone(), path.clone()), cells).is_none(), "{kind} {path} has two rows");
    }
    rows
}

fn default(entry: &Entry) -> &'static str {
    match entry.need {
        Requirement::Required => "**required**",
        Requirement::Optional | Requirement::RequiredInBody | Requirement::IgnoredInBody => {
            entry.default.unwrap_or("–")
        }
    }
}

/// The effect of a change, for fields of a spec.
fn effect(kind: &Section, path: &str) -> Option<String> {
    let field = Field::from_path(path).filter(|_| kind.name == "Process")?;
    let (daemon, foreground) =
        (base_effect(field, StartMode::Daemon), base_effect(field, StartMode::Foreground));
    Some(match daemon == foreground {
        true => daemon.to_string(),
        false => format!("{daemon} (daemon), {foreground} (foreground)"),
    })
}

#[test]
fn the_manifest_reference_lists_every_field() {
    let page = std::fs::read_to_string(project().join("docs/manifest-reference.md")).expect("the reference");
    let mut rows = rows(&page);
    for kind in grammar::ALL_KINDS {
        for (path, entry) in explain::paths(kind) {
            // The page refers to Process for these.
            if kind.name == "Defaults" && path.starts_with("spec.") {
                continue;
            }
            let Some(cells) = rows.remove(&(kind.name.to_owned(), path.clone())) else {
                panic!("{} {path} is missing", kind.name);
            };
            let [_, shape, value, change, meaning, ..] = cells.as_slice() else { panic!("{cells:?}") };
            assert_eq!(*shape, entry.shape.describe(), "type of {} {path}", kind.name);
            assert_eq!(*value, default(entry), "default of {} {path}", kind.name);
            match effect(kind, &path) {
                Some(effect) => assert_eq!(*change, effect, "effect of {} {path}", kind.name),
                None => assert!(!change.is_empty(), "effect of {} {path}", kind.name),
            }
            assert!(!meaning.is_empty(), "meaning of {} {path}", kind.name);
        }
    }
    assert!(rows.is_empty(), "rows of fields that do not exist: {:?}", rows.keys());
}
