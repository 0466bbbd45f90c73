//! Inputs of a plan: manifests, observed state, rules and time.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing::info;

use super::args;
use crate::cli::local::Home;
use crate::cli::output::print::{self, Printer, count};
use crate::cli::target::{ConnectedTarget, LocalStart, namespaces, runtime, two_rows};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::control::spec_history::{ManifestHistory, SearchCache};
use crate::execute::world::ObserveError;
use crate::manifest::{self, Limits, Loaded, Severity, rows};
use crate::model::{Desired, DesiredInstance, InstanceKey, ManifestRevision, Now, Observed, Plan};
use crate::reconcile::spec_recovery::missing;
use crate::reconcile::{Caps, Rules, fingerprint, reconcile};
use crate::source::git::work_tree;
use crate::source::set_default_user;

pub struct PlanInput {
    pub loaded: Loaded,
    pub observed: Observed,
    pub rules: Rules,
    pub now: Now,
    pub target: String,
    /// As written on the command line.
    pub paths: String,
    /// The observed state comes from a file, not from a target.
    pub offline: bool,
    old: SpecLookup,
}

/// Lookup of earlier specs in the manifests' history, with cached results.
struct SpecLookup {
    past: ManifestHistory,
    limits: Limits,
    known: SearchCache,
}

/// Inputs of a plan without the observed state.
pub struct DesiredInput {
    loaded: Loaded,
    rules: Rules,
    now: Now,
}

impl DesiredInput {
    /// Refuses a tree with errors: a plan of the other files would silently omit processes.
    pub fn read(args: &args::InputArgs, printer: &Printer) -> Result<DesiredInput, Failure> {
        let begin = Instant::now();
        let loaded = manifest::load(&args.paths, &args.limits.limits());
        info!(files = loaded.files, instances = loaded.desired.instances.len(), took = ?begin.elapsed(), "manifests read");
        DesiredInput::of(loaded, args, printer)
    }

    /// Like [`DesiredInput::read`], for manifests that are already loaded.
    pub fn of(
        mut loaded: Loaded,
        args: &args::InputArgs,
        printer: &Printer,
    ) -> Result<DesiredInput, Failure> {
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
        check_users(&loaded, args, &caps)?;
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
        let rules = rules(args, caps, &loaded)?;
        let meant = |key: &InstanceKey, want: &DesiredInstance| {
            rules.selection.means(key, Some(&want.origin.declared), &want.spec.labels)
        };
        if !rules.selection.is_everything()
            && !loaded.desired.instances.iter().any(|(key, want)| meant(key, want))
        {
            printer.warning("no process in the manifests matches this selection");
        }
        Ok(DesiredInput { loaded, rules, now })
    }

    pub fn owner(&self) -> &str {
        &self.rules.owner
    }

    pub fn desired(&self) -> &Desired {
        &self.loaded.desired
    }

    /// Adds the observed state. `live` is `None` if the local system was never started.
    pub async fn observe(
        mut self,
        args: &args::InputArgs,
        live: Option<&ConnectedTarget>,
        printer: &Printer,
    ) -> Result<PlanInput, Failure> {
        let begin = Instant::now();
        let past = ManifestHistory::Paths(args.paths.clone());
        let mut old = SpecLookup { past, limits: args.limits.limits(), known: SearchCache::default() };
        let observed = match live {
            Some(live) => {
                // A rollback has no paths, and no new source.
                if self.rules.prune && !args.claims.accept_source && !args.paths.is_empty() {
                    let source = work_tree::of_paths(&args.paths);
                    super::source::check_source(live, &self.rules.owner, &source).await?;
                }
                (self.rules.holds, self.rules.pauses) = live.restraints().await?;
                observe_with_live_checks(live, &self.loaded.desired, &mut self.rules, &self.now, &mut old)
                    .await?
            }
            None => {
                let observed = read_rows(args, &self.now, printer)?.normalize_host_keys(&self.loaded.desired);
                observed.map_err(|instance| two_rows(&ObserveError::Ambiguous(instance)))?
            }
        };
        info!(rows = observed.instances.len(), took = ?begin.elapsed(), "observed");
        let paths: Vec<_> = args.paths.iter().map(|path| path.display().to_string()).collect();
        let (target, offline) = (args.target.target.clone(), args.offline.observed.is_some());
        let DesiredInput { loaded, rules, now } = self;
        Ok(PlanInput { loaded, observed, rules, now, target, paths: paths.join(" "), offline, old })
    }
}

impl PlanInput {
    /// Reads all inputs. Does not start the local system.
    pub fn read(args: &args::InputArgs, printer: &Printer) -> Result<PlanInput, Failure> {
        let early = Prefetch::start(args, Duration::MAX);
        let wanted = DesiredInput::read(args, printer)?;
        let live = match (args.offline.observed.as_ref(), early) {
            (Some(_), _) => None,
            (None, Some(early)) => Some(early.join()),
            (None, None) => args.target.connect(LocalStart::Never)?.map(Arc::new),
        };
        let is_down = live.is_none() && args.offline.observed.is_none();
        if is_down && Home::find().is_ok_and(|home| home.path("gateway/store.db").exists()) {
            printer.warning(
                "the local system is not running, so its processes are not observed; `abide up` starts it again",
            );
        }
        runtime()?.block_on(wanted.observe(args, live.as_deref(), printer))
    }

