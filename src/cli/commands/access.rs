//! `abide access`: evaluates an apps file, without a gateway.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::cli::args::InvalidValue;
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::access::forbidden;
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::error_chain::chain;
use crate::gateway::access::{AccessRequest, AccessRole, authorize};
use crate::gateway::apps::Apps;
use crate::model::{HostKey, Name, ProcessKey};

/// Check what an app of a gateway may do
#[derive(Debug, clap::Args)]
pub struct AccessArgs {
    #[command(subcommand)]
    pub verb: AccessVerb,
}

#[derive(Debug, clap::Subcommand)]
pub enum AccessVerb {
    /// Check whether an app may run a verb, from the apps file alone
    ///
    /// Exits with 0 if the app may, and with 77 if it lacks a grant, which the message names.
    #[command(
        after_help = "Examples:\n  abide access check ci-web apply web --owner web-team --apps apps.yaml\n  abide access check ci-web stop web/api --host 0:10.0.0.7 --user www --apps apps.yaml"
    )]
    Check(CheckArgs),
}

#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Code of the app
    #[arg(value_name = "APP")]
    pub app: String,
    /// Verb of the command line
    #[arg(value_name = "VERB", value_enum)]
    pub verb: CheckedVerb,
    /// Namespace, or a process in it; `*`: every namespace
    #[arg(value_name = "NS[/NAME]", value_parser = parse_subject)]
    pub subject: NamespaceArg,
    /// Host: CLOUD:IP or @AGENT_ID
    #[arg(long, value_name = "HOST", env = "ABIDE_HOST")]
    pub host: Option<HostKey>,
    /// Account of the process
    #[arg(long, value_name = "NAME", env = "ABIDE_USER")]
    pub user: Option<String>,
    /// Owner of the manifests (repeatable: `own` needs both owners)
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER")]
    pub owner: Vec<String>,
    /// Apps file of the gateway
    #[arg(long, value_name = "FILE", env = "ABIDE_APPS")]
    pub apps: PathBuf,
}

/// A namespace, or `*`.
#[derive(Clone, Debug)]
pub struct NamespaceArg(String);

fn parse_subject(text: &str) -> Result<NamespaceArg, InvalidValue> {
    let wrong = InvalidValue("a namespace, NAMESPACE/NAME, or *");
    if text == "*" {
        return Ok(NamespaceArg(text.to_owned()));
    }
    match text.contains('/') {
        true => {
            text.parse::<ProcessKey>().map(|key| NamespaceArg(key.namespace.to_string())).map_err(|_| wrong)
        }
        false => text.parse::<Name>().map(|name| NamespaceArg(name.to_string())).map_err(|_| wrong),
    }
}

/// Verbs that call a gateway.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum CheckedVerb {
    Get,
    Describe,
    Status,
    Logs,
    History,
    Plan,
    Diff,
    Export,
    Doctor,
    Apply,
    Watch,
    Rollback,
    Start,
    Stop,
    Restart,
    Reload,
    Kill,
    Release,
    /// Needs the owner of the processes.
    Unprotect,
    /// Needs both owners: --owner A --owner B.
    Own,
    Pause,
    Resume,
    LeaseReset,
    Audit,
    /// `audit --verify`: needs every namespace, host and owner.
    AuditVerify,
    /// `token` in all its forms: needs every namespace, host and owner.
    Token,
    /// `host revoke`: needs every namespace, host and owner.
    HostRevoke,
}

impl CheckedVerb {
    fn role(self) -> AccessRole {
        match self {
            CheckedVerb::Get
            | CheckedVerb::Describe
            | CheckedVerb::Status
            | CheckedVerb::Logs
            | CheckedVerb::History
            | CheckedVerb::Plan
            | CheckedVerb::Diff
            | CheckedVerb::Export
            | CheckedVerb::Doctor => AccessRole::Read,
            CheckedVerb::Apply
            | CheckedVerb::Watch
            | CheckedVerb::Rollback
            | CheckedVerb::Start
            | CheckedVerb::Stop
            | CheckedVerb::Restart
            | CheckedVerb::Reload
            | CheckedVerb::Kill
            | CheckedVerb::Release
            | CheckedVerb::Unprotect
            | CheckedVerb::Own
            | CheckedVerb::Pause
            | CheckedVerb::Resume => AccessRole::Operate,
            CheckedVerb::LeaseReset | CheckedVerb::Token | CheckedVerb::HostRevoke => AccessRole::Admin,
            CheckedVerb::Audit | CheckedVerb::AuditVerify => AccessRole::Admin,
        }
    }
}

pub fn run(args: &AccessArgs, printer: &Printer) -> Result<Exit, Failure> {
    match &args.verb {
        AccessVerb::Check(args) => check(args, printer),
    }
}

fn check(args: &CheckArgs, printer: &Printer) -> Result<Exit, Failure> {
    let apps = Apps::read(&args.apps).map_err(|error| Failure::new(Exit::Usage, chain(&error)))?;
    let app = apps.find(&args.app).ok_or_else(|| unknown(args, &apps))?;
    if let Some(at) = app.expired(clock::now()) {
        return Err(forbidden(format!("app {}: its secret expired at {at}", visible(&args.app))));
    }
    let NamespaceArg(namespace) = &args.subject;
    let request = AccessRequest {
        role: Some(args.verb.role()),
        namespace: Some(namespace),
        host: args.host.as_ref(),
        user: args.user.as_deref(),
        ..AccessRequest::default()
    };
    let of_owner = |owner: &String| {
        let owner = Some(owner.as_str());
        authorize(app.grant(), &AccessRequest { owner, state_owner: owner, ..AccessRequest::default() })
    };
    let checked = authorize(app.grant(), &request).and_then(|()| args.owner.iter().try_for_each(of_owner));
    let checked = checked.and_then(|()| match args.verb {
        CheckedVerb::Token | CheckedVerb::HostRevoke | CheckedVerb::AuditVerify => {
            app.grant().check_everything()
        }
        _ => Ok(()),
    });
    checked.map_err(|missing| forbidden(missing.to_string()))?;
    printer.data(&format!("app {} may\n", visible(&args.app)));
    Ok(Exit::Done)
}

fn unknown(args: &CheckArgs, apps: &Apps) -> Failure {
    let known: Vec<String> = apps.codes().map(visible).collect();
    let message = format!("{} has no app {}", args.apps.display(), visible(&args.app));
    forbidden(message).hint(format!("its apps: {}", known.join(", ")))
}
