//! `abide status`: one screen about a target, and `--check` for scripts.

use std::collections::BTreeMap;

use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::commands::plan::args::SelectArgs;
use crate::cli::commands::rollback::describe_pin;
use crate::cli::commands::up::{count_left_running, unsupervised_message};
use crate::cli::commands::watch::source::short_id;
use crate::cli::declared_names::DeclaredNames;
use crate::cli::local::Home;
use crate::cli::output::print::{BOLD, Printer, WARNING, count, visible};
use crate::cli::sync_status::{ProcessStatus, statuses};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::contract::{
    self, ActiveSource, DriftedFile, NextAction, OutOfSyncInstance, PinnedOwner, PublishedStatus, TargetDown,
    TargetReport,
};
use crate::engine::pin::Pin;
use crate::engine::published_status;
use crate::engine::stored_revisions::{self, ActiveRevision};
use crate::model::{Health, HoldReason, HostKey, InstanceKey, Observed, ObservedInstance, Selection};
use crate::reconcile::SyncStatus;
use crate::store::Error;

/// Show a summary of a target on one screen
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub select: SelectArgs,
    /// Exit with 3 if any process is out of sync, unhealthy or on an unknown host, or if a running `watch` has a problem. Held
    /// and paused processes are ignored, except those `watch`
    /// has given up on
    #[arg(long, env = "ABIDE_CHECK", value_parser = parse_switch)]
    pub check: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_STATUS_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

/// The status of a local system that does not run, with the processes that it left running.
fn not_running_text(target: &TargetArgs) -> Result<String, Failure> {
    let mut text = "the local system is not running: no process is supervised\n".to_owned();
    if target.target == "local" {
        let left = runtime()?.block_on(count_left_running(&Home::find()?));
        if left > 0 {
            text.push_str(&format!("{}\n", unsupervised_message(left)));
        }
    }
    Ok(text)
}

/// Warns that a local system does not run: a reading verb shows none of its processes.
pub fn warn_not_running(target: &TargetArgs, printer: &Printer) -> Result<(), Failure> {
    // A local system that was never started has no processes.
    if target.target != "local" || !Home::find()?.path("gateway/store.db").exists() {
        return Ok(());
    }
    let left = runtime()?.block_on(count_left_running(&Home::find()?));
    let also = if left > 0 { format!("; {}", unsupervised_message(left)) } else { String::new() };
    printer.warning(&format!("the local system is not running, so its processes are not shown{also}"));
    Ok(())
}

pub fn run(args: &StatusArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = args.target.connect(LocalStart::Never)? else {
        match args.output {
            PlainForm::Text => printer.styled(&not_running_text(&args.target)?),
            PlainForm::Json => printer.data(&contract::compact(&TargetDown { running: false })),
        }
        // An earlier local system left processes that are not supervised now.
        let has_state = args.target.target == "local" && Home::find()?.path("gateway/store.db").exists();
        return Ok(if args.check && has_state { Exit::Incomplete } else { Exit::Done });
    };
    let found = runtime()?.block_on(StatusView::read(&live, &args.select.selection()))?;
    let exit = if args.check && !found.is_in_order() { Exit::Incomplete } else { Exit::Done };
    match args.output {
        PlainForm::Json => printer.data(&contract::pretty(&found.report(&live))),
        PlainForm::Text => printer.styled(&found.text(&live)),
    }
    Ok(exit)
}

/// The active revision of an owner.
struct OwnerRevision {
    owner: String,
    revision: ActiveRevision,
    /// Its processes were compared with it. A caller with role `read` gets no stored manifests with secrets.
    is_compared: bool,
}

/// Facts of a target that `status` shows.
struct StatusView {
    hosts: usize,
    hosts_without_agent: usize,
    processes: usize,
    running: usize,
    /// Selected instances that are out of sync or unhealthy, each with the reason.
    wrong: BTreeMap<InstanceKey, String>,
    drifted: Vec<DriftedFile>,
    /// Adopted processes that were not restarted since.
    unknown_specs: Vec<InstanceKey>,
    holds: usize,
    pauses: usize,
    pins: Vec<(String, Pin)>,
    active: Vec<OwnerRevision>,
    controllers: Vec<PublishedStatus>,
}

