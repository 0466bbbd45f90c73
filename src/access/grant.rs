//! Grants: one pure function decides whether an app or a person may do something.
//!
//! A [`Grant`] is an entry in the apps file or in the users file. An [`AccessRequest`] names what a call needs: a role, and every
//! namespace, host, user and owner that it concerns. [`authorize`] compares both. A refusal names the missing grant. The
//! route table declares the role of each call; handlers add the parts that a request names, and filter lists with
//! [`Grant::may_see`].
//!
//! A pattern is compared exactly, except that `*` matches any characters.

use std::fmt;
use std::str::FromStr;

use crate::contract::AccessInfo;
use crate::escape::visible;
use crate::model::{HostKey, InstanceKey, glob};

/// Highest role of a caller. Each role includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum AccessRole {
    /// Lists, status, logs, and reads of the state store.
    Read,
    /// Also operations, registrations, holds, pauses and leases.
    Operate,
    /// Also the reset of leases, and with every namespace, host and owner join tokens and certificates of agents.
    #[default]
    Admin,
}

impl AccessRole {
    pub const ALL: [AccessRole; 3] = [AccessRole::Read, AccessRole::Operate, AccessRole::Admin];

    pub fn word(self) -> &'static str {
        match self {
            AccessRole::Read => "read",
            AccessRole::Operate => "operate",
            AccessRole::Admin => "admin",
        }
    }
}

/// The word of a role that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a role must be read, operate or admin")]
pub struct UnknownRole;

impl FromStr for AccessRole {
    type Err = UnknownRole;

    fn from_str(word: &str) -> Result<AccessRole, UnknownRole> {
        AccessRole::ALL.into_iter().find(|role| role.word() == word).ok_or(UnknownRole)
    }
}

/// Holder of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Principal {
    /// A program, by its code in the apps file.
    App(String),
    /// A person, by the name in the users file.
    Person(String),
}

impl Principal {
    /// Prefix of the codes of people: an app and a person of the same name are two callers.
    const PERSON_PREFIX: &str = "person:";

    /// The code of an app, or the name of a person.
    pub fn name(&self) -> &str {
        match self {
            Principal::App(name) | Principal::Person(name) => name,
        }
    }

    /// The kind of caller, in audit entries.
    pub fn kind(&self) -> &'static str {
        match self {
            Principal::App(_) => "app",
            Principal::Person(_) => "person",
        }
    }

    /// The unique name among all callers, in stored records and in logs.
    pub fn code(&self) -> String {
        match self {
            Principal::App(code) => code.clone(),
            Principal::Person(name) => format!("{}{name}", Principal::PERSON_PREFIX),
        }
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Principal::App(code) => write!(f, "app {}", visible(code)),
            Principal::Person(name) => write!(f, "person {}", visible(name)),
        }
    }
}

/// Actions that an app or a person may take, and their objects. A list has patterns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub principal: Principal,
    pub role: AccessRole,
    pub namespaces: Vec<String>,
    pub hosts: Vec<String>,
    /// Accounts that a process may run as. `None`: any.
    pub users: Option<Vec<String>>,
    /// Owners of processes and of state. `None`: processes of any owner; state of any owner only with every namespace.
    pub owners: Option<Vec<String>>,
}

/// Requirements of a call. `None`: the call does not concern this.
#[derive(Clone, Copy, Debug, Default)]
pub struct AccessRequest<'a> {
    pub role: Option<AccessRole>,
    /// `*`: every namespace.
    pub namespace: Option<&'a str>,
    pub host: Option<&'a HostKey>,
    /// The account of a process; empty: the agent's own.
    pub user: Option<&'a str>,
    /// The owner of a process.
    pub owner: Option<&'a str>,
    /// The owner of entries in the state store.
    pub state_owner: Option<&'a str>,
}

/// The grant that a caller lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{principal} lacks {grant}")]
pub struct MissingGrant {
    pub principal: Principal,
    pub grant: GrantPart,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrantPart {
    Role(AccessRole),
    Namespace(String),
    Host(String),
    User(String),
    Owner(String),
}

impl fmt::Display for GrantPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GrantPart::Role(role) => write!(f, "role {}", role.word()),
            GrantPart::Namespace(name) if name == "*" => write!(f, "namespace * (all namespaces)"),
            GrantPart::Namespace(name) => write!(f, "namespace {}", visible(name)),
            GrantPart::Host(host) if host == "*" => write!(f, "host * (all hosts)"),
            GrantPart::Host(host) => write!(f, "host {}", visible(host)),
            GrantPart::User(name) if name.is_empty() => {
                write!(f, "user * (a process without a user runs as the agent's account)")
            }
            GrantPart::User(name) => write!(f, "user {}", visible(name)),
            GrantPart::Owner(name) if name == "*" => write!(f, "owner * (all owners)"),
            GrantPart::Owner(name) => write!(f, "owner {}", visible(name)),
        }
    }
}

