//! `abide watch`: the standing controller, and what it tells.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{info, warn};

use super::args::{LimitArgs, switch};
use super::listen::{ListenArgs, Listening, TellArgs, Telling};
use super::plan::args::{Select, duration};
use super::print::{self, BOLD, DIM, ERROR, HINT, Printer, WARNING, count, visible};
use super::serve::Signals;
use super::target::{Live, Start, TargetArgs, namespaces, runtime};
use super::watch_source::{SourceArgs, Watched, short};
use super::{Exit, Failure};
use crate::backend::{self, Backend, Changes, Client, Scope};
use crate::control::board::Subject;
use crate::control::source::Named;
use crate::control::{self, Event, Setting, Target};
use crate::dashboard;
use crate::execute::world::World;
use crate::http::Reloaded;
use crate::manifest::Severity;
use crate::model::{Amount, Desired, Hold, InstanceKey, Pause, Want};
use crate::reconcile::{Caps, Rules};
use crate::store::Either;

/// Keep manifests true, for ever
///
/// Reads the directory again whenever it changes, or takes each new commit of a branch, repairs what drifts, and says why. A
/// broken file changes nothing: what it used to declare stays in force until the next good save. Prints `ready URL` on stdout
/// when it answers requests there: a status page, an API, events, metrics. SIGTERM and Ctrl-C end it at a safe point, and leave
/// processes as they are; SIGHUP reads the config file again.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide watch manifests\n  abide watch manifests --prune --target prod --owner web-team\n  abide watch --git https://git.example.org/fleet.git --ref main --path manifests"
)]
pub struct Watch {
    /// Files or directories of manifests
    #[arg(required_unless_present = "git", conflicts_with = "git", value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub how: How,
    #[command(flatten)]
    pub select: Select,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub tell: TellArgs,
}

#[derive(Debug, clap::Args)]
pub struct How {
    /// Whose set this is
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", default_value = "default")]
    pub owner: String,
    /// Remove what is ours and in no manifest any more
    #[arg(long, env = "ABIDE_PRUNE", value_parser = switch)]
    pub prune: bool,
    /// Take over existing processes that nobody owns, without a restart
    #[arg(long, env = "ABIDE_ADOPT", value_parser = switch)]
    pub adopt: bool,
    /// With --prune: take manifests from another source than the owner's last ones
    #[arg(long, env = "ABIDE_ACCEPT_SOURCE", value_parser = switch)]
    pub accept_source: bool,
    /// Repair what differs though no manifest changed
    #[arg(long, env = "ABIDE_HEAL", value_name = "YES|NO", default_value = "true", action = clap::ArgAction::Set, value_parser = switch)]
    pub heal: bool,
    /// Take changed manifests
    #[arg(long, env = "ABIDE_FOLLOW_MANIFESTS", value_name = "YES|NO", default_value = "true", action = clap::ArgAction::Set, value_parser = switch)]
    pub follow: bool,
    /// How often to look without a reason
    #[arg(long, value_name = "TIME", env = "ABIDE_INTERVAL", default_value = "30s", value_parser = duration)]
    pub interval: u64,
    /// How long it must have been quiet after a change
    #[arg(long, value_name = "TIME", env = "ABIDE_DEBOUNCE", default_value = "200ms", value_parser = milliseconds)]
    pub debounce: u64,
    /// Most instances to remove in one pass: a count, or a share of what is ours [default: the greater of 1 and 10%]
    #[arg(long, value_name = "N|P%", env = "ABIDE_MAX_DELETE")]
    pub max_delete: Option<Amount>,
    /// Most instances to restart in one pass: a count, or a share of what is ours [default: any number]
    #[arg(long, value_name = "N|P%", env = "ABIDE_MAX_RESTART")]
    pub max_restart: Option<Amount>,
}

impl How {
    /// As without any flag.
    pub fn usual() -> How {
        How {
            owner: "default".to_owned(),
            prune: false,
            adopt: false,
            accept_source: false,
            heal: true,
            follow: true,
            interval: 30,
            debounce: 200,
            max_delete: None,
            max_restart: None,
        }
    }
}

fn milliseconds(text: &str) -> Result<u64, String> {
    let wrong = || "a duration such as 200ms or 2s".to_owned();
    match text.strip_suffix("ms") {
        Some(number) => number.trim().parse().map_err(|_| wrong()),
        None => crate::model::seconds(text).map(|secs| secs.saturating_mul(1000)).ok_or_else(wrong),
    }
}

