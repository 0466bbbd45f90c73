//! OpenAPI 3.1 description of the API, generated from the route table.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::routes::{ApiCall, RouteAccess, all};

pub fn description() -> &'static Value {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(build);
    &DOCUMENT
}

fn build() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for (method, path, call) in all() {
        let operation = operation(method, &path, call);
        let item = paths.entry(path).or_insert_with(|| json!({}));
        item[method.to_lowercase()] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Abide gateway",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "BlueKing's GSE and JOB process API, with Abide's extensions. Every path works with and without a trailing slash; paths under /api/v2 also work after any prefix. A failure is an envelope with result false and HTTP 200, except for the listed statuses.",
        },
        "security": [{"bkapi": []}, {"basic": []}],
        "paths": paths,
        "components": {"securitySchemes": schemes(), "schemas": schemas()},
    })
}

fn operation(method: &str, path: &str, call: ApiCall) -> Value {
    let mut operation = json!({
        "operationId": format!("{}{}", method.to_lowercase(), path.replace(['/', '.', '-'], "_")),
        "summary": summary(call),
        "responses": responses(call),
    });
    if let Some(schema) = request(call) {
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": reference(schema)}}});
    }
    let parameters: Vec<Value> = parameters(call)
        .iter()
        .map(|(name, about)| json!({"name": name, "in": "query", "description": about, "schema": {"type": "string"}}))
        .chain(headers(call))
        .collect();
    if !parameters.is_empty() {
        operation["parameters"] = Value::Array(parameters);
    }
    match call.access() {
        RouteAccess::Anybody => operation["security"] = json!([]),
        RouteAccess::Agent => operation["security"] = json!([{"token": []}]),
        RouteAccess::App | RouteAccess::Everywhere => {}
    }
    operation
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

fn summary(call: ApiCall) -> &'static str {
    match call {
        ApiCall::Register => {
            "Register a process on hosts; the row code is 850 on hosts where it is already registered"
        }
        ApiCall::Update => "Register a process on hosts, or update its registration",
        ApiCall::Unregister => "Unregister a process on hosts where it is stopped and not hosted",
        ApiCall::Operate { .. } => "Start an operation on hosts; without a spec the registered one is used",
        ApiCall::OperateMulti => "Start several different operations as one task",
        ApiCall::Result(_) => "Get the rows of a task; the row code is 115 while it runs",
        ApiCall::Status { .. } => "Get the status of a process on hosts",
        ApiCall::Sync => "Get the status of all processes of a namespace, paged",
        ApiCall::SetGroups => "Set the resource groups of a namespace on hosts",
        ApiCall::Groups => "Get the resource groups of a namespace",
        ApiCall::Agents { .. } => "Get the agent status of hosts",
        ApiCall::Job(_) => "JOB: operate processes, identified by their paths",
        ApiCall::JobResult => "JOB: get the rows of a task",
        ApiCall::Processes => "List processes with all facts, paged",
        ApiCall::Watch => "Stream process changes after a number, one JSON object per line",
        ApiCall::Rename => "Rename an instance without a restart",
        ApiCall::Hosts => "List hosts with an agent",
        ApiCall::Tasks => "List the latest tasks",
        ApiCall::State => "Access the store of controllers: journals, ledgers, holds, leases",
        ApiCall::Join => "Agents: open a session for hosts",
        ApiCall::Stream => "Agents: stream specs and operations, one JSON object per line",
        ApiCall::Tell => "Agents: send results and reports",
        ApiCall::Health => "Liveness check",
        ApiCall::Ready => "Readiness check",
        ApiCall::Metrics => "Prometheus metrics",
        ApiCall::Description => "This description",
    }
}

fn request(call: ApiCall) -> Option<&'static str> {
    match call {
        ApiCall::Register | ApiCall::Update | ApiCall::Operate { .. } => Some("ProcRequest"),
        ApiCall::Unregister | ApiCall::Status { .. } | ApiCall::Sync | ApiCall::Groups => Some("ProcRequest"),
        ApiCall::SetGroups | ApiCall::Agents { .. } => Some("ProcRequest"),
        ApiCall::OperateMulti => Some("MultiRequest"),
        ApiCall::Result(_) => Some("TaskQuery"),
        ApiCall::Job(_) => Some("JobRequest"),
        ApiCall::JobResult => Some("JobTaskQuery"),
        ApiCall::Rename => Some("Rename"),
        ApiCall::State => Some("State"),
        ApiCall::Join => Some("Join"),
        ApiCall::Tell => Some("Told"),
        ApiCall::Processes | ApiCall::Watch | ApiCall::Hosts | ApiCall::Tasks | ApiCall::Stream => None,
        ApiCall::Health | ApiCall::Ready | ApiCall::Metrics | ApiCall::Description => None,
    }
}