/// Decides a request. The first missing grant is the error.
pub fn authorize(grant: &Grant, request: &AccessRequest<'_>) -> Result<(), MissingGrant> {
    let AccessRequest { role, namespace, host, user, owner, state_owner } = *request;
    let lacks =
        |grant_part: GrantPart| Err(MissingGrant { principal: grant.principal.clone(), grant: grant_part });
    if let Some(role) = role.filter(|role| *role > grant.role) {
        return lacks(GrantPart::Role(role));
    }
    if let Some(name) = namespace.filter(|name| !matches(&grant.namespaces, name)) {
        return lacks(GrantPart::Namespace(name.to_owned()));
    }
    if let Some(host) = host.filter(|_| !is_all(&grant.hosts)).map(HostKey::to_string)
        && !matches(&grant.hosts, &host)
    {
        return lacks(GrantPart::Host(host));
    }
    if let (Some(name), Some(users)) = (user, &grant.users)
        && !matches(users, name)
    {
        return lacks(GrantPart::User(name.to_owned()));
    }
    if let (Some(name), Some(owners)) = (owner, &grant.owners)
        && !matches(owners, name)
    {
        return lacks(GrantPart::Owner(name.to_owned()));
    }
    let has_state = |name: &str| match &grant.owners {
        Some(owners) => matches(owners, name),
        None => grant.has_state(),
    };
    match state_owner.filter(|name| !has_state(name)) {
        Some(name) => lacks(GrantPart::Owner(name.to_owned())),
        None => Ok(()),
    }
}

fn matches(patterns: &[String], text: &str) -> bool {
    patterns.iter().any(|pattern| glob(pattern, text))
}

fn is_all(patterns: &[String]) -> bool {
    patterns.iter().any(|pattern| pattern == "*")
}

impl Grant {
    /// Everything, as an app without restrictions has it.
    pub fn everything(app: impl Into<String>) -> Grant {
        let all = || vec!["*".to_owned()];
        let (role, namespaces, hosts) = (AccessRole::Admin, all(), all());
        let principal = Principal::App(app.into());
        Grant { principal, role, namespaces, hosts, users: None, owners: None }
    }

    /// Whether no namespace, host or owner is out of reach, so that lists need no filter.
    pub fn sees_everything(&self) -> bool {
        is_all(&self.namespaces) && is_all(&self.hosts) && !self.is_bound_to_owners()
    }

    pub fn is_bound_to_owners(&self) -> bool {
        self.owners.as_deref().is_some_and(|owners| !is_all(owners))
    }

    /// Whether the state of at least one owner is in reach.
    pub fn has_state(&self) -> bool {
        match &self.owners {
            Some(owners) => !owners.is_empty(),
            None => is_all(&self.namespaces),
        }
    }

    pub fn is_bound_to_hosts(&self) -> bool {
        !is_all(&self.hosts)
    }

    pub fn check_role(&self, role: AccessRole) -> Result<(), MissingGrant> {
        authorize(self, &AccessRequest { role: Some(role), ..AccessRequest::default() })
    }

    pub fn check_namespace(&self, namespace: &str) -> Result<(), MissingGrant> {
        authorize(self, &AccessRequest { namespace: Some(namespace), ..AccessRequest::default() })
    }

    /// Every namespace, host and owner.
    pub fn check_everything(&self) -> Result<(), MissingGrant> {
        let lacks = |part: GrantPart| Err(MissingGrant { principal: self.principal.clone(), grant: part });
        match () {
            () if !is_all(&self.namespaces) => lacks(GrantPart::Namespace("*".to_owned())),
            () if self.is_bound_to_hosts() => lacks(GrantPart::Host("*".to_owned())),
            () if self.is_bound_to_owners() => lacks(GrantPart::Owner("*".to_owned())),
            () => Ok(()),
        }
    }

