//! Targets of the verbs: `local` is the system of this host, others are defined in the config file.

pub mod access;
mod config;
mod config_files;
mod connected;
mod inventory_config;
pub mod notify_config;
mod secret_from;
pub mod trust;

pub use config_files::{CONFIG_FILE_NAME, ConfigFile, find_config_files};
pub use trust::Trust;

pub use crate::engine::ConnectedTarget;
pub use connected::{TargetCause, two_rows};

use std::path::PathBuf;

use self::config::{Entry, unusable};
use super::commands::serve::private_folder;
use super::key_file::KeyFileArgs;
use super::local::Home;
use super::{Exit, Failure};
use crate::backend::{Abide, AnyBackend};
use crate::cli::output::print::Printer;
use crate::error_chain::chain;
use crate::http::{ApiClient, ClientError};
use crate::model::DEFAULT_OWNER;
use crate::reconcile::Caps;
use crate::store::{AnyStore, Embedded, Remote};

/// The target, its config file and its state store.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    /// Target: `local`, or a name in the config file
    #[arg(long, value_name = "NAME", env = "ABIDE_TARGET", default_value = "local")]
    pub target: String,
    /// Config file [default: ./abide.yaml (see `abide config trust`), then ~/.config/abide/config.yaml]
    #[arg(long, value_name = "FILE", env = "ABIDE_CONFIG")]
    pub config: Option<PathBuf>,
    /// State store (journal, ledger, holds, history): a folder, or the URL of an Abide gateway in the config file
    /// [default: the target itself if it is an Abide gateway, else $ABIDE_HOME/state]
    #[arg(long, value_name = "DIR|URL", env = "ABIDE_STATE")]
    pub state: Option<String>,
    #[command(flatten)]
    pub keys: KeyFileArgs,
}

/// Whether to start the local system if it is not running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalStart {
    OnDemand,
    Never,
}

impl TargetArgs {
    /// The local system, without flags and variables.
    pub fn local() -> TargetArgs {
        TargetArgs { target: "local".to_owned(), config: None, state: None, keys: KeyFileArgs::default() }
    }

    /// The target's capabilities. Fails if the target is not defined.
    pub fn caps(&self) -> Result<Caps, Failure> {
        match self.target.as_str() {
            "local" => Ok(Caps::LOCAL),
            name => self.entry(name)?.dialect(name).map(Caps::of),
        }
    }

    /// The owner from --owner, else from the config file, else `default`.
    pub fn owner_or_default(&self, typed: Option<&str>) -> Result<String, Failure> {
        let owner = typed.map_or_else(|| self.owner(), |owner| Ok(Some(owner.to_owned())))?;
        Ok(owner.unwrap_or_else(|| DEFAULT_OWNER.to_owned()))
    }

    /// The owner in the config file.
    pub fn owner(&self) -> Result<Option<String>, Failure> {
        Ok(self.config()?.owner())
    }

    /// `None`: the local system is not running.
    pub fn connect(&self, start: LocalStart) -> Result<Option<ConnectedTarget>, Failure> {
        let name = self.target.clone();
        if name != "local" {
            let entry = self.entry(&name)?;
            let defined_in = Some(entry.definition.file.display().to_string());
            let backend = entry.client(&name)?;
            let own = match &backend {
                AnyBackend::Abide(abide) => Some(Remote::new(abide.calls().clone())),
                AnyBackend::Platform(_) => None,
            };
            let state = self.state(own)?;
            return Ok(Some(ConnectedTarget { name, backend, state, defined_in }));
        }
        // The config file does not define `local`, but an invalid file is an error.
        self.config()?;
        self.connect_local(start)
    }

    /// Connects to the local system, without the config file.
    pub fn connect_local(&self, start: LocalStart) -> Result<Option<ConnectedTarget>, Failure> {
        let name = "local".to_owned();
        let broken =
            |error: ClientError| Failure::new(Exit::Unreachable, format!("target {name}: {}", chain(&error)));
        let home = Home::find()?;
        let access = match start {
            LocalStart::OnDemand => Some(home.start()?),
            LocalStart::Never => home.access(),
        };
        let Some(access) = access else { return Ok(None) };
        let abide = Abide::new(&access).map_err(broken)?;
        let state = self.state(Some(Remote::new(abide.calls().clone())))?;
        Ok(Some(ConnectedTarget {
            name,
            backend: AnyBackend::Abide(Box::new(abide)),
            state,
            defined_in: None,
        }))
    }

    /// Connects to the target, and starts the local system if it is not running.
    pub fn connect_or_start(&self, printer: &Printer) -> Result<ConnectedTarget, Failure> {
        let is_down = self.target == "local" && Home::find()?.server_pid().is_none();
        let live = self.connect(LocalStart::OnDemand)?;
        if let Some(pid) = Home::find()?.server_pid().filter(|_| is_down) {
            let message = "started the local system in the background: `abide down` stops it";
            printer.info(&format!("{message} (process {pid})"));
        }
        live.ok_or_else(|| Failure::new(Exit::Unreachable, "the local system is not running"))
    }

    /// The state store: from --state, else the target's own, else from the config file, else a local folder.
    fn state(&self, own: Option<Remote>) -> Result<AnyStore, Failure> {
        let configured = match (&self.state, &own) {
            (Some(state), _) => Some(state.clone()),
            (None, Some(_)) => None,
            (None, None) => self.config()?.state()?,
        };
        if let (None, Some(own)) = (&configured, own) {
            return Ok(AnyStore::own(own));
        }
        if let Some(url) = configured.as_ref().filter(|state| state.starts_with("http")) {
            return self.state_at(url).map(|state| AnyStore::there(state, &self.target));
        }
        let folder = match configured {
            Some(folder) => PathBuf::from(folder),
            None => Home::find()?.path("state"),
        };
        if let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(|error| {
                Failure::new(Exit::Failed, format!("cannot create folder {}: {error}", parent.display()))
            })?;
        }
        let keys = self.keys.source(&folder)?;
        private_folder(&folder)?;
        let opened = Embedded::open_keyed(&folder.join("state.db"), &keys);
        opened
            .map(|state| AnyStore::here(state, &self.target))
            .map_err(|error| Failure::new(Exit::Failed, error.to_string()))
    }

    /// The state store of a gateway in the config file, with the credentials of its target.
    fn state_at(&self, url: &str) -> Result<Remote, Failure> {
        let config = self.config()?;
        let same = |entry: &&Entry| entry.url.trim_end_matches('/') == url.trim_end_matches('/');
        let found = config.targets().find(|(_, entry)| same(entry) && entry.dialect == "abide");
        let Some((name, entry)) = found else {
            let message =
                format!("--state {url}: no target of dialect abide in {} has this URL", config.shown());
            return Err(
                Failure::new(Exit::Usage, message).hint("add a target with this URL: its `auth` is used")
            );
        };
        let calls = ApiClient::new(&entry.access(name)?);
        Ok(Remote::new(calls.map_err(|error| unusable(name, &chain(&error)))?))
    }
}

/// A runtime for verbs that call a target.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))
}
