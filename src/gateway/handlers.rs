//! App calls: decode a body, check namespaces, run the call and encode its response.

use std::sync::Arc;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::Value;

use super::auth::App;
use super::batch::{Operations, RawJobBody, RawOperations, RejectedItem};
use super::decode::{numeric_parameter, parameter, parse_body};
use super::logs::LogQuery;
use super::metrics::Gauges;
use super::middleware::{MiddlewareState, RequestLog};
use super::processes::Query;
use super::registry::{RegistryCall as Registry, owned_spec};
use super::reply::{json, lines};
use super::routes::ApiCall;
use super::state::StoreRequest;
use super::{ApiError, Caller, Gateway, fleet, openapi};
use crate::clock;
use crate::contract::{RenameRequest, StoreAnswer, TaskAnswer};
use crate::gse::JobApi;
use crate::gse::codes::{GseOp, RowCode};
use crate::gse::request::{JobTaskQuery, ProcRequest, TaskQuery};
use crate::gse::response::{Envelope, JobTaskData, TaskData};
use crate::http::{Connection, end_on_revocation};
use crate::model::InstanceKey;
use crate::store::Store;

pub(super) async fn handle<S: Store>(
    shared: &MiddlewareState<S>,
    app: &App,
    log: &mut RequestLog,
    parts: &Parts,
    body: &[u8],
) -> Result<Response, ApiError> {
    let gateway = &shared.gateway;
    let caller = caller(app, &parts.headers)?;
    let may = |namespace: &str| app.may_touch(namespace);
    let data: Value = match log.call {
        ApiCall::Register => registry(gateway, Registry::Register, app, log, body, &caller).await?,
        ApiCall::Update => registry(gateway, Registry::Update, app, log, body, &caller).await?,
        ApiCall::Unregister => registry(gateway, Registry::Unregister, app, log, body, &caller).await?,
        ApiCall::Operate { second } => operate(gateway, app, log, body, &caller, second).await?,
        ApiCall::OperateMulti => operate_multi(gateway, app, log, body, &caller).await?,
        ApiCall::Job(api) => {
            let data = job(gateway, app, log, api, body, &caller).await?;
            return Ok(json(StatusCode::OK, &Envelope::of_job(data)));
        }
        ApiCall::JobResult => {
            let JobTaskQuery { bk_gse_taskid } = parse_body(body)?;
            let id =
                bk_gse_taskid.ok_or_else(|| ApiError::BadRequest("bk_gse_taskid is missing".to_owned()))?;
            let data = gateway.job_results(&id, &may).await?;
            return Ok(json(StatusCode::OK, &Envelope::of_job(data)));
        }
        ApiCall::Result(form) => {
            let TaskQuery { task_id } = parse_body(body)?;
            let id = task_id.ok_or_else(|| ApiError::BadRequest("task_id is missing".to_owned()))?;
            let rows = gateway.results(&id, form, &may).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(rows)));
        }
        ApiCall::Status { second } => {
            let data = gateway.status(&request(app, log, body)?, second).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(data)));
        }
        ApiCall::Sync => {
            let data = gateway.sync(&request(app, log, body)?).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(data)));
        }
        ApiCall::SetGroups => {
            let request = request(app, log, body)?;
            serde_json::to_value(gateway.set_groups(&request, &parse_body(body)?, &caller).await?)?
        }
        ApiCall::Groups => serde_json::to_value(gateway.groups(&request(app, log, body)?).await?)?,
        ApiCall::Agents { by_id: true } => {
            serde_json::to_value(gateway.agent_states(&request(app, log, body)?)?)?
        }
        ApiCall::Agents { by_id: false } => Value::Object(gateway.agents(&request(app, log, body)?)?),
        ApiCall::Processes => {
            let page = gateway.processes(&query(parts)?, &may).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(page)));
        }
        ApiCall::Figures => {
            let series = gateway.figure_series(&instance_parameter(app, parts)?).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(series)));
        }
        ApiCall::Watch => return watch(shared, app, parts).await,
        ApiCall::Logs => return logs(shared, app, parts),
        ApiCall::Rename => rename(gateway, app, log, body, &caller).await?,
        ApiCall::Hosts => hosts(shared, parts).await?,
        ApiCall::Tasks => tasks(gateway, app, parameter(parts, "op"), caller).await?,
        ApiCall::State => {
            let answer = state(shared, app, log, body).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(answer)));
        }
        ApiCall::Metrics => return Ok(metrics(gateway, Connection::of(&parts.extensions)).await),
        ApiCall::Description => return Ok(json(StatusCode::OK, openapi::description())),
        ApiCall::JoinTokens | ApiCall::CreateJoinToken | ApiCall::RevokeJoinToken | ApiCall::RevokeHost => {
            return fleet::app_call(shared, app, log, body).await;
        }
        ApiCall::Join | ApiCall::Stream | ApiCall::Tell | ApiCall::AgentLogs | ApiCall::AgentFigures => {
            Value::Null
        }
        ApiCall::RenewCertificate | ApiCall::Enroll => Value::Null,
        ApiCall::Health | ApiCall::Ready => Value::Null,
    };
    Ok(json(StatusCode::OK, &Envelope::ok(data)))
}

