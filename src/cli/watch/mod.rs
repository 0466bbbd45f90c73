//! `abide watch`: the standing controller, and what it tells.

mod args;
mod log;
mod target;
mod tell;

pub use args::{How, Watch};

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::info;

use self::tell::{Said, tell};
use super::args::LimitArgs;
use super::listen::{Listening, Telling};
use super::local::Home;
use super::plan::owner::{may_prune, owner as named};
use super::plan::source::same_soon;
use super::print::Printer;
use super::serve::Signals;
use super::target::{Live, runtime};
use super::watch_source::Watched;
use super::{Exit, Failure};
use crate::control::board::Subject;
use crate::control::source::Named;
use crate::control::{self, Event, Setting};
use crate::dashboard;
use crate::http::Reloaded;
use crate::manifest;
use crate::memory;
use crate::model::Desired;
use crate::reconcile::{Caps, Rules};
use crate::store::Either;

pub fn run(args: &mut Watch, printer: &Printer) -> Result<Exit, Failure> {
    args.how.owner = owner(args)?;
    let args = &*args;
    if args.how.claims.prune {
        may_prune(args.how.owner.as_deref(), args.target.target == "local")?;
    }
    let from = args.source.from(&args.paths, &args.limits, &args.how)?;
    memory::allocate_tightly();
    runtime()?.block_on(async {
        let mut signals = Signals::listen()?;
        let socket = args.listen.bind()?;
        let address = socket.local_addr().map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        let live = args.target.reach()?;
        let telling = Telling::begin(&args.tell, subject(&from, &args.how, &live.name))?;
        let state = Reloaded::fixed(live.state.clone());
        let access = args.listen.access(address, printer)?;
        let router = dashboard::router(telling.dashboard(access, state.clone(), None));
        let listening = Listening::begin(socket, address, router);
        printer.data(&format!("ready {}\n", listening.url));
        telling.systemd.ready();
        let ended = for_ever(args, from, live, &state, &telling, &mut signals, printer).await;
        telling.end().await;
        listening.end().await;
        ended
    })
}

/// Whose set it is. What a branch holds is not known before it is fetched: there a Policy does not decide it.
fn owner(args: &Watch) -> Result<Option<String>, Failure> {
    let typed = args.how.owner.as_deref();
    match typed.is_some() || args.source.git.is_some() {
        true => named(typed, &Desired::default(), &args.target),
        false => named(None, &manifest::load(&args.paths, &args.limits.limits()).desired, &args.target),
    }
}

/// Begins, and begins anew whenever somebody asks for that.
async fn for_ever(
    args: &Watch,
    mut from: Watched,
    mut live: Live,
    state: &Reloaded<Either>,
    telling: &Telling,
    signals: &mut Signals,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let connect = || args.target.reach();
    loop {
        if args.how.claims.prune && !args.how.claims.accept_source {
            let (source, mut said) = (from.source(), Said::default());
            let mut told = |event: Event<'_>| {
                telling.board.note(&event);
                tell(&event, &mut said, printer);
            };
            tokio::select! {
                same = same_soon(&live, args.how.owner(), &source, &mut told) => same?,
                exit = signals.asked_by() => return Ok(exit),
            }
        }
        let rules = Rules { selection: args.select.selection(), ..rules(&args.how, live.caps()) };
        match watch_with(from, args, &rules, &live, telling, signals, &connect, printer).await {
            Next::End(exit) => return Ok(exit),
            Next::Anew(new, again) => {
                info!("begun anew");
                state.set(new.state.clone());
                (live, from) = (*new, again);
            }
        }
    }
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
            () = elsewhere(live) => None,
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

/// Until this machine's system is to be found at another address, or died without a word. Who ended it on purpose is not
/// contradicted.
async fn elsewhere(live: &Live) {
    let Ok(url) = live.abide().map(|abide| abide.calls().url()) else { return std::future::pending().await };
    let Ok(home) = Home::find() else { return std::future::pending().await };
    if live.name != "local" {
        return std::future::pending().await;
    }
    let mut abandoned = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        abandoned = if home.is_abandoned() { abandoned + 1 } else { 0 };
        // Whoever takes a folder over is between two for a moment.
        if abandoned > 1 || home.access().is_some_and(|access| access.url.trim_end_matches('/') != url) {
            return;
        }
    }
}

/// What is watched over, for whoever asks.
pub fn subject(from: &Watched, how: &How, target: &str) -> Subject {
    Subject {
        target: target.to_owned(),
        owner: how.owner().to_owned(),
        sources: from.shown(),
        follow: how.follow,
        heal: how.heal,
        prune: how.claims.prune,
        interval: how.every(),
    }
}

fn rules(how: &How, caps: Caps) -> Rules {
    Rules {
        owner: how.owner().to_owned(),
        prune: how.claims.prune,
        adopt: how.claims.adopt,
        max_delete: how.bounds.max_delete,
        max_restart: how.bounds.max_restart,
        override_holds: how.bounds.override_holds,
        stale_after_secs: Some(how.bounds.stale_after),
        ..Rules::new(caps)
    }
}

/// For `up`, with the usual rules.
#[allow(clippy::too_many_arguments)] // each is somebody else's
pub async fn usually(
    paths: &[PathBuf],
    limits: &LimitArgs,
    how: &How,
    live: &Live,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    telling: &Telling,
) {
    let from = Watched::Paths { paths: paths.to_vec(), only_poll: false };
    stand(from, limits, how, rules(how, live.caps()), live, stop, printer, telling).await;
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
        interval: how.every(),
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
