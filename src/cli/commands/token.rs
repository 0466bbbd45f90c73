//! `abide token`: one-time join tokens of agents.

use clap::Subcommand;

use crate::backend::{Abide, AnyBackend, BackendError, RefusalReason};
use crate::cli::args::{InvalidValue, PlainForm};
use crate::cli::output::print::{Printer, visible};
use crate::cli::output::table::{Align, Table};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::contract::{self, JoinTokenRequest, Revoked};
use crate::model::{HostKey, seconds};

/// Create, list and revoke one-time join tokens of agents
///
/// An agent exchanges a join token for a client certificate of the gateway's CA (`abide serve --ca-dir`). The app of the
/// target needs role admin with every namespace, host and owner.
#[derive(Debug, clap::Args)]
pub struct TokenArgs {
    #[command(subcommand)]
    pub verb: TokenVerb,
}

#[derive(Debug, Subcommand)]
pub enum TokenVerb {
    Create(CreateArgs),
    List(TokenListArgs),
    Revoke(TokenRevokeArgs),
}

/// Create a join token and print it: it is shown once
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  abide token create --target fleet --host 0:10.0.0.7 > token\n  abide agent --join https://gateway:7465 --token-file token --data /var/lib/abide-agent --as-host 0:10.0.0.7"
)]
pub struct CreateArgs {
    /// Host that the agent may serve, as CLOUD:IP (repeatable)
    #[arg(long, required = true, env = "ABIDE_TOKEN_HOST", value_name = "CLOUD:IP", value_delimiter = ',')]
    pub host: Vec<HostKey>,
    /// Time until the token expires, at most 7d
    #[arg(long, env = "ABIDE_TOKEN_TTL", value_name = "DURATION", default_value = "1h", value_parser = parse_ttl)]
    pub ttl: u64,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_TOKEN_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

/// List join tokens, without their secrets
#[derive(Debug, clap::Args)]
pub struct TokenListArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_TOKEN_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

/// Revoke a join token, and the certificate that it was exchanged for
#[derive(Debug, clap::Args)]
pub struct TokenRevokeArgs {
    /// Id of the token, as `abide token list` shows it
    #[arg(value_name = "ID")]
    pub id: String,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_TOKEN_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

fn parse_ttl(text: &str) -> Result<u64, InvalidValue> {
    let ttl = seconds(text).filter(|secs| (1..=7 * 86_400).contains(secs));
    ttl.ok_or(InvalidValue("a duration from 1s to 7d, such as 1h"))
}

pub fn run(args: &TokenArgs, printer: &Printer) -> Result<Exit, Failure> {
    match &args.verb {
        TokenVerb::Create(args) => create(args, printer),
        TokenVerb::List(args) => list(args, printer),
        TokenVerb::Revoke(args) => revoke(args, printer),
    }
}

/// The target, which must be an Abide gateway.
pub fn connect(target: &TargetArgs) -> Result<ConnectedTarget, Failure> {
    let live = target.connect(LocalStart::Never)?.ok_or_else(|| {
        Failure::new(Exit::Unreachable, "target local: the local system is not running")
            .hint("`abide up` starts it")
    })?;
    match &live.backend {
        AnyBackend::Abide(_) => Ok(live),
        AnyBackend::Platform(_) => {
            let message = format!(
                "target {} is not an Abide gateway: it has no join tokens and no audit log",
                live.name
            );
            Err(Failure::new(Exit::Usage, message).hint("pass --target NAME of a target with dialect abide"))
        }
    }
}

/// Runs a call of an Abide gateway.
pub fn call<T>(
    live: &ConnectedTarget,
    call: impl AsyncFnOnce(&Abide) -> Result<T, BackendError>,
) -> Result<T, Failure> {
    let AnyBackend::Abide(abide) = &live.backend else {
        return Err(Failure::new(Exit::Usage, format!("target {} is not an Abide gateway", live.name)));
    };
    runtime()?.block_on(call(abide)).map_err(|error| match error {
        // The gateway answered: the request cannot be fulfilled.
        BackendError::Refused(refusal) if refusal.reason == RefusalReason::Other => {
            Failure::new(Exit::Failed, format!("target {}: {refusal}", live.name))
        }
        error => live.failure(&error),
    })
}

fn create(args: &CreateArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = connect(&args.target)?;
    let request = JoinTokenRequest { hosts: args.host.clone(), ttl_secs: Some(args.ttl) };
    let created = call(&live, async |abide| abide.create_join_token(&request).await)?;
    match args.output {
        PlainForm::Json => printer.data(&contract::pretty(&created)),
        PlainForm::Text => {
            printer.data(&format!("{}\n", created.token));
            printer.info(&format!(
                "join token {} expires at {}; one agent can use it once",
                created.id, created.expires
            ));
        }
    }
    Ok(Exit::Done)
}

fn list(args: &TokenListArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = connect(&args.target)?;
    let rows = call(&live, async |abide| abide.join_tokens().await)?;
    if args.output == PlainForm::Json {
        printer.data(&contract::pretty(&rows));
        return Ok(Exit::Done);
    }
    let columns = ["ID", "STATE", "HOSTS", "EXPIRES", "BY", "AGENT"];
    let mut table = Table::new(columns.map(|name| (name, Align::Left)));
    for row in &rows {
        let hosts = row.hosts.iter().take(3).map(ToString::to_string).collect::<Vec<_>>().join(",");
        let more = row.hosts.len().saturating_sub(3);
        let hosts = if more > 0 { format!("{hosts} and {more} more") } else { hosts };
        let agent = row.agent.as_deref().unwrap_or("-");
        table.row(vec![
            visible(&row.id),
            visible(&row.state),
            visible(&hosts),
            visible(&row.expires),
            visible(&row.by),
            visible(agent),
        ]);
    }
    printer.styled(&table.text());
    Ok(Exit::Done)
}

fn revoke(args: &TokenRevokeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = connect(&args.target)?;
    let revoked = call(&live, async |abide| abide.revoke_join_token(&args.id).await)?;
    print_revoked(&revoked, args.output, printer);
    Ok(Exit::Done)
}

/// Prints the effect of a revocation.
pub fn print_revoked(revoked: &Revoked, form: PlainForm, printer: &Printer) {
    if form == PlainForm::Json {
        return printer.data(&contract::pretty(revoked));
    }
    for token in &revoked.tokens {
        printer.data(&format!("join token {} is revoked\n", visible(token)));
    }
    for host in &revoked.hosts {
        printer.data(&format!("the certificate of host {host} is revoked\n"));
    }
}
