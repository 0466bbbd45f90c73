//! Repository addresses and their credentials: one form for git, one for display.
//!
//! Credentials of a URL reach git through its environment, which only this user can read, never through its
//! arguments, which every user can. Every displayed text masks them.

use std::net::IpAddr;

/// Query parameters that hold credentials, by a part of their name.
const SECRETS: [&str; 6] = ["token", "password", "passwd", "secret", "apikey", "api_key"];

/// A parsed repository address.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    /// Without credentials.
    pub url: String,
    /// The URL without its path, which the credentials are for; http and https only.
    pub site: String,
    pub user: Option<String>,
    pub password: Option<String>,
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Address").field("url", &masked(&self.url)).finish_non_exhaustive()
    }
}

/// Reason why an address cannot be used, without its secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GitAddressError {
    #[error("contains a credential as a parameter, which git cannot send")]
    SecretParameter,
    #[error("has a '/', '?' or '#' in its credentials, which would end the host")]
    EndedHost,
    #[error("has an '@' after its host: a part of the password, or of the path")]
    AmbiguousPassword,
    #[error("contains a control character in its credentials")]
    ControlCharacter,
}

pub fn parse(address: &str) -> Result<Address, GitAddressError> {
    let whole = |url: &str| Address { url: url.to_owned(), site: String::new(), user: None, password: None };
    let Some((scheme, rest)) = address.split_once("://") else { return Ok(whole(address)) };
    let web = matches!(scheme, "http" | "https");
    if web && has_secret_parameter(rest) {
        return Err(GitAddressError::SecretParameter);
    }
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let Some((userinfo, host)) = authority.rsplit_once('@') else {
        let port = authority.rsplit_once(':').map(|(_, port)| port).filter(|_| !authority.ends_with(']'));
        // The host would be parsed as a part of the user name.
        if port.is_some_and(|port| port.bytes().any(|byte| !byte.is_ascii_digit())) && path.contains('@') {
            return Err(GitAddressError::EndedHost);
        }
        return Ok(Address { site: site(web, scheme, authority), ..whole(address) });
    };
    let (user, password) = match userinfo.split_once(':') {
        Some((user, password)) => (user, Some(decoded(password))),
        None => (userinfo, None),
    };
    let has_control = |text: &str| text.chars().any(char::is_control);
    // It is ambiguous which of the two ends the password.
    if password.is_some() && path.contains('@') {
        return Err(GitAddressError::AmbiguousPassword);
    }
    if !web {
        // ssh takes no password from an address, and shows it in its arguments.
        return Ok(whole(&format!("{scheme}://{user}@{host}{path}")));
    }
    let user = decoded(user);
    if has_control(&user) || password.as_deref().is_some_and(has_control) {
        return Err(GitAddressError::ControlCharacter);
    }
    Ok(Address {
        url: format!("{scheme}://{host}{path}"),
        site: site(web, scheme, host),
        user: Some(user),
        password,
    })
}

fn site(web: bool, scheme: &str, host: &str) -> String {
    if web { format!("{scheme}://{host}") } else { String::new() }
}

/// Scheme and host of an address that is fetched over the network without encryption; `None`: it is encrypted, or
/// local. Only a literal loopback address and `localhost` are local.
pub fn plain(address: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = address.split_once("://")?;
    if !matches!(scheme, "http" | "git") {
        return None;
    }
    let host = host_of(rest);
    (!is_this_machine(host)).then_some((scheme, host))
}

/// Whether an address with a host is this machine, so that no proxy is involved.
pub fn is_loopback(address: &str) -> bool {
    address.split_once("://").is_some_and(|(_, rest)| is_this_machine(host_of(rest)))
}

/// The host of an address after its scheme, without user, port and brackets.
fn host_of(rest: &str) -> &str {
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(host, _)| host),
    }
}

fn is_this_machine(host: &str) -> bool {
    let is_loopback = |address: IpAddr| address.to_canonical().is_loopback();
    host == "localhost" || host.parse().is_ok_and(is_loopback)
}

/// Decodes `%40` and the like; an invalid sequence stays as it is.
fn decoded(text: &str) -> String {
    let bytes = percent_encoding::percent_decode_str(text);
    bytes.decode_utf8().map_or_else(|_| text.to_owned(), |decoded| decoded.into_owned())
}

/// One address per source, the same for every user. In ssh a user name is part of the address and not a secret.
pub fn without_credentials(url: &str) -> String {
    match parse(url) {
        Ok(address) => masked(&address.url),
        Err(_) => masked(url),
    }
}

/// Masks the credentials of every URL in a text.
pub fn masked(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let scheme = rest[..at].rsplit(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        let (before, after) = rest.split_at(at + 3);
        masked.push_str(before);
        let (shown, more) = without_user(scheme, after);
        masked.push_str(&shown);
        rest = more;
    }
    masked.push_str(rest);
    without_parameters(&masked)
}

