//! Abide gateway as a target: supports every field, reports whole specs, and executes a repeated call once.
//!
//! [`observe`] reads the full state, [`digests`] its compact form, [`process`] parses one row, [`change_stream`] reads
//! later changes, [`status`] is the live status check, [`operations`] sends operations, [`logs`] opens log streams, and [`fleet`]
//! administers join tokens and certificates. [`audit`] reads the audit log, and [`secret_keys`] has the keys of digests.

mod audit;
mod change_stream;
mod digests;
mod fleet;
mod logs;
mod observe;
mod operations;
mod process;
mod secret_keys;
mod status;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

pub use self::audit::AuditFilter;
pub use self::logs::LogRequest;
use self::observe::{FullObservation, gaps};
use self::operations::{RowWire, TaskWire};
use self::secret_keys::SecretKeyRing;
use super::{
    Backend, BackendError, ChangeOrigin, ChangeStream, InstanceQuery, Operation, OperationState,
    OperationStatus, Refusal, RefusalReason, Scope, Task, Watermark, name_of_move,
};
use crate::contract::FoundTask;
use crate::gse::codes::EnvelopeCode;
use crate::gse::keys;
use crate::http::{ApiClient, ApiEndpoint, CallError, ClientError, UnreadableResponse};
use crate::model::{Dialect, HostKey, InstanceKey, Observed, Op};

/// Timeout of one call.
const TIME: Duration = Duration::from_secs(30);

pub struct Abide {
    calls: ApiClient,
    /// Generation of the writer lease; 0: no lease is held.
    generation: AtomicU64,
    /// An observation that was fetched in advance.
    early: Mutex<Option<FullObservation>>,
    secret_keys: SecretKeyRing,
}

impl Abide {
    pub fn new(access: &ApiEndpoint) -> Result<Abide, ClientError> {
        Ok(Abide::of_client(ApiClient::new(access)?))
    }

    /// A backend with the connections and credentials of another client, without a lease.
    pub fn of_client(calls: ApiClient) -> Abide {
        Abide {
            calls,
            generation: AtomicU64::new(0),
            early: Mutex::new(None),
            secret_keys: SecretKeyRing::default(),
        }
    }

    pub fn calls(&self) -> &ApiClient {
        &self.calls
    }

    /// Sets the lease generation of later calls; the gateway refuses older generations.
    pub fn act_as(&self, generation: u64) {
        self.generation.store(generation, Ordering::Release);
    }

    async fn get(&self, path: &str) -> Result<String, BackendError> {
        self.calls.call(reqwest::Method::GET, path, Vec::new(), &[], TIME).await.map_err(BackendError::from)
    }

    async fn post(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, String)],
    ) -> Result<String, BackendError> {
        let body = body.to_string().into_bytes();
        self.calls.call(reqwest::Method::POST, path, body, headers, TIME).await.map_err(BackendError::from)
    }

    /// The rows of a task as text; `None`: the task is not queued yet.
    async fn results(&self, id: &str) -> Result<Option<String>, BackendError> {
        let path = "/api/c/compapi/v2/gse/get_proc_operate_result_v2/";
        let body = json!({"task_id": id}).to_string().into_bytes();
        match self.calls.call(reqwest::Method::POST, path, body, &[], TIME).await {
            Ok(text) => Ok(Some(text)),
            Err(CallError::Refused { code, .. }) if code == EnvelopeCode::NOT_QUEUED.0 => Ok(None),
            Err(broken) => Err(broken.into()),
        }
    }

    /// Headers of a mutating call: idempotency key, lease generation and origin.
    fn signed(&self, call: String, order: &Operation) -> Vec<(&'static str, String)> {
        let mut headers = vec![("X-Abide-Op", call)];
        if let Some(origin) = &order.origin {
            let ChangeOrigin { plan, revision, commit, break_glass, repairs: _ } = &**origin;
            let named = [("X-Abide-Plan", plan), ("X-Abide-Revision", revision), ("X-Abide-Commit", commit)];
            headers.extend(named.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))));
            headers.extend(break_glass.as_ref().map(|reason| ("X-Abide-Break-Glass", escaped(reason))));
        }
        match (self.generation.load(Ordering::Acquire), order.owner.as_ref()) {
            (0, _) | (_, None) => {}
            (generation, Some(owner)) => {
                headers.push(("X-Abide-Owner", owner.clone()));
                headers.push(("X-Abide-Generation", generation.to_string()));
            }
        }
        headers
    }
}

