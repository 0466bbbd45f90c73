//! Replies of the gateway: JSON, lines of JSON, and errors in the envelope of GSE or JOB.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::Value;

use super::ApiError;
use super::routes::ApiCall;
use crate::gse::codes::EnvelopeCode;
use crate::gse::response::Envelope;

/// An error response, and its message for the log.
pub(super) type ErrorReply = (Box<Response>, String);

pub(super) fn error_reply(
    call: ApiCall,
    status: StatusCode,
    code: EnvelopeCode,
    message: &str,
) -> ErrorReply {
    (Box::new(error_response(call, status, code, message)), message.to_owned())
}

pub(super) fn unauthorized(call: ApiCall, message: &str) -> ErrorReply {
    error_reply(call, StatusCode::UNAUTHORIZED, EnvelopeCode::NOT_ALLOWED, message)
}

/// An error reply with `Retry-After`.
pub(super) fn busy(call: ApiCall, status: StatusCode, code: EnvelopeCode, message: &str) -> ErrorReply {
    let (mut response, message) = error_reply(call, status, code, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    (response, message)
}

pub(super) fn api_error_reply(call: ApiCall, refusal: &ApiError) -> ErrorReply {
    let (status, code, message) = match refusal {
        ApiError::BadRequest(message) => (StatusCode::OK, EnvelopeCode::BAD_REQUEST, message.clone()),
        ApiError::UnknownTask(message) => (StatusCode::OK, EnvelopeCode::UNKNOWN_TASK, message.clone()),
        ApiError::NotQueued => {
            (StatusCode::OK, EnvelopeCode::NOT_QUEUED, "the task is not queued yet: poll again".to_owned())
        }
        ApiError::NotAllowed(message) => (StatusCode::OK, EnvelopeCode::NOT_ALLOWED, message.clone()),
        // Only Abide's own calls return these, and its clients read the HTTP status.
        ApiError::Conflict(message) => (StatusCode::CONFLICT, EnvelopeCode::TAKEN, message.clone()),
        ApiError::Gone(message) => (StatusCode::GONE, EnvelopeCode::GONE, message.clone()),
        ApiError::Busy(message) => {
            return busy(call, StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::CONCURRENCY_LIMITED, message);
        }
        ApiError::Store(error) => (StatusCode::OK, EnvelopeCode::STORE_FAILED, error.to_string()),
        ApiError::AuditFailed(_) => (StatusCode::OK, EnvelopeCode::STORE_FAILED, refusal.to_string()),
    };
    error_reply(call, status, code, &message)
}

/// The envelope for a connection beyond the maximum, sent before its request is read.
pub fn overload_body() -> String {
    let envelope = Envelope::<Value>::failed(EnvelopeCode::CONCURRENCY_LIMITED, "too many connections");
    serde_json::to_string(&envelope).unwrap_or_default()
}

/// An error in the envelope format of GSE or JOB.
fn error_response(call: ApiCall, status: StatusCode, code: EnvelopeCode, message: &str) -> Response {
    let envelope = Envelope::<Value>::failed(code, message);
    let mut response = json(status, &if call.is_job() { envelope.as_job() } else { envelope });
    // The audit log has the code of a failure.
    response.extensions_mut().insert(code);
    response
}

pub(super) fn envelope_response(status: StatusCode, code: EnvelopeCode, message: &str) -> Response {
    json(status, &Envelope::<Value>::failed(code, message))
}

pub(super) fn json(status: StatusCode, value: &impl serde::Serialize) -> Response {
    let mut response = Response::new(Body::from(serde_json::to_vec(value).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A streamed response of JSON lines.
pub(super) fn lines(body: Body) -> Response {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;

    #[tokio::test]
    async fn a_task_that_is_not_queued_yet_is_1000115() {
        let (response, _) = api_error_reply(ApiCall::Sync, &ApiError::NotQueued);
        assert_eq!(response.status(), StatusCode::OK);
        let body = to_bytes(response.into_body(), 1000).await.expect("a body");
        let envelope: Value = serde_json::from_slice(&body).expect("an envelope");
        assert_eq!((&envelope["code"], &envelope["result"]), (&1_000_115.into(), &false.into()));
    }
}
