//! Our own gateway as a target: everything can be said and read back, and a call that is sent twice is carried out once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::mpsc::Sender;

use super::{Answer, Backend, Changes, Fault, Mark, Order, Outcome, Scope, Task, Told};
use crate::gse::codes::GseOp;
use crate::gse::request::SpecWire;
use crate::gse::{keys, spec_body};
use crate::http::{Access, Broken, Calls};
use crate::model::{
    Dialect, Health, Host, HostKey, InstanceKey, Observed, Op, Revision, Runs, Seen, Stamped, Version,
};

/// Rows of one page.
const PAGE: usize = 5_000;
/// How long one call may take.
const TIME: Duration = Duration::from_secs(30);

pub struct Abide {
    calls: Calls,
    /// Of the writer lease; 0: none is held.
    generation: AtomicU64,
    /// A look that was taken before somebody asked for it.
    early: Mutex<Option<Whole>>,
}

/// A look at everything.
struct Whole {
    observed: Observed,
    /// Hosts that somebody speaks for.
    alive: BTreeSet<HostKey>,
    /// The number that changes are to be followed from.
    as_of: u64,
}

impl Abide {
    pub fn new(access: &Access) -> Result<Abide, String> {
        let generation = AtomicU64::new(0);
        Ok(Abide { calls: Calls::new(access)?, generation, early: Mutex::new(None) })
    }

    pub fn calls(&self) -> &Calls {
        &self.calls
    }

    /// From here on, calls carry this number, and older ones are refused.
    pub fn act_as(&self, generation: u64) {
        self.generation.store(generation, Ordering::Release);
    }

    async fn get(&self, path: &str) -> Result<String, Fault> {
        self.calls.ask(reqwest::Method::GET, path, Vec::new(), &[], TIME).await.map_err(Fault::from)
    }

    async fn post(&self, path: &str, body: &Value, headers: &[(&str, String)]) -> Result<String, Fault> {
        let body = body.to_string().into_bytes();
        self.calls.ask(reqwest::Method::POST, path, body, headers, TIME).await.map_err(Fault::from)
    }

    /// What a call that changes something is known by: its name, and whoever holds the lease.
    fn signed(&self, call: String, owner: &str) -> Vec<(&'static str, String)> {
        let mut headers = vec![("X-Abide-Op", call)];
        match self.generation.load(Ordering::Acquire) {
            0 => {}
            generation => {
                headers.push(("X-Abide-Owner", owner.to_owned()));
                headers.push(("X-Abide-Generation", generation.to_string()));
            }
        }
        headers
    }

    /// Every process that is known there, as it is told.
    pub async fn rows(&self, query: &str) -> Result<Vec<Value>, Fault> {
        let mut all = Vec::new();
        let mut after = String::new();
        loop {
            #[derive(Deserialize)]
            struct Page {
                items: Vec<Value>,
                more: Option<String>,
            }
            let path = format!("/api/abide/v1/processes?limit={PAGE}{query}{after}");
            let page: Page = read(&self.get(&path).await?)?;
            all.extend(page.items);
            match page.more {
                Some(more) => after = format!("&after={}", escaped(&more)),
                None => return Ok(all),
            }
        }
    }

    pub async fn hosts(&self) -> Result<Vec<HostRow>, Fault> {
        read(&self.get("/api/abide/v1/hosts").await?)
    }

    pub async fn tasks(&self) -> Result<Vec<Value>, Fault> {
        read(&self.get("/api/abide/v1/tasks").await?)
    }

    /// Hosts of which an agent tells.
    async fn alive(&self) -> Result<BTreeSet<HostKey>, Fault> {
        let hosts: Vec<HostRow> = read(&self.get("/api/abide/v1/hosts?brief=1").await?)?;
        Ok(hosts.into_iter().filter(|row| row.agent).map(|row| row.host).collect())
    }

    /// What is registered and running, and which of the hosts that are asked about have nobody to tell of them; and the
    /// number that changes are to be followed from.
    pub async fn look(&self, scope: &Scope) -> Result<(Observed, u64), Fault> {
        let early = self.early.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let Whole { mut observed, alive, as_of } = match early {
            Some(early) => early,
            None => self.whole(scope).await?,
        };
        let mut asked: BTreeSet<&HostKey> = scope.subjects.iter().map(|one| &one.host.key).collect();
        asked.extend(observed.instances.keys().map(|key| &key.host));
        observed.gaps = gaps(asked.into_iter(), &alive);
        Ok((observed, as_of))
    }

