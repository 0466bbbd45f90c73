//! Host policy: the users, namespaces, paths and probe targets that a gateway may use on this host.
//!
//! `/etc/abide/agent.yaml` belongs to the host's administrator. It bounds every launch and adoption that a gateway requests;
//! stopping, ending supervision and observing are always allowed. The agent reads the file when it starts, and refuses to
//! start if the file does not parse or another user could have written it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tracing::{info, warn};

use super::account::{Account, AccountError};
use super::health::{HealthSettings, Probe, http_address};
use super::probe_targets::{ProbeTarget, host_of, is_allowed};
use crate::model::{EnvValue, InstanceKey, Sandbox, Spec, SpecSection, glob, ulimit_number};
use crate::permissions::{PermissionError, own_uid, refuse_changeable_by_group, resolved};

/// The default policy file.
pub const DEFAULT_FILE: &str = "/etc/abide/agent.yaml";

/// Maximum size of a policy file.
const MAX_BYTES: u64 = 1 << 20;

/// Reason why the policy file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("host policy {}: cannot read the file", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("host policy {}", file.display())]
    Unsafe { file: PathBuf, source: PermissionError },
    #[error("host policy {}: not a regular file", file.display())]
    NotAFile { file: PathBuf },
    #[error("host policy {}: larger than {MAX_BYTES} bytes", file.display())]
    TooLarge { file: PathBuf },
    #[error("host policy {}", file.display())]
    Yaml { file: PathBuf, source: serde_yaml::Error },
    #[error("host policy {}: {rule}: {} is not an absolute path without `..`", file.display(), path.display())]
    Path { file: PathBuf, rule: &'static str, path: PathBuf },
}

/// Reason why an instance may not be launched or adopted on this host.
#[derive(Debug, thiserror::Error)]
pub enum PolicyRefusal {
    #[error(transparent)]
    Account(#[from] AccountError),
    #[error("host policy {}: {rule}", file.display())]
    Rule { file: PathBuf, rule: RefusingRule },
}

/// The rule that refuses an instance.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusingRule {
    #[error("root: user {name:?} (uid 0) is not allowed")]
    Root { name: String },
    #[error("users: user {name:?} is not allowed")]
    Users { name: String },
    #[error("namespaces: namespace {namespace:?} is not allowed")]
    Namespaces { namespace: String },
    #[error("paths: {field} {path} is not below an allowed path")]
    Paths { field: &'static str, path: String },
    #[error("probes: {target} is not allowed")]
    Probes { target: String },
    #[error("env_exec: env {name} is read from a program, which is not allowed")]
    EnvExec { name: String },
    #[error("raise_priority: {field} of user {name:?} is beyond the rights of that user")]
    RaisePriority { field: String, name: String },
}

/// The rules of a host. An unset rule allows everything, except that root opens no file for another user, and raises no
/// limit or priority for it, that no probe reaches a metadata service, and that no program gives a variable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPolicy {
    file: PathBuf,
    rules: PolicyFile,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    /// Names or patterns (`web-*`) of users that processes may run as. A pattern never allows root.
    users: Option<Vec<String>>,
    /// Whether processes may run as uid 0; unset: `users` decides.
    root: Option<bool>,
    /// Names or patterns of namespaces.
    namespaces: Option<Vec<String>>,
    /// Folders that contain every path of a spec.
    paths: Option<Vec<PathBuf>>,
    /// Folders or files that the agent may open as root for another user, where that user cannot.
    #[serde(default)]
    root_opens: Vec<PathBuf>,
    /// Whether the sandbox of another user than root may set a priority or limit that the user could not set.
    #[serde(default)]
    raise_priority: bool,
    /// Whether variables may be read from programs (`env: {NAME: {exec: …}}`).
    #[serde(default)]
    env_exec: bool,
    /// Addresses, networks and host names that `http` and `tcp` probes may connect to, besides the host's own.
    probes: Option<Vec<ProbeTarget>>,
}

