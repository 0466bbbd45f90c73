//! Vocabulary of the project: unique type names, module headers that name their subject, and no retired words in texts.
//!
//! `docs/glossary.md` lists the terms. These tests read the sources, the guides and the help of every verb.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::support::{abide, project, stdout};

/// Names that several public types share, each with the reason.
const SHARED_NAMES: [(&str, &str); 8] = [
    ("Change", "a changed key of the store; a changed field of a spec"),
    ("ConfigFile", "an entry of `configmap`; a config file of the command line"),
    ("Entry", "one entry of a table, queue, ledger, config file or store; always written with its module"),
    ("Job", "the `job` section of a spec, a GSE word; a job of the store's writer thread"),
    ("Kind", "the variant of a node, import file, log entry or table; always written with its module"),
    ("Limits", "limits of manifests; limits of the gateway"),
    ("Report", "a wire message of the agent; the report of `apply`"),
    ("Row", "one row of a table; always written with its module"),
];
const MAX_SHARED_NAMES: usize = 12;

/// Words and phrases that texts for people do not contain. `is no` has its own rule, [`negated_noun`].
const RETIRED: [&str; 22] = [
    "anew",
    "beside",
    "for ever",
    "whoever",
    "somebody",
    "nobody",
    "under way",
    "come to its end",
    "comes to its end",
    "came to its end",
    "made true",
    "makes true",
    "is told",
    "stands for",
    "so long as",
    "a mere",
    "mend",
    "mends",
    "mended",
    "of late",
    "at hand",
    "by hand",
];

/// Texts that contain a retired word and stay: names of the system, and words that scripts match.
const STABLE: [&str; 6] = [
    "ABIDE_BENCH_USER=nobody", // a user of the operating system
    "user: nobody",
    "user nobody",
    "\"nobody\"",
    "`mended`",
    "\"mended\"", // name of an event in `watch --log-format json`
];

pub fn rust_files(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => rust_files(&path, all),
            false if path.extension().is_some_and(|extension| extension == "rs") => all.push(path),
            false => {}
        }
    }
}

/// Every file of `src` with its text, sorted by path.
pub fn sources() -> Vec<(String, String)> {
    let root = project();
    let mut paths = Vec::new();
    rust_files(&root.join("src"), &mut paths);
    paths.sort();
    assert!(paths.len() > 200, "only {} source files were found", paths.len());
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).expect("a path below the project").display().to_string();
        (name, std::fs::read_to_string(&path).expect("a source file"))
    };
    paths.into_iter().map(read).collect()
}

/// The text without its test module, which is the last item of a file.
pub fn without_tests(text: &str) -> &str {
    let end = text.match_indices("#[cfg(test)]").find(|(at, tag)| {
        // A module in a file of its own ends nothing.
        let line = text[at + tag.len()..].trim_start().lines().next().unwrap_or_default();
        line.ends_with('{') && (line.starts_with("mod ") || line.starts_with("pub mod "))
    });
    end.map_or(text, |(at, _)| &text[..at])
}

/// The name of a type that this line declares with any `pub` visibility.
pub fn public_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    type_name(rest.strip_prefix(' ')?)
}

/// The name of a type that this item declares, without its visibility.
pub fn type_name(rest: &str) -> Option<&str> {
    let kinds = ["struct ", "enum ", "trait ", "type ", "union ", "unsafe trait "];
    let name = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    (end > 0).then(|| &name[..end])
}

/// The character is part of a word: `at` is its byte offset.
fn is_inside_word(text: &str, at: usize) -> bool {
    text[at..].chars().next().is_some_and(|c| c.is_alphanumeric() || c == '_')
}

fn contains_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, found)| {
        let before = text[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_');
        !before && !is_inside_word(text, at + found.len())
    })
}

/// "is no X", which reads "is not an X". "there is no", "is no longer" and "is no more than" are plain English.
fn negated_noun(text: &str) -> bool {
    text.match_indices("is no ").any(|(at, found)| {
        let before = text[..at].ends_with("there ") || text[..at].ends_with(char::is_alphanumeric);
        let next = &text[at + found.len()..];
        let noun = next.starts_with(|c: char| c.is_alphabetic());
        !before && noun && !next.starts_with("longer") && !next.starts_with("more than")
    })
}

