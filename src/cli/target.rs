//! Targets: whom the verbs look at and change. `local` is the system of this machine; others are in the config file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::local::Home;
use super::serve::private_folder;
use super::{Exit, Failure};
use crate::backend::{Abide, Backend, Business, Client, Fault, HostRow, Pace, Platform};
use crate::control::pin::{self, Pin};
use crate::execute::world::{Blind, Sight, World};
use crate::http::{Access, Calling, Calls};
use crate::model::{
    Desired, Dialect, Hold, HostKey, InstanceKey, Name, Observed, Pause, Seen, Time, Version,
};
use crate::reconcile::Caps;
use crate::store::{Either, Embedded, Remote, Store};

/// Which target, and where its kind is written.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    /// The target: `local`, or a name in the config file
    #[arg(long, value_name = "NAME", env = "ABIDE_TARGET", default_value = "local")]
    pub target: String,
    /// The config file [default: ./abide.yaml, else ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where journal, ledger, holds and history are kept: a folder, or the URL of an Abide gateway that the config file
    /// names [default: the target itself if it is an Abide gateway, else $ABIDE_HOME/state]
    #[arg(long, value_name = "DIR|URL", env = "ABIDE_STATE")]
    pub state: Option<String>,
}

/// What to do where there is no local system yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    OnDemand,
    Never,
}