impl HostPolicy {
    /// Reads the named file, or the default one, which may be missing.
    pub fn read(named: Option<&Path>) -> Result<HostPolicy, PolicyError> {
        let file = named.unwrap_or(Path::new(DEFAULT_FILE));
        // A dangling link does not count as a missing file.
        if named.is_none() && std::fs::symlink_metadata(file).is_err_and(is_missing) {
            return Ok(HostPolicy::default());
        }
        let text = read_regular_file(file)?;
        refuse_changeable_by_group(file, own_uid())
            .map_err(|source| PolicyError::Unsafe { file: file.to_owned(), source })?;
        HostPolicy::parse(file, &text)
    }

    fn parse(file: &Path, text: &str) -> Result<HostPolicy, PolicyError> {
        let rules: Option<PolicyFile> = serde_yaml::from_str(text)
            .map_err(|source| PolicyError::Yaml { file: file.to_owned(), source })?;
        let rules = rules.unwrap_or_default();
        let paths = rules.paths.iter().flatten().map(|path| ("paths", path));
        for (rule, path) in paths.chain(rules.root_opens.iter().map(|path| ("root_opens", path))) {
            if resolved(path).is_none() {
                return Err(PolicyError::Path { file: file.to_owned(), rule, path: path.clone() });
            }
        }
        Ok(HostPolicy { file: file.to_owned(), rules })
    }

    /// Logs the policy file in force.
    pub fn log(&self) {
        match self.file.as_os_str().is_empty() {
            true => {
                info!(file = DEFAULT_FILE, "no host policy: the file does not exist, nothing is restricted")
            }
            false => info!(file = %self.file.display(), "host policy active"),
        }
    }

    /// Checks whether the instance may be launched or adopted with this spec. A refusal names the first rule, and is logged.
    pub fn check(&self, key: &InstanceKey, spec: &Spec) -> Result<(), PolicyRefusal> {
        match self.refusals(key, spec).into_iter().next() {
            Some(refused) => {
                warn!(instance = %key, why = %refused, "launch or adoption refused");
                Err(refused)
            }
            None => Ok(()),
        }
    }

    /// Every rule that refuses this instance, each named.
    pub fn refusals(&self, key: &InstanceKey, spec: &Spec) -> Vec<PolicyRefusal> {
        let has_rules = self.rules != PolicyFile::default();
        let has_exec = spec.env.values().any(|value| matches!(value, EnvValue::Exec(_)));
        if !has_rules && !has_exec && !spec.sandbox.is_set() && !spec.health.is_set() {
            return Vec::new();
        }
        let account = match Account::of(spec) {
            Ok(account) => account,
            Err(error) => return vec![error.into()],
        };
        let user = self.check_user(account.name(), account.uid()).err();
        let namespace = self.check_namespace(&key.namespace.to_string()).err();
        // For the agent's own user the kernel decides.
        let raised = match account.is_own() || self.rules.raise_priority {
            true => Vec::new(),
            false => raised_fields(&spec.sandbox),
        };
        let name = account.name();
        let raised =
            raised.into_iter().map(|field| RefusingRule::RaisePriority { field, name: name.to_owned() });
        let refused = user.into_iter().chain(namespace).chain(self.refused_paths(spec)).chain(raised);
        let refused = refused.chain(self.refused_probe(spec)).chain(self.refused_exec(spec));
        let file = self.named_file();
        refused.map(|rule| PolicyRefusal::Rule { file: file.clone(), rule }).collect()
    }

    /// The probe of a spec, if it names an address that is not allowed. A name is checked when it is resolved.
    fn refused_probe(&self, spec: &Spec) -> Option<RefusingRule> {
        let target = match HealthSettings::of(spec)?.probe {
            Probe::Http(url) => http_address(url)?,
            Probe::Tcp(address) => address.to_owned(),
            Probe::Command(_) => return None,
        };
        let address: SocketAddr = target.parse().ok()?;
        let is_allowed = is_allowed(self.rules.probes.as_deref(), host_of(&target), address);
        (!is_allowed).then_some(RefusingRule::Probes { target })
    }

    /// The first variable that is read from a program, if that is not allowed.
    fn refused_exec(&self, spec: &Spec) -> Option<RefusingRule> {
        let mut read = spec.env.iter().filter(|(_, value)| matches!(value, EnvValue::Exec(_)));
        let (name, _) = read.next().filter(|_| !self.rules.env_exec)?;
        Some(RefusingRule::EnvExec { name: name.clone() })
    }

