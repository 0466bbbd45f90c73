//! Audit record of a request: collected while the request is handled, written when its answer is known.

use std::collections::BTreeMap;
use std::net::IpAddr;

use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;

use super::{AuditLog, RepeatedEvent, ThrottledEvent, timestamp};
use crate::access::apps::App;
use crate::contract::{
    AuditAction, AuditCaller, AuditEntry, AuditEvent, AuditFailedRow, AuditInstances, AuditOutcome,
    AuditPurpose, StoreRequest,
};
use crate::gateway::auth::header_user;
use crate::gateway::middleware::peer_of;
use crate::gateway::namespace_limits::NamespaceGate;
use crate::gateway::routes::ApiCall;
use crate::gateway::tasks::instance;
use crate::gse::codes::{EnvelopeCode, GseOp, RowCode};
use crate::gse::keys as result_keys;
use crate::gse::request::ProcRequest;
use crate::gse::response::Rows;
use crate::http::Peer;
use crate::model::{HostKey, InstanceKey, count, noun_for};
use crate::store::{KeyScope, keys};

/// Maximum characters of a name or header that a caller claims.
const MAX_CLAIM_CHARS: usize = 128;
/// Maximum characters of the reason of a break-glass change.
const MAX_REASON_CHARS: usize = 500;
/// Maximum groups of instances that a line of the log on stderr names.
const MAX_LOGGED_GROUPS: usize = 3;

/// A request, for the audit log.
pub struct RequestLog {
    pub call: ApiCall,
    pub changes: bool,
    /// The authenticated caller; empty: unknown.
    pub who: String,
    pub kind: &'static str,
    /// The name that an unknown caller claimed.
    pub claimed: String,
    /// The user on whose behalf an app calls, as claimed by the app.
    pub as_user: String,
    pub what: AuditAction,
    pub purpose: AuditPurpose,
    /// The request showed valid credentials.
    pub proved: bool,
    /// Rows that were refused.
    pub refused: RefusedRows,
    /// Subject of a read that may contain secrets.
    pub reads: Option<String>,
    /// Shares of the limits of namespaces, until the answer is known.
    pub namespaces: NamespaceGate,
}

/// Status and code of an answer.
#[derive(Clone, Copy)]
pub struct AnswerCodes {
    status: StatusCode,
    /// `None`: success.
    code: Option<EnvelopeCode>,
}

impl AnswerCodes {
    pub fn of(response: &Response) -> AnswerCodes {
        let code = response.extensions().get::<EnvelopeCode>().copied();
        AnswerCodes { status: response.status(), code }
    }

    /// Whether the call was refused for its credentials, a missing grant or a limit.
    fn is_refused(self) -> bool {
        matches!(
            self.status,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS
        ) || self.code == Some(EnvelopeCode::NOT_ALLOWED)
    }
}

/// The reason of a break-glass change, which its header percent-encodes.
fn reason(headers: &HeaderMap) -> String {
    let text = headers.get("x-abide-break-glass").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let text = percent_encoding::percent_decode_str(text).decode_utf8_lossy();
    text.chars().take(MAX_REASON_CHARS).collect()
}

/// Refused rows of a call: their number, and the instances where they are known.
#[derive(Default)]
pub struct RefusedRows {
    pub count: usize,
    pub rows: Vec<AuditFailedRow>,
}

impl RequestLog {
    pub fn of(call: ApiCall) -> RequestLog {
        RequestLog {
            call,
            changes: call.changes(),
            who: String::new(),
            kind: "app",
            claimed: String::new(),
            as_user: String::new(),
            what: AuditAction::default(),
            purpose: AuditPurpose::default(),
            proved: false,
            refused: RefusedRows::default(),
            reads: None,
            namespaces: NamespaceGate::default(),
        }
    }

    /// The app or person whose credentials were proved.
    pub fn set_caller(&mut self, app: &App) {
        self.who.clone_from(&app.code);
        self.kind = app.grant().principal.kind();
    }

    /// Reads the user in the headers, as the app claims. A person acts for no other user.
    pub fn read_user(&mut self, headers: &HeaderMap) {
        if self.as_user.is_empty() && self.kind != "person" {
            self.as_user = header_user(headers).unwrap_or_default();
        }
    }

    /// Reads the purpose in the headers, as the caller claims.
    pub fn read_purpose(&mut self, headers: &HeaderMap) {
        if !self.purpose.is_empty() {
            return;
        }
        let text = |name: &str| {
            let text = headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
            text.chars().take(MAX_CLAIM_CHARS).collect::<String>()
        };
        self.purpose = AuditPurpose {
            owner: text("x-abide-owner"),
            generation: text("x-abide-generation").parse().ok(),
            op: text("x-abide-op"),
            plan: text("x-abide-plan"),
            revision: text("x-abide-revision"),
            commit: text("x-abide-commit"),
            break_glass: reason(headers),
        };
    }

