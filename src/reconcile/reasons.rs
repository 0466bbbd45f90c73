//! Reasons of the steps of a chain, from the observed state before the first step.

use std::sync::Arc;

use super::assess::TargetSpec;
use super::chain::StepDraft;
use super::choose::Situation;
use super::field_differences::{SecretView, differences};
use crate::model::{
    AutoType, DesiredInstance, Effect, KnownSpec, Op, Present, Reason, Rule, SourceLocation, SpecSide, State,
};

/// The inputs of a step's reasons.
pub struct StepReasons<'w, 'a> {
    pub target: &'w TargetSpec<'a>,
    pub present: Option<Present<'w>>,
    /// The situation before the first step.
    pub is: Situation,
    pub adopting: bool,
    /// No list contains the instance; a live check can find a process with its identity.
    pub unlisted: bool,
    /// The reason of a removal.
    pub rule: Option<Rule>,
    pub place: &'w SourceLocation,
}

const PROCESS_EFFECTS: [Effect; 3] = [Effect::Reload, Effect::Restart, Effect::Replace];

impl<'w, 'a> StepReasons<'w, 'a> {
    pub fn of(
        is: Situation,
        target: &'w TargetSpec<'a>,
        present: Present<'w>,
        want: &'w DesiredInstance,
    ) -> StepReasons<'w, 'a> {
        let (rule, place) = (down_rule(want.origin.state), &want.origin.place);
        StepReasons { target, present: Some(present), is, adopting: false, unlisted: false, rule, place }
    }

    pub fn draft(&self, op: Op, which: SpecSide) -> StepDraft {
        let seen = self.present.map(|present| present.seen());
        let spec = match (op, which) {
            (Op::Unregister, _) => None,
            (_, SpecSide::New) => Some(Arc::clone(self.target.spec)),
            (Op::Unsupervise, SpecSide::Old) => seen.and_then(|seen| seen.specs.registered.spec().cloned()),
            (_, SpecSide::Old) => {
                let live = seen.filter(|_| self.is.live.is_some()).map(|seen| &seen.specs.live);
                live.or(seen.map(|seen| &seen.specs.registered)).and_then(|version| version.spec().cloned())
            }
        };
        let mut why = self.why(op, which);
        if why.is_empty() {
            // A preparatory step has the reason of the strongest difference.
            why = self.differs(Rule::LiveDiffers, &PROCESS_EFFECTS);
        }
        let revision = (which == SpecSide::New && op != Op::Unregister).then(|| *self.target.revision());
        let reloaded_fields = if op == Op::Reload { self.target.reloaded() } else { Vec::new() };
        // Adoption assumes that the running process is the wanted one.
        let creates = matches!(op, Op::Start | Op::Supervise);
        let needs_live_check = op.is_destructive() || self.adopting || (self.unlisted && creates);
        StepDraft { op, spec_side: which, spec, revision, reloaded_fields, needs_live_check, why }
    }

    /// Adds the other fields that change with a chain to the last of its steps that carries the wanted spec.
    pub fn add_other_changes(&self, steps: &mut [StepDraft]) {
        let carries = |draft: &StepDraft| {
            let sends = match draft.op {
                Op::Register | Op::Reload | Op::Restart | Op::Start | Op::Supervise => true,
                Op::Stop | Op::Unsupervise | Op::Unregister | Op::Kill => false,
            };
            sends && draft.spec_side == SpecSide::New
        };
        let Some(last) = steps.iter().rposition(carries) else { return };
        for why in self.other_changes(last, steps) {
            steps[last].why.push(why);
        }
    }

    /// The changed fields that no reason of the chain names, also those without an effect of their own.
    fn other_changes(&self, last: usize, steps: &[StepDraft]) -> Vec<Reason> {
        let Some(seen) = self.present.map(|present| present.seen()) else { return Vec::new() };
        // An adopted process keeps its spec until the next plan; one that is stopped has none.
        let is_live = self.is.live.is_some() && !self.adopting && steps[last].op != Op::Register;
        let is_given = self.is.given.is_some();
        let sides = [
            (Rule::LiveDiffers, &seen.specs.live, is_live),
            (Rule::GivenDiffers, &seen.specs.registered, is_given),
        ];
        let mut others: Vec<Reason> = Vec::new();
        for (rule, version, is_compared) in sides {
            // Without the whole old spec, the other steps give their reasons by digests.
            if !is_compared || version.spec().is_none() {
                continue;
            }
            let all = self.all_differences(rule, version);
            let is_new = |why: &Reason| {
                let known = steps.iter().flat_map(|draft| &draft.why).chain(&others);
                !known.into_iter().any(|other| other.field == why.field && other.new == why.new)
            };
            let new: Vec<Reason> = all.into_iter().filter(is_new).collect();
            others.extend(new);
        }
        others
    }

