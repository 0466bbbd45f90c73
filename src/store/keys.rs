//! Store schema: every key, built and parsed in one place.
//!
//! Values are JSON unless the table says otherwise. Keys are stable: an upgrade reads them.
//!
//! Gateway:
//!
//! | key | value |
//! |---|---|
//! | `reg/NAMESPACE/NAME/HOST` | registered spec, owner, revision |
//! | `live/NAMESPACE/NAME/HOST` | last report of the agent |
//! | `failed/NAMESPACE/NAME/HOST` | last report of an instance whose first start failed: it is not registered |
//! | `identity/HOST/INDEX` | instance that holds an identity |
//! | `claim/HOST/NAMESPACE/NAME` | registration without its identity |
//! | `group/NAMESPACE/HOST` | pools of a namespace on a host |
//! | `task/ID` | task with its operations |
//! | `open/ID` | empty; exists while a row of the task is not final |
//! | `done/ID/N`, `done/ID/lost` | result of row N; rows of missing agents |
//! | `op/APP/OP` | task of an idempotency key (`X-Abide-Op`) |
//! | `task-number` | last task number, decimal |
//! | `agent/HOSTS/AGENT` | last acknowledged sequence number of an agent; HOSTS is a digest |
//! | `fleet/token/ID` | join token: digest of its secret, hosts, expiry, creator, use |
//! | `fleet/host/HOST` | certificate of a host: pinned key, agent, serial number, expiry, revocation |
//! | `fleet/revoked/SERIAL` | revoked certificate, until it expires |
//! | `audit-anchor` | head of the audit log's hash chain, and its oldest entry |
//! | `probe` | time of the last write check |
//! | `store-id` | identity of the store, as text |
//! | `secret-key` | root of the keys of digests of secrets, in hex |
//!
//! Controllers. In a store that several targets share, every key has the prefix `at/TARGET/`, and leases have the
//! prefix `lease/at/TARGET/`:
//!
//! | key | value |
//! |---|---|
//! | `lease/writer/OWNER`, `lease/leader/OWNER` | holder, generation, expiry |
//! | `journal/OWNER/RUN/N` | call that is in flight |
//! | `ledger/TARGET/INSTANCE` | specs and state that Abide gave to an instance |
//! | `hold/INSTANCE` | hold of a person |
//! | `pause/NAMESPACE`, `pause/*` | pause |
//! | `controller/OWNER` | published status of a controller |
//! | `protect/INSTANCE` | protections of a live instance, and its owner |
//! | `pin/OWNER` | pinned manifest revision |
//! | `left/OWNER/INSTANCE` | suspended instance |
//! | `alert/OWNER/ROUTE:KIND:SUBJECT` | incident that a route of `notify` has sent |
//! | `rollout/OWNER/NAMESPACE:NAME` | decisions on the rollout of a process: version, promoted stages, state |
//! | `source/OWNER/taken` | active revision |
//! | `source/OWNER/applied` | revision that was fully applied, as text; written with `--heal no` |
//! | `source/OWNER/git` | last commit of a git source |
//! | `snap/OWNER/rev/REVISION` | stored revision: list sums |
//! | `snap/OWNER/list/SUM` | file names with sums of their texts |
//! | `snap/OWNER/text/SUM` | text, or one chunk of it |
//! | `snap/OWNER/inventory/NAME` | last good hosts of an inventory: time, number, digest of the text |
//! | `snap/OWNER/inventory/NAME:DIGEST:N` | one chunk of the text |
//! | `history/OWNER/TIME-PID-N` | one entry of `abide history` |
//! | `expect/` | reserved |
//!
//! Agent:
//!
//! | key | value |
//! |---|---|
//! | `proc/INSTANCE` | `InstanceState`: specs, pid, boot id, supervision, last run |
//! | `intent/INSTANCE` | launch that has begun |
//! | `pending/INSTANCE` | operation that has begun |
//! | `up/OP` | result that the gateway has not acknowledged |
//! | `ran/OP` | acknowledged operation, until the floor passes it |
//! | `floor` | highest sequence number that is final |
//! | `fence/OWNER` | highest generation seen of an owner |
//!
//! An owner may contain `/`; a part that may contain any character is the last of its key. A `_PREFIX` constant or
//! `_prefix` function ends with `/`, so that a range never includes keys of another prefix.

