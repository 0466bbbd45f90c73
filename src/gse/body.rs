//! GSE request bodies: register_proc_info (v1) and operate_proc (v2).

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{BodyContent, Dialect, JobApi, Loss, job};
use crate::model::{
    ConfigFile, Control, EnvValue, Field, Host, HostKey, Identity, Job, Monitor, Resource, Spec, SpecSection,
    State,
};

/// The request bodies of the given processes, and the parts that no body can transmit.
/// `api`: the JOB call to use.
pub fn bodies(subjects: &[BodyContent], dialect: Dialect, api: Option<JobApi>) -> (Vec<Value>, Vec<Loss>) {
    let mut losses = Vec::new();
    let (absent, subjects): (Vec<BodyContent>, Vec<BodyContent>) =
        subjects.iter().cloned().partition(|subject| subject.state == State::Absent);
    losses.extend(
        absent.iter().map(|subject| {
            Loss::new(subject, "state: absent", "a body can only declare an existing process")
        }),
    );
    let bodies = match dialect {
        Dialect::Job => job::bodies(&subjects, api, &mut losses).iter().map(|body| json!(body)).collect(),
        Dialect::GseV1 | Dialect::GseV2 | Dialect::GseApigw | Dialect::Abide => {
            subjects.iter().map(|subject| body(subject, dialect, &mut losses)).collect()
        }
    };
    losses.sort();
    losses.dedup();
    (bodies, losses)
}

fn body(subject: &BodyContent, dialect: Dialect, losses: &mut Vec<Loss>) -> Value {
    let unsupported = dialect.unsupported_fields(&subject.spec).into_iter();
    losses.extend(unsupported.map(|field| Loss::field(subject, field, dialect)));
    if subject.spec.identity.user.is_none() {
        losses.push(Loss::new(
            subject,
            "identity.user",
            format!("{} requires it, but it is unset", dialect.name()),
        ));
    }
    if dialect == Dialect::GseV1 && subject.state != State::Running {
        let what = format!("state: {}", subject.state.word());
        losses.push(Loss::new(
            subject,
            what,
            "register_proc_info only registers; a separate operation sets the state",
        ));
    }
    let mut meta = json!({"namespace": subject.key.namespace, "name": subject.key.name});
    if !subject.spec.labels.is_empty() {
        meta["labels"] = json!(subject.spec.labels);
    }
    let hosts: Vec<Value> = subject.hosts.iter().filter_map(|h| host(h, subject, dialect, losses)).collect();
    let mut body = json!({"meta": meta, "hosts": hosts, "spec": spec_body(&subject.spec, dialect)});
    if dialect == Dialect::GseV2 {
        body["op_type"] = json!(match subject.state {
            State::Running => 0,
            State::Stopped | State::Absent => 1,
            State::Unhosted => 4,
        });
    }
    body
}

fn host(host: &Host, subject: &BodyContent, dialect: Dialect, losses: &mut Vec<Loss>) -> Option<Value> {
    let HostKey::Address { cloud, ip } = &host.key else {
        let why = format!("{} identifies hosts by address only", dialect.name());
        losses.push(Loss::new(subject, format!("host {}", host.key), why));
        return None;
    };
    let mut value = json!({"ip": ip.to_string(), "bk_cloud_id": cloud});
    match (dialect, host.supplier) {
        // Required there; 0 is its default.
        (Dialect::GseV1, supplier) => value["bk_supplier_id"] = json!(supplier.unwrap_or(0)),
        (_, Some(_)) => losses.push(Loss::new(
            subject,
            format!("bk_supplier_id of {}", host.key),
            format!("{} does not support it", dialect.name()),
        )),
        (_, None) => {}
    }
    if host.agent_id.is_some() {
        losses.push(Loss::new(
            subject,
            format!("bk_agent_id of {}", host.key),
            format!("{} does not support it", dialect.name()),
        ));
    }
    Some(value)
}

/// A map of set fields.
struct Fields(Map<String, Value>);

impl Fields {
    fn new() -> Fields {
        Fields(Map::new())
    }

    fn put(mut self, name: &str, value: Option<impl Into<Value>>) -> Fields {
        if let Some(value) = value {
            self.0.insert(name.to_owned(), value.into());
        }
        self
    }

    fn section(self, name: &str, section: Fields) -> Fields {
        let value = (!section.0.is_empty()).then_some(Value::Object(section.0));
        self.put(name, value)
    }
}

