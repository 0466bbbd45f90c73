//! Call names, bodies and result keys of each dialect. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::backend::{InstanceQuery, Operation};
use crate::gse::codes::{GseOp, ManageOp};
use crate::gse::{self, JobApi, JobProcess, keys, spec_body};
use crate::model::{
    Dialect, HashedSpec, Host, HostKey, InstanceKey, Op, ProcessKey, Protection, Spec, SpecRevision, State,
};

/// Maximum instances per call.
const BATCH: usize = 1000;

/// Business or scope of JOB calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Business {
    Biz(i64),
    Scope { kind: String, id: String },
}

/// A dialect, and the settings of the target for all of its calls.
pub struct Wire {
    pub dialect: Dialect,
    pub business: Option<Business>,
    pub supplier: Option<u64>,
}

/// A request about one instance.
#[derive(Clone, Debug)]
pub struct Item {
    pub instance: InstanceKey,
    host: Host,
    does: PlatformAction,
    spec: Option<Arc<HashedSpec>>,
    owner: Option<String>,
    revision: Option<SpecRevision>,
    protections: Vec<Protection>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum PlatformAction {
    Register,
    Update,
    Unregister,
    Operate(GseOp),
}

/// Grouping key: action, process, labels and spec.
type Kind = (PlatformAction, String, Option<([u8; 16], u64)>);

/// One call.
pub struct PlatformRequest {
    pub name: &'static str,
    pub body: Value,
    pub response: ResponseKind,
}

/// Kind of response of a call.
pub enum ResponseKind {
    /// Rows, directly.
    Registry(()),
    Task,
    JobTask,
}

impl Item {
    pub fn of(order: &Operation) -> Item {
        let does = match (GseOp::of(order.op), order.op) {
            (Some(op), _) => PlatformAction::Operate(op),
            (None, Op::Unregister) => PlatformAction::Unregister,
            (None, _) if order.before.registered => PlatformAction::Update,
            (None, _) => PlatformAction::Register,
        };
        Item {
            instance: order.instance.clone(),
            host: order.host.clone(),
            does,
            spec: order.spec.clone(),
            owner: order.owner.clone(),
            revision: order.revision,
            protections: order.protections.clone(),
        }
    }

    /// A live check, read-only.
    pub fn live_check(subject: &InstanceQuery) -> Item {
        Item {
            instance: subject.instance.clone(),
            host: subject.host.clone(),
            does: PlatformAction::Operate(GseOp::Status),
            spec: subject.spec.clone(),
            owner: None,
            revision: None,
            protections: Vec::new(),
        }
    }

    /// An update of an existing registration.
    pub fn as_known(item: &Item) -> Item {
        Item { does: PlatformAction::Update, ..item.clone() }
    }

    fn process(&self) -> ProcessKey {
        self.instance.process()
    }
}

impl Wire {
    /// Groups items into calls, by index.
    pub fn calls(&self, items: &[Item]) -> Vec<Vec<usize>> {
        let mut calls: Vec<Vec<usize>> = Vec::new();
        match self.dialect {
            // One operation, process and spec per call.
            Dialect::GseV1 => {
                let mut kinds: BTreeMap<_, Vec<usize>> = BTreeMap::new();
                for (at, item) in items.iter().enumerate() {
                    kinds.entry(self.kind(item)).or_default().push(at);
                }
                for places in kinds.into_values() {
                    calls.extend(places.chunks(BATCH).map(<[usize]>::to_vec));
                }
            }
            // Any combination.
            Dialect::GseV2 | Dialect::GseApigw | Dialect::Abide => {
                let all: Vec<usize> = (0..items.len()).collect();
                calls.extend(all.chunks(BATCH).map(<[usize]>::to_vec));
            }
            // One operation per call, and no two instances with one result key.
            Dialect::Job => {
                let mut open: HashMap<_, (Vec<usize>, HashSet<String>)> = HashMap::new();
                for (at, item) in items.iter().enumerate() {
                    let key = self.key(item);
                    let (places, taken) = open.entry((job_call(item), item.does)).or_default();
                    if places.len() == BATCH || taken.contains(&key) {
                        calls.push(std::mem::take(places));
                        taken.clear();
                    }
                    places.push(at);
                    taken.insert(key);
                }
                let mut rest: Vec<Vec<usize>> = open.into_values().map(|(places, _)| places).collect();
                rest.sort();
                calls.extend(rest);
            }
        }
        calls
    }