/// The retired words of a text.
fn retired_words(text: &str) -> Vec<&'static str> {
    let mut text = text.to_owned();
    for stable in STABLE {
        text = text.replace(stable, "");
    }
    let text = text.to_lowercase();
    let mut found: Vec<&str> = RETIRED.into_iter().filter(|word| contains_word(&text, word)).collect();
    if negated_noun(&text) {
        found.push("is no X");
    }
    found
}

/// The string literals of Rust code with their lines: comments and character literals are skipped.
fn literals(code: &str) -> Vec<(usize, String)> {
    let bytes = code.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &code[at..];
        if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with("/*") {
            at += block_comment(rest);
        } else if let Some(hashes) = raw_string(rest, code[..at].chars().next_back()) {
            let open = rest.find('"').expect("a raw string has a quote") + 1;
            let close = format!("\"{}", "#".repeat(hashes));
            let length = rest[open..].find(&close).unwrap_or(rest.len() - open);
            found.push((line_of(code, at), rest[open..open + length].to_owned()));
            at += (open + length + close.len()).min(rest.len());
        } else if rest.starts_with('"') {
            let length = quoted(rest);
            found.push((line_of(code, at), rest[1..length - 1].replace("\\\"", "\"").replace("\\\n", " ")));
            at += length;
        } else if rest.starts_with('\'') {
            at += character(rest);
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    found
}

fn line_of(code: &str, at: usize) -> usize {
    code[..at].matches('\n').count() + 1
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match &rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] if depth == 1 => return at + 2,
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    rest.len()
}

/// The number of `#` of a raw string that begins here.
fn raw_string(rest: &str, before: Option<char>) -> Option<usize> {
    if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let rest = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    rest[hashes..].starts_with('"').then_some(hashes)
}