impl StatusView {
    async fn read(live: &ConnectedTarget, selection: &Selection) -> Result<StatusView, Failure> {
        let mut observed = live.observe_all().await?;
        let hosts = live.hosts(&observed).await?;
        let mut statuses = statuses(live).await?;
        let active = active_revisions(live, &observed, &statuses).await?;
        let (holds, pauses) = live.holds_and_pauses().await?;
        if !selection.is_everything() {
            let declared = DeclaredNames::read(live).await;
            let none = BTreeMap::new();
            statuses.retain(|key, _| {
                let labels = observed.instances.get(key).map_or(&none, |seen| &seen.labels);
                selection.selects(key, declared.of(key), labels)
            });
            observed.instances.retain(|key, seen| selection.selects(key, declared.of(key), &seen.labels));
        }
        // The observed state takes precedence over the manifest's reason.
        let mut wrong: BTreeMap<InstanceKey, String> = statuses
            .iter()
            .filter_map(|(key, status)| Some((key.clone(), out_of_sync_reason(status)?)))
            .collect();
        let unhealthy = |(key, seen): (&InstanceKey, &ObservedInstance)| {
            Some((key.clone(), unhealthy_reason(key, seen, &observed.gaps)?))
        };
        wrong.extend(observed.instances.iter().filter_map(unhealthy));
        Ok(StatusView {
            hosts: hosts.len(),
            hosts_without_agent: hosts.iter().filter(|host| !host.agent).count(),
            processes: observed.instances.len(),
            running: observed.instances.values().filter(|seen| seen.running == Some(true)).count(),
            wrong,
            drifted: observed.instances.iter().flat_map(drifted_files).collect(),
            unknown_specs: unknown_specs(&observed),
            holds: holds.len(),
            pauses: pauses.len(),
            pins: live.pins().await?,
            active,
            controllers: controllers(live).await?,
        })
    }

    /// Whether nothing needs attention: all instances are in sync and healthy, and running controllers follow their
    /// sources.
    fn is_in_order(&self) -> bool {
        self.wrong.is_empty() && self.controllers.iter().all(|one| !one.running || problem(one).is_none())
    }

    fn report(&self, live: &ConnectedTarget) -> TargetReport {
        let wrong = self.wrong.iter();
        TargetReport {
            running: true,
            url: live.backend.url().to_owned(),
            hosts: self.hosts,
            hosts_without_agent: self.hosts_without_agent,
            processes: self.processes,
            processes_running: self.running,
            not_as_told: wrong
                .map(|(key, why)| OutOfSyncInstance { instance: key.clone(), why: why.clone() })
                .collect(),
            unknown_specs: self.unknown_specs.clone(),
            drifted_files: self.drifted.clone(),
            holds: self.holds,
            pauses: self.pauses,
            pins: self.pins.iter().map(pinned_owner).collect(),
            sources: self.active.iter().map(active_source).collect(),
            controllers: self.controllers.clone(),
        }
    }