    /// Something was done since.
    pub fn look_anew(&self) {
        *self.early.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
    }

    /// Looks ahead: the next look is this one.
    pub async fn look_early(&self) {
        if let Ok(whole) = self.whole(&Scope::default()).await {
            *self.early.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(whole);
        }
    }

    async fn whole(&self, scope: &Scope) -> Result<Whole, Fault> {
        let at = crate::clock::moment();
        let alive = self.alive().await?;
        let mut as_of = None;
        let mut observed = Observed { at, ..Observed::default() };
        let mut specs: HashMap<String, Arc<Stamped>> = HashMap::new();
        let likely: HashMap<&InstanceKey, &Arc<Stamped>> =
            scope.subjects.iter().filter_map(|one| Some((&one.instance, one.spec.as_ref()?))).collect();
        let mut after = String::new();
        loop {
            let text = self.get(&format!("/api/abide/v1/processes?limit={PAGE}{after}")).await?;
            let page: Page<'_> = read(&text)?;
            as_of.get_or_insert(page.as_of);
            // Those that are wanted are known without it; it must not hold on to all others.
            specs.clear();
            for row in page.items {
                let key = row.instance.clone();
                let mut seen = row.seen(&mut specs)?;
                // Most of it is as wanted: then one spec in memory is enough.
                if let Some(likely) = likely.get(&key) {
                    for version in [&mut seen.given, &mut seen.live] {
                        if version.spec().is_some_and(|spec| spec == *likely) {
                            *version = Version::Spec(Arc::clone(likely));
                        }
                    }
                }
                observed.instances.insert(key, seen);
            }
            match page.more {
                Some(more) => after = format!("&after={}", escaped(&more)),
                None => return Ok(Whole { observed, alive, as_of: as_of.unwrap_or_default() }),
            }
        }
    }

    /// One order of each kind of spec makes one item, with all of its hosts.
    fn items(&self, orders: &[&Order]) -> Vec<Value> {
        /// Process, operation, spec and revision.
        type Kind = (String, i64, usize, String);
        let mut items: BTreeMap<Kind, (Value, Vec<Value>)> = BTreeMap::new();
        for order in orders {
            let op = op_code(order.op);
            let spec = order.spec.as_ref().map_or(0, |spec| Arc::as_ptr(spec) as usize);
            let rev = order.revision.map(|revision| revision.to_string()).unwrap_or_default();
            let process = order.instance.process().to_string();
            let (_, hosts) = items.entry((process, op, spec, rev)).or_insert_with(|| {
                let mut item = self.body(order);
                item["op_type"] = json!(op);
                if !order.takes.is_empty() {
                    item["takes"] = order.takes.iter().map(|field| field.path()).collect();
                }
                (item, Vec::new())
            });
            hosts.push(host_value(&order.host));
        }
        let whole = |(mut item, hosts): (Value, Vec<Value>)| {
            item["hosts"] = Value::Array(hosts);
            item
        };
        items.into_values().map(whole).collect()
    }

    fn body(&self, order: &Order) -> Value {
        let key = &order.instance;
        let mut labels = json!({"abide_owner": order.owner});
        if let Some(revision) = order.revision {
            labels["abide_rev"] = json!(revision.to_string());
        }
        for (name, value) in order.spec.iter().flat_map(|spec| &spec.labels) {
            labels[name] = json!(value);
        }
        let mut body = json!({"meta": {"namespace": key.namespace, "name": key.name, "labels": labels}});
        if let Some(spec) = &order.spec {
            body["spec"] = spec_body(spec, Dialect::Abide);
        }
        body
    }

