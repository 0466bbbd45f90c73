//! Published status derivation: status for other commands, from the events of the control loop.

use std::collections::BTreeSet;

use super::{ControllerConfig, ControllerEvent, PassResult};
use crate::contract::PublishedStatus;
use crate::manifest::{Problem, Severity};
use crate::model::HoldReason;
use crate::source::SourceState;

/// Limits of the listed texts.
const MAX_LISTED: usize = 5;
const MAX_CHARS: usize = 200;

/// The status of a controller before its first event.
pub fn initial(config: &ControllerConfig) -> PublishedStatus {
    PublishedStatus {
        owner: config.rules.owner.clone(),
        host: crate::proc::host_name(),
        pid: std::process::id(),
        source: config.manifests.source.clone(),
        follow: config.follow,
        heal: config.heal,
        prune: config.rules.prune,
        ..PublishedStatus::default()
    }
}

/// The effect of an event.
pub fn record(status: &mut PublishedStatus, event: &ControllerEvent<'_>) {
    match event {
        ControllerEvent::Read { reading, revision } => {
            status.revision = revision.to_string();
            status.commit.clone_from(&reading.commit);
            set_errors(status, reading);
        }
        ControllerEvent::Problems { reading } => set_errors(status, reading),
        ControllerEvent::Source { trouble } => {
            status.source_error = trouble.map(|error| shorten(&format!("{}: {error}", error.word())));
        }
        ControllerEvent::Pinned { pin } => status.pinned = Some(pin.revision.to_string()),
        ControllerEvent::Unpinned { .. } => status.pinned = None,
        ControllerEvent::Planned { result } => set_plan(status, result),
        ControllerEvent::Failure { why } => status.failure = Some(shorten(why)),
        ControllerEvent::RevisionNotFollowed { .. }
        | ControllerEvent::Waiting { .. }
        | ControllerEvent::Leading { .. }
        | ControllerEvent::ExecutionStarted { .. }
        | ControllerEvent::StepFinished { .. }
        | ControllerEvent::Soaking { .. }
        | ControllerEvent::Relaunched { .. }
        | ControllerEvent::RolledBack { .. }
        | ControllerEvent::ExecutionFinished { .. }
        | ControllerEvent::Idle { .. }
        | ControllerEvent::PassStarted
        | ControllerEvent::PassFinished { .. }
        | ControllerEvent::Tick => {}
    }
}

fn set_errors(status: &mut PublishedStatus, reading: &SourceState) {
    let errors = reading.problems.iter().filter(|problem| problem.severity == Severity::Error);
    let errors: Vec<&Problem> = errors.collect();
    status.errors = errors.len();
    let shown = |problem: &&Problem| {
        shorten(&format!("{}:{}:{}: {}", problem.file, problem.line, problem.column, problem.message))
    };
    status.first_errors = errors.iter().take(MAX_LISTED).map(shown).collect();
}

fn set_plan(status: &mut PublishedStatus, result: &PassResult) {
    status.failure = None;
    let is_suspended =
        |reason: &HoldReason| matches!(reason, HoldReason::NotConverging | HoldReason::RolledBack);
    let held = result.rules.holds.by_controller.values();
    status.suspended = held.filter(|(reason, _)| is_suspended(reason)).count();
    let gates = result.plan.waves.iter().flat_map(|wave| &wave.gates);
    let rollouts: BTreeSet<String> = gates.map(|gate| gate.process.to_string()).collect();
    status.rollouts = rollouts.into_iter().take(MAX_LISTED).collect();
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
