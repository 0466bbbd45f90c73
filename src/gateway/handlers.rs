//! App calls: decode a body, check what it names, run the call and encode its response.

use std::sync::Arc;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::Value;

use super::audit::{AuditLog, AuditQuery, RequestLog};
use super::batch::{Operations, RawJobBody, RawOperations, RejectedItem};
use super::decode::{numeric_parameter, parameter, parse_body};
use super::logs::LogQuery;
use super::metrics::Gauges;
use super::middleware::MiddlewareState;
use super::processes::{CurrentGrant, Query};
use super::registry::{RegistryCall as Registry, owned_spec};
use super::reply::{json, lines};
use super::routes::ApiCall;
use super::state::StoreRequest;
use super::{ApiError, Caller, Gateway, fleet, openapi};
use crate::access::apps::AppLogin;
use crate::access::{AccessRequest, AccessRole, Grant, authorize};
use crate::contract::{AuditInstances, FigureSeries, RenameRequest, StateChanges, StoreAnswer, TaskAnswer};
use crate::gse::JobApi;
use crate::gse::codes::GseOp;
use crate::gse::request::{JobTaskQuery, ProcRequest, TaskQuery};
use crate::gse::response::{Envelope, JobTaskData, TaskData};
use crate::http::{Connection, end_on_revocation};
use crate::model::{InstanceKey, Name};
use crate::store::Store;

pub(super) async fn handle<S: Store>(
    shared: &MiddlewareState<S>,
    login: &AppLogin<'_>,
    log: &mut RequestLog,
    parts: &Parts,
    body: &[u8],
) -> Result<Response, ApiError> {
    let (gateway, caller) = (&shared.gateway, caller(login, &parts.headers)?);
    let grant: &Grant = &caller.grant;
    let data: Value = match log.call {
        ApiCall::Register => registry(gateway, Registry::Register, log, body, &caller).await?,
        ApiCall::Update => registry(gateway, Registry::Update, log, body, &caller).await?,
        ApiCall::Unregister => registry(gateway, Registry::Unregister, log, body, &caller).await?,
        ApiCall::Operate { second } => operate(gateway, log, body, &caller, second).await?,
        ApiCall::OperateMulti => operate_multi(gateway, log, body, &caller).await?,
        ApiCall::Job(api) => {
            let data = job(gateway, log, api, body, &caller).await?;
            return Ok(json(StatusCode::OK, &Envelope::of_job(data)));
        }
        ApiCall::JobResult => {
            let JobTaskQuery { bk_gse_taskid } = parse_body(body)?;
            let id =
                bk_gse_taskid.ok_or_else(|| ApiError::BadRequest("bk_gse_taskid is missing".to_owned()))?;
            let data = gateway.job_results(&id, grant).await?;
            return Ok(json(StatusCode::OK, &Envelope::of_job(data)));
        }
        ApiCall::Result(form) => {
            let TaskQuery { task_id } = parse_body(body)?;
            let id = task_id.ok_or_else(|| ApiError::BadRequest("task_id is missing".to_owned()))?;
            let rows = gateway.results(&id, form, grant).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(rows)));
        }
        ApiCall::Status { second } => {
            let data = gateway.status(&request(&caller, log, body)?, second, grant).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(data)));
        }
        ApiCall::Sync => {
            let data = gateway.sync(&request(&caller, log, body)?, grant).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(data)));
        }
        ApiCall::SetGroups => {
            let request = request(&caller, log, body)?;
            serde_json::to_value(gateway.set_groups(&request, &parse_body(body)?, &caller).await?)?
        }
        ApiCall::Groups => serde_json::to_value(gateway.groups(&request(&caller, log, body)?).await?)?,
        ApiCall::Agents { by_id: true } => {
            serde_json::to_value(gateway.agent_states(&request(&caller, log, body)?)?)?
        }
        ApiCall::Agents { by_id: false } => Value::Object(gateway.agents(&request(&caller, log, body)?)?),
        ApiCall::Processes | ApiCall::ProcessDigests => return processes(gateway, grant, log, parts).await,
        ApiCall::Figures => {
            let series = figures(gateway, &caller, log, &instance_parameter(parts)?).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(series)));
        }
        ApiCall::Watch => return watch(shared, login, log, parts).await,
        ApiCall::Logs => return logs(shared, (login, &caller), log, parts).await,
        ApiCall::Rename => rename(gateway, log, body, &caller).await?,
        ApiCall::Hosts => hosts(shared, grant, parts).await?,
        ApiCall::Tasks => tasks(gateway, parameter(parts, "op"), caller).await?,
        ApiCall::State => {
            let answer = state(shared, login, log, body).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(answer)));
        }
        ApiCall::Access => return Ok(json(StatusCode::OK, &Envelope::ok(login.info()))),
        ApiCall::Audit | ApiCall::VerifyAudit => return audit(gateway, grant, log, parts).await,
        ApiCall::Metrics => return Ok(metrics(gateway, Connection::of(&parts.extensions)).await),
        ApiCall::Description => return Ok(json(StatusCode::OK, openapi::description())),
        ApiCall::JoinTokens | ApiCall::CreateJoinToken | ApiCall::RevokeJoinToken | ApiCall::RevokeHost => {
            return fleet::app_call(shared, login.app, log, body).await;
        }
        ApiCall::Join
        | ApiCall::Stream
        | ApiCall::AgentMessages
        | ApiCall::AgentLogs
        | ApiCall::AgentFigures => Value::Null,
        ApiCall::RenewCertificate | ApiCall::Enroll | ApiCall::Health | ApiCall::Ready => Value::Null,
    };
    Ok(json(StatusCode::OK, &Envelope::ok(data)))
}

