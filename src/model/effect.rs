//! Effects of a field change, from none to a new process. The table is in `model::effects`.

use std::collections::BTreeMap;
use std::fmt;

use super::Field;

/// Ordered by disturbance: the strongest effect among the changed fields decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    /// Left out of every comparison; sent with the next operation that carries the spec.
    None,
    /// The new spec is registered with the engine; the process is not touched.
    Register,
    /// The process reloads its configuration; its pid stays.
    Reload,
    /// A new process under the same identity.
    Restart,
    /// The old process is stopped under its old identity, the new one started under the new identity.
    Replace,
}

impl Effect {
    pub const ALL: [Effect; 5] =
        [Effect::None, Effect::Register, Effect::Reload, Effect::Restart, Effect::Replace];

    pub fn word(self) -> &'static str {
        match self {
            Effect::None => "none",
            Effect::Register => "register",
            Effect::Reload => "reload",
            Effect::Restart => "restart",
            Effect::Replace => "replace",
        }
    }

    pub fn from_word(word: &str) -> Option<Effect> {
        Effect::ALL.into_iter().find(|effect| effect.word() == word)
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Per-process effects of some fields and environment variables; they override the table.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct OnChange {
    fields: BTreeMap<Field, Effect>,
    /// Of single variables, by name; they override the effect of `env`.
    variables: BTreeMap<String, Effect>,
}

impl OnChange {
    pub fn new() -> OnChange {
        OnChange::default()
    }

    pub fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.variables.is_empty()
    }

    pub fn get(&self, field: Field) -> Option<Effect> {
        self.fields.get(&field).copied()
    }

    /// The previous effect, if there was one.
    pub fn insert(&mut self, field: Field, effect: Effect) -> Option<Effect> {
        self.fields.insert(field, effect)
    }

    pub fn variables(&self) -> &BTreeMap<String, Effect> {
        &self.variables
    }

    /// The previous effect, if there was one.
    pub fn insert_variable(&mut self, name: &str, effect: Effect) -> Option<Effect> {
        self.variables.insert(name.to_owned(), effect)
    }
}

impl<const N: usize> From<[(Field, Effect); N]> for OnChange {
    fn from(fields: [(Field, Effect); N]) -> OnChange {
        OnChange { fields: BTreeMap::from(fields), variables: BTreeMap::new() }
    }
}

/// The digest of a manifest revision contains this text: it must not change for entries of whole fields.
impl fmt::Debug for OnChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let variables = self.variables.iter().map(|(name, effect)| (format!("env.{name}"), effect));
        f.debug_map().entries(&self.fields).entries(variables).finish()
    }
}
