//! Live spec after a registration: which fields of a registered spec take effect in the running process at once.

use super::{Effect, EffectTable, Field, OnChange, Spec, SpecRevision, base_effect};

/// A spec, and its revision if it is known.
pub type SpecAndRevision<'a> = (&'a Spec, Option<SpecRevision>);

/// The strongest effect in which two specs differ: by their revisions, which include `on_change`, or by their fields.
pub fn difference(one: SpecAndRevision<'_>, other: SpecAndRevision<'_>) -> Effect {
    match (one.1, other.1) {
        (Some(one), Some(other)) => one.differs_from(&other),
        _ => {
            let revision = |spec: &Spec| EffectTable::of(spec, &OnChange::default()).revision(spec);
            revision(one.0).differs_from(&revision(other.0))
        }
    }
}

/// The spec in effect after `given` was registered: its fields with effect Register take effect at once, as long as no
/// restart is pending. `None`: the live spec does not change.
pub fn live_after_registration(
    live: SpecAndRevision<'_>,
    given: SpecAndRevision<'_>,
) -> Option<(Spec, Option<SpecRevision>)> {
    if difference(live, given) >= Effect::Restart {
        return None;
    }
    let mode = live.0.control.start_mode.unwrap_or_default();
    let mut spec = live.0.clone();
    for field in Field::ALL.iter().filter(|field| base_effect(**field, mode) == Effect::Register) {
        spec.take(*field, given.0);
    }
    let revision = match (live.1, given.1) {
        (_, given_revision) if spec == *given.0 => given_revision,
        (Some(live), Some(given)) => Some(SpecRevision { register: given.register, ..live }),
        (_, _) => None,
    };
    (spec != *live.0 || revision != live.1).then_some((spec, revision))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(stop: &str, start: &str, config: &str) -> Spec {
        let mut spec = Spec::default();
        spec.control.stop_cmd = Some(stop.to_owned());
        spec.control.start_cmd = Some(start.to_owned());
        spec.identity.config_path = Some(config.to_owned());
        spec
    }

    #[test]
    fn register_fields_take_effect_unless_a_restart_is_pending() {
        let live = spec("old", "run", "a");
        let after =
            |given: &Spec| live_after_registration((&live, None), (given, None)).map(|(spec, _)| spec);
        assert_eq!(after(&live), None);
        assert_eq!(after(&spec("new", "run", "a")), Some(spec("new", "run", "a")));
        assert_eq!(after(&spec("new", "run", "b")), Some(spec("new", "run", "a")), "a reload is pending");
        assert_eq!(after(&spec("new", "other", "a")), None, "a restart is pending");
        let mut moved = spec("new", "run", "a");
        moved.identity.pid_path = "/other".to_owned();
        assert_eq!(after(&moved), None, "another identity");
    }

    #[test]
    fn the_revision_follows() {
        let revision = |spec: &Spec| Some(EffectTable::of(spec, &OnChange::default()).revision(spec));
        let (live, given) = (spec("old", "run", "a"), spec("new", "run", "b"));
        let (after, found) =
            live_after_registration((&live, revision(&live)), (&given, revision(&given))).expect("a change");
        assert_eq!(found, revision(&after));
        assert_eq!(difference((&after, found), (&given, revision(&given))), Effect::Reload);
    }
}