    /// Counts first, then the instances that need attention, grouped by reason.
    fn text(&self, live: &ConnectedTarget) -> String {
        let mut text = format!("{BOLD}{}{BOLD:#} at {}\n", live.name, live.backend.url());
        text.push_str(&count(self.hosts, "host"));
        match self.hosts_without_agent {
            0 => text.push('\n'),
            missing => text.push_str(&format!(", {missing} without an agent\n")),
        }
        text.push_str(&format!("{}, {} running", count(self.processes, "process"), self.running));
        let parts = [(self.holds, "hold"), (self.pauses, "pause")];
        let parts = parts.into_iter().filter(|(n, _)| *n > 0);
        text.extend(parts.map(|(n, what)| format!(", {}", count(n, what))));
        text.push('\n');
        for OwnerRevision { owner, revision: active, is_compared } in &self.active {
            let commit =
                active.commit.as_deref().map(|id| format!(", commit {}", short_id(id))).unwrap_or_default();
            let (owner, revision, source) =
                (visible(owner), short_id(active.revision.as_str()), visible(&active.source));
            let unknown = if *is_compared {
                ""
            } else {
                "; its manifests cannot be read, so the sync status is unknown"
            };
            text.push_str(&format!("owner {owner:?}: revision {revision}{commit}, from {source}{unknown}\n"));
        }
        for (owner, pin) in &self.pins {
            let (owner, pin) = (visible(owner), describe_pin(pin));
            text.push_str(&format!("owner {owner:?}: {WARNING}pinned{WARNING:#} to {pin}\n"));
        }
        self.controllers.iter().for_each(|one| text.push_str(&controller_text(one)));
        let drift = self.drifted.iter();
        let drift =
            drift.map(|file| (&file.instance, format!("file differs from the configmap: {}", file.path)));
        let wrong = self.wrong.iter().map(|(key, why)| (key, why.clone()));
        text.push_str(&groups(wrong.chain(drift)));
        self.unknown_specs.iter().for_each(|key| text.push_str(&unknown_spec_line(key)));
        if self.wrong.is_empty() {
            text.push_str(match self.active.iter().all(|one| one.is_compared) {
                true => "all processes are in sync and healthy\n",
                false => "no process is known to be out of sync or unhealthy\n",
            });
        }
        text
    }
}

/// The published controllers. Of several owners, those that run come first.
async fn controllers(live: &ConnectedTarget) -> Result<Vec<PublishedStatus>, Failure> {
    let broken = |error: Error| live.failure(&error);
    let leases = live.state.leases().await.map_err(broken)?;
    let mut all = published_status::read(&live.state, &leases).await.map_err(broken)?;
    all.sort_by_key(|one| !one.running);
    Ok(all)
}

/// Obstacles that keep a controller from following its manifests.
fn problem(one: &PublishedStatus) -> Option<String> {
    if let Some(error) = &one.source_error {
        return Some(format!("the source is not followed: {error}"));
    }
    if let Some(failure) = &one.failure {
        return Some(failure.clone());
    }
    let first = one.first_errors.first()?;
    Some(format!("{} in the manifests: {first}", count(one.errors, "error")))
}

fn controller_text(one: &PublishedStatus) -> String {
    let (owner, source, host) = (visible(&one.owner), visible(&one.source), visible(&one.host));
    if !one.running {
        return format!("owner {owner:?}: no controller runs; the last one followed {source}\n");
    }
    let mut text = format!("owner {owner:?}: a controller on {host} (process {}) follows {source}", one.pid);
    let more = [
        (!one.follow).then(|| "without new revisions (--follow no)".to_owned()),
        (one.suspended > 0).then(|| format!("{} suspended", one.suspended)),
        (!one.rollouts.is_empty()).then(|| format!("rolling out {}", visible(&one.rollouts.join(", ")))),
    ];
    text.extend(more.into_iter().flatten().map(|more| format!(", {more}")));
    text.push('\n');
    text.extend(problem(one).map(|why| format!("  {WARNING}!{WARNING:#} {}\n", visible(&why))));
    let failing = one.notify_failures.iter().map(|why| visible(&format!("alerts are not delivered: {why}")));
    text.extend(failing.map(|line| format!("  {WARNING}!{WARNING:#} {line}\n")));
    text
}

