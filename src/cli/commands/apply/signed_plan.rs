//! Required signatures: which applies need a signed plan, by the policy of the control host.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::cli::Failure;
use crate::cli::commands::plan::signatures::{VerifiedSigners, signatures, verify};
use crate::cli::output::print::{count, visible};
use crate::clock;
use crate::contract::PlanDocument;
use crate::error_chain::chain;
use crate::model::{ControlHostPolicy, SignatureRule, Time, span};
use crate::permissions::{own_uid, refuse_changeable};
use crate::reconcile::Rules;

/// The machine word of a refusal.
const NOT_SIGNED: &str = "NotSigned";
/// The fields of a plan that its signers see. The inputs are not compared: they are what is applied.
const COMPARED: [&str; 10] =
    ["version", "target", "owner", "source", "id", "summary", "waves", "held", "notes", "gates"];

/// Refuses an apply without the signatures that the policies require. Returns the persons who signed.
pub fn check(rules: &Rules, target: &str, saved: Option<&Value>) -> Result<Vec<String>, Failure> {
    if let Some(why) = saved.and_then(|plan| expiry_problem(plan, clock::now())) {
        let hint = "`abide plan PATH --out FILE`, then `abide plan sign FILE --key KEY`";
        return Err(Failure::refused(NOT_SIGNED, format!("{why}; nothing was done")).hint(hint));
    }
    let mut persons = BTreeSet::new();
    for (policy, rule) in required(rules, target) {
        persons.extend(check_rule(policy, rule, rules, target, saved)?);
    }
    Ok(persons.into_iter().collect())
}

/// Returns the persons whose signatures count for this rule.
fn check_rule(
    policy: &ControlHostPolicy,
    rule: &SignatureRule,
    rules: &Rules,
    target: &str,
    saved: Option<&Value>,
) -> Result<BTreeSet<String>, Failure> {
    let needs = format!(
        "policy {:?} ({}) requires {} for target {target}, owner {:?}",
        policy.name,
        policy.file,
        count(rule.required as usize, "signature"),
        rules.owner
    );
    let refused = |why: &str| Failure::refused(NOT_SIGNED, format!("{needs}: {why}; nothing was done"));
    let Some(plan) = saved else {
        return Err(refused("no signed plan was given").hint(
            "`abide plan PATH --out plan.json`, then `abide plan sign plan.json --key KEY` by each person, then \
             `abide apply plan.json`",
        ));
    };
    if let Some(why) = other_subject(plan, rules, target) {
        return Err(refused(&why));
    }
    if signatures(plan).is_empty() {
        return Err(refused("the plan has no signature").hint("`abide plan sign FILE --key KEY` adds one"));
    }
    if plan["expires"].as_str().is_none() {
        return Err(refused("the plan has no expiry")
            .hint("`abide plan PATH --out FILE`, then `abide plan sign FILE --key KEY`"));
    }
    let signers = rule.allowed_signers.as_path();
    // Another user who could change the file could sign.
    refuse_changeable(signers, own_uid())
        .map_err(|error| refused(&format!("allowed_signers {}: {}", signers.display(), chain(&error))))?;
    let verified = verify(plan, signers).map_err(|error| refused(&error.to_string()))?;
    let VerifiedSigners { persons, rejected } = verified;
    if persons.len() >= rule.required as usize {
        return Ok(persons);
    }
    let by: Vec<String> = persons.iter().map(|person| visible(person)).collect();
    let have = match by.is_empty() {
        true => "the plan has no valid signature".to_owned(),
        false => format!("the plan has {}, by {}", count(by.len(), "valid signature"), by.join(", ")),
    };
    let why: Vec<String> = [have].into_iter().chain(rejected.iter().map(|why| visible(why))).collect();
    Err(refused(&why.join("; ")).hint(match rejected.is_empty() {
        true => "another person runs `abide plan sign FILE --key KEY`",
        false => "`abide plan PATH --out FILE` makes a new plan to sign; each person counts once",
    }))
}

/// Refuses a plan with signatures whose fields are not those of the plan that is made now: fingerprint and steps do not
/// prove that its signers saw the revision and the reasons of what is applied.
pub fn check_content(saved: &Value, now: &PlanDocument) -> Result<(), Failure> {
    if signatures(saved).is_empty() {
        return Ok(());
    }
    let now = serde_json::to_value(now).unwrap_or_default();
    let differs = |field: &&str| comparable(&saved[*field]) != comparable(&now[*field]);
    let Some(field) = COMPARED.into_iter().find(differs) else { return Ok(()) };
    let message = format!(
        "field {field:?} of the signed plan differs from the plan that is made now; nothing was done"
    );
    let hint = "`abide plan PATH --out FILE` makes a new plan to sign";
    Err(Failure::refused(NOT_SIGNED, message).hint(hint))
}

/// A field without the details of held changes: they contain ages.
fn comparable(field: &Value) -> Value {
    let mut field = field.clone();
    for row in field.as_array_mut().into_iter().flatten() {
        if let Some(row) = row.as_object_mut() {
            row.shift_remove("detail");
        }
    }
    field
}

/// Refuses a controller whose target and owner need signed plans: it applies manifests without a saved plan.
pub fn check_controller(rules: &Rules, target: &str) -> Result<(), Failure> {
    let Some((policy, _)) = required(rules, target).next() else { return Ok(()) };
    let message = format!(
        "policy {:?} ({}) requires signed plans for target {target}, owner {:?}: a controller applies manifests without \
         a plan file",
        policy.name, policy.file, rules.owner
    );
    let hint = "apply signed plans; or exclude this owner from `signatures`, and require signed commits with \
                --verify-signatures FILE";
    Err(Failure::refused(NOT_SIGNED, message).hint(hint))
}

/// The rules for a target and an owner, each with its policy.
fn required<'a>(
    rules: &'a Rules,
    target: &'a str,
) -> impl Iterator<Item = (&'a ControlHostPolicy, &'a SignatureRule)> {
    let policies = rules.policy.iter().flat_map(|policy| policy.all());
    let with_rule = policies.filter_map(|policy| Some((policy, policy.signatures.as_ref()?)));
    with_rule.filter(|(_, rule)| rule.applies(target, &rules.owner))
}

/// Reason why a plan's expiry refuses it: it has passed or is not a time. Checked also without a policy.
fn expiry_problem(plan: &Value, now: Time) -> Option<String> {
    let expires = plan["expires"].as_str()?;
    match clock::read(expires) {
        Some(until) if until > now => None,
        Some(until) => Some(format!("the plan expired {} ago, at {until}", span(now.secs_since(until)))),
        None => Some(format!("the plan's expiry {:?} is not an RFC 3339 time", visible(expires))),
    }
}

/// The target or owner of the plan, if it is not that of this apply.
fn other_subject(plan: &Value, rules: &Rules, target: &str) -> Option<String> {
    let subjects = [("target", &plan["target"], target), ("owner", &plan["owner"], rules.owner.as_str())];
    subjects.into_iter().find_map(|(what, planned, now)| {
        let planned = planned.as_str().unwrap_or_default();
        (planned != now).then(|| format!("the plan is for {what} {:?}, not {now:?}", visible(planned)))
    })
}
