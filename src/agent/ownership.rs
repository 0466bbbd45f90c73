//! Process ownership: the proof that a pid belongs to a launch of this agent, or may be adopted.
//!
//! A pid file is a hint that its writer controls, and an environment is what a process says of itself. Neither proves
//! anything alone. After a launch the main process must be in the launch's control group, descend from the launch (the
//! agent is the subreaper of all it launches), or carry the launch id; in each case with a real user that fits the account.
//! A root account may drop privileges, so any user fits it. Adoption of a process that the agent did not launch needs the
//! account's own user, the named executable, and a pid file that no other user can write. A process that another instance
//! holds is refused everywhere ([`Hold::take`]).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::account::Account;
use super::cgroup::Group;
use super::keeper::Shared;
use super::kernel::{Hold, Identity, Marked, marked, parent, runs, uids};
use super::row::Run;
use super::user_files::{FileWork, PidEntry, Rights};
use crate::model::{InstanceKey, Spec};
use crate::permissions::{Above, refuse_changeable, user_name};

/// The longest chain of parents that is followed.
const GENERATIONS: usize = 64;

/// A launch whose main process is looked for.
pub struct LaunchEvidence<'a> {
    pub launch_id: &'a str,
    pub group: Option<&'a Group>,
    /// [`super::kernel::ticks_since_boot`] before the launch.
    pub since: u64,
    /// The run that a restart_cmd replaces: a daemon may fork its successor itself.
    pub replaces: Option<&'a Run>,
}

/// How a process was proven to belong to a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// By the launch's own group, descent or id.
    Launch,
    /// By those of the run that it replaces.
    Replaced,
}

/// A pid file and the process that it names. Not a proof of anything.
enum Named {
    Found(Identity),
    /// No process: the file is missing, or its process is gone or runs another executable.
    Missing(String),
    /// The file cannot be read now: a process may run.
    Unknown(String),
}

impl Named {
    fn found(self) -> Result<Identity, String> {
        match self {
            Named::Found(identity) => Ok(identity),
            Named::Missing(why) | Named::Unknown(why) => Err(why),
        }
    }

    /// `None`: no process. An error: it is not known whether one runs.
    fn known(self) -> Result<Option<Identity>, String> {
        match self {
            Named::Found(identity) => Ok(Some(identity)),
            Named::Missing(_) => Ok(None),
            Named::Unknown(why) => Err(format!("cannot tell whether the process runs: {why}")),
        }
    }
}

/// The process that a spec's pid file names, if it runs the named executable.
async fn named(spec: &Spec, rights: &Rights) -> Named {
    let pid = match rights.read_pid_file(&spec.identity.pid_path).await {
        Ok(PidEntry::Pid(pid)) => pid,
        Ok(PidEntry::None(why)) => return Named::Missing(why),
        Err(why) => return Named::Unknown(why),
    };
    let Some(identity) = Identity::of(pid).filter(Identity::is_current) else {
        return Named::Missing(format!("process {pid} is gone"));
    };
    match runs(pid, &spec.identity.proc_name) {
        true => Named::Found(identity),
        false => Named::Missing(format!("process {pid} does not run {}", spec.identity.proc_name)),
    }
}

/// Takes hold of a process that passed a check, unless it became another one or another instance holds it.
fn take(identity: &Identity) -> Result<Hold, String> {
    let pid = identity.pid;
    if identity.is_held() {
        return Err(format!("process {pid} is held by another instance of this agent"));
    }
    Hold::take(identity).ok_or_else(|| format!("process {pid} is gone, or cannot be held"))
}

/// Takes hold of the main process of a launch, as its pid file names it, if it belongs to the launch.
pub async fn launched(
    spec: &Spec,
    rights: &Rights,
    evidence: &LaunchEvidence<'_>,
) -> Result<(Hold, Proof), String> {
    let identity = named(spec, rights).await.found()?;
    if evidence.replaces.is_some_and(|run| run.identity == identity) {
        return Err(format!("process {} is the one from before", identity.pid));
    }
    let hold = take(&identity)?;
    let proof = match belongs(&identity, rights.account(), evidence)? {
        Belonging::Proven(proof) => proof,
        Belonging::Descends(proof) => {
            refuse_foreign_claim(&identity, spec, rights).await?;
            proof
        }
    };
    // What was read belongs to this process only if the pid did not change hands meanwhile.
    match identity.is_current() {
        true => Ok((hold, proof)),
        false => Err(format!("process {} is gone", identity.pid)),
    }
}

