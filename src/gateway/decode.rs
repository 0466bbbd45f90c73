//! Request decoding: JSON bodies and query parameters, with error messages that quote no values.

use axum::body::Bytes;
use axum::http::request::Parts;
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ApiError;
use super::routes::ApiCall;

/// Parses the body as JSON regardless of its Content-Type. An empty body is an empty object.
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

/// Describes a field error and its location. The value may be a secret, so the message names only the expected type.
pub(super) fn describe_json_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    let at = match error.line() {
        0 => String::new(),
        line => format!(" (line {line}, column {})", error.column()),
    };
    for prefix in ["missing field ", "duplicate field "] {
        if let Some(field) = text.strip_prefix(prefix) {
            let is = if prefix.starts_with("missing") { "is missing" } else { "is set twice" };
            return format!("{} {is}{at}", field.replace('`', ""));
        }
    }
    if let Some((field, _)) = text.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
        return format!("unknown field {field:?}{at}");
    }
    let expected = text.rsplit_once("expected ").map(|(_, expected)| expected);
    let kind = match expected {
        Some(kind) if kind.starts_with("struct") || kind.starts_with("a map") || kind.contains("variant") => {
            "an object"
        }
        Some(kind) if kind.contains("sequence") => "a list",
        Some(kind) if kind.contains("string") || kind.contains("str") => "a string",
        Some("u64" | "i64" | "u32" | "usize" | "i32" | "u16") => "a whole number",
        Some("f64") => "a number",
        Some("a boolean") => "true or false",
        Some(_) | None => return format!("a field has an invalid value{at}"),
    };
    format!("a field has the wrong type: expected {kind}{at}")
}

/// The body of a query that JOB publishes with GET: fields that the body lacks come from the query string, also credentials.
/// No log contains the query string.
pub(super) fn with_query(call: ApiCall, parts: &Parts, body: Bytes) -> Result<Bytes, ApiError> {
    let Some(query) = parts.uri.query().filter(|_| call == ApiCall::JobResult) else { return Ok(body) };
    let mut fields: serde_json::Map<String, Value> = parse_body(&body)?;
    for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        fields.entry(percent_decode(name)).or_insert_with(|| Value::String(percent_decode(value)));
    }
    Ok(serde_json::to_vec(&fields)?.into())
}

pub(super) fn parameter(parts: &Parts, name: &str) -> Option<String> {
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(known, _)| *known == name).map(|(_, value)| percent_decode(value))
}

/// Decodes a query value: `%41` is `A`, and `+` is a space.
fn percent_decode(text: &str) -> String {
    percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned()
}

pub(super) fn numeric_parameter(parts: &Parts, name: &str) -> Result<u64, ApiError> {
    match parameter(parts, name) {
        None => Ok(0),
        Some(text) => {
            text.parse().map_err(|_| ApiError::BadRequest(format!("{name} is {text:?}: it must be a number")))
        }
    }
}
