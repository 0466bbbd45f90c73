//! Reports of an apply: text, JSON, Markdown and JUnit.

use std::collections::HashMap;
use std::path::Path;

use super::ApplyArgs;
use crate::cli::commands::plan::args::PlanForm;
use crate::cli::commands::plan::input::{PlanDigests, PlanInput};
use crate::cli::commands::plan::json as plan_json;
use crate::cli::output::print::{BOLD, DIM, ERROR, HINT, Printer, WARNING, count, visible};
use crate::cli::target::ConnectedTarget;
use crate::cli::{Exit, Failure};
use crate::contract::{ApplyReport, ExitReport, PlanDocument, StepReport, TargetProcess, UnhealthyInstance};
use crate::escape;
use crate::execute::{StepOutcome, StepResult};
use crate::model::{Health, HoldReason, Op, Plan};

/// The result of an apply.
pub struct Report {
    pub ended: Vec<StepResult>,
    /// A new plan is empty and all instances are healthy; `None`: not verified.
    pub converged: Option<bool>,
    pub exit: Exit,
    pub reason: Option<&'static str>,
    /// Instances that are in sync but unhealthy.
    pub unhealthy: Vec<(String, Health, String)>,
}

impl Report {
    /// Makes `converged` and the reason consistent with the exit code: an apply converged if and only if it exits with 0, and
    /// only exit code 3 has a reason.
    pub fn with_consistent_exit(mut self) -> Report {
        self.converged = self.converged.map(|converged| converged && self.exit == Exit::Done);
        self.reason = self.reason.filter(|_| self.exit == Exit::Incomplete);
        self
    }
}

/// The reason of an incomplete apply if it is ownership alone. Other held reasons are in the plan.
pub fn sole_reason(reasons: impl Iterator<Item = Option<HoldReason>>) -> Option<&'static str> {
    let mut all: Vec<Option<HoldReason>> = reasons.collect();
    all.dedup();
    match all[..] {
        [Some(reason @ HoldReason::NotOwned)] => Some(reason.word()),
        _ => None,
    }
}

/// The plan before the first step.
pub struct OriginalPlan {
    pub digests: PlanDigests,
    pub document: PlanDocument,
}

impl OriginalPlan {
    pub fn of(input: &PlanInput, planned: &Plan) -> OriginalPlan {
        let digests = input.digests(planned);
        let document = plan_json::document(input, planned, &digests);
        OriginalPlan { digests, document }
    }
}

/// Checks before the first step that the file for the report can be written.
pub fn check_writable(file: &Path) -> Result<(), Failure> {
    let existed = file.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
    opened.map_err(|error| {
        let message = format!("cannot write {}: {error}", file.display());
        Failure::new(Exit::Failed, message).hint("nothing was done")
    })?;
    if !existed {
        let _ = std::fs::remove_file(file);
    }
    Ok(())
}

pub fn show(
    args: &ApplyArgs,
    planned: &Plan,
    before: &OriginalPlan,
    report: &Report,
    printer: &Printer,
) -> Result<Exit, Failure> {
    // A failed write keeps the report and the exit code.
    if let Some(file) = &args.junit
        && let Err(error) = std::fs::write(file, junit(report))
    {
        printer.warning(&format!("cannot write {}: {error}", file.display()));
    }
    match args.output {
        PlanForm::Json => printer.data(&render_json(before, report)?),
        PlanForm::Markdown => printer.data(&render_markdown(report)),
        PlanForm::Text => printer.styled(&render_text(planned, report)),
    }
    Ok(report.exit)
}

