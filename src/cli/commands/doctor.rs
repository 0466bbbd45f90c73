//! `abide doctor`: checks of config, target, credentials, clocks, agents and limits, each with a remedy.

use std::path::PathBuf;
use std::time::Duration;

use crate::access::{AccessRole, Grant, Principal};
use crate::agent::{HostPolicy, RefusedInstance, refused_instances};
use crate::backend::{AnyBackend, Backend, BackendError, RefusalReason};
use crate::cli::commands::get::{SKEW_MS, describe_clock_skew as clock_of};
use crate::cli::key_file::KeyFileArgs;
use crate::cli::local::Home;
use crate::cli::output::print::{ERROR, HINT, Printer, WARNING, count, visible};
use crate::cli::target::access::FORBIDDEN_HINT;
use crate::cli::target::{LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::{AccessInfo, HostCertificate, HostEntry};
use crate::error_chain::chain;
use crate::permissions::check_private;
use crate::store::is_encrypted;

/// Check config, target, credentials, clocks, agents and limits
///
/// Prints a remedy for each problem. Exits with 1 if there are errors; warnings do not count.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub target: TargetArgs,
}

enum Finding {
    Well(String),
    Warning(String, String),
    Bad(String, String),
}

pub fn run(args: &DoctorArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut findings = vec![limits()];
    if args.target.target == "local" {
        findings.extend(local());
    }
    findings.extend(target(args)?);
    findings.extend(notify_routes(args));
    findings.extend(inventories(args));
    let mut bad = false;
    for finding in findings {
        bad |= matches!(finding, Finding::Bad(..));
        let text = match finding {
            Finding::Well(what) => format!("{HINT}ok{HINT:#}       {}\n", visible(&what)),
            Finding::Warning(what, todo) => {
                format!("{WARNING}warning{WARNING:#}  {}\n{}", visible(&what), remedy_line(&todo))
            }
            Finding::Bad(what, todo) => {
                format!("{ERROR}error{ERROR:#}    {}\n{}", visible(&what), remedy_line(&todo))
            }
        };
        printer.styled(&text);
    }
    Ok(if bad { Exit::Failed } else { Exit::Done })
}

/// The line below a finding. Some failures have no remedy.
fn remedy_line(todo: &str) -> String {
    if todo.is_empty() { String::new() } else { format!("         {}\n", visible(todo)) }
}

/// An agent holds one file descriptor per process.
fn limits() -> Finding {
    const FEW: u64 = 4096;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    match limit < FEW {
        true => Finding::Warning(
            format!("the limit of open files is only {limit}: an agent needs one per process"),
            "raise it: ulimit -n 65536, or LimitNOFILE= in the unit".to_owned(),
        ),
        false => Finding::Well(format!("the limit of open files is {limit}")),
    }
}

fn local() -> Vec<Finding> {
    let home = match Home::find() {
        Ok(home) => home,
        Err(failure) => return vec![Finding::Bad(failure.message, failure.hint.unwrap_or_default())],
    };
    let folder = home.path("");
    let shown = folder.display().to_string();
    let mut findings = Vec::new();
    match folder.exists().then(|| check_private(&folder)) {
        None => {
            findings.push(Finding::Well(format!("{shown} does not exist yet: the first change creates it")))
        }
        Some(Err(refused)) => {
            let todo = "the local system refuses to start: other users could change files that it trusts";
            findings.push(Finding::Bad(chain(&refused), todo.to_owned()));
        }
        Some(Ok(Some(warning))) => {
            let todo = "the folder holds the specs of processes, with their secrets";
            findings.push(Finding::Warning(warning, todo.to_owned()));
        }
        Some(Ok(None)) => findings.push(Finding::Well(format!("only this user can enter {shown}"))),
    }
    findings.extend(unencrypted_stores(&home));
    findings.extend(host_policy(&home));
    match home.server_pid() {
        Some(pid) => findings.push(Finding::Well(format!("the local system runs as process {pid}"))),
        None => findings.push(Finding::Well(
            "the local system is not running; verbs that change something start it".to_owned(),
        )),
    }
    findings
}

