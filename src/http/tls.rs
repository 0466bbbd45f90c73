//! TLS server configuration: rustls, with certificate files that reload on change.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::reload::{Reloadable, watch_file};

/// Why the certificate and key files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read the certificate {}", file.display())]
    Certificate { file: PathBuf, source: pem::Error },
    #[error("{} contains no certificate", file.display())]
    NoCertificate { file: PathBuf },
    #[error("cannot read the key {}", file.display())]
    Key { file: PathBuf, source: pem::Error },
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
    #[error("the certificate {} and the key {} do not match", cert.display(), key.display())]
    Mismatch { cert: PathBuf, key: PathBuf, source: rustls::Error },
}

/// The current TLS configuration.
#[derive(Clone)]
pub struct Tls(Reloadable<Arc<ServerConfig>>);

impl Tls {
    /// Reads the two files, and reloads them on change.
    pub fn watch_files(cert: &Path, key: &Path) -> Result<Tls, TlsError> {
        let (cert, key) = (cert.to_owned(), key.to_owned());
        let files = vec![cert.clone(), key.clone()];
        watch_file(files, move || read(&cert, &key)).map(Tls)
    }

    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&*self.0.get())
    }
}

fn read(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let certificates = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| TlsError::Certificate { file: cert.to_owned(), source })?;
    if certificates.is_empty() {
        return Err(TlsError::NoCertificate { file: cert.to_owned() });
    }
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|source| TlsError::Key { file: key.to_owned(), source })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Setup)?;
    let config = builder
        .with_no_client_auth()
        .with_single_cert(certificates, private)
        .map_err(|source| TlsError::Mismatch { cert: cert.to_owned(), key: key.to_owned(), source })?;
    Ok(Arc::new(config))
}
