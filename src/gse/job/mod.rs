//! JOB request bodies: manage_proc (1 host, 2 unhost) and operate_process (GSE's operations).
//!
//! Both have the same shape, but their operation numbers have different meanings.

mod check;

use std::collections::{HashMap, HashSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::request::loose_number;
use super::{BodyContent, Dialect, Loss};
use crate::model::{
    AutoType, Control, Field, Host, HostKey, Identity, Job, Monitor, Name, Percent, ProcessKey, Resource,
    Spec, State,
};

/// The call of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    ManageProc,
    OperateProcess,
}

/// Prefix of a JOB namespace; the id of the business or scope follows.
const NAMESPACE: &str = "job-";
/// Label with the scope type of a body, so that a conversion keeps it.
const SCOPE_LABEL: &str = "bk_scope_type";
/// Label with the call of a body, where the manifest alone would select the other one.
const API_LABEL: &str = "bk_job_api";

impl Api {
    fn word(self) -> &'static str {
        match self {
            Api::ManageProc => "manage_proc",
            Api::OperateProcess => "operate_process",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "JobRequest")]
pub struct JobBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_biz_id: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_scope_type: Option<String>,
    /// A text in the documents; some callers send a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_scope_id: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub op_type: Option<i64>,
    pub process_infos: Vec<JobProcess>,
}

macro_rules! job_process {
    ($($field:ident: $type:ty),* $(,)?) => {
        /// One entry of process_infos: all fields of both calls.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default)]
        pub struct JobProcess {
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>,)*
            pub ip_list: Vec<JobHost>,
        }
    };
}

job_process! {
    proc_name: String,
    proc_owner: String,
    contact: String,
    setup_path: String,
    pid_path: String,
    cfg_path: String,
    log_path: String,
    account: String,
    start_cmd: String,
    stop_cmd: String,
    restart_cmd: String,
    reload_cmd: String,
    kill_cmd: String,
    func_id: Value,
    instance_id: Value,
    value_key: String,
    r#type: i64,
    cpu_lmt: Limit,
    mem_lmt: Limit,
    cycle_time: i64,
    instance_num: i64,
    op_timeout: i64,
    start_check_begin_time: i64,
    start_check_end_time: i64,
}

/// A percentage. JOB uses whole numbers: `20`, not `20.0`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Limit(pub f64);

impl Serialize for Limit {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.0.fract() == 0.0 { to.serialize_i64(self.0 as i64) } else { to.serialize_f64(self.0) }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobHost {
    #[serde(deserialize_with = "cloud_id")]
    pub bk_cloud_id: u64,
    pub ip: String,
}

/// A number, or a text of its digits.
fn cloud_id<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    loose_number(from)?.ok_or_else(|| serde::de::Error::missing_field("bk_cloud_id"))
}

impl JobBody {
    /// The call of a body. Only manage_proc requires an owner, only operate_process has contact and account.
    pub fn api(&self) -> Api {
        let any = |set: fn(&JobProcess) -> bool| self.process_infos.iter().any(set);
        let operates = any(|p| p.contact.is_some() || p.account.is_some());
        let manages = any(|p| p.proc_owner.is_some()) && matches!(self.op_type, None | Some(1 | 2));
        if manages && !operates { Api::ManageProc } else { Api::OperateProcess }
    }

    /// The namespace of the body's processes.
    pub fn namespace_name(&self) -> Name {
        self.namespace(&mut Vec::new())
    }

    /// The processes that the body requests, and notes for the reader.
    pub fn contents(&self, api: Api) -> (Vec<BodyContent>, Vec<String>) {
        self.read(api, true)
    }

    /// The same for callers that identify processes by path: names may be repeated.
    pub fn contents_by_path(&self, api: Api) -> (Vec<BodyContent>, Vec<String>) {
        self.read(api, false)
    }

