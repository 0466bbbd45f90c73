//! YAML printer for [`Document`]: readable output that all YAML parsers read alike.
//!
//! The YAML crate's writer leaves `no` and `1e3` unquoted, which YAML 1.1 parsers read as other types. This printer quotes
//! every ambiguous text. Small maps in lists are printed on one line.

mod supervision;

use serde_yaml::Value;

use super::document::{
    ConfigEntry, ControlEntry, Document, EnvEntry, EnvSource, HostEntry, HostValue, IdentityEntry, JobEntry,
    Map, Meta, MonitorEntry, Real, ResourceEntry, SpecEntry, Text, TextOrNumber, WarnEntry,
};
use super::node::{Kind, resolve};
use super::variables::escape;
use crate::model::{
    Control, EnvValue, Host, HostKey, Identity, Job, Monitor, ProcessKey, Resource, Spec, State,
};

/// Prints documents as one file.
pub fn yaml(documents: &[Document]) -> String {
    documents.iter().map(document).collect::<Vec<_>>().join("---\n")
}

fn document(document: &Document) -> String {
    let mut out = String::new();
    match serde_yaml::to_value(document) {
        Ok(Value::Mapping(map)) if !map.is_empty() => block(&Value::Mapping(map), 0, &mut out),
        _ => out.push_str("{}\n"),
    }
    out
}

/// Converts a process of the model to a document. `${` in its texts is literal, so it is escaped.
pub fn process(key: &ProcessKey, hosts: &[Host], state: State, spec: &Spec) -> Document {
    Document {
        api_version: Some("abide/v1".into()),
        kind: Some("Process".into()),
        meta: Some(Meta {
            namespace: Some(key.namespace.as_str().into()),
            name: Some(key.name.as_str().into()),
            labels: some_map(
                spec.labels.iter().map(|(name, value)| (name.clone(), TextOrNumber::Text(value.clone()))),
            ),
        }),
        hosts: Some(hosts.iter().map(host_value).collect()),
        state: (state != State::Running).then(|| state.word().into()),
        spec: Some(Box::new(spec_entry(spec))),
        ..Document::default()
    }
}

/// An entry of `hosts`.
pub fn host_value(one: &Host) -> HostValue {
    HostValue::Entry(host(one))
}

fn host(host: &Host) -> HostEntry {
    let (ip, bk_cloud_id) = match &host.key {
        HostKey::Address { cloud, ip } => (Some(Text(ip.to_string())), i64::try_from(*cloud).ok()),
        HostKey::Agent(_) => (None, None),
    };
    HostEntry {
        ip,
        bk_cloud_id,
        bk_supplier_id: host.supplier.and_then(|id| i64::try_from(id).ok()),
        bk_agent_id: host.agent().map(|id| id.as_str().into()),
        ..HostEntry::default()
    }
}

fn spec_entry(spec: &Spec) -> SpecEntry {
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
    let files: Vec<ConfigEntry> = configmap
        .iter()
        .map(|file| ConfigEntry { path: template(&file.path), md5: plain(&file.md5) })
        .collect();
    SpecEntry {
        identity: Some(identity_entry(identity)),
        control: non_default(control_entry(control)),
        resource: non_default(resource_entry(resource)),
        monitor_policy: Some(monitor_entry(monitor)),
        warn_report_policy: report_id.map(|id| WarnEntry { report_id: Some(id) }),
        configmap: (!files.is_empty()).then_some(files),
        env: some_map(env.iter().map(|(name, value)| (name.clone(), env_entry(value)))),
        job: non_default(job_entry(job)),
        health: supervision::health(health).map(Box::new),
        restart: supervision::restart(restart).map(Box::new),
        log: non_default(supervision::log(log)).map(Box::new),
        limits: non_default(supervision::limits(limits)).map(Box::new),
        env_file: template(env_file),
        sandbox: non_default(supervision::sandbox(sandbox)).map(Box::new),
        hooks: non_default(supervision::hooks(hooks)).map(Box::new),
    }
}

fn plain(text: &Option<String>) -> Option<Text> {
    text.clone().map(Text)
}

/// A text in which `${` is literal.
fn template(text: &Option<String>) -> Option<Text> {
    text.as_deref().map(|text| Text(escape(text)))
}

fn number(n: Option<u32>) -> Option<i64> {
    n.map(i64::from)
}

