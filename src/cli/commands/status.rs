//! `abide status`: one screen about a target, and `--check` for scripts.

use std::collections::BTreeMap;

use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::commands::rollback::describe_pin;
use crate::cli::commands::watch::source::short_id;
use crate::cli::local::Home;
use crate::cli::output::print::{BOLD, Printer, WARNING, count, visible};
use crate::cli::sync_status::{ProcessStatus, statuses};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::contract::{
    self, ActiveSource, NextAction, OutOfSyncInstance, PinnedOwner, TargetDown, TargetReport,
};
use crate::control::pin::Pin;
use crate::control::stored_revisions::{self, ActiveRevision};
use crate::model::{Health, HoldReason, HostKey, InstanceKey, ObservedInstance};
use crate::reconcile::SyncStatus;
use crate::store::Error;

/// Show a summary of a target on one screen
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Exit with 3 if any process is out of sync or unhealthy. Held and paused processes are ignored, except those `watch`
    /// has given up on
    #[arg(long, env = "ABIDE_CHECK", value_parser = parse_switch)]
    pub check: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_STATUS_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &StatusArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = args.target.connect(LocalStart::Never)? else {
        match args.output {
            PlainForm::Text => printer.styled("the local system is not running: no process is supervised\n"),
            PlainForm::Json => printer.data(&contract::compact(&TargetDown { running: false })),
        }
        // An earlier local system left processes that are not supervised now.
        let has_state = args.target.target == "local" && Home::find()?.path("gateway/store.db").exists();
        return Ok(if args.check && has_state { Exit::Incomplete } else { Exit::Done });
    };
    let (observed, hosts, (holds, pauses), pins, statuses, active) = runtime()?.block_on(async {
        let observed = live.observe_all().await?;
        let hosts = live.hosts(&observed).await?;
        let statuses = statuses(&live).await?;
        let active = active_revisions(&live).await?;
        Ok::<_, Failure>((observed, hosts, live.restraints().await?, live.pins().await?, statuses, active))
    })?;
    // The observed state takes precedence over the manifest's reason.
    let mut wrong: BTreeMap<&InstanceKey, String> =
        statuses.iter().filter_map(|(key, status)| Some((key, out_of_sync_reason(status)?))).collect();
    let unhealthy = |(key, seen)| Some((key, unhealthy_reason(key, seen, &observed.gaps)?));
    wrong.extend(observed.instances.iter().filter_map(unhealthy));
    let running = observed.instances.values().filter(|seen| seen.running == Some(true)).count();
    let unknown_specs: Vec<&InstanceKey> = observed
        .instances
        .iter()
        .filter(|(_, seen)| seen.specs.is_live_assumed)
        .map(|(key, _)| key)
        .collect();
    let dead = hosts.iter().filter(|host| !host.agent).count();
    let exit = if args.check && !wrong.is_empty() { Exit::Incomplete } else { Exit::Done };
    if args.output == PlainForm::Json {
        let wrong = wrong.iter();
        let whole = TargetReport {
            running: true,
            url: live.backend.url().to_owned(),
            hosts: hosts.len(),
            hosts_without_agent: dead,
            processes: observed.instances.len(),
            processes_running: running,
            not_as_told: wrong
                .map(|(key, why)| OutOfSyncInstance { instance: (*key).clone(), why: why.clone() })
                .collect(),
            unknown_specs: unknown_specs.into_iter().cloned().collect(),
            holds: holds.len(),
            pauses: pauses.len(),
            pins: pins.iter().map(pinned_owner).collect(),
            sources: active.iter().map(active_source).collect(),
        };
        printer.data(&contract::pretty(&whole));
        return Ok(exit);
    }
    let mut text = format!("{BOLD}{}{BOLD:#} at {}\n", live.name, live.backend.url());
    text.push_str(&format!("{}, {dead} without an agent\n", count(hosts.len(), "host")));
    text.push_str(&format!("{}, {running} running", count(observed.instances.len(), "process")));
    let restraints = [(holds.len(), "hold"), (pauses.len(), "pause")].into_iter().filter(|(n, _)| *n > 0);
    text.extend(restraints.map(|(n, what)| format!(", {}", count(n, what))));
    text.push('\n');
    for (owner, active) in &active {
        let commit =
            active.commit.as_deref().map(|id| format!(", commit {}", short_id(id))).unwrap_or_default();
        let (owner, revision, source) =
            (visible(owner), short_id(active.revision.as_str()), visible(&active.source));
        text.push_str(&format!("{owner:?}: revision {revision}{commit}, from {source}\n"));
    }
    for (owner, pin) in &pins {
        let (owner, pin) = (visible(owner), describe_pin(pin));
        text.push_str(&format!("{owner:?} is {WARNING}pinned{WARNING:#} to {pin}\n"));
    }
    for (key, why) in &wrong {
        text.push_str(&format!("  {WARNING}!{WARNING:#} {}  {}\n", visible(&key.to_string()), visible(why)));
    }
    unknown_specs.into_iter().for_each(|key| text.push_str(&unknown_spec_line(key)));
    if wrong.is_empty() {
        text.push_str("all processes are in sync and healthy\n");
    }
    printer.styled(&text);
    Ok(exit)
}

