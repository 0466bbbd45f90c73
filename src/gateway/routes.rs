//! Route table: maps methods and paths to calls. The OpenAPI description and the access tests are generated from it.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::tasks::KeyForm;
use crate::access::AccessRole;
use crate::gse::JobApi;

/// A call, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiCall {
    Register,
    Update,
    Unregister,
    /// `second`: version 2, which requires a spec.
    Operate {
        second: bool,
    },
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
    /// manage_proc or operate_process: the same body with different operation codes.
    Job(JobApi),
    JobResult,
    Processes,
    ProcessDigests,
    Figures,
    Watch,
    Logs,
    Rename,
    Hosts,
    Tasks,
    State,
    Access,
    Audit,
    VerifyAudit,
    Join,
    Stream,
    AgentMessages,
    AgentLogs,
    AgentFigures,
    RenewCertificate,
    /// An agent exchanges a join token for a certificate.
    Enroll,
    JoinTokens,
    CreateJoinToken,
    RevokeJoinToken,
    RevokeHost,
    Health,
    Ready,
    Metrics,
    Description,
}

/// Rule of a call: the credentials and the role that it requires, and what of the request its grant is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteRule {
    /// No credentials.
    Public,
    /// The token of an agent, for its hosts.
    Agent,
    /// An agent with a join token.
    JoinToken,
    /// An app with at least this role.
    App(AccessRole, RouteScope),
}

/// Part of a request or an answer that is compared with the namespaces, hosts, users and owners of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteScope {
    /// Nothing: the answer is the same for every app.
    Nothing,
    /// Every namespace, host and owner: an app that lacks one is refused.
    Everything,
    /// The processes and hosts that the request names. Another one is refused.
    Named,
    /// The same. A live check needs `read`, every other operation `operate`.
    Operations,
    /// The rows of the answer. Others are left out.
    Listed,
    /// The keys of the request and of the answer. A read needs `read`, a write `operate`, a reset of a lease `admin`.
    Keys,
}

impl ApiCall {
    /// Exhaustive: a call without a rule does not compile.
    pub fn rule(self) -> RouteRule {
        use RouteScope::{Everything, Keys, Listed, Named, Nothing, Operations};
        match self {
            ApiCall::Health | ApiCall::Ready => RouteRule::Public,
            ApiCall::Join
            | ApiCall::Stream
            | ApiCall::AgentMessages
            | ApiCall::AgentLogs
            | ApiCall::AgentFigures => RouteRule::Agent,
            ApiCall::Register | ApiCall::Update | ApiCall::Unregister => {
                RouteRule::App(AccessRole::Operate, Named)
            }
            ApiCall::SetGroups | ApiCall::Rename => RouteRule::App(AccessRole::Operate, Named),
            ApiCall::Operate { .. } | ApiCall::OperateMulti | ApiCall::Job(_) => {
                RouteRule::App(AccessRole::Read, Operations)
            }
            ApiCall::Status { .. } | ApiCall::Sync | ApiCall::Groups | ApiCall::Agents { .. } => {
                RouteRule::App(AccessRole::Read, Named)
            }
            ApiCall::Figures | ApiCall::Logs => RouteRule::App(AccessRole::Read, Named),
            ApiCall::Result(_) | ApiCall::JobResult | ApiCall::Tasks => {
                RouteRule::App(AccessRole::Read, Listed)
            }
            ApiCall::Processes | ApiCall::ProcessDigests | ApiCall::Watch | ApiCall::Hosts => {
                RouteRule::App(AccessRole::Read, Listed)
            }
            ApiCall::State => RouteRule::App(AccessRole::Read, Keys),
            ApiCall::Access | ApiCall::Metrics | ApiCall::Description => {
                RouteRule::App(AccessRole::Read, Nothing)
            }
            ApiCall::Audit => RouteRule::App(AccessRole::Admin, Listed),
            ApiCall::VerifyAudit => RouteRule::App(AccessRole::Admin, Everything),
            ApiCall::RenewCertificate => RouteRule::Agent,
            ApiCall::Enroll => RouteRule::JoinToken,
            ApiCall::JoinTokens
            | ApiCall::CreateJoinToken
            | ApiCall::RevokeJoinToken
            | ApiCall::RevokeHost => RouteRule::App(AccessRole::Admin, Everything),
        }
    }

