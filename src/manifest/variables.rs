//! Template variables: `${NAME}` in paths, commands, env, health and value_key.
//!
//! Built-in names are `instance`, `host.ip`, `host.cloud`, `name` and `namespace`; users define others
//! ([`variable_scopes`](super::variable_scopes)).
//!
//! `${NAME:-TEXT}` has a default. A variable may use others: expansion is bounded in text and in steps. `$${` escapes
//! `${`, for variables of the shell. Any other `$` is left as it is.

use super::document::{
    ConfigEntry, EnvEntry, EnvSource, HealthValue, HookValue, SpecEntry, Text, TextOrNumber,
};
use super::problem::FieldPath;
use super::variable_scopes::VarScope;
use crate::model::{ConfigFile, EnvValue, HostKey, InstanceKey, Secret, Spec};

/// Names of the variables.
pub const NAMES: [&str; 5] = ["instance", "host.ip", "host.cloud", "name", "namespace"];

/// Values of the variables for one instance.
pub struct InstanceVariables<'a> {
    pub key: &'a InstanceKey,
    pub instance: Option<u32>,
    pub scope: &'a VarScope,
}

/// Reason why a text cannot be expanded.
#[derive(Debug, PartialEq, Eq)]
pub enum ExpandError {
    Unknown(String),
    /// The variables of the cycle, the first one twice.
    Cycle(Vec<String>),
    TooLarge,
}

/// Maximum bytes of an expanded text: Linux's limit for one argument.
const MAX_BYTES: usize = 128 << 10;
/// Maximum variables that one text may expand, with those inside of others.
const MAX_STEPS: usize = 10_000;

/// Whether a name can be a variable of a user.
pub fn is_identifier(name: &str) -> bool {
    name.len() <= 128
        && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Splits `NAME:-DEFAULT`.
fn split_default(text: &str) -> (&str, Option<&str>) {
    text.split_once(":-").map_or((text, None), |(name, default)| (name, Some(default)))
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

/// The first template error in a text, as message and hint. `named`: called for each variable of a user, and whether it has
/// a default.
pub fn first_error(
    text: &str,
    numbered: bool,
    named: &mut dyn FnMut(&str, bool),
) -> Option<(String, String)> {
    if !text.contains("${") {
        return None;
    }
    template_parts(text).find_map(|part| match part {
        TemplatePart::Text(_) => None,
        TemplatePart::Unclosed => Some((
            "\"${\" has no closing \"}\"".to_owned(),
            "write $${ for a variable of the shell".to_owned(),
        )),
        TemplatePart::Variable(inner) => {
            let (name, default) = split_default(inner);
            if default.is_some_and(|default| default.contains("${")) {
                let message =
                    format!("the default of ${{{}}} contains a variable", super::node::shorten(name));
                return Some((message, "define a variable with that value instead".to_owned()));
            }
            match name {
                "instance" if !numbered && default.is_none() => Some((
                    "${instance} needs `instances`".to_owned(),
                    "add `instances: N` to the process".to_owned(),
                )),
                name if NAMES.contains(&name) => None,
                name if is_identifier(name) => {
                    named(name, default.is_some());
                    None
                }
                _ => Some(invalid(inner)),
            }
        }
    })
}

fn invalid(name: &str) -> (String, String) {
    let name = super::node::shorten(name);
    let known = NAMES.map(|name| format!("${{{name}}}")).join(" ");
    (
        format!("unknown variable ${{{name}}}"),
        format!("known variables: {known}; write $${{{name}}} (or ${name}) for a variable of the shell"),
    )
}

/// Variables that a spec uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VariableUse {
    /// The spec has a variable or an escaped `$${`.
    pub any: bool,
    /// The spec uses `${host.…}`, so it differs per host.
    pub host: bool,
    /// Variables that users define.
    pub named: Vec<NamedVariable>,
}

/// A variable of a user in a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedVariable {
    pub path: FieldPath,
    pub name: String,
    pub has_default: bool,
    /// The field is a path that begins with the variable.
    pub begins_path: bool,
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

/// Whether a path is absolute on Unix or Windows.
pub fn is_absolute(path: &str) -> bool {
    let drive =
        |b: &[u8]| b.len() > 2 && b[0].is_ascii_alphabetic() && b[1] == b':' && matches!(b[2], b'\\' | b'/');
    path.starts_with('/') || path.starts_with("\\\\") || drive(path.as_bytes())
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

/// A text with its variables replaced.
pub fn expand(text: &str, variables: &InstanceVariables<'_>) -> Result<String, ExpandError> {
    let mut expansion =
        Expansion { variables, out: String::with_capacity(text.len() + 16), inside: Vec::new(), steps: 0 };
    expansion.add(text)?;
    Ok(expansion.out)
}

/// An expansion in progress.
struct Expansion<'a> {
    variables: &'a InstanceVariables<'a>,
    out: String,
    /// Variables whose values are being expanded.
    inside: Vec<String>,
    steps: usize,
}

impl Expansion<'_> {
    fn add(&mut self, text: &str) -> Result<(), ExpandError> {
        for part in template_parts(text) {
            match part {
                TemplatePart::Text(text) => self.out.push_str(text),
                // `first_error` has rejected unclosed variables.
                TemplatePart::Unclosed => {}
                TemplatePart::Variable(inner) => self.add_variable(inner)?,
            }
            if self.out.len() > MAX_BYTES {
                return Err(ExpandError::TooLarge);
            }
        }
        Ok(())
    }

    fn add_variable(&mut self, inner: &str) -> Result<(), ExpandError> {
        let (name, default) = split_default(inner);
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(ExpandError::TooLarge);
        }
        if NAMES.contains(&name) {
            let value = value(name, self.variables);
            self.out.push_str(if value.is_empty() { default.unwrap_or_default() } else { &value });
            return Ok(());
        }
        let scope = self.variables.scope;
        match (scope.get(&self.variables.key.host, name), default) {
            (None, Some(default)) => self.out.push_str(default),
            (None, None) => return Err(ExpandError::Unknown(name.to_owned())),
            (Some(value), _) => {
                if let Some(at) = self.inside.iter().position(|known| known == name) {
                    let mut circle = self.inside.split_off(at);
                    circle.push(name.to_owned());
                    return Err(ExpandError::Cycle(circle));
                }
                self.inside.push(name.to_owned());
                self.add(value)?;
                self.inside.pop();
            }
        }
        Ok(())
    }
}

