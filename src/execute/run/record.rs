//! Recording of step outcomes: the result, the consequences for later steps, and the ledger entry.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::poll::is_once;
use super::{Chains, Run};
use crate::backend::{Backend, InstanceQuery, RowState};
use crate::execute::lost_reply::{earliest, has_run};
use crate::execute::{ExecutionEvent, StepOutcome, StepResult, ledger};
use crate::model::{HoldReason, ObservedInstance, Op, Step, Time};
use crate::reconcile::{Expected, after};
use crate::store::{Store, Txn};

impl<B: Backend, S: Store> Run<'_, B, S> {
    #[expect(clippy::too_many_arguments, reason = "the result of a step, and the queues that it releases")]
    pub(super) fn close<'s>(
        &mut self,
        step: &'s Step,
        outcome: StepOutcome,
        state: RowState,
        message: String,
        begun: Instant,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        self.end(step, outcome, state, message, begun);
        match outcome.is_well() {
            true => ready.extend(chains.get_mut(&step.instance).and_then(VecDeque::pop_front)),
            false => self.skip_rest(chains, step),
        }
    }

    pub(super) fn end(
        &mut self,
        step: &Step,
        outcome: StepOutcome,
        state: RowState,
        message: String,
        begun: Instant,
    ) {
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (instance, op) = (step.instance.clone(), step.op);
        let reason = self.refused_by(step, outcome, state);
        self.note(step, outcome, state, begun);
        let (id, code) = (step.id, state.code());
        let ended = StepResult { step: id, instance, op, outcome, state, code, message, took_ms, reason };
        match outcome {
            StepOutcome::Done | StepOutcome::AlreadySo => {}
            // The rest of its chain is skipped; a skipped step is not a failure.
            StepOutcome::Skipped => {
                self.outcomes.failed.insert(step.instance.clone());
            }
            StepOutcome::Failed | StepOutcome::TimedOut | StepOutcome::Unknown => {
                self.count_failed(&step.instance);
            }
        }
        (self.on_event)(ExecutionEvent::Ended(&ended));
        self.outcomes.ended.push(ended);
    }

    /// Whether the instance was ours before this run: by its label, by the ledger, or because the plan adopts it.
    pub(super) fn is_owned(&self, step: &Step) -> bool {
        let owner = self.terms.settings.owner.as_str();
        let key = step.from.as_ref().unwrap_or(&step.instance);
        let row = self.terms.before.get(key).or_else(|| self.terms.before.get(&step.instance));
        let is_there =
            |seen: &ObservedInstance| [seen.registered, seen.hosted, seen.running].contains(&Some(true));
        // A plan acts on a process without an owner only where it adopts it.
        let by_row = row.is_some_and(|seen| match seen.owner.as_deref() {
            Some(its) => its == owner && !seen.process.not_owned,
            None => is_there(seen),
        });
        by_row || self.ledger.known.get(&step.instance).is_some_and(|entry| entry.proves(owner))
    }

    /// Whether we registered it, whatever runs there.
    pub(super) fn is_registered_by_us(&self, step: &Step) -> bool {
        let entry =
            self.ledger.known.get(&step.instance).filter(|entry| entry.owner == self.terms.settings.owner);
        entry.is_some_and(|entry| !entry.gone && entry.registered)
    }

    /// Would a process that this start finds belong to another owner? A step without an owner is not checked.
    pub(super) fn is_foreign(&self, step: &Step) -> bool {
        step.op == Op::Start && !self.terms.settings.owner.is_empty() && !self.is_owned(step)
    }

    fn refused_by(&self, step: &Step, outcome: StepOutcome, state: RowState) -> Option<HoldReason> {
        let is_other = match (step.op, state) {
            (Op::Start, RowState::AlreadyRunning) => self.is_foreign(step),
            (Op::Register, RowState::AlreadyRegistered) => true,
            _ => false,
        };
        (outcome == StepOutcome::Failed && is_other).then_some(HoldReason::NotOwned)
    }

    /// When a call was sent, by the clock that observations use.
    pub(super) fn sent_at(&self, begun: Instant) -> Time {
        let ago = i64::try_from(begun.elapsed().as_millis()).unwrap_or(i64::MAX);
        Time(self.backend.now().0.saturating_sub(ago))
    }

    /// Start time from which on a running process is ours; `None`: every running process is.
    fn ours_after(&self, step: &Step, outcome: StepOutcome, state: RowState, begun: Instant) -> Option<Time> {
        if self.terms.settings.owner.is_empty() {
            return None;
        }
        if self.is_owned(step) {
            // Our agent lists only what it started: the process that made the start fail may be another one, so it is
            // checked.
            let is_found = step.op == Op::Start && state == RowState::AlreadyRunning;
            let is_checked = self.terms.settings.caps.reads_specs && is_found;
            return is_checked.then_some(ledger::ALWAYS);
        }
        // An earlier start whose result was lost may have taken effect since.
        let known = self.ledger.known.get(&step.instance).filter(|entry| !entry.gone && entry.unsure);
        let lost = known.and_then(|entry| entry.ours_after).unwrap_or(ledger::NEVER);
        match (step.op, outcome.is_well()) {
            (Op::Start, false) if state == RowState::AlreadyRunning => Some(lost),
            (Op::Start, false) => Some(lost.min(earliest(self.sent_at(begun)))),
            // A target that works with the registered spec cannot be asked about a process before it is registered.
            (Op::Register, _) if self.terms.settings.caps.operates_on_registered_spec => {
                Some(lost.min(self.sent_at(begun)))
            }
            _ => None,
        }
    }

    /// Writes the new state of the instance to the pending ledger entries.
    fn note(&mut self, step: &Step, outcome: StepOutcome, state: RowState, begun: Instant) {
        if outcome == StepOutcome::Skipped {
            return;
        }
        // These steps are repeatable: without proof, they count as not executed.
        let harmless = matches!(step.op, Op::Register | Op::Unregister | Op::Reload | Op::Supervise);
        if harmless && !outcome.is_well() {
            if self.terms.settings.caps.reads_specs {
                return;
            }
            let perhaps = self.ledger.known.get(&step.instance).map(|entry| entry.perhaps(step));
            let unproven = self.ours_after(step, outcome, state, begun);
            let unproven = unproven.filter(|_| state != RowState::AlreadyRegistered);
            let entry = match (perhaps, unproven) {
                (Some(entry), _) => entry,
                // A registration that took effect after all would carry our label, whatever runs there.
                (None, Some(after)) => {
                    let (owner, now) = (&self.terms.settings.owner, self.backend.now());
                    let entry = ledger::Entry::after(step, &Expected::Unknown, owner, None, now);
                    ledger::Entry { ours_after: Some(after), ..entry }
                }
                (None, None) => return,
            };
            self.ledger.known.insert(step.instance.clone(), entry.clone());
            self.ledger.notes.insert(step.instance.clone(), entry);
            return;
        }
        let expected = match outcome {
            // The process had ended already: whether it is still supervised has to be observed.
            StepOutcome::AlreadySo if state == RowState::NotRunning => Expected::Unknown,
            StepOutcome::Done | StepOutcome::AlreadySo => after(
                step,
                self.seen.get(&step.instance),
                &self.terms.settings.owner,
                &self.terms.settings.caps,
            ),
            StepOutcome::Failed if has_run(step.op, state, is_once(step)) => after(
                step,
                self.seen.get(&step.instance),
                &self.terms.settings.owner,
                &self.terms.settings.caps,
            ),
            StepOutcome::Failed | StepOutcome::TimedOut | StepOutcome::Unknown | StepOutcome::Skipped => {
                Expected::Unknown
            }
        };
        if let Expected::State(seen) = &expected {
            self.seen.insert(step.instance.clone(), (**seen).clone());
        }
        let ours_after = self.ours_after(step, outcome, state, begun);
        if self.terms.settings.caps.reads_specs {
            self.note_foreign(step, outcome, state, ours_after);
            return;
        }
        let known = self.ledger.known.get(&step.instance);
        let entry =
            ledger::Entry::after(step, &expected, &self.terms.settings.owner, known, self.backend.now());
        let entry = ledger::Entry { ours_after: ours_after.or(entry.ours_after), ..entry };
        // After a definite failure it is known that no run took place.
        let once = entry.once && outcome != StepOutcome::Failed;
        // Once the instance can be observed again, a restart shows by its pid.
        let then = self.seen.get(&step.instance).and_then(|seen| seen.process.pid).filter(|_| entry.unsure);
        let entry = ledger::Entry { once, pid: then.or(entry.pid), ..entry };
        self.ledger.known.insert(step.instance.clone(), entry.clone());
        self.ledger.notes.insert(step.instance.clone(), entry);
    }

    /// Where specs are read back, the ledger holds only instances that are not ours.
    fn note_foreign(&mut self, step: &Step, outcome: StepOutcome, state: RowState, ours_after: Option<Time>) {
        let is_known = self.ledger.known.contains_key(&step.instance);
        // A start whose check failed may still come up, and make the next start find it running.
        let is_found =
            ours_after.is_some() && matches!(state, RowState::AlreadyRunning | RowState::CheckFailed);
        let is_answered = matches!(state, RowState::Done | RowState::Unreported);
        let is_ours = is_known && is_answered && outcome.is_well();
        let is_ours = is_ours && matches!(step.op, Op::Start | Op::Supervise | Op::Register);
        let expected = match (is_found, is_ours) {
            (true, _) => Expected::Unknown,
            (false, true) => Expected::Gone,
            (false, false) => return,
        };
        let entry =
            ledger::Entry::after(step, &expected, &self.terms.settings.owner, None, self.backend.now());
        let entry = ledger::Entry { ours_after, once: false, ..entry };
        self.ledger.known.insert(step.instance.clone(), entry.clone());
        self.ledger.notes.insert(step.instance.clone(), entry);
    }

    pub(super) fn skip_rest(&mut self, chains: &mut Chains<'_, '_>, after: &Step) {
        let rest = chains.get_mut(&after.instance).map(std::mem::take).unwrap_or_default();
        for step in rest {
            let why = format!("the preceding {} did not succeed", after.op);
            self.end(step, StepOutcome::Skipped, RowState::Unreported, why, Instant::now());
        }
    }

    pub(in crate::execute) fn subject(&self, step: &Step) -> InstanceQuery {
        let known = self.ledger.known.get(&step.instance).and_then(ledger::Entry::spec);
        let spec = match step.op {
            // The sent spec applies from now on.
            Op::Start | Op::Supervise | Op::Restart | Op::Reload | Op::Register => {
                step.spec.clone().or(known)
            }
            Op::Stop | Op::Kill | Op::Unsupervise | Op::Unregister => known.or_else(|| step.spec.clone()),
        };
        InstanceQuery { instance: step.instance.clone(), host: step.host.clone(), spec }
    }

    pub(super) fn take_unwritten(&mut self) -> Txn {
        ledger::noted(&self.terms.settings.target, &std::mem::take(&mut self.ledger.notes))
    }
}