fn unencrypted_stores(home: &Home) -> Vec<Finding> {
    let files = ["gateway/store.db", "agent/agent.db", "state/state.db"].map(|file| home.path(file));
    let plain = files.iter().filter(|file| file.is_file() && is_encrypted(file).is_ok_and(|is| !is));
    let todo = "start the local system with a key file (--key-file FILE, ABIDE_KEY_FILE): its first start encrypts the file";
    let finding = |file: &PathBuf| {
        let what = format!("{} is not encrypted: it has the secrets of processes", file.display());
        Finding::Warning(what, todo.to_owned())
    };
    plain.map(finding).collect()
}

/// Instances of the local system that the host policy or file permissions would refuse.
fn host_policy(home: &Home) -> Vec<Finding> {
    let named = std::env::var_os("ABIDE_AGENT_POLICY").filter(|file| !file.is_empty()).map(PathBuf::from);
    let policy = match HostPolicy::read(named.as_deref()) {
        Ok(policy) => policy,
        Err(error) => {
            return vec![Finding::Bad(
                chain(&error),
                "fix the file: the agent does not start with it".to_owned(),
            )];
        }
    };
    let folder = home.path("agent");
    if !folder.join("agent.db").is_file() {
        return Vec::new();
    }
    let keys = match KeyFileArgs::from_env().source(&home.path(".")) {
        Ok(keys) => keys,
        Err(failure) => return vec![Finding::Bad(failure.message, failure.hint.unwrap_or_default())],
    };
    let refused = match runtime().map(|runtime| runtime.block_on(refused_instances(&folder, &keys, &policy)))
    {
        Ok(Ok(refused)) => refused,
        Ok(Err(error)) => {
            return vec![Finding::Warning(
                format!("cannot check the instances of {}: {error}", folder.display()),
                "check its permissions and free disk space".to_owned(),
            )];
        }
        Err(failure) => return vec![Finding::Bad(failure.message, failure.hint.unwrap_or_default())],
    };
    let todo = "`abide agent --check-policy --data DIR` lists all; running processes are refused at their next launch";
    let finding = |one: &RefusedInstance| {
        let what = format!("{} would be refused: {}", one.instance, one.reasons.join("; "));
        Finding::Warning(what, todo.to_owned())
    };
    refused.iter().take(5).map(finding).collect()
}

/// The hosts of an Abide gateway. Other platforms have no such list: a request shows that they answer.
async fn hosts(backend: &AnyBackend) -> Result<Option<Vec<HostEntry>>, BackendError> {
    match backend {
        AnyBackend::Abide(abide) => abide.hosts().await.map(Some),
        AnyBackend::Platform(platform) => platform.answers().await.map(|()| None),
    }
}

/// The remedy for an error of the target.
fn remedy(error: &BackendError) -> &'static str {
    match error {
        error if error.is_forbidden() => FORBIDDEN_HINT,
        BackendError::Refused(refusal) if refusal.reason == RefusalReason::WrongCredentials => {
            "check auth.app_code and auth.app_secret of the target, and the gateway's apps file"
        }
        _ => "check the address, and that a gateway listens there: `curl URL/healthz` prints ok",
    }
}

fn target(args: &DoctorArgs) -> Result<Vec<Finding>, Failure> {
    let name = &args.target.target;
    let live = match args.target.connect(LocalStart::Never) {
        Ok(Some(live)) => live,
        Ok(None) => return Ok(Vec::new()),
        Err(failure) => return Ok(vec![Finding::Bad(failure.message, failure.hint.unwrap_or_default())]),
    };
    let begin = std::time::Instant::now();
    let runtime = runtime()?;
    let answer =
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(10), hosts(&live.backend)).await });
    let url = live.backend.url().to_owned();
    let hosts = match answer {
        Ok(Ok(hosts)) => hosts,
        Ok(Err(error)) => {
            let what = format!("target {name} at {url}: {error}");
            return Ok(vec![Finding::Bad(what, remedy(&error).to_owned())]);
        }
        Err(_) => {
            let what = format!("target {name} at {url} did not answer within 10 s");
            let todo = "check for a firewall that drops packets, or a gateway that hangs";
            return Ok(vec![Finding::Bad(what, todo.to_owned())]);
        }
    };
    let defined_in = live.defined_in.as_ref().map(|file| format!(" (defined in {file})")).unwrap_or_default();
    let mut findings = vec![Finding::Well(format!(
        "target {name} at {url}{defined_in} answers in {} ms and accepts the credentials",
        begin.elapsed().as_millis()
    ))];
    let Some(hosts) = hosts else {
        let state = args
            .target
            .state
            .clone()
            .unwrap_or_else(|| "$ABIDE_HOME/state, or the config file's `state`".to_owned());
        let dialect = live.backend.dialect().name();
        let what = format!("target {name} has dialect {dialect}; journal and ledger are in {state}");
        findings.push(Finding::Well(what));
        return Ok(findings);
    };
    if args.target.target != "local" {
        findings.extend(runtime.block_on(live.access()).iter().flat_map(access));
    }
    findings.extend(agents(&hosts));
    Ok(findings)
}

