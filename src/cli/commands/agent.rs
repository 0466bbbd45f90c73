//! `abide agent`: a host agent as a daemon.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::agent::{
    AgentIntervals, HostPolicy, JoinConfig, RefusedInstance, SAMPLE_INTERVAL, Supervisor, agent_name,
    left_running, refused_instances, run as serve, this_host,
};
use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::commands::serve::{Signals, private_file, private_folder};
use crate::cli::key_file::KeyFileArgs;
use crate::cli::output::print::{Printer, count, visible};
use crate::cli::systemd::Systemd;
use crate::cli::target::runtime;
use crate::cli::{Exit, Failure};
use crate::contract::{self, RefusedLaunch, RefusedLaunches};
use crate::error_chain::chain;
use crate::http::{AddressError, ClientConfig};
use crate::malloc;
use crate::model::HostKey;
use crate::permissions::require_private;

/// Run a host agent that supervises processes for a gateway
///
/// Prints `ready URL` on stdout when all its hosts have joined the gateway. SIGTERM and Ctrl-C stop the agent; its
/// processes keep running, and the next agent with the same --data adopts them.
#[derive(Debug, clap::Args)]
pub struct AgentArgs {
    /// URL of the gateway
    #[arg(long, env = "ABIDE_JOIN", value_name = "URL", required_unless_present = "check_policy")]
    pub join: Option<String>,
    /// File with the agent's token
    ///
    /// A join token of `abide token create` is exchanged for a certificate, which the agent then uses and renews.
    #[arg(long, env = "ABIDE_TOKEN_FILE", value_name = "FILE", required_unless_present_any = ["check_policy", "client_cert"])]
    pub token_file: Option<PathBuf>,
    /// Data folder, created if it does not exist
    #[arg(long, env = "ABIDE_DATA", value_name = "DIR")]
    pub data: PathBuf,
    /// Host that the agent serves, as CLOUD:IP (repeatable) [default: 0:127.0.0.1]
    #[arg(long, env = "ABIDE_AS_HOST", value_name = "CLOUD:IP", value_delimiter = ',')]
    pub as_host: Vec<HostKey>,
    /// Seconds between checks of health_cmd and configuration files
    #[arg(long, env = "ABIDE_CHECK_SECS", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub check_secs: u64,
    /// Seconds between samples of cpu, memory, descriptors and threads of a process
    #[arg(long, env = "ABIDE_SAMPLE_SECS", value_name = "N", default_value_t = SAMPLE_INTERVAL.as_secs(), value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub sample_secs: u64,
    #[command(flatten)]
    pub keys: KeyFileArgs,
    #[command(flatten)]
    pub transport: AgentTransportArgs,
    /// Host policy: allowed users, namespaces, paths and probe targets of processes [default: /etc/abide/agent.yaml, if it exists]
    #[arg(long, env = "ABIDE_AGENT_POLICY", value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// List the instances in --data that the host policy or file permissions refuse, and exit with 3 if there are any
    #[arg(long, env = "ABIDE_CHECK_POLICY", value_parser = parse_switch)]
    pub check_policy: bool,
    /// With --check-policy: output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_AGENT_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

/// TLS of the connection to the gateway.
#[derive(Debug, clap::Args)]
pub struct AgentTransportArgs {
    /// CA certificate of the gateway, PEM
    #[arg(long, env = "ABIDE_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Trust only --ca-file, not the system's certificates
    #[arg(long, env = "ABIDE_CA_ONLY", value_parser = parse_switch)]
    pub ca_only: bool,
    /// Client certificate of an external CA and its key, in one PEM file, instead of a token
    ///
    /// Read for every session. The gateway verifies it with --client-ca.
    #[arg(long, env = "ABIDE_CLIENT_CERT", value_name = "FILE", conflicts_with = "token_file")]
    pub client_cert: Option<PathBuf>,
    /// Accept plain http to a gateway that is not on loopback
    ///
    /// Anyone on the network path can then read the token and forge operations.
    #[arg(long, env = "ABIDE_INSECURE_JOIN", value_parser = parse_switch)]
    pub insecure_join: bool,
}

impl AgentTransportArgs {
    fn client_config(&self) -> ClientConfig {
        ClientConfig {
            client_cert: self.client_cert.clone(),
            ca_file: self.ca_file.clone(),
            ca_only: self.ca_only,
            insecure: self.insecure_join,
            ..ClientConfig::default()
        }
    }
}

/// Runs before the first thread starts: each thread would get its own heap.
pub fn prepare_memory() {
    malloc::allocate_tightly();
    malloc::map_large_buffers();
}

pub fn run(args: &AgentArgs, printer: &Printer) -> Result<Exit, Failure> {
    if args.check_policy {
        return check_policy(args, printer);
    }
    let missing = |flag: &str| Failure::new(Exit::Usage, format!("{flag} is missing"));
    let join = args.join.as_deref().ok_or_else(|| missing("--join"))?;
    if args.token_file.is_none() && args.transport.client_cert.is_none() {
        return Err(missing("--token-file"));
    }
    if !(join.starts_with("http://") || join.starts_with("https://")) {
        let message = format!("--join {join:?} is not an http or https URL");
        return Err(Failure::new(Exit::Usage, message).hint("such as http://127.0.0.1:7465"));
    }
    // Checked before the data folder is opened: a refused start changes nothing.
    let refused = |why: String| Failure::new(Exit::Usage, format!("--join: {why}"));
    args.transport.client_config().check(join).map_err(|error| match error {
        AddressError::Plain(_) => refused(error.to_string()).hint(
            "use https, or pass --insecure-join to accept operations that anyone on the network path can forge",
        ),
        AddressError::Invalid(why) => refused(why),
    })?;
    if args.transport.ca_only && args.transport.ca_file.is_none() {
        let message = "--ca-only needs --ca-file FILE: without it no certificate is trusted";
        return Err(Failure::new(Exit::Usage, message).hint("pass --ca-file FILE, or omit --ca-only"));
    }
    args.transport.client_config().client(join).map_err(|error| refused(chain(&error)))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))?;
    runtime.block_on(run_until_stopped(args, join, printer))
}

