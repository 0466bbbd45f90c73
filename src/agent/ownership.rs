//! Process ownership: the proof that a pid belongs to a launch of this agent, or may be adopted.
//!
//! A pid file is controlled by its writer, and an environment by the process itself. Neither is proof alone. After a launch
//! the main process must be in the launch's control group, descend from the launch (the agent is the subreaper of all its
//! launches), or carry the launch id; in each case its real user must match the account. A process of a root account may
//! drop privileges, so every user matches it. Adoption of a process that the agent did not launch needs the account's own
//! user, the named executable, and a pid file that no other user can write. A process that another instance holds is
//! always refused ([`ProcessHandle::open`]).

use std::path::{Path, PathBuf};

use super::account::Account;
use super::cgroup::Cgroup;
use super::proc_scan::{self, ScanError};
use super::process::{
    LaunchedProcess, ProcessHandle, ProcessIdentity, boot_id, is_before_exec, parent, runs_program, uids,
};
use super::state::ProcessRun;
use super::tree::{LaunchRecord, LaunchTraces, ProcessTree};
use super::user_files::{FileWork, PidEntry, Rights, UserFileError};
use crate::model::{InstanceKey, Spec};
use crate::permissions::{PermissionError, refuse_changeable, user_name};
use crate::proc::UnreadableProcess;

/// Reason why a process is not claimed or adopted.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    #[error(transparent)]
    Files(#[from] UserFileError),
    /// The pid file is missing, or does not name a process.
    #[error("{0}")]
    NotNamed(String),
    #[error("cannot determine whether the process runs: {0}")]
    Unknown(#[source] Box<OwnershipError>),
    #[error("process {pid} cannot be read: {source}")]
    Unreadable { pid: u32, source: UnreadableProcess },
    #[error("process {pid} cannot be read: {source}")]
    Scan { pid: u32, source: ScanError },
    #[error("process {0} is gone")]
    Gone(u32),
    #[error("process {pid} does not run {program}")]
    OtherProgram { pid: u32, program: String },
    #[error("process {0} is held by another instance of this agent")]
    Claimed(u32),
    #[error("process {0} is gone, or no handle on it can be opened")]
    NoHandle(u32),
    #[error("process {0} is still the process before the restart")]
    BeforeRestart(u32),
    #[error("process {pid} does not run as root, and {source}")]
    NotRoot { pid: u32, source: Box<OwnershipError> },
    #[error("the pid file of process {0} changed")]
    PidFileChanged(u32),
    #[error("process {0} belongs to another launch")]
    OtherLaunch(u32),
    #[error(
        "process {0} was not started by this launch: it is neither in its control group, nor its descendant, nor \
         carries its launch id"
    )]
    NotOfLaunch(u32),
    #[error("process {pid} runs as user {user}, not as {account}")]
    WrongUser { pid: u32, user: String, account: String },
    #[error("the pid file of the process cannot be trusted: {0}")]
    Untrusted(#[source] PermissionError),
    #[error("cannot adopt: {0}")]
    Adopt(#[source] Box<OwnershipError>),
    #[error("cannot adopt process {pid}: {source}")]
    AdoptProcess { pid: u32, source: Box<OwnershipError> },
    #[error("cannot adopt process {0}: its pid file changed during the check")]
    ChangedDuringCheck(u32),
    #[error("no process carries a launch id of this instance")]
    NoLaunchId,
    #[error("process {pid} does not run in {folder}")]
    OtherFolder { pid: u32, folder: String },
    #[error("process {0} does not belong to the tree of the process that ended")]
    OtherTree(u32),
    #[error("process {0} may have been started by another user than root")]
    ForeignEnvironment(u32),
}

const NO_PID_PATH: &str = "the spec has no pid_path";

/// Maximum length of a chain of parents.
const MAX_ANCESTORS: usize = 64;

/// A launch whose main process is searched.
pub struct LaunchEvidence<'a> {
    pub launch_id: &'a str,
    pub group: Option<&'a Cgroup>,
    /// [`super::process::ticks_since_boot`] before the launch.
    pub since: u64,
    /// The run that a restart_cmd replaces: a daemon may fork its successor itself.
    pub replaces: Option<&'a ProcessRun>,
}