    /// The call for all of these items, which are of one group.
    pub fn ask(&self, items: &[Item]) -> PlatformRequest {
        let first = items.first().map(|item| item.does);
        match (self.dialect, first) {
            (Dialect::Job, _) => self.job(items),
            (_, Some(PlatformAction::Register)) => self.registry("register_proc_info", items, true),
            (_, Some(PlatformAction::Update)) => self.registry("update_proc_info", items, true),
            (_, Some(PlatformAction::Unregister)) => self.registry("unregister_proc_info", items, false),
            (Dialect::GseV1, _) => {
                let body = items.first().map_or(Value::Null, |first| {
                    let mut body = json!({"meta": self.meta(first), "hosts": self.hosts(items)});
                    body["op_type"] = json!(op_code(first));
                    body
                });
                PlatformRequest { name: "operate_proc", body, response: ResponseKind::Task }
            }
            (Dialect::GseV2 | Dialect::GseApigw | Dialect::Abide, _) => {
                let body = json!({"proc_operate_req": self.requests(items)});
                PlatformRequest { name: "operate_proc_multi", body, response: ResponseKind::Task }
            }
        }
    }

    /// Result key of an item.
    pub fn key(&self, item: &Item) -> String {
        let process = item.process();
        match self.dialect {
            Dialect::GseV1 => {
                let supplier = item.host.supplier.or(self.supplier);
                let host = Host { supplier, ..item.host.clone() };
                keys::v1(&host, &process).unwrap_or_else(|| keys::v2(&host.key, &process))
            }
            Dialect::GseV2 | Dialect::Abide => keys::v2(&item.host.key, &process),
            Dialect::GseApigw => {
                format!("{}:{}:{}", agent_id(&item.host), process.namespace, process.name)
            }
            Dialect::Job => match &item.spec {
                Some(spec) => keys::job(&item.host.key, spec),
                None => String::new(),
            },
        }
    }

    /// The hosts part of a query.
    pub fn where_(&self, hosts: &[Host]) -> (&'static str, Value) {
        match self.dialect {
            Dialect::GseApigw => ("agent_id_list", hosts.iter().map(agent_id).collect()),
            Dialect::GseV1 | Dialect::GseV2 | Dialect::Job | Dialect::Abide => {
                ("hosts", hosts.iter().map(|host| self.host(host)).collect())
            }
        }
    }

    pub fn with_business(&self, mut body: Value) -> Value {
        match &self.business {
            Some(Business::Biz(id)) => body["bk_biz_id"] = json!(id),
            Some(Business::Scope { kind, id }) => {
                body["bk_scope_type"] = json!(kind);
                body["bk_scope_id"] = json!(id);
            }
            None => {}
        }
        body
    }

    /// Items of one group differ in their hosts only. The spec is part of the key where the call carries it.
    fn kind(&self, item: &Item) -> Kind {
        let has_spec = match (self.dialect, item.does) {
            (Dialect::GseV1, PlatformAction::Operate(_)) | (_, PlatformAction::Unregister) => false,
            (Dialect::GseV1, PlatformAction::Register | PlatformAction::Update) => true,
            (Dialect::GseV2 | Dialect::GseApigw | Dialect::Job | Dialect::Abide, _) => true,
        };
        let spec = item.spec.as_ref().filter(|_| has_spec).map(|spec| spec.digest());
        (item.does, self.meta(item).to_string(), spec)
    }

    fn registry(&self, name: &'static str, items: &[Item], with_spec: bool) -> PlatformRequest {
        let body = items.first().map_or(Value::Null, |first| {
            let mut body = json!({"meta": self.meta(first), "hosts": self.hosts(items)});
            if let (true, Some(spec)) = (with_spec, &first.spec) {
                body["spec"] = spec_body(spec, self.dialect);
            }
            body
        });
        PlatformRequest { name, body, response: ResponseKind::Registry(()) }
    }

    /// Items of one group are one request with all of their hosts.
    fn requests(&self, items: &[Item]) -> Vec<Value> {
        let mut kinds: BTreeMap<_, Vec<Item>> = BTreeMap::new();
        for item in items {
            kinds.entry(self.kind(item)).or_default().push(item.clone());
        }
        let request = |items: Vec<Item>| {
            let first = &items[0];
            let hosts: Vec<Host> = items.iter().map(|item| item.host.clone()).collect();
            let (field, hosts) = self.where_(&hosts);
            let mut body = json!({"meta": self.meta(first), "op_type": op_code(first)});
            body[field] = hosts;
            if let Some(spec) = &first.spec {
                body["spec"] = spec_body(spec, self.dialect);
            }
            body
        };
        kinds.into_values().map(request).collect()
    }

    fn meta(&self, item: &Item) -> Value {
        let mut meta = json!({"namespace": item.instance.namespace, "name": item.instance.name});
        let mut labels = BTreeMap::new();
        for (name, value) in item.spec.iter().flat_map(|spec| &spec.labels) {
            labels.insert(name.clone(), value.clone());
        }
        labels.extend(item.owner.clone().map(|owner| ("abide_owner".to_owned(), owner)));
        labels.extend(item.revision.map(|revision| ("abide_rev".to_owned(), revision.to_string())));
        labels.extend(Protection::label(&item.protections).map(|text| ("abide_protect".to_owned(), text)));
        if !labels.is_empty() {
            meta["labels"] = json!(labels);
        }
        meta
    }

    fn hosts(&self, items: &[Item]) -> Value {
        items.iter().map(|item| self.host(&item.host)).collect()
    }

