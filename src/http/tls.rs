//! TLS server configuration: rustls, with certificate files that reload on change, and optional client certificates.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

use super::reload::{Reloadable, watch_file};

/// Reason why the certificate and key files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read the certificate {}", file.display())]
    Certificate { file: PathBuf, source: pem::Error },
    #[error("{} contains no certificate", file.display())]
    NoCertificate { file: PathBuf },
    #[error("cannot read the key {}", file.display())]
    Key { file: PathBuf, source: pem::Error },
    #[error("cannot use the client CA {}", file.display())]
    ClientCa { file: PathBuf, source: VerifierBuilderError },
    #[error("cannot use the client CA {}", file.display())]
    ClientCaCertificate { file: PathBuf, source: rustls::Error },
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
        Tls::watch_files_and_clients(cert, key, None)
    }

    /// The same, and asks clients for a certificate of the CAs in `client_ca`. A client may have none; one of another
    /// CA, or an expired one, fails the handshake.
    pub fn watch_files_and_clients(
        cert: &Path,
        key: &Path,
        client_ca: Option<&Path>,
    ) -> Result<Tls, TlsError> {
        let (cert, key, client_ca) = (cert.to_owned(), key.to_owned(), client_ca.map(Path::to_owned));
        let files = [&cert, &key].into_iter().chain(&client_ca).cloned().collect();
        watch_file(files, move || read(&cert, &key, client_ca.as_deref())).map(Tls)
    }

    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&*self.0.get())
    }
}

fn read_certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| TlsError::Certificate { file: file.to_owned(), source })?;
    match certificates.is_empty() {
        true => Err(TlsError::NoCertificate { file: file.to_owned() }),
        false => Ok(certificates),
    }
}

fn read(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Arc<ServerConfig>, TlsError> {
    let certificates = read_certificates(cert)?;
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|source| TlsError::Key { file: key.to_owned(), source })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Setup)?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for root in read_certificates(file)? {
                roots
                    .add(root)
                    .map_err(|source| TlsError::ClientCaCertificate { file: file.to_owned(), source })?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .allow_unauthenticated()
                .build()
                .map_err(|source| TlsError::ClientCa { file: file.to_owned(), source })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder.with_single_cert(certificates, private).map_err(|source| TlsError::Mismatch {
        cert: cert.to_owned(),
        key: key.to_owned(),
        source,
    })?;
    Ok(Arc::new(config))
}
