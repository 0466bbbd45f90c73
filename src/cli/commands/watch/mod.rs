//! `abide watch`: the controller as a daemon, with status server, console output and notifications.

mod args;
mod console;
mod json_log;
pub mod source;

pub use args::{ControllerArgs, WatchArgs};

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::info;

use self::console::{ConsoleState, print_event};
use crate::cli::args::LimitArgs;
use crate::cli::commands::apply::check_controller;
use crate::cli::commands::plan::owner::{may_prune, owner as resolve_owner};
use crate::cli::commands::plan::policy::check_owner;
use crate::cli::commands::plan::source::wait_for_same_source;
use crate::cli::commands::serve::Signals;
use crate::cli::commands::watch::source::WatchSource;
use crate::cli::local::Home;
use crate::cli::output::print::Printer;
use crate::cli::status_server::{Notifiers, StatusServer};
use crate::cli::target::{ConnectedTarget, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::control::status::ControllerInfo;
use crate::control::{self, ControllerConfig, ControllerEvent, ManifestConfig};
use crate::dashboard;
use crate::http::Reloadable;
use crate::inventory::InventoryFeed;
use crate::malloc;
use crate::manifest;
use crate::model::Desired;
use crate::observe::Target;
use crate::reconcile::{Caps, HoldRules, Rules};
use crate::source::DefaultUserCache;
use crate::store::AnyStore;

pub fn run(args: &mut WatchArgs, printer: &Printer) -> Result<Exit, Failure> {
    args.how.owner = owner(args)?;
    let args = &*args;
    if args.how.claims.prune {
        may_prune(args.how.owner.as_deref(), args.target.target == "local")?;
    }
    // An invalid policy ends it before anything is observed.
    args.how.bounds.read_policy()?;
    let from = args.source.resolve(&args.paths, &args.limits, &args.how)?;
    malloc::allocate_tightly();
    runtime()?.block_on(async {
        let mut signals = Signals::listen()?;
        let socket = args.listen.bind()?;
        let address = socket.local_addr().map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
        // An invalid file ends it before the local system is started.
        let tls = args.listen.tls()?;
        let access = args.listen.access(address, printer)?;
        let routes = args.target.config()?.notify()?;
        args.target.all_inventories()?;
        let live = args.target.connect_or_start(printer)?;
        let notifiers = Notifiers::start(&args.tell, routes, controller_info(&from, &args.how, &live.name))?;
        let state = Reloadable::fixed(live.state.clone());
        let router = dashboard::router(notifiers.dashboard(access, state.clone(), None));
        let server = StatusServer::start(socket, address, tls, router);
        printer.data(&format!("ready {}\n", server.url));
        notifiers.systemd.ready();
        let ended = run_with_restarts(args, from, live, &state, &notifiers, &mut signals, printer).await;
        notifiers.stop().await;
        server.stop().await;
        ended
    })
}

/// The owner of the manifests. With --git a Policy does not set it: the branch is not fetched yet.
fn owner(args: &WatchArgs) -> Result<Option<String>, Failure> {
    let typed = args.how.owner.as_deref();
    match typed.is_some() || args.source.git.is_some() {
        true => resolve_owner(typed, &Desired::default(), &args.target),
        false => {
            let desired = manifest::load(&args.paths, &args.limits.limits()).desired;
            resolve_owner(None, &desired, &args.target)
        }
    }
}

/// Runs the controller, and starts it over after SIGHUP or when the local system moved.
async fn run_with_restarts(
    args: &WatchArgs,
    mut from: WatchSource,
    mut live: ConnectedTarget,
    state: &Reloadable<AnyStore>,
    notifiers: &Notifiers,
    signals: &mut Signals,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let connect = || args.target.connect_or_start(printer);
    loop {
        if args.how.claims.prune && !args.how.claims.accept_source {
            let (source, mut console) = (from.source(), ConsoleState::default());
            let mut on_event = |event: ControllerEvent<'_>| {
                notifiers.board.record(&event);
                notifiers.alerts.record(&event);
                print_event(&event, &mut console, printer);
            };
            tokio::select! {
                same = wait_for_same_source(&live, args.how.owner(), &source, &mut on_event) => same?,
                exit = signals.stop_signal() => return Ok(exit),
            }
        }
        let rules = Rules { selection: args.select.selection(), ..rules(&args.how, live.caps())? };
        check_controller(&rules, &live.name)?;
        match watch_with(from, args, &rules, &live, notifiers, signals, &connect, printer).await {
            NextAction::End(exit) => return Ok(exit),
            NextAction::Restart(new_target, new_source) => {
                info!("controller restarted");
                state.set(new_target.state.clone());
                (live, from) = (*new_target, new_source);
            }
        }
    }
}

/// Next action after a run of the controller.
enum NextAction {
    End(Exit),
    /// Run again with the current config file.
    Restart(Box<ConnectedTarget>, WatchSource),
}