    fn read(&self, api: Api, apart: bool) -> (Vec<BodyContent>, Vec<String>) {
        let mut notes = Vec::new();
        let namespace = self.namespace(&mut notes);
        let scope = self.bk_scope_type.clone().filter(|scope| !scope.is_empty() && self.bk_biz_id.is_none());
        let mut subjects = Vec::new();
        let mut names = Names::default();
        for (at, process) in self.process_infos.iter().enumerate() {
            let mut note = |text: String| notes.push(format!("process_infos[{at}]: {text}"));
            let Some(own) = process.name(&mut note) else { continue };
            let hosts = process.hosts();
            let name = if apart { names.take(&own, &hosts) } else { own.clone() };
            if name != own {
                note(format!("named {name}: another process of this body has the name {own}"));
            }
            let mut spec = process.spec(&mut note);
            spec.labels.extend(scope.clone().map(|scope| (SCOPE_LABEL.to_owned(), scope)));
            let state = state(api, self.op_type, spec.monitor.auto_type, &mut note);
            let key = ProcessKey { namespace: namespace.clone(), name };
            let mut subject = BodyContent { key, hosts, state, spec };
            if call(&subject, None).0 != api {
                subject.spec.labels.insert(API_LABEL.to_owned(), api.word().to_owned());
            }
            subjects.push(subject);
        }
        (subjects, notes)
    }

    fn namespace(&self, notes: &mut Vec<String>) -> Name {
        let id = match (&self.bk_biz_id, &self.bk_scope_id) {
            (Some(id), scope) => {
                if scope.is_some() {
                    notes.push(format!("the body has bk_biz_id {id} and a scope; the scope is ignored"));
                }
                id.to_string()
            }
            (None, Some(Value::String(id))) if !id.is_empty() => id.clone(),
            (None, Some(Value::Number(id))) => id.to_string(),
            _ => {
                notes.push(
                    "the body has neither bk_biz_id nor bk_scope_id; the namespace is job-0".to_owned(),
                );
                "0".to_owned()
            }
        };
        let name = speakable(&format!("{NAMESPACE}{id}"));
        if name.as_str() != format!("{NAMESPACE}{id}") {
            notes.push(format!("the namespace is {name}: {id:?} is not a valid name"));
        }
        name
    }
}

/// The names used in a body so far. JOB distinguishes two processes of one program by path; manifests need two names.
#[derive(Default)]
struct Names {
    taken: HashSet<(HostKey, Name)>,
    /// The last suffix of each name: it only increases, so every search ends.
    last: HashMap<Name, u32>,
}

impl Names {
    /// The name, with a suffix if needed, that is free on all of the hosts.
    fn take(&mut self, own: &Name, hosts: &[Host]) -> Name {
        const ROOM: usize = 117; // 128 characters minus `-` and ten digits
        let mut name = own.clone();
        while hosts.iter().any(|host| self.taken.contains(&(host.key.clone(), name.clone()))) {
            let last = self.last.entry(own.clone()).or_insert(1);
            *last = last.saturating_add(1);
            let base: String = own.as_str().chars().take(ROOM).collect();
            name = speakable(&format!("{base}-{last}"));
        }
        self.taken.extend(hosts.iter().map(|host| (host.key.clone(), name.clone())));
        name
    }
}

/// Converts a text to a name: characters that a key cannot contain become `-`.
fn speakable(text: &str) -> Name {
    let fits = |c: char| !(matches!(c, ':' | '/') || c.is_whitespace() || c.is_control());
    let text: String = text.chars().map(|c| if fits(c) { c } else { '-' }).take(128).collect();
    text.parse().unwrap_or_else(|_| speakable("unnamed"))
}

fn state(api: Api, op_type: Option<i64>, auto_type: AutoType, note: &mut impl FnMut(String)) -> State {
    let Some(op_type) = op_type else { return State::Running };
    let state = match (api, op_type) {
        (Api::ManageProc, 1) => Some(State::Running),
        (Api::ManageProc, 2) => Some(State::unsupervised(auto_type)),
        (Api::ManageProc, _) => None,
        (Api::OperateProcess, op_type) => State::wanted_by(op_type, auto_type),
    };
    state.unwrap_or_else(|| {
        note(format!("op_type {op_type} is unknown to {}; the state is running", api.word()));
        State::Running
    })
}

