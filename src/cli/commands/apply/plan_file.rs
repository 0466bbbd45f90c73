//! Saved plans: their manifests and flags, and the check that a new plan is equal.

use serde_json::Value;

use super::ApplyArgs;
use super::report::OriginalPlan;
use crate::cli::commands::plan::input::PlanInput;
use crate::cli::{Exit, Failure};
use crate::model::Plan;

/// Loads a saved plan and replaces the arguments with its manifests and flags. `None`: PATH is not a plan file.
pub fn load_plan_file(args: &mut ApplyArgs) -> Result<Option<Value>, Failure> {
    let [file] = args.input.paths.as_slice() else { return Ok(None) };
    if file.extension().is_none_or(|extension| extension != "json") && !file.is_file() {
        return Ok(None);
    }
    let Some(plan) =
        std::fs::read_to_string(file).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok())
    else {
        return Ok(None);
    };
    if plan["inputs"]["paths"].as_array().is_none() || plan["fingerprint"].as_str().is_none() {
        return Ok(None);
    }
    let shown = file.display().to_string();
    let wrong = |what: &str| Failure::new(Exit::Usage, format!("{shown}: {what}"));
    if !plan["inputs"]["offline"].is_null() {
        return Err(wrong("cannot apply an offline plan (--observed)"));
    }
    let typed = std::mem::replace(&mut args.input.target.target, "local".to_owned());
    args.input.restore_from(&plan["inputs"]).map_err(|why| wrong(&why))?;
    if typed != "local" && typed != args.input.target.target {
        let what = format!("this plan is for target {}, not {typed}", args.input.target.target);
        return Err(wrong(&what));
    }
    Ok(Some(plan))
}

/// Refuses a saved plan unless a new plan has the same fingerprint and steps.
pub fn check_unchanged(saved: &Value, input: &PlanInput, planned: &Plan) -> Result<(), Failure> {
    let now = OriginalPlan::of(input, planned);
    let again = serde_json::to_value(&now.document).unwrap_or_default();
    let steps = |plan: &Value| -> Vec<String> {
        let waves = plan["waves"].as_array().into_iter().flatten();
        let steps = waves.flat_map(|wave| wave.as_array().into_iter().flatten());
        steps.map(|step| format!("{} {} {}", step["instance"], step["op"], step["spec"])).collect()
    };
    if saved["fingerprint"] == now.digests.all.as_str() && steps(saved) == steps(&again) {
        return Ok(());
    }
    let message = "the plan is stale: manifests, flags or the observed state changed since it was made";
    Err(Failure::refused("StalePlan", message).hint("plan again, and review the new plan"))
}
