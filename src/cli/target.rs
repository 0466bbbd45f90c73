//! Targets: whom the verbs look at and change. `local` is the system of this machine; others are in the config file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;

use super::local::Home;
use super::{Exit, Failure};
use crate::backend::{Abide, Fault};
use crate::http::{Access, Calling};
use crate::model::{Desired, Hold, HostKey, Observed, Pause};
use crate::store::{Remote, Store};

/// Which target, and where its kind is written.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    /// The target: `local`, or a name in the config file
    #[arg(long, value_name = "NAME", env = "ABIDE_TARGET", default_value = "local")]
    pub target: String,
    /// The config file [default: ./abide.yaml, else ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
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
    pub backend: Abide,
    pub state: Remote,
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
    #[serde(default, flatten)]
    _more: BTreeMap<String, serde_yaml::Value>,
}

#[derive(Debug, Deserialize)]
struct Auth {
    app_code: String,
    app_secret: SecretFrom,
    username: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SecretFrom {
    env: Option<String>,
    file: Option<PathBuf>,
}

impl SecretFrom {
    fn read(&self, target: &str) -> Result<String, Failure> {
        let failed =
            |why: String| Failure::new(Exit::Usage, format!("target {target:?}: auth.app_secret: {why}"));
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
        TargetArgs { target: "local".to_owned(), config: None }
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

    /// Is there such a target?
    pub fn exists(&self) -> Result<(), Failure> {
        if self.target == "local" { Ok(()) } else { self.named(&self.target).map(|_| ()) }
    }

    /// `None`: the local system was never started, or nobody serves it.
    pub fn connect(&self, owner: &str, start: Start) -> Result<Option<Live>, Failure> {
        let access = match self.target.as_str() {
            "local" => {
                let home = Home::find()?;
                match start {
                    Start::OnDemand => Some(home.start()?),
                    Start::Never => home.access(),
                }
            }
            name => Some(self.named(name)?),
        };
        let Some(access) = access else { return Ok(None) };
        let broken = |why: String| Failure::new(Exit::Unreachable, format!("target {}: {why}", self.target));
        let backend = Abide::new(&access, owner).map_err(broken)?;
        let state = Remote::new(backend.calls().clone());
        Ok(Some(Live { name: self.target.clone(), backend, state }))
    }

    fn named(&self, name: &str) -> Result<Access, Failure> {
        let (config, file) = self.config()?;
        let Some(entry) = config.targets.get(name) else {
            let known: Vec<&str> = config.targets.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let message = format!("there is no target {name:?} in {} (it has {known})", file.display());
            return Err(Failure::new(Exit::Usage, message));
        };
        if entry.dialect != "abide" {
            let message = format!(
                "target {name:?}: this version drives dialect `abide` alone, not {:?}",
                entry.dialect
            );
            return Err(Failure::new(Exit::Unreachable, message)
                .hint("rehearse with --observed FILE --caps DIALECT, or convert --to DIALECT"));
        }
        let auth = entry.auth.as_ref();
        let auth = auth.ok_or_else(|| Failure::new(Exit::Usage, format!("target {name:?} has no auth")))?;
        Ok(Access {
            url: entry.url.clone(),
            code: auth.app_code.clone(),
            secret: auth.app_secret.read(name)?,
            username: auth.username.clone(),
            calling: Calling { ca_file: entry.ca_file.clone() },
        })
    }
}

impl Live {
    pub fn failure(&self, fault: &Fault) -> Failure {
        Failure::new(Exit::Unreachable, format!("target {}: {fault}", self.name))
    }

    /// What is there, for these manifests.
    pub async fn look(&self, desired: &Desired) -> Result<Observed, Failure> {
        let hosts: BTreeSet<HostKey> = desired.instances.keys().map(|key| key.host.clone()).collect();
        self.backend.look(&hosts).await.map_err(|fault| self.failure(&fault))
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

    async fn all<T: serde::de::DeserializeOwned>(&self, place: &str) -> Result<Vec<T>, Failure> {
        let page = self
            .state
            .range(place, None, usize::MAX)
            .await
            .map_err(|error| Failure::new(Exit::Unreachable, format!("target {}: {error}", self.name)))?;
        Ok(page.entries.iter().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect())
    }
}

/// A runtime for verbs that ask a target.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))
}
