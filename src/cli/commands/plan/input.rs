//! Plan inputs of a verb: manifests, prefetched observation and rules from flags.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing::info;

use super::args;
use super::policy::{check_owner, check_policy};
use crate::access::AccessRole;
use crate::cli::inventories::{self, LoadedManifests};
use crate::cli::local::Home;
use crate::cli::output::print::{self, Printer, count};
use crate::cli::target::{ConnectedTarget, LocalStart, runtime, two_rows};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::control::spec_history::{HistorySearch, ManifestHistory};
use crate::engine::PlanRequest;
pub use crate::engine::{PlanDigests, PlanInput};
use crate::inventory::ResolvedInventories;
use crate::manifest::{Loaded, Severity, rows};
use crate::model::{Desired, DesiredInstance, InstanceKey, Now, Observed, Plan};
use crate::observe::ObserveError;
use crate::reconcile::{Caps, Rules};
use crate::source::git::work_tree;
use crate::source::set_default_user;

/// Inputs of a plan without the observed state.
pub struct DesiredInput {
    loaded: Loaded,
    rules: Rules,
    now: Now,
    inventories: ResolvedInventories,
}

impl DesiredInput {
    /// Refuses a tree with errors: a plan of the other files would silently omit processes.
    pub fn read(args: &args::InputArgs, printer: &Printer) -> Result<DesiredInput, Failure> {
        let begin = Instant::now();
        let limits = args.limits.limits();
        let owner = |desired: &Desired| {
            let owner = super::owner::owner(args.owner.as_deref(), desired, &args.target)?;
            Ok(owner.unwrap_or_else(|| "default".to_owned()))
        };
        let (sources, is_offline) = ((&args.target, &args.inventory), args.offline.observed.is_some());
        let LoadedManifests { loaded, inventories } =
            inventories::load(&args.paths, &limits, sources, owner, is_offline, printer)?;
        info!(files = loaded.files, instances = loaded.desired.instances.len(), took = ?begin.elapsed(), "manifests read");
        let wanted = DesiredInput::of(loaded, args, printer)?;
        Ok(DesiredInput { inventories, ..wanted })
    }

    /// The inventories that were read. After an apply their hosts are the last good ones.
    pub fn take_inventories(&mut self) -> ResolvedInventories {
        std::mem::take(&mut self.inventories)
    }

    /// Like [`DesiredInput::read`], for manifests that are already loaded.
    pub fn of(
        mut loaded: Loaded,
        args: &args::InputArgs,
        printer: &Printer,
    ) -> Result<DesiredInput, Failure> {
        let break_glass = args.break_glass.reason()?;
        let policy = args.bounds.read_policy()?;
        if let Some(policy) = &policy {
            check_policy(policy, &mut loaded);
        }
        let shown = loaded.problems.iter().filter(|p| p.severity == Severity::Error || !printer.is_quiet());
        printer.to_stderr(&shown.map(|problem| print::problem(problem) + "\n").collect::<String>());
        if loaded.errors() > 0 {
            let message =
                format!("{} in the manifests: nothing was planned", count(loaded.errors(), "error"));
            return Err(Failure::new(Exit::InvalidManifest, message));
        }
        let caps = match args.offline.observed {
            Some(_) => args.offline.caps,
            None => args.target.caps()?,
        };
        check_target_fields(&loaded, args, &caps)?;
        if is_local(args) && args.offline.observed.is_none() {
            // The local agent runs processes without a `user` as the current user.
            if let Some(me) = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten() {
                set_default_user(&mut loaded.desired, &me.name);
            }
        }
        let now = match args.offline.now {
            Some(moment) => clock::at(moment, &loaded.desired),
            None => clock::with_zones(&loaded.desired),
        };
        let mut rules = Rules { policy, ..rules(args, caps, &loaded)? };
        rules.holds.break_glass = break_glass;
        if let Some(policy) = &rules.policy {
            check_owner(policy, &rules.owner)?;
        }
        let meant = |key: &InstanceKey, want: &DesiredInstance| {
            rules.selection.selects(key, Some(&want.origin.declared), &want.spec.labels)
        };
        if !rules.selection.is_everything()
            && !loaded.desired.instances.iter().any(|(key, want)| meant(key, want))
        {
            printer.warning("no process in the manifests matches this selection");
        }
        Ok(DesiredInput { loaded, rules, now, inventories: ResolvedInventories::default() })
    }

    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Whether no manifest was found: an empty directory is more often a mistake than a request.
    pub fn is_without_files(&self) -> bool {
        self.loaded.files == 0 && self.loaded.desired.instances.is_empty()
    }

