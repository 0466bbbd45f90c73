//! Accounts: the user, groups, home and shell that the commands of a spec run with.

use std::path::PathBuf;

use crate::model::Spec;

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
    /// Whom a spec's commands run as.
    pub fn of(spec: &Spec) -> Result<Account, String> {
        match &spec.identity.user {
            Some(name) => Account::named(name),
            None => {
                let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten();
                Account::named(&me.ok_or("this agent's own user has no name")?.name)
            }
        }
    }

    pub fn named(name: &str) -> Result<Account, String> {
        use nix::unistd::{User, getgrouplist};
        let user = User::from_name(name).map_err(|error| format!("cannot look user {name:?} up: {error}"))?;
        let user = user.ok_or_else(|| format!("there is no user {name:?} on this host"))?;
        let c_name = std::ffi::CString::new(name).map_err(|_| format!("{name:?} is no user's name"))?;
        let groups = getgrouplist(&c_name, user.gid)
            .map_err(|error| format!("cannot look the groups of {name:?} up: {error}"))?;
        let me = nix::unistd::geteuid();
        if !me.is_root() && user.uid != me {
            return Err(format!("only root can run a process as {name:?}, and this agent is not root"));
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