impl LaunchEvidence<'_> {
    /// Whether a process that the launch or its command has started is alive, or may be.
    async fn has_new_process(&self, rights: &Rights) -> bool {
        // A command that replaces the process runs in its launch, next to older processes.
        let since = if self.replaces.is_some() { self.since } else { 0 };
        let is_new = |identity: &ProcessIdentity| identity.started >= since && !identity.is_claimed();
        let grouped = self.group.iter().flat_map(|group| group.processes());
        if grouped.filter_map(ProcessIdentity::of).any(|one| one.is_current() && is_new(&one)) {
            return true;
        }
        let tree = ProcessTree::of_launch(LaunchRecord {
            boot: boot_id().to_owned(),
            launch_id: self.launch_id.to_owned(),
            group: None,
            uid: Some(rights.account().uid()),
            traces: LaunchTraces::default(),
        });
        tree.members()
            .await
            .map_or(true, |members| members.unknown.is_some() || members.known.iter().any(is_new))
    }
}

/// Proof that a process belongs to a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnershipProof {
    /// By the launch's own control group, descent or id.
    Launch,
    /// By the control group, descent or id of the run that it replaces.
    Replaced,
}

/// The process that a pid file names. This is a claim, not a proof.
pub(super) enum PidFileProcess {
    Found(ProcessIdentity),
    /// No process: the file is missing, or its process is gone or runs another executable.
    Missing(OwnershipError),
    /// The file cannot be read now: a process may run.
    Unknown(OwnershipError),
}

impl PidFileProcess {
    pub(super) fn required(self) -> Result<ProcessIdentity, OwnershipError> {
        match self {
            PidFileProcess::Found(identity) => Ok(identity),
            PidFileProcess::Missing(why) | PidFileProcess::Unknown(why) => Err(why),
        }
    }

    /// `None`: no process. An error: it is unknown whether one runs.
    fn if_running(self) -> Result<Option<ProcessIdentity>, OwnershipError> {
        match self {
            PidFileProcess::Found(identity) => Ok(Some(identity)),
            PidFileProcess::Missing(_) => Ok(None),
            PidFileProcess::Unknown(error) => Err(OwnershipError::Unknown(Box::new(error))),
        }
    }
}

/// The process that a spec's pid file names, if it runs the named executable.
pub(super) async fn pid_file_process(spec: &Spec, rights: &Rights) -> PidFileProcess {
    named_process(spec, rights, true).await
}

/// Like [`pid_file_process`], for a process with another proof. Only an executable that the manifest names is compared.
async fn launched_process(spec: &Spec, rights: &Rights) -> PidFileProcess {
    named_process(spec, rights, spec.identity.names_program()).await
}

async fn named_process(spec: &Spec, rights: &Rights, checks_program: bool) -> PidFileProcess {
    if spec.identity.pid_path.is_empty() {
        return PidFileProcess::Missing(OwnershipError::NotNamed(NO_PID_PATH.to_owned()));
    }
    let pid = match rights.read_pid_file(&spec.identity.pid_path).await {
        Ok(PidEntry::Pid(pid)) => pid,
        Ok(PidEntry::None(why)) => return PidFileProcess::Missing(OwnershipError::NotNamed(why)),
        Err(error) => return PidFileProcess::Unknown(error.into()),
    };
    let Some(identity) = ProcessIdentity::of(pid).filter(ProcessIdentity::is_current) else {
        return PidFileProcess::Missing(OwnershipError::Gone(pid));
    };
    if !checks_program {
        return PidFileProcess::Found(identity);
    }
    let program = spec.identity.proc_name.clone();
    match read_process(pid, move |pid| runs_program(pid, &program)).await {
        Ok(true) => PidFileProcess::Found(identity),
        Ok(false) => {
            let program = spec.identity.proc_name.clone();
            PidFileProcess::Missing(OwnershipError::OtherProgram { pid, program })
        }
        Err(error) => PidFileProcess::Unknown(error),
    }
}

