//! Spec effects: effect of each field of a spec, for the planner and `explain`.

use crate::model::{Effect, Field, OnChange, Spec, SpecRevision, Value};
pub use crate::model::{EffectTable, base_effect, effect_of};

/// A field of a spec, the effect of a change to it, and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldEffect<'a> {
    pub field: Field,
    pub effect: Effect,
    pub value: Value<'a>,
}

/// The whole table for one spec, in the order of [`Field::ALL`].
pub fn table<'a>(spec: &'a Spec, on_change: &OnChange) -> Vec<FieldEffect<'a>> {
    let effects = EffectTable::of(spec, on_change);
    let rows = spec.values().into_iter();
    rows.map(|(field, value)| FieldEffect { field, effect: effects.effect(field), value }).collect()
}

/// The digests of one spec, on a target that supports every field.
pub fn revision(spec: &Spec, on_change: &OnChange) -> SpecRevision {
    EffectTable::of(spec, on_change).revision(spec)
}