impl Backend for Abide {
    fn dialect(&self) -> Dialect {
        Dialect::Abide
    }

    async fn observe(&self, scope: &Scope) -> Result<Observed, BackendError> {
        Ok(self.observe_with_seq(scope).await?.0)
    }

    async fn check_live(&self, subjects: &[InstanceQuery]) -> Result<Observed, BackendError> {
        self.status_of(subjects).await
    }

    async fn messages(
        &self,
        instances: &[InstanceKey],
    ) -> Result<BTreeMap<InstanceKey, String>, BackendError> {
        self.messages_of(instances).await
    }

    async fn follow(&self, scope: &Scope) -> Result<(Observed, Option<ChangeStream>), BackendError> {
        let (observed, as_of) = self.observe_with_seq(scope).await?;
        let (calls, keys) = (self.calls.clone(), self.secret_keys.clone());
        let changes = ChangeStream::opened_later(as_of, move |tell| {
            tokio::spawn(change_stream::feed(calls, keys, as_of, tell));
        });
        Ok((observed, Some(changes)))
    }

    async fn watermark(&self, hosts: &BTreeSet<HostKey>) -> Result<Watermark, BackendError> {
        #[derive(Deserialize)]
        struct AsOf {
            as_of: u64,
        }
        // Not a valid namespace: returns an empty page.
        let path = "/api/abide/v1/processes?namespace=%20&limit=1&brief=1";
        let (page, alive) = tokio::try_join!(self.get(path), self.alive())?;
        let page: AsOf = read(&page)?;
        Ok(Watermark { number: page.as_of, gaps: gaps(hosts.iter(), &alive) })
    }

    fn has_idempotency_keys(&self) -> bool {
        true
    }

    async fn find_task(&self, call: &str, instances: &[InstanceKey]) -> Result<Option<Task>, BackendError> {
        let found: FoundTask = read(&self.get(&format!("/api/abide/v1/tasks?op={}", escaped(call))).await?)?;
        let rows = instances.iter().map(|instance| (instance.clone(), instance.to_string())).collect();
        Ok(found.task.map(|id| Task { ids: vec![id], rows, ..Task::default() }))
    }

    async fn submit(&self, call: &str, orders: &[Operation]) -> Result<Task, BackendError> {
        let moves = |order: &&Operation| order.moves();
        let registers = |order: &&Operation| matches!(order.op, Op::Register | Op::Unregister);
        let mut task = Task::default();
        let registry: Vec<&Operation> =
            orders.iter().filter(|order| registers(order) && !moves(order)).collect();
        self.registry(call, &registry, &mut task.answered).await?;
        for (nth, order) in orders.iter().filter(moves).enumerate() {
            let mut body = self.body(order);
            body["from"] = json!(order.from);
            body["to"] = json!(order.instance);
            let signed = self.signed(name_of_move(call, nth), order);
            let text = self.post("/api/abide/v1/rename", &body, &signed).await?;
            task.ids.push(read::<TaskWire>(&text)?.task_id);
            task.rows.insert(order.instance.clone(), order.id.clone());
        }
        let operations: Vec<&Operation> = orders.iter().filter(|order| !registers(order)).collect();
        if !operations.is_empty() {
            let body = json!({"proc_operate_req": self.items(&operations)});
            let signed = self.signed(call.to_owned(), operations[0]);
            let text = self.post("/api/c/compapi/v2/gse/operate_proc_multi/", &body, &signed).await?;
            task.ids.push(read::<TaskWire>(&text)?.task_id);
            task.rows.extend(operations.iter().map(|order| (order.instance.clone(), order.id.clone())));
        }
        Ok(task)
    }