/// Runs the controller until it is stopped or has to start over.
#[allow(clippy::too_many_arguments)] // each has another owner
async fn watch_with(
    from: WatchSource,
    args: &WatchArgs,
    rules: &Rules,
    live: &ConnectedTarget,
    notifiers: &Notifiers,
    signals: &mut Signals,
    connect: &impl Fn() -> Result<ConnectedTarget, Failure>,
    printer: &Printer,
) -> NextAction {
    let (stop, stopped) = watch::channel(false);
    let inventories = match args.target.all_inventories() {
        Ok(inventories) => inventories,
        Err(failure) => {
            printer.failure(&failure);
            return NextAction::End(failure.exit);
        }
    };
    let feed = InventoryFeed::new(inventories, args.how.owner().to_owned());
    let controller = run_until_stopped(
        from,
        &args.limits,
        &args.how,
        rules.clone(),
        live,
        stopped,
        printer,
        notifiers,
        feed,
    );
    tokio::pin!(controller);
    let reload = || {
        let new = (connect()?, args.source.resolve(&args.paths, &args.limits, &args.how)?);
        args.target.all_inventories()?;
        notifiers.alerts.set_routes(args.target.config()?.notify()?);
        Ok::<_, Failure>(new)
    };
    let next = loop {
        let signal = tokio::select! {
            () = &mut controller => return NextAction::End(Exit::Failed),
            signal = signals.stop_or_reload_signal() => signal,
            () = wait_until_local_system_moves(live) => None,
        };
        match signal {
            Some(exit) => break NextAction::End(exit),
            None => match reload() {
                Ok((new, from)) => break NextAction::Restart(Box::new(new), from),
                Err(failure) => {
                    printer.warning(&format!(
                        "cannot reload the config file: {}; the previous config stays active",
                        failure.message
                    ));
                }
            },
        }
    };
    if matches!(next, NextAction::End(_)) {
        notifiers.systemd.stopping();
    }
    let _ = stop.send(true);
    controller.await;
    if matches!(next, NextAction::End(_)) {
        printer.info(stopped_message(live));
    }
    next
}

/// Message of a controller that ended: supervision continues without it.
fn stopped_message(live: &ConnectedTarget) -> &'static str {
    match live.name == "local" {
        true => {
            "watch stopped: manifests are not applied until the next one; the local system keeps supervising processes \
             (`abide down` stops it)"
        }
        false => {
            "watch stopped: manifests are not applied until the next one; agents keep supervising processes"
        }
    }
}

/// Returns when the local system has another address, or crashed. A local system that was stopped is not started again.
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
        // A take-over looks like a crash for a moment.
        if abandoned > 1 || home.access().is_some_and(|access| access.url.trim_end_matches('/') != url) {
            return;
        }
    }
}

/// The controller's configuration for the status page and API.
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

fn rules(how: &ControllerArgs, caps: Caps) -> Result<Rules, Failure> {
    let policy = how.bounds.read_policy()?;
    if let Some(policy) = &policy {
        check_owner(policy, how.owner())?;
    }
    Ok(Rules {
        owner: how.owner().to_owned(),
        prune: how.claims.prune,
        adopt: how.claims.adopt,
        budgets: how.bounds.budgets(),
        holds: HoldRules { override_manual: how.bounds.override_holds, ..HoldRules::default() },
        stale_after_secs: Some(how.bounds.stale_after),
        policy,
        ..Rules::new(caps)
    })
}

/// The controller of `up`, with default rules.
#[allow(clippy::too_many_arguments)] // each has another owner
pub async fn run_with_defaults(
    paths: &[PathBuf],
    limits: &LimitArgs,
    how: &ControllerArgs,
    live: &ConnectedTarget,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    notifiers: &Notifiers,
) -> Result<(), Failure> {
    let from = WatchSource::Paths { paths: paths.to_vec(), only_poll: false };
    let rules = rules(how, live.caps())?;
    check_controller(&rules, &live.name)?;
    let configured =
        TargetArgs { config: std::env::var_os("ABIDE_CONFIG").map(PathBuf::from), ..TargetArgs::local() };
    let feed = InventoryFeed::new(configured.all_inventories()?, how.owner().to_owned());
    run_until_stopped(from, limits, how, rules, live, stop, printer, notifiers, feed).await;
    Ok(())
}

#[allow(clippy::too_many_arguments)] // each has another owner
async fn run_until_stopped(
    from: WatchSource,
    limits: &LimitArgs,
    how: &ControllerArgs,
    rules: Rules,
    live: &ConnectedTarget,
    stop: watch::Receiver<bool>,
    printer: &Printer,
    notifiers: &Notifiers,
    inventories: Arc<InventoryFeed>,
) {
    notifiers.gateway.set(live.abide().ok().map(|abide| abide.calls().clone()));
    // The local agent runs processes without a `user` as the current user.
    let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.name);
    let me = me.filter(|_| live.name == "local");
    let config = ControllerConfig {
        rules,
        follow: how.follow,
        heal: how.heal,
        interval: how.reconcile_interval(),
        timeout: Duration::from_secs(600),
        check: if live.name == "local" { crate::cli::commands::apply::check_config_files } else { |_| None },
        trigger: Arc::clone(&notifiers.trigger),
        manifests: ManifestConfig {
            source: from.source(),
            default_user: me.clone(),
            limits: limits.limits(),
            history: from.manifest_history(),
        },
        notify_failures: notifiers.alerts.deliveries.failures(),
    };
    let alerts = notifiers.alerts.start(live.state.clone(), &notifiers.board);
    let mut default_user = DefaultUserCache::default();
    let finish = Box::new(move |desired: &mut Desired| {
        if let Some(me) = &me {
            default_user.name(desired, me);
        }
    });
    let mut source = from.open(limits.limits(), Duration::from_millis(how.debounce), finish);
    source.use_inventories(Arc::clone(&inventories));
    let trigger = source.trigger();
    let mut console = ConsoleState::default();
    let mut on_event = |event: ControllerEvent<'_>| {
        notifiers.board.record(&event);
        notifiers.alerts.record(&event);
        print_event(&event, &mut console, printer);
    };
    tokio::select! {
        () = control::run(&config, &mut source, live, stop, &mut on_event) => {}
        () = inventories.run(live.state.clone(), || trigger.now()) => {}
    }
    alerts.stop().await;
}