/// How strong a proof is.
enum Belonging {
    Proven(Proof),
    /// By descent alone, which an orphan of another launch shows too.
    Descends(Proof),
}

/// Of a root account's processes any user's may be the main one. By descent alone a process of another user is taken only
/// if that user could not have named it.
async fn refuse_foreign_claim(identity: &Identity, spec: &Spec, rights: &Rights) -> Result<(), String> {
    let pid = identity.pid;
    if rights.account().uid() != 0 || uids(pid).is_some_and(|ids| ids[0] == 0) {
        return Ok(());
    }
    refuse_pid_file(spec, rights)
        .await
        .map_err(|why| format!("process {pid} does not run as root, and {why}"))?;
    // The file is read again: before its permissions were checked another user may have written it.
    match named(spec, rights).await {
        Named::Found(again) if again == *identity => Ok(()),
        Named::Found(_) | Named::Missing(_) => Err(format!("the pid file of process {pid} changed")),
        Named::Unknown(why) => Err(why),
    }
}

fn belongs(
    identity: &Identity,
    account: &Account,
    evidence: &LaunchEvidence<'_>,
) -> Result<Belonging, String> {
    let pid = identity.pid;
    refuse_user(pid, account)?;
    let in_group = |group: Option<&Group>| group.is_some_and(|group| group.processes().contains(&pid));
    if in_group(evidence.group) {
        return Ok(Belonging::Proven(Proof::Launch));
    }
    let replaced = evidence.replaces;
    if in_group(replaced.and_then(Run::group).as_ref()) && identity.started >= evidence.since {
        return Ok(Belonging::Proven(Proof::Replaced));
    }
    // Only the account's own processes and root can read the launch id; one that dropped privileges needs more.
    let own = uids(pid).is_some_and(|ids| ids[0] == account.uid());
    let launch_id = Marked::of(pid).map(|marked| marked.launch_id);
    let replaced_id = replaced.map(|run| run.incarnation.as_str()).filter(|id| !id.is_empty());
    match launch_id.as_deref() {
        Some(id) if id == evidence.launch_id && own => return Ok(Belonging::Proven(Proof::Launch)),
        Some(id) if Some(id) == replaced_id && own && identity.started >= evidence.since => {
            return Ok(Belonging::Proven(Proof::Replaced));
        }
        Some(id) if id != evidence.launch_id && Some(id) != replaced_id => {
            return Err(format!("process {pid} belongs to another launch"));
        }
        Some(_) | None => {}
    }
    let proof = descends(identity, evidence.since, replaced.map(|run| &run.identity));
    proof.map(Belonging::Descends).ok_or_else(|| {
        format!(
            "process {pid} was not started by this launch: it is neither in its control group, nor its descendant, nor \
             carries its launch id"
        )
    })
}

/// A user that fits an account: its own, or any for root, whose processes may drop privileges.
fn refuse_user(pid: u32, account: &Account) -> Result<(), String> {
    let ids = uids(pid).ok_or_else(|| format!("process {pid} is gone"))?;
    match account.uid() == 0 || ids[0] == account.uid() {
        true => Ok(()),
        false => Err(wrong_user(pid, ids[0], account)),
    }
}

fn wrong_user(pid: u32, uid: u32, account: &Account) -> String {
    format!("process {pid} runs as user {}, not as {}", user_name(uid), account.name())
}

/// Does the chain of parents lead to the agent, with nothing in it older than the launch or held by another instance? Or
/// to the process that is replaced?
fn descends(identity: &Identity, since: u64, replaced: Option<&Identity>) -> Option<Proof> {
    let mut one = identity.clone();
    for _ in 0..GENERATIONS {
        if one.started < since {
            return None;
        }
        let above = parent(one.pid)?;
        if above == std::process::id() {
            return Some(Proof::Launch);
        }
        one = Identity::of(above)?;
        if replaced == Some(&one) {
            return Some(Proof::Replaced);
        }
        if above <= 1 || one.is_held() {
            return None;
        }
    }
    None
}

