//! Glossary: at most sixty terms, each with its Rust type, linked from the README and the map of the crate.

use std::collections::BTreeSet;

use crate::support::project;
use crate::vocabulary::{none, public_type, sources, type_name, without_tests};

#[test]
fn the_glossary_is_short_and_linked() {
    let read = |name: &str| std::fs::read_to_string(project().join(name)).expect("a file");
    let glossary = read("docs/glossary.md");
    let terms = glossary.lines().filter(|line| line.starts_with("| ")).skip(1).count();
    assert!((40..=60).contains(&terms), "{terms} terms");
    for file in ["README.md", "src/lib.rs"] {
        assert!(read(file).contains("docs/glossary.md"), "{file} does not name the glossary");
    }
}

/// The cells of a row of a table in markdown.
fn cells(row: &str) -> Vec<&str> {
    row.trim_matches('|').split(" | ").map(|cell| cell.trim_matches(['|', ' '])).collect()
}

#[test]
fn each_type_of_the_glossary_exists() {
    let mut declared = BTreeSet::new();
    for (_, text) in sources() {
        let lines = without_tests(&text).lines();
        declared.extend(
            lines.filter_map(|line| public_type(line).or_else(|| type_name(line))).map(str::to_owned),
        );
    }
    let code: String = sources().into_iter().map(|(_, text)| text).collect();
    let glossary = std::fs::read_to_string(project().join("docs/glossary.md")).expect("the glossary");
    let mut findings = Vec::new();
    let mut named = 0;
    for row in glossary.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let cells = cells(row);
        assert_eq!(cells.len(), 5, "{row}");
        for name in cells[2].split(", ").map(|name| name.trim_matches('`')).filter(|name| *name != "–") {
            named += 1;
            let exists = match name.split_once("::") {
                Some((owner, item)) if owner.starts_with(char::is_uppercase) => {
                    declared.contains(owner) && code.contains(&format!("    {item}"))
                }
                Some((module, item)) => {
                    code.contains(&format!("pub mod {module};")) && code.contains(&format!("fn {item}"))
                }
                None => declared.contains(name),
            };
            if !exists {
                findings.push(format!("{}: {name}", cells[0]));
            }
        }
    }
    assert!(named > 50, "only {named} types were found");
    none("types of the glossary do not exist", &findings);
}
