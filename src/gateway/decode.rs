//! The form of a request: its body as JSON and its query parameters, and what is wrong with them in words.

use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::ApiError;

/// The body as JSON, whatever its Content-Type says. An empty one is an empty object.
pub(super) fn parse_body<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.iter().all(u8::is_ascii_whitespace) { b"{}" } else { bytes };
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    serde_json::from_slice(bytes).map_err(|error| {
        if !error.is_data() {
            let (line, column) = (error.line(), error.column());
            return ApiError::BadRequest(format!("the body is not valid JSON: line {line}, column {column}"));
        }
        if first != Some(&b'{') {
            return ApiError::BadRequest("the body is not a JSON object".to_owned());
        }
        ApiError::BadRequest(describe_json_error(&error))
    })
}

/// What is wrong with a field, and where. What was found there may be a secret: the message names only what was expected.
pub(super) fn describe_json_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    let at = match error.line() {
        0 => String::new(),
        line => format!(" (line {line}, column {})", error.column()),
    };
    for said in ["missing field ", "duplicate field "] {
        if let Some(field) = text.strip_prefix(said) {
            let is = if said.starts_with("missing") { "is missing" } else { "is there twice" };
            return format!("{} {is}{at}", field.replace('`', ""));
        }
    }
    if let Some((field, _)) = text.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
        return format!("there is no field {field:?}{at}");
    }
    let expected = text.rsplit_once("expected ").map(|(_, expected)| expected);
    let kind = match expected {
        Some(kind) if kind.starts_with("struct") || kind.starts_with("a map") || kind.contains("variant") => {
            "an object"
        }
        Some(kind) if kind.contains("sequence") => "a list",
        Some(kind) if kind.contains("string") || kind.contains("str") => "a text",
        Some("u64" | "i64" | "u32" | "usize" | "i32" | "u16") => "a whole number",
        Some("f64") => "a number",
        Some("a boolean") => "true or false",
        Some(_) | None => return format!("a field cannot be used as it is{at}"),
    };
    format!("a field has the wrong type: {kind} was expected{at}")
}

pub(super) fn parameter(parts: &Parts, name: &str) -> Option<String> {
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(known, _)| *known == name).map(|(_, value)| percent_decode(value))
}

/// `%41` is `A`.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = after.get(..2).and_then(|pair| std::str::from_utf8(pair).ok());
        let byte = hex.filter(|_| *first == b'%').and_then(|pair| u8::from_str_radix(pair, 16).ok());
        bytes.push(byte.unwrap_or(if *first == b'+' { b' ' } else { *first }));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(super) fn numeric_parameter(parts: &Parts, name: &str) -> Result<u64, ApiError> {
    match parameter(parts, name) {
        None => Ok(0),
        Some(text) => {
            text.parse().map_err(|_| ApiError::BadRequest(format!("{name} is {text:?}: no number")))
        }
    }
}
