//! Effect table: the effect of a change to each field of a spec, and the digests of a spec per effect.
//!
//! Total by construction, twice: `Spec::values` takes the spec apart with no `..`, so a new field of the struct
//! does not compile until it is listed; [`base_effect`] matches every [`Field`], so a new name does not
//! compile until it is placed. `explain`, the difference of two specs and the digests all read this table.

use std::collections::BTreeMap;

use super::value::Env;
use super::{Effect, EnvValue, Field, OnChange, Spec, SpecRevision, StartMode, Value};

type EnvMap = BTreeMap<String, EnvValue>;

/// The effect of a field before a process's own `on_change`. The agent writes the output of a foreground process to
/// `log_path`; for a daemon the field is informational.
pub fn base_effect(field: Field, mode: StartMode) -> Effect {
    match field {
        Field::Labels
        | Field::StopCmd
        | Field::RestartCmd
        | Field::ReloadCmd
        | Field::KillCmd
        | Field::VersionCmd
        | Field::HealthCmd
        | Field::Cpu
        | Field::Mem
        | Field::Fd
        | Field::Disk
        | Field::Net
        | Field::StartCheckSecs
        | Field::StopCheckSecs
        | Field::StartRetries
        | Field::StartInterval
        | Field::CrontabRule
        | Field::OpTimeout
        | Field::ReportId
        | Field::ProcOwner
        | Field::FuncId
        | Field::InstanceId
        | Field::InstanceNum
        | Field::CycleTime
        | Field::StartCheckBeginTime
        | Field::StartCheckEndTime
        | Field::StopSignal
        | Field::StopTimeout
        | Field::ReloadSignal
        | Field::CrontabZone
        | Field::Health
        | Field::Restart
        | Field::Log
        | Field::Limits
        | Field::Hooks => Effect::Register,
        Field::Configmap | Field::ConfigPath => Effect::Reload,
        Field::StartCmd | Field::Env | Field::StartMode | Field::EnvFile | Field::Sandbox => Effect::Restart,
        Field::LogPath => match mode {
            StartMode::Daemon => Effect::Register,
            StartMode::Foreground => Effect::Restart,
        },
        Field::ProcName
        | Field::SetupPath
        | Field::PidPath
        | Field::User
        | Field::ValueKey
        | Field::AutoType => Effect::Replace,
    }
}

/// The effect of a field for one process: its `on_change` entry, else the base effect.
pub fn effect_of(field: Field, mode: StartMode, on_change: &OnChange) -> Effect {
    on_change.get(field).unwrap_or_else(|| base_effect(field, mode))
}

/// The table of one process: includes its `on_change`, its start mode and the fields that its target supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffectTable {
    fields: [Effect; Field::COUNT],
    /// Environment variables with an effect of their own.
    variables: BTreeMap<String, Effect>,
}

impl EffectTable {
    pub fn new(mode: StartMode, on_change: &OnChange) -> EffectTable {
        let mut effects = [Effect::None; Field::COUNT];
        for field in Field::ALL {
            effects[*field as usize] = effect_of(*field, mode, on_change);
        }
        EffectTable { fields: effects, variables: on_change.variables().clone() }
    }

    pub fn of(spec: &Spec, on_change: &OnChange) -> EffectTable {
        EffectTable::new(spec.control.start_mode.unwrap_or_default(), on_change)
    }

    /// Excludes the fields that a target does not support from every comparison.
    pub fn without(mut self, unsupported: impl Fn(Field) -> bool) -> EffectTable {
        for field in Field::ALL.iter().filter(|field| unsupported(**field)) {
            self.fields[*field as usize] = Effect::None;
        }
        if unsupported(Field::Env) {
            self.variables.clear();
        }
        self
    }

    pub fn effect(&self, field: Field) -> Effect {
        self.fields[field as usize]
    }

    /// The strongest effect among the environment variables that differ.
    pub fn effect_of_env(&self, old: &EnvMap, new: &EnvMap) -> Effect {
        let names = old.keys().chain(new.keys()).filter(|name| old.get(*name) != new.get(*name));
        let effect = |name: &String| self.variables.get(name).copied().unwrap_or(self.effect(Field::Env));
        names.map(effect).max().unwrap_or(Effect::None)
    }

    /// Whether a reload puts the field into effect.
    pub fn is_reloaded(&self, field: Field) -> bool {
        self.effect(field) == Effect::Reload
            || (field == Field::Env && self.variables.values().any(|effect| *effect == Effect::Reload))
    }

