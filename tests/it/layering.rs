//! Layering: which modules may use which, read from the sources.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use abide::gse::codes::{EnvelopeCode, RowCode};

use crate::support::project;

const MODULES: [&str; 29] = [
    "model",
    "contract",
    "manifest",
    "reconcile",
    "gse",
    "agent_protocol",
    "import",
    "inventory",
    "source",
    "backend",
    "observe",
    "execute",
    "engine",
    "control",
    "alerts",
    "dashboard",
    "store",
    "http",
    "access",
    "gateway",
    "agent",
    "pki",
    "retry_delay",
    "clock",
    "ids",
    "metrics",
    "proc",
    "subprocess",
    "cli",
];

/// The modules that each module may use, apart from the primitives.
const MAY_USE: [(&str, &[&str]); 28] = [
    ("retry_delay", &[]),
    ("clock", &["model"]),
    ("ids", &["model"]),
    ("metrics", &[]),
    ("proc", &[]),
    ("subprocess", &[]),
    ("model", &[]),
    ("contract", &["model"]),
    ("manifest", &["model", "contract", "clock"]),
    ("reconcile", &["model"]),
    ("gse", &["model"]),
    ("agent_protocol", &["model", "gse"]),
    ("import", &["model", "manifest"]),
    ("inventory", &["model", "manifest", "import", "store", "http", "clock"]),
    ("source", &["model", "manifest", "inventory", "store", "clock"]),
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
    ("alerts", &["model", "contract", "control", "store", "http", "clock"]),
    (
        "dashboard",
        &["model", "contract", "control", "engine", "alerts", "source", "store", "http", "access", "clock"],
    ),
    ("store", &["model", "contract", "http", "clock"]),
    ("http", &[]),
    ("access", &["model", "contract", "http", "clock"]),
    ("gateway", &["model", "contract", "gse", "agent_protocol", "store", "http", "access", "pki", "clock"]),
    ("agent", &["model", "gse", "agent_protocol", "store", "http", "pki", "clock"]),
    ("pki", &["model"]),
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
    const PRIMITIVES: [&str; 5] = ["retry_delay", "ids", "metrics", "proc", "subprocess"];
    for (module, used) in MAY_USE {
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
fn the_architecture_guide_has_the_same_table() {
    let guide = std::fs::read_to_string(project().join("docs/architecture.md")).expect("a guide");
    let section = guide.split("## Dependencies between modules").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let words =
        |cell: &str| -> BTreeSet<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    for (module, used) in MAY_USE.iter().filter(|(module, _)| {
        !["retry_delay", "clock", "ids", "metrics", "proc", "subprocess"].contains(module)
    }) {
        let row = section.lines().find_map(|line| line.strip_prefix(&format!("| `{module}` |")));
        let used: BTreeSet<String> = used.iter().map(|used| (*used).to_owned()).collect();
        assert_eq!(row.map(words), Some(used), "{module}");
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

/// The architecture guide has a theory of operation for each module, and each call of the agent protocol.
#[test]
fn the_architecture_guide_is_complete() {
    let guide = std::fs::read_to_string(project().join("docs/architecture.md")).expect("the guide");
    let map = std::fs::read_to_string(project().join("src/lib.rs")).expect("the map");
    // Single files that the table of modules describes.
    let primitives = ["clock"];
    let mut described = 0;
    for module in map.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')) {
        assert!(map.contains(&format!("//! - [`{module}`]: ")), "the map of src/lib.rs has no {module}");
        if !primitives.contains(&module) {
            assert!(guide.contains(&format!("**`{module}`: ")), "no theory of operation of {module}");
            described += 1;
        }
    }
    assert!(described > 15, "only {described} modules were found");
    for (_, path, _) in abide::gateway::routes::all() {
        let is_agents = path.contains("/v1/agent/") || path.contains("/v1/agents/");
        assert!(!is_agents || guide.contains(&path), "the agent protocol lacks {path}");
    }
}

/// The protocol's codes are decided on where the protocol is spoken; elsewhere states are.
#[test]
fn codes_of_the_protocol_stay_in_its_modules() {
    let speaks = ["gse", "agent_protocol", "backend", "gateway", "agent"];
    let rows = RowCode::ALL.iter().map(|code| code.0);
    let codes: BTreeSet<i64> = rows.chain(EnvelopeCode::ALL.iter().map(|code| code.0)).collect();
    for module in MODULES.into_iter().filter(|module| !speaks.contains(module)) {
        for (file, code) in sources(&project().join("src").join(module)) {
            for word in ["gse::codes", "RowCode", "EnvelopeCode"] {
                assert!(!code.contains(word), "{file} uses {word}");
            }
            let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
            let numbers = words.filter_map(|word| word.replace('_', "").parse::<i64>().ok());
            // 0 is a number like any other.
            let bare = numbers.filter(|number| *number != 0).find(|number| codes.contains(number));
            assert_eq!(bare, None, "{file} has a code of the protocol");
        }
    }
}

/// A text cannot be matched on, and has no cause.
#[test]
fn errors_are_types() {
    for (file, code) in sources(&project().join("src")) {
        assert!(!is_stringly(&code), "{file} has an error that is a String");
    }
}

/// Whether a signature or an implementation has the error type `String`.
fn is_stringly(code: &str) -> bool {
    if ["type Err = String;", "type Error = String;"].iter().any(|declared| code.contains(declared)) {
        return true;
    }
    code.match_indices(", String>").any(|(at, _)| {
        let line = code[..at].rsplit('\n').next().unwrap_or_default();
        // The last type that is open at this place.
        let mut open: Vec<&str> = Vec::new();
        for part in line.split_inclusive(['<', '>']) {
            match part.strip_suffix('<') {
                Some(name) => open.push(name),
                None if part.ends_with('>') && !part.ends_with("->") => drop(open.pop()),
                None => {}
            }
        }
        open.last().is_some_and(|name| name.ends_with("Result"))
    })
}

#[test]
fn only_the_cli_prints() {
    for module in MODULES.into_iter().filter(|module| *module != "cli") {
        for (file, code) in sources(&project().join("src").join(module)) {
            assert!(!code.contains("print!") && !code.contains("println!"), "{file} prints");
        }
    }
}
