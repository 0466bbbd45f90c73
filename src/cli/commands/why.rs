//! `abide why`: the events of an instance, oldest first, its present state and its next operation.

use crate::cli::args::PlainForm;
use crate::cli::commands::describe::next_text;
use crate::cli::commands::manual::InstanceArgs;
use crate::cli::commands::status::warn_not_running;
use crate::cli::commands::watch::source::short_id;
use crate::cli::instance_details::{InstanceFacts, no_match};
use crate::cli::output::age::local_and_age;
use crate::cli::output::print::{BOLD, DIM, Printer, visible};
use crate::cli::output::table::{Align, pad};
use crate::cli::process_listing;
use crate::cli::target::{ConnectedTarget, LocalStart, runtime};
use crate::cli::{Exit, Failure};
use crate::clock::{self, now};
use crate::contract::{self, HistoryEntry, InstanceTimeline, TargetProcess, TimelineEvent};
use crate::engine::stored_revisions::{self, ActiveRevision};
use crate::model::{InstanceKey, SyncStatus, Time};

/// Show the events of a process and its next operation
///
/// Each line is an event: the active manifest and its commit, the runs that operated the process with their results, and
/// its exits. The last lines are the present state, and the next operation or the reason why the process is held.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  abide why web/api\n  abide why web/api@10.0.0.1 -o json")]
pub struct WhyArgs {
    #[command(flatten)]
    pub instances: InstanceArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_WHY_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &WhyArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.instances.target.connect(LocalStart::Never)?;
    let timelines = match &live {
        None => {
            warn_not_running(&args.instances.target, printer)?;
            Vec::new()
        }
        Some(live) => runtime()?.block_on(timelines(live, args, printer))?,
    };
    if args.output == PlainForm::Json {
        printer.data(&contract::pretty(&timelines));
    }
    if timelines.is_empty() {
        let note = live.as_ref().and_then(ConnectedTarget::list_note);
        no_match(&args.instances, note).iter().for_each(|line| printer.info(line));
    } else if args.output == PlainForm::Text {
        let now = now();
        printer.styled(&timelines.iter().map(|story| render(story, now)).collect::<Vec<_>>().join("\n"));
    }
    Ok(Exit::Done)
}

async fn timelines(
    live: &ConnectedTarget,
    args: &WhyArgs,
    printer: &Printer,
) -> Result<Vec<InstanceTimeline>, Failure> {
    let facts = InstanceFacts::read(live, &args.instances).await?;
    facts.missing.iter().for_each(|message| printer.info(message));
    let mut timelines = Vec::new();
    for row in &facts.rows {
        let status = facts.statuses.get(row.instance());
        let listed = row.clone().listed(status.map_or(SyncStatus::Unknown, |status| status.sync));
        let active = match listed.row.owner.as_deref() {
            Some(owner) => {
                stored_revisions::active(&live.state, owner).await.map_err(|error| live.failure(&error))?.0
            }
            None => None,
        };
        let mut events = events(row, &facts);
        events.extend(status.and(active).map(|active| activation(&active)));
        events.sort_by_key(|event| clock::read(&event.at));
        timelines.push(InstanceTimeline {
            instance: row.instance().clone(),
            declared: status.and_then(|status| status.declared.clone()),
            events,
            state: process_listing::state(&listed),
            next_action: status.map(|status| status.next.clone()),
            process: listed,
        });
    }
    Ok(timelines)
}

/// The event of the activation of the manifests.
fn activation(active: &ActiveRevision) -> TimelineEvent {
    let commit =
        active.commit.as_deref().map(|commit| format!(", commit {}", short_id(commit))).unwrap_or_default();
    let revision = short_id(active.revision.as_str());
    event(active.at.to_string(), "manifest", format!("{} active, revision {revision}{commit}", active.source))
}

fn event(at: String, kind: &str, text: String) -> TimelineEvent {
    TimelineEvent { at, kind: kind.to_owned(), text }
}

/// The events of an instance, unsorted.
fn events(row: &TargetProcess, facts: &InstanceFacts) -> Vec<TimelineEvent> {
    let instance = row.instance();
    let mut events: Vec<TimelineEvent> =
        facts.history.iter().filter_map(|run| operated(run, instance)).collect();
    if let TargetProcess::Gateway(process) = row {
        events.extend(
            process.registered_at.iter().map(|at| event(at.clone(), "registered", "registered".to_owned())),
        );
        events.extend(process.exits.iter().flatten().map(|exit| {
            let mut text = exit.reason.clone();
            match (exit.signal, exit.code) {
                (Some(signal), _) => text.push_str(&format!(" by signal {signal}")),
                (None, Some(code)) => text.push_str(&format!(" with code {code}")),
                (None, None) => {}
            }
            let detail = if exit.detail.is_empty() { String::new() } else { format!(": {}", exit.detail) };
            event(exit.time.clone(), "exit", format!("{text} (pid {}){detail}", exit.pid))
        }));
        events.extend(process.started.iter().filter(|_| process.running).map(|at| {
            let pid = process.pid.map(|pid| format!(" as pid {pid}")).unwrap_or_default();
            event(at.clone(), "start", format!("started{pid}"))
        }));
    }
    events
}

/// The operations of a run on the instance, with results.
fn operated(run: &HistoryEntry, instance: &InstanceKey) -> Option<TimelineEvent> {
    let steps = run.steps.iter().filter(|step| step.instance == *instance);
    let done = steps.map(|step| match step.message.is_empty() {
        true => format!("{} {}", step.op, step.outcome.word()),
        false => format!(
            "{} {}: {}",
            step.op,
            step.outcome.word(),
            step.message.lines().collect::<Vec<_>>().join(" ")
        ),
    });
    let done: Vec<String> = done.collect();
    let commit =
        run.commit.as_deref().map(|commit| format!(", commit {}", short_id(commit))).unwrap_or_default();
    let revision = short_id(&run.revision);
    (!done.is_empty()).then(|| {
        let done = done.join(", ");
        let text = format!("{done} (by {}, source {}, revision {revision}{commit})", run.by, run.source);
        event(run.at.clone(), "operation", text)
    })
}

fn render(story: &InstanceTimeline, now: Time) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}\n", visible(&story.instance.to_string()));
    let mut line = |name: &str, value: &str| {
        text.push_str(&format!("  {DIM}{}{DIM:#}  {value}\n", pad(name, 11, Align::Left)));
    };
    match (&story.declared, &story.process.row.owner) {
        (Some(place), Some(owner)) => {
            line("declared", &format!("{} (owner {})", visible(place), visible(owner)))
        }
        (Some(place), None) => line("declared", &visible(place)),
        (None, Some(owner)) => {
            line("declared", &format!("by no active manifest of owner {}", visible(owner)))
        }
        (None, None) => line("declared", "by no active manifest; no owner"),
    }
    for event in &story.events {
        let at = local_and_age(&event.at, now).unwrap_or_else(|| visible(&event.at));
        line(&event.kind, &format!("{at}  {}", visible(&event.text)));
    }
    line("now", &process_listing::state_sentence(&story.process, now));
    if let Some(message) = story.process.message.as_deref().and_then(|text| text.lines().next()) {
        line("message", &visible(message));
    }
    let next = story
        .next_action
        .as_deref()
        .map_or("unknown: no active revision to compare with".to_owned(), next_text);
    line("next", &next);
    text
}