/// A process that runs under a daemon's identity, which this agent neither launched nor adopted. It is reported, never
/// held: only adoption makes it ours.
///
/// An error: it is not known whether one runs.
pub async fn stranger(spec: &Spec, rights: &Rights) -> Result<Option<u32>, String> {
    let is_stranger =
        |identity: &Identity| !identity.is_held() && refuse_user(identity.pid, rights.account()).is_ok();
    Ok(named(spec, rights).await.known()?.filter(is_stranger).map(|identity| identity.pid))
}

/// A daemon that an earlier launch of this agent left behind for an instance: its pid file came too late. It is the
/// agent's own descendant, and its environment names the instance.
///
/// An error: it is not known whether one runs.
pub async fn left_behind(
    key: &InstanceKey,
    spec: &Spec,
    rights: &Rights,
) -> Result<Option<(Hold, String)>, String> {
    let Some(identity) = named(spec, rights).await.known()? else { return Ok(None) };
    let marked = Marked::of(identity.pid).filter(|marked| marked.instance == key.to_string());
    let is_own =
        refuse_user(identity.pid, rights.account()).is_ok() && descends(&identity, 0, None).is_some();
    let Some(marked) = marked.filter(|_| is_own) else { return Ok(None) };
    if refuse_foreign_claim(&identity, spec, rights).await.is_err() {
        return Ok(None);
    }
    let Ok(hold) = take(&identity) else { return Ok(None) };
    Ok(identity.is_current().then_some((hold, marked.launch_id)))
}

/// Takes hold of a daemon that the agent did not launch, because it was told to host it. `None`: no process runs there.
pub async fn adopt(spec: &Spec, rights: &Rights) -> Result<Option<Hold>, String> {
    let Some(identity) = named(spec, rights).await.known()? else { return Ok(None) };
    let (pid, account) = (identity.pid, rights.account());
    let hold = take(&identity).map_err(|why| format!("cannot adopt: {why}"))?;
    let real = uids(pid).map(|ids| ids[0]);
    if real != Some(account.uid()) {
        let why = real.map_or(format!("process {pid} is gone"), |real| wrong_user(pid, real, account));
        return Err(format!("cannot adopt: {why}"));
    }
    refuse_pid_file(spec, rights).await.map_err(|why| format!("cannot adopt process {pid}: {why}"))?;
    // The file is read again: what it said before its permissions were checked may have been another user's word.
    match named(spec, rights).await.found() {
        Ok(again) if again == identity => Ok(Some(hold)),
        Ok(_) | Err(_) => Err(format!("cannot adopt process {pid}: its pid file changed meanwhile")),
    }
}

/// A pid file that another user can write names whatever that user wants.
async fn refuse_pid_file(spec: &Spec, rights: &Rights) -> Result<(), String> {
    let path = PathBuf::from(&spec.identity.pid_path);
    let check = move |rights: &Rights| refuse_changeable_pid_file(&path, rights.account());
    rights.run(FileWork::Paths, "check the permissions of pid_path", check).await
}

/// Blocks.
fn refuse_changeable_pid_file(path: &Path, account: &Account) -> Result<(), String> {
    let refused = |why: String| format!("its pid file cannot be trusted: {why}");
    refuse_changeable(path, account.uid(), Above::Owned).map_err(refused)?;
    // New entries in a sticky folder of all users are other users' too.
    match path.parent() {
        Some(folder) => refuse_changeable(folder, account.uid(), Above::Owned).map(drop).map_err(refused),
        None => Ok(()),
    }
}

/// A launch whose outcome was not recorded before the agent ended.
pub struct Interrupted<'a> {
    pub launch_id: &'a str,
    pub spec: &'a Spec,
    pub group: Option<Group>,
}

/// The main processes of interrupted launches, by launch id: in the launch's control group or with its id, which only
/// this agent's store knows, and with a user that fits.
pub async fn interrupted(shared: &Shared, launches: &[Interrupted<'_>]) -> HashMap<String, Identity> {
    if launches.is_empty() {
        return HashMap::new();
    }
    let all = marked();
    let find = async |launch: &Interrupted<'_>| {
        let rights = shared.rights_of(launch.spec).ok()?;
        let with_id = all.iter().filter(|one| one.launch_id == launch.launch_id);
        let mut pids: Vec<u32> = with_id.map(|one| one.identity.pid).collect();
        pids.extend(launch.group.iter().flat_map(Group::processes));
        pids.retain(|pid| refuse_user(*pid, rights.account()).is_ok());
        Some((launch.launch_id.to_owned(), main_of(&pids, launch.spec, &rights).await?))
    };
    // At once: pid files that cannot be read cost one time limit in all.
    futures_util::future::join_all(launches.iter().map(find)).await.into_iter().flatten().collect()
}

