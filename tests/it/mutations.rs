//! Randomly damaged manifests: no panic, and every problem has an existing location.

use abide::import::convert;
use abide::manifest::{Limits, load_text};
use proptest::prelude::*;

use crate::support::{GOOD, Tree, project};

/// Good texts to damage: the sample fleet and the documents' examples.
fn seeds() -> Vec<String> {
    let mut all = vec![GOOD.to_owned()];
    for folder in ["manifests", "tests/it/fixtures"] {
        for entry in std::fs::read_dir(project().join(folder)).expect("a folder").flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|e| e == "yaml" || e == "json") {
                all.push(std::fs::read_to_string(path).expect("a file"));
            }
        }
    }
    all.sort();
    all
}

/// One damage to a text.
#[derive(Clone, Debug)]
enum Damage {
    Cut(usize, usize),
    Insert(usize, String),
    Repeat(usize, usize),
    Swap(usize, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let piece = prop_oneof![
        proptest::sample::select(vec![
            "{",
            "}",
            "[",
            "]",
            ":",
            ": ",
            "- ",
            "? ",
            "&a ",
            "*a",
            "!x ",
            "|",
            ">",
            "'",
            "\"",
            "#",
            "\n",
            "  ",
            "\t",
            "---\n",
            "...\n",
            "%YAML 1.2\n",
            "<<: ",
            "null",
            "-1",
            "1e400",
            "99999999999999999999",
            ".nan",
            "${",
            "${x}",
            "${instance}",
            "\u{202e}",
            "é",
            "\\",
            ",",
            "kind: Policy\n",
            "instances: 3\n",
            "group: g",
            "true",
            "\0",
        ])
        .prop_map(str::to_owned),
        any::<String>(),
    ];
    prop_oneof![
        (any::<usize>(), 1..40usize).prop_map(|(at, len)| Damage::Cut(at, len)),
        (any::<usize>(), piece).prop_map(|(at, text)| Damage::Insert(at, text)),
        (any::<usize>(), 1..60usize).prop_map(|(at, len)| Damage::Repeat(at, len)),
        (any::<usize>(), any::<usize>()).prop_map(|(a, b)| Damage::Swap(a, b)),
    ]
}

fn apply(text: &str, damage: &Damage) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    let len = chars.len().max(1);
    match damage {
        Damage::Cut(at, count) => {
            let at = at % len;
            chars.drain(at.min(chars.len())..(at + count).min(chars.len()));
        }
        Damage::Insert(at, piece) => {
            let at = (at % len).min(chars.len());
            chars.splice(at..at, piece.chars());
        }
        Damage::Repeat(at, count) => {
            let at = (at % len).min(chars.len());
            let piece: Vec<char> = chars[at..(at + count).min(chars.len())].to_vec();
            chars.splice(at..at, piece);
        }
        Damage::Swap(a, b) if !chars.is_empty() => chars.swap(a % len, b % len),
        Damage::Swap(..) => {}
    }
    chars.into_iter().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_manifests_are_problems_with_locations(seed in proptest::sample::select(seeds()), damages in proptest::collection::vec(damage(), 1..6)) {
        let text = damages.iter().fold(seed, |text, damage| apply(&text, damage));
        let loaded = load_text("a.yaml", text.clone(), &Limits::default());
        let lines = text.split('\n').count() as u32;
        for problem in &loaded.problems {
            prop_assert!(problem.line >= 1 && problem.column >= 1 && problem.line <= lines + 1, "{problem:?}\n{text}");
            prop_assert!(!problem.message.is_empty() && !problem.message.contains("{other}"), "{problem:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// The same through files, JSON included, and through convert.
    #[test]
    fn damaged_files_and_bodies_too(seed in proptest::sample::select(seeds()), damages in proptest::collection::vec(damage(), 1..4), json: bool) {
        let text = damages.iter().fold(seed, |text, damage| apply(&text, damage));
        let tree = Tree::new(&[(if json { "a.json" } else { "a.yaml" }, text.as_bytes())]);
        for problem in tree.load().problems {
            prop_assert!(problem.line >= 1 && problem.column >= 1, "{problem:?}");
        }
        if let Err(problems) = convert::read::<abide::gse::JobBody>(tree.path(), &Limits::default()) {
            prop_assert!(problems.iter().all(|problem| problem.line >= 1));
        }
    }
}
