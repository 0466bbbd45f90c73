//! Offline check of an agent's folder: lists instances whose next launch the host policy or the file rules would refuse.
//!
//! An upgrade or a new policy restarts nothing; an instance that it refuses fails at its next launch. This check finds such
//! instances before that. Existing files are opened as the launch opens them, with the rights of the spec's user; nothing is
//! created. For missing files, owners and mode bits of their folders are evaluated, not access control lists.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use super::account::Account;
use super::policy::HostPolicy;
use super::state::{InstanceState, load_readable};
use super::user_files::{Rights, RootOpenPolicy, UserFileError};
use crate::error_chain::chain;
use crate::model::{ConfigFile, EnvValue, InstanceKey, Spec, StartMode};
use crate::permissions::own_uid;
use crate::store::{Embedded, Error, KeySource, keys};

/// An instance whose next launch would be refused, and the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedInstance {
    pub instance: InstanceKey,
    pub reasons: Vec<String>,
}

/// The instances of an agent's folder that would be refused. The agent may be running.
pub async fn refused_instances(
    folder: &Path,
    keys: &KeySource,
    policy: &HostPolicy,
) -> Result<Vec<RefusedInstance>, Error> {
    let file = folder.join("agent.db");
    if !file.is_file() {
        return Err(Error::Missing { file: file.display().to_string() });
    }
    let store = Embedded::open_as_found(&file, keys)?;
    let mut refused = Vec::new();
    for (name, state) in load_readable::<InstanceState>(&store, keys::INSTANCE_STATE_PREFIX).await? {
        let (Ok(instance), Some(given)) = (name.parse::<InstanceKey>(), &state.given) else { continue };
        let reasons = reasons(&instance, &given.spec, policy).await;
        if !reasons.is_empty() {
            refused.push(RefusedInstance { instance, reasons });
        }
    }
    refused.sort_by(|one, other| one.instance.cmp(&other.instance));
    Ok(refused)
}

/// The number of processes that an agent with this folder left running and that still run, and how many of them it
/// supervised.
pub async fn left_running(folder: &Path, keys: &KeySource) -> Result<(usize, usize), Error> {
    let store = Embedded::open_as_found(&folder.join("agent.db"), keys)?;
    let states = load_readable::<InstanceState>(&store, keys::INSTANCE_STATE_PREFIX).await?;
    let is_alive = |state: &InstanceState| state.run.as_ref().is_some_and(|run| run.identity.is_current());
    let running = states.iter().filter(|(_, state)| is_alive(state));
    Ok((running.clone().count(), running.filter(|(_, state)| state.hosted).count()))
}

async fn reasons(key: &InstanceKey, spec: &Spec, policy: &HostPolicy) -> Vec<String> {
    let account = match Account::of(spec) {
        Ok(account) => account,
        Err(error) => return vec![chain(&error)],
    };
    let mut reasons: Vec<String> = policy.refusals(key, spec).iter().map(|refusal| chain(refusal)).collect();
    let is_exempt = |path: &str| policy.may_root_open(Path::new(path));
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
    if let Some(folder) =
        Path::new(&spec.identity.pid_path).parent().filter(|_| !is_exempt(&spec.identity.pid_path))
    {
        check("pid_path", &folder.display().to_string(), PathAccess::Write);
    }
    if let Some(path) = spec.identity.log_path.as_ref().filter(|path| !is_exempt(path)) {
        check("log_path", path, PathAccess::Write);
    }
    // An unreadable configmap file does not prevent the launch; it is reported as missing.
    let stated = |entry: &&ConfigFile| entry.md5.is_some();
    for path in spec.configmap.iter().filter(stated).filter_map(|entry| entry.path.as_deref()) {
        if Path::new(path).exists() && !is_exempt(path) {
            check("configmap", path, PathAccess::Read);
        }
    }
    // Only root can open files as another user: another caller evaluates mode bits.
    let can_open = own_uid() == 0 || account.is_own();
    if !can_open {
        let files = spec.env.iter().filter_map(|(name, value)| match value {
            EnvValue::File(file) => Some((format!("env {name}"), file)),
            EnvValue::Text(_) | EnvValue::Exec(_) | EnvValue::Secret(_) | EnvValue::Digest(_) => None,
        });
        let file = spec.env_file.iter().map(|path| ("env_file".to_owned(), path));
        for (field, path) in files.chain(file).filter(|(_, path)| !is_exempt(path)) {
            check(&field, path, PathAccess::Read);
        }
    }
    if can_open {
        let policy = policy.clone();
        let may_root_open: RootOpenPolicy = Arc::new(move |path: &Path| policy.may_root_open(path));
        let rights = Rights::new(account, Arc::default(), may_root_open);
        for (field, error) in refused_files(key, spec, &rights).await {
            // A field that its mode bits refuse is listed once.
            if !reasons.iter().any(|reason| reason.starts_with(&format!("{field}: "))) {
                reasons.push(chain(&error));
            }
        }
    }
    reasons
}

/// The files that a launch would refuse, each with its field.
async fn refused_files(key: &InstanceKey, spec: &Spec, rights: &Rights) -> Vec<(String, UserFileError)> {
    let mut refused = Vec::new();
    let mut note = |field: &str, result: Result<(), UserFileError>| {
        refused.extend(result.err().map(|error| (field.to_owned(), error)));
    };
    let identity = &spec.identity;
    if let Some(path) = &identity.log_path {
        note("log_path", rights.check_log(path, key.name.as_str()).await);
    }
    // A daemon writes its pid file itself; the launch reads it.
    match spec.control.start_mode.unwrap_or_default() {
        StartMode::Foreground if identity.pid_path.is_empty() => {}
        StartMode::Foreground => note("pid_path", rights.check_pid_file(&identity.pid_path).await),
        StartMode::Daemon => note("pid_path", rights.read_pid_file(&identity.pid_path).await.map(drop)),
    }
    if let Some(path) = &spec.env_file {
        note("env_file", rights.env_file(path).await.map(drop));
    }
    for (name, value) in &spec.env {
        if let EnvValue::File(file) = value {
            let read = rights.env_values(vec![(name.clone(), file.clone())]).await;
            note(&format!("env {name}"), read.map(drop));
        }
    }
    refused
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
