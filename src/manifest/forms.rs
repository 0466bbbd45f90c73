//! Forms of a process: conversion between the long and the short form, without a change of its meaning.
//!
//! Both directions keep templates, references and the order of lists. A field that a Defaults document sets is kept where
//! leaving it out would inherit that value.

use std::net::IpAddr;

use super::check::ValueChecker;
use super::check::short_form::{DEFAULT_DIR, NUMBERED_KEY, ShortForm, fold};
use super::document::{
    ControlEntry, Document, HealthEntry, HealthValue, HostEntry, HostValue, IdentityEntry, MonitorEntry,
    Overlay, SpecEntry, Text,
};
use super::grammar::{API_VERSION, PROCESS_TYPES};
use super::variables::escape;
use crate::model::StartMode;

/// The fields that the Defaults among these documents set.
pub fn inherited(documents: &[Document]) -> SpecEntry {
    let mut all = SpecEntry::default();
    let defaults = documents.iter().filter(|document| document.kind.as_deref() == Some("Defaults"));
    defaults.filter_map(|document| document.spec.as_deref()).for_each(|spec| all.fill_from(spec));
    all
}

fn is_process(document: &Document) -> bool {
    matches!(document.kind.as_deref(), Some("Process")) || document.kind.is_none() && document.run.is_some()
}

/// The long form: every field in `spec`, and every value that the short form leaves out.
pub fn long(mut document: Document, inherited: &SpecEntry) -> Document {
    document.hosts = document.hosts.map(|hosts| hosts.into_iter().map(long_host).collect());
    if !is_process(&document) {
        return document;
    }
    document.api_version.get_or_insert_with(|| API_VERSION.into());
    document.kind.get_or_insert_with(|| "Process".into());
    let is_short = document.run.is_some();
    let short = ShortForm::take(&mut document);
    // The caller has checked the document: no field is set in both forms.
    let mut spec = fold(*document.spec.take().unwrap_or_default(), short, &mut ValueChecker::default());
    if is_short {
        write_left_out(&document, &mut spec, inherited);
    }
    document.spec = Some(Box::new(spec));
    document
}

/// Writes what [`complete`](super::check::short_form::complete) fills in.
fn write_left_out(document: &Document, spec: &mut SpecEntry, inherited: &SpecEntry) {
    let above = inherited.identity.clone().unwrap_or_default();
    let identity = spec.identity.get_or_insert_default();
    let name = document.meta.as_ref().and_then(|meta| meta.name.clone());
    let is_partial = [(&identity.proc_name, &above.proc_name), (&identity.setup_path, &above.setup_path)]
        .into_iter()
        .any(|(own, above)| !is_set(own) && (own.is_some() || !is_set(above)));
    if !is_set(&identity.proc_name) && !is_set(&above.proc_name) {
        identity.proc_name = name;
    }
    if !is_set(&identity.setup_path) && !is_set(&above.setup_path) {
        identity.setup_path = Some(DEFAULT_DIR.into());
    }
    if (is_partial || document.instances.is_some())
        && !is_set(&identity.value_key)
        && !is_set(&above.value_key)
    {
        identity.value_key = own_key(document).map(Text);
    }
}

/// The value_key of a process that leaves it out.
fn own_key(document: &Document) -> Option<String> {
    let meta = document.meta.as_ref()?;
    Some(match document.instances {
        Some(_) => NUMBERED_KEY.to_owned(),
        None => escape(&format!("{}/{}", &**meta.namespace.as_ref()?, &**meta.name.as_ref()?)),
    })
}

/// The short form: spec fields at the top level, without values that it may leave out.
pub fn short(document: Document, inherited: &SpecEntry) -> Document {
    let mut document = long(document, inherited);
    document.hosts = document.hosts.map(|hosts| hosts.into_iter().map(short_host).collect());
    if !is_process(&document) {
        return document;
    }
    let mut spec = *document.spec.take().unwrap_or_default();
    let (above, above_control) =
        (inherited.identity.clone().unwrap_or_default(), inherited.control.clone().unwrap_or_default());
    let mut control = spec.control.take().unwrap_or_default();
    let is_known_mode = control.start_mode.is_some() || above_control.start_mode.is_none();
    if is_set(&control.start_cmd) && is_known_mode {
        shorten_command(&mut document, &mut control);
        let mut identity = spec.identity.take().unwrap_or_default();
        // Without a key of its own, an identity that lacks its directory would get one.
        let has_key = is_set(&identity.value_key) || is_set(&above.value_key);
        leave_out(&document, &mut identity, &above);
        let keeps_dir = is_set(&above.setup_path) || !has_key;
        document.dir = identity.setup_path.take().filter(|path| **path != *DEFAULT_DIR || keeps_dir);
        document.user = identity.user.take();
        spec.identity = non_default(identity);
    }
    document.stop_signal = control.stop_signal.take();
    document.stop_timeout = control.stop_timeout.take();
    document.reload_signal = control.reload_signal.take();
    spec.control = non_default(control);
    let mut monitor = spec.monitor_policy.take().unwrap_or_default();
    shorten_type(&mut document, &mut monitor, inherited);
    spec.monitor_policy = non_default(monitor);
    document.env = spec.env.take();
    document.health = spec.health.take().map(|health| Box::new(short_health(*health)));
    document.restart = spec.restart.take();
    document.log = spec.log.take();
    document.limits = spec.limits.take();
    document.env_file = spec.env_file.take();
    document.sandbox = spec.sandbox.take();
    document.hooks = spec.hooks.take();
    document.spec = non_default(spec).map(Box::new);
    if document.run.is_some() {
        document.api_version = None;
    }
    if document.run.is_none() && document.spec.is_none() {
        document.spec = Some(Box::default());
    }
    document
}

