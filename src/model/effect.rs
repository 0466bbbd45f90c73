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

/// Per-process effects of some fields; they override the table.
pub type OnChange = BTreeMap<Field, Effect>;
