//! Keys of hosts, processes and instances, on the wire and in output.
//!
//! An instance is `cloud:ip:namespace:name`, or `@AGENT_ID:namespace:name` for a host that is known only by
//! its agent. An IPv6 address and an agent id may contain `:`; a namespace or a name may not. So a key is
//! read from the right, and it reads back as it was written.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Maximum length of a namespace or name: a result key must fit into a database column of the platform.
const MAX_NAME: usize = 128;
/// Maximum length of a GSE 2.0 agent id.
const MAX_AGENT_ID: usize = 64;

/// Reason why a text is not a key. Completes the sentence "…cannot be used: ".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyError {
    Empty,
    Character(char),
    TooLong(usize),
    Ip(String),
    Cloud(String),
    Form(String, &'static str),
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyError::Empty => write!(f, "the text is empty"),
            KeyError::Character(c) => {
                write!(f, "the text contains {c:?}, which a result key cannot carry")
            }
            KeyError::TooLong(most) => write!(f, "the text is longer than {most} characters"),
            KeyError::Ip(text) => write!(f, "{text:?} is not an IP address"),
            KeyError::Cloud(text) => {
                write!(f, "{text:?} is not a cloud id (a whole number from 0)")
            }
            KeyError::Form(text, form) => write!(f, "{text:?} is not a key of the form {form}"),
        }
    }
}

impl std::error::Error for KeyError {}

/// A namespace, or the name of a process. Cheap to clone: a fleet repeats few names many times.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        if let Some(bad) =
            text.chars().find(|c| matches!(c, ':' | '/') || c.is_whitespace() || c.is_control())
        {
            return Err(KeyError::Character(bad));
        }
        if text.chars().count() > MAX_NAME {
            return Err(KeyError::TooLong(MAX_NAME));
        }
        Ok(Name(text.into()))
    }
}

/// The id of a GSE 2.0 agent.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(Arc<str>);

impl AgentId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for AgentId {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        if let Some(bad) = text.chars().find(|c| c.is_whitespace() || c.is_control()) {
            return Err(KeyError::Character(bad));
        }
        if text.chars().count() > MAX_AGENT_ID {
            return Err(KeyError::TooLong(MAX_AGENT_ID));
        }
        Ok(AgentId(text.into()))
    }
}

/// Identity of a host: area and address or, without a known address, its agent id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostKey {
    Address { cloud: u64, ip: IpAddr },
    Agent(AgentId),
}

impl fmt::Display for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostKey::Address { cloud, ip } => write!(f, "{cloud}:{ip}"),
            HostKey::Agent(id) => write!(f, "@{id}"),
        }
    }
}

impl FromStr for HostKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        if let Some(id) = text.strip_prefix('@') {
            return id.parse().map(HostKey::Agent);
        }
        let form = || KeyError::Form(text.to_owned(), "CLOUD:IP or @AGENT_ID");
        let (cloud, ip) = text.split_once(':').ok_or_else(form)?;
        // `+5` parses as a number, but is not a canonical key.
        if !cloud.bytes().all(|b| b.is_ascii_digit()) {
            return Err(KeyError::Cloud(cloud.to_owned()));
        }
        let cloud = cloud.parse().map_err(|_| KeyError::Cloud(cloud.to_owned()))?;
        let ip = ip.parse().map_err(|_| KeyError::Ip(ip.to_owned()))?;
        Ok(HostKey::Address { cloud, ip })
    }
}

/// A host with all settings of its manifest entry. The key alone identifies the host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host {
    pub key: HostKey,
    /// GSE 1.0 calls need it in addition to the cloud id; unset is not sent.
    pub supplier: Option<u64>,
    /// Set for a host known by its address *and* its agent; a host keyed by its agent has it in the key.
    pub agent_id: Option<AgentId>,
}

impl Host {
    /// The agent id, from the key or the field.
    pub fn agent(&self) -> Option<&AgentId> {
        match &self.key {
            HostKey::Agent(id) => Some(id),
            HostKey::Address { .. } => self.agent_id.as_ref(),
        }
    }
}

/// One declared process, on any host: `namespace/name`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessKey {
    pub namespace: Name,
    pub name: Name,
}