/// Lists hosts with their agents and certificates.
async fn hosts<S: Store>(shared: &MiddlewareState<S>, parts: &Parts) -> Result<Value, ApiError> {
    let mut hosts = shared.gateway.list_hosts(parameter(parts, "brief").is_some()).await?;
    shared.fleet.describe(&mut hosts);
    Ok(serde_json::to_value(hosts)?)
}

/// Streams changes until the app's credentials are revoked.
async fn watch<S: Store>(
    shared: &MiddlewareState<S>,
    app: &App,
    parts: &Parts,
) -> Result<Response, ApiError> {
    let after = numeric_parameter(parts, "after")?;
    let (authenticator, code) = (Arc::clone(&shared.authenticator), app.code.clone());
    let may = Arc::new(move |namespace: &str| {
        let apps = authenticator.apps();
        apps.find(&code).is_some_and(|app| namespace.is_empty() || app.may_touch(namespace))
    });
    let body = shared.gateway.watch(query(parts)?, after, may).await;
    let revoked = shared.authenticator.app_revocation(app);
    Ok(lines(end_on_revocation(body, revoked, CREDENTIALS_REVOKED)))
}

/// Streams the log of one instance until the app's credentials are revoked.
fn logs<S: Store>(shared: &MiddlewareState<S>, app: &App, parts: &Parts) -> Result<Response, ApiError> {
    let query = log_query(parts)?;
    let namespace = query.instance.namespace.as_str();
    if !app.may_touch(namespace) {
        return Err(not_allowed(app, namespace));
    }
    let body = shared.gateway.logs(&app.code, query)?;
    let revoked = shared.authenticator.app_revocation(app);
    Ok(lines(end_on_revocation(body, revoked, LOG_CREDENTIALS_REVOKED)))
}

fn log_query(parts: &Parts) -> Result<LogQuery, ApiError> {
    let get = |name: &str| parameter(parts, name);
    let wrong = |name: &str, form: &str| ApiError::BadRequest(format!("{name} is missing or not {form}"));
    let instance = InstanceKey {
        namespace: get("namespace")
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| wrong("namespace", "a name"))?,
        name: get("name").and_then(|text| text.parse().ok()).ok_or_else(|| wrong("name", "a name"))?,
        host: get("host")
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| wrong("host", "CLOUD:IP or @AGENT_ID"))?,
    };
    let tail = get("tail").map(|text| text.parse().map_err(|_| wrong("tail", "a number"))).transpose()?;
    let since = match get("since") {
        Some(text) => Some(clock::read(&text).ok_or_else(|| wrong("since", "a time in RFC 3339"))?),
        None => None,
    };
    let cursor = get("cursor").filter(|cursor| !cursor.is_empty());
    let follow = matches!(get("follow").as_deref(), Some("1" | "true"));
    Ok(LogQuery { instance, tail, since, cursor, follow })
}

/// Runs a store request. A wait for changes ends when the app's credentials are revoked.
async fn state<S: Store>(
    shared: &MiddlewareState<S>,
    app: &App,
    log: &mut RequestLog,
    body: &[u8],
) -> Result<StoreAnswer, ApiError> {
    let mut fields: serde_json::Map<String, Value> = parse_body(body)?;
    fields.retain(|name, _| !name.starts_with("bk_"));
    let request: StoreRequest = parse_body(&serde_json::to_vec(&fields)?)?;
    let changes = request.changes();
    log.changes = changes.is_some();
    log.what = changes.unwrap_or_default();
    if !matches!(request, StoreRequest::Changes { .. }) {
        return shared.gateway.state(request).await;
    }
    tokio::select! {
        answer = shared.gateway.state(request) => answer,
        () = shared.authenticator.app_revocation(app) => {
            Err(ApiError::NotAllowed("these credentials are no longer known".to_owned()))
        }
    }
}