/// The length of a string literal with its quotes.
fn quoted(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// The length of a character literal; 1 for the quote of a lifetime.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, c))) => {
            let after = at + c.len_utf8();
            after + rest[after..].find('\'').map_or(0, |end| end + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

/// Fails if there are findings, and lists them.
pub fn none(what: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{} {what}:\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn each_public_type_name_is_used_once() {
    assert!(SHARED_NAMES.len() <= MAX_SHARED_NAMES, "too many shared names");
    let mut declared: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, text) in sources() {
        for (nth, line) in without_tests(&text).lines().enumerate() {
            if let Some(name) = public_type(line) {
                declared.entry(name.to_owned()).or_default().push(format!("{file}:{}", nth + 1));
            }
        }
    }
    assert!(declared.len() > 300, "only {} types were found", declared.len());
    let shared: BTreeSet<&str> = SHARED_NAMES.into_iter().map(|(name, _)| name).collect();
    let twice = |name: &str| declared.get(name).is_some_and(|places| places.len() > 1);
    let unlisted: Vec<String> = declared
        .iter()
        .filter(|(name, _)| twice(name) && !shared.contains(name.as_str()))
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect();
    assert!(unlisted.is_empty(), "type names that are used twice:\n{}", unlisted.join("\n"));
    let unused: Vec<&&str> = shared.iter().filter(|name| !twice(name)).collect();
    assert!(unused.is_empty(), "these names are unique by now; remove them from SHARED_NAMES: {unused:?}");
}

#[test]
fn module_headers_name_their_subject() {
    let questions = ["What", "Who", "Whose", "How", "Why", "Where", "Which"];
    let mut findings = Vec::new();
    for (file, text) in sources() {
        let first = text.lines().next().unwrap_or_default();
        let Some(header) = first.strip_prefix("//! ") else {
            findings.push(format!("{file}: no module header"));
            continue;
        };
        let word: String = header.chars().take_while(|c| c.is_alphabetic()).collect();
        if questions.contains(&word.as_str()) {
            findings.push(format!("{file}: {header}"));
        }
    }
    none("module headers begin with a question word", &findings);
}

#[test]
fn no_file_is_named_by_a_question_word() {
    let questions = ["what", "who", "whose", "how", "why", "where", "which"];
    let findings: Vec<String> = sources()
        .into_iter()
        .map(|(file, _)| file)
        // A verb may be a question: `abide why`.
        .filter(|file| !file.starts_with("src/cli/commands/"))
        .filter(|file| file.trim_end_matches(".rs").split('/').any(|part| questions.contains(&part)))
        .collect();
    none("files are named by a question word", &findings);
}

#[test]
fn module_headers_have_no_retired_word() {
    let mut findings = Vec::new();
    for (file, text) in sources() {
        let header: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("//!")).collect();
        for word in retired_words(&header.join(" ")) {
            findings.push(format!("{file}: {word}"));
        }
    }
    none("retired words in module headers", &findings);
}

#[test]
fn literals_have_no_retired_word() {
    let mut findings = Vec::new();
    let mut number = 0;
    for (file, text) in sources().into_iter().filter(|(file, _)| !file.ends_with("tests.rs")) {
        for (line, literal) in literals(without_tests(&text)) {
            number += 1;
            // A literal is quoted again, so that STABLE can name a whole one.
            for word in retired_words(&format!("\"{literal}\"")) {
                findings.push(format!("{file}:{line}: {word}: {literal}"));
            }
        }
    }
    assert!(number > 3000, "only {number} literals were found");
    none("retired words in string literals", &findings);
}

/// A message that begins with `it` has no subject in a log.
#[test]
fn literals_do_not_begin_with_it() {
    let mut findings = Vec::new();
    for (file, text) in sources().into_iter().filter(|(file, _)| !file.ends_with("tests.rs")) {
        for (line, literal) in literals(without_tests(&text)) {
            if literal.to_lowercase().starts_with("it ") {
                findings.push(format!("{file}:{line}: {literal}"));
            }
        }
    }
    none("string literals begin with `it`", &findings);
}

#[test]
fn guides_have_no_retired_word() {
    let root = project();
    let mut paths: Vec<PathBuf> = ["README.md", "SECURITY.md", "CONTRIBUTING.md"]
        .into_iter()
        .map(|name| root.join(name))
        .filter(|path| path.exists())
        .collect();
    for entry in std::fs::read_dir(root.join("docs")).expect("docs").flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "md") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    assert!(paths.len() > 10, "{paths:?}");
    let mut findings = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).expect("a guide");
        let name = path.strip_prefix(&root).expect("below the project").display().to_string();
        for (nth, line) in text.lines().enumerate() {
            for word in retired_words(line) {
                findings.push(format!("{name}:{}: {word}: {line}", nth + 1));
            }
        }
    }
    none("retired words in guides", &findings);
}

/// The comment of a line of Rust code.
fn comment(line: &str) -> Option<&str> {
    let at = line.match_indices("// ").map(|(at, _)| at).find(|at| {
        let before = line[..*at].trim_end_matches(['/', '!']);
        before.is_empty() || before.ends_with(' ')
    });
    let at = at.or_else(|| line.find("/// ")).or_else(|| line.find("//! "))?;
    Some(line[at..].trim_start_matches(['/', '!']))
}

/// The label of a wait, which is printed when the wait fails.
fn wait_label(line: &str) -> Option<&str> {
    line.split_once("until(\"")?.1.split('"').next()
}

#[test]
fn comments_and_scripts_have_no_retired_word() {
    let root = project();
    let mut paths = Vec::new();
    ["src", "tests", "benches", "examples"]
        .iter()
        .for_each(|folder| rust_files(&root.join(folder), &mut paths));
    let mut findings = Vec::new();
    for path in paths.iter().filter(|path| !path.ends_with("it/vocabulary.rs")) {
        let text = std::fs::read_to_string(path).expect("a source file");
        for (nth, line) in text.lines().enumerate() {
            for part in [comment(line), wait_label(line)].into_iter().flatten() {
                let words = retired_words(part).into_iter();
                findings.extend(words.map(|word| format!("{}:{}: {word}: {line}", path.display(), nth + 1)));
            }
        }
    }
    let mut scripts: Vec<PathBuf> =
        ["Cargo.toml", "deny.toml", ".ci/run", "tests/run"].iter().map(|name| root.join(name)).collect();
    for folder in [
        "examples/ci",
        "examples/container",
        "examples/inventories",
        "examples/notify",
        "examples/systemd",
        "manifests",
    ] {
        let entries = std::fs::read_dir(root.join(folder)).expect("a folder of examples");
        scripts.extend(entries.flatten().map(|entry| entry.path()));
    }
    for path in scripts {
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let words = retired_words(&text).into_iter();
        findings.extend(words.map(|word| format!("{}: {word}", path.display())));
    }
    none("retired words in comments and scripts", &findings);
}