/// The list of processes, in either form.
async fn processes<S: Store>(
    gateway: &Gateway<S>,
    grant: &Grant,
    log: &mut RequestLog,
    parts: &Parts,
) -> Result<Response, ApiError> {
    let query = list_query(grant, log, parts)?;
    if log.call == ApiCall::ProcessDigests {
        let page = gateway.process_digests(&query, grant).await?;
        return Ok(json(StatusCode::OK, &Envelope::ok(page)));
    }
    let page = gateway.processes(&query, grant).await?;
    Ok(json(StatusCode::OK, &Envelope::ok(page)))
}

/// Entries of the audit log, or its verification.
async fn audit<S: Store>(
    gateway: &Gateway<S>,
    grant: &Grant,
    log: &mut RequestLog,
    parts: &Parts,
) -> Result<Response, ApiError> {
    log.reads = Some("audit".to_owned());
    if log.call == ApiCall::VerifyAudit {
        return Ok(json(StatusCode::OK, &Envelope::ok(gateway.verify_audit().await?)));
    }
    let page = gateway.audit_page(AuditQuery::read(grant, parts)?, grant).await?;
    Ok(json(StatusCode::OK, &Envelope::ok(page)))
}

/// Lists hosts with their agents and certificates.
async fn hosts<S: Store>(
    shared: &MiddlewareState<S>,
    grant: &Grant,
    parts: &Parts,
) -> Result<Value, ApiError> {
    let mut hosts = shared.gateway.list_hosts(parameter(parts, "brief").is_some(), grant).await?;
    shared.fleet.describe(&mut hosts, grant);
    Ok(serde_json::to_value(hosts)?)
}

/// The grant of a caller at the time of each call; `None`: the caller was removed.
fn current_grant<S: Store>(shared: &MiddlewareState<S>, login: &AppLogin<'_>) -> CurrentGrant {
    let (authenticator, code) = (Arc::clone(&shared.authenticator), login.app.code.clone());
    Arc::new(move || authenticator.apps().find(&code).map(|app| Arc::clone(app.grant())))
}