/// Last line of a watch whose app was removed or has a new secret: a [`ProcessChange`](crate::contract::ProcessChange)
/// with an error.
const CREDENTIALS_REVOKED: &str = "{\"error\":\"these credentials are no longer known\"}\n";

/// The same for a log: a [`LogLine`](crate::contract::LogLine) with an error.
const LOG_CREDENTIALS_REVOKED: &str =
    "{\"error\":\"these credentials are no longer known\",\"reason\":\"revoked\"}\n";

/// Parses the headers of Abide's own clients.
fn caller(app: &App, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let wrong = |name: &str| ApiError::BadRequest(format!("the header {name} is not valid"));
    let generation = match text("x-abide-generation") {
        None => None,
        Some(number) => Some(number.parse().map_err(|_| wrong("X-Abide-Generation"))?),
    };
    if generation.is_some() && text("x-abide-owner").is_none() {
        return Err(ApiError::BadRequest("X-Abide-Generation requires X-Abide-Owner".to_owned()));
    }
    let name = |header: &str| match text(header) {
        Some(value) if value.is_empty() || value.len() > 128 || value.contains('/') => Err(wrong(header)),
        value => Ok(value),
    };
    let (owner, op) = (name("x-abide-owner")?, name("x-abide-op")?);
    Ok(Caller { app: app.code.clone(), owner, generation, op, sees: app.namespaces().to_vec() })
}

/// Parses a request about one process or namespace, and checks the app's access.
fn request(app: &App, log: &mut RequestLog, body: &[u8]) -> Result<ProcRequest, ApiError> {
    let request: ProcRequest = parse_body(body)?;
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".to_owned());
    let (meta, hosts) = (&request.meta, request.hosts.len() + request.agent_id_list.len());
    let unit = if hosts == 1 { "host" } else { "hosts" };
    log.what = format!("{}/{} on {hosts} {unit}", text(&meta.namespace), text(&meta.name));
    if let Some(op) = request.op_type {
        log.what.push_str(&format!(", op {op}"));
    }
    allowed(app, &request)?;
    Ok(request)
}

fn allowed(app: &App, request: &ProcRequest) -> Result<(), ApiError> {
    match request.meta.namespace.as_ref().filter(|namespace| !app.may_touch(namespace)) {
        Some(namespace) => Err(not_allowed(app, namespace)),
        None => Ok(()),
    }
}

/// The same for items that are not carried out: their rows are part of the task.
fn allowed_rejected(app: &App, rejected: &[RejectedItem]) -> Result<(), ApiError> {
    let foreign = |item: &&RejectedItem| !item.namespace.is_empty() && !app.may_touch(&item.namespace);
    match rejected.iter().find(foreign) {
        Some(item) => Err(not_allowed(app, &item.namespace)),
        None => Ok(()),
    }
}

/// Only version 1 operations fall back on the registered spec; a live check may mean a process by its name.
fn has_spec(request: &ProcRequest) -> Result<(), ApiError> {
    match request.spec {
        Some(_) => Ok(()),
        None if request.op_type == Some(GseOp::Status.code()) => Ok(()),
        None => Err(ApiError::BadRequest("spec is missing".to_owned())),
    }
}

fn not_allowed(app: &App, namespace: &str) -> ApiError {
    ApiError::NotAllowed(format!("app {:?} may not touch namespace {namespace:?}", app.code))
}

async fn registry<S: Store>(
    gateway: &Gateway<S>,
    call: Registry,
    app: &App,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let rows = gateway.registry_call(call, &request(app, log, body)?, caller).await?;
    log.refused = rows.values().filter(|row| row.code() != RowCode::DONE).count();
    Ok(serde_json::to_value(rows)?)
}

/// `second`: version 2, which requires a spec.
async fn operate<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
    second: bool,
) -> Result<Value, ApiError> {
    let request = request(app, log, body)?;
    if second {
        has_spec(&request)?;
    }
    request.usable_targets()?;
    let operations = Operations { requests: vec![request], rejected: Vec::new() };
    let task_id = gateway.operate(operations, caller).await?;
    Ok(serde_json::to_value(TaskData { task_id })?)
}