    /// The addresses of `HOST:PORT` that a probe may connect to.
    pub fn probe_addresses(
        &self,
        target: &str,
        mut found: Vec<SocketAddr>,
    ) -> Result<Vec<SocketAddr>, PolicyRefusal> {
        let first = found.first().map(ToString::to_string).unwrap_or_default();
        found.retain(|address| is_allowed(self.rules.probes.as_deref(), host_of(target), *address));
        match found.is_empty() && !first.is_empty() {
            true => Err(PolicyRefusal::Rule {
                file: self.named_file(),
                rule: RefusingRule::Probes { target: first },
            }),
            false => Ok(found),
        }
    }

    /// The file to change, also if it does not exist.
    fn named_file(&self) -> PathBuf {
        if self.file.as_os_str().is_empty() { DEFAULT_FILE.into() } else { self.file.clone() }
    }

    /// Whether a check resolves paths, which may block on a file system.
    pub fn resolves_paths(&self) -> bool {
        self.rules.paths.is_some()
    }

    fn check_user(&self, name: &str, uid: u32) -> Result<(), RefusingRule> {
        let PolicyFile { users, root, .. } = &self.rules;
        match (uid == 0, root, users) {
            (true, Some(true), _) => Ok(()),
            (true, Some(false), _) => Err(RefusingRule::Root { name: name.to_owned() }),
            (_, _, None) => Ok(()),
            (true, None, Some(users)) if users.iter().any(|one| one == name) => Ok(()),
            (false, _, Some(users)) if users.iter().any(|one| glob(one, name)) => Ok(()),
            (_, _, Some(_)) => Err(RefusingRule::Users { name: name.to_owned() }),
        }
    }

    fn check_namespace(&self, namespace: &str) -> Result<(), RefusingRule> {
        match &self.rules.namespaces {
            Some(allowed) if !allowed.iter().any(|one| glob(one, namespace)) => {
                Err(RefusingRule::Namespaces { namespace: namespace.to_owned() })
            }
            Some(_) | None => Ok(()),
        }
    }

    fn refused_paths(&self, spec: &Spec) -> Vec<RefusingRule> {
        let Some(allowed) = &self.rules.paths else { return Vec::new() };
        let identity = &spec.identity;
        let mut named = vec![
            ("setup_path", Some(identity.setup_path.as_str())),
            ("pid_path", Some(identity.pid_path.as_str())),
            ("log_path", identity.log_path.as_deref()),
            ("config_path", identity.config_path.as_deref()),
            ("env_file", spec.env_file.as_deref()),
        ];
        named.extend(spec.configmap.iter().map(|entry| ("configmap", entry.path.as_deref())));
        named.extend(spec.env.values().map(|value| match value {
            EnvValue::File(file) => ("env", Some(file.as_str())),
            EnvValue::Text(_) | EnvValue::Exec(_) | EnvValue::Secret(_) | EnvValue::Digest(_) => {
                ("env", None)
            }
        }));
        let paths = named.into_iter().filter_map(|(field, path)| Some((field, path?)));
        paths
            .filter(|(_, path)| !path.is_empty() && !is_below(Path::new(path), allowed))
            .map(|(field, path)| RefusingRule::Paths { field, path: path.to_owned() })
            .collect()
    }

    /// Whether the agent may open a file as root for another user who cannot open it.
    pub fn may_root_open(&self, path: &Path) -> bool {
        is_below(path, &self.rules.root_opens)
    }
}

/// Reads a file of bounded size. The open waits for nothing: a FIFO or a device is refused by its type.
fn read_regular_file(file: &Path) -> Result<String, PolicyError> {
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    let unreadable = |source| PolicyError::Read { file: file.to_owned(), source };
    // Before the open, which can have an effect on a device.
    if !std::fs::metadata(file).map_err(unreadable)?.is_file() {
        return Err(PolicyError::NotAFile { file: file.to_owned() });
    }
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let opened = std::fs::File::options().read(true).custom_flags(flags).open(file).map_err(unreadable)?;
    // The path may lead to another file by now.
    if !opened.metadata().map_err(unreadable)?.is_file() {
        return Err(PolicyError::NotAFile { file: file.to_owned() });
    }
    let mut text = String::new();
    let read = opened.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
    match read as u64 > MAX_BYTES {
        true => Err(PolicyError::TooLarge { file: file.to_owned() }),
        false => Ok(text),
    }
}