    /// Whether the response uses JOB's envelope.
    pub fn is_job(self) -> bool {
        matches!(self, ApiCall::Job(_) | ApiCall::JobResult)
    }

    /// Whether the call changes something, and is therefore in the audit log.
    pub fn changes(self) -> bool {
        match self {
            ApiCall::Register
            | ApiCall::Update
            | ApiCall::Unregister
            | ApiCall::SetGroups
            | ApiCall::Rename => true,
            ApiCall::Operate { .. } | ApiCall::OperateMulti | ApiCall::Job(_) | ApiCall::Join => true,
            ApiCall::Enroll | ApiCall::RenewCertificate => true,
            ApiCall::CreateJoinToken | ApiCall::RevokeJoinToken | ApiCall::RevokeHost => true,
            ApiCall::Result(_)
            | ApiCall::JobResult
            | ApiCall::Status { .. }
            | ApiCall::Sync
            | ApiCall::Groups => false,
            ApiCall::Agents { .. }
            | ApiCall::Processes
            | ApiCall::ProcessDigests
            | ApiCall::Figures
            | ApiCall::Watch
            | ApiCall::Logs
            | ApiCall::Hosts
            | ApiCall::JoinTokens
            | ApiCall::Tasks
            | ApiCall::Access
            | ApiCall::Audit
            | ApiCall::VerifyAudit => false,
            // Agents write continuously; the audit log omits these. A request decides for controllers.
            ApiCall::State
            | ApiCall::Stream
            | ApiCall::AgentMessages
            | ApiCall::AgentLogs
            | ApiCall::AgentFigures => false,
            ApiCall::Health | ApiCall::Ready | ApiCall::Metrics | ApiCall::Description => false,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            ApiCall::Register => "register",
            ApiCall::Update => "update",
            ApiCall::Unregister => "unregister",
            ApiCall::Operate { .. } => "operate",
            ApiCall::OperateMulti => "operate_multi",
            ApiCall::Result(_) => "result",
            ApiCall::Status { .. } => "status",
            ApiCall::Sync => "sync",
            ApiCall::SetGroups => "set_groups",
            ApiCall::Groups => "groups",
            ApiCall::Agents { .. } => "agents",
            ApiCall::Job(JobApi::ManageProc) => "manage_proc",
            ApiCall::Job(JobApi::OperateProcess) => "operate_process",
            ApiCall::JobResult => "job_result",
            ApiCall::Processes => "processes",
            ApiCall::ProcessDigests => "process_digests",
            ApiCall::Figures => "figures",
            ApiCall::Watch => "watch",
            ApiCall::Logs => "logs",
            ApiCall::Rename => "rename",
            ApiCall::Hosts => "hosts",
            ApiCall::Tasks => "tasks",
            ApiCall::State => "state",
            ApiCall::Access => "access",
            ApiCall::Audit => "audit",
            ApiCall::VerifyAudit => "verify_audit",
            ApiCall::Join => "join",
            ApiCall::Stream => "stream",
            ApiCall::AgentMessages => "tell",
            ApiCall::AgentLogs => "agent_logs",
            ApiCall::AgentFigures => "agent_figures",
            ApiCall::RenewCertificate => "renew_certificate",
            ApiCall::Enroll => "enroll",
            ApiCall::JoinTokens => "join_tokens",
            ApiCall::CreateJoinToken => "create_join_token",
            ApiCall::RevokeJoinToken => "revoke_join_token",
            ApiCall::RevokeHost => "revoke_host",
            ApiCall::Health => "health",
            ApiCall::Ready => "ready",
            ApiCall::Metrics => "metrics",
            ApiCall::Description => "description",
        }
    }
}

