//! `abide agent`: a host agent as a daemon.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::agent::{
    HostPolicy, JoinConfig, RefusedInstance, Supervisor, agent_name, refused_instances, run as serve,
    this_host,
};
use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::commands::serve::{Signals, private_file, private_folder};
use crate::cli::output::print::{Printer, count, visible};
use crate::cli::systemd::Systemd;
use crate::cli::target::runtime;
use crate::cli::{Exit, Failure};
use crate::http::{AddressError, ClientConfig};
use crate::malloc;
use crate::model::HostKey;
use crate::permissions::require_private;

/// Run a host agent: it joins a gateway and starts, stops and guards processes here
///
/// Prints `ready URL` on stdout once its session stands for all its hosts. Its processes live on when it ends, and the next
/// agent with the same --data takes hold of them again. SIGTERM and Ctrl-C end it.
#[derive(Debug, clap::Args)]
pub struct AgentArgs {
    /// The gateway's URL
    #[arg(long, env = "ABIDE_JOIN", value_name = "URL", required_unless_present = "check_policy")]
    pub join: Option<String>,
    /// File with this agent's token
    #[arg(long, env = "ABIDE_TOKEN_FILE", value_name = "FILE", required_unless_present = "check_policy")]
    pub token_file: Option<PathBuf>,
    /// Folder for everything that must survive; it is made if need be
    #[arg(long, env = "ABIDE_DATA", value_name = "DIR")]
    pub data: PathBuf,
    /// Host to answer for, as CLOUD:IP; may be given several times [default: 0:127.0.0.1]
    #[arg(long, env = "ABIDE_AS_HOST", value_name = "CLOUD:IP", value_delimiter = ',')]
    pub as_host: Vec<HostKey>,
    /// Seconds between two looks at a process's health_cmd and configuration files
    #[arg(long, env = "ABIDE_CHECK_SECS", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub check_secs: u64,
    /// Certificate of the gateway's authority in PEM
    #[arg(long, env = "ABIDE_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Trust only the certificates in --ca-file, not those that this machine trusts
    #[arg(long, env = "ABIDE_CA_ONLY", value_parser = parse_switch)]
    pub ca_only: bool,
    /// Accept plain http to a gateway that is not on loopback; anyone on the network path can then read the token and forge operations
    #[arg(long, env = "ABIDE_INSECURE_JOIN", value_parser = parse_switch)]
    pub insecure_join: bool,
    /// Host policy: which users, namespaces and paths processes may have [default: /etc/abide/agent.yaml, if it exists]
    #[arg(long, env = "ABIDE_AGENT_POLICY", value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// List the instances in --data that the host policy or the permissions of their files refuse, and exit: 3 if any
    #[arg(long, env = "ABIDE_CHECK_POLICY", value_parser = parse_switch)]
    pub check_policy: bool,
    /// With --check-policy: output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_AGENT_OUTPUT", value_name = "FORM")]
    pub output: PlainForm,
}

impl AgentArgs {
    fn client_config(&self) -> ClientConfig {
        ClientConfig {
            ca_file: self.ca_file.clone(),
            ca_only: self.ca_only,
            insecure: self.insecure_join,
            ..ClientConfig::default()
        }
    }
}

/// Before the first thread starts: threads would have heaps of their own, which every forked process would copy.
pub fn prepare_memory() {
    malloc::allocate_tightly();
    malloc::fork_without_heap();
}

pub fn run(args: &AgentArgs, printer: &Printer) -> Result<Exit, Failure> {
    if args.check_policy {
        return check_policy(args, printer);
    }
    let missing = |flag: &str| Failure::new(Exit::Usage, format!("{flag} is missing"));
    let join = args.join.as_deref().ok_or_else(|| missing("--join"))?;
    let token_file = args.token_file.as_deref().ok_or_else(|| missing("--token-file"))?;
    if !(join.starts_with("http://") || join.starts_with("https://")) {
        let message = format!("--join {join:?} is no URL");
        return Err(Failure::new(Exit::Usage, message).hint("such as http://127.0.0.1:7465"));
    }
    // Before the data folder is opened: a refusal at start leaves everything as it is.
    let refused = |why: String| Failure::new(Exit::Usage, format!("--join: {why}"));
    args.client_config().check(join).map_err(|error| match error {
        AddressError::Plain(_) => refused(error.to_string()).hint(
            "use https, or pass --insecure-join to accept operations that anyone on the network path can forge",
        ),
        AddressError::Invalid(why) => refused(why),
    })?;
    if args.ca_only && args.ca_file.is_none() {
        let message = "--ca-only needs --ca-file FILE: without it no certificate is trusted";
        return Err(Failure::new(Exit::Usage, message).hint("pass --ca-file FILE, or leave --ca-only out"));
    }
    args.client_config().client(join).map_err(refused)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))?;
    runtime.block_on(run_until_stopped(args, join, token_file, printer))
}

async fn run_until_stopped(
    args: &AgentArgs,
    join: &str,
    token_file: &Path,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let mut signals = Signals::listen()?;
    let policy = HostPolicy::read(args.policy.as_deref()).map_err(failed)?;
    policy.log();
    private_folder(&args.data)?;
    private_file(&args.data.join("agent.db"))?;
    // One that is not there yet is waited for, like a gateway that is not.
    if token_file.exists() {
        require_private(token_file).map_err(failed)?;
    }
    let agent = agent_name(&args.data).map_err(failed)?;
    let hosts = if args.as_host.is_empty() { vec![this_host()] } else { args.as_host.clone() };
    let (up, told) = mpsc::unbounded_channel();
    let table = Supervisor::open(&args.data, Duration::from_secs(args.check_secs), policy, up)
        .await
        .map_err(|error| failed(error.to_string()))?;
    let joining = JoinConfig {
        url: join.to_owned(),
        token_file: token_file.to_owned(),
        agent,
        hosts,
        calling: args.client_config(),
    };
    let (stop, stopped) = watch::channel(false);
    let systemd = Systemd::from_env();
    let mut said = false;
    let ready = || {
        if !std::mem::replace(&mut said, true) {
            printer.data(&format!("ready {join}\n"));
            systemd.ready();
        }
    };
    tokio::select! {
        ended = serve(joining, table, told, ready, stopped) => ended.map_err(failed)?,
        exit = signals.shutdown_signal() => {
            systemd.stopping();
            let _ = stop.send(true);
            return Ok(exit);
        }
    }
    Ok(Exit::Done)
}

/// Lists the instances that would not be launched again.
fn check_policy(args: &AgentArgs, printer: &Printer) -> Result<Exit, Failure> {
    let failed = |why: String| Failure::new(Exit::Failed, why);
    let policy = HostPolicy::read(args.policy.as_deref()).map_err(failed)?;
    if let Err(error) = std::fs::metadata(args.data.join("agent.db")) {
        let folder = args.data.display();
        return Err(match error.kind() {
            ErrorKind::NotFound => failed(format!("folder {folder} has no agent.db"))
                .hint("--data names the folder that the agent runs with"),
            _ => failed(format!("cannot read agent.db in folder {folder}: {error}")),
        });
    }
    let refused = runtime()?
        .block_on(refused_instances(&args.data, &policy))
        .map_err(|error| failed(format!("cannot check {}: {error}", args.data.display())))?;
    match args.output {
        PlainForm::Json => printer.data(&format!("{}\n", serde_json::json!({ "refused": refused }))),
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
