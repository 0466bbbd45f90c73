//! HTTP client setup: the only function that builds a client, for targets, state, agents and notifications.
//!
//! A client never follows a redirect: the request and its credentials are meant for the address that the user
//! configured. It refuses plain http to an address that is not loopback unless the user allows that.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::error::root_cause;

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

/// Why no request is sent to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressError {
    Invalid(String),
    /// Plain http to an address that is not loopback.
    Plain(String),
}

impl std::fmt::Display for AddressError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AddressError::Invalid(why) => f.write_str(why),
            AddressError::Plain(to) => write!(f, "refusing plain http to {to}"),
        }
    }
}

/// Maximum time to establish a connection.
const CONNECT: Duration = Duration::from_secs(5);

impl ClientConfig {
    /// Checks an address before any request: `Err` says why no request is sent to it.
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
    pub fn client(&self, url: &str) -> Result<reqwest::Client, String> {
        self.check(url).map_err(|error| error.to_string())?;
        // An error means that a provider is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .redirect(reqwest::redirect::Policy::none());
        builder = match (&self.ca_file, self.ca_only) {
            (Some(file), true) => builder.tls_certs_only(certificates(file)?),
            (Some(file), false) => builder.tls_certs_merge(certificates(file)?),
            (None, true) => return Err("ca_only needs a ca_file: no certificate would be trusted".to_owned()),
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
            builder = builder
                .proxy(through.map_err(|error| format!("the proxy cannot be used: {}", root_cause(&error)))?);
        }
        builder = builder.default_headers(self.headers()?);
        builder.build().map_err(|error| match &self.client_cert {
            // The client certificate is the only part not validated above.
            Some(file) => client_certificate_error(file, &root_cause(&error)),
            None => format!("cannot set up HTTP: {}", root_cause(&error)),
        })
    }

    fn headers(&self) -> Result<HeaderMap, String> {
        let mut all = HeaderMap::new();
        for (name, value) in &self.headers {
            let wrong = || format!("the header {name:?} cannot be sent");
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
            let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
            // The value may be a secret, so the message omits it.
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

/// Why a redirect is not followed; `None`: the response is not a redirect. The message shows only the host of the
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

fn identity(file: &Path) -> Result<reqwest::Identity, String> {
    let pem = std::fs::read(file).map_err(|error| client_certificate_error(file, &error.to_string()))?;
    reqwest::Identity::from_pem(&pem).map_err(|_| {
        client_certificate_error(file, "the file must contain a certificate and its key, both in PEM")
    })
}

fn client_certificate_error(file: &Path, why: &str) -> String {
    format!("cannot use the client certificate {}: {why}", file.display())
}

fn certificates(file: &Path) -> Result<Vec<reqwest::Certificate>, String> {
    let failed = |why: String| format!("cannot read the certificate {}: {why}", file.display());
    let pem = std::fs::read(file).map_err(|error| failed(error.to_string()))?;
    let all = reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| failed(root_cause(&error)))?;
    match all.is_empty() {
        true => Err(format!("{} contains no certificate", file.display())),
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