/// Of the processes of one launch the main one: as the pid file names it, else the oldest whose parent is not one of them.
async fn main_of(pids: &[u32], spec: &Spec, rights: &Rights) -> Option<Identity> {
    let free = |identity: &Identity| identity.is_current() && !identity.is_held();
    if pids.len() > 1
        && let Named::Found(identity) = named(spec, rights).await
        && pids.contains(&identity.pid)
        && free(&identity)
    {
        return Some(identity);
    }
    let roots = pids.iter().filter(|pid| parent(**pid).is_none_or(|parent| !pids.contains(&parent)));
    roots.filter_map(|pid| Identity::of(*pid)).filter(free).min_by_key(|one| (one.started, one.pid))
}

/// Finds the process of an instance again whose launch is not recorded: the agent's folder was lost. Its launch id is
/// unknown, so its environment counts only together with its user, its folder and, under another name (`renamed`), the
/// pid file that names it.
pub async fn found_again(
    key: &InstanceKey,
    spec: &Spec,
    rights: &Rights,
    unclaimed: &[Marked],
    renamed: bool,
) -> Result<(Hold, String), String> {
    let named_pid = named(spec, rights).await.found().ok().map(|identity| identity.pid);
    let candidates = unclaimed.iter().filter(|one| match renamed {
        false => one.instance == key.to_string(),
        // Under a name of another host or none it is not a renamed instance of this one.
        true => {
            let was: Option<InstanceKey> = one.instance.parse().ok();
            was.is_some_and(|was| was != *key && was.host == key.host) && Some(one.identity.pid) == named_pid
        }
    });
    let mut why = "no process carries its launch".to_owned();
    let mut fitting: Vec<&Marked> = Vec::new();
    for one in candidates {
        match fits(one, spec, rights, renamed).await {
            Ok(()) => fitting.push(one),
            Err(refused) => why = refused,
        }
    }
    let pids: Vec<u32> = fitting.iter().map(|one| one.identity.pid).collect();
    let main = main_of(&pids, spec, rights).await.ok_or(why)?;
    let launch_id = fitting.iter().find(|one| one.identity == main).map(|one| one.launch_id.clone());
    let launch_id = launch_id.ok_or_else(|| format!("process {} is gone", main.pid))?;
    Ok((take(&main)?, launch_id))
}

async fn fits(one: &Marked, spec: &Spec, rights: &Rights, renamed: bool) -> Result<(), String> {
    let (identity, setup_path) = (one.identity.clone(), spec.identity.setup_path.clone());
    let check = move |rights: &Rights| fits_folder(&identity, &setup_path, rights.account());
    rights.run(FileWork::Paths, "check setup_path", check).await?;
    if renamed {
        refuse_pid_file(spec, rights).await?;
    }
    match one.identity.is_current() {
        true => Ok(()),
        false => Err(format!("process {} is gone", one.identity.pid)),
    }
}

/// Blocks.
fn fits_folder(identity: &Identity, setup_path: &str, account: &Account) -> Result<(), String> {
    let pid = identity.pid;
    let ids = uids(pid).ok_or_else(|| format!("process {pid} is gone"))?;
    if ids[0] != account.uid() {
        return Err(wrong_user(pid, ids[0], account));
    }
    if account.uid() == 0 {
        refuse_foreign_environment(pid, ids)?;
    }
    // Another system on this machine may have an instance of the same name, in another folder.
    let here = std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
    let there = std::fs::canonicalize(setup_path).ok();
    match here.is_some() && here == there {
        true => Ok(()),
        false => Err(format!("process {pid} does not run in {setup_path}")),
    }
}

/// The environment of a root process is root's word only if no user started it by a set-user-ID program.
fn refuse_foreign_environment(pid: u32, ids: [u32; 4]) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    let set_uid = std::fs::metadata(format!("/proc/{pid}/exe")).map(|meta| meta.mode() & 0o4000 != 0);
    match ids == [0; 4] && matches!(set_uid, Ok(false)) {
        true => Ok(()),
        false => Err(format!("process {pid} may have been started by another user than root")),
    }
}
