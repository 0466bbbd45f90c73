//! Source texts: encoding checks, misleading characters, and the split of a file into documents.
//!
//! A line `---` starts a document and a line `...` ends one, in any context: YAML allows them nowhere else. Files are split
//! at these lines before parsing, so an invalid document cannot hide the next one, and cores can share a file. A file with
//! `%` directives is not split, because directives apply across the split.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde_json::value::RawValue;

use super::find::FileContent;
use super::problem::{Code, Excerpt, Problem, Span, SpanProblem};
use crate::escape::is_hidden;

/// The text of one file and the slices of its documents.
#[derive(Clone, Debug)]
pub struct SourceText {
    /// Display name: the path as passed, or `<stdin>`.
    pub name: Arc<str>,
    pub text: Arc<str>,
    pub json: bool,
    pub slices: Vec<Slice>,
    /// Byte offset of every [`STRIDE`]th line, built for the first problem. Sparse, since a file may consist of line ends.
    lines: OnceLock<Vec<usize>>,
}

impl SourceText {
    /// Splits a text into documents, up to slightly more than the limit.
    pub fn new(name: Arc<str>, text: String, json: bool, most: usize) -> SourceText {
        let slices = if json { json_slices(&text, most) } else { slices(&text, most) };
        SourceText { name, text: text.into(), json, slices, lines: OnceLock::new() }
    }

    /// The file as a [`FileContent`]. The text is shared, not copied.
    pub fn file_content(&self, scope_dir: &Path) -> FileContent {
        let content = Arc::from(Arc::clone(&self.text));
        FileContent {
            name: self.name.to_string(),
            scope_dir: scope_dir.to_owned(),
            bytes: self.text.len() as u64,
            content,
        }
    }

    pub fn problem(&self, fault: SpanProblem) -> Problem {
        let Span { line, column, len, byte } = fault.span;
        let excerpt = match fault.private {
            true => Excerpt::default(),
            false => {
                Excerpt::around(&self.text, byte.unwrap_or_else(|| self.byte(line, column)), len as usize)
            }
        };
        Problem::new(self.name.clone(), fault, excerpt)
    }

    /// The byte at a line and column, both from 1.
    fn byte(&self, line: u32, column: u32) -> usize {
        let starts = self.lines.get_or_init(|| {
            std::iter::once(0).chain(line_starts(&self.text, 0).skip(STRIDE - 1).step_by(STRIDE)).collect()
        });
        let line = (line as usize).saturating_sub(1);
        let near = starts.get(line / STRIDE).copied();
        let start = near.and_then(|near| match line % STRIDE {
            0 => Some(near),
            more => line_starts(&self.text, near).nth(more - 1),
        });
        let start = start.unwrap_or(self.text.len());
        let rest =
            self.text[start..].chars().take_while(|c| *c != '\n').take((column as usize).saturating_sub(1));
        start + rest.map(char::len_utf8).sum::<usize>()
    }
}

/// Lines between two entries of the index.
const STRIDE: usize = 64;

/// Offsets of the line starts after a position.
fn line_starts(text: &str, from: usize) -> impl Iterator<Item = usize> + '_ {
    text.as_bytes()[from..].iter().enumerate().filter(|(_, b)| **b == b'\n').map(move |(at, _)| from + at + 1)
}

/// A part of a file that is parsed separately: one document, or a whole file with directives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    pub bytes: Range<usize>,
    /// The number of the slice's first line, from 1.
    pub line: u32,
    /// Number of characters of that line before the slice.
    pub skipped: u32,
}

/// Checks that bytes are UTF-8 without misleading characters. An error includes the valid text, for the excerpt.
pub fn decode(bytes: Vec<u8>) -> Result<String, (SpanProblem, String)> {
    let fault = |code, (line, column), message: String, hint: &str| {
        SpanProblem::new(code, Span::at(line, column), message, Some(hint.to_owned()))
    };
    match bytes.as_slice() {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            let message = "the file is UTF-16".into();
            return Err((fault(Code::NotText, (1, 1), message, "save it as UTF-8"), String::new()));
        }
        [0xef, 0xbb, 0xbf, ..] => {
            let message = "the file begins with a byte order mark, U+FEFF".into();
            let fault = fault(Code::HiddenCharacter, (1, 1), message, "save it as UTF-8 without a BOM");
            return Err((fault, excerpt_text(bytes, 0)));
        }
        _ => {}
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            let bytes = error.into_bytes();
            let message = format!("byte 0x{:02x} is not UTF-8", bytes[valid]);
            let shown = excerpt_text(bytes, valid);
            return Err((fault(Code::NotText, position(&shown, valid), message, "save it as UTF-8"), shown));
        }
    };
    let found = text.bytes().position(suspicious).and_then(|from| hidden(&text, from));
    match found.or_else(|| lone_return(&text)) {
        None => Ok(text),
        Some((at, c)) => {
            let (code, what, hint) = about_hidden(c);
            let message = format!("the file contains {what}, U+{:04X}", c as u32);
            Err((fault(code, position(&text, at), message, hint), text))
        }
    }
}

