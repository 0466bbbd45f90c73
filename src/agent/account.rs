//! Accounts: user, groups, home and shell for the processes and commands of a spec.

use std::path::PathBuf;
use std::sync::LazyLock;

use super::account_cache::{AccountCache, file_stamps};
use crate::model::Spec;

/// Reason why a process cannot run as a user.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AccountError {
    #[error("the agent's own uid has no user name")]
    NoName,
    #[error("cannot look up user {name:?}: {source}")]
    LookUp { name: String, source: nix::Error },
    #[error("cannot look up user {name:?}: no answer yet; try again later")]
    TimedOut { name: String },
    #[error("user {name:?} does not exist on this host")]
    Unknown { name: String },
    #[error("{name:?} is not a valid user name")]
    InvalidName { name: String },
    #[error("cannot look up the groups of user {name:?}: {source}")]
    Groups { name: String, source: nix::Error },
    #[error("cannot run a process as user {name:?}: the agent does not run as root")]
    NotRoot { name: String },
}

/// The user that a process runs as.
#[derive(Clone, Debug)]
pub struct Account {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
    pub(super) name: String,
    pub(super) home: PathBuf,
    pub(super) shell: PathBuf,
}

/// The ids of an account that decide which files it may use.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileCredentials {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

impl Account {
    /// The account of a spec; without `user`, the agent's own.
    pub fn of(spec: &Spec) -> Result<Account, AccountError> {
        match &spec.identity.user {
            Some(name) => Account::named(name),
            None => {
                let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten();
                Account::named(&me.ok_or(AccountError::NoName)?.name)
            }
        }
    }

    /// Looks up an account by its name, within the waits of [`AccountCache`].
    pub fn named(name: &str) -> Result<Account, AccountError> {
        static CACHE: LazyLock<AccountCache> = LazyLock::new(AccountCache::default);
        CACHE.get(name, file_stamps(), Account::look_up)
    }

    pub(super) fn look_up(name: &str) -> Result<Account, AccountError> {
        use nix::unistd::{User, getgrouplist};
        let named = || name.to_owned();
        let user = User::from_name(name).map_err(|source| AccountError::LookUp { name: named(), source })?;
        let user = user.ok_or_else(|| AccountError::Unknown { name: named() })?;
        let c_name = std::ffi::CString::new(name).map_err(|_| AccountError::InvalidName { name: named() })?;
        let groups = getgrouplist(&c_name, user.gid)
            .map_err(|source| AccountError::Groups { name: named(), source })?;
        let me = nix::unistd::geteuid();
        if !me.is_root() && user.uid != me {
            return Err(AccountError::NotRoot { name: named() });
        }
        Ok(Account {
            uid: user.uid.as_raw(),
            gid: user.gid.as_raw(),
            groups: groups.iter().map(|group| group.as_raw()).collect(),
            name: user.name,
            home: user.dir,
            shell: user.shell,
        })
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// The ids that decide which files the account may use.
    pub fn file_credentials(&self) -> FileCredentials {
        FileCredentials { uid: self.uid, gid: self.gid, groups: self.groups.clone() }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The agent runs as this user itself.
    pub fn is_own(&self) -> bool {
        self.uid == nix::unistd::geteuid().as_raw()
    }
}
