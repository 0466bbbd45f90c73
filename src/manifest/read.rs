//! One part of a file → documents. The good path is serde and nothing else; the tree is built only where serde
//! refuses, and then finds everything that is wrong at once.

use serde::Deserialize;

use super::document::{Document, HostLabels};
use super::limits::Limits;
use super::problem::{Code, Fault, Path, Span};
use super::text::{Slice, Source};
use super::{structure, tree};

/// A document, by its number in its slice.
#[derive(Debug)]
pub struct Read {
    pub nth: usize,
    pub document: Option<Document>,
    pub faults: Vec<Fault>,
    pub dropped: Vec<Path>,
}

/// From here on a document is checked against the limits before a parser builds anything of it.
const OUTSIZE: usize = 256 << 10;

/// Reads one slice. `Err`: it could not be parsed at all.
pub fn slice(source: &Source, slice: &Slice, limits: &Limits) -> Result<Vec<Read>, Fault> {
    let text = &source.text[slice.bytes.clone()];
    if text.len() as u64 > limits.document_bytes {
        return Err(Fault {
            code: Code::TooLarge,
            span: Span::at(slice.line, slice.skipped + 1),
            message: format!(
                "the document is larger than {} bytes",
                limits.document_bytes
            ),
            hint: Some("if that is meant, raise --max-document-bytes".to_owned()),
        });
    }
    if text.len() > OUTSIZE || is_suspicious(text, limits) {
        tree::guard(&source.text, slice, limits)?;
    }
    let error = match quick(source.json, text) {
        Ok(documents) if documents.iter().flatten().all(is_plain) => {
            let reads = documents
                .into_iter()
                .enumerate()
                .filter_map(|(nth, document)| {
                    Some(Read {
                        nth,
                        document: Some(document?),
                        faults: Vec::new(),
                        dropped: Vec::new(),
                    })
                });
            return Ok(reads.collect());
        }
        Ok(_) => None,
        Err(refusal) => Some(refusal),
    };
    let nodes = match (tree::nodes(&source.text, slice, limits), &error) {
        // A JSON file keeps to JSON, though YAML might take it.
        (_, Some(refusal)) if source.json && refusal.syntax => return Err(refusal.fault(slice)),
        (Ok(nodes), _) => nodes,
        (Err(fault), _) => return Err(fault),
    };
    let reads: Vec<_> = nodes
        .iter()
        .flat_map(items)
        .enumerate()
        .filter_map(|(nth, node)| understood(nth, node))
        .collect();
    match error {
        // Serde refused what the grammar takes: report what serde said.
        Some(refusal)
            if nodes.iter().all(|node| !is_list(node))
                && reads.iter().all(|read| read.faults.is_empty()) =>
        {
            Err(refusal.fault(slice))
        }
        _ => Ok(reads),
    }
}

/// The documents of a tree: a list stands for what is in it.
pub fn items(node: &super::node::Node) -> std::slice::Iter<'_, super::node::Node> {
    match &node.kind {
        super::node::Kind::List(items) => items.iter(),
        _ => std::slice::from_ref(node).iter(),
    }
}

fn is_list(node: &super::node::Node) -> bool {
    matches!(node.kind, super::node::Kind::List(_))
}

fn understood(nth: usize, node: &super::node::Node) -> Option<Read> {
    if matches!(node.kind, super::node::Kind::Null) {
        return None;
    }
    let structure::Understood {
        document,
        faults,
        dropped,
    } = structure::understand(node);
    Some(Read {
        nth,
        document,
        faults,
        dropped,
    })
}

/// What serde said, for the case that nobody can say it better.
struct Refusal {
    message: String,
    line: usize,
    column: usize,
    syntax: bool,
}

impl Refusal {
    fn fault(&self, slice: &Slice) -> Fault {
        let first = self.line <= 1;
        Fault {
            code: Code::Syntax,
            span: Span::at(
                slice.line + (self.line as u32).saturating_sub(1),
                (self.column as u32).max(1) + if first { slice.skipped } else { 0 },
            ),
            message: self.message.clone(),
            hint: None,
        }
    }
}

/// Null documents keep their number.
fn quick(json: bool, text: &str) -> Result<Vec<Option<Document>>, Refusal> {
    if json {
        return serde_json::from_str(text)
            .map(|document| vec![document])
            .map_err(|error| Refusal {
                line: error.line(),
                column: error.column(),
                syntax: !error.is_data(),
                message: {
                    let text = error.to_string();
                    text.rsplit_once(" at line ")
                        .map_or(text.clone(), |(message, _)| message.to_owned())
                },
            });
    }
    let documents = serde_yaml::Deserializer::from_str(text).map(Option::<Document>::deserialize);
    documents
        .collect::<Result<_, _>>()
        .map_err(|error| Refusal {
            line: error.location().map_or(1, |at| at.line()),
            column: error.location().map_or(1, |at| at.column()),
            syntax: false,
            message: error.to_string(),
        })
}

/// Brackets that may nest beyond the limit cost the YAML crate the square of their depth; aliases may stand for
/// a tree much larger than the text. Counted without regard to quotes: a guess that only costs time.
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

/// A Process with nothing in it that is another kind's: what the struct takes is then what the grammar takes.
fn is_plain(document: &Document) -> bool {
    let in_body = document.api_version.is_none() && document.kind.is_none();
    let process = document
        .kind
        .as_deref()
        .is_none_or(|kind| kind == "Process");
    let of_policy = document.owner.is_some()
        || document.allow.is_some()
        || document.budgets.is_some()
        || document.windows.is_some();
    let of_request = document.op_type.is_some()
        || document.bk_app_code.is_some()
        || document.bk_app_secret.is_some()
        || document.bk_token.is_some()
        || document.bk_username.is_some();
    let labelled = document
        .hosts
        .iter()
        .flatten()
        .any(|host| matches!(host.labels, Some(HostLabels::Have(_))));
    process && !of_policy && (in_body || !of_request) && !labelled
}
