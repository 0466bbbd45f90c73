//! The command line: verbs, flags and exit codes. All three are a contract with users' scripts.
//!
//! Data goes to stdout, everything else to stderr. Other modules return results; only this module prints.

mod args;
mod commands;
mod declared_names;
mod fleet_ca;
mod help;
mod instance_details;
mod inventories;
mod key_file;
mod local;
mod output;
mod people;
mod process_listing;
mod status_server;
mod sync_status;
mod systemd;
mod target;
mod word_meanings;

use std::process::ExitCode;

use clap::FromArgMatches;
use clap::error::ErrorKind;
use tracing::level_filters::LevelFilter;

use self::args::{Args, Verb};
use self::commands::manual::{operate, pause, release};
use self::commands::{
    access, agent, apply, audit, completions, config, convert, describe, diff, doctor, down, explain, export,
    get, history, host, import, init, inventory, lease, logs, man, notify, plan, rollback, rollout, schema,
    serve, status, token, up, validate, version, watch, why,
};
use self::commands::{own, render, unprotect};
use self::output::print::Printer;
use self::output::{logging, stderr};
use crate::model::Op;

/// Exit codes of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Done = 0,
    /// For `diff`: there are differences.
    Failed = 1,
    /// There are changes; for `diff`: any error except 65, 69 and 77.
    Changes = 2,
    /// Not converged: an instance failed, is unknown or unhealthy.
    Incomplete = 3,
    /// Refused by a safety check.
    Refused = 4,
    /// The time limit passed while operations were in flight.
    TimedOut = 5,
    /// Another process holds the lease.
    Locked = 6,
    /// A rollout failed and was rolled back.
    RolledBack = 7,
    Usage = 64,
    InvalidManifest = 65,
    /// The target is unreachable.
    Unreachable = 69,
    /// The credentials do not permit the call.
    Forbidden = 77,
    /// SIGINT: stopped at a safe point.
    Interrupted = 130,
    Terminated = 143,
}

impl Exit {
    pub const ALL: [Exit; 14] = [
        Exit::Done,
        Exit::Failed,
        Exit::Changes,
        Exit::Incomplete,
        Exit::Refused,
        Exit::TimedOut,
        Exit::Locked,
        Exit::RolledBack,
        Exit::Usage,
        Exit::InvalidManifest,
        Exit::Unreachable,
        Exit::Forbidden,
        Exit::Interrupted,
        Exit::Terminated,
    ];

    pub fn meaning(self) -> &'static str {
        match self {
            Exit::Done => "Done, nothing to do, or converged.",
            Exit::Failed => "Any other error; `diff`: there are differences.",
            Exit::Changes => "`plan --detailed-exitcode`: there are changes, held ones included.",
            Exit::Incomplete => "Not converged: an instance failed, is held, unknown or unhealthy.",
            Exit::Refused => "Refused by a safety check; `exit.reason` of -o json names it.",
            Exit::TimedOut => {
                "The time limit passed while operations were in flight, or a rollout waits for a promotion."
            }
            Exit::Locked => "Another process holds the lease of the owner.",
            Exit::RolledBack => "A rollout failed and was rolled back.",
            Exit::Usage => "Wrong usage, or an unknown name.",
            Exit::InvalidManifest => "Invalid manifest or request body.",
            Exit::Unreachable => "The target is unreachable.",
            Exit::Forbidden => "The credential lacks a grant.",
            Exit::Interrupted => "Interrupted by SIGINT at a safe point.",
            Exit::Terminated => "Interrupted by SIGTERM at a safe point.",
        }
    }
}

/// A verb's failure: exit code, message, and a hint that is printed on its own line.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    pub message: String,
    pub hint: Option<String>,
    /// The safety check that refused, as one word for scripts.
    pub reason: Option<&'static str>,
}

impl Failure {
    fn new(exit: Exit, message: impl Into<String>) -> Failure {
        Failure { exit, message: message.into(), hint: None, reason: None }
    }

    fn refused(reason: &'static str, message: impl Into<String>) -> Failure {
        Failure { reason: Some(reason), ..Failure::new(Exit::Refused, message) }
    }

    fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }
}

