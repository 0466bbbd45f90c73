//! Document tree with source positions. Built only for documents with a problem, and for kinds other than Process.

use serde_yaml::Value;

use super::problem::Span;

#[derive(Clone, Debug)]
pub struct Node {
    pub span: Span,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub enum Kind {
    Null,
    Bool(bool),
    Int(i64),
    /// A whole number beyond 64 bits.
    Huge,
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Node, Node)>),
    /// A value with an unsupported tag.
    Tagged(String),
}

impl Node {
    /// The value of a key; the last one if the key is duplicated.
    pub fn get(&self, name: &str) -> Option<&Node> {
        let Kind::Map(entries) = &self.kind else {
            return None;
        };
        entries.iter().rev().find(|(key, _)| key.text() == Some(name)).map(|(_, value)| value)
    }

    pub fn text(&self) -> Option<&str> {
        match &self.kind {
            Kind::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Description with the value, for messages.
    pub fn describe(&self) -> String {
        match &self.kind {
            Kind::Null => "nothing".into(),
            Kind::Bool(b) => format!("the boolean {b}"),
            Kind::Int(n) => format!("the number {n}"),
            Kind::Huge => "a number beyond 64 bits".into(),
            Kind::Float(x) => format!("the number {x}"),
            Kind::Text(text) => format!("the text {:?}", shorten(text)),
            Kind::List(_) => "a list".into(),
            Kind::Map(_) => "a map".into(),
            Kind::Tagged(tag) => format!("a value with the tag {tag:?}"),
        }
    }

    /// The value for serde, without positions.
    pub fn to_value(&self) -> Value {
        match &self.kind {
            Kind::Null | Kind::Huge | Kind::Tagged(_) => Value::Null,
            Kind::Bool(b) => Value::Bool(*b),
            Kind::Int(n) => Value::Number((*n).into()),
            Kind::Float(x) => Value::Number((*x).into()),
            Kind::Text(text) => Value::String(text.clone()),
            Kind::List(items) => Value::Sequence(items.iter().map(Node::to_value).collect()),
            Kind::Map(entries) => {
                Value::Mapping(entries.iter().map(|(k, v)| (k.to_value(), v.to_value())).collect())
            }
        }
    }
}

impl Kind {
    /// Description of the type, without the value.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::Null => "nothing",
            Kind::Bool(_) => "a boolean",
            Kind::Int(_) | Kind::Huge | Kind::Float(_) => "a number",
            Kind::Text(_) => "text",
            Kind::List(_) => "a list",
            Kind::Map(_) => "a map",
            Kind::Tagged(_) => "a value with a tag",
        }
    }
}

/// Shortens a text for a message.
pub fn shorten(text: &str) -> String {
    const MOST: usize = 60;
    match text.char_indices().nth(MOST) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// Value of a plain scalar by the YAML 1.2 core schema, as the YAML crate parses it.
pub fn resolve(text: &str) -> Kind {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Kind::Null,
        "true" | "True" | "TRUE" => return Kind::Bool(true),
        "false" | "False" | "FALSE" => return Kind::Bool(false),
        ".nan" | ".NaN" | ".NAN" => return Kind::Float(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => {
            return Kind::Float(f64::INFINITY);
        }
        "-.inf" | "-.Inf" | "-.INF" => return Kind::Float(f64::NEG_INFINITY),
        _ => {}
    }
    let (negative, digits) = match text.as_bytes()[0] {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    if let Some(int) = integer(negative, digits) {
        return int;
    }
    let zero_led = digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit());
    let numeric = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    match text.parse::<f64>() {
        Ok(x) if numeric && !zero_led && x.is_finite() => Kind::Float(x),
        _ => Kind::Text(text.to_owned()),
    }
}

fn integer(negative: bool, digits: &str) -> Option<Kind> {
    let (radix, digits) = match digits.get(..2) {
        Some("0x") => (16, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some("0b") => (2, &digits[2..]),
        _ => (10, digits),
    };
    let zero_led = radix == 10 && digits.len() > 1 && digits.starts_with('0');
    if digits.is_empty() || zero_led || !digits.chars().all(|c| c.is_digit(radix)) {
        return None;
    }
    match i128::from_str_radix(digits, radix).map(|n| i64::try_from(if negative { -n } else { n })) {
        Ok(Ok(n)) => Some(Kind::Int(n)),
        Ok(Err(_)) | Err(_) => Some(Kind::Huge),
    }
}
