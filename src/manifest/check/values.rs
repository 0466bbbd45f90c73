//! Checks of single values: each method returns a typed value or records a problem.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::manifest::document::{Map, Text, TextOrNumber};
use crate::manifest::explain;
use crate::manifest::node::shorten;
use crate::manifest::problem::{Code, FieldPath, MAX_PER_DOCUMENT, PathProblem, did_you_mean};
use crate::manifest::variables::{self, NamedVariable, VariableUse, is_absolute};
use crate::model::{Amount, Percent, seconds};

#[derive(Debug, Default)]
pub struct ValueChecker {
    pub findings: Vec<PathProblem>,
    /// Variables used by the templates so far.
    pub uses: VariableUse,
    error: bool,
}

impl ValueChecker {
    /// Records a problem. A hostile document may have millions: only the first are kept, and at least one error.
    pub fn report(&mut self, finding: PathProblem) {
        if self.findings.len() < 2 * MAX_PER_DOCUMENT || (finding.is_error() && !self.error) {
            self.error |= finding.is_error();
            self.findings.push(finding);
        }
    }

    /// Reports a missing field. The problem points at the parent.
    pub fn report_missing(&mut self, path: FieldPath) {
        let hint = meaning(&path);
        let finding = PathProblem::new(Code::MissingField, path.clone(), format!("{path} is missing"));
        self.report(PathProblem { hint, ..finding }.at_key());
    }

    /// Text that is not empty. GSE's documents use an empty text for "unset".
    pub fn text(&mut self, path: &FieldPath, value: Option<&Text>) -> Option<String> {
        let text = value.filter(|text| !text.is_empty())?;
        if text.contains('\0') {
            let message =
                format!("{path} contains a NUL character, which is not allowed in a command or path");
            self.report(PathProblem::new(Code::NotText, path.clone(), message).hint("remove it"));
            return None;
        }
        if text.len() > MAX_TEXT {
            let message = format!("{path} has {} bytes, more than the limit of {MAX_TEXT}", text.len());
            self.report(
                PathProblem::new(Code::TooLarge, path.clone(), message).hint("put it into a separate file"),
            );
            return None;
        }
        Some(text.to_string())
    }

    /// Text in which variables are replaced.
    pub fn template(&mut self, path: &FieldPath, value: Option<&Text>, numbered: bool) -> Option<String> {
        let text = self.text(path, value)?;
        let named = &mut self.uses.named;
        let mut note = |name: &str, has_default| {
            // A hostile document may use millions: only the first are checked one by one.
            if named.len() < 2 * MAX_PER_DOCUMENT {
                let (path, name) = (path.clone(), name.to_owned());
                named.push(NamedVariable { path, name, has_default, begins_path: false });
            }
        };
        if let Some((message, hint)) = variables::first_error(&text, numbered, &mut note) {
            self.report(PathProblem::new(Code::BadVariable, path.clone(), message).hint(hint));
            return None;
        }
        self.uses.scan(&text);
        Some(text)
    }

    pub fn path(&mut self, path: &FieldPath, value: Option<&Text>, numbered: bool) -> Option<String> {
        let known = self.uses.named.len();
        let text = self.template(path, value, numbered)?;
        let first = self.uses.named.get_mut(known);
        if let Some(first) = first.filter(|first| text.starts_with(&format!("${{{}", first.name))) {
            // Checked with its value.
            first.begins_path = !first.has_default;
            return Some(text);
        }
        if !is_absolute(&text) {
            let message = format!("{path} {:?} is a relative path", shorten(&text));
            self.report(
                PathProblem::new(Code::RelativePath, path.clone(), message)
                    .hint("use an absolute path, with a leading /"),
            );
            return None;
        }
        Some(text)
    }

    /// A whole number within its range, in the model's integer type.
    pub fn int<N: TryFrom<i64>>(
        &mut self,
        path: &FieldPath,
        value: Option<i64>,
        range: RangeInclusive<i64>,
        code: Code,
    ) -> Option<N> {
        let value = value?;
        if let Some(fit) = N::try_from(value).ok().filter(|_| range.contains(&value)) {
            return Some(fit);
        }
        let (low, high) = range.into_inner();
        let unit = if code == Code::BadDuration { " seconds" } else { "" };
        let bounds =
            if high == i64::MAX { format!("{low} or more") } else { format!("{low} to {high}{unit}") };
        let message = format!("{path} is {value}{unit}; it must be {bounds}");
        self.report(PathProblem { hint: meaning(path), ..PathProblem::new(code, path.clone(), message) });
        None
    }

    pub fn percent(&mut self, path: &FieldPath, value: Option<f64>) -> Option<Percent> {
        let value = value?;
        let percent = Percent::new(value);
        if percent.is_none() {
            let message = format!("{path} is {value}; it must be a percentage from 0 to 100");
            self.report(
                PathProblem::new(Code::BadPercent, path.clone(), message)
                    .hint("the percentage is of the whole host, not of one core"),
            );
        }
        percent
    }

