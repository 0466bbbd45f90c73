//! Trusted proxies: the header in which a proxy with single sign-on names the person it authenticated.
//!
//! The header counts only from a peer inside the configured address ranges. From any other peer it is ignored, and a
//! warning is logged. Two such headers in one request are refused: a proxy that adds its header to the client's would
//! let the client choose a name.

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName};
use tracing::warn;

/// Minimum interval between log lines about ignored headers.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// A range of addresses: CIDR, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    /// Without the bits after the prefix.
    network: u128,
    prefix: u32,
    is_v4: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressRangeError {
    #[error("not an address range such as 10.0.0.7/32")]
    Form,
    #[error("a range of all addresses would trust every peer")]
    Everything,
}

impl FromStr for AddressRange {
    type Err = AddressRangeError;

    fn from_str(text: &str) -> Result<AddressRange, AddressRangeError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.trim().parse().map_err(|_| AddressRangeError::Form)?;
        let (bits, width) = address_bits(address);
        let prefix = match prefix {
            None => width,
            Some(text) if text.starts_with('+') => return Err(AddressRangeError::Form),
            Some(text) => text.parse().ok().filter(|bits| *bits <= width).ok_or(AddressRangeError::Form)?,
        };
        if prefix == 0 {
            return Err(AddressRangeError::Everything);
        }
        let network = bits >> (width - prefix) << (width - prefix);
        Ok(AddressRange { network, prefix, is_v4: address.is_ipv4() })
    }
}

/// The bits of an address and their number.
fn address_bits(address: IpAddr) -> (u128, u32) {
    match address {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()), 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    }
}

impl AddressRange {
    /// An IPv4 address in IPv6 form counts as IPv4.
    pub fn contains(self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        let (bits, width) = address_bits(address);
        address.is_ipv4() == self.is_v4
            && bits >> (width - self.prefix) == self.network >> (width - self.prefix)
    }

    pub fn has_loopback(self) -> bool {
        self.contains(IpAddr::from([127, 0, 0, 1]))
            || self.contains(IpAddr::from(std::net::Ipv6Addr::LOCALHOST))
    }
}

/// Proxies that authenticate people, and the header with a person's name.
#[derive(Debug)]
pub struct TrustedProxy {
    ranges: Vec<AddressRange>,
    header: HeaderName,
    logged: Mutex<Option<Instant>>,
}

/// A request of a trusted proxy with more than one user header, or with one that is not text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the user header of the proxy is not one name")]
pub struct AmbiguousUser;

impl TrustedProxy {
    pub fn new(ranges: Vec<AddressRange>, header: HeaderName) -> TrustedProxy {
        TrustedProxy { ranges, header, logged: Mutex::new(None) }
    }

    pub fn is_trusted(&self, peer: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(peer))
    }

    /// The name in the header of a trusted peer. `None`: the proxy authenticated no person.
    pub fn user<'a>(&self, peer: IpAddr, headers: &'a HeaderMap) -> Option<Result<&'a str, AmbiguousUser>> {
        let mut values = headers.get_all(&self.header).iter();
        let first = values.next()?;
        if !self.is_trusted(peer) {
            self.log_ignored(peer);
            return None;
        }
        match (first.to_str(), values.next()) {
            (Ok(name), None) => Some(name.trim()).filter(|name| !name.is_empty()).map(Ok),
            _ => Some(Err(AmbiguousUser)),
        }
    }

    /// Whether the client's connection to a trusted proxy uses TLS, as the proxy reports it.
    pub fn is_https(&self, peer: IpAddr, headers: &HeaderMap) -> bool {
        let scheme = headers.get("x-forwarded-proto").and_then(|value| value.to_str().ok());
        self.is_trusted(peer) && scheme.is_some_and(|scheme| scheme.trim().eq_ignore_ascii_case("https"))
    }

    fn log_ignored(&self, peer: IpAddr) {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
            *logged = Some(Instant::now());
            warn!(target: "audit", %peer, header = %self.header, "user header ignored: the peer is not a trusted proxy");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> AddressRange {
        text.parse().expect("a range")
    }

    #[test]
    fn a_range_contains_its_addresses_and_no_others() {
        for (text, inside, outside) in [
            ("10.1.2.3", "10.1.2.3", "10.1.2.4"),
            ("10.1.2.3/24", "10.1.2.255", "10.1.3.0"),
            ("10.0.0.0/8", "::ffff:10.9.9.9", "11.0.0.0"),
            ("128.0.0.0/1", "255.255.255.255", "127.255.255.255"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("::1", "::1", "127.0.0.1"),
        ] {
            let (range, ip) = (range(text), |text: &str| text.parse::<IpAddr>().expect("an address"));
            assert!(range.contains(ip(inside)) && !range.contains(ip(outside)), "{text}");
        }
        for wrong in
            ["", "10.0.0.0/33", "10.0.0/8", "10.0.0.0/", "10.0.0.0/+8", "host", "::/129", "1.2.3.4/8/8"]
        {
            assert_eq!(wrong.parse::<AddressRange>(), Err(AddressRangeError::Form), "{wrong}");
        }
        for all in ["0.0.0.0/0", "::/0"] {
            assert_eq!(all.parse::<AddressRange>(), Err(AddressRangeError::Everything), "{all}");
        }
    }

    #[test]
    fn the_header_counts_only_from_a_trusted_peer_and_only_once() {
        let proxy = TrustedProxy::new(vec![range("10.0.0.7")], HeaderName::from_static("x-user"));
        let headers = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append("x-user", value.parse().expect("a value"));
            }
            headers
        };
        let user = |peer: &str, values: &[&str]| {
            let headers = headers(values);
            proxy.user(peer.parse().expect("an address"), &headers).map(|user| user.map(str::to_owned))
        };
        assert_eq!(user("10.0.0.7", &["ann"]), Some(Ok("ann".to_owned())));
        assert_eq!(user("10.0.0.8", &["ann"]), None);
        assert_eq!((user("10.0.0.7", &[]), user("10.0.0.7", &[" "])), (None, None));
        assert_eq!(user("10.0.0.7", &["ann", "bob"]), Some(Err(AmbiguousUser)));
        assert_eq!(user("10.0.0.7", &["", "bob"]), Some(Err(AmbiguousUser)));
    }
}
