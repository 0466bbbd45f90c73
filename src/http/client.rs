//! HTTP client setup: the only function that builds a client, for targets, state, agents and notifications.
//!
//! A client never follows a redirect: the request and its credentials are meant for the address that the user
//! configured. It refuses plain http to an address that is not loopback unless the user allows that.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::error::SetupError;

/// TLS, proxy and header settings of a client.
#[derive(Clone, Debug, Default)]
pub struct ClientConfig {
    /// CA certificates in PEM, trusted in addition to those of this machine.
    pub ca_file: Option<PathBuf>,
    /// Client certificate and its key, in one PEM file.
    pub client_cert: Option<PathBuf>,
    /// Proxy URL, such as `http://proxy:3128`.
    pub proxy: Option<String>,
    /// Headers sent with every request.
    pub headers: Vec<(String, String)>,
    /// Trust only the certificates in `ca_file`, not those of this machine.
    pub ca_only: bool,
    /// Accept plain http to an address that is not loopback.
    pub insecure: bool,
}

/// Reason why no request is sent to an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("{0}")]
    Invalid(String),
    /// Plain http to an address that is not loopback.
    #[error("refusing plain http to {0}")]
    Plain(String),
}

/// Reason why no client can be made for an address.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The message omits the URL: it may be the secret.
    #[error("the address is not a valid http or https URL")]
    InvalidUrl,
    #[error("ca_only needs a ca_file: no certificate would be trusted")]
    NoCaFile,
    #[error("cannot read the certificate {}", file.display())]
    ReadCertificate { file: PathBuf, source: std::io::Error },
    #[error("cannot read the certificate {}", file.display())]
    InvalidCertificate { file: PathBuf, source: SetupError },
    #[error("{} contains no certificate", file.display())]
    NoCertificate { file: PathBuf },
    #[error("cannot use the client certificate {}", file.display())]
    ReadClientCertificate { file: PathBuf, source: std::io::Error },
    #[error(
        "cannot use the client certificate {}: the file must contain a certificate and its key, both in PEM",
        file.display()
    )]
    InvalidClientCertificate { file: PathBuf },
    #[error("cannot use the client certificate {}", file.display())]
    UnusableClientCertificate { file: PathBuf, source: SetupError },
    #[error("the proxy cannot be used")]
    Proxy(#[source] SetupError),
    /// The value may be a secret, so the message omits it.
    #[error("the header {name:?} cannot be sent")]
    Header { name: String },
    #[error("cannot set up HTTP")]
    Setup(#[source] SetupError),
}

/// Maximum time to establish a connection.
const CONNECT: Duration = Duration::from_secs(5);

impl ClientConfig {
    /// Checks an address before any request: `Err`: the reason why no request is sent to it.
    pub fn check(&self, url: &str) -> Result<(), AddressError> {
        let invalid = |why: String| Err(AddressError::Invalid(why));
        let parsed: Url = match url.parse() {
            Ok(url) => url,
            Err(error) => return invalid(format!("the URL is not valid: {error}")),
        };
        match parsed.scheme() {
            "https" => return Ok(()),
            "http" => {}
            other => return invalid(format!("{other:?} is not a supported scheme: use https or http")),
        }
        if self.insecure {
            return Ok(());
        }
        let host = parsed.host_str().unwrap_or_default();
        if !is_loopback(&parsed) {
            return Err(AddressError::Plain(format!("{host} (not a loopback address)")));
        }
        // A request to loopback that a proxy elsewhere forwards crosses the network as well.
        let proxy = self.proxy.as_deref().and_then(|proxy| proxy.parse::<Url>().ok());
        match proxy.filter(|proxy| !is_loopback(proxy)) {
            Some(_) => Err(AddressError::Plain(format!("{host} through a proxy that is not on loopback"))),
            None => Ok(()),
        }
    }

    /// A client for this address.
    pub fn client(&self, url: &str) -> Result<reqwest::Client, ClientError> {
        self.check(url)?;
        // An error means that a provider is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .redirect(reqwest::redirect::Policy::none());
        builder = match (&self.ca_file, self.ca_only) {
            (Some(file), true) => builder.tls_certs_only(certificates(file)?),
            (Some(file), false) => builder.tls_certs_merge(certificates(file)?),
            (None, true) => return Err(ClientError::NoCaFile),
            (None, false) => builder,
        };
        // Requests to loopback bypass the proxy of the environment.
        if self.proxy.is_none() && url.parse::<Url>().is_ok_and(|url| is_loopback(&url)) {
            builder = builder.no_proxy();
        }
        if let Some(file) = &self.client_cert {
            builder = builder.identity(identity(file)?);
        }
        if let Some(proxy) = &self.proxy {
            let through = reqwest::Proxy::all(proxy);
            builder = builder.proxy(through.map_err(|error| ClientError::Proxy(SetupError(error)))?);
        }
        builder = builder.default_headers(self.headers()?);
        builder.build().map_err(|error| match &self.client_cert {
            // The client certificate is the only part not validated above.
            Some(file) => {
                ClientError::UnusableClientCertificate { file: file.clone(), source: SetupError(error) }
            }
            None => ClientError::Setup(SetupError(error)),
        })
    }

    fn headers(&self) -> Result<HeaderMap, ClientError> {
        let mut all = HeaderMap::new();
        for (name, value) in &self.headers {
            let wrong = || ClientError::Header { name: name.clone() };
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
            let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
            // The value may be a secret.
            value.set_sensitive(true);
            all.insert(name, value);
        }
        Ok(all)
    }
}

/// Whether a URL names this machine, by a literal loopback address or as `localhost`.
fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match address.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host == "localhost",
    }
}