pub fn run(args: &mut Watch, printer: &Printer) -> Result<Exit, Failure> {
    args.how.owner = args.target.owner_or(&args.how.owner);
    let args = &*args;
    if args.how.prune && args.how.owner == "default" && args.target.target != "local" {
        let message = "--prune removes what belongs to an owner, and `default` may be anybody";
        return Err(Failure::refused("OwnerNotNamed", message).hint("name the owner: --owner NAME"));
    }
    let mut from = args.source.from(&args.paths, &args.limits, &args.how)?;
    runtime()?.block_on(async {
        let mut signals = Signals::listen()?;
        let socket = args.listen.bind().await?;
        let address = socket.local_addr().map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        let connect = || {
            let live = args.target.connect(Start::OnDemand)?;
            live.ok_or_else(|| Failure::new(Exit::Unreachable, "there is no local system"))
        };
        let mut live = connect()?;
        if args.how.prune && !args.how.accept_source {
            let source = from.source();
            tokio::select! {
                same = super::plan::source::same_soon(&live, &args.how.owner, &source, printer) => same?,
                exit = signals.asked_to_stop() => return Ok(exit),
            }
        }
        let telling = Telling::begin(&args.tell, subject(&from, &args.how, &live.name))?;
        let state = Reloaded::fixed(live.state.clone());
        let access = args.listen.access(address, printer)?;
        let router = dashboard::router(telling.dashboard(access, state.clone(), None));
        let listening = Listening::begin(socket, address, router);
        printer.data(&format!("ready {}\n", listening.url));
        telling.systemd.ready();
        let mut rules = rules(&args.how, live.caps());
        rules.selection = args.select.selection();
        let exit = loop {
            match watch_with(from, args, &rules, &live, &telling, &mut signals, &connect, printer).await {
                Next::End(exit) => break exit,
                Next::Anew(new, again) => {
                    info!("the config file was read again");
                    state.set(new.state.clone());
                    (live, from) = (*new, again);
                }
            }
        };
        telling.end().await;
        listening.end().await;
        Ok(exit)
    })
}

/// What comes after the loop.
enum Next {
    End(Exit),
    /// The same with what the config file says now.
    Anew(Box<Live>, Watched),
}

/// Goes on until somebody asks for an end, or for another beginning.
#[allow(clippy::too_many_arguments)] // each is somebody else's
async fn watch_with(
    from: Watched,
    args: &Watch,
    rules: &Rules,
    live: &Live,
    telling: &Telling,
    signals: &mut Signals,
    connect: &impl Fn() -> Result<Live, Failure>,
    printer: &Printer,
) -> Next {
    let (stop, stopped) = watch::channel(false);
    let watching = stand(from, &args.limits, &args.how, rules.clone(), live, stopped, printer, telling);
    tokio::pin!(watching);
    let again = || Ok::<_, Failure>((connect()?, args.source.from(&args.paths, &args.limits, &args.how)?));
    let next = loop {
        let asked = tokio::select! {
            () = &mut watching => return Next::End(Exit::Failed),
            asked = signals.asked() => asked,
        };
        match asked {
            Some(exit) => break Next::End(exit),
            None => match again() {
                Ok((new, from)) => break Next::Anew(Box::new(new), from),
                Err(failure) => printer.warning(&format!("all stays as it is: {}", failure.message)),
            },
        }
    };
    if matches!(next, Next::End(_)) {
        telling.systemd.stopping();
    }
    let _ = stop.send(true);
    watching.await;
    next
}

/// What is watched over, for whoever asks.
pub fn subject(from: &Watched, how: &How, target: &str) -> Subject {
    Subject {
        target: target.to_owned(),
        owner: how.owner.clone(),
        sources: from.shown(),
        follow: how.follow,
        heal: how.heal,
        prune: how.prune,
        interval: Duration::from_secs(how.interval.max(1)),
    }
}

fn rules(how: &How, caps: Caps) -> Rules {
    Rules {
        owner: how.owner.clone(),
        prune: how.prune,
        adopt: how.adopt,
        max_delete: how.max_delete,
        max_restart: how.max_restart,
        stale_after_secs: Some(600),
        ..Rules::new(caps)
    }
}

