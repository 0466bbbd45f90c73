//! The calls of apps: from a body to what a call answers.

use std::sync::Arc;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;

use super::auth::App;
use super::form::{number, parameter, read};
use super::http::{Asked, Shared, json, lines};
use super::metrics::Gauges;
use super::processes::Query;
use super::registry::{Call as Registry, held};
use super::routes::Call;
use super::state::Ask;
use super::{Caller, Gateway, Refusal, openapi};
use crate::gse::answer::{Envelope, JobTaskData, TaskData};
use crate::gse::codes::RowCode;
use crate::gse::request::{MultiRequest, ProcRequest};
use crate::gse::{JobApi, JobBody};
use crate::http::{Connection, until_revoked};
use crate::model::InstanceKey;
use crate::store::Store;

pub(super) async fn carry_out<S: Store>(
    shared: &Shared<S>,
    app: &App,
    asked: &mut Asked,
    parts: &Parts,
    body: &[u8],
) -> Result<Response, Refusal> {
    let gateway = &shared.gateway;
    let caller = caller(app, &parts.headers)?;
    let may = |namespace: &str| app.may_touch(namespace);
    let data: Value = match asked.call {
        Call::Register => registry(gateway, Registry::Register, app, asked, body, &caller).await?,
        Call::Update => registry(gateway, Registry::Update, app, asked, body, &caller).await?,
        Call::Unregister => registry(gateway, Registry::Unregister, app, asked, body, &caller).await?,
        Call::Operate { second } => {
            let request = request(app, asked, body)?;
            if second {
                has_spec(&request)?;
            }
            let task_id = gateway.operate(&[request], &caller).await?;
            serde_json::to_value(TaskData { task_id })?
        }
        Call::OperateMulti => {
            let requests = read::<MultiRequest>(body)?.proc_operate_req;
            requests.iter().try_for_each(|one| allowed(app, one).and_then(|()| has_spec(one)))?;
            asked.what = format!("{} requests", requests.len());
            let task_id = gateway.operate(&requests, &caller).await?;
            serde_json::to_value(TaskData { task_id })?
        }
        Call::Job(api) => {
            let data = job(gateway, app, asked, api, body, &caller).await?;
            return Ok(json(StatusCode::OK, &Envelope::of_job(data)));
        }
        Call::JobResult => {
            let Task { bk_gse_taskid, .. } = read(body)?;
            let id = bk_gse_taskid.ok_or_else(|| Refusal::Wrong("bk_gse_taskid is missing".to_owned()))?;
            let data = gateway.job_results(&id, &may).await?;
            return Ok(json(StatusCode::OK, &Envelope::of_job(data)));
        }
        Call::Result(form) => {
            let Task { task_id, .. } = read(body)?;
            let id = task_id.ok_or_else(|| Refusal::Wrong("task_id is missing".to_owned()))?;
            let rows = gateway.results(&id, form, &may).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(rows)));
        }
        Call::Status { second } => {
            let data = gateway.status(&request(app, asked, body)?, second).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(data)));
        }
        Call::Sync => {
            let data = gateway.sync(&request(app, asked, body)?).await?;
            return Ok(json(StatusCode::OK, &Envelope::ok(data)));
        }
        Call::SetGroups => {
            let request = request(app, asked, body)?;
            serde_json::to_value(gateway.set_groups(&request, &read(body)?, &caller).await?)?
        }
        Call::Groups => gateway.groups(&request(app, asked, body)?).await?,
        Call::Agents { by_id } => gateway.agents(&request(app, asked, body)?, by_id)?,
        Call::Processes => gateway.processes(&query(parts)?, &may).await?,
        Call::Watch => {
            let after = number(parts, "after")?;
            let (keepers, code) = (Arc::clone(&shared.keepers), app.code.clone());
            let may = Arc::new(move |namespace: &str| {
                let apps = keepers.apps();
                apps.named(&code).is_some_and(|app| namespace.is_empty() || app.may_touch(namespace))
            });
            let body = gateway.watch(query(parts)?, after, may).await;
            return Ok(lines(until_revoked(body, shared.keepers.app_revoked(app), NO_LONGER_KNOWN)));
        }
        Call::Rename => rename(gateway, app, asked, body, &caller).await?,
        Call::Hosts => gateway.list_hosts(parameter(parts, "brief").is_some()).await?,
        Call::Tasks => match parameter(parts, "op") {
            Some(op) => gateway.task_of(&Caller { op: Some(op), ..caller }).await?,
            None => gateway.list_tasks(&may).await?,
        },
        Call::State => {
            let mut question: serde_json::Map<String, Value> = read(body)?;
            question.retain(|name, _| !name.starts_with("bk_"));
            let question = serde_json::to_vec(&question)?;
            let ask: Ask = read(&question)?;
            let changes = ask.changes();
            asked.changes = changes.is_some();
            asked.what = changes.unwrap_or_default();
            if matches!(ask, Ask::Changes { .. }) {
                tokio::select! {
                    answer = gateway.state(ask) => answer?,
                    () = shared.keepers.app_revoked(app) => {
                        return Err(Refusal::NotAllowed("these credentials are no longer known".to_owned()));
                    }
                }
            } else {
                gateway.state(ask).await?
            }
        }
        Call::Metrics => return Ok(metrics(gateway, Connection::of(&parts.extensions)).await),
        Call::Description => return Ok(json(StatusCode::OK, openapi::description())),
        Call::Join | Call::Stream | Call::Tell | Call::Health | Call::Ready => Value::Null,
    };
    Ok(json(StatusCode::OK, &Envelope::ok(data)))
}