/// GSE's calls by name, through ESB and, for GSE 2.0, through the API gateway.
const GSE: &[(&str, ApiCall)] = &[
    ("register_proc_info", ApiCall::Register),
    ("update_proc_info", ApiCall::Update),
    ("unregister_proc_info", ApiCall::Unregister),
    ("operate_proc", ApiCall::Operate { second: false }),
    ("operate_proc_v2", ApiCall::Operate { second: true }),
    ("operate_proc_multi", ApiCall::OperateMulti),
    ("get_proc_operate_result", ApiCall::Result(KeyForm::V1)),
    ("get_proc_operate_result_v2", ApiCall::Result(KeyForm::V2)),
    ("get_proc_status", ApiCall::Status { second: false }),
    ("get_proc_status_v2", ApiCall::Status { second: true }),
    ("sync_proc_status", ApiCall::Sync),
    ("set_process_group_info", ApiCall::SetGroups),
    ("get_process_group_info", ApiCall::Groups),
    ("get_agent_status", ApiCall::Agents { by_id: false }),
    ("get_agent_info", ApiCall::Agents { by_id: false }),
    ("list_agent_state", ApiCall::Agents { by_id: true }),
];

const JOB: &[(&str, ApiCall)] = &[
    ("manage_proc", ApiCall::Job(JobApi::ManageProc)),
    ("manage_process", ApiCall::Job(JobApi::ManageProc)),
    ("operate_process", ApiCall::Job(JobApi::OperateProcess)),
    ("get_proc_result", ApiCall::JobResult),
];

/// GSE's REST paths, and Abide's own paths.
const OTHERS: &[(&str, &str, ApiCall)] = &[
    ("POST", "/procapi/v1/proc/procinfo", ApiCall::Register),
    ("PUT", "/procapi/v1/proc/procinfo", ApiCall::Update),
    ("DELETE", "/procapi/v1/proc/procinfo", ApiCall::Unregister),
    ("POST", "/procapi/v1/proc/operate", ApiCall::Operate { second: false }),
    ("POST", "/procapi/v2/proc/operate", ApiCall::Operate { second: true }),
    ("POST", "/procapi/v2/proc/multioperate", ApiCall::OperateMulti),
    ("GET", "/procapi/v1/proc/operate", ApiCall::Result(KeyForm::V1)),
    ("GET", "/procapi/v2/proc/operate", ApiCall::Result(KeyForm::V2)),
    ("GET", "/procapi/v1/proc/status", ApiCall::Status { second: false }),
    ("GET", "/procapi/v2/proc/status", ApiCall::Status { second: true }),
    ("GET", "/procapi/v1/proc/syncstatus", ApiCall::Sync),
    ("POST", "/procapi/v1/proc/groupinfo", ApiCall::SetGroups),
    ("GET", "/procapi/v1/proc/groupinfo", ApiCall::Groups),
    // JOB publishes this query with GET; the fields are in the query string.
    ("GET", "/api/c/compapi/v2/job/get_proc_result", ApiCall::JobResult),
    ("GET", "/api/c/compapi/v2/jobv3/get_proc_result", ApiCall::JobResult),
    ("POST", "/api/v2/cluster/list_agent_state", ApiCall::Agents { by_id: true }),
    ("GET", "/api/abide/v1/processes", ApiCall::Processes),
    ("GET", "/api/abide/v1/processes/digests", ApiCall::ProcessDigests),
    ("GET", "/api/abide/v1/processes/figures", ApiCall::Figures),
    ("GET", "/api/abide/v1/processes/watch", ApiCall::Watch),
    ("GET", "/api/abide/v1/logs", ApiCall::Logs),
    ("POST", "/api/abide/v1/rename", ApiCall::Rename),
    ("GET", "/api/abide/v1/hosts", ApiCall::Hosts),
    ("GET", "/api/abide/v1/tasks", ApiCall::Tasks),
    ("POST", "/api/abide/v1/state", ApiCall::State),
    ("GET", "/api/abide/v1/access", ApiCall::Access),
    ("GET", "/api/abide/v1/audit", ApiCall::Audit),
    ("GET", "/api/abide/v1/audit/verify", ApiCall::VerifyAudit),
    ("POST", "/api/abide/v1/agent/join", ApiCall::Join),
    ("GET", "/api/abide/v1/agent/stream", ApiCall::Stream),
    ("POST", "/api/abide/v1/agent/tell", ApiCall::AgentMessages),
    ("POST", "/api/abide/v1/agent/logs", ApiCall::AgentLogs),
    ("POST", "/api/abide/v1/agent/figures", ApiCall::AgentFigures),
    ("POST", "/api/abide/v1/agent/renew", ApiCall::RenewCertificate),
    ("POST", "/api/abide/v1/agents/join", ApiCall::Enroll),
    ("GET", "/api/abide/v1/tokens", ApiCall::JoinTokens),
    ("POST", "/api/abide/v1/tokens", ApiCall::CreateJoinToken),
    ("POST", "/api/abide/v1/tokens/revoke", ApiCall::RevokeJoinToken),
    ("POST", "/api/abide/v1/hosts/revoke", ApiCall::RevokeHost),
    ("GET", "/healthz", ApiCall::Health),
    ("GET", "/readyz", ApiCall::Ready),
    ("GET", "/metrics", ApiCall::Metrics),
    ("GET", "/openapi.json", ApiCall::Description),
];

