//! The CA of agents: flags of `abide serve`, and the trust that they select.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::info;

use crate::cli::args::{InvalidValue, parse_switch};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::error_chain::chain;
use crate::gateway::FleetTrust;
use crate::http::watch_file;
use crate::model::seconds;
use crate::permissions::{own_uid, refuse_changeable};
use crate::pki::{AuthorityError, AuthorityFiles};
use crate::store::{Embedded, Store, keys};

/// Bounds of --cert-life, in seconds.
const MIN_LIFE_SECS: u64 = 5;
const MAX_LIFE_SECS: u64 = 366 * 86_400;

/// Client certificates of agents.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Certificates of agents")]
pub struct FleetArgs {
    /// Folder of the CA that signs certificates of agents (ca.pem, ca.key), outside --data
    ///
    /// The first start creates the CA. `abide token create` then makes join tokens. Needs TLS.
    #[arg(long, env = "ABIDE_CA_DIR", value_name = "DIR", conflicts_with_all = ["ca_cert", "client_ca"])]
    pub ca_dir: Option<PathBuf>,
    /// Certificate of an existing CA that signs certificates of agents, PEM
    #[arg(
        long,
        env = "ABIDE_CA_CERT",
        value_name = "FILE",
        requires = "ca_key",
        conflicts_with = "client_ca"
    )]
    pub ca_cert: Option<PathBuf>,
    /// Its private key, PEM; no other user may read it
    #[arg(long, env = "ABIDE_CA_KEY", value_name = "FILE", requires = "ca_cert")]
    pub ca_key: Option<PathBuf>,
    /// CA certificates of an external CA: verify its client certificates, sign none
    #[arg(long, env = "ABIDE_CLIENT_CA", value_name = "FILE")]
    pub client_ca: Option<PathBuf>,
    /// Create a CA in --ca-dir even though hosts have certificates of another one: they need new join tokens
    #[arg(long, env = "ABIDE_INIT_CA", value_parser = parse_switch, requires = "ca_dir")]
    pub init_ca: bool,
    /// Life of a certificate; the agent renews it at two thirds
    #[arg(long, env = "ABIDE_CERT_LIFE", value_name = "DURATION", default_value = "30d", value_parser = parse_life)]
    pub cert_life: u64,
}

fn parse_life(text: &str) -> Result<u64, InvalidValue> {
    let life = seconds(text).filter(|secs| (MIN_LIFE_SECS..=MAX_LIFE_SECS).contains(secs));
    life.ok_or(InvalidValue("a duration from 5s to 366d, such as 30d"))
}

impl FleetArgs {
    /// The files of the CA that signs.
    fn authority_files(&self) -> Option<AuthorityFiles> {
        match (&self.ca_dir, &self.ca_cert, &self.ca_key) {
            (Some(folder), ..) => Some(AuthorityFiles::in_folder(folder)),
            (None, Some(cert), Some(key)) => Some(AuthorityFiles { cert: cert.clone(), key: key.clone() }),
            _ => None,
        }
    }

    /// The file of CAs whose client certificates are verified.
    pub fn client_ca_file(&self) -> Option<PathBuf> {
        self.authority_files().map(|files| files.cert).or_else(|| self.client_ca.clone())
    }

    /// Checks the flags before a file is opened.
    pub fn check(&self, data: &Path, has_tls: bool) -> Result<(), Failure> {
        if self.client_ca_file().is_some() && !has_tls {
            let message = "certificates of agents need TLS";
            return Err(Failure::new(Exit::Usage, message).hint("pass --tls-cert and --tls-key"));
        }
        let is_inside = |folder: &PathBuf| match (std::path::absolute(folder), std::path::absolute(data)) {
            (Ok(folder), Ok(data)) => folder.starts_with(data),
            _ => false,
        };
        if self.ca_dir.as_ref().is_some_and(is_inside) {
            let message = "--ca-dir must not be inside --data";
            return Err(Failure::new(Exit::Usage, message)
                .hint("a backup of the data folder would contain the key of the CA"));
        }
        Ok(())
    }

    /// Opens the CA, and creates it on first use.
    pub async fn trust(&self, store: &Embedded) -> Result<FleetTrust, Failure> {
        let failed = |why: String| Failure::new(Exit::Failed, why);
        let Some(files) = self.authority_files() else {
            let Some(file) = &self.client_ca else { return Ok(FleetTrust::Disabled) };
            refuse_changeable(file, own_uid()).map_err(|error| failed(chain(&error)))?;
            return Ok(FleetTrust::External);
        };
        let unusable = |error: AuthorityError| failed(chain(&error));
        if self.ca_dir.is_some() && !files.exist().map_err(unusable)? {
            let pinned = store.range(keys::HOST_PIN_PREFIX, None, 1).await;
            let pinned = pinned.map_err(|error| failed(error.to_string()))?;
            if !pinned.entries.is_empty() && !self.init_ca {
                let message =
                    format!("{} does not exist, and hosts have certificates of it", files.cert.display());
                return Err(failed(message)
                    .hint("restore it, or pass --init-ca: these hosts then need new join tokens"));
            }
            files.create(clock::now()).map_err(unusable)?;
            info!(certificate = %files.cert.display(), "created a CA for certificates of agents");
        }
        let life = Duration::from_secs(self.cert_life);
        let watched = vec![files.cert.clone(), files.key.clone()];
        let authority = watch_file(watched, move || files.read()).map_err(unusable)?;
        Ok(FleetTrust::Issuer { authority, life })
    }
}