impl ProcessKey {
    /// Reads `NS/NAME`, or `NAME` within `home`.
    pub fn within(home: &Name, text: &str) -> Result<Self, KeyError> {
        match text.split_once('/') {
            Some((namespace, name)) => Ok(ProcessKey { namespace: namespace.parse()?, name: name.parse()? }),
            None => Ok(ProcessKey { namespace: home.clone(), name: text.parse()? }),
        }
    }
}

impl fmt::Display for ProcessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for ProcessKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let (namespace, name) =
            text.split_once('/').ok_or_else(|| KeyError::Form(text.to_owned(), "NAMESPACE/NAME"))?;
        Ok(ProcessKey { namespace: namespace.parse()?, name: name.parse()? })
    }
}

/// One process on one host.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceKey {
    pub host: HostKey,
    pub namespace: Name,
    pub name: Name,
}

impl InstanceKey {
    pub fn process(&self) -> ProcessKey {
        ProcessKey { namespace: self.namespace.clone(), name: self.name.clone() }
    }
}

impl fmt::Display for InstanceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.host, self.namespace, self.name)
    }
}

impl FromStr for InstanceKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let form = || KeyError::Form(text.to_owned(), "CLOUD:IP:NAMESPACE:NAME or @AGENT_ID:NAMESPACE:NAME");
        let (rest, name) = text.rsplit_once(':').ok_or_else(form)?;
        let (host, namespace) = rest.rsplit_once(':').ok_or_else(form)?;
        Ok(InstanceKey { host: host.parse()?, namespace: namespace.parse()?, name: name.parse()? })
    }
}

/// Keys have one text form, for serde, `Debug` and `Display`.
macro_rules! as_text {
    ($($key:ty),*) => {$(
        impl fmt::Debug for $key {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
        impl Serialize for $key {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $key {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}
as_text!(Name, AgentId, HostKey, ProcessKey, InstanceKey);

macro_rules! show_text {
    ($($key:ty),*) => {$(
        impl fmt::Display for $key {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}
show_text!(Name, AgentId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_keys_read_back_as_written() {
        for text in [
            "0:127.0.0.1:web:hello",
            "12:fe80::1:web:hello",
            "0:2001:db8::7:web:a.b-c_d",
            "@0200000000525400:web:hello",
            "@0:10.0.0.1:web:hello", // clients use "cloud:ip" as the id of an agent without one
            "@fe80::1:web:hello",
        ] {
            let key: InstanceKey = text.parse().expect(text);
            assert_eq!(key.to_string(), text);
            assert_eq!((key.namespace.as_str(), key.host.to_string().is_empty()), ("web", false));
        }
    }

    #[test]
    fn an_address_has_one_spelling() {
        let a: HostKey = "0:2001:DB8:0:0::7".parse().unwrap();
        assert_eq!(a.to_string(), "0:2001:db8::7");
    }

    #[test]
    fn bad_keys_say_what_is_wrong() {
        let error = |text: &str| text.parse::<InstanceKey>().unwrap_err().to_string();
        assert_eq!(error("0:10.0.0.300:web:a"), "\"10.0.0.300\" is not an IP address");
        assert_eq!(error("x:10.0.0.1:web:a"), "\"x\" is not a cloud id (a whole number from 0)");
        assert_eq!(error("0:10.0.0.1::a"), "the text is empty");
        assert!(error("web:a").contains("CLOUD:IP:NAMESPACE:NAME"));
        assert_eq!("a/b".parse::<Name>(), Err(KeyError::Character('/')));
        assert_eq!("a:b".parse::<Name>(), Err(KeyError::Character(':')));
        assert_eq!("a".repeat(129).parse::<Name>(), Err(KeyError::TooLong(128)));
        assert_eq!("a".repeat(65).parse::<AgentId>(), Err(KeyError::TooLong(64)));
    }

    #[test]
    fn a_bare_name_stays_in_its_namespace() {
        let home: Name = "web".parse().unwrap();
        assert_eq!(ProcessKey::within(&home, "db").unwrap().to_string(), "web/db");
        assert_eq!(ProcessKey::within(&home, "data/db").unwrap().to_string(), "data/db");
    }
}