use crate::model::{HostKey, InstanceKey, Name, ProcessKey};

// Keys of the gateway.

pub const REGISTRATION_PREFIX: &str = "reg/";
pub const REPORT_PREFIX: &str = "live/";
pub const FAILED_START_PREFIX: &str = "failed/";
pub const GROUP_PREFIX: &str = "group/";
pub const TASK_PREFIX: &str = "task/";
pub const OPEN_TASK_PREFIX: &str = "open/";
pub const RESPONSE_PREFIX: &str = "op/";
pub const TASK_NUMBER: &str = "task-number";
/// Every key of certificates and join tokens.
pub const FLEET_PREFIX: &str = "fleet/";
pub const JOIN_TOKEN_PREFIX: &str = "fleet/token/";
pub const HOST_PIN_PREFIX: &str = "fleet/host/";
pub const REVOKED_PREFIX: &str = "fleet/revoked/";
pub const AUDIT_ANCHOR: &str = "audit-anchor";
pub const PROBE: &str = "probe";
pub const STORE_ID: &str = "store-id";
pub const SECRET_ROOT: &str = "secret-key";

/// Registrations sort by namespace, then name.
pub fn registration(instance: &InstanceKey) -> String {
    by_process(REGISTRATION_PREFIX, instance)
}

pub fn registrations_prefix(namespace: &str) -> String {
    format!("{REGISTRATION_PREFIX}{namespace}/")
}

pub fn report(instance: &InstanceKey) -> String {
    by_process(REPORT_PREFIX, instance)
}

pub fn failed_start(instance: &InstanceKey) -> String {
    by_process(FAILED_START_PREFIX, instance)
}

/// The failed starts of all namespaces, or of one.
pub fn failed_starts_prefix(namespace: Option<&str>) -> String {
    namespace.map_or(FAILED_START_PREFIX.to_owned(), |name| format!("{FAILED_START_PREFIX}{name}/"))
}

/// The instance of a failed start.
pub fn failed_start_of(key: &str) -> Option<InstanceKey> {
    process_of(key.strip_prefix(FAILED_START_PREFIX)?)
}

fn by_process(prefix: &str, instance: &InstanceKey) -> String {
    format!("{prefix}{}/{}/{}", instance.namespace, instance.name, instance.host)
}

/// The instance of a registration or a report; `None` for every other key.
pub fn instance_of(key: &str) -> Option<InstanceKey> {
    process_of(key.strip_prefix(REGISTRATION_PREFIX).or_else(|| key.strip_prefix(REPORT_PREFIX))?)
}

fn process_of(rest: &str) -> Option<InstanceKey> {
    let mut parts = rest.splitn(3, '/');
    let (namespace, name) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some(InstanceKey { host: parts.next()?.parse().ok()?, namespace, name })
}

/// `index`: of the identity; it may contain any character.
pub fn identity(host: &HostKey, index: &str) -> String {
    format!("{}{index}", identities_prefix(host))
}

pub fn identities_prefix(host: &HostKey) -> String {
    format!("identity/{host}/")
}

pub fn claim(instance: &InstanceKey) -> String {
    format!("{}{}/{}", claims_prefix(&instance.host), instance.namespace, instance.name)
}

pub fn claims_prefix(host: &HostKey) -> String {
    format!("claim/{host}/")
}

pub fn group(namespace: &str, host: &HostKey) -> String {
    format!("{GROUP_PREFIX}{namespace}/{host}")
}

/// Namespace and host of a group key.
pub fn group_of(key: &str) -> Option<(&str, HostKey)> {
    let (namespace, host) = key.strip_prefix(GROUP_PREFIX)?.split_once('/')?;
    Some((namespace, host.parse().ok()?))
}