/// The routes of alerts. An invalid config file is a finding of the target.
fn notify_routes(args: &DoctorArgs) -> Option<Finding> {
    match args.target.config().ok()?.notify() {
        Ok(routes) if routes.is_empty() => None,
        Ok(routes) => {
            let names: Vec<&str> = routes.iter().map(|route| route.name.as_str()).collect();
            let names = names.join(", ");
            Some(Finding::Well(format!("alert routes: {names}; `abide notify test ROUTE` sends a message")))
        }
        Err(failure) => Some(Finding::Bad(failure.message, failure.hint.unwrap_or_default())),
    }
}

/// The inventories of the config file: each is read once.
fn inventories(args: &DoctorArgs) -> Vec<Finding> {
    let Ok(config) = args.target.config() else { return Vec::new() };
    let mut findings = Vec::new();
    for name in config.inventory_names() {
        let read = match config.inventory(&name) {
            Ok(Some(source)) => {
                runtime().map(|runtime| (source.kind.describe(), runtime.block_on(source.read())))
            }
            Ok(None) => continue,
            Err(failure) => Err(failure),
        };
        findings.push(match read {
            Ok((source, Ok(read))) => {
                let hosts = count(read.hosts, "host");
                Finding::Well(format!("inventory {name} ({source}) has {hosts}"))
            }
            Ok((source, Err(error))) => Finding::Bad(
                format!("inventory {name} ({source}): {error}"),
                "its host groups keep their last good hosts, and a run without these is refused".to_owned(),
            ),
            Err(failure) => Finding::Bad(failure.message, failure.hint.unwrap_or_default()),
        });
    }
    findings
}

/// The grant of the app or person, and the end of its secret.
fn access(info: &AccessInfo) -> Vec<Finding> {
    const SOON_MS: i64 = 14 * 24 * 3_600_000;
    let caller = Grant::from(info.clone()).principal;
    let is_person = matches!(caller, Principal::Person(_));
    let list = |names: &[String]| names.join(", ");
    let mut findings = vec![Finding::Well(format!(
        "{caller} has role {}, namespaces {}, hosts {}, owners {}",
        info.role,
        list(&info.namespaces),
        list(&info.hosts),
        info.owners.as_deref().map_or("any".to_owned(), list),
    ))];
    let (file, secrets) = if is_person { ("users file", "tokens") } else { ("apps file", "secrets") };
    // A person with role read runs nothing.
    if info.users.is_none() && !(is_person && info.role == AccessRole::Read.word()) {
        findings.push(Finding::Warning(
            format!("{caller} has no `users`: its processes may run as any account, also root"),
            format!("list the accounts of its processes in the gateway's {file}: `users: [www]`"),
        ));
    }
    if let Some(at) = info.expires.as_deref().and_then(clock::read)
        && at.0.saturating_sub(clock::now().0) < SOON_MS
    {
        findings.push(Finding::Warning(
            format!("the secret of {caller} expires at {at}"),
            format!("add a second secret to the gateway's {file} (`{secrets}:`), and use that one here"),
        ));
    }
    findings
}

