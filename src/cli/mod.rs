//! The command line: verbs, flags and exit codes are a contract with people's scripts.
//!
//! Data goes to stdout, everything else to stderr. A verb returns what happened; only this room prints.

mod args;
mod commands;
mod local;
mod output;
mod status_server;
mod sync_status;
mod systemd;
mod target;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use tracing::level_filters::LevelFilter;

use self::args::{Args, Verb};
use self::commands::{
    agent, apply, config, convert, diff, doctor, explain, generate, get, import, init, lease, logs, manual,
    plan, rollback, serve, status, up, validate, watch,
};
use self::output::print::Printer;
use self::output::{logging, stderr};
use crate::model::Op;

/// Exit codes of the contract that the verbs so far can end with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Done = 0,
    /// For `diff`: there are differences.
    Failed = 1,
    /// There are changes; for `diff`: any error but 65 and 69.
    Changes = 2,
    /// Not everything is as wanted: something failed, is unknown or not well.
    Incomplete = 3,
    /// A guard said no.
    Refused = 4,
    /// Something was still in progress.
    TimedOut = 5,
    /// Another holds the lease.
    Locked = 6,
    /// A rollout failed, and what it changed is as it was.
    RolledBack = 7,
    Usage = 64,
    InvalidManifest = 65,
    /// The target could not be reached.
    Unreachable = 69,
    /// Stopped at a safe point.
    Interrupted = 130,
    Terminated = 143,
}

/// Why a verb could not do its work: a sentence, and a hint on a line of its own.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    pub message: String,
    pub hint: Option<String>,
    /// Which guard said no, in one word for scripts.
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
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // A broken pipe here is as good as printed.
            let _ = error.print();
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            let verb = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
            return exit_code(match asked {
                true => Exit::Done,
                // `diff` keeps 1 for differences and 2 for whatever went wrong.
                false if verb.as_deref() == Some("diff") => Exit::Changes,
                false => Exit::Usage,
            });
        }
    };
    let stands = matches!(&args.verb, Verb::Watch(_) | Verb::Up(_) | Verb::Serve(_) | Verb::Agent(_));
    let in_json = stands && matches!(args.common.log_format, args::LogFormat::Json);
    let printer = Printer::new(&args.common, in_json);
    if matches!(&args.verb, Verb::Agent(_)) {
        agent::prepare_memory();
    }
    if stands {
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

fn run(verb: Verb, printer: &Printer) -> Result<Exit, Failure> {
    match verb {
        Verb::Init(args) => init::run(&args, printer),
        Verb::Validate(args) => validate::run(&args, printer),
        Verb::Plan(args) => plan::run(&args, printer),
        Verb::Diff(args) => diff::run(&args, printer),
        Verb::Convert(args) => convert::run(&args, printer),
        Verb::Explain(args) => explain::run(&args, printer),
        Verb::Apply(mut args) => apply::run(&mut args, printer),
        Verb::Watch(mut args) => watch::run(&mut args, printer),
        Verb::Up(args) => up::up(&args, printer),
        Verb::Down(args) => up::down(&args, printer),
        Verb::Get(args) => get::run(&args, printer),
        Verb::Logs(args) => logs::run(&args, printer),
        Verb::Status(args) => status::status(&args, printer),
        Verb::Describe(args) => status::describe(&args, printer),
        Verb::History(args) => status::history(&args, printer),
        Verb::Rollback(args) => rollback::run(*args, printer),
        Verb::Export(args) => status::export(&args, printer),
        Verb::Import(args) => import::run(&args, printer),
        Verb::Start(args) => manual::operate(Op::Start, &args, printer),
        Verb::Stop(args) => manual::operate(Op::Stop, &args, printer),
        Verb::Restart(args) => manual::operate(Op::Restart, &args, printer),
        Verb::Reload(args) => manual::operate(Op::Reload, &args, printer),
        Verb::Kill(args) => manual::operate(Op::Kill, &args, printer),
        Verb::Release(args) => manual::release(&args, printer),
        Verb::Pause(args) => manual::pause(&args, printer),
        Verb::Resume(args) => manual::resume(&args, printer),
        Verb::Lease(args) => lease::run(&args, printer),
        Verb::Doctor(args) => doctor::run(&args, printer),
        Verb::Config(args) => config::run(&args, printer),
        Verb::Serve(args) => serve::run(&args, printer),
        Verb::Agent(args) => agent::run(&args, printer),
        Verb::Schema => generate::schema(printer),
        Verb::Completions(args) => generate::completions(&args, printer),
        Verb::Man(args) => generate::man(&args, printer),
        Verb::Version(args) => generate::version(&args, printer),
    }
}

fn exit_code(exit: Exit) -> ExitCode {
    ExitCode::from(exit as u8)
}

/// What runs for long tells what happens; what answers a question only answers it, and `watch` and `up` tell by themselves.
fn default_level(verb: &Verb) -> LevelFilter {
    let tells =
        matches!(verb, Verb::Serve(_) | Verb::Agent(_)) || matches!(verb, Verb::Up(up) if up.background);
    if tells { LevelFilter::INFO } else { LevelFilter::WARN }
}
