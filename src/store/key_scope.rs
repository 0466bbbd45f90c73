//! Scope of controller keys: the owner, instance or namespace that a key belongs to.
//!
//! A gateway decides with it which app may use a key. A key of no known form has no scope, and is only for apps without
//! restrictions. An owner may contain `/`, so it is parsed from both ends of the key.

use super::keys;
use crate::model::InstanceKey;

/// Scope of a controller key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyScope<'a> {
    Owner(&'a str),
    /// A ledger entry or a protection: its value names an owner as well.
    Owned(InstanceKey),
    Hold(InstanceKey),
    /// A pause of one namespace.
    Namespace(&'a str),
    /// The pause of all namespaces. Every controller reads it.
    AllNamespaces,
}

impl KeyScope<'_> {
    /// The scope of a key.
    pub fn of_key(key: &str) -> Option<KeyScope<'_>> {
        let (family, rest) = family(key)?;
        let owner = |owner: &'_ str| !owner.is_empty();
        match family {
            "lease" => {
                let (role, name) = keys::lease_name_parts(rest);
                (matches!(role, "writer" | "leader") && owner(name)).then_some(KeyScope::Owner(name))
            }
            "pin" | "controller" => Some(KeyScope::Owner(rest)).filter(|_| owner(rest)),
            "alert" | "left" | "source" | "history" | "rollout" => {
                let (name, _) = rest.rsplit_once('/')?;
                Some(KeyScope::Owner(name)).filter(|_| owner(name))
            }
            "journal" | "snap" => {
                let (name, _) = rest.rsplit_once('/')?.0.rsplit_once('/')?;
                Some(KeyScope::Owner(name)).filter(|_| owner(name))
            }
            "ledger" => Some(KeyScope::Owned(rest.split_once('/')?.1.parse().ok()?)),
            "protect" => Some(KeyScope::Owned(rest.parse().ok()?)),
            "hold" => Some(KeyScope::Hold(rest.parse().ok()?)),
            "pause" if rest == "*" => Some(KeyScope::AllNamespaces),
            "pause" => Some(KeyScope::Namespace(rest)).filter(|_| !rest.is_empty()),
            _ => None,
        }
    }

    /// The owner of all keys with this prefix, if the prefix names one.
    pub fn owner_of_prefix(prefix: &str) -> Option<&str> {
        let (family, rest) = family(prefix)?;
        let name = match family {
            "alert" | "journal" | "history" | "left" | "source" | "rollout" => rest.strip_suffix('/')?,
            "snap" => ["/rev/", "/list/", "/text/"].iter().find_map(|part| rest.strip_suffix(part))?,
            _ => return None,
        };
        Some(name).filter(|name| !name.is_empty())
    }
}

/// The first part of a key and the rest, without the prefix of a target: `at/TARGET/…` and `lease/at/TARGET/…`.
fn family(key: &str) -> Option<(&str, &str)> {
    let below_target = |rest: &'_ str| rest.split_once('/').map(|(_, rest)| rest.len());
    let (family, rest) = match key.strip_prefix("at/") {
        Some(rest) => rest.split_once('/')?.1.split_once('/')?,
        None => key.split_once('/')?,
    };
    if family != "lease" {
        return Some((family, rest));
    }
    match rest.strip_prefix("at/") {
        Some(below) => Some((family, &below[below.len() - below_target(below)?..])),
        None => Some((family, rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance() -> InstanceKey {
        "0:10.0.0.7:web:api".parse().expect("an instance")
    }

    #[test]
    fn every_controller_key_has_the_scope_of_its_parts() {
        let (instance, name) = (instance(), "team/ops");
        let of_owner = [
            keys::lease(&keys::writer_lease_name(name)),
            keys::lease(&keys::leader_lease_name(name)),
            keys::journal(&keys::journal_run_prefix(name, "r1"), 7),
            keys::pin(name),
            keys::controller(name),
            keys::suspended(name, &instance),
            keys::alert(name, "oncall", "unhealthy", "web/api"),
            keys::active_revision(name),
            keys::applied_revision(name),
            keys::last_commit(name),
            format!("{}{}", keys::snapshots_prefix(name), "r1"),
            format!("{}{}", keys::snapshot_lists_prefix(name), "s1"),
            format!("{}{}", keys::snapshot_texts_prefix(name), "s1"),
            keys::inventory(name, "cmdb"),
            keys::inventory_chunk(name, "cmdb", "ab12", 7),
            keys::history(name, "1763424000000-42-3"),
        ];
        for key in of_owner {
            let shared = match key.strip_prefix("lease/") {
                Some(rest) => format!("lease/{}{rest}", keys::target_prefix("gse")),
                None => format!("{}{key}", keys::target_prefix("gse")),
            };
            for key in [key, shared] {
                assert_eq!(KeyScope::of_key(&key), Some(KeyScope::Owner(name)), "{key}");
            }
        }
        let ledger = keys::ledger("gse", &instance);
        for key in [ledger, keys::protection(&instance)] {
            assert_eq!(KeyScope::of_key(&key), Some(KeyScope::Owned(instance.clone())), "{key}");
        }
        assert_eq!(KeyScope::of_key(&keys::hold(&instance)), Some(KeyScope::Hold(instance.clone())));
        let pause = keys::pause(Some(&instance.namespace));
        assert_eq!(KeyScope::of_key(&pause), Some(KeyScope::Namespace("web")));
        assert_eq!(KeyScope::of_key(&keys::pause(None)), Some(KeyScope::AllNamespaces));
    }

    #[test]
    fn a_key_of_another_form_has_no_scope() {
        for key in [
            "",
            "x",
            "journal",
            "journal/",
            "journal/a",
            "journal/a/b",
            "journal//r/1",
            "pin/",
            "left/a",
            "snap/a/rev",
            "history/a",
            "hold/x",
            "ledger/gse",
            "ledger/gse/x",
            "lease/a",
            "lease/other/a",
            "lease/at/x",
            "at/",
            "at/x",
            "at/x/pin",
            "expect/a/b",
            "reg/web/api/0:10.0.0.7",
            "pause/",
        ] {
            assert_eq!(KeyScope::of_key(key), None, "{key}");
        }
    }

    #[test]
    fn a_prefix_names_its_owner() {
        for prefix in [
            keys::journal_prefix("team/ops"),
            keys::owner_history_prefix("team/ops"),
            keys::suspended_prefix("team/ops"),
            keys::snapshots_prefix("team/ops"),
            keys::snapshot_texts_prefix("team/ops"),
            format!("at/gse/{}", keys::journal_prefix("team/ops")),
        ] {
            assert_eq!(KeyScope::owner_of_prefix(&prefix), Some("team/ops"), "{prefix}");
        }
        for prefix in ["journal/", "hold/", "pause/", "snap/", "lease/", "source/", "ledger/gse/", "pin/"] {
            assert_eq!(KeyScope::owner_of_prefix(prefix), None, "{prefix}");
        }
    }
}
