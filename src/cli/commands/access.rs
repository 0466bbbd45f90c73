//! `abide access`: evaluates an apps file or a users file, without a gateway, and makes digests of tokens.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use crate::access::apps::Apps;
use crate::access::{
    AccessRequest, AccessRole, CredentialsFileError, MIN_TOKEN_CHARS, authorize, token_digest,
};
use crate::cli::args::{InvalidValue, PlainForm, parse_switch};
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::access::forbidden;
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::{self, TokenHash};
use crate::error_chain::chain;
use crate::ids::fresh_secret;
use crate::model::{HostKey, Name, ProcessKey};

/// Check permissions of an app or a person, and hash tokens
#[derive(Debug, clap::Args)]
pub struct AccessArgs {
    #[command(subcommand)]
    pub verb: AccessVerb,
}

#[derive(Debug, clap::Subcommand)]
pub enum AccessVerb {
    /// Check whether an app or a person may run a verb, from the file alone
    ///
    /// Exits with 0 if the caller may, and with 77 if it lacks a grant, which the message names.
    #[command(
        after_help = "Examples:\n  abide access check ci-web apply web --owner web-team --apps apps.yaml\n  abide access check ci-web stop web/api --host 0:10.0.0.7 --user www --apps apps.yaml\n  abide access check ann pause web --users users.yaml"
    )]
    Check(CheckArgs),
    /// Print the digest of a person's token for the users file
    ///
    /// Reads the token from stdin. The digest is SHA-256 in hex, the value of `token_sha256`. A token with fewer than 16
    /// characters is refused.
    #[command(after_help = "Examples:\n  abide access hash < token\n  abide access hash --generate")]
    Hash(HashArgs),
}

#[derive(Debug, clap::Args)]
pub struct HashArgs {
    /// Make a random token, and print it and its digest: it is shown once
    #[arg(long, env = "ABIDE_HASH_GENERATE", value_parser = parse_switch)]
    pub generate: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_HASH_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Code of the app, or name of the person
    #[arg(value_name = "APP|PERSON")]
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
    #[arg(long, value_name = "FILE", env = "ABIDE_APPS", required_unless_present = "users")]
    pub apps: Option<PathBuf>,
    /// Users file of the gateway or the controller: check a person
    #[arg(long, value_name = "FILE", env = "ABIDE_USERS", conflicts_with = "apps")]
    pub users: Option<PathBuf>,
}

/// Maximum bytes of a token on stdin.
const MAX_TOKEN_BYTES: u64 = 4096;

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
    Why,
    History,
    Plan,
    Diff,
    Export,
    Doctor,
    Apply,
    Watch,
    Rollback,
    /// Needs role operate if the owner declares secrets.
    RolloutStatus,
    RolloutPromote,
    RolloutAbort,
    RolloutUndo,
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
    LeaseList,
    LeaseReset,
    InventoryList,
    InventoryShow,
    InventoryAccept,
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
            | CheckedVerb::Why
            | CheckedVerb::History
            | CheckedVerb::RolloutStatus
            | CheckedVerb::LeaseList
            | CheckedVerb::InventoryList
            | CheckedVerb::InventoryShow
            | CheckedVerb::Plan
            | CheckedVerb::Diff
            | CheckedVerb::Export
            | CheckedVerb::Doctor => AccessRole::Read,
            CheckedVerb::Apply
            | CheckedVerb::Watch
            | CheckedVerb::Rollback
            | CheckedVerb::RolloutPromote
            | CheckedVerb::RolloutAbort
            | CheckedVerb::RolloutUndo
            | CheckedVerb::Start
            | CheckedVerb::Stop
            | CheckedVerb::Restart
            | CheckedVerb::Reload
            | CheckedVerb::Kill
            | CheckedVerb::Release
            | CheckedVerb::Unprotect
            | CheckedVerb::Own
            | CheckedVerb::InventoryAccept
            | CheckedVerb::Pause
            | CheckedVerb::Resume => AccessRole::Operate,
            CheckedVerb::LeaseReset | CheckedVerb::Token | CheckedVerb::HostRevoke => AccessRole::Admin,
            CheckedVerb::Audit | CheckedVerb::AuditVerify => AccessRole::Admin,
        }
    }

    /// Whether the verb always reads or writes the state of an owner.
    fn needs_state(self) -> bool {
        match self {
            CheckedVerb::Why
            | CheckedVerb::History
            | CheckedVerb::Plan
            | CheckedVerb::Diff
            | CheckedVerb::Apply
            | CheckedVerb::Watch
            | CheckedVerb::Rollback
            | CheckedVerb::RolloutStatus
            | CheckedVerb::RolloutPromote
            | CheckedVerb::RolloutAbort
            | CheckedVerb::RolloutUndo
            | CheckedVerb::InventoryList
            | CheckedVerb::InventoryShow
            | CheckedVerb::InventoryAccept
            | CheckedVerb::Own => true,
            CheckedVerb::Get
            | CheckedVerb::Describe
            | CheckedVerb::Status
            | CheckedVerb::Logs
            | CheckedVerb::Export
            | CheckedVerb::Doctor
            | CheckedVerb::LeaseList
            | CheckedVerb::LeaseReset => false,
            // A process without an owner has no state.
            CheckedVerb::Start
            | CheckedVerb::Stop
            | CheckedVerb::Restart
            | CheckedVerb::Reload
            | CheckedVerb::Kill
            | CheckedVerb::Release
            | CheckedVerb::Unprotect
            | CheckedVerb::Pause
            | CheckedVerb::Resume => false,
            CheckedVerb::Audit | CheckedVerb::AuditVerify | CheckedVerb::Token | CheckedVerb::HostRevoke => {
                false
            }
        }
    }
}

