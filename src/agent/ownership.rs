//! Process ownership: the proof that a pid belongs to a launch of this agent, or may be adopted.
//!
//! A pid file is a hint that its writer controls, and an environment is what a process says of itself. Neither proves
//! anything alone. After a launch the main process must be in the launch's control group, descend from the launch (the
//! agent is the subreaper of all it launches), or carry the launch id; in each case with a real user that fits the account.
//! A root account may drop privileges, so any user fits it. Adoption of a process that the agent did not launch needs the
//! account's own user, the named executable, and a pid file that no other user can write. A process that another instance
//! holds is refused everywhere ([`Hold::take`]).

use std::collections::HashMap;
use std::path::Path;

use super::cgroup::Group;
use super::keeper::Shared;
use super::kernel::{Hold, Identity, Marked, marked, parent, runs, uids};
use super::row::Run;
use super::spawn::Account;
use super::user_files::Rights;
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

/// The process that a spec's pid file names, if it runs the named executable. Not a proof of anything.
fn named(spec: &Spec, rights: &Rights) -> Result<Identity, String> {
    let pid = rights.read_pid_file(&spec.identity.pid_path)?;
    let identity = Identity::of(pid).filter(Identity::is_current);
    let identity = identity.ok_or_else(|| format!("process {pid} is gone"))?;
    match runs(pid, &spec.identity.proc_name) {
        true => Ok(identity),
        false => Err(format!("process {pid} does not run {}", spec.identity.proc_name)),
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
pub fn launched(
    spec: &Spec,
    rights: &Rights,
    evidence: &LaunchEvidence<'_>,
) -> Result<(Hold, Proof), String> {
    let (identity, account) = (named(spec, rights)?, rights.account());
    if evidence.replaces.is_some_and(|run| run.identity == identity) {
        return Err(format!("process {} is the one from before", identity.pid));
    }
    let hold = take(&identity)?;
    let proof = belongs(&identity, account, evidence)?;
    // What was read belongs to this process only if the pid did not change hands meanwhile.
    match identity.is_current() {
        true => Ok((hold, proof)),
        false => Err(format!("process {} is gone", identity.pid)),
    }
}

fn belongs(identity: &Identity, account: &Account, evidence: &LaunchEvidence<'_>) -> Result<Proof, String> {
    let pid = identity.pid;
    refuse_user(pid, account)?;
    let in_group = |group: Option<&Group>| group.is_some_and(|group| group.processes().contains(&pid));
    if in_group(evidence.group) {
        return Ok(Proof::Launch);
    }
    let replaced = evidence.replaces;
    if in_group(replaced.and_then(Run::group).as_ref()) && identity.started >= evidence.since {
        return Ok(Proof::Replaced);
    }
    // Only the account's own processes and root can read the launch id; one that dropped privileges needs more.
    let own = uids(pid).is_some_and(|ids| ids[0] == account.uid());
    let launch_id = Marked::of(pid).map(|marked| marked.launch_id);
    let replaced_id = replaced.map(|run| run.incarnation.as_str()).filter(|id| !id.is_empty());
    match launch_id.as_deref() {
        Some(id) if id == evidence.launch_id && own => return Ok(Proof::Launch),
        Some(id) if Some(id) == replaced_id && own && identity.started >= evidence.since => {
            return Ok(Proof::Replaced);
        }
        Some(id) if id != evidence.launch_id && Some(id) != replaced_id => {
            return Err(format!("process {pid} belongs to another launch"));
        }
        Some(_) | None => {}
    }
    descends(identity, evidence.since, replaced.map(|run| &run.identity)).ok_or_else(|| {
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
pub fn stranger(spec: &Spec, rights: &Rights) -> Option<u32> {
    let identity = named(spec, rights).ok()?;
    (!identity.is_held() && refuse_user(identity.pid, rights.account()).is_ok()).then_some(identity.pid)
}

/// A daemon that an earlier launch of this agent left behind for an instance: its pid file came too late. It is the
/// agent's own descendant, and its environment names the instance.
pub fn left_behind(key: &InstanceKey, spec: &Spec, rights: &Rights) -> Option<(Hold, String)> {
    let identity = named(spec, rights).ok()?;
    refuse_user(identity.pid, rights.account()).ok()?;
    let marked = Marked::of(identity.pid).filter(|marked| marked.instance == key.to_string())?;
    descends(&identity, 0, None)?;
    let hold = take(&identity).ok()?;
    identity.is_current().then_some((hold, marked.launch_id))
}

/// Takes hold of a daemon that the agent did not launch, because it was told to host it. `None`: no process runs there.
pub fn adopt(spec: &Spec, rights: &Rights) -> Result<Option<Hold>, String> {
    let Ok(identity) = named(spec, rights) else { return Ok(None) };
    let (pid, account) = (identity.pid, rights.account());
    let hold = take(&identity).map_err(|why| format!("cannot adopt: {why}"))?;
    let real = uids(pid).map(|ids| ids[0]);
    if real != Some(account.uid()) {
        let why = real.map_or(format!("process {pid} is gone"), |real| wrong_user(pid, real, account));
        return Err(format!("cannot adopt: {why}"));
    }
    refuse_pid_file(Path::new(&spec.identity.pid_path), account)
        .map_err(|why| format!("cannot adopt process {pid}: {why}"))?;
    // The file is read again: what it said before its permissions were checked may have been another user's word.
    match named(spec, rights) {
        Ok(again) if again == identity => Ok(Some(hold)),
        Ok(_) | Err(_) => Err(format!("cannot adopt process {pid}: its pid file changed meanwhile")),
    }
}

/// A pid file that another user can write names whatever that user wants.
fn refuse_pid_file(path: &Path, account: &Account) -> Result<(), String> {
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
pub fn interrupted(shared: &Shared, launches: &[Interrupted<'_>]) -> HashMap<String, Identity> {
    if launches.is_empty() {
        return HashMap::new();
    }
    let all = marked();
    let find = |launch: &Interrupted<'_>| {
        let rights = shared.rights_of(launch.spec).ok()?;
        let with_id = all.iter().filter(|one| one.launch_id == launch.launch_id);
        let mut pids: Vec<u32> = with_id.map(|one| one.identity.pid).collect();
        pids.extend(launch.group.iter().flat_map(Group::processes));
        pids.retain(|pid| refuse_user(*pid, rights.account()).is_ok());
        main_of(&pids, launch.spec, &rights)
    };
    launches.iter().filter_map(|launch| Some((launch.launch_id.to_owned(), find(launch)?))).collect()
}

/// Of the processes of one launch the main one: as the pid file names it, else the oldest whose parent is not one of them.
fn main_of(pids: &[u32], spec: &Spec, rights: &Rights) -> Option<Identity> {
    let free = |identity: &Identity| identity.is_current() && !identity.is_held();
    if let Ok(identity) = named(spec, rights)
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
pub fn found_again(
    key: &InstanceKey,
    spec: &Spec,
    rights: &Rights,
    unclaimed: &[Marked],
    renamed: bool,
) -> Result<(Hold, String), String> {
    let named_pid = named(spec, rights).ok().map(|identity| identity.pid);
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
        match fits(one, spec, rights.account(), renamed) {
            Ok(()) => fitting.push(one),
            Err(refused) => why = refused,
        }
    }
    let pids: Vec<u32> = fitting.iter().map(|one| one.identity.pid).collect();
    let main = main_of(&pids, spec, rights).ok_or(why)?;
    let launch_id = fitting.iter().find(|one| one.identity == main).map(|one| one.launch_id.clone());
    let launch_id = launch_id.ok_or_else(|| format!("process {} is gone", main.pid))?;
    Ok((take(&main)?, launch_id))
}

fn fits(one: &Marked, spec: &Spec, account: &Account, renamed: bool) -> Result<(), String> {
    let pid = one.identity.pid;
    let ids = uids(pid).ok_or_else(|| format!("process {pid} is gone"))?;
    if ids[0] != account.uid() {
        return Err(wrong_user(pid, ids[0], account));
    }
    if account.uid() == 0 {
        refuse_foreign_environment(pid, ids)?;
    }
    // Another system on this machine may have an instance of the same name, in another folder.
    let here = std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
    let there = std::fs::canonicalize(&spec.identity.setup_path).ok();
    if here.is_none() || here != there {
        return Err(format!("process {pid} does not run in {}", spec.identity.setup_path));
    }
    if renamed {
        refuse_pid_file(Path::new(&spec.identity.pid_path), account)?;
    }
    match one.identity.is_current() {
        true => Ok(()),
        false => Err(format!("process {pid} is gone")),
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