pub fn task(id: &str) -> String {
    format!("{TASK_PREFIX}{id}")
}

pub fn task_of(key: &str) -> Option<&str> {
    key.strip_prefix(TASK_PREFIX)
}

pub fn open_task(id: &str) -> String {
    format!("{OPEN_TASK_PREFIX}{id}")
}

pub fn open_task_of(key: &str) -> Option<&str> {
    key.strip_prefix(OPEN_TASK_PREFIX)
}

pub fn row_result(task: &str, nth: usize) -> String {
    format!("{}{nth}", row_results_prefix(task))
}

/// The row numbers of a task whose agents are missing.
pub fn missing_rows(task: &str) -> String {
    format!("{}lost", row_results_prefix(task))
}

pub fn row_results_prefix(task: &str) -> String {
    format!("done/{task}/")
}

/// The row number of a result of this task; `None` for its missing rows.
pub fn row_of(key: &str, task: &str) -> Option<usize> {
    below(key.strip_prefix("done/")?, task)?.parse().ok()
}

/// The stored response of an idempotency key.
pub fn response(app: &str, op: &str) -> String {
    format!("{RESPONSE_PREFIX}{app}/{op}")
}

/// The counter of an agent. `hosts`: a digest of its hosts.
pub fn agent_counter(hosts: &str, agent: &str) -> String {
    format!("agent/{hosts}/{agent}")
}

pub fn join_token(id: &str) -> String {
    format!("{JOIN_TOKEN_PREFIX}{id}")
}

pub fn join_token_of(key: &str) -> Option<&str> {
    key.strip_prefix(JOIN_TOKEN_PREFIX)
}

/// The certificate that is pinned for a host.
pub fn host_pin(host: &HostKey) -> String {
    format!("{HOST_PIN_PREFIX}{host}")
}

pub fn host_pin_of(key: &str) -> Option<HostKey> {
    key.strip_prefix(HOST_PIN_PREFIX)?.parse().ok()
}

/// `serial`: in hex.
pub fn revoked_certificate(serial: &str) -> String {
    format!("{REVOKED_PREFIX}{serial}")
}

pub fn revoked_certificate_of(key: &str) -> Option<&str> {
    key.strip_prefix(REVOKED_PREFIX)
}

// Keys of controllers.

pub const LEASE_PREFIX: &str = "lease/";
pub const HOLD_PREFIX: &str = "hold/";
pub const PROTECTION_PREFIX: &str = "protect/";
pub const CONTROLLER_STATUS_PREFIX: &str = "controller/";
pub const PAUSE_PREFIX: &str = "pause/";
pub const PIN_PREFIX: &str = "pin/";
pub const SUSPENDED_PREFIX: &str = "left/";
pub const ALERT_PREFIX: &str = "alert/";
pub const ROLLOUT_PREFIX: &str = "rollout/";
pub const SOURCE_PREFIX: &str = "source/";
pub const HISTORY_PREFIX: &str = "history/";

/// Prefixes that a gateway stores for controllers, sorted.
pub const CONTROLLER_PREFIXES: [&str; 16] = [
    ALERT_PREFIX,
    "at/",
    CONTROLLER_STATUS_PREFIX,
    "expect/",
    HISTORY_PREFIX,
    HOLD_PREFIX,
    "journal/",
    LEASE_PREFIX,
    "ledger/",
    SUSPENDED_PREFIX,
    PAUSE_PREFIX,
    PIN_PREFIX,
    PROTECTION_PREFIX,
    ROLLOUT_PREFIX,
    "snap/",
    SOURCE_PREFIX,
];

/// Prefix of every key of a target in a store that several targets share.
pub fn target_prefix(target: &str) -> String {
    format!("at/{target}/")
}

/// The prefix `at/TARGET/` of a key of another target.
pub fn target_of(key: &str) -> Option<&str> {
    let (target, _) = key.strip_prefix("at/")?.split_once('/')?;
    key.get(.."at/".len() + target.len() + 1)
}