/// The valid text before a byte, and a few characters after it for the excerpt. Replacement characters for all invalid
/// bytes would need three times the memory of the file.
fn excerpt_text(mut bytes: Vec<u8>, valid: usize) -> String {
    const SHOWN_BYTES: usize = 512;
    let rest = &bytes[valid..];
    let rest = String::from_utf8_lossy(&rest[..rest.len().min(SHOWN_BYTES)]).into_owned();
    bytes.truncate(valid);
    let mut text = String::from_utf8(bytes).unwrap_or_default();
    text.reserve_exact(rest.len());
    text.push_str(&rest);
    text
}

fn about_hidden(c: char) -> (Code, &'static str, &'static str) {
    match c {
        '\0' => (Code::NotText, "a NUL byte", "the file is binary, or UTF-16 without a byte order mark"),
        '\u{feff}' => (Code::HiddenCharacter, "a byte order mark", "remove it"),
        '\r' | '\u{85}' | '\u{2028}' | '\u{2029}' => (
            Code::HiddenCharacter,
            "a line end that only some programs recognize",
            "the text after it may be part of a comment or not; write a \\u escape in double quotes",
        ),
        c if c.is_control() => (Code::NotText, "a control character", "the file is binary or damaged"),
        _ => (
            Code::HiddenCharacter,
            "a character that reverses the displayed text",
            "a reviewer would not see what runs; write a \\u escape in double quotes",
        ),
    }
}

/// Whether a byte may start a hidden character: a control byte, or the first byte of U+008x, U+061C, U+20xx, U+FExx.
fn suspicious(b: u8) -> bool {
    matches!(b, 0..=8 | 11 | 12 | 14..=31 | 0x7f | 0xc2 | 0xd8 | 0xe2 | 0xef)
}

/// Whether a carriage return is not part of a line end.
fn lone_return(text: &str) -> Option<(usize, char)> {
    let bytes = text.as_bytes();
    let lone = |at: &usize| bytes[*at] == b'\r' && bytes.get(at + 1) != Some(&b'\n');
    (text.find('\r')?..bytes.len()).find(lone).map(|at| (at, '\r'))
}

/// The first hidden character at or after byte `from`.
fn hidden(text: &str, from: usize) -> Option<(usize, char)> {
    text[from..].char_indices().map(|(at, c)| (from + at, c)).find(|(_, c)| is_hidden(*c))
}

/// Line and column (both from 1, columns in characters) of a byte.
pub fn position(text: &str, byte: usize) -> (u32, u32) {
    let before = &text[..text.floor_char_boundary(byte.min(text.len()))];
    let line = before.bytes().filter(|b| *b == b'\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |at| at + 1);
    (line as u32, before[start..].chars().count() as u32 + 1)
}

/// Splits a YAML text before `---` and after `...`.
pub fn slices(text: &str, most: usize) -> Vec<Slice> {
    let is = |line: &str, marker| {
        line.strip_prefix(marker)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
    };
    let mut slices = Vec::new();
    let (mut start, mut first_line, mut line, mut at) = (0, 1, 1, 0);
    for raw in text.split_inclusive('\n') {
        if slices.len() > most {
            return slices;
        }
        if raw.starts_with('%') {
            return vec![Slice { bytes: 0..text.len(), line: 1, skipped: 0 }];
        }
        if is(raw, "---") && at > start {
            slices.push(Slice { bytes: start..at, line: first_line, skipped: 0 });
            (start, first_line) = (at, line);
        }
        at += raw.len();
        line += 1;
        if is(raw, "...") {
            // A second `...` ends no document.
            if text[start..at].trim_end() == "..." {
                (start, first_line) = (at, line);
                continue;
            }
            slices.push(Slice { bytes: start..at, line: first_line, skipped: 0 });
            (start, first_line) = (at, line);
        }
    }
    if start < text.len() {
        slices.push(Slice { bytes: start..text.len(), line: first_line, skipped: 0 });
    }
    slices
}

/// Splits a JSON text into consecutive values; a list counts as its items. Invalid text is the last slice.
pub fn json_slices(text: &str, most: usize) -> Vec<Slice> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    let mut found: Vec<Range<usize>> = Vec::new();
    let offset = |part: &str| part.as_ptr() as usize - text.as_ptr() as usize;
    while let Some(value) = values.next().filter(|_| found.len() <= most) {
        let Ok(value) = value else {
            let rest = text[values.byte_offset()..].trim_start();
            found.push(offset(rest)..text.len());
            break;
        };
        let items: Vec<&RawValue> = match value.get().starts_with('[') {
            true => serde_json::from_str(value.get()).unwrap_or_else(|_| vec![value]),
            false => vec![value],
        };
        found.extend(items.iter().map(|item| offset(item.get())..offset(item.get()) + item.get().len()));
    }
    // Lines and columns continue from the previous value, so that one pass is enough.
    let (mut line, mut skipped, mut counted) = (1, 0, 0);
    let mut slice = |bytes: Range<usize>| {
        let passed = &text[counted..bytes.start];
        line += passed.bytes().filter(|b| *b == b'\n').count() as u32;
        skipped = match passed.rfind('\n') {
            Some(at) => passed[at + 1..].chars().count() as u32,
            None => skipped + passed.chars().count() as u32,
        };
        counted = bytes.start;
        Slice { bytes, line, skipped }
    };
    found.into_iter().map(&mut slice).collect()
}

