//! Active revision: choice between the pinned one, the last applied one and that of the source. Pure.

use crate::engine::pin::Pin;
use crate::model::ManifestRevision;
use crate::source::SourceState;

/// Everything that the choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RevisionInputs {
    pub source: Manifests,
    /// The pinned revision.
    pub pinned: Option<Manifests>,
    /// The last applied revision. Read only without `--follow` and without a pin.
    pub last_applied: Option<LastAppliedManifests>,
    /// Apply new revisions of the source.
    pub follow: bool,
    /// Repair drift.
    pub heal: bool,
}

/// Known part of a manifest set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manifests {
    /// The source was not read yet.
    NotRead,
    Read {
        coverage: Coverage,
        /// No instance is declared.
        is_empty: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    Complete,
    /// Something is unreadable, and its last good version replaces it.
    LastGood,
    /// Something is unreadable, and has no last good version.
    UnknownFiles,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastAppliedManifests {
    pub manifests: Manifests,
    /// The source has the same revision.
    pub is_of_source: bool,
}

impl Manifests {
    pub fn of(state: &SourceState) -> Manifests {
        let coverage = match (state.is_incomplete, state.has_unknown_files) {
            (_, true) => Coverage::UnknownFiles,
            (true, false) => Coverage::LastGood,
            (false, false) => Coverage::Complete,
        };
        Manifests::Read { coverage, is_empty: state.desired.instances.is_empty() }
    }

    /// Whether the desired state is known: unreadable manifests without any declaration say nothing.
    fn is_state_known(self) -> bool {
        match self {
            Manifests::NotRead => false,
            Manifests::Read { coverage: Coverage::Complete, .. } => true,
            Manifests::Read { coverage: Coverage::LastGood | Coverage::UnknownFiles, is_empty } => !is_empty,
        }
    }

    fn is_activatable(self) -> bool {
        match self {
            Manifests::NotRead | Manifests::Read { coverage: Coverage::UnknownFiles, .. } => false,
            Manifests::Read { coverage: Coverage::Complete | Coverage::LastGood, .. } => true,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// No manifests are known yet.
    Nothing,
    Revision(ChosenRevision),
}

/// The revision of a pass, and what the pass may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenRevision {
    pub from: RevisionOrigin,
    /// The desired state is known: the pass observes and plans.
    pub is_known: bool,
    /// The source's revision is another one and is not followed.
    pub leaves_source: bool,
    pub disabled: Disabled,
    /// Neither a change of the manifests nor drift is applied: every difference counts as drift.
    pub all_is_drift: bool,
    /// The revision becomes the active one.
    pub activates: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevisionOrigin {
    Pin,
    LastApplied,
    Source,
}

/// Disabled changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disabled {
    Nothing,
    /// Drift is held.
    Heal,
    /// New revisions are held.
    Follow,
}

/// Chooses the revision of a pass. A pin precedes; without `--follow` the last applied revision stays active,
/// whatever the source contains.
pub fn choose_revision(inputs: &RevisionInputs) -> Choice {
    let RevisionInputs { source, pinned, last_applied, follow, heal } = *inputs;
    let last_applied = last_applied.filter(|_| !follow && pinned.is_none());
    let (from, manifests) = match (pinned, last_applied) {
        (Some(pinned), _) => (RevisionOrigin::Pin, pinned),
        (None, Some(last)) => (RevisionOrigin::LastApplied, last.manifests),
        (None, None) if source == Manifests::NotRead => return Choice::Nothing,
        (None, None) => (RevisionOrigin::Source, source),
    };
    // A pin is set by a person, and a last applied revision was active before: --follow does not apply to them.
    let disabled = match (from, follow, heal) {
        (RevisionOrigin::Source, false, _) => Disabled::Follow,
        (_, _, false) => Disabled::Heal,
        (_, _, true) => Disabled::Nothing,
    };
    let leaves_source = match from {
        RevisionOrigin::Pin => false,
        RevisionOrigin::LastApplied => {
            source != Manifests::NotRead && last_applied.is_some_and(|last| !last.is_of_source)
        }
        RevisionOrigin::Source => !follow,
    };
    Choice::Revision(ChosenRevision {
        from,
        is_known: manifests.is_state_known(),
        leaves_source,
        disabled,
        all_is_drift: from == RevisionOrigin::LastApplied && !heal,
        activates: from == RevisionOrigin::Source && follow && manifests.is_activatable(),
    })
}

/// Whether the source ends a pin: it is followed, complete, and has a newer revision.
pub fn is_superseded(pin: &Pin, source: Option<&SourceState>, follow: bool) -> bool {
    follow && source.is_some_and(|source| !source.is_incomplete && pin.is_older_than(&source.revision))
}

/// The revision of a partly broken source that a new pin overrides, though it was never active: it does not end the
/// pin when the source recovers.
pub fn left_behind(pin: &Pin, source: Option<&SourceState>) -> Option<ManifestRevision> {
    let source = source.filter(|source| source.is_incomplete && !source.revision.is_none())?;
    pin.is_older_than(&source.revision).then(|| source.revision.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Time;

    fn all_reads() -> Vec<Manifests> {
        let coverages = [Coverage::Complete, Coverage::LastGood, Coverage::UnknownFiles];
        let both = |coverage| [false, true].map(|is_empty| Manifests::Read { coverage, is_empty });
        coverages.into_iter().flat_map(both).collect()
    }

    fn all_inputs() -> Vec<RevisionInputs> {
        let reads = all_reads();
        let sources = || reads.iter().copied().chain([Manifests::NotRead]);
        let pins = || reads.iter().copied().map(Some).chain([None]);
        let is_same = |manifests| {
            [false, true].map(|is_of_source| Some(LastAppliedManifests { manifests, is_of_source }))
        };
        let last = || reads.iter().copied().flat_map(is_same).chain([None]);
        let flags = [(true, true), (true, false), (false, true), (false, false)];
        let mut all = Vec::new();
        for source in sources() {
            for pinned in pins() {
                for last_applied in last() {
                    for (follow, heal) in flags {
                        all.push(RevisionInputs { source, pinned, last_applied, follow, heal });
                    }
                }
            }
        }
        all
    }

    /// A row of the table: which inputs it covers, and what they give.
    struct Row {
        name: &'static str,
        covers: fn(&RevisionInputs) -> bool,
        from: Option<RevisionOrigin>,
        leaves_source: fn(&RevisionInputs) -> bool,
        disabled: fn(&RevisionInputs) -> Disabled,
        all_is_drift: fn(&RevisionInputs) -> bool,
        activates: fn(&RevisionInputs) -> bool,
    }

    fn unless_healed(inputs: &RevisionInputs) -> Disabled {
        if inputs.heal { Disabled::Nothing } else { Disabled::Heal }
    }

    fn is_silent(inputs: &RevisionInputs) -> bool {
        inputs.source == Manifests::NotRead
    }

    const TABLE: [Row; 5] = [
        Row {
            name: "a pin precedes everything",
            covers: |inputs| inputs.pinned.is_some(),
            from: Some(RevisionOrigin::Pin),
            leaves_source: |_| false,
            disabled: unless_healed,
            all_is_drift: |_| false,
            activates: |_| false,
        },
        Row {
            name: "a source that is followed becomes active, unless something of it was never read",
            covers: |inputs| inputs.pinned.is_none() && inputs.follow && !is_silent(inputs),
            from: Some(RevisionOrigin::Source),
            leaves_source: |_| false,
            disabled: unless_healed,
            all_is_drift: |_| false,
            activates: |inputs| {
                !matches!(inputs.source, Manifests::Read { coverage: Coverage::UnknownFiles, .. })
            },
        },
        Row {
            name: "without --follow the last applied revision stays",
            covers: |inputs| inputs.pinned.is_none() && !inputs.follow && inputs.last_applied.is_some(),
            from: Some(RevisionOrigin::LastApplied),
            leaves_source: |inputs| {
                !is_silent(inputs) && inputs.last_applied.is_some_and(|last| !last.is_of_source)
            },
            disabled: unless_healed,
            all_is_drift: |inputs| !inputs.heal,
            activates: |_| false,
        },
        Row {
            name: "without --follow and without an applied revision, everything of the source is held",
            covers: |inputs| {
                inputs.pinned.is_none()
                    && !inputs.follow
                    && inputs.last_applied.is_none()
                    && !is_silent(inputs)
            },
            from: Some(RevisionOrigin::Source),
            leaves_source: |_| true,
            disabled: |_| Disabled::Follow,
            all_is_drift: |_| false,
            activates: |_| false,
        },
        Row {
            name: "nothing was read yet",
            covers: |inputs| {
                inputs.pinned.is_none()
                    && is_silent(inputs)
                    && (inputs.follow || inputs.last_applied.is_none())
            },
            from: None,
            leaves_source: |_| false,
            disabled: |_| Disabled::Nothing,
            all_is_drift: |_| false,
            activates: |_| false,
        },
    ];

    #[test]
    fn every_combination_is_in_one_row_of_the_table() {
        let all = all_inputs();
        assert_eq!(all.len(), 7 * 7 * 13 * 4);
        for inputs in &all {
            let rows: Vec<&Row> = TABLE.iter().filter(|row| (row.covers)(inputs)).collect();
            let [row] = rows[..] else { panic!("{} rows cover {inputs:?}", rows.len()) };
            let expected = row.from.map(|from| {
                let manifests = match from {
                    RevisionOrigin::Pin => inputs.pinned,
                    RevisionOrigin::LastApplied => inputs.last_applied.map(|last| last.manifests),
                    RevisionOrigin::Source => Some(inputs.source),
                };
                ChosenRevision {
                    from,
                    is_known: !matches!(
                        manifests,
                        Some(Manifests::Read {
                            coverage: Coverage::LastGood | Coverage::UnknownFiles,
                            is_empty: true
                        })
                    ),
                    leaves_source: (row.leaves_source)(inputs),
                    disabled: (row.disabled)(inputs),
                    all_is_drift: (row.all_is_drift)(inputs),
                    activates: (row.activates)(inputs),
                }
            });
            let expected = expected.map_or(Choice::Nothing, Choice::Revision);
            assert_eq!(choose_revision(inputs), expected, "{}: {inputs:?}", row.name);
        }
    }

    #[test]
    fn the_flags_of_a_read_give_its_coverage() {
        for (is_incomplete, has_unknown_files, coverage) in [
            (false, false, Coverage::Complete),
            (true, false, Coverage::LastGood),
            (true, true, Coverage::UnknownFiles),
        ] {
            let state = SourceState { is_incomplete, has_unknown_files, ..SourceState::default() };
            assert_eq!(Manifests::of(&state), Manifests::Read { coverage, is_empty: true });
        }
    }

    #[test]
    fn only_a_newer_complete_source_that_is_followed_ends_a_pin() {
        let revision = |text: &str| ManifestRevision::from_text(text);
        let pin = Pin {
            revision: revision("1"),
            commit: None,
            since: Time(0),
            by: "ann".to_owned(),
            reason: None,
            over: Some(revision("2")),
            also: Vec::new(),
        };
        for name in ["1", "2", "3", ""] {
            for is_incomplete in [false, true] {
                let source =
                    SourceState { revision: revision(name), is_incomplete, ..SourceState::default() };
                for follow in [false, true] {
                    let ends = follow && !is_incomplete && matches!(name, "3" | "");
                    assert_eq!(is_superseded(&pin, Some(&source), follow), ends, "{name} {is_incomplete}");
                }
                let left = (is_incomplete && name == "3").then(|| revision("3"));
                assert_eq!(left_behind(&pin, Some(&source)), left, "{name} {is_incomplete}");
            }
        }
        assert!(!is_superseded(&pin, None, true) && left_behind(&pin, None).is_none());
    }
}