    async fn poll(&self, task: &Task) -> Result<Vec<OperationStatus>, BackendError> {
        let mut all = task.answered.clone();
        let mut known: HashMap<String, RowWire> = HashMap::new();
        for id in &task.ids {
            if let Some(text) = self.results(id).await? {
                known.extend(read::<HashMap<String, RowWire>>(&text)?);
            }
        }
        for (instance, order) in &task.rows {
            let row = known.get(&keys::v2(&instance.host, &instance.process()));
            let result = row.map_or(OperationState::InProgress, RowWire::outcome);
            all.push(OperationStatus { order: order.clone(), instance: instance.clone(), result });
        }
        Ok(all)
    }
}

impl From<CallError> for BackendError {
    fn from(broken: CallError) -> BackendError {
        let reason = RefusalReason::of(&broken);
        match broken {
            CallError::Unreachable(why) => BackendError::Unreachable(why),
            CallError::NoAnswer(_) | CallError::Redirected { may_have_run: true, .. } => {
                BackendError::NoAnswer
            }
            CallError::Unreadable(response) => BackendError::unreadable(&response),
            CallError::Redirected { why, may_have_run: false } => BackendError::Unreachable(why.into()),
            CallError::Refused { status, code, message } => {
                let known = EnvelopeCode(code);
                let busy = [
                    EnvelopeCode::RATE_LIMITED,
                    EnvelopeCode::CONCURRENCY_LIMITED,
                    EnvelopeCode::STORE_FAILED,
                ];
                match () {
                    () if status == 429 || busy.contains(&known) => BackendError::Busy(message),
                    // A proxy responded: whether the gateway executed the call is unknown.
                    () if status >= 500 && (code == 0 || known.meaning().is_none()) => {
                        let what = format!("the target failed: {message} (HTTP {status}, code {code})");
                        BackendError::Inconclusive(what)
                    }
                    () => BackendError::Refused(Refusal::new(reason, format!("{message} (code {code})"))),
                }
            }
        }
    }
}

fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, BackendError> {
    serde_json::from_str(text).map_err(|error| {
        let response = UnreadableResponse::new(200, &error.to_string(), text.as_bytes());
        BackendError::invalid_response(format!("invalid response: {response}"))
    })
}

/// Percent-encodes text for a URL or a header.
fn escaped(text: &str) -> String {
    use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
    const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
    utf8_percent_encode(text, RESERVED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_gateway_itself_refuses() {
        let fault =
            |status, code| BackendError::from(CallError::Refused { status, code, message: "no".to_owned() });
        let refused = |reason, text: &str| BackendError::Refused(Refusal::new(reason, text));
        assert_eq!(
            fault(200, EnvelopeCode::BAD_REQUEST.0),
            refused(RefusalReason::Other, "no (code 1900400)")
        );
        assert_eq!(fault(409, EnvelopeCode::TAKEN.0), refused(RefusalReason::Other, "no (code 1900409)"));
        let not_allowed = EnvelopeCode::NOT_ALLOWED.0;
        assert_eq!(fault(403, not_allowed), refused(RefusalReason::NotPermitted, "no (code 1900403)"));
        assert_eq!(fault(401, not_allowed), refused(RefusalReason::WrongCredentials, "no (code 1900403)"));
        assert_eq!(fault(200, EnvelopeCode::STORE_FAILED.0), BackendError::Busy("no".to_owned()));
        assert_eq!(fault(503, EnvelopeCode::CONCURRENCY_LIMITED.0), BackendError::Busy("no".to_owned()));
        assert_eq!(fault(429, 0), BackendError::Busy("no".to_owned()));
        for (proxy, text) in [(fault(502, 0), "(HTTP 502, code 0)"), (fault(504, 17), "(HTTP 504, code 17)")]
        {
            assert!(proxy.may_have_run() && proxy.to_string().ends_with(text), "{proxy}");
        }
    }
}