/// The key of a lease by its name.
pub fn lease(name: &str) -> String {
    format!("{LEASE_PREFIX}{name}")
}

/// The name of a lease by its key.
pub fn lease_of(key: &str) -> Option<&str> {
    key.strip_prefix(LEASE_PREFIX)
}

/// Name of the lease that allows changes to an owner's processes.
pub fn writer_lease_name(owner: &str) -> String {
    format!("writer/{owner}")
}

/// Name of the lease that allows a controller to act for an owner.
pub fn leader_lease_name(owner: &str) -> String {
    format!("leader/{owner}")
}

/// Role and owner of a lease name.
pub fn lease_name_parts(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}

/// One call below the prefix of its run. Six digits keep the order of calls.
pub fn journal(run_prefix: &str, nth: u64) -> String {
    format!("{run_prefix}{nth:06}")
}

pub fn journal_prefix(owner: &str) -> String {
    format!("journal/{owner}/")
}

pub fn journal_run_prefix(owner: &str, run: &str) -> String {
    format!("{}{run}/", journal_prefix(owner))
}

/// `RUN/N` of a call of this owner.
pub fn journal_call<'a>(key: &'a str, owner: &str) -> Option<&'a str> {
    below(key.strip_prefix("journal/")?, owner)
}

pub fn ledger(target: &str, instance: &InstanceKey) -> String {
    format!("{}{instance}", ledger_prefix(target))
}

pub fn ledger_prefix(target: &str) -> String {
    format!("ledger/{target}/")
}

pub fn ledger_instance(key: &str, target: &str) -> Option<InstanceKey> {
    below(key.strip_prefix("ledger/")?, target)?.parse().ok()
}

pub fn alerts_prefix(owner: &str) -> String {
    format!("{ALERT_PREFIX}{owner}/")
}

/// The subject is a process, a host, or empty. A `/` in it becomes `:`, so that the owner ends at the last `/`.
pub fn alert(owner: &str, route: &str, kind: &str, subject: &str) -> String {
    format!("{}{route}:{kind}:{}", alerts_prefix(owner), subject.replace('/', ":"))
}

pub fn rollouts_prefix(owner: &str) -> String {
    format!("{ROLLOUT_PREFIX}{owner}/")
}

/// Neither part of a name contains `:` or `/`.
pub fn rollout(owner: &str, process: &ProcessKey) -> String {
    format!("{}{}:{}", rollouts_prefix(owner), process.namespace, process.name)
}

pub fn rollout_process(key: &str, owner: &str) -> Option<ProcessKey> {
    let (namespace, name) = below(key.strip_prefix(ROLLOUT_PREFIX)?, owner)?.split_once(':')?;
    Some(ProcessKey { namespace: namespace.parse().ok()?, name: name.parse().ok()? })
}

pub fn controller(owner: &str) -> String {
    format!("{CONTROLLER_STATUS_PREFIX}{owner}")
}

pub fn protection(instance: &InstanceKey) -> String {
    format!("{PROTECTION_PREFIX}{instance}")
}

/// The instance of a protection.
pub fn protected_instance(key: &str) -> Option<InstanceKey> {
    key.strip_prefix(PROTECTION_PREFIX)?.parse().ok()
}

pub fn hold(instance: &InstanceKey) -> String {
    format!("{HOLD_PREFIX}{instance}")
}

/// `None`: everywhere. `*` is not a valid namespace, so the global pause has a key of its own.
pub fn pause(namespace: Option<&Name>) -> String {
    format!("{PAUSE_PREFIX}{}", namespace.map_or("*", Name::as_str))
}

pub fn pin(owner: &str) -> String {
    format!("{PIN_PREFIX}{owner}")
}

pub fn pin_owner(key: &str) -> Option<&str> {
    key.strip_prefix(PIN_PREFIX)
}

pub fn suspended(owner: &str, instance: &InstanceKey) -> String {
    format!("{}{instance}", suspended_prefix(owner))
}

