//! `abide notify`: the routes of alerts in the config file, and a test message.

use std::path::PathBuf;

use clap::Subcommand;

use crate::alerts::AlertRoute;
use crate::alerts::conditions::{AlertSubject, Extent, IncidentKey};
use crate::alerts::message::MessageOrigin;
use crate::alerts::tracker::{Incident, IncidentBatch};
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::{find_config_files, runtime};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::{AlertKind, AlertPhase};
use crate::error_chain::chain;
use crate::model::DEFAULT_OWNER;

/// Show the routes of alerts, and send a test message
///
/// `watch` and `up PATH` send alerts to the routes of `notify` in the config file.
#[derive(Debug, clap::Args)]
pub struct NotifyVerbArgs {
    #[command(subcommand)]
    pub verb: NotifyVerb,
}

#[derive(Debug, Subcommand)]
pub enum NotifyVerb {
    /// Send one test message to a route and print the answer
    ///
    /// Sends a message of kind `unhealthy` about the process test/message, and its recovery with --resolved. Exits with 1
    /// if the receiver did not accept it.
    Test(RouteTestArgs),
    /// Print the routes and their receivers
    List(RouteListArgs),
}

#[derive(Debug, clap::Args)]
pub struct RouteTestArgs {
    /// Name of the route
    #[arg(value_name = "ROUTE")]
    pub route: String,
    /// Send the recovery of the test message
    #[arg(long, env = "ABIDE_NOTIFY_RESOLVED", value_parser = crate::cli::args::parse_switch)]
    pub resolved: bool,
    /// Config file [default: ./abide.yaml (see `abide config trust`), then ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct RouteListArgs {
    /// Config file [default: ./abide.yaml (see `abide config trust`), then ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
}

pub fn run(args: &NotifyVerbArgs, printer: &Printer) -> Result<Exit, Failure> {
    match &args.verb {
        NotifyVerb::Test(args) => test(args, printer),
        NotifyVerb::List(args) => {
            let files = find_config_files(args.config.as_deref())?;
            let routes = files.notify()?;
            if routes.is_empty() {
                printer.data(&format!("no alert routes in {}\n", files.shown()));
                printer.info("`notify` of the config file defines them: see docs/alerts.md");
            }
            for route in routes {
                let scope = match route.rules.namespaces.as_slice() {
                    [] => "all namespaces".to_owned(),
                    [one] => format!("namespace {one}"),
                    some => format!("namespaces {}", some.join(", ")),
                };
                let (to, severity) = (route.receiver.shown(), route.rules.min_severity.word());
                let line = format!("{}: {to}; {scope}; from severity {severity}", route.name);
                printer.data(&format!("{}\n", visible(&line)));
            }
            Ok(Exit::Done)
        }
    }
}

fn test(args: &RouteTestArgs, printer: &Printer) -> Result<Exit, Failure> {
    let files = find_config_files(args.config.as_deref())?;
    let shown = files.shown();
    let mut routes = files.notify()?;
    let Some(at) = routes.iter().position(|route| route.name == args.route) else {
        let known: Vec<&str> = routes.iter().map(|route| route.name.as_str()).collect();
        let message = format!("no alert route {:?} in {shown}", args.route);
        return Err(Failure::new(Exit::Usage, message).hint(match known.is_empty() {
            true => "`notify` of the config file defines routes: see docs/alerts.md".to_owned(),
            false => format!("known routes: {}", known.join(", ")),
        }));
    };
    let AlertRoute { name, receiver, timeout, .. } = routes.swap_remove(at);
    let phase = if args.resolved { AlertPhase::Resolved } else { AlertPhase::Firing };
    let now = clock::now();
    let origin = MessageOrigin {
        owner: DEFAULT_OWNER.to_owned(),
        target: "local".to_owned(),
        route: name.clone(),
        ..MessageOrigin::default()
    };
    let to = visible(&receiver.shown());
    let sent = runtime()?.block_on(receiver.send(&test_batch(phase)?, &origin, now, timeout));
    match sent {
        Ok(answer) => {
            printer.data(&format!("{name}: sent to {to}: {answer}\n"));
            Ok(Exit::Done)
        }
        Err(error) => {
            let message =
                format!("notify route {name:?}: {to} did not accept the message: {}", chain(&error));
            Err(Failure::new(Exit::Failed, message))
        }
    }
}

/// A message about a process that does not exist.
fn test_batch(phase: AlertPhase) -> Result<IncidentBatch, Failure> {
    let invalid = |_| Failure::new(Exit::Failed, "the test message is not valid");
    let process = "test/message".parse().map_err(invalid)?;
    let instance = "0:127.0.0.1:test:message".parse().map_err(invalid)?;
    let now = clock::now();
    let key = IncidentKey { kind: AlertKind::Unhealthy, subject: AlertSubject::Process(process) };
    let extent = Extent {
        instances: 1,
        named: vec![instance],
        detail: "test message of `abide notify test`".to_owned(),
    };
    let ended = (phase == AlertPhase::Resolved).then_some(now);
    let incident = Incident { since: now.before_secs(60), ended, sent: None, extent };
    Ok(IncidentBatch { kind: key.kind, phase, incidents: vec![(key, incident)] })
}
