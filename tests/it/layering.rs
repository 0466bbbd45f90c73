//! Who may know whom, read off the sources: the plan of the house stays true.

use std::path::{Path, PathBuf};

use crate::support::project;

const MODULES: [&str; 14] = [
    "model",
    "manifest",
    "reconcile",
    "gse",
    "backend",
    "execute",
    "control",
    "dashboard",
    "store",
    "http",
    "gateway",
    "agent",
    "clock",
    "cli",
];

/// Every `.rs` file below a folder, without its tests.
fn sources(folder: &Path) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let inside =
        || std::fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path()).collect();
    // A small room is a file.
    let paths: Vec<PathBuf> = if folder.is_dir() { inside() } else { vec![folder.with_extension("rs")] };
    for path in paths {
        if path.is_dir() {
            all.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = std::fs::read_to_string(&path).expect("a file");
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            all.push((path.display().to_string(), lines.collect::<Vec<_>>().join("\n")));
        }
    }
    all
}

#[test]
fn modules_depend_only_on_allowed_modules() {
    let may_know: [(&str, &[&str]); 12] = [
        ("model", &[]),
        ("manifest", &["model", "clock"]),
        ("reconcile", &["model"]),
        ("gse", &["model"]),
        ("backend", &["model", "gse", "http", "clock"]),
        ("execute", &["model", "store", "backend", "reconcile", "clock"]),
        ("control", &["model", "manifest", "reconcile", "backend", "execute", "control", "store", "clock"]),
        ("dashboard", &["model", "control", "store", "http", "clock"]),
        ("store", &["model", "http", "clock"]),
        ("http", &[]),
        ("gateway", &["model", "gse", "store", "http", "clock"]),
        ("agent", &["model", "gse", "store", "http", "clock"]),
    ];
    for (room, known) in may_know {
        for (file, code) in sources(&project().join("src").join(room)) {
            for other in MODULES.iter().filter(|other| **other != room && !known.contains(other)) {
                assert!(!code.contains(&format!("crate::{other}")), "{file} knows {other}");
            }
        }
    }
}

#[test]
fn the_core_uses_only_std_serde_and_blake3() {
    let manifest = std::fs::read_to_string(project().join("Cargo.toml")).expect("Cargo.toml");
    let section = manifest
        .split("[dependencies]")
        .nth(1)
        .and_then(|rest| rest.split("\n[").next())
        .expect("dependencies");
    let crates = section
        .lines()
        .filter_map(|line| line.split_once(" ="))
        .map(|(name, _)| name.trim().replace('-', "_"));
    let guests: Vec<String> = crates.filter(|name| !matches!(name.as_str(), "serde" | "blake3")).collect();
    assert!(guests.len() > 5, "the list of dependencies was not found: {guests:?}");
    for room in ["model", "reconcile"] {
        for (file, code) in sources(&project().join("src").join(room)) {
            for guest in &guests {
                // `ring::` is no part of `String::`.
                let path = format!("{guest}::");
                let own = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
                assert!(!code.match_indices(&path).any(|(at, _)| own(at)), "{file} sees {guest}");
            }
            for word in ["std::fs", "std::net::Tcp", "std::process", "SystemTime", "Instant", "println!"] {
                assert!(!code.contains(word), "{file}: {word}");
            }
        }
    }
}

#[test]
fn only_the_cli_prints() {
    for room in MODULES.into_iter().filter(|room| *room != "cli") {
        for (file, code) in sources(&project().join("src").join(room)) {
            assert!(!code.contains("print!") && !code.contains("println!"), "{file} prints");
        }
    }
}