fn identity_entry(identity: &Identity) -> IdentityEntry {
    let required = |text: &str| (!text.is_empty()).then(|| Text(text.to_owned()));
    IdentityEntry {
        proc_name: required(&identity.proc_name),
        setup_path: required(&escape(&identity.setup_path)),
        pid_path: required(&escape(&identity.pid_path)),
        config_path: template(&identity.config_path),
        log_path: template(&identity.log_path),
        user: plain(&identity.user),
        value_key: template(&identity.value_key),
    }
}

fn control_entry(control: &Control) -> ControlEntry {
    ControlEntry {
        start_cmd: template(&control.start_cmd),
        stop_cmd: template(&control.stop_cmd),
        restart_cmd: template(&control.restart_cmd),
        reload_cmd: template(&control.reload_cmd),
        kill_cmd: template(&control.kill_cmd),
        version_cmd: template(&control.version_cmd),
        health_cmd: template(&control.health_cmd),
        start_mode: control.start_mode.map(|mode| mode.word().into()),
        stop_signal: plain(&control.stop_signal),
        stop_timeout: number(control.stop_timeout).map(TextOrNumber::Number),
        reload_signal: plain(&control.reload_signal),
    }
}

fn resource_entry(resource: &Resource) -> ResourceEntry {
    let large = |n: Option<u64>| n.and_then(|n| i64::try_from(n).ok());
    ResourceEntry {
        cpu: resource.cpu.map(|share| Real(share.get())),
        mem: resource.mem.map(|share| Real(share.get())),
        fd: large(resource.fd),
        disk: large(resource.disk),
        net: large(resource.net),
    }
}

fn monitor_entry(monitor: &Monitor) -> MonitorEntry {
    MonitorEntry {
        auto_type: Some(monitor.auto_type.into()),
        start_check_secs: number(monitor.start_check_secs),
        stop_check_secs: number(monitor.stop_check_secs),
        start_retries: number(monitor.start_retries),
        start_interval: number(monitor.start_interval),
        crontab_rule: plain(&monitor.crontab_rule),
        crontab_zone: plain(&monitor.crontab_zone),
        op_timeout: number(monitor.op_timeout),
    }
}

fn job_entry(job: &Job) -> JobEntry {
    JobEntry {
        proc_owner: plain(&job.proc_owner),
        func_id: plain(&job.func_id),
        instance_id: plain(&job.instance_id),
        instance_num: number(job.instance_num),
        cycle_time: number(job.cycle_time),
        start_check_begin_time: number(job.start_check_begin_time),
        start_check_end_time: number(job.start_check_end_time),
    }
}

fn env_entry(value: &EnvValue) -> EnvEntry {
    let text = |text: &str| TextOrNumber::Text(escape(text));
    match value {
        EnvValue::Text(value) => EnvEntry::Plain(text(value)),
        EnvValue::File(path) => {
            EnvEntry::Source(EnvSource { file: Some(Text(escape(path))), ..EnvSource::default() })
        }
        EnvValue::Secret(secret) => {
            let value = Some(text(secret.expose()));
            EnvEntry::Source(EnvSource { value, secret: Some(true), ..EnvSource::default() })
        }
        EnvValue::Exec(argv) => {
            let argv = argv.iter().map(|word| Text(escape(word))).collect();
            EnvEntry::Source(EnvSource { exec: Some(argv), ..EnvSource::default() })
        }
        // No value: the manifest is invalid until the user fills one in.
        EnvValue::Digest(_) => EnvEntry::Source(EnvSource { secret: Some(true), ..EnvSource::default() }),
    }
}

fn non_default<T: Default + PartialEq>(section: T) -> Option<T> {
    (section != T::default()).then_some(section)
}

fn some_map<V>(entries: impl Iterator<Item = (String, V)>) -> Option<Map<V>> {
    let map = entries.collect::<std::collections::BTreeMap<_, _>>();
    (!map.is_empty()).then_some(Map(map))
}

/// Prints a map or list in block style.
fn block(value: &Value, indent: usize, out: &mut String) {
    let pad = " ".repeat(indent);
    match value {
        Value::Mapping(map) => {
            for (key, value) in map {
                out.push_str(&pad);
                out.push_str(&flow(key));
                out.push(':');
                entry(value, indent + 2, out);
            }
        }
        Value::Sequence(items) => {
            for item in items {
                out.push_str(&pad);
                out.push('-');
                match item {
                    Value::Mapping(map) if !is_small(item) && !map.is_empty() => {
                        // The first key is on the line of the dash.
                        let mut inner = String::new();
                        block(item, indent + 2, &mut inner);
                        out.push(' ');
                        out.push_str(inner.trim_start());
                    }
                    _ => entry(item, indent + 2, out),
                }
            }
        }
        _ => {}
    }
}

