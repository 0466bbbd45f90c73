//! Reports of an apply: text, JSON, Markdown and JUnit.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::ApplyArgs;
use crate::backend::RowState;
use crate::cli::commands::plan::args::PlanForm;
use crate::cli::commands::plan::markdown::held_blocks;
use crate::cli::commands::plan::text::held_text;
use crate::cli::output::print::{BOLD, DIM, ERROR, HINT, Printer, WARNING, count, visible};
use crate::cli::target::ConnectedTarget;
use crate::cli::target::access::FORBIDDEN;
use crate::cli::{Exit, Failure};
use crate::contract::{
    ApplyReport, ExitReport, PlanDocument, RolledBackProcess, StepReport, TargetProcess, UnhealthyInstance,
};
use crate::engine::{Conclusion, Report};
use crate::escape;
use crate::execute::{StepOutcome, StepResult};
use crate::model::{Health, HoldReason, Op, Plan, RolloutPause};

/// The result of an apply, as it is rendered.
pub struct ReportView {
    pub ended: Vec<StepResult>,
    pub converged: Option<bool>,
    pub exit: Exit,
    pub reason: Option<&'static str>,
    /// Unhealthy instances, each with the reason.
    pub unhealthy: Vec<(String, Health, String)>,
    /// Processes that were rolled back, each with the reason.
    pub rolled_back: Vec<RolledBackProcess>,
    /// Rollouts that have reached a pause.
    pub pauses: Vec<RolloutPause>,
}

impl ReportView {
    /// The view of a report, and its plan. The reasons of unhealthy instances come from the target, until the time limit.
    pub async fn of(report: Report, live: &ConnectedTarget, deadline: Instant) -> (ReportView, Plan) {
        let Report { plan, ended, converged, conclusion, reason, unhealthy, rolled_back, pauses, .. } =
            report;
        let rolled_back = rolled_back.into_iter();
        let rolled_back =
            rolled_back.map(|(process, why)| RolledBackProcess { process: process.to_string(), why });
        let unhealthy =
            unhealthy.into_iter().map(|one| (one.instance.to_string(), one.health, String::new()));
        let mut unhealthy: Vec<_> = unhealthy.collect();
        let until = if ended.is_empty() { deadline } else { Instant::now() + EXPLAIN_TIMEOUT };
        let _ = tokio::time::timeout_at(until, explain_unhealthy(live, &mut unhealthy)).await;
        let is_forbidden = ended.iter().any(|one| one.state == RowState::Forbidden);
        let (exit, reason) = match (exit(conclusion), reason.map(HoldReason::word)) {
            (Exit::Incomplete, None) if is_forbidden => (Exit::Forbidden, Some(FORBIDDEN)),
            known => known,
        };
        let rolled_back = rolled_back.collect();
        let pauses = pauses.into_iter().filter(|pause| pause.is_reached).collect();
        (ReportView { ended, converged, exit, reason, unhealthy, rolled_back, pauses }, plan)
    }
}

/// Time limit for the reasons of unhealthy instances after the last step.
const EXPLAIN_TIMEOUT: Duration = Duration::from_secs(5);

fn exit(conclusion: Conclusion) -> Exit {
    match conclusion {
        Conclusion::Done => Exit::Done,
        Conclusion::Incomplete => Exit::Incomplete,
        Conclusion::TimedOut | Conclusion::AwaitingPromotion => Exit::TimedOut,
        Conclusion::LeaseLost => Exit::Locked,
        Conclusion::RolledBack => Exit::RolledBack,
        Conclusion::Stopped(code) if code == Exit::Terminated as u8 => Exit::Terminated,
        Conclusion::Stopped(_) => Exit::Interrupted,
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
    original: Option<PlanDocument>,
    report: &ReportView,
    printer: &Printer,
) -> Result<Exit, Failure> {
    // A failed write keeps the report and the exit code.
    if let Some(file) = &args.junit
        && let Err(error) = std::fs::write(file, junit(planned, report))
    {
        printer.warning(&format!("cannot write {}: {error}", file.display()));
    }
    match args.output {
        PlanForm::Json => printer.data(&render_json(original, report)?),
        PlanForm::Markdown => printer.data(&render_markdown(planned, report)),
        PlanForm::Text => printer.styled(&render_text(planned, report)),
    }
    Ok(report.exit)
}

fn render_json(plan: Option<PlanDocument>, report: &ReportView) -> Result<String, Failure> {
    let plan = plan.ok_or_else(|| Failure::new(Exit::Failed, "cannot write JSON: there is no plan"))?;
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
        plan,
        outcomes: outcomes.collect(),
        not_well: unhealthy.collect(),
        rolled_back: report.rolled_back.clone(),
        converged: report.converged.unwrap_or(false),
        exit: ExitReport { code: report.exit as u8, reason: report.reason.map(str::to_owned) },
    };
    let text = serde_json::to_string_pretty(&whole);
    text.map(|text| text + "\n")
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))
}

