//! Slice parser: parses one slice of a file into documents.
//!
//! Valid input takes the serde path only. If serde rejects the input, a tree is built and all problems are found in it.

use std::collections::HashSet;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::document::{Document, HostLabels, HostValue};
use super::grammar::{self, Shape};
use super::limits::Limits;
use super::node::{Kind, Node};
use super::problem::{Code, FieldPath, Span, SpanProblem};
use super::text::{Slice, SourceText};
use super::{structure, tree};

/// A parsed document with its index in the slice.
#[derive(Debug)]
pub struct ParsedDocument {
    pub nth: usize,
    /// Start of the document, if already known.
    pub begin: Option<Span>,
    pub document: Option<Document>,
    pub faults: Vec<SpanProblem>,
    pub dropped: HashSet<FieldPath>,
}

/// Documents above this size are checked against the limits before a parser builds values.
const PRECHECK_BYTES: usize = 256 << 10;

/// Parses one slice. `Err` if its syntax is invalid or a limit is exceeded.
pub fn slice(
    source: &SourceText,
    slice: &Slice,
    limits: &Limits,
) -> Result<Vec<ParsedDocument>, SpanProblem> {
    let text = &source.text[slice.bytes.clone()];
    if text.len() as u64 > limits.document_bytes {
        let message = format!("the document is larger than {} bytes", limits.document_bytes);
        let hint = "if this is intended, raise --max-document-bytes".to_owned();
        return Err(SpanProblem::new(
            Code::TooLarge,
            Span::at(slice.line, slice.skipped + 1),
            message,
            Some(hint),
        ));
    }
    if text.len() > PRECHECK_BYTES || is_suspicious(text, limits) || limits.depth < Limits::default().depth {
        tree::check_limits(source, slice, limits)?;
    }
    let parse_error = match parse_fast(source.json, text) {
        Ok(documents) if documents.iter().flatten().all(is_plain) && is_exact(source.json, text) => {
            let reads = documents.into_iter().enumerate().filter_map(|(nth, document)| {
                let document = Some(document?);
                Some(ParsedDocument {
                    nth,
                    begin: None,
                    document,
                    faults: Vec::new(),
                    dropped: HashSet::new(),
                })
            });
            return Ok(collect_exact(reads));
        }
        Ok(_) => None,
        Err(parse_error) => Some(parse_error),
    };
    // The limit check has already parsed a large document: skip this pass.
    let well_formed =
        if text.len() > PRECHECK_BYTES && !source.json { Ok(()) } else { syntax(source.json, text) };
    let nodes = match (tree::nodes(source, slice, limits), well_formed) {
        // A JSON file must be valid JSON, even if it is valid YAML.
        (_, Err(parse_error)) if source.json => return Err(parse_error.fault(slice, text)),
        (Err(fault), _) => return Err(fault),
        (Ok(_), Err(parse_error)) => return Err(parse_error.fault(slice, text)),
        (Ok(nodes), Ok(())) => nodes,
    };
    let lists = !source.json && nodes.iter().any(|node| matches!(node.kind, Kind::List(_)));
    let items = items(nodes, source.json);
    if let Some(beyond) = items.get(limits.documents) {
        return Err(SpanProblem::too_many_documents(limits.documents, beyond.span));
    }
    let items = items.into_iter().enumerate();
    let reads = collect_exact(items.filter_map(|(nth, node)| from_node(nth, &node)));
    match parse_error {
        // The grammar accepts what serde rejected: only serde's message is available.
        Some(parse_error) if !lists && reads.iter().all(|read| read.faults.is_empty()) => {
            Err(parse_error.fault(slice, text))
        }
        _ => Ok(reads),
    }
}

/// Collects without spare capacity: a file may have a hundred thousand slices of one document each.
pub fn collect_exact<T>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut all: Vec<T> = items.collect();
    all.shrink_to_fit();
    all
}

/// The documents of a text: a list counts as its items. (JSON lists are split before parsing.)
pub fn items(nodes: Vec<Node>, json: bool) -> Vec<Node> {
    let inside = |node: Node| match node.kind {
        Kind::List(items) if !json => items,
        _ => vec![node],
    };
    nodes.into_iter().flat_map(inside).collect()
}

fn from_node(nth: usize, node: &Node) -> Option<ParsedDocument> {
    if matches!(node.kind, Kind::Null) {
        return None;
    }
    let structure::ShapeResult { document, faults, dropped } = structure::check_shape(node);
    Some(ParsedDocument { nth, begin: Some(node.span), document, faults, dropped })
}

/// serde's error, reported if the tree shows no problem.
struct ParserError {
    message: String,
    line: usize,
    column: usize,
}

const TABS: &str = "YAML does not allow tabs as indentation, or @ or ` at the start of a plain scalar";

