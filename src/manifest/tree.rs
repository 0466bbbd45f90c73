//! Tree builder: parses text into [`Node`]s with positions, within the limits.
//!
//! Iterative, so that no input causes recursion. YAML and JSON use the same parser; JSON syntax errors are found earlier.

use std::collections::HashMap;

use granit_parser::{ErrorKind, Event, Marker, Parser, ScalarStyle, Tag};

use super::limits::Limits;
use super::node::{Kind, Node, resolve};
use super::problem::{Code, Span, SpanProblem};
use super::text::{Slice, SourceText};

/// The documents of a slice.
pub fn nodes(source: &SourceText, slice: &Slice, limits: &Limits) -> Result<Vec<Node>, SpanProblem> {
    let mut builder = Builder::default();
    parse_events(source, slice, limits, |event, span| builder.on_event(event, span))?;
    Ok(builder.documents)
}

/// Checks a slice against the limits, without building nodes.
pub fn check_limits(source: &SourceText, slice: &Slice, limits: &Limits) -> Result<(), SpanProblem> {
    parse_events(source, slice, limits, |_, _| CopiedValues(0))
}

/// Number of values that an event copied: for an alias, or for an anchor.
struct CopiedValues(usize);

fn parse_events<'t>(
    source: &'t SourceText,
    slice: &Slice,
    limits: &Limits,
    mut sink: impl FnMut(Event<'t>, Span) -> CopiedValues,
) -> Result<(), SpanProblem> {
    let options = granit_parser::options! {
        flow_nesting_limit: limits.depth.saturating_add(1),
        block_nesting_limit: limits.depth.saturating_add(1),
        // JSON has no limit for the length of a key; this is the YAML crate's.
        simple_key_max_lookahead: if source.json { limits.document_bytes as usize } else { 1024 },
    };
    let too_large = |span, message: String, flag: &str| {
        SpanProblem::new(Code::TooLarge, span, message, Some(format!("if this is intended, raise {flag}")))
    };
    let too_deep =
        |span| too_large(span, format!("values are nested more than {} deep", limits.depth), "--max-depth");
    let (mut documents, mut depth, mut aliases, mut values) = (0, 0, 0, 0);
    for event in Parser::new_from_str_with_options(&source.text[slice.bytes.clone()], options) {
        let (event, raw) = event.map_err(|error| {
            let span = span_of(slice, *error.marker(), None);
            match error.kind() {
                ErrorKind::RecursionLimitExceeded => too_deep(span),
                _ => SpanProblem::new(Code::Syntax, span, error.info(), None),
            }
        })?;
        let span = span_of(slice, raw.start, Some(raw.end));
        values += 1;
        match &event {
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth -= 1,
            Event::Alias(_) => aliases += 1,
            Event::DocumentStart(..) => (documents, aliases, values) = (documents + 1, 0, 0),
            _ => {}
        }
        if depth > limits.depth {
            return Err(too_deep(span));
        }
        if documents > limits.documents {
            return Err(SpanProblem::too_many_documents(limits.documents, span));
        }
        if aliases > limits.aliases {
            let message = format!("the document has more than {} aliases", limits.aliases);
            return Err(too_large(span, message, "--max-aliases"));
        }
        values += sink(event, span).0;
        if values > limits.values {
            let message = format!("the document has more than {} values", limits.values);
            return Err(too_large(span, message, "--max-values"));
        }
    }
    Ok(())
}

/// Converts a position. The parser counts lines from 1 and columns from 0, within the slice.
fn span_of(slice: &Slice, start: Marker, end: Option<Marker>) -> Span {
    let len = match end {
        Some(end) if end.line() == start.line() => end.col().saturating_sub(start.col()),
        Some(_) | None => 1,
    };
    Span {
        line: slice.line + (start.line() as u32).saturating_sub(1),
        column: start.col() as u32 + 1 + if start.line() <= 1 { slice.skipped } else { 0 },
        len: len.max(1) as u32,
        byte: start.byte_offset().map(|at| slice.bytes.start + at),
    }
}

#[derive(Default)]
struct Builder {
    documents: Vec<Node>,
    open: Vec<OpenCollection>,
    anchors: HashMap<usize, (Node, usize)>,
    made: usize,
}

/// A list or map that is not closed yet.
struct OpenCollection {
    span: Span,
    anchor: usize,
    made_before: usize,
    content: Content,
}

enum Content {
    List(Vec<Node>),
    Map(Vec<(Node, Node)>, Option<Node>),
}

impl Builder {
    fn on_event(&mut self, event: Event<'_>, span: Span) -> CopiedValues {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.made += 1;
                let kind = scalar(&text, style, tag.as_deref());
                self.put(Node { span, kind }, anchor, 1)
            }
            Event::SequenceStart(_, anchor, _) => self.begin(span, anchor, Content::List(Vec::new())),
            Event::MappingStart(_, anchor, _) => self.begin(span, anchor, Content::Map(Vec::new(), None)),
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(OpenCollection { span, anchor, made_before, content }) = self.open.pop() else {
                    return CopiedValues(0);
                };
                let kind = match content {
                    Content::List(items) => Kind::List(items),
                    Content::Map(entries, _) => Kind::Map(entries),
                };
                self.put(Node { span, kind }, anchor, self.made - made_before)
            }
            Event::Alias(id) => {
                // An alias inside of its own anchor: the value is still open and cannot be copied.
                let (node, size) = match self.anchors.get(&id) {
                    Some((node, size)) => (Node { span, kind: node.kind.clone() }, *size),
                    None => (Node { span, kind: Kind::Tagged("an alias of its own container".into()) }, 1),
                };
                self.made += size;
                self.put(node, 0, size);
                CopiedValues(size)
            }
            Event::DocumentEnd => {
                self.anchors.clear();
                CopiedValues(0)
            }
            _ => CopiedValues(0),
        }
    }

    fn begin(&mut self, span: Span, anchor: usize, content: Content) -> CopiedValues {
        self.made += 1;
        self.open.push(OpenCollection { span, anchor, made_before: self.made, content });
        CopiedValues(0)
    }

    fn put(&mut self, node: Node, anchor: usize, size: usize) -> CopiedValues {
        let copied = if anchor == 0 { 0 } else { size };
        if anchor != 0 {
            self.anchors.insert(anchor, (node.clone(), size));
        }
        match self.open.last_mut().map(|open| &mut open.content) {
            None => self.documents.push(node),
            Some(Content::List(items)) => items.push(node),
            Some(Content::Map(entries, key)) => match key.take() {
                None => *key = Some(node),
                Some(key) => entries.push((key, node)),
            },
        }
        CopiedValues(copied)
    }
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Kind {
    match tag {
        None if style == ScalarStyle::Plain => resolve(text),
        None => Kind::Text(text.to_owned()),
        Some(tag) => match tag.core_suffix() {
            Some("str") => Kind::Text(text.to_owned()),
            Some(_) => resolve(text),
            None => Kind::Tagged(tag.original()),
        },
    }
}
