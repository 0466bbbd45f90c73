//! Single values: each method reads one, notes what is wrong with it, and gives it back typed.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::manifest::document::{Map, Text, TextOrNumber};
use crate::manifest::explain;
use crate::manifest::node::shorten;
use crate::manifest::problem::{Code, FieldPath, MAX_PER_DOCUMENT, PathProblem, did_you_mean};
use crate::manifest::variables::{self, VariableUse};
use crate::model::{Amount, Percent, seconds};

#[derive(Debug, Default)]
pub struct ValueChecker {
    pub findings: Vec<PathProblem>,
    /// What the templates so far ask for.
    pub uses: VariableUse,
    error: bool,
}

impl ValueChecker {
    /// Keeps a finding; of a bomb's millions only the first, and at least one error.
    pub fn report(&mut self, finding: PathProblem) {
        if self.findings.len() < 2 * MAX_PER_DOCUMENT || (finding.is_error() && !self.error) {
            self.error |= finding.is_error();
            self.findings.push(finding);
        }
    }

    /// Points at the parent: the field itself is nowhere.
    pub fn report_missing(&mut self, path: FieldPath) {
        let hint = meaning(&path);
        let finding = PathProblem::new(Code::MissingField, path.clone(), format!("{path} is missing"));
        self.report(PathProblem { hint, ..finding }.at_key());
    }

    /// Text that is not empty: an empty text means "unset" in the documents.
    pub fn text(&mut self, path: &FieldPath, value: Option<&Text>) -> Option<String> {
        let text = value.filter(|text| !text.is_empty())?;
        if text.contains('\0') {
            let message = format!("{path} contains a NUL character, which no command or path can");
            self.report(PathProblem::new(Code::NotText, path.clone(), message).hint("remove it"));
            return None;
        }
        if text.len() > MAX_TEXT {
            let message =
                format!("{path} has {} bytes, and no system takes more than {MAX_TEXT}", text.len());
            self.report(
                PathProblem::new(Code::TooLarge, path.clone(), message).hint("put it into a file of its own"),
            );
            return None;
        }
        Some(text.to_string())
    }

    /// Text in which variables are replaced.
    pub fn template(&mut self, path: &FieldPath, value: Option<&Text>, numbered: bool) -> Option<String> {
        let text = self.text(path, value)?;
        if let Some((message, hint)) = variables::first_error(&text, numbered) {
            self.report(PathProblem::new(Code::BadVariable, path.clone(), message).hint(hint));
            return None;
        }
        self.uses.scan(&text);
        Some(text)
    }

    pub fn path(&mut self, path: &FieldPath, value: Option<&Text>, numbered: bool) -> Option<String> {
        let text = self.template(path, value, numbered)?;
        if !is_absolute(&text) {
            let message = format!("{path} {:?} is a relative path", shorten(&text));
            self.report(
                PathProblem::new(Code::RelativePath, path.clone(), message)
                    .hint("write it from the root, with a leading /"),
            );
            return None;
        }
        Some(text)
    }

    /// A whole number within its range, in whatever width the model holds it.
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
            let message = format!("{path} is {value}; a percentage lies between 0 and 100");
            self.report(
                PathProblem::new(Code::BadPercent, path.clone(), message)
                    .hint("it is a share of the whole host, not of one core"),
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
            let message = format!("{path} cannot be {:?}", shorten(value));
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
                "" => Some("has no name"),
                name if name.starts_with("abide_") => Some("is reserved: abide_* labels are Abide's own"),
                name if name.len() > MAX_LABEL => Some("has a name that is too long"),
                _ => None,
            };
            if let Some(fault) = fault {
                let message = format!("label {:?} {fault}", shorten(name));
                self.report(PathProblem::new(Code::BadLabel, at, message).hint("take another name").at_key());
                continue;
            }
            self.loose(&at, value);
            labels.insert(name.clone(), value.to_string());
        }
        labels
    }

    /// A number where text is meant is taken, with a warning.
    pub fn loose(&mut self, path: &FieldPath, value: &TextOrNumber) {
        if let TextOrNumber::Number(n) = value {
            if path.starts_with(&FieldPath::of("spec.env")) {
                // It may be a secret: the number stays out of the message.
                let message = format!("{path} is a number where text is meant; it is taken as text");
                return self.report(
                    PathProblem::new(Code::NumberAsText, path.clone(), message).hint("put it in quotes"),
                );
            }
            let message = format!("{path} is a number where text is meant; it is taken as \"{n}\"");
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
            let message = format!("{path} {:?} is neither a count nor a share", shorten(text));
            self.report(PathProblem::new(Code::WrongType, path.clone(), message).hint("such as 3 or 10%"));
            return None;
        }
        let share = Amount::share(text).filter(|share| least == 0 || share.get() > 0.0);
        if share.is_none() {
            let message = format!("{path} {:?} is no percentage between 0% and 100%", shorten(text));
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
        let sane = seconds.filter(|seconds| *seconds <= MAX_DURATION);
        if sane.is_none() {
            let message = format!("{path} {:?} is no duration up to a week", shorten(&value.to_string()));
            self.report(
                PathProblem::new(Code::BadDuration, path.clone(), message).hint("such as 30s, 5m or 1h30m"),
            );
        }
        sane
    }
}

/// The longest argument that Linux hands to a program: a longer command cannot be run.
const MAX_TEXT: usize = 128 << 10;

/// The longest name of a label that keys, columns and YAML's own rules for keys all take.
const MAX_LABEL: usize = 253;

/// What the grammar says of a field.
fn meaning(path: &FieldPath) -> Option<String> {
    let found = explain::find(&path.to_string()).ok()?;
    found.entry.map(|entry| entry.meaning.to_owned())
}

const MAX_DURATION: u64 = 7 * 86_400;

/// From the root, on any system that GSE manages.
fn is_absolute(path: &str) -> bool {
    let drive =
        |b: &[u8]| b.len() > 2 && b[0].is_ascii_alphabetic() && b[1] == b':' && matches!(b[2], b'\\' | b'/');
    path.starts_with('/') || path.starts_with("\\\\") || drive(path.as_bytes())
}