/// Prints the value after `key:` or `-`.
fn entry(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Mapping(map) if !map.is_empty() && (indent <= 2 || !is_small(value)) => {
            out.push('\n');
            block(value, indent, out);
        }
        Value::Sequence(items) if !items.is_empty() && !items.iter().all(is_scalar) => {
            out.push('\n');
            block(value, indent, out);
        }
        Value::Mapping(_) | Value::Sequence(_) => {
            out.push(' ');
            out.push_str(&flow(value));
            out.push('\n');
        }
        _ => {
            out.push(' ');
            out.push_str(&scalar(value, indent));
            out.push('\n');
        }
    }
}

fn flow(value: &Value) -> String {
    match value {
        Value::Mapping(map) => {
            let entries: Vec<_> = map.iter().map(|(k, v)| format!("{}: {}", flow(k), flow(v))).collect();
            format!("{{{}}}", entries.join(", "))
        }
        Value::Sequence(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::String(text) if is_word(text) => text.clone(),
        Value::String(text) => quoted(text),
        other => scalar(other, 0),
    }
}

fn is_scalar(value: &Value) -> bool {
    !matches!(value, Value::Mapping(_) | Value::Sequence(_) | Value::Tagged(_))
}

/// A map of up to four short values, printed inline.
fn is_small(value: &Value) -> bool {
    match value {
        Value::Mapping(map) => map.len() <= 4 && map.values().all(is_scalar) && flow(value).len() <= 100,
        _ => false,
    }
}

fn scalar(value: &Value, indent: usize) -> String {
    match value {
        Value::String(text) if is_word(text) || is_phrase(text) => text.clone(),
        Value::String(text) => literal(text, indent).unwrap_or_else(|| quoted(text)),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::Null | Value::Sequence(_) | Value::Mapping(_) | Value::Tagged(_) => "null".to_owned(),
    }
}

/// Whether a text needs no quotes in any YAML parser.
fn is_word(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '/')
        || text.starts_with("./")
        || text.parse::<std::net::Ipv4Addr>().is_ok();
    let old_word = ["y", "n", "yes", "no", "on", "off"].iter().any(|word| text.eq_ignore_ascii_case(word));
    begins && !old_word && text.chars().all(fits) && matches!(resolve(text), Kind::Text(_))
}

/// Whether a text is plain words with single spaces, such as a simple command.
fn is_phrase(text: &str) -> bool {
    let word = |word: &str| {
        word.chars().all(|c| c.is_ascii_alphanumeric() || "_./-=".contains(c)) && !word.is_empty()
    };
    text.contains(' ')
        && text.starts_with(|c: char| c.is_ascii_alphabetic() || "./".contains(c))
        && text.split(' ').all(word)
}

/// Literal block for a multi-line text.
fn literal(text: &str, indent: usize) -> Option<String> {
    let body = text.strip_suffix('\n').unwrap_or(text);
    let plain = |line: &str| {
        !line.ends_with([' ', '\t'])
            && line.chars().all(|c| c.is_ascii_graphic() || c == ' ' || c.is_alphanumeric())
    };
    let fine = body.contains('\n')
        && !body.starts_with([' ', '\n', '\t'])
        && !body.ends_with('\n')
        && body.split('\n').all(plain);
    if !fine {
        return None;
    }
    let pad = " ".repeat(indent);
    let lines =
        body.split('\n').map(|line| if line.is_empty() { String::new() } else { format!("{pad}{line}") });
    let chomp = if text.ends_with('\n') { "|" } else { "|-" };
    Some(format!("{chomp}\n{}", lines.collect::<Vec<_>>().join("\n")))
}

/// Double-quoted text, with escapes for invisible characters.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_ascii_graphic() || c == ' ' || c.is_alphanumeric() => out.push(c),
            c if (c as u32) < 0x100 => out.push_str(&format!("\\x{:02x}", c as u32)),
            c if (c as u32) < 0x1_0000 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push_str(&format!("\\U{:08x}", c as u32)),
        }
    }
    out.push('"');
    out
}
