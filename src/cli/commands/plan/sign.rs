//! `abide plan sign`: adds the signature of a person to a saved plan.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::groups::reason;
use super::signatures::{PlanSignatureError, fingerprint, public_key, sign, signatures};
use super::write_atomically;
use crate::cli::commands::apply::is_saved_plan;
use crate::cli::commands::plan::args::duration;
use crate::cli::output::print::{Printer, count, visible};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::model::{Reason, Rule, Time, span};

/// Time until a signed plan expires, in seconds.
const EXPIRES: u64 = 86_400;
/// Maximum time until a signed plan expires, in seconds.
const MAX_EXPIRES: u64 = 30 * 86_400;
/// The default of `--stale-after`, in seconds.
const STALE_AFTER: u64 = 600;
/// Maximum steps that are shown.
const MAX_SHOWN: usize = 50;

/// Sign a saved plan with an ssh key
///
/// Shows the plan, and adds a signature to its file. Several persons may sign: the policy of the control host sets which
/// plans need signatures, and how many. `abide apply FILE` refuses a plan that was changed, or that has expired.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide plan manifests --out plan.json\n  abide plan sign plan.json --key ~/.ssh/id_ed25519\n  abide apply plan.json"
)]
pub struct SignArgs {
    /// File of `abide plan --out`
    #[arg(value_name = "PLANFILE")]
    pub file: PathBuf,
    /// ssh key: a private key, or the public key of one that an ssh agent holds
    #[arg(long, value_name = "KEY", env = "ABIDE_SIGN_KEY")]
    pub key: PathBuf,
    /// Time until the plan expires, at most 30 days [default: 24h]; the first signature sets it
    #[arg(long, value_name = "TIME", env = "ABIDE_EXPIRES", value_parser = duration)]
    pub expires: Option<u64>,
}

pub fn run(args: &SignArgs, printer: &Printer) -> Result<Exit, Failure> {
    let file = args.file.display();
    let failed = |why: String| Failure::new(Exit::Failed, format!("{file}: {why}"));
    let text = std::fs::read_to_string(&args.file).map_err(|error| failed(error.to_string()))?;
    let plan = serde_json::from_str::<Value>(&text).ok().filter(is_saved_plan);
    let Some(mut plan) = plan else {
        let message = format!("{file} is not a saved plan");
        return Err(Failure::new(Exit::Usage, message).hint("`abide plan PATH --out FILE` writes one"));
    };
    if !plan["inputs"]["offline"].is_null() {
        return Err(Failure::new(
            Exit::Usage,
            format!("{file}: cannot sign an offline plan (--observed), which is never applied"),
        ));
    }
    set_expiry(&mut plan, args.expires).map_err(|why| Failure::new(Exit::Usage, format!("{file}: {why}")))?;
    show(&plan, printer);
    let signature = sign(&plan, &args.key).map_err(|error| sign_failure(&error, args))?;
    let key = public_key(&signature);
    let known: Vec<String> = signatures(&plan).into_iter().map(str::to_owned).collect();
    let expires = plan["expires"].as_str().unwrap_or_default().to_owned();
    let named = fingerprint(&signature).unwrap_or_default();
    if known.iter().any(|known| public_key(known) == key) {
        printer.info(&format!("{file} already has a signature of key {named}"));
        return Ok(Exit::Done);
    }
    let all: Vec<String> = known.into_iter().chain([signature]).collect();
    let signed = count(all.len(), "signature");
    plan["signatures"] = json!(all);
    let text = serde_json::to_string_pretty(&plan).map_err(|error| failed(error.to_string()))?;
    write_atomically(&args.file, &(text + "\n")).map_err(|error| failed(format!("cannot write: {error}")))?;
    printer.info(&format!("{file} is signed with key {named}: it has {signed} and expires at {expires}"));
    Ok(Exit::Done)
}

/// Reason why a plan cannot be signed with this expiry.
#[derive(Debug, thiserror::Error)]
enum ExpiryError {
    #[error("the plan expired {0} ago: `abide plan PATH --out FILE` makes a new one to sign")]
    Expired(String),
    #[error("the plan's expiry {0:?} is not an RFC 3339 time")]
    NotATime(String),
    #[error("--expires cannot change a plan that is signed: sign without --expires, or make a new plan")]
    Fixed,
    #[error("the plan has signatures but no expiry: make a new plan")]
    Missing,
    #[error("a signed plan must expire within 30 days: this one expires in {0}")]
    TooFar(String),
}

