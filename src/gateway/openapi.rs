//! OpenAPI 3.1 description of the API: routes from the route table, schemas from the types that the calls read and write.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::routes::{ApiCall, RouteRule, all};
use crate::agent_protocol::{
    Acked, EnrollmentRequest, FiguresUpdate, FromAgent, IssuedCertificate, Join, Joined, LogChunk,
};
use crate::contract::{
    AccessInfo, AuditPage, AuditVerification, CreatedJoinToken, FigureSeries, HostEntry, HostRevocation,
    JoinTokenRequest, JoinTokenRow, LogLine, ProcessChange, ProcessDigestPage, ProcessPage, RenameRequest,
    Revoked, SchemaSet, ServerHealth, StoreAnswer, StoreRequest, TaskAnswer, TokenRevocation,
};
use crate::gse::JobBody;
use crate::gse::request::{JobTaskQuery, MultiRequest, ProcRequest, TaskQuery};
use crate::gse::response::{
    AgentState, AgentStatus, Envelope, GroupData, JobResult, JobTaskData, Rows, StatusData, TaskData,
};

pub fn description() -> &'static Value {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(build);
    &DOCUMENT
}

fn build() -> Value {
    let mut schemas = SchemaSet::new();
    let mut paths: Map<String, Value> = Map::new();
    for (method, path, call) in all() {
        let operation = operation(&mut schemas, method, &path, call);
        let item = paths.entry(path).or_insert_with(|| json!({}));
        item[method.to_lowercase()] = operation;
    }
    let about = "BlueKing's GSE and JOB process API, with Abide's extensions. Every path works with and without a \
                 trailing slash; paths under /api/v2 also work after any prefix. A failure is an envelope with result \
                 false and HTTP 200, except for the listed statuses.";
    schemas.document(("Abide gateway", about), json!([{"bkapi": []}, {"basic": []}]), schemes(), paths)
}

fn operation(schemas: &mut SchemaSet, method: &str, path: &str, call: ApiCall) -> Value {
    let mut operation = json!({
        "operationId": format!("{}{}", method.to_lowercase(), path.replace(['/', '.', '-'], "_")),
        "summary": summary(call),
        "responses": responses(schemas, call),
    });
    if let Some(schema) = request(schemas, call) {
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    let parameters: Vec<Value> = parameters(call)
        .iter()
        .map(|(name, about)| json!({"name": name, "in": "query", "description": about, "schema": {"type": "string"}}))
        .chain(headers(call))
        .collect();
    if !parameters.is_empty() {
        operation["parameters"] = Value::Array(parameters);
    }
    match call.rule() {
        RouteRule::Public => operation["security"] = json!([]),
        RouteRule::Agent => operation["security"] = json!([{"token": []}, {"certificate": []}]),
        RouteRule::JoinToken => operation["security"] = json!([{"join": []}]),
        RouteRule::App(..) => {}
    }
    operation
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
        ApiCall::ProcessDigests => {
            "List processes with the facts that determine a plan and with digests of their specs, paged"
        }
        ApiCall::Figures => "Get fresh figures of an instance, and those of the last hour",
        ApiCall::Watch => "Stream process changes after a number, one JSON object per line",
        ApiCall::Logs => "Stream the log of a process on a host, one JSON object per line",
        ApiCall::Rename => "Rename an instance without a restart",
        ApiCall::Hosts => "List hosts with an agent",
        ApiCall::Tasks => "List the latest tasks",
        ApiCall::State => "Access the store of controllers: journals, ledgers, holds, leases",
        ApiCall::Access => "Get the role, namespaces, hosts, users and owners of the calling app",
        ApiCall::Audit => {
            "List audit entries in order, paged; an app with a scope gets those of its instances"
        }
        ApiCall::VerifyAudit => "Verify the hash chain of the audit log",
        ApiCall::Join => "Agents: open a session for hosts",
        ApiCall::Stream => "Agents: stream specs and operations, one JSON object per line",
        ApiCall::AgentMessages => "Agents: send results and reports",
        ApiCall::AgentLogs => "Agents: send a part of a log",
        ApiCall::AgentFigures => "Agents: send figures",
        ApiCall::RenewCertificate => "Agents: renew the client certificate",
        ApiCall::Enroll => "Agents: exchange a join token for a client certificate; needs TLS",
        ApiCall::JoinTokens => "List join tokens, without their secrets",
        ApiCall::CreateJoinToken => "Create a one-time join token for hosts",
        ApiCall::RevokeJoinToken => "Revoke a join token and the certificates that it was exchanged for",
        ApiCall::RevokeHost => "Revoke the certificate of a host; its session ends",
        ApiCall::Health => "Liveness check",
        ApiCall::Ready => "Readiness check",
        ApiCall::Metrics => "Prometheus metrics",
        ApiCall::Description => "This description",
    }
}