    /// Adds the instances that a request about one process names.
    pub fn add_request(&mut self, request: &ProcRequest) {
        let text = |text: &Option<String>, none: &str| text.clone().unwrap_or_else(|| none.to_owned());
        let process = format!("{}/{}", text(&request.meta.namespace, "?"), text(&request.meta.name, "*"));
        let op = request.op_type.map(|code| match GseOp::from_code(code) {
            Some(op) => crate::agent_protocol::AgentOp::from(op).word().to_owned(),
            None => format!("op {code}"),
        });
        let targets = request.read_targets().unwrap_or_default();
        let valid = targets.hosts.iter().map(|host| host.key.to_string());
        let invalid = targets.invalid.iter().map(|invalid| invalid.written.v1.clone());
        let hosts = valid.chain(invalid).collect();
        self.what.instances.push(AuditInstances { process, op: op.unwrap_or_default(), hosts });
    }

    /// Adds the rows of a registration that are not done.
    pub fn add_refused_rows(&mut self, request: &ProcRequest, rows: &Rows) {
        self.refused.count = rows.values().filter(|row| row.code() != RowCode::DONE).count();
        let (Ok(process), Ok(targets), true) =
            (request.process(), request.read_targets(), self.refused.count > 0)
        else {
            return;
        };
        let written = request.written();
        for host in &targets.hosts {
            let key = result_keys::v1(host, &process);
            let key = key.unwrap_or_else(|| result_keys::v2(&host.key, &process));
            let row = rows.get(&result_keys::as_written(key, &host.key, written.get(&host.key)));
            if let Some(row) = row.filter(|row| row.code() != RowCode::DONE) {
                let instance = instance(&process, &host.key).to_string();
                self.refused.rows.push(AuditFailedRow { instance, code: row.code().0 });
            }
        }
    }

