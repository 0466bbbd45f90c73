//! Which call a method and a path are: one table, which also makes the API's description and the tests of who may call.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::tasks::KeyForm;
use crate::gse::JobApi;

/// A call, whichever way it was addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Register,
    Update,
    Unregister,
    /// The second version always comes with a spec.
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
    /// manage_proc or operate_process: the same shape, other numbers.
    Job(JobApi),
    JobResult,
    Processes,
    Watch,
    Rename,
    Hosts,
    Tasks,
    State,
    Join,
    Stream,
    Tell,
    Health,
    Ready,
    Metrics,
    Description,
}

/// Who may make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Anybody,
    /// An app, within its namespaces.
    App,
    /// An app that may touch every namespace.
    Everywhere,
    /// An agent, for its hosts.
    Agent,
}

impl Call {
    pub fn access(self) -> Access {
        match self {
            Call::Health | Call::Ready => Access::Anybody,
            Call::Join | Call::Stream | Call::Tell => Access::Agent,
            Call::State | Call::Tasks | Call::Hosts => Access::Everywhere,
            Call::Register | Call::Update | Call::Unregister | Call::Operate { .. } | Call::OperateMulti => {
                Access::App
            }
            Call::Result(_) | Call::Status { .. } | Call::Sync | Call::SetGroups | Call::Groups => {
                Access::App
            }
            Call::Agents { .. } | Call::Job(_) | Call::JobResult => Access::App,
            Call::Processes | Call::Watch | Call::Rename | Call::Metrics | Call::Description => Access::App,
        }
    }

    /// Is it JOB that answers?
    pub fn is_job(self) -> bool {
        matches!(self, Call::Job(_) | Call::JobResult)
    }

    /// Does it change something? Then a line tells of it.
    pub fn changes(self) -> bool {
        match self {
            Call::Register | Call::Update | Call::Unregister | Call::SetGroups | Call::Rename => true,
            Call::Operate { .. } | Call::OperateMulti | Call::Job(_) | Call::Join => true,
            Call::Result(_) | Call::JobResult | Call::Status { .. } | Call::Sync | Call::Groups => false,
            Call::Agents { .. } | Call::Processes | Call::Watch | Call::Hosts | Call::Tasks => false,
            // Controllers write their journals all the time, and agents tell all the time.
            Call::State | Call::Stream | Call::Tell => false,
            Call::Health | Call::Ready | Call::Metrics | Call::Description => false,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Call::Register => "register",
            Call::Update => "update",
            Call::Unregister => "unregister",
            Call::Operate { .. } => "operate",
            Call::OperateMulti => "operate_multi",
            Call::Result(_) => "result",
            Call::Status { .. } => "status",
            Call::Sync => "sync",
            Call::SetGroups => "set_groups",
            Call::Groups => "groups",
            Call::Agents { .. } => "agents",
            Call::Job(JobApi::ManageProc) => "manage_proc",
            Call::Job(JobApi::OperateProcess) => "operate_process",
            Call::JobResult => "job_result",
            Call::Processes => "processes",
            Call::Watch => "watch",
            Call::Rename => "rename",
            Call::Hosts => "hosts",
            Call::Tasks => "tasks",
            Call::State => "state",
            Call::Join => "join",
            Call::Stream => "stream",
            Call::Tell => "tell",
            Call::Health => "health",
            Call::Ready => "ready",
            Call::Metrics => "metrics",
            Call::Description => "description",
        }
    }
}

/// GSE's calls by name, through ESB and, in 2.0, through the API gateway.
const GSE: &[(&str, Call)] = &[
    ("register_proc_info", Call::Register),
    ("update_proc_info", Call::Update),
    ("unregister_proc_info", Call::Unregister),
    ("operate_proc", Call::Operate { second: false }),
    ("operate_proc_v2", Call::Operate { second: true }),
    ("operate_proc_multi", Call::OperateMulti),
    ("get_proc_operate_result", Call::Result(KeyForm::First)),
    ("get_proc_operate_result_v2", Call::Result(KeyForm::Second)),
    ("get_proc_status", Call::Status { second: false }),
    ("get_proc_status_v2", Call::Status { second: true }),
    ("sync_proc_status", Call::Sync),
    ("set_process_group_info", Call::SetGroups),
    ("get_process_group_info", Call::Groups),
    ("get_agent_status", Call::Agents { by_id: false }),
    ("get_agent_info", Call::Agents { by_id: false }),
    ("list_agent_state", Call::Agents { by_id: true }),
];

const JOB: &[(&str, Call)] = &[
    ("manage_proc", Call::Job(JobApi::ManageProc)),
    ("manage_process", Call::Job(JobApi::ManageProc)),
    ("operate_process", Call::Job(JobApi::OperateProcess)),
    ("get_proc_result", Call::JobResult),
];

