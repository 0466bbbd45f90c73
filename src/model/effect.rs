//! What a changed field asks for, from nothing to a new process. The table itself is `model::classes`.

use std::collections::BTreeMap;
use std::fmt;

use super::Field;

/// Ordered by how much it disturbs: the strongest among the changed fields decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    /// Left out of every comparison; sent with the next operation that carries the spec.
    None,
    /// The engine is told; the process is not touched.
    Register,
    /// The process is asked to read its configuration again; its pid stays.
    Reload,
    /// A new process under the same identity.
    Restart,
    /// The old process is stopped as it was known, the new one started as it is to be known.
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

/// A process's own word on some fields; it goes before the table.
pub type OnChange = BTreeMap<Field, Effect>;
