//! Label selectors: `key=v,key!=v,key in (a,b),key,!key`. All terms must hold.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<Term>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    Is(String, String),
    IsNot(String, String),
    In(String, Vec<String>),
    Has(String),
    HasNot(String),
}

impl Selector {
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.matches_with(|key| labels.get(key).map(String::as_str))
    }

    /// The same for labels in any form.
    pub fn matches_with<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|term| match term {
            Term::Is(key, value) => get(key) == Some(value.as_str()),
            Term::IsNot(key, value) => get(key) != Some(value.as_str()),
            Term::In(key, values) => get(key).is_some_and(|label| values.iter().any(|one| one == label)),
            Term::Has(key) => get(key).is_some(),
            Term::HasNot(key) => get(key).is_none(),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectorError(String);

impl fmt::Display for SelectorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is none of key=v, key!=v, key in (a,b), key, !key", self.0)
    }
}

impl std::error::Error for SelectorError {}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        terms(text)
            .into_iter()
            .map(|term| parse(term).ok_or_else(|| SelectorError(term.to_owned())))
            .collect::<Result<_, _>>()
            .map(Selector)
    }
}

/// Splits at the commas outside of parentheses.
fn terms(text: &str) -> Vec<&str> {
    let mut depth = 0;
    text.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .map(str::trim)
    .collect()
}

fn parse(term: &str) -> Option<Term> {
    let word = |text: &str| {
        let text = text.trim();
        let fine = !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || "=!(),".contains(c));
        fine.then(|| text.to_owned())
    };
    if let Some((key, value)) = term.split_once("!=") {
        return Some(Term::IsNot(word(key)?, word(value)?));
    }
    if let Some((key, value)) = term.split_once('=') {
        return Some(Term::Is(word(key)?, word(value.strip_prefix('=').unwrap_or(value))?));
    }
    if let Some(list) = term.strip_suffix(')') {
        let (key, list) = list.split_once('(')?;
        let key = word(key.trim().strip_suffix("in").filter(|key| key.ends_with(char::is_whitespace))?)?;
        return Some(Term::In(key, list.split(',').map(word).collect::<Option<_>>()?));
    }
    match term.strip_prefix('!') {
        Some(key) => word(key).map(Term::HasNot),
        None => word(term).map(Term::Has),
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, term) in self.0.iter().enumerate() {
            let comma = if nth == 0 { "" } else { "," };
            match term {
                Term::Is(key, value) => write!(f, "{comma}{key}={value}")?,
                Term::IsNot(key, value) => write!(f, "{comma}{key}!={value}")?,
                Term::In(key, values) => write!(f, "{comma}{key} in ({})", values.join(","))?,
                Term::Has(key) => write!(f, "{comma}{key}")?,
                Term::HasNot(key) => write!(f, "{comma}!{key}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_selects_its_hosts() {
        let labels = [("rack", "a"), ("tier", "front")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let cases = [
            ("rack=a", true),
            ("rack==a", true),
            ("rack=b", false),
            ("rack!=b", true),
            ("zone!=b", true),
            ("tier in (back, front)", true),
            ("tier in (back)", false),
            ("zone in (a)", false),
            ("rack", true),
            ("!rack", false),
            ("!zone, rack=a,tier in (front,x)", true),
        ];
        for (text, expected) in cases {
            let selector: Selector = text.parse().expect(text);
            assert_eq!(selector.matches(&labels), expected, "{text}");
            assert_eq!(selector.to_string().parse(), Ok(selector), "{text}");
        }
    }

    #[test]
    fn text_that_is_not_a_selector_is_refused() {
        for text in ["", "a=", "=a", "a b", "a in b", "a in ()", "ain (b)", "a,,b", "a=b=c", "a in (b", "!"] {
            assert!(text.parse::<Selector>().is_err(), "{text:?}");
        }
    }
}