    /// The environment in parts: variables with an effect of their own, and the rest under the effect of `env`.
    fn env_parts(&self, env: &EnvMap) -> Vec<(Effect, String, EnvMap)> {
        let mut rest = env.clone();
        let mut parts = Vec::new();
        for (name, effect) in &self.variables {
            if let Some((name, value)) = rest.remove_entry(name) {
                parts.push((*effect, format!("{}.{name}", Field::Env.path()), EnvMap::from([(name, value)])));
            }
        }
        if !rest.is_empty() {
            parts.insert(0, (self.effect(Field::Env), Field::Env.path().to_owned(), rest));
        }
        parts
    }

    /// The digests of one spec. Fields with effect None are in none of them.
    pub fn revision(&self, spec: &Spec) -> SpecRevision {
        self.digests(spec).0
    }

    /// The digests, and a digest of all fields, which is unique per spec.
    pub(super) fn digests(&self, spec: &Spec) -> (SpecRevision, [u8; 16]) {
        // A documented default equals an unset field.
        let values = spec.values();
        let splits_env = !self.variables.is_empty();
        let env_parts = if splits_env { self.env_parts(&spec.env) } else { Vec::new() };
        let env_values: Vec<Value<'_>> = env_parts.iter().map(|(_, _, env)| Value::Env(Env(env))).collect();
        let mut set = Vec::with_capacity(values.len());
        for (field, value) in values.iter().filter(|(field, _)| spec.is_set(*field)) {
            match *field == Field::Env && splits_env {
                true => {
                    let parts = env_parts.iter().zip(&env_values);
                    set.extend(parts.map(|((effect, path, _), value)| (*effect, path.as_str(), value)));
                }
                false => set.push((self.effect(*field), field.path(), value)),
            }
        }
        // Serialized first: one hash over a few hundred bytes is much faster than many small updates.
        let mut text = Vec::with_capacity(1024);
        let mut whole = Vec::with_capacity(5 * blake3::OUT_LEN);
        let mut digest = |wanted: fn(Effect) -> bool| {
            text.clear();
            for (_, path, value) in set.iter().filter(|(effect, _, _)| wanted(*effect)) {
                put(&mut text, path);
                put_value(&mut text, value);
            }
            let hash = blake3::hash(&text);
            whole.extend_from_slice(hash.as_bytes());
            let [a, b, c, d, ..] = *hash.as_bytes();
            u32::from_be_bytes([a, b, c, d])
        };
        let revision = SpecRevision {
            register: digest(|effect| effect == Effect::Register),
            reload: digest(|effect| effect == Effect::Reload),
            restart: digest(|effect| effect == Effect::Restart),
            replace: digest(|effect| effect == Effect::Replace),
            run: digest(|effect| effect >= Effect::Reload),
        };
        let mut sum = [0; 16];
        sum.copy_from_slice(&blake3::hash(&whole).as_bytes()[..16]);
        (revision, sum)
    }
}

/// Length-prefixed, so that no two lists of texts have the same bytes.
fn put(to: &mut Vec<u8>, text: &str) {
    // The file size limit bounds every text.
    to.extend_from_slice(&(text.len() as u32).to_le_bytes());
    to.extend_from_slice(text.as_bytes());
}

/// A type byte and a count keep the encodings of different values distinct.
fn put_value(to: &mut Vec<u8>, value: &Value<'_>) {
    let mut begin = |kind: u8, count: usize| {
        to.push(kind);
        to.extend_from_slice(&(count as u32).to_le_bytes());
    };
    match value {
        Value::Unset => begin(0, 0),
        Value::Text(text) => {
            begin(1, 1);
            put(to, text);
        }
        Value::Number(n) => {
            begin(2, 1);
            to.extend_from_slice(&n.to_le_bytes());
        }
        Value::Share(p) => {
            begin(3, 1);
            to.extend_from_slice(&p.get().to_bits().to_le_bytes());
        }
        Value::Labels(labels) => {
            begin(4, labels.len());
            for (key, value) in labels {
                put(to, key);
                put(to, value);
            }
        }
        Value::Files(files) => {
            begin(5, files.len());
            for (path, md5) in files {
                put(to, path);
                put(to, md5);
            }
        }
        Value::Section(parts) => {
            begin(7, parts.len());
            for (name, value) in parts {
                put(to, name);
                put(to, value);
            }
        }
        Value::Env(env) => {
            begin(6, env.0.len());
            for (key, origin, text) in env.seen() {
                put(to, key);
                to.push(origin as u8);
                put(to, &text);
            }
        }
    }
}
