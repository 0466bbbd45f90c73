//! Plans as JSON: version 1 of a contract, to which fields are only added.

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::args;
use super::input::{PlanDigests, PlanInput};
use crate::cli::{Exit, Failure};
use crate::control::history::summary;
use crate::model::{Gate, HeldChange, InstanceKey, Plan, Step, Time, Why};

#[derive(Serialize)]
struct PlanJson<'a> {
    version: u32,
    id: String,
    target: &'a str,
    owner: &'a str,
    source: Value,
    observed_at: String,
    fingerprint: String,
    summary: Value,
    waves: Vec<Vec<StepJson<'a>>>,
    held: Vec<HeldJson<'a>>,
    notes: &'a [String],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gates: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inputs: Option<Value>,
}

#[derive(Serialize)]
struct StepJson<'a> {
    id: String,
    instance: &'a InstanceKey,
    op: &'static str,
    spec: &'static str,
    pid_stays: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a InstanceKey>,
    #[serde(serialize_with = "serialize_reasons")]
    why: &'a [Why],
}

#[derive(Serialize)]
struct HeldJson<'a> {
    instance: &'a InstanceKey,
    reason: &'static str,
    detail: &'a str,
    steps: Vec<&'static str>,
    #[serde(serialize_with = "serialize_reasons")]
    why: &'a [Why],
    at: Option<String>,
}

fn serialize_reasons<S: Serializer>(all: &[Why], to: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct WhyJson<'a> {
        rule: &'static str,
        field: &'a Option<String>,
        old: &'a Option<String>,
        new: &'a Option<String>,
        at: Option<String>,
    }
    to.collect_seq(all.iter().map(|Why { rule, field, old, new, at }| {
        let at = at.as_ref().map(ToString::to_string);
        WhyJson { rule: rule.word(), field, old, new, at }
    }))
}

pub fn plan(input: &PlanInput, plan: &Plan, digests: &PlanDigests) -> Result<String, Failure> {
    print(&build_from_input(input, plan, digests, None))
}

/// The plan with its inputs, so that `apply` can repeat it. It contains no spec and no secret.
pub fn plan_with_inputs(
    input: &PlanInput,
    plan: &Plan,
    digests: &PlanDigests,
    args: &args::InputArgs,
) -> Result<String, Failure> {
    let select = &args.select;
    let paths: Vec<String> = args.paths.iter().map(|path| path.display().to_string()).collect();
    let amount = |amount: Option<crate::model::Amount>| amount.map(|amount| amount.to_string());
    let inputs = json!({
        "paths": paths,
        "flags": {
            "target": args.target.target,
            "owner": args.owner,
            "prune": args.claims.prune,
            "adopt": args.claims.adopt,
            "accept_source": args.claims.accept_source,
            "max_delete": amount(args.bounds.max_delete),
            "max_restart": amount(args.bounds.max_restart),
            "override_holds": args.bounds.override_holds,
            "stale_after_secs": args.bounds.stale_after,
            "namespace": select.namespace,
            "selector": select.selector.as_ref().map(ToString::to_string),
            "host": select.host,
            "include": select.include,
            "exclude": select.exclude,
        },
        "offline": args.offline.observed.as_ref().map(|file| json!({
            "observed": file.display().to_string(),
            "caps": args.offline.caps.name(),
            "now": args.offline.now.map(|now| now.to_string()),
        })),
    });
    print(&build_from_input(input, plan, digests, Some(inputs)))
}

fn build_from_input<'a>(
    input: &'a PlanInput,
    plan: &'a Plan,
    digests: &PlanDigests,
    inputs: Option<Value>,
) -> PlanJson<'a> {
    let about = PlanHeader {
        target: &input.target,
        owner: &input.rules.owner,
        paths: &input.paths,
        observed_at: input.observed.at,
    };
    build_plan(&about, plan, digests, inputs)
}

/// Target, owner, source and time of a plan.
pub struct PlanHeader<'a> {
    pub target: &'a str,
    pub owner: &'a str,
    pub paths: &'a str,
    pub observed_at: Time,
}

/// A plan of the controller, in the same form.
pub fn controller_plan(about: &PlanHeader<'_>, plan: &Plan, digests: &PlanDigests) -> Value {
    serde_json::to_value(build_plan(about, plan, digests, None)).unwrap_or_default()
}

fn build_plan<'a>(
    about: &PlanHeader<'a>,
    plan: &'a Plan,
    digests: &PlanDigests,
    inputs: Option<Value>,
) -> PlanJson<'a> {
    let PlanDigests { wanted: revision, all: fingerprint, id } = digests.clone();
    PlanJson {
        version: 1,
        id,
        target: about.target,
        owner: about.owner,
        source: json!({"path": about.paths, "revision": revision}),
        observed_at: about.observed_at.to_string(),
        fingerprint,
        summary: summary(plan, &plan.held),
        waves: plan.waves.iter().map(|wave| wave.steps.iter().map(step).collect()).collect(),
        held: plan.held.iter().map(held).collect(),
        notes: &plan.notes,
        gates: gates(plan),
        inputs,
    }
}

fn step(step: &Step) -> StepJson<'_> {
    StepJson {
        id: step.id.to_string(),
        instance: &step.instance,
        op: step.op.word(),
        spec: step.spec_side.word(),
        pid_stays: step.pid_stays,
        from: step.from.as_ref(),
        why: &step.why,
    }
}

fn held(held: &HeldChange) -> HeldJson<'_> {
    HeldJson {
        instance: &held.instance,
        reason: held.reason.word(),
        detail: &held.detail,
        steps: held.steps.iter().map(|op| op.word()).collect(),
        why: &held.why,
        at: held.at.as_ref().map(ToString::to_string),
    }
}

/// The gates between waves.
fn gates(plan: &Plan) -> Vec<Value> {
    let one = |wave: usize, gate: &Gate| {
        json!({
            "after_wave": wave + 1,
            "process": gate.process,
            "soak_secs": gate.soak_secs,
            "max_failures": gate.max_failures,
            "auto_rollback": gate.auto_rollback,
        })
    };
    let waves = plan.waves.iter().enumerate();
    waves.flat_map(|(at, wave)| wave.gates.iter().map(move |gate| one(at, gate))).collect()
}

/// The JSON of a refusal by a safety check.
pub fn refusal(exit: Exit, reason: Option<&str>) -> String {
    format!("{}\n", json!({"exit": {"code": exit as u8, "reason": reason}}))
}

fn print(value: &impl Serialize) -> Result<String, Failure> {
    let json = serde_json::to_string_pretty(value);
    json.map(|json| json + "\n")
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))
}