/// Streams changes until the app's credentials are revoked. The grant is read for every change.
async fn watch<S: Store>(
    shared: &MiddlewareState<S>,
    login: &AppLogin<'_>,
    log: &mut RequestLog,
    parts: &Parts,
) -> Result<Response, ApiError> {
    let after = numeric_parameter(parts, "after")?;
    let query = list_query(login.app.grant(), log, parts)?;
    let body = shared.gateway.watch(query, after, current_grant(shared, login)).await;
    let revoked =
        shared.authenticator.app_revocation(login, |grant| grant.check_role(AccessRole::Read).is_ok());
    Ok(lines(end_on_revocation(body, revoked, CREDENTIALS_REVOKED)))
}

/// Streams the log of one instance until the app's credentials are revoked, or its grant no longer has the instance or the
/// instance's owner.
async fn logs<S: Store>(
    shared: &MiddlewareState<S>,
    (login, caller): (&AppLogin<'_>, &Caller),
    log: &mut RequestLog,
    parts: &Parts,
) -> Result<Response, ApiError> {
    let query = LogQuery::read(parts)?;
    let instance = query.instance.clone();
    log.add_instances("", [&instance]);
    log.reads = Some(instance.to_string());
    log.namespaces.enter(instance.namespace.as_str())?;
    shared.gateway.check_read(caller, &instance).await?;
    let owner = shared.gateway.owner_of(&instance).await?;
    let body = shared.gateway.logs(&caller.app, query, current_grant(shared, login))?;
    let revoked = shared
        .authenticator
        .app_revocation(login, move |grant| grant.check_instance(&instance, owner.as_deref()).is_ok());
    Ok(lines(end_on_revocation(body, revoked, LOG_CREDENTIALS_REVOKED)))
}

/// Runs a store request. A wait for changes ends when the app's credentials are revoked, or without changes when its grant
/// changes: the next request is compared with the new one.
async fn state<S: Store>(
    shared: &MiddlewareState<S>,
    login: &AppLogin<'_>,
    log: &mut RequestLog,
    body: &[u8],
) -> Result<StoreAnswer, ApiError> {
    let grant = login.app.grant();
    let mut fields: serde_json::Map<String, Value> = parse_body(body)?;
    fields.retain(|name, _| !name.starts_with("bk_"));
    let request: StoreRequest = parse_body(&serde_json::to_vec(&fields)?)?;
    log.add_state(&request);
    log.changes = request.is_recorded();
    log.reads = request.read_of_specs();
    if request.role() > AccessRole::Read {
        shared.gateway.check_audited()?;
    }
    if !matches!(request, StoreRequest::Changes { .. }) {
        return shared.gateway.state(request, grant).await;
    }
    let before = Arc::clone(grant);
    let is_in_force = shared.authenticator.app_credential_check(login);
    tokio::select! {
        biased;
        () = shared.authenticator.app_revocation(login, move |grant| *grant == *before) => match is_in_force() {
            true => Ok(StoreAnswer::Changes(StateChanges { changes: Vec::new() })),
            false => Err(ApiError::NotAllowed("these credentials are no longer known".to_owned())),
        },
        answer = shared.gateway.state(request, grant) => answer,
    }
}

/// Last line of a watch whose app was removed or has a new secret: a [`ProcessChange`](crate::contract::ProcessChange)
/// with an error.
const CREDENTIALS_REVOKED: &str = "{\"error\":\"these credentials are no longer known\"}\n";

/// The same for a log: a [`LogLine`](crate::contract::LogLine) with an error.
const LOG_CREDENTIALS_REVOKED: &str =
    "{\"error\":\"these credentials are no longer known\",\"reason\":\"revoked\"}\n";

/// Parses the headers of Abide's own clients.
fn caller(login: &AppLogin<'_>, headers: &HeaderMap) -> Result<Caller, ApiError> {
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
    let (app, grant, limits) = (login.app.code.clone(), Arc::clone(login.app.grant()), login.app.limits());
    // A generation would be compared with the lease of that owner.
    authorize(&grant, &AccessRequest { owner: owner.as_deref(), ..AccessRequest::default() })?;
    Ok(Caller { app, owner, generation, op, grant, limits })
}

/// Parses a request about one process or namespace, and checks the app's access.
fn request(caller: &Caller, log: &mut RequestLog, body: &[u8]) -> Result<ProcRequest, ApiError> {
    let request: ProcRequest = parse_body(body)?;
    check_named(caller, log, &request)?;
    Ok(request)
}

/// Checks what a request names. The audit log has every instance of a change and of a refused request.
fn check_named(caller: &Caller, log: &mut RequestLog, request: &ProcRequest) -> Result<(), ApiError> {
    let checked = caller.check_request(request);
    if log.changes || checked.is_err() {
        log.add_request(request);
    }
    checked?;
    request.meta.namespace.as_deref().map_or(Ok(()), |namespace| log.namespaces.enter(namespace))
}

/// Checks items that are not carried out: their rows are part of the task.
fn check_rejected(caller: &Caller, rejected: &[RejectedItem]) -> Result<(), ApiError> {
    let mut named = rejected.iter().map(|item| item.namespace.as_str()).filter(|name| !name.is_empty());
    Ok(named.try_for_each(|namespace| caller.grant.check_namespace(namespace))?)
}

/// Only version 1 operations fall back on the registered spec; a live check may mean a process by its name.
fn has_spec(request: &ProcRequest) -> Result<(), ApiError> {
    match request.spec {
        Some(_) => Ok(()),
        None if request.op_type == Some(GseOp::Status.code()) => Ok(()),
        None => Err(ApiError::BadRequest("spec is missing".to_owned())),
    }
}

async fn registry<S: Store>(
    gateway: &Gateway<S>,
    call: Registry,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let request = request(caller, log, body)?;
    let rows = gateway.registry_call(call, &request, caller).await?;
    log.add_refused_rows(&request, &rows);
    Ok(serde_json::to_value(rows)?)
}

/// A live check changes nothing.
fn is_live_check(request: &ProcRequest) -> bool {
    request.op_type == Some(GseOp::Status.code())
}

/// `second`: version 2, which requires a spec.
async fn operate<S: Store>(
    gateway: &Gateway<S>,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
    second: bool,
) -> Result<Value, ApiError> {
    let request = request(caller, log, body)?;
    if second {
        has_spec(&request)?;
    }
    request.usable_targets()?;
    log.changes = !is_live_check(&request);
    let operations = Operations { requests: vec![request], rejected: Vec::new() };
    let task_id = gateway.operate(operations, caller).await?;
    log.what.task.clone_from(&task_id);
    Ok(serde_json::to_value(TaskData { task_id })?)
}

async fn operate_multi<S: Store>(
    gateway: &Gateway<S>,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let operations = parse_body::<RawOperations>(body)?.read();
    operations.requests.iter().try_for_each(|one| check_named(caller, log, one))?;
    check_rejected(caller, &operations.rejected)?;
    log.refused.count = operations.rejected.len();
    log.changes = !operations.requests.iter().all(is_live_check);
    let task_id = gateway.operate(operations, caller).await?;
    log.what.task.clone_from(&task_id);
    Ok(serde_json::to_value(TaskData { task_id })?)
}

/// The task of an operation (`op`), or all tasks.
async fn tasks<S: Store>(
    gateway: &Gateway<S>,
    op: Option<String>,
    caller: Caller,
) -> Result<Value, ApiError> {
    let answer = match op {
        Some(op) => TaskAnswer::Found(gateway.task_of(&Caller { op: Some(op), ..caller }).await?),
        None => TaskAnswer::List(gateway.list_tasks(&caller.grant).await?),
    };
    Ok(serde_json::to_value(answer)?)
}

/// Maps JOB's calls to GSE operations.
async fn job<S: Store>(
    gateway: &Gateway<S>,
    log: &mut RequestLog,
    api: JobApi,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let (body, rejected) = parse_body::<RawJobBody>(body)?.read(api)?;
    check_rejected(caller, &rejected)?;
    log.refused.count = rejected.len();
    let (subjects, _) = body.contents_by_path(api);
    log.what.detail = body.op_type.map_or_else(String::new, |code| format!("op {code}"));
    log.changes = api == JobApi::ManageProc || body.op_type != Some(GseOp::Status.code());
    for subject in &subjects {
        let hosts = subject.hosts.iter().map(|host| host.key.to_string()).collect();
        let (process, op) = (subject.key.to_string(), String::new());
        log.what.instances.push(AuditInstances { process, op, hosts });
        caller.grant.check_namespace(subject.key.namespace.as_str())?;
        subject.hosts.iter().try_for_each(|host| caller.grant.check_host(&host.key))?;
        log.namespaces.enter(subject.key.namespace.as_str())?;
    }
    let bk_gse_taskid = gateway.operate_job((&body, rejected), api, caller).await?;
    // A registered identity selects its instance, regardless of the name in the call.
    if let Some(instances) = gateway.task_instances(&bk_gse_taskid) {
        log.what.instances = instances;
    }
    log.what.task.clone_from(&bk_gse_taskid);
    Ok(serde_json::to_value(JobTaskData { bk_gse_taskid })?)
}

async fn rename<S: Store>(
    gateway: &Gateway<S>,
    log: &mut RequestLog,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, ApiError> {
    let RenameRequest { from, to, .. } = parse_body(body)?;
    log.what.detail = format!("from {from}");
    log.add_instances("rename", [&to]);
    log.namespaces.enter(from.namespace.as_str())?;
    log.namespaces.enter(to.namespace.as_str())?;
    let spec = parse_body::<ProcRequest>(body)?.spec()?.map(|spec| owned_spec(spec, caller));
    for key in [&from, &to] {
        gateway.check_change(caller, key, spec.as_ref()).await?;
    }
    let task_id = gateway.rename(from, to, spec, caller).await?;
    log.what.task.clone_from(&task_id);
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
            audit_entries: self.audit().map_or(0, AuditLog::written),
            audit_failing: self.audit().is_some_and(AuditLog::is_failing),
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

async fn figures<S: Store>(
    gateway: &Gateway<S>,
    caller: &Caller,
    log: &mut RequestLog,
    instance: &InstanceKey,
) -> Result<FigureSeries, ApiError> {
    log.add_instances("", [instance]);
    log.namespaces.enter(instance.namespace.as_str())?;
    gateway.check_read(caller, instance).await?;
    gateway.figure_series(instance).await
}

/// The instance of a query.
fn instance_parameter(parts: &Parts) -> Result<InstanceKey, ApiError> {
    let wrong = || ApiError::BadRequest("instance is missing, or not HOST:NAMESPACE:NAME".to_owned());
    parameter(parts, "instance").ok_or_else(wrong)?.parse().map_err(|_| wrong())
}

/// The query of a list. A namespace or an owner that the query names has to be granted; others are left out of the list.
fn list_query(grant: &Grant, log: &mut RequestLog, parts: &Parts) -> Result<Query, ApiError> {
    let query = query(parts);
    // Not a valid namespace: the list is empty, and only the number of the last change is of interest.
    if let Some(namespace) = query.exact_namespace().filter(|text| text.parse::<Name>().is_ok()) {
        let (process, hosts) = (format!("{namespace}/*"), Vec::new());
        log.what.instances.push(AuditInstances { process, hosts, ..AuditInstances::default() });
        grant.check_namespace(namespace)?;
        log.namespaces.enter(namespace)?;
    }
    let owner = query.owner.as_deref();
    authorize(grant, &AccessRequest { owner, ..AccessRequest::default() })?;
    Ok(query)
}

fn query(parts: &Parts) -> Query {
    let get = |name: &str| parameter(parts, name);
    let (namespace, name, host) = (get("namespace"), get("name"), get("host"));
    Query {
        namespace,
        name,
        host,
        owner: get("owner"),
        after: get("after"),
        limit: get("limit"),
        brief: get("brief"),
        numbers: get("numbers"),
        attempts: get("attempts"),
        digests: get("digests"),
    }
}
