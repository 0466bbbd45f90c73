//! Redaction for readers without credentials: command lines and environment values of specs are hidden.
//!
//! Every user of the machine can reach a loopback listener and read its responses without the token. Names, states,
//! reasons and counts stay visible. The shape of the JSON is the same, and `redacted: true` marks hidden values.

use crate::contract::{ExitDetails, HistoryEntry, ManifestProblem, PlanDocument, ReportedDetails};
use crate::control::status::{HIDDEN, is_private, may_quote};

/// The part of the data that a reader may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// With the token.
    Full,
    Redacted,
}

/// Redacts a plan: commands and `env` values, old and new.
pub fn plan(mut plan: PlanDocument) -> PlanDocument {
    let steps = plan.waves.iter_mut().flatten().flat_map(|step| &mut step.why);
    let held = plan.held.iter_mut().flat_map(|held| &mut held.why);
    for why in steps.chain(held).filter(|why| why.field.as_deref().is_some_and(is_private)) {
        for side in [&mut why.old, &mut why.new].into_iter().flatten() {
            *side = HIDDEN.to_owned();
        }
    }
    plan.redacted = Some(true);
    plan
}

/// Redacts the details of a process: a message or the detail of an exit may quote output or a command.
pub fn details(details: ReportedDetails, view: View) -> ReportedDetails {
    if view == View::Full {
        return details;
    }
    let last_exit = details.last_exit.map(|exit| ExitDetails { detail: String::new(), ..exit });
    ReportedDetails { message: None, last_exit, ..details }
}

/// Redacts the history: the message of a failed step has output of its process.
pub fn history(mut entries: Vec<HistoryEntry>) -> Vec<HistoryEntry> {
    for step in entries.iter_mut().flat_map(|entry| &mut entry.steps).filter(|step| !step.message.is_empty())
    {
        step.message = HIDDEN.to_owned();
    }
    entries
}

/// Redacts manifest problems: a message about a command or a variable may quote it.
pub fn problems(mut problems: Vec<ManifestProblem>) -> Vec<ManifestProblem> {
    for problem in &mut problems {
        if may_quote(&problem.message) || problem.hint.as_deref().is_some_and(may_quote) {
            problem.message = HIDDEN.to_owned();
            problem.hint = None;
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{HeldStep, OperationCounts, PlanSource, PlanStep, StepReason};
    use crate::model::{HoldReason, Op, Rule, SpecSide};

    fn why(field: Option<&str>) -> StepReason {
        let value = |text: &str| field.map(|_| text.to_owned());
        StepReason {
            rule: Rule::LiveDiffers,
            field: field.map(str::to_owned),
            old: value("a --password x"),
            new: value("b"),
            at: None,
        }
    }

    #[test]
    fn values_of_commands_and_variables_are_hidden_on_both_sides() {
        let instance: crate::model::InstanceKey = "0:10.0.0.1:web:api".parse().expect("a key");
        let step = PlanStep {
            id: "1".to_owned(),
            instance: instance.clone(),
            op: Op::Restart,
            spec: SpecSide::New,
            pid_stays: false,
            from: None,
            why: ["control.start_cmd", "env.TOKEN", "resource.cpu"].map(|field| why(Some(field))).to_vec(),
        };
        let held = HeldStep {
            instance,
            reason: HoldReason::Hold,
            detail: String::new(),
            steps: Vec::new(),
            why: vec![why(Some("control.health_cmd")), why(None)],
            at: None,
        };
        let whole = PlanDocument {
            version: 1,
            id: String::new(),
            target: String::new(),
            owner: String::new(),
            source: PlanSource { path: String::new(), revision: String::new() },
            observed_at: String::new(),
            fingerprint: String::new(),
            summary: OperationCounts::default(),
            waves: vec![vec![step]],
            held: vec![held],
            notes: Vec::new(),
            gates: Vec::new(),
            inputs: None,
            expires: None,
            signatures: Vec::new(),
            redacted: None,
        };
        let hidden = plan(whole);
        let step = &hidden.waves[0][0].why;
        assert_eq!((step[0].old.as_deref(), step[1].new.as_deref()), (Some(HIDDEN), Some(HIDDEN)));
        assert_eq!(step[2].old.as_deref(), Some("a --password x"), "not a command");
        assert_eq!(hidden.held[0].why[0].new.as_deref(), Some(HIDDEN));
        assert_eq!((&hidden.held[0].why[1].old, hidden.redacted), (&None, Some(true)));
    }
}
