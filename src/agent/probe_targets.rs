//! Probe targets: the addresses that `http` and `tcp` probes of a host may connect to.
//!
//! The agent connects on behalf of the author of a manifest, from the host's network and often as root. Loopback and the
//! host's own addresses are always allowed. Metadata services of clouds give out credentials of the host: they are refused
//! unless the host policy lists their address. The rule `probes` bounds all other addresses; without it they are allowed.
//!
//! The check uses the resolved addresses, and the probe connects to these: a second lookup cannot give others.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use serde::Deserialize;

/// Addresses of metadata services: AWS, GCP, Azure and others; AWS ECS; Alibaba Cloud; AWS over IPv6.
const METADATA: [IpAddr; 4] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// A text that names no probe target.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is not an address, a network (10.0.0.0/8) or a host name, with an optional port (db.example:5432, [fd00::/8]:80)"
)]
pub struct InvalidTarget(String);

/// An entry of the rule `probes`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ProbeTarget {
    host: TargetHost,
    /// `None`: every port.
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TargetHost {
    /// An address and the length of its network.
    Network(IpAddr, u32),
    /// A host name in lower case. All of its addresses are allowed.
    Name(String),
}

impl TryFrom<String> for ProbeTarget {
    type Error = InvalidTarget;

    fn try_from(text: String) -> Result<ProbeTarget, InvalidTarget> {
        parse(&text).ok_or(InvalidTarget(text))
    }
}

fn parse(text: &str) -> Option<ProbeTarget> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        // An IPv6 address without brackets has no port.
        None if text.matches(':').count() > 1 => (text, None),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = match port {
        Some(port) => Some(port.parse().ok().filter(|port| *port > 0)?),
        None => None,
    };
    let host = match network(host) {
        Some((address, length)) => TargetHost::Network(address, length),
        None => TargetHost::Name(name(host)?),
    };
    Some(ProbeTarget { host, port })
}

fn network(text: &str) -> Option<(IpAddr, u32)> {
    let (address, length) =
        text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
    let address: IpAddr = address.parse().ok()?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let length = length.map_or(Some(longest), |length| length.parse().ok())?;
    (length <= longest).then_some((address, length))
}

/// A name whose last label has a letter: others are addresses with a mistake.
fn name(text: &str) -> Option<String> {
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let last = text.rsplit('.').next()?;
    let is_name = text.split('.').all(is_label) && last.bytes().any(|byte| byte.is_ascii_alphabetic());
    is_name.then(|| text.to_ascii_lowercase())
}

impl ProbeTarget {
    fn contains(&self, address: IpAddr, port: u16) -> bool {
        let in_network = match (&self.host, address) {
            (TargetHost::Network(IpAddr::V4(own), length), IpAddr::V4(other)) => {
                let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
                own.to_bits() & mask == other.to_bits() & mask
            }
            (TargetHost::Network(IpAddr::V6(own), length), IpAddr::V6(other)) => {
                let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
                own.to_bits() & mask == other.to_bits() & mask
            }
            (TargetHost::Network(..) | TargetHost::Name(_), _) => false,
        };
        in_network && self.port.is_none_or(|own| own == port)
    }

    fn names(&self, host: &str, port: u16) -> bool {
        let is_name = matches!(&self.host, TargetHost::Name(own) if *own == host.to_ascii_lowercase());
        is_name && self.port.is_none_or(|own| own == port)
    }
}

/// Whether a probe of `host` may connect to this address of it. `listed`: the rule `probes`; `None`: it is unset.
pub fn is_allowed(listed: Option<&[ProbeTarget]>, host: &str, address: SocketAddr) -> bool {
    // An IPv4 address may be written as an IPv6 address.
    let (ip, port) = (address.ip().to_canonical(), address.port());
    let in_list = || listed.is_some_and(|all| all.iter().any(|one| one.contains(ip, port)));
    let by_name = || listed.is_some_and(|all| all.iter().any(|one| one.names(host, port)));
    if METADATA.contains(&ip) {
        return in_list();
    }
    listed.is_none() || ip.is_loopback() || ip.is_unspecified() || in_list() || by_name() || is_own(ip)
}