    pub fn desired(&self) -> &Desired {
        &self.loaded.desired
    }

    /// The request of a plan for a target. `source`: see [`PlanRequest::source`].
    pub fn request(self, args: &args::InputArgs, source: Option<String>) -> PlanRequest<HistorySearch> {
        let limits = args.limits.limits();
        let past = ManifestHistory::Paths(args.paths.clone());
        let DesiredInput { loaded, rules, now, .. } = self;
        PlanRequest {
            loaded,
            limits: limits.clone(),
            rules,
            now,
            source,
            accept_source: args.claims.accept_source,
            activates: true,
            shown_source: shown_paths(args),
            search: HistorySearch { past, commit: None, limits },
        }
    }

    /// A plan without a target: for the rows of --observed, or for a local system that was never started.
    fn plan_offline(self, args: &args::InputArgs, printer: &Printer) -> Result<(PlanInput, Plan), Failure> {
        let DesiredInput { loaded, rules, now, .. } = self;
        let observed = read_rows(args, &now, printer)?.normalize_host_keys(&loaded.desired);
        let observed = observed.map_err(|instance| two_rows(&ObserveError::Ambiguous(instance)))?;
        let (target, offline) = (args.target.target.clone(), args.offline.observed.is_some());
        let paths = shown_paths(args);
        let (pin, computed_revision) = (None, OnceLock::new());
        let input =
            PlanInput { loaded, observed, rules, now, target, paths, offline, pin, computed_revision };
        let plan = input.plan();
        Ok((input, plan))
    }
}

/// Reads all inputs and plans. Does not start the local system.
pub fn read_and_plan(args: &args::InputArgs, printer: &Printer) -> Result<(PlanInput, Plan), Failure> {
    let early = Prefetch::start(args, Duration::MAX);
    let wanted = DesiredInput::read(args, printer)?;
    let live = match (args.offline.observed.as_ref(), early) {
        (Some(_), _) => None,
        (None, Some(early)) => Some(early.join()),
        (None, None) => args.target.connect(LocalStart::Never)?.map(Arc::new),
    };
    let Some(live) = live else {
        let is_down = args.offline.observed.is_none();
        if is_down && Home::find().is_ok_and(|home| home.path("gateway/store.db").exists()) {
            printer.warning(
                "the local system is not running, so its processes are not observed; `abide up` starts it again",
            );
        }
        return wanted.plan_offline(args, printer);
    };
    let source = Some(work_tree::of_paths(&args.paths));
    let planned = runtime()?.block_on(async {
        live.check_desired(wanted.desired(), &wanted.rules, AccessRole::Read).await?;
        wanted.request(args, source).plan(&*live).await.map_err(|error| live.apply_failure(&error))
    });
    let (input, plan, _) = planned?;
    Ok((input, plan))
}

/// The paths as written on the command line.
fn shown_paths(args: &args::InputArgs) -> String {
    let paths: Vec<_> = args.paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(" ")
}

/// Observation of an Abide gateway while the manifests are loaded. The gateway returns all instances, so it needs no
/// manifests first.
pub struct Prefetch {
    live: Arc<ConnectedTarget>,
    thread: JoinHandle<()>,
}

impl Prefetch {
    /// `None`: the target is not running, or is not an Abide gateway.
    pub fn start(args: &args::InputArgs, at_most: Duration) -> Option<Prefetch> {
        if args.offline.observed.is_some() {
            return None;
        }
        let live = Arc::new(args.target.connect(LocalStart::Never).ok()??);
        let target = Arc::clone(&live);
        target.abide().ok()?;
        let prefetch = move || {
            if let (Ok(abide), Ok(runtime)) = (target.abide(), runtime()) {
                let _ = runtime.block_on(async { tokio::time::timeout(at_most, abide.prefetch()).await });
            }
        };
        let thread = std::thread::Builder::new().name("prefetch".to_owned()).spawn(prefetch).ok()?;
        Some(Prefetch { live, thread })
    }

