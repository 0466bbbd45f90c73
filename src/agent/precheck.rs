//! Offline check of an agent's folder: lists instances whose next launch the host policy or the file rules would refuse.
//!
//! An upgrade or a new policy restarts nothing; an instance that it refuses fails at its next launch. This check finds such
//! instances before that. It evaluates owners and mode bits, not access control lists.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::account::Account;
use super::policy::HostPolicy;
use super::state::{InstanceState, load_readable};
use crate::error_chain::chain;
use crate::model::{ConfigFile, EnvValue, InstanceKey, Spec};
use crate::store::{Embedded, Error, keys};

/// An instance whose next launch would be refused, and the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedInstance {
    pub instance: InstanceKey,
    pub reasons: Vec<String>,
}

/// The instances of an agent's folder that would be refused. The agent may be running.
pub async fn refused_instances(folder: &Path, policy: &HostPolicy) -> Result<Vec<RefusedInstance>, Error> {
    let file = folder.join("agent.db");
    if !file.is_file() {
        return Err(Error::Missing { file: file.display().to_string() });
    }
    let store = Embedded::open(&file)?;
    let mut refused = Vec::new();
    for (name, state) in load_readable::<InstanceState>(&store, keys::INSTANCE_STATE_PREFIX).await? {
        let (Ok(instance), Some(given)) = (name.parse::<InstanceKey>(), &state.given) else { continue };
        let reasons = reasons(&instance, &given.spec, policy);
        if !reasons.is_empty() {
            refused.push(RefusedInstance { instance, reasons });
        }
    }
    refused.sort_by(|one, other| one.instance.cmp(&other.instance));
    Ok(refused)
}

/// The number of processes that an agent with this folder left running, and how many of them it supervised.
pub async fn left_running(folder: &Path) -> Result<(usize, usize), Error> {
    let store = Embedded::open(&folder.join("agent.db"))?;
    let states = load_readable::<InstanceState>(&store, keys::INSTANCE_STATE_PREFIX).await?;
    let running = states.iter().filter(|(_, state)| state.run.is_some());
    Ok((running.clone().count(), running.filter(|(_, state)| state.hosted).count()))
}

fn reasons(key: &InstanceKey, spec: &Spec, policy: &HostPolicy) -> Vec<String> {
    let account = match Account::of(spec) {
        Ok(account) => account,
        Err(error) => return vec![chain(&error)],
    };
    let mut reasons: Vec<String> = policy.refusals(key, spec).iter().map(|refusal| chain(refusal)).collect();
    let mut check = |field: &str, path: &str, access: PathAccess| {
        if !allows(&account, Path::new(path), access) {
            let what = match access {
                PathAccess::Enter => "enter",
                PathAccess::Read => "read",
                PathAccess::Write => "write to",
            };
            reasons.push(format!("{field}: user {:?} cannot {what} {path}", account.name()));
        }
    };
    check("setup_path", &spec.identity.setup_path, PathAccess::Enter);
    // A pid file is replaced by a rename, so the folder must be writable.
    if let Some(folder) = Path::new(&spec.identity.pid_path).parent() {
        check("pid_path", &folder.display().to_string(), PathAccess::Write);
    }
    if let Some(path) = &spec.identity.log_path {
        check("log_path", path, PathAccess::Write);
    }
    // An unreadable configmap file does not prevent the launch; it is reported as missing.
    let stated = |entry: &&ConfigFile| entry.md5.is_some();
    for path in spec.configmap.iter().filter(stated).filter_map(|entry| entry.path.as_deref()) {
        if Path::new(path).exists() && !policy.may_root_open(Path::new(path)) {
            check("configmap", path, PathAccess::Read);
        }
    }
    if let Some(path) = spec.env_file.as_deref().filter(|path| !policy.may_root_open(Path::new(path))) {
        check("env_file", path, PathAccess::Read);
    }
    for (name, value) in &spec.env {
        if let EnvValue::File(file) = value
            && !policy.may_root_open(Path::new(file))
        {
            check(&format!("env {name}"), file, PathAccess::Read);
        }
    }
    reasons
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathAccess {
    Enter,
    Read,
    Write,
}

const READ: u32 = 4;
const WRITE: u32 = 2;
const ENTER: u32 = 1;

/// Whether an account may access the path. For a write, a missing path may be created.
fn allows(account: &Account, path: &Path, access: PathAccess) -> bool {
    if account.uid() == 0 {
        return true;
    }
    let granted = |path: &Path, bits: u32| {
        let Ok(meta) = std::fs::metadata(path) else { return false };
        let shift = match () {
            () if meta.uid() == account.uid() => 6,
            () if account.groups().contains(&meta.gid()) => 3,
            () => 0,
        };
        (meta.mode() >> shift) & bits == bits
    };
    let existing = match access {
        PathAccess::Enter | PathAccess::Read => Some(path),
        PathAccess::Write => path.ancestors().find(|part| part.exists()),
    };
    let Some(existing) = existing else { return false };
    let bits = match (access, existing.is_dir()) {
        (PathAccess::Enter, _) => ENTER,
        (PathAccess::Read, _) => READ,
        (PathAccess::Write, true) => WRITE | ENTER,
        (PathAccess::Write, false) => WRITE,
    };
    granted(existing, bits) && existing.ancestors().skip(1).all(|folder| granted(folder, ENTER))
}
