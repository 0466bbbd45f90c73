//! Plan cases: each folder of `tests/cases` is one, and documents one situation. `manifest.yaml` is the desired state (its
//! first lines explain the case), `observed.json` the observed state, and `args` the flags. `expected.txt` and
//! `expected.json` contain the output of `abide plan`.
//!
//! `ABIDE_UPDATE=1 cargo test cases` rewrites the expectations; read the diff before you commit it.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{abide, project, stderr, stdout};

const NOW: &str = "2026-11-16T08:00:00Z"; // a Monday

fn folders() -> Vec<PathBuf> {
    let folder = project().join("tests/cases");
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("cases").flatten().map(|entry| entry.path()).collect();
    all.sort();
    all
}

fn plan(folder: &Path, form: &str) -> (String, Option<i32>) {
    let args = std::fs::read_to_string(folder.join("args")).unwrap_or_default();
    let mut all = vec!["plan", "manifest.yaml", "--observed", "observed.json", "-o", form];
    if !args.contains("--now") {
        all.extend(["--now", NOW]);
    }
    all.extend(args.split_whitespace());
    let output = abide(&all, folder, b"");
    (stdout(&output) + &stderr(&output), output.status.code())
}

/// Digests of everything would change with every case that is edited; what they cover is tested elsewhere.
fn without_digests(json: &str) -> String {
    let Ok(mut plan) = serde_json::from_str::<Value>(json) else { return json.to_owned() };
    let object = plan.as_object_mut().expect("an object");
    for name in ["id", "fingerprint", "source", "notes"] {
        object.remove(name);
    }
    serde_json::to_string_pretty(&plan).expect("JSON") + "\n"
}

#[test]
fn each_case_has_its_expected_plan() {
    let update = std::env::var_os("ABIDE_UPDATE").is_some();
    let folders = folders();
    assert!(folders.len() >= 40, "only {} cases", folders.len());
    let mut wrong = Vec::new();
    for folder in &folders {
        let manifest = std::fs::read_to_string(folder.join("manifest.yaml")).expect("a manifest");
        assert!(manifest.starts_with("# "), "{} does not say what it shows", folder.display());
        let (text, code) = plan(folder, "text");
        let (json, _) = plan(folder, "json");
        let text = format!("{text}exit {}\n", code.expect("an exit code"));
        for (name, got) in [("expected.txt", text), ("expected.json", without_digests(&json))] {
            let file = folder.join(name);
            if update {
                std::fs::write(&file, &got).expect("a file");
            }
            let expected = std::fs::read_to_string(&file).unwrap_or_default();
            if got != expected {
                wrong.push(format!("{}\n--- expected\n{expected}--- got\n{got}", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