impl JobProcess {
    /// JOB identifies an instance by its value_key, else by its program.
    fn name(&self, note: &mut impl FnMut(String)) -> Option<Name> {
        let own = [&self.value_key, &self.proc_name].into_iter().flatten().find(|text| !text.is_empty());
        let Some(own) = own else {
            note("ignored: it has neither value_key nor proc_name".to_owned());
            return None;
        };
        let name = speakable(own);
        if name.as_str() != own {
            note(format!("named {name}: {own:?} is not a valid name"));
        }
        Some(name)
    }

    /// Each host once. The addresses were validated before.
    fn hosts(&self) -> Vec<Host> {
        let mut seen = HashSet::new();
        let address =
            |host: &JobHost| Some(HostKey::Address { cloud: host.bk_cloud_id, ip: host.ip.parse().ok()? });
        let keys = self.ip_list.iter().filter_map(address).filter(|key| seen.insert(key.clone()));
        keys.map(|key| Host { key, supplier: None, agent_id: None }).collect()
    }

    fn spec(&self, note: &mut impl FnMut(String)) -> Spec {
        let text = |value: &Option<String>| value.clone().filter(|text| !text.is_empty());
        let any_text = |value: &Option<Value>| match value {
            Some(Value::String(text)) => Some(text.clone()).filter(|text| !text.is_empty()),
            Some(Value::Number(n)) => Some(n.to_string()),
            _ => None,
        };
        // The grammar that parsed the body checked the ranges.
        let number = |value: Option<i64>| value.and_then(|n| u32::try_from(n).ok());
        let share = |value: Option<Limit>| value.and_then(|Limit(share)| Percent::new(share));
        let cycle_time = number(self.cycle_time);
        let auto_type = self.r#type.and_then(|code| AutoType::try_from(code).ok()).unwrap_or_else(|| {
            let periodic = cycle_time.is_some_and(|secs| secs > 0);
            let guess = if periodic { AutoType::Periodic } else { AutoType::Resident };
            note(format!("`type` is unset; auto_type {} is assumed", i64::from(guess)));
            guess
        });
        if let (Some(owner), Some(contact)) = (text(&self.proc_owner), text(&self.contact))
            && owner != contact
        {
            note(format!("proc_owner is {owner:?} and contact is {contact:?}; the contact is ignored"));
        }
        Spec {
            identity: Identity {
                proc_name: text(&self.proc_name).unwrap_or_default(),
                setup_path: text(&self.setup_path).unwrap_or_default(),
                pid_path: text(&self.pid_path).unwrap_or_default(),
                config_path: text(&self.cfg_path),
                log_path: text(&self.log_path),
                user: Some(text(&self.account).unwrap_or_else(|| "root".to_owned())),
                value_key: text(&self.value_key),
            },
            control: Control {
                start_cmd: text(&self.start_cmd),
                stop_cmd: text(&self.stop_cmd),
                restart_cmd: text(&self.restart_cmd),
                reload_cmd: text(&self.reload_cmd),
                kill_cmd: text(&self.kill_cmd),
                ..Control::default()
            },
            resource: Resource { cpu: share(self.cpu_lmt), mem: share(self.mem_lmt), ..Resource::default() },
            monitor: Monitor { auto_type, op_timeout: number(self.op_timeout), ..Monitor::default() },
            job: Job {
                proc_owner: text(&self.proc_owner).or_else(|| text(&self.contact)),
                func_id: any_text(&self.func_id),
                instance_id: any_text(&self.instance_id),
                instance_num: number(self.instance_num),
                cycle_time,
                start_check_begin_time: number(self.start_check_begin_time),
                start_check_end_time: number(self.start_check_end_time),
            },
            ..Spec::default()
        }
    }
}

