//! Outer policy: rules of the control host, outside of the repository. No manifest can widen it.

use std::path::PathBuf;
use std::sync::Arc;

use super::{Allow, Budgets, InstanceKey, Spec, glob};

/// Rules of the control host for every plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlHostPolicy {
    pub name: String,
    pub file: String,
    /// The only owner that may be planned for.
    pub owner: Option<String>,
    pub allow: Allow,
    /// Patterns of `setup_path`. `None` allows everything, an empty list nothing.
    pub paths: Option<Vec<String>>,
    pub budgets: Budgets,
    pub signatures: Option<SignatureRule>,
    /// Another policy that holds as well.
    pub and: Option<Arc<ControlHostPolicy>>,
}

/// Signatures that a plan needs before it is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignatureRule {
    /// File of ssh keys and their principals.
    pub allowed_signers: PathBuf,
    /// Number of persons, at least 1.
    pub required: u32,
    /// Patterns of the targets and owners whose plans need them. `None`: all.
    pub targets: Option<Vec<String>>,
    pub owners: Option<Vec<String>>,
}

impl SignatureRule {
    pub fn applies(&self, target: &str, owner: &str) -> bool {
        let names = |patterns: &Option<Vec<String>>, text: &str| {
            patterns.as_ref().is_none_or(|patterns| patterns.iter().any(|pattern| glob(pattern, text)))
        };
        names(&self.targets, target) && names(&self.owners, owner)
    }
}

impl ControlHostPolicy {
    /// This policy, and those that hold as well.
    pub fn all(&self) -> impl Iterator<Item = &ControlHostPolicy> {
        std::iter::successors(Some(self), |policy| policy.and.as_deref())
    }

    /// Values of an instance that the policies do not allow. `spec`: of its manifest; an orphan has none.
    pub fn violation(&self, key: &InstanceKey, spec: Option<&Spec>) -> Option<String> {
        self.all().find_map(|policy| policy.own_violation(key, spec))
    }

    fn own_violation(&self, key: &InstanceKey, spec: Option<&Spec>) -> Option<String> {
        let outside = |allowed: &Option<Vec<String>>, text: &str| {
            allowed.as_ref().is_some_and(|patterns| !patterns.iter().any(|pattern| glob(pattern, text)))
        };
        let what = if outside(&self.allow.namespaces, key.namespace.as_str()) {
            format!("namespace {:?}", key.namespace.as_str())
        } else if outside(&self.allow.hosts, &key.host.to_string()) {
            format!("host {}", key.host)
        } else {
            self.refused_part(spec?, outside)?
        };
        Some(format!("policy {:?} ({}) does not allow {what}", self.name, self.file))
    }

    fn refused_part(
        &self,
        spec: &Spec,
        outside: impl Fn(&Option<Vec<String>>, &str) -> bool,
    ) -> Option<String> {
        let user = spec.identity.user.as_deref().unwrap_or_default();
        if outside(&self.allow.users, user) {
            return Some(match user {
                "" => "a process without identity.user".to_owned(),
                user => format!("user {user:?}"),
            });
        }
        let path = spec.identity.setup_path.as_str();
        // A pattern is compared with text: `..` would lead out of what it names.
        let leads_out = self.paths.is_some() && path.split('/').any(|part| part == "..");
        (leads_out || outside(&self.paths, path)).then(|| format!("setup_path {path:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_rule_applies_by_target_and_owner() {
        let list = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        let rule = |targets, owners| SignatureRule { targets, owners, ..SignatureRule::default() };
        assert!(rule(None, None).applies("prod", "shop"));
        assert!(rule(list(&["prod*"]), None).applies("prod-eu", "shop"));
        assert!(!rule(list(&["prod*"]), None).applies("test", "shop"));
        assert!(!rule(list(&["prod"]), list(&["web"])).applies("prod", "shop"));
        assert!(!rule(list(&[]), None).applies("prod", "shop"));
    }

    #[test]
    fn a_policy_names_the_first_part_that_it_does_not_allow() {
        let list = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        let policy = ControlHostPolicy {
            name: "prod".to_owned(),
            file: "/etc/abide/policy.yaml".to_owned(),
            allow: Allow { namespaces: list(&["web"]), users: list(&["www"]), hosts: list(&["0:10.0.*"]) },
            paths: list(&["/opt/web/*"]),
            ..ControlHostPolicy::default()
        };
        let spec = |user: Option<&str>, path: &str| {
            let mut spec = Spec::default();
            (spec.identity.user, spec.identity.setup_path) = (user.map(str::to_owned), path.to_owned());
            spec
        };
        let (good, key) = (spec(Some("www"), "/opt/web/api"), |text: &str| text.parse().expect("a key"));
        for (text, spec, says) in [
            ("0:10.0.0.1:web:a", &good, None),
            ("0:10.0.0.1:web2:a", &good, Some("namespace \"web2\"")),
            ("0:10.1.0.1:web:a", &good, Some("host 0:10.1.0.1")),
            ("0:10.0.0.1:web:a", &spec(Some("root"), "/opt/web/api"), Some("user \"root\"")),
            ("0:10.0.0.1:web:a", &spec(None, "/opt/web/api"), Some("a process without identity.user")),
            ("0:10.0.0.1:web:a", &spec(Some("www"), "/opt/db"), Some("setup_path \"/opt/db\"")),
            ("0:10.0.0.1:web:a", &spec(Some("www"), "/opt/web/../db"), Some("setup_path \"/opt/web/../db\"")),
        ] {
            let expected =
                says.map(|what| format!("policy \"prod\" (/etc/abide/policy.yaml) does not allow {what}"));
            assert_eq!(policy.violation(&key(text), Some(spec)), expected);
        }
        assert_eq!(policy.violation(&key("0:10.0.0.1:web:a"), None), None, "an orphan");
        // A policy without rules of its own does not widen the other one.
        let both = ControlHostPolicy { and: Some(Arc::new(policy)), ..ControlHostPolicy::default() };
        assert_eq!(both.all().count(), 2);
        assert!(
            both.violation(&key("0:10.1.0.1:web:a"), None).is_some_and(|why| why.contains("host 0:10.1.0.1"))
        );
    }
}