/// Like [`expand`], for a text that was checked: an invalid document declares no instances.
fn substitute(text: &str, variables: &InstanceVariables<'_>) -> String {
    expand(text, variables).unwrap_or_default()
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
    spec.hooks.iter_mut().for_each(|hook| with(&mut hook.run));
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
    for hook in spec.hooks.iter_mut().flat_map(|hooks| hooks.iter_mut()) {
        match hook {
            HookValue::Run(run) => *run = escape(run),
            HookValue::Map(hook) => hook.run.iter_mut().for_each(text),
        }
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
        substitute(text, &InstanceVariables { key: &key, instance: Some(2), scope: &VarScope::default() })
    }

    #[test]
    fn variables_are_replaced_and_the_shell_keeps_its_own() {
        assert_eq!(on("/run/${namespace}/${name}.${instance}.pid"), "/run/web/api_2.2.pid");
        assert_eq!(on("${host.cloud}:${host.ip}"), "3:10.0.0.7");
        assert_eq!(on("echo $HOME $$ $(date) $${PATH} $"), "echo $HOME $$ $(date) ${PATH} $");
        assert_eq!(on("$$${name}"), "$${name}");
    }

    #[test]
    fn errors_of_templates_are_named() {
        let first_error = |text: &str, numbered| {
            let mut named = Vec::new();
            let error = super::first_error(text, numbered, &mut |name, default| {
                named.push(format!("{name} {default}"))
            });
            error.map(|(message, _)| message).or((!named.is_empty()).then(|| named.join(", ")))
        };
        assert_eq!(first_error("cat ${HOME}/x ${B:-c}", false).as_deref(), Some("HOME false, B true"));
        assert_eq!(first_error("cat ${HOME%/}", false).as_deref(), Some("unknown variable ${HOME%/}"));
        assert_eq!(first_error("a ${instance}", true), None);
        assert_eq!(first_error("a ${instance}", false).as_deref(), Some("${instance} needs `instances`"));
        assert_eq!(first_error("a ${name", false).as_deref(), Some("\"${\" has no closing \"}\""));
        assert_eq!(
            first_error("${a:-${b}}", false).as_deref(),
            Some("the default of ${a} contains a variable")
        );
        assert_eq!(first_error("echo $${HOME} $HOME", false), None);
    }

    #[test]
    fn escaping_is_undone_by_replacing() {
        for text in ["${JAVA_HOME}/bin/java", "$${X}", "a$b", "$$${", "$"] {
            assert_eq!(on(&escape(text)), text);
        }
    }
}
