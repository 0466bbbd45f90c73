//! Effect table: the effect of a change to each field of a spec, and the digests of a spec per effect.
//!
//! Total by construction, twice: `Spec::values` takes the spec apart with no `..`, so a new field of the struct
//! does not compile until it is listed; [`base_effect`] matches every [`Field`], so a new name does not
//! compile until it is placed. `explain`, the difference of two specs and the digests all read this table.

use super::{Effect, Field, OnChange, Spec, SpecRevision, StartMode, Value};

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
    on_change.get(&field).copied().unwrap_or_else(|| base_effect(field, mode))
}

/// The table of one process: includes its `on_change`, its start mode and the fields that its target supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffectTable([Effect; Field::COUNT]);

impl EffectTable {
    pub fn new(mode: StartMode, on_change: &OnChange) -> EffectTable {
        let mut effects = [Effect::None; Field::COUNT];
        for field in Field::ALL {
            effects[*field as usize] = effect_of(*field, mode, on_change);
        }
        EffectTable(effects)
    }

    pub fn of(spec: &Spec, on_change: &OnChange) -> EffectTable {
        EffectTable::new(spec.control.start_mode.unwrap_or_default(), on_change)
    }

    /// Excludes the fields that a target does not support from every comparison.
    pub fn without(mut self, unsupported: impl Fn(Field) -> bool) -> EffectTable {
        for field in Field::ALL.iter().filter(|field| unsupported(**field)) {
            self.0[*field as usize] = Effect::None;
        }
        self
    }

    pub fn effect(&self, field: Field) -> Effect {
        self.0[field as usize]
    }

    /// The digests of one spec. Fields with effect None are in none of them.
    pub fn revision(&self, spec: &Spec) -> SpecRevision {
        self.digests(spec).0
    }

    /// The digests, and a digest of all fields, which is unique per spec.
    pub(super) fn digests(&self, spec: &Spec) -> (SpecRevision, [u8; 16]) {
        // A documented default equals an unset field.
        let values = spec.values();
        let set = values.iter().filter(|(field, _)| spec.is_set(*field));
        let set: Vec<_> = set.map(|(field, value)| (self.effect(*field), field.path(), value)).collect();
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