pub fn suspended_prefix(owner: &str) -> String {
    format!("{SUSPENDED_PREFIX}{owner}/")
}

/// The suspended instance of a key of this owner.
pub fn suspended_instance_of(key: &str, owner: &str) -> Option<InstanceKey> {
    below(key.strip_prefix(SUSPENDED_PREFIX)?, owner)?.parse().ok()
}

/// The suspended instance of a key of any owner. The owner may contain `/`, the instance may not.
pub fn suspended_instance(key: &str) -> Option<InstanceKey> {
    key.strip_prefix(SUSPENDED_PREFIX)?.rsplit_once('/')?.1.parse().ok()
}

pub fn active_revision(owner: &str) -> String {
    format!("{SOURCE_PREFIX}{owner}/taken")
}

/// The owner of an active revision.
pub fn active_revision_owner(key: &str) -> Option<&str> {
    key.strip_prefix(SOURCE_PREFIX)?.strip_suffix("/taken")
}

pub fn applied_revision(owner: &str) -> String {
    format!("{SOURCE_PREFIX}{owner}/applied")
}

pub fn last_commit(owner: &str) -> String {
    format!("{SOURCE_PREFIX}{owner}/git")
}

pub fn snapshots_prefix(owner: &str) -> String {
    format!("snap/{owner}/rev/")
}

pub fn snapshot_lists_prefix(owner: &str) -> String {
    format!("snap/{owner}/list/")
}

pub fn snapshot_texts_prefix(owner: &str) -> String {
    format!("snap/{owner}/text/")
}

/// The last good hosts of an inventory.
pub fn inventory(owner: &str, name: &str) -> String {
    format!("snap/{owner}/inventory/{name}")
}

/// A name of an inventory contains no `:`.
pub fn inventory_chunk(owner: &str, name: &str, digest: &str, nth: usize) -> String {
    format!("{}:{digest}:{nth:04}", inventory(owner, name))
}

/// `id`: `TIME-PID-N`, which sorts by time.
pub fn history(owner: &str, id: &str) -> String {
    format!("{}{id}", owner_history_prefix(owner))
}

pub fn owner_history_prefix(owner: &str) -> String {
    format!("{HISTORY_PREFIX}{owner}/")
}

// Keys of the agent.

pub const INSTANCE_STATE_PREFIX: &str = "proc/";
pub const LAUNCH_INTENT_PREFIX: &str = "intent/";
pub const PENDING_OPERATION_PREFIX: &str = "pending/";
pub const RESULT_PREFIX: &str = "up/";
pub const ACKNOWLEDGED_PREFIX: &str = "ran/";
pub const FENCE_PREFIX: &str = "fence/";
pub const FLOOR: &str = "floor";

pub fn instance_state(instance: &InstanceKey) -> String {
    format!("{INSTANCE_STATE_PREFIX}{instance}")
}

pub fn instance_state_of(key: &str) -> Option<InstanceKey> {
    key.strip_prefix(INSTANCE_STATE_PREFIX)?.parse().ok()
}

pub fn launch_intent(instance: &InstanceKey) -> String {
    format!("{LAUNCH_INTENT_PREFIX}{instance}")
}

pub fn pending_operation(instance: &InstanceKey) -> String {
    format!("{PENDING_OPERATION_PREFIX}{instance}")
}

pub fn result(op_id: &str) -> String {
    format!("{RESULT_PREFIX}{op_id}")
}

pub fn acknowledged(op_id: &str) -> String {
    format!("{ACKNOWLEDGED_PREFIX}{op_id}")
}

pub fn fence(owner: &str) -> String {
    format!("{FENCE_PREFIX}{owner}")
}

/// The rest of a key below a part. Parsing a page of keys allocates nothing.
fn below<'a>(rest: &'a str, part: &str) -> Option<&'a str> {
    rest.strip_prefix(part)?.strip_prefix('/')
}

#[cfg(test)]
mod tests;