async fn run_until_stopped(args: &AgentArgs, join: &str, printer: &Printer) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let mut signals = Signals::listen()?;
    let policy = HostPolicy::read(args.policy.as_deref()).map_err(|error| failed(chain(&error)))?;
    policy.log();
    let keys = args.keys.source(&args.data)?;
    private_folder(&args.data)?;
    private_file(&args.data.join("agent.db"))?;
    // The session waits for a missing token file, as it does for an unreachable gateway.
    for file in args.token_file.iter().chain(&args.transport.client_cert).filter(|file| file.exists()) {
        require_private(file).map_err(|error| failed(chain(&error)))?;
    }
    let agent = agent_name(&args.data).map_err(|error| failed(chain(&error)))?;
    let hosts = if args.as_host.is_empty() { vec![this_host()] } else { args.as_host.clone() };
    let (reports, outgoing) = mpsc::unbounded_channel();
    let intervals = AgentIntervals {
        check: Duration::from_secs(args.check_secs),
        sample: Duration::from_secs(args.sample_secs),
    };
    let supervisor = tokio::select! {
        opened = Supervisor::open(&args.data, &keys, intervals, policy, reports) => {
            opened.map_err(|error| failed(error.to_string()))?
        }
        exit = signals.shutdown_signal() => return Ok(exit),
    };
    let joining = JoinConfig {
        url: join.to_owned(),
        token_file: args.token_file.clone(),
        folder: args.data.clone(),
        agent,
        hosts,
        calling: args.transport.client_config(),
    };
    let (stop, stopped) = watch::channel(false);
    let systemd = Systemd::from_env();
    let mut is_announced = false;
    let ready = || {
        if !std::mem::replace(&mut is_announced, true) {
            printer.data(&format!("ready {join}\n"));
            systemd.ready();
        }
    };
    tokio::select! {
        ended = serve(joining, supervisor, outgoing, ready, stopped) => ended.map_err(|error| failed(chain(&error)))?,
        exit = signals.shutdown_signal() => {
            systemd.stopping();
            let _ = stop.send(true);
            if let Ok((running, supervised)) = left_running(&args.data, &keys).await
                && running > 0
            {
                printer.info(&format!(
                    "{} left running, {supervised} of them without supervision until an agent with --data {} starts",
                    count(running, "process"),
                    args.data.display(),
                ));
            }
            return Ok(exit);
        }
    }
    Ok(Exit::Done)
}

/// Lists the instances that the next launch would refuse.
fn check_policy(args: &AgentArgs, printer: &Printer) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let policy = HostPolicy::read(args.policy.as_deref()).map_err(|error| failed(chain(&error)))?;
    if let Err(error) = std::fs::metadata(args.data.join("agent.db")) {
        let folder = args.data.display();
        return Err(match error.kind() {
            ErrorKind::NotFound => failed(format!("folder {folder} has no agent.db"))
                .hint("--data names the folder that the agent runs with"),
            _ => failed(format!("cannot read agent.db in folder {folder}: {error}")),
        });
    }
    let keys = args.keys.source(&args.data)?;
    let refused = runtime()?
        .block_on(refused_instances(&args.data, &keys, &policy))
        .map_err(|error| failed(format!("cannot check {}: {error}", args.data.display())))?;
    match args.output {
        PlainForm::Json => {
            let row = |one: &RefusedInstance| RefusedLaunch {
                instance: one.instance.clone(),
                reasons: one.reasons.clone(),
            };
            printer.data(&contract::compact(&RefusedLaunches { refused: refused.iter().map(row).collect() }));
        }
        PlainForm::Text if refused.is_empty() => printer.data("no instance would be refused\n"),
        PlainForm::Text => {
            for RefusedInstance { instance, reasons } in &refused {
                let lines: String = reasons.iter().map(|why| format!("  {}\n", visible(why))).collect();
                printer.data(&format!("{instance}\n{lines}"));
            }
            printer
                .info(&format!("{} would be refused at the next launch", count(refused.len(), "instance")));
        }
    }
    Ok(if refused.is_empty() { Exit::Done } else { Exit::Incomplete })
}
