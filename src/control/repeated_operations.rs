//! Repeated operations: those that an instance needed again, and the differences that they repaired, as text.

use std::collections::BTreeSet;

use crate::model::{Op, Rule, Step};

/// The operations of one instance and the differences that they repair.
#[derive(Debug, Default, PartialEq)]
pub(super) struct RepeatedOperations {
    pub(super) ops: Vec<Op>,
    /// States of the process that the operations end, as predicates.
    states: BTreeSet<&'static str>,
    fields: BTreeSet<String>,
}

impl RepeatedOperations {
    pub(super) fn add(&mut self, step: &Step) {
        self.ops.push(step.op);
        for why in &step.why {
            match &why.field {
                Some(field) => self.fields.insert(field.clone()),
                None => self.states.insert(unwanted_state(why.rule)),
            };
        }
    }

    /// "`start`", "`unhost`, `start`".
    pub(super) fn operations(&self) -> String {
        let words: Vec<String> = self.ops.iter().map(|op| format!("`{}`", op.word())).collect();
        words.join(", ")
    }

    /// "the process was not running again", "the difference returned (not running, `user` differs)".
    pub(super) fn returned(&self) -> String {
        let mut states = self.states.iter().copied();
        match (states.next(), states.next(), self.fields.is_empty()) {
            (None, _, true) => "the same operations were needed again".to_owned(),
            (Some(state), None, true) => format!("the process was {state} again"),
            _ => {
                let states = self.states.iter().map(|state| (*state).to_owned());
                let fields = self.fields.iter().map(|field| format!("`{field}` differs"));
                let all: Vec<String> = states.chain(fields).collect();
                format!("the difference returned ({})", all.join(", "))
            }
        }
    }
}

/// The state that a step with this reason ends.
fn unwanted_state(rule: Rule) -> &'static str {
    match rule {
        Rule::NotRegistered => "not registered",
        Rule::NotRunning => "not running",
        Rule::NotHosted => "not supervised",
        Rule::Hosted => "supervised",
        Rule::GivenDiffers => "registered with another spec",
        Rule::LiveDiffers => "running with another spec",
        Rule::SpecUnknown => "running with an unknown spec",
        Rule::NotRun => "not run with this spec",
        Rule::StateStopped => "running or supervised",
        Rule::StateAbsent | Rule::Orphan => "registered",
        Rule::Adopted => "without an owner",
        Rule::Moved => "registered by its earlier name",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::testing::start_step;
    use crate::model::Reason;

    #[test]
    fn a_suspension_names_each_operation_and_each_difference() {
        let why = |rule, field: Option<&str>| {
            let field = field.map(str::to_owned);
            Reason { rule, field, old: None, new: None, at: None }
        };
        let mut repeated = RepeatedOperations::default();
        let mut step = start_step("0:10.0.0.1:web:api".parse().expect("a key"));
        step.why = vec![why(Rule::NotRunning, None)];
        repeated.add(&step);
        assert_eq!(RepeatedOperations::default().returned(), "the same operations were needed again");
        assert_eq!(repeated.operations(), "`start`");
        assert_eq!(repeated.returned(), "the process was not running again");
        step.op = Op::Unsupervise;
        step.why = vec![why(Rule::Hosted, None)];
        repeated.add(&step);
        assert_eq!(repeated.operations(), "`start`, `unhost`");
        assert_eq!(repeated.returned(), "the difference returned (not running, supervised)");
        step.why = vec![why(Rule::GivenDiffers, Some("env.B")), why(Rule::GivenDiffers, Some("env.A"))];
        repeated.add(&step);
        assert_eq!(
            repeated.returned(),
            "the difference returned (not running, supervised, `env.A` differs, `env.B` differs)"
        );
        let only_fields = RepeatedOperations { states: BTreeSet::new(), ..repeated };
        assert_eq!(only_fields.returned(), "the difference returned (`env.A` differs, `env.B` differs)");
    }
}
