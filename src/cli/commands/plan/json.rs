//! Plans as JSON: version 1 of a contract, to which fields are only added.

use serde::Serialize;

use super::args;
use super::input::{PlanDigests, PlanInput};
use crate::cli::{Exit, Failure};
use crate::contract::{
    self, ExitReport, HeldStep, OfflineInputs, PlanDocument, PlanFlags, PlanGate, PlanInputs, PlanSource,
    PlanStep, RefusalReport, StepReason,
};
use crate::engine::history::summary;
use crate::model::{Gate, HeldChange, Plan, Reason, Step, Time};

pub fn plan(input: &PlanInput, plan: &Plan, digests: &PlanDigests) -> Result<String, Failure> {
    print(&document(input, plan, digests))
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
    let flags = PlanFlags {
        target: args.target.target.clone(),
        owner: args.owner.clone(),
        prune: args.claims.prune,
        adopt: args.claims.adopt,
        accept_source: args.claims.accept_source,
        accept_shrink: args.inventory.accept_shrink.clone(),
        max_delete: amount(args.bounds.max_delete),
        max_restart: amount(args.bounds.max_restart),
        override_holds: args.bounds.override_holds,
        stale_after_secs: args.bounds.stale_after,
        break_glass: input.rules.holds.break_glass.clone(),
        namespace: select.namespace.clone(),
        selector: select.selector.as_ref().map(ToString::to_string),
        host: select.host.clone(),
        include: select.include.clone(),
        exclude: select.exclude.clone(),
    };
    let offline = args.offline.observed.as_ref().map(|file| OfflineInputs {
        observed: file.display().to_string(),
        caps: args.offline.caps.name().to_owned(),
        now: args.offline.now.map(|now| now.to_string()),
    });
    let inputs = Some(PlanInputs { paths, flags, offline });
    print(&PlanDocument { inputs, ..document(input, plan, digests) })
}

/// The plan of a command.
pub fn document(input: &PlanInput, plan: &Plan, digests: &PlanDigests) -> PlanDocument {
    let about = PlanHeader {
        target: &input.target,
        owner: &input.rules.owner,
        paths: &input.paths,
        observed_at: input.observed.at,
    };
    controller_plan(&about, plan, digests)
}

/// Target, owner, source and time of a plan.
pub struct PlanHeader<'a> {
    pub target: &'a str,
    pub owner: &'a str,
    pub paths: &'a str,
    pub observed_at: Time,
}

/// A plan of the controller, in the same form.
pub fn controller_plan(about: &PlanHeader<'_>, plan: &Plan, digests: &PlanDigests) -> PlanDocument {
    let PlanDigests { wanted: revision, all: fingerprint, id } = digests.clone();
    PlanDocument {
        version: 1,
        id,
        target: about.target.to_owned(),
        owner: about.owner.to_owned(),
        source: PlanSource { path: about.paths.to_owned(), revision: revision.to_string() },
        observed_at: about.observed_at.to_string(),
        fingerprint,
        summary: summary(plan, &plan.held),
        waves: plan.waves.iter().map(|wave| wave.steps.iter().map(step).collect()).collect(),
        held: plan.held.iter().map(held).collect(),
        notes: plan.notes.clone(),
        gates: gates(plan),
        inputs: None,
        expires: None,
        signatures: Vec::new(),
        redacted: None,
    }
}

fn step(step: &Step) -> PlanStep {
    PlanStep {
        id: step.id.to_string(),
        instance: step.instance.clone(),
        op: step.op,
        spec: step.spec_side,
        pid_stays: step.pid_stays,
        from: step.from.clone(),
        why: step.why.iter().map(reason).collect(),
    }
}

fn held(held: &HeldChange) -> HeldStep {
    HeldStep {
        instance: held.instance.clone(),
        reason: held.reason,
        detail: held.detail.clone(),
        steps: held.steps.clone(),
        why: held.why.iter().map(reason).collect(),
        at: held.at.as_ref().map(ToString::to_string),
    }
}

fn reason(why: &Reason) -> StepReason {
    let Reason { rule, field, old, new, at } = why.clone();
    StepReason { rule, field, old, new, at: at.map(|at| at.to_string()) }
}

/// The gates between waves.
fn gates(plan: &Plan) -> Vec<PlanGate> {
    let one = |wave: usize, gate: &Gate| PlanGate {
        after_wave: wave + 1,
        process: gate.process.clone(),
        soak_secs: gate.soak_secs,
        max_failures: gate.max_failures,
        auto_rollback: gate.auto_rollback,
    };
    let waves = plan.waves.iter().enumerate();
    waves.flat_map(|(at, wave)| wave.gates.iter().map(move |gate| one(at, gate))).collect()
}

/// The JSON of a refusal by a safety check.
pub fn refusal(exit: Exit, reason: Option<&str>) -> String {
    let exit = ExitReport { code: exit as u8, reason: reason.map(str::to_owned) };
    contract::compact(&RefusalReport { exit })
}

fn print(value: &impl Serialize) -> Result<String, Failure> {
    let json = serde_json::to_string_pretty(value);
    json.map(|json| json + "\n")
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))
}
