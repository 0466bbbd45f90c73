//! `abide watch`: the standing controller, and what it tells.

mod args;
mod console;
mod json_log;
pub mod source;
mod target;

pub use args::{ControllerArgs, WatchArgs};

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::info;

use self::console::{ConsoleState, print_event};
use crate::cli::args::LimitArgs;
use crate::cli::commands::plan::owner::{may_prune, owner as named};
use crate::cli::commands::plan::source::wait_for_same_source;
use crate::cli::commands::serve::Signals;
use crate::cli::commands::watch::source::WatchSource;
use crate::cli::local::Home;
use crate::cli::output::print::Printer;
use crate::cli::status_server::{Notifiers, StatusServer};
use crate::cli::target::{ConnectedTarget, runtime};
use crate::cli::{Exit, Failure};
use crate::control::source::DefaultUserCache;
use crate::control::status::ControllerInfo;
use crate::control::{self, ControllerConfig, ControllerEvent};
use crate::dashboard;
use crate::http::Reloadable;
use crate::malloc;
use crate::manifest;
use crate::model::Desired;
use crate::reconcile::{Caps, Rules};
use crate::store::AnyStore;

pub fn run(args: &mut WatchArgs, printer: &Printer) -> Result<Exit, Failure> {
    args.how.owner = owner(args)?;
    let args = &*args;
    if args.how.claims.prune {
        may_prune(args.how.owner.as_deref(), args.target.target == "local")?;
    }
    let from = args.source.resolve(&args.paths, &args.limits, &args.how)?;
    malloc::allocate_tightly();
    runtime()?.block_on(async {
        let mut signals = Signals::listen()?;
        let socket = args.listen.bind()?;
        let address = socket.local_addr().map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        let live = args.target.connect_or_start()?;
        let telling = Notifiers::start(&args.tell, controller_info(&from, &args.how, &live.name))?;
        let state = Reloadable::fixed(live.state.clone());
        let access = args.listen.access(address, printer)?;
        let router = dashboard::router(telling.dashboard(access, state.clone(), None));
        let listening = StatusServer::start(socket, address, router);
        printer.data(&format!("ready {}\n", listening.url));
        telling.systemd.ready();
        let ended = run_with_restarts(args, from, live, &state, &telling, &mut signals, printer).await;
        telling.stop().await;
        listening.stop().await;
        ended
    })
}

/// Whose set it is. What a branch holds is not known before it is fetched: there a Policy does not decide it.
fn owner(args: &WatchArgs) -> Result<Option<String>, Failure> {
    let typed = args.how.owner.as_deref();
    match typed.is_some() || args.source.git.is_some() {
        true => named(typed, &Desired::default(), &args.target),
        false => named(None, &manifest::load(&args.paths, &args.limits.limits()).desired, &args.target),
    }
}

/// Begins, and begins anew whenever somebody asks for that.
async fn run_with_restarts(
    args: &WatchArgs,
    mut from: WatchSource,
    mut live: ConnectedTarget,
    state: &Reloadable<AnyStore>,
    telling: &Notifiers,
    signals: &mut Signals,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let connect = || args.target.connect_or_start();
    loop {
        if args.how.claims.prune && !args.how.claims.accept_source {
            let (source, mut said) = (from.source(), ConsoleState::default());
            let mut told = |event: ControllerEvent<'_>| {
                telling.board.record(&event);
                print_event(&event, &mut said, printer);
            };
            tokio::select! {
                same = wait_for_same_source(&live, args.how.owner(), &source, &mut told) => same?,
                exit = signals.stop_signal() => return Ok(exit),
            }
        }
        let rules = Rules { selection: args.select.selection(), ..rules(&args.how, live.caps()) };
        match watch_with(from, args, &rules, &live, telling, signals, &connect, printer).await {
            NextAction::End(exit) => return Ok(exit),
            NextAction::Restart(new, again) => {
                info!("begun anew");
                state.set(new.state.clone());
                (live, from) = (*new, again);
            }
        }
    }
}

