//! Template variables: `${instance} ${host.ip} ${host.cloud} ${name} ${namespace}` in paths, commands, env and value_key.
//!
//! `$${` escapes `${`, for variables of the shell. Any other `$` is left as it is.

use super::document::{
    ConfigEntry, EnvEntry, EnvSource, HealthValue, HookValue, SpecEntry, Text, TextOrNumber,
};
use crate::model::{ConfigFile, EnvValue, HostKey, InstanceKey, Secret, Spec};

/// Names of the variables.
pub const NAMES: [&str; 5] = ["instance", "host.ip", "host.cloud", "name", "namespace"];

/// Values of the variables for one instance.
pub struct InstanceVariables<'a> {
    pub key: &'a InstanceKey,
    pub instance: Option<u32>,
}

/// One part of a template.
#[derive(Debug, PartialEq, Eq)]
enum TemplatePart<'a> {
    Text(&'a str),
    Variable(&'a str),
    /// `${` without its `}`.
    Unclosed,
}

fn template_parts(text: &str) -> impl Iterator<Item = TemplatePart<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        if let Some(escaped) = rest.strip_prefix("$${") {
            let open = &rest[1..3];
            rest = escaped;
            return Some(TemplatePart::Text(open));
        }
        if let Some(inner) = rest.strip_prefix("${") {
            let Some(end) = inner.find('}') else {
                rest = "";
                return Some(TemplatePart::Unclosed);
            };
            rest = &inner[end + 1..];
            return Some(TemplatePart::Variable(&inner[..end]));
        }
        let skip = usize::from(rest.starts_with('$'));
        let end = rest[skip..].find('$').map_or(rest.len(), |at| at + skip);
        let (text, after) = rest.split_at(end);
        rest = after;
        Some(TemplatePart::Text(text))
    })
}

/// The first template error in a text, as message and hint.
pub fn first_error(text: &str, numbered: bool) -> Option<(String, String)> {
    if !text.contains("${") {
        return None;
    }
    template_parts(text).find_map(|part| match part {
        TemplatePart::Text(_) => None,
        TemplatePart::Unclosed => Some((
            "\"${\" has no closing \"}\"".to_owned(),
            "write $${ for a variable of the shell".to_owned(),
        )),
        TemplatePart::Variable("instance") if !numbered => {
            Some(("${instance} needs `instances`".to_owned(), "add `instances: N` to the process".to_owned()))
        }
        TemplatePart::Variable(name) if NAMES.contains(&name) => None,
        TemplatePart::Variable(name) => {
            let name = super::node::shorten(name);
            let known = NAMES.map(|name| format!("${{{name}}}")).join(" ");
            Some((
                format!("unknown variable ${{{name}}}"),
                format!(
                    "known variables: {known}; write $${{{name}}} (or ${name}) for a variable of the shell"
                ),
            ))
        }
    })
}

/// Which variables a spec uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VariableUse {
    /// The spec has a variable or an escaped `$${`.
    pub any: bool,
    /// The spec uses `${host.…}`, so it differs per host.
    pub host: bool,
}

impl VariableUse {
    /// Records the variables of one text of the spec.
    pub fn scan(&mut self, text: &str) {
        if text.contains("${") {
            self.any = true;
            self.host |= text.contains("${host.");
        }
    }
}

/// The spec of one instance, with its variables replaced.
pub fn replace(spec: &Spec, variables: &InstanceVariables<'_>) -> Spec {
    let mut spec = spec.clone();
    each_text(&mut spec, |text| {
        if text.contains("${") {
            *text = substitute(text, variables);
        }
    });
    spec
}

fn substitute(text: &str, variables: &InstanceVariables<'_>) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for part in template_parts(text) {
        match part {
            TemplatePart::Text(text) => out.push_str(text),
            // `first_error` has rejected unclosed and unknown variables.
            TemplatePart::Unclosed => {}
            TemplatePart::Variable(name) => out.push_str(&value(name, variables)),
        }
    }
    out
}

fn value(name: &str, variables: &InstanceVariables<'_>) -> String {
    let host = &variables.key.host;
    match (name, host) {
        ("instance", _) => variables.instance.map(|n| n.to_string()).unwrap_or_default(),
        ("name", _) => variables.key.name.to_string(),
        ("namespace", _) => variables.key.namespace.to_string(),
        ("host.ip", HostKey::Address { ip, .. }) => ip.to_string(),
        ("host.cloud", HostKey::Address { cloud, .. }) => cloud.to_string(),
        // Host expansion rejects `${host.…}` on a host without an address.
        _ => String::new(),
    }
}

/// Escapes a text that is not a template, so that it has no variables.
pub fn escape(text: &str) -> String {
    text.replace("${", "$${")
}

/// Reverses [`escape`] in all texts of a spec.
pub fn unescape(spec: &Spec) -> Spec {
    let mut spec = spec.clone();
    each_text(&mut spec, |text| *text = text.replace("$${", "${"));
    spec
}