fn render_json(before: &OriginalPlan, report: &Report) -> Result<String, Failure> {
    let outcomes = report.ended.iter().map(|ended| StepReport {
        step: ended.step.to_string(),
        instance: ended.instance.clone(),
        op: ended.op,
        outcome: ended.outcome,
        code: ended.code,
        message: ended.message.clone(),
        took_ms: ended.took_ms,
        reason: ended.reason,
    });
    let unhealthy = report.unhealthy.iter().map(|(instance, health, why)| UnhealthyInstance {
        instance: instance.clone(),
        health: *health,
        why: why.clone(),
    });
    let whole = ApplyReport {
        version: 1,
        plan: before.document.clone(),
        outcomes: outcomes.collect(),
        not_well: unhealthy.collect(),
        converged: report.converged.unwrap_or(false),
        exit: ExitReport { code: report.exit as u8, reason: report.reason.map(str::to_owned) },
    };
    let text = serde_json::to_string_pretty(&whole);
    text.map(|text| text + "\n")
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))
}

/// Groups failures with the same outcome, operation and message.
fn group_failures(report: &Report) -> Vec<(StepOutcome, Op, String, Vec<String>)> {
    let mut groups: Vec<(StepOutcome, Op, String, Vec<String>)> = Vec::new();
    for ended in report.ended.iter().filter(|ended| !ended.outcome.is_well()) {
        let same = |group: &&mut (StepOutcome, Op, String, Vec<String>)| {
            (group.0, group.1, group.2.as_str()) == (ended.outcome, ended.op, ended.message.as_str())
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.3.push(ended.instance.to_string()),
            None => groups.push((
                ended.outcome,
                ended.op,
                ended.message.clone(),
                vec![ended.instance.to_string()],
            )),
        }
    }
    groups
}

/// Sets the reason of each unhealthy instance: the agent's message, else the meaning of its health.
pub async fn explain_unhealthy(live: &ConnectedTarget, unhealthy: &mut [(String, Health, String)]) {
    if unhealthy.is_empty() {
        return;
    }
    let rows = live.rows("&brief=1").await.unwrap_or_default();
    let by_instance: HashMap<String, &TargetProcess> =
        rows.iter().map(|row| (row.instance().to_string(), row)).collect();
    for (instance, health, why) in unhealthy {
        let row = by_instance.get(instance.as_str());
        let message = row.and_then(|row| row.message()).filter(|message| !message.is_empty());
        let exit = row.and_then(|row| row.exit());
        *why = match (message, exit, *health) {
            (Some(message), _, _) => message.to_owned(),
            (None, Some(code), _) => format!("exited with code {code}"),
            (None, None, Health::Degraded) => "health_cmd fails".to_owned(),
            (None, None, _) => "the process keeps exiting; `abide logs` prints its output".to_owned(),
        };
    }
}

fn render_text(planned: &Plan, report: &Report) -> String {
    const SHOWN: usize = 5;
    let mut text = String::new();
    for (outcome, op, message, instances) in group_failures(report) {
        let more = instances.len().saturating_sub(SHOWN);
        let names = instances.iter().take(SHOWN).map(|name| visible(name)).collect::<Vec<_>>().join(", ");
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        text.push_str(&format!("{ERROR}{}{ERROR:#} {op} {names}{more}\n", outcome.word()));
        text.extend(message.lines().map(|line| format!("    {}\n", visible(line))));
    }
    for (instance, health, why) in &report.unhealthy {
        text.push_str(&format!("{WARNING}{}{WARNING:#} {}\n", health.word(), visible(instance)));
        text.extend(why.lines().map(|line| format!("    {}\n", visible(line))));
    }
    if report.ended.is_empty() {
        let held = planned.held.len();
        let rest = if held > 0 { format!("; {} held", count(held, "instance")) } else { String::new() };
        text.push_str(&format!("{BOLD}Nothing to do{BOLD:#}: {} as wanted{rest}\n", is_are(planned.in_sync)));
        return text;
    }
    let mut words: Vec<String> = Vec::new();
    for outcome in StepOutcome::ALL {
        let many = report.ended.iter().filter(|ended| ended.outcome == outcome).count();
        if many > 0 {
            words.push(format!("{many} {}", outcome.word()));
        }
    }
    let slowest =
        report.ended.iter().filter(|ended| ended.outcome.is_well()).max_by_key(|ended| ended.took_ms);
    let slowest = slowest.map(|ended| {
        format!(
            "  {DIM}slowest: {} {} ({} ms){DIM:#}",
            ended.op,
            visible(&ended.instance.to_string()),
            ended.took_ms
        )
    });
    let end = match report.converged {
        Some(true) => format!("{HINT}converged{HINT:#}"),
        Some(false) => format!("{WARNING}not converged{WARNING:#}"),
        None => "not verified".to_owned(),
    };
    text.push_str(&format!("{BOLD}{}{BOLD:#}: {end}{}\n", words.join(", "), slowest.unwrap_or_default()));
    text
}