/// Reads the arguments or the environment of a process on a worker thread.
async fn read_process<T: Send + 'static>(
    pid: u32,
    read: impl FnOnce(u32) -> Result<T, UnreadableProcess> + Send + 'static,
) -> Result<T, OwnershipError> {
    let read = proc_scan::run(move || read(pid)).await;
    let read = read.map_err(|source| OwnershipError::Scan { pid, source })?;
    read.map_err(|source| OwnershipError::Unreadable { pid, source })
}

/// Opens a handle on a process that passed a check, unless the pid was reused or another instance holds the process.
pub(super) fn claim_process(identity: &ProcessIdentity) -> Result<ProcessHandle, OwnershipError> {
    let pid = identity.pid;
    if identity.is_claimed() {
        return Err(OwnershipError::Claimed(pid));
    }
    ProcessHandle::open(identity).ok_or(OwnershipError::NoHandle(pid))
}

/// Claims the main process of a launch, which its pid file names, if it belongs to the launch.
pub async fn claim_launched(
    spec: &Spec,
    rights: &Rights,
    evidence: &LaunchEvidence<'_>,
) -> Result<(ProcessHandle, OwnershipProof), OwnershipError> {
    let identity = launched_process(spec, rights).await.required()?;
    if evidence.replaces.is_some_and(|run| run.identity == identity) {
        return Err(OwnershipError::BeforeRestart(identity.pid));
    }
    let handle = claim_process(&identity)?;
    let proof = match prove_launch(&identity, rights.account(), evidence).await? {
        ProofStrength::Proven(proof) => proof,
        ProofStrength::Descends(proof) => {
            refuse_foreign_claim(&identity, spec, rights).await?;
            proof
        }
    };
    // The evidence was read by pid. It belongs to this process only if the pid was not reused in the meantime.
    match identity.is_current() {
        true => Ok((handle, proof)),
        false => Err(OwnershipError::Gone(identity.pid)),
    }
}

/// Claims the process that the pid file names, if it is one of these members of a process tree.
pub async fn claim_member(
    spec: &Spec,
    rights: &Rights,
    members: &[ProcessIdentity],
) -> Result<ProcessHandle, OwnershipError> {
    let identity = launched_process(spec, rights).await.required()?;
    if !members.contains(&identity) {
        return Err(OwnershipError::OtherTree(identity.pid));
    }
    refuse_user(identity.pid, rights.account())?;
    claim_process(&identity)
}

/// Whether a launch may still become the process that its pid file should name: the named process has not called `execve`,
/// or a process of the launch has yet to write the pid file. A stale pid file may name an ended or unrelated process.
pub async fn may_still_start(spec: &Spec, rights: &Rights, evidence: &LaunchEvidence<'_>) -> bool {
    if evidence.has_new_process(rights).await {
        return true;
    }
    if spec.identity.pid_path.is_empty() {
        return false;
    }
    match rights.read_pid_file(&spec.identity.pid_path).await {
        Ok(PidEntry::Pid(pid)) => is_before_exec(pid),
        Ok(PidEntry::None(_)) | Err(_) => false,
    }
}

/// The strength of a proof.
enum ProofStrength {
    Proven(OwnershipProof),
    /// By descent alone, which an orphan of another launch has too.
    Descends(OwnershipProof),
}

/// The main process of a root account may run as any user. By descent alone, a process of another user is accepted only if
/// that user could not have written the pid file.
async fn refuse_foreign_claim(
    identity: &ProcessIdentity,
    spec: &Spec,
    rights: &Rights,
) -> Result<(), OwnershipError> {
    let pid = identity.pid;
    if rights.account().uid() != 0 || uids(pid).is_some_and(|ids| ids[0] == 0) {
        return Ok(());
    }
    refuse_pid_file(spec, rights)
        .await
        .map_err(|error| OwnershipError::NotRoot { pid, source: Box::new(error) })?;
    // Read again after the check of its permissions: another user may have written the file before.
    match launched_process(spec, rights).await {
        PidFileProcess::Found(again) if again == *identity => Ok(()),
        PidFileProcess::Found(_) | PidFileProcess::Missing(_) => Err(OwnershipError::PidFileChanged(pid)),
        PidFileProcess::Unknown(why) => Err(why),
    }
}

