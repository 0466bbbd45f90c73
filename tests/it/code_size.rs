//! Code size: limits for files, functions and structs, read from the formatted sources.
//!
//! A limit is reached when a file, function or struct has more than one purpose. The remedy is a part with a name of its
//! own, not an exception.

use std::path::PathBuf;

use crate::support::project;
use crate::vocabulary::rust_files;

const MAX_FILE_LINES: usize = 500;
const MAX_FUNCTION_LINES: usize = 80;
const MAX_STRUCT_FIELDS: usize = 12;

/// Folders whose files and functions are measured. Structs are measured in `src` only: fixtures are argument types.
const CODE: [&str; 4] = ["src", "tests", "benches", "examples"];

/// Folders and files of types whose fields a document, a protocol or the command line defines.
const DEFINED_OUTSIDE: [(&str, &str); 4] = [
    ("src/contract/", "public JSON"),
    ("src/gse/", "requests and responses of GSE and JOB"),
    ("src/agent_protocol.rs", "messages between gateway and agents"),
    ("src/cli/target/config.rs", "config files"),
];

/// Structs that are defined by a stored or written form, each with the reason.
const DEFINED_BY_FORM: [(&str, &str); 4] = [
    ("src/agent/state.rs: InstanceState", "JSON in the agent's store"),
    ("src/execute/ledger.rs: Entry", "JSON in the controller's store"),
    ("src/gateway/tasks.rs: TaskItem", "JSON in the gateway's store"),
    ("src/model/spec.rs: Spec", "one field per section of a spec"),
];

/// The files of these folders with their lines, sorted by path.
fn files(folders: &[&str]) -> Vec<(String, Vec<String>)> {
    let root = project();
    let mut paths: Vec<PathBuf> = Vec::new();
    folders.iter().for_each(|folder| rust_files(&root.join(folder), &mut paths));
    paths.sort();
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).expect("a path below the project").display().to_string();
        let text = std::fs::read_to_string(&path).expect("a source file");
        (name, text.lines().map(str::to_owned).collect())
    };
    paths.into_iter().map(read).collect()
}

/// The rest of a line behind its indentation and visibility.
fn item(line: &str) -> &str {
    let line = line.trim_start();
    match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or(line, |(_, item)| item),
        Some(rest) if rest.starts_with(' ') => rest.trim_start(),
        Some(_) | None => line,
    }
}

/// The name of an item: `fn` or `struct`, behind the keywords that may precede it.
fn name_of<'a>(line: &'a str, keyword: &str) -> Option<&'a str> {
    let mut rest = item(line);
    for before in ["const ", "async ", "unsafe ", "extern \"C\" "] {
        rest = rest.strip_prefix(before).unwrap_or(rest);
    }
    let name = rest.strip_prefix(keyword)?.strip_prefix(' ')?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    (end > 0).then(|| &name[..end])
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The lines of an item from its first line on: the formatter puts its closing brace below the beginning of the item.
fn body(lines: &[String]) -> &[String] {
    let depth = indentation(&lines[0]);
    let is_end = |line: &String| {
        let rest = line.get(depth..).unwrap_or_default();
        indentation(line) == depth
            && (rest.starts_with('}') || rest.starts_with(") -> ") && rest.ends_with(';'))
    };
    // One line is the whole item: `fn f() {}`, `struct Unit;`.
    if lines[0].ends_with(['}', ';']) {
        return &lines[..1];
    }
    let end = lines.iter().skip(1).position(is_end).map_or(lines.len(), |at| at + 2);
    &lines[..end]
}

/// The functions of a file: name and number of lines.
fn functions(lines: &[String]) -> Vec<(&str, usize)> {
    let found = lines.iter().enumerate().filter_map(|(at, line)| Some((at, name_of(line, "fn")?)));
    found.map(|(at, name)| (name, body(&lines[at..]).len())).collect()
}

/// The structs of a file with named fields: name and number of fields.
fn structs(lines: &[String]) -> Vec<(&str, usize)> {
    let found = lines.iter().enumerate().filter_map(|(at, line)| Some((at, name_of(line, "struct")?)));
    let fields = |at: usize| {
        let depth = indentation(&lines[at]) + 4;
        let is_field = |line: &&String| {
            let name = item(line).split_once(": ").map(|(name, _)| name.trim_start_matches("r#"));
            let is_name = |name: &str| name.chars().all(|c| c.is_alphanumeric() || c == '_');
            indentation(line) == depth && name.is_some_and(is_name)
        };
        body(&lines[at..]).iter().filter(is_field).count()
    };
    found.map(|(at, name)| (name, fields(at))).collect()
}

fn none_over(limit: usize, what: &str, findings: Vec<String>) {
    assert!(findings.is_empty(), "more than {limit} {what}:\n{}", findings.join("\n"));
}

#[test]
fn no_file_is_longer_than_its_limit() {
    let all = files(&CODE);
    assert!(all.len() > 600, "only {} files were found", all.len());
    let long = all.iter().filter(|(_, lines)| lines.len() > MAX_FILE_LINES);
    none_over(
        MAX_FILE_LINES,
        "lines",
        long.map(|(file, lines)| format!("{file}: {}", lines.len())).collect(),
    );
}

#[test]
fn no_function_is_longer_than_its_limit() {
    let all = files(&CODE);
    let mut number = 0;
    let mut long = Vec::new();
    for (file, lines) in &all {
        let functions = functions(lines);
        number += functions.len();
        let found = functions.into_iter().filter(|(_, lines)| *lines > MAX_FUNCTION_LINES);
        long.extend(found.map(|(name, lines)| format!("{file}: {name}: {lines}")));
    }
    assert!(number > 5000, "only {number} functions were found");
    none_over(MAX_FUNCTION_LINES, "lines", long);
}

#[test]
fn no_struct_has_more_fields_than_its_limit() {
    let mut number = 0;
    let (mut large, mut by_form) = (Vec::new(), Vec::new());
    for (file, lines) in &files(&["src"]) {
        let structs = structs(lines);
        number += structs.len();
        if DEFINED_OUTSIDE.iter().any(|(path, _)| file.starts_with(path)) {
            continue;
        }
        for (name, fields) in structs.into_iter().filter(|(_, fields)| *fields > MAX_STRUCT_FIELDS) {
            let found = format!("{file}: {name}");
            match DEFINED_BY_FORM.iter().any(|(known, _)| *known == found) {
                true => by_form.push(found),
                false => large.push(format!("{found}: {fields}")),
            }
        }
    }
    assert!(number > 400, "only {number} structs were found");
    none_over(MAX_STRUCT_FIELDS, "fields", large);
    let unused: Vec<&str> = DEFINED_BY_FORM
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| !by_form.iter().any(|one| one == name))
        .collect();
    assert!(
        unused.is_empty(),
        "these structs are small by now; remove them from DEFINED_BY_FORM: {unused:?}"
    );
}

#[test]
fn functions_and_structs_are_measured() {
    let code = "\
impl A {
    pub(super) async fn f(
        a: u8,
    ) -> u8 {
        if a > 1 {
            2
        }
    }

    fn g() {}
}

pub struct B<'a> {
    /// Comment: not a field.
    pub a: u8,
    pub(crate) r#b: &'a [u8],
    c: Vec<(
        u8,
        u8,
    )>,
}

struct C;
trait D {
    fn h(
        &self,
    ) -> u8;
}
";
    let lines: Vec<String> = code.lines().map(str::to_owned).collect();
    assert_eq!(functions(&lines), [("f", 7), ("g", 1), ("h", 3)]);
    assert_eq!(structs(&lines), [("B", 3), ("C", 0)]);
}