    /// register and unregister are answered at once, process by process.
    async fn registry(&self, call: &str, orders: &[&Order], answered: &mut Vec<Answer>) -> Result<(), Fault> {
        let mut calls: BTreeMap<(String, bool, usize), Vec<&Order>> = BTreeMap::new();
        for order in orders {
            let spec = order.spec.as_ref().map_or(0, |spec| Arc::as_ptr(spec) as usize);
            let goes = order.op == Op::Unregister;
            calls.entry((order.instance.process().to_string(), goes, spec)).or_default().push(order);
        }
        for (nth, ((_, goes, _), orders)) in calls.into_iter().enumerate() {
            let mut body = self.body(orders[0]);
            body["hosts"] = orders.iter().map(|order| host_value(&order.host)).collect();
            let name = if goes { "unregister_proc_info" } else { "update_proc_info" };
            let path = format!("/api/c/compapi/v2/gse/{name}/");
            let signed = self.signed(format!("{call}.{nth}"), &orders[0].owner);
            let asked = self.post(&path, &body, &signed).await;
            let rows: HashMap<String, RowWire> = match asked {
                Ok(text) => read(&text)?,
                Err(fault @ (Fault::Refused(_) | Fault::Unreachable(_))) => {
                    let failed = Outcome::Failed { code: 0, message: fault.to_string() };
                    answered.extend(orders.iter().map(|order| answer(order, failed.clone())));
                    continue;
                }
                Err(fault @ (Fault::NoAnswer | Fault::Busy(_))) => return Err(fault),
            };
            for order in orders {
                let process = order.instance.process();
                let key =
                    keys::v1(&order.host, &process).unwrap_or_else(|| keys::v2(&order.host.key, &process));
                let result = rows.get(&key).map_or(Outcome::InProgress, RowWire::outcome);
                answered.push(answer(order, result));
            }
        }
        Ok(())
    }
}

impl Backend for Abide {
    fn dialect(&self) -> Dialect {
        Dialect::Abide
    }

    async fn observe(&self, scope: &Scope) -> Result<Observed, Fault> {
        Ok(self.look(scope).await?.0)
    }

    async fn follow(&self, scope: &Scope) -> Result<(Observed, Option<Changes>), Fault> {
        let (observed, as_of) = self.look(scope).await?;
        let (tell, changes) = Changes::new(as_of);
        tokio::spawn(feed(self.calls.clone(), as_of, tell));
        Ok((observed, Some(changes)))
    }

    async fn mark(&self, hosts: &BTreeSet<HostKey>) -> Result<Mark, Fault> {
        #[derive(Deserialize)]
        struct AsOf {
            as_of: u64,
        }
        // No namespace has this name: an empty page.
        let page: AsOf = read(&self.get("/api/abide/v1/processes?namespace=%20&limit=1&brief=1").await?)?;
        Ok(Mark { number: page.as_of, gaps: gaps(hosts.iter(), &self.alive().await?) })
    }

    fn knows_names(&self) -> bool {
        true
    }

    async fn find(&self, call: &str, instances: &[InstanceKey]) -> Result<Option<Task>, Fault> {
        #[derive(Deserialize)]
        struct Found {
            task: Option<String>,
        }
        let found: Found = read(&self.get(&format!("/api/abide/v1/tasks?op={}", escaped(call))).await?)?;
        let rows = instances.iter().map(|instance| (instance.clone(), instance.to_string())).collect();
        Ok(found.task.map(|id| Task { ids: vec![id], rows, ..Task::default() }))
    }

    async fn submit(&self, call: &str, orders: &[Order]) -> Result<Task, Fault> {
        let moves = |order: &&Order| order.from.is_some() && order.op == Op::Register;
        let registers = |order: &&Order| matches!(order.op, Op::Register | Op::Unregister);
        let mut task = Task::default();
        let registry: Vec<&Order> = orders.iter().filter(|order| registers(order) && !moves(order)).collect();
        self.registry(call, &registry, &mut task.answered).await?;
        for (nth, order) in orders.iter().filter(moves).enumerate() {
            let mut body = self.body(order);
            body["from"] = json!(order.from);
            body["to"] = json!(order.instance);
            let signed = self.signed(format!("{call}.m{nth}"), &order.owner);
            let text = self.post("/api/abide/v1/rename", &body, &signed).await?;
            task.ids.push(read::<TaskWire>(&text)?.task_id);
            task.rows.insert(order.instance.clone(), order.id.clone());
        }
        let operations: Vec<&Order> = orders.iter().filter(|order| !registers(order)).collect();
        if !operations.is_empty() {
            let body = json!({"proc_operate_req": self.items(&operations)});
            let signed = self.signed(call.to_owned(), &operations[0].owner);
            let text = self.post("/api/c/compapi/v2/gse/operate_proc_multi/", &body, &signed).await?;
            task.ids.push(read::<TaskWire>(&text)?.task_id);
            task.rows.extend(operations.iter().map(|order| (order.instance.clone(), order.id.clone())));
        }
        Ok(task)
    }