/// The fields of a sandbox that a process without privileges could not set: it can only lower its priority and its
/// limits. The values of the agent are those that its processes begin with.
fn raised_fields(sandbox: &Sandbox) -> Vec<String> {
    let mut fields = Vec::new();
    if sandbox.nice.is_some_and(|nice| nice < own_nice()) {
        fields.push("sandbox.nice".to_owned());
    }
    if sandbox.oom_score_adj.is_some_and(|score| score < own_oom_score_adj()) {
        fields.push("sandbox.oom_score_adj".to_owned());
    }
    for (name, limit) in &sandbox.ulimits {
        let own = ulimit_number(name).map_or(0, own_hard_limit);
        if limit.hard > own {
            fields.push(format!("sandbox.ulimits.{name}"));
        }
    }
    fields
}

fn own_nice() -> i32 {
    rustix::process::getpriority_process(None).unwrap_or(0)
}

fn own_oom_score_adj() -> i32 {
    let text = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

fn own_hard_limit(resource: usize) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes to a local variable.
    let read = unsafe { libc::getrlimit(resource as _, &mut limit) };
    if read == 0 { limit.rlim_max } else { 0 }
}

fn is_missing(error: std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound
}

/// Whether a path is below an allowed one after resolution of all links: a link must not lead out.
fn is_below(path: &Path, allowed: &[PathBuf]) -> bool {
    let Some(real) = resolved(path) else { return false };
    allowed.iter().any(|one| resolved(one).is_some_and(|one| real.starts_with(one)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Ulimit;
    use std::sync::Arc;

    fn policy(text: &str) -> HostPolicy {
        HostPolicy::parse(Path::new("/etc/abide/agent.yaml"), text).expect("it parses")
    }

    fn refusal(text: &str, change: impl FnOnce(&mut Spec)) -> String {
        let mut spec = Spec::default();
        spec.identity.setup_path = "/opt/api".to_owned();
        spec.identity.pid_path = "/run/api.pid".to_owned();
        spec.identity.user = Some("root".to_owned());
        change(&mut spec);
        let key: InstanceKey = "0:127.0.0.1:web:api".parse().expect("a key");
        policy(text).check(&key, &Arc::new(spec)).err().map(|refusal| refusal.to_string()).unwrap_or_default()
    }

    #[test]
    fn each_rule_names_itself() {
        if !nix::unistd::geteuid().is_root() {
            return; // Only root can use two accounts.
        }
        let at = |why: &str| format!("host policy /etc/abide/agent.yaml: {why}");
        let nobody = |spec: &mut Spec| spec.identity.user = Some("nobody".to_owned());
        assert_eq!(refusal("", |_| ()), "");
        assert_eq!(refusal("users: [app]", |_| ()), at("users: user \"root\" is not allowed"));
        assert_eq!(refusal("users: ['*']", |_| ()), at("users: user \"root\" is not allowed"), "a pattern");
        assert_eq!(refusal("users: [app, root]", |_| ()), "");
        assert_eq!(refusal("{users: [app], root: true}", |_| ()), "");
        assert_eq!(refusal("root: false", |_| ()), at("root: user \"root\" (uid 0) is not allowed"));
        assert_eq!(refusal("{users: ['no*'], root: false}", nobody), "");
        assert_eq!(refusal("users: [app]", nobody), at("users: user \"nobody\" is not allowed"));
        assert_eq!(refusal("namespaces: [db]", |_| ()), at("namespaces: namespace \"web\" is not allowed"));
        assert_eq!(refusal("namespaces: ['w*']", |_| ()), "");
        assert_eq!(refusal("paths: [/opt, /run]", |_| ()), "");
        let outside = at("paths: pid_path /run/api.pid is not below an allowed path");
        assert_eq!(refusal("paths: [/opt]", |_| ()), outside);
        assert_eq!(refusal("paths: [/opt, /run/api]", |_| ()), outside);
        let climbs = |spec: &mut Spec| spec.identity.log_path = Some("/opt/../etc/shadow".to_owned());
        assert!(refusal("paths: [/opt, /run]", climbs).contains("log_path /opt/../etc/shadow"));
        let env = |spec: &mut Spec| drop(spec.env.insert("A".into(), EnvValue::File("/etc/shadow".into())));
        assert!(refusal("paths: [/opt, /run]", env).contains("env /etc/shadow"));
    }

    #[test]
    fn another_user_than_root_raises_no_priority_or_limit() {
        if !nix::unistd::geteuid().is_root() {
            return; // Only root can use two accounts.
        }
        let with = |user: &str, change: fn(&mut Sandbox)| {
            let user = user.to_owned();
            move |spec: &mut Spec| {
                spec.identity.user = Some(user);
                change(&mut spec.sandbox);
            }
        };
        let at = |field: &str| {
            format!(
                "host policy /etc/abide/agent.yaml: raise_priority: sandbox.{field} of user \"nobody\" is beyond the \
                 rights of that user"
            )
        };
        let nice: fn(&mut Sandbox) = |sandbox| sandbox.nice = Some(own_nice() - 1);
        assert_eq!(refusal("", with("nobody", nice)), at("nice"));
        assert_eq!(refusal("", with("root", nice)), "");
        assert_eq!(refusal("raise_priority: true", with("nobody", nice)), "");
        let score: fn(&mut Sandbox) = |sandbox| sandbox.oom_score_adj = Some(own_oom_score_adj() - 1);
        assert_eq!(refusal("", with("nobody", score)), at("oom_score_adj"));
        let lower: fn(&mut Sandbox) = |sandbox| {
            (sandbox.nice, sandbox.oom_score_adj) = (Some(own_nice() + 1), Some(own_oom_score_adj() + 1));
            sandbox.ulimits.insert("nofile".to_owned(), Ulimit { soft: 10, hard: 10 });
        };
        assert_eq!(refusal("", with("nobody", lower)), "");
        let own = own_hard_limit(libc::RLIMIT_CORE as usize);
        if own < u64::MAX {
            let core: fn(&mut Sandbox) =
                |sandbox| _ = sandbox.ulimits.insert("core".to_owned(), Ulimit { soft: 0, hard: u64::MAX });
            assert_eq!(refusal("", with("nobody", core)), at("ulimits.core"));
        }
    }

    #[test]
    fn every_rule_that_refuses_is_listed() {
        let mut spec = Spec::default();
        spec.identity.setup_path = "/srv/api".to_owned();
        spec.identity.pid_path = "/run/api.pid".to_owned();
        let key: InstanceKey = "0:127.0.0.1:web:api".parse().expect("a key");
        let all = policy("{users: [], namespaces: [db], paths: [/opt]}").refusals(&key, &spec);
        let all: Vec<String> = all.iter().map(ToString::to_string).collect();
        let rules: Vec<&str> = all.iter().filter_map(|why| why.split(": ").nth(1)).collect();
        assert_eq!(rules, ["users", "namespaces", "paths", "paths"], "{all:?}");
        assert!(all[3].contains("pid_path /run/api.pid"), "{all:?}");
    }

    #[test]
    fn a_link_does_not_lead_out_of_an_allowed_path() {
        let folder = tempfile::tempdir().expect("a folder");
        let allowed = folder.path().join("allowed");
        std::fs::create_dir(&allowed).expect("a folder");
        std::os::unix::fs::symlink("/etc", allowed.join("link")).expect("a link");
        let text = format!("root_opens: [{}]", allowed.display());
        assert!(policy(&text).may_root_open(&allowed.join("file")));
        assert!(!policy(&text).may_root_open(&allowed.join("link/shadow")));
        assert!(!policy(&text).may_root_open(Path::new("/etc/shadow")));
        assert!(
            !HostPolicy::default().may_root_open(Path::new("/etc/shadow")),
            "nothing unless it is allowed"
        );
    }

    #[test]
    fn an_invalid_policy_is_refused() {
        for text in [
            "probes: [10.0.0.0/99]",
            "user: [app]",
            "users: app",
            "root: maybe",
            "paths: [opt]",
            "root_opens: [/a/../b]",
            "- x",
        ] {
            assert!(HostPolicy::parse(Path::new("f"), text).is_err(), "{text}");
        }
    }
}
