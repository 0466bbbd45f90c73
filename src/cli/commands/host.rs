//! `abide host`: certificates of hosts.

use clap::Subcommand;

use super::token::{call, connect, print_revoked};
use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::output::print::Printer;
use crate::cli::target::TargetArgs;
use crate::cli::{Exit, Failure};
use crate::contract::HostRevocation;
use crate::model::HostKey;

/// Revoke the certificate of a host's agent
#[derive(Debug, clap::Args)]
pub struct HostArgs {
    #[command(subcommand)]
    pub verb: HostVerb,
}

#[derive(Debug, Subcommand)]
pub enum HostVerb {
    Revoke(RevokeArgs),
}

/// Revoke the key of a host's agent and end its session
///
/// All hosts of the agent lose their certificate, and open join tokens for the host are revoked. The processes keep
/// running. The host joins again with a new join token; a static token is not accepted for it.
#[derive(Debug, clap::Args)]
pub struct RevokeArgs {
    /// Host, as CLOUD:IP
    #[arg(value_name = "CLOUD:IP")]
    pub host: HostKey,
    /// Also accept static tokens for these hosts again
    #[arg(long, env = "ABIDE_HOST_FORGET", value_parser = parse_switch)]
    pub forget: bool,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_HOST_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &HostArgs, printer: &Printer) -> Result<Exit, Failure> {
    let HostVerb::Revoke(args) = &args.verb;
    let live = connect(&args.target)?;
    let request = HostRevocation { host: args.host.clone(), forget: args.forget };
    let revoked = call(&live, async |abide| abide.revoke_host(&request).await)?;
    print_revoked(&revoked, args.output, printer);
    Ok(Exit::Done)
}