    /// Adds instances with an operation.
    pub fn add_instances<'a>(&mut self, op: &str, instances: impl IntoIterator<Item = &'a InstanceKey>) {
        let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for key in instances {
            groups.entry(key.process().to_string()).or_default().push(key.host.to_string());
        }
        let group = |(process, hosts)| AuditInstances { process, op: op.to_owned(), hosts };
        self.what.instances.extend(groups.into_iter().map(group));
    }

    /// Adds hosts of a call about agents.
    pub fn add_hosts(&mut self, hosts: &[HostKey]) {
        self.what.hosts.extend(hosts.iter().map(ToString::to_string));
    }

    /// Adds the keys of a controller's request, with the instances and the owner that they belong to.
    pub fn add_state(&mut self, request: &StoreRequest) {
        let (detail, keys): (String, Vec<String>) = match request {
            StoreRequest::Get { key } => ("get".to_owned(), vec![key.clone()]),
            StoreRequest::Range { prefix, .. } => ("range".to_owned(), vec![prefix.clone()]),
            StoreRequest::Slice { prefix, .. } => ("slice".to_owned(), vec![prefix.clone()]),
            StoreRequest::Changes { prefix, .. } => ("changes".to_owned(), vec![prefix.clone()]),
            StoreRequest::Txn { writes, .. } => {
                let deleted = writes.iter().filter(|write| write.value.is_none()).count();
                let keys = writes.iter().map(|write| write.key.clone()).collect();
                (format!("{} written, {deleted} deleted", writes.len() - deleted), keys)
            }
            StoreRequest::TakeLease { name, .. } => ("acquire lease".to_owned(), vec![keys::lease(name)]),
            StoreRequest::RenewLease { name, .. } => ("renew lease".to_owned(), vec![keys::lease(name)]),
            StoreRequest::ReleaseLease { name, .. } => ("release lease".to_owned(), vec![keys::lease(name)]),
            StoreRequest::ResetLease { name, above, force } => {
                (format!("reset lease (above {above}, force {force})"), vec![keys::lease(name)])
            }
        };
        let mut instances = Vec::new();
        for key in &keys {
            match KeyScope::of_key(key) {
                Some(KeyScope::Owner(owner)) if self.purpose.owner.is_empty() => {
                    self.purpose.owner = owner.chars().take(MAX_CLAIM_CHARS).collect();
                }
                Some(KeyScope::Owned(instance) | KeyScope::Hold(instance)) => instances.push(instance),
                Some(KeyScope::Namespace(namespace)) => {
                    let process = format!("{namespace}/*");
                    self.what.instances.push(AuditInstances { process, ..AuditInstances::default() });
                }
                Some(KeyScope::Owner(_) | KeyScope::AllNamespaces) | None => {}
            }
        }
        self.add_instances("", &instances);
        (self.what.detail, self.what.keys) = (detail, keys);
    }

    /// Short text for the log on stderr.
    pub fn summary(&self) -> String {
        let AuditAction { instances, hosts, keys, detail, .. } = &self.what;
        let mut parts: Vec<String> = Vec::new();
        for AuditInstances { process, op, hosts } in instances.iter().take(MAX_LOGGED_GROUPS) {
            let op = if op.is_empty() { String::new() } else { format!(", op {op}") };
            parts.push(format!("{process} on {}{op}", count(hosts.len(), "host")));
        }
        if instances.len() > MAX_LOGGED_GROUPS {
            parts.push(format!("{} more", instances.len() - MAX_LOGGED_GROUPS));
        }
        if let (true, Some(first)) = (instances.is_empty(), keys.first()) {
            parts.push(match keys.len() {
                1 => first.to_string(),
                many => format!("{first} of {many} keys"),
            });
        }
        if let Some(first) = hosts.first() {
            let more = hosts.len() - 1;
            let more = if more > 0 {
                format!(" and {more} more {}", noun_for(&more, "host"))
            } else {
                String::new()
            };
            parts.push(format!("{first}{more}"));
        }
        parts.extend(Some(detail.clone()).filter(|detail| !detail.is_empty()));
        parts.join("; ")
    }

    /// The login of an app or a person. Agents have an entry for each session.
    fn login(&self, ip: IpAddr) -> Option<RepeatedEvent<'_>> {
        let is_login = matches!(self.kind, "app" | "person") && !self.who.is_empty();
        is_login.then_some(RepeatedEvent::Login(&self.who, ip))
    }

    /// Whether an answered request has no entry: neither its own nor a login. Most reads end here, without a lock.
    pub fn is_without_entry(&self, audit: &AuditLog, parts: &Parts, answer: AnswerCodes) -> bool {
        if self.changes || self.reads.is_some() || answer.is_refused() {
            return false;
        }
        self.login(peer_of(parts)).is_none_or(|login| audit.is_repeated(login))
    }

    /// Writes the entry of an answered request. A change waits for its line.
    pub async fn write(mut self, audit: &AuditLog, parts: &Parts, answer: AnswerCodes, message: &str) {
        let peer = parts.extensions.get::<Peer>().map(|Peer(peer)| *peer);
        let ip = peer_of(parts);
        let (code, is_refused) = (answer.code, answer.is_refused());
        let (event, admitted) = match () {
            () if self.who.is_empty() && is_refused => {
                let own = audit.admit(ThrottledEvent::Unknown(ip));
                let all = own.and_then(|_| audit.admit(ThrottledEvent::AllUnknown));
                (AuditEvent::Refused, own.zip(all).map(|(own, all)| own + all))
            }
            // A caller without credentials changes and reads nothing.
            () if self.who.is_empty() => return,
            () if is_refused => (AuditEvent::Refused, audit.admit(ThrottledEvent::Refused(self.who.clone()))),
            () if self.changes => (AuditEvent::Change, Some(0)),
            () => match &self.reads {
                Some(read) => {
                    (AuditEvent::Read, audit.admit_repeated(RepeatedEvent::Read(&self.who, ip, read)))
                }
                None => (AuditEvent::Login, None),
            },
        };
        if let Some(suppressed) = self.login(ip).and_then(|login| audit.admit_repeated(login)) {
            self.read_user(&parts.headers);
            let mut login = self.entry(AuditEvent::Login, peer, suppressed);
            login.result.status = "ok".to_owned();
            audit.record(login);
        }
        let Some(suppressed) = admitted else { return };
        self.read_user(&parts.headers);
        self.read_purpose(&parts.headers);
        self.what.call = self.call.word().to_owned();
        let mut entry = self.entry(event, peer, suppressed);
        let status = match (is_refused, code) {
            (true, _) => "refused",
            (false, Some(_)) => "failed",
            (false, None) => "ok",
        };
        let message = if message == "ok" { String::new() } else { message.to_owned() };
        let (status, code) = (status.to_owned(), code.map(|code| code.0));
        (entry.what, entry.purpose) = (self.what, self.purpose);
        entry.result = AuditOutcome { status, code, message, failed: self.refused.rows, suppressed };
        match event == AuditEvent::Change {
            true => audit.record_and_wait(entry).await,
            false => audit.record(entry),
        }
    }

    /// An entry with the caller alone.
    fn entry(&self, event: AuditEvent, peer: Option<std::net::SocketAddr>, suppressed: u64) -> AuditEntry {
        let claim = |text: &str| text.chars().take(MAX_CLAIM_CHARS).collect::<String>();
        let (kind, name) = match self.who.is_empty() {
            true => ("unknown", claim(&self.claimed)),
            false => (self.kind, self.who.clone()),
        };
        let peer = peer.map(|peer| peer.to_string()).unwrap_or_default();
        AuditEntry {
            time: timestamp(),
            event,
            who: AuditCaller { kind: kind.to_owned(), name, user: claim(&self.as_user), peer },
            what: AuditAction { call: self.call.word().to_owned(), ..AuditAction::default() },
            result: AuditOutcome { suppressed, ..AuditOutcome::default() },
            ..AuditEntry::default()
        }
    }
}