/// Groups failures, and successes with a note, with the same outcome, operation and message.
fn group_messages(report: &ReportView) -> Vec<(StepOutcome, Op, String, Vec<String>)> {
    let mut groups: Vec<(StepOutcome, Op, String, Vec<String>)> = Vec::new();
    let has_message = |ended: &&StepResult| match ended.outcome {
        StepOutcome::Done => !ended.message.is_empty(),
        outcome => !outcome.is_well(),
    };
    for ended in report.ended.iter().filter(has_message) {
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
async fn explain_unhealthy(live: &ConnectedTarget, unhealthy: &mut [(String, Health, String)]) {
    if unhealthy.is_empty() {
        return;
    }
    let rows = live.rows("&brief=1", BTreeSet::new()).await.unwrap_or_default();
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

fn render_text(planned: &Plan, report: &ReportView) -> String {
    const SHOWN: usize = 5;
    let mut text = String::new();
    for (outcome, op, message, instances) in group_messages(report) {
        let more = instances.len().saturating_sub(SHOWN);
        let names = instances.iter().take(SHOWN).map(|name| visible(name)).collect::<Vec<_>>().join(", ");
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let style = if outcome.is_well() { WARNING } else { ERROR };
        text.push_str(&format!("{style}{}{style:#} {op} {names}{more}\n", outcome.word()));
        text.extend(message.lines().map(|line| format!("    {}\n", visible(line))));
    }
    for (instance, health, why) in &report.unhealthy {
        text.push_str(&format!("{WARNING}{}{WARNING:#} {}\n", health.word(), visible(instance)));
        text.extend(why.lines().map(|line| format!("    {}\n", visible(line))));
    }
    for RolledBackProcess { process, why } in &report.rolled_back {
        let is_complete = if report.exit == Exit::RolledBack { "" } else { ", not completely" };
        text.push_str(&format!("{WARNING}rolled back{is_complete}{WARNING:#} {}\n", visible(process)));
        text.extend(why.lines().map(|line| format!("    {}\n", visible(line))));
    }
    if report.ended.is_empty() {
        // A plan with steps was printed before its approval, with what it holds.
        text.push_str(&held_text(planned));
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
    text.extend(report.pauses.iter().map(|pause| format!("{HINT}rollout{HINT:#}: {}\n", pause_line(pause))));
    text
}

/// The pause of a rollout, and how to continue.
fn pause_line(RolloutPause { process, stage, stages, .. }: &RolloutPause) -> String {
    let (nth, of, process) = (stage + 1, stages.len(), visible(&process.to_string()));
    let name = stages.get(*stage).map(|name| visible(name)).unwrap_or_default();
    format!("{process}: stage {nth} of {of} ({name}) is done: `abide rollout promote {process}` continues")
}

fn is_are(n: usize) -> String {
    format!("{} {}", count(n, "instance"), if n == 1 { "is" } else { "are" })
}

fn render_markdown(planned: &Plan, report: &ReportView) -> String {
    let well = report.ended.iter().filter(|ended| ended.outcome.is_well()).count();
    let end = match report.converged {
        Some(true) => "converged",
        Some(false) => "**not converged**",
        None => "not verified",
    };
    let mut text =
        format!("### abide apply: {well} of {} done, {end}\n\n", count(report.ended.len(), "step"));
    for (outcome, op, message, instances) in group_messages(report) {
        text.push_str(&format!(
            "- **{}** `{op}` on {}\n",
            outcome.word(),
            count(instances.len(), "instance")
        ));
        text.push_str(&escape::block(&message, "  "));
    }
    for (instance, health, why) in &report.unhealthy {
        text.push_str(&format!("- **{}** {}\n", health.word(), escape::code(instance)));
        text.push_str(&escape::block(why, "  "));
    }
    for RolledBackProcess { process, why } in &report.rolled_back {
        text.push_str(&format!("- **rolled back** {}\n", escape::code(process)));
        text.push_str(&escape::block(why, "  "));
    }
    for pause in &report.pauses {
        text.push_str(&format!("- **paused** {}\n", pause_line(pause)));
    }
    text.extend(held_blocks(planned));
    text
}

fn junit(planned: &Plan, report: &ReportView) -> String {
    let steps = planned.steps().count();
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
        // A step of a rollback is a test case of its own: it must not replace the failure of the same name.
        let verb = if ended.step > steps { "roll back: " } else { "" };
        let name = format!("{verb}{} {}", ended.op, ended.instance);
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
            state: crate::backend::RowState::Other(1),
            code: 1,
            message: message.to_owned(),
            took_ms: 1,
            reason: None,
        };
        let report = ReportView {
            ended: vec![ended],
            converged: Some(false),
            exit: Exit::Incomplete,
            reason: None,
            unhealthy: Vec::new(),
            rolled_back: Vec::new(),
            pauses: Vec::new(),
        };
        let markdown = render_markdown(&Plan::default(), &report);
        assert!(!markdown.contains('\r') && markdown.contains("\n  # owned @team"), "{markdown}");
        assert!(markdown.contains("\n  ```\n") && markdown.ends_with("\n  ````\n"), "{markdown}");
        let junit = junit(&Plan::default(), &report);
        assert_eq!(junit.matches("<failure").count(), 1, "{junit}");
        assert!(
            junit.contains("message=\"x&#13;# owned @team &lt;img src=x&gt;&#13;&#10;```&#10;&quot;/&gt;"),
            "{junit}"
        );
        assert!(!junit.contains(['\u{0}', '\u{ffff}']), "{junit}");
    }
}
