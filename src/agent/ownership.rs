//! Process ownership: the proof that a pid belongs to a launch of this agent, or may be adopted.
//!
//! A pid file is controlled by its writer, and an environment by the process itself. Neither is proof alone. After a launch
//! the main process must be in the launch's control group, descend from the launch (the agent is the subreaper of all its
//! launches), or carry the launch id; in each case its real user must match the account. A process of a root account may
//! drop privileges, so every user matches it. Adoption of a process that the agent did not launch needs the account's own
//! user, the named executable, and a pid file that no other user can write. A process that another instance holds is
//! always refused ([`ProcessHandle::open`]).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::account::Account;
use super::cgroup::Cgroup;
use super::context::AgentContext;
use super::process::{
    LaunchedProcess, ProcessHandle, ProcessIdentity, launched_processes, parent, runs_program, uids,
};
use super::state::ProcessRun;
use super::user_files::{FileWork, PidEntry, Rights, UserFileError};
use crate::model::{InstanceKey, Spec};
use crate::permissions::{Above, PermissionError, refuse_changeable, user_name};

/// Why a process is not claimed or adopted.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    #[error(transparent)]
    Files(#[from] UserFileError),
    /// The pid file is missing, or does not name a process.
    #[error("{0}")]
    NotNamed(String),
    #[error("cannot tell whether the process runs: {0}")]
    Unknown(#[source] Box<OwnershipError>),
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
    #[error("its pid file cannot be trusted: {0}")]
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
    #[error("process {0} may have been started by another user than root")]
    ForeignEnvironment(u32),
}

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

/// How a process was proven to belong to a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnershipProof {
    /// By the launch's own control group, descent or id.
    Launch,
    /// By the control group, descent or id of the run that it replaces.
    Replaced,
}

/// The process that a pid file names. This is a claim, not a proof.
enum PidFileProcess {
    Found(ProcessIdentity),
    /// No process: the file is missing, or its process is gone or runs another executable.
    Missing(OwnershipError),
    /// The file cannot be read now: a process may run.
    Unknown(OwnershipError),
}