/// A spec as the calls of a dialect carry it: the set fields that the dialect supports.
pub fn spec_body(spec: &Spec, dialect: Dialect) -> Value {
    let Spec {
        labels: _,
        identity,
        control,
        resource,
        monitor,
        report_id,
        configmap,
        env,
        job,
        health,
        restart,
        log,
        limits,
        env_file,
        sandbox,
        hooks,
    } = spec;
    let supports = |field: Field| dialect.supports(field);
    let env: Map<String, Value> = env.iter().map(|(name, value)| (name.clone(), env_value(value))).collect();
    let policy = match dialect {
        Dialect::GseV1 | Dialect::Abide => "monitor_policy",
        Dialect::GseV2 | Dialect::GseApigw | Dialect::Job => "alive_monitor_policy",
    };
    let all = Fields::new()
        .section("identity", identity_section(identity))
        .put("control", Some(Value::Object(control_section(control, dialect).0)))
        .section("resource", if supports(Field::Cpu) { resource_section(resource) } else { Fields::new() })
        .section(policy, monitor_section(monitor, dialect))
        .section("warn_report_policy", Fields::new().put("report_id", *report_id))
        .put("configmap", (!configmap.is_empty()).then(|| config_files(configmap)))
        .section("env", if supports(Field::Env) { Fields(env) } else { Fields::new() })
        .section("job", if supports(Field::CycleTime) { job_section(job) } else { Fields::new() })
        .put("health", own_section(health, supports(Field::Health)))
        .put("restart", own_section(restart, supports(Field::Restart)))
        .put("log", own_section(log, supports(Field::Log)))
        .put("limits", own_section(limits, supports(Field::Limits)))
        .put("env_file", env_file.clone().filter(|_| supports(Field::EnvFile)))
        .put("sandbox", own_section(sandbox, supports(Field::Sandbox)))
        .put("hooks", own_section(hooks, supports(Field::Hooks)));
    Value::Object(all.0)
}

fn identity_section(identity: &Identity) -> Fields {
    let required = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    Fields::new()
        // Only the documents' examples use this name, and only here.
        .put("index_key", identity.value_key.clone())
        .put("proc_name", required(&identity.proc_name))
        .put("setup_path", required(&identity.setup_path))
        .put("pid_path", required(&identity.pid_path))
        .put("config_path", identity.config_path.clone())
        .put("log_path", identity.log_path.clone())
        .put("user", identity.user.clone())
}

fn control_section(control: &Control, dialect: Dialect) -> Fields {
    let supports = |field: Field| dialect.supports(field);
    Fields::new()
        .put("start_cmd", control.start_cmd.clone())
        .put("stop_cmd", control.stop_cmd.clone())
        .put("restart_cmd", control.restart_cmd.clone())
        .put("reload_cmd", control.reload_cmd.clone())
        .put("kill_cmd", control.kill_cmd.clone())
        .put("version_cmd", control.version_cmd.clone())
        .put("health_cmd", control.health_cmd.clone())
        .put("start_mode", control.start_mode.filter(|_| supports(Field::StartMode)).map(|mode| json!(mode)))
        .put("stop_signal", control.stop_signal.clone().filter(|_| supports(Field::StopSignal)))
        .put("stop_timeout", control.stop_timeout.filter(|_| supports(Field::StopTimeout)))
        .put("reload_signal", control.reload_signal.clone().filter(|_| supports(Field::ReloadSignal)))
}

fn resource_section(resource: &Resource) -> Fields {
    Fields::new()
        .put("cpu", resource.cpu.map(f64::from))
        .put("mem", resource.mem.map(f64::from))
        .put("fd", resource.fd)
        .put("disk", resource.disk)
        .put("net", resource.net)
}

fn monitor_section(monitor: &Monitor, dialect: Dialect) -> Fields {
    let supports = |field: Field| dialect.supports(field);
    Fields::new()
        .put("auto_type", Some(i64::from(monitor.auto_type)))
        .put("start_check_secs", monitor.start_check_secs)
        .put("stop_check_secs", monitor.stop_check_secs)
        .put("start_retries", monitor.start_retries)
        .put("start_interval", monitor.start_interval)
        .put("crontab_rule", monitor.crontab_rule.clone())
        .put("crontab_zone", monitor.crontab_zone.clone().filter(|_| supports(Field::CrontabZone)))
        .put("op_timeout", monitor.op_timeout.filter(|_| supports(Field::OpTimeout)))
}

fn job_section(job: &Job) -> Fields {
    Fields::new()
        .put("proc_owner", job.proc_owner.clone())
        .put("func_id", job.func_id.clone())
        .put("instance_id", job.instance_id.clone())
        .put("instance_num", job.instance_num)
        .put("cycle_time", job.cycle_time)
        .put("start_check_begin_time", job.start_check_begin_time)
        .put("start_check_end_time", job.start_check_end_time)
}

fn config_files(files: &[ConfigFile]) -> Vec<Value> {
    let object = |file: &ConfigFile| {
        Value::Object(Fields::new().put("path", file.path.clone()).put("md5", file.md5.clone()).0)
    };
    files.iter().map(object).collect()
}

/// A section that only Abide has, in its stored form.
fn own_section(section: &(impl SpecSection + Serialize), supported: bool) -> Option<Value> {
    (supported && section.is_set()).then(|| json!(section))
}

fn env_value(value: &EnvValue) -> Value {
    match value {
        EnvValue::Text(text) => json!(text),
        EnvValue::File(file) => json!({"file": file}),
        EnvValue::Exec(argv) => json!({"exec": argv}),
        EnvValue::Secret(secret) => json!({"value": secret.expose(), "secret": true}),
        EnvValue::Digest(digest) => json!({"digest": digest, "secret": true}),
    }
}