/// Start of GSE 2.0 paths, after any prefix of the API gateway.
const V2_PREFIXES: [&str; 2] = ["/api/v2/proc/", "/api/v2/cluster/"];

/// Every method and path, without prefixes and trailing slashes.
pub fn all() -> impl Iterator<Item = (&'static str, String, ApiCall)> {
    let named = |prefix: &'static str, calls: &'static [(&'static str, ApiCall)]| {
        calls.iter().map(move |(name, call)| ("POST", format!("{prefix}{name}"), *call))
    };
    named("/api/c/compapi/v2/gse/", GSE)
        .chain(named("/api/v2/proc/", GSE))
        .chain(named("/api/c/compapi/v2/job/", JOB))
        .chain(named("/api/c/compapi/v2/jobv3/", JOB))
        .chain(OTHERS.iter().map(|(method, path, call)| (*method, (*path).to_owned(), *call)))
}

/// Index by path; a path has few methods.
static TABLE: LazyLock<HashMap<String, Vec<(&'static str, ApiCall)>>> = LazyLock::new(|| {
    let mut table: HashMap<String, Vec<(&'static str, ApiCall)>> = HashMap::new();
    for (method, path, call) in all() {
        table.entry(path).or_default().push((method, call));
    }
    table
});

/// Result of a route lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteMatch {
    Call(ApiCall),
    /// The path exists, but not for this method.
    OtherMethod,
    Nothing,
}

/// Finds the call of a path, with or without a trailing slash.
pub fn find(method: &str, path: &str) -> RouteMatch {
    let path = path.trim_end_matches('/');
    let calls = TABLE.get(path).or_else(|| {
        let begins = V2_PREFIXES.iter().find_map(|second| path.find(second))?;
        TABLE.get(&path[begins..])
    });
    let Some(calls) = calls else { return RouteMatch::Nothing };
    let call = calls.iter().find(|(known, _)| *known == method);
    call.map_or(RouteMatch::OtherMethod, |(_, call)| RouteMatch::Call(*call))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_found_at_all_its_paths() {
        for path in [
            "/api/c/compapi/v2/gse/register_proc_info/",
            "/api/c/compapi/v2/gse/register_proc_info",
            "/procapi/v1/proc/procinfo",
            "/api/v2/proc/register_proc_info",
            "/prod/api/v2/proc/register_proc_info/",
            "/api/bk-gse/prod/api/v2/proc/register_proc_info",
        ] {
            assert_eq!(find("POST", path), RouteMatch::Call(ApiCall::Register), "{path}");
        }
        assert_eq!(find("PUT", "/procapi/v1/proc/procinfo"), RouteMatch::Call(ApiCall::Update));
        assert_eq!(find("PATCH", "/procapi/v1/proc/procinfo"), RouteMatch::OtherMethod);
        assert_eq!(
            find("POST", "/prod/api/v2/cluster/list_agent_state"),
            RouteMatch::Call(ApiCall::Agents { by_id: true })
        );
        for path in ["", "/", "/nowhere", "/api/v2/proc/", "/healthz/x", "/api/c/compapi/v2/gse/"] {
            assert_eq!(find("GET", path), RouteMatch::Nothing, "{path}");
        }
    }

    #[test]
    fn no_path_maps_to_two_calls() {
        let mut seen = std::collections::HashSet::new();
        for (method, path, _) in all() {
            assert!(seen.insert((method, path.clone())), "{method} {path}");
        }
    }
}