impl ParserError {
    fn fault(&self, slice: &Slice, text: &str) -> SpanProblem {
        let line = slice.line + (self.line as u32).saturating_sub(1);
        let skipped = if self.line <= 1 { slice.skipped } else { 0 };
        let span = Span::at(line, (self.column as u32).max(1) + skipped);
        // The most common cause, which the parser's message does not name.
        let line_text = text.lines().nth(self.line.saturating_sub(1)).unwrap_or_default();
        let first = line_text.chars().nth(self.column.saturating_sub(1));
        let hint = matches!(first, Some('\t' | '@' | '`')).then(|| TABS.to_owned());
        SpanProblem::new(Code::Syntax, span, strip_positions(&self.message), hint)
    }
}

impl From<serde_json::Error> for ParserError {
    fn from(error: serde_json::Error) -> ParserError {
        ParserError { line: error.line(), column: error.column(), message: error.to_string() }
    }
}

impl From<serde_yaml::Error> for ParserError {
    fn from(error: serde_yaml::Error) -> ParserError {
        let (line, column) = error.location().map_or((1, 1), |at| (at.line(), at.column()));
        ParserError { line, column, message: error.to_string() }
    }
}

/// Removes positions from a parser message: they are relative to the slice, and the problem has its own location.
fn strip_positions(message: &str) -> String {
    let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let mut out = String::new();
    let mut rest = message;
    while let Some((before, after)) = rest.split_once(" at line ") {
        out.push_str(before);
        rest = &after[digits(after)..];
        if let Some(column) = rest.strip_prefix(" column ") {
            rest = &column[digits(column)..];
        }
    }
    out + rest
}

/// Parses with serde only. Null documents keep their index.
fn parse_fast(json: bool, text: &str) -> Result<Vec<Option<Document>>, ParserError> {
    if json {
        return Ok(vec![serde_json::from_str(text)?]);
    }
    let documents = serde_yaml::Deserializer::from_str(text).map(Option::<Document>::deserialize);
    Ok(documents.collect::<Result<_, _>>()?)
}

/// Checks the syntax only.
fn syntax(json: bool, text: &str) -> Result<(), ParserError> {
    if json {
        serde_json::from_str::<IgnoredAny>(text)?;
        return Ok(());
    }
    for document in serde_yaml::Deserializer::from_str(text) {
        IgnoredAny::deserialize(document)?;
    }
    Ok(())
}

/// Whether a text may be expensive to parse. The YAML crate needs quadratic time in the nesting depth, and aliases may
/// expand to a tree much larger than the text. Quotes are ignored: a false positive only costs time.
fn is_suspicious(text: &str, limits: &Limits) -> bool {
    let (mut depth, mut deepest, mut stars) = (0usize, 0, 0);
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'*' => stars += 1,
            _ => {}
        }
    }
    deepest > limits.depth || stars > limits.aliases
}

/// Whether serde's result is exact. serde ignores YAML tags, and accepts a JSON list for a struct.
fn is_exact(json: bool, text: &str) -> bool {
    if json {
        let value = serde_json::from_str(text).unwrap_or_default();
        return lists_fit(&value, &Shape::Section(&grammar::PROCESS));
    }
    let is_token_start =
        |at: usize| at == 0 || matches!(text.as_bytes()[at - 1], b' ' | b'\n' | b'[' | b'{' | b',' | b'\t');
    !text.match_indices('!').any(|(at, _)| is_token_start(at))
}

/// Whether lists occur only where the grammar has lists.
fn lists_fit(value: &serde_json::Value, shape: &Shape) -> bool {
    use serde_json::Value;
    match (value, shape) {
        (Value::Array(items), Shape::List(of)) => items.iter().all(|item| lists_fit(item, of)),
        (Value::Array(_), _) => false,
        (Value::Object(map), Shape::Section(section)) => {
            let known = |(name, value): (&String, &Value)| {
                section.entry(name).is_none_or(|entry| lists_fit(value, &entry.shape))
            };
            map.iter().all(known)
        }
        (Value::Object(map), Shape::Map(of)) => map.values().all(|value| lists_fit(value, of)),
        (value, Shape::OneOf(shapes)) => shapes.iter().any(|shape| lists_fit(value, shape)),
        _ => true,
    }
}

/// Whether a document is a Process without fields of other kinds. For these, the struct and the grammar are equivalent.
fn is_plain(document: &Document) -> bool {
    let in_body = document.api_version.is_none() && document.kind.is_none();
    let process = document.kind.as_deref().is_none_or(|kind| kind == "Process");
    let of_policy = document.owner.is_some()
        || document.allow.is_some()
        || document.budgets.is_some()
        || document.windows.is_some();
    let of_request = document.op_type.is_some()
        || document.bk_app_code.is_some()
        || document.bk_app_secret.is_some()
        || document.bk_token.is_some()
        || document.bk_username.is_some();
    let labelled = document.hosts.iter().flatten().filter_map(HostValue::entry);
    let labelled = labelled.into_iter().any(|host| matches!(host.labels, Some(HostLabels::Have(_))));
    let of_overlay = document.base.is_some() || document.patches.is_some();
    process && document.vars.is_none() && !of_policy && !of_overlay && (in_body || !of_request) && !labelled
}