/// Moves the command to the top level. `run` implies the mode foreground.
fn shorten_command(document: &mut Document, control: &mut ControlEntry) {
    document.run = control.start_cmd.take();
    let mode = control.start_mode.take().unwrap_or_else(|| StartMode::Daemon.word().into());
    document.mode = (*mode != *StartMode::Foreground.word()).then_some(mode);
}

/// Removes the values of an identity that are filled in again. The directory stays: it is written as `dir`.
fn leave_out(document: &Document, identity: &mut IdentityEntry, above: &IdentityEntry) {
    let Some(key) = own_key(document) else { return };
    if identity.value_key.as_deref() != Some(&*key) || is_set(&above.value_key) {
        return;
    }
    let name = document.meta.as_ref().and_then(|meta| meta.name.as_deref());
    let is_own_name = identity.proc_name.as_deref() == name && !is_set(&above.proc_name);
    let is_own_dir = identity.setup_path.as_deref() == Some(DEFAULT_DIR) && !is_set(&above.setup_path);
    if is_own_name {
        identity.proc_name = None;
    }
    if is_own_name || is_own_dir || document.instances.is_some() {
        identity.value_key = None;
    }
}

fn shorten_type(document: &mut Document, monitor: &mut MonitorEntry, inherited: &SpecEntry) {
    let above = inherited.monitor_policy.clone().unwrap_or_default();
    document.zone = monitor.crontab_zone.take();
    let [schedule, service, ..] = PROCESS_TYPES else { return };
    let word = monitor.auto_type.and_then(|code| PROCESS_TYPES.get(usize::try_from(code).ok()?));
    let Some(word) = word else { return };
    monitor.auto_type = None;
    let is_scheduled = word == schedule;
    if is_scheduled {
        document.schedule = monitor.crontab_rule.take();
    }
    let is_implied = match is_scheduled {
        true => is_set(&document.schedule),
        false => word == service && above.auto_type.is_none(),
    };
    document.process_type = (!is_implied).then(|| (*word).into());
}

/// A health check with one probe and nothing else, as text.
fn short_health(health: HealthValue) -> HealthValue {
    let HealthValue::Check(check) = &health else { return health };
    let HealthEntry { cmd, http, tcp, start_period, interval, timeout, retries } = check;
    if start_period.is_some() || interval.is_some() || timeout.is_some() || retries.is_some() {
        return health;
    }
    let is_url = |text: &str| ["http://", "https://", "tcp://"].iter().any(|scheme| text.starts_with(scheme));
    match (cmd, http, tcp) {
        (Some(cmd), None, None) if !is_url(cmd) && !cmd.is_empty() => HealthValue::Probe(cmd.to_string()),
        (None, Some(url), None) if url.starts_with("http://") => HealthValue::Probe(url.to_string()),
        (None, None, Some(address)) if !address.is_empty() && !address.ends_with('/') => {
            HealthValue::Probe(format!("tcp://{}", &**address))
        }
        _ => health,
    }
}

fn long_host(host: HostValue) -> HostValue {
    let HostValue::Address(text) = &host else { return host };
    let parsed = super::check::parse_address(text);
    match parsed.and_then(|(cloud, ip)| Some((i64::try_from(cloud).ok()?, ip))) {
        Some((cloud, ip)) => HostValue::Entry(HostEntry {
            ip: Some(Text(ip.to_string())),
            bk_cloud_id: Some(cloud),
            ..HostEntry::default()
        }),
        None => host,
    }
}

fn short_host(host: HostValue) -> HostValue {
    let HostValue::Entry(entry) = &host else { return host };
    let only_address = HostEntry { ip: None, bk_cloud_id: None, ..entry.clone() } == HostEntry::default();
    let ip = entry.ip.as_deref().and_then(|ip| ip.parse::<IpAddr>().ok());
    match (only_address, ip, entry.bk_cloud_id) {
        (true, Some(ip), Some(0)) => HostValue::Address(ip.to_string()),
        (true, Some(IpAddr::V4(ip)), Some(cloud)) if cloud > 0 => HostValue::Address(format!("{cloud}:{ip}")),
        (true, Some(IpAddr::V6(ip)), Some(cloud)) if cloud > 0 => {
            HostValue::Address(format!("{cloud}:[{ip}]"))
        }
        _ => host,
    }
}

fn is_set(text: &Option<Text>) -> bool {
    text.as_ref().is_some_and(|text| !text.is_empty())
}

fn non_default<T: Default + PartialEq>(value: T) -> Option<T> {
    (value != T::default()).then_some(value)
}
