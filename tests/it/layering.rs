//! Layering: which modules may use which, read from the sources.

use std::path::{Path, PathBuf};

use crate::support::project;

const MODULES: [&str; 24] = [
    "model",
    "contract",
    "manifest",
    "reconcile",
    "gse",
    "agent_protocol",
    "import",
    "source",
    "backend",
    "observe",
    "execute",
    "engine",
    "control",
    "dashboard",
    "store",
    "http",
    "gateway",
    "agent",
    "backoff",
    "clock",
    "ids",
    "metrics",
    "proc",
    "cli",
];

/// Every `.rs` file below a folder, without its tests.
fn sources(folder: &Path) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let inside =
        || std::fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path()).collect();
    // A small module is a file.
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

/// `crate::agent_protocol` is not a use of `agent`.
fn uses(code: &str, module: &str) -> bool {
    let path = format!("crate::{module}");
    let is_whole = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    code.match_indices(&path).any(|(at, _)| is_whole(&code[at + path.len()..]))
}

#[test]
fn modules_depend_only_on_allowed_modules() {
    const PRIMITIVES: [&str; 4] = ["backoff", "ids", "metrics", "proc"];
    let may_use: [(&str, &[&str]); 23] = [
        ("backoff", &[]),
        ("clock", &["model"]),
        ("ids", &["model"]),
        ("metrics", &[]),
        ("proc", &[]),
        ("model", &[]),
        ("contract", &["model"]),
        ("manifest", &["model", "contract", "clock"]),
        ("reconcile", &["model"]),
        ("gse", &["model"]),
        ("agent_protocol", &["model", "gse"]),
        ("import", &["model", "manifest"]),
        ("source", &["model", "manifest", "store", "clock"]),
        ("backend", &["model", "contract", "gse", "agent_protocol", "http", "clock"]),
        ("execute", &["model", "store", "backend", "reconcile", "clock"]),
        // An observation reads the ledger that an execution writes.
        ("observe", &["model", "store", "backend", "reconcile", "execute", "clock"]),
        // Of `manifest` it uses the texts: a revision is stored with them, and reasons have their location in them.
        (
            "engine",
            &[
                "model",
                "contract",
                "manifest",
                "reconcile",
                "backend",
                "observe",
                "execute",
                "store",
                "http",
                "clock",
            ],
        ),
        (
            "control",
            &[
                "model",
                "contract",
                "manifest",
                "reconcile",
                "backend",
                "observe",
                "execute",
                "engine",
                "source",
                "store",
                "clock",
            ],
        ),
        ("dashboard", &["model", "contract", "control", "source", "store", "http", "clock"]),
        ("store", &["model", "contract", "http", "clock"]),
        ("http", &[]),
        ("gateway", &["model", "contract", "gse", "agent_protocol", "store", "http", "clock"]),
        ("agent", &["model", "gse", "agent_protocol", "store", "http", "clock"]),
    ];
    for (module, used) in may_use {
        let is_pure = matches!(module, "model" | "reconcile" | "clock") || PRIMITIVES.contains(&module);
        let is_allowed = |other: &str| {
            other == module || used.contains(&other) || (PRIMITIVES.contains(&other) && !is_pure)
        };
        for (file, code) in sources(&project().join("src").join(module)) {
            for other in MODULES.iter().filter(|other| !is_allowed(other)) {
                assert!(!uses(&code, other), "{file} uses {other}");
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
    let others: Vec<String> = crates.filter(|name| !matches!(name.as_str(), "serde" | "blake3")).collect();
    assert!(others.len() > 5, "the list of dependencies was not found: {others:?}");
    for module in ["model", "reconcile"] {
        for (file, code) in sources(&project().join("src").join(module)) {
            for other in &others {
                // `String::` contains `ring::`.
                let path = format!("{other}::");
                let own = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
                assert!(!code.match_indices(&path).any(|(at, _)| own(at)), "{file} uses {other}");
            }
            for word in ["std::fs", "std::net::Tcp", "std::process", "SystemTime", "Instant", "println!"] {
                assert!(!code.contains(word), "{file}: {word}");
            }
        }
    }
}

#[test]
fn only_the_cli_prints() {
    for module in MODULES.into_iter().filter(|module| *module != "cli") {
        for (file, code) in sources(&project().join("src").join(module)) {
            assert!(!code.contains("print!") && !code.contains("println!"), "{file} prints");
        }
    }
}