    /// Reads the current holds and pauses.
    pub async fn refresh_holds(&mut self, live: &ConnectedTarget) -> Result<(), Failure> {
        (self.rules.holds, self.rules.pauses) = live.restraints().await?;
        Ok(())
    }

    /// Observes the target again.
    pub async fn observe_again(&mut self, live: &ConnectedTarget) -> Result<(), Failure> {
        self.now = clock::with_zones(&self.loaded.desired);
        self.observed =
            observe_with_live_checks(live, &self.loaded.desired, &mut self.rules, &self.now, &mut self.old)
                .await?;
        Ok(())
    }

    pub fn plan(&self) -> Plan {
        let begin = Instant::now();
        let plan = reconcile(&self.loaded.desired, &self.observed, &self.rules, &self.now);
        info!(steps = plan.steps().count(), held = plan.held.len(), took = ?begin.elapsed(), "planned");
        plan
    }

    /// The target of the plan as text.
    pub fn heading(&self) -> String {
        match self.offline {
            true => format!("offline plan for {}", self.rules.caps.name()),
            false => format!("target {}", self.target),
        }
    }

    pub fn digests(&self, plan: &Plan) -> PlanDigests {
        let wanted = ManifestRevision::of(&self.loaded.desired);
        PlanDigests::of(wanted, &self.observed, &self.rules, &self.target, plan)
    }
}

/// Digests of a plan's inputs.
#[derive(Clone, Default)]
pub struct PlanDigests {
    /// Revision of the manifests.
    pub wanted: ManifestRevision,
    /// Fingerprint: all inputs.
    pub all: String,
    /// Plan id: fingerprint and steps.
    pub id: String,
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

/// Observes the target, with live checks of the instances that a plan would change.
async fn observe_with_live_checks(
    live: &ConnectedTarget,
    desired: &Desired,
    rules: &mut Rules,
    now: &Now,
    old: &mut SpecLookup,
) -> Result<Observed, Failure> {
    let mut world = live.observe_for(desired, rules.prune.then(|| namespaces(desired))).await?;
    rules.known_namespaces = world.namespaces(&rules.owner);
    // Without report lag, only instances to adopt that are not listed need a live check.
    let adopts = || rules.adopt || desired.instances.values().any(|want| want.origin.adopt);
    if rules.caps.lag_secs == 0 && !adopts() {
        return Ok(world.observed);
    }
    let mut plan = reconcile(desired, &world.observed, rules, now);
    let missing = missing(&plan, desired, &world.observed, &rules.caps);
    if !missing.is_empty() {
        world.add_recovered_specs(old.known.lookup(&old.past, None, &old.limits, missing, &rules.caps).await);
        plan = reconcile(desired, &world.observed, rules, now);
    }
    while world.check_live(&live.backend, &rules.caps, &plan).await {
        plan = reconcile(desired, &world.observed, rules, now);
    }
    Ok(world.observed)
}

impl PlanDigests {
    pub fn of(
        wanted: ManifestRevision,
        observed: &Observed,
        rules: &Rules,
        target: &str,
        plan: &Plan,
    ) -> PlanDigests {
        let all = fingerprint(&wanted, observed, rules, target, plan);
        let steps =
            plan.steps().map(|step| format!("{} {} {}", step.instance, step.op, step.spec_side.word()));
        let id = blake3::hash(format!("{all}\n{}", steps.collect::<Vec<_>>().join("\n")).as_bytes());
        PlanDigests { wanted, all, id: id.to_hex()[..16].to_owned() }
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
    rules.max_delete = args.bounds.max_delete;
    rules.max_restart = args.bounds.max_restart;
    rules.override_holds = args.bounds.override_holds;
    rules.stale_after_secs = Some(args.bounds.stale_after);
    rules.selection = args.select.selection();
    Ok(rules)
}

/// An offline plan is for the kind of target in --caps.
fn is_local(args: &args::InputArgs) -> bool {
    args.target.target == "local" && args.offline.caps == Caps::LOCAL
}

/// Requires a user in every spec, except for the local agent, which has a default user.
fn check_users(loaded: &Loaded, args: &args::InputArgs, caps: &Caps) -> Result<(), Failure> {
    if is_local(args) {
        return Ok(());
    }
    let without_user = loaded.desired.instances.values().filter(|want| want.spec.identity.user.is_none());
    let locations: BTreeSet<_> =
        without_user.map(|want| (&want.origin.place, &want.origin.declared)).collect();
    if locations.is_empty() {
        return Ok(());
    }
    let lines = locations.iter().map(|(location, key)| {
        format!("{location}: process \"{key}\" has no spec.identity.user, and {} needs it", caps.name())
    });
    let message = lines.collect::<Vec<_>>().join("\nerror: ");
    Err(Failure::new(Exit::InvalidManifest, message)
        .hint("set spec.identity.user to the user of the process"))
}
