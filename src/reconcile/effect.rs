//! The effect table as the planner reads it: field by field, for one spec.

use crate::model::{Effect, Field, OnChange, Spec, SpecRevision, Value, secret_digest};
pub use crate::model::{EffectTable, base_effect, effect_of};

/// One row: a field of one spec, what changing it does there, and what it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Row<'a> {
    pub field: Field,
    pub effect: Effect,
    pub value: Value<'a>,
}

/// The whole table for one spec, in the order of [`Field::ALL`].
pub fn table<'a>(spec: &'a Spec, on_change: &OnChange) -> Vec<Row<'a>> {
    let classes = EffectTable::of(spec, on_change);
    let rows = spec.values().into_iter();
    rows.map(|(field, value)| Row { field, effect: classes.effect(field), value }).collect()
}

/// The digests of one spec, on a target that can say everything.
pub fn revision(spec: &Spec, on_change: &OnChange) -> SpecRevision {
    EffectTable::of(spec, on_change).revision(spec)
}

/// What is shown of a value that is not to be shown.
pub fn digest(text: &str) -> String {
    secret_digest(text)[..8].to_owned()
}