fn request(schemas: &mut SchemaSet, call: ApiCall) -> Option<Value> {
    Some(match call {
        ApiCall::Register | ApiCall::Update | ApiCall::Operate { .. } => schemas.request::<ProcRequest>(),
        ApiCall::Unregister | ApiCall::Status { .. } | ApiCall::Sync => schemas.request::<ProcRequest>(),
        ApiCall::SetGroups | ApiCall::Groups | ApiCall::Agents { .. } => schemas.request::<ProcRequest>(),
        ApiCall::OperateMulti => schemas.request::<MultiRequest>(),
        ApiCall::Result(_) => schemas.request::<TaskQuery>(),
        ApiCall::Job(_) => schemas.request::<JobBody>(),
        ApiCall::JobResult => schemas.request::<JobTaskQuery>(),
        ApiCall::Rename => schemas.request::<RenameRequest>(),
        ApiCall::State => schemas.request::<StoreRequest>(),
        ApiCall::Join => schemas.request::<Join>(),
        ApiCall::AgentMessages => schemas.request::<Vec<FromAgent>>(),
        ApiCall::AgentLogs => schemas.request::<LogChunk>(),
        ApiCall::AgentFigures => schemas.request::<FiguresUpdate>(),
        ApiCall::Enroll => schemas.request::<EnrollmentRequest>(),
        ApiCall::CreateJoinToken => schemas.request::<JoinTokenRequest>(),
        ApiCall::RevokeJoinToken => schemas.request::<TokenRevocation>(),
        ApiCall::RevokeHost => schemas.request::<HostRevocation>(),
        ApiCall::RenewCertificate | ApiCall::JoinTokens => return None,
        ApiCall::Processes | ApiCall::ProcessDigests | ApiCall::Figures => return None,
        ApiCall::Watch | ApiCall::Hosts => return None,
        ApiCall::Tasks | ApiCall::Stream | ApiCall::Logs | ApiCall::Access => return None,
        ApiCall::Audit | ApiCall::VerifyAudit => return None,
        ApiCall::Health | ApiCall::Ready | ApiCall::Metrics | ApiCall::Description => return None,
    })
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
        (
            "attempts",
            "processes: if set, also list instances that are not registered because their first start failed",
        ),
        (
            "digests",
            "`keyed`: digests of secrets under a key, which the answer has if the grant covers the owner",
        ),
    ];
    match call {
        ApiCall::Processes | ApiCall::Watch => FILTERS,
        ApiCall::ProcessDigests => &[
            ("namespace", "glob pattern"),
            ("name", "glob pattern"),
            ("host", "glob pattern of CLOUD:IP or @AGENT_ID"),
            ("owner", "exact owner"),
            ("after", "`more` of the previous page"),
            ("limit", "1 to 10000"),
        ],
        ApiCall::Logs => &[
            ("namespace", "namespace of the process"),
            ("name", "name of the process"),
            ("host", "CLOUD:IP or @AGENT_ID"),
            ("tail", "the last lines only: a number"),
            ("since", "lines since this time only, in RFC 3339"),
            ("cursor", "continue after a line of an earlier stream"),
            ("follow", "1: wait for new lines"),
        ],
        ApiCall::Hosts => &[("brief", "if set, omit the number of processes")],
        ApiCall::Stream => &[("session", "session id of join"), ("after", "the last received seq")],
        ApiCall::JobResult => &[("bk_gse_taskid", "task id; every field of the body may be in the query")],
        ApiCall::AgentMessages | ApiCall::AgentLogs | ApiCall::AgentFigures => {
            &[("session", "session id of join")]
        }
        ApiCall::Figures => &[("instance", "HOST:NAMESPACE:NAME")],
        ApiCall::Audit => &[
            ("namespace", "entries about instances of this namespace only"),
            ("who", "entries of this caller, or of this user, only"),
            ("since", "entries since this time only, in RFC 3339"),
            ("after", "`more` of the previous page"),
            ("limit", "1 to 1000"),
        ],
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
        ("X-Abide-Plan", "plan id, for the audit log"),
        ("X-Abide-Revision", "revision of the manifests, for the audit log"),
        ("X-Abide-Commit", "commit of the manifests, for the audit log"),
        (
            "X-Abide-Break-Glass",
            "reason of a change outside of a maintenance window, percent-encoded, for the audit log",
        ),
    ];
    let header = |(name, about): (&str, &str)| json!({"name": name, "in": "header", "description": about, "schema": {"type": "string"}});
    match call.changes() && matches!(call.rule(), RouteRule::App(..)) {
        true => ours.map(header).to_vec(),
        false => Vec::new(),
    }
}

/// The envelope around the data of a call.
fn envelope<T: JsonSchema>(schemas: &mut SchemaSet) -> Value {
    let envelope = schemas.response::<Envelope<Value>>();
    let data = schemas.response::<Option<T>>();
    json!({"allOf": [envelope, {"type": "object", "properties": {"data": data}}]})
}