/// A target that can be asked.
pub struct Live {
    pub name: String,
    pub backend: Client,
    pub state: Either,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Config {
    targets: BTreeMap<String, Entry>,
    owner: Option<String>,
    state: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    url: String,
    dialect: String,
    auth: Option<Auth>,
    #[serde(default)]
    ca_file: Option<PathBuf>,
    /// A certificate of ours and its key, in one PEM file.
    #[serde(default)]
    client_cert: Option<PathBuf>,
    #[serde(default)]
    proxy: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, HeaderFrom>,
    #[serde(default)]
    supplier_id: Option<u64>,
    #[serde(default)]
    biz_id: Option<i64>,
    #[serde(default)]
    scope: Option<ScopeEntry>,
    #[serde(default)]
    tenant: Option<String>,
    #[serde(default)]
    qps: Option<f64>,
    #[serde(default)]
    max_in_flight: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScopeEntry {
    #[serde(rename = "type")]
    kind: String,
    id: String,
}

/// A header's value, or where it is kept.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum HeaderFrom {
    Text(String),
    Kept(SecretFrom),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Auth {
    app_code: String,
    app_secret: SecretFrom,
    username: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SecretFrom {
    env: Option<String>,
    file: Option<PathBuf>,
}

impl SecretFrom {
    fn read(&self, target: &str, what: &str) -> Result<String, Failure> {
        let failed = |why: String| Failure::new(Exit::Usage, format!("target {target:?}: {what}: {why}"));
        match (&self.env, &self.file) {
            (Some(name), None) => {
                std::env::var(name).map_err(|_| failed(format!("the variable {name} is not set")))
            }
            (None, Some(file)) => std::fs::read_to_string(file)
                .map(|text| text.trim().to_owned())
                .map_err(|error| failed(format!("cannot read {}: {error}", file.display()))),
            _ => Err(failed("say {env: NAME} or {file: PATH}".to_owned())),
        }
    }
}

impl TargetArgs {
    /// This machine's system, whatever was typed or exported.
    pub fn local() -> TargetArgs {
        TargetArgs { target: "local".to_owned(), config: None, state: None }
    }

    fn config(&self) -> Result<(Config, PathBuf), Failure> {
        let usual =
            std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config/abide/config.yaml"));
        let places = [Some(PathBuf::from("abide.yaml")), usual];
        let file = match &self.config {
            Some(file) => file.clone(),
            None => match places.into_iter().flatten().find(|file| file.is_file()) {
                Some(file) => file,
                None => return Ok((Config::default(), PathBuf::from("abide.yaml"))),
            },
        };
        let wrong = |why: String| Failure::new(Exit::Usage, format!("{}: {why}", file.display()));
        let text = std::fs::read_to_string(&file).map_err(|error| wrong(error.to_string()))?;
        let config = serde_yaml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        Ok((config, file))
    }

    /// What the target can do, and whether there is such a one.
    pub fn caps(&self) -> Result<Caps, Failure> {
        match self.target.as_str() {
            "local" => Ok(Caps::LOCAL),
            name => self.with_entry(name, |entry, _| dialect(name, entry)).map(Caps::of),
        }
    }

    /// The owner that was typed, else the config file's.
    pub fn owner_or(&self, typed: &str) -> String {
        let said = if typed == "default" { self.owner() } else { None };
        said.unwrap_or_else(|| typed.to_owned())
    }

    /// Whose set it is, where the config file says so.
    pub fn owner(&self) -> Option<String> {
        self.config().ok().and_then(|(config, _)| config.owner)
    }

    /// `None`: the local system was never started, or nobody serves it.
    pub fn connect(&self, start: Start) -> Result<Option<Live>, Failure> {
        let name = self.target.clone();
        let broken = |why: String| Failure::new(Exit::Unreachable, format!("target {name}: {why}"));
        if name != "local" {
            let backend = self.named(&name)?;
            let own = match &backend {
                Client::Abide(abide) => Some(Remote::new(abide.calls().clone())),
                Client::Platform(_) => None,
            };
            let state = self.state(own)?;
            return Ok(Some(Live { name, backend, state }));
        }
        let home = Home::find()?;
        let access = match start {
            Start::OnDemand => Some(home.start()?),
            Start::Never => home.access(),
        };
        let Some(access) = access else { return Ok(None) };
        let abide = Abide::new(&access).map_err(broken)?;
        let state = self.state(Some(Remote::new(abide.calls().clone())))?;
        Ok(Some(Live { name, backend: Client::Abide(Box::new(abide)), state }))
    }

    /// Where what must survive is kept: where somebody says, else at the target, else in a folder here.
    fn state(&self, own: Option<Remote>) -> Result<Either, Failure> {
        let said = match (&self.state, &own) {
            (Some(said), _) => Some(said.clone()),
            (None, Some(_)) => None,
            (None, None) => self.config()?.0.state,
        };
        if let (None, Some(own)) = (&said, own) {
            return Ok(Either::own(own));
        }
        if let Some(url) = said.as_ref().filter(|said| said.starts_with("http")) {
            return self.state_at(url).map(|state| Either::there(state, &self.target));
        }
        let folder = match said {
            Some(folder) => PathBuf::from(folder),
            None => Home::find()?.path("state"),
        };
        if let Some(above) = folder.parent().filter(|above| !above.as_os_str().is_empty()) {
            let made = std::fs::create_dir_all(above);
            made.map_err(|error| Failure::new(Exit::Failed, format!("{}: {error}", above.display())))?;
        }
        private_folder(&folder)?;
        let opened = Embedded::open(&folder.join("state.db"));
        opened
            .map(|state| Either::here(state, &self.target))
            .map_err(|error| Failure::new(Exit::Failed, error.to_string()))
    }

    /// The state of a gateway that the config file names, as the app that it names.
    fn state_at(&self, url: &str) -> Result<Remote, Failure> {
        let (config, file) = self.config()?;
        let same = |entry: &&Entry| entry.url.trim_end_matches('/') == url.trim_end_matches('/');
        let found = config.targets.iter().find(|(_, entry)| same(entry) && entry.dialect == "abide");
        let Some((name, entry)) = found else {
            let message =
                format!("--state {url}: no target of dialect abide in {} has this URL", file.display());
            return Err(
                Failure::new(Exit::Usage, message).hint("add one: its auth is what the state is kept as")
            );
        };
        let calls = Calls::new(&access(name, entry)?);
        Ok(Remote::new(calls.map_err(|why| unusable(name, &why))?))
    }

    fn with_entry<T>(
        &self,
        name: &str,
        read: impl FnOnce(&Entry, &Config) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let (config, file) = self.config()?;
        let Some(entry) = config.targets.get(name) else {
            let known: Vec<&str> = config.targets.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let message = format!("there is no target {name:?} in {} (it has {known})", file.display());
            return Err(Failure::new(Exit::Usage, message));
        };
        read(entry, &config)
    }

    fn named(&self, name: &str) -> Result<Client, Failure> {
        self.with_entry(name, |entry, _| {
            let dialect = dialect(name, entry)?;
            let access = access(name, entry)?;
            let broken = |why: String| unusable(name, &why);
            if dialect == Dialect::Abide {
                return Ok(Client::Abide(Box::new(Abide::new(&access).map_err(broken)?)));
            }
            let business = match (entry.biz_id, &entry.scope) {
                (None, None) if dialect == Dialect::Job => {
                    let message =
                        format!("target {name:?}: JOB needs a business: biz_id, or scope: {{type, id}}");
                    return Err(Failure::new(Exit::Usage, message));
                }
                (Some(_), Some(_)) => {
                    let message = format!("target {name:?} has a biz_id and a scope: one of them");
                    return Err(Failure::new(Exit::Usage, message));
                }
                (Some(id), None) => Some(Business::Biz(id)),
                (None, Some(scope)) => {
                    Some(Business::Scope { kind: scope.kind.clone(), id: scope.id.clone() })
                }
                (None, None) => None,
            };
            let usual = Pace::default();
            let pace = Pace { qps: entry.qps, at_once: entry.max_in_flight.unwrap_or(usual.at_once) };
            let platform = Platform::new(&access, dialect, business, entry.supplier_id, pace);
            Ok(Client::Platform(Box::new(platform.map_err(broken)?)))
        })
    }
}

fn dialect(name: &str, entry: &Entry) -> Result<Dialect, Failure> {
    let found = Dialect::ALL.into_iter().find(|dialect| dialect.name() == entry.dialect);
    found.ok_or_else(|| {
        let known = Dialect::ALL.map(Dialect::name).join(", ");
        Failure::new(Exit::Usage, format!("target {name:?}: there is no dialect {:?}", entry.dialect))
            .hint(format!("one of {known}"))
    })
}

/// What the config file says cannot be done, and nobody was asked yet.
fn unusable(name: &str, why: &str) -> Failure {
    Failure::new(Exit::Usage, format!("target {name:?}: {why}"))
}

fn access(name: &str, entry: &Entry) -> Result<Access, Failure> {
    let auth = entry.auth.as_ref();
    let auth = auth.ok_or_else(|| Failure::new(Exit::Usage, format!("target {name:?} has no auth")))?;
    let mut headers = Vec::new();
    for (header, value) in &entry.headers {
        let value = match value {
            HeaderFrom::Text(text) => text.clone(),
            HeaderFrom::Kept(kept) => kept.read(name, &format!("headers.{header}"))?,
        };
        headers.push((header.clone(), value));
    }
    headers.extend(entry.tenant.clone().map(|tenant| ("X-Bk-Tenant-Id".to_owned(), tenant)));
    Ok(Access {
        url: entry.url.clone(),
        code: auth.app_code.clone(),
        secret: auth.app_secret.read(name, "auth.app_secret")?,
        username: auth.username.clone(),
        calling: Calling {
            ca_file: entry.ca_file.clone(),
            client_cert: entry.client_cert.clone(),
            proxy: entry.proxy.clone(),
            headers,
        },
    })
}

impl Live {
    pub fn failure(&self, fault: &Fault) -> Failure {
        Failure::new(Exit::Unreachable, format!("target {}: {fault}", self.name))
    }

    pub fn blind(&self, blind: &Blind) -> Failure {
        Failure::new(Exit::Unreachable, format!("target {}: {blind}", self.name))
    }

    pub fn caps(&self) -> Caps {
        Caps::of(self.backend.dialect())
    }

    /// Calls carry this number from here on, if it is one of the target's own.
    pub fn act_as(&self, generation: u64) {
        if self.state.is_own() {
            self.backend.act_as(generation);
        }
    }

    /// Our own gateway, for what no other target can tell.
    pub fn abide(&self) -> Result<&Abide, Failure> {
        match &self.backend {
            Client::Abide(abide) => Ok(abide),
            Client::Platform(_) => {
                let message = format!(
                    "target {} speaks {}, which cannot tell that",
                    self.name,
                    self.backend.dialect().name()
                );
                Err(Failure::new(Exit::Failed, message))
            }
        }
    }

    /// How the world is for these manifests; `whole`: all of these namespaces, and all that we know of beside.
    pub async fn world(&self, desired: &Desired, whole: Option<BTreeSet<Name>>) -> Result<World, Failure> {
        let sight = Sight { target: &self.name, caps: &self.caps(), desired, whole };
        World::see(&self.backend, &self.state, &sight).await.map_err(|blind| self.blind(&blind))
    }

    /// Everything that is known there.
    pub async fn everything(&self) -> Result<Observed, Failure> {
        let world = self.world(&Desired::default(), Some(BTreeSet::new())).await?;
        Ok(world.observed)
    }

    /// Every process that is known there, as rows of the contract. `query` narrows it where the target can.
    pub async fn rows(&self, query: &str) -> Result<Vec<Value>, Failure> {
        if let Client::Abide(abide) = &self.backend {
            return abide.rows(query).await.map_err(|fault| self.failure(&fault));
        }
        let observed = self.everything().await?;
        Ok(observed.instances.iter().map(|(key, seen)| row(key, seen, &observed)).collect())
    }

    /// The hosts that are known there. Elsewhere than at our own gateway: those of which something was seen.
    pub async fn hosts(&self, observed: &Observed) -> Result<Vec<HostRow>, Failure> {
        if let Client::Abide(abide) = &self.backend {
            return abide.hosts().await.map_err(|fault| self.failure(&fault));
        }
        let mut hosts: BTreeMap<HostKey, u64> = observed.gaps.keys().map(|host| (host.clone(), 0)).collect();
        observed.instances.keys().for_each(|key| *hosts.entry(key.host.clone()).or_default() += 1);
        let host = |(host, processes): (HostKey, u64)| {
            let agent = !observed.gaps.contains_key(&host);
            HostRow { host, agent, version: None, heard: observed.at.to_string(), processes }
        };
        Ok(hosts.into_iter().map(host).collect())
    }

    /// What people asked to be left alone. What is over is left out.
    pub async fn restraints(&self) -> Result<(Vec<Hold>, Vec<Pause>), Failure> {
        let now = crate::clock::moment();
        let (mut holds, mut pauses): (Vec<Hold>, Vec<Pause>) =
            (self.all("hold/").await?, self.all("pause/").await?);
        holds.retain(|hold| hold.until.is_none_or(|until| until > now));
        pauses.retain(|pause| pause.until.is_none_or(|until| until > now));
        Ok((holds, pauses))
    }

    /// What is pinned, with its owner.
    pub async fn pins(&self) -> Result<Vec<(String, Pin)>, Failure> {
        let page = self.state.range(pin::PLACE, None, usize::MAX).await;
        let page =
            page.map_err(|error| Failure::new(Exit::Unreachable, format!("target {}: {error}", self.name)))?;
        let pin = |entry: &crate::store::Entry| {
            let owner = entry.key.strip_prefix(pin::PLACE)?.to_owned();
            Some((owner, serde_json::from_slice(&entry.value).ok()?))
        };
        Ok(page.entries.iter().filter_map(pin).collect())
    }

    async fn all<T: serde::de::DeserializeOwned>(&self, place: &str) -> Result<Vec<T>, Failure> {
        let page = self
            .state
            .range(place, None, usize::MAX)
            .await
            .map_err(|error| Failure::new(Exit::Unreachable, format!("target {}: {error}", self.name)))?;
        Ok(page.entries.iter().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect())
    }
}

/// The namespaces that manifests or their policies speak of.
pub fn namespaces(desired: &Desired) -> BTreeSet<Name> {
    desired.instances.keys().map(|key| key.namespace.clone()).collect()
}

/// An instance of a target that has no such rows of its own.
fn row(key: &InstanceKey, seen: &Seen, observed: &Observed) -> Value {
    let revision = |version: &Version| match version {
        Version::Unknown => None,
        Version::Digests(revision) => Some(revision.to_string()),
        Version::Spec(spec) => Some(spec.revision().to_string()),
    };
    let blind = seen.unknown || observed.gaps.contains_key(&key.host);
    let fact = |fact: Option<bool>| fact.filter(|_| !blind);
    let hosting = match fact(seen.hosted) {
        Some(true) => "Hosted",
        Some(false) => "NotHosted",
        None => "Unknown",
    };
    let time = |time: Option<Time>| time.map(|time| time.to_string());
    let spec = |version: &Version| version.spec().map(|spec| crate::gse::spec_body(spec, Dialect::Abide));
    json!({
        "instance": key, "namespace": key.namespace, "name": key.name, "host": key.host.to_string(),
        "labels": seen.labels, "registered": fact(seen.registered), "hosted": fact(seen.hosted),
        "running": fact(seen.running), "pid": seen.pid, "owner": seen.owner.as_deref(),
        "revision": revision(&seen.given), "live_revision": revision(&seen.live), "sync": "Unknown",
        "health": seen.health.word(), "hosting": hosting, "since": time(seen.since),
        "report_time": time(seen.report_time), "spec": spec(&seen.given), "live_spec": spec(&seen.live),
        "message": observed.gaps.get(&key.host),
    })
}

/// A runtime for verbs that ask a target.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))
}