/// Bodies for processes: one per business and call, in process order. `api`: the call that the user chose.
pub fn bodies(subjects: &[BodyContent], api: Option<Api>, losses: &mut Vec<Loss>) -> Vec<JobBody> {
    let mut bodies: Vec<JobBody> = Vec::new();
    // Per body head: the index of the body being filled, and its result keys.
    let mut open: HashMap<(String, Api), (usize, HashSet<String>)> = HashMap::new();
    for subject in subjects {
        let (api, op_type) = call(subject, api);
        let head = head(subject, op_type);
        if head.bk_biz_id.is_none() && head.bk_scope_id.is_none() {
            let why = "JOB uses a business instead; set bk_biz_id";
            losses.push(Loss::new(subject, "meta.namespace", why));
        }
        let process = process(subject, api, losses);
        let keys: Vec<String> = result_keys(subject).collect();
        let (at, taken) = open.entry((format!("{head:?}"), api)).or_insert((usize::MAX, HashSet::new()));
        // Two instances with one result key cannot be distinguished in a response.
        if *at == usize::MAX || keys.iter().any(|key| taken.contains(key)) {
            (*at, *taken) = (bodies.len(), HashSet::new());
            bodies.push(head);
        }
        taken.extend(keys);
        bodies[*at].process_infos.push(process);
    }
    bodies
}

/// A body without its processes.
fn head(subject: &BodyContent, op_type: i64) -> JobBody {
    let mut body = JobBody { op_type: Some(op_type), ..JobBody::default() };
    let id = subject.key.namespace.as_str().strip_prefix(NAMESPACE);
    match (id, subject.spec.labels.get(SCOPE_LABEL)) {
        (Some(id), Some(scope)) => {
            body.bk_scope_type = Some(scope.clone());
            body.bk_scope_id = Some(Value::String(id.to_owned()));
        }
        (Some(id), None) => body.bk_biz_id = id.parse().ok(),
        (None, _) => {}
    }
    body
}

/// The result keys of a process in get_proc_result.
fn result_keys(subject: &BodyContent) -> impl Iterator<Item = String> {
    let identity = &subject.spec.identity;
    let program = format!("{}/{}", identity.setup_path.trim_end_matches('/'), identity.proc_name);
    subject.hosts.iter().map(move |host| format!("{program}:{}", host.key))
}

/// The call and operation for a state: the user's choice, the label, else manage_proc where it supports everything. It
/// supports no account but root, and requires an owner.
fn call(subject: &BodyContent, chosen: Option<Api>) -> (Api, i64) {
    let root = subject.spec.identity.user.as_deref() == Some("root");
    let managed = root && subject.spec.job.proc_owner.is_some();
    let remembered = match subject.spec.labels.get(API_LABEL).map(String::as_str) {
        Some("manage_proc") => Some(Api::ManageProc),
        Some("operate_process") => Some(Api::OperateProcess),
        _ => None,
    };
    let api = chosen.or(remembered).unwrap_or(match subject.state {
        State::Running | State::Unhosted if managed => Api::ManageProc,
        State::Running | State::Unhosted | State::Stopped | State::Absent => Api::OperateProcess,
    });
    let op_type = match (api, subject.state) {
        (Api::ManageProc, State::Running) => 1,
        (Api::ManageProc, State::Unhosted | State::Stopped | State::Absent) => 2,
        (Api::OperateProcess, State::Running) => 0,
        (Api::OperateProcess, State::Unhosted) => 4,
        (Api::OperateProcess, State::Stopped | State::Absent) => 1,
    };
    (api, op_type)
}

/// One entry of process_infos, without the list of unsupported parts.
pub fn process_info(subject: &BodyContent, api: Api) -> JobProcess {
    process(subject, api, &mut Vec::new())
}