/// The answer of a call. A stream has one JSON object per line.
fn answer(schemas: &mut SchemaSet, call: ApiCall) -> Value {
    match call {
        ApiCall::Register | ApiCall::Update | ApiCall::Unregister => envelope::<Rows>(schemas),
        ApiCall::SetGroups | ApiCall::Result(_) => envelope::<Rows>(schemas),
        ApiCall::Operate { .. } | ApiCall::OperateMulti | ApiCall::Rename => envelope::<TaskData>(schemas),
        ApiCall::Status { .. } | ApiCall::Sync => envelope::<StatusData>(schemas),
        ApiCall::Groups => envelope::<GroupData>(schemas),
        ApiCall::Agents { by_id: true } => envelope::<Vec<AgentState>>(schemas),
        ApiCall::Agents { by_id: false } => envelope::<BTreeMap<String, AgentStatus>>(schemas),
        ApiCall::Job(_) => envelope::<JobTaskData>(schemas),
        ApiCall::JobResult => envelope::<JobResult>(schemas),
        ApiCall::Processes => envelope::<ProcessPage>(schemas),
        ApiCall::ProcessDigests => envelope::<ProcessDigestPage>(schemas),
        ApiCall::Figures => envelope::<FigureSeries>(schemas),
        ApiCall::Watch => schemas.response::<ProcessChange>(),
        ApiCall::Logs => schemas.response::<LogLine>(),
        ApiCall::Hosts => envelope::<Vec<HostEntry>>(schemas),
        ApiCall::Tasks => envelope::<TaskAnswer>(schemas),
        ApiCall::State => envelope::<StoreAnswer>(schemas),
        ApiCall::Access => envelope::<AccessInfo>(schemas),
        ApiCall::Audit => envelope::<AuditPage>(schemas),
        ApiCall::VerifyAudit => envelope::<AuditVerification>(schemas),
        ApiCall::Join => envelope::<Joined>(schemas),
        ApiCall::AgentMessages => envelope::<Acked>(schemas),
        ApiCall::AgentLogs => envelope::<bool>(schemas),
        ApiCall::AgentFigures => envelope::<Map<String, Value>>(schemas),
        ApiCall::RenewCertificate | ApiCall::Enroll => envelope::<IssuedCertificate>(schemas),
        ApiCall::JoinTokens => envelope::<Vec<JoinTokenRow>>(schemas),
        ApiCall::CreateJoinToken => envelope::<CreatedJoinToken>(schemas),
        ApiCall::RevokeJoinToken | ApiCall::RevokeHost => envelope::<Revoked>(schemas),
        ApiCall::Health | ApiCall::Ready => schemas.response::<ServerHealth>(),
        // The messages to agents are internal, metrics are text, and OpenAPI describes itself.
        ApiCall::Stream | ApiCall::Metrics | ApiCall::Description => json!({}),
    }
}

fn responses(schemas: &mut SchemaSet, call: ApiCall) -> Value {
    let media_type = match call {
        ApiCall::Watch | ApiCall::Logs | ApiCall::Stream => "application/x-ndjson",
        ApiCall::Metrics => "text/plain",
        _ => "application/json",
    };
    let answer = json!({media_type: {"schema": answer(schemas, call)}});
    let mut all = json!({"200": {"description": "success, or a failure in the envelope", "content": answer}});
    if call == ApiCall::Ready {
        all["503"] = json!({"description": "not ready, with the cause", "content": answer});
    }
    if call.rule() == RouteRule::Public {
        return all;
    }
    let failure = json!({"application/json": {"schema": schemas.response::<Envelope<Value>>()}});
    let own: &[(&str, &str)] = match call {
        ApiCall::Enroll => {
            &[("403", "the connection has no TLS"), ("409", "another agent used the join token")]
        }
        ApiCall::Rename | ApiCall::Join => &[("409", "another process or agent holds it")],
        ApiCall::State
        | ApiCall::Stream
        | ApiCall::AgentMessages
        | ApiCall::AgentLogs
        | ApiCall::AgentFigures => &[("410", "no longer available: start over")],
        _ => &[],
    };
    let common = [
        ("401", "unknown credentials"),
        ("408", "reading the body timed out"),
        ("413", "the body is too large"),
        ("429", "rate limit exceeded"),
        ("500", "internal error"),
        ("503", "too many concurrent requests"),
    ];
    for (status, why) in own.iter().chain(&common) {
        all[*status] = json!({"description": why, "content": failure});
    }
    all
}

fn schemes() -> Value {
    json!({
        "bkapi": {"type": "apiKey", "in": "header", "name": "X-Bkapi-Authorization",
                  "description": "JSON with bk_app_code and bk_app_secret; both may be in the body instead"},
        "basic": {"type": "http", "scheme": "basic", "description": "app code and secret"},
        "token": {"type": "http", "scheme": "bearer", "description": "an agent's token"},
        "join": {"type": "http", "scheme": "bearer", "description": "a join token"},
        "certificate": {"type": "mutualTLS", "description": "an agent's certificate"},
    })
}
