//! Calling: one client for everything that we ask others.

use std::path::Path;
use std::time::Duration;

/// How to call.
#[derive(Clone, Debug, Default)]
pub struct Calling {
    /// Whom to trust beside those whom this machine trusts, in PEM.
    pub ca_file: Option<std::path::PathBuf>,
}

/// How long it may take until a connection stands.
const CONNECT: Duration = Duration::from_secs(5);

impl Calling {
    pub fn client(&self) -> Result<reqwest::Client, String> {
        // Somebody else may have installed it: then it is there.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder().connect_timeout(CONNECT).tcp_nodelay(true);
        if let Some(file) = &self.ca_file {
            for certificate in certificates(file)? {
                builder = builder.add_root_certificate(certificate);
            }
        }
        builder.build().map_err(|error| format!("cannot set up HTTP: {error}"))
    }
}

fn certificates(file: &Path) -> Result<Vec<reqwest::Certificate>, String> {
    let failed =
        |error: &dyn std::fmt::Display| format!("cannot read the certificate {}: {error}", file.display());
    let pem = std::fs::read(file).map_err(|error| failed(&error))?;
    reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| failed(&error))
}