    fn host(&self, host: &Host) -> Value {
        let HostKey::Address { cloud, ip } = &host.key else { return json!({"bk_agent_id": agent_id(host)}) };
        let mut value = json!({"ip": ip.to_string(), "bk_cloud_id": cloud});
        // Required there; 0 is its default.
        if self.dialect == Dialect::GseV1 {
            value["bk_supplier_id"] = json!(host.supplier.or(self.supplier).unwrap_or(0));
        }
        value
    }

    fn job(&self, items: &[Item]) -> PlatformRequest {
        let first = items.first();
        let api = first.map_or(JobApi::OperateProcess, job_call);
        let op_type = first.map_or(GseOp::Status.code(), |first| match (api, first.does) {
            (JobApi::ManageProc, PlatformAction::Operate(GseOp::Unhost)) => ManageOp::Unhost.code(),
            (JobApi::ManageProc, _) => ManageOp::Host.code(),
            (JobApi::OperateProcess, _) => op_code(first),
        });
        // Items of one group are one entry with all of their hosts.
        let mut kinds: BTreeMap<_, Vec<&Item>> = BTreeMap::new();
        items.iter().for_each(|item| kinds.entry(self.kind(item)).or_default().push(item));
        let infos: Vec<JobProcess> =
            kinds.into_values().filter_map(|items| job_process(&items, api)).collect();
        let body = self.with_business(json!({"op_type": op_type, "process_infos": infos}));
        let name = match api {
            JobApi::ManageProc => "manage_proc",
            JobApi::OperateProcess => "operate_process",
        };
        PlatformRequest { name, body, response: ResponseKind::JobTask }
    }
}

fn op_code(item: &Item) -> i64 {
    match item.does {
        PlatformAction::Operate(op) => op.code(),
        PlatformAction::Register | PlatformAction::Update | PlatformAction::Unregister => {
            GseOp::Status.code()
        }
    }
}

/// manage_proc hosts and unhosts, but supports no account but root and requires an owner; otherwise operate_process is used.
fn job_call(item: &Item) -> JobApi {
    let managed =
        |spec: &Spec| spec.identity.user.as_deref() == Some("root") && spec.job.proc_owner.is_some();
    match item.does {
        PlatformAction::Operate(GseOp::Host | GseOp::Unhost)
            if item.spec.as_ref().is_some_and(|spec| managed(spec)) =>
        {
            JobApi::ManageProc
        }
        _ => JobApi::OperateProcess,
    }
}

fn job_process(items: &[&Item], api: JobApi) -> Option<JobProcess> {
    let first = items.first()?;
    let subject = gse::BodyContent {
        key: first.process(),
        hosts: items.iter().map(|item| item.host.clone()).collect(),
        state: State::Running,
        spec: Spec::clone(first.spec.as_ref()?),
    };
    Some(gse::job_process(&subject, api))
}

/// The agent id of a host, or its address where the id is unknown.
fn agent_id(host: &Host) -> String {
    host.agent().map_or_else(|| host.key.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(host: u8, label: &str, command: &str) -> Item {
        let instance: InstanceKey = format!("0:10.0.0.{host}:web:api").parse().expect("a key");
        let mut spec = Spec::default();
        spec.control.start_cmd = Some(command.to_owned());
        spec.labels.insert("tier".to_owned(), label.to_owned());
        let host = Host { key: instance.host.clone(), supplier: None, agent_id: None };
        let does = PlatformAction::Operate(GseOp::Restart);
        // Parsed separately, so that no two share memory.
        let spec = Some(Arc::new(HashedSpec::new(spec)));
        Item {
            instance,
            host,
            does,
            spec,
            owner: Some("team".to_owned()),
            revision: None,
            protections: Vec::new(),
        }
    }

    /// Items that differ in their hosts only are sent once.
    #[test]
    fn the_same_specs_are_one_call_wherever_they_were_read() {
        let wire = |dialect| Wire { dialect, business: None, supplier: Some(0) };
        let items: Vec<Item> = (0..50).map(|host| item(host, "a", "./run")).collect();
        assert_eq!(wire(Dialect::GseV1).calls(&items).len(), 1);
        assert_eq!(wire(Dialect::GseV2).requests(&items).len(), 1);
        // GSE 1.0 operations carry no spec: only the process must be equal.
        let others = [item(1, "a", "./run"), item(2, "a", "./walk"), item(3, "b", "./run")];
        assert_eq!(wire(Dialect::GseV1).calls(&others), [vec![0, 1], vec![2]]);
        assert_eq!(wire(Dialect::GseV2).requests(&others).len(), 3);
        let registers = others.map(|item| Item { does: PlatformAction::Update, ..item });
        assert_eq!(wire(Dialect::GseV1).calls(&registers).len(), 3);
        let owners =
            ["one", "other"].map(|owner| Item { owner: Some(owner.to_owned()), ..item(1, "a", "./run") });
        assert_eq!(wire(Dialect::GseV1).calls(&owners).len(), 2);
    }
}
