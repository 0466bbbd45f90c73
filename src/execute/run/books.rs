//! What is known by the end of each step: its outcome, what it means for the steps after it, and what the ledger is to keep.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::answers::is_once;
use super::{Chains, Run};
use crate::backend::{Backend, Subject};
use crate::execute::doubt::has_run;
use crate::execute::{Ended, Outcome, Told, ledger};
use crate::model::{Op, Step};
use crate::reconcile::{Expected, after};
use crate::store::{Store, Txn};

impl<B: Backend, S: Store> Run<'_, B, S> {
    #[expect(clippy::too_many_arguments, reason = "what a step is closed with, and what goes on after it")]
    pub(super) fn close<'s>(
        &mut self,
        step: &'s Step,
        outcome: Outcome,
        code: i64,
        message: String,
        begun: Instant,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        self.end(step, outcome, code, message, begun);
        match outcome.is_well() {
            true => ready.extend(chains.get_mut(&step.instance).and_then(VecDeque::pop_front)),
            false => self.skip_rest(chains, step),
        }
    }

    pub(super) fn end(&mut self, step: &Step, outcome: Outcome, code: i64, message: String, begun: Instant) {
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (instance, op) = (step.instance.clone(), step.op);
        self.note(step, outcome, code);
        let ended = Ended { step: step.id, instance, op, outcome, code, message, took_ms };
        if !outcome.is_well() && self.failed.insert(step.instance.clone()) && outcome != Outcome::Skipped {
            let declared = self.terms.declared.get(&step.instance).cloned();
            *self.failures.entry(declared.unwrap_or_else(|| step.instance.process())).or_default() += 1;
        }
        (self.told)(Told::Ended(&ended));
        self.ended.push(ended);
    }

    /// How the instance is by now, for the ledger.
    fn note(&mut self, step: &Step, outcome: Outcome, code: i64) {
        if outcome == Outcome::Skipped {
            return;
        }
        // These can be done again without harm: as long as nobody knows better, they were not done.
        let harmless = matches!(step.op, Op::Register | Op::Unregister | Op::Reload | Op::Host);
        if harmless && !outcome.is_well() {
            if let Some(entry) = self.known.get(&step.instance).filter(|_| !self.terms.caps.reads_specs) {
                self.notes.insert(step.instance.clone(), entry.perhaps(step));
            }
            return;
        }
        let expected = match outcome {
            // Nobody stopped it: whether it is still guarded has to be seen.
            Outcome::AlreadySo if code == 829 => Expected::Unsure,
            Outcome::Done | Outcome::AlreadySo => {
                after(step, self.seen.get(&step.instance), &self.terms.owner, &self.terms.caps)
            }
            Outcome::Failed if has_run(step.op, code, is_once(step)) => {
                after(step, self.seen.get(&step.instance), &self.terms.owner, &self.terms.caps)
            }
            Outcome::Failed | Outcome::TimedOut | Outcome::Unknown | Outcome::Skipped => Expected::Unsure,
        };
        if let Expected::So(seen) = &expected {
            self.seen.insert(step.instance.clone(), (**seen).clone());
        }
        if self.terms.caps.reads_specs {
            return;
        }
        let known = self.known.get(&step.instance);
        let entry = ledger::Entry::after(step, &expected, &self.terms.owner, known, self.backend.now());
        // A step that was surely not carried out leaves no doubt about a run.
        let once = entry.once && outcome != Outcome::Failed;
        // Once it can be seen again, a restart shows by its pid.
        let then = self.seen.get(&step.instance).and_then(|seen| seen.pid).filter(|_| entry.unsure);
        let entry = ledger::Entry { once, pid: then.or(entry.pid), ..entry };
        self.known.insert(step.instance.clone(), entry.clone());
        self.notes.insert(step.instance.clone(), entry);
    }

    pub(super) fn skip_rest(&mut self, chains: &mut Chains<'_, '_>, after: &Step) {
        let rest = chains.get_mut(&after.instance).map(std::mem::take).unwrap_or_default();
        for step in rest {
            let why = format!("the {} before it did not end well", after.op);
            self.end(step, Outcome::Skipped, 0, why, Instant::now());
        }
    }

    pub(in crate::execute) fn subject(&self, step: &Step) -> Subject {
        let known = self.known.get(&step.instance).and_then(ledger::Entry::spec);
        let spec = match step.op {
            // What is sent is what it is from now on.
            Op::Start | Op::Host | Op::Restart | Op::Reload | Op::Register => step.spec.clone().or(known),
            Op::Stop | Op::Kill | Op::Unhost | Op::Unregister => known.or_else(|| step.spec.clone()),
        };
        Subject { instance: step.instance.clone(), host: step.host.clone(), spec }
    }

    pub(super) fn take_notes(&mut self) -> Txn {
        ledger::noted(&self.terms.target, &std::mem::take(&mut self.notes))
    }
}