    async fn poll(&self, task: &Task) -> Result<Vec<Answer>, Fault> {
        let mut all = task.answered.clone();
        let mut known: HashMap<String, RowWire> = HashMap::new();
        for id in &task.ids {
            let path = "/api/c/compapi/v2/gse/get_proc_operate_result_v2/";
            match self.post(path, &json!({"task_id": id}), &[]).await {
                Ok(text) => known.extend(read::<HashMap<String, RowWire>>(&text)?),
                Err(Fault::Refused(why)) if why.contains("1000115") => {}
                Err(fault) => return Err(fault),
            }
        }
        for (instance, order) in &task.rows {
            let row = known.get(&keys::v2(&instance.host, &instance.process()));
            let result = row.map_or(Outcome::InProgress, RowWire::outcome);
            all.push(Answer { order: order.clone(), instance: instance.clone(), result });
        }
        Ok(all)
    }
}

fn gaps<'a>(
    hosts: impl Iterator<Item = &'a HostKey>,
    alive: &BTreeSet<HostKey>,
) -> BTreeMap<HostKey, String> {
    let silent = hosts.filter(|host| !alive.contains(*host));
    silent.map(|host| (host.clone(), "no agent is connected".to_owned())).collect()
}

/// Reads what the gateway pushes, until nobody wants to know.
async fn feed(calls: Calls, after: u64, tell: Sender<Told>) {
    let over = tokio::select! {
        over = pushed(&calls, after, &tell) => over,
        () = tell.closed() => return,
    };
    let _ = tell.send(Told::Over(over)).await;
}

/// Why it is over.
async fn pushed(calls: &Calls, after: u64, tell: &Sender<Told>) -> String {
    let path = format!("/api/abide/v1/processes/watch?numbers=1&after={after}");
    let mut lines = match calls.lines(&path, TIME).await {
        Ok(lines) => lines,
        Err(broken) => return Fault::from(broken).to_string(),
    };
    // There is a line at every beat, if only an empty one.
    let silence = Duration::from_secs(3 * crate::gse::channel::BEAT_SECS);
    loop {
        let text = match tokio::time::timeout(silence, lines.next()).await {
            Ok(Ok(text)) if text.is_empty() => return "the gateway ended it".to_owned(),
            Ok(Ok(text)) => text,
            Ok(Err(broken)) => return Fault::from(broken).to_string(),
            Err(_) => return "the gateway is silent".to_owned(),
        };
        let told = match understood(&text) {
            Ok(told) => told,
            Err(why) => return why,
        };
        if let Some(told) = told
            && tell.send(told).await.is_err()
        {
            return String::new();
        }
    }
}

/// What some lines say together. `Err`: from here on nothing is certain.
fn understood(text: &[u8]) -> Result<Option<Told>, String> {
    #[derive(Deserialize)]
    struct Line<'a> {
        number: Option<u64>,
        instance: Option<InstanceKey>,
        #[serde(borrow)]
        process: Option<ProcessWire<'a>>,
        error: Option<String>,
    }
    let text = std::str::from_utf8(text).map_err(|_| "what it tells is no text".to_owned())?;
    let (mut last, mut rows, mut specs) = (None, Vec::new(), HashMap::new());
    for line in text.lines().filter(|line| !line.is_empty()) {
        let line: Line<'_> = read(line).map_err(|fault| fault.to_string())?;
        let Some(number) = line.number else {
            return Err(line.error.unwrap_or_else(|| "the gateway has forgotten older changes".to_owned()));
        };
        last = Some(number);
        if let Some(key) = line.instance {
            let seen = line.process.map(|row| row.seen(&mut specs)).transpose();
            rows.push((key, seen.map_err(|fault| fault.to_string())?));
        }
    }
    Ok(last.map(|number| Told::Rows { number, rows }))
}

/// One host as the gateway tells of it.
#[derive(Clone, Debug, Deserialize)]
pub struct HostRow {
    pub host: HostKey,
    pub agent: bool,
    pub version: Option<String>,
    pub heard: String,
    #[serde(default)]
    pub processes: u64,
}

#[derive(Deserialize)]
struct TaskWire {
    task_id: String,
}

#[derive(Deserialize)]
struct RowWire {
    error_code: i64,
    #[serde(default)]
    error_msg: String,
}

impl RowWire {
    fn outcome(&self) -> Outcome {
        match self.error_code {
            0 => Outcome::Done,
            115 | 1_015_012 => Outcome::InProgress,
            code => Outcome::Failed { code, message: self.error_msg.clone() },
        }
    }
}

fn answer(order: &Order, result: Outcome) -> Answer {
    Answer { order: order.id.clone(), instance: order.instance.clone(), result }
}

#[derive(Deserialize)]
struct Page<'a> {
    #[serde(borrow)]
    items: Vec<ProcessWire<'a>>,
    more: Option<String>,
    as_of: u64,
}

