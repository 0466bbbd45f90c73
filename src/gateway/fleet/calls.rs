//! Calls of fleet membership: the exchange of a join token, and the administration of tokens and certificates.

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;

use crate::access::apps::{App, LoginError};
use crate::agent_protocol::EnrollmentRequest;
use crate::contract::{HostRevocation, JoinTokenRequest, TokenRevocation};
use crate::gateway::ApiError;
use crate::gateway::audit::RequestLog;
use crate::gateway::auth::bearer;
use crate::gateway::decode::parse_body;
use crate::gateway::middleware::{MiddlewareState, body_error_reply, overloaded, wrong_credentials};
use crate::gateway::reply::{ErrorReply, api_error_reply, error_reply, json, unauthorized};
use crate::gateway::routes::ApiCall;
use crate::gse::codes::EnvelopeCode;
use crate::gse::response::Envelope;
use crate::http::{Connection, CredentialKey, CredentialScope, TransportSecurity, admit_known, read_body};
use crate::pki::JoinToken;
use crate::store::Store;

/// Maximum bytes of an exchange: a signing request and a thousand hosts.
const MAX_ENROLLMENT_BYTES: usize = 128 << 10;

/// Exchanges the join token in the header for a certificate. The token is checked before the body is read.
pub(in crate::gateway) async fn enroll<S: Store>(
    shared: &MiddlewareState<S>,
    log: &mut RequestLog,
    parts: &Parts,
    body: Body,
) -> Result<Response, ErrorReply> {
    let (call, connection) = (log.call, Connection::of(&parts.extensions));
    let refuse = |refusal: ApiError| api_error_reply(call, &refusal);
    let Some(text) = bearer(&parts.headers) else { return Err(unauthorized(call, WRONG_JOIN_TOKEN)) };
    let Ok(token) = text.trim().parse::<JoinToken>() else {
        return Err(wrong_credentials(call, connection, "a join token", &LoginError::Unknown).await);
    };
    if shared.fleet.find_token(&token).await.map_err(refuse)?.is_none() {
        let who = format!("join token {}", token.id());
        log.claimed.clone_from(&who);
        return Err(wrong_credentials(call, connection, &who, &LoginError::Unknown).await);
    }
    (log.who, log.kind) = (format!("join token {}", token.id()), "token");
    if !parts.extensions.get::<TransportSecurity>().is_some_and(|security| security.tls) {
        let message = "a join token needs https: its certificate identifies TLS connections";
        return Err(error_reply(call, StatusCode::FORBIDDEN, EnvelopeCode::NOT_ALLOWED, message));
    }
    let credential = CredentialKey::new(CredentialScope::OneHost, token.id());
    let mut admitted = admit_known(&shared.agents, Some(credential))
        .map_err(|resource| overloaded(shared, call, connection, resource))?;
    let bytes = read_body(body, MAX_ENROLLMENT_BYTES, shared.limits.body_time, &mut admitted).await;
    let bytes = bytes.map_err(|error| body_error_reply(shared, call, connection, error))?;
    let request: EnrollmentRequest = parse_body(&bytes).map_err(refuse)?;
    log.what.detail = format!("agent {}", request.agent);
    log.add_hosts(&request.hosts);
    let issued = shared.fleet.enroll(&token, &request).await.map_err(refuse)?;
    Ok(json(StatusCode::OK, &Envelope::ok(issued)))
}

/// A call of an app that administers the fleet.
pub(in crate::gateway) async fn app_call<S: Store>(
    shared: &MiddlewareState<S>,
    app: &App,
    log: &mut RequestLog,
    body: &[u8],
) -> Result<Response, ApiError> {
    let fleet = &shared.fleet;
    let by = match log.as_user.is_empty() {
        true => app.code.clone(),
        false => format!("{} ({})", app.code, log.as_user.chars().take(64).collect::<String>()),
    };
    Ok(match log.call {
        ApiCall::CreateJoinToken => {
            let request: JoinTokenRequest = parse_body(body)?;
            log.add_hosts(&request.hosts);
            let created = fleet.create_token(&request, &by).await?;
            log.what.detail = format!("join token {}", created.id);
            json(StatusCode::OK, &Envelope::ok(created))
        }
        ApiCall::RevokeJoinToken => {
            let TokenRevocation { id } = parse_body(body)?;
            log.what.detail = format!("join token {id}");
            json(StatusCode::OK, &Envelope::ok(fleet.revoke_token(&id, &by).await?))
        }
        ApiCall::RevokeHost => {
            let request: HostRevocation = parse_body(body)?;
            log.what.detail =
                if request.forget { "static tokens accepted again" } else { "certificate revoked" }
                    .to_owned();
            log.add_hosts(std::slice::from_ref(&request.host));
            json(StatusCode::OK, &Envelope::ok(fleet.revoke_host(&request, &by).await?))
        }
        _ => json(StatusCode::OK, &Envelope::ok(fleet.list_tokens().await?)),
    })
}

pub(in crate::gateway) const WRONG_JOIN_TOKEN: &str = "this join token is not known";