/// The guides refer to the cases: the first lines of a case explain its plan.
#[test]
fn plan_cases_name_their_subject() {
    let subjectless = ["What", "Who", "Whose", "How", "Why", "Where", "Which", "It", "The same"];
    let folders = std::fs::read_dir(project().join("tests/cases")).expect("the cases").flatten();
    let mut findings = Vec::new();
    let mut number = 0;
    for path in folders.map(|entry| entry.path().join("manifest.yaml")) {
        let text = std::fs::read_to_string(&path).expect("a manifest");
        let lines: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("# ")).collect();
        let header = lines.join(" ");
        number += 1;
        if header.is_empty() || subjectless.iter().any(|word| header.starts_with(&format!("{word} "))) {
            findings.push(format!("{}: {header}", path.display()));
        }
        let words = retired_words(&header).into_iter();
        findings.extend(words.map(|word| format!("{}: {word}: {header}", path.display())));
    }
    assert!(number > 90, "only {number} cases were found");
    none("headers of plan cases", &findings);
}

#[test]
fn comments_are_found() {
    assert_eq!(comment("    /// one"), Some(" one"));
    assert_eq!(comment("//! two"), Some(" two"));
    assert_eq!(comment("f(\"http://x // y\"); // three"), Some(" y\"); // three"));
    assert_eq!(comment("let x = \"http://x\";"), None);
    assert_eq!(wait_label("until(\"it is logged\", || true);"), Some("it is logged"));
}

/// The subcommands that a help text lists: indented words before the options, under one heading or several.
pub fn subcommands(help: &str) -> Vec<String> {
    let list = help.split("ptions:\n").next().unwrap_or_default();
    let names = list.lines().filter_map(|line| {
        let entry =
            line.strip_prefix("  ").filter(|entry| entry.starts_with(|c: char| c.is_ascii_lowercase()))?;
        entry.split_whitespace().next()
    });
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn help_has_no_retired_word() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut waiting: Vec<Vec<String>> = vec![Vec::new()];
    let mut findings = Vec::new();
    let mut seen = 0;
    while let Some(verb) = waiting.pop() {
        let args: Vec<&str> = verb.iter().map(String::as_str).chain(["--help"]).collect();
        let output = abide(&args, folder.path(), b"");
        assert!(output.status.success(), "{args:?}");
        let help = stdout(&output);
        seen += 1;
        for line in help.lines() {
            for word in retired_words(line) {
                findings.push(format!("abide {}: {word}: {}", verb.join(" "), line.trim()));
            }
        }
        waiting.extend(subcommands(&help).into_iter().map(|name| [verb.clone(), vec![name]].concat()));
    }
    assert!(seen > 35, "only {seen} verbs were found");
    none("retired words in help", &findings);
}

#[test]
fn the_lexer_finds_literals_and_skips_comments() {
    let code = "let a: &'static str = \"one \\\"two\\\"\"; // \"no\"\nlet q = '\"'; /* \"no\" */ f(r#\"three\"#, b'\\'', \"four\")";
    let found: Vec<String> = literals(code).into_iter().map(|(_, literal)| literal).collect();
    assert_eq!(found, ["one \"two\"", "three", "four"]);
    assert_eq!(literals(code)[1].0, 2);
}

#[test]
fn retired_words_are_whole_words() {
    assert_eq!(retired_words("besides, recommend: this is no longer so"), Vec::<&str>::new());
    assert_eq!(retired_words("Whoever asks is told"), ["whoever", "is told"]);
    assert_eq!(retired_words("the body is no JSON"), ["is no X"]);
    assert_eq!(retired_words("there is no such path"), Vec::<&str>::new());
    assert_eq!(retired_words("run it as user nobody"), Vec::<&str>::new());
}