fn is_are(n: usize) -> String {
    format!("{} {}", count(n, "instance"), if n == 1 { "is" } else { "are" })
}

fn render_markdown(report: &Report) -> String {
    let well = report.ended.iter().filter(|ended| ended.outcome.is_well()).count();
    let end = match report.converged {
        Some(true) => "converged",
        Some(false) => "**not converged**",
        None => "not verified",
    };
    let mut text = format!("### abide apply: {well} of {} steps done, {end}\n\n", report.ended.len());
    for (outcome, op, message, instances) in group_failures(report) {
        text.push_str(&format!(
            "- **{}** `{op}` on {}\n",
            outcome.word(),
            count(instances.len(), "instance")
        ));
        text.push_str(&escape::block(&message, "  "));
    }
    text
}

fn junit(report: &Report) -> String {
    let failures = report
        .ended
        .iter()
        .filter(|ended| {
            matches!(ended.outcome, StepOutcome::Failed | StepOutcome::TimedOut | StepOutcome::Unknown)
        })
        .count();
    let skipped = report.ended.iter().filter(|ended| ended.outcome == StepOutcome::Skipped).count();
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"abide apply\" tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\">\n",
        report.ended.len()
    );
    for ended in &report.ended {
        let secs = ended.took_ms as f64 / 1000.0;
        let name = format!("{} {}", ended.op, ended.instance);
        text.push_str(&format!(
            "  <testcase classname=\"{}\" name=\"{}\" time=\"{secs:.3}\"",
            escape::xml(&ended.instance.process().to_string()),
            escape::xml(&name)
        ));
        let message = escape::xml(&ended.message);
        match ended.outcome {
            StepOutcome::Done | StepOutcome::AlreadySo => text.push_str("/>\n"),
            StepOutcome::Skipped => text.push_str(&format!("><skipped message=\"{message}\"/></testcase>\n")),
            outcome => text.push_str(&format!(
                "><failure type=\"{}\" message=\"{message}\"/></testcase>\n",
                outcome.word()
            )),
        }
    }
    text + "</testsuite>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages contain output of the failed process.
    #[test]
    fn a_message_does_not_become_markup() {
        let message = "x\r# owned @team <img src=x>\r\n```\n\"/><failure a=\"\u{0}\u{ffff}";
        let ended = StepResult {
            step: 1,
            instance: "0:127.0.0.1:web:api".parse().expect("a key"),
            op: Op::Start,
            outcome: StepOutcome::Failed,
            code: 1,
            message: message.to_owned(),
            took_ms: 1,
            reason: None,
        };
        let report = Report {
            ended: vec![ended],
            converged: Some(false),
            exit: Exit::Incomplete,
            reason: None,
            unhealthy: Vec::new(),
        };
        let markdown = render_markdown(&report);
        assert!(!markdown.contains('\r') && markdown.contains("\n  # owned @team"), "{markdown}");
        assert!(markdown.contains("\n  ```\n") && markdown.ends_with("\n  ````\n"), "{markdown}");
        let junit = junit(&report);
        assert_eq!(junit.matches("<failure").count(), 1, "{junit}");
        assert!(
            junit.contains("message=\"x&#13;# owned @team &lt;img src=x&gt;&#13;&#10;```&#10;&quot;/&gt;"),
            "{junit}"
        );
        assert!(!junit.contains(['\u{0}', '\u{ffff}']), "{junit}");
    }
}
