//! Instance selection by namespace, label, host and name. An instance outside the selection is neither changed nor pruned.

use std::collections::{BTreeMap, BTreeSet};

use super::{HostKey, InstanceKey, Name, ProcessKey, Selector};

/// The default selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Empty: all.
    pub namespaces: Vec<Name>,
    pub labels: Option<Selector>,
    /// Patterns of host keys, or of addresses only; empty: all.
    pub hosts: Vec<String>,
    /// Names of declared processes or of instances; empty: all.
    pub include: Vec<ProcessKey>,
    pub exclude: Vec<ProcessKey>,
}

impl Selection {
    /// The namespaces that the selection names, by themselves or in names of processes.
    pub fn named_namespaces(&self) -> BTreeSet<Name> {
        self.namespaces.iter().chain(self.include.iter().map(|process| &process.namespace)).cloned().collect()
    }

    pub fn is_everything(&self) -> bool {
        *self == Selection::default()
    }

    /// `declared`: the name that the instance was declared under, if it is declared.
    pub fn selects(
        &self,
        key: &InstanceKey,
        declared: Option<&ProcessKey>,
        labels: &BTreeMap<String, String>,
    ) -> bool {
        if self.is_everything() {
            return true;
        }
        let named = |names: &[ProcessKey]| {
            names.iter().any(|name| {
                (name.namespace == key.namespace && name.name == key.name) || declared == Some(name)
            })
        };
        (self.namespaces.is_empty() || self.namespaces.contains(&key.namespace))
            && (self.include.is_empty() || named(&self.include))
            && !named(&self.exclude)
            && self.labels.as_ref().is_none_or(|selector| selector.matches(labels))
            && self.selects_host(&key.host)
    }

    /// Whether a host is selected; only the host patterns apply.
    pub fn selects_host(&self, host: &HostKey) -> bool {
        self.hosts.is_empty() || self.hosts.iter().any(|pattern| on_host(pattern, host))
    }
}

/// `0:10.0.*`, or without the area: `10.0.*`.
fn on_host(pattern: &str, host: &HostKey) -> bool {
    let host = host.to_string();
    let address = host.split_once(':').map_or(host.as_str(), |(_, address)| address);
    // The key has the canonical spelling of an address; a pattern may be in upper case.
    let lower = pattern.to_ascii_lowercase();
    glob(pattern, &host) || glob(&lower, &host) || glob(&lower, address)
}

/// Whether a text matches a pattern in which `*` matches any text.
pub fn glob(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else {
        return false;
    };
    let Some(last) = pieces.next_back() else {
        return rest.is_empty();
    };
    for piece in pieces {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_as_people_expect() {
        for (pattern, text, expected) in [
            ("web", "web", true),
            ("web", "web2", false),
            ("web-*", "web-a", true),
            ("web-*", "web", false),
            ("0:10.0.*", "0:10.0.3.4", true),
            ("*", "", true),
            ("a*b*c", "axxbxxc", true),
            ("a*b*c", "acb", false),
            ("*aa", "a", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn each_way_of_selecting_narrows() {
        let key: InstanceKey = "0:10.0.3.4:web:api_2".parse().unwrap();
        let declared: ProcessKey = "web/api".parse().unwrap();
        let labels = BTreeMap::from([("tier".to_owned(), "front".to_owned())]);
        let selects = |selection: &Selection| selection.selects(&key, Some(&declared), &labels);
        let all = Selection::default();
        assert!(selects(&all));
        assert!(selects(&Selection { namespaces: vec!["web".parse().unwrap()], ..all.clone() }));
        assert!(!selects(&Selection { namespaces: vec!["db".parse().unwrap()], ..all.clone() }));
        for name in ["web/api", "web/api_2"] {
            assert!(selects(&Selection { include: vec![name.parse().unwrap()], ..all.clone() }));
            assert!(!selects(&Selection { exclude: vec![name.parse().unwrap()], ..all.clone() }));
        }
        assert!(!selects(&Selection { include: vec!["web/api_1".parse().unwrap()], ..all.clone() }));
        for (pattern, expected) in [("0:10.0.*", true), ("10.0.3.4", true), ("10.1.*", false)] {
            assert_eq!(
                selects(&Selection { hosts: vec![pattern.into()], ..all.clone() }),
                expected,
                "{pattern}"
            );
        }
        assert!(!selects(&Selection { labels: Some("tier=back".parse().unwrap()), ..all }));
    }
}