/// The last line of a watch whose app is gone, or has another secret.
const NO_LONGER_KNOWN: &str = "{\"error\":\"these credentials are no longer known\"}\n";

/// Which task is asked for, by GSE's name for it or by JOB's.
#[derive(Deserialize)]
struct Task {
    task_id: Option<String>,
    bk_gse_taskid: Option<String>,
}

/// What Abide's own clients say with a call.
fn caller(app: &App, headers: &HeaderMap) -> Result<Caller, Refusal> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let wrong = |name: &str| Refusal::Wrong(format!("{name} cannot be used"));
    let generation = match text("x-abide-generation") {
        None => None,
        Some(number) => Some(number.parse().map_err(|_| wrong("X-Abide-Generation"))?),
    };
    if generation.is_some() && text("x-abide-owner").is_none() {
        return Err(Refusal::Wrong("X-Abide-Generation says nothing without X-Abide-Owner".to_owned()));
    }
    let name = |header: &str| match text(header) {
        Some(value) if value.is_empty() || value.len() > 128 || value.contains('/') => Err(wrong(header)),
        value => Ok(value),
    };
    let (owner, op) = (name("x-abide-owner")?, name("x-abide-op")?);
    Ok(Caller { app: app.code.clone(), owner, generation, op, sees: app.namespaces().to_vec() })
}

/// A request about one process or namespace that this app may touch.
fn request(app: &App, asked: &mut Asked, body: &[u8]) -> Result<ProcRequest, Refusal> {
    let request: ProcRequest = read(body)?;
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "?".to_owned());
    let (meta, hosts) = (&request.meta, request.hosts.len() + request.agent_id_list.len());
    asked.what = format!("{}/{} on {hosts} hosts", text(&meta.namespace), text(&meta.name));
    if let Some(op) = request.op_type {
        asked.what.push_str(&format!(", op {op}"));
    }
    allowed(app, &request)?;
    Ok(request)
}

fn allowed(app: &App, request: &ProcRequest) -> Result<(), Refusal> {
    match request.meta.namespace.as_ref().filter(|namespace| !app.may_touch(namespace)) {
        Some(namespace) => Err(not_allowed(app, namespace)),
        None => Ok(()),
    }
}

/// Only the first version's operations fall back on what is registered.
fn has_spec(request: &ProcRequest) -> Result<(), Refusal> {
    match request.spec {
        Some(_) => Ok(()),
        None => Err(Refusal::Wrong("spec is missing".to_owned())),
    }
}

fn not_allowed(app: &App, namespace: &str) -> Refusal {
    Refusal::NotAllowed(format!("app {:?} may not touch namespace {namespace:?}", app.code))
}

async fn registry<S: Store>(
    gateway: &Gateway<S>,
    call: Registry,
    app: &App,
    asked: &mut Asked,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, Refusal> {
    let rows = gateway.registry_call(call, &request(app, asked, body)?, caller).await?;
    asked.refused = rows.values().filter(|row| row.code() != RowCode::DONE).count();
    Ok(serde_json::to_value(rows)?)
}

/// JOB's calls are GSE's operations under other names.
async fn job<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    asked: &mut Asked,
    api: JobApi,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, Refusal> {
    let body: JobBody = read(body)?;
    let (subjects, _) = body.places(api);
    asked.what = format!("{} processes, op {:?}", subjects.len(), body.op_type);
    if let Some(subject) = subjects.iter().find(|subject| !app.may_touch(subject.key.namespace.as_str())) {
        return Err(not_allowed(app, subject.key.namespace.as_str()));
    }
    let may = |namespace: &str| app.may_touch(namespace);
    let bk_gse_taskid = gateway.operate_job(&body, api, caller, &may).await?;
    Ok(serde_json::to_value(JobTaskData { bk_gse_taskid })?)
}

async fn rename<S: Store>(
    gateway: &Gateway<S>,
    app: &App,
    asked: &mut Asked,
    body: &[u8],
    caller: &Caller,
) -> Result<Value, Refusal> {
    #[derive(Deserialize)]
    struct Names {
        from: InstanceKey,
        to: InstanceKey,
    }
    let Names { from, to } = read(body)?;
    asked.what = format!("{from} to {to}");
    for key in [&from, &to] {
        if !app.may_touch(key.namespace.as_str()) {
            return Err(not_allowed(app, key.namespace.as_str()));
        }
    }
    let spec = read::<ProcRequest>(body)?.spec()?.map(|spec| held(spec, caller));
    let task_id = gateway.rename(from, to, spec, caller).await?;
    Ok(serde_json::to_value(TaskData { task_id })?)
}

impl<S: Store> Gateway<S> {
    /// What is counted, for whoever tells of it.
    pub async fn metrics_text(&self) -> String {
        let gauges = Gauges {
            registered: self.registered().await.unwrap_or(0),
            sessions: self.sessions(),
            open_tasks: self.open_tasks(),
            ready: self.not_ready().is_none(),
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

fn query(parts: &Parts) -> Result<Query, Refusal> {
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
    })
}