async fn operate_multi<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let operations = parse_body::<RawOperations>(body)?.read();
    operations.requests.iter().try_for_each(|one| allowed(app, one))?;
    allowed_rejected(app, &operations.rejected)?;
    log.what = format!("{} requests", operations.requests.len());
    log.refused = operations.rejected.len();
    let task_id = gateway.operate(operations, caller).await?;
    Ok(serde_json::to_value(TaskData { task_id })?)
}

/// The task of an operation (`op`), or all tasks.
async fn tasks<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    op: Option<String>,
    caller: Caller,
) -> Result<Value, ApiError> {
    let answer = match op {
        Some(op) => TaskAnswer::Found(gateway.task_of(&Caller { op: Some(op), ..caller }).await?),
        None => TaskAnswer::List(gateway.list_tasks(&|namespace: &str| app.may_touch(namespace)).await?),
    };
    Ok(serde_json::to_value(answer)?)
}

/// Maps JOB's calls to GSE operations.
async fn job<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    log: &mut RequestLog,
    api: JobApi,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let (body, rejected) = parse_body::<RawJobBody>(body)?.read(api)?;
    allowed_rejected(app, &rejected)?;
    log.refused = rejected.len();
    let (subjects, _) = body.places(api);
    log.what = format!("{} processes, op {:?}", subjects.len(), body.op_type);
    if let Some(subject) = subjects.iter().find(|subject| !app.may_touch(subject.key.namespace.as_str())) {
        return Err(not_allowed(app, subject.key.namespace.as_str()));
    }
    let may = |namespace: &str| app.may_touch(namespace);
    let bk_gse_taskid = gateway.operate_job((&body, rejected), api, caller, &may).await?;
    Ok(serde_json::to_value(JobTaskData { bk_gse_taskid })?)
}

async fn rename<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let RenameRequest { from, to, .. } = parse_body(body)?;
    log.what = format!("{from} to {to}");
    for key in [&from, &to] {
        if !app.may_touch(key.namespace.as_str()) {
            return Err(not_allowed(app, key.namespace.as_str()));
        }
    }
    let spec = parse_body::<ProcRequest>(body)?.spec()?.map(|spec| owned_spec(spec, caller));
    let task_id = gateway.rename(from, to, spec, caller).await?;
    Ok(serde_json::to_value(TaskData { task_id })?)
}

impl<S: Store> Gateway<S> {
    /// All metrics of the gateway.
    pub async fn metrics_text(&self) -> String {
        let gauges = Gauges {
            registered: self.count_registered().await.unwrap_or(0),
            sessions: self.sessions(),
            open_tasks: self.open_tasks(),
            log_streams: self.log_streams.count(),
            ready: self.not_ready().is_none(),
            ignored_reports: self.report_usage.ignored(),
        };
        self.metrics.text(&gauges)
    }
}

async fn metrics<S: Store>(gateway: &Gateway<S>, connection: Option<&Connection>) -> Response {
    let mut text = gateway.metrics_text().await;
    if let Some(connection) = connection {
        text.push_str(&connection.listener().metrics_text());
    }
    let mut response = Response::new(Body::from(text));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// The instance of a query, which the app may see.
fn instance_parameter(app: &App, parts: &Parts) -> Result<InstanceKey, ApiError> {
    let wrong = || ApiError::BadRequest("instance is missing, or not HOST:NAMESPACE:NAME".to_owned());
    let text = parameter(parts, "instance").ok_or_else(wrong)?;
    let instance: InstanceKey = text.parse().map_err(|_| wrong())?;
    match app.may_touch(instance.namespace.as_str()) {
        true => Ok(instance),
        false => Err(not_allowed(app, instance.namespace.as_str())),
    }
}

fn query(parts: &Parts) -> Result<Query, ApiError> {
    let get = |name: &str| parameter(parts, name);
    let (namespace, name, host) = (get("namespace"), get("name"), get("host"));
    Ok(Query {
        namespace,
        name,
        host,
        owner: get("owner"),
        after: get("after"),
        limit: get("limit"),
        brief: get("brief"),
        numbers: get("numbers"),
        attempts: get("attempts"),
    })
}