impl PidFileProcess {
    fn required(self) -> Result<ProcessIdentity, OwnershipError> {
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
async fn pid_file_process(spec: &Spec, rights: &Rights) -> PidFileProcess {
    let pid = match rights.read_pid_file(&spec.identity.pid_path).await {
        Ok(PidEntry::Pid(pid)) => pid,
        Ok(PidEntry::None(why)) => return PidFileProcess::Missing(OwnershipError::NotNamed(why)),
        Err(error) => return PidFileProcess::Unknown(error.into()),
    };
    let Some(identity) = ProcessIdentity::of(pid).filter(ProcessIdentity::is_current) else {
        return PidFileProcess::Missing(OwnershipError::Gone(pid));
    };
    match runs_program(pid, &spec.identity.proc_name) {
        true => PidFileProcess::Found(identity),
        false => {
            let program = spec.identity.proc_name.clone();
            PidFileProcess::Missing(OwnershipError::OtherProgram { pid, program })
        }
    }
}

/// Opens a handle on a process that passed a check, unless the pid was reused or another instance holds the process.
fn claim_process(identity: &ProcessIdentity) -> Result<ProcessHandle, OwnershipError> {
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
    let identity = pid_file_process(spec, rights).await.required()?;
    if evidence.replaces.is_some_and(|run| run.identity == identity) {
        return Err(OwnershipError::BeforeRestart(identity.pid));
    }
    let handle = claim_process(&identity)?;
    let proof = match prove_launch(&identity, rights.account(), evidence)? {
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
    match pid_file_process(spec, rights).await {
        PidFileProcess::Found(again) if again == *identity => Ok(()),
        PidFileProcess::Found(_) | PidFileProcess::Missing(_) => Err(OwnershipError::PidFileChanged(pid)),
        PidFileProcess::Unknown(why) => Err(why),
    }
}

fn prove_launch(
    identity: &ProcessIdentity,
    account: &Account,
    evidence: &LaunchEvidence<'_>,
) -> Result<ProofStrength, OwnershipError> {
    let pid = identity.pid;
    refuse_user(pid, account)?;
    let in_group = |group: Option<&Cgroup>| group.is_some_and(|group| group.processes().contains(&pid));
    if in_group(evidence.group) {
        return Ok(ProofStrength::Proven(OwnershipProof::Launch));
    }
    let replaced = evidence.replaces;
    if in_group(replaced.and_then(ProcessRun::group).as_ref()) && identity.started >= evidence.since {
        return Ok(ProofStrength::Proven(OwnershipProof::Replaced));
    }
    // Only root and the account's own processes can read the launch id. A process that dropped privileges needs another
    // proof.
    let own = uids(pid).is_some_and(|ids| ids[0] == account.uid());
    let launch_id = LaunchedProcess::of(pid).map(|launched| launched.launch_id);
    let replaced_id = replaced.map(|run| run.incarnation.as_str()).filter(|id| !id.is_empty());
    match launch_id.as_deref() {
        Some(id) if id == evidence.launch_id && own => {
            return Ok(ProofStrength::Proven(OwnershipProof::Launch));
        }
        Some(id) if Some(id) == replaced_id && own && identity.started >= evidence.since => {
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
fn refuse_user(pid: u32, account: &Account) -> Result<(), OwnershipError> {
    let ids = uids(pid).ok_or(OwnershipError::Gone(pid))?;
    match account.uid() == 0 || ids[0] == account.uid() {
        true => Ok(()),
        false => Err(wrong_user(pid, ids[0], account)),
    }
}

fn wrong_user(pid: u32, uid: u32, account: &Account) -> OwnershipError {
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

/// The pid of a process under a daemon's identity that this agent neither launched nor adopted. The agent reports it and
/// opens no handle on it: only adoption does.
///
/// An error: it is unknown whether one runs.
pub async fn foreign_pid(spec: &Spec, rights: &Rights) -> Result<Option<u32>, OwnershipError> {
    let is_foreign = |identity: &ProcessIdentity| {
        !identity.is_claimed() && refuse_user(identity.pid, rights.account()).is_ok()
    };
    Ok(pid_file_process(spec, rights).await.if_running()?.filter(is_foreign).map(|identity| identity.pid))
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
    let Some(identity) = pid_file_process(spec, rights).await.if_running()? else { return Ok(None) };
    let launched = LaunchedProcess::of(identity.pid).filter(|launched| launched.instance == key.to_string());
    let is_own =
        refuse_user(identity.pid, rights.account()).is_ok() && descends(&identity, 0, None).is_some();
    let Some(launched) = launched.filter(|_| is_own) else { return Ok(None) };
    if refuse_foreign_claim(&identity, spec, rights).await.is_err() {
        return Ok(None);
    }
    let Ok(handle) = claim_process(&identity) else { return Ok(None) };
    Ok(identity.is_current().then_some((handle, launched.launch_id)))
}

/// Adopts a daemon that the agent did not launch, on an explicit operation. `None`: no process runs.
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
async fn refuse_pid_file(spec: &Spec, rights: &Rights) -> Result<(), OwnershipError> {
    let path = PathBuf::from(&spec.identity.pid_path);
    let check = move |rights: &Rights| refuse_changeable_pid_file(&path, rights.account());
    rights.run(FileWork::Paths, "check the permissions of pid_path", check).await
}

/// Checks the permissions of a pid file. Blocks.
fn refuse_changeable_pid_file(path: &Path, account: &Account) -> Result<(), OwnershipError> {
    let refused = OwnershipError::Untrusted;
    refuse_changeable(path, account.uid(), Above::Owned).map_err(refused)?;
    // In a sticky directory that all users can write, another user can create the file.
    match path.parent() {
        Some(folder) => refuse_changeable(folder, account.uid(), Above::Owned).map(drop).map_err(refused),
        None => Ok(()),
    }
}

/// A launch whose outcome was not recorded before the agent ended.
pub struct InterruptedLaunch<'a> {
    pub launch_id: &'a str,
    pub spec: &'a Spec,
    pub group: Option<Cgroup>,
}

/// The main processes of interrupted launches, by launch id. The proof is the launch's control group or its id, which only
/// this agent's store has, and a user that matches.
pub async fn find_interrupted(
    shared: &AgentContext,
    launches: &[InterruptedLaunch<'_>],
) -> HashMap<String, ProcessIdentity> {
    if launches.is_empty() {
        return HashMap::new();
    }
    let all = launched_processes();
    let find = async |launch: &InterruptedLaunch<'_>| {
        let rights = shared.rights_of(launch.spec).ok()?;
        let with_id = all.iter().filter(|one| one.launch_id == launch.launch_id);
        let mut pids: Vec<u32> = with_id.map(|one| one.identity.pid).collect();
        pids.extend(launch.group.iter().flat_map(Cgroup::processes));
        pids.retain(|pid| refuse_user(*pid, rights.account()).is_ok());
        Some((launch.launch_id.to_owned(), main_process(&pids, launch.spec, &rights).await?))
    };
    // Concurrently: pid files that hang cost one timeout in total.
    futures_util::future::join_all(launches.iter().map(find)).await.into_iter().flatten().collect()
}

/// The main process of a launch: the one that the pid file names, or the oldest whose parent is not in the launch.
async fn main_process(pids: &[u32], spec: &Spec, rights: &Rights) -> Option<ProcessIdentity> {
    let free = |identity: &ProcessIdentity| identity.is_current() && !identity.is_claimed();
    if pids.len() > 1
        && let PidFileProcess::Found(identity) = pid_file_process(spec, rights).await
        && pids.contains(&identity.pid)
        && free(&identity)
    {
        return Some(identity);
    }
    let roots = pids.iter().filter(|pid| parent(**pid).is_none_or(|parent| !pids.contains(&parent)));
    roots.filter_map(|pid| ProcessIdentity::of(*pid)).filter(free).min_by_key(|one| (one.started, one.pid))
}

/// Finds the process of an instance whose launch is not recorded, because the agent's folder was lost. The launch id is
/// unknown, so the environment counts only together with the user, the folder and, under another name (`renamed`), the
/// pid file.
pub async fn find_unrecorded(
    key: &InstanceKey,
    spec: &Spec,
    rights: &Rights,
    unclaimed: &[LaunchedProcess],
    renamed: bool,
) -> Result<(ProcessHandle, String), OwnershipError> {
    let named_pid = pid_file_process(spec, rights).await.required().ok().map(|identity| identity.pid);
    let candidates = unclaimed.iter().filter(|one| match renamed {
        false => one.instance == key.to_string(),
        // A process with the name of another host, or without a name, is not a renamed process of this instance.
        true => {
            let was: Option<InstanceKey> = one.instance.parse().ok();
            was.is_some_and(|was| was != *key && was.host == key.host) && Some(one.identity.pid) == named_pid
        }
    });
    let mut why = OwnershipError::NoLaunchId;
    let mut fitting: Vec<&LaunchedProcess> = Vec::new();
    for one in candidates {
        match check_candidate(one, spec, rights, renamed).await {
            Ok(()) => fitting.push(one),
            Err(refused) => why = refused,
        }
    }
    let pids: Vec<u32> = fitting.iter().map(|one| one.identity.pid).collect();
    let main = main_process(&pids, spec, rights).await.ok_or(why)?;
    let launch_id = fitting.iter().find(|one| one.identity == main).map(|one| one.launch_id.clone());
    let launch_id = launch_id.ok_or(OwnershipError::Gone(main.pid))?;
    Ok((claim_process(&main)?, launch_id))
}

async fn check_candidate(
    one: &LaunchedProcess,
    spec: &Spec,
    rights: &Rights,
    renamed: bool,
) -> Result<(), OwnershipError> {
    let (identity, setup_path) = (one.identity.clone(), spec.identity.setup_path.clone());
    let check = move |rights: &Rights| check_folder(&identity, &setup_path, rights.account());
    rights.run(FileWork::Paths, "check setup_path", check).await?;
    if renamed {
        refuse_pid_file(spec, rights).await?;
    }
    match one.identity.is_current() {
        true => Ok(()),
        false => Err(OwnershipError::Gone(one.identity.pid)),
    }
}

/// Checks the user, the environment and the working directory of a process. Blocks.
fn check_folder(
    identity: &ProcessIdentity,
    setup_path: &str,
    account: &Account,
) -> Result<(), OwnershipError> {
    let pid = identity.pid;
    let ids = uids(pid).ok_or(OwnershipError::Gone(pid))?;
    if ids[0] != account.uid() {
        return Err(wrong_user(pid, ids[0], account));
    }
    if account.uid() == 0 {
        refuse_foreign_environment(pid, ids)?;
    }
    // Another agent on this machine may have an instance of the same name in another folder.
    let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
    let expected = std::fs::canonicalize(setup_path).ok();
    match cwd.is_some() && cwd == expected {
        true => Ok(()),
        false => Err(OwnershipError::OtherFolder { pid, folder: setup_path.to_owned() }),
    }
}

/// Refuses a root process that another user may have started by a set-user-ID program: that user set its environment.
fn refuse_foreign_environment(pid: u32, ids: [u32; 4]) -> Result<(), OwnershipError> {
    use std::os::unix::fs::MetadataExt;
    let set_uid = std::fs::metadata(format!("/proc/{pid}/exe")).map(|meta| meta.mode() & 0o4000 != 0);
    match ids == [0; 4] && matches!(set_uid, Ok(false)) {
        true => Ok(()),
        false => Err(OwnershipError::ForeignEnvironment(pid)),
    }
}