    fn all_differences(&self, rule: Rule, version: &KnownSpec) -> Vec<Reason> {
        let Some(seen) = self.present.map(|present| present.seen()) else { return Vec::new() };
        differences(rule, version, self.target, &Effect::ALL, &SecretView::of(&seen.specs), Some(self.place))
    }

    pub fn plain(&self, rule: Rule) -> Reason {
        Reason::plain(rule, Some(self.place))
    }

    fn why(&self, op: Op, which: SpecSide) -> Vec<Reason> {
        let down = self.rule.map(|rule| vec![self.plain(rule)]);
        match op {
            Op::Start if self.is.live.is_some() => self.differs(Rule::LiveDiffers, &PROCESS_EFFECTS),
            Op::Start if self.target.goal.auto_type == AutoType::OneShot => {
                let changed = self.differs(Rule::GivenDiffers, &PROCESS_EFFECTS);
                let changed = changed.into_iter().filter(|why| why.field.is_some());
                std::iter::once(self.plain(Rule::NotRun)).chain(changed).collect()
            }
            Op::Start => vec![self.plain(Rule::NotRunning)],
            Op::Stop | Op::Kill => down.unwrap_or_else(|| self.differs(Rule::LiveDiffers, &PROCESS_EFFECTS)),
            Op::Reload | Op::Restart => self.differs(Rule::LiveDiffers, &PROCESS_EFFECTS),
            Op::Register if which == SpecSide::Old => {
                down.unwrap_or_else(|| self.differs(Rule::LiveDiffers, &[Effect::Replace]))
            }
            Op::Register if self.is.given.is_none() => vec![self.plain(Rule::NotRegistered)],
            Op::Register => self.spec_unknown_reasons(),
            Op::Supervise if !self.is.hosted => {
                let adopted = self.adopting.then(|| self.plain(Rule::Adopted));
                adopted.into_iter().chain([self.plain(Rule::NotHosted)]).collect()
            }
            Op::Supervise => self.spec_unknown_reasons(),
            Op::Unsupervise
                if which == SpecSide::Old
                    && self.rule.is_none()
                    && self.target.goal.state == State::Running =>
            {
                self.differs(Rule::GivenDiffers, &[Effect::Replace])
            }
            Op::Unsupervise => down.unwrap_or_else(|| vec![self.plain(Rule::Hosted)]),
            Op::Unregister => down.unwrap_or_default(),
        }
    }

    /// Reason the spec is registered again.
    fn spec_unknown_reasons(&self) -> Vec<Reason> {
        let all = [Effect::Register, Effect::Reload, Effect::Restart, Effect::Replace];
        let adopted = self.adopting.then(|| self.plain(Rule::Adopted));
        let known = self.present.is_none_or(|present| present.seen().specs.registered != KnownSpec::Unknown);
        let differs =
            if known || !self.adopting { self.differs(Rule::GivenDiffers, &all) } else { Vec::new() };
        adopted.into_iter().chain(differs).collect()
    }

    fn differs(&self, rule: Rule, effects: &[Effect]) -> Vec<Reason> {
        let Some(seen) = self.present.map(|present| present.seen()) else { return Vec::new() };
        let version = if rule == Rule::LiveDiffers { &seen.specs.live } else { &seen.specs.registered };
        differences(rule, version, self.target, effects, &SecretView::of(&seen.specs), Some(self.place))
    }
}

/// The reason of a step towards stopped or absent.
pub fn down_rule(state: State) -> Option<Rule> {
    match state {
        State::Running | State::Unhosted => None,
        State::Stopped => Some(Rule::StateStopped),
        State::Absent => Some(Rule::StateAbsent),
    }
}