pub fn is_json(text: &str) -> bool {
    serde_json::Deserializer::from_str(text).into_iter::<serde::de::IgnoredAny>().all(|value| value.is_ok())
}

/// Line and column of a slice's first content, after markers, blank lines and comments.
pub fn content_start(text: &str, slice: &Slice) -> (u32, u32) {
    for (line, raw) in (slice.line..).zip(text[slice.bytes.clone()].lines()) {
        let mut rest = raw.trim_start();
        let mut skipped = raw.len() - rest.len();
        if let Some(after) = raw.strip_prefix("---") {
            rest = after.trim_start();
            skipped = raw.len() - rest.len();
        }
        if !rest.is_empty() && !rest.starts_with('#') {
            let before = if line == slice.line { slice.skipped } else { 0 };
            return (line, before + skipped as u32 + 1);
        }
    }
    (slice.line, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_split_at_document_markers() {
        let text = "# head\na: 1\n---\nb: 2\n...\nd: 4\n--- # note\nc: |\n  --- not a marker\n---x: 1\n";
        let cut: Vec<_> = slices(text, 100).iter().map(|s| (s.line, &text[s.bytes.clone()])).collect();
        assert_eq!(
            cut,
            [
                (1, "# head\na: 1\n"),
                (3, "---\nb: 2\n...\n"),
                (6, "d: 4\n"),
                (7, "--- # note\nc: |\n  --- not a marker\n---x: 1\n"),
            ]
        );
        assert_eq!(content_start(text, &slices(text, 100)[0]), (2, 1));
        assert_eq!(content_start(text, &slices(text, 100)[3]), (8, 1));
        assert_eq!(content_start("--- {a: 1}", &slices("--- {a: 1}", 100)[0]), (1, 5));
    }

    #[test]
    fn positions_are_found_after_many_lines() {
        let text: String = (1..=1000).map(|n| format!("{}x{n}\n", " ".repeat(n % 7))).collect();
        let source = SourceText::new("a".into(), text.clone(), false, 100);
        let mut start = 0;
        for (line, raw) in (1..).zip(text.split_inclusive('\n')) {
            assert_eq!((source.byte(line, 1), source.byte(line, 2)), (start, start + 1), "{line}");
            start += raw.len();
        }
        assert_eq!(source.byte(1001, 1), text.len());
        assert_eq!(source.byte(5000, 3), text.len());
    }

    #[test]
    fn a_file_with_directives_is_not_split() {
        assert_eq!(slices("%YAML 1.2\n---\na: 1\n---\nb: 2\n", 100).len(), 1);
    }

    #[test]
    fn invalid_characters_are_located() {
        let fault = |bytes: &[u8]| {
            let (fault, _) = decode(bytes.to_vec()).unwrap_err();
            (fault.code, fault.span.line, fault.span.column)
        };
        assert_eq!(fault(b"\xff\xfea\0"), (Code::NotText, 1, 1));
        assert_eq!(fault(b"\xef\xbb\xbfa: 1"), (Code::HiddenCharacter, 1, 1));
        assert_eq!(fault(b"a: 1\nb: \xff"), (Code::NotText, 2, 4));
        assert_eq!(fault(b"a: 1\n\0"), (Code::NotText, 2, 1));
        assert_eq!(fault("a: é\u{202e}x".as_bytes()), (Code::HiddenCharacter, 1, 5));
        assert_eq!(fault("a: 1\nb: \u{feff}".as_bytes()), (Code::HiddenCharacter, 2, 4));
        assert!(decode("a: “typographic” é 中文 ‰\t\r\n".as_bytes().to_vec()).is_ok());
    }
}
