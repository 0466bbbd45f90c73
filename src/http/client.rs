//! Calling: one client for everything that we ask others.

use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::told::root_of;

/// How to call.
#[derive(Clone, Debug, Default)]
pub struct Calling {
    /// Whom to trust beside those whom this machine trusts, in PEM.
    pub ca_file: Option<PathBuf>,
    /// Our own certificate and its key, in one PEM file.
    pub client_cert: Option<PathBuf>,
    /// Through whom: `http://proxy:3128`.
    pub proxy: Option<String>,
    /// Sent with every call.
    pub headers: Vec<(String, String)>,
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
        if let Some(file) = &self.client_cert {
            builder = builder.identity(identity(file)?);
        }
        if let Some(proxy) = &self.proxy {
            let through = reqwest::Proxy::all(proxy);
            builder = builder
                .proxy(through.map_err(|error| format!("the proxy cannot be used: {}", root_of(&error)))?);
        }
        builder = builder.default_headers(self.headers()?);
        builder.build().map_err(|error| match &self.client_cert {
            // The one part that is not looked at before.
            Some(file) => useless(file, &root_of(&error)),
            None => format!("cannot set up HTTP: {}", root_of(&error)),
        })
    }

    fn headers(&self) -> Result<HeaderMap, String> {
        let mut all = HeaderMap::new();
        for (name, value) in &self.headers {
            let wrong = || format!("the header {name:?} cannot be sent");
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
            let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
            // It may be a secret.
            value.set_sensitive(true);
            all.insert(name, value);
        }
        Ok(all)
    }
}

fn identity(file: &Path) -> Result<reqwest::Identity, String> {
    let pem = std::fs::read(file).map_err(|error| useless(file, &error.to_string()))?;
    reqwest::Identity::from_pem(&pem)
        .map_err(|_| useless(file, "it must hold a certificate and its key, both in PEM"))
}

fn useless(file: &Path, why: &str) -> String {
    format!("cannot use the client certificate {}: {why}", file.display())
}

fn certificates(file: &Path) -> Result<Vec<reqwest::Certificate>, String> {
    let failed = |why: String| format!("cannot read the certificate {}: {why}", file.display());
    let pem = std::fs::read(file).map_err(|error| failed(error.to_string()))?;
    let all = reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| failed(root_of(&error)))?;
    match all.is_empty() {
        true => Err(format!("{} holds no certificate", file.display())),
        false => Ok(all),
    }
}