/// The expiry is part of what is signed: the first signature sets it. One in a plan without signatures is replaced: its
/// writer has not signed.
fn set_expiry(plan: &mut Value, requested: Option<u64>) -> Result<(), ExpiryError> {
    let now = clock::now();
    if signatures(plan).is_empty() {
        let secs = requested.unwrap_or(EXPIRES);
        if secs > MAX_EXPIRES {
            return Err(ExpiryError::TooFar(span(secs)));
        }
        // Whole seconds read better.
        plan["expires"] = json!(Time(now.after_secs(secs).0 / 1000 * 1000).to_string());
        return Ok(());
    }
    if requested.is_some() {
        return Err(ExpiryError::Fixed);
    }
    match plan["expires"].as_str() {
        Some(expires) => check_expiry(expires, now),
        None => Err(ExpiryError::Missing),
    }
}

fn check_expiry(expires: &str, now: Time) -> Result<(), ExpiryError> {
    let Some(until) = clock::read(expires) else { return Err(ExpiryError::NotATime(expires.to_owned())) };
    if until <= now {
        return Err(ExpiryError::Expired(span(now.secs_since(until))));
    }
    match until.secs_since(now) {
        secs if secs > MAX_EXPIRES => Err(ExpiryError::TooFar(span(secs))),
        _ => Ok(()),
    }
}

/// Prints the signed content: target, owner, revision, expiry, flags, and steps with their reasons.
fn show(plan: &Value, printer: &Printer) {
    let text = |value: &Value| visible(value.as_str().unwrap_or("?"));
    let waves = plan["waves"].as_array().into_iter().flatten();
    let steps: Vec<&Value> = waves.flat_map(|wave| wave.as_array().into_iter().flatten()).collect();
    let revision: String = text(&plan["source"]["revision"]).chars().take(12).collect();
    let mut shown = format!(
        "target {}, owner {}, revision {revision} of {}: {}\n",
        text(&plan["target"]),
        text(&plan["owner"]),
        text(&plan["source"]["path"]),
        count(steps.len(), "step")
    );
    shown.push_str(&format!("expires {}\n", text(&plan["expires"])));
    for (flag, value) in flags(plan) {
        shown.push_str(&format!("flag {flag}: {value}\n"));
    }
    for step in steps.iter().take(MAX_SHOWN) {
        shown.push_str(&format!("  {} {}\n", text(&step["op"]), text(&step["instance"])));
        for why in step["why"].as_array().into_iter().flatten() {
            shown.push_str(&format!("    {}\n", reason_text(why)));
        }
    }
    if steps.len() > MAX_SHOWN {
        shown.push_str(&format!("  and {} more\n", steps.len() - MAX_SHOWN));
    }
    for note in plan["notes"].as_array().into_iter().flatten() {
        shown.push_str(&format!("note: {}\n", text(note)));
    }
    printer.data(&shown);
}

/// The flags of the plan that are not the default. Target and owner are shown otherwise.
fn flags(plan: &Value) -> Vec<(String, String)> {
    let is_default = |name: &str, value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Number(_) => name == "stale_after_secs" && value.as_u64() == Some(STALE_AFTER),
        Value::String(_) => matches!(name, "target" | "owner"),
        Value::Bool(true) | Value::Object(_) => false,
    };
    let flags = plan["inputs"]["flags"].as_object().into_iter().flatten();
    let others = flags.filter(|(name, value)| !is_default(name.as_str(), value));
    others.map(|(name, value)| (visible(name), visible(&value.to_string()))).collect()
}

/// The reason of a step in a line: the field with both values in full, or the state that the step ends.
fn reason_text(why: &Value) -> String {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let side = |value: &Value| value.as_str().map_or("unset".to_owned(), visible);
    if let Some(field) = why["field"].as_str() {
        return format!("{}: {} → {}", visible(field), side(&why["old"]), side(&why["new"]));
    }
    let word = why["rule"].as_str().unwrap_or("?");
    match Rule::ALL.into_iter().find(|rule| rule.word() == word) {
        Some(rule) => {
            reason(&Reason { rule, field: None, old: text(&why["old"]), new: text(&why["new"]), at: None })
        }
        None => visible(word),
    }
}

fn sign_failure(error: &PlanSignatureError, args: &SignArgs) -> Failure {
    let message = format!("cannot sign with {}: {error}", args.key.display());
    let failure = Failure::new(Exit::Failed, message);
    match error {
        PlanSignatureError::NoProgram => failure.hint("install the ssh client (openssh-client)"),
        PlanSignatureError::Refused(_) => {
            failure.hint("--key names a private ssh key, or the public key of one that an ssh agent holds")
        }
        PlanSignatureError::Program(_)
        | PlanSignatureError::Temporary(_)
        | PlanSignatureError::NoSignature => failure,
    }
}