/// For `up`, with the usual rules.
pub async fn usually(
    paths: &[PathBuf],
    limits: &LimitArgs,
    live: &Live,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    telling: &Telling,
) {
    let how = How::usual();
    let from = Watched::Paths { paths: paths.to_vec(), only_poll: false };
    stand(from, limits, &how, rules(&how, live.caps()), live, stop, printer, telling).await;
}

#[allow(clippy::too_many_arguments)] // each is somebody else's
async fn stand(
    from: Watched,
    limits: &LimitArgs,
    how: &How,
    rules: Rules,
    live: &Live,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    telling: &Telling,
) {
    // Whom the local agent runs processes as, where nobody says: us.
    let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.name);
    let me = me.filter(|_| live.name == "local");
    let setting = Setting {
        rules,
        follow: how.follow,
        heal: how.heal,
        interval: Duration::from_secs(how.interval.max(1)),
        timeout: Duration::from_secs(600),
        check: if live.name == "local" { super::apply::config_is_there } else { |_| None },
        look_now: Arc::clone(&telling.look_now),
        source: from.source(),
        past: from.past(),
        user: me.clone(),
        limits: limits.limits(),
    };
    let mut named = Named::default();
    let finish = Box::new(move |desired: &mut Desired| {
        if let Some(me) = &me {
            named.name(desired, me);
        }
    });
    let mut source = from.open(limits.limits(), Duration::from_millis(how.debounce), finish);
    let mut said = Said::default();
    let mut told = |event: Event<'_>| {
        telling.board.note(&event);
        tell(&event, &mut said, printer);
    };
    control::run(&setting, &mut source, live, stop, &mut told).await;
}

/// What was said last: things are told when they change, not at every look.
#[derive(Default)]
struct Said {
    held: String,
    /// Something happened since everything was as wanted.
    news: bool,
    /// Why nothing could be done, as long as that is so.
    trouble: String,
}

