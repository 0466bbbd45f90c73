//! Redaction for readers without credentials: command lines and environment values of specs are hidden.
//!
//! Every user of the machine can reach a loopback listener and read its responses without the token. Names, states,
//! reasons and counts stay visible. The shape of the JSON is the same, and `redacted: true` marks hidden values.

use serde_json::{Value, json};

use crate::control::status::HIDDEN;

/// The part of the data that a reader may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// With the token.
    Full,
    Redacted,
}

/// Redacts a plan of the form `abide plan -o json`: commands and `env` values, old and new.
pub fn plan(mut plan: Value) -> Value {
    let waves = plan["waves"].as_array_mut().into_iter().flatten();
    let steps = waves.filter_map(Value::as_array_mut).flatten();
    steps.for_each(|step| step_reasons(&mut step["why"]));
    plan["held"].as_array_mut().into_iter().flatten().for_each(|held| step_reasons(&mut held["why"]));
    plan["redacted"] = json!(true);
    plan
}

fn step_reasons(whys: &mut Value) {
    for why in whys.as_array_mut().into_iter().flatten() {
        if why["field"].as_str().is_some_and(crate::control::status::is_private) {
            for side in ["old", "new"] {
                if !why[side].is_null() {
                    why[side] = json!(HIDDEN);
                }
            }
        }
    }
}

/// Redacts manifest problems: a message about a command or a variable may quote it.
pub fn problems(mut problems: Value) -> Value {
    for problem in problems.as_array_mut().into_iter().flatten() {
        let quotes = |text: &Value| text.as_str().is_some_and(crate::control::status::may_quote);
        if quotes(&problem["message"]) || quotes(&problem["hint"]) {
            problem["message"] = json!(HIDDEN);
            problem["hint"] = Value::Null;
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_commands_and_variables_are_hidden_on_both_sides() {
        let why =
            |field: &str| json!({"field": field, "old": "a --password x", "new": "b", "rule": "LiveDiffers"});
        let whole = json!({"waves": [[{"why": [why("control.start_cmd"), why("env.TOKEN"), why("resource.cpu")]}]],
                           "held": [{"why": [why("control.health_cmd"), {"field": null, "old": null, "new": null}]}]});
        let hidden = plan(whole);
        let step = &hidden["waves"][0][0]["why"];
        assert_eq!((&step[0]["old"], &step[1]["new"]), (&json!(HIDDEN), &json!(HIDDEN)));
        assert_eq!(step[2]["old"], "a --password x", "not a command");
        assert_eq!(hidden["held"][0]["why"][0]["new"], HIDDEN);
        assert_eq!((&hidden["held"][0]["why"][1]["old"], &hidden["redacted"]), (&Value::Null, &json!(true)));
    }
}