pub fn run(args: &AccessArgs, printer: &Printer) -> Result<Exit, Failure> {
    match &args.verb {
        AccessVerb::Check(args) => check(args, printer),
        AccessVerb::Hash(args) => hash(args, printer),
    }
}

fn check(args: &CheckArgs, printer: &Printer) -> Result<Exit, Failure> {
    let invalid = |error: CredentialsFileError| Failure::new(Exit::Usage, chain(&error));
    let (apps, file) = match (&args.users, &args.apps) {
        (Some(file), _) => (Apps::read_people(file).map_err(invalid)?, file),
        (None, Some(file)) => (Apps::read(file).map_err(invalid)?, file),
        (None, None) => return Err(Failure::new(Exit::Usage, "pass --apps FILE or --users FILE")),
    };
    let found = if args.users.is_some() { apps.find_person(&args.app) } else { apps.find(&args.app) };
    let app = found.ok_or_else(|| unknown(args, file, &apps))?;
    let caller = &app.grant().principal;
    if let Some(at) = app.expired(clock::now()) {
        return Err(forbidden(format!("{caller}: its secret expired at {at}")));
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
    if args.verb.needs_state() && !app.grant().has_state() {
        let verb =
            args.verb.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        return Err(forbidden(format!("{caller} lacks owners: {verb} needs the state of an owner")));
    }
    printer.data(&format!("{caller} may\n"));
    Ok(Exit::Done)
}

fn unknown(args: &CheckArgs, file: &Path, apps: &Apps) -> Failure {
    let known: Vec<String> = apps.principals().map(|one| visible(one.name())).collect();
    let (one, many) = if args.users.is_some() { ("person", "people") } else { ("app", "apps") };
    let message = format!("{} has no {one} {}", file.display(), visible(&args.app));
    forbidden(message).hint(format!("its {many}: {}", known.join(", ")))
}

fn hash(args: &HashArgs, printer: &Printer) -> Result<Exit, Failure> {
    let usage = |why: String| Failure::new(Exit::Usage, why);
    let token = match args.generate {
        true => fresh_secret(),
        false => {
            let mut line = String::new();
            let read = std::io::stdin().lock().take(MAX_TOKEN_BYTES).read_line(&mut line);
            read.map_err(|error| usage(format!("cannot read the token from stdin: {error}")))?;
            line.trim().to_owned()
        }
    };
    if token.chars().count() < MIN_TOKEN_CHARS {
        let message =
            format!("the token has fewer than {MIN_TOKEN_CHARS} characters: its digest could be guessed");
        return Err(usage(message).hint("--generate makes a random token"));
    }
    let digest = token_digest(&token);
    let shown = Some(token).filter(|_| args.generate);
    match (args.output, shown) {
        (PlainForm::Json, token) => {
            printer.data(&contract::pretty(&TokenHash { token, token_sha256: digest }));
        }
        (PlainForm::Text, None) => printer.data(&format!("{digest}\n")),
        (PlainForm::Text, Some(token)) => {
            printer.data(&format!("token:        {token}\ntoken_sha256: {digest}\n"));
        }
    }
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    use super::*;
    use crate::cli::args::Args;

    /// Every form of every verb with `--target`, as words.
    fn verbs_with_target(command: &Command, words: &[&str]) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        for verb in command.get_subcommands() {
            let words = [words, &[verb.get_name()]].concat();
            if verb.get_arguments().any(|arg| arg.get_id() == "target") {
                found.push(words.iter().map(|word| (*word).to_owned()).collect());
            }
            found.extend(verbs_with_target(verb, &words));
        }
        found
    }

    #[test]
    fn every_verb_that_calls_a_gateway_can_be_checked() {
        let known: Vec<String> = CheckedVerb::value_variants()
            .iter()
            .filter_map(|verb| Some(verb.to_possible_value()?.get_name().to_owned()))
            .collect();
        let all = verbs_with_target(&Args::command(), &[]);
        assert!(all.len() > 30, "{all:?}");
        for words in all {
            let is_known = known.contains(&words.join("-")) || known.contains(&words[0]);
            assert!(is_known, "abide access check has no verb for {words:?}");
        }
    }
}
