//! The API in its own words: OpenAPI 3.1, made of the table of routes.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::routes::{Access, Call, all};

pub fn description() -> &'static Value {
    static MADE: LazyLock<Value> = LazyLock::new(make);
    &MADE
}

fn make() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for (method, path, call) in all() {
        let operation = operation(method, &path, call);
        let place = paths.entry(path).or_insert_with(|| json!({}));
        place[method.to_lowercase()] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Abide gateway",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "BlueKing's GSE and JOB process API, and what Abide adds to it. Every path answers with and without a slash at its end; those below /api/v2 also behind any prefix. A failure is an envelope with result false and HTTP 200, except where listed.",
        },
        "security": [{"bkapi": []}, {"basic": []}],
        "paths": paths,
        "components": {"securitySchemes": schemes(), "schemas": schemas()},
    })
}

fn operation(method: &str, path: &str, call: Call) -> Value {
    let mut operation = json!({
        "operationId": format!("{}{}", method.to_lowercase(), path.replace(['/', '.', '-'], "_")),
        "summary": about(call),
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
        Access::Anybody => operation["security"] = json!([]),
        Access::Agent => operation["security"] = json!([{"token": []}]),
        Access::App | Access::Everywhere => {}
    }
    operation
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

fn about(call: Call) -> &'static str {
    match call {
        Call::Register => "Register a process on hosts; a row says 850 where it is registered already",
        Call::Update => "Register a process on hosts, whether it was or not",
        Call::Unregister => "Forget a process on hosts where it is stopped and not hosted",
        Call::Operate { .. } => "Begin an operation on hosts; without a spec the registered one is used",
        Call::OperateMulti => "Begin several operations, which may differ, as one task",
        Call::Result(_) => "How each row of a task stands: 115 while it runs",
        Call::Status { .. } => "How a process stands on hosts",
        Call::Sync => "How all processes of a namespace stand, page by page",
        Call::SetGroups => "Set the pools that processes of a namespace share on hosts",
        Call::Groups => "The pools that were set",
        Call::Agents { .. } => "Which hosts have a live agent",
        Call::Job(_) => "JOB: operate processes, known by where they are",
        Call::JobResult => "JOB: how each row of a task stands",
        Call::Processes => "Everything that is known of processes, page by page",
        Call::Watch => "What changes, a JSON object a line, from a number on",
        Call::Rename => "Know an instance by another name, without a restart",
        Call::Hosts => "The hosts that have an agent",
        Call::Tasks => "The latest tasks",
        Call::State => "The store, for controllers: journals, ledgers, holds, leases",
        Call::Join => "Agents: begin a session for some hosts",
        Call::Stream => "Agents: what is to be done, a JSON object a line",
        Call::Tell => "Agents: results and reports",
        Call::Health => "Is it there?",
        Call::Ready => "Can it do its work?",
        Call::Metrics => "Counts, for Prometheus",
        Call::Description => "This description",
    }
}

fn request(call: Call) -> Option<&'static str> {
    match call {
        Call::Register | Call::Update | Call::Operate { .. } => Some("ProcRequest"),
        Call::Unregister | Call::Status { .. } | Call::Sync | Call::Groups => Some("ProcRequest"),
        Call::SetGroups | Call::Agents { .. } => Some("ProcRequest"),
        Call::OperateMulti => Some("MultiRequest"),
        Call::Result(_) => Some("TaskQuery"),
        Call::Job(_) => Some("JobRequest"),
        Call::JobResult => Some("JobTaskQuery"),
        Call::Rename => Some("Rename"),
        Call::State => Some("State"),
        Call::Join => Some("Join"),
        Call::Tell => Some("Told"),
        Call::Processes | Call::Watch | Call::Hosts | Call::Tasks | Call::Stream => None,
        Call::Health | Call::Ready | Call::Metrics | Call::Description => None,
    }
}

fn parameters(call: Call) -> &'static [(&'static str, &'static str)] {
    const FILTERS: &[(&str, &str)] = &[
        ("namespace", "a pattern"),
        ("name", "a pattern"),
        ("host", "a pattern of CLOUD:IP or @AGENT_ID"),
        ("owner", "exactly"),
        ("brief", "set: without specs"),
        ("after", "processes: the last page's `more`; watch: a number"),
        ("limit", "1 to 10000"),
        ("numbers", "watch, set: also the numbers of other changes"),
    ];
    match call {
        Call::Processes | Call::Watch => FILTERS,
        Call::Hosts => &[("brief", "set: without the number of processes")],
        Call::Stream => &[("session", "from join"), ("after", "the last seq that is known")],
        Call::Tell => &[("session", "from join")],
        _ => &[],
    }
}

fn headers(call: Call) -> Vec<Value> {
    let ours = [
        ("X-Abide-Op", "the same for the same call: it is carried out once"),
        ("X-Abide-Owner", "whose instances these are"),
        ("X-Abide-Generation", "of the owner's writer lease: an older one is refused with 1900409"),
    ];
    let header = |(name, about): (&str, &str)| json!({"name": name, "in": "header", "description": about, "schema": {"type": "string"}});
    match call.changes() && call.access() == Access::App {
        true => ours.map(header).to_vec(),
        false => Vec::new(),
    }
}

fn responses(call: Call) -> Value {
    let content = match call {
        Call::Watch | Call::Stream => json!({"application/x-ndjson": {}}),
        Call::Metrics => json!({"text/plain": {}}),
        Call::Health | Call::Ready | Call::Description => json!({"application/json": {}}),
        _ => json!({"application/json": {"schema": reference("Envelope")}}),
    };
    let mut all = json!({"200": {"description": "done, or refused in the envelope", "content": content}});
    if call.access() != Access::Anybody {
        for (status, why) in [
            ("401", "no such credentials"),
            ("413", "the body is too large"),
            ("429", "too many requests a second"),
            ("503", "too many requests at once"),
        ] {
            all[status] = json!({"description": why});
        }
    }
    all
}

fn schemes() -> Value {
    json!({
        "bkapi": {"type": "apiKey", "in": "header", "name": "X-Bkapi-Authorization",
                  "description": "JSON with bk_app_code and bk_app_secret; both may stand in the body instead"},
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
            "spec": {"type": "object", "description": "as a manifest's spec"},
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
        "State": {"type": "object", "description": "one of", "properties": {
            "get": {"type": "object"}, "range": {"type": "object"}, "txn": {"type": "object"},
            "changes": {"type": "object"}, "take_lease": {"type": "object"}, "renew_lease": {"type": "object"},
            "release_lease": {"type": "object"}, "reset_lease": {"type": "object"}}},
        "Join": {"type": "object", "required": ["agent", "hosts"], "properties": {
            "agent": text, "hosts": list(text.clone()), "version": text}},
        "Told": list(json!({"type": "object", "required": ["seq"], "properties": {
            "seq": number, "result": {"type": "object"}, "report": {"type": "object"}}})),
    })
}
