//! Selection of config files: named by the user, found in the current directory, or the user's own; and their trust.
//!
//! A file found in the current directory may come from a checkout or an archive: its author decides where credentials of
//! this host would be sent. It may set `owner` and define targets. Its credentials, its `state`, and targets that the
//! user's own file also defines are used only after `abide config trust` recorded its digest.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Once;

use tracing::{info, warn};

use super::TargetArgs;
use super::config::{Config, Entry};
use super::notify_config::RouteEntry;
use super::trust::{self, Trust};
use crate::alerts::AlertRoute;
use crate::cli::{Exit, Failure};
pub use crate::contract::ConfigOrigin;
use crate::inventory::InventorySource;

/// The name of a config file in the current directory.
pub const CONFIG_FILE_NAME: &str = "abide.yaml";
/// Maximum size of a config file.
const MAX_BYTES: u64 = 1 << 20;

impl ConfigOrigin {
    pub fn describe(self) -> &'static str {
        match self {
            ConfigOrigin::Given => "given by --config or ABIDE_CONFIG",
            ConfigOrigin::Found => "found in the current directory",
            ConfigOrigin::User => "the user's own",
        }
    }
}

/// A parsed config file.
pub struct ConfigFile {
    pub path: PathBuf,
    pub origin: ConfigOrigin,
    pub trust: Trust,
    pub content: String,
    pub config: Config,
}

/// The config files in use: the first wins, the user's own fills in what it leaves out.
#[derive(Default)]
pub struct ConfigFiles {
    pub first: Option<ConfigFile>,
    pub users: Option<ConfigFile>,
}

/// The file that defines a target, and its trust.
#[derive(Clone, Debug, Default)]
pub struct Definition {
    pub file: PathBuf,
    trust: Trust,
}

impl Definition {
    /// Refuses a part of a file that is not trusted.
    pub fn may_use(&self, target: &str, what: &str) -> Result<(), Failure> {
        may_use(&self.file, self.trust, &format!("target {target:?}: {what}"))
    }
}

/// Refuses a part of a file that is not trusted.
fn may_use(file: &Path, trust: Trust, what: &str) -> Result<(), Failure> {
    let why = match trust {
        Trust::Full => return Ok(()),
        Trust::None => "was found in the current directory and is not trusted",
        Trust::Changed => "was found in the current directory and has changed since it was trusted",
    };
    let shown = file.display();
    let message = format!("{what} cannot be used: {shown} {why}");
    Err(Failure::new(Exit::Usage, message).hint(format!(
        "read {shown}, then run `abide config trust`; or name it: --config {shown}, or ABIDE_CONFIG"
    )))
}

impl ConfigFile {
    fn read(path: PathBuf, origin: ConfigOrigin) -> Result<ConfigFile, Failure> {
        let wrong = |why: String| Failure::new(Exit::Usage, format!("{}: {why}", path.display()));
        let mut text = String::new();
        let read =
            std::fs::File::open(&path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
        read.map_err(|error| wrong(error.to_string()))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(wrong(format!("the file is larger than {MAX_BYTES} bytes")));
        }
        // Trust is checked on the text that is parsed.
        let trust = match origin {
            ConfigOrigin::Found => trust::check_trust(&path, text.as_bytes())?,
            ConfigOrigin::Given | ConfigOrigin::User => Trust::Full,
        };
        // An empty file is valid.
        let config: Option<Config> = serde_yaml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let mut config = config.unwrap_or_default();
        for entry in config.targets.values_mut() {
            entry.definition = Definition { file: path.clone(), trust };
        }
        Ok(ConfigFile { path, origin, trust, content: text, config })
    }

    fn defines(&self, target: &str) -> bool {
        self.config.targets.contains_key(target)
    }
}

impl ConfigFiles {
    fn files(&self) -> impl Iterator<Item = &ConfigFile> {
        self.first.iter().chain(&self.users)
    }

    /// The file names for messages.
    pub fn shown(&self) -> String {
        let files: Vec<String> = self.files().map(|file| file.path.display().to_string()).collect();
        if files.is_empty() { CONFIG_FILE_NAME.to_owned() } else { files.join(" and ") }
    }

    pub fn owner(&self) -> Option<String> {
        self.files().find_map(|file| file.config.owner.clone())
    }

    pub fn state(&self) -> Result<Option<String>, Failure> {
        let Some(file) = self.files().find(|file| file.config.state.is_some()) else { return Ok(None) };
        may_use(&file.path, file.trust, "`state`")?;
        Ok(file.config.state.clone())
    }

    /// The routes of alerts, of the first file that has some.
    pub fn notify(&self) -> Result<Vec<AlertRoute>, Failure> {
        let Some((file, routes)) = self.files().find_map(|file| Some((file, file.config.notify.as_ref()?)))
        else {
            return Ok(Vec::new());
        };
        may_use(&file.path, file.trust, "`notify`")?;
        let folder = file.path.parent().unwrap_or(Path::new("."));
        let route = |(name, entry): (&String, &RouteEntry)| {
            entry.route(name, folder).map_err(|mut failure| {
                failure.message = format!("{} ({})", failure.message, file.path.display());
                failure
            })
        };
        routes.iter().map(route).collect()
    }