/// Whether this host has the address. The kernel uses an own address as the source of a connection to it; no packet is sent.
fn is_own(address: IpAddr) -> bool {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    source.is_ok_and(|source| source.ip() == address)
}

/// The host in `HOST:PORT`.
pub fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(listed: Option<&[&str]>, host: &str, address: &str) -> bool {
        let parsed = listed.map(|texts| {
            texts.iter().map(|text| parse(text).unwrap_or_else(|| panic!("{text}"))).collect::<Vec<_>>()
        });
        is_allowed(parsed.as_deref(), host, address.parse().expect("an address"))
    }

    #[test]
    fn loopback_is_always_allowed_and_others_only_if_they_are_listed() {
        for own in ["127.0.0.1:80", "127.9.9.9:1", "[::1]:80", "[::ffff:127.0.0.1]:80", "0.0.0.0:80"] {
            assert!(allows(Some(&[]), "x", own), "{own}");
        }
        assert!(allows(None, "x", "192.0.2.1:80"), "without the rule");
        assert!(!allows(Some(&[]), "x", "192.0.2.1:80"));
        for (entry, address, is_listed) in [
            ("192.0.2.1", "192.0.2.1:80", true),
            ("192.0.2.1", "[::ffff:192.0.2.1]:80", true),
            ("192.0.2.1:80", "192.0.2.1:80", true),
            ("192.0.2.1:81", "192.0.2.1:80", false),
            ("192.0.2.0/24", "192.0.2.200:9", true),
            ("192.0.2.0/24:9", "192.0.2.200:9", true),
            ("192.0.2.0/24", "192.0.3.1:9", false),
            ("0.0.0.0/0", "192.0.3.1:9", true),
            ("0.0.0.0/0", "[2001:db8::1]:9", false),
            ("2001:db8::/32", "[2001:db8::1]:9", true),
            ("[2001:db8::/32]:9", "[2001:db8::1]:9", true),
            ("[2001:db8::/32]:8", "[2001:db8::1]:9", false),
            ("[2001:db8::1]", "[2001:db8::1]:9", true),
            ("::/0", "[2001:db9::1]:9", true),
        ] {
            assert_eq!(allows(Some(&[entry]), "x", address), is_listed, "{entry} {address}");
        }
    }

    #[test]
    fn a_name_is_compared_with_the_text_of_the_probe() {
        assert!(allows(Some(&["DB.example:5432"]), "db.Example", "192.0.2.1:5432"));
        assert!(!allows(Some(&["db.example:5432"]), "db.example", "192.0.2.1:22"));
        assert!(!allows(Some(&["db.example"]), "evil.example", "192.0.2.1:5432"));
        assert_eq!((host_of("db.example:80"), host_of("[::1]:80")), ("db.example", "::1"));
    }

    #[test]
    fn a_metadata_service_needs_its_address_in_the_list() {
        for address in
            ["169.254.169.254:80", "[::ffff:169.254.169.254]:80", "[fd00:ec2::254]:80", "100.100.100.200:80"]
        {
            assert!(!allows(None, "x", address), "{address}");
            assert!(!allows(Some(&["meta.example"]), "meta.example", address), "{address}");
        }
        assert!(allows(Some(&["169.254.169.254:80"]), "x", "169.254.169.254:80"));
        assert!(allows(None, "x", "169.254.20.10:53"), "another link-local address");
    }

    #[test]
    fn only_addresses_of_this_host_are_its_own() {
        assert!(is_own(Ipv4Addr::LOCALHOST.into()));
        assert!(!is_own(Ipv4Addr::new(192, 0, 2, 1).into()));
        assert!(!is_own("2001:db8::1".parse().expect("an address")));
    }

    #[test]
    fn a_mistake_is_not_a_target() {
        for text in [
            "",
            ":80",
            "a b",
            "10.0.0",
            "10.0.0.0/33",
            "x/8",
            "a:0",
            "a:b",
            "[::1",
            "[::1]80",
            "::1/129",
            "a..b",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
