//! Saved plans: their manifests, flags, fingerprint and steps.

use serde_json::Value;

use super::ApplyArgs;
use crate::cli::commands::plan::signatures::{digest, signatures};
use crate::cli::{Exit, Failure};
use crate::engine::SavedPlan;

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
    if !is_saved_plan(&plan) {
        return Ok(None);
    }
    let shown = file.display().to_string();
    let wrong = |what: &str| Failure::new(Exit::Usage, format!("{shown}: {what}"));
    if !plan["inputs"]["offline"].is_null() {
        return Err(wrong("cannot apply an offline plan (--observed)"));
    }
    let typed = std::mem::replace(&mut args.input.target.target, "local".to_owned());
    let owner = args.input.owner.take();
    let break_glass = args.input.break_glass.reason()?;
    if break_glass.is_some() && break_glass.as_deref() != plan["inputs"]["flags"]["break_glass"].as_str() {
        let hint = "`abide plan PATH --break-glass --reason TEXT --out FILE` makes a plan with it";
        return Err(wrong("the plan was made without this --break-glass and --reason").hint(hint));
    }
    args.input.restore_from(&plan["inputs"]).map_err(|why| wrong(&why.to_string()))?;
    if typed != "local" && typed != args.input.target.target {
        let what = format!("this plan is for target {}, not {typed}", args.input.target.target);
        return Err(wrong(&what));
    }
    if let Some(owner) = owner.filter(|owner| plan["owner"].as_str() != Some(owner)) {
        let planned = plan["owner"].as_str().unwrap_or_default();
        return Err(wrong(&format!("this plan is for owner {planned:?}, not {owner:?}")));
    }
    Ok(Some(plan))
}

/// Whether a document is a plan of `plan --out`.
pub fn is_saved_plan(plan: &Value) -> bool {
    plan["inputs"]["paths"].as_array().is_some() && plan["fingerprint"].as_str().is_some()
}

/// Fingerprint and steps of a saved plan.
pub fn saved_plan(plan: &Value) -> SavedPlan {
    let waves = plan["waves"].as_array().into_iter().flatten();
    let steps = waves.flat_map(|wave| wave.as_array().into_iter().flatten());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let line =
        |step: &Value| format!("{} {} {}", text(&step["instance"]), text(&step["op"]), text(&step["spec"]));
    SavedPlan {
        fingerprint: text(&plan["fingerprint"]),
        revision: text(&plan["source"]["revision"]),
        steps: steps.map(line).collect(),
        signed_by: Vec::new(),
        signed_plan: (!signatures(plan).is_empty()).then(|| digest(plan)),
    }
}