    pub fn word(
        &mut self,
        path: &FieldPath,
        value: Option<&Text>,
        words: &'static [&'static str],
    ) -> Option<&'static str> {
        let value = value?;
        let known = words.iter().find(|word| **word == &**value).copied();
        if known.is_none() {
            let hint = match did_you_mean(value, words.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => format!("one of {}", words.join(", ")),
            };
            let message = format!("{path} {:?} is not an allowed value", shorten(value));
            self.report(PathProblem::new(Code::UnknownWord, path.clone(), message).hint(hint));
        }
        known
    }

    pub fn words<'a>(
        &'a mut self,
        path: &'a FieldPath,
        list: Option<&'a [Text]>,
        words: &'static [&'static str],
    ) -> impl Iterator<Item = &'static str> + 'a {
        let list = list.unwrap_or_default().iter().enumerate();
        list.filter_map(move |(at, word)| self.word(&path.index(at), Some(word), words))
    }

    pub fn labels(&mut self, path: &FieldPath, map: Option<&Map<TextOrNumber>>) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        for (name, value) in map.iter().flat_map(|map| &map.0) {
            let at = path.entry(name);
            let fault = match name.as_str() {
                "" => Some("has an empty name"),
                name if name.starts_with("abide_") => {
                    Some("is reserved: names that begin with abide_ belong to Abide")
                }
                name if name.len() > MAX_LABEL => Some("has a name that is too long"),
                _ => None,
            };
            if let Some(fault) = fault {
                let message = format!("label {:?} {fault}", shorten(name));
                self.report(PathProblem::new(Code::BadLabel, at, message).hint("use another name").at_key());
                continue;
            }
            self.loose(&at, value);
            labels.insert(name.clone(), value.to_string());
        }
        labels
    }

    /// Accepts a number in place of text, with a warning.
    pub fn loose(&mut self, path: &FieldPath, value: &TextOrNumber) {
        if let TextOrNumber::Number(n) = value {
            if path.starts_with(&FieldPath::of("spec.env")) {
                // The number may be a secret, so the message omits it.
                let message = format!("{path} is a number in place of text; it is read as text");
                return self.report(
                    PathProblem::new(Code::NumberAsText, path.clone(), message).hint("quote the value"),
                );
            }
            let message = format!("{path} is a number in place of text; it is read as \"{n}\"");
            self.report(
                PathProblem::new(Code::NumberAsText, path.clone(), message).hint(format!("write \"{n}\"")),
            );
        }
    }

    /// A count of at least `least`, or a share.
    pub fn amount(&mut self, path: &FieldPath, value: Option<&TextOrNumber>, least: i64) -> Option<Amount> {
        let text = match value? {
            TextOrNumber::Number(n) => {
                return self.int(path, Some(*n), least..=i64::MAX, Code::OutOfRange).map(Amount::Count);
            }
            TextOrNumber::Text(text) => text,
        };
        if !text.trim().ends_with('%') {
            let message = format!("{path} {:?} is neither a count nor a percentage", shorten(text));
            self.report(PathProblem::new(Code::WrongType, path.clone(), message).hint("such as 3 or 10%"));
            return None;
        }
        let share = Amount::share(text).filter(|share| least == 0 || share.get() > 0.0);
        if share.is_none() {
            let message = format!("{path} {:?} is not a percentage from 0% to 100%", shorten(text));
            self.report(PathProblem::new(Code::BadPercent, path.clone(), message).hint("such as 3 or 10%"));
        }
        share.map(Amount::Share)
    }

    pub fn duration(&mut self, path: &FieldPath, value: Option<&TextOrNumber>) -> Option<u64> {
        let value = value?;
        let seconds = match value {
            TextOrNumber::Number(n) => u64::try_from(*n).ok(),
            TextOrNumber::Text(text) => seconds(text),
        };
        let valid = seconds.filter(|seconds| *seconds <= MAX_DURATION);
        if valid.is_none() {
            let message =
                format!("{path} {:?} is not a duration of at most a week", shorten(&value.to_string()));
            self.report(
                PathProblem::new(Code::BadDuration, path.clone(), message).hint("such as 30s, 5m or 1h30m"),
            );
        }
        valid
    }
}

/// Linux's limit for one argument: a longer command cannot run.
const MAX_TEXT: usize = 128 << 10;

/// Maximum length of a label name.
const MAX_LABEL: usize = 253;

/// Meaning of a field in the grammar, used as hint.
fn meaning(path: &FieldPath) -> Option<String> {
    let found = explain::find(&path.to_string()).ok()?;
    found.entry.map(|entry| entry.meaning.to_owned())
}

const MAX_DURATION: u64 = 7 * 86_400;