/// Reason why a redirect is not followed; `None`: the response is not a redirect. The message shows only the host of the
/// location: its path and its user may be secrets.
pub fn redirect(answer: &reqwest::Response) -> Option<String> {
    let status = answer.status();
    if !status.is_redirection() {
        return None;
    }
    let location = answer.headers().get(reqwest::header::LOCATION).and_then(|value| value.to_str().ok());
    let location = location.and_then(|location| answer.url().join(location).ok());
    let host = location.as_ref().and_then(|url| {
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        Some(format!("{}{port}", url.host_str()?))
    });
    let to = host.map_or_else(String::new, |host| format!(" to {host}"));
    Some(format!("the server redirects{to} (HTTP {}); redirects are never followed", status.as_u16()))
}

fn identity(file: &Path) -> Result<reqwest::Identity, ClientError> {
    let named = || file.to_owned();
    let pem =
        std::fs::read(file).map_err(|source| ClientError::ReadClientCertificate { file: named(), source })?;
    reqwest::Identity::from_pem(&pem).map_err(|_| ClientError::InvalidClientCertificate { file: named() })
}

fn certificates(file: &Path) -> Result<Vec<reqwest::Certificate>, ClientError> {
    let named = || file.to_owned();
    let pem = std::fs::read(file).map_err(|source| ClientError::ReadCertificate { file: named(), source })?;
    let all = reqwest::Certificate::from_pem_bundle(&pem)
        .map_err(|error| ClientError::InvalidCertificate { file: named(), source: SetupError(error) })?;
    match all.is_empty() {
        true => Err(ClientError::NoCertificate { file: named() }),
        false => Ok(all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_is_for_loopback_alone() {
        let calling = ClientConfig::default();
        for good in [
            "https://gateway.example",
            "http://127.0.0.1:7465",
            "http://127.8.9.10/x",
            "http://[::1]:80",
            "http://[::ffff:127.0.0.1]",
            "http://localhost:1",
            "HTTP://LOCALHOST",
            "http://2130706433/",
        ] {
            assert_eq!(calling.check(good), Ok(()), "{good}");
            calling.client(good).expect(good);
        }
        for bad in [
            "http://gateway.example",
            "http://0.0.0.0:80",
            "http://10.0.0.1",
            "http://localhost.example",
            "http://127.0.0.1.example",
            "http://127.0.0.1@gateway.example",
            "http://[::]",
            "http://[fe80::1]",
        ] {
            let why = calling.check(bad).expect_err(bad);
            assert!(matches!(why, AddressError::Plain(_)), "{why}");
            assert!(calling.client(bad).is_err(), "{bad}");
            assert_eq!(
                ClientConfig { insecure: true, ..ClientConfig::default() }.check(bad),
                Ok(()),
                "{bad}"
            );
        }
        for bad in ["", "gateway.example", "ftp://127.0.0.1", "file:///etc/passwd", "http://"] {
            assert!(ClientConfig { insecure: true, ..ClientConfig::default() }.check(bad).is_err(), "{bad}");
        }
        let proxied =
            ClientConfig { proxy: Some("http://proxy.example:3128".to_owned()), ..ClientConfig::default() };
        assert!(
            proxied.check("http://127.0.0.1").is_err() && proxied.check("https://gateway.example").is_ok()
        );
        assert!(
            ClientConfig { ca_only: true, ..ClientConfig::default() }
                .client("https://gateway.example")
                .is_err()
        );
    }
}