/// Instances by reason, the largest group first. Of a long list, some are named and the others counted.
fn groups<'k>(instances: impl Iterator<Item = (&'k InstanceKey, String)>) -> String {
    const NAMED: usize = 5;
    const MAX_GROUPS: usize = 12;
    let mut by_reason: BTreeMap<String, Vec<&InstanceKey>> = BTreeMap::new();
    instances.for_each(|(key, why)| by_reason.entry(why).or_default().push(key));
    let mut groups: Vec<(String, Vec<&InstanceKey>)> = by_reason.into_iter().collect();
    groups.sort_by_key(|(_, keys)| std::cmp::Reverse(keys.len()));
    let mut text = String::new();
    for (why, keys) in groups.iter().take(MAX_GROUPS) {
        for key in keys.iter().take(NAMED) {
            let (key, why) = (visible(&key.to_string()), visible(why));
            text.push_str(&format!("  {WARNING}!{WARNING:#} {key}  {why}\n"));
        }
        if keys.len() > NAMED {
            let more = count(keys.len() - NAMED, "more instance");
            text.push_str(&format!("  {WARNING}!{WARNING:#} and {more}: {}\n", visible(why)));
        }
    }
    if groups.len() > MAX_GROUPS {
        let more: usize = groups[MAX_GROUPS..].iter().map(|(_, keys)| keys.len()).sum();
        let more = count(more, "more instance");
        text.push_str(&format!(
            "  {WARNING}!{WARNING:#} and {more} for other reasons: `abide status -o json`\n"
        ));
    }
    text
}

fn drifted_files((key, seen): (&InstanceKey, &ObservedInstance)) -> Vec<DriftedFile> {
    let file = |path: &String| DriftedFile { instance: key.clone(), path: path.clone() };
    seen.specs.drifted_files.iter().map(file).collect()
}

fn unknown_specs(observed: &Observed) -> Vec<InstanceKey> {
    let unknown = observed.instances.iter().filter(|(_, seen)| seen.specs.is_live_assumed);
    unknown.map(|(key, _)| key.clone()).collect()
}

fn unknown_spec_line(key: &InstanceKey) -> String {
    format!("  {}  runs with an unknown spec: adopted, and not restarted since\n", visible(&key.to_string()))
}

/// The active revision of each owner.
async fn active_revisions(
    live: &ConnectedTarget,
    observed: &Observed,
    statuses: &BTreeMap<InstanceKey, ProcessStatus>,
) -> Result<Vec<OwnerRevision>, Failure> {
    let broken = |error: Error| live.failure(&error);
    let mut all = Vec::new();
    for owner in stored_revisions::owners(&live.state).await.map_err(broken)? {
        let active = stored_revisions::active(&live.state, &owner).await.map_err(broken)?.0;
        let of_owner = |seen: &ObservedInstance| seen.owner.as_deref() == Some(owner.as_str());
        let owned = observed.instances.iter().filter(|(_, seen)| of_owner(seen));
        let mut compared = owned.map(|(key, _)| statuses.contains_key(key)).peekable();
        let is_compared = compared.peek().is_none() || compared.any(|one| one);
        all.extend(active.map(|revision| OwnerRevision { owner, revision, is_compared }));
    }
    Ok(all)
}

fn active_source(OwnerRevision { owner, revision: active, .. }: &OwnerRevision) -> ActiveSource {
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
    let unknown = |next: &NextAction| match next {
        NextAction::Held { held, detail } if held.is_unknown() => Some(format!("unknown: {detail}")),
        NextAction::Held { .. } | NextAction::Step { .. } => None,
    };
    let held = |next: &NextAction| match next {
        NextAction::Held { held, .. } => Some(*held),
        NextAction::Step { .. } => None,
    };
    match status.sync {
        SyncStatus::Held
            if let Some(held) = status.next.iter().find_map(held)
                && given_up.contains(&held) =>
        {
            return Some(format!("out of sync and suspended by watch: {}", held.word()));
        }
        SyncStatus::OutOfSync => {}
        // A declared instance on a host that cannot be observed.
        SyncStatus::Unknown => return status.next.iter().find_map(unknown),
        SyncStatus::InSync | SyncStatus::Held | SyncStatus::Paused | SyncStatus::Orphan => return None,
    }
    let ops = status.next.iter().filter_map(|next| match next {
        NextAction::Step { op, .. } => Some(op.word()),
        NextAction::Held { .. } => None,
    });
    let ops: Vec<&str> = ops.collect();
    Some(format!("out of sync: needs {}", ops.join(", ")))
}

/// Reason why an instance is unhealthy, or differs from its registered spec.
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