/// What comes after the loop.
enum NextAction {
    End(Exit),
    /// The same with what the config file says now.
    Restart(Box<ConnectedTarget>, WatchSource),
}

/// Goes on until somebody asks for an end, or for another beginning.
#[allow(clippy::too_many_arguments)] // each is somebody else's
async fn watch_with(
    from: WatchSource,
    args: &WatchArgs,
    rules: &Rules,
    live: &ConnectedTarget,
    telling: &Notifiers,
    signals: &mut Signals,
    connect: &impl Fn() -> Result<ConnectedTarget, Failure>,
    printer: &Printer,
) -> NextAction {
    let (stop, stopped) = watch::channel(false);
    let watching =
        run_until_stopped(from, &args.limits, &args.how, rules.clone(), live, stopped, printer, telling);
    tokio::pin!(watching);
    let again = || Ok::<_, Failure>((connect()?, args.source.resolve(&args.paths, &args.limits, &args.how)?));
    let next = loop {
        let asked = tokio::select! {
            () = &mut watching => return NextAction::End(Exit::Failed),
            asked = signals.stop_or_reload_signal() => asked,
            () = wait_until_local_system_moves(live) => None,
        };
        match asked {
            Some(exit) => break NextAction::End(exit),
            None => match again() {
                Ok((new, from)) => break NextAction::Restart(Box::new(new), from),
                Err(failure) => printer.warning(&format!("all stays as it is: {}", failure.message)),
            },
        }
    };
    if matches!(next, NextAction::End(_)) {
        telling.systemd.stopping();
    }
    let _ = stop.send(true);
    watching.await;
    next
}

/// Until this machine's system is to be found at another address, or died without a word. Who ended it on purpose is not
/// contradicted.
async fn wait_until_local_system_moves(live: &ConnectedTarget) {
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
pub fn controller_info(from: &WatchSource, how: &ControllerArgs, target: &str) -> ControllerInfo {
    ControllerInfo {
        target: target.to_owned(),
        owner: how.owner().to_owned(),
        sources: from.describe(),
        follow: how.follow,
        heal: how.heal,
        prune: how.claims.prune,
        interval: how.reconcile_interval(),
    }
}

fn rules(how: &ControllerArgs, caps: Caps) -> Rules {
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
pub async fn run_with_defaults(
    paths: &[PathBuf],
    limits: &LimitArgs,
    how: &ControllerArgs,
    live: &ConnectedTarget,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    telling: &Notifiers,
) {
    let from = WatchSource::Paths { paths: paths.to_vec(), only_poll: false };
    run_until_stopped(from, limits, how, rules(how, live.caps()), live, stop, printer, telling).await;
}

#[allow(clippy::too_many_arguments)] // each is somebody else's
async fn run_until_stopped(
    from: WatchSource,
    limits: &LimitArgs,
    how: &ControllerArgs,
    rules: Rules,
    live: &ConnectedTarget,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    telling: &Notifiers,
) {
    // Whom the local agent runs processes as, where nobody says: us.
    let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.name);
    let me = me.filter(|_| live.name == "local");
    let setting = ControllerConfig {
        rules,
        follow: how.follow,
        heal: how.heal,
        interval: how.reconcile_interval(),
        timeout: Duration::from_secs(600),
        check: if live.name == "local" { crate::cli::commands::apply::check_config_files } else { |_| None },
        trigger: Arc::clone(&telling.look_now),
        source: from.source(),
        manifest_history: from.manifest_history(),
        user: me.clone(),
        limits: limits.limits(),
    };
    let mut named = DefaultUserCache::default();
    let finish = Box::new(move |desired: &mut Desired| {
        if let Some(me) = &me {
            named.name(desired, me);
        }
    });
    let mut source = from.open(limits.limits(), Duration::from_millis(how.debounce), finish);
    let mut said = ConsoleState::default();
    let mut told = |event: ControllerEvent<'_>| {
        telling.board.record(&event);
        print_event(&event, &mut said, printer);
    };
    control::run(&setting, &mut source, live, stop, &mut told).await;
}