fn process(subject: &BodyContent, api: Api, losses: &mut Vec<Loss>) -> JobProcess {
    let Spec { identity, control, resource, monitor, job, .. } = &subject.spec;
    let index = identity.value_key.as_deref().unwrap_or(&identity.proc_name);
    if !is_called(&subject.key.name, index) {
        losses.push(Loss::new(
            subject,
            "meta.name",
            format!("JOB names it {index:?}, by its value_key or proc_name"),
        ));
    }
    if identity.user.is_none() {
        let why = "the account is unset, and JOB uses root by default";
        losses.push(Loss::new(subject, "identity.user", why));
    }
    for host in &subject.hosts {
        let ids = [("bk_supplier_id", host.supplier.is_some()), ("bk_agent_id", host.agent_id.is_some())];
        for (name, _) in ids.into_iter().filter(|(_, there)| *there) {
            losses.push(Loss::new(subject, format!("{name} of {}", host.key), "job does not support it"));
        }
    }
    let unsupported = Dialect::Job.unsupported_fields(&subject.spec).into_iter();
    losses.extend(
        unsupported
            .filter(|field| !only_ours(subject, *field))
            .map(|field| Loss::field(subject, field, Dialect::Job)),
    );
    let mut percent = |what: &str, share: Option<Percent>| {
        if share.is_some_and(|share| share.get().fract() != 0.0) {
            losses.push(Loss::new(subject, what, "rounded: JOB supports whole percents only"));
        }
        share.map(|share| Limit(share.get().round()))
    };
    let (cpu_lmt, mem_lmt) = (percent("resource.cpu", resource.cpu), percent("resource.mem", resource.mem));
    let hosts = subject.hosts.iter().filter_map(|host| match &host.key {
        HostKey::Address { cloud, ip } => Some(JobHost { bk_cloud_id: *cloud, ip: ip.to_string() }),
        HostKey::Agent(_) => {
            losses.push(Loss::new(
                subject,
                format!("host {}", host.key),
                "JOB identifies hosts by address only",
            ));
            None
        }
    });
    let ip_list = hosts.collect();
    let manage = api == Api::ManageProc;
    let required = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    JobProcess {
        proc_name: required(&identity.proc_name),
        proc_owner: job.proc_owner.clone().filter(|_| manage),
        contact: job.proc_owner.clone().filter(|_| !manage),
        setup_path: required(&identity.setup_path),
        pid_path: required(&identity.pid_path),
        cfg_path: identity.config_path.clone(),
        log_path: identity.log_path.clone(),
        account: identity.user.clone().filter(|_| !manage),
        start_cmd: control.start_cmd.clone(),
        stop_cmd: control.stop_cmd.clone(),
        restart_cmd: control.restart_cmd.clone(),
        reload_cmd: control.reload_cmd.clone(),
        kill_cmd: control.kill_cmd.clone(),
        func_id: job.func_id.clone().map(Value::String),
        instance_id: job.instance_id.clone().map(Value::String),
        value_key: identity.value_key.clone(),
        r#type: Some(monitor.auto_type.into()),
        cpu_lmt,
        mem_lmt,
        cycle_time: job.cycle_time.map(Into::into),
        instance_num: job.instance_num.map(Into::into),
        op_timeout: monitor.op_timeout.map(Into::into),
        start_check_begin_time: job.start_check_begin_time.map(Into::into),
        start_check_end_time: job.start_check_end_time.map(Into::into),
        ip_list,
    }
}

/// Whether a name is the one that JOB's key gives, with or without a suffix.
fn is_called(name: &Name, index: &str) -> bool {
    let own = speakable(index);
    let number = name.as_str().strip_prefix(own.as_str()).map(|rest| rest.strip_prefix('-'));
    *name == own || number.flatten().is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The labels that a JOB body can represent.
fn only_ours(subject: &BodyContent, field: Field) -> bool {
    field == Field::Labels
        && subject.spec.labels.keys().all(|label| label == SCOPE_LABEL || label == API_LABEL)
}
