//! TLS server configuration: rustls, with certificate files that reload on change.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::reload::{Reloadable, watch_file};

/// The current TLS configuration.
#[derive(Clone)]
pub struct Tls(Reloadable<Arc<ServerConfig>>);

impl Tls {
    /// Reads the two files, and reloads them on change.
    pub fn watch_files(cert: &Path, key: &Path) -> Result<Tls, String> {
        let (cert, key) = (cert.to_owned(), key.to_owned());
        let files = vec![cert.clone(), key.clone()];
        watch_file(files, move || read(&cert, &key)).map(Tls)
    }

    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&*self.0.get())
    }
}

fn read(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, String> {
    let certificates = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| format!("cannot read the certificate {}: {error}", cert.display()))?;
    if certificates.is_empty() {
        return Err(format!("{} contains no certificate", cert.display()));
    }
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| format!("cannot read the key {}: {error}", key.display()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("cannot set up TLS: {error}"))?;
    let config = builder.with_no_client_auth().with_single_cert(certificates, private).map_err(|error| {
        format!("the certificate {} and the key {} do not match: {error}", cert.display(), key.display())
    })?;
    Ok(Arc::new(config))
}