pub fn main() -> ExitCode {
    crate::agent::serve_if_launcher();
    let args = match parse_args() {
        Ok(args) => args,
        Err(error) => {
            // A broken pipe is not an error.
            let _ = error.print();
            let is_requested = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            let verb = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
            return exit_code(match is_requested {
                true => Exit::Done,
                // `diff` exits with 1 for differences and with 2 for errors.
                false if verb.as_deref() == Some("diff") => Exit::Changes,
                false => Exit::Usage,
            });
        }
    };
    let is_daemon = matches!(&args.verb, Verb::Watch(_) | Verb::Up(_) | Verb::Serve(_) | Verb::Agent(_));
    let in_json = is_daemon && matches!(args.common.log_format, args::LogFormat::Json);
    let printer = Printer::new(&args.common, in_json);
    if matches!(&args.verb, Verb::Agent(_)) {
        agent::prepare_memory();
    }
    if is_daemon {
        stderr::start_writer(in_json);
    }
    logging::start(&args.common, default_level(&args.verb));
    let exit = match run(args.verb, &printer) {
        Ok(_) if printer.failed() => Exit::Failed,
        Ok(exit) => exit,
        Err(failure) => {
            printer.failure(&failure);
            failure.exit
        }
    };
    stderr::flush_queue();
    exit_code(exit)
}

fn parse_args() -> Result<Args, clap::Error> {
    let mut matches = help::command().try_get_matches()?;
    Args::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut help::command()))
}

fn run(verb: Verb, printer: &Printer) -> Result<Exit, Failure> {
    match verb {
        Verb::Init(args) => init::run(&args, printer),
        Verb::Validate(args) => validate::run(&args, printer),
        Verb::Plan(args) => plan::run(&args, printer),
        Verb::Diff(args) => diff::run(&args, printer),
        Verb::Convert(args) => convert::run(&args, printer),
        Verb::Explain(args) => explain::run(&args, printer),
        Verb::Render(args) => render::run(&args, printer),
        Verb::Apply(mut args) => apply::run(&mut args, printer),
        Verb::Watch(mut args) => watch::run(&mut args, printer),
        Verb::Up(args) => up::run(&args, printer),
        Verb::Down(args) => down::run(&args, printer),
        Verb::Get(args) => get::run(&args, printer),
        Verb::Logs(args) => logs::run(&args, printer),
        Verb::Status(args) => status::run(&args, printer),
        Verb::Describe(args) => describe::run(&args, printer),
        Verb::Why(args) => why::run(&args, printer),
        Verb::History(args) => history::run(&args, printer),
        Verb::Rollback(args) => rollback::run(*args, printer),
        Verb::Export(args) => export::run(&args, printer),
        Verb::Import(args) => import::run(&args, printer),
        Verb::Start(args) => operate::run(Op::Start, &args, printer),
        Verb::Stop(args) => operate::run(Op::Stop, &args, printer),
        Verb::Restart(args) => operate::run(Op::Restart, &args, printer),
        Verb::Reload(args) => operate::run(Op::Reload, &args, printer),
        Verb::Kill(args) => operate::run(Op::Kill, &args, printer),
        Verb::Release(args) => release::run(&args, printer),
        Verb::Unprotect(args) => unprotect::run(&args, printer),
        Verb::Rollout(args) => rollout::run(*args, printer),
        Verb::Own(args) => own::run(&args, printer),
        Verb::Pause(args) => pause::pause(&args, printer),
        Verb::Resume(args) => pause::resume(&args, printer),
        Verb::Lease(args) => lease::run(&args, printer),
        Verb::Token(args) => token::run(&args, printer),
        Verb::Host(args) => host::run(&args, printer),
        Verb::Access(args) => access::run(&args, printer),
        Verb::Audit(args) => audit::run(&args, printer),
        Verb::Doctor(args) => doctor::run(&args, printer),
        Verb::Config(args) => config::run(&args, printer),
        Verb::Inventory(args) => inventory::run(&args, printer),
        Verb::Notify(args) => notify::run(&args, printer),
        Verb::Serve(args) => serve::run(&args, printer),
        Verb::Agent(args) => agent::run(&args, printer),
        Verb::Schema => schema::run(printer),
        Verb::Completions(args) => completions::run(&args, printer),
        Verb::Man(args) => man::run(&args, printer),
        Verb::Version(args) => version::run(&args, printer),
    }
}

fn exit_code(exit: Exit) -> ExitCode {
    ExitCode::from(exit as u8)
}

/// Log level without -v: daemons log at info. `watch` and `up` print their own events, so they log warnings only.
fn default_level(verb: &Verb) -> LevelFilter {
    let logs_info =
        matches!(verb, Verb::Serve(_) | Verb::Agent(_)) || matches!(verb, Verb::Up(up) if up.background);
    if logs_info { LevelFilter::INFO } else { LevelFilter::WARN }
}