    /// The target. Its next observation is the prefetched one.
    pub fn join(self) -> Arc<ConnectedTarget> {
        let _ = self.thread.join();
        self.live
    }
}

/// Rows of --observed. Without it the local system was never started, so the observed state is empty.
fn read_rows(args: &args::InputArgs, now: &Now, printer: &Printer) -> Result<Observed, Failure> {
    let Some(file) = &args.offline.observed else {
        return Ok(Observed { at: now.at, ..Observed::default() });
    };
    if file == Path::new("-") && args.paths.iter().any(|path| path == Path::new("-")) {
        return Err(Failure::new(
            Exit::Usage,
            "manifests and --observed cannot both come from standard input",
        ));
    }
    let read = rows::read(file, args.limits.max_file_bytes, args.offline.now);
    let (observed, odd) = read.map_err(|faults| {
        Failure::new(Exit::Failed, format!("{}: {}", file.display(), faults.join("\n  ")))
            .hint("a list of rows: [{\"instance\": \"0:10.0.0.1:web:api\", \"running\": true, …}]")
    })?;
    odd.iter().for_each(|odd| printer.warning(&format!("{}: {}", file.display(), print::visible(odd))));
    Ok(observed)
}

fn rules(args: &args::InputArgs, caps: Caps, loaded: &Loaded) -> Result<Rules, Failure> {
    let mut rules = Rules::new(caps);
    let owner = super::owner::owner(args.owner.as_deref(), &loaded.desired, &args.target)?;
    if args.claims.prune {
        super::owner::may_prune(owner.as_deref(), is_local(args))?;
    }
    if args.claims.prune && loaded.desired.instances.is_empty() {
        let message =
            "the manifests declare no processes, and --prune would delete all of the owner's processes";
        let hint = "to delete processes, set `state: absent` for each";
        return Err(Failure::refused("EmptySet", message).hint(hint));
    }
    rules.owner = owner.unwrap_or(rules.owner);
    rules.prune = args.claims.prune;
    rules.adopt = args.claims.adopt;
    rules.budgets = args.bounds.budgets();
    rules.holds.override_manual = args.bounds.override_holds;
    rules.stale_after_secs = Some(args.bounds.stale_after);
    rules.selection = args.select.selection();
    Ok(rules)
}

/// An offline plan is for the kind of target in --caps.
fn is_local(args: &args::InputArgs) -> bool {
    args.target.target == "local" && args.offline.caps == Caps::LOCAL
}

/// Requires what a target needs and the local agent chooses itself: a user, and on other platforms a pid file, which only a
/// daemon writes.
fn check_target_fields(loaded: &Loaded, args: &args::InputArgs, caps: &Caps) -> Result<(), Failure> {
    let (needs_user, needs_pid) = (!is_local(args), *caps != Caps::LOCAL);
    let mut lines = BTreeSet::new();
    let (mut without_user, mut without_pid) = (false, false);
    for want in loaded.desired.instances.values() {
        let (spec, origin) = (&want.spec, &want.origin);
        let no_user = needs_user && spec.identity.user.is_none();
        let no_pid = needs_pid && spec.identity.pid_path.is_empty();
        let missing = match (no_user, no_pid) {
            (false, false) => continue,
            (true, false) => "no spec.identity.user",
            (false, true) => "no spec.identity.pid_path",
            (true, true) => "neither spec.identity.user nor spec.identity.pid_path",
        };
        (without_user, without_pid) = (without_user | no_user, without_pid | no_pid);
        let needs = if no_user && no_pid { "them" } else { "it" };
        lines.insert((
            &origin.place,
            format!("process \"{}\" has {missing}, and {} needs {needs}", origin.declared, caps.name()),
        ));
    }
    if lines.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = lines.iter().map(|(place, line)| format!("{place}: {line}")).collect();
    let hint = match (without_user, without_pid) {
        (true, false) => "set spec.identity.user to the user of the process".to_owned(),
        (user, _) => {
            let user = if user { "`user`, " } else { "" };
            format!(
                "set {user}`mode: daemon` and spec.identity.pid_path, the pid file that the daemon writes"
            )
        }
    };
    Err(Failure::new(Exit::InvalidManifest, lines.join("\nerror: ")).hint(hint))
}
