//! Responses of the status server: JSON documents, errors and redirects.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

use crate::contract::{self, ErrorBody};

/// An error response with `Retry-After`.
pub(super) fn busy(status: StatusCode, message: &str) -> ErrorResponse {
    let mut response = error_response(status, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// A JSON error response.
pub(super) type ErrorResponse = Box<Response>;

pub(super) fn error_response(status: StatusCode, message: &str) -> ErrorResponse {
    Box::new(json_response(status, &ErrorBody { error: message.to_owned() }))
}

/// The body for a connection that finds no room, before its request is read.
pub fn overload_body() -> String {
    contract::compact(&ErrorBody { error: "too many connections".to_owned() })
}

pub(super) fn json_response(status: StatusCode, document: &impl Serialize) -> Response {
    let mut response = typed_response(Body::from(contract::compact(document)), "application/json");
    *response.status_mut() = status;
    response
}

pub(super) fn typed_response(body: Body, kind: &'static str) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub(super) fn redirect_to(path: &'static str) -> Response {
    let mut response = typed_response(Body::empty(), "text/plain; charset=utf-8");
    *response.status_mut() = StatusCode::SEE_OTHER;
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static(path));
    response
}