fn unknown_spec_line(key: &InstanceKey) -> String {
    format!("  {}  runs with an unknown spec: adopted, and not restarted since\n", visible(&key.to_string()))
}

/// The active revision of each owner.
async fn active_revisions(live: &ConnectedTarget) -> Result<Vec<(String, ActiveRevision)>, Failure> {
    let broken = |error: Error| live.failure(&error);
    let mut all = Vec::new();
    for owner in stored_revisions::owners(&live.state).await.map_err(broken)? {
        let active = stored_revisions::active(&live.state, &owner).await.map_err(broken)?.0;
        all.extend(active.map(|active| (owner, active)));
    }
    Ok(all)
}

fn active_source((owner, active): &(String, ActiveRevision)) -> ActiveSource {
    ActiveSource {
        owner: owner.clone(),
        revision: active.revision.to_string(),
        commit: active.commit.clone(),
        source: active.source.clone(),
        since: active.at.to_string(),
    }
}

fn pinned_owner((owner, pin): &(String, Pin)) -> PinnedOwner {
    PinnedOwner {
        owner: owner.clone(),
        revision: pin.revision.to_string(),
        commit: pin.commit.clone(),
        since: pin.since.to_string(),
        by: pin.by.clone(),
        reason: pin.reason.clone(),
    }
}

/// The operations that would bring an instance in sync. Held instances count as in sync, except those that `watch` has
/// given up on.
fn out_of_sync_reason(status: &ProcessStatus) -> Option<String> {
    let given_up = [HoldReason::NotConverging, HoldReason::RolledBack];
    let held = |next: &NextAction| match next {
        NextAction::Held { held, .. } => Some(*held),
        NextAction::Step { .. } => None,
    };
    match status.sync {
        SyncStatus::Held
            if let Some(held) = status.next.iter().find_map(held)
                && given_up.contains(&held) =>
        {
            return Some(format!("out of sync, and watch has given up: {}", held.word()));
        }
        SyncStatus::OutOfSync => {}
        SyncStatus::InSync
        | SyncStatus::Unknown
        | SyncStatus::Held
        | SyncStatus::Paused
        | SyncStatus::Orphan => return None,
    }
    let ops = status.next.iter().filter_map(|next| match next {
        NextAction::Step { op, .. } => Some(op.word()),
        NextAction::Held { .. } => None,
    });
    let ops: Vec<&str> = ops.collect();
    Some(format!("out of sync: needs {}", ops.join(", ")))
}

/// Why an instance is unhealthy, or differs from its registered spec.
fn unhealthy_reason(
    key: &InstanceKey,
    seen: &ObservedInstance,
    gaps: &BTreeMap<HostKey, String>,
) -> Option<String> {
    use crate::model::{AutoType, KnownSpec};
    if let Some(why) = gaps.get(&key.host) {
        return Some(why.clone());
    }
    let kind = seen.specs.registered.spec().map(|spec| spec.monitor.auto_type);
    match (seen.health, seen.running, &seen.specs.registered, &seen.specs.live) {
        (health @ (Health::Failed | Health::Degraded), _, _, _) => Some(health.word().to_owned()),
        (_, Some(false), _, _)
            if seen.hosted == Some(true) && kind == Some(AutoType::Resident) && !seen.completed =>
        {
            Some("supervised but not running".to_owned())
        }
        (_, Some(true), KnownSpec::Full(given), KnownSpec::Full(live)) if !given.is_equivalent(live) => {
            Some("runs with a spec other than the registered one".to_owned())
        }
        _ => None,
    }
}