async fn prove_launch(
    identity: &ProcessIdentity,
    account: &Account,
    evidence: &LaunchEvidence<'_>,
) -> Result<ProofStrength, OwnershipError> {
    let pid = identity.pid;
    refuse_user(pid, account)?;
    let in_group = |group: Option<&Cgroup>| group.is_some_and(|group| group.processes().contains(&pid));
    // A command that replaces the process runs in its launch: only a process that is younger than the command is new.
    let replaced = evidence.replaces;
    let is_new = replaced.is_none() || identity.started >= evidence.since;
    if in_group(evidence.group) && is_new {
        return Ok(ProofStrength::Proven(OwnershipProof::Launch));
    }
    if in_group(replaced.and_then(ProcessRun::group).as_ref()) && is_new {
        return Ok(ProofStrength::Proven(OwnershipProof::Replaced));
    }
    // Only root and the account's own processes can read the launch id. A process that dropped privileges needs another
    // proof.
    let own = uids(pid).is_some_and(|ids| ids[0] == account.uid());
    let launch_id = read_process(pid, LaunchedProcess::of).await?.map(|launched| launched.launch_id);
    let replaced_id = replaced.map(|run| run.incarnation.as_str()).filter(|id| !id.is_empty());
    match launch_id.as_deref() {
        Some(id) if id == evidence.launch_id && own && is_new => {
            return Ok(ProofStrength::Proven(OwnershipProof::Launch));
        }
        Some(id) if Some(id) == replaced_id && own && is_new => {
            return Ok(ProofStrength::Proven(OwnershipProof::Replaced));
        }
        Some(id) if id != evidence.launch_id && Some(id) != replaced_id => {
            return Err(OwnershipError::OtherLaunch(pid));
        }
        Some(_) | None => {}
    }
    let proof = descends(identity, evidence.since, replaced.map(|run| &run.identity));
    proof.map(ProofStrength::Descends).ok_or(OwnershipError::NotOfLaunch(pid))
}

/// Refuses a process whose real user is not the account. A root account matches every user: it may drop privileges.
pub(super) fn refuse_user(pid: u32, account: &Account) -> Result<(), OwnershipError> {
    let ids = uids(pid).ok_or(OwnershipError::Gone(pid))?;
    match account.uid() == 0 || ids[0] == account.uid() {
        true => Ok(()),
        false => Err(wrong_user(pid, ids[0], account)),
    }
}

pub(super) fn wrong_user(pid: u32, uid: u32, account: &Account) -> OwnershipError {
    OwnershipError::WrongUser { pid, user: user_name(uid), account: account.name().to_owned() }
}

/// Whether the chain of parents leads to the agent or to the replaced process. No process of the chain may be older than
/// the launch or held by another instance.
fn descends(
    identity: &ProcessIdentity,
    since: u64,
    replaced: Option<&ProcessIdentity>,
) -> Option<OwnershipProof> {
    let mut one = identity.clone();
    for _ in 0..MAX_ANCESTORS {
        if one.started < since {
            return None;
        }
        let above = parent(one.pid)?;
        if above == std::process::id() {
            return Some(OwnershipProof::Launch);
        }
        one = ProcessIdentity::of(above)?;
        if replaced == Some(&one) {
            return Some(OwnershipProof::Replaced);
        }
        if above <= 1 || one.is_claimed() {
            return None;
        }
    }
    None
}

/// The pid of a process under a declared identity that this agent neither launched nor adopted. The agent reports it and
/// opens no handle on it: only adoption does.
///
/// An error: it is unknown whether one runs.
pub async fn foreign_pid(spec: &Spec, rights: &Rights) -> Result<Option<u32>, OwnershipError> {
    let found = pid_file_process(spec, rights).await.if_running()?;
    Ok(found.filter(|identity| is_foreign(identity, rights)).map(|identity| identity.pid))
}

