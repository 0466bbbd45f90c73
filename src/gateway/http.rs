//! The addresses of every call, and what a request meets before it is one: size, time, form, credentials.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use serde_json::Value;
use tracing::info;

use super::auth::{App, Apps, credentials};
use super::registry::Call as Registry;
use super::tasks::KeyForm;
use super::{Gateway, Refusal};
use crate::gse::answer::{Envelope, JobTaskData, TaskData};
use crate::gse::codes::EnvelopeCode;
use crate::gse::request::{MultiRequest, ProcRequest};
use crate::gse::{JobApi, JobBody};
use crate::store::Store;

/// The largest body: 100,000 hosts fit.
const MOST_BYTES: usize = 16 << 20;
/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(30);

struct Shared<S> {
    gateway: Gateway<S>,
    apps: Apps,
}

/// The whole API. Health answers anybody; everything else wants credentials.
pub fn router<S: Store>(gateway: Gateway<S>, apps: Apps) -> Router {
    let shared = Arc::new(Shared { gateway, apps });
    Router::new().fallback(serve::<S>).with_state(shared)
}

/// A call, whichever way it was addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Register,
    Update,
    Unregister,
    Operate,
    OperateMulti,
    Result(KeyForm),
    Status {
        second: bool,
    },
    Sync,
    SetGroups,
    Groups,
    Agents {
        by_id: bool,
    },
    /// manage_proc or operate_process: the same shape, other numbers.
    Job(JobApi),
    JobResult,
    Health,
}

/// Finds the call of a path, with or without a slash at its end.
pub fn find(method: &Method, path: &str) -> Option<Call> {
    let path = path.trim_end_matches('/');
    if matches!(path, "/healthz" | "/readyz") {
        return (method == Method::GET).then_some(Call::Health);
    }
    if let Some(native) = path.strip_prefix("/procapi/") {
        return native_call(method, native);
    }
    if method != Method::POST {
        return None;
    }
    if let Some(name) = path.strip_prefix("/api/c/compapi/v2/gse/") {
        return named(name);
    }
    let job = ["/api/c/compapi/v2/job/", "/api/c/compapi/v2/jobv3/"];
    if let Some(name) = job.iter().find_map(|prefix| path.strip_prefix(prefix)) {
        return match name {
            "manage_proc" | "manage_process" => Some(Call::Job(JobApi::ManageProc)),
            "operate_process" => Some(Call::Job(JobApi::OperateProcess)),
            "get_proc_result" => Some(Call::JobResult),
            _ => None,
        };
    }
    // GSE 2.0 stands behind whatever prefix the API gateway was given.
    if let Some((_, name)) = path.split_once("/api/v2/proc/") {
        return named(name);
    }
    match path.split_once("/api/v2/cluster/") {
        Some((_, "list_agent_state")) => Some(Call::Agents { by_id: true }),
        _ => None,
    }
}

fn named(name: &str) -> Option<Call> {
    Some(match name {
        "register_proc_info" => Call::Register,
        "update_proc_info" => Call::Update,
        "unregister_proc_info" => Call::Unregister,
        "operate_proc" | "operate_proc_v2" => Call::Operate,
        "operate_proc_multi" => Call::OperateMulti,
        "get_proc_operate_result" => Call::Result(KeyForm::First),
        "get_proc_operate_result_v2" => Call::Result(KeyForm::Second),
        "get_proc_status" => Call::Status { second: false },
        "get_proc_status_v2" => Call::Status { second: true },
        "sync_proc_status" => Call::Sync,
        "set_process_group_info" => Call::SetGroups,
        "get_process_group_info" => Call::Groups,
        "get_agent_status" | "get_agent_info" => Call::Agents { by_id: false },
        "list_agent_state" => Call::Agents { by_id: true },
        _ => return None,
    })
}