/// A process as the gateway tells of it.
#[derive(Deserialize)]
struct ProcessWire<'a> {
    instance: InstanceKey,
    registered: bool,
    hosted: bool,
    running: bool,
    pid: Option<u32>,
    owner: Option<String>,
    revision: Option<Revision>,
    live_revision: Option<Revision>,
    labels: BTreeMap<String, String>,
    health: String,
    since: Option<String>,
    report_time: Option<String>,
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
    #[serde(borrow)]
    live_spec: Option<&'a RawValue>,
    ran: Option<Value>,
}

impl ProcessWire<'_> {
    fn seen(&self, specs: &mut HashMap<String, Arc<Stamped>>) -> Result<Seen, Fault> {
        let mut version = |raw: Option<&RawValue>, revision: Option<Revision>| match raw.map(RawValue::get) {
            None | Some("null") => Ok(revision.map_or(Version::Unknown, Version::Digests)),
            Some(text) => known(text, &self.labels, specs).map(Version::Spec),
        };
        let given = version(self.spec, self.revision)?;
        let live = if self.running { version(self.live_spec, self.live_revision)? } else { Version::Unknown };
        let ran = match &self.ran {
            None => Runs::Unknown,
            Some(Value::String(word)) if word == "never" => Runs::Never,
            Some(Value::String(_)) => Runs::Unknown,
            Some(ran) => {
                let revision = ran["revision"].as_str().and_then(|text| text.parse::<Revision>().ok());
                revision.map_or(Runs::Given, |revision| Runs::Digest(revision.run))
            }
        };
        Ok(Seen {
            unknown: false,
            registered: Some(self.registered),
            hosted: Some(self.hosted),
            running: Some(self.running),
            labels: self.labels.clone(),
            owner: self.owner.as_deref().map(Arc::from),
            given,
            live,
            ran,
            health: Health::ALL.into_iter().find(|one| one.word() == self.health).unwrap_or_default(),
            pid: self.pid,
            since: self.since.as_deref().and_then(crate::clock::read),
            report_time: self.report_time.as_deref().and_then(crate::clock::read),
        })
    }
}

/// Thousands of rows tell of the same spec.
fn known(
    text: &str,
    labels: &BTreeMap<String, String>,
    specs: &mut HashMap<String, Arc<Stamped>>,
) -> Result<Arc<Stamped>, Fault> {
    let name = format!("{text}{labels:?}");
    if let Some(spec) = specs.get(&name) {
        return Ok(Arc::clone(spec));
    }
    let wire: SpecWire = read(text)?;
    let mut spec =
        wire.spec().map_err(|wrong| Fault::Refused(format!("it tells of a spec whose {wrong}")))?;
    spec.labels = labels.clone();
    let spec = Arc::new(Stamped::new(spec));
    specs.insert(name, Arc::clone(&spec));
    Ok(spec)
}

impl From<Broken> for Fault {
    fn from(broken: Broken) -> Fault {
        match broken {
            Broken::Unreachable(why) => Fault::Unreachable(why),
            Broken::NoAnswer(_) => Fault::NoAnswer,
            Broken::Refused { code, message, .. } => Fault::Refused(format!("{message} (code {code})")),
        }
    }
}

fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, Fault> {
    serde_json::from_str(text).map_err(|error| Fault::Refused(format!("its answer cannot be read: {error}")))
}

fn op_code(op: Op) -> i64 {
    match op {
        Op::Start => GseOp::Start,
        Op::Stop => GseOp::Stop,
        Op::Host => GseOp::Host,
        Op::Unhost => GseOp::Unhost,
        Op::Restart => GseOp::Restart,
        Op::Reload => GseOp::Reload,
        Op::Kill => GseOp::Kill,
        // Not an operation: it has a call of its own.
        Op::Register | Op::Unregister => GseOp::Status,
    }
    .code()
}

fn host_value(host: &Host) -> Value {
    match &host.key {
        HostKey::Address { cloud, ip } => {
            let mut value = json!({"ip": ip.to_string(), "bk_cloud_id": cloud});
            if let Some(supplier) = host.supplier {
                value["bk_supplier_id"] = json!(supplier);
            }
            value
        }
        HostKey::Agent(id) => json!({"bk_agent_id": id}),
    }
}

/// What a key of a page may contain, as a part of an address.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~');
    let one = |byte: u8| if plain(byte) { (byte as char).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(one).collect()
}