fn parameters(call: ApiCall) -> &'static [(&'static str, &'static str)] {
    const FILTERS: &[(&str, &str)] = &[
        ("namespace", "glob pattern"),
        ("name", "glob pattern"),
        ("host", "glob pattern of CLOUD:IP or @AGENT_ID"),
        ("owner", "exact owner"),
        ("brief", "if set, omit specs"),
        ("after", "processes: `more` of the previous page; watch: a change number"),
        ("limit", "1 to 10000"),
        ("numbers", "watch: if set, also send the numbers of other changes"),
    ];
    match call {
        ApiCall::Processes | ApiCall::Watch => FILTERS,
        ApiCall::Hosts => &[("brief", "if set, omit the number of processes")],
        ApiCall::Stream => &[("session", "session id of join"), ("after", "the last received seq")],
        ApiCall::JobResult => &[("bk_gse_taskid", "task id; every field of the body may be in the query")],
        ApiCall::Tell => &[("session", "session id of join")],
        _ => &[],
    }
}

fn headers(call: ApiCall) -> Vec<Value> {
    let ours = [
        ("X-Abide-Op", "idempotency key: calls with the same key run once"),
        ("X-Abide-Owner", "owner of the instances"),
        (
            "X-Abide-Generation",
            "generation of the owner's writer lease; an older one is refused with 1900409",
        ),
    ];
    let header = |(name, about): (&str, &str)| json!({"name": name, "in": "header", "description": about, "schema": {"type": "string"}});
    match call.changes() && call.access() == RouteAccess::App {
        true => ours.map(header).to_vec(),
        false => Vec::new(),
    }
}

fn responses(call: ApiCall) -> Value {
    let content = match call {
        ApiCall::Watch | ApiCall::Stream => json!({"application/x-ndjson": {}}),
        ApiCall::Metrics => json!({"text/plain": {}}),
        ApiCall::Health | ApiCall::Ready | ApiCall::Description => json!({"application/json": {}}),
        _ => json!({"application/json": {"schema": reference("Envelope")}}),
    };
    let mut all =
        json!({"200": {"description": "success, or a failure in the envelope", "content": content}});
    if call.access() != RouteAccess::Anybody {
        for (status, why) in [
            ("401", "unknown credentials"),
            ("413", "the body is too large"),
            ("429", "rate limit exceeded"),
            ("503", "too many concurrent requests"),
        ] {
            all[status] = json!({"description": why});
        }
    }
    all
}

fn schemes() -> Value {
    json!({
        "bkapi": {"type": "apiKey", "in": "header", "name": "X-Bkapi-Authorization",
                  "description": "JSON with bk_app_code and bk_app_secret; both may be in the body instead"},
        "basic": {"type": "http", "scheme": "basic", "description": "app code and secret"},
        "token": {"type": "http", "scheme": "bearer", "description": "an agent's token"},
    })
}

fn schemas() -> Value {
    let text = json!({"type": "string"});
    let number = json!({"type": "integer"});
    let list = |of: Value| json!({"type": "array", "items": of});
    json!({
        "Envelope": {"type": "object", "required": ["result", "code", "message", "data"], "properties": {
            "result": {"type": "boolean"}, "code": number, "message": text, "data": {}}},
        "Row": {"type": "object", "properties": {"error_code": number, "error_msg": text, "content": {}}},
        "Host": {"type": "object", "properties": {
            "ip": text, "bk_cloud_id": number, "bk_supplier_id": number, "bk_agent_id": text}},
        "ProcRequest": {"type": "object", "properties": {
            "meta": {"type": "object", "properties": {"namespace": text, "name": text, "labels": {"type": "object"}}},
            "hosts": list(reference("Host")), "agent_id_list": list(text.clone()),
            "op_type": {"type": "integer", "enum": [0, 1, 2, 3, 4, 7, 8, 9]},
            "spec": {"type": "object", "description": "the spec of a manifest"},
            "page": {"type": "object", "properties": {"start": number, "limit": {"type": "integer", "maximum": 1000}}}}},
        "MultiRequest": {"type": "object", "required": ["proc_operate_req"],
            "properties": {"proc_operate_req": list(reference("ProcRequest"))}},
        "TaskQuery": {"type": "object", "required": ["task_id"], "properties": {"task_id": text}},
        "JobRequest": {"type": "object", "required": ["op_type", "process_infos"], "properties": {
            "bk_biz_id": number, "bk_scope_type": text, "bk_scope_id": text, "op_type": number,
            "process_infos": list(json!({"type": "object"}))}},
        "JobTaskQuery": {"type": "object", "required": ["bk_gse_taskid"], "properties": {"bk_gse_taskid": text}},
        "Rename": {"type": "object", "required": ["from", "to"], "properties": {
            "from": text, "to": text, "spec": {"type": "object"}, "meta": {"type": "object"}}},
        "State": {"type": "object", "description": "exactly one of these requests", "properties": {
            "get": {"type": "object"}, "range": {"type": "object"}, "slice": {"type": "object"},
            "txn": {"type": "object"},
            "changes": {"type": "object"}, "take_lease": {"type": "object"}, "renew_lease": {"type": "object"},
            "release_lease": {"type": "object"}, "reset_lease": {"type": "object"}}},
        "Join": {"type": "object", "required": ["agent", "hosts"], "properties": {
            "agent": text, "hosts": list(text.clone()), "version": text}},
        "Told": list(json!({"type": "object", "required": ["seq"], "properties": {
            "seq": number, "result": {"type": "object"}, "report": {"type": "object"}}})),
    })
}