/// GSE's own paths: what is asked for is in the method.
fn native_call(method: &Method, path: &str) -> Option<Call> {
    Some(match (method.as_str(), path) {
        ("POST", "v1/proc/procinfo") => Call::Register,
        ("PUT", "v1/proc/procinfo") => Call::Update,
        ("DELETE", "v1/proc/procinfo") => Call::Unregister,
        ("POST", "v1/proc/operate" | "v2/proc/operate") => Call::Operate,
        ("POST", "v2/proc/multioperate") => Call::OperateMulti,
        ("GET", "v1/proc/operate") => Call::Result(KeyForm::First),
        ("GET", "v2/proc/operate") => Call::Result(KeyForm::Second),
        ("GET", "v1/proc/status") => Call::Status { second: false },
        ("GET", "v2/proc/status") => Call::Status { second: true },
        ("GET", "v1/proc/syncstatus") => Call::Sync,
        ("POST", "v1/proc/groupinfo") => Call::SetGroups,
        ("GET", "v1/proc/groupinfo") => Call::Groups,
        _ => return None,
    })
}

async fn serve<S: Store>(State(shared): State<Arc<Shared<S>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let Some(call) = find(&parts.method, path) else {
        return failed(
            StatusCode::NOT_FOUND,
            EnvelopeCode::NO_SUCH_PATH,
            "there is no such path, or not for this method",
        );
    };
    if call == Call::Health {
        return json(StatusCode::OK, &serde_json::json!({"status": "ok"}));
    }
    let body = match read(body).await {
        Ok(body) => body,
        Err(response) => return *response,
    };
    let app = match who(&shared.apps, &parts.headers, &body) {
        Some(app) => app,
        None => {
            return failed(
                StatusCode::UNAUTHORIZED,
                EnvelopeCode::NOT_ALLOWED,
                "no app is known by these credentials",
            );
        }
    };
    let (response, result) = match carry_out(&shared.gateway, app, call, &body).await {
        Ok(data) => (json(StatusCode::OK, &Envelope::ok(data)), "ok".to_owned()),
        Err(refusal) => refused(&refusal),
    };
    if changes(call) {
        info!(target: "audit", app = %app.code, ?call, path, %result, "change");
    }
    response
}

/// Does a call change something? Then a line tells of it.
fn changes(call: Call) -> bool {
    match call {
        Call::Register | Call::Update | Call::Unregister | Call::SetGroups => true,
        Call::Operate | Call::OperateMulti | Call::Job(_) => true,
        Call::Result(_) | Call::JobResult | Call::Status { .. } | Call::Sync => false,
        Call::Groups | Call::Agents { .. } | Call::Health => false,
    }
}

/// The body as JSON, whatever its Content-Type says. An empty one is an empty object.
async fn read(body: Body) -> Result<Value, Box<Response>> {
    let too_large = "the body is larger than 16 MB";
    let bytes = match tokio::time::timeout(BODY_TIME, to_bytes(body, MOST_BYTES)).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(_)) => {
            return Err(Box::new(failed(StatusCode::PAYLOAD_TOO_LARGE, EnvelopeCode::TOO_LARGE, too_large)));
        }
        Err(_) => {
            let message = "the body took too long to arrive";
            return Err(Box::new(failed(StatusCode::REQUEST_TIMEOUT, EnvelopeCode::BAD_REQUEST, message)));
        }
    };
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    match serde_json::from_slice(&bytes) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => {
            Err(Box::new(failed(StatusCode::OK, EnvelopeCode::BAD_REQUEST, "the body is no JSON object")))
        }
        Err(error) => {
            let place = format!("the body is no JSON: line {}, column {}", error.line(), error.column());
            Err(Box::new(failed(StatusCode::OK, EnvelopeCode::BAD_REQUEST, &place)))
        }
    }
}

fn who<'a>(apps: &'a Apps, headers: &HeaderMap, body: &Value) -> Option<&'a App> {
    let header = headers.get("x-bkapi-authorization").and_then(|value| value.to_str().ok());
    let (code, secret) = credentials(header, body)?;
    apps.known(&code, &secret)
}