/// The displayable start of a URL after its scheme, and the rest of the text.
fn without_user<'a>(scheme: &str, after: &'a str) -> (String, &'a str) {
    // A user name alone is a secret in https (tokens), but not in ssh.
    let secret = |user: &str| user.contains(':') || scheme.starts_with("http");
    let token = &after[..after.find(char::is_whitespace).unwrap_or(after.len())];
    let end = after.find(|c: char| matches!(c, '/' | '?' | '#' | '\'' | '"') || c.is_whitespace());
    let (authority, more) = after.split_at(end.unwrap_or(after.len()));
    // A password may contain characters that end a host: then the last @ ends it, unless another URL starts before.
    let token = &token[..token.find("://").unwrap_or(token.len())];
    let is_cut = !authority.contains('@') && authority.contains(':') && token.len() > authority.len();
    if is_cut && let Some((_, host)) = token.rsplit_once('@') {
        let begin = token.len() - host.len();
        let length = host.find(['/', '?', '#', '\'', '"']).unwrap_or(host.len());
        return (format!("***@{}", &host[..length]), &after[begin + length..]);
    }
    match authority.rsplit_once('@') {
        Some((user, host)) if secret(user) => {
            // Another @ may be the real end.
            match token.rsplit_once('@') {
                Some((_, last)) if user.contains(':') && token.len() - last.len() > authority.len() => {
                    let begin = token.len() - last.len();
                    let length = last.find(['/', '?', '#', '\'', '"']).unwrap_or(last.len());
                    (format!("***@{}", &last[..length]), &after[begin + length..])
                }
                Some(_) | None => (format!("***@{host}"), more),
            }
        }
        Some(_) | None => (authority.to_owned(), more),
    }
}

/// Masks the values of query parameters that hold credentials.
fn without_parameters(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['?', '&', ';']) {
        let (before, after) = rest.split_at(at + 1);
        out.push_str(before);
        let (name, value) = match after.split_once('=') {
            Some((name, value)) if is_secret(name) => (name, value),
            Some(_) | None => {
                rest = after;
                continue;
            }
        };
        let end = value.find(|c: char| matches!(c, '&' | ';' | '#' | '\'' | '"') || c.is_whitespace());
        out.push_str(name);
        out.push_str("=***");
        rest = &value[end.unwrap_or(value.len())..];
    }
    out + rest
}

fn is_secret(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let name = name.to_ascii_lowercase();
    name.chars().all(plain) && SECRETS.iter().any(|secret| name.contains(secret))
}

fn has_secret_parameter(url: &str) -> bool {
    without_parameters(url) != url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_url_shows_a_credential() {
        for (text, shown) in [
            (
                "fatal: unable to access 'https://u:p@h/x.git/': no",
                "fatal: unable to access 'https://***@h/x.git/': no",
            ),
            ("https://token@h", "https://***@h"),
            ("ssh://git@h/x and http://a:b@c/d", "ssh://git@h/x and http://***@c/d"),
            ("ssh://git:p@ss@h/x", "ssh://***@h/x"),
            ("git@h:x", "git@h:x"),
            ("https://h/a@b", "https://h/a@b"),
            ("https://u:pa/s3cret@h/x", "https://***@h/x"),
            ("https://u:p@s3cret/s3cret@h/x", "https://***@h/x"),
            ("https://u:p?s3cret#s3cret'\"s3cret@h/x'", "https://***@h/x'"),
            ("https://u:pä%2Fs3crét@h/x", "https://***@h/x"),
            ("https://h/x?access_token=s3cret&a=b", "https://h/x?access_token=***&a=b"),
            ("'https://h/x?a=b&private_token=s3cret'", "'https://h/x?a=b&private_token=***'"),
            ("https://h/x?a=b;OAuth-Token=s3cret end", "https://h/x?a=b;OAuth-Token=*** end"),
            ("https://h:8443/x and https://h:8443/y", "https://h:8443/x and https://h:8443/y"),
            ("what? a & b = c", "what? a & b = c"),
        ] {
            assert_eq!(masked(text), shown);
        }
    }

    #[test]
    fn credentials_are_taken_out_of_an_address() {
        for (text, url, user, password) in [
            ("https://h/x", "https://h/x", None, None),
            ("https://u:p@h:8443/x.git", "https://h:8443/x.git", Some("u"), Some("p")),
            ("https://u:p%40s%2Fs@h/x", "https://h/x", Some("u"), Some("p@s/s")),
            ("https://u:p@ss%@h/x", "https://h/x", Some("u"), Some("p@ss%")),
            ("https://u:a:b@h/x", "https://h/x", Some("u"), Some("a:b")),
            ("https://u:pÄ%C3%A4@[::1]:1/x", "https://[::1]:1/x", Some("u"), Some("pÄä")),
            ("https://token@h/x", "https://h/x", Some("token"), None),
            ("ssh://git:p@h/x", "ssh://git@h/x", None, None),
            ("git@h:x", "git@h:x", None, None),
            ("/srv/a@b", "/srv/a@b", None, None),
        ] {
            let address = parse(text).expect(text);
            assert_eq!(
                (&*address.url, address.user.as_deref(), address.password.as_deref()),
                (url, user, password)
            );
            assert!(!format!("{address:?}").contains("p@s"), "{address:?}");
        }
        for bad in [
            "https://u:pa/ss@h/x",
            "https://u:p@s/s@h/x",
            "https://h/x?access_token=t",
            "https://u:a%0Ab@h/x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn plain_connections_beyond_loopback_are_found() {
        for (address, host) in [
            ("http://h/x", Some(("http", "h"))),
            ("http://u:p@h:8080/x", Some(("http", "h"))),
            ("http://127.0.0.1@h/x", Some(("http", "h"))),
            ("http://127.0.0.1.h/x", Some(("http", "127.0.0.1.h"))),
            ("http://127.1/x", Some(("http", "127.1"))),
            ("http://[::2]:80/x", Some(("http", "::2"))),
            ("git://h", Some(("git", "h"))),
            ("http://localhost:80/x", None),
            ("http://u:p@127.0.0.9/x", None),
            ("git://[::1]/x", None),
            ("https://h/x", None),
            ("ssh://h/x", None),
            ("git@h:x", None),
            ("/srv/http", None),
        ] {
            assert_eq!(plain(address), host, "{address}");
        }
    }
}
