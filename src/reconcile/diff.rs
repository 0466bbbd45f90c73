//! Difference of two specs: by field where both are known, by effect where only their revisions are.

use super::choose::Delta;
use super::spec_effects::EffectTable;
use crate::model::{Effect, Field, Spec, SpecRevision, Value};

/// One field that differs, for output.
#[derive(Clone, Debug, PartialEq)]
pub struct Change<'a> {
    pub field: Field,
    pub effect: Effect,
    pub old: Value<'a>,
    pub new: Value<'a>,
}

/// Every field in which `old` differs from `new`, in table order, with the effects of the wanted spec.
pub fn changes<'a>(old: &'a Spec, new: &'a Spec, effects: &EffectTable) -> Vec<Change<'a>> {
    let pairs = old.values().into_iter().zip(new.values());
    let effect = |field: Field| match field {
        Field::Env => effects.effect_of_env(&old.env, &new.env),
        field => effects.effect(field),
    };
    pairs
        .filter(|((_, old), (_, new))| old != new)
        .map(|((field, old), (_, new))| Change { field, effect: effect(field), old, new })
        .filter(|change| change.effect != Effect::None)
        .collect()
}

/// The effects of the changes.
pub fn delta(changes: &[Change<'_>]) -> Delta {
    let any = |effect| changes.iter().any(|change| change.effect == effect);
    Delta {
        register: any(Effect::Register),
        reload: any(Effect::Reload),
        restart: any(Effect::Restart),
        replace: any(Effect::Replace),
    }
}

/// The effects by two revisions, where the old spec is unknown.
pub fn delta_of_revisions(old: &SpecRevision, new: &SpecRevision) -> Delta {
    Delta {
        register: old.register != new.register,
        reload: old.reload != new.reload,
        restart: old.restart != new.restart,
        replace: old.replace != new.replace,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Control, OnChange, StartMode};
    use crate::reconcile::revision;

    fn plain(spec: &Spec) -> EffectTable {
        EffectTable::of(spec, &OnChange::new())
    }

    fn spec(start: &str, stop: &str) -> Spec {
        let control =
            Control { start_cmd: Some(start.into()), stop_cmd: Some(stop.into()), ..Control::default() };
        Spec { control, ..Spec::default() }
    }

    #[test]
    fn changes_name_field_class_and_both_values() {
        let (old, new) = (spec("a", "x"), spec("b", "y"));
        let all = changes(&old, &new, &plain(&new));
        let seen: Vec<_> = all.iter().map(|change| (change.field, change.effect)).collect();
        assert_eq!(seen, [(Field::StartCmd, Effect::Restart), (Field::StopCmd, Effect::Register)]);
        assert_eq!((&all[0].old, &all[0].new), (&Value::Text("a"), &Value::Text("b")));
        assert_eq!(delta(&all), Delta { register: true, restart: true, ..Delta::default() });
        assert!(changes(&new, &new, &plain(&new)).is_empty());
    }

    #[test]
    fn revisions_show_the_same_classes() {
        let (old, new) = (spec("a", "x"), spec("b", "x"));
        let none = OnChange::new();
        let by_digest = delta_of_revisions(&revision(&old, &none), &revision(&new, &none));
        assert_eq!(by_digest, delta(&changes(&old, &new, &plain(&new))));
    }

    #[test]
    fn a_field_of_class_none_is_no_change() {
        let quiet = OnChange::from([(Field::StartCmd, Effect::None)]);
        let (old, new) = (spec("a", "x"), spec("b", "x"));
        assert!(changes(&old, &new, &EffectTable::of(&new, &quiet)).is_empty());
    }

    #[test]
    fn the_wanted_mode_decides_the_class_of_log_path() {
        let at = |path: &str, mode| {
            let mut spec = spec("a", "x");
            spec.identity.log_path = Some(path.into());
            spec.control.start_mode = Some(mode);
            spec
        };
        for (mode, effect) in
            [(StartMode::Daemon, Effect::Register), (StartMode::Foreground, Effect::Restart)]
        {
            let (old, new) = (at("/a", mode), at("/b", mode));
            assert_eq!(changes(&old, &new, &plain(&new))[0].effect, effect);
        }
    }
}
