//! Links, verbs and flags in the guides: each link resolves, and each `abide` command has the verb and the flags that it names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::guides::guides;
use crate::support::{abide, project, stdout};
use crate::vocabulary::subcommands;

/// Flags in the guides that belong to other programs: cargo, gpg, and the sample command of a plan.
const OTHER_PROGRAMS: [&str; 7] =
    ["--bench", "--example", "--export", "--lib", "--port", "--release", "--test"];

fn read(guide: &str) -> String {
    std::fs::read_to_string(project().join(guide)).expect("a guide")
}

/// The lines outside of fenced blocks.
fn prose(text: &str) -> Vec<&str> {
    let mut is_code = false;
    let lines = text.lines().filter(move |line| {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    });
    lines.collect()
}

/// The anchors of a guide's headings, as forges make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text)
        .into_iter()
        .filter_map(|line| Some(line.trim_start_matches('#')).filter(|rest| rest.len() < line.len()));
    let anchor = |heading: &str| {
        let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_resolves() {
    let mut number = 0;
    for guide in guides() {
        let text = read(&guide);
        let folder = Path::new(&guide).parent().expect("a folder").to_owned();
        let lines = prose(&text).join("\n");
        let targets = lines.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.starts_with("https://")) {
            number += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file =
                if path.is_empty() { project().join(&guide) } else { project().join(&folder).join(path) };
            assert!(file.exists(), "{guide}: {target} does not exist");
            if !anchor.is_empty() {
                let text = std::fs::read_to_string(&file).expect("a guide");
                assert!(anchors(&text).contains(anchor), "{guide}: {target}: no heading has this anchor");
            }
        }
    }
    assert!(number > 100, "only {number} links were found");
}

/// The help of every verb, by its words.
fn help() -> BTreeMap<String, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut waiting = vec![String::new()];
    let mut all = BTreeMap::new();
    while let Some(verb) = waiting.pop() {
        let args: Vec<&str> = verb.split_whitespace().chain(["--help"]).collect();
        let text = stdout(&abide(&args, folder.path(), b""));
        waiting.extend(subcommands(&text).into_iter().map(|name| format!("{verb} {name}").trim().to_owned()));
        all.insert(verb, text);
    }
    all
}

/// The flags in a text, without those that follow another word character.
fn flags(text: &str) -> Vec<&str> {
    let ends = |c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    let begins = text.match_indices("--").map(|(at, _)| at).filter(|at| {
        let before = text[..*at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '-')
    });
    let found = begins.map(|at| &text[at..at + text[at..].find(ends).unwrap_or(text.len() - at)]);
    found.filter(|flag| flag.len() > 3).collect()
}

fn has_flag(help: &str, flag: &str) -> bool {
    flags(help).contains(&flag)
}

/// The commands of a line: the text after `abide ` in code, up to the end of the command.
fn commands(line: &str) -> Vec<&str> {
    let begins: &[&str] = match line.starts_with("$ ") {
        true => &["$ abide ", "; abide ", "| abide "],
        false => &["`abide "],
    };
    let found =
        begins.iter().flat_map(|begin| line.match_indices(begin).map(|(at, _)| &line[at + begin.len()..]));
    found.map(|rest| rest.split(['`', '#', ';', '|', '&', '>']).next().unwrap_or_default()).collect()
}

#[test]
fn every_verb_and_flag_exists() {
    let help = help();
    let everywhere = help.values().flat_map(|text| flags(text)).collect::<BTreeSet<_>>();
    let (mut findings, mut number) = (Vec::new(), 0);
    for guide in guides() {
        for (nth, line) in read(&guide).lines().enumerate() {
            let at = format!("{guide}:{}", nth + 1);
            for flag in flags(line) {
                if !everywhere.contains(flag) && !OTHER_PROGRAMS.contains(&flag) {
                    findings.push(format!("{at}: no verb has {flag}"));
                }
            }
            for command in commands(line) {
                number += 1;
                let words: Vec<&str> =
                    command.split_whitespace().filter(|word| !word.starts_with('-')).take(2).collect();
                let (whole, first) = (words.join(" "), words.first().copied().unwrap_or_default());
                let is_name = first.chars().all(|c| c.is_ascii_lowercase());
                match help.get(&whole).or_else(|| help.get(first)) {
                    Some(text) => findings.extend(
                        flags(command)
                            .iter()
                            .filter(|flag| !has_flag(text, flag))
                            .map(|flag| format!("{at}: {first} has no {flag}")),
                    ),
                    None if is_name => findings.push(format!("{at}: no verb {first}")),
                    None => {}
                }
            }
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
    assert!(number > 150, "only {number} commands were found");
}