/// As [`foreign_pid`]. Blocks.
pub fn foreign_pid_blocking(spec: &Spec, rights: &Rights) -> Result<Option<u32>, OwnershipError> {
    let unknown = |error| OwnershipError::Unknown(Box::new(error));
    if spec.identity.pid_path.is_empty() {
        return Ok(None);
    }
    let pid = match rights.pid_in(Path::new(&spec.identity.pid_path)) {
        Ok(PidEntry::Pid(pid)) => pid,
        Ok(PidEntry::None(_)) => return Ok(None),
        Err(error) => return Err(unknown(error.into())),
    };
    let Some(identity) = ProcessIdentity::of(pid).filter(ProcessIdentity::is_current) else {
        return Ok(None);
    };
    let runs = runs_program(pid, &spec.identity.proc_name);
    let runs = runs.map_err(|source| unknown(OwnershipError::Unreadable { pid, source }))?;
    Ok((runs && is_foreign(&identity, rights)).then_some(pid))
}

/// Whether the agent holds no handle on a process of the account.
fn is_foreign(identity: &ProcessIdentity, rights: &Rights) -> bool {
    !identity.is_claimed() && refuse_user(identity.pid, rights.account()).is_ok()
}

/// A daemon of an earlier launch whose pid file appeared after that launch timed out. It is a descendant of the agent, and
/// its environment names the instance.
///
/// An error: it is unknown whether one runs.
pub async fn find_orphan(
    key: &InstanceKey,
    spec: &Spec,
    rights: &Rights,
) -> Result<Option<(ProcessHandle, String)>, OwnershipError> {
    let Some(identity) = launched_process(spec, rights).await.if_running()? else { return Ok(None) };
    let unknown = |error| OwnershipError::Unknown(Box::new(error));
    let launched = read_process(identity.pid, LaunchedProcess::of).await.map_err(unknown)?;
    let launched = launched.filter(|launched| launched.instance == key.to_string());
    let is_own =
        refuse_user(identity.pid, rights.account()).is_ok() && descends(&identity, 0, None).is_some();
    let Some(launched) = launched.filter(|_| is_own) else { return Ok(None) };
    if refuse_foreign_claim(&identity, spec, rights).await.is_err() {
        return Ok(None);
    }
    let Ok(handle) = claim_process(&identity) else { return Ok(None) };
    Ok(identity.is_current().then_some((handle, launched.launch_id)))
}

/// Adopts a process that the agent did not launch, on an explicit operation. `None`: no process runs.
pub async fn adopt(spec: &Spec, rights: &Rights) -> Result<Option<ProcessHandle>, OwnershipError> {
    let Some(identity) = pid_file_process(spec, rights).await.if_running()? else { return Ok(None) };
    let (pid, account) = (identity.pid, rights.account());
    let handle = claim_process(&identity).map_err(|error| OwnershipError::Adopt(Box::new(error)))?;
    let real = uids(pid).map(|ids| ids[0]);
    if real != Some(account.uid()) {
        let why = real.map_or(OwnershipError::Gone(pid), |real| wrong_user(pid, real, account));
        return Err(OwnershipError::Adopt(Box::new(why)));
    }
    refuse_pid_file(spec, rights)
        .await
        .map_err(|error| OwnershipError::AdoptProcess { pid, source: Box::new(error) })?;
    // Read again after the check of its permissions: another user may have written the file before.
    match pid_file_process(spec, rights).await.required() {
        Ok(again) if again == identity => Ok(Some(handle)),
        Ok(_) | Err(_) => Err(OwnershipError::ChangedDuringCheck(pid)),
    }
}

/// Refuses a pid file that another user can write: that user could name any process.
pub(super) async fn refuse_pid_file(spec: &Spec, rights: &Rights) -> Result<(), OwnershipError> {
    let path = PathBuf::from(&spec.identity.pid_path);
    let check = move |rights: &Rights| refuse_changeable_pid_file(&path, rights.account());
    rights.run(FileWork::Paths, "check the permissions of pid_path", check).await
}

/// Checks the permissions of a pid file. Blocks.
fn refuse_changeable_pid_file(path: &Path, account: &Account) -> Result<(), OwnershipError> {
    let refused = OwnershipError::Untrusted;
    refuse_changeable(path, account.uid()).map_err(refused)?;
    // In a sticky directory that all users can write, another user can create the file.
    match path.parent() {
        Some(folder) => refuse_changeable(folder, account.uid()).map(drop).map_err(refused),
        None => Ok(()),
    }
}