fn tell(event: &Event<'_>, said: &mut Said, printer: &Printer) {
    match event {
        Event::Read { reading, revision } => {
            let errors =
                reading.problems.iter().filter(|problem| problem.severity == Severity::Error).count();
            printer.to_stderr(
                &reading.problems.iter().map(|problem| print::problem(problem) + "\n").collect::<String>(),
            );
            let short_revision = short(revision);
            let kept = if reading.is_incomplete { "; what is broken stays as it last was" } else { "" };
            let errors =
                if errors > 0 { format!(", {}{kept}", count(errors, "error")) } else { kept.to_owned() };
            let commit = reading.commit.as_deref().unwrap_or_default();
            info!(%revision, files = reading.files, commit, "read");
            let at = if commit.is_empty() { String::new() } else { format!(" at commit {}", short(commit)) };
            said.news = true;
            printer.styled(&format!(
                "{BOLD}read{BOLD:#} {} wanted {DIM}{short_revision}{DIM:#}{at}{errors}\n",
                count(reading.desired.instances.len(), "instance")
            ));
        }
        Event::Source { trouble: None } => {
            said.news = true;
            printer.styled(&format!("{BOLD}source{BOLD:#}: it is followed again\n"));
        }
        Event::Source { trouble: Some(trouble) } => {
            let word = trouble.word();
            info!(%trouble, word, "the source is not followed");
            let hint = trouble.hint().map(|hint| format!("{HINT}hint{HINT:#}: {hint}\n")).unwrap_or_default();
            printer.styled(&format!(
                "{ERROR}source{ERROR:#}: {word}: {}; what was last taken stays\n{hint}",
                visible(&trouble.to_string())
            ));
        }
        Event::Pinned { pin } => {
            said.news = true;
            printer.styled(&format!("{WARNING}pinned{WARNING:#} to {}\n", super::rollback::words(pin)));
        }
        Event::Unpinned { pin, newer } => {
            said.news = true;
            let why = if *newer { ": the source has something newer" } else { "" };
            printer.styled(&format!("{BOLD}no longer pinned{BOLD:#} to {}{why}\n", short(&pin.revision)));
        }
        Event::Waiting { holder } => {
            printer.styled(&format!(
                "{WARNING}waiting{WARNING:#}: {} (process {}) leads\n",
                visible(&holder.host),
                holder.pid
            ));
        }
        Event::Leading { generation } => info!(generation, "leading"),
        Event::Planned { look, .. } => {
            said.trouble.clear();
            let text: String = look
                .plan
                .held
                .iter()
                .map(|held| {
                    format!(
                        "{WARNING}{}{WARNING:#} {}: {}\n",
                        held.reason.word(),
                        visible(&held.instance.to_string()),
                        visible(&held.detail)
                    )
                })
                .collect();
            if said.held != text {
                printer.styled(&text);
                said.held = text;
            }
        }
        Event::Doing { .. } | Event::Passing | Event::Passed { .. } | Event::Turned => {}
        Event::Ended { step, ended } => {
            let why = step.why.first().map(super::plan::groups::reason).unwrap_or_default();
            let at = step.why.first().and_then(|why| why.at.as_ref());
            let place = at.map(|at| format!("  {DIM}{at}{DIM:#}")).unwrap_or_default();
            let (style, word) =
                if ended.outcome.is_well() { (HINT, "") } else { (ERROR, ended.outcome.word()) };
            let (op, instance) = (step.op, visible(&step.instance.to_string()));
            let mut text = format!("{style}{op}{style:#} {instance}  {}{place}", visible(&why));
            if !word.is_empty() {
                text.push_str(&format!("  {ERROR}{word}{ERROR:#}: {}", visible(&ended.message)));
            }
            printer.styled(&format!("{text}\n"));
        }
        Event::Soaking { process, secs } => {
            printer.styled(&format!("{DIM}{process}: watching for {secs} s whether it stays well{DIM:#}\n"));
        }
        Event::Relaunched { instance, pid } => {
            info!(%instance, pid, "relaunched");
            printer.styled(&format!(
                "{DIM}relaunched{DIM:#} {}: it ended, and is back as process {pid}\n",
                visible(&instance.to_string())
            ));
        }
        Event::RolledBack { processes } => {
            warn!(%processes, "rolled back");
            printer.styled(&format!(
                "{ERROR}rolled back{ERROR:#} {}: too many of it failed; left alone until its manifest changes\n",
                visible(processes)
            ));
        }
        Event::Did { steps, took } => {
            said.news = true;
            info!(steps, ?took, "did");
        }
        // Told once, not as often as it is tried.
        Event::Trouble { why } if said.trouble != *why => {
            info!(%why, "trouble");
            printer.styled(&format!("{ERROR}trouble{ERROR:#}: {}\n", visible(why)));
            (*why).clone_into(&mut said.trouble);
        }
        Event::Trouble { why } => info!(%why, "trouble"),
        Event::Rested { settled, held } => {
            info!(settled, held, "as wanted");
            if std::mem::take(&mut said.news) {
                let rest = if *held > 0 { format!(", {held} held") } else { String::new() };
                printer.styled(&format!(
                    "{BOLD}converged{BOLD:#}: {} as wanted{rest}\n",
                    count(*settled, "instance")
                ));
            }
        }
    }
}

impl Target for Live {
    type Backend = Client;
    type State = Either;

    fn backend(&self) -> &Client {
        &self.backend
    }

    fn state(&self) -> &Either {
        &self.state
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn act_as(&self, generation: u64) {
        Live::act_as(self, generation);
    }

    async fn look(&self, desired: &Desired, prune: bool) -> Result<World, String> {
        let world = self.world(desired, prune.then(|| namespaces(desired))).await;
        world.map_err(|failure| failure.message)
    }

    async fn follow(&self, desired: &Desired, prune: bool) -> Result<(World, Option<Changes>), String> {
        if !self.caps().reads_specs {
            return Ok((self.look(desired, prune).await?, None));
        }
        let subject = |(key, want): (&InstanceKey, &Want)| backend::Subject {
            instance: key.clone(),
            host: want.host.clone(),
            spec: Some(want.spec.clone()),
        };
        let scope = Scope::of(desired.instances.iter().map(subject).collect());
        let (observed, changes) =
            self.backend.follow(&scope).await.map_err(|fault| self.failure(&fault).message)?;
        Ok((World::of(observed), changes))
    }

    async fn restraints(&self) -> Result<(Vec<Hold>, Vec<Pause>), String> {
        Live::restraints(self).await.map_err(|failure| failure.message)
    }
}
