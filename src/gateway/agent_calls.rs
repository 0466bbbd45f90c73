//! Agent calls: sessions, streams, results and renewals, each for the hosts that the agent's credential covers.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;

use super::ApiError;
use super::audit::RequestLog;
use super::decode::{numeric_parameter, parameter, parse_body};
use super::fleet::AgentGuard;
use super::middleware::MiddlewareState;
use super::reply::{ErrorReply, api_error_reply, json, lines, unauthorized};
use super::routes::ApiCall;
use crate::agent_protocol::{Join, Joined};
use crate::gse::response::Envelope;
use crate::http::end_on_revocation;
use crate::store::Store;

/// Handles agent calls. The credential must be valid for all of the agent's hosts.
pub(super) async fn agent<S: Store>(
    shared: &MiddlewareState<S>,
    guard: &AgentGuard,
    log: &mut RequestLog,
    parts: &Parts,
    bytes: &Bytes,
) -> Result<Response, ErrorReply> {
    let (gateway, call) = (&shared.gateway, log.call);
    let refuse = |refusal: ApiError| api_error_reply(call, &refusal);
    // The credential may have been revoked while the body was read.
    if !guard.is_known() {
        return Err(unauthorized(call, "these credentials are no longer known"));
    }
    match call {
        ApiCall::Join => {
            let join: Join = parse_body(bytes).map_err(refuse)?;
            log.who = format!("agent {}", join.agent);
            log.add_hosts(&join.hosts);
            let joined = open_session(shared, guard, call, &join).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(joined)));
        }
        ApiCall::RenewCertificate => {
            let Some(certificate) = guard.certificate() else {
                return Err(unauthorized(call, "only a certificate can be renewed"));
            };
            log.who = format!("agent {}", certificate.agent);
            log.what.detail = format!("certificate {}", certificate.serial);
            let renewed = shared.fleet.renew(certificate).await.map_err(refuse)?;
            return Ok(json(StatusCode::OK, &Envelope::ok(renewed)));
        }
        _ => {}
    }
    let session = parameter(parts, "session").unwrap_or_default();
    let hosts = gateway.session_hosts(&session).map_err(refuse)?;
    if let Some(why) = guard.refusal(&hosts) {
        return Err(unauthorized(call, &why));
    }
    if call == ApiCall::Stream {
        let after = numeric_parameter(parts, "after").map_err(refuse)?;
        let revoked = guard.revocation(hosts.clone());
        let guard = guard.clone();
        let may = Arc::new(move || guard.allows(&hosts));
        let body = gateway.stream(&session, after, may).await.map_err(refuse)?;
        return Ok(lines(end_on_revocation(body, revoked, "")));
    }
    let answer = match call {
        ApiCall::AgentFigures => gateway.receive_figures(&session, bytes),
        ApiCall::AgentLogs => gateway.receive_log_chunk(&hosts, bytes),
        _ => gateway.receive_batch(&session, bytes, parameter(parts, "clock")).await,
    };
    answer.map(|answer| json(StatusCode::OK, &answer)).map_err(refuse)
}

/// Opens a session for hosts that the credential covers.
async fn open_session<S: Store>(
    shared: &MiddlewareState<S>,
    guard: &AgentGuard,
    call: ApiCall,
    join: &Join,
) -> Result<Joined, ErrorReply> {
    let refuse = |refusal: ApiError| api_error_reply(call, &refusal);
    if let Some(why) = guard.refusal(&join.hosts) {
        return Err(unauthorized(call, &why));
    }
    if let Some(certificate) = guard.certificate() {
        shared
            .fleet
            .check_agent(certificate, join)
            .map_err(|refusal| unauthorized(call, &refusal.to_string()))?;
        shared.fleet.record_external(certificate, join).await.map_err(refuse)?;
    }
    let mut joined = shared.gateway.join(join, guard.credential_key()).await.map_err(refuse)?;
    joined.certificate = guard.certificate().and_then(|certificate| shared.fleet.life_of(certificate));
    Ok(joined)
}
