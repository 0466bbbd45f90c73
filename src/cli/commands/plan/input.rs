//! Everything that a plan is made from: manifests, what was seen, rules, and the time.

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
use crate::control::source::git::work_tree;
use crate::control::source::set_default_user;
use crate::control::spec_history::{ManifestHistory, SearchCache};
use crate::execute::world::ObserveError;
use crate::manifest::{self, Limits, Loaded, Severity, rows};
use crate::model::{Desired, DesiredInstance, InstanceKey, Now, Observed, Plan};
use crate::reconcile::spec_recovery::missing;
use crate::reconcile::{Caps, Rules, fingerprint, of_desired, reconcile};

pub struct PlanInput {
    pub loaded: Loaded,
    pub observed: Observed,
    pub rules: Rules,
    pub now: Now,
    pub target: String,
    /// As they were written on the command line.
    pub paths: String,
    /// There was no target, only rows.
    pub offline: bool,
    old: SpecLookup,
}

/// Where old specs can be looked up, and what came of it.
struct SpecLookup {
    past: ManifestHistory,
    limits: Limits,
    known: SearchCache,
}

/// What is wanted, and by which rules: everything but the world.
pub struct DesiredInput {
    loaded: Loaded,
    rules: Rules,
    now: Now,
}

impl DesiredInput {
    /// A tree with any error is refused: a plan of the rest would leave out what nobody sees.
    pub fn read(args: &args::InputArgs, printer: &Printer) -> Result<DesiredInput, Failure> {
        let begin = Instant::now();
        let loaded = manifest::load(&args.paths, &args.limits.limits());
        info!(files = loaded.files, instances = loaded.desired.instances.len(), took = ?begin.elapsed(), "manifests read");
        DesiredInput::of(loaded, args, printer)
    }

    /// The same for manifests that somebody else has read.
    pub fn of(
        mut loaded: Loaded,
        args: &args::InputArgs,
        printer: &Printer,
    ) -> Result<DesiredInput, Failure> {
        let told = loaded.problems.iter().filter(|p| p.severity == Severity::Error || !printer.is_quiet());
        printer.to_stderr(&told.map(|problem| print::problem(problem) + "\n").collect::<String>());
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
            // Whom the local agent runs processes as, where nobody says: us.
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
            printer.warning("nothing in the manifests is in this selection");
        }
        Ok(DesiredInput { loaded, rules, now })
    }

    pub fn owner(&self) -> &str {
        &self.rules.owner
    }

    pub fn desired(&self) -> &Desired {
        &self.loaded.desired
    }

    /// With the world as it is now. `None`: nothing was ever started there.
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
                // What is gone back to is nobody's new source.
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
    /// Reads it all, without starting anything.
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
            printer.warning("the local system is not running, so nothing is seen of what it left; `abide up` brings it back");
        }
        runtime()?.block_on(wanted.observe(args, live.as_deref(), printer))
    }

    /// What is to be left alone by now.
    pub async fn refresh_holds(&mut self, live: &ConnectedTarget) -> Result<(), Failure> {
        (self.rules.holds, self.rules.pauses) = live.restraints().await?;
        Ok(())
    }

    /// The same with the world as it is by now.
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

    /// For whom the plan is, in words.
    pub fn heading(&self) -> String {
        match self.offline {
            true => format!("rehearsed for {}", self.rules.caps.name()),
            false => format!("target {}", self.target),
        }
    }

    pub fn digests(&self, plan: &Plan) -> PlanDigests {
        let wanted = of_desired(&self.loaded.desired);
        PlanDigests::of(wanted, &self.observed, &self.rules, &self.target, plan)
    }
}

/// What a plan was made from, in short.
#[derive(Clone, Default)]
pub struct PlanDigests {
    /// Of what the manifests want.
    pub wanted: String,
    /// Of everything: the fingerprint.
    pub all: String,
    /// Of that and of the steps.
    pub id: String,
}

/// Our own gateway tells everything whatever is wanted: it is asked while the manifests are read.
pub struct Prefetch {
    live: Arc<ConnectedTarget>,
    looking: JoinHandle<()>,
}

impl Prefetch {
    /// `None`: there is nobody to ask yet, or it has to be told what to look at.
    pub fn start(args: &args::InputArgs, at_most: Duration) -> Option<Prefetch> {
        if args.offline.observed.is_some() {
            return None;
        }
        let live = Arc::new(args.target.connect(LocalStart::Never).ok()??);
        let looker = Arc::clone(&live);
        looker.abide().ok()?;
        let look = move || {
            if let (Ok(abide), Ok(runtime)) = (looker.abide(), runtime()) {
                let _ = runtime.block_on(async { tokio::time::timeout(at_most, abide.prefetch()).await });
            }
        };
        let looking = std::thread::Builder::new().name("look".to_owned()).spawn(look).ok()?;
        Some(Prefetch { live, looking })
    }

    /// Whom it asked; his next look is the one that was taken.
    pub fn join(self) -> Arc<ConnectedTarget> {
        let _ = self.looking.join();
        self.live
    }
}

/// How the world is, with a close look at whatever these manifests would cost.
async fn observe_with_live_checks(
    live: &ConnectedTarget,
    desired: &Desired,
    rules: &mut Rules,
    now: &Now,
    old: &mut SpecLookup,
) -> Result<Observed, Failure> {
    let mut world = live.observe_for(desired, rules.prune.then(|| namespaces(desired))).await?;
    rules.known_namespaces = world.namespaces(&rules.owner);
    // Where a list is live, only what is to be adopted and is not listed is left to check.
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
    pub fn of(wanted: String, observed: &Observed, rules: &Rules, target: &str, plan: &Plan) -> PlanDigests {
        let all = fingerprint(&wanted, observed, rules, target, plan);
        let steps =
            plan.steps().map(|step| format!("{} {} {}", step.instance, step.op, step.spec_side.word()));
        let id = blake3::hash(format!("{all}\n{}", steps.collect::<Vec<_>>().join("\n")).as_bytes());
        PlanDigests { wanted, all, id: id.to_hex()[..16].to_owned() }
    }
}

/// Rows from a file; without one, nothing was ever started here, so nothing is there.
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
        let message = "the manifests want nothing at all, and --prune would remove everything";
        let hint = "if that is meant, say `state: absent` for each process";
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

/// Also a rehearsal is for the kind of target that it rehearses.
fn is_local(args: &args::InputArgs) -> bool {
    args.target.target == "local" && args.offline.caps == Caps::LOCAL
}

/// The local agent has a user of its own; every other target must be told.
fn check_users(loaded: &Loaded, args: &args::InputArgs, caps: &Caps) -> Result<(), Failure> {
    if is_local(args) {
        return Ok(());
    }
    let nameless = loaded.desired.instances.values().filter(|want| want.spec.identity.user.is_none());
    let places: BTreeSet<_> = nameless.map(|want| (&want.origin.place, &want.origin.declared)).collect();
    if places.is_empty() {
        return Ok(());
    }
    let lines = places.iter().map(|(place, key)| {
        format!("{place}: process \"{key}\" leaves out spec.identity.user, and {} needs it", caps.name())
    });
    let message = lines.collect::<Vec<_>>().join("\nerror: ");
    Err(Failure::new(Exit::InvalidManifest, message).hint("the user that it is to run as"))
}