    /// The definition of an inventory, with its secrets. `None`: no file defines it.
    pub fn inventory(&self, name: &str) -> Result<Option<InventorySource>, Failure> {
        let Some((file, entry)) =
            self.files().find_map(|file| Some((file, file.config.inventories.get(name)?)))
        else {
            return Ok(None);
        };
        may_use(&file.path, file.trust, &format!("inventory {name:?}"))?;
        let folder = file.path.parent().unwrap_or(Path::new("."));
        entry.source(name, folder).map(Some).map_err(|mut failure| {
            failure.message = format!("{} ({})", failure.message, file.path.display());
            failure
        })
    }

    /// The names of all inventories.
    pub fn inventory_names(&self) -> BTreeSet<String> {
        self.files().flat_map(|file| file.config.inventories.keys()).cloned().collect()
    }

    pub fn targets(&self) -> impl Iterator<Item = (&String, &Entry)> {
        // Targets of trusted files come first.
        let (trusted, other): (Vec<_>, Vec<_>) = self.files().partition(|file| file.trust == Trust::Full);
        trusted.into_iter().chain(other).flat_map(|file| &file.config.targets)
    }

    /// The definition of a target.
    pub fn entry(self, name: &str) -> Result<Entry, Failure> {
        let Some(file) = self.files().find(|file| file.defines(name)) else {
            let mut known: Vec<&str> =
                self.files().flat_map(|file| file.config.targets.keys()).map(String::as_str).collect();
            known.sort_unstable();
            known.dedup();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let message = format!("{} has no target {name:?} (targets: {known})", self.shown());
            return Err(Failure::new(Exit::Usage, message));
        };
        if let Some(users) =
            self.users.as_ref().filter(|users| users.path != file.path && users.defines(name))
        {
            let what = format!("target {name:?} is defined in {} as well, so this one", users.path.display());
            may_use(&file.path, file.trust, &what)?;
        }
        let path = file.path.clone();
        let files = [self.first, self.users].into_iter().flatten();
        let entry =
            files.filter(|file| file.path == path).find_map(|mut file| file.config.targets.remove(name));
        entry.ok_or_else(|| Failure::new(Exit::Usage, format!("target {name:?} is not defined")))
    }
}

impl TargetArgs {
    /// Reads the config files in use.
    pub fn config(&self) -> Result<ConfigFiles, Failure> {
        let chosen = find_config_files(self.config.as_deref())?;
        static LOGGED: Once = Once::new();
        LOGGED.call_once(|| {
            for file in chosen.files() {
                let (path, why) = (file.path.display(), file.origin.describe());
                info!(file = %path, %why, trusted = file.trust == Trust::Full, "config file in use");
            }
        });
        Ok(chosen)
    }

    /// The inventories that the config files define. One that cannot be used is logged and left out: the manifests may not
    /// need it.
    pub fn all_inventories(&self) -> Result<BTreeMap<String, InventorySource>, Failure> {
        let config = self.config()?;
        let source = |name: String| match config.inventory(&name) {
            Ok(source) => Some((name, source?)),
            Err(failure) => {
                warn!(inventory = %name, why = %failure.message, "inventory cannot be used");
                None
            }
        };
        Ok(config.inventory_names().into_iter().filter_map(source).collect())
    }

    /// Those of these inventories that a config file defines. The others may have last good hosts.
    pub fn inventories(
        &self,
        names: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, InventorySource>, Failure> {
        let config = self.config()?;
        let source = |name: &String| config.inventory(name).map(|source| Some((name.clone(), source?)));
        names.iter().filter_map(|name| source(name).transpose()).collect()
    }

    /// The definition of a target.
    pub(super) fn entry(&self, name: &str) -> Result<Entry, Failure> {
        self.config()?.entry(name)
    }
}

/// Reads the config files in use: only the named one, else the one in the current directory and the user's own.
pub fn find_config_files(given: Option<&Path>) -> Result<ConfigFiles, Failure> {
    if let Some(file) = given {
        let first = ConfigFile::read(file.to_owned(), ConfigOrigin::Given)?;
        return Ok(ConfigFiles { first: Some(first), users: None });
    }
    let read = |path: PathBuf, origin: ConfigOrigin| match path.is_file() {
        true => ConfigFile::read(path, origin).map(Some),
        false => Ok(None),
    };
    let users = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config/abide/config.yaml"));
    Ok(ConfigFiles {
        first: read(PathBuf::from(CONFIG_FILE_NAME), ConfigOrigin::Found)?,
        users: users.map_or(Ok(None), |users| read(users, ConfigOrigin::User))?,
    })
}