async fn carry_out<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    call: Call,
    body: &Value,
) -> Result<Value, Refusal> {
    let may = |namespace: &str| app.may_touch(namespace);
    match call {
        Call::Job(api) => return operate_job(gateway, app, api, body).await,
        Call::JobResult => {
            let id = body.get("bk_gse_taskid").and_then(Value::as_str);
            let id = id.ok_or_else(|| Refusal::Wrong("bk_gse_taskid is missing".to_owned()))?;
            return gateway.job_results(id, &may).await;
        }
        _ => {}
    }
    let request: ProcRequest = understand(body)?;
    let several: Vec<ProcRequest> = match call {
        Call::OperateMulti => understand::<MultiRequest>(body)?.proc_operate_req,
        _ => vec![request.clone()],
    };
    for one in &several {
        if let Some(namespace) = one.meta.namespace.as_ref().filter(|namespace| !app.may_touch(namespace)) {
            return Err(Refusal::NotAllowed(format!(
                "app {:?} may not touch namespace {namespace:?}",
                app.code
            )));
        }
    }
    let value =
        |data: Result<Value, serde_json::Error>| data.map_err(|error| Refusal::Wrong(error.to_string()));
    let to_value = serde_json::to_value;
    match call {
        Call::Register => {
            value(serde_json::to_value(gateway.registry_call(Registry::Register, &request).await?))
        }
        Call::Update => value(serde_json::to_value(gateway.registry_call(Registry::Update, &request).await?)),
        Call::Unregister => {
            value(serde_json::to_value(gateway.registry_call(Registry::Unregister, &request).await?))
        }
        Call::Operate | Call::OperateMulti => {
            let task_id = gateway.operate(&several).await?;
            value(to_value(TaskData { task_id }))
        }
        Call::Result(form) => {
            let id = request.task_id.ok_or_else(|| Refusal::Wrong("task_id is missing".to_owned()))?;
            value(serde_json::to_value(gateway.results(&id, form, &may).await?))
        }
        Call::Status { second } => value(serde_json::to_value(gateway.status(&request, second).await?)),
        Call::Sync => value(serde_json::to_value(gateway.sync(&request).await?)),
        Call::SetGroups => value(serde_json::to_value(gateway.set_groups(&request, body).await?)),
        Call::Groups => gateway.groups(&request).await,
        Call::Agents { by_id } => gateway.agents(&request, by_id),
        Call::Health | Call::Job(_) | Call::JobResult => Ok(Value::Null),
    }
}

/// JOB's calls are GSE's operations under other names.
async fn operate_job<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    api: JobApi,
    body: &Value,
) -> Result<Value, Refusal> {
    let body: JobBody = understand(body)?;
    let (subjects, _) = body.subjects(api);
    if let Some(subject) = subjects.iter().find(|subject| !app.may_touch(subject.key.namespace.as_str())) {
        let namespace = subject.key.namespace.as_str();
        return Err(Refusal::NotAllowed(format!("app {:?} may not touch namespace {namespace:?}", app.code)));
    }
    let bk_gse_taskid = gateway.operate_job(&body, api).await?;
    serde_json::to_value(JobTaskData { bk_gse_taskid }).map_err(|error| Refusal::Wrong(error.to_string()))
}

fn understand<T: serde::de::DeserializeOwned>(body: &Value) -> Result<T, Refusal> {
    // What was found there may be a secret: only what was expected is told.
    T::deserialize(body).map_err(|error| {
        let text = error.to_string();
        let expected = text.rsplit_once("expected ").map_or("another type", |(_, expected)| expected);
        Refusal::Wrong(format!("a field has the wrong type: expected {expected}"))
    })
}

fn refused(refusal: &Refusal) -> (Response, String) {
    let (code, message) = match refusal {
        Refusal::Wrong(message) => (EnvelopeCode::BAD_REQUEST, message.clone()),
        Refusal::UnknownTask(message) => (EnvelopeCode::UNKNOWN_TASK, message.clone()),
        Refusal::NotQueued => (EnvelopeCode::NOT_QUEUED, "not queued yet: ask again".to_owned()),
        Refusal::NotAllowed(message) => (EnvelopeCode::NOT_ALLOWED, message.clone()),
        Refusal::Store(error) => (EnvelopeCode::STORE_FAILED, error.to_string()),
    };
    (failed(StatusCode::OK, code, &message), message)
}

fn failed(status: StatusCode, code: EnvelopeCode, message: &str) -> Response {
    json(status, &Envelope::<Value>::failed(code, message))
}

fn json(status: StatusCode, value: &impl serde::Serialize) -> Response {
    let mut response = Response::new(Body::from(serde_json::to_vec(value).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