/// GSE's own paths, where the method says what is asked for; and ours.
const OTHERS: &[(&str, &str, Call)] = &[
    ("POST", "/procapi/v1/proc/procinfo", Call::Register),
    ("PUT", "/procapi/v1/proc/procinfo", Call::Update),
    ("DELETE", "/procapi/v1/proc/procinfo", Call::Unregister),
    ("POST", "/procapi/v1/proc/operate", Call::Operate { second: false }),
    ("POST", "/procapi/v2/proc/operate", Call::Operate { second: true }),
    ("POST", "/procapi/v2/proc/multioperate", Call::OperateMulti),
    ("GET", "/procapi/v1/proc/operate", Call::Result(KeyForm::First)),
    ("GET", "/procapi/v2/proc/operate", Call::Result(KeyForm::Second)),
    ("GET", "/procapi/v1/proc/status", Call::Status { second: false }),
    ("GET", "/procapi/v2/proc/status", Call::Status { second: true }),
    ("GET", "/procapi/v1/proc/syncstatus", Call::Sync),
    ("POST", "/procapi/v1/proc/groupinfo", Call::SetGroups),
    ("GET", "/procapi/v1/proc/groupinfo", Call::Groups),
    ("POST", "/api/v2/cluster/list_agent_state", Call::Agents { by_id: true }),
    ("GET", "/api/abide/v1/processes", Call::Processes),
    ("GET", "/api/abide/v1/processes/watch", Call::Watch),
    ("POST", "/api/abide/v1/rename", Call::Rename),
    ("GET", "/api/abide/v1/hosts", Call::Hosts),
    ("GET", "/api/abide/v1/tasks", Call::Tasks),
    ("POST", "/api/abide/v1/state", Call::State),
    ("POST", "/api/abide/v1/agent/join", Call::Join),
    ("GET", "/api/abide/v1/agent/stream", Call::Stream),
    ("POST", "/api/abide/v1/agent/tell", Call::Tell),
    ("GET", "/healthz", Call::Health),
    ("GET", "/readyz", Call::Ready),
    ("GET", "/metrics", Call::Metrics),
    ("GET", "/openapi.json", Call::Description),
];

/// Where GSE 2.0 begins, behind whatever prefix the API gateway was given.
const SECOND: [&str; 2] = ["/api/v2/proc/", "/api/v2/cluster/"];

/// Every method and path, without prefixes and slashes at the end.
pub fn all() -> impl Iterator<Item = (&'static str, String, Call)> {
    let named = |prefix: &'static str, calls: &'static [(&'static str, Call)]| {
        calls.iter().map(move |(name, call)| ("POST", format!("{prefix}{name}"), *call))
    };
    named("/api/c/compapi/v2/gse/", GSE)
        .chain(named("/api/v2/proc/", GSE))
        .chain(named("/api/c/compapi/v2/job/", JOB))
        .chain(named("/api/c/compapi/v2/jobv3/", JOB))
        .chain(OTHERS.iter().map(|(method, path, call)| (*method, (*path).to_owned(), *call)))
}

/// By path, then by method: a path has few.
static TABLE: LazyLock<HashMap<String, Vec<(&'static str, Call)>>> = LazyLock::new(|| {
    let mut table: HashMap<String, Vec<(&'static str, Call)>> = HashMap::new();
    for (method, path, call) in all() {
        table.entry(path).or_default().push((method, call));
    }
    table
});

/// What a method and a path were found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Call(Call),
    /// The path is there, and not for this method.
    OtherMethod,
    Nothing,
}

/// Finds the call of a path, with or without a slash at its end.
pub fn find(method: &str, path: &str) -> Found {
    let path = path.trim_end_matches('/');
    let calls = TABLE.get(path).or_else(|| {
        let begins = SECOND.iter().find_map(|second| path.find(second))?;
        TABLE.get(&path[begins..])
    });
    let Some(calls) = calls else { return Found::Nothing };
    let call = calls.iter().find(|(known, _)| *known == method);
    call.map_or(Found::OtherMethod, |(_, call)| Found::Call(*call))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_found_at_all_its_addresses() {
        for path in [
            "/api/c/compapi/v2/gse/register_proc_info/",
            "/api/c/compapi/v2/gse/register_proc_info",
            "/procapi/v1/proc/procinfo",
            "/api/v2/proc/register_proc_info",
            "/prod/api/v2/proc/register_proc_info/",
            "/api/bk-gse/prod/api/v2/proc/register_proc_info",
        ] {
            assert_eq!(find("POST", path), Found::Call(Call::Register), "{path}");
        }
        assert_eq!(find("PUT", "/procapi/v1/proc/procinfo"), Found::Call(Call::Update));
        assert_eq!(find("PATCH", "/procapi/v1/proc/procinfo"), Found::OtherMethod);
        assert_eq!(
            find("POST", "/prod/api/v2/cluster/list_agent_state"),
            Found::Call(Call::Agents { by_id: true })
        );
        for path in ["", "/", "/nowhere", "/api/v2/proc/", "/healthz/x", "/api/c/compapi/v2/gse/"] {
            assert_eq!(find("GET", path), Found::Nothing, "{path}");
        }
    }

    #[test]
    fn no_address_stands_for_two_calls() {
        let mut seen = std::collections::HashSet::new();
        for (method, path, _) in all() {
            assert!(seen.insert((method, path.clone())), "{method} {path}");
        }
    }
}