/// Every text of a spec in which variables are replaced.
fn each_text(spec: &mut Spec, mut with: impl FnMut(&mut String)) {
    let identity = &mut spec.identity;
    with(&mut identity.setup_path);
    with(&mut identity.pid_path);
    let control = &mut spec.control;
    let optional = [
        &mut identity.config_path,
        &mut identity.log_path,
        &mut identity.value_key,
        &mut control.start_cmd,
        &mut control.stop_cmd,
        &mut control.restart_cmd,
        &mut control.reload_cmd,
        &mut control.kill_cmd,
        &mut control.version_cmd,
        &mut control.health_cmd,
        &mut spec.health.cmd,
        &mut spec.health.http,
        &mut spec.health.tcp,
        &mut spec.env_file,
    ];
    optional.into_iter().flatten().for_each(&mut with);
    spec.sandbox.read_only_paths.iter_mut().for_each(&mut with);
    spec.hooks.before_start.iter_mut().for_each(|hook| with(&mut hook.run));
    spec.configmap.iter_mut().filter_map(|ConfigFile { path, .. }| path.as_mut()).for_each(&mut with);
    for value in spec.env.values_mut() {
        match value {
            EnvValue::Text(text) | EnvValue::File(text) => with(text),
            EnvValue::Exec(argv) => argv.iter_mut().for_each(&mut with),
            EnvValue::Secret(secret) => {
                let mut text = secret.expose().to_owned();
                with(&mut text);
                *secret = Secret::new(text);
            }
            EnvValue::Digest(_) => {}
        }
    }
}

/// Escapes every text of a spec in which variables are replaced.
pub fn escape_spec(spec: &mut SpecEntry) {
    let text = |text: &mut Text| text.0 = escape(&text.0);
    let loose = |value: &mut TextOrNumber| {
        if let TextOrNumber::Text(text) = value {
            *text = escape(text);
        }
    };
    if let Some(i) = &mut spec.identity {
        let paths =
            [&mut i.setup_path, &mut i.pid_path, &mut i.config_path, &mut i.log_path, &mut i.value_key];
        paths.into_iter().flatten().for_each(text);
    }
    if let Some(c) = &mut spec.control {
        let commands = [
            &mut c.start_cmd,
            &mut c.stop_cmd,
            &mut c.restart_cmd,
            &mut c.reload_cmd,
            &mut c.kill_cmd,
            &mut c.version_cmd,
            &mut c.health_cmd,
        ];
        commands.into_iter().flatten().for_each(text);
    }
    match spec.health.as_deref_mut() {
        Some(HealthValue::Probe(probe)) => *probe = escape(probe),
        Some(HealthValue::Check(check)) => {
            [&mut check.cmd, &mut check.http, &mut check.tcp].into_iter().flatten().for_each(text);
        }
        None => {}
    }
    spec.env_file.iter_mut().for_each(text);
    spec.sandbox.iter_mut().flat_map(|sandbox| sandbox.read_only_paths.iter_mut().flatten()).for_each(text);
    match spec.hooks.as_mut().and_then(|hooks| hooks.before_start.as_mut()) {
        Some(HookValue::Run(run)) => *run = escape(run),
        Some(HookValue::Map(hook)) => hook.run.iter_mut().for_each(text),
        None => {}
    }
    for ConfigEntry { path, .. } in spec.configmap.iter_mut().flatten() {
        path.iter_mut().for_each(text);
    }
    for value in spec.env.iter_mut().flat_map(|env| env.0.values_mut()) {
        match value {
            EnvEntry::Plain(value) => loose(value),
            EnvEntry::Source(EnvSource { file, value, .. }) => {
                file.iter_mut().for_each(text);
                value.iter_mut().for_each(loose);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(text: &str) -> String {
        let key = "3:10.0.0.7:web:api_2".parse().unwrap();
        substitute(text, &InstanceVariables { key: &key, instance: Some(2) })
    }

    #[test]
    fn variables_are_replaced_and_the_shell_keeps_its_own() {
        assert_eq!(on("/run/${namespace}/${name}.${instance}.pid"), "/run/web/api_2.2.pid");
        assert_eq!(on("${host.cloud}:${host.ip}"), "3:10.0.0.7");
        assert_eq!(on("echo $HOME $$ $(date) $${PATH} $"), "echo $HOME $$ $(date) ${PATH} $");
        assert_eq!(on("$$${name}"), "$${name}");
    }

    #[test]
    fn unknown_variables_are_named() {
        let (message, hint) = first_error("cat ${HOME}/x", false).unwrap();
        assert_eq!(message, "unknown variable ${HOME}");
        assert!(hint.ends_with("write $${HOME} (or $HOME) for a variable of the shell"), "{hint}");
        assert_eq!(first_error("a ${instance}", true), None);
        assert_eq!(first_error("a ${instance}", false).unwrap().0, "${instance} needs `instances`");
        assert!(first_error("a ${name", false).is_some());
        assert_eq!(first_error("echo $${HOME} $HOME", false), None);
    }

    #[test]
    fn escaping_is_undone_by_replacing() {
        for text in ["${JAVA_HOME}/bin/java", "$${X}", "a$b", "$$${", "$"] {
            assert_eq!(on(&escape(text)), text);
        }
    }
}
