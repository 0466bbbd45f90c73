//! Launches without a record: the processes of launches that the agent's store does not have, or whose outcome it does not.
//!
//! An agent that was killed left an intent; the proof is its control group or its launch id. An agent whose folder was
//! lost left nothing: the environment of a process counts only together with its user and its folder.

use std::collections::HashMap;

use super::account::Account;
use super::cgroup::Cgroup;
use super::context::AgentContext;
use super::exit_record::is_command_id;
use super::launch_mark::LaunchMark;
use super::ownership::{
    OwnershipError, PidFileProcess, claim_process, pid_file_process, refuse_pid_file, refuse_user, wrong_user,
};
use super::process::{LaunchedProcess, ProcessHandle, ProcessIdentity, parent, uids};
use super::process_table::{ProcessTable, ScannedProcess};
use super::user_files::{FileWork, Rights};
use crate::model::{InstanceKey, Spec};
use crate::proc::trimmed;

/// Levels of ancestors that are examined.
const MAX_ANCESTORS: usize = 64;

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
    let table = ProcessTable::wait_for_current().await;
    let find = async |launch: &InterruptedLaunch<'_>| {
        let rights = shared.rights_of(launch.spec).ok()?;
        let mark = LaunchMark::of(launch.launch_id);
        // The mark counts for a process whose environment cannot be read.
        let is_launched = |process: &ScannedProcess| match process.is_unreadable() {
            true => process.mark == Some(mark),
            false => process.launch_id() == Some(launch.launch_id),
        };
        let launched = table.iter().filter(|(_, one)| one.stat.is_alive() && is_launched(one));
        let mut pids: Vec<u32> = launched.map(|(pid, _)| pid).collect();
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

/// Whether an ancestor of the process is another agent: that agent runs and supervises the process.
pub fn has_another_agent(process: &LaunchedProcess) -> bool {
    let own = trimmed("/proc/self/comm");
    let ancestors = std::iter::successors(parent(process.identity.pid), |pid| parent(*pid));
    let others = ancestors.take(MAX_ANCESTORS).filter(|pid| *pid > 1 && *pid != std::process::id());
    !own.is_empty() && others.into_iter().any(|pid| trimmed(&format!("/proc/{pid}/comm")) == own)
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
    let of_processes = unclaimed.iter().filter(|one| !is_command_id(&one.launch_id));
    let candidates = of_processes.filter(|one| match renamed {
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