    /// The key of an owner's secrets: with `operate` a caller can run commands with them; with `read` it needs a list of
    /// owners that has this one.
    pub fn check_secret_key(&self, owner: &str) -> Result<(), MissingGrant> {
        authorize(
            self,
            &AccessRequest { owner: Some(owner).filter(|name| !name.is_empty()), ..Default::default() },
        )?;
        match self.is_bound_to_owners() && !owner.is_empty() {
            true => Ok(()),
            false => self.check_role(AccessRole::Operate),
        }
    }

    pub fn check_host(&self, host: &HostKey) -> Result<(), MissingGrant> {
        authorize(self, &AccessRequest { host: Some(host), ..AccessRequest::default() })
    }

    /// An instance with its owner, where one is known.
    pub fn check_instance(&self, key: &InstanceKey, owner: Option<&str>) -> Result<(), MissingGrant> {
        let (namespace, host) = (Some(key.namespace.as_str()), Some(&key.host));
        authorize(self, &AccessRequest { namespace, host, owner, ..AccessRequest::default() })
    }

    /// Whether a list for this caller contains an instance.
    pub fn may_see(&self, key: &InstanceKey, owner: Option<&str>) -> bool {
        self.check_instance(key, owner).is_ok()
    }
}

/// The grant of a gateway's answer, for checks before the first change. A word of a newer gateway counts as `read`.
impl From<AccessInfo> for Grant {
    fn from(info: AccessInfo) -> Grant {
        let AccessInfo { app, person, role, namespaces, hosts, users, owners, .. } = info;
        let principal = person.map_or(Principal::App(app), Principal::Person);
        Grant { principal, role: role.parse().unwrap_or(AccessRole::Read), namespaces, hosts, users, owners }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn bound() -> Grant {
        Grant {
            principal: Principal::App("ci-web".to_owned()),
            role: AccessRole::Operate,
            namespaces: list(&["web", "shop-*"]),
            hosts: list(&["0:10.0.0.1"]),
            users: Some(list(&["www"])),
            owners: Some(list(&["team"])),
        }
    }

    #[test]
    fn patterns_are_compared_exactly_and_refusals_name_the_missing_grant() {
        let (grant, host) = (bound(), |text: &str| text.parse::<HostKey>().expect("a host"));
        for (namespace, is_own) in [
            ("web", true),
            ("shop-a", true),
            ("web2", false),
            ("web-a", false),
            ("Web", false),
            ("we", false),
        ] {
            assert_eq!(grant.check_namespace(namespace).is_ok(), is_own, "{namespace}");
        }
        for (text, is_own) in [("0:10.0.0.1", true), ("0:10.0.0.12", false), ("1:10.0.0.1", false)] {
            assert_eq!(grant.check_host(&host(text)).is_ok(), is_own, "{text}");
        }
        let owner = |owner| authorize(&grant, &AccessRequest { owner: Some(owner), ..Default::default() });
        assert!(owner("team").is_ok() && owner("team-b").is_err() && owner("Team").is_err());
        let user = |user| authorize(&grant, &AccessRequest { user: Some(user), ..Default::default() });
        assert!(user("www").is_ok() && user("www-data").is_err());
        let shown = |result: Result<(), MissingGrant>| result.expect_err("refused").to_string();
        assert_eq!(shown(grant.check_namespace("web2")), "app ci-web lacks namespace web2");
        assert_eq!(shown(grant.check_namespace("*")), "app ci-web lacks namespace * (all namespaces)");
        assert_eq!(shown(grant.check_role(AccessRole::Admin)), "app ci-web lacks role admin");
        assert!(shown(user("")).starts_with("app ci-web lacks user * (a process without a user"));
        assert!(grant.check_role(AccessRole::Read).is_ok() && grant.check_role(AccessRole::Operate).is_ok());
    }

    #[test]
    fn an_app_without_owners_has_state_only_with_every_namespace() {
        let state = |grant: &Grant| {
            authorize(grant, &AccessRequest { state_owner: Some("team"), ..Default::default() }).is_ok()
        };
        let process = |grant: &Grant| {
            authorize(grant, &AccessRequest { owner: Some("team"), ..Default::default() }).is_ok()
        };
        let scoped = Grant { owners: None, ..bound() };
        assert!(process(&scoped) && !state(&scoped));
        let everywhere = Grant::everything("all");
        assert!(process(&everywhere) && state(&everywhere) && everywhere.sees_everything());
        assert!(state(&bound()) && !bound().sees_everything());
    }
}