/// The agents of a gateway: connected, with matching clocks and versions.
fn agents(hosts: &[HostEntry]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let alive: Vec<_> = hosts.iter().filter(|host| host.agent).collect();
    let dead: Vec<String> =
        hosts.iter().filter(|host| !host.agent).map(|host| host.host.to_string()).collect();
    match (alive.is_empty(), dead.is_empty()) {
        (true, _) => findings.push(Finding::Bad(
            "no agent is connected".to_owned(),
            "run `abide agent --join URL --token-file F --data DIR` on each host".to_owned(),
        )),
        (false, false) => findings.push(Finding::Warning(
            format!(
                "{} of {} {} no agent: {}",
                dead.len(),
                count(hosts.len(), "host"),
                if dead.len() == 1 { "has" } else { "have" },
                dead.iter().take(5).cloned().collect::<Vec<_>>().join(", ")
            ),
            "start these agents; until then their processes are unknown and held".to_owned(),
        )),
        (false, true) => {
            findings.push(Finding::Well(format!("{}, each with an agent", count(hosts.len(), "host"))))
        }
    }
    findings.extend(skewed(&alive));
    findings.extend(certificates(hosts));
    // Agents report every few seconds, so the newest report shows the gateway's clock.
    let newest = alive.iter().filter_map(|host| clock::read(&host.heard)).max();
    let here = clock::now();
    if let Some(there) = newest {
        let skew = (here.0 - there.0) / 1000;
        if !(-5..=30).contains(&skew) {
            findings.push(Finding::Warning(
                format!("the gateway's clock differs from the clock of this host by about {skew} s"),
                "synchronize both with a time server: the age of reports depends on it".to_owned(),
            ));
        }
    }
    let old: Vec<&str> = alive
        .iter()
        .filter_map(|host| host.version.as_deref())
        .filter(|version| *version != env!("CARGO_PKG_VERSION"))
        .collect();
    if let Some(version) = old.first() {
        findings.push(Finding::Warning(
            format!(
                "{} with a version other than this program's ({version}, not {})",
                count(old.len(), "agent"),
                env!("CARGO_PKG_VERSION")
            ),
            "upgrade them: their processes keep running".to_owned(),
        ));
    }
    findings
}

/// Days before its expiry at which a certificate that was not renewed is reported.
const EXPIRES_SOON_SECS: u64 = 3 * 86_400;

/// Hosts whose certificate is revoked, has expired, or expires soon.
fn certificates(hosts: &[HostEntry]) -> Vec<Finding> {
    let now = clock::now();
    let named = |is_meant: &dyn Fn(&HostCertificate) -> bool| -> Vec<String> {
        let certificate = |host: &HostEntry| {
            let found = host.certificate.as_ref().filter(|certificate| is_meant(certificate))?;
            Some(format!("{} ({})", host.host, found.expires))
        };
        hosts.iter().filter_map(certificate).collect()
    };
    let expiry = |certificate: &HostCertificate| clock::read(&certificate.expires);
    let revoked = named(&|certificate| certificate.revoked);
    let expired = named(&|one| !one.revoked && expiry(one).is_some_and(|at| at <= now));
    let soon = named(&|one| {
        !one.revoked && expiry(one).is_some_and(|at| at > now && at <= now.after_secs(EXPIRES_SOON_SECS))
    });
    let first = |names: &[String]| names.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
    let finding = |names: Vec<String>, what: &str, todo: &str| {
        let text = format!("{} {what}: {}", count(names.len(), "certificate"), first(&names));
        (!names.is_empty()).then(|| Finding::Warning(text, todo.to_owned()))
    };
    let join_again =
        "`abide token create --host CLOUD:IP` makes a join token: put it into the agent's token file";
    [
        finding(revoked, "revoked", join_again),
        finding(expired, "expired", join_again),
        finding(
            soon,
            "expiring soon",
            "check the agent's log: it renews its certificate at two thirds of its life",
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Agents whose clocks differ from the gateway's.
fn skewed(alive: &[&HostEntry]) -> Option<Finding> {
    let skewed: Vec<String> = alive
        .iter()
        .filter(|host| host.clock_skew_ms.is_some_and(|skew_ms| skew_ms.saturating_abs() > SKEW_MS))
        .map(|host| format!("{} ({})", host.host, clock_of(host.clock_skew_ms)))
        .collect();
    let shown = skewed.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
    (!skewed.is_empty()).then(|| {
        Finding::Warning(
            format!("the clocks of {} differ from the gateway's: {shown}", count(skewed.len(), "agent")),
            "synchronize these hosts with a time server: schedules, start times and logs use their clock"
                .to_owned(),
        )
    })
}
